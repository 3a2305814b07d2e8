"""Messages are found by key, by id, by place in the log and by time, and nothing else is."""

from __future__ import annotations

import numpy as np
import pytest

from raymq.store.base import format as fmt
from raymq.store.base.errors import Corrupt, OffsetOutOfRange, Rejected
from raymq.store.config.store_config import StoreConfig
from raymq.store.engine.message_store import MessageStore
from raymq.store.index.index_keys import key_hash
from raymq.store.index.query import Boundary
from raymq.store.put.inner_message import InnerMessage
from raymq.store.records import properties
from raymq.store.records.record import encode_record
from tests.support.batches import batch, request
from tests.support.clock import ManualClock
from tests.support.confirming import confirm, confirm_with_index

SMALL = StoreConfig(
    segment_size_bytes=16 * 1024,
    consume_queue_file_size_bytes=400,
    max_hash_slot_num=50,
    max_index_num=100,
)
NOW = 1_700_000_000_000


@pytest.fixture
def clock():
    return ManualClock(NOW)


@pytest.fixture
def store(tmp_path, clock):
    opened = MessageStore.open(tmp_path, config=SMALL, clock=clock)
    for topic in ("t", "u", "empty"):
        opened.topics.create(topic, 2, [0])
    yield opened
    opened.close()


def put(store: MessageStore, body: bytes, keys: str = "k", *, topic: str = "t", queue: int = 0):
    """One message, confirmed and dispatched. Returns: its `AppendedRows`."""
    message = InnerMessage(topic, queue, body, {"KEYS": keys} if keys else {})
    (appended,) = store.put_inner([message])
    confirm_with_index(store)
    return appended


def bodies(store: MessageStore, key: str = "k", **options):
    return store.query.by_key("t", key, **options).records.column("body").to_pylist()


# --- by key ---------------------------------------------------------------------------------------


def test_the_newest_messages_come_in_the_order_of_the_log(store):
    for number in range(150):
        put(store, b"%d" % number)
    assert bodies(store) == [b"%d" % number for number in range(86, 150)]
    assert bodies(store, max_num=1000) == bodies(store)
    assert bodies(store, max_num=3) == [b"147", b"148", b"149"]


def test_both_ends_of_a_time_range_are_exact_to_the_millisecond(store, clock):
    for number in range(20):
        put(store, b"%d" % number)
        clock.advance(300)
    for begin in range(0, 20, 3):
        for end in range(begin, 20, 4):
            found = bodies(store, begin_ms=NOW + begin * 300, end_ms=NOW + end * 300)
            assert found == [b"%d" % number for number in range(begin, end + 1)]
    assert bodies(store, begin_ms=NOW + 1, end_ms=NOW + 299) == []
    assert bodies(store, begin_ms=NOW + 20 * 300) == []


def test_a_message_with_a_key_twice_is_found_once(store):
    put(store, b"a", "k k  k")
    assert bodies(store) == [b"a"]


def test_keys_of_the_same_hash_are_distinguished_only_on_request(store):
    # "Aa" and "BB" have the same hash, and so has any text around them.
    assert key_hash("t", "xAa") == key_hash("t", "xBB")
    for number in range(100):
        put(store, b"A%d" % number, "xAa")
        put(store, b"B%d" % number, "xBB")
    assert len(bodies(store, "xAa", max_num=10)) == 10
    assert {body[:1] for body in bodies(store, "xAa")} == {b"A", b"B"}
    found = bodies(store, "xAa", exact=True)
    assert found == [b"A%d" % number for number in range(36, 100)]


def test_topics_of_the_same_hash_are_distinguished_on_request(tmp_path, clock):
    store = MessageStore.open(tmp_path, config=SMALL, clock=clock)
    put(store, b"1", "k", topic="Aa")
    put(store, b"2", "k", topic="BB")
    assert store.query.by_key("Aa", "k").records.num_rows == 2
    found = store.query.by_key("Aa", "k", exact=True).records
    assert found.column("body").to_pylist() == [b"1"]
    store.close()


def test_a_result_says_how_far_the_index_is(store, clock):
    assert store.query.by_key("t", "k")[1:] == (0, 0)
    clock.advance(5)
    put(store, b"a")
    appended = put(store, b"b")
    put(store, b"c", "")
    assert store.query.by_key("t", "k")[1:] == (NOW + 5, appended.physical_offset)


def test_messages_of_deleted_files_are_left_out(store):
    first = put(store, b"x" * 100)
    while len(store.log.segments.files) < 3:
        put(store, b"x" * 100)
    gone = store.log.segments.files[0]
    store.log.segments.files = store.log.segments.files[1:]
    found = store.query.by_key("t", "k", max_num=64).records
    assert 0 < found.num_rows < 64 or found.column("physical_offset")[0].as_py() >= store.log.start
    assert min(found.column("physical_offset").to_pylist()) >= store.log.start
    with pytest.raises(OffsetOutOfRange) as caught:
        store.query.by_offset(first.physical_offset)
    assert caught.value.min == store.log.start
    store.log.segments.files = [gone, *store.log.segments.files]


def test_entries_that_point_at_no_record_are_passed_over(store):
    appended = put(store, b"a")
    put(store, b"x" * 200)
    hashed, offset = key_hash("t", "k"), appended.physical_offset
    # The entries that a cut by RocketMQ leaves: inside a record, after the log's end, at the end of a file.
    for at in (offset + 4, store.log.end, store.log.end + 999, SMALL.segment_size_bytes - 1):
        store.index.append(
            np.array([hashed], dtype=np.int32), np.array([at]), np.array([NOW]), upto=store.log.end
        )
    store.log.note_confirmed(store.log.end)
    assert bodies(store) == [b"a", b"x" * 200]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [(("", "k", 1), "topic"), (("t", "", 1), "key"), (("t", "k", 0), "max_num")],
)
def test_a_query_that_asks_for_nothing_is_refused(store, arguments, field):
    topic, key, number = arguments
    with pytest.raises(Rejected) as caught:
        store.query.by_key(topic, key, max_num=number)
    assert caught.value.field == field


# --- by id and by place ---------------------------------------------------------------------------


def test_a_message_is_found_by_its_id(store):
    appended = put(store, b"hello")
    message_id = fmt.offset_message_id("127.0.0.1", 10911, appended.physical_offset)
    assert store.query.by_id(message_id).column("body").to_pylist() == [b"hello"]
    assert store.query.by_id(message_id.lower()).num_rows == 1


def test_a_message_is_found_by_an_id_with_an_ipv6_host(tmp_path):
    config = StoreConfig(
        segment_size_bytes=16 * 1024, store_host=("2001:db8::2", 10911), message_index=False
    )
    store = MessageStore.open(tmp_path, config=config)
    appended = put(store, b"six", topic="t")
    message_id = fmt.offset_message_id("2001:db8::2", 10911, appended.physical_offset)
    assert len(message_id) == 56
    assert store.query.by_id(message_id).column("body").to_pylist() == [b"six"]
    store.close()


def test_an_id_of_another_store_is_refused(store):
    appended = put(store, b"hello")
    message_id = fmt.offset_message_id("10.0.0.9", 10911, appended.physical_offset)
    with pytest.raises(Rejected, match=r"given by 10\.0\.0\.9:10911") as caught:
        store.query.by_id(message_id)
    assert caught.value.limit == "127.0.0.1:10911"


@pytest.mark.parametrize("text", ["", "12", "zz" * 16, "0" * 33, "0" * 54, "00 0" * 8])
def test_an_invalid_message_id_is_refused(store, text):
    with pytest.raises(Rejected) as caught:
        store.query.by_id(text)
    assert caught.value.field == "message_id"


def test_an_offset_where_no_record_begins_is_refused(store):
    appended = put(store, b"hello")
    with pytest.raises(Rejected) as caught:
        store.query.by_offset(appended.physical_offset + 1)
    assert caught.value.field == "offset"


def test_a_record_inside_a_body_is_none(store):
    # The body is a whole valid record with its own physical offset.
    outer = store.log.end + fmt.HEADER_BYTES
    body = encode_record(topic="t", body=b"evil", physical_offset=outer, queue_offset=0)
    put(store, body)
    with pytest.raises(Rejected):
        store.query.by_offset(outer)


def test_nothing_above_the_confirmed_end_is_found(store):
    appended = store.put(request([b"a"]))
    with pytest.raises(OffsetOutOfRange) as caught:
        store.query.by_offset(appended.physical_offset)
    assert caught.value.max == store.log.confirmed


def test_a_damaged_body_is_raised_as_damage(store):
    appended = put(store, b"hello")
    file = store.log.segments.find(appended.physical_offset)
    file.pwrite(b"J", appended.physical_offset - file.start + fmt.HEADER_BYTES)
    with pytest.raises(Corrupt) as caught:
        store.query.by_offset(appended.physical_offset)
    assert caught.value.rule == "body CRC"
    file.pwrite(b"h", appended.physical_offset - file.start + fmt.HEADER_BYTES)


# --- by time --------------------------------------------------------------------------------------


def expected(times: list[int], low: int, time_ms: int, boundary: Boundary) -> int:
    if boundary is Boundary.LOWER:
        return next((low + row for row, at in enumerate(times) if at >= time_ms), low + len(times))
    earlier = [low + row for row, at in enumerate(times) if at <= time_ms]
    return earlier[-1] if earlier else low


@pytest.mark.parametrize("boundary", list(Boundary))
def test_a_time_gives_the_same_offset_as_looking_at_all(store, clock, boundary):
    times = []
    chance = np.random.default_rng(3)
    # Several consume queue files and log files; many messages of one millisecond.
    for _ in range(40):
        count = int(chance.integers(1, 5))
        store.put(request([b"x" * 200] * count))
        times += [clock.now_ms()] * count
        clock.advance(int(chance.integers(0, 3)) * 10)
    confirm(store)
    for time_ms in range(NOW - 10, clock.now_ms() + 20, 5):
        found = store.query.offset_by_time("t", 0, time_ms, boundary)
        assert found == expected(times, 0, time_ms, boundary), time_ms
    # The oldest messages are deleted.
    queue = store.consume_queues.find("t", 0)
    queue.min_offset = low = 37
    for time_ms in range(NOW - 10, clock.now_ms() + 20, 5):
        found = store.query.offset_by_time("t", 0, time_ms, boundary)
        assert found == expected(times[low:], low, time_ms, boundary), time_ms
    assert store.query.earliest_store_time("t", 0) == times[low]
    queue.min_offset = 0


def test_times_of_a_queue_without_messages(store):
    for boundary in Boundary:
        assert store.query.offset_by_time("empty", 0, NOW, boundary) == 0
        assert store.query.offset_by_time("none", 0, NOW, boundary) == 0
    assert store.query.earliest_store_time("empty", 0) is None
    assert store.query.earliest_store_time_of_all() is None


def test_the_earliest_times_are_those_of_the_oldest_messages(store, clock):
    began = clock.now_ms()
    clock.advance(50)
    put(store, b"a")
    clock.advance(50)
    put(store, b"b")
    assert store.query.earliest_store_time("t", 0) == NOW + 50
    assert store.query.earliest_store_time_of_all() == began


def test_records_with_an_ipv6_born_host_have_their_time_elsewhere(store, clock):
    clock.advance(7)
    store.put_inner([InnerMessage("t", 0, b"six", born_host=("2001:db8::1", 1))])
    confirm(store)
    assert store.query.earliest_store_time("t", 0) == NOW + 7


def test_batches_of_rows_with_and_without_keys_are_found(store):
    values = batch([b"a", b"b"], properties=properties.encode({"KEYS": "m n"}))
    store.put(request([b"none"]))
    store.put(request([b"none"])._replace(batch=values))
    put(store, b"end", "")
    assert bodies(store, "m") == bodies(store, "n") == [b"a", b"b"]
