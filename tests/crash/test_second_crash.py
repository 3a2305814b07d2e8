"""Two faults in a row: a crash during the recovery from a crash, a power loss after a failed sync."""

from __future__ import annotations

import pytest

from raymq.store.base.errors import Unavailable
from raymq.store.base.failpoints import FailPointReached, failpoint
from raymq.store.log.control_files.marks import read_marks
from raymq.store.log.control_files.meta import read_meta
from raymq.store.log.recovery.snapshot_head import read_head, snapshot_starts
from raymq.store.records import record
from raymq.store.tools.inspect import check as inspect_store
from tests.support.batches import request
from tests.support.confirming import confirm, dispatch_all
from tests.support.crash_check import Checker, check_snapshots, states
from tests.support.crash_states import disk_of, kill_states, last_states
from tests.support.crash_traces import CONFIG, ROOT, SEED, Promise, Trace, open_store
from tests.support.crash_workloads import make_trace
from tests.support.simulated_disk import SimulatedDisk

SIZE = CONFIG.segment_size_bytes


def test_a_kill_during_recovery_from_a_power_loss_leaves_no_hole_in_a_consume_queue() -> None:
    disk = SimulatedDisk(record=False)
    store = open_store(disk)
    store.topics.create("t", 2, [0])
    for queue in (0, 1, 0):
        store.put(request([b"body"], queue=queue))
    confirm(store)

    tree = disk.tree()
    store.abandon()
    # Of the unsynced consume queues only the units of queue 0 reached the disk.
    lost = {path: bytes(len(data)) for path, data in tree.items() if "/t/1/" in path}
    assert len(lost) == 1

    recovering = disk_of({**tree, **lost}, boot=1).recording()
    open_store(recovering)

    killed = list(kill_states(recovering))
    assert len(killed) >= 5
    for image in killed:
        again = open_store(image)
        again.log.note_confirmed(again.log.end)
        dispatch_all(again)
        assert again.queue_range("t", 0) == (0, 2)
        assert again.queue_range("t", 1) == (0, 1), f"killed at {image.crashed_at} of recovery"


def test_consume_queues_whose_sync_failed_are_written_again_at_the_next_start() -> None:
    """The kernel calls their pages clean: no later sync would bring them to the disk."""
    disk = SimulatedDisk()
    store = open_store(disk)
    store.topics.create("t", 2, [0])
    for queue in (0, 0, 1):
        store.put(request([b"body"], queue=queue))
    confirm(store)

    disk.fail("sync_data", at=2)
    with pytest.raises(OSError, match="error"):
        store.sync_queues()
    with pytest.raises(Unavailable):
        store.sync_queues()
    disk.heal()

    # The process ends. The machine runs on, so the page cache stays.
    store.abandon()
    store = open_store(disk)
    dispatch_all(store)
    store.sync_queues()

    _, lost = last_states(disk, 64, SEED)
    assert len(lost) > 1
    for image in lost:
        again = open_store(image)
        again.log.note_confirmed(again.log.end)
        dispatch_all(again)
        assert again.queue_range("t", 0) == (0, 2)
        assert again.queue_range("t", 1) == (0, 1)


def break_off_a_snapshot() -> Trace:
    """A store whose process ended after the first part of the snapshot that the second segment begins with."""
    trace = Trace(512)
    trace.begin_with_topics()
    trace.open()
    trace.ack()

    def stop() -> None:
        if trace.store.log.end >= SIZE:
            raise FailPointReached

    def fill() -> None:
        for turn in range(20):
            trace.put(turn % 2, 1, 1300, producer_id=70)

    with failpoint("log.after_store", stop), pytest.raises(FailPointReached):
        fill()
    trace.store.log.close(clean=False)
    trace.open()
    trace.ack()
    trace.store.sync_queues()

    return trace


def lose_power_within_a_snapshot(trace: Trace, parts: int) -> SimulatedDisk:
    """Put, and lose power after the write of so many parts. All writes before reached the disk.

    The last part has neither its chain unit nor its mark.
    """
    disk = trace.disk
    begun = len(disk.snapshot())
    trace.put(0, 1, 50)

    segment = disk.number_of(f"/s/commitlog/{SIZE:020d}")
    writes = [
        at
        for at, op in enumerate(disk.snapshot(), start=1)
        if at > begun and op.kind == "write" and op.node == segment
    ]
    # Of the disks at this place the first ones hold a part of the write, the last one holds all of it.
    *_, written = (image for image in kill_states(disk) if image.crashed_at == writes[parts - 1])
    trace.store.abandon()

    lost = disk_of(written.tree(), boot=disk.boot + 1)
    lost.notes = (Promise(trace.acked, trace.acked),)
    return lost


def test_a_segment_full_of_broken_off_snapshots_is_ended() -> None:
    """Three crashes in a row, each within a snapshot in the same segment. The fourth snapshot finds no room there."""
    trace = break_off_a_snapshot()
    assert trace.acked.ends == ((0, 3), (1, 2))

    for parts, end in ((4, 23_374), (2, 27_687)):
        lost = lose_power_within_a_snapshot(trace, parts)
        trace.begin_with_crash(lost, power=True)
        trace.go_on()
        assert trace.store.log.end == end
        assert read_head(trace.store.log.segments.files[1]) == (None, end)

    trace.store.abandon()
    disk = lost.recording()
    Checker(trace).check(lost, power=True)

    # The state comes from the snapshot of the first segment, and all that was acknowledged is there.
    store = open_store(disk)
    assert [*snapshot_starts(store.log, store.log.end)] == [0]
    topics = dict(store.state.topics)
    ends = dict(store.state.next_offsets)

    # The next put ends the full segment, and begins a newer one with a whole snapshot.
    assert store.put(request([b"next"])).first_offset == 3
    ended, newest = store.log.segments.files[1:]
    walk = record.walk(ended.read_view(), ended.start, stop=SIZE)
    assert (walk.reason, walk.end) == (record.WalkStop.BLANK, 27_687)
    assert read_head(newest)[0] is not None
    assert [*snapshot_starts(store.log, store.log.end)] == [2 * SIZE, 0]

    confirm(store)
    store.abandon()
    again = open_store(disk_of(disk.tree(), boot=disk.boot + 1))
    assert again.state.topics == topics
    assert again.state.next_offsets["t", 0] == ends["t", 0] + 1 == 4
    assert again.state.next_offsets["t", 1] == ends["t", 1]

    for made in trace.acked.batches:
        values = request(
            [*made.bodies],
            queue=made.queue,
            tag="x",
            producer_id=made.producer_id,
            sequence=made.sequence,
        )
        assert again.put(values).duplicates == 1


def test_the_check_refuses_any_other_segment_without_a_snapshot() -> None:
    store = break_off_a_snapshot().store
    store.log.seal(0)
    store.put(request([b"next"]))
    with pytest.raises(AssertionError, match="had room"):
        check_snapshots(store)

    store = break_off_a_snapshot().store
    # The put path believes that the segment has its snapshot.
    store.snapshots.segment = SIZE
    store.put(request([b"next"]))
    with pytest.raises(AssertionError, match="newest segment"):
        check_snapshots(store)

    store.log.seal(0)
    store.put(request([b"next"]))
    with pytest.raises(AssertionError, match="record follows"):
        check_snapshots(store)


def broken_off_first_starts(trace: Trace) -> list[SimulatedDisk]:
    """Disks that crashes leave of the first start of a store that RocketMQ wrote. `verify` finds no fault in them.

    Returns: those with marks.
    """
    found = []

    for power, image in states(trace, 2):
        if read_meta(ROOT / "raymq/meta", files=image).get("store_id") is None:
            faults = inspect_store(ROOT, image).faults
            assert faults == [], f"power loss: {power}, at {image.crashed_at}"
            if read_marks(ROOT / "raymq/marks", files=image).appended_end:
                found.append(image)

    return found


def test_verify_calls_nothing_a_fault_that_a_broken_off_first_start_leaves() -> None:
    trace = make_trace("foreign", 512)
    once = broken_off_first_starts(trace)

    trace.begin_with_crash(once[0], power=True)
    trace.go_on()

    # The second start empties the consume queues, which no mark proves.
    assert len(once) > 1 < len(broken_off_first_starts(trace))
