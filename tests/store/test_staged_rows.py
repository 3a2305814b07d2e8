"""Staged rows: what a decision names is published once, in order, whatever ends in the middle."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from raymq.store.base.errors import OffsetOutOfRange, Rejected, Unavailable
from raymq.store.base.format import STAGED_TOPIC
from raymq.store.config.store_config import StoreConfig
from raymq.store.engine.message_store import MessageStore
from raymq.store.put.put_hooks import PutHook
from raymq.store.queues.raw_records import decode_records, fault_of
from raymq.store.records.properties import decode
from raymq.store.records.record import PUT_SCHEMA
from raymq.store.records.requests import AppendedRows, PutRequest
from raymq.store.records.staged_range import StagedRange, target_properties
from raymq.store.services import staged_rows
from raymq.store.services.decision_body import DECISION_TEXT_BYTES_MAX, body_of, decision_of
from raymq.store.services.staged_rows import publish
from tests.support.confirming import confirm

CONFIG = StoreConfig(segment_size_bytes=256 * 1024, prewrite_window_bytes=64 * 1024)
#: producer id of the write in its queue
WRITE = 99


class World:
    """A store, and one write of rows to queue 1 of topic t."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.open()
        self.store.topics.create("t", 2, [0])

    def open(self) -> None:
        self.store = MessageStore.open(self.root, config=CONFIG)
        confirm(self.store)

    def kill(self) -> None:
        self.store.abandon()
        self.open()

    def stage(
        self,
        bodies: list[bytes],
        *,
        producer_id: int = 5,
        sequence: int = 0,
        tag: str | None = "red",
    ) -> StagedRange:
        """Put rows as a task does. Every second one has a tag and a property."""
        head = target_properties("t", 1)
        rows = len(bodies)
        columns = [
            pa.array(bodies, pa.binary()),
            pa.array([tag if row % 2 else None for row in range(rows)], pa.string()),
            pa.array([head + (b"KEYS\x01k%d\x02" % row) * (row % 2) for row in range(rows)]),
            pa.array([1_700_000_000_000 + row for row in range(rows)]),
        ]
        put = PutRequest(
            STAGED_TOPIC,
            0,
            pa.record_batch(columns, schema=PUT_SCHEMA),
            producer_id,
            0,
            sequence,
            "quorum",
        )
        appended = self.store.put(put)
        confirm(self.store)
        return StagedRange(producer_id, appended.first_offset, appended.last_offset, rows)

    def publish(self, ranges: list[StagedRange], *, slices: int = 1 << 30) -> bool:
        """Publish for so many slices. Returns: whether all is published."""
        left = [slices]

        def is_over() -> bool:
            left[0] -= 1
            return left[0] <= 0

        found = publish(self.store, "t", 1, producer_id=WRITE, ranges=ranges, is_over=is_over)
        confirm(self.store)
        return found.is_complete

    def rows(self) -> list[dict[str, object]]:
        """What a reader of the queue gets."""
        found: list[dict[str, object]] = []
        offset, end = self.store.queue_range("t", 1)
        while offset < end:
            part = self.store.fetch("t", 1, offset, max_bytes=1 << 20, max_records=1000)
            assert fault_of(part) is None
            found += decode_records(part.records).to_pylist()
            offset = part.next_offset
        return found

    def bodies(self) -> list[bytes]:
        return [row["body"] for row in self.rows()]  # type: ignore[misc]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.store.abandon()


class UpperCase(PutHook):
    """Changes the bodies of all rows."""

    name = "upper-case"

    def before_batch(self, request: PutRequest) -> PutRequest:
        columns = request.batch.columns  # type: ignore[union-attr]
        bodies = pa.array([each.as_py().upper() for each in columns[0]], pa.binary())
        return request._replace(batch=pa.record_batch([bodies, *columns[1:4]], schema=PUT_SCHEMA))


@pytest.mark.parametrize("tag", ["red", None])
def test_a_hook_may_change_published_rows_whose_crcs_are_known(
    world: World, tag: str | None
) -> None:
    staged = world.stage([b"row %d" % row for row in range(100)], tag=tag)
    world.store.hooks.append(UpperCase())
    assert world.publish([staged])
    assert world.bodies() == [b"ROW %d" % row for row in range(100)]


def test_rows_without_a_tag_are_published_as_they_were_sent(world: World) -> None:
    bodies = [b"%d" % row * (1 + row % 7) for row in range(300)]
    first = world.stage(bodies[:200], tag=None)
    last = world.stage(bodies[200:], tag=None, sequence=200)
    assert world.publish([first, last])
    rows = world.rows()
    assert [row["body"] for row in rows] == bodies
    keys = [decode(row["properties"]).get("KEYS") for row in rows]  # type: ignore[arg-type]
    expected = [f"k{row}" if row % 2 else None for row in range(200)]
    assert keys == expected + expected[:100]


def test_staged_rows_are_not_visible_and_are_published_as_they_were_sent(world: World) -> None:
    staged = world.stage([b"%d" % row for row in range(100)])
    assert world.bodies() == []
    assert world.publish([staged])
    rows = world.rows()
    assert [row["body"] for row in rows] == [b"%d" % row for row in range(100)]
    assert [row["born_time_ms"] for row in rows] == [1_700_000_000_000 + row for row in range(100)]
    properties = [decode(row["properties"]) for row in rows]  # type: ignore[arg-type]
    for row, each in enumerate(properties):
        each.pop("_P")
        assert each == ({"TAGS": "red", "KEYS": f"k{row}"} if row % 2 else {})


def test_a_repeated_publication_stores_nothing_more(world: World) -> None:
    ranges = [world.stage([b"a", b"b"]), world.stage([b"c"], sequence=2)]
    for _ in range(3):
        assert world.publish(ranges)
        world.kill()
    assert world.bodies() == [b"a", b"b", b"c"]


def test_rows_of_many_small_ranges_are_put_together(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranges = []
    for number in range(40):
        ranges.append(
            world.stage([b"%d-%d" % (number, row) for row in range(3)], sequence=3 * number)
        )
        world.stage([b"zombie"], producer_id=6, sequence=number)
    puts: list[int] = []
    put = world.store.put

    def counted(request: PutRequest) -> AppendedRows:
        puts.append(request.batch.num_rows)
        return put(request)

    monkeypatch.setattr(world.store, "put", counted)
    assert world.publish(ranges)
    assert puts == [120]
    assert world.bodies() == [b"%d-%d" % (number, row) for number in range(40) for row in range(3)]


def test_a_publication_of_small_ranges_goes_on_where_it_was_killed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged_rows, "SLICE_ROWS", 7)
    ranges = []
    for number in range(8):
        rows = [b"%d" % row for row in range(3 * number, 3 * number + 3)]
        ranges.append(world.stage(rows, sequence=3 * number))
        world.stage([b"zombie"], producer_id=6, sequence=number)
    calls = 0
    while not world.publish(ranges, slices=1):
        calls += 1
        assert world.bodies() == [b"%d" % row for row in range(6 * calls)]
        world.kill()
    assert calls == 3
    assert world.bodies() == [b"%d" % row for row in range(24)]


def test_a_small_range_that_is_of_another_producer_is_refused(world: World) -> None:
    first = world.stage([b"a"])
    other = world.stage([b"zombie"], producer_id=6)
    wrong = other._replace(producer_id=5)
    with pytest.raises(Rejected, match="have 0 rows of the write's producer"):
        world.publish([first, wrong])
    assert world.bodies() == []


def test_a_decision_of_before_compression_is_read_and_a_bomb_is_not() -> None:
    decision = {"write_id": "w", "parts": []}
    assert decision_of(body_of(decision)) == decision
    assert decision_of(b'{"write_id":"w","parts":[]}') == decision
    bomb = zlib.compress(b" " * (DECISION_TEXT_BYTES_MAX + 1))
    assert len(bomb) < 1 << 20
    with pytest.raises(ValueError, match="more than"):
        decision_of(bomb)


def test_rows_of_attempts_that_the_decision_does_not_name_stay_unseen(world: World) -> None:
    world.stage([b"zombie"], producer_id=6)
    ranges = [world.stage([b"a"])]
    world.stage([b"zombie"], producer_id=6, sequence=1)
    assert world.publish(ranges)
    assert world.bodies() == [b"a"]


def test_rows_of_others_between_those_of_a_range_are_left_out(world: World) -> None:
    first = world.stage([b"a", b"b"])
    world.stage([b"other"] * 3, producer_id=6)
    last = world.stage([b"c", b"d"], sequence=2)
    whole = StagedRange(5, first.first_offset, last.last_offset, 4)
    assert world.publish([whole])
    assert world.bodies() == [b"a", b"b", b"c", b"d"]


def test_a_slice_that_has_only_rows_of_others_is_passed_over(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged_rows, "SLICE_ROWS", 3)
    first = world.stage([b"a", b"b"])
    world.stage([b"other"] * 10, producer_id=6)
    last = world.stage([b"c"], sequence=2)
    assert world.publish([StagedRange(5, first.first_offset, last.last_offset, 3)])
    assert world.bodies() == [b"a", b"b", b"c"]


def test_rows_that_the_leader_does_not_have_are_asked_for_again(world: World) -> None:
    staged = world.stage([b"a"])
    with pytest.raises(Unavailable, match="is not in the log of this leader"):
        world.publish([staged._replace(first_offset=50, last_offset=50)])


@pytest.mark.parametrize("have_others_between", [False, True])
def test_a_publication_goes_on_where_it_was_killed(
    world: World, monkeypatch: pytest.MonkeyPatch, have_others_between: bool
) -> None:
    monkeypatch.setattr(staged_rows, "SLICE_ROWS", 7)
    ranges = [world.stage([b"%d" % row for row in range(30)])]
    if have_others_between:
        world.stage([b"other"] * 20, producer_id=6)
    later = world.stage([b"%d" % row for row in range(30, 50)], sequence=30)
    if have_others_between:
        first = ranges[0].first_offset
        ranges = [StagedRange(5, first, later.last_offset, 50)]
    else:
        ranges.append(later)
    ranges.append(world.stage([b"50"], sequence=50))

    calls = 0
    while not world.publish(ranges, slices=1):
        calls += 1
        seen = world.bodies()
        assert seen == [b"%d" % row for row in range(len(seen))]
        world.kill()
    assert calls >= 7
    assert world.bodies() == [b"%d" % row for row in range(51)]
    assert world.publish(ranges, slices=1)


def test_a_decision_that_names_other_rows_is_refused(world: World) -> None:
    staged = world.stage([b"a", b"b"])
    world.stage([b"c"], producer_id=6)
    with pytest.raises(
        Rejected, match=r"have 1 rows of the write's producer for queue 1 of t, not 2"
    ) as refused:
        world.publish([StagedRange(5, staged.last_offset, staged.last_offset + 1, 2)])
    assert refused.value.field == "ranges"
    with pytest.raises(
        Rejected, match="have 0 rows of the write's producer for queue 0 of t, not 2"
    ):
        publish(world.store, "t", 0, producer_id=WRITE, ranges=[staged], is_over=lambda: False)


def test_rows_that_were_deleted_before_they_were_published_are_reported(world: World) -> None:
    staged = world.stage([b"a" * 1000] * 10)
    world.store.begin_next_file()
    confirm(world.store)
    world.store.retention.forget_before(world.store.log.end)
    with pytest.raises(OffsetOutOfRange, match="were deleted before they were published"):
        world.publish([staged])
    assert world.bodies() == []


@pytest.mark.parametrize(
    ("topic", "queue_id", "properties", "producer_id", "field"),
    [
        (STAGED_TOPIC, 0, None, 5, "properties"),
        (STAGED_TOPIC, 0, b"a\x01b\x02" + target_properties("t", 1), 5, "properties"),
        (STAGED_TOPIC, 0, target_properties("t", 1), None, "properties"),
        (STAGED_TOPIC, 1, target_properties("t", 1), 5, "properties"),
        (STAGED_TOPIC, 0, target_properties("t", 2), 5, "queue_id"),
        (STAGED_TOPIC, 0, target_properties("missing", 0), 5, "topic"),
        (STAGED_TOPIC, 0, target_properties(STAGED_TOPIC, 0), 5, "topic"),
    ],
)
def test_rows_that_could_not_be_published_are_refused(
    world: World,
    topic: str,
    queue_id: int,
    properties: bytes | None,
    producer_id: int | None,
    field: str,
) -> None:
    columns = [
        pa.array([b"x"]),
        pa.array([None], pa.string()),
        pa.array([properties], pa.binary()),
        pa.array([0]),
    ]
    batch = pa.record_batch(columns, schema=PUT_SCHEMA)
    with pytest.raises(Rejected) as refused:
        world.store.put(PutRequest(topic, queue_id, batch, producer_id, 0, 0, "quorum"))
    assert refused.value.field == field
    assert world.store.queue_range(STAGED_TOPIC, 0) == (0, 0)
