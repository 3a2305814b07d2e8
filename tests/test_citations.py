"""No word leans on a document that is not there: every citation in the code and the documents is resolved.

Read are comments, docstrings and other texts of Python files, and all of each document. A citation is the name of a
decision or rule (`D4`, `R9`), of an ADR, of a document with or without a section, or of a module.
"""

from __future__ import annotations

import io
import os
import re
import tokenize
import unicodedata
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PARTS = (
    "store",
    "replication",
    "actors",
    "client",
    "cluster",
    "spark",
    "doors",
    "tests",
    "examples",
    "benchmarks",
)
DESIGN = "docs/design.md"

#: decisions, replication rules
RULE = re.compile(r"\b[DR]\d{1,2}\b")
DECISION_RECORD = re.compile(r"\b(?:ADRs?|[Dd]ecision)\s+(\d{1,4})\b")
DOCUMENT = re.compile(r"(?<![\w/.:])((?:\.\./)*[\w][\w./-]*\.md)(?:#([\w-]+))?(?:, \"([^\"]+)\")?")
MODULE = re.compile(r"(?<![\w/.-])([a-z_][\w/]*\.py)\b")
#: ways to cite that nothing here can resolve
UNRESOLVABLE = re.compile(
    r"\bdesign section \d|\b[Ss]ection \d+ of the design|\bdesign D\d|\(reference[s ]|\breference (?:section )?\d+\.\d"
)

#: pages that are made from the code or from files beside docs/
GENERATED = re.compile(
    r"docs/(reference/(cli|configuration|message)|changelog|contributing|examples/.*)\.md"
)
#: modules of others that tests and benchmarks name
FOREIGN_MODULES = {"pandas.py", "scripts.py", "sitecustomize.py"}
#: f-strings are tokens of their own from Python 3.12 on
STRINGS = {tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}


def python_files() -> list[Path]:
    found = [path for part in PARTS for path in (ROOT / part).rglob("*.py")]
    found += [ROOT / "run.py", ROOT / "noxfile.py", ROOT / "pyspark_raymq.py"]
    found += (ROOT / "raymq").glob("*.py")
    found += [*(ROOT / ".ci").glob("*.py"), *(ROOT / "docs").rglob("*.py")]
    return sorted(path for path in found if "__pycache__" not in path.parts)


def documents() -> list[Path]:
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def texts_of(source: str) -> Iterator[str]:
    """Comments and strings of a Python source, neighbouring comment lines as one text."""
    comments: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments.append(token.string.lstrip("#: "))
        elif token.type not in (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            if comments:
                yield " ".join(comments)
                comments = []
            if token.type in STRINGS:
                yield token.string
    yield " ".join(comments)


@cache
def prose_of(path: Path) -> str:
    """The prose of a file."""
    text = path.read_text(encoding="utf-8")
    return text if path.suffix == ".md" else "\n".join(texts_of(text))


def everything() -> list[Path]:
    """All files that may cite. This one is left out: it names citations that do not exist."""
    return [path for path in [*python_files(), *documents()] if path != Path(__file__).resolve()]


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def slugs(title: str) -> set[str]:
    """The anchors of a heading, as GitHub makes them and as the documentation site makes them."""
    title = re.sub(r"<[^>]*>|[`*]|\]\([^)]*\)|\[", "", title).strip().lower()
    github = re.sub(r"[^\w\- ]", "", title).replace(" ", "-")
    plain = unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode()
    return {github, re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip())}


@cache
def headings(path: Path) -> frozenset[str]:
    text = re.sub(
        r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    return frozenset(re.findall(r"^#+ (.+)$", text, re.MULTILINE))


@cache
def anchors(path: Path) -> frozenset[str]:
    """Everything that `path#...` may lead to."""
    text = path.read_text(encoding="utf-8")
    named = re.findall(r'<a id="([\w-]+)">|\{#([\w-]+)\}', text)
    return frozenset(
        [anchor for pair in named for anchor in pair if anchor]
        + [slug for title in headings(path) for slug in slugs(title)]
    )


def find_document(cited: str, at: Path) -> Path | None:
    """The document that a file means: beside itself, in the root or docs/; in code also any of that name in docs/."""
    within = [*(ROOT / "docs").rglob(cited)] if at.suffix == ".py" and "/" not in cited else []
    for found in [*(start / cited for start in (at.parent, ROOT, ROOT / "docs")), *within]:
        if found.is_file() and found.resolve().is_relative_to(ROOT):
            return found.resolve()
    return None


def is_generated(cited: str, at: Path) -> bool:
    """Whether the build of the documentation site makes this page."""
    paths = [os.path.normpath(start / cited) for start in (at.parent, ROOT / "docs")]
    return any(GENERATED.fullmatch(os.path.relpath(path, ROOT)) for path in paths)


def test_every_decision_and_rule_that_is_cited_is_in_the_design() -> None:
    known = anchors(ROOT / DESIGN)
    missing = {
        f"{name(path)}: {rule}"
        for path in everything()
        for rule in RULE.findall(prose_of(path))
        if rule.lower() not in known
    }
    assert not missing


def test_a_file_that_cites_a_decision_or_rule_says_where_it_is() -> None:
    silent = {
        name(path)
        for path in everything()
        if name(path) != DESIGN
        and RULE.search(prose_of(path))
        and "design.md" not in prose_of(path)
    }
    assert not silent, f"name {DESIGN} beside the rule, or say what the rule says"


def test_every_decision_record_that_is_cited_exists() -> None:
    records = {path.name[:4] for path in (ROOT / "docs" / "decisions").glob("*.md")}
    missing = {
        f"{name(path)}: {number}"
        for path in everything()
        for number in DECISION_RECORD.findall(prose_of(path))
        if number.zfill(4) not in records
    }
    assert not missing


def test_every_document_that_is_cited_exists_and_has_the_section() -> None:
    broken = set()
    for path in everything():
        for cited, anchor, section in DOCUMENT.findall(prose_of(path)):
            found = find_document(cited, path)
            if is_generated(cited, path):
                continue
            if (
                found is None
                or (anchor and anchor not in anchors(found))
                or (section and section not in headings(found))
            ):
                broken.add(f"{name(path)}: {cited} {anchor}{section}".rstrip())
    assert not broken


def test_links_within_a_document_lead_to_a_heading() -> None:
    broken = {
        f"{name(path)}: #{anchor}"
        for path in documents()
        for anchor in re.findall(r"\]\(#([^)]+)\)", prose_of(path))
        if anchor not in anchors(path)
    }
    assert not broken


def test_every_module_that_a_text_names_exists() -> None:
    known = {name(path) for path in python_files()}
    ends = {
        "/".join(parts[at:]) for parts in (k.split("/") for k in known) for at in range(len(parts))
    }
    missing = {
        f"{name(path)}: {module}"
        for path in everything()
        for module in MODULE.findall(prose_of(path))
        if module.removeprefix("raymq/") not in ends | FOREIGN_MODULES
    }
    assert not missing


def test_nothing_is_cited_in_a_way_that_cannot_be_resolved() -> None:
    found = {
        f"{name(path)}: {cited}"
        for path in everything()
        for cited in UNRESOLVABLE.findall(prose_of(path))
    }
    assert not found, f"say what is meant, or cite {DESIGN}"


@pytest.mark.parametrize(
    ("text", "pattern", "found"),
    [
        ("never retried (D4)", RULE, ["D4"]),
        ("R9 and R10", RULE, ["R9", "R10"]),
        ("see design section 4", UNRESOLVABLE, ["design section 4"]),
        ("Section 4 of the design: a tail", UNRESOLVABLE, ["Section 4 of the design"]),
        ("RocketMQ 5.3.3 (reference 6.7)", UNRESOLVABLE, ["(reference "]),
        ("see ADR 0009", DECISION_RECORD, ["0009"]),
        ("`store/base/files.py`, put_acks.py", MODULE, ["store/base/files.py", "put_acks.py"]),
        (
            'see docs/operating.md, "Security"',
            DOCUMENT,
            [("docs/operating.md", "", "Security")],
        ),
        ("docs/design.md#r9", DOCUMENT, [("docs/design.md", "r9", "")]),
    ],
)
def test_the_search_for_citations_sees_what_it_is_for(
    text: str, pattern: re.Pattern[str], found: list[object]
) -> None:
    assert pattern.findall(text) == found


def test_comments_and_strings_are_read_and_names_are_not() -> None:
    source = "R1 = 2  # R3\n# on two\n# lines\nx = 'R4'\n"
    assert list(texts_of(source)) == ["R3 on two lines", "'R4'", ""]
