"""Rows of a write with a delivery time: staged, and delivered once by the timers of a real shard."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from raymq.actors.api.puts import put_request
from raymq.client.messages.delivery_times import encode_times
from raymq.client.messages.message import Message
from raymq.client.messages.queue_split import TURN_ROWS
from raymq.client.messages.write_columns import SinkTopic, by_queue
from raymq.client.produce.message_encoder import timer_properties
from raymq.client.staged.committer import Committer
from raymq.client.staged.staged_writer import StagedWriter
from raymq.client.staged.write_commit import StagedRows
from raymq.client.times import EARLIEST_MS
from raymq.client.transport.routes import Routes
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Rejected
from raymq.store.base.format import SCHEDULE_TOPIC, TIMER_TOPIC
from raymq.store.records.properties import decode, encode
from raymq.store.records.record import PUT_SCHEMA
from raymq.store.records.small_batch import SmallBatch
from tests.support.served_shard import PATIENT, ServedShard

UTC = timezone.utc
TIMES = pa.timestamp("us", "UTC")
LONG_PAST = datetime(2001, 9, 9, tzinfo=UTC)


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedShard]:
    with ServedShard(tmp_path_factory.mktemp("delayed") / "shard") as made:
        made.start_flusher()
        yield made


@pytest.fixture
def topic(shard: ServedShard, request: pytest.FixtureRequest) -> str:
    name = re.sub("[^a-z0-9]+", "-", request.node.name)[-100:]
    shard.cluster.create_topic(name, queues=3)
    return name


def frame(values: list[str], times: list[datetime | None], **columns: Any) -> pa.RecordBatch:
    return pa.record_batch({"value": values, "deliver_at": pa.array(times, TIMES)} | columns)


def stage(shard: ServedShard, topic: str, *batches: pa.RecordBatch, turn: int = 0) -> StagedRows:
    found = {topic: SinkTopic.of(topic, shard.cluster.topics()[topic])}
    with StagedWriter(Routes.of(shard.cluster)) as writer:
        for number, batch in enumerate(batches, turn):
            row = number * TURN_ROWS
            for part in by_queue(batch, found, topic=topic, first_row=row, takes_later=True):
                writer.write(*part)
        return writer.finish()


def commit(shard: ServedShard, write_id: str, staged: StagedRows) -> bool:
    """Returns: whether an earlier commit counts."""
    return Committer(Routes.of(shard.cluster)).commit(write_id, staged).is_repeated


def poll(shard: ServedShard, topic: str, count: int) -> list[Any]:
    """The first messages of a topic, and those that came with them."""
    found: list[Any] = []
    with shard.cluster.consumer(topic, start="earliest") as consumer:
        while len(found) < count:
            found += consumer.poll(timeout=20)
    return found


def waiting(shard: ServedShard) -> int:
    """How many rows the timer topic of the shard has got."""
    return int(shard.host.store.state.next_offsets.get((TIMER_TOPIC, 0), 0))


def test_rows_are_delivered_once_after_their_time_with_all_columns(
    shard: ServedShard, topic: str
) -> None:
    soon = datetime.now(UTC) + timedelta(milliseconds=1500)
    kind = pa.map_(pa.string(), pa.string())
    batch = frame(
        ["now", "past", "2001", "soon"],
        [None, LONG_PAST, datetime(2001, 1, 1, tzinfo=UTC), soon],
        key=["k0", "k1", "k2", "k3"],
        tag=["red", "blue", None, "red"],
        properties=pa.array([[("p", "q")]] * 4, kind),
        partition=pa.array([0, 1, 1, None], pa.int32()),
    )
    staged = stage(shard, topic, batch)
    assert staged.rows == 4
    assert not commit(shard, topic, staged)
    first = waiting(shard)
    # The same write again, of the same rows in other places.
    again = stage(shard, topic, batch.slice(2), batch.slice(0, 2))
    assert commit(shard, topic, again)
    assert waiting(shard) == first

    # The last one to come.
    messages = poll(shard, topic, 4)
    found = {each.body: each for each in messages}
    assert sorted(found) == [b"2001", b"now", b"past", b"soon"]
    assert len(messages) == 4
    assert found[b"soon"].store_time_ms >= soon.timestamp() * 1000
    assert [found[b"past"].key, found[b"past"].tag, found[b"past"].queue_id] == [b"k1", "blue", 1]
    assert all(each.properties == {"p": "q"} for each in messages)


def test_a_message_of_a_delay_level_is_read_once_after_its_delay_with_its_flags(
    shard: ServedShard, topic: str
) -> None:
    message = Message(
        topic=topic,
        body=b"late",
        key=b"k",
        tag="red",
        delay_level=1,
        flag=7,
        sys_flag=0x301,
        born_host="[2001:db8::1]:5000",
        wait_store_ok=False,
    )
    begun_ms = Clock().now_ms()
    with shard.cluster.producer() as producer:
        receipt = producer.send(message).result(30)
        producer.send(topic, b"now").result(30)
    assert (receipt.topic, receipt.queue_id) == (SCHEDULE_TOPIC, 0)

    found = {each.body: each for each in poll(shard, topic, 2)}
    now, late = found[b"now"], found[b"late"]
    assert late.store_time_ms >= begun_ms + 1_000
    assert (late.key, late.tag, late.properties) == (b"k", "red", {})
    assert (late.flag, late.sys_flag) == (7, 0x301)
    assert late.born_host == "[2001:db8:0:0:0:0:0:1]:5000"
    assert (now.flag, now.sys_flag) == (0, 0)
    assert now.born_host is not None
    assert now.born_host.startswith("127.0.0.1:")


def test_rows_without_a_key_are_the_same_rows_in_another_queue(
    shard: ServedShard, topic: str
) -> None:
    batch = frame(["a", "b"], [LONG_PAST, LONG_PAST])
    assert not commit(shard, topic, stage(shard, topic, batch))
    assert commit(shard, topic, stage(shard, topic, batch, turn=1))
    other = frame(["a", "b"], [LONG_PAST, LONG_PAST + timedelta(seconds=1)])
    with pytest.raises(Rejected, match="was committed before with 2 other rows"):
        commit(shard, topic, stage(shard, topic, other))
    assert len(poll(shard, topic, 2)) == 2


def test_the_order_of_the_pairs_in_a_map_does_not_make_other_rows(
    shard: ServedShard, topic: str
) -> None:
    pairs = [("a", "1"), ("b", "2")]
    kind = pa.map_(pa.string(), pa.string())
    one, other = (
        frame(["x"], [LONG_PAST], properties=pa.array([each], kind))
        for each in (pairs, pairs[::-1])
    )
    assert not commit(shard, topic, stage(shard, topic, one))
    assert commit(shard, topic, stage(shard, topic, other))
    assert len(poll(shard, topic, 1)) == 1


class EndingRoutes:
    """Routes whose process ends after the n-th answer."""

    def __init__(self, routes: Routes, calls: int) -> None:
        self._routes = routes
        self._calls = calls

    def call(self, shard: int, op: str, args: dict[str, Any]) -> dict[str, Any]:
        answer = self._routes.call(shard, op, args)
        self._calls -= 1
        if self._calls < 0:
            raise KeyboardInterrupt
        return answer


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_a_commit_that_ended_in_the_middle_is_completed(
    shard: ServedShard, topic: str, calls: int
) -> None:
    batch = frame([f"{row}" for row in range(9)], [None, LONG_PAST, LONG_PAST] * 3)
    before = waiting(shard)
    ending: Any = EndingRoutes(Routes.of(shard.cluster), calls)
    with pytest.raises(KeyboardInterrupt):
        Committer(ending).commit(topic, stage(shard, topic, batch))
    assert commit(shard, topic, stage(shard, topic, batch))
    assert sorted(int(each.body) for each in poll(shard, topic, 9)) == list(range(9))
    assert waiting(shard) - before == 6


def test_what_a_publication_could_refuse_is_refused_while_rows_are_staged(
    shard: ServedShard, topic: str
) -> None:
    def refused(text: str, batch: pa.RecordBatch, name: str = topic) -> None:
        with pytest.raises(Rejected, match=text):
            stage(shard, name, batch)

    # The largest row that is staged can be published, and delivered.
    taken = StagedRows.joined([])

    def stage_larger_and_larger() -> None:
        nonlocal taken
        for size in range(63_400, 64_001, 10):
            taken = stage(shard, topic, frame(["x" * size], [LONG_PAST]))

    with pytest.raises(Rejected, match="row 0 of a batch for later makes a record of"):
        stage_larger_and_larger()
    commit(shard, topic, taken)
    (largest,) = poll(shard, topic, 1)
    assert 63_400 < len(largest.body) < 64_000
    # Of a row for now the limit is another one.
    assert stage(shard, topic, frame(["x" * 65_000], [None])).rows == 1

    shard.cluster.create_topic("compacted", queues=1, compacted=True)
    refused("has no KEYS", frame(["x"], [LONG_PAST]), "compacted")
    keys = pa.array([["k"]], pa.list_(pa.string()))
    assert stage(shard, "compacted", frame(["x"], [LONG_PAST], index_keys=keys)).rows == 1


def test_a_cluster_whose_timers_are_switched_off_refuses_the_rows(tmp_path: Path) -> None:
    with ServedShard(tmp_path / "off", replace(PATIENT, timer_wheel_enabled=False)) as off:
        off.start_flusher()
        off.cluster.create_topic("t", queues=1)
        with pytest.raises(Rejected, match="timers are switched off"):
            stage(off, "t", frame(["x"], [LONG_PAST]))


@pytest.mark.parametrize(
    ("properties", "field"),
    [
        ({"TIMER_OUT_MS": "0", "REAL_TOPIC": "raw"}, "properties"),
        ({"TIMER_OUT_MS": "0", "REAL_TOPIC": "raw", "REAL_QID": "7"}, "queue_id"),
        ({"TIMER_OUT_MS": "0", "REAL_TOPIC": "missing", "REAL_QID": "0"}, "topic"),
        ({"TIMER_OUT_MS": "9" * 15, "REAL_TOPIC": "raw", "REAL_QID": "0"}, "deliver_at_ms"),
    ],
)
def test_a_row_that_could_not_be_delivered_is_not_staged(
    shard: ServedShard, properties: dict[str, str], field: str
) -> None:
    shard.cluster.create_topic("raw", queues=1)
    with StagedWriter(Routes.of(shard.cluster)) as writer:
        writer.write(TIMER_TOPIC, 0, raw_row(properties))
        with pytest.raises(Rejected) as refused:
            writer.finish()
    assert refused.value.field == field


def raw_row(properties: dict[str, str]) -> pa.RecordBatch:
    columns = [
        pa.array([b"x"]),
        pa.array([None], pa.string()),
        pa.array([encode(properties)]),
        pa.array([0]),
    ]
    return pa.record_batch(columns, schema=PUT_SCHEMA)


def test_the_timers_of_a_shard_have_one_queue(shard: ServedShard) -> None:
    arguments = {"write_id": "w", "topic": TIMER_TOPIC, "queue_id": 1, "ranges": []}
    with pytest.raises(Rejected) as refused:
        Routes.of(shard.cluster).call(0, "publish_rows", arguments)
    assert refused.value.field == "queue_id"


@pytest.mark.parametrize("is_small", [False, True])
def test_no_message_of_the_network_can_say_that_its_rows_were_staged(is_small: bool) -> None:
    row = raw_row({"TIMER_OUT_MS": "0", "REAL_TOPIC": "raw", "REAL_QID": "0"})
    rows = SmallBatch(*(each.to_pylist() for each in row.columns)) if is_small else row
    place = {"topic": TIMER_TOPIC, "queue": 0, "pid": 7, "epoch": 0, "seq": 0, "acks": "quorum"}
    assert not put_request(place | {"was_staged": True}, rows).was_staged


# --- the times -------------------------------------------------------------------------------------

NOW_MS = 1_700_000_000_250


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_times_of_every_unit_are_those_of_a_producer(unit: str) -> None:
    times_ms = [NOW_MS - NOW_MS % 1000 + 1000 * step for step in (1, 2, 86_400)]
    per_s = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[unit]
    column = pa.array([each // 1000 * per_s for each in times_ms], pa.timestamp(unit, "UTC"))
    assert encode_times(column).to_pylist() == [timer_properties(each, NOW_MS) for each in times_ms]


def test_a_part_of_a_millisecond_is_rounded_up_and_null_stays_null() -> None:
    us = 1000 * EARLIEST_MS
    times = pa.array(
        [us + 1, us + 1000, us + 1001, None, us + 1_000_000], pa.timestamp("us", "Asia/Tokyo")
    )
    found = [each and decode(each) for each in encode_times(times).to_pylist()]
    assert [each and int(each["TIMER_DELIVER_MS"]) - EARLIEST_MS for each in found] == [
        1,
        1,
        2,
        None,
        1000,
    ]


@pytest.mark.parametrize("is_negative", [True, False])
@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_a_time_before_2001_is_refused_with_its_row(unit: str, is_negative: bool) -> None:
    per_s = {"s": 1, "ms": 1000, "us": 10**6, "ns": 10**9}[unit]
    earliest = EARLIEST_MS // 1000 * per_s
    early = -(1 << 62) if is_negative else earliest - 1
    times = pa.array([None, earliest, early], pa.timestamp(unit, "UTC"))
    with pytest.raises(Rejected, match="row 2: deliver_at is before 2001") as refused:
        encode_times(times)
    assert (refused.value.field, refused.value.row) == ("deliver_at", 2)
    assert refused.value.limit


@pytest.mark.parametrize(("unit", "time"), [("s", 1 << 62), ("ms", 1 << 62), ("us", 1 << 62)])
def test_how_far_timers_reach_is_for_the_shard_to_say(
    shard: ServedShard, topic: str, unit: str, time: int
) -> None:
    times = pa.array([time], pa.timestamp(unit, "UTC"))
    with pytest.raises(
        Rejected, match=r"timers reach 259200000 ms \(timer_max_delay_s\)"
    ) as refused:
        stage(shard, topic, pa.record_batch({"value": ["x"], "deliver_at": times}))
    assert refused.value.field == "deliver_at_ms"
    assert refused.value.limit


def test_a_cluster_whose_timers_reach_further_takes_later_times(tmp_path: Path) -> None:
    week = replace(PATIENT, timer_max_delay_s=7 * 86_400)
    with ServedShard(tmp_path / "week", week) as far:
        far.start_flusher()
        far.cluster.create_topic("t", queues=1)
        later = datetime.now(UTC) + timedelta(days=6)
        assert stage(far, "t", frame(["x"], [later])).rows == 1


@pytest.mark.parametrize("kind", [pa.int64(), pa.timestamp("us")])
def test_times_have_a_time_zone(kind: pa.DataType) -> None:
    with pytest.raises(Rejected, match="a timestamp with a time zone"):
        encode_times(pa.array([1], kind))


def test_rows_for_later_need_a_caller_that_takes_them(shard: ServedShard) -> None:
    shard.cluster.create_topic("direct", queues=1)
    found = {"direct": SinkTopic.of("direct", shard.cluster.topics()["direct"])}
    batch = frame(["x"], [datetime.fromtimestamp(Clock().now_ms() / 1000, UTC)])
    with pytest.raises(Rejected, match="delivery='staged'") as refused:
        list(by_queue(batch, found, topic="direct", first_row=0))
    assert refused.value.field == "deliver_at"
