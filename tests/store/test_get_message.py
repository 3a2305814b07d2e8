"""Reading a queue with RocketMQ's statuses, limits and filters."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymq.store.base import format as fmt
from raymq.store.base.errors import Rejected
from raymq.store.base.files import Files
from raymq.store.config.store_config import StoreConfig
from raymq.store.engine.message_store import MessageStore
from raymq.store.put.inner_message import InnerMessage
from raymq.store.queues import message_filter
from raymq.store.queues.consume_queue import BLANK_SIZE
from raymq.store.queues.expression_filter import expression_filter
from raymq.store.queues.get_message import GetMessage, GetMessageStatus
from raymq.store.records import properties
from raymq.store.records.record import decode
from tests.support.batches import request
from tests.support.clock import ManualClock
from tests.support.confirming import confirm

SMALL = StoreConfig(
    segment_size_bytes=16 * 1024, consume_queue_file_size_bytes=400, message_index=False
)
LOTS = 1 << 40


class SmallMemory(Files):
    """A host with a memory of a given size."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.nbytes = nbytes

    def memory_bytes(self) -> int:
        return self.nbytes


def opened(root, memory: int = LOTS, **options: int) -> MessageStore:
    values = {field.name: getattr(SMALL, field.name) for field in fields(SMALL)}
    store = MessageStore.open(
        root,
        config=StoreConfig(**{**values, **options}),
        files=SmallMemory(memory),
        clock=ManualClock(),
    )
    if "t" not in store.state.topics:
        store.topics.create("t", 2, [0])
        confirm(store)
    return store


def put(store: MessageStore, count: int, *, size: int = 10, tag: str | None = None) -> None:
    store.put(request([b"x" * size] * count, tag=tag))
    confirm(store)


def put_with(store: MessageStore, *values: dict[str, str]) -> None:
    for value in values:
        store.put_inner([InnerMessage("t", 0, b"b", value)])
    confirm(store)


@pytest.fixture
def store(tmp_path):
    made = opened(tmp_path)
    yield made
    made.close()


def summary(result) -> tuple[str, int, list[int]]:
    return result.status.value, result.next_begin_offset, result.queue_offsets.tolist()


# --- the statuses ---------------------------------------------------------------------------------


def test_messages_are_found_and_the_next_offset_is_after_them(store):
    put(store, 5)
    result = store.get_message("t", 0, 1, 3)
    assert summary(result) == ("FOUND", 4, [1, 2, 3])
    assert (result.min_offset, result.max_offset) == (0, 5)
    bodies = [decode(raw, [0], [len(raw)])["body"][0].as_py() for raw in result.records.to_pylist()]
    assert bodies == [b"x" * 10] * 3


def test_a_missing_queue_answers_no_matched_logic_queue(store):
    for topic, queue in (("none", 0), ("t", 2), ("t", -1)):
        result = store.get_message(topic, queue, 7, 1)
        assert summary(result) == ("NO_MATCHED_LOGIC_QUEUE", 0, [])


def test_a_queue_that_never_had_a_message_has_none(store):
    assert summary(store.get_message("t", 1, 7, 1)) == ("NO_MESSAGE_IN_QUEUE", 0, [])


def test_an_offset_that_was_deleted_is_too_small(store):
    put(store, 5)
    store.consume_queues.get("t", 0).min_offset = 2
    assert summary(store.get_message("t", 0, 1, 1)) == ("OFFSET_TOO_SMALL", 2, [])
    store.consume_queues.get("t", 0).min_offset = 0


def test_the_next_offset_to_come_overflows_by_one(store):
    put(store, 5)
    assert summary(store.get_message("t", 0, 5, 1)) == ("OFFSET_OVERFLOW_ONE", 5, [])


def test_an_offset_after_it_overflows_badly(store):
    put(store, 5)
    assert summary(store.get_message("t", 0, 6, 1)) == ("OFFSET_OVERFLOW_BADLY", 5, [])


def test_an_offset_that_the_log_has_and_dispatch_not_yet_is_waited_for(store):
    put(store, 5)
    store.put(request([b"y"] * 3))
    assert summary(store.get_message("t", 0, 7, 1)) == ("OFFSET_OVERFLOW_ONE", 7, [])


def test_a_missing_consume_queue_file_leads_to_the_next_one(store):
    put(store, 50)
    queue = store.consume_queues.get("t", 0)._queue
    kept = queue.files
    hole = kept[1]
    queue.files = [kept[0], _Hole(hole), *kept[2:]]
    queue.find, found = (
        (lambda at: None if hole.start <= at < hole.start + 400 else found(at)),
        (queue.find),
    )
    assert summary(store.get_message("t", 0, 25, 5)) == ("OFFSET_FOUND_NULL", 40, [])
    del queue.find
    queue.files = kept


class _Hole:
    def __init__(self, file) -> None:
        self.start, self.size = file.start, file.size

    def sync(self) -> None: ...
    def close(self) -> None: ...


def test_messages_whose_log_file_is_gone_were_removing(store):
    put(store, 60, size=500)
    files = store.log.segments.files
    assert len(files) > 2
    store.log.segments.files = files[1:]
    result = store.get_message("t", 0, 0, 5)
    assert result.status is GetMessageStatus.MESSAGE_WAS_REMOVING
    # One consume queue file is read, and reading continues after the deleted ones.
    assert summary(result)[1:] == (20, [])
    again = store.get_message("t", 0, 20, 5)
    assert again.status is GetMessageStatus.FOUND
    store.log.segments.files = files


def test_messages_that_are_not_wanted_are_not_matched(store):
    put(store, 5, tag="A")
    wanted = expression_filter("TAG", "B")
    result = store.get_message("t", 0, 0, 3, wanted=wanted)
    assert summary(result) == ("NO_MATCHED_MESSAGE", 5, [])


# --- the limits -----------------------------------------------------------------------------------


def test_one_answer_has_32_messages_from_memory_and_8_from_disk(tmp_path):
    store = opened(tmp_path / "a", consume_queue_file_size_bytes=4000)
    put(store, 60)
    assert len(store.get_message("t", 0, 0, 100).queue_offsets) == 32
    assert not store.get_message("t", 0, 0, 100).suggest_pulling_from_slave
    store.close()
    store = opened(tmp_path / "b", memory=0, consume_queue_file_size_bytes=4000)
    put(store, 60)
    result = store.get_message("t", 0, 0, 100)
    assert len(result.queue_offsets) == 8
    assert result.suggest_pulling_from_slave
    store.close()


def test_one_answer_has_the_bytes_that_memory_and_disk_allow(tmp_path):
    options = {
        "max_transfer_bytes_on_message_in_memory": 3000,
        "max_transfer_bytes_on_message_in_disk": 1500,
    }
    for memory, count in ((LOTS, 5), (0, 2)):
        store = opened(tmp_path / str(memory), memory=memory, **options)
        put(store, 20, size=500)
        assert len(store.get_message("t", 0, 0, 100).queue_offsets) == count
        assert len(store.get_message("t", 0, 0, 100, max_bytes=1).queue_offsets) == 1
        store.close()


def test_an_answer_ends_with_a_consume_queue_file(store):
    put(store, 50)
    assert summary(store.get_message("t", 0, 15, 30)) == ("FOUND", 20, [15, 16, 17, 18, 19])


def test_a_filter_looks_at_800_units_or_at_as_many_files_as_it_may(tmp_path):
    wanted = expression_filter("TAG", "B")
    for files, size, seen in ((1, 400, 20), (3, 400, 60), (1, 40_000, 800)):
        store = opened(
            tmp_path / f"{files}-{size}",
            consume_queue_file_size_bytes=size,
            travel_cq_file_num_when_get_message=files,
        )
        put(store, 1000, size=1, tag="A")
        result = store.get_message("t", 0, 0, 1, wanted=wanted)
        assert summary(result) == ("NO_MATCHED_MESSAGE", seen, [])
        store.close()


# --- bytes ----------------------------------------------------------------------------------------


def test_an_answer_over_two_log_files_is_in_order(tmp_path):
    store = opened(tmp_path, consume_queue_file_size_bytes=4000)
    put(store, 60, size=500)
    result = store.get_message("t", 0, 10, 32)
    offsets = [
        int(decode(raw, [0], [len(raw)])["queue_offset"][0].as_py())
        for raw in result.records.to_pylist()
    ]
    assert offsets == result.queue_offsets.tolist() == list(range(10, 42))
    store.close()


# --- filters --------------------------------------------------------------------------------------


def test_tags_of_the_same_hash_are_distinguished(store):
    assert fmt.tags_code("Aa") == fmt.tags_code("BB")
    put_with(store, {"TAGS": "Aa"}, {"TAGS": "BB"}, {}, {"TAGS": "C"}, {"TAGS": "Aa"})
    result = store.get_message("t", 0, 0, 10, wanted=expression_filter("TAG", "Aa || C"))
    assert summary(result) == ("FOUND", 5, [0, 3, 4])


@pytest.mark.parametrize("expression", ["*", "", "A || *"])
def test_everything_is_wanted(store, expression):
    put_with(store, {"TAGS": "A"}, {})
    result = store.get_message("t", 0, 0, 10, wanted=expression_filter("TAG", expression))
    assert result.queue_offsets.tolist() == [0, 1]


def test_properties_are_filtered_by_sql(store):
    put_with(store, *({"n": str(number)} for number in range(10)), {})
    result = store.get_message(
        "t", 0, 0, 20, wanted=expression_filter("SQL92", "n BETWEEN 3 AND 5")
    )
    assert summary(result) == ("FOUND", 11, [3, 4, 5])


@pytest.mark.parametrize(
    ("kind", "expression"), [("TAG", " || "), ("XPATH", "a"), ("SQL92", "upper(a) = 'X'")]
)
def test_an_invalid_filter_is_refused(kind, expression):
    with pytest.raises(Rejected) as caught:
        expression_filter(kind, expression)
    assert caught.value.field == "filter"


# --- the whole against one unit after the other ---------------------------------------------------


def one_by_one(units, *, end, memory, start, max_nums, max_bytes, tags, config):
    """DefaultMessageStore#getMessage's loop over one consume queue file."""
    rows, taken, seen, status = [], 0, 0, "NO_MATCHED_MESSAGE"
    skipping = False
    for number, (position, size, code) in enumerate(units):
        seen = number
        near = end - position <= memory
        if rows:
            most = config.max_transfer_count_on_message_in_memory
            most_bytes = config.max_transfer_bytes_on_message_in_memory
            if not near:
                most = config.max_transfer_count_on_message_in_disk
                most_bytes = config.max_transfer_bytes_on_message_in_disk
            if len(rows) + 1 > max_nums or taken + size > max_bytes:
                break
            if taken + size > most_bytes or len(rows) > most - 1:
                break
        seen = number + 1
        gone = position < start or size == BLANK_SIZE
        if skipping and gone:
            continue
        if tags is not None and code not in tags:
            status = status if rows else "NO_MATCHED_MESSAGE"
            continue
        if gone:
            status = status if rows else "MESSAGE_WAS_REMOVING"
            skipping = True
            continue
        skipping = False
        rows.append(number)
        taken += size
        status = "FOUND"
    return rows, seen, status


class _Wanted:
    needs_records = False

    def __init__(self, tags) -> None:
        self.tags = tags

    def units(self, codes):
        return np.isin(codes, list(self.tags))


class _Log:
    """The part of a log that `_pick` uses."""

    def __init__(self, start: int, end: int, memory: int) -> None:
        self.start, self.end = start, end
        self.files = SmallMemory(memory)
        self.config = StoreConfig(
            access_message_in_memory_max_ratio=100,
            max_transfer_bytes_on_message_in_memory=90,
            max_transfer_count_on_message_in_memory=6,
            max_transfer_bytes_on_message_in_disk=50,
            max_transfer_count_on_message_in_disk=3,
        )


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 2)), min_size=1, max_size=25),
    st.integers(0, 200),
    st.integers(0, 400),
    st.integers(1, 9),
    st.integers(1, 120),
    st.sampled_from([None, {0}, {1, 2}, set()]),
)
@settings(max_examples=200, deadline=None)
def test_all_units_at_once_give_what_one_after_the_other_gives(
    parts, start, memory, max_nums, max_bytes, tags
):
    units = np.zeros(len(parts), dtype=fmt.QUEUE_UNIT_DTYPE)
    at = 0
    for row, (size, code) in enumerate(parts):
        units[row] = (at, size, code)
        at += size
    log = _Log(start, at, memory)
    reader = GetMessage(log, None, None)
    picked = reader._pick(units, max_nums, max_bytes, None if tags is None else _Wanted(tags))
    expected = one_by_one(
        units.tolist(),
        end=at,
        memory=memory,
        start=start,
        max_nums=max_nums,
        max_bytes=max_bytes,
        tags=tags,
        config=log.config,
    )
    assert (picked.rows.tolist(), picked.examined, picked.status.value) == expected


def test_filters_by_records_look_at_no_more_than_they_need(store, monkeypatch):
    monkeypatch.setattr(message_filter, "RECORDS_AT_ONCE", 2)
    put_with(store, *({"n": str(number % 3)} for number in range(18)))
    wanted = expression_filter("SQL92", "n = 1")
    assert summary(store.get_message("t", 0, 0, 2, wanted=wanted)) == ("FOUND", 5, [1, 4])
    assert summary(store.get_message("t", 0, 5, 9, wanted=wanted)) == ("FOUND", 18, [7, 10, 13, 16])
    assert pa.types.is_binary(store.get_message("t", 0, 0, 2, wanted=wanted).records.type)
    assert properties.decode(b"n\x011\x02") == {"n": "1"}
