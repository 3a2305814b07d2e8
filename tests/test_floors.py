"""The floors of the benchmarks: `--check` turns a missed one into an exit code."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks import queues, replicate
from benchmarks.floors import Line, at_least, at_most, report
from benchmarks.put import Rounds


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


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        ({}, []),
        ({"three_1KiB_msg_s": 2}, ["three replicas, batches of 1 KiB"]),
        ({"three_ms": 2.01}, ["  one message"]),
        ({"gaps_ms": [9, 2001, 2001]}, ["  3 leaders killed, writes back"]),
        ({"gaps_ms": [9, 9, 5001]}, [""]),
        ({"restart_gap_ms": 1001}, ["  all replicas restarted, longest wait"]),
        ({"catch_up_bytes_s": 4}, ["  catch-up of an empty follower"]),
        ({"cpu_percent_per_shard": 5.01}, ["idle, 4 shards x 3: CPU of a core per shard"]),
    ],
)
def test_each_promise_about_replicas_has_a_floor(
    changed: dict[str, Any], missed: list[str]
) -> None:
    rounds = Rounds()
    figures = {"one_1KiB_msg_s": 10, "three_1KiB_msg_s": 3, "one_ms": 1, "three_ms": 2}
    figures |= {"one_cpu_s_per_GB": 1, "three_cpu_s_per_GB": 9}
    figures |= {"copy_bytes_s": 10, "catch_up_bytes_s": 5}
    for name, value in figures.items():
        rounds.note(name, changed.get(name, value))
    idle_percent = changed.get("cpu_percent_per_shard", 5)
    single = {
        "gaps_ms": changed.get("gaps_ms", [9, 2000, 5000]),
        "restart_gap_ms": changed.get("restart_gap_ms", 1000),
        "catch_up": {"alone_ms": 1, "beside_ms": 100},
        "idle": {
            "processes": 36,
            "memory_mb": 1,
            "bare_memory_mb": 1,
            "cpu_percent_per_shard": idle_percent,
            "bare_cpu_percent_per_shard": 4,
        },
    }
    lines = replicate.table(rounds, single)
    assert [line.what for line in lines if line.missed] == missed


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
