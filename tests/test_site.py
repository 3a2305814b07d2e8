"""The documentation site: its pages' programs run, and what is generated from the code has all of it."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

import raymq
from raymq.client.produce.producer_config import ProducerConfig
from raymq.cluster.cli.main import build_parser
from raymq.store.config.store_config import IN_CLUSTER, StoreConfig
from tests.support.page_programs import blocks, needs_ray, programs, run
from tests.support.programs import Program
from tests.support.served_shard import ServedShard

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
# The generators are scripts of the site and belong to no package.
sys.path.insert(0, str(DOCS / "_generate"))
pages = importlib.import_module("reference_pages")


def name(page: Path) -> str:
    return page.relative_to(DOCS).as_posix()


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedShard]:
    with ServedShard(tmp_path_factory.mktemp("site") / "store") as shard:
        shard.start_flusher()
        yield shard


@pytest.mark.parametrize(
    "page", [page for page, texts in programs().items() if not needs_ray(texts)]
)
def test_the_programs_of_a_page_run(page: str, shard: ServedShard) -> None:
    run(page, programs()[page], shard.cluster)


@pytest.mark.ray
@pytest.mark.thorough
@pytest.mark.program(Program((str(ROOT / "tests" / "support" / "page_programs.py"), "data")))
def test_the_programs_of_pages_that_need_ray_run(printed: list[str]) -> None:
    (text,) = printed
    answer = json.loads(text.splitlines()[-1])
    assert {"ray.md", "guides/from-ray-queue.md"} <= set(answer["seconds"])
    assert not answer["failed"], "\n".join(answer["failed"].values())


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_programs_that_do_not_run_here_compile(page: Path) -> None:
    for _, text in blocks(page):
        ast.parse(text)


# Those of the generated page are usages.
@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "cli.md"], ids=name)
def test_the_command_lines_of_pages_are_understood(page: Path) -> None:
    for block in re.findall(r"```text\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        for line in re.findall(r"^(?:.*\| )?raymq (.*?)(?:\s+#.*)?$", block, re.MULTILINE):
            build_parser().parse_args(shlex.split(line))


def test_the_first_program_is_that_of_readme() -> None:
    def calls(text: str) -> list[str]:
        return [
            ast.unparse(node.func)
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Call)
        ]

    ours = [text for _, text in blocks(DOCS / "start.md")][0]
    theirs = [text for _, text in blocks(ROOT / "README.md")][0]
    assert calls(ours) == calls(theirs)
    assert programs().get("start.md") is None


def test_the_table_of_the_promise_is_that_of_readme() -> None:
    def table(path: Path) -> list[str]:
        return re.findall(r"^\| .*_MASTER \|.*$", path.read_text(encoding="utf-8"), re.MULTILINE)

    assert len(table(ROOT / "README.md")) == 4
    assert table(DOCS / "concepts" / "promise.md") == table(ROOT / "README.md")


@pytest.mark.parametrize("made", pages.PAGES)
def test_the_generated_pages_are_those_of_the_code(made: str) -> None:
    text = (DOCS / "reference" / made).read_text(encoding="utf-8")
    assert text == pages.PAGES[made](), "run: python docs/_generate/reference_pages.py"


def entries(page: str) -> list[str]:
    """The options that a page defines."""
    return re.findall(r"^`(\w+)`\n:   \S", page, re.MULTILINE)


def test_the_configuration_page_has_every_option_with_a_text() -> None:
    page = pages.configuration_page()
    sections = dict(
        zip(*[iter(re.split(r"^## (.*)$", page, flags=re.MULTILINE)[1:])] * 2, strict=True)
    )
    expected = {
        "Starting a cluster": set(inspect.signature(raymq.start).parameters) - {"data_dir"},
        "Connecting": set(inspect.signature(raymq.connect).parameters) - {"target"},
        "Producer": {field.name for field in fields(ProducerConfig)},
        "Consumer": set(inspect.signature(raymq.Consumer).parameters)
        - {"cluster", "topic", "clock"},
        "Queue": set(inspect.signature(raymq.Queue).parameters) - {"name"},
        "Store": {field.name for field in fields(StoreConfig)},
    }
    for section, options in expected.items():
        found = entries(sections[section])
        assert len(found) == len(set(found)), section
        assert set(found) == options, section


def test_options_of_a_store_that_a_cluster_takes_are_marked() -> None:
    options = {option.name: option for option in pages.store_options()}
    taken = {name for name, option in options.items() if "embedded only" not in option.given}
    assert taken == set(IN_CLUSTER)
    assert options["store_host"].given.startswith("embedded only: each replica writes")
    assert options["flush_interval_ms"].given == "`start(config=)`, flag `--config`"
    assert options["max_message_bytes"].range.endswith("in a cluster 1 to 33,554,432")
    assert options["segment_size_bytes"].changes == "decided at the first start"
    assert options["flush"].changes == "each start may change it"
    assert options["flush"].given == "`start(flush=)`, flag `--flush`"
    assert options["flush_interval_ms"].rocketmq == "flushIntervalCommitLog"


def test_the_page_of_commands_has_every_command_and_argument_with_a_text() -> None:
    page = pages.cli_page()
    for command in pages.commands(build_parser()):
        assert f"\n## {command.words}\n" in page
        assert command.help, command.words
        for action in pages.arguments(command.parser):
            assert pages.argument_text(action), f"{command.words}: {action.dest} has no help"


def test_every_environment_variable_that_the_code_reads_is_on_the_page() -> None:
    reads = re.compile(r"environ(?:\.get\(|\[)\"(RAYMQ_\w+)\"")
    named = {
        variable
        for folder in ("client", "cluster", "store", "actors", "spark")
        for path in (ROOT / folder).rglob("*.py")
        for variable in reads.findall(path.read_text(encoding="utf-8"))
    }
    assert named
    assert named - set(pages.VARIABLES) <= {"RAYMQ_FAILPOINTS"}


def test_a_field_comment_is_found_over_several_lines() -> None:
    comments = pages.field_comments(StoreConfig)
    assert comments["flush"].startswith('"sync"')
    assert comments["commit_log_paths"].startswith("directories on other disks")
    assert "`commitlog/`" in comments["commit_log_paths"]
