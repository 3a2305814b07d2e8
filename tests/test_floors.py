"""The floors of the benchmarks: `--check` turns a missed one into an exit code."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks import groups, queues, replicate
from benchmarks.floors import Line, at_least, at_most, report
from benchmarks.rounds import Rounds, lines_of, usual_directory


def noted(figures: dict[str, Any]) -> Rounds:
    """Rounds with these figures; a list has one for each round."""
    rounds = Rounds()
    for name, values in figures.items():
        for value in values if isinstance(values, list) else [values]:
            rounds.note(name, value)
    return rounds


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


# /dev/null is the home of some service users. A lone "~" is the answer of a system that knows no home.
@pytest.mark.parametrize("home", ["/dev/null", "~"])
def test_without_a_home_benchmarks_write_into_the_checkout(
    home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda _: home)
    assert usual_directory() == Path(__file__).resolve().parents[1] / "build" / "bench"


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
        ({"many_disk_MB": 1000.000001}, ["many queues: disk"]),
        ({"many_open_s": 3.01}, ["many queues: start"]),
    ],
)
def test_the_floors_of_many_queues_are_the_disk_and_the_start(
    changed: dict[str, float], missed: list[str]
) -> None:
    figures = {"many_descriptors": 300, "many_disk_MB": 1000, "many_open_s": 3, "few_open_s": 1}
    lines = lines_of(queues.ROWS, noted(figures | changed))
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


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        ({}, []),
        ({"three_1KiB_msg_s": 2}, ["three replicas, batches of 1 KiB"]),
        ({"three_ms": 2.01}, ["  one message"]),
        ({"gap_ms": [9, 2001, 2001]}, ["  3 leaders killed, writes back"]),
        ({"gap_ms": [9, 9, 5001]}, ["  leaders killed, at worst"]),
        ({"restart_gap_ms": 1001}, ["  all replicas restarted, longest wait"]),
        ({"catch_up_MB_s": 4}, ["  catch-up of an empty follower"]),
        ({"replicate_cpu_percent": 5.01}, ["idle, 4 shards x 3: CPU of a core per shard"]),
    ],
)
def test_each_promise_about_replicas_has_a_floor(
    changed: dict[str, Any], missed: list[str]
) -> None:
    figures: dict[str, Any] = {"one_1KiB_msg_s": 10, "three_1KiB_msg_s": 3}
    figures |= {"one_ms": 1, "three_ms": 2, "copy_MB_s": 10, "catch_up_MB_s": 5}
    figures |= {"gap_ms": [9, 2000, 5000], "restart_gap_ms": 1000}
    figures |= {"alone_ms": 1, "beside_p50_ms": 100, "beside_p99_ms": 200}
    figures |= {"replicate_cpu_percent": 5, "replicate_bare_cpu_percent": 4}
    lines = replicate.table(noted(figures | changed))
    assert [line.what for line in lines if line.missed] == missed
    assert sum(line.floor is not None for line in lines) == 7


@pytest.mark.parametrize(
    ("ratios", "missed"),
    [
        # 3 % slower at most.
        ([0.98] * 10, False),
        # Slower, and the turns are sure of it.
        ([0.9] * 10, True),
        # The turns cannot tell.
        ([0.8, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 1.1, 1.1, 1.1], False),
    ],
)
def test_puts_beside_idle_members_are_slower_by_3_percent_or_not_for_sure(
    ratios: list[float], missed: bool
) -> None:
    figures = {"puts_beside_per_s": ratios, "puts_alone_per_s": [1.0] * 10}
    (line,) = groups.table(noted(figures))
    assert line.missed is missed


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        ({}, []),
        ({"thousand_stable_ms": 6201}, ["1,000 members, 2,000 queues, one joins"]),
        ({"commit_one_ms": 1.3}, ["a commit of one queue"]),
        ({"transactions_500_per_s": 69}, ["a transaction of 500"]),
        ({"tags_MB": 11}, ["tags, 1 of 100: all messages"]),
        ({"sql_looked_msg_s": 79}, ["  looked at"]),
        ({"query_p50_ms": 6}, ["a query by key"]),
    ],
)
def test_each_promise_about_groups_has_a_floor(changed: dict[str, Any], missed: list[str]) -> None:
    figures: dict[str, Any] = {"put_ms": 1, "commit_one_ms": 1.2, "commit_hundred_ms": 1.5}
    for name in groups.GROUPS:
        figures |= {f"{name}_stable_ms": 6200, f"{name}_cpu_ms": 100}
    figures |= {"puts_500_per_s": 100, "transactions_500_per_s": 70}
    figures |= {"idle_percent": 1, "idle_MB": 64, "query_p50_ms": 5}
    for name, size in (("plain", 100), ("tags", 10), ("sql", 10)):
        figures |= {f"{name}_MB": size, f"{name}_looked_msg_s": 100}
    lines = groups.table(noted(figures | changed))
    assert [line.what for line in lines if line.missed] == missed
    assert sum(line.floor is not None for line in lines) == 16


def test_what_a_process_writes_is_counted(tmp_path: Path) -> None:
    before = replicate.written_bytes(os.getpid())
    (tmp_path / "file").write_bytes(b"x" * 2 * replicate.QUIET_BYTES)
    written = replicate.written_bytes(os.getpid()) - before
    assert written >= 2 * replicate.QUIET_BYTES


def test_the_raw_copy_ends_where_the_log_does_and_is_synced_on_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, end = tmp_path / "commitlog", 20_500_000
    source.mkdir()
    for start in (0, 20_000_000, 40_000_000):
        (source / f"{start:020}").write_bytes(b"x" * 20_000_000)
    copied: list[int] = []
    pwrite = os.pwrite

    def count(fd: int, data: memoryview, at: int) -> int:
        copied.append(len(data))
        return pwrite(fd, data, at)

    #: bytes copied before each sync
    synced: list[int] = []
    fdatasync = os.fdatasync

    def note_sync(fd: int) -> None:
        synced.append(sum(copied))
        fdatasync(fd)

    monkeypatch.setattr(os, "pwrite", count)
    monkeypatch.setattr(os, "fdatasync", note_sync)
    assert replicate.copy_rate(source, tmp_path, end) > 0
    assert sum(copied) == end
    assert synced == [replicate.COPY_SYNC_BYTES, 20_000_000, end]
    assert [path.name for path in tmp_path.iterdir()] == ["commitlog"]


def test_ten_ratios_leave_one_on_each_side_of_the_median_s_interval() -> None:
    ratios = [0.1, *[0.9, 1.1] * 4, 9.0]
    rounds = noted({"now": ratios, "before": [1.0] * 10})
    assert rounds.interval("now", "before") == " (0.90 to 1.10)"


def test_five_ratios_have_no_interval() -> None:
    rounds = noted({"now": [1.0] * 5, "before": [1.0] * 5})
    assert rounds.interval("now", "before") == ""
