"""Rows that are sent again are answered with their original offsets, however long ago they were stored."""

from __future__ import annotations

import random
from contextlib import closing
from dataclasses import replace

import pytest

from raymq.store.base.errors import Fenced, Rejected
from raymq.store.config.store_config import StoreConfig
from raymq.store.embedded.embedded_store import EmbeddedStore
from raymq.store.engine.message_store import MessageStore
from raymq.store.put.duplicates import DuplicateSearch
from raymq.store.state.producer_table import (
    RUNS_MAX,
    RUNS_RECENT,
    UNKNOWN_OFFSET,
    ProducerQueue,
    Run,
)
from raymq.store.state.shard_state import ShardState
from tests.support.batches import request
from tests.support.clock import ManualClock
from tests.support.producer_tables import known

SMALL = StoreConfig(segment_size_bytes=64 * 1024, consume_queue_file_size_bytes=2000)
OURS, OTHER = 7, 8


@pytest.fixture
def store(tmp_path):
    opened = open_store(tmp_path)
    opened.create_topic("t", 2)
    opened.create_topic("other", 1)
    yield opened
    opened.close()


def open_store(path):
    return EmbeddedStore(path, config=SMALL, clock=ManualClock())


def put(store, count, *, sequence, producer_id=OURS, **options):
    """Append without a wait, as a stream does."""
    return store.append(
        request([b"x" * 40] * count, producer_id=producer_id, sequence=sequence, **options)
    )


def settle(store):
    """Wait for everything and dispatch it."""
    store.store.log.sync()
    store.fetch("t", 0, store.store.queue_range("t", 0)[0])


def interleave(store, batches, *, count=3, others=2):
    """Batches of ours, each followed by rows of another producer. Returns: the offset of each of our rows."""
    offsets = []
    other = 0
    for number in range(batches):
        at = put(store, count, sequence=number * count).first_offset
        offsets += range(at, at + count)
        if others:
            put(store, others, sequence=other, producer_id=OTHER)
            other += others
    return offsets


def entry_of(store, producer_id=OURS):
    return store.store.state.producers.get((producer_id, "t", 0))


def asked_again(store, sequence, count=1):
    again = put(store, count, sequence=sequence)
    assert (again.duplicates, again.count) == (count, count)
    return again.first_offset


def test_every_row_of_a_long_history_is_answered_with_its_offset(store):
    offsets = interleave(store, 120)
    settle(store)
    assert len(entry_of(store).runs) <= RUNS_MAX
    assert len(store.store.log.segments.files) > 1
    backwards = [asked_again(store, sequence) for sequence in reversed(range(len(offsets)))]
    assert backwards[::-1] == offsets
    assert [asked_again(store, sequence) for sequence in range(len(offsets))] == offsets


def test_producers_of_any_pace_find_their_rows(store):
    dice = random.Random(5)
    stored = {producer_id: [] for producer_id in (11, 12, 13, 14)}
    for turn in range(500):
        # The rarest writes at both ends only, with a long pause between.
        weights = [1, 5, 20, 3 if turn < 60 or turn > 440 else 0]
        producer_id = dice.choices(list(stored), weights)[0]
        offsets = stored[producer_id]
        count = dice.randint(1, 9)
        at = put(store, count, sequence=len(offsets), producer_id=producer_id).first_offset
        offsets += range(at, at + count)
    settle(store)
    for producer_id, offsets in stored.items():
        assert len(entry_of(store, producer_id).runs) > RUNS_RECENT
        for sequence in dice.sample(range(len(offsets)), min(80, len(offsets))):
            entry_of(store, producer_id).found = None
            again = put(store, 1, sequence=sequence, producer_id=producer_id)
            assert (again.first_offset, again.duplicates) == (offsets[sequence], 1)


def test_rows_that_are_not_dispatched_yet_are_found_in_the_log(tmp_path):
    engine = MessageStore.open(tmp_path, config=SMALL, clock=ManualClock())
    engine.topics.create("t", 2, [0])
    engine.topics.create("tt", 1, [0])
    offsets = []
    for number in range(200):
        # The same producer elsewhere: another queue, and a topic whose name begins alike.
        engine.put(request([b"y"] * 2, producer_id=OURS, sequence=number * 2, queue=1))
        engine.put(request([b"y"] * 2, producer_id=OURS, sequence=number * 2, topic="tt"))
        offsets.append(
            engine.put(request([b"x" * 40], producer_id=OURS, sequence=number)).first_offset
        )
        engine.put(request([b"z"], producer_id=OTHER, sequence=number))
        if number == 50:
            confirmed = engine.log.end
    assert len(engine.log.segments.files) > 1
    for end in (0, confirmed, engine.log.end):
        # Nothing, a part, and all of it is confirmed and dispatched.
        while engine.dispatched < end:
            engine.dispatch(end)
        engine.state.producers.get((OURS, "t", 0)).found = None
        for number in (*range(0, 200, 7), 50, 51, 1, 199):
            again = engine.put(request([b"x" * 40], producer_id=OURS, sequence=number))
            assert (again.first_offset, again.duplicates) == (offsets[number], 1)
    engine.close()


def test_old_rows_are_found_after_a_restart(tmp_path):
    store = open_store(tmp_path)
    store.create_topic("t", 1)
    offsets = interleave(store, 150)
    before = entry_of(store)
    store.close()
    store = open_store(tmp_path)
    after = entry_of(store)
    assert (after.next_sequence, after.end_offset) == (before.next_sequence, before.end_offset)
    assert (after.runs[0], after.runs[-1]) == (before.runs[0], before.runs[-1])
    assert [asked_again(store, sequence) for sequence in range(0, 450, 11)] == offsets[::11]
    store.close()


def test_a_batch_that_spans_runs_is_answered_with_the_offsets_of_its_first_and_last_row(store):
    offsets = interleave(store, 60)
    settle(store)
    before = store.store.log.end
    again = put(store, 100, sequence=10)
    assert (again.first_offset, again.last_offset) == (offsets[10], offsets[109])
    assert again.last_offset - again.first_offset > 99
    assert store.store.log.end == before
    # The end of it is new: the stored rows are trimmed, the first offset is the original one.
    again = put(store, 180, sequence=5)
    assert (again.first_offset, again.duplicates, again.count) == (offsets[5], 175, 180)
    assert again.last_offset == store.store.state.next_offsets["t", 0] - 1
    assert entry_of(store).next_sequence == 185


def test_rows_of_an_older_epoch_are_found_and_an_old_epoch_is_fenced_still(store):
    offsets = interleave(store, 60)
    settle(store)
    again = put(store, 1, sequence=4, epoch=3)
    assert (again.first_offset, again.duplicates) == (offsets[4], 1)
    with pytest.raises(Fenced):
        put(store, 1, sequence=4, epoch=2)


def test_an_offset_is_unknown_only_when_the_log_has_the_row_no_more(store):
    offsets = interleave(store, 300)
    settle(store)
    log = store.store.log
    gone = log.segments.files[0]
    units = store.store.consume_queues.get("t", 0)
    first = int((units.read(0, units.max_offset)["position"] < gone.start + gone.size).sum())
    log.segments.delete_first()
    for sequence, offset in enumerate(offsets):
        # Of some that are gone the state itself still knows the place.
        known = {offset} if offset >= first else {offset, UNKNOWN_OFFSET}
        assert asked_again(store, sequence) in known
    second = entry_of(store).runs[1]
    assert second.first_offset < first
    assert asked_again(store, second.first_sequence - 20) == UNKNOWN_OFFSET


def test_a_row_that_becomes_a_duplicate_after_its_check_is_answered_too(store):
    late = store.store.put_path.check(request([b"x" * 40] * 3, producer_id=OURS, sequence=3))
    offsets = interleave(store, 60)
    settle(store)
    again = store.store.put_path.append(late)
    assert (again.first_offset, again.last_offset, again.duplicates) == (offsets[3], offsets[5], 3)


def test_no_put_waits_for_the_lock_while_a_row_is_searched(store, monkeypatch):
    offsets = interleave(store, 60)
    settle(store)
    looks = []
    look = DuplicateSearch._own_rows_of_units

    def watched(self, *args):
        looks.append(store.store.put_path._lock.begin_ms > 0)
        return look(self, *args)

    monkeypatch.setattr(DuplicateSearch, "_own_rows_of_units", watched)
    assert asked_again(store, 4) == offsets[4]
    assert looks
    assert not any(looks)


def test_a_whole_write_sent_again_reads_each_row_about_once(store, monkeypatch):
    interleave(store, 700, others=3)
    settle(store)
    read = []
    look = DuplicateSearch._own_rows_of_units

    def counted(self, first_offset, units):
        read.append(len(units))
        return look(self, first_offset, units)

    monkeypatch.setattr(DuplicateSearch, "_own_rows_of_units", counted)
    for number in range(700):
        put(store, 3, sequence=number * 3)
    # One small slice a batch. Without the last result as a hint each would bisect again.
    assert len(read) <= 700
    read.clear()
    for number in range(0, 700, 70):
        entry_of(store).found = None
        put(store, 30, sequence=number * 3)
    assert sum(read) < 2 * 700 * 6


def test_slices_shrink_when_a_look_takes_long(store, monkeypatch):
    put(store, 2, sequence=0)
    put(store, 2000, sequence=0, producer_id=OTHER)
    put(store, 2, sequence=2)
    settle(store)
    entry = entry_of(store)
    # As if the state had forgotten the offset of sequence 1.
    entry.runs = [Run(0, 1, 0), Run(3, 1, 2003)]
    sizes = []
    look = DuplicateSearch._own_rows_of_units

    def slow(self, first_offset, units):
        store.store.clock.advance(5)
        sizes.append(len(units))
        return look(self, first_offset, units)

    monkeypatch.setattr(DuplicateSearch, "_own_rows_of_units", slow)
    assert asked_again(store, 2) == 2002
    assert sizes[:5] == [32, 16, 8, 4, 4]


def test_kept_runs_are_the_first_the_newest_and_the_edges_of_long_pauses():
    entry = ProducerQueue()
    offset = 0
    for number in range(500):
        if number in (100, 300):
            offset += 1_000_000
        entry.extend(number * 2, 2, offset, 0)
        offset += 3
    runs = entry.runs
    assert len(runs) <= RUNS_MAX
    assert runs[0].first_sequence == 0
    assert [run.first_sequence for run in runs[-RUNS_RECENT:]] == [*range(988, 1000, 2)]
    for edge in (99, 100, 299, 300):
        assert edge * 2 in [run.first_sequence for run in runs]
    spans = [
        b.first_offset - a.first_offset - a.count for a, b in zip(runs, runs[1:], strict=False)
    ]
    assert sorted(spans)[-3] < 1_000


def test_the_runs_of_a_state_do_not_depend_on_where_its_log_is_read_from():
    def state_after(first, last, state, rows_at_once):
        for number in range(first, last):
            for row in range(0, 4, rows_at_once):
                state.apply_rows(
                    "t",
                    0,
                    number * 6 + row,
                    rows_at_once,
                    0,
                    0,
                    producer_id=OURS,
                    first_sequence=number * 4 + row,
                )
        return state

    whole = state_after(0, 100, ShardState(), 4)
    for cut in (10, 33, 71):
        resumed = ShardState()
        for part in state_after(0, cut, ShardState(), 1).snapshot(100):
            resumed.apply_state_record("SNAPSHOT", part)
        assert known(state_after(cut, 100, resumed, 2).producers) == known(whole.producers)


@pytest.mark.parametrize("count", [2, 80])
def test_a_refused_row_is_named_only_if_no_row_of_its_batch_is_stored(tmp_path, count):
    bodies = [b"small", bytes(500)] * (count // 2)
    with closing(open_store(tmp_path)) as store:
        store.create_topic("t", 1)
        store.append(request(bodies, producer_id=OURS))
    # Its limits are others now.
    lower = replace(SMALL, max_message_bytes=100)
    with closing(EmbeddedStore(tmp_path, config=lower, clock=ManualClock())) as store:
        with pytest.raises(Rejected, match="500 bytes") as refused:
            store.append(request(bodies, producer_id=OURS))
        assert "row" not in refused.value.fields
        with pytest.raises(Rejected, match="500 bytes") as refused:
            store.append(request(bodies, producer_id=OURS, sequence=count))
        assert refused.value.fields["row"] == 1
