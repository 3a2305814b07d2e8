"""CommitRealTime commits what it promises, when its rules say so, and nothing twice."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import pytest

from raymq.store.base.failpoints import FailPointReached, failpoint
from raymq.store.base.files import Files
from raymq.store.config.store_config import StoreConfig
from raymq.store.log import transient_pool
from raymq.store.log.commit_real_time import CommitRealTime, SegmentWriter
from raymq.store.log.flush import PAGE_BYTES
from raymq.store.log.transient_pool import TransientPool
from tests.support.clock import ManualClock

SEGMENT = 64 * 1024
POOL = 32 * 1024
LEAST, INTERVAL_MS = 4, 200
CONFIG = StoreConfig(
    segment_size_bytes=SEGMENT,
    transient_pool_slice_bytes=POOL // 2,
    commit_interval_ms=INTERVAL_MS,
    commit_least_pages=LEAST,
    commit_thorough_interval_ms=INTERVAL_MS,
)


class Disk(Files):
    """Files that count writes, and refuse them when `refused` is set."""

    refused = False
    writes = 0

    def pwrite(self, fd: int, data: object, offset: int) -> None:
        if self.refused:
            raise OSError(errno.EIO, "the disk does not answer")
        self.writes += 1
        super().pwrite(fd, data, offset)


class Bench:
    """A pool, the files that it is committed into, and the CommitRealTime that does it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.disk = Disk()
        self.clock = ManualClock()
        self.reported: list[int] = []
        self.appended = 0
        (root / "commitlog").mkdir()
        for start in (0, SEGMENT, 2 * SEGMENT):
            (root / "commitlog" / f"{start:020d}").write_bytes(bytes(SEGMENT))
        self.pool = TransientPool.create(root, "s", POOL, SEGMENT, files=Files())
        self.pool.reset(0)
        self.commit = self.next_life(0)

    def next_life(self, committed: int) -> CommitRealTime:
        return CommitRealTime(
            self.pool,
            SegmentWriter(self.root / "commitlog", SEGMENT, self.disk),
            self.clock,
            CONFIG,
            committed=committed,
            on_committed=self.reported.append,
        )

    def append(self, nbytes: int, letter: bytes = b"x") -> None:
        self.pool.committed = self.commit.committed
        assert self.appended + nbytes - self.pool.committed <= POOL
        self.pool.write(self.appended, letter * nbytes)
        self.appended += nbytes

    def log(self) -> bytes:
        files = sorted((self.root / "commitlog").iterdir())
        return b"".join(path.read_bytes() for path in files)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(transient_pool, "SHM_DIR", str(tmp_path / "shm"))
    return Bench(tmp_path)


def test_committed_bytes_are_in_the_files_and_reported_once(bench: Bench):
    bench.append(1000, b"a")
    assert bench.commit.commit(bench.appended) == 1000
    bench.append(500, b"b")
    assert bench.commit.commit(bench.appended) == 1500
    assert bench.commit.commit(bench.appended) == 1500
    assert bench.reported == [1000, 1500]
    assert bench.commit.commits == bench.disk.writes == 2
    assert bench.log()[:1501] == b"a" * 1000 + b"b" * 500 + b"\x00"


def test_many_rounds_of_the_pool_fill_file_after_file(bench: Bench):
    letters = [bytes([65 + turn]) for turn in range(14)]
    for letter in letters:
        bench.append(12_000, letter)
        bench.commit.commit(bench.appended)
    assert bench.log()[: bench.appended] == b"".join(letter * 12_000 for letter in letters)


def test_a_hole_is_stepped_over(bench: Bench):
    bench.appended = SEGMENT - 9000
    bench.commit = bench.next_life(SEGMENT - 9000)
    bench.append(8, b"b")
    bench.pool.note_hole(bench.appended)
    bench.appended = SEGMENT
    bench.append(100, b"c")
    assert bench.commit.commit(bench.appended) == SEGMENT + 100
    assert bench.log()[SEGMENT - 9001 : SEGMENT + 101] == (
        b"\x00" + b"b" * 8 + bytes(8992) + b"c" * 100 + b"\x00"
    )


def test_few_pages_wait_for_the_thorough_interval(bench: Bench):
    bench.append(LEAST * PAGE_BYTES - 1)
    assert bench.commit.commit_if_due(bench.appended) == 0
    bench.clock.advance(INTERVAL_MS - 1)
    assert bench.commit.commit_if_due(bench.appended) == 0
    bench.clock.advance(1)
    assert bench.commit.commit_if_due(bench.appended) == bench.appended
    bench.append(10)
    bench.clock.advance(INTERVAL_MS - 1)
    assert bench.commit.commit_if_due(bench.appended) == bench.appended - 10


def test_enough_pages_are_committed_at_once(bench: Bench):
    bench.append(LEAST * PAGE_BYTES)
    assert bench.commit.commit_if_due(bench.appended) == bench.appended


def test_a_full_file_is_committed_whatever_the_page_rule_says(bench: Bench):
    bench.appended = SEGMENT - 50
    bench.commit = bench.next_life(SEGMENT - 50)
    bench.append(49)
    assert bench.commit.commit_if_due(bench.appended) == SEGMENT - 50
    bench.append(10)
    assert bench.commit.commit_if_due(bench.appended) == SEGMENT + 9


def test_a_full_slice_is_committed_whatever_the_page_rule_says(bench: Bench):
    lazy = CommitRealTime(
        bench.pool,
        SegmentWriter(bench.root / "commitlog", SEGMENT, bench.disk),
        bench.clock,
        replace(CONFIG, commit_least_pages=1000),
        committed=0,
        on_committed=bench.reported.append,
    )
    bench.append(POOL // 2 - 1)
    assert lazy.commit_if_due(bench.appended) == 0
    bench.append(1)
    assert lazy.commit_if_due(bench.appended) == POOL // 2


def test_the_next_look_is_an_interval_after_the_last(bench: Bench):
    assert bench.commit.wait_ms() == INTERVAL_MS
    bench.clock.advance(150)
    assert bench.commit.wait_ms() == 50
    bench.commit.commit_if_due(0)
    assert bench.commit.wait_ms() == INTERVAL_MS
    bench.clock.advance(1000)
    assert bench.commit.wait_ms() == 0


def test_a_failed_write_is_not_reported_and_the_next_process_writes_it_again(bench: Bench):
    bench.append(1000, b"a")
    bench.disk.refused = True
    with pytest.raises(OSError, match="does not answer"):
        bench.commit.commit(bench.appended)
    assert (bench.reported, bench.commit.committed) == ([], 0)
    bench.disk.refused = False
    assert bench.next_life(0).commit(bench.appended) == 1000
    assert bench.log()[:1000] == b"a" * 1000


@pytest.mark.parametrize("point", ["commit.before_write", "commit.after_write_before_report"])
def test_the_successor_of_a_dead_process_commits_the_same_bytes(bench: Bench, point: str):
    bench.append(1000, b"a")
    bench.commit.commit(bench.appended)
    bench.append(2000, b"b")
    with failpoint(point, "raise"), pytest.raises(FailPointReached):
        bench.commit.commit(bench.appended)
    assert bench.reported == [1000]
    again = bench.next_life(1000)
    assert again.commit(bench.appended) == 3000
    assert bench.reported == [1000, 3000]
    assert bench.log()[:3001] == b"a" * 1000 + b"b" * 2000 + b"\x00"
