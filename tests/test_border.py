"""The border between what users may import and everything else."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.docstrings import PUBLIC, examples, needs_cluster, public_objects
from tests.support.programs import Program

ROOT = Path(__file__).resolve().parent.parent

NAMES = {
    "raymq": """
        AsyncConsumer AsyncProducer AsyncWorkers Cluster Consumer Message Producer Queue Receipt Workers __version__
        at_ms connect errors matching start
    """,
    "raymq.data": "TopicSink lease_batches micro_batches read_topic",
    "raymq.errors": """
        Bug CommitUnknown Corrupt DeliveryUnknown Fenced OffsetOutOfRange RayMQError Rejected StorageFull Unavailable
    """,
    "raymq.serve": "LagAutoscalingPolicy RayMQAdapterConfig RayMQTaskProcessorAdapter",
    "raymq.spark": """
        QueueReceipt WriteResult from_value options raydp_session read standalone_session stream stream_sink to_value
        use_format use_java write
    """,
    "raymq.store": """
        AppendedRows EmbeddedStore FetchSlice GetMessageResult Half InnerMessage MessageFilter PUT_SCHEMA PutHook
        PutRequest PutResult PutStatus QueryResult RECORD_SCHEMA Resolution StoreConfig decode_properties decode_records
        expression_filter producer_stamps verify
    """,
    "raymq.trace": "TraceHook context_of",
}

#: classes and functions whose docstring has an example and explains every option
EXPLAINED = (
    "raymq.AsyncConsumer",
    "raymq.AsyncProducer",
    "raymq.AsyncWorkers",
    "raymq.Cluster.create_topic",
    "raymq.Cluster.reset_group",
    "raymq.Consumer",
    "raymq.Producer",
    "raymq.Queue",
    "raymq.Workers",
    "raymq.connect",
    "raymq.data.TopicSink",
    "raymq.data.lease_batches",
    "raymq.data.micro_batches",
    "raymq.data.read_topic",
    "raymq.spark.options",
    "raymq.spark.read",
    "raymq.spark.standalone_session",
    "raymq.spark.stream_sink",
    "raymq.spark.use_format",
    "raymq.spark.write",
    "raymq.start",
    "raymq.store.EmbeddedStore",
    "raymq.trace.TraceHook",
)


@pytest.mark.parametrize("module", PUBLIC)
def test_a_public_module_has_exactly_these_names(module: str) -> None:
    public = importlib.import_module(module)
    assert set(public.__all__) == set(NAMES[module].split())
    assert dir(public) == sorted(public.__all__) or module == "raymq.errors"
    for name in public.__all__:
        assert getattr(public, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = public.nothing


def test_public_modules_load_neither_ray_nor_arrow() -> None:
    code = (
        f"import sys, {', '.join(PUBLIC)}\n"
        "print([name for name in ('ray', 'pyarrow', 'numpy', 'pyspark', 'opentelemetry') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def programs() -> Iterator[tuple[str, str]]:
    """(name, source) of everything that shows users how to write a program."""
    for path in sorted((ROOT / "examples").glob("*.py")):
        yield path.name, path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = path.read_text(encoding="utf-8")
        for number, block in enumerate(re.findall(r"```python\n(.*?)```", text, re.DOTALL)):
            # A block of a tab is indented.
            yield f"{path.relative_to(ROOT)}:{number}", textwrap.dedent(block)
    yield from examples()


def foreign_names(source: str) -> Iterator[str]:
    """Names of RayMQ that a program uses from beyond the border."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (
                alias.name
                for alias in node.names
                if alias.name.startswith("raymq") and alias.name not in PUBLIC
            )
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("raymq"):
            allowed = NAMES.get(node.module or "", "").split()
            yield from (
                f"{node.module}.{alias.name}" for alias in node.names if alias.name not in allowed
            )
        elif isinstance(node, ast.Attribute):
            base, _, name = ast.unparse(node).rpartition(".")
            parts = {public.removeprefix("raymq.") for public in PUBLIC}
            if base in PUBLIC and name not in NAMES[base].split() and name not in parts:
                yield f"{base}.{name}"


@pytest.mark.parametrize(("name", "source"), list(programs()), ids=lambda value: value[:40])
def test_a_program_for_users_imports_public_names_only(name: str, source: str) -> None:
    assert list(foreign_names(source)) == []


def test_the_border_check_sees_every_kind_of_import() -> None:
    source = """
        import raymq.cluster.record.paths
        from raymq.spark.sink import write
        from raymq import Queue, nothing
        from raymq.store import format
        raymq.Cluster, raymq.store.verify, raymq.cluster.record.paths, raymq.errors.Rejected
    """
    assert sorted(foreign_names(textwrap.dedent(source))) == [
        "raymq.cluster",
        "raymq.cluster.record.paths",
        "raymq.nothing",
        "raymq.spark.sink.write",
        "raymq.store.format",
    ]


@pytest.mark.parametrize("name", EXPLAINED)
def test_a_public_docstring_has_an_example_and_explains_every_option(name: str) -> None:
    value = dict(public_objects())[name]
    text = inspect.getdoc(value) or ""
    options = list(inspect.signature(value).parameters.values())
    assert not [each for each in options if each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]
    explained = re.findall(
        r"^ {4}(\w+): ", text.partition("\nArgs:\n")[2].partition("\n\n")[0], re.MULTILINE
    )
    assert explained == [each.name for each in options if each.name != "self"]
    assert "\nExample:\n" in text
    assert "\nRaises:\n" in text


@pytest.mark.ray
@pytest.mark.program(Program(("-m", "tests.support.docstrings")))
def test_the_examples_in_docstrings_run_beside_a_cluster(printed: list[str]) -> None:
    (text,) = printed
    ran = [line.removeprefix("ran ") for line in text.splitlines() if line.startswith("ran ")]
    assert ran == [example.name for example in examples() if needs_cluster(example)]
    assert len(ran) >= 8


@pytest.mark.parametrize(
    "example",
    [each for each in examples() if each.name.startswith("raymq.store")],
    ids=lambda each: each.name,
)
def test_the_examples_of_an_embedded_store_run(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(example.code, example.name, "exec"), {})
