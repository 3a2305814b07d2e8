"""The programs and commands of README and docs/ are run: a reader's first steps must work as printed."""

from __future__ import annotations

import argparse
import re
import shlex
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import raymq
from raymq.cluster.cli.main import build_parser
from raymq.store.records.record import decode
from tests.support.programs import Program

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
GOLDEN = ROOT / "tests" / "golden" / "rocketmq-5.3.3-clean.tar.xz"


def block(document: str, language: str) -> str:
    """The first fenced block of one language."""
    text = (ROOT / document).read_text(encoding="utf-8")
    found = re.search(rf"```{language}\n(.*?)```", text, re.DOTALL)
    assert found, f"{document} has no {language} block"
    return found[1]


@pytest.fixture(scope="module")
def worked_record() -> bytes:
    return bytes.fromhex(block("docs/format.md", "hex"))


def test_the_worked_record_is_the_first_one_that_rocketmq_wrote(worked_record):
    with tarfile.open(GOLDEN) as archive:
        member = next(member for member in archive if member.name.endswith("commitlog/" + "0" * 20))
        stream = archive.extractfile(member)
        assert stream is not None
        assert stream.read(len(worked_record)) == worked_record


def test_the_worked_record_decodes_to_what_its_table_says(worked_record):
    batch = decode(
        worked_record,
        np.array([0], dtype=np.int64),
        np.array([len(worked_record)], dtype=np.int64),
    )
    (row,) = batch.to_pylist()
    assert row["topic"] == "TopicTest"
    assert row["body"] == b"Hello RocketMQ"
    assert (row["queue_id"], row["flag"], row["queue_offset"], row["sys_flag"]) == (0, 7, 0, 0)
    assert (row["born_host"], row["store_host"]) == ("127.0.0.1:54321", "10.0.0.1:10911")
    assert (row["born_time_ms"], row["store_time_ms"]) == (1700000000000, 1795228640669)
    assert row["body_crc"] == 0x69C865ED
    assert b"TAGS\x01TagA\x02KEYS\x01k1 k2\x02" in row["properties"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_links_between_documents_lead_somewhere(document):
    path = ROOT / document
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text(encoding="utf-8"))
    broken = [link for link in links if "://" not in link and not (path.parent / link).exists()]
    assert not broken


def test_every_file_that_a_document_names_exists():
    named = re.compile(
        r"`((?:store|actors|replication|client|cluster|spark|tests|examples)/[\w/.]+)`"
    )
    missing = {
        name
        for document in DOCUMENTS
        for name in named.findall((ROOT / document).read_text(encoding="utf-8"))
        if not (ROOT / name).exists()
    }
    assert not missing


def commands(parser: argparse.ArgumentParser, words: str) -> Iterator[str]:
    """Every command of the grammar that does something: "raymq topic list"."""
    verbs = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not verbs:
        yield words
    for action in verbs:
        for name, inner in action.choices.items():
            yield from commands(inner, f"{words} {name}")


@pytest.mark.parametrize("words", list(commands(build_parser(), "raymq")))
def test_every_command_is_in_the_operators_guide(words):
    assert words in (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")


def test_the_command_lines_of_the_readme_are_understood():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = re.findall(r"^    raymq (.*?)(?:\s+#.*)?$", text, re.MULTILINE)
    assert len(lines) >= 5
    for line in lines:
        build_parser().parse_args(shlex.split(line))


@pytest.mark.parametrize("name", sorted(set(raymq.__all__) - {"__version__"}))
def test_every_name_at_the_top_is_in_the_api_page(name):
    page = ROOT / "docs" / "reference" / ("errors.md" if name == "errors" else "api.md")
    assert f"\n::: raymq.{name}\n" in page.read_text(encoding="utf-8")


@pytest.mark.ray
@pytest.mark.program(Program(("-c", block("README.md", "python")), runs=2))
def test_the_first_program_of_the_readme_runs_twice_on_one_directory(printed: list[str]) -> None:
    lines = block("README.md", "python").splitlines()
    assert len([line for line in lines if line.strip()]) <= 12
    for run, text in enumerate(printed, start=1):
        assert "stored: queue" in text
        assert text.count("b'one espresso'") == run
    assert len(printed) == 2
