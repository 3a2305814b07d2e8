"""Snapshots of several records, and batches of several units that end in the middle."""

from __future__ import annotations

import errno
import json
import struct
from pathlib import Path

import pytest

from raymq.store.base.errors import DeliveryUnknown, StorageFull
from raymq.store.config.store_config import StoreConfig
from raymq.store.engine.message_store import MessageStore
from raymq.store.log.recovery.snapshot_head import read_head
from raymq.store.records import record
from raymq.store.state.shard_state import SNAPSHOT, TOPIC, ShardState, deleted_topic_body
from raymq.store.tools.inspect import verify
from tests.support.batches import request
from tests.support.clock import ManualClock
from tests.support.confirming import confirm
from tests.support.crash_states import disk_of
from tests.support.producer_tables import known
from tests.support.simulated_disk import SimulatedDisk

ROOT = Path("/s")
CONFIG = StoreConfig(segment_size_bytes=16 * 1024, consume_queue_file_size_bytes=400)


def open_store(disk: SimulatedDisk) -> MessageStore:
    return MessageStore.open(ROOT, config=CONFIG, files=disk, clock=ManualClock())


def full_state() -> ShardState:
    state = ShardState()
    for number in range(10):
        state.apply_state_record(TOPIC, b'{"name":"t%d","queues":4,"shards":[0,1]}' % number)
        state.apply_rows(
            f"t{number}", 1, 5, 3, 900 + number, 77, producer_id=number, epoch=2, first_sequence=6
        )
        body = b'{"group":"g","topic":"t%d","offsets":{"1":8}}' % number
        state.apply_state_record("OFFSETS", body)
    state.apply_state_record("EPOCH", b'{"epoch":4}')
    # One topic was deleted, another one deleted and made again.
    for name in ("t8", "t9"):
        state.apply_state_record(TOPIC, deleted_topic_body(name, 1))
    state.apply_state_record(TOPIC, b'{"name":"t9","queues":2,"shards":[0]}')
    return state


def reported(state: ShardState) -> dict[str, object]:
    facts = {name: value for name, value in vars(state).items() if not name.startswith("_")}
    return {**facts, "producers": known(state.producers)}


def test_a_deleted_topic_takes_its_offsets_with_it_and_its_name_keeps_the_places() -> None:
    state = full_state()
    assert "t8" not in state.topics
    assert [key for key in state.offsets if key[1] in ("t8", "t9")] == []
    assert [state.generation(name) for name in ("t7", "t8", "t9")] == [0, 1, 1]
    assert [state.first_offset(name, 1) for name in ("t7", "t8", "t9")] == [0, 8, 8]
    assert state.next_offsets["t9", 1] == 8
    # Repeated, or late: the topic that was made since stays.
    state.apply_state_record(TOPIC, deleted_topic_body("t9", 1))
    assert "t9" in state.topics
    state.apply_state_record(TOPIC, deleted_topic_body("t9", 2))
    assert "t9" not in state.topics


def test_a_topic_that_is_made_again_begins_after_what_came_while_no_topic_had_its_name() -> None:
    state = full_state()
    state.apply_rows("t8", 1, 8, 2, 1_000, 78)
    state.apply_rows("t8", 3, 0, 1, 1_100, 79)
    state.apply_state_record(TOPIC, b'{"name":"t8","queues":2,"shards":[0]}')
    assert [state.first_offset("t8", queue_id) for queue_id in range(4)] == [0, 10, 0, 1]
    assert state.generation("t8") == 1

    # Another record of the topic, as of more queues, leaves its messages alone. So does a snapshot.
    state.apply_rows("t8", 1, 10, 1, 1_200, 80)
    state.apply_state_record(TOPIC, b'{"name":"t8","queues":4,"shards":[0]}')
    again = ShardState()
    for part in state.snapshot(200):
        again.apply_state_record(SNAPSHOT, part)
    for each in (state, again):
        assert each.first_offset("t8", 1) == 10


def test_a_state_comes_back_from_the_parts_of_its_snapshot() -> None:
    state = full_state()
    parts = state.snapshot(200)
    assert len(parts) > 5
    again = ShardState()
    again.apply_state_record(TOPIC, b'{"name":"forgotten","queues":1,"shards":[0]}')
    for part in parts:
        again.apply_state_record(SNAPSHOT, part)
    assert reported(again) == reported(state)


def test_a_snapshot_without_one_of_its_parts_changes_nothing() -> None:
    parts = full_state().snapshot(200)
    for lost in range(len(parts)):
        state = ShardState()
        state.apply_state_record(TOPIC, b'{"name":"kept","queues":1,"shards":[0]}')
        for number, part in enumerate(parts):
            if number != lost:
                state.apply_state_record(SNAPSHOT, part)
        assert list(state.topics) == ["kept"]
        for part in parts:
            state.apply_state_record(SNAPSHOT, part)
        assert reported(state) == reported(full_state())


def test_the_internal_queue_stays_dense_when_its_own_record_meets_a_roll() -> None:
    store = open_store(SimulatedDisk())
    store.topics.create("t", 1, [0])
    for number in range(200):
        store.commit_offsets("g" * 100, "t", {0: number})
    confirm(store)
    assert len(store.log.segments.files) > 3
    offset = 0
    while True:
        part = store.fetch("rmq_sys_raymq", 0, offset, max_bytes=1 << 20, max_records=1000)
        if part.records is None or not len(part.records):
            break
        for raw in part.records.to_pylist():
            assert int.from_bytes(raw[20:28], "big") == offset
            offset += 1
    assert offset == store.state.next_offsets["rmq_sys_raymq", 0] > 200


@pytest.mark.parametrize("reboot", [False, True])
def test_a_state_too_large_for_a_file_comes_back_from_an_earlier_snapshot(reboot: bool) -> None:
    disk = SimulatedDisk()
    store = open_store(disk)
    names = [f"topic-{number:03d}-{'x' * 90}" for number in range(120)]
    for name in names:
        store.topics.create(name, 1, [0])
    store.topics.create("t", 1, [0])
    for number in range(60):
        store.put(request([b"%d" % number * 500], producer_id=3, sequence=number))
    confirm(store)
    store.sync_queues()
    store.log.close(clean=False)
    disk.boot += reboot
    again = open_store(disk)
    assert list(again.state.topics) == [*names, "t"]
    assert again.put(request([b"59" * 500], producer_id=3, sequence=59)).first_offset == 59


def test_a_snapshot_that_the_disk_refused_is_written_before_the_next_batch() -> None:
    disk = SimulatedDisk()
    store = open_store(disk)
    for number in range(40):
        store.topics.create(f"topic-{number:03d}-{'x' * 60}", 4, [0])
    store.topics.create("t", 1, [0])
    while store.log.room() > 2000:
        store.put(request([b"x" * 400]))
    end = store.state.next_offsets["t", 0]
    # Blank and its unit, one part and its unit, then no room for the second part.
    disk.fail("pwrite", at=5, error=errno.ENOSPC)
    with pytest.raises(StorageFull):
        store.put(request([b"y" * 2500]))
    segment = store.log.segments.files[1]
    assert store.log.end > segment.start
    assert read_head(segment) == (None, store.log.end)
    assert store.put(request([b"z"])).first_offset == end
    complete_at, parts_end = read_head(segment)
    assert complete_at == parts_end is not None
    assert not verify(ROOT, disk)


def test_a_snapshot_that_a_power_loss_damaged_is_cut_and_the_one_before_it_counts() -> None:
    """Its records pass the walk, but their chain unit differs: above the synced end that is a tear."""
    disk = SimulatedDisk(record=False)
    store = open_store(disk)
    for number in range(38):
        store.topics.create(f"topic-{number:03d}-{'x' * 60}", 4, [0])
    store.topics.create("t", 1, [0])
    topics = set(store.state.topics)
    while len(store.log.segments.files) < 2:
        confirm(store)
        store.put(request([b"x" * 900]))
    before = store.state.next_offsets["t", 0] - 1
    confirm(store)
    store.sync_queues()
    end = store.log.end
    tree = disk.tree()
    store.close()
    start = store.log.config.segment_size_bytes
    path = f"/s/commitlog/{start:020d}"
    log = bytearray(tree[path])
    second = int(record.walk(log, start, limit=1).sizes[0])
    # Its flag, which no CRC of the record's covers.
    log[second + 19] ^= 1
    synced = start + second
    marks = struct.pack("<4q", end, synced, synced, end).ljust(4096, b"\0")
    again = open_store(disk_of({**tree, path: bytes(log), "/s/raymq/marks": marks}, boot=1))
    assert again.log.end == synced
    assert set(again.state.topics) == topics
    assert again.put(request([b"next"])).first_offset == before > 0
    assert read_head(again.log.segments.files[1])[0] is not None


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
def test_a_batch_whose_later_unit_fails_says_what_is_stored_and_can_be_repeated(error: int) -> None:
    bodies = [b"%03d" % number * 300 for number in range(40)]
    stored = []
    for at in range(1, 40):
        disk = SimulatedDisk()
        store = open_store(disk)
        store.topics.create("t", 1, [0])
        confirm(store)
        end = store.log.end
        disk.fail("pwrite", at=at, error=error)
        unknown = refusal = None
        try:
            store.put(request([*bodies], producer_id=5))
        except DeliveryUnknown as told_so:
            unknown = told_so
        except (StorageFull, OSError) as told_so:
            refusal = told_so
        kept = 0 if unknown is None else unknown.append["count"]
        if unknown is not None:
            assert 0 < kept < len(bodies)
            assert unknown.append["first_offset"] == 0
            assert unknown.append["end_offset"] == store.log.end
        elif refusal is not None:
            assert ("t", 0) not in store.state.next_offsets
            assert store.log.end == end
        else:
            break
        stored.append(kept)
        again = store.put(request([*bodies], producer_id=5))
        assert (again.first_offset, again.duplicates, again.count) == (0, kept, len(bodies))
        confirm(store)
        assert store.queue_range("t", 0) == (0, len(bodies))
        assert verify(ROOT, disk) == []
    assert stored == sorted(stored)
    assert len(set(stored)) > 4


def test_rows_that_are_put_together_as_text_are_json_of_any_name():
    state = ShardState()
    for number, name in enumerate(('a"b\\', "ü", "plain")):
        state.apply_rows(
            name, number, 0, 5, 100, 1, producer_id=number, epoch=2, first_sequence=7 * number
        )
    parts = state.snapshot(100)
    assert len(parts) > 3
    for part in parts:
        text = part.partition(b"\n")[0]
        assert json.dumps(json.loads(text), separators=(",", ":")).encode() == text
    again = ShardState()
    for part in parts:
        again.apply_state_record(SNAPSHOT, part)
    assert again.next_offsets == state.next_offsets
    assert known(again.producers) == known(state.producers)
    assert again.snapshot(100) == parts
