"""The assignment of a durable queue's items, against a shard in memory with real Flight. No Ray."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from ray.util.queue import Empty, Full

from raymq.client.produce.queue_sequence import BatchReceipt
from raymq.cluster.queue.assignment_log import Assignment, AssignmentLog, make_topics
from raymq.cluster.queue.coordinator import QueueCoordinator
from raymq.cluster.queue.durable_queue import Queue
from raymq.cluster.queue.queue_client import ItemReader
from raymq.store.base.clock import Clock
from raymq.store.base.errors import DeliveryUnknown, Fenced, Rejected, Unavailable
from raymq.store.records.requests import FetchRequest, FetchSlice, PutRequest
from raymq.store.state.shard_state import CLEANUP_POLICY, COMPACTION, TopicInfo
from tests.support.batches import batch, put_one
from tests.support.fake_backend import FakeBackend, FakeCluster

NAME = "jobs"
TAKEN = "%TAKEN%" + NAME


class QueueCluster(FakeCluster):
    """A FakeCluster with the methods of a Cluster handle that a queue calls."""

    data_dir = ray_address = None

    def topics(self) -> dict[str, dict[str, Any]]:
        """As Cluster.topics."""
        return self.call(0, "topics", {})

    def call(self, shard: int, op: str, args: dict[str, Any]) -> dict[str, Any]:
        """As Cluster.call, without the wire."""
        if op == "create_topic":
            self.backends[shard].create(args["name"], args["queues"], tuple(args["shards"]))
            return {"created": True}
        return self.backends[shard].call(op, args)

    def learn_shards(self, count: int) -> range:
        """As Cluster.learn_shards."""
        return range(self.shards, count)

    def refresh(self) -> dict[int, str]:
        """As Cluster.refresh."""
        return dict(self.endpoints)


@pytest.fixture
def cluster() -> Iterator[QueueCluster]:
    cluster = QueueCluster()
    assert make_topics(cluster, NAME) == 0  # type: ignore[arg-type]
    yield cluster
    cluster.close()


@pytest.fixture
def backend(cluster: QueueCluster) -> FakeBackend:
    return cluster.backends[0]


Make = Callable[[], QueueCoordinator]


@pytest.fixture
def make(cluster: QueueCluster) -> Make:
    return lambda: QueueCoordinator(cluster, NAME, 0)  # type: ignore[arg-type]


def run(main: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(main, 30))


def put(backend: FakeBackend, count: int) -> None:
    put_one(backend, PutRequest(NAME, 0, batch([b"x"] * count), None, 0, 0, "quorum"))


def test_items_are_given_in_order_and_once(make: Make, backend: FakeBackend) -> None:
    async def main() -> None:
        coordinator = make()
        put(backend, 5)
        assert await coordinator.size() == 5
        assert await coordinator.take(1, 1, 0.0) == (0, 1)
        assert await coordinator.take(2, 3, 0.0) == (1, 3)
        assert await coordinator.take(3, 2, 0.0) is None
        assert await coordinator.take(4, 1, 0.0) == (4, 1)
        assert await coordinator.take(5, 1, 0.0) is None
        assert await coordinator.size() == 0
        await coordinator.close()

    run(main())


def test_deleted_items_are_never_assigned(make: Make, backend: FakeBackend) -> None:
    async def main() -> None:
        coordinator = make()
        put(backend, 9)
        assert await coordinator.take(1, 2, 0.0) == (0, 2)
        backend.trim(NAME, 0, 5)
        # It asks when it has to, and now and then.
        assert await coordinator.size() == 4
        assert await coordinator.take(2, 1, 0.0) == (5, 1)
        await coordinator.close()
        backend.trim(NAME, 0, 8)
        successor = make()
        assert await successor.take(3, 1, 0.0) == (8, 1)
        assert await successor.size() == 0
        await successor.close()

    run(main())


def test_getters_that_wait_share_records_and_are_served_in_order(
    make: Make, backend: FakeBackend
) -> None:
    async def main() -> None:
        coordinator = make()
        await coordinator.size()
        waiting = [asyncio.create_task(coordinator.take(n, 1, 20.0)) for n in range(20)]
        while (await coordinator.describe())["getters"] < 20:
            await asyncio.sleep(0)
        put(backend, 20)
        assert await asyncio.gather(*waiting) == [(n, 1) for n in range(20)]
        await coordinator.close()

    run(main())
    # One that opened, and far fewer than one a getter.
    assert len(backend.bodies(TAKEN)) < 10


def test_a_request_that_is_asked_again_gets_the_same_items_also_from_a_successor(
    make: Make, backend: FakeBackend
) -> None:
    async def main() -> None:
        first = make()
        put(backend, 4)
        assert await first.take(7, 2, 0.0) == (0, 2)
        assert await first.take(7, 2, 0.0) == (0, 2)
        second = make()
        assert await second.take(7, 2, 0.0) == (0, 2)
        assert await second.take(8, 1, 0.0) == (2, 1)
        await first.close()
        await second.close()

    run(main())


def test_two_coordinators_at_once_never_assign_an_item_twice(
    make: Make, backend: FakeBackend
) -> None:
    async def main() -> None:
        coordinators = [make(), make()]
        put(backend, 30)
        found = []
        for request in range(30):
            # Each fences the other, learns of it by the refusal, and reads the log again.
            found.append(await coordinators[request % 2].take(request, 1, 0.0))
        assert found == [(n, 1) for n in range(30)]
        for coordinator in coordinators:
            await coordinator.close()

    run(main())


def test_an_earlier_writer_is_fenced_before_the_log_is_read(
    cluster: QueueCluster, backend: FakeBackend
) -> None:
    put(backend, 3)
    first, second = (AssignmentLog(cluster, NAME, 0, Clock()) for _ in range(2))  # type: ignore[arg-type]
    first.open()
    second.open()
    with pytest.raises(Fenced):
        first.write(1, []).result(10)
    assert (second.next_unassigned, second.end, second.given) == (0, 3, [])
    first.close()
    second.close()


def lag(backend: FakeBackend, monkeypatch: pytest.MonkeyPatch, polls: int) -> Callable[[], None]:
    """Returns: a function that freezes the end of %TAKEN% that the shard shows, for the next `polls` polls."""
    call, answers = backend.call, []

    def stale(op: str, args: dict[str, Any]) -> dict[str, Any]:
        if op == "queue_ranges" and args["topic"] == TAKEN and answers:
            return answers.pop()
        return call(op, args)

    monkeypatch.setattr(backend, "call", stale)
    return lambda: answers.extend([call("queue_ranges", {"topic": TAKEN})] * polls)


def test_a_successor_waits_until_earlier_records_are_readable(
    make: Make, cluster: QueueCluster, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = lag(backend, monkeypatch, polls=3)
    first = AssignmentLog(cluster, NAME, 0, Clock())  # type: ignore[arg-type]
    first.open()
    put(backend, 4)
    begin()
    first.write(2, [Assignment(1, 0, 2)]).result(10)
    first.close()

    async def main() -> None:
        coordinator = make()
        assert await coordinator.take(2, 2, 0.0) == (2, 2)
        assert await coordinator.take(1, 2, 0.0) == (0, 2)
        await coordinator.close()

    run(main())


def test_a_record_stored_just_before_its_writer_was_fenced_is_waited_for(
    cluster: QueueCluster, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (AssignmentLog(cluster, NAME, 0, Clock()) for _ in range(2))  # type: ignore[arg-type]
    begin = lag(backend, monkeypatch, polls=3)
    first.open()
    call = second._routes.call

    def fence(shard: int, op: str, args: dict[str, Any]) -> dict[str, Any]:
        if op == "init_producer":
            begin()
            first.write(2, [Assignment(1, 0, 2)]).result(10)
        return call(shard, op, args)

    monkeypatch.setattr(second._routes, "call", fence)
    second.open()
    assert (second.next_unassigned, second.given) == (2, [Assignment(1, 0, 2)])
    first.close()
    second.close()


def test_a_record_with_an_unknown_outcome_is_looked_for_in_the_log(
    make: Make, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raymq.cluster.queue.assignment_log.DELIVERY_TIMEOUT_MS", 300)

    async def main() -> None:
        coordinator = make()
        put(backend, 2)
        assert await coordinator.size() == 2

        # Refused for good, as a fenced one is: nothing is stored.
        backend.refusals += [Rejected("no", field="body")]
        assert await coordinator.take(1, 1, 0.0) == (0, 1)

        # Stored, and no receipt comes until the coordinator has begun to read the log again.
        stored = len(backend.bodies(TAKEN))
        backend.hold_answers()
        taking = asyncio.create_task(coordinator.take(2, 1, 0.0))
        await asyncio.to_thread(backend.wait_for, lambda: len(backend.bodies(TAKEN)) == stored + 2)
        backend.release()
        assert await taking == (1, 1)
        assert await coordinator.size() == 0
        await coordinator.close()

    run(main())


def test_an_unreachable_shard_is_raised_and_the_request_can_be_repeated(
    make: Make, cluster: QueueCluster, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raymq.cluster.queue.coordinator.ANSWER_S", 0.3)
    monkeypatch.setattr("raymq.cluster.queue.assignment_log.DELIVERY_TIMEOUT_MS", 500)

    async def main() -> None:
        coordinator = make()
        put(backend, 2)
        assert await coordinator.size() == 2

        await asyncio.to_thread(cluster.down)
        with pytest.raises(Unavailable, match="does not answer"):
            await coordinator.take(1, 1, 0.0)
        with pytest.raises(Unavailable, match="does not answer"):
            await coordinator.take(2, 1, 0.0)

        await asyncio.to_thread(cluster.up)
        found = set()
        while len(found) < 2:
            for request in (1, 2):
                with contextlib.suppress(Unavailable):
                    taken = await coordinator.take(request, 1, 0.0)
                    assert taken is not None
                    found.add(taken)

        assert found == {(0, 1), (1, 1)}
        await coordinator.close()

    run(main())


def test_a_request_that_raised_unavailable_gets_no_items_until_it_is_repeated(
    make: Make, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        coordinator = make()
        put(backend, 2)
        await coordinator.size()
        fate: Future[BatchReceipt] = Future()
        with monkeypatch.context() as patch:
            patch.setattr("raymq.cluster.queue.coordinator.ANSWER_S", 0.05)
            patch.setattr(AssignmentLog, "write", lambda *_: fate)
            with pytest.raises(Unavailable):
                await coordinator.take(1, 1, 0.0)
        fate.set_exception(DeliveryUnknown("late", status="UNKNOWN_ERROR"))
        assert await coordinator.take(2, 1, 0.0) == (0, 1)
        assert await coordinator.take(1, 1, 0.0) == (1, 1)
        await coordinator.close()

    run(main())


def test_a_request_that_no_caller_waits_for_takes_no_items(
    make: Make, backend: FakeBackend
) -> None:
    async def main() -> None:
        coordinator = make()
        assert await coordinator.take(1, 1, 0.01) is None
        waiting = asyncio.create_task(coordinator.take(2, 1, 20.0))
        while (await coordinator.describe())["getters"] < 1:
            await asyncio.sleep(0)
        await coordinator.forget(2)
        assert await waiting is None
        put(backend, 1)
        assert await coordinator.take(3, 1, 10.0) == (0, 1)
        await coordinator.close()

    run(main())


def test_room_is_given_in_order_and_comes_back(make: Make, backend: FakeBackend) -> None:
    async def main() -> None:
        coordinator = make()
        assert await coordinator.reserve(1, 2, 3, 0.0)
        assert await coordinator.reserve(1, 2, 3, 0.0)
        assert not await coordinator.reserve(2, 2, 3, 0.0)

        put(backend, 2)
        await coordinator.release(1, 2)
        assert await coordinator.reserve(3, 1, 3, 0.0)
        large = asyncio.create_task(coordinator.reserve(4, 2, 3, 20.0))
        while (await coordinator.describe())["putters"] < 1:
            await asyncio.sleep(0)

        # It would fit as soon as one is taken, but the large one was first.
        small = asyncio.create_task(coordinator.reserve(5, 1, 3, 20.0))
        await coordinator.take(1, 1, 0.0)
        assert not large.done()
        await coordinator.take(2, 1, 0.0)
        assert await large

        await coordinator.release(3, 0)
        assert await small
        await coordinator.close()

    run(main())


class SocketQueue(Queue):
    """A handle in a process that Ray does not know."""

    @property
    def actor(self) -> Any:
        """None is started."""
        return None

    def _submit(self, method: str, arguments: tuple[Any, ...]) -> Any:
        raise AssertionError(f"{method} went by Ray")


def test_a_call_that_need_not_wait_uses_the_local_socket_of_a_near_coordinator(
    make: Make, cluster: QueueCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("raymq.cluster.queue.local_socket.run_dir", lambda _: tmp_path)

    def use() -> None:
        few = SocketQueue(NAME, cluster=cluster, maxsize=3)  # type: ignore[arg-type]
        for number in range(3):
            few.put_nowait(number)
        assert few.full()
        for attempt in (lambda: few.put_nowait(9), lambda: few.put(9, timeout=0.01)):
            with pytest.raises(Full):
                attempt()
        assert [few.get() for _ in range(3)] == [0, 1, 2]

        # Its room is free as soon as a put has returned.
        for _ in range(5):
            few.put_nowait_batch([1, 2, 3])
            assert few.get_nowait_batch(3) == [1, 2, 3]

        for attempt in (few.get_nowait, lambda: few.get(timeout=0.01)):
            with pytest.raises(Empty):
                attempt()
        few._client().close()

    async def main() -> None:
        coordinator = make()
        await coordinator.size()
        await asyncio.to_thread(use)
        await coordinator.close()

    run(main())


def test_items_are_read_by_offset_in_pieces_and_ahead(
    cluster: QueueCluster, backend: FakeBackend
) -> None:
    bodies = [b"%d" % n for n in range(300)]
    put_one(backend, PutRequest(NAME, 0, batch(bodies), None, 0, 0, "quorum"))
    reader = ItemReader(cluster.routes(), NAME, 0)
    for first, count in ((0, 300), (5, 1), (6, 1), (299, 1), (0, 1), (200, 7)):
        pieces = reader.read(first, count, timeout_s=10)
        found = [body for piece in pieces for body in piece.bodies]
        assert found == bodies[first : first + count]
    cluster.down()
    cluster.up()
    assert reader.read(299, 1, timeout_s=10)[0].bodies == bodies[299:]
    reader.close()


def test_the_longer_items_are_neighbours_the_more_are_read_ahead(
    cluster: QueueCluster, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(backend, 2000)
    fetch, asked = backend.fetch, []

    def note(request: FetchRequest) -> list[FetchSlice]:
        asked.append(request.max_records)
        return fetch(request)

    monkeypatch.setattr(backend, "fetch", note)
    reader = ItemReader(cluster.routes(), NAME, 0)
    for first in range(0, 1000, 10):
        reader.read(first, 10, timeout_s=10)
    assert asked == [10, 256, 512, 1024]
    # Another's items lie between: as at first.
    reader.read(1900, 20, timeout_s=10)
    assert asked[4:] == [20]
    reader.close()


def test_a_topic_with_several_queues_is_refused_as_a_queue(cluster: QueueCluster) -> None:
    cluster.create_topic("many", queues=2)
    with pytest.raises(Rejected, match="2 queues"):
        make_topics(cluster, "many")  # type: ignore[arg-type]


def test_a_compacted_topic_is_refused_as_a_queue(
    cluster: QueueCluster, backend: FakeBackend
) -> None:
    attributes = ((CLEANUP_POLICY, COMPACTION),)
    backend.state.topics["latest"] = TopicInfo("latest", 1, (0,), attributes)
    with pytest.raises(Rejected, match="compacted"):
        make_topics(cluster, "latest")  # type: ignore[arg-type]
    assert "%TAKEN%latest" not in backend.state.topics


@pytest.mark.parametrize(
    ("name", "options", "field"),
    [
        (5, {}, "name"),
        ("q", {"maxsize": "x"}, "maxsize"),
        ("q", {"maxsize": -1}, "maxsize"),
        ("q", {"linger_ms": None}, "linger_ms"),
    ],
)
def test_arguments_of_a_queue_are_checked_before_any_call(name, options, field):
    with pytest.raises(Rejected) as refused:
        Queue(name, **options)
    assert refused.value.field == field
