"""A fetch with a filter gives what is wanted, and says up to where it looked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from raymq.store.base.errors import Corrupt
from raymq.store.base.files import Files
from raymq.store.config.store_config import StoreConfig
from raymq.store.engine.message_store import MessageStore
from raymq.store.put.inner_message import InnerMessage
from raymq.store.queues import reader
from raymq.store.queues.expression_filter import expression_filter
from raymq.store.queues.message_filter import RECORDS_AT_ONCE, LookLimit, MessageFilter, TagFilter
from raymq.store.queues.raw_records import decode_records
from raymq.store.records import record
from raymq.store.records.properties import decode as decode_properties
from raymq.store.records.requests import FetchSlice
from raymq.store.state.shard_state import CLEANUP_POLICY, COMPACTION
from tests.support.confirming import confirm

MANY = 1 << 20


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MessageStore]:
    # A file of the log has a few dozen messages.
    made = MessageStore.open(
        tmp_path, config=StoreConfig(segment_size_bytes=8 * 1024, message_index=False)
    )
    made.topics.create("t", 1, [0])
    made.topics.create("latest", 1, [0], {CLEANUP_POLICY: COMPACTION})
    confirm(made)
    yield made
    made.close()


def put(store: MessageStore, count: int, topic: str = "t") -> None:
    """Messages with the tags a, b and c in turn, and their number as a property and as the key of every second one."""
    for number in range(count):
        properties = {"TAGS": "abc"[number % 3], "n": str(number), "KEYS": f"k{number // 2}"}
        store.put_inner([InnerMessage(topic, 0, b"%d" % number, properties)])
    confirm(store)


def fetch(
    store: MessageStore,
    wanted: MessageFilter,
    offset: int = 0,
    *,
    topic: str = "t",
    max_bytes: int = MANY,
    max_records: int = MANY,
) -> FetchSlice:
    return store.fetch(
        topic, 0, offset, max_bytes=max_bytes, max_records=max_records, wanted=wanted
    )


def bodies(found: FetchSlice) -> list[int]:
    if not len(found.records):
        return []
    return [int(body) for body in decode_records(found.records).column("body").to_pylist()]


def read_all(store: MessageStore, wanted: MessageFilter, **limits: int) -> list[int]:
    """All that a reader gets who goes on where each fetch says."""
    got: list[int] = []
    offset, end = 0, store.queue_range("t", 0)[1]
    while offset < end:
        found = fetch(store, wanted, offset, **limits)
        assert found.first_offset == offset < found.next_offset
        got += bodies(found)
        offset = found.next_offset
    return got


@pytest.mark.parametrize(
    "limits", [{}, {"max_records": 1}, {"max_records": 5}, {"max_bytes": 1}, {"max_bytes": 600}]
)
@pytest.mark.parametrize(
    ("kind", "expression", "tags"),
    [
        ("TAG", "b", {1}),
        ("TAG", "a || c", {0, 2}),
        ("TAG", "none", set()),
        ("TAG", "*", {0, 1, 2}),
        ("SQL92", "TAGS = 'c'", {2}),
    ],
)
def test_a_reader_gets_each_wanted_message_once_whatever_the_limits(
    store: MessageStore, kind: str, expression: str, tags: set[int], limits: dict[str, int]
) -> None:
    put(store, 100)
    expected = [number for number in range(100) if number % 3 in tags]
    assert read_all(store, expression_filter(kind, expression), **limits) == expected


def test_a_fetch_without_a_wanted_message_says_where_to_go_on(
    store: MessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, 40)
    monkeypatch.setattr(reader, "FILTERED_UNITS", 16)
    found = fetch(store, TagFilter("none"))
    assert (found.first_offset, found.next_offset, len(found.records)) == (0, 16, 0)
    found = fetch(store, TagFilter("none"), 32)
    assert found.next_offset == 40


def test_tags_of_the_same_hash_are_told_apart(store: MessageStore) -> None:
    for tag in ("Aa", "BB", "Aa"):
        store.put_inner([InnerMessage("t", 0, b"7", {"TAGS": tag})])
    confirm(store)
    found = fetch(store, TagFilter("Aa"), max_records=1)
    assert (len(found.records), found.next_offset) == (1, 2)
    found = fetch(store, TagFilter("Aa"), 1)
    assert (len(found.records), found.next_offset) == (1, 3)


def test_a_filter_by_records_reads_up_to_a_damaged_one_which_the_next_fetch_reports(
    store: MessageStore, tmp_path: Path
) -> None:
    put(store, 20)
    units = store.consume_queues.get("t", 0).read(9, 1)
    path = next(
        path
        for path in sorted((tmp_path / "commitlog").iterdir(), reverse=True)
        if int(path.name) <= int(units["position"][0])
    )
    with path.open("r+b") as file:
        file.seek(int(units["position"][0]) - int(path.name) + 4)
        file.write(b"\xff\xff\xff\xff")
    wanted = expression_filter("SQL92", "n >= 0")
    found = fetch(store, wanted)
    assert (bodies(found), found.next_offset) == (list(range(9)), 9)
    with pytest.raises(Corrupt):
        fetch(store, wanted, 9)
    # Its unit says that it has another tag: it is not read.
    assert bodies(fetch(store, TagFilter("b"), 9)) == [10, 13, 16, 19]


def test_a_compacted_topic_is_filtered_too(store: MessageStore) -> None:
    put(store, 40, "latest")
    store.compaction.compact("latest", 0, roll=True)
    got, offset = [], 0
    while offset < 40:
        found = fetch(store, TagFilter("b"), offset, topic="latest", max_records=2)
        assert found.next_offset > offset
        got += bodies(found)
        offset = found.next_offset
    # The last message of each key; whatever is not compacted yet may be there, too.
    last = [number for number in range(1, 40, 2) if number % 3 == 1]
    assert [number for number in got if number % 2] == last
    assert got == sorted(set(got))


def test_what_a_filter_gives_are_the_records_of_the_log(store: MessageStore) -> None:
    put(store, 10)
    plain = store.fetch("t", 0, 0, max_bytes=MANY, max_records=10).records
    found = fetch(store, TagFilter("a")).records
    assert found.equals(plain.take(pa.array(np.arange(0, 10, 3))))


# --- bodies ---------------------------------------------------------------------------------------

LARGE = 100_000


@pytest.fixture
def large(tmp_path: Path) -> Iterator[MessageStore]:
    """A store of messages with large bodies, and small ones in between: those with odd numbers are large."""
    made = MessageStore.open(tmp_path, config=StoreConfig(message_index=False))
    made.topics.create("t", 1, [0])
    for number in range(40):
        properties = {"TAGS": "ab"[number % 2], "n": str(number), "long": "x" * (1 + number * 100)}
        body = b"%d" % number if number % 2 == 0 else b"x" * LARGE
        made.put_inner([InnerMessage("t", 0, body, properties)])
    confirm(made)
    yield made
    made.close()


class ReadBytes:
    """Counts the bytes of files that are read while it is there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        read_range, read_into = Files.read_range, Files.read_into

        def counted(files: Files, fd: int, start: int, stop: int, **how: object) -> bytes:
            self.count += stop - start
            return read_range(files, fd, start, stop, **how)

        def counted_into(files: Files, fd: int, target: memoryview, *where: object, **how: object):
            self.count += len(target)
            return read_into(files, fd, target, *where, **how)

        monkeypatch.setattr(Files, "read_range", counted)
        monkeypatch.setattr(Files, "read_into", counted_into)


@pytest.mark.parametrize(("kind", "expression"), [("TAG", "none"), ("SQL92", "n > 99")])
def test_no_body_is_read_of_a_large_message_that_is_not_wanted(
    large: MessageStore, monkeypatch: pytest.MonkeyPatch, kind: str, expression: str
) -> None:
    read = ReadBytes(monkeypatch)
    found = fetch(large, expression_filter(kind, expression))
    assert (len(found.records), found.next_offset) == (0, 40)
    # 78,000 bytes are properties, which a filter by tag does not need either.
    assert read.count < (200_000 if kind == "SQL92" else 2_000)
    fetch(large, expression_filter("SQL92", "n = 7"))
    assert read.count > LARGE


def test_only_the_wanted_bodies_are_in_the_answer(large: MessageStore) -> None:
    found = fetch(large, expression_filter("SQL92", "n = 4 OR n = 9"), max_bytes=1 << 30)
    assert [len(body) for body in decode_records(found.records)["body"].to_pylist()] == [1, LARGE]
    assert found.records.nbytes < LARGE + 3_000


def test_the_properties_of_large_and_small_records_are_those_that_were_put(
    large: MessageStore,
) -> None:
    units = large.consume_queues.get("t", 0).read(0, 40)
    places = units["position"].astype(np.int64), units["size"].astype(np.int64)
    texts = large.log.reads.properties(*places).to_pylist()
    assert [decode_properties(text)["n"] for text in texts] == [str(n) for n in range(40)]
    whole = large.log.reads.records(*places)
    assert texts == record.decode(*whole, columns=("properties",)).column(0).to_pylist()


@pytest.mark.parametrize("at", [0, 4, 28, 35, 84, 85, LARGE + 88, LARGE + 90])
def test_damage_of_a_large_record_is_found_although_its_body_is_not_read(
    large: MessageStore, tmp_path: Path, at: int
) -> None:
    """Size, magic, physical offset, length of the body, of the topic and of the properties."""
    place = int(large.consume_queues.get("t", 0).read(1, 1)["position"][0])
    (path,) = [each for each in (tmp_path / "commitlog").iterdir() if int(each.name) == 0]
    with path.open("r+b") as file:
        file.seek(place + at)
        before = file.read(1)
        file.seek(place + at)
        file.write(bytes([before[0] ^ 0x55]))
    wanted = expression_filter("SQL92", "n >= 0")
    assert fetch(large, wanted).next_offset == 1
    with pytest.raises(Corrupt) as caught:
        fetch(large, wanted, 1)
    assert caught.value.offset == place


# --- limits ---------------------------------------------------------------------------------------


def test_a_read_ends_when_its_time_is_over_and_moves_on_all_the_same(store: MessageStore) -> None:
    put(store, 3 * RECORDS_AT_ONCE)
    wanted = expression_filter("SQL92", "n = 1 OR n = 300")
    got, offset, reads = [], 0, 0
    while offset < 3 * RECORDS_AT_ONCE:
        found = store.fetch(
            "t",
            0,
            offset,
            max_bytes=MANY,
            max_records=MANY,
            wanted=wanted,
            look=LookLimit(MANY, lambda: True),
        )
        assert 0 < found.next_offset - offset <= RECORDS_AT_ONCE
        got += bodies(found)
        offset, reads = found.next_offset, reads + 1
    assert got == [1, 300]
    assert reads >= 3


def test_a_read_looks_at_so_many_units_at_most(store: MessageStore) -> None:
    put(store, 20)
    for wanted in (TagFilter("none"), expression_filter("SQL92", "n > 99")):
        found = store.fetch(
            "t",
            0,
            2,
            max_bytes=MANY,
            max_records=MANY,
            wanted=wanted,
            look=LookLimit(7, lambda: False),
        )
        assert (found.next_offset, len(found.records)) == (9, 0)
