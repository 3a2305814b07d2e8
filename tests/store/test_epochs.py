"""A leader's epoch begins with a record of the log, so that the log alone says which epoch each of its bytes has."""

from __future__ import annotations

import errno
import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from raymq.store.base.checksum import crc32c
from raymq.store.base.errors import Rejected
from raymq.store.config.store_config import StoreConfig
from raymq.store.engine.message_store import MessageStore
from raymq.store.log.chain import ChainUnit
from raymq.store.log.epochs import EpochStarts
from raymq.store.state.shard_state import INTERNAL_TOPIC
from raymq.store.tools.inspect import dump, verify
from raymq.store.tools.repair import Repair
from tests.support.batches import request
from tests.support.clock import ManualClock
from tests.support.confirming import confirm
from tests.support.crash_states import last_states
from tests.support.simulated_disk import SimulatedDisk

CONFIG = StoreConfig(segment_size_bytes=64 * 1024, consume_queue_file_size_bytes=2000)
ROOT = Path("/s")


def open_store(disk: SimulatedDisk) -> MessageStore:
    return MessageStore.open(ROOT, config=CONFIG, files=disk, clock=ManualClock())


def fill(store: MessageStore, batches: int) -> None:
    for _ in range(batches):
        store.put(request([b"x" * 5000]))


def epochs_of(store: MessageStore) -> list[tuple[int, int]]:
    """Where each epoch of the chain begins."""
    found: list[tuple[int, int]] = []
    for unit in store.log.chain.units(store.log.start, store.log.end):
        if not found or unit.epoch != found[-1][1]:
            found.append((unit.start, unit.epoch))
    return found


def three_epochs(disk: SimulatedDisk) -> MessageStore:
    """A store of several files, with records of the epochs 0, 2 and 7."""
    store = open_store(disk)
    store.topics.create("t", 1, [0])
    fill(store, 4)
    store.begin_epoch(2)
    fill(store, 20)
    store.begin_epoch(7)
    fill(store, 2)
    confirm(store)
    return store


def lose_chain(disk: SimulatedDisk) -> None:
    for name in disk.list(ROOT / "raymq" / "chain"):
        disk.unlink(ROOT / "raymq" / "chain" / name)


def test_all_records_after_an_epoch_record_are_of_its_epoch() -> None:
    disk = SimulatedDisk()
    store = three_epochs(disk)
    (_, zero), (second, two), (third, seven) = epochs_of(store)
    assert [zero, two, seven] == [0, 2, 7]
    assert len(store.log.segments.files) > 2
    begun = [
        int(str(item["phy"]))
        for item in dump(ROOT, files=disk)
        if item.get("topic") == INTERNAL_TOPIC and item.get("tags") == "EPOCH"
    ]
    assert begun == [second, third]


def test_an_epoch_that_the_log_has_already_is_refused_and_nothing_is_stored() -> None:
    store = three_epochs(SimulatedDisk())
    end = store.log.end
    for epoch in (1, 7):
        with pytest.raises(Rejected, match="records of epoch 7"):
            store.begin_epoch(epoch)
    assert (store.log.end, store.log.epoch) == (end, 7)


def test_a_failed_epoch_record_leaves_the_epoch_as_it_was() -> None:
    disk = SimulatedDisk()
    store = three_epochs(disk)
    disk.fail("pwrite")
    with pytest.raises(OSError, match="error"):
        store.begin_epoch(8)
    disk.heal()
    fill(store, 1)
    assert epochs_of(store)[-1][1] == store.log.last_epoch == 7


def test_the_next_process_continues_in_the_epoch_of_the_last_record() -> None:
    disk = SimulatedDisk()
    three_epochs(disk).close()
    store = open_store(disk)
    assert store.log.epoch == store.log.last_epoch == store.state.log_epoch == 7
    fill(store, 1)
    assert epochs_of(store)[-1][1] == 7


def test_epochs_are_read_from_the_log_if_the_whole_chain_is_lost() -> None:
    disk = SimulatedDisk()
    store = three_epochs(disk)
    snapshot = max(store.log.marks.snapshots)
    store.abandon()
    lose_chain(disk)

    again = open_store(disk)
    # Recovery reads from the newest snapshot on: units before that place have the epoch 0.
    assert epochs_of(again) == [(0, 0), (snapshot, 7)]
    again.close()


def test_a_snapshot_names_the_epoch_of_the_records_after_it() -> None:
    disk = SimulatedDisk()
    store = open_store(disk)
    store.topics.create("t", 1, [0])
    store.begin_epoch(5)
    fill(store, 40)
    confirm(store)
    store.abandon()
    lose_chain(disk)
    # No EPOCH record is in the files that recovery reads.
    again = open_store(disk)
    assert (again.log.last_epoch, again.state.log_epoch) == (5, 5)


def test_epochs_survive_every_power_loss_that_keeps_their_records() -> None:
    disk = SimulatedDisk()
    store = open_store(disk)
    store.topics.create("t", 1, [0])
    fill(store, 4)
    begun = store.begin_epoch(7).physical_offset
    fill(store, 2)
    store.log.sync()
    # The chain is not synced: a power loss takes any part of it.
    _, lost = last_states(disk, 64, 0)
    assert len(lost) > 10
    for image in lost:
        again = open_store(image)
        assert epochs_of(again) == [(0, 0), (begun, 7)]
        assert again.log.last_epoch == 7
        again.abandon()


def test_the_unit_in_which_a_log_is_cut_keeps_its_epoch() -> None:
    disk = SimulatedDisk()
    store = open_store(disk)
    store.topics.create("t", 1, [0])
    store.begin_epoch(3)
    start = store.log.end
    store.put(request([b"x" * 500] * 20))
    (unit,) = store.log.chain.units(start, store.log.end)
    store.log.truncate(start + 10)
    assert epochs_of(store)[-1][1] == store.log.epoch == 3
    assert unit.epoch == 3


def test_a_cut_before_an_epoch_record_ends_that_epoch() -> None:
    store = open_store(SimulatedDisk())
    store.topics.create("t", 1, [0])
    store.begin_epoch(3)
    at = store.log.end
    store.begin_epoch(4)
    store.log.truncate(at)
    assert store.log.epoch == store.log.last_epoch == 3


def unit_of(store: MessageStore, start: int, end: int, previous: int) -> ChainUnit:
    """A unit of the bytes [start, end), as a leader makes it that has lost its chain."""
    crc = crc32c(store.log.reads.raw(start, end))
    return ChainUnit(start, end, store.log.last_epoch, crc, previous)


def test_a_cut_below_an_adopted_range_leaves_each_byte_its_epoch() -> None:
    leader = open_store(SimulatedDisk())
    follower = MessageStore.open(
        ROOT, config=CONFIG, files=SimulatedDisk(), clock=ManualClock(), follows=True
    )
    assert follower.followed is not None
    log = leader.log

    # Units of several records, of which each but the first begins an epoch.
    units: list[ChainUnit] = []
    for epoch in (1, 2, 3):
        start = log.end
        leader.begin_epoch(epoch)
        if epoch == 1:
            leader.topics.create("t", 1, [0])
            start = 0
        fill(leader, 1)
        middle = log.end
        fill(leader, 1)
        units.append(unit_of(leader, start, log.end, units[-1].value if units else 0))
    follower.followed.append_units(units[:2], memoryview(log.reads.raw(0, units[1].end)))
    third = units[2]
    data = memoryview(log.reads.raw(third.start, third.end))
    follower.followed.append_units([third], data)

    # Another leader has the bytes of the last epoch in smaller units.
    first = unit_of(leader, third.start, middle, third.previous)
    second = unit_of(leader, middle, third.end, first.value)
    follower.followed.adopt_units([first, second], data)
    begun = units[1].start
    cut = next(
        int(at) for at in log.reads.walk(begun, units[1].end).walk.positions.tolist() if at > begun
    )
    follower.followed.truncate(cut)
    assert epochs_of(follower) == [(0, 1), (begun, 2)]
    assert follower.log.last_epoch == 2


def test_an_adoption_that_fails_leaves_the_log_as_recent_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = MessageStore.open(ROOT, config=CONFIG, files=SimulatedDisk(), clock=ManualClock())
    store.begin_epoch(1)
    store.topics.create("t", 1, [0])
    middle = store.log.end
    store.begin_epoch(2)
    fill(store, 1)
    log = store.log
    whole = unit_of(store, 0, middle, 0)

    def fail(units: object) -> None:
        raise OSError(errno.EIO, "no disk")

    data = memoryview(log.reads.raw(0, middle))
    with monkeypatch.context() as patched:
        patched.setattr(log.chain, "append", fail)
        with pytest.raises(OSError, match="no disk"):
            log.adopt_units([whole], data)
    assert log.chain.end < log.end
    assert log.last_epoch == 2
    log.adopt_units([whole], data)
    assert log.chain.end == log.end
    assert log.last_epoch == 2


def test_a_unit_that_begins_before_the_walk_keeps_its_epoch_when_its_end_is_lost() -> None:
    config = replace(CONFIG, snapshot_interval_bytes=3000)
    disk = SimulatedDisk()

    def lead(files: SimulatedDisk) -> MessageStore:
        store = MessageStore.open(ROOT, config=config, files=files, clock=ManualClock())
        store.begin_epoch(1)
        store.topics.create("t", 1, [0])
        store.begin_epoch(2)
        fill(store, 7)
        return store

    # Both have the same bytes, of which a power loss took the last ones from the first replica.
    first, second = lead(disk), lead(SimulatedDisk())
    (_, begun) = [start for start, epoch in epochs_of(first) if epoch]
    middle = first.log.end
    assert begun < max(first.log.marks.snapshots) < middle
    fill(second, 2)
    confirm(first)
    first.sync_queues()

    # The second one has lost its chain. It makes one unit of bytes that are on the disk and of later ones.
    before = first.log.chain.value_at(begun)
    assert before is not None
    wide = unit_of(second, begun, second.log.end, before)
    first.follow()
    assert first.followed is not None
    first.followed.adopt_units([wide], memoryview(second.log.reads.raw(begun, wide.end)))
    first.log.chain.sync()

    _, lost = last_states(disk, 64, 0)
    made_again = 0
    for image in lost:
        again = MessageStore.open(
            ROOT, config=config, files=image, clock=ManualClock(), follows=True
        )
        recovered = again.log.recovered
        assert recovered is not None
        assert middle <= again.log.end
        assert [epoch for _, epoch in epochs_of(again)] == [0, 1, 2]
        assert epochs_of(again)[-1][0] == begun
        made_again += recovered.begin > begun and recovered.proven_end == begun
        again.abandon()
    assert made_again


def test_a_rebuilt_chain_has_the_epoch_of_every_record(tmp_path: Path) -> None:
    store = MessageStore.open(tmp_path, config=CONFIG, clock=ManualClock())
    store.topics.create("t", 1, [0])
    fill(store, 3)
    store.begin_epoch(2)
    fill(store, 20)
    store.begin_epoch(3)
    confirm(store)
    known = epochs_of(store)
    store.close()

    for path in (tmp_path / "raymq" / "chain").iterdir():
        path.write_bytes(b"rotten" * 20)
    assert verify(tmp_path)
    Repair(tmp_path).run()
    assert verify(tmp_path) == []
    again = MessageStore.open(tmp_path, config=CONFIG, clock=ManualClock())
    assert epochs_of(again) == known
    again.close()


def test_starts_of_epochs_are_found_by_offset() -> None:
    starts = EpochStarts()
    for offset, epoch in [(10, 1), (30, 4), (40, 4), (50, 2), (90, 9)]:
        starts.note(offset, epoch)
    assert [starts.epoch_at(offset) for offset in (0, 10, 29, 30, 89, 90)] == [0, 1, 1, 4, 4, 9]
    assert [starts.next_start(offset) for offset in (0, 10, 30, 90)] == [10, 30, 90, None]
    starts.truncate(30)
    assert (starts.epoch_at(99), starts.next_start(10)) == (1, None)


def test_starts_of_epochs_may_be_noted_in_any_order() -> None:
    noted = [(10, 1), (20, 1), (30, 4), (40, 4), (50, 7)]
    for order in itertools.permutations(noted):
        starts = EpochStarts()
        for offset, epoch in order:
            starts.note(offset, epoch)
        assert [starts.epoch_at(offset) for offset in (9, 10, 29, 30, 49, 50)] == [0, 1, 1, 4, 4, 7]
        assert [starts.next_start(offset) for offset in (0, 10, 30, 50)] == [10, 30, 50, None]
        starts.truncate(45)
        assert (starts.epoch_at(99), starts.next_start(10)) == (4, 30)


def test_epochs_never_fall_along_the_log() -> None:
    starts = EpochStarts()
    starts.note(30, 4)
    # Units that were made again before their epoch was known have a lower one, or 0.
    for offset, epoch in [(40, 2), (30, 3), (10, 0), (50, 0)]:
        starts.note(offset, epoch)
    assert [starts.epoch_at(offset) for offset in (10, 30, 60)] == [0, 4, 4]
    assert starts.next_start(0) == 30
    starts.note(20, 5)
    assert [starts.epoch_at(offset) for offset in (19, 20, 30)] == [0, 5, 5]
    assert starts.next_start(20) is None
