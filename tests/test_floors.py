"""The floors of the benchmarks: `--check` turns a missed one into an exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import queues
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


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        ({}, []),
        ({"disk_bytes": 1_000_000_001}, ["many queues: disk"]),
        ({"ratio": 3.01}, ["many queues: start"]),
    ],
)
def test_the_floors_of_many_queues_are_the_disk_and_the_start(
    changed: dict[str, Any], missed: list[str]
) -> None:
    store = {"put_us": 9, "dispatch_us": 9, "sync_s": 9, "open_s": 3, "descriptors": 300}
    facts = {"many": store, "few": store, "disk_bytes": 1_000_000_000, "ratio": 3.0, **changed}
    lines = queues.table(facts)
    assert [line.what for line in lines if line.floor] == [
        "many queues: disk",
        "many queues: start",
    ]
    assert [line.what for line in lines if line.missed] == missed


def test_the_disk_of_many_queues_is_everything_but_the_commit_log(tmp_path: Path) -> None:
    for kind in ("commitlog", "consumequeue/t/0", "raymq/chain"):
        (tmp_path / kind).mkdir(parents=True)
        (tmp_path / kind / "0").write_bytes(b"x" * 1_000_000)
    assert 2_000_000 <= queues.disk_bytes(tmp_path) < 2_500_000
