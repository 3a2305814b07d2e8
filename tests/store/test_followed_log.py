"""A follower is a whole store: its state and its queues have what is confirmed, and no cut takes that back."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from pathlib import Path

import pytest

from raymq.store.base.checksum import crc32c
from raymq.store.base.errors import Bug, Corrupt, Rejected, StorageFull, Unavailable
from raymq.store.base.running_flags import FENCED
from raymq.store.config.store_config import StoreConfig
from raymq.store.engine.followed_log import FollowedLog
from raymq.store.engine.message_store import MessageStore
from raymq.store.engine.state_applier import COLUMNS
from raymq.store.log.chain import ChainUnit
from raymq.store.log.epochs import state_records
from raymq.store.log.recovery.snapshot_head import read_head, snapshot_starts
from raymq.store.put.inner_message import InnerMessage, ServiceProgress
from raymq.store.records import rows
from raymq.store.services.half_messages import HalfEnd, HalfMessages
from raymq.store.state.shard_state import (
    INTERNAL_TOPIC,
    NO_BUNDLE,
    PROGRESS,
    BundleRange,
    bundle_range,
)
from tests.support.batches import request
from tests.support.clock import ManualClock
from tests.support.confirming import confirm
from tests.support.crash_states import last_states
from tests.support.simulated_disk import SimulatedDisk

CONFIG = StoreConfig(segment_size_bytes=32 * 1024, consume_queue_file_size_bytes=2000)
ROOT = Path("/s")


def open_leader() -> MessageStore:
    store = MessageStore.open(ROOT, config=CONFIG, files=SimulatedDisk(), clock=ManualClock())
    store.begin_epoch(1)
    store.topics.create("t", 2, [0])
    return store


def open_follower(disk: SimulatedDisk) -> MessageStore:
    return MessageStore.open(ROOT, config=CONFIG, files=disk, clock=ManualClock(), follows=True)


def followed(store: MessageStore) -> FollowedLog:
    assert store.followed is not None
    return store.followed


def send(leader: MessageStore, follower: MessageStore) -> int:
    """Bring all that the follower lacks. Returns: the end."""
    end = follower.log.end
    cut = leader.log.chain.unit_at(end)
    units = leader.log.chain.units(end if cut is None else cut.start, leader.log.end)
    for unit in units:
        data = memoryview(leader.log.reads.raw(unit.start, unit.end))
        if unit.start < end:
            followed(follower).adopt_units([unit], data)
        else:
            followed(follower).append_units([unit], data)
    return follower.log.end


def confirm_upto(follower: MessageStore, end: int) -> None:
    follower.log.sync()
    follower.log.note_confirmed(end)
    while follower.dispatched < end:
        before = follower.dispatched
        assert follower.dispatch(end) > before


def put_some(leader: MessageStore, count: int = 3, *, first_sequence: int = 0) -> None:
    """Batches of a producer, offsets of a group, a topic, and a bundle of moved messages."""
    for number in range(count):
        rows = [b"%d" % number] * 5
        sequence = first_sequence + 5 * (number // 2)
        leader.put(request(rows, queue=number % 2, producer_id=9, sequence=sequence))
    leader.commit_offsets("g", "t", {0: count})
    leader.topics.create(f"topic-{leader.log.end}", 1, [0])
    leader.put_inner(
        [InnerMessage("t", 0, b"moved")], progress=ServiceProgress("levels", {"1": leader.log.end})
    )


def state_of(store: MessageStore) -> list[bytes]:
    return store.state.snapshot(1 << 20)


def bodies(store: MessageStore) -> dict[tuple[str, int], list[bytes]]:
    found = {}
    for topic, queue in store.queues():
        low, high = store.queue_range(topic, queue)
        part = store.fetch(topic, queue, low, max_bytes=1 << 24, max_records=10_000)
        assert part.records is not None or low == high
        found[topic, queue] = [] if part.records is None else part.records.to_pylist()
    return found


def test_state_queues_and_log_are_the_leaders_once_confirmed() -> None:
    leader, follower = open_leader(), open_follower(SimulatedDisk())
    for turn in range(8):
        put_some(leader, 12, first_sequence=30 * turn)
        confirm_upto(follower, send(leader, follower))
    confirm(leader)
    assert len(leader.log.segments.files) > 1
    assert state_of(follower) == state_of(leader)
    assert bodies(follower) == bodies(leader)
    assert follower.log.last_epoch == 1


def test_a_follower_that_takes_over_has_the_half_messages_with_their_ends_and_counts() -> None:
    leader, follower = open_leader(), open_follower(SimulatedDisk())
    halves = HalfMessages(leader)
    halves.load()
    names = ("committed", "asked", "late")
    offsets = [
        halves.prepare(InnerMessage("t", 0, name.encode(), {"UNIQ_KEY": name}), "g").offset
        for name in names
    ]
    confirm(leader)
    leader.clock.sleep_ms(6_000)
    assert len(halves.hand_out(["g"], 3).halves) == 3
    halves.end(offsets[0], "g", HalfEnd.COMMIT)
    end = send(leader, follower)
    halves.end(offsets[2], "g", HalfEnd.COMMIT)
    confirm_upto(follower, end)
    follower.lead(2)
    confirm(follower)

    halves = HalfMessages(follower)
    halves.load()
    assert halves.open_count == 2
    assert halves.prepare(InnerMessage("t", 0, b"", {"UNIQ_KEY": "asked"}), "g").is_repeated
    follower.clock.sleep_ms(36_000)
    assert [half.checks for half in halves.hand_out(["g"], 3).halves] == [2, 2]
    assert halves.end(offsets[0], "g", HalfEnd.COMMIT).is_repeated
    with pytest.raises(Rejected, match="resolved as COMMIT"):
        halves.end(offsets[0], "g", HalfEnd.ROLLBACK)
    # Its commit was lost with the leader before, and was not answered.
    halves.end(offsets[2], "g", HalfEnd.ROLLBACK)
    confirm(follower)
    (record,) = bodies(follower)["t", 0]
    assert b"committed" in record


def test_nothing_is_visible_before_it_is_confirmed() -> None:
    leader, follower = open_leader(), open_follower(SimulatedDisk())
    confirm_upto(follower, send(leader, follower))
    before, seen = state_of(follower), bodies(follower)
    confirmed = leader.log.end
    put_some(leader)
    send(leader, follower)
    follower.dispatch(follower.log.confirmed)
    assert (state_of(follower), bodies(follower)) == (before, seen)
    followed(follower).truncate(confirmed)
    assert state_of(follower) == before
    put_some(leader)
    confirm_upto(follower, send(leader, follower))
    assert state_of(follower) == state_of(leader)


def test_a_cut_after_a_restart_takes_the_cut_records_out_of_the_state() -> None:
    disk = SimulatedDisk()
    leader, follower = open_leader(), open_follower(disk)
    put_some(leader, 30)
    confirmed = send(leader, follower)
    confirm_upto(follower, confirmed)
    before = state_of(follower)
    put_some(leader, 3, first_sequence=75)
    send(leader, follower)
    follower.abandon()

    again = open_follower(disk)
    # Recovery applies the whole log.
    assert state_of(again) == state_of(leader)
    followed(again).truncate(confirmed)
    assert state_of(again) == before
    confirm_upto(again, send(leader, again))
    assert state_of(again) == state_of(leader)
    confirm(leader)
    assert bodies(again) == bodies(leader)


def places_of_cuts(leader: MessageStore, begin: int) -> list[tuple[int, int]]:
    """Each record from `begin` on: an offset inside of it, and where it or its bundle begins."""
    found, bundle = [], NO_BUNDLE
    walk = leader.log.reads.walk(begin, leader.log.end)
    for run in rows.runs(*walk[:2], walk.walk.positions, walk.walk.sizes, columns=COLUMNS):
        if run.topic == INTERNAL_TOPIC:
            for kind, body, at in state_records(run):
                bundle = bundle_range(at, body) if kind == PROGRESS else bundle
        for at in run.positions.tolist():
            found.append((at + 9, bundle.start if bundle.start <= at < bundle.end else at))
    return found


def test_a_cut_in_a_record_or_a_bundle_is_made_at_its_start() -> None:
    disk = SimulatedDisk()
    leader, follower = open_leader(), open_follower(disk)
    put_some(leader, 4)
    confirmed = send(leader, follower)
    confirm_upto(follower, confirmed)
    put_some(leader, 2, first_sequence=10)
    places = places_of_cuts(leader, confirmed)
    assert len({start for _, start in places}) < len(places)
    for offset, start in places:
        send(leader, follower)
        follower.log.sync()
        followed(follower).truncate(offset)
        assert follower.log.end == start
        # A kill before the leader's bytes are written finds whole records.
        follower.abandon()
        follower = open_follower(disk)
        assert follower.log.end == start
    confirm_upto(follower, send(leader, follower))
    confirm(leader)
    assert state_of(follower) == state_of(leader)
    assert bodies(follower) == bodies(leader)


def test_a_cut_before_the_bytes_of_an_adoption_leaves_whole_records() -> None:
    disk = SimulatedDisk()
    old, new, third = open_leader(), open_follower(disk), open_follower(SimulatedDisk())
    put_some(old, 4)
    for store in (new, third):
        confirm_upto(store, send(old, store))
    confirmed = new.log.end
    put_some(old, 2, first_sequence=10)
    send(old, third)
    new.lead(2)
    put_some(new, 2, first_sequence=10)

    # The first bytes of both records are the same: size, magic and more.
    units = new.log.chain.units(confirmed, new.log.end)
    data = memoryview(new.log.reads.raw(confirmed, units[-1].end))
    differs = third.log.same_until(units, data)
    assert confirmed < differs < units[0].end
    followed(third).truncate(differs)
    assert third.log.end == confirmed
    followed(third).adopt_units(units, data)
    confirm_upto(third, third.log.end)
    confirm(new)
    assert state_of(third) == state_of(new)
    assert bodies(third) == bodies(new)


def half_bundle(leader: MessageStore, follower: MessageStore) -> tuple[BundleRange, int]:
    """Let a leader whose units end inside of a bundle send the first one.

    Returns: the bundle, and the follower's end.
    """
    put_some(leader, 4)
    send(leader, follower)
    start = leader.log.end
    appended = leader.put_inner(
        [InnerMessage("t", 0, b"of a half")] * 3, progress=ServiceProgress("levels", {"2": 77})
    )
    end = appended[2].physical_offset
    data = leader.log.reads.raw(start, end)
    unit = ChainUnit(start, end, 1, crc32c(data), leader.log.chain.units(start, end)[0].previous)
    followed(follower).append_units([unit], memoryview(data))
    follower.log.sync()
    return BundleRange(start, leader.log.end), end


@pytest.mark.parametrize("reboots", [0, 1])
def test_a_start_keeps_half_a_bundle_that_a_follower_acknowledged(reboots: int) -> None:
    disk = SimulatedDisk()
    leader, follower = open_leader(), open_follower(disk)
    _, end = half_bundle(leader, follower)
    follower.log.note_confirmed(end)
    follower.abandon()
    disk.boot += reboots

    again = open_follower(disk)
    assert (again.log.end, again.log.confirmed) == (end, end)
    confirm_upto(again, send(leader, again))
    confirm(leader)
    assert state_of(again) == state_of(leader)
    assert bodies(again) == bodies(leader)


@pytest.mark.parametrize("restarts", [False, True])
def test_a_take_over_drops_half_a_bundle(restarts: bool) -> None:
    disk = SimulatedDisk()
    leader, follower = open_leader(), open_follower(disk)
    confirm_upto(follower, send(leader, follower))
    bundle, end = half_bundle(leader, follower)
    if restarts:
        follower.abandon()
        follower = open_follower(disk)
        assert (follower.log.end, follower.state.progress["levels"]["2"]) == (end, 77)

    begun = follower.lead(2)
    assert begun.physical_offset == bundle.start
    assert list(follower.state.progress["levels"]) == ["1"]
    put_some(follower, 4, first_sequence=10)
    confirm(follower)
    assert follower.log.end > bundle.end
    read = [body for found in bodies(follower).values() for body in found]
    assert len(read) > 40
    assert not [body for body in read if b"of a half" in body]

    # No later start takes what follows for the rest of the bundle.
    known = state_of(follower)
    follower.abandon()
    again = open_follower(disk)
    assert state_of(again) == known


def test_half_a_bundle_that_is_confirmed_is_never_cut() -> None:
    leader, follower = open_leader(), open_follower(SimulatedDisk())
    _, end = half_bundle(leader, follower)
    confirm_upto(follower, end)
    with pytest.raises(Corrupt, match="below its confirmed end"):
        follower.lead(2)
    # It still follows a leader that has the rest.
    confirm_upto(follower, send(leader, follower))
    confirm(leader)
    assert state_of(follower) == state_of(leader)
    assert bodies(follower) == bodies(leader)


def test_a_damaged_record_that_was_not_applied_ends_a_take_over() -> None:
    disk = SimulatedDisk()
    leader, follower = open_leader(), open_follower(disk)
    confirm_upto(follower, send(leader, follower))
    at = put_some(leader, 4) or follower.log.end
    send(leader, follower)
    file = follower.log.segments.find(at)
    assert file is not None
    file.pwrite(b"\xff" * 8, at - file.start)
    with pytest.raises(Corrupt):
        follower.lead(2)
    assert follower.followed is not None


def test_units_that_leave_a_gap_are_not_adopted() -> None:
    leader, follower = open_leader(), open_follower(SimulatedDisk())
    end = send(leader, follower)
    put_some(leader)
    units = leader.log.chain.units(end, leader.log.end)[1:]
    data = memoryview(leader.log.reads.raw(units[0].start, units[-1].end))
    with pytest.raises(Rejected, match="does not continue the log"):
        followed(follower).adopt_units(units, data)
    assert follower.log.end == follower.log.chain.units(0, end)[-1].end == end


def test_a_cut_below_dispatched_records_is_refused() -> None:
    leader, follower = open_leader(), open_follower(SimulatedDisk())
    put_some(leader, 4)
    below = send(leader, follower)
    put_some(leader, 2, first_sequence=10)
    end = send(leader, follower)
    confirm_upto(follower, end)
    before, seen = state_of(follower), bodies(follower)
    # Marks that were made again do not have the confirmed end.
    follower.log.marks.lower(below)
    with pytest.raises(Bug, match="dispatches confirmed records only"):
        followed(follower).truncate(below)
    assert follower.log.end == end
    assert (state_of(follower), bodies(follower)) == (before, seen)


def test_a_restart_in_the_middle_of_unconfirmed_records_applies_none_twice() -> None:
    disk = SimulatedDisk()
    leader, follower = open_leader(), open_follower(disk)
    for turn in range(4):
        put_some(leader, 6, first_sequence=15 * turn)
        end = send(leader, follower)
        follower.abandon()
        follower = open_follower(disk)
        confirm_upto(follower, end)
        assert state_of(follower) == state_of(leader)


def test_a_dispatch_that_failed_applies_no_record_twice() -> None:
    disk = SimulatedDisk()
    leader, follower = open_leader(), open_follower(disk)
    put_some(leader, 12)
    end = send(leader, follower)
    follower.log.sync()
    follower.log.note_confirmed(end)
    disk.fail("pwrite", error=errno.ENOSPC)
    with pytest.raises(StorageFull):
        follower.dispatch(end)
    disk.heal()
    confirm_upto(follower, end)
    assert state_of(follower) == state_of(leader)


def test_a_follower_appends_nothing_of_its_own() -> None:
    follower = open_follower(SimulatedDisk())
    assert follower.log.end == 0
    follower.close()


def test_a_follower_stops_in_order_and_opens_as_a_leader() -> None:
    disk = SimulatedDisk()
    leader, follower = open_leader(), open_follower(disk)
    put_some(leader, 8)
    confirm_upto(follower, send(leader, follower))
    follower.close()
    store = MessageStore.open(ROOT, config=CONFIG, files=disk, clock=ManualClock())
    assert not store.log.crashed
    assert store.dispatched == store.log.end
    assert state_of(store) == state_of(leader)
    store.begin_epoch(2)
    put_some(store, 2, first_sequence=20)
    store.abandon()


def test_a_follower_that_takes_over_goes_on_where_the_leader_was() -> None:
    leader, follower = open_leader(), open_follower(SimulatedDisk())
    put_some(leader, 12)
    confirmed = send(leader, follower)
    confirm_upto(follower, confirmed)
    put_some(leader, 2, first_sequence=30)
    send(leader, follower)

    # The last records are in its log and in no table of it.
    follower.lead(2)
    assert follower.followed is None
    assert follower.log.last_epoch == 2
    again = follower.put(request([b"0"] * 5, producer_id=9, sequence=30))
    assert (again.duplicates, again.count) == (5, 5)
    put_some(follower, 2, first_sequence=35)
    confirm(follower)
    confirm(leader)
    known = bodies(leader)["t", 0]
    assert bodies(follower)["t", 0][: len(known)] == known


def test_a_leader_that_steps_down_loses_what_only_it_had() -> None:
    old, new = open_leader(), open_follower(SimulatedDisk())
    put_some(old, 12)
    confirmed = send(old, new)
    for store in (old, new):
        confirm_upto(store, confirmed)
    put_some(old, 4, first_sequence=30)

    new.lead(2)
    put_some(new, 6, first_sequence=30)
    old.follow()
    followed(old).truncate(confirmed)
    confirm_upto(old, send(new, old))
    confirm(new)
    assert state_of(old) == state_of(new)
    assert bodies(old) == bodies(new)


def test_a_take_over_that_failed_can_be_tried_again() -> None:
    disk = SimulatedDisk()
    leader, follower = open_leader(), open_follower(disk)
    put_some(leader, 12)
    confirm_upto(follower, send(leader, follower))
    put_some(leader, 2, first_sequence=30)
    send(leader, follower)
    disk.fail("pwrite", error=errno.ENOSPC)
    with pytest.raises(StorageFull):
        follower.lead(2)
    disk.heal()
    follower.lead(2)
    confirm(follower)
    assert follower.log.last_epoch == 2
    put_some(follower, 2, first_sequence=35)


def test_replicas_that_lead_in_turn_have_the_same_state_and_queues() -> None:
    disks = [SimulatedDisk() for _ in range(2)]
    first, second = open_leader(), open_follower(disks[1])
    sequence, epoch = 0, 1
    for turn in range(6):
        put_some(first, 8, first_sequence=sequence)
        sequence += 20
        end = send(first, second)
        for store in (first, second):
            confirm_upto(store, end)
        if turn % 2:
            # Records that only the old leader has.
            put_some(first, 2, first_sequence=sequence)
        epoch += 1
        second.lead(epoch)
        first.follow()
        followed(first).truncate(end)
        first, second = second, first
        confirm_upto(second, send(first, second))
        confirm(first)
        assert state_of(first) == state_of(second)
        assert bodies(first) == bodies(second)


def test_a_take_over_applies_records_of_several_files() -> None:
    leader, follower = open_leader(), open_follower(SimulatedDisk())
    confirm_upto(follower, send(leader, follower))
    before = len(leader.log.segments.files)
    for turn in range(16):
        put_some(leader, 12, first_sequence=30 * turn)
    send(leader, follower)
    assert len(follower.log.segments.files) > before + 1

    follower.lead(2)
    leader.begin_epoch(2)
    assert state_of(follower) == state_of(leader)
    confirm(follower)
    confirm(leader)
    assert bodies(follower) == bodies(leader)


def test_a_cut_makes_the_state_of_several_files_again() -> None:
    disk = SimulatedDisk()
    leader, follower = open_leader(), open_follower(disk)
    confirm_upto(follower, send(leader, follower))
    # The state outgrows a file, so that the next files begin without a snapshot of it.
    for number in range(300):
        leader.commit_offsets(f"group-{number}-{'x' * 40}", "t", {0: number})
    put_some(leader, 40)
    end, before = send(leader, follower), state_of(leader)
    newest = next(snapshot_starts(follower.log, end))
    assert len([file for file in follower.log.segments.files if file.start > newest]) > 1
    put_some(leader, 2, first_sequence=100)
    send(leader, follower)
    follower.abandon()

    again = open_follower(disk)
    followed(again).truncate(end)
    assert state_of(again) == before
    confirm_upto(again, send(leader, again))
    assert state_of(again) == state_of(leader)


def test_a_power_loss_in_an_adoption_takes_no_synced_bytes() -> None:
    disk = SimulatedDisk()
    leader, follower = open_leader(), open_follower(disk)
    put_some(leader, 4)
    synced = send(leader, follower)
    confirm_upto(follower, synced)
    follower.sync_queues()
    begin = next(u.start for u in leader.log.chain.units(0, synced) if u.end > synced // 2)
    put_some(leader, 4, first_sequence=10)

    # The leader has lost its chain: one unit has bytes that are on the disk and later ones.
    end, previous = leader.log.end, follower.log.chain.value_at(begin)
    assert begin < synced < end
    assert previous is not None
    data = leader.log.reads.raw(begin, end)
    unit = ChainUnit(begin, end, 1, crc32c(data), previous)
    followed(follower).adopt_units([unit], memoryview(data))
    # The kernel writes the chain before the log and the marks.
    follower.log.chain.sync()

    _, lost = last_states(disk, 128, 0)
    assert len(lost) > 20
    for image in lost:
        again = open_follower(image)
        assert again.log.end >= synced
        again.abandon()


def units_from(store: MessageStore, start: int) -> list[ChainUnit]:
    return store.log.chain.units(start, store.log.end)


def kinds_from(store: MessageStore, start: int) -> list[str]:
    """The kinds of the state records from `start` on, where a record or a blank begins."""
    found = []
    while start < store.log.end:
        view, base, walk = store.log.reads.walk(start, store.log.end)
        for run in rows.runs(view, base, walk.positions, walk.sizes, columns=COLUMNS):
            if run.topic == INTERNAL_TOPIC:
                found += [kind for kind, _, _ in state_records(run)]
        start = store.log.reads.next_walk_start(start, walk)
    return found


def put_config(disk: SimulatedDisk) -> None:
    """RocketMQ had the store open: it left a topic and offsets in its files."""
    disk.make_dirs(ROOT / "config")
    topics = {"topicConfigTable": {"new": {"readQueueNums": 3, "writeQueueNums": 3}}}
    offsets = {"offsetTable": {"new@g": {"0": 5}}}
    for name, table in [("topics.json", topics), ("consumerOffset.json", offsets)]:
        disk.write_file_atomic(ROOT / "config" / name, json.dumps(table).encode())


def check_lead(follower: MessageStore, epoch: int) -> list[str]:
    """Let a replica lead: all of its bytes are of its epoch, in the chain and in the records. Returns: their kinds."""
    before = follower.log.end
    follower.flags.set(FENCED)
    begun = follower.lead(epoch)
    follower.flags.clear(FENCED)
    assert {unit.epoch for unit in units_from(follower, before)} == {epoch}
    kinds = kinds_from(follower, before)
    assert kinds.index("EPOCH") == len(kinds_from(follower, before)) - len(
        kinds_from(follower, begun.physical_offset)
    )
    assert follower.state.log_epoch == follower.log.epoch == follower.log.last_epoch == epoch
    return kinds


def test_what_a_new_leader_imports_is_of_its_epoch() -> None:
    disk = SimulatedDisk()
    leader, follower = open_leader(), open_follower(disk)
    put_some(leader, 4)
    confirm_upto(follower, send(leader, follower))
    follower.abandon()
    put_config(disk)

    follower = open_follower(disk)
    kinds = check_lead(follower, 2)
    assert kinds == ["EPOCH", "TOPIC", "PROGRESS", "OFFSETS", "PROGRESS"]
    assert follower.state.topics["new"].queues == 3
    assert follower.state.offsets["g", "new"] == {0: 5}
    # Imported once.
    follower.abandon()
    again = open_follower(disk)
    assert check_lead(again, 3) == ["EPOCH"]


def test_an_import_that_failed_is_tried_again_in_the_same_epoch() -> None:
    disk = SimulatedDisk()
    leader, follower = open_leader(), open_follower(disk)
    put_some(leader, 4)
    confirm_upto(follower, send(leader, follower))
    put_config(disk)
    before = follower.log.end
    # The EPOCH record and its unit are two writes.
    disk.fail("pwrite", at=4, error=errno.ENOSPC)
    with pytest.raises(StorageFull):
        follower.lead(2)
    disk.heal()
    with pytest.raises(Unavailable):
        follower.commit_offsets("g", "t", {0: 1})
    assert follower.lead(2).physical_offset == before
    assert kinds_from(follower, before).count("EPOCH") == 1
    assert follower.state.topics["new"].queues == 3
    put_some(follower, 2, first_sequence=10)


def test_a_replica_whose_take_over_failed_follows_again() -> None:
    for at in range(1, 5):
        disk = SimulatedDisk()
        leader, follower, other = open_leader(), open_follower(disk), open_follower(SimulatedDisk())
        put_some(leader, 4)
        confirmed = send(leader, follower)
        send(leader, other)
        put_config(disk)
        disk.fail("pwrite", at=at, error=errno.ENOSPC)
        with pytest.raises(StorageFull):
            follower.lead(2)
        disk.heal()

        other.lead(3)
        put_some(other, 2, first_sequence=10)
        follower.follow()
        followed(follower).truncate(confirmed)
        confirm_upto(follower, send(other, follower))
        confirm(other)
        assert state_of(follower) == state_of(other)
        assert bodies(follower) == bodies(other)


def test_a_leader_of_an_empty_log_writes_all_of_it_in_its_epoch() -> None:
    follower = open_follower(SimulatedDisk())
    assert check_lead(follower, 4) == ["SNAPSHOT", "EPOCH"]
    follower.topics.create("t", 2, [0])
    put_some(follower)


def test_two_leaders_write_no_different_bytes_in_one_epoch() -> None:
    leader = open_leader()
    for turn in range(4):
        put_some(leader, 14, first_sequence=35 * turn)
    assert len(leader.log.segments.files) > 1
    seen = set()
    disk = SimulatedDisk()
    for unit in units_from(leader, 0):
        follower = open_follower(disk)
        data = memoryview(leader.log.reads.raw(unit.start, unit.end))
        followed(follower).append_units([unit], data)
        follower.abandon()
        # Another leader may begin wherever the log of the first one ends on a follower.
        image, _ = last_states(disk, 1, 0)
        new = open_follower(image)
        seen.add(check_lead(new, 2)[0])
        new.abandon()
        again = open_follower(image)
        assert again.state.log_epoch == 2
        again.abandon()
    assert seen == {"EPOCH", "SNAPSHOT"}


def fill_file(leader: MessageStore, room: int) -> None:
    """Put records until the file has only so much room."""
    start = leader.log.end
    leader.put(request([b"x" * 100]))
    other_bytes = leader.log.end - start - 100
    while leader.log.room() > 8000:
        leader.put(request([b"x" * 3000]))
    leader.put(request([b"x" * (leader.log.room() - room - other_bytes)]))
    assert leader.log.room() == room


def test_a_file_without_room_is_ended_in_the_new_epoch() -> None:
    disk = SimulatedDisk()
    leader, follower = open_leader(), open_follower(disk)
    fill_file(leader, 50)
    end = send(leader, follower)
    assert check_lead(follower, 2) == ["SNAPSHOT", "EPOCH"]
    blank = follower.log.chain.units(end, follower.log.end)[0]
    assert blank.end == CONFIG.segment_size_bytes
    follower.log.sync()
    follower.abandon()

    # The snapshot names the epoch, so that the records alone say it.
    for name in disk.list(ROOT / "raymq" / "chain"):
        disk.unlink(ROOT / "raymq" / "chain" / name)
    again = open_follower(disk)
    made = units_from(again, blank.end)
    assert made
    assert {unit.epoch for unit in made} == {2}


def test_an_epoch_begins_after_each_write_that_may_fail() -> None:
    for at in range(1, 8):
        disk = SimulatedDisk()
        leader, follower = open_leader(), open_follower(disk)
        fill_file(leader, 50)
        end = send(leader, follower)
        disk.fail("pwrite", at=at, error=errno.ENOSPC)
        failed = False
        try:
            follower.lead(2)
        except StorageFull:
            failed = True
            disk.heal()
            begun = follower.lead(2)
            assert begun.end_offset == follower.log.end
        assert failed == (at <= 6)
        disk.heal()
        assert {unit.epoch for unit in units_from(follower, end)} == {2}
        kinds = kinds_from(follower, end)
        assert (kinds.count("EPOCH"), kinds[-1]) == (1, "EPOCH")
        with pytest.raises(Rejected, match="records of epoch 2"):
            follower.lead(2)
        put_some(follower, 2)
        confirm(follower)


def test_a_snapshot_that_is_due_comes_after_the_epoch() -> None:
    config = replace(CONFIG, segment_size_bytes=256 * 1024, snapshot_interval_bytes=3000)
    leader = MessageStore.open(ROOT, config=config, files=SimulatedDisk(), clock=ManualClock())
    leader.begin_epoch(1)
    leader.topics.create("t", 2, [0])
    follower = MessageStore.open(
        ROOT, config=config, files=SimulatedDisk(), clock=ManualClock(), follows=True
    )
    while leader.log.end < 100_000:
        leader.put(request([b"x" * 20_000]))
    # The follower's log ends where the leader would have written a snapshot.
    newest = max(leader.log.marks.snapshots)
    assert newest > 0
    for unit in leader.log.chain.units(0, newest):
        data = memoryview(leader.log.reads.raw(unit.start, unit.end))
        followed(follower).append_units([unit], data)
    end = follower.log.end
    assert check_lead(follower, 2) == ["EPOCH"]
    follower.put(request([b"y"]))
    assert kinds_from(follower, end) == ["EPOCH", "SNAPSHOT"]


def test_a_file_whose_snapshot_was_cut_gets_a_new_one() -> None:
    store, other = open_leader(), open_follower(SimulatedDisk())
    sequence = 0
    while len(store.log.segments.files) < 2:
        confirmed = send(store, other)
        put_some(store, 2, first_sequence=sequence)
        sequence += 5
    begin = store.log.segments.files[-1].start
    assert confirmed < begin
    store.log.sync()
    store.follow()
    followed(store).truncate(begin)
    assert check_lead(store, 2)[-2:] == ["SNAPSHOT", "EPOCH"]
    (whole, _) = read_head(store.log.segments.files[-1])
    assert whole is not None


def test_units_that_do_not_continue_the_log_change_nothing() -> None:
    leader, follower = open_leader(), open_follower(SimulatedDisk())
    send(leader, follower)
    end = follower.log.end
    put_some(leader)
    (unit, *_) = leader.log.chain.units(end, leader.log.end)
    with pytest.raises(Corrupt):
        followed(follower).append_units([unit], memoryview(bytes(unit.end - unit.start)))
    assert follower.log.end == end


def test_a_sync_that_began_before_a_cut_proves_nothing_of_the_bytes_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leader, follower = open_leader(), open_follower(SimulatedDisk())
    confirm_upto(follower, send(leader, follower))
    confirmed = leader.log.end
    put_some(leader)
    end = send(leader, follower)
    segments = follower.log.segments
    sync_range = segments.sync_range

    def cut_and_grow_after_sync(start: int, stop: int) -> None:
        # The thread of the sync runs on only after the next leader has cut the log and sent other bytes.
        sync_range(start, stop)
        monkeypatch.setattr(segments, "sync_range", sync_range)
        followed(follower).truncate(confirmed)
        send(leader, follower)

    monkeypatch.setattr(segments, "sync_range", cut_and_grow_after_sync)
    assert follower.log.sync() == confirmed
    assert (follower.log.synced, follower.log.end) == (confirmed, end)
    assert follower.log.sync() == end
