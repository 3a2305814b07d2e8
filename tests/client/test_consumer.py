"""The consumer, against shards in memory with real Flight."""

from __future__ import annotations

import itertools
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pyarrow as pa
import pytest

from raymq.client.consume import assigned_queues
from raymq.client.consume import consumer as consumer_module
from raymq.client.consume.consumer import Consumer
from raymq.client.consume.range_reader import read_range
from raymq.client.consume.shard_reader import WAIT_MS, ReadState
from raymq.client.messages.message import queue_offsets
from raymq.client.messages.received import ReceivedMessage
from raymq.store.base.errors import OffsetOutOfRange, Rejected, Unavailable
from raymq.store.records.requests import FetchRequest, FetchSlice, PutRequest
from tests.support.batches import batch, put_one
from tests.support.clock import ManualClock
from tests.support.fake_backend import FakeCluster
from tests.support.waiting import until

Make = Callable[..., Consumer]


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    cluster = FakeCluster(2)
    cluster.create_topic("t", queues=4)
    yield cluster
    cluster.close()


@pytest.fixture
def make(cluster: FakeCluster) -> Iterator[Make]:
    made: list[Consumer] = []

    def consumer(**options: Any) -> Consumer:
        made.append(Consumer(cluster, "t", **options))  # type: ignore[arg-type]
        return made[-1]

    yield consumer
    for each in made:
        each.close()


def put(cluster: FakeCluster, queue: int, *bodies: bytes) -> None:
    put_one(
        cluster.backends[queue % 2],
        PutRequest("t", queue, batch(list(bodies)), None, 0, 0, "quorum"),
    )


def poll_all(consumer: Consumer, count: int) -> list[ReceivedMessage]:
    found: list[ReceivedMessage] = []
    while len(found) < count:
        some = consumer.poll(100, 10)
        assert some, "nothing came in time"
        found += some
    return found


def wait_until(
    consumer: Consumer, condition: Callable[[ReadState], object], limit_s: float = 10.0
) -> None:
    """Wait until the readers of a consumer have brought something about."""
    state, end_s = consumer._assigned.state, time.monotonic() + limit_s
    with state.changed:
        while not condition(state):
            assert time.monotonic() < end_s, "it did not happen in time"
            state.changed.wait(0.01)


def test_all_queues_of_all_shards_are_read_in_order(cluster: FakeCluster, make: Make) -> None:
    for queue in range(4):
        put(cluster, queue, *(b"%d-%d" % (queue, n) for n in range(5)))
    found = poll_all(make(start="earliest"), 20)
    for queue in range(4):
        mine = [m for m in found if m.queue_id == queue]
        assert [m.offset for m in mine] == list(range(5))
        assert [m.body for m in mine] == [b"%d-%d" % (queue, n) for n in range(5)]
        assert {m.shard for m in mine} == {queue % 2}


def test_poll_waits_for_a_message_and_no_longer(cluster: FakeCluster, make: Make) -> None:
    consumer = make(start="latest")
    assert consumer.poll(10, 0) == []
    late = threading.Thread(target=put, args=(cluster, 3, b"late"))
    late.start()
    (found,) = consumer.poll(10, 20)
    late.join()
    assert found.body == b"late"


def test_latest_starts_after_the_messages_that_exist(cluster: FakeCluster, make: Make) -> None:
    put(cluster, 0, b"old")
    consumer = make(start="latest")
    put(cluster, 0, b"new")
    assert [m.body for m in poll_all(consumer, 1)] == [b"new"]


def test_max_records_is_kept_and_nothing_is_skipped(cluster: FakeCluster, make: Make) -> None:
    put(cluster, 0, *(b"%d" % n for n in range(10)))
    consumer = make(start="earliest", queues=[0])
    found = []
    for _ in range(4):
        part = consumer.poll(3, 10)
        assert len(part) <= 3
        found += part
    assert [m.offset for m in found] == list(range(10))
    assert consumer.position(0) == 10


def test_an_empty_body_arrives_as_empty_bytes(cluster: FakeCluster, make: Make) -> None:
    put(cluster, 0, b"", b"not empty")
    assert [m.body for m in poll_all(make(start="earliest"), 2)] == [b"", b"not empty"]
    columns = make(start="earliest").poll_batch(timeout=10)
    assert columns.column("body").to_pylist() == [b"", b"not empty"]


def test_columns_are_polled_a_queue_at_a_time(cluster: FakeCluster, make: Make) -> None:
    consumer = make(start="earliest")
    assert consumer.poll_batch(timeout=0).num_rows == 0
    put(cluster, 1, b"a", b"b")
    found = consumer.poll_batch(timeout=10)
    assert found.column("body").to_pylist() == [b"a", b"b"]
    assert found.column("queue_id").to_pylist() == [1, 1]


def test_iteration_counts_only_returned_messages(cluster: FakeCluster, make: Make) -> None:
    put(cluster, 0, *(b"%d" % n for n in range(5)))
    consumer = make(start="earliest", queues=[0], group="g")
    for message in consumer:
        consumer.commit()
        if message.offset == 1:
            break
    assert consumer.positions() == {0: 2}
    assert consumer.committed() == {0: 2}
    assert [m.offset for m in poll_all(consumer, 3)] == [2, 3, 4]


def interrupt_after(calls: int) -> None:
    """Raise KeyboardInterrupt where a signal handler may: after that many more calls by a consumer."""
    left = [calls]
    files = {consumer_module.__file__, assigned_queues.__file__}

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename in files:
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt

    sys.setprofile(profile)


@pytest.mark.parametrize(
    "read",
    [
        lambda consumer: [message.body for message in consumer.poll(7, 10)],
        lambda consumer: consumer.poll_batch(7, 10).column("body").to_pylist(),
        lambda consumer: [message.body for message in [consumer.next_message(10)] if message],
    ],
    ids=["poll", "poll_batch", "next_message"],
)
def test_an_interrupted_read_takes_no_message_wherever_the_interrupt_comes(
    cluster: FakeCluster, make: Make, read: Callable[[Consumer], list[bytes]]
) -> None:
    bodies = [b"%d" % n for n in range(100)]
    put(cluster, 1, *bodies)
    consumer = make(start="earliest", queues=[1], fetch_records=5)

    found: list[bytes] = []
    interrupts = 0
    for calls in itertools.count(1):
        interrupt_after(calls)
        try:
            found += read(consumer)
            break
        except KeyboardInterrupt:
            interrupts += 1
            assert consumer.position(1) == 0
        finally:
            sys.setprofile(None)

    assert interrupts > 5
    while len(found) < len(bodies):
        some = read(consumer)
        assert some, "nothing came in time"
        found += some
    assert found == bodies
    assert consumer.position(1) == len(bodies)


def test_a_group_goes_on_where_it_committed(cluster: FakeCluster, make: Make) -> None:
    put(cluster, 0, b"a", b"b", b"c")
    put(cluster, 1, b"d")
    first = make(group="g", start="earliest")
    poll_all(first, 4)
    first.commit({0: 2, 1: 1})
    first.close()
    second = make(group="g", start="earliest")
    assert second.positions() == {0: 2, 1: 1, 2: 0, 3: 0}
    assert [m.body for m in poll_all(second, 1)] == [b"c"]


@pytest.mark.parametrize("options", [{}, {"group": "new"}, {"start": {0: 0}}])
def test_a_consumer_without_a_start_is_refused(make: Make, options: dict[str, Any]) -> None:
    with pytest.raises(Rejected, match="earliest") as refused:
        make(**options)
    assert refused.value.field == "start"


def test_queues_and_offsets_can_be_chosen(cluster: FakeCluster, make: Make) -> None:
    put(cluster, 2, b"a", b"b")
    consumer = make(queues=[2], start={2: 1})
    assert [m.body for m in poll_all(consumer, 1)] == [b"b"]
    with pytest.raises(Rejected):
        consumer.position(0)
    with pytest.raises(Rejected):
        make(queues=[4], start=0)


def test_a_deleted_offset_is_raised_until_seek(cluster: FakeCluster, make: Make) -> None:
    put(cluster, 0, b"a", b"b", b"c")
    cluster.backends[0].trim("t", 0, 2)
    consumer = make(queues=[0], start=0)
    for _ in range(2):
        with pytest.raises(OffsetOutOfRange) as gone:
            consumer.poll(10, 10)
        assert (gone.value.min, gone.value.max) == (2, 3)
    assert consumer.position(0) == 0
    consumer.seek(0, "earliest")
    assert [m.body for m in poll_all(consumer, 1)] == [b"c"]


def test_seek_goes_back_and_forth(cluster: FakeCluster, make: Make) -> None:
    put(cluster, 0, *(b"%d" % n for n in range(5)))
    consumer = make(queues=[0], start="earliest")
    poll_all(consumer, 5)
    consumer.seek(0, 1)
    assert consumer.position(0) == 1
    assert [m.offset for m in poll_all(consumer, 4)] == [1, 2, 3, 4]
    consumer.seek(0, "latest")
    assert consumer.position(0) == 5
    with pytest.raises(Rejected):
        consumer.seek(0, "middle")


def compact(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, gone: set[int]) -> None:
    """Remove messages as compaction does: some offsets have none any more."""
    backend = cluster.backends[0]
    whole = backend._read

    def read(request: FetchRequest) -> list[FetchSlice]:
        found = []
        for part in whole(request):
            assert part.records is not None
            left = [n for n in range(len(part.records)) if part.first_offset + n not in gone]
            found += [part._replace(records=part.records.take(left))] if left else []
        return found

    monkeypatch.setattr(backend, "_read", read)


def test_gaps_of_a_compacted_topic_are_passed_however_it_is_read(
    cluster: FakeCluster, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(cluster, 0, *(b"%d" % n for n in range(10)))
    compact(cluster, monkeypatch, {1, 2, 4, 5, 6, 8})
    consumer = make(queues=[0], start=0)
    assert [m.offset for m in consumer.poll(2, 10)] == [0, 3]
    assert consumer.position(0) == 7
    message = consumer.next_message(10)
    assert message is not None
    assert (message.offset, consumer.position(0)) == (7, 8)
    assert [m.offset for m in consumer.poll(5, 10)] == [9]
    assert consumer.position(0) == 10


def test_positions_move_on_over_what_a_shard_looked_at_in_vain(
    cluster: FakeCluster, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(cluster, 0, *(b"%d" % number for number in range(5)))
    backend = cluster.backends[0]
    read = backend._read
    wanted_from = 5

    def in_vain(request: FetchRequest) -> list[FetchSlice]:
        """Two messages at a time, and nothing below `wanted_from`."""
        found = []
        for part in read(request._replace(max_records=2)):
            is_wanted = part.records is not None and part.first_offset >= wanted_from
            found.append(part if is_wanted else part._replace(records=pa.array([], pa.binary())))
        return found

    monkeypatch.setattr(backend, "_read", in_vain)
    consumer = make(start="earliest", group="g", queues=[0])
    until(lambda: consumer.position(0) == 5, lambda: consumer.poll(timeout=0.01))
    consumer.commit()
    assert make(group="g", queues=[0], start="earliest").position(0) == 5
    wanted_from = 4
    other = make(start="earliest", queues=[0])
    assert [message.body for message in poll_all(other, 1)] == [b"4"]
    assert other.position(0) == 5
    batches = list(read_range(cluster, "t", 0, 0, 0, 5))  # type: ignore[arg-type]
    assert [queue_offsets(records).tolist() for records in batches if len(records)] == [[4]]


def test_ranges_of_a_compacted_topic_share_no_message(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(cluster, 0, *(b"%d" % n for n in range(10)))
    compact(cluster, monkeypatch, {1, 2, 4, 5, 6, 8})
    ranges = [
        [o for records in read_range(cluster, "t", 0, 0, *ends) for o in queue_offsets(records)]  # type: ignore[arg-type]
        for ends in ((0, 5), (5, 8), (8, 10))
    ]
    assert ranges == [[0, 3], [7], [9]]


def test_a_range_whose_messages_do_not_arrive_raises_unavailable(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster.backends[0], "fetch", lambda request: [])
    with pytest.raises(Unavailable, match="queue 0 at offset 3 or after it"):
        list(read_range(cluster, "t", 0, 0, 3, 5, timeout_s=0))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"fetch_bytes": 0},
        {"fetch_records": 0.5},
        {"unavailable_timeout_ms": "1"},
        {"queues": []},
        {"queues": "0"},
        {"group": ""},
        {"group": "a@b"},
        {"group": 5},
        {"start": "soon"},
    ],
)
def test_options_that_mean_nothing_are_refused_by_name(make: Make, options: dict[str, Any]) -> None:
    with pytest.raises(Rejected) as refused:
        make(**{"start": 0, **options})
    assert str(refused.value.field)[:5] in str(options)


def test_offsets_that_are_none_are_not_committed(make: Make) -> None:
    consumer = make(start=0, group="g")
    for wrong in (-1, 1.5, "1", True):
        with pytest.raises(Rejected, match="the offset of queue 0 is"):
            consumer.commit({0: wrong})  # type: ignore[dict-item]
    assert consumer.committed() == {}


def test_reading_goes_on_after_a_server_came_back(cluster: FakeCluster, make: Make) -> None:
    put(cluster, 0, b"a")
    consumer = make(queues=[0], start="earliest")
    poll_all(consumer, 1)
    cluster.down(0)
    put(cluster, 0, b"b")
    cluster.up(0)
    assert [m.offset for m in poll_all(consumer, 1)] == [1]


def test_a_shard_that_stays_unreachable_raises_unavailable(
    cluster: FakeCluster, make: Make
) -> None:
    consumer = make(queues=[0], start=0, unavailable_timeout_ms=0)
    cluster.down(0)
    wait_until(consumer, lambda state: state.down)
    with pytest.raises(Unavailable, match="shard 0"):
        consumer.poll(1, 0)


def test_messages_of_other_shards_do_not_hide_an_unreachable_one(
    cluster: FakeCluster, make: Make
) -> None:
    put(cluster, 0, b"read before")
    consumer = make(start=0, unavailable_timeout_ms=0)
    state = consumer._assigned.state
    wait_until(consumer, lambda state: state.ahead[0])
    put(cluster, 1, *(b"%d" % n for n in range(9)))
    wait_until(consumer, lambda state: state.ahead[1])

    with state.changed:
        state.down[0] = (0, Unavailable("down", shard=0))
    assert consumer.poll(1, 0)[0].body == b"read before"
    with pytest.raises(Unavailable, match="shard 0"):
        consumer.poll(1, 0)
    assert consumer.position(1) == 0


@pytest.mark.parametrize("unread", [False, True], ids=["idle topic", "slow consumer"])
def test_a_shard_that_was_away_for_a_moment_is_not_called_unreachable(
    cluster: FakeCluster, make: Make, unread: bool
) -> None:
    clock = ManualClock()
    consumer = make(queues=[0, 2], start=0, clock=clock)
    state = consumer._assigned.state
    if unread:
        put(cluster, 0, b"a")
        wait_until(consumer, lambda state: state.ahead[0])
        with state.changed:
            state.down[0] = (clock.monotonic_ms(), Unavailable("down", shard=0))
            # A new stream is opened, as after the failure.
            consumer._assigned._readers[0].restart()
            state.notify()
    else:
        cluster.down(0)
        wait_until(consumer, lambda state: state.down)
        cluster.up(0)
    # A fetch of an idle topic takes longer.
    wait_until(consumer, lambda state: not state.down, limit_s=WAIT_MS / 2000)
    clock.advance(3_600_000)
    assert len(consumer.poll(10, 0)) == unread
    assert consumer.poll(10, 0) == []


def test_a_wrong_token_is_raised(cluster: FakeCluster, make: Make) -> None:
    consumer = make(queues=[0], start=0)
    consumer._routes.token = "wrong"
    consumer._assigned.state.fatal_error = None
    cluster.down(0)
    cluster.up(0)
    with pytest.raises(Rejected) as refused:
        consumer.poll(1, 10)
    assert refused.value.field == "token"


def test_commit_needs_a_group(make: Make) -> None:
    consumer = make(start=0)
    for ask in (consumer.commit, consumer.committed):
        with pytest.raises(Rejected, match="group"):
            ask()


def test_a_consumer_refuses_pickling_and_says_what_to_do(make: Make) -> None:
    with pytest.raises(Rejected, match="pickle the Cluster"):
        pickle.dumps(make(start=0))


def test_a_closed_consumer_says_so(make: Make) -> None:
    consumer = make(start=0)
    consumer.close()
    with pytest.raises(Rejected, match="closed"):
        consumer.poll()


@pytest.mark.parametrize("offset", [-1, 2**70, 1.5, None, True])
def test_an_offset_that_no_queue_can_have_is_refused_before_it_is_asked_for(
    make: Make, offset: Any
) -> None:
    with pytest.raises(Rejected, match="offset of queue 0"):
        make(start={0: offset}, queues=[0])
    consumer = make(start="earliest")
    with pytest.raises(Rejected, match="offset of queue 0"):
        consumer.seek(0, offset)


def poll_by(size: int, consumer: Consumer, count: int) -> list[ReceivedMessage]:
    found: list[ReceivedMessage] = []
    while len(found) < count:
        found += consumer.poll(size, 10)
    return found


def test_queues_take_turns_while_a_fetch_is_handed_out(cluster: FakeCluster, make: Make) -> None:
    # The first turn is the second queue's.
    put(cluster, 2, *[b"busy %d" % n for n in range(300)])
    put(cluster, 0, b"quiet")
    # Both are on one shard, and so in one fetch.
    consumer = make(start="earliest", queues=[0, 2])
    found = poll_by(50, consumer, 301)
    assert {message.queue_id for message in found[:51]} == {0, 2}
    assert [message.offset for message in found if message.queue_id == 2] == list(range(300))
    assert consumer.positions() == {0: 1, 2: 300}


def test_queues_take_turns_after_iteration_gave_messages_back(
    cluster: FakeCluster, make: Make
) -> None:
    put(cluster, 0, *[b"%d" % n for n in range(1500)])
    put(cluster, 2, *[b"%d" % n for n in range(1500)])
    consumer = make(start="earliest", queues=[0, 2])
    found: dict[int, list[int]] = {0: [], 2: []}
    while sum(map(len, found.values())) < 3000:
        one = consumer.next_message(10)
        assert one is not None
        found[one.queue_id].append(one.offset)
        for message in consumer.poll(7, 0):
            found[message.queue_id].append(message.offset)
    assert found == {0: list(range(1500)), 2: list(range(1500))}
