"""The producer table remembers a million entries in bounded memory, and refuses more with the limit in the error."""

from __future__ import annotations

import random
import threading
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from raymq.store.base.errors import Fenced, Rejected
from raymq.store.base.format import DECISIONS_TOPIC, STAGED_TOPIC
from raymq.store.config.store_config import StoreConfig
from raymq.store.embedded.embedded_store import EmbeddedStore
from raymq.store.engine.message_store import MessageStore
from raymq.store.log.recovery.snapshot_head import read_head
from raymq.store.records.staged_range import target_properties
from raymq.store.state import producer_table
from raymq.store.state.producer_table import ENTRY_DTYPE, EPOCH_DTYPE, ProducerTable
from raymq.store.state.shard_state import SNAPSHOT, ShardState
from tests.support.batches import batch, request
from tests.support.clock import ManualClock
from tests.support.producer_tables import entries_of, epochs_of, known

HOUR_MS = 3_600_000
MIB = 1 << 20


def stored(state, producer_id, queue, sequence, *, epoch=0, now=1000, count=1, topic="t"):
    """A batch of a producer that is in the log."""
    offset = state.next_offsets.get((topic, queue), 0)
    state.apply_rows(
        topic,
        queue,
        offset,
        count,
        100 * (offset + count),
        now,
        producer_id=producer_id,
        epoch=epoch,
        first_sequence=sequence,
    )
    return offset


def restored(state, **limits):
    again = ShardState(ProducerTable(**limits))
    for part in state.snapshot(MIB):
        again.apply_state_record(SNAPSHOT, part)
    return again


def test_more_producers_and_queues_than_are_objects_are_all_recognised():
    """320 producers x 64 queues: more than 20,000 entries, each written in turn."""
    state = ShardState()
    offsets = {}
    for turn in range(2):
        for producer_id in range(320):
            for queue in range(64):
                offsets[producer_id, queue, turn] = stored(state, producer_id, queue, turn)
    assert len(state.producers) == 320 * 64 > producer_table.RECENT_MAX
    for each in (state, restored(state)):
        for (producer_id, queue, turn), offset in list(offsets.items())[::7]:
            found = each.admit(producer_id, 0, "t", queue, turn, 1)
            assert (found.duplicates, found.first_offset) == (1, offset)
    assert known(restored(state).producers) == known(state.producers)


def test_the_table_says_the_same_as_a_dict_whatever_is_written_in_which_order(monkeypatch):
    monkeypatch.setattr(producer_table, "RECENT_MAX", 7)
    dice = random.Random(3)
    state, sequences, epochs = ShardState(), {}, {}
    for turn in range(6000):
        producer_id = dice.choice((dice.randrange(40), (1 << 64) - 1 - dice.randrange(300)))
        queue, topic = dice.randrange(3), dice.choice("abc")
        key = (producer_id, topic, queue)
        epochs[producer_id] = max(epochs.get(producer_id, 0), dice.randrange(1 + turn // 1000))
        sequence, count = sequences.get(key, 0), dice.randint(1, 3)
        stored(
            state, producer_id, queue, sequence, epoch=epochs[producer_id], count=count, topic=topic
        )
        sequences[key] = sequence + count
        if turn % 1500 == 1499:
            state = restored(state)
    found = {key: entry[0] for key, entry in entries_of(state.producers).items()}
    assert found == sequences
    assert epochs_of(state.producers) == epochs
    assert state.producers.get((5, "d", 0)) is None
    for producer_id, epoch in epochs.items():
        assert state.producers.epoch(producer_id) == epoch
        if epoch:
            with pytest.raises(Fenced):
                state.admit(producer_id, epoch - 1, "a", 0, 0, 1)


def test_above_the_limit_a_new_producer_is_refused_and_none_is_forgotten():
    state = ShardState(ProducerTable(entries_max=10, expiry_ms=HOUR_MS))
    for producer_id in range(10):
        stored(state, producer_id, 0, 0)
    with pytest.raises(Rejected, match="producer_entries_max") as refused:
        state.admit(10, 0, "t", 0, 0, 1)
    assert (refused.value.field, refused.value.limit) == ("producer", 10)
    assert not refused.value.retriable
    with pytest.raises(Rejected):
        state.admit(3, 0, "t", 1, 0, 1)
    with pytest.raises(Rejected):
        state.next_epoch(10)
    for producer_id in range(10):
        assert state.admit(producer_id, 0, "t", 0, 0, 1).duplicates == 1
        assert state.next_epoch(producer_id) == 1


def test_at_the_limit_what_was_unused_for_long_makes_room():
    state = ShardState(ProducerTable(entries_max=10, expiry_ms=HOUR_MS))
    for producer_id in range(10):
        stored(state, producer_id, 0, 0, epoch=2, now=producer_id)
    stored(state, 0, 0, 1, epoch=2, now=HOUR_MS + 4)
    assert len(state.producers) == 10, "below the limit nothing is forgotten"
    assert state.admit(10, 0, "t", 0, 0, 1).duplicates == 0
    assert {producer_id for producer_id, _, _ in entries_of(state.producers)} == {0, 5, 6, 7, 8, 9}
    assert epochs_of(state.producers).keys() == {0, 5, 6, 7, 8, 9}
    assert state.admit(0, 2, "t", 0, 0, 2).duplicates == 2
    stored(state, 10, 0, 0, now=HOUR_MS + 4)
    assert state.admit(10, 0, "t", 0, 0, 1).duplicates == 1


def test_at_the_limit_attempts_of_staged_writes_make_room_after_an_hour():
    state = ShardState(ProducerTable(entries_max=8, expiry_ms=168 * HOUR_MS))
    for attempt in range(4):
        stored(state, attempt, 0, 0, now=attempt, topic=STAGED_TOPIC)
    stored(state, 10, 0, 0, now=5, topic=DECISIONS_TOPIC)
    stored(state, 11, 0, 0, now=5)
    # One producer in two topics, and one that has sent again.
    stored(state, 2, 0, 0, now=5)
    stored(state, 3, 0, 1, now=HOUR_MS - 1, topic=STAGED_TOPIC)
    stored(state, 12, 0, 0, now=HOUR_MS - 1)
    with pytest.raises(Rejected):
        state.admit(13, 0, "t", 0, 0, 1)

    stored(state, 12, 0, 1, now=HOUR_MS + 2)
    assert state.admit(13, 0, "t", 0, 0, 1).duplicates == 0

    assert entries_of(state.producers).keys() == {
        (2, "t", 0),
        (3, STAGED_TOPIC, 0),
        (10, DECISIONS_TOPIC, 0),
        (11, "t", 0),
        (12, "t", 0),
    }
    assert epochs_of(state.producers).keys() == {2, 3, 10, 11, 12}


def test_a_stream_of_staged_writes_is_recognised_for_days_beside_its_many_attempts():
    """A batch in ten minutes of 8 tasks and 4 queues, for four days: a sixth of all entries fit the table."""
    state = ShardState(ProducerTable(entries_max=3000, expiry_ms=168 * HOUR_MS))
    batches = 4 * 24 * 6
    for number in range(batches):
        now = number * HOUR_MS // 6
        for task in range(8):
            assert state.admit(number << 8 | task, 0, STAGED_TOPIC, 0, 0, 1).duplicates == 0
            stored(state, number << 8 | task, 0, 0, now=now, topic=STAGED_TOPIC)
        for queue in range(4):
            assert state.admit(number << 8 | 8, 0, "t", queue, 0, 1).duplicates == 0
            stored(state, number << 8 | 8, queue, 0, now=now)
        assert state.admit(number << 8 | 9, 0, DECISIONS_TOPIC, 0, 0, 1).duplicates == 0
        stored(state, number << 8 | 9, 0, 0, now=now, topic=DECISIONS_TOPIC)

    assert 13 * batches > 2 * 3000 > 2 * 5 * batches
    for each in (state, restored(state)):
        for number in range(batches):
            assert each.admit(number << 8 | 9, 0, DECISIONS_TOPIC, 0, 0, 1).duplicates == 1
            assert each.admit(number << 8 | 8, 0, "t", number % 4, 0, 1).duplicates == 1


def test_a_full_table_looks_for_expired_entries_when_there_are_some_or_after_an_hour():
    minute_ms = HOUR_MS // 60
    limit = 4 * producer_table.DROPPED_SHARE
    state = ShardState(ProducerTable(entries_max=limit, expiry_ms=24 * HOUR_MS))
    for producer_id in range(limit):
        stored(state, producer_id, 0, 0, now=producer_id * minute_ms)

    def admit_at(now: int) -> int:
        """Admit a new producer. Returns: how many entries were dropped."""
        before = len(state.producers)
        state.store_time_ms = now
        state.admit(1000 + now, 0, "t", 0, 0, 1)
        return before - len(state.producers)

    assert admit_at(24 * HOUR_MS) == 1
    stored(state, 500, 0, 0, now=24 * HOUR_MS)
    for minutes in range(1, 5):
        with pytest.raises(Rejected, match="too few were unused for 24 hours"):
            admit_at(24 * HOUR_MS + minutes * minute_ms)
    assert admit_at(24 * HOUR_MS + 5 * minute_ms) == 5

    # The others are used again, but for two.
    for producer_id in range(8, limit):
        stored(state, producer_id, 0, 1, now=state.store_time_ms)
    for producer_id in range(501, 506):
        stored(state, producer_id, 0, 0)
    with pytest.raises(Rejected):
        admit_at(24 * HOUR_MS + 8 * minute_ms)
    assert admit_at(25 * HOUR_MS + 5 * minute_ms) == 2


def test_a_full_table_of_a_million_drops_expired_entries_in_moments():
    entries, epochs = columns(1_000_000)
    entries["time_ms"] = epochs["time_ms"] = np.arange(len(entries))
    table = ProducerTable(expiry_ms=HOUR_MS)
    table.queue_numbers([("t", number) for number in range(64)])
    table.load([entries], [epochs])
    begin_s = time.thread_time()
    table.check_room(1, HOUR_MS + 9)
    took_s = time.thread_time() - begin_s
    assert len(table) == sum(map(len, table.epoch_rows())) == 1_000_000 - 10
    assert table.get((int(entries["producer"][9]), "t", 9)) is None
    assert table.get((int(entries["producer"][10]), "t", 10)) is not None
    assert took_s < 15, "puts wait meanwhile; np.isin of each part took 48 s"


def test_what_a_log_holds_above_a_limit_that_was_lowered_is_remembered():
    state = ShardState()
    for producer_id in range(30):
        stored(state, producer_id, 0, 0)
    again = restored(state, entries_max=10, expiry_ms=HOUR_MS)
    stored(again, 30, 0, 0)
    for producer_id in range(31):
        assert again.admit(producer_id, 0, "t", 0, 0, 1).duplicates == 1


def test_a_refusal_at_the_limit_stores_nothing_and_outlives_a_restart(tmp_path):
    config = StoreConfig(segment_size_bytes=64 * 1024, producer_entries_max=3)
    store = EmbeddedStore(tmp_path, config=config)
    store.create_topic("t", 1)
    for producer_id in range(3):
        store.put(request([b"x"], producer_id=producer_id, sequence=0))
    end = store.store.log.end
    with pytest.raises(Rejected, match="producer_entries_max"):
        store.put(request([b"x"], producer_id=3, sequence=0))
    assert store.store.log.end == end
    store.put(request([b"no producer"]))
    store.close()
    store = EmbeddedStore(tmp_path, config=config)
    with pytest.raises(Rejected, match="producer_entries_max"):
        store.store.inner_put.init_producer(3)
    assert store.put(request([b"x"], producer_id=2, sequence=0)).duplicates == 1
    store.close()


@pytest.fixture
def store_at_its_limit(tmp_path):
    """Three producers, which is the limit. The first one has expired, the others were used just now."""
    clock = ManualClock()
    config = StoreConfig(
        segment_size_bytes=64 * 1024, producer_entries_max=3, producer_expiry_hours=1
    )
    store = MessageStore.open(tmp_path, config=config, clock=clock)
    store.topics.create("t", 1, [0])
    store.put(request([b"x"], producer_id=0, sequence=0))
    clock.advance(2 * HOUR_MS)
    for producer_id in (1, 2):
        store.put(request([b"x"], producer_id=producer_id, sequence=0))
    yield store
    store.abandon()


def test_a_store_that_was_killed_after_it_forgot_attempts_recognises_all_that_it_did_before(
    tmp_path,
):
    clock = ManualClock()
    config = StoreConfig(segment_size_bytes=64 * 1024, producer_entries_max=4)
    staged_row = target_properties("t", 0)

    def put(store: MessageStore, topic: str, producer_id: int) -> int:
        rows = batch([b"x"], properties=staged_row if topic == STAGED_TOPIC else None)
        return store.put(
            request([b"x"], topic=topic, producer_id=producer_id)._replace(batch=rows)
        ).duplicates

    store = MessageStore.open(tmp_path, config=config, clock=clock)
    store.topics.create("t", 1, [0])
    for topic, producer_id in ((STAGED_TOPIC, 1), (STAGED_TOPIC, 2), ("t", 3), ("t", 4)):
        assert put(store, topic, producer_id) == 0
    clock.advance(2 * HOUR_MS)
    # The clock of the state is the newest record's.
    store.put(request([b"no producer"]))
    assert put(store, "t", 5) == 0
    forgot = entries_of(store.state.producers)
    assert forgot.keys() == {(3, "t", 0), (4, "t", 0), (5, "t", 0)}
    store.abandon()

    # The log has no record of what was forgotten: recovery remembers it again, as a follower does.
    store = MessageStore.open(tmp_path, config=config, clock=clock)
    recovered = entries_of(store.state.producers)
    assert forgot.items() <= recovered.items()
    assert recovered.keys() - forgot.keys() == {(1, STAGED_TOPIC, 0), (2, STAGED_TOPIC, 0)}
    assert put(store, "t", 6) == 0
    assert [put(store, "t", producer_id) for producer_id in (3, 4, 5, 6)] == [1, 1, 1, 1]

    # The next file begins with the state: every reader of it knows the same.
    store.log.seal(0)
    store.put(request([b"first of the file"]))
    before = known(store.state.producers)
    store.abandon()
    store = MessageStore.open(tmp_path, config=config, clock=clock)
    assert known(store.state.producers) == before
    store.abandon()


class Meanwhile:
    """The action of another thread at a given moment. It is complete then, unless the put lock makes it wait."""

    def __init__(self, store: MessageStore, action: Callable[[], Any]) -> None:
        self._store = store
        self._thread = threading.Thread(target=self._run, args=(action,))
        self.result: Any = None

    def _run(self, action: Callable[[], Any]) -> None:
        self.result = action()

    def begin(self) -> None:
        """That moment."""
        self._thread.start()
        if not self._store.put_lock.thread_lock.locked():
            self._thread.join()

    def end(self) -> Any:
        """The result of the action."""
        self._thread.join()
        return self.result


def test_a_put_beside_init_producer_at_the_limit_is_not_forgotten(store_at_its_limit, monkeypatch):
    store = store_at_its_limit
    again = request([b"y"], producer_id=2, sequence=1)
    other = Meanwhile(store, lambda: store.put(again))
    make_rows = producer_table._Rows

    def make_rows_then_put(dtype, parts=()):
        rows = make_rows(dtype, parts)
        if dtype is ENTRY_DTYPE:
            # The rows that stay are copied, but are not the table's rows yet.
            monkeypatch.undo()
            other.begin()
        return rows

    monkeypatch.setattr(producer_table, "_Rows", make_rows_then_put)
    assert store.inner_put.init_producer(7)[0] == 0
    appended = other.end()
    assert appended.duplicates == 0
    repeated = store.put(again)
    assert (repeated.duplicates, repeated.first_offset) == (1, appended.first_offset)


def test_two_threads_that_init_one_producer_get_two_epochs(store_at_its_limit, monkeypatch):
    store = store_at_its_limit
    other = Meanwhile(store, lambda: store.inner_put.init_producer(1))
    next_epoch = store.state.next_epoch

    def next_epoch_twice(producer_id):
        epoch = next_epoch(producer_id)
        monkeypatch.undo()
        other.begin()
        return epoch

    monkeypatch.setattr(store.state, "next_epoch", next_epoch_twice)
    first, appended = store.inner_put.init_producer(1)
    second, later = other.end()
    assert (first, second) == (1, 2)
    assert appended.end_offset == later.physical_offset
    assert store.state.producers.epoch(1) == 2


def test_a_snapshot_of_an_earlier_version_is_read():
    part = (
        b'{"part":0,"parts":1,"rows":[{"t":"time","v":77},{"t":"queue","n":"t","q":1,"o":9},'
        b'{"t":"epoch","p":5,"e":3},'
        b'{"t":"seq","p":5,"n":"t","q":1,"s":6,"e":900,"r":[[0,2,1],[2,1,5],[3,3,6]]}]}'
    )
    state = ShardState()
    assert state.apply_state_record(SNAPSHOT, part)
    assert state.admit(5, 3, "t", 1, 2, 1).first_offset == 5
    assert state.producers.epoch(5) == 3
    assert restored(state).admit(5, 3, "t", 1, 5, 1) == (1, 8, 900)


def test_the_parts_of_a_snapshot_keep_to_their_size():
    state = ShardState()
    for number in range(3000):
        stored(state, number, number % 7, 0, topic="topic-" + "x" * (number % 50))
    for limit in (1000, 8192, 100_000):
        parts = state.snapshot(limit)
        assert max(map(len, parts)) <= 1.1 * limit
        again = ShardState()
        for part in parts:
            again.apply_state_record(SNAPSHOT, part)
        assert known(again.producers) == known(state.producers)


def columns(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Entries of as many producers, in 64 queues, with the numbers of a log of days."""
    dice = np.random.default_rng(1)
    entries = np.zeros(count, dtype=ENTRY_DTYPE)
    entries["producer"] = dice.permutation(count).astype(np.uint64) * np.uint64(0x1234567890AB)
    entries["queue"] = np.arange(count) % 64
    entries["time_ms"] = 1_700_000_000_000 + dice.integers(0, 86_400_000, count)
    entries["end_offset"] = dice.integers(0, 1 << 38, count)
    entries["first_count"] = entries["last_count"] = 100
    entries["first_offset"] = dice.integers(0, 1 << 24, count)
    entries["last_sequence"] = dice.integers(1000, 1 << 24, count)
    entries["last_offset"] = entries["last_sequence"] + entries["first_offset"]
    epochs = np.zeros(count, dtype=EPOCH_DTYPE)
    epochs["producer"] = entries["producer"]
    epochs["time_ms"], epochs["epoch"] = entries["time_ms"], 3
    return entries, epochs


#: an object of so many is made, and counts for all of them: tracemalloc is slow
SAMPLED = 10


def test_a_million_entries_take_200_mb_and_are_written_and_read_as_columns():
    entries, epochs = columns(1_000_000)
    queues = [("t", number) for number in range(64)]
    state = ShardState()
    tracemalloc.start()
    try:
        assert state.producers.queue_numbers(queues).tolist() == list(range(64))
        state.producers.load([entries], [epochs])
        rows, _ = tracemalloc.get_traced_memory()
        # Each with all the runs that an object may have.
        for at in range(producer_table.RECENT_MAX // SAMPLED):
            entry = state.producers.open((int(entries["producer"][at]), "t", at % 64))
            for number in range(producer_table.RUNS_MAX):
                entry.extend(1 << 26 | 9 * number, 1, 1 << 26 | 90 * number, 1 << 39)
        objects = (tracemalloc.get_traced_memory()[0] - rows) * SAMPLED
        tracemalloc.reset_peak()
        parts = state.snapshot(MIB)
        peak = tracemalloc.get_traced_memory()[1] - tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    size = sum(map(len, parts))
    print(
        f"\n{rows / 1e6:.0f} MB of rows, {objects / 1e6:.0f} MB of objects; a snapshot has "
        f"{size / 1e6:.0f} MB, and takes {peak / 1e6:.0f} MB beside them"
    )
    assert rows + objects <= 200e6
    assert size <= 60e6
    assert peak <= 20e6
    again = ShardState()
    for part in parts:
        again.apply_state_record(SNAPSHOT, part)
    assert len(again.producers) == len(state.producers) == 1_000_000
    for at in range(0, 1_000_000, 100_000):
        key = (int(entries["producer"][at]), "t", at % 64)
        assert again.producers.epoch(key[0]) == 3
        entry, before = again.producers.get(key), state.producers.get(key)
        assert entry.next_sequence == before.next_sequence


@pytest.mark.parametrize("segment_size_bytes", [64 * 1024, MIB, 16 * MIB])
def test_as_many_producers_as_a_shard_accepts_fit_the_snapshot_of_a_file(segment_size_bytes):
    """With numbers as wide as they can be."""
    config = StoreConfig(segment_size_bytes=segment_size_bytes)
    dice = np.random.default_rng(1)
    state = ShardState()
    state.producers.queue_numbers([("t", 0)])
    tables = []
    for dtype in (ENTRY_DTYPE, EPOCH_DTYPE):
        rows = np.zeros(config.producer_entries_limit, dtype=dtype)
        for name in set(dtype.names) - {"queue"}:
            rows[name] = dice.integers(0, (1 << 63) - 1, len(rows))
        tables.append(rows)
    state.producers.load([tables[0]], [tables[1]])
    parts = state.snapshot(min(MIB, segment_size_bytes // 8))
    record_bytes = 200
    assert sum(len(part) + record_bytes for part in parts) <= config.snapshot_bytes_max


def test_with_small_files_a_new_producer_is_refused_before_the_snapshot_outgrows_a_file(tmp_path):
    config = StoreConfig(segment_size_bytes=64 * 1024)
    store = MessageStore.open(tmp_path, config=config, clock=ManualClock())
    store.topics.create("t", 1, [0])
    dice = random.Random(1)
    for _ in range(config.producer_entries_limit):
        store.put(request([b"x"], producer_id=dice.getrandbits(64), sequence=0))
    with pytest.raises(Rejected) as refused:
        store.put(request([b"x"], producer_id=dice.getrandbits(64), sequence=0))
    assert refused.value.limit == config.producer_entries_limit == len(store.state.producers)
    for named in ("segment_size_bytes", "65536", str(refused.value.limit)):
        assert named in str(refused.value)
    store.log.seal(0)
    store.put(request([b"first of the file"]))
    complete_at, _ = read_head(store.log.segments.files[-1])
    assert complete_at is not None, "retention deletes only what such a file follows"
    store.abandon()


def test_with_large_files_the_limit_is_the_option():
    assert StoreConfig().producer_entries_limit == 1_000_000
    assert StoreConfig(producer_entries_max=7).producer_entries_limit == 7


@pytest.mark.parametrize("shift", [0, 16, 32, 40, 48])
def test_producer_ids_of_a_pattern_are_found_in_a_few_looks(shift):
    rows = producer_table._Rows(EPOCH_DTYPE)
    for number in range(3000):
        rows.add(number << shift, 0)
    looks = 0
    address = rows.address

    def counted(row):
        nonlocal looks
        looks += 1
        return address(row)

    rows.address = counted
    for number in range(3000):
        assert rows.find(number << shift, 0) == number
    assert looks < 3 * 3000
    # As they are found after a load.
    loaded = producer_table._Rows(EPOCH_DTYPE, list(rows.parts()))
    for number in range(0, 3000, 100):
        assert loaded.find(number << shift, 0) == number


def test_other_threads_find_entries_while_the_table_grows_and_drops():
    table = ProducerTable(entries_max=10_000, expiry_ms=HOUR_MS)
    known = table.make((1, "t", 0))
    known.extend(0, 5, 0, 50)
    known.time_ms = 2 * HOUR_MS
    for producer_id in range(2, 6000):
        table.make((producer_id, "t", 0))
        looked = table.get((1, "t", 0))
        assert looked is not None
        assert looked.next_sequence == 5
    assert table.drop_expired(2 * HOUR_MS) == 5998
    assert table.get((1, "t", 0)).next_sequence == 5
    assert len(table) == 1


def test_a_million_entries_come_back_with_the_store(tmp_path):
    """The same through the log, a hundredth of it: a snapshot of several parts at the head of a file."""
    config = StoreConfig(segment_size_bytes=4 * MIB)
    store = MessageStore.open(tmp_path, config=config, clock=ManualClock())
    store.topics.create("t", 64, [0])
    entries, epochs = columns(10_000)
    store.state.producers.queue_numbers([("t", number) for number in range(64)])
    store.state.producers.load([entries], [epochs])
    store.log.seal(0)
    store.put(request([b"first of the file"]))
    store.log.sync()
    store.log.note_confirmed(store.log.end)
    before = known(store.state.producers)
    store.close()
    again = MessageStore.open(tmp_path, config=config, clock=ManualClock())
    assert known(again.state.producers) == before
    again.close()
