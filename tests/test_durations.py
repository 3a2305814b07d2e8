"""A run of the tests notes how long each of them took."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import durations


def report(node_id: str, duration: float) -> pytest.TestReport:
    return pytest.TestReport(node_id, ("", 0, ""), {}, "passed", None, "call", duration=duration)


def test_the_phases_of_a_test_are_added_and_the_longest_file_and_test_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, target = tmp_path / "lines", tmp_path / "build" / "durations.json"
    monkeypatch.setenv(durations.VARIABLE, str(lines))
    durations.note(report("folder/a::test_one[x::y]", 0.5))
    durations.note(report("folder/b::test_two", 1.0))
    durations.note(report("folder/b::test_three", 1.25))
    durations.note(report("folder/b::test_two", 0.5))
    durations.write(lines, target)
    found = durations.by_file(lines.read_text())
    assert list(found) == ["folder/b", "folder/a"]
    assert found["folder/b"] == {"seconds": 2.75, "tests": {"test_two": 1.5, "test_three": 1.25}}
    assert found["folder/a"]["tests"] == {"test_one[x::y]": 0.5}
    assert target.read_text().startswith("{")


def test_a_run_that_does_not_ask_for_durations_notes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(durations.VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    durations.note(report("folder/a::test_one", 0.5))
    assert list(tmp_path.iterdir()) == []
