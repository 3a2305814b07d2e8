"""Batches and streams of format("raymq"), planned and read over real Flight from a shard in memory. No Spark."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from raymq.client.consume.queue_ranges import QueueRange, read_queue_range
from raymq.cluster.cluster import Cluster
from raymq.spark import queue_lookup
from raymq.spark.batch_plan import plan_batch
from raymq.spark.offsets import Offsets, TopicQueue, report_loss
from raymq.spark.queue_lookup import QueueLookup, connect
from raymq.spark.source_options import SourceOptions
from raymq.spark.stream_progress import LOWER_END_S, StreamProgress
from raymq.store.base.clock import Clock
from raymq.store.base.errors import OffsetOutOfRange, Rejected, Unavailable
from raymq.store.queues.raw_records import decode_records
from tests.support.batches import put_one, request
from tests.support.clock import ManualClock
from tests.support.fake_backend import FakeBackend, FakeCluster

T0, T1 = TopicQueue("t", 0), TopicQueue("t", 1)


class Source:
    """A shard with the topics t (two queues) and u (one), and reads of it."""

    def __init__(self) -> None:
        self.shard = FakeCluster()
        self.shard.create_topic("t", queues=2)
        self.shard.create_topic("u", queues=1)
        self.backend: FakeBackend = self.shard.backends[0]
        self.clusters: list[Cluster] = []

    def put(self, topic: str, queue: int, *bodies: bytes) -> None:
        put_one(self.backend, request(list(bodies), topic=topic, queue=queue))

    def options(self, **given: str) -> SourceOptions:
        address = f"raymq://{self.shard.endpoints[0]}"
        named = {"raymq.address": address, "raymq.token": self.shard.token, **given}
        if not {"subscribe", "subscribePattern", "assign"} & set(given):
            named["subscribe"] = "t"
        return SourceOptions.parse(named)

    def lookup(self, options: SourceOptions) -> QueueLookup:
        self.clusters.append(connect(options))
        return QueueLookup(self.clusters[-1], options.subscription)

    def plan(self, **given: str) -> list[QueueRange]:
        options = self.options(**given)
        return plan_batch(self.lookup(options), options)

    def stream(self, *, clock: Clock | None = None, **given: str) -> StreamProgress:
        options = self.options(**given)
        return StreamProgress(self.lookup(options), options, clock=clock)

    def read(self, ranges: list[QueueRange], *, fail: bool = True) -> list[bytes]:
        """The bodies, as tasks with a pickled handle read them."""
        cluster = pickle.loads(pickle.dumps(self.lookup(self.options()).cluster))
        found: list[bytes] = []
        for each in ranges:
            on_loss = partial(report_loss, fail=fail)
            for records in read_queue_range(cluster, each, on_loss=on_loss):
                found += decode_records(records).column("body").to_pylist()
        return found

    def close(self) -> None:
        for cluster in self.clusters:
            cluster.close()
        self.shard.close()


@pytest.fixture
def source() -> Iterator[Source]:
    made = Source()
    yield made
    made.close()


# --- batches --------------------------------------------------------------------------------------


def test_a_batch_reads_every_queue_of_every_topic(source: Source) -> None:
    source.put("t", 0, b"a", b"b")
    source.put("t", 1, b"c")
    source.put("u", 0, b"d")
    assert source.read(source.plan(subscribe="t,u")) == [b"a", b"b", b"c", b"d"]
    assert source.read(source.plan(subscribePattern="u|v")) == [b"d"]
    assert source.plan(subscribePattern="nothing.*") == []
    assert source.read(source.plan(assign='{"t": [1], "u": [0]}')) == [b"c", b"d"]
    assert len(source.plan(minPartitions="3")) == 3


def test_a_topic_or_queue_that_does_not_exist_is_refused(source: Source) -> None:
    with pytest.raises(Rejected, match="does not exist") as refused:
        source.plan(subscribe="t,nowhere")
    assert refused.value.field == "topic"
    with pytest.raises(Rejected, match="has the queues 0 to 1, not 5") as refused:
        source.plan(assign='{"t": [0, 5]}')
    assert refused.value.field == "assign"


def test_a_batch_begins_and_ends_at_offsets(source: Source) -> None:
    source.put("t", 0, b"0", b"1", b"2", b"3")
    source.put("t", 1, b"x", b"y")
    ranges = source.plan(
        startingOffsets='{"t": {"0": 1, "1": -2}}', endingOffsets='{"t": {"0": 3, "1": -1}}'
    )
    assert source.read(ranges) == [b"1", b"2", b"x", b"y"]


def test_a_batch_that_ends_before_it_begins_is_refused(source: Source) -> None:
    source.put("t", 0, b"0", b"1", b"2")
    begin, end = '{"t": {"0": 2, "1": 0}}', '{"t": {"0": 1, "1": -1}}'
    with pytest.raises(Rejected, match="queue 0 ends at 1, before startingOffsets") as refused:
        source.plan(startingOffsets=begin, endingOffsets=end)
    assert (refused.value.field, refused.value.limit, refused.value.found) == (
        "endingOffsets",
        2,
        1,
    )
    assert source.plan(startingOffsets=begin, endingOffsets=begin.replace("0}", "-1}")) == []
    # Until a time there may be nothing after an offset.
    assert source.plan(startingOffsets=begin, endingTimestamp="1") == []


def test_a_batch_begins_and_ends_at_times(source: Source) -> None:
    source.backend.clock = clock = ManualClock()
    times = []
    for number in range(20):
        clock.advance(10)
        source.put("t", 0, b"%d" % number)
        times.append(clock.now_ms())
    queue = {"assign": '{"t": [0]}'}
    for first, last in ((0, 20), (3, 17), (19, 20), (7, 7)):
        end = times[last] if last < 20 else times[-1] + 1
        ranges = source.plan(startingTimestamp=f"{times[first]}", endingTimestamp=f"{end}", **queue)
        assert source.read(ranges) == [b"%d" % number for number in range(first, last)]

    between = f'{{"t": {{"0": {times[4] + 1}}}}}'
    assert source.read(source.plan(startingOffsetsByTimestamp=between, **queue))[0] == b"5"
    late = {"startingTimestamp": str(times[-1] + 1), **queue}
    with pytest.raises(Rejected, match="no message stored at"):
        source.plan(**late)
    assert source.plan(startingOffsetsByTimestampStrategy="latest", **late) == []


def test_a_limit_of_a_batch_is_only_warned_of(
    source: Source, caplog: pytest.LogCaptureFixture
) -> None:
    source.put("t", 0, b"a", b"b")
    with caplog.at_level(logging.WARNING, "raymq"):
        assert source.read(source.plan(maxOffsetsPerTrigger="1")) == [b"a", b"b"]
    assert "no effect on a batch" in caplog.text


def test_expired_offsets_of_a_batch_are_an_error_or_a_warning(
    source: Source, caplog: pytest.LogCaptureFixture
) -> None:
    source.put("t", 0, b"0", b"1", b"2", b"3")
    planned = source.plan()
    source.backend.trim("t", 0, 2)
    with pytest.raises(OffsetOutOfRange, match="offsets 0 to 1 expired"):
        source.read(planned)
    begin = '{"t": {"0": 1, "1": 0}}'
    with pytest.raises(OffsetOutOfRange, match="holds the offsets 2 to 4, not 1"):
        source.plan(startingOffsets=begin)
    with caplog.at_level(logging.WARNING, "raymq"):
        assert source.read(planned, fail=False) == [b"2", b"3"]
        assert source.read(source.plan(startingOffsets=begin, failOnDataLoss="false")) == [
            b"2",
            b"3",
        ]
    assert "offsets 0 to 1 expired" in caplog.text


def test_the_next_address_is_tried_when_one_does_not_answer(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_lookup, "CONNECT_S", 0)
    there = f"raymq://{source.shard.endpoints[0]}"
    source.put("t", 0, b"a")
    assert source.read(source.plan(**{"raymq.address": f"raymq://127.0.0.1:1,{there}"})) == [b"a"]
    with pytest.raises(Unavailable, match="no shard answers at raymq://127.0.0.1:1"):
        source.plan(**{"raymq.address": "raymq://127.0.0.1:1"})
    with pytest.raises(Rejected, match="token"):
        source.plan(**{"raymq.token": "wrong"})


# --- streams --------------------------------------------------------------------------------------


def drain(stream: StreamProgress, start: Offsets, limit: int | None) -> list[Offsets]:
    """The ends of batches, until there is nothing more."""
    found = [start]
    while (end := stream.latest(found[-1], limit)) != found[-1]:
        found.append(end)
    return found


def test_a_stream_from_the_earliest_offset_reads_all_in_batches_of_the_limit(
    source: Source,
) -> None:
    source.put("t", 0, *(b"a%d" % n for n in range(90)))
    source.put("t", 1, *(b"b%d" % n for n in range(10)))
    stream = source.stream(startingOffsets="earliest")
    ends = drain(stream, stream.initial(), 20)
    assert [sum(end.values()) for end in ends] == [0, 20, 40, 60, 80, 100]
    assert ends[1] == {T0: 18, T1: 2}
    read = []
    for start, end in zip(ends, ends[1:], strict=False):
        read += source.read(stream.ranges(start, end))
    assert len(read) == len(set(read)) == 100
    assert stream.newest == {T0: 90, T1: 10}


def test_the_first_batch_of_a_stream_from_the_latest_offset_keeps_its_beginning(
    source: Source,
) -> None:
    source.put("t", 0, b"old")
    stream = source.stream()
    start = stream.initial()
    source.put("t", 0, b"new")
    end = stream.latest(start, None)
    assert end == start == stream.initial() == {T0: 1, T1: 0}

    # Spark stops after it wrote the end of this batch, and before it committed the batch. It asks again.
    source.put("t", 0, b"newer")
    again = source.stream()
    later = again.initial()
    assert later == {T0: 3, T1: 0}
    assert again.ranges(later, end) == []
    assert source.read(again.ranges(end, again.latest(end, None))) == [b"new", b"newer"]


def test_before_spark_4_2_a_stream_knows_its_start_from_the_first_end(source: Source) -> None:
    source.put("t", 0, b"old")
    stream = source.stream()
    end = stream.latest(None, None)
    source.put("t", 0, b"new")
    assert stream.initial() == end == {T0: 1, T1: 0}


def test_a_queue_that_is_added_is_read_from_its_first_message(source: Source) -> None:
    stream = source.stream(subscribePattern="t.*", startingOffsets="earliest")
    start = stream.latest(stream.initial(), None)
    source.shard.create_topic("t2", queues=1)
    source.put("t2", 0, b"first")
    end = stream.latest(start, None)
    assert end[TopicQueue("t2", 0)] == 1
    assert source.read(stream.ranges(start, end)) == [b"first"]
    assert stream.ranges(end, end) == []


def test_expired_offsets_of_a_stream_are_an_error_or_a_warning(
    source: Source, caplog: pytest.LogCaptureFixture
) -> None:
    source.put("t", 0, *(b"%d" % n for n in range(10)))
    source.backend.trim("t", 0, 4)
    start = {T0: 1, T1: 0}
    strict, lenient = source.stream(), source.stream(failOnDataLoss="false")
    end = strict.latest(start, 3)
    assert end == lenient.latest(start, 3) == {T0: 7, T1: 0}
    with pytest.raises(OffsetOutOfRange, match="offsets 1 to 3 expired"):
        strict.ranges(start, end)
    with caplog.at_level(logging.WARNING, "raymq"):
        assert source.read(lenient.ranges(start, end)) == [b"4", b"5", b"6"]
    assert "offsets 1 to 3 expired" in caplog.text

    # A batch that has expired altogether, and a queue that is new to the stream.
    assert lenient.ranges({T0: 1}, {T0: 3}) == []
    with pytest.raises(OffsetOutOfRange, match="offsets 0 to 3 expired"):
        strict.ranges({T1: 0}, {T0: 10, T1: 0})
    # A topic that is gone.
    with pytest.raises(OffsetOutOfRange, match="topic gone queue 0"):
        strict.ranges({}, {TopicQueue("gone", 0): 2})


def test_a_stream_that_reads_what_is_there_now_ends(source: Source) -> None:
    source.put("t", 0, b"0", b"1", b"2")
    stream = source.stream(startingOffsets="earliest")
    stream.stop_at_present_ends()
    source.put("t", 0, b"later")
    source.shard.create_topic("t9", queues=1)
    ends = drain(stream, stream.initial(), 2)
    assert [end[T0] for end in ends] == [0, 2, 3]


def test_an_end_before_the_start_is_waited_for_and_never_read(
    source: Source, caplog: pytest.LogCaptureFixture
) -> None:
    source.put("t", 0, b"0")
    stream = source.stream()
    ahead = {T0: 5, T1: 0}
    with caplog.at_level(logging.WARNING, "raymq"):
        assert stream.latest(ahead, None) == ahead
    assert "ends at offset 1, before 5" in caplog.text
    with pytest.raises(Unavailable, match="start the query again"):
        stream.ranges(ahead, {T0: 1, T1: 0})


def test_an_end_that_stays_before_the_start_is_lost_data(
    source: Source, caplog: pytest.LogCaptureFixture
) -> None:
    source.put("t", 0, b"0")
    ahead = {T0: 5, T1: 0}
    clock = ManualClock()
    strict = source.stream(clock=clock)
    lenient = source.stream(clock=clock, failOnDataLoss="false")
    for stream in (strict, lenient):
        assert stream.latest(ahead, None) == ahead
    clock.advance(1000 * LOWER_END_S)
    with pytest.raises(OffsetOutOfRange, match="unclean recovery, or the checkpoint is of another"):
        strict.latest(ahead, None)

    # The other one goes on at the end, and reads what comes there.
    end = lenient.latest(ahead, None)
    assert end == {T0: 1, T1: 0}
    assert lenient.ranges(ahead, end) == []
    source.put("t", 0, b"new")
    assert lenient.latest(end, None) == {T0: 2, T1: 0}
    assert "the stream goes on there" in caplog.text


def test_a_run_that_reads_what_is_there_waits_for_such_a_queue_and_does_not_pass_over_it(
    source: Source,
) -> None:
    source.put("t", 0, b"0")
    ahead = {T0: 5, T1: 0}
    clock = ManualClock()
    strict = source.stream(clock=clock)
    strict.stop_at_present_ends()
    with pytest.raises(OffsetOutOfRange, match="unclean recovery"):
        strict.latest(ahead, None)
    assert sum(clock.slept) == 1000 * LOWER_END_S

    lenient = source.stream(clock=clock, failOnDataLoss="false")
    lenient.stop_at_present_ends()
    assert lenient.latest(ahead, None) == {T0: 1, T1: 0}


def test_before_spark_4_2_a_lower_end_is_never_taken(source: Source) -> None:
    source.put("t", 0, b"0")
    options = source.options(failOnDataLoss="false")
    stream = StreamProgress(source.lookup(options), options, starts_are_known=False)
    # Spark does not say where the batch begins.
    end = stream.latest(None, None)
    with pytest.raises(Unavailable, match="start the query again"):
        stream.ranges({T0: 5, T1: 0}, end)


def test_a_new_leader_that_knows_all_messages_in_time_does_no_harm(source: Source) -> None:
    ahead = {T0: 1, T1: 0}
    clock = ManualClock()
    stream = source.stream(clock=clock)
    for _ in range(2):
        assert stream.latest(ahead, None) == ahead
        clock.advance(1000 * (LOWER_END_S - 1))
        source.put("t", 0, b"0")
        ahead = {T0: ahead[T0] + 1, T1: 0}
        stream.latest({T0: 0, T1: 0}, None)


def test_a_position_that_a_stream_does_not_have_is_refused(source: Source) -> None:
    stream: Any = source.stream(startingOffsets='{"t": {"0": 7, "1": 0}}')
    with pytest.raises(OffsetOutOfRange, match="holds the offsets 0 to 0, not 7"):
        stream.initial()
