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
    assert found["folder/b"].pop("cpu_s") < 60
    assert found["folder/b"] == {"seconds": 2.75, "tests": {"test_two": 1.5, "test_three": 1.25}}
    assert found["folder/a"]["tests"] == {"test_one[x::y]": 0.5}
    assert target.read_text().startswith("{")


def test_the_cpu_time_of_a_file_is_that_of_all_phases_of_its_tests() -> None:
    lines = '["a::x", 1.0, 0.25]\n["b::y", 1.0, 2.0]\n["a::z", 0.5, 0.5]\n'
    found = durations.by_file(lines)
    assert {path: each["cpu_s"] for path, each in found.items()} == {"a": 0.75, "b": 2.0}


def test_a_run_that_does_not_ask_for_durations_notes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(durations.VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    durations.note(report("folder/a::test_one", 0.5))
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_took_more_than_twice_its_budget_is_named() -> None:
    seconds = {"a": 163.0, "b": 78.0, "c": 30.0, "d": 19.0}
    (line,) = durations.over_budget(seconds, {"a": 62.0, "b": 60.0, "c": 30.0})
    assert line.startswith(
        "a took 163 s, more than twice its budget of 62 s, on a machine that takes 1.3 times the budgets"
    )


def test_a_short_file_may_take_half_a_minute_more_by_chance() -> None:
    most = durations.OTHERS_S + durations.BY_CHANCE_S
    assert durations.over_budget({"a": most}, {}) == []
    assert len(durations.over_budget({"a": most + 1}, {})) == 1
    assert durations.over_budget({"a": 12 + durations.BY_CHANCE_S}, {"a": 12.0}) == []


def test_on_a_machine_that_is_slower_for_most_files_a_budget_is_more() -> None:
    budgets = {"a": 24.0, "b": 30.0}
    assert durations.over_budget({"a": 72.0, "b": 90.0, "c": 120.0}, budgets) == []
    assert len(durations.over_budget({"a": 72.0, "b": 90.0, "c": 121.0}, budgets)) == 1


def test_beside_other_work_a_budget_grows_by_how_long_a_computation_waits() -> None:
    seconds = {"a": 58.0, "b": 20.0, "c": 20.0}
    budgets = {"a": 23.0, "b": 20.0, "c": 20.0}
    assert len(durations.over_budget(seconds, budgets)) == 1
    alone, busy = durations.LANES_WAIT, 1.2 * durations.LANES_WAIT
    assert len(durations.over_budget(seconds, budgets, [1.0, alone, 9.0])) == 1
    assert durations.over_budget(seconds, budgets, [1.0, busy, 9.0]) == []


def test_on_a_busy_machine_a_file_counts_by_its_cpu_time() -> None:
    seconds = {"a": 200.0, "b": 34.0, "c": 34.0}
    budgets = {"a": 16.0, "b": 20.0, "c": 20.0}
    assert len(durations.over_budget(seconds, budgets)) == 1
    assert durations.over_budget(seconds, budgets, cpu_s={"a": 19.0}) == []
    assert len(durations.over_budget(seconds, budgets, cpu_s={"a": 100.0})) == 1


def test_a_computation_takes_its_own_cpu_time_or_longer() -> None:
    assert durations.core_wait() > 0.99


def test_budgets_are_the_durations_of_a_run(tmp_path: Path) -> None:
    source, target = tmp_path / "durations.json", tmp_path / "budgets.json"
    source.write_text('{"b": {"seconds": 31.2}, "a": {"seconds": 12.0}, "c": {"seconds": 9.9}}')
    durations.write_budgets(source, target)
    assert durations.read_budgets(target) == {"a": 12, "b": 32}
