"""The lanes of the suite run each test once, and say what pytest would have said."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from _pytest.mark.expression import Expression

from tests import lanes

MARKS = ("ray", "spark", "interop", "served", "program", "beside", "alone", "faults")
PASSES = "print('..  [100%]'); print('==== 2 passed, 1 skipped in 0.10s ====')"
FAILS = """
print('.F  [100%]')
print('==== FAILURES ====')
print('its own words')
print('==== short test summary info ====')
print('FAILED tests/a::test_b - AssertionError')
print('==== 1 failed, 1 passed in 0.10s ====')
raise SystemExit(1)
"""
ENDS = "print('no word of pytest'); raise SystemExit(3)"
WAITS = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
print('waits', flush=True)
try:
    signal.pause()
except KeyboardInterrupt:
    print('ended in order')
"""
NOTHING = "print('9 deselected in 0.10s'); raise SystemExit(5)"


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The program of each lane in the place of its pytest."""
    programs = dict.fromkeys([each.expression for each in (*lanes.LANES, lanes.LAST)], PASSES)

    def command(expression: str, words: Sequence[str]) -> list[str]:
        return [sys.executable, "-c", programs[expression]]

    monkeypatch.setattr(lanes, "command", command)
    monkeypatch.setattr(lanes, "BUILD", tmp_path / "tests")
    monkeypatch.setattr(lanes, "DURATIONS", tmp_path / "durations.json")
    # `run` sets it, and no test of this run may note its duration there.
    monkeypatch.setenv(lanes.durations.VARIABLE, str(tmp_path / "unused"))
    monkeypatch.setattr(lanes, "LOOK_S", 0.01)
    return programs


@pytest.mark.parametrize("count", range(len(MARKS) + 1))
def test_a_test_belongs_to_one_lane_whatever_its_marks(count: int) -> None:
    for marks in itertools.combinations(MARKS, count):
        chosen = [
            lane.name
            for lane in (*lanes.LANES, lanes.LAST)
            if Expression.compile(lane.expression).evaluate(set(marks).__contains__)
        ]
        assert len(chosen) == 1, marks


def test_the_counts_of_all_lanes_are_added(
    said: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    said[lanes.LAST.expression] = NOTHING
    assert lanes.run([], quick=False) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith("======== 10 passed, 5 skipped in ")


def test_the_words_of_a_lane_that_failed_are_printed_and_its_tests_are_named_at_the_end(
    said: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    said[lanes.LANES[1].expression] = FAILS
    assert lanes.run([], quick=False) == 1
    out = capsys.readouterr().out
    *_, named, last = out.splitlines()
    assert "its own words" in out
    assert named == "FAILED tests/a::test_b - AssertionError"
    assert last.startswith("======== 1 failed, 11 passed, 5 skipped in ")


def test_a_lane_that_ends_without_a_word_is_an_error(
    said: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    said[lanes.LANES[0].expression] = ENDS
    assert lanes.run([], quick=False) == 1
    out = capsys.readouterr().out
    assert "no word of pytest" in out
    assert out.splitlines()[-1].startswith("======== 10 passed, 5 skipped, 1 error in ")


def test_a_run_that_is_interrupted_lets_each_lane_end_in_order(
    said: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for lane in lanes.LANES[: lanes.SLOTS]:
        said[lane.expression] = WAITS
    begun = [lanes.BUILD / f"{lane.name}.log" for lane in lanes.LANES[: lanes.SLOTS]]

    def look(seconds: float) -> None:
        if all(log.exists() and "waits" in log.read_text() for log in begun):
            raise KeyboardInterrupt

    clock = SimpleNamespace(monotonic=time.monotonic, sleep=look)
    monkeypatch.setattr(lanes, "time", clock)
    with pytest.raises(KeyboardInterrupt):
        lanes.run([], quick=False)
    assert all("ended in order" in log.read_text() for log in begun)


def test_what_is_thorough_is_left_out_of_each_lane_of_a_quick_run(
    said: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    for expression in list(said):
        said[f"({expression}) and not thorough"] = said.pop(expression)
    assert lanes.run([], quick=True) == 0
