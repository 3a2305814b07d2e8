"""Appends through the transient pool: the same log, readers see what is committed, a kill loses nothing."""

from __future__ import annotations

import errno
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from raymq.store.base.errors import OffsetOutOfRange, Rejected, StorageFull, Unavailable
from raymq.store.base.failpoints import FailPointReached, failpoint
from raymq.store.base.files import Files
from raymq.store.config.store_config import StoreConfig
from raymq.store.embedded.embedded_store import EmbeddedStore
from raymq.store.engine.message_store import MessageStore
from raymq.store.log import transient_pool
from raymq.store.log.commit_real_time import SegmentWriter
from raymq.store.log.transient_pool import PoolReader, TransientPool, check_room
from raymq.store.tools.inspect import verify
from tests.support.batches import request
from tests.support.clock import ManualClock

SEGMENT = 64 * 1024
PLAIN = StoreConfig(segment_size_bytes=SEGMENT, consume_queue_file_size_bytes=2000, flush="async")
POOLED = replace(PLAIN, transient_pool=True, transient_pool_slice_bytes=16 * 1024)
#: smaller and larger than a file
SIZES = [8 * 1024, 16 * 1024, 40 * 1024, 128 * 1024]
DIED_AT = [
    "log.before_store",
    "pool.stored",
    "log.after_store",
    "log.roll",
    "log.after_snapshot",
]


@pytest.fixture(autouse=True)
def shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    place = tmp_path / "shm"
    place.mkdir()
    monkeypatch.setattr(transient_pool, "SHM_DIR", str(place))
    yield place
    # Nothing outlives a store that was closed.
    assert list(place.iterdir()) == []


def make_pool(root: Path, size: int = 8192, store: str = "s") -> TransientPool:
    pool = TransientPool.create(root, store, size, SEGMENT, files=Files())
    pool.reset(0)
    return pool


def content(pool: PoolReader, start: int, stop: int) -> dict[int, bytes]:
    return {offset: bytes(data) for offset, data in pool.pieces(start, stop)}


def discard(pool: TransientPool, shm: Path) -> None:
    pool.close()
    (shm / pool.name).unlink()


def open_store(root: Path, config: StoreConfig = POOLED, **options: object) -> MessageStore:
    store = MessageStore.open(root, config=config, **options)  # type: ignore[arg-type]
    store.topics.create("t", 1, [0])
    return store


def confirm(store: MessageStore) -> None:
    """The step of CommitLog when CommitRealTime has committed all."""
    store.log.commit_pool()
    store.log.note_confirmed(store.log.committed)
    while store.dispatched < store.log.confirmed:
        store.dispatch(store.log.confirmed)


def commit_elsewhere(store: MessageStore, stop: int) -> None:
    """The step of CommitRealTime, and that of CommitLog afterwards."""
    log = store.log
    log.pool.publish(7)
    pool = PoolReader.open(log.root, 7, files=Files())
    writer = SegmentWriter(log.root / "commitlog", SEGMENT, Files())
    for offset, data in pool.pieces(log.committed, stop):
        writer.write(offset, data)
    writer.close()
    pool.close()
    log.note_committed(stop)


def records(store: MessageStore) -> list[bytes]:
    low, high = store.queue_range("t", 0)
    found: list[bytes] = []
    while low < high:
        part = store.fetch("t", 0, low, max_bytes=1 << 30, max_records=10_000)
        found += part.records.to_pylist()
        low = part.next_offset
    return found


def put_some(store: MessageStore, count: int = 60, seed: int = 1) -> list[bytes]:
    """Puts of all sizes, over several files. Returns: the bodies."""
    chance = random.Random(seed)
    bodies = [bytes([i % 251 + 1]) * chance.randrange(1, 7000) for i in range(count)]
    for at in range(0, count, 3):
        store.put(request(bodies[at : at + 3]))
    return bodies


def has(found: list[bytes], bodies: list[bytes]) -> bool:
    return len(found) >= len(bodies) and all(
        body in record for body, record in zip(bodies, found, strict=False)
    )


# --- the pool -------------------------------------------------------------------------------------


def test_bytes_come_back_also_around_the_end_of_the_pool(tmp_path: Path, shm: Path):
    pool = make_pool(tmp_path)
    pool.write(0, b"a" * 5000)
    assert content(pool, 0, 100) == {0: b"a" * 100}
    pool.committed = 5000
    pool.write(5000, b"b" * 6000)
    assert content(pool, 5000, 11000) == {5000: b"b" * 3192, 8192: b"b" * 2808}
    discard(pool, shm)


def test_a_piece_lies_in_one_file_and_leaves_the_hole_out(tmp_path: Path, shm: Path):
    pool = make_pool(tmp_path)
    pool.write(SEGMENT - 100, b"c" * 10)
    pool.note_hole(SEGMENT - 90)
    pool.write(SEGMENT, b"d" * 20)
    expected = {SEGMENT - 100: b"c" * 10, SEGMENT: b"d" * 20}
    assert content(pool, SEGMENT - 100, SEGMENT + 20) == expected
    assert content(pool, SEGMENT - 50, SEGMENT) == {}
    pool.reset(SEGMENT + 20)
    assert pool.hole_end == 0
    discard(pool, shm)


def test_without_room_a_pool_is_refused_with_the_numbers(tmp_path: Path):
    class Small(Files):
        def free_bytes(self, path: object) -> int:
            return 1 << 20

    with pytest.raises(StorageFull, match=r"needs 134221824 bytes .* has 1048576 \(1 MiB\) free"):
        TransientPool.create(tmp_path, "s", 128 << 20, SEGMENT, files=Small())
    with pytest.raises(StorageFull, match="3 transient pools need"):
        check_room([tmp_path / str(n) for n in range(3)], 1 << 20, files=Small())


def test_space_that_is_taken_between_check_and_allocation_leaves_nothing(tmp_path: Path):
    class Full(Files):
        def allocate(self, fd: int, size: int) -> None:
            raise StorageFull("full", field="disk")

    with pytest.raises(StorageFull) as refusal:
        TransientPool.create(tmp_path, "s", 8192, SEGMENT, files=Full())
    assert refusal.value.fields["field"] == "transient_pool"


def test_a_pool_that_is_there_needs_no_second_room(tmp_path: Path, shm: Path):
    root = tmp_path / "s"
    (root / "raymq").mkdir(parents=True)
    pool = make_pool(root)
    pool.publish(root, 7)
    check_room([root], 1 << 60, files=Files())
    with pytest.raises(StorageFull):
        check_room([root, tmp_path], 1 << 60, files=Files())
    discard(pool, shm)


def test_only_the_same_store_of_the_same_boot_is_attached(tmp_path: Path, shm: Path):
    class NextBoot(Files):
        def boot_id(self) -> str:
            return "another"

    pool = make_pool(tmp_path)
    again = TransientPool.attach(tmp_path, pool.name, "s", files=Files())
    assert again is not None
    again.close()
    assert TransientPool.attach(tmp_path, pool.name, "other store", files=Files()) is None
    assert TransientPool.attach(tmp_path, pool.name, "s", files=NextBoot()) is None
    other = f"{pool.name[:-1]}{'0' if pool.name[-1] != '0' else '1'}"
    (shm / pool.name).rename(shm / other)
    assert TransientPool.attach(tmp_path, other, "s", files=Files()) is None
    with (shm / other).open("r+b") as file:
        file.truncate(5000)
    (shm / other).rename(shm / pool.name)
    assert TransientPool.attach(tmp_path, pool.name, "s", files=Files()) is None
    discard(pool, shm)


def test_a_reader_takes_only_the_pool_of_its_commit_log(tmp_path: Path, shm: Path):
    (tmp_path / "raymq").mkdir()
    with pytest.raises(Unavailable):
        PoolReader.open(tmp_path, 7, files=Files())
    pool = make_pool(tmp_path)
    pool.publish(tmp_path, 7)
    PoolReader.open(tmp_path, 7, files=Files()).close()
    with pytest.raises(Unavailable):
        PoolReader.open(tmp_path, 8, files=Files())
    pool.reset(0)
    with pytest.raises(Unavailable):
        PoolReader.open(tmp_path, 7, files=Files())
    discard(pool, shm)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"transient_pool_slices": 1}, "transient_pool_slices"),
        ({"transient_pool_slice_bytes": 5000}, "transient_pool_slice_bytes"),
        ({"transient_pool_slice_bytes": 4096}, "transient_pool_slice_bytes"),
    ],
)
def test_a_pool_too_small_for_its_log_is_refused(options: dict[str, int], field: str):
    with pytest.raises(Rejected) as refusal:
        replace(POOLED, **options)  # type: ignore[arg-type]
    assert refusal.value.fields["field"] == field


# --- the log over it ------------------------------------------------------------------------------


@pytest.mark.parametrize("slice_bytes", SIZES)
def test_the_files_hold_the_same_bytes_as_without_a_pool(tmp_path: Path, slice_bytes: int):
    logs = []
    for name, config in (
        ("plain", PLAIN),
        ("pooled", replace(POOLED, transient_pool_slice_bytes=slice_bytes)),
    ):
        store = open_store(tmp_path / name, config, clock=ManualClock())
        put_some(store)
        store.log.commit_pool()
        store.log.note_confirmed(store.log.end)
        store.close()
        assert verify(tmp_path / name) == []
        files = sorted((tmp_path / name / "commitlog").iterdir())
        logs.append(b"".join(path.read_bytes() for path in files))
    assert len(logs[0]) >= 3 * SEGMENT
    assert logs[0] == logs[1]


def test_nothing_is_read_confirmed_or_called_synced_before_it_is_committed(tmp_path: Path):
    store = open_store(tmp_path / "s")
    log = store.log
    confirm(store)
    before = log.end
    store.put(request([b"x" * 100]))
    assert (log.committed, log.end > before) == (before, True)
    log.note_confirmed(log.end)
    log.note_synced(log.end)
    assert log.sync() == before
    assert (log.confirmed, log.synced) == (before, before)
    assert store.dispatch(log.confirmed) == before
    assert not any(log.reads.raw(before, log.end_max))
    confirm(store)
    assert len(records(store)) == 1
    store.close()


def test_a_commit_of_another_process_frees_room(tmp_path: Path):
    store = open_store(tmp_path / "s")
    log = store.log
    store.put(request([b"x" * 100]))
    commit_elsewhere(store, log.end - 10)
    assert log.committed == log.end - 10
    log.note_committed(5)
    assert log.committed == log.end - 10
    commit_elsewhere(store, log.end)
    assert log.committed == log.end
    store.abandon()
    open_store(tmp_path / "s", PLAIN).close()
    assert verify(tmp_path / "s") == []


def test_a_record_larger_than_the_pool_is_refused(tmp_path: Path):
    store = open_store(tmp_path / "s", replace(POOLED, transient_pool_slice_bytes=8192))
    with pytest.raises(Rejected, match="transient pool of 16384 bytes"):
        store.put(request([b"x" * 17_000]))
    store.put(request([b"x" * 16_000]))
    store.close()


def test_an_embedded_store_has_no_commit_service(tmp_path: Path):
    with pytest.raises(Rejected):
        EmbeddedStore(tmp_path / "s", config=POOLED)


def test_a_full_pool_waits_and_then_refuses_with_nothing_stored(tmp_path: Path):
    clock = ManualClock()
    store = open_store(tmp_path / "s", clock=clock)
    log = store.log
    confirm(store)
    asked: list[int] = []
    log.pool.on_full = lambda: asked.append(log.end)
    for _ in range(sent := 10):
        store.put(request([b"x" * 3000]))
    assert asked == []
    with pytest.raises(Unavailable, match="CommitRealTime is at") as refusal:
        store.put(request([b"x" * 3000]))
    assert refusal.value.retriable
    assert sum(clock.slept) >= POOLED.sync_flush_timeout_ms
    end, looked = log.end, len(asked)
    # The next put looks once and does not wait as long again.
    with pytest.raises(Unavailable):
        store.put(request([b"y" * 3000]))
    assert len(asked) == looked + 1
    assert log.end == end

    # As long as it gets on, however slowly, puts wait.
    def step() -> None:
        clock.advance(POOLED.sync_flush_timeout_ms - 100)
        commit_elsewhere(store, log.committed + 1000)

    log.pool.on_full = step
    store.put(request([b"z" * 3000]))
    log.pool.on_full = None
    confirm(store)
    found = records(store)
    assert len(found) == sent + 1
    assert b"z" * 3000 in found[-1]
    store.close()
    assert verify(tmp_path / "s") == []


class NoUnits(Files):
    refuse = False

    def pwrite(self, fd: int, data: object, offset: int) -> None:
        if self.refuse and len(data) == 40:  # type: ignore[arg-type]
            raise OSError(errno.EIO, "no unit")
        super().pwrite(fd, data, offset)


def test_a_put_that_the_chain_refuses_leaves_nothing(tmp_path: Path):
    files = NoUnits()
    store = open_store(tmp_path / "s", files=files)
    put_some(store, 9)
    files.refuse = True
    with pytest.raises(OSError, match="no unit"):
        store.put(request([b"refused" * 500]))
    files.refuse = False
    store.put(request([b"k"]))
    confirm(store)
    found = records(store)
    assert len(found) == 10
    assert not any(b"refused" in record for record in found)
    store.close()
    assert verify(tmp_path / "s") == []


def test_a_seal_that_the_chain_refuses_digs_no_hole(tmp_path: Path):
    files = NoUnits()
    store = open_store(tmp_path / "s", files=files)
    bodies = [b"a" * 20_000, b"b" * 20_000]
    for body in bodies:
        store.put(request([body]))
    files.refuse = True
    with pytest.raises(OSError, match="no unit"):
        store.put(request([b"c" * 30_000]))
    files.refuse = False
    store.put(request([b"d" * 10_000]))
    store.put(request([b"e" * 30_000]))
    confirm(store)
    assert has(records(store), [*bodies, b"d" * 10_000, b"e" * 30_000])
    store.close()
    assert verify(tmp_path / "s") == []


def test_a_cut_takes_the_pool_back_too(tmp_path: Path):
    store = open_store(tmp_path / "s")
    log = store.log
    store.put(request([b"a" * 1000]))
    cut = log.end
    store.put(request([b"b" * 1000]))
    log.truncate(cut)
    assert (log.end, log.committed) == (cut, cut)
    unit = log.append(b"\x01" * 64, 0)
    assert unit == cut
    log.commit_pool()
    assert log.reads.raw(cut, cut + 65) == b"\x01" * 64 + b"\x00"
    log.truncate(cut)
    store.close()
    assert verify(tmp_path / "s") == []


def test_the_original_of_a_duplicate_is_found_once_it_is_committed(tmp_path: Path):
    store = open_store(tmp_path / "s")
    confirm(store)
    first = request([b"a", b"b"], producer_id=7, sequence=0)
    store.put(first)
    assert store.put(first).duplicates == 2
    confirm(store)
    again = store.put(first)
    assert (again.first_offset, again.last_offset, again.duplicates) == (0, 1, 2)
    store.close()


# --- kills ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("slice_bytes", SIZES)
def test_a_killed_store_comes_back_with_all_that_was_put(tmp_path: Path, slice_bytes: int):
    config = replace(POOLED, transient_pool_slice_bytes=slice_bytes)
    store = open_store(tmp_path / "s", config)
    bodies = put_some(store)
    end = store.log.end
    assert store.log.committed < end
    store.abandon()
    # Once with the pool, once without: nothing was committed in between.
    for config_again in (config, PLAIN):
        again = MessageStore.open(tmp_path / "s", config=config_again)
        assert again.log.same_boot
        assert again.log.end == end
        confirm(again)
        assert has(records(again), bodies)
        again.abandon()
    assert verify(tmp_path / "s") == []


@pytest.mark.parametrize("point", DIED_AT)
@pytest.mark.parametrize("nth", [1, 2, 7])
def test_a_store_killed_at_any_step_keeps_every_put_that_returned(
    tmp_path: Path, point: str, nth: int
):
    store = open_store(tmp_path / "s")
    reached = 0
    kept: list[bytes] = []

    def die() -> None:
        nonlocal reached
        reached += 1
        if reached == nth:
            raise FailPointReached(point)

    def put_for_ever() -> None:
        while True:
            body = bytes([len(kept) % 251 + 1]) * 5000
            store.put(request([body]))
            kept.append(body)

    with failpoint(point, die), pytest.raises(FailPointReached):
        put_for_ever()
    store.abandon()
    for _ in range(2):
        with failpoint("pool.restored", "raise"), pytest.raises(FailPointReached):
            MessageStore.open(tmp_path / "s", config=POOLED)
    again = MessageStore.open(tmp_path / "s", config=POOLED)
    assert again.log.same_boot
    again.put(request([b"next"]))
    confirm(again)
    found = records(again)
    assert has(found, kept)
    assert len(found) - len(kept) in (1, 2)
    assert b"next" in found[-1]
    again.close()
    assert verify(tmp_path / "s") == []


@pytest.mark.parametrize("flush", ["sync", "async"])
def test_a_lost_pool_loses_what_was_not_committed_and_nothing_else(
    tmp_path: Path, shm: Path, flush: str
):
    config = replace(POOLED, flush=flush)
    store = open_store(tmp_path / "s", config)
    kept = put_some(store)
    confirm(store)
    store.log.sync()
    committed = store.log.committed
    store.put(request([b"lost" * 100]))
    store.abandon()
    (pool,) = shm.iterdir()
    pool.unlink()
    assert verify(tmp_path / "s") == []
    again = MessageStore.open(tmp_path / "s", config=config)
    assert not again.log.same_boot
    assert again.log.end == committed
    again.put(request([b"next"]))
    confirm(again)
    found = records(again)
    assert has(found, kept)
    assert len(found) == len(kept) + 1
    again.close()
    assert verify(tmp_path / "s") == []


def test_a_reader_goes_on_where_it_was_although_dispatch_begins_again(tmp_path: Path, shm: Path):
    store = open_store(tmp_path / "s")
    kept = put_some(store)
    confirm(store)
    store.log.sync()
    store.abandon()
    (pool,) = shm.iterdir()
    pool.unlink()
    again = MessageStore.open(tmp_path / "s", config=POOLED)
    assert again.queue_range("t", 0) == (0, 0)
    part = again.fetch("t", 0, len(kept), max_bytes=1 << 20, max_records=10)
    assert (len(part.records), part.next_offset) == (0, len(kept))
    with pytest.raises(OffsetOutOfRange):
        again.fetch("t", 0, len(kept) + 1, max_bytes=1 << 20, max_records=10)
    again.put(request([b"next"]))
    confirm(again)
    part = again.fetch("t", 0, len(kept), max_bytes=1 << 20, max_records=10)
    assert b"next" in part.records[0].as_py()
    again.close()


def test_a_copied_store_lets_its_originals_pool_alone(tmp_path: Path):
    store = open_store(tmp_path / "s")
    kept = put_some(store, 9)
    confirm(store)
    store.log.sync()
    store.put(request([b"only in the pool"]))
    shutil.copytree(tmp_path / "s", tmp_path / "copy")
    copy = MessageStore.open(tmp_path / "copy", config=POOLED)
    assert not copy.log.same_boot
    copy.put(request([b"other" * 100]))
    confirm(copy)
    assert has(records(copy), [*kept, b"other"])
    copy.close()
    store.put(request([b"next"]))
    confirm(store)
    assert has(records(store), [*kept, b"only in the pool", b"next"])
    store.close()
    for name in ("s", "copy"):
        assert verify(tmp_path / name) == []


def test_a_pool_of_another_size_is_emptied_and_replaced(tmp_path: Path, shm: Path):
    store = open_store(tmp_path / "s")
    bodies = put_some(store, 6)
    store.abandon()
    larger = replace(POOLED, transient_pool_slice_bytes=64 * 1024)
    again = MessageStore.open(tmp_path / "s", config=larger)
    (pool,) = shm.iterdir()
    assert pool.stat().st_size == 4096 + 128 * 1024
    confirm(again)
    assert has(records(again), bodies)
    again.close()
    assert list(shm.iterdir()) == []


def test_a_reader_of_a_pool_changes_nothing_there(tmp_path: Path, shm: Path):
    (tmp_path / "raymq").mkdir()
    pool = make_pool(tmp_path)
    pool.publish(tmp_path, 7)
    reader = PoolReader.open(tmp_path, 7, files=Files())
    assert all(data.readonly for _, data in reader.pieces(0, 8192))
    reader.close()
    discard(pool, shm)
