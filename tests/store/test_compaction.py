"""Compaction topics: the latest message of each key, in RocketMQ's files, whatever dies when."""

from __future__ import annotations

import errno
import json
import struct
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from raymq.store.base import format as fmt
from raymq.store.base.errors import Corrupt, OffsetOutOfRange, Rejected, StorageFull, Unavailable
from raymq.store.base.failpoints import FailPointReached, failpoint
from raymq.store.base.files import Files, SyncFailed
from raymq.store.base.format import TIMER_TOPIC
from raymq.store.base.status import PutStatus
from raymq.store.compaction import compaction_store, swap
from raymq.store.compaction.compaction_store import CompactionService
from raymq.store.compaction.compactor import write_compacted
from raymq.store.compaction.units import file_sizes
from raymq.store.config.store_config import StoreConfig
from raymq.store.embedded.put_message import MessagePut
from raymq.store.engine.message_store import MessageStore
from raymq.store.index.query import Boundary
from raymq.store.put.inner_message import InnerMessage
from raymq.store.queues.get_message import GetMessageStatus
from raymq.store.queues.message_filter import TagFilter
from raymq.store.queues.raw_records import decode_records
from raymq.store.queues.sql_filter import SqlFilter
from raymq.store.records import record
from raymq.store.records.properties import encode
from raymq.store.records.requests import PutRequest
from raymq.store.services.transaction import TransactionService
from raymq.store.state.shard_state import ShardState
from raymq.store.tools.inspect import verify
from tests.support.bad_sectors import SECTOR, BadSectors
from tests.support.clock import ManualClock
from tests.support.confirming import confirm
from tests.support.crash_states import last_states
from tests.support.damaged_store import FIRST_LOG, copy, flip, patch
from tests.support.simulated_disk import SimulatedDisk

CONFIG = StoreConfig(
    segment_size_bytes=64 * 1024,
    consume_queue_file_size_bytes=2000,
    compaction_file_size_bytes=4096,
    max_hash_slot_num=100,
    max_index_num=400,
    compaction_queue_file_size_bytes=46 * 18,
)
COMPACTED = {"cleanup.policy": "COMPACTION"}
#: of these the log file's size is made
FILE = 46 * 18 * 5
#: of a store on a simulated disk
ROOT = Path("/s")
LOG = Path("compaction/compactionLog/c/0")
QUEUE = Path("compaction/compactionCq/c/0")


def opened(root: Path, files: Files | None = None) -> MessageStore:
    return MessageStore.open(root, config=CONFIG, files=files, clock=ManualClock())


@pytest.fixture
def store(tmp_path: Path) -> Any:
    made = opened(tmp_path / "s")
    made.topics.create("c", 2, [0], COMPACTED)
    yield made
    made.close()
    assert verify(tmp_path / "s") == []


def batch(pairs: list[tuple[str | None, bytes]]) -> pa.RecordBatch:
    """Keys and bodies as a batch; a key of None: no KEYS."""
    properties = [None if key is None else f"KEYS\x01{key}\x02".encode() for key, _ in pairs]
    return pa.record_batch(
        [
            pa.array([body for _, body in pairs], pa.binary()),
            pa.array(["TagA"] * len(pairs), pa.string()),
            pa.array(properties, pa.binary()),
            pa.array([5] * len(pairs), pa.int64()),
        ],
        schema=record.PUT_SCHEMA,
    )


def put(store: MessageStore, *pairs: tuple[str | None, bytes], queue: int = 0) -> None:
    store.put(PutRequest("c", queue, batch(list(pairs)), None, 0, 0, "quorum"))
    confirm(store)


def read(store: MessageStore, queue: int = 0, offset: int = 0) -> list[tuple[int, str, bytes]]:
    """Offset, key and body of everything from an offset on."""
    found: list[tuple[int, str, bytes]] = []
    while True:
        part = store.fetch("c", queue, offset, max_bytes=700, max_records=7)
        assert part.records is not None
        for raw in part.records.to_pylist():
            row = record.decode(raw, np.array([0]), np.array([len(raw)])).to_pylist()[0]
            key = row["properties"].partition(b"KEYS\x01")[2].partition(b"\x02")[0].decode()
            found.append((row["queue_offset"], key, row["body"]))
        if part.next_offset == offset:
            return found
        offset = part.next_offset


def fill(store: MessageStore, keys: int = 10, rounds: int = 8) -> list[tuple[int, str, bytes]]:
    """Put each key `rounds` times. Returns: the latest of each."""
    for number in range(rounds):
        put(store, *((f"k{key}", b"%d of %d" % (number, key)) for key in range(keys)))
    last = rounds - 1
    return [(last * keys + key, f"k{key}", b"%d of %d" % (last, key)) for key in range(keys)]


# --- offsets by time ------------------------------------------------------------------------------


def test_of_a_time_only_the_messages_that_are_left_count(tmp_path: Path) -> None:
    clock = ManualClock(1_700_000_000_000)
    store = MessageStore.open(tmp_path / "s", config=CONFIG, clock=clock)
    store.topics.create("c", 1, [0], COMPACTED)
    times = []
    # Whole files are compacted: the first messages of most keys go.
    for number in range(240):
        clock.advance(10)
        put(store, (f"k{number % 7}", b"%d" % number * 20))
        times.append(clock.now_ms())
    while store.compaction.compact("c", 0, roll=True) is not None:
        pass

    left = [offset for offset, _, _ in read(store)]
    assert 7 <= len(left) < 240
    for time_ms in {each + step for each in times for step in (-5, 0, 5)}:
        later = [each for each in left if times[each] >= time_ms]
        earlier = [each for each in left if times[each] <= time_ms]
        first = store.offset_by_time("c", 0, time_ms)
        last = store.offset_by_time("c", 0, time_ms, Boundary.UPPER)
        assert (first, last) == (later[0] if later else 240, earlier[-1] if earlier else left[0])
    store.close()


# --- topics and puts ------------------------------------------------------------------------------


def test_every_message_needs_a_key(store: MessageStore) -> None:
    for pairs in ([("a", b"1"), (None, b"2")], [("a", b"1"), ("  ", b"2")]):
        with pytest.raises(Rejected) as caught:
            put(store, *pairs)
        assert (caught.value.row, caught.value.status) == (1, "MESSAGE_ILLEGAL")
    assert read(store) == []
    with pytest.raises(Rejected):
        put(store, (None, b"alone"))


def test_a_message_without_a_key_cannot_reach_a_compacted_topic_by_a_detour(
    store: MessageStore,
) -> None:
    store.topics.create("t", 1, [0])
    doors = MessagePut(store, lambda appended: appended)
    end = store.log.end
    bare = InnerMessage("c", 0, b"x")
    level, blank = {"DELAY": "2"}, {"KEYS": " "}
    waiting = {
        "TIMER_OUT_MS": str(store.clock.now_ms() + 3000),
        "REAL_TOPIC": "c",
        "REAL_QID": "0",
    }
    later = InnerMessage(TIMER_TOPIC, 0, b"x", waiting)
    text = encode(waiting)
    for message in (
        bare,
        replace(bare, properties=level),
        replace(bare, properties=blank),
        later,
        replace(later, properties={}, properties_text=text),
    ):
        assert doors.put((message,), is_batch=False).status is PutStatus.MESSAGE_ILLEGAL
    keyed = replace(bare, properties={"KEYS": "k"})
    assert doors.put((keyed, bare), is_batch=True).status is PutStatus.MESSAGE_ILLEGAL
    with pytest.raises(Rejected, match="KEYS"):
        TransactionService(store).prepare(bare)
    other, good = text.replace(b"\x01c\x02", b"\x01t\x02"), text + b"KEYS\x01k\x02"
    rows = pa.Table.from_batches([batch([(None, b"x")] * 3)]).set_column(
        2, "properties", pa.array([other, good, text], pa.binary())
    )
    with pytest.raises(Rejected, match="KEYS") as caught:
        store.put(PutRequest(TIMER_TOPIC, 0, rows.to_batches()[0], None, 0, 0, "quorum"))
    assert caught.value.row == 2
    assert store.log.end == end
    store.put(PutRequest(TIMER_TOPIC, 0, rows.to_batches()[0][:2], None, 0, 0, "quorum"))
    assert doors.put((keyed,), is_batch=False).status is PutStatus.PUT_OK
    TransactionService(store).prepare(keyed)


def test_attributes_outlive_snapshots_and_old_records_have_none(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.topics.create("c", 1, [0], COMPACTED)
    store.topics.create("plain", 1, [0])
    put(store, *((f"k{i}", b"x" * 1000) for i in range(120)))
    assert store.log.end > CONFIG.segment_size_bytes
    with pytest.raises(Rejected, match="COMPACTION"):
        store.topics.create("c", 1, [0])
    with pytest.raises(Rejected, match="not known"):
        store.topics.create("d", 1, [0], {"cleanup.policy": "SOMETIMES"})
    store.close()
    store = opened(tmp_path)
    assert store.log.recovered is not None
    assert store.log.recovered.begin > 0, "from a snapshot"
    assert store.state.topics["c"].attributes == (("cleanup.policy", "COMPACTION"),)
    assert store.state.topics["plain"].attributes == ()
    store.close()
    state = ShardState()
    state.apply_state_record("TOPIC", b'{"name":"old","queues":1,"shards":[0]}')
    assert state.topics["old"].attributes == ()
    assert b'"a"' not in b"".join(state.snapshot(1 << 20)), "as it was written before"


# --- compacting -----------------------------------------------------------------------------------


def test_the_latest_of_each_key_is_left_and_offsets_keep_their_gaps(store: MessageStore) -> None:
    latest = fill(store)
    assert len(read(store)) == 80
    assert store.compaction.compact("c", 0, roll=True) == 79
    assert read(store) == latest
    assert len(latest) == 10
    # From the middle of a gap the next one that is left is read.
    assert read(store, offset=75)[0][0] == 75
    assert read(store, offset=3) == latest
    assert read(store, offset=80) == []
    with pytest.raises(OffsetOutOfRange):
        store.fetch("c", 0, 81, max_bytes=1, max_records=1)
    put(store, ("k3", b"newer"))
    assert read(store)[-1] == (80, "k3", b"newer")
    assert store.compaction.compact("c", 0) is None, "the file that is written is left alone"
    store.compaction.compact("c", 0, roll=True)
    assert read(store) == [*(row for row in latest if row[1] != "k3"), (80, "k3", b"newer")]


def test_a_message_without_a_body_takes_its_key_away(store: MessageStore) -> None:
    put(store, ("a", b"1"), ("b", b"1"), ("a", b""), ("c", b""), ("c", b"again"))
    store.compaction.compact("c", 0)
    assert [key for _, key, _ in read(store)] == ["a", "b", "a", "c", "c"]
    store.compaction.compact("c", 0, roll=True)
    assert read(store) == [(1, "b", b"1"), (4, "c", b"again")]
    put(store, ("b", b""), ("c", b""))
    store.compaction.compact("c", 0, roll=True)
    assert read(store) == []
    put(store, ("d", b"1"))
    assert read(store) == [(7, "d", b"1")]


def test_keys_are_the_whole_of_keys_and_queues_are_compacted_on_their_own(
    store: MessageStore,
) -> None:
    put(store, ("x y", b"1"), ("x", b"2"), ("x y", b"3"))
    put(store, ("x", b"4"), queue=1)
    store.compaction.advance_all()
    store.compaction.compact("c", 0, roll=True)
    assert read(store) == [(1, "x", b"2"), (2, "x y", b"3")]
    assert read(store, queue=1) == [(0, "x", b"4")]


def test_the_commit_log_and_the_consume_queue_keep_all_of_them(store: MessageStore) -> None:
    fill(store)
    store.compaction.advance_all()
    store.compaction.compact("c", 0, roll=True)
    plain = store.reader.fetch("c", 0, 0, max_bytes=1 << 20, max_records=1000)
    assert len(plain.records) == 80
    assert store.consume_queues.range("c", 0) == (0, 80)


def test_what_was_copied_and_synced_needs_no_commit_log_any_more(store: MessageStore) -> None:
    fill(store)
    assert store.compaction.sync_and_find_needed_from() is not None
    while store.compaction.advance_all():
        pass
    store.compaction.sync()
    assert store.compaction.sync_and_find_needed_from() is None
    put(store, ("k", b"v"))
    held = store.compaction.sync_and_find_needed_from()
    assert held is not None
    assert held < store.log.end


def delete_old_files(store: MessageStore) -> None:
    """Let the commit log delete its first files, with all messages of queue 0."""
    while store.log.end < 3 * CONFIG.segment_size_bytes:
        put(store, *[("other", b"x" * 1000)] * 10, queue=1)
    while store.compaction.advance("c", 1):
        pass
    assert isinstance(store.clock, ManualClock)
    store.clock.advance(4 * 24 * 3_600_000)
    store.clean_service.delete_now()
    assert store.clean_service.run_once() > 0


def test_a_queue_begins_with_the_first_message_that_is_left_whatever_the_log_has_deleted(
    store: MessageStore,
) -> None:
    latest = fill(store)
    put(store, ("gone", b""))
    store.compaction.compact("c", 0, roll=True)
    delete_old_files(store)
    assert store.consume_queues.range("c", 0) == (81, 81)
    low, high = store.queue_range("c", 0)
    assert (low, high) == (latest[0][0], 81)
    assert read(store, offset=low) == latest


def test_get_message_reads_what_is_left_with_its_filters_and_statuses(store: MessageStore) -> None:
    assert store.get_message("c", 0, 0, 10).status is GetMessageStatus.NO_MESSAGE_IN_QUEUE
    latest = fill(store)
    put(store, ("k3", b""), ("gone", b"x"), ("gone", b""))
    store.compaction.compact("c", 0, roll=True)
    left = [row for row in latest if row[1] != "k3"]
    low, high = store.queue_range("c", 0)
    found = store.get_message("c", 0, low, 4)
    assert (found.status, found.min_offset, found.max_offset) == (GetMessageStatus.FOUND, 70, 83)
    assert found.queue_offsets.tolist() == [row[0] for row in left[:4]]
    assert found.next_begin_offset == left[3][0] + 1
    raw = found.records.to_pylist()[3]
    assert (
        record.decode(raw, np.array([0]), np.array([len(raw)])).to_pylist()[0]["body"] == left[3][2]
    )
    some = SqlFilter("KEYS IN ('k2', 'k5', 'k9')")
    found = store.get_message("c", 0, low, 2, wanted=some)
    assert found.queue_offsets.tolist() == [72, 75]
    found = store.get_message("c", 0, found.next_begin_offset, 2, wanted=some)
    assert found.queue_offsets.tolist() == [79]
    for tag, count in (("TagA", 9), ("TagB", 0)):
        found = store.get_message("c", 0, low, 99, wanted=TagFilter(tag))
        assert len(found.queue_offsets) == count
    assert found.status is GetMessageStatus.NO_MATCHED_MESSAGE
    for offset, status, goes_on in (
        (low - 1, GetMessageStatus.OFFSET_TOO_SMALL, low),
        (left[-1][0] + 1, GetMessageStatus.NO_MATCHED_MESSAGE, high),
        (high, GetMessageStatus.OFFSET_OVERFLOW_ONE, high),
        (high + 1, GetMessageStatus.OFFSET_OVERFLOW_BADLY, high),
    ):
        found = store.get_message("c", 0, offset, 9)
        assert (found.status, found.next_begin_offset) == (status, goes_on), offset


def test_get_message_skips_nothing_after_a_slice_without_keys(
    store: MessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction_store, "_COPIED_MAX", 4)
    # Of another store's making: our doors refuse them.
    for _ in range(5):
        store.put_inner([InnerMessage("c", 0, b"no key")])
    put(store, ("a", b"1"), ("b", b"2"))
    found = store.get_message("c", 0, 0, 32)
    assert (found.status, found.next_begin_offset) == (GetMessageStatus.NO_MATCHED_MESSAGE, 4)
    found = store.get_message("c", 0, 4, 32)
    assert (found.status, found.queue_offsets.tolist()) == (GetMessageStatus.FOUND, [5, 6])


def while_compacting(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Do something in the next compaction, after the new files were written and before the exchange."""

    def write_and_act(*args: Any) -> list[str]:
        names = write_compacted(*args)
        monkeypatch.setattr(compaction_store, "write_compacted", write_compacted)
        act()
        return names

    monkeypatch.setattr(compaction_store, "write_compacted", write_and_act)


def test_messages_of_files_that_fill_during_a_compaction_stay(
    store: MessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    latest = fill(store)
    late = [(80 + number, f"late{number}", b"x" * 100) for number in range(60)]

    def put_and_read() -> None:
        put(store, *((key, body) for _, key, body in late))
        assert len(read(store)) == 140

    while_compacting(monkeypatch, put_and_read)
    store.compaction.compact("c", 0, roll=True)
    assert read(store) == latest + late
    store.compaction.compact("c", 0, roll=True)
    assert read(store) == latest + late


def test_a_random_history_ends_as_a_dict_would(store: MessageStore) -> None:
    rng = np.random.default_rng(7)
    model: dict[str, tuple[int, bytes]] = {}
    offset = 0
    for step in range(40):
        rows = []
        for _ in range(int(rng.integers(1, 12))):
            key = f"k{int(rng.integers(0, 15))}"
            body = b"" if rng.random() < 0.2 else bytes(rng.bytes(int(rng.integers(1, 300))))
            rows.append((key, body))
            model[key] = (offset, body)
            offset += 1
        put(store, *rows)
        if step % 7 == 6:
            store.compaction.advance_all()
            store.compaction.compact("c", 0, roll=bool(rng.random() < 0.5))
            seen: dict[str, tuple[int, bytes]] = {}
            offsets = []
            for at, key, body in read(store):
                seen[key] = (at, body)
                offsets.append(at)
            assert offsets == sorted(set(offsets))
            alive = {key: value for key, value in model.items() if value[1]}
            assert {key: value for key, value in seen.items() if value[1]} == alive


def test_file_sizes_are_made_of_the_configured_ones_as_rocketmq_makes_them() -> None:
    assert file_sizes(100 << 20, 10 << 20) == (104_857_460, 10_485_746)
    assert file_sizes(4096, 46 * 18) == (FILE, 46 * 18)
    assert file_sizes(46 * 69, 460) == (46 * 70, 460)


# --- RocketMQ's files -----------------------------------------------------------------------------


def test_files_are_those_of_rocketmq(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.topics.create("c", 1, [0], COMPACTED)
    fill(store)
    read(store)
    names = sorted(path.name for path in (tmp_path / LOG).iterdir())
    assert names == sorted(path.name for path in (tmp_path / QUEUE).iterdir())
    assert names[:2] == [f"{0:020d}", f"{FILE:020d}"]
    assert len(names) > 2
    store.compaction.compact("c", 0)
    store.close()
    for name in sorted(path.name for path in (tmp_path / LOG).iterdir()):
        log, units = (tmp_path / LOG / name).read_bytes(), (tmp_path / QUEUE / name).read_bytes()
        assert (len(log), len(units)) == (FILE, 46 * 18)
        at = place = 0
        while struct.unpack_from(">i", units, place + 8)[0] > 0:
            position, size, code, stored, offset, count, compacted, zero = struct.unpack_from(
                ">qiqqqhii", units, place
            )
            assert (count, compacted, zero, code) == (1, -1, 0, fmt.tags_code("TagA"))
            assert position == int(name) + at
            row = record.decode(log[at : at + size], np.array([0]), np.array([size])).to_pylist()[0]
            assert (row["physical_offset"], row["queue_offset"]) == (position, offset)
            assert (row["topic"], row["store_time_ms"]) == ("c", stored)
            at, place = at + size, place + 46
        walk = record.walk(log, int(name))
        if walk.reason is record.WalkStop.BLANK:
            assert struct.unpack_from(">i", log, at)[0] == FILE - at
            assert struct.unpack_from(">qi", units, place) == (-1, 0)
    positions = json.loads((tmp_path / "compaction/position-checkpoint").read_text())
    assert positions["queueOffsetMap"].keys() == {"c_0"}
    assert positions["empty"] is False


# --- starts and crashes ---------------------------------------------------------------------------


def test_a_start_goes_on_where_the_stop_was(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.topics.create("c", 1, [0], COMPACTED)
    latest = fill(store)
    store.compaction.advance_all()
    store.compaction.compact("c", 0, roll=True)
    put(store, ("new", b"1"))
    assert len(read(store)) == 11
    store.close()
    store = opened(tmp_path)
    assert read(store) == [*latest, (80, "new", b"1")]
    put(store, ("new", b"2"))
    assert read(store)[-1] == (81, "new", b"2")
    store.close()
    assert verify(tmp_path) == []


def stored_keys(root: Path) -> list[str]:
    """The keys in the files of queue 0, as RocketMQ would read them."""
    found: list[str] = []
    for path in sorted((root / LOG).iterdir()):
        data = path.read_bytes()
        walk = record.walk(data, int(path.name))
        rows = record.decode(data, walk.positions - int(path.name), walk.sizes)
        for text in rows.column("properties").to_pylist():
            found.append(text.partition(b"KEYS\x01")[2].partition(b"\x02")[0].decode())
    return found


def test_an_orderly_stop_copies_all_that_was_put(tmp_path: Path) -> None:
    """RocketMQ serves a compacted topic from these files alone, and copies only newly dispatched messages."""
    root = tmp_path / "s"
    store = opened(root)
    store.topics.create("c", 1, [0], COMPACTED)
    keys = [f"k{number}" for number in range(30)]
    put(store, *((key, b"body") for key in keys))
    store.close()
    assert stored_keys(root) == keys
    assert not (root / "abort").exists()
    assert verify(root) == []


def test_a_stop_that_cannot_copy_leaves_the_store_as_a_crash_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "s"
    store = opened(root)
    store.topics.create("c", 1, [0], COMPACTED)
    put(store, ("a", b"1"))

    def full(*_: Any) -> bool:
        raise StorageFull("no room", field="disk")

    monkeypatch.setattr(store.compaction, "advance_all", full)
    store.close()
    assert (root / "abort").exists()
    monkeypatch.undo()
    store = opened(root)
    assert read(store) == [(0, "a", b"1")]
    store.close()
    assert stored_keys(root) == ["a"]
    assert not (root / "abort").exists()


def test_what_was_not_synced_is_copied_again_after_a_crash(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.topics.create("c", 1, [0], COMPACTED)
    fill(store, rounds=2)
    store.compaction.advance_all()
    store.compaction.sync()
    put(store, *((f"late{i}", b"x" * 100) for i in range(30)))
    assert len(read(store)) == 50
    last = sorted((tmp_path / LOG).iterdir())[-1]
    store.abandon()
    # A power loss takes what was not synced: here half of a file, and all units.
    data = last.read_bytes()
    last.write_bytes(data[:1000].ljust(len(data), b"\0"))
    units = tmp_path / QUEUE / last.name
    units.write_bytes(bytes(46 * 18))
    store = opened(tmp_path)
    confirm(store)
    assert len(read(store)) == 50
    store.close()
    assert verify(tmp_path) == []


def read_after_power_losses(disk: SimulatedDisk, queue: int = 0) -> list[list[Any]]:
    """What a queue holds on each of the disks that a power loss may leave now. Raises: Corrupt for damage."""
    _, lost = last_states(disk, 30, 1)
    found = []
    for image in lost:
        store = opened(ROOT, image)
        confirm(store)
        found.append(read(store, queue))
        store.abandon()
    assert found
    return found


@pytest.mark.parametrize("queue", [0, 1], ids=["the same queue", "another queue"])
def test_what_readers_copy_during_a_compaction_is_synced_before_it_counts_as_synced(
    monkeypatch: pytest.MonkeyPatch, queue: int
) -> None:
    disk = SimulatedDisk(block_bytes=512)
    store = opened(ROOT, disk)
    store.topics.create("c", 2, [0], COMPACTED)
    fill(store)
    put(store, ("first", b"x"), queue=1)
    store.compaction.advance_all()
    store.compaction.sync()

    def put_and_read() -> None:
        put(store, *((f"late{number}", b"y" * 100) for number in range(6)), queue=queue)
        read(store, queue)

    while_compacting(monkeypatch, put_and_read)
    store.compaction.compact("c", 0, roll=True)
    assert store.compaction.sync_and_find_needed_from() is None
    store.sync_queues()
    latest = read(store, queue)
    assert all(found == latest for found in read_after_power_losses(disk, queue))
    store.abandon()


def copy_and_sync(store: MessageStore) -> None:
    store.compaction.advance_all()
    store.compaction.sync()


# The first file is full after 17 messages, and is sealed with two syncs. The next two are for the second file.
@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_after_a_failed_sync_no_copy_counts_as_synced_before_the_next_start(at: int) -> None:
    disk = SimulatedDisk(block_bytes=512)
    store = opened(ROOT, disk)
    store.topics.create("c", 1, [0], COMPACTED)
    put(store, *((f"k{number}", b"x" * 100) for number in range(5)))
    copy_and_sync(store)
    put(store, *((f"k{number}", b"x" * 100) for number in range(5, 30)))
    store.sync_queues()
    disk.fail("sync_data", at=at)
    with pytest.raises(SyncFailed):
        copy_and_sync(store)
    disk.heal()

    for _ in range(2):
        with pytest.raises(Unavailable, match="until the next start"):
            store.compaction.sync()
        with pytest.raises(Unavailable):
            store.compaction.sync_and_find_needed_from()
        with pytest.raises(Unavailable):
            store.compaction.compact("c", 0, roll=True)
    with pytest.raises(Unavailable):
        store.close()
    assert disk.exists(ROOT / "abort")

    keys = [f"k{number}" for number in range(30)]
    for found in read_after_power_losses(disk):
        assert [key for _, key, _ in found] == keys
    store = opened(ROOT, disk)
    confirm(store)
    assert [key for _, key, _ in read(store)] == keys
    store.close()
    assert not disk.exists(ROOT / "abort")


def test_a_failed_sync_is_in_the_status_of_the_service_until_the_next_start() -> None:
    disk = SimulatedDisk()
    store = opened(ROOT, disk)
    store.topics.create("c", 1, [0], COMPACTED)
    put(store, ("a", b"1"))
    service = CompactionService(store.compaction, interval_ms=1000, now_ms=0)
    reported: list[str | None] = []

    def stopping() -> bool:
        reported.append(service.last_error)
        disk.heal()
        service.wake()
        return len(reported) == 4

    assert service.step(0)
    disk.fail("sync_data")
    with pytest.raises(SyncFailed):
        service.step(0)
    service.run(stopping, store.clock)
    assert reported[0] is None
    assert all(error and "fdatasync" in error for error in reported[1:])
    store.abandon()


def test_records_that_a_reader_copies_after_the_sync_are_still_needed(
    store: MessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, ("a", b"1"))
    sync = store.compaction.sync
    reader = threading.Thread(target=read, args=(store,))

    def sync_while_a_reader_waits() -> None:
        sync()
        reader.start()
        # It is done at once, or waits for the lock.
        reader.join(0.05)

    monkeypatch.setattr(store.compaction, "sync", sync_while_a_reader_waits)
    assert store.compaction.sync_and_find_needed_from() is not None
    reader.join()
    monkeypatch.undo()
    assert store.compaction.sync_and_find_needed_from() is None


NOTE = Path("raymq/compaction")


@pytest.mark.parametrize("damage", ["cut", "no object", "a digit"])
def test_a_start_after_a_crash_refuses_a_damaged_note_and_keeps_what_the_log_has_deleted_without_it(
    tmp_path: Path, damage: str
) -> None:
    store = opened(tmp_path)
    store.topics.create("c", 2, [0], COMPACTED)
    latest = fill(store)
    store.compaction.compact("c", 0, roll=True)
    delete_old_files(store)
    put(store, ("late", b"1"))
    assert store.consume_queues.range("c", 0) == (80, 81)
    want = [read(store, 0), read(store, 1)]
    assert want[0] == [*latest, (80, "late", b"1")]
    store.abandon()

    note = (tmp_path / NOTE).read_bytes()
    if damage == "a digit":
        at = note.index(b"c/0") + len(b'c/0": [')
        damaged = note[:at] + b"9" + note[at + 1 :]
    else:
        damaged = note[:-5] if damage == "cut" else b"[1]"
    (tmp_path / NOTE).write_bytes(damaged)
    for _ in range(2):
        with pytest.raises(Corrupt, match="raymq/compaction is damaged") as caught:
            opened(tmp_path)
        assert caught.value.fields["path"] == str(tmp_path / NOTE)

    (tmp_path / NOTE).unlink()
    store = opened(tmp_path)
    confirm(store)
    assert [read(store, 0), read(store, 1)] == want
    store.close()
    assert verify(tmp_path) == []


def test_a_start_after_an_orderly_stop_replaces_a_damaged_note(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.topics.create("c", 1, [0], COMPACTED)
    latest = fill(store, rounds=1)
    store.close()
    note = (tmp_path / NOTE).read_bytes()
    (tmp_path / NOTE).write_bytes(b"{")
    opened(tmp_path).abandon()
    assert (tmp_path / NOTE).read_bytes() == note
    store = opened(tmp_path)
    assert read(store) == latest
    store.close()


def test_a_note_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.topics.create("c", 1, [0], COMPACTED)
    fill(store, rounds=1)
    copy_and_sync(store)
    store.abandon()
    note = json.loads((tmp_path / NOTE).read_bytes())
    assert note["ends"].keys() == {"c/0"}
    (tmp_path / NOTE).write_text(json.dumps(note["ends"]))
    store = opened(tmp_path)
    assert store.compaction.next_offset("c", 0) == 10, "nothing was cut"
    store.close()


def test_a_start_does_not_take_a_note_that_cannot_be_read_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    store.topics.create("c", 1, [0], COMPACTED)
    latest = fill(store, rounds=1)
    copy_and_sync(store)
    store.abandon()
    files = Files()
    read_file = files.read_file

    def failing(path: Any) -> bytes:
        if Path(path) == tmp_path / NOTE:
            raise OSError(errno.EIO, "Input/output error")
        return read_file(path)

    monkeypatch.setattr(files, "read_file", failing)
    with pytest.raises(OSError, match="Input/output error"):
        opened(tmp_path, files)
    store = opened(tmp_path)
    confirm(store)
    assert store.compaction.next_offset("c", 0) == 10, "nothing was cut"
    assert read(store) == latest
    store.close()


@pytest.mark.parametrize("point", ["compaction.built", "compaction.committed", "compaction.moved"])
def test_a_compaction_that_dies_is_done_as_a_whole_or_not_at_all(
    tmp_path: Path, point: str
) -> None:
    store = opened(tmp_path)
    store.topics.create("c", 1, [0], COMPACTED)
    latest = fill(store)
    before = read(store)
    with failpoint(point, "raise"), pytest.raises(FailPointReached):
        store.compaction.compact("c", 0, roll=True)
    store.abandon()
    for _ in range(2):
        store = opened(tmp_path)
        confirm(store)
        assert read(store) == (before if point == "compaction.built" else latest)
        store.abandon()
    store = opened(tmp_path)
    store.compaction.compact("c", 0)
    confirm(store)
    assert read(store) == latest
    put(store, ("after", b"1"))
    store.close()
    store = opened(tmp_path)
    assert read(store) == [*latest, (80, "after", b"1")]
    assert not (tmp_path / LOG / "compacting").exists()
    store.close()
    assert verify(tmp_path) == []


@pytest.mark.parametrize(
    ("call", "at"),
    [("rename", 1), ("rename", 2), ("unlink", 3), ("sync_dir", 2), ("open_file", 1), ("rename", 3)],
)
def test_an_exchange_that_fails_is_finished_by_the_next_start_and_not_repeated(
    monkeypatch: pytest.MonkeyPatch, call: str, at: int
) -> None:
    disk = SimulatedDisk()
    store = opened(ROOT, disk)
    store.topics.create("c", 1, [0], COMPACTED)
    latest = fill(store)
    assert len(read(store)) == 80
    finish = swap.finish

    def fail_and_finish(*args: Any, **named: Any) -> None:
        disk.fail(call, at=at)
        finish(*args, **named)

    with monkeypatch.context() as patch:
        patch.setattr(swap, "finish", fail_and_finish)
        with pytest.raises(OSError, match="Input/output error"):
            store.compaction.compact("c", 0, roll=True)
    disk.heal()
    with pytest.raises(Unavailable):
        store.compaction.compact("c", 0, roll=True)
    assert read(store)[-10:] == latest
    put(store, ("after", b"1"))
    store.abandon()
    store = opened(ROOT, disk)
    confirm(store)
    assert read(store) == [*latest, (80, "after", b"1")]
    store.close()


def test_a_crash_after_a_compaction_loses_no_later_message(tmp_path: Path) -> None:
    """The next file gets a lower place than the last one had: what was noted of that must not reach over it."""
    store = opened(tmp_path)
    store.topics.create("c", 1, [0], COMPACTED)
    fill(store, rounds=12)
    read(store)
    store.compaction.compact("c", 0, roll=True)
    put(store, *((f"late{i}", b"y" * 100) for i in range(20)))
    assert len(read(store)) == 30
    newest = sorted((tmp_path / LOG).iterdir())[-1]
    store.abandon()
    newest.write_bytes(bytes(FILE))
    store = opened(tmp_path)
    confirm(store)
    assert [row[1] for row in read(store)] == [
        *(f"k{i}" for i in range(10)),
        *(f"late{i}" for i in range(20)),
    ]
    store.close()


def test_a_lost_file_is_damage_and_an_unfinished_pair_is_not(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.topics.create("c", 1, [0], COMPACTED)
    fill(store)
    count = len(read(store))
    store.close()
    last = sorted((tmp_path / LOG).iterdir())[-1]
    (tmp_path / LOG / f"{int(last.name) + FILE:020d}").write_bytes(b"")
    store = opened(tmp_path)
    assert len(read(store)) == count
    store.close()
    (tmp_path / QUEUE / f"{0:020d}").unlink()
    with pytest.raises(Corrupt, match="belong together"):
        opened(tmp_path)


class FullDisk(Files):
    """No room for compacted files while `full`."""

    full = False

    def open_file(self, path: Any, *, create: bool = False, writable: bool = True) -> int:
        if self.full and create and "compacting" in str(path):
            raise StorageFull("the disk is full", field="disk")
        return super().open_file(path, create=create, writable=writable)


def test_a_full_disk_leaves_the_old_files(tmp_path: Path) -> None:
    files = FullDisk()
    store = opened(tmp_path, files)
    store.topics.create("c", 1, [0], COMPACTED)
    latest = fill(store)
    before = read(store)
    files.full = True
    with pytest.raises(StorageFull):
        store.compaction.compact("c", 0, roll=True)
    assert read(store) == before
    files.full = False
    store.compaction.compact("c", 0)
    assert read(store) == latest
    store.close()


@pytest.mark.parametrize(
    ("error", "kind"), [(errno.ENOSPC, StorageFull), (errno.EIO, OSError)], ids=["full", "failing"]
)
def test_copied_messages_are_read_from_a_disk_that_takes_no_more(
    error: int, kind: type[Exception]
) -> None:
    disk = SimulatedDisk()
    store = opened(ROOT, disk)
    store.topics.create("c", 1, [0], COMPACTED)
    put(store, ("a", b"1"), ("b", b"2"))
    copied = read(store)
    put(store, ("c", b"3"))
    disk.fail("pwrite", error=error, forever=True)
    for offset in (0, 1):
        part = store.fetch("c", 0, offset, max_bytes=1, max_records=1)
        assert part.next_offset == offset + 1
    assert store.get_message("c", 0, 0, 10).queue_offsets.tolist() == [0, 1]
    with pytest.raises(kind):
        store.fetch("c", 0, 2, max_bytes=1, max_records=1)
    with pytest.raises(kind):
        store.get_message("c", 0, 2, 10)
    disk.heal()
    assert read(store) == [*copied, (2, "c", b"3")]
    store.close()


def test_copied_messages_are_read_after_a_failed_sync() -> None:
    disk = SimulatedDisk()
    store = opened(ROOT, disk)
    store.topics.create("c", 1, [0], COMPACTED)
    put(store, ("a", b"1"), ("b", b"2"))
    copied = read(store)
    disk.fail("sync_data")
    with pytest.raises(SyncFailed):
        store.compaction.sync()
    assert read(store) == copied
    put(store, ("c", b"3"))
    assert store.get_message("c", 0, 0, 10).queue_offsets.tolist() == [0, 1]
    with pytest.raises(Unavailable, match="until the next start"):
        store.get_message("c", 0, 2, 10)
    store.abandon()


def test_the_service_copies_at_once_and_compacts_at_its_interval(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.topics.create("c", 1, [0], COMPACTED)
    fill(store)
    service = CompactionService(store.compaction, interval_ms=1000, now_ms=0)
    while service.step(0):
        pass
    assert store.compaction.sync_and_find_needed_from() is None
    assert len(read(store)) == 80
    assert service.step(1000) is False
    left = len(read(store))
    assert left < 80, "sealed files are compacted, the last one is not"
    service.step(1500)
    assert len(read(store)) == left
    store.close()


def test_an_unexpected_error_ends_a_step_of_the_service_and_not_its_thread(
    store: MessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = CompactionService(store.compaction, interval_ms=1000, now_ms=0)
    reported: list[str | None] = []

    def broken() -> bool:
        raise ValueError("of no known kind")

    def stopping() -> bool:
        reported.append(service.last_error)
        if len(reported) == 2:
            monkeypatch.undo()
        service.wake()
        return len(reported) == 3

    monkeypatch.setattr(store.compaction, "advance_all", broken)
    service.run(stopping, store.clock)
    assert reported == [None, "of no known kind", None]


# --- damage ---------------------------------------------------------------------------------------


def put_three_rounds(root: Path, files: Files | None = None) -> MessageStore:
    """A store with three messages of each of two keys, none of them copied yet."""
    store = opened(root, files)
    store.topics.create("c", 1, [0], COMPACTED)
    for number in range(3):
        put(store, ("a", b"a%d" % number * 600), ("b", b"b%d" % number * 600))
    return store


def body_at(store: MessageStore, offset: int) -> bytes:
    """The first two bytes of the next message from `offset` on."""
    part = store.fetch("c", 0, offset, max_bytes=1, max_records=1)
    body: bytes = decode_records(part.records).column("body")[0].as_py()
    return body[:2]


BODIES = [b"a0", b"b0", b"a1", b"b1", b"a2", b"b2"]


@pytest.mark.parametrize("damage", ["a body", "a size", "a sector", "a unit"])
def test_a_damaged_message_is_an_error_and_never_an_older_one_of_its_key(
    tmp_path: Path, damage: str
) -> None:
    files = BadSectors()
    store = put_three_rounds(tmp_path, files)
    units = store.consume_queues.find("c", 0).read(0, 6)
    positions, damaged = units["position"].astype(int).tolist(), [4]
    if damage == "a sector":
        sector = files.lose(tmp_path / FIRST_LOG, positions[4])
        ends = [*positions[1:], store.log.end]
        damaged = [i for i in range(6) if positions[i] < sector + SECTOR and ends[i] > sector]
    elif damage == "a unit":
        (unit_file,) = (tmp_path / "consumequeue/c/0").iterdir()
        flip(unit_file, 4 * 20 + 8)
    else:
        flip(tmp_path / FIRST_LOG, positions[4] + (100 if damage == "a body" else 3))

    for offset, body in enumerate(BODIES):
        if offset in damaged:
            with pytest.raises(Corrupt, match="compactionLog"):
                body_at(store, offset)
        else:
            assert body_at(store, offset) == body
    assert len(store.damage) >= len(damaged)

    # The commit log may delete its record: the compacted queue has the damage, too, and verify names it.
    assert store.compaction.sync_and_find_needed_from() is None
    store.close()
    assert any(fault.file.startswith("compaction/") for fault in verify(tmp_path))


def test_damage_of_a_compacted_queue_hides_no_other_message_and_is_in_status(
    tmp_path: Path,
) -> None:
    store = put_three_rounds(tmp_path)
    assert len(read(store)) == 6
    position = store.compaction.read("c", 0, 2, max_bytes=1, max_records=1).units["position"][0]
    name = sorted(path.name for path in (tmp_path / LOG).iterdir() if int(path.name) <= position)[
        -1
    ]
    flip(tmp_path / LOG / name, int(position) - int(name) + 100)
    assert store.damage == []

    part = store.fetch("c", 0, 0, max_bytes=1 << 20, max_records=100)
    assert (len(part.records), part.next_offset) == (1, 1), "half of the messages before the damage"
    assert [body_at(store, offset) for offset in (1, 3, 4, 5)] == [b"b0", b"b1", b"a2", b"b2"]
    for max_records in (1, 100):
        with pytest.raises(Corrupt):
            store.fetch("c", 0, 2, max_bytes=1 << 20, max_records=max_records)
    assert [error.fields["path"] for error in store.damage] == [str(tmp_path / LOG / name)]
    store.close()


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("number", [0, 1, 5, -1])
@pytest.mark.parametrize("pair", [0, -1])
def test_a_zeroed_unit_of_a_compacted_queue_hides_no_message(
    tmp_path: Path, is_open: bool, number: int, pair: int
) -> None:
    store = opened(tmp_path)
    store.topics.create("c", 1, [0], COMPACTED)
    fill(store)
    everything = read(store)
    units = sorted((tmp_path / QUEUE).iterdir())[pair]
    if not is_open:
        store.close()
    before = units.read_bytes()
    count = sum(any(before[at + 8 : at + 12]) for at in range(0, 46 * 17, 46))
    at = 46 * (number % count)
    patch(units, at, bytes(46))
    if not is_open:
        assert verify(tmp_path) != []
        store = opened(tmp_path)
    for offset, *_ in everything:
        assert read(store, offset=offset)[0][0] == offset
    assert read(store) == everything
    assert units.read_bytes() == before
    store.close()
    assert verify(tmp_path) == []


@pytest.mark.parametrize("unit", [bytes(20), struct.pack(">qiq", 0, 0x7FFFFFFF, 0)])
def test_a_message_whose_unit_is_gone_is_an_error_and_never_an_older_one_of_its_key(
    tmp_path: Path, unit: bytes
) -> None:
    store = put_three_rounds(tmp_path)
    (path,) = (tmp_path / "consumequeue/c/0").iterdir()
    patch(path, 4 * 20, unit)
    for offset, body in enumerate(BODIES):
        if offset == 4:
            with pytest.raises(Corrupt, match="compactionLog"):
                body_at(store, offset)
        else:
            assert body_at(store, offset) == body
    store.close()


def test_a_queue_with_damage_stays_as_it_is_and_the_others_are_compacted(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.topics.create("c", 2, [0], COMPACTED)
    fill(store)
    damaged = int(store.consume_queues.find("c", 0).read(3, 1)["position"][0])
    for number in range(80):
        put(store, ("k", b"%d" % number), queue=1)
    flip(tmp_path / FIRST_LOG, damaged + 88)

    service = CompactionService(store.compaction, interval_ms=1000, now_ms=0)
    while service.step(0):
        pass
    with pytest.raises(Corrupt, match="compactionLog/c/0"):
        service.step(1000)
    assert [body for *_, body in read(store, queue=1)][-1] == b"79"
    assert len(read(store, queue=1)) < 80
    assert len(read(store, offset=4)) == 76
    # The damage in the commit log, and its copy.
    assert len(store.damage) == 2
    store.close()


def test_verify_names_what_is_wrong_with_a_compacted_queue(tmp_path: Path) -> None:
    store = opened(tmp_path / "s")
    store.topics.create("c", 1, [0], COMPACTED)
    fill(store)
    read(store)
    store.close()
    name = sorted(path.name for path in (tmp_path / "s" / LOG).iterdir())[1]
    log, units = LOG / name, QUEUE / name
    row = struct.unpack_from(">qi", (tmp_path / "s" / units).read_bytes(), 3 * 46)
    for n, (file, at, offset) in enumerate(
        [
            (units, 3 * 46 + 7, 3 * 46),  # its position
            (units, 3 * 46 + 11, 3 * 46),  # its size
            (units, 3 * 46 + 35, row[0]),  # its queue offset
            (log, row[0] - int(name) + 90, 3 * 46),  # a body
        ]
    ):
        root = copy(tmp_path / "s", tmp_path / str(n))
        flip(root / file, at)
        faults = verify(root)
        named = log if at == 3 * 46 + 35 else units
        assert (faults[0].file, faults[0].offset) == (str(named), offset)
        assert {fault.file for fault in faults} <= {str(log), str(units)}
    root = copy(tmp_path / "s", tmp_path / "lone")
    (root / units).unlink()
    assert [(f.file, f.rule) for f in verify(root)] == [
        (str(log), "a compaction log file has its file of units")
    ]
