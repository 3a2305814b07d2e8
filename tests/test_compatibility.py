"""docs/compatibility.md judges all of RocketMQ's features, and what it names as proof is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
FEATURES = 90


def rows() -> list[tuple[int, str, str, str]]:
    """Number, feature, state and remark of each row."""
    found = re.findall(r"^\| (\d+) \| (.+?) \| (.+?) \| ?(.*?) ?\|$", TEXT, re.MULTILINE)
    return [(int(number), feature, state, remark) for number, feature, state, remark in found]


def paths(text: str) -> list[str]:
    return re.findall(r"`([a-z]+/[\w/.]+\.py)`", text)


def test_every_feature_has_its_row():
    assert [number for number, *_ in rows()] == list(range(1, FEATURES + 1))


def test_every_state_is_one_of_four_and_says_what_it_must():
    for number, _, state, remark in rows():
        assert state in ("done", "engine only", "not wanted", "later"), number
        if state in ("done", "engine only"):
            assert paths(remark), f"row {number} is {state}: name the module or test that shows it"
        if state == "not wanted":
            assert remark, f"row {number}: say why"


def test_every_file_that_is_named_is_there():
    missing = [path for path in paths(TEXT) if not (ROOT / path).is_file()]
    assert not missing
