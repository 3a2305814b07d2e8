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


def test_a_file_that_took_more_than_twice_its_budget_is_named() -> None:
    seconds = {"a": 63.0, "b": 39.0, "c": 15.0, "d": 19.0}
    (line,) = durations.over_budget(seconds, {"a": 24.0, "b": 30.0, "c": 15.0})
    assert line.startswith(
        "a took 63 s, more than twice its budget of 24 s, on a machine that takes 1.3 times the budgets"
    )


def test_a_file_without_a_budget_of_its_own_has_that_of_all_others() -> None:
    assert durations.over_budget({"a": 2 * durations.OTHERS_S}, {}) == []
    assert len(durations.over_budget({"a": 2 * durations.OTHERS_S + 1}, {})) == 1


def test_on_a_machine_that_is_slower_for_most_files_a_budget_is_more() -> None:
    budgets = {"a": 24.0, "b": 30.0}
    assert durations.over_budget({"a": 72.0, "b": 90.0, "c": 60.0}, budgets) == []
    assert len(durations.over_budget({"a": 72.0, "b": 90.0, "c": 61.0}, budgets)) == 1


def test_budgets_are_the_durations_of_a_run(tmp_path: Path) -> None:
    source, target = tmp_path / "durations.json", tmp_path / "budgets.json"
    source.write_text('{"b": {"seconds": 31.2}, "a": {"seconds": 12.0}, "c": {"seconds": 9.9}}')
    durations.write_budgets(source, target)
    assert durations.read_budgets(target) == {"a": 12, "b": 32}
