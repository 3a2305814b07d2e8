"""The floors of the benchmarks: `--check` turns a missed one into an exit code."""

from __future__ import annotations

import pytest

from benchmarks.floors import Line, at_least, at_most, report


@pytest.mark.parametrize(
    ("line", "missed"),
    [
        (Line("rate", "5", floor=at_least(3), value=3), False),
        (Line("rate", "5", floor=at_least(3), value=2.99), True),
        (Line("time", "5", floor=at_most(3), value=3), False),
        (Line("time", "5", floor=at_most(3), value=3.01), True),
        (Line("limit", "5", remark="limit"), False),
    ],
)
def test_a_floor_judges_its_value(line: Line, missed: bool) -> None:
    assert line.missed is missed


def test_only_a_check_makes_a_missed_floor_an_exit_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = [Line("quick", "1", "1 x", at_least(0.5), 1), Line("slow", "9", "9 x", at_most(3), 9)]
    assert report(lines, check=True) == 1
    assert "missed: slow: 9, floor <= 3" in capsys.readouterr().out
    assert report(lines, check=False) == 0
    assert report(lines[:1], check=True) == 0
