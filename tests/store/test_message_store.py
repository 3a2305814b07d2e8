"""The engine alone: what is put comes back, in order, after every way to stop."""

import errno
import os
import threading

import pyarrow as pa
import pytest

from raymq.store.base.errors import Corrupt, Fenced, OffsetOutOfRange, Rejected, Unavailable
from raymq.store.config.store_config import StoreConfig
from raymq.store.embedded.embedded_store import EmbeddedStore
from raymq.store.engine.message_store import MessageStore
from raymq.store.queues.reader import UNITS_FIRST
from raymq.store.records.record import PUT_SCHEMA, decode
from raymq.store.records.requests import PutRequest
from raymq.store.tools.inspect import dump, verify
from tests.support.batches import request
from tests.support.waiting import until

SMALL = StoreConfig(segment_size_bytes=64 * 1024, consume_queue_file_size_bytes=2000)


@pytest.fixture
def store(tmp_path):
    opened = EmbeddedStore(tmp_path / "s", config=SMALL)
    opened.create_topic("t", 4)
    yield opened
    opened.close()
    assert verify(tmp_path / "s") == []


def bodies_of(store, queue=0, topic="t", offset=0):
    found = []
    while True:
        part = store.fetch(topic, queue, offset)
        if not len(part.records):
            return found
        found += part.records.to_pylist()
        offset = part.next_offset


def payloads(records):
    import numpy as np

    out = []
    for raw in records:
        rows = decode(raw, np.array([0]), np.array([len(raw)]))
        out.append(rows.column("body")[0].as_py())
    return out


def test_a_batch_comes_back_in_order_from_its_queue(store):
    appended = store.put(request([b"a", b"b", b"c"], queue=1))
    assert (appended.first_offset, appended.count) == (0, 3)
    assert payloads(bodies_of(store, 1)) == [b"a", b"b", b"c"]
    assert bodies_of(store, 0) == []


def test_files_roll_and_every_record_is_still_there(store):
    want = [bytes([i % 256]) * 700 for i in range(400)]
    for low in range(0, 400, 7):
        store.put(request(want[low : low + 7]))
    assert len(store.store.log.segments.files) > 3
    assert payloads(bodies_of(store)) == want


def test_a_read_of_much_ends_where_neighbours_end_unless_they_are_few(tmp_path):
    store = EmbeddedStore(tmp_path)
    store.create_topic("t", 2)
    body = b"x" * 10_000
    for count in (30, 10, 9):
        store.put(request([body] * count))
        store.put(request([b"y"], queue=1))
    part = store.fetch("t", 0, 0)
    assert part.next_offset == 30
    ends = {offset: store.fetch("t", 0, offset).next_offset for offset in (2, 10, 20)}
    # From 10 on they are not much.
    assert ends == {2: 30, 10: 49, 20: 49}
    assert store.fetch("t", 0, 0, max_records=29).next_offset == 29
    assert payloads(bodies_of(store)) == [body] * 49
    store.close()


def test_a_read_has_as_many_short_records_as_fit(tmp_path):
    store = EmbeddedStore(tmp_path)
    store.create_topic("t", 1)
    many = 4 * UNITS_FIRST + 3
    store.put(request([b""] * many))
    assert store.fetch("t", 0, 0).next_offset == many
    assert store.fetch("t", 0, 0, max_records=UNITS_FIRST + 1).next_offset == UNITS_FIRST + 1
    size = len(store.fetch("t", 0, 0, max_records=1).records[0].as_buffer())
    for count in (1, UNITS_FIRST, UNITS_FIRST + 1):
        assert store.fetch("t", 0, 0, max_bytes=count * size).next_offset == count
    store.close()


def wait_a_little() -> None:
    threading.Event().wait(0.01)


def test_the_key_of_the_last_message_is_found_without_another_put(store):
    row = pa.record_batch(
        [
            pa.array([b"last"], pa.binary()),
            pa.nulls(1, pa.string()),
            pa.array([b"KEYS\x01k\x02"], pa.binary()),
            pa.array([1]),
        ],
        schema=PUT_SCHEMA,
    )
    store.put(PutRequest("t", 0, row, None, 0, 0, "quorum"))
    until(lambda: len(store.store.query.by_keys("t", ["k"], max_num=1).records), wait_a_little)


def test_an_embedded_store_has_warm_files_where_they_are_asked_for(tmp_path):
    size = 256 * 1024
    store = EmbeddedStore(
        tmp_path, config=StoreConfig(segment_size_bytes=size, warm_mapped_file=True)
    )
    store.create_topic("t", 1)
    allocator, queue = store.store.log.allocator, store.store.log.segments
    until(lambda: allocator.caught_up, wait_a_little)
    assert [file.prewritten for file in queue.files] == [size, size]
    store.put(request([b"x" * 1000] * 300))
    until(lambda: [file.prewritten for file in queue.files] == [size] * 3, wait_a_little)
    assert payloads(bodies_of(store)) == [b"x" * 1000] * 300
    store.close()


def test_a_dispatch_that_fails_in_the_background_ends_no_flush(tmp_path, monkeypatch):
    store = EmbeddedStore(tmp_path)
    store.create_topic("t", 1)
    failed = []

    def fail(confirmed: int) -> int:
        failed.append(confirmed)
        raise Corrupt("damaged", path="consumequeue", offset=0, rule="", found=None)

    with monkeypatch.context() as patch:
        patch.setattr(store.store, "dispatch", fail)
        until(lambda: failed, wait_a_little)
    assert store.put(request([b"x"])).end_offset <= store.store.log.synced
    assert payloads(bodies_of(store)) == [b"x"]
    store.close()


def test_a_batch_larger_than_a_file_is_cut_into_units(store):
    want = [bytes([i % 256]) * 1000 for i in range(200)]
    store.put(request(want))
    assert payloads(bodies_of(store)) == want


def test_a_store_comes_back_after_a_clean_stop(tmp_path):
    store = EmbeddedStore(tmp_path, config=SMALL)
    store.create_topic("t", 2)
    store.put(request([b"x" * 300] * 500))
    store.close()
    assert not (tmp_path / "abort").exists()
    again = EmbeddedStore(tmp_path, config=SMALL)
    assert again.store.state.topics["t"].queues == 2
    assert len(bodies_of(again)) == 500
    assert again.put(request([b"y"])).first_offset == 500
    again.close()
    assert verify(tmp_path) == []


def test_a_put_under_way_is_answered_by_the_close_that_syncs_it(tmp_path, monkeypatch):
    store = EmbeddedStore(tmp_path, config=SMALL)
    store.create_topic("t", 1)
    # Its flush thread gets to nothing any more.
    store._end_threads()
    appended = store.append(request([b"x"]))
    reported, waits = [], threading.Event()
    wait_for = store._changed.wait_for

    def seen(*arguments):
        waits.set()
        return wait_for(*arguments)

    monkeypatch.setattr(store._changed, "wait_for", seen)
    waiting = threading.Thread(target=lambda: reported.append(store.wait(appended)))
    waiting.start()
    waits.wait(10)
    store.close()
    waiting.join(10)
    assert reported == [appended]


def test_an_abandoned_store_ends_its_threads_and_recovers_like_one_that_died(tmp_path):
    before = set(threading.enumerate())
    store = EmbeddedStore(tmp_path, config=SMALL)
    store.create_topic("t", 1)
    store.put(request([b"x" * 300] * 500))
    store.abandon()
    assert set(threading.enumerate()) <= before
    assert (tmp_path / "abort").exists()
    again = EmbeddedStore(tmp_path, config=SMALL)
    assert len(bodies_of(again)) == 500
    again.close()
    assert verify(tmp_path) == []


def test_a_durable_put_dispatches_what_was_synced_before_it(store):
    first = store.put(request([b"a"]))
    store.put(request([b"b"]))
    assert store.store.dispatched >= first.end_offset


def test_two_engines_never_share_a_store(tmp_path):
    store = EmbeddedStore(tmp_path, config=SMALL)
    with pytest.raises(Unavailable, match="already open"):
        EmbeddedStore(tmp_path, config=SMALL)
    store.close()


def test_a_repeated_batch_is_answered_with_its_original_offsets(store):
    first = store.put(request([b"1", b"2", b"3"], producer_id=7))
    again = store.put(request([b"1", b"2", b"3"], producer_id=7))
    assert (again.first_offset, again.duplicates) == (first.first_offset, 3)
    partly = store.put(request([b"3", b"4"], producer_id=7, sequence=2))
    assert (partly.first_offset, partly.duplicates, partly.count) == (2, 1, 2)
    assert payloads(bodies_of(store)) == [b"1", b"2", b"3", b"4"]


def test_sequences_survive_a_restart_and_a_roll(tmp_path):
    store = EmbeddedStore(tmp_path, config=SMALL)
    store.create_topic("t", 1)
    for start in range(0, 300, 10):
        store.put(request([b"z" * 900] * 10, producer_id=9, epoch=2, sequence=start))
    store.close()
    store = EmbeddedStore(tmp_path, config=SMALL)
    again = store.put(request([b"z" * 900] * 10, producer_id=9, epoch=2, sequence=290))
    assert (again.first_offset, again.duplicates) == (290, 10)
    with pytest.raises(Fenced):
        store.put(request([b"old"], producer_id=9, epoch=1, sequence=300))
    with pytest.raises(Rejected, match="expected 300"):
        store.put(request([b"gap"], producer_id=9, epoch=2, sequence=301))
    store.close()


def test_an_unknown_producer_must_start_at_zero(store):
    with pytest.raises(Rejected, match="starts at 0"):
        store.put(request([b"x"], producer_id=1, sequence=5))


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: request([b"x"], topic="nowhere"), "topic"),
        (lambda: request([b"x"], topic=""), "topic"),
        (lambda: request([b"x"], topic="a" * 128), "topic"),
        (lambda: request([b"x"], topic="a b"), "topic"),
        (lambda: request([b"x"], topic="SCHEDULE_TOPIC_XXXX"), "properties"),
        (lambda: request([b"x"], topic="rmq_sys_raymq"), "topic"),
        (lambda: request([b"x"], queue=4), "queue_id"),
        (lambda: request([b"x"], queue=-1), "queue_id"),
        (lambda: request([]), "batch"),
        (lambda: request([b"x", b"y" * 40_000]), "record"),
    ],
)
def test_a_bad_put_names_its_field_and_stores_nothing(store, make, field):
    end = store.store.log.end
    with pytest.raises(Rejected) as caught:
        store.put(make())
    assert caught.value.field == field
    assert store.store.log.end == end
    store.put(request([b"still usable"]))


def test_an_offset_outside_the_queue_is_refused_with_the_range(store):
    store.put(request([b"a"]))
    with pytest.raises(OffsetOutOfRange) as caught:
        store.fetch("t", 0, 5)
    assert (caught.value.min, caught.value.max) == (0, 1)


def test_puts_of_many_threads_keep_dense_offsets(store):
    def work(queue):
        for i in range(50):
            store.put(request([b"%d" % i], queue=queue))

    threads = [threading.Thread(target=work, args=(q,)) for q in (0, 1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for queue in range(4):
        assert payloads(bodies_of(store, queue)) == [b"%d" % i for i in range(50)]


def test_a_file_of_the_wrong_length_is_named(tmp_path):
    EmbeddedStore(tmp_path, config=SMALL).close()
    path = tmp_path / "commitlog" / ("0" * 20)
    os.truncate(path, 1000)
    with pytest.raises(Corrupt, match="65536"):
        EmbeddedStore(tmp_path, config=SMALL)


def test_a_directory_that_is_not_a_store_is_refused(tmp_path):
    (tmp_path / "holiday.jpg").write_bytes(b"x")
    with pytest.raises(Rejected, match="not a store"):
        EmbeddedStore(tmp_path, config=SMALL)


def test_damage_below_the_synced_mark_is_reported_and_never_cut(tmp_path):
    store = EmbeddedStore(tmp_path, config=SMALL)
    store.create_topic("t", 1)
    store.put(request([b"q" * 500] * 20))
    at = store.put(request([b"q" * 500] * 20)).physical_offset
    store.close()
    path = tmp_path / "commitlog" / ("0" * 20)
    with path.open("r+b") as file:
        file.seek(at + 200)
        file.write(b"!")
    before = path.read_bytes()
    with pytest.raises(Corrupt):
        EmbeddedStore(tmp_path, config=SMALL)
    assert path.read_bytes() == before
    assert verify(tmp_path)[0].file.startswith("commitlog")


def test_consume_queues_are_rebuilt_when_they_are_gone(tmp_path):
    import shutil

    store = EmbeddedStore(tmp_path, config=SMALL)
    store.create_topic("t", 1)
    store.put(request([b"q" * 50] * 300, tag="TagA"))
    store.close()
    shutil.rmtree(tmp_path / "consumequeue")
    store = EmbeddedStore(tmp_path, config=SMALL)
    assert len(bodies_of(store)) == 300
    store.close()
    assert verify(tmp_path) == []
    units = [line for line in dump(tmp_path) if line["kind"] == "msg" and line["topic"] == "t"]
    assert {line["cqTags"] for line in units} == {2598919}


def test_a_closed_store_says_that_it_is_closed(tmp_path):
    store = EmbeddedStore(tmp_path, config=SMALL)
    store.create_topic("t", 1)
    store.close()
    with pytest.raises(Unavailable, match="closed"):
        store.store.fetch("t", 0, 0, max_bytes=1, max_records=1)
    with pytest.raises(Unavailable, match="closed"):
        store.store.get_message("t", 0, 0, 1)


def test_a_cut_whose_chain_cannot_be_completed_stops_the_log(tmp_path, monkeypatch):
    store = MessageStore.open(tmp_path)
    store.topics.create("t", 1, [0])
    log, end = store.log, store.log.end
    store.put(request([b"x"]))

    def full() -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(log, "complete_chain", full)
    with pytest.raises(OSError, match="no space"):
        log.truncate(end)
    assert "did not finish" in log.health.poisoned
    store.abandon()
    again = MessageStore.open(tmp_path)
    assert again.log.end == end
    again.close()
