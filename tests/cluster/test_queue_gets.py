"""What a get of a durable queue leaves when it is interrupted, or meets an item that it cannot return. No Ray."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from ray.util.queue import Empty

from raymq.client.messages import codecs
from raymq.cluster.queue.coordinator import QueueCoordinator
from raymq.cluster.queue.durable_queue import Queue
from raymq.store.base.errors import Corrupt, OffsetOutOfRange, RayMQError, Rejected
from raymq.store.records.requests import PutRequest
from tests.cluster.test_queue_coordinator import NAME, TAKEN, QueueCluster
from tests.support.batches import batch, put_one
from tests.support.fake_backend import FakeBackend


class Calls:
    """Stands for the calls of a coordinator that has `items` items."""

    closed = False
    #: what it answers to `give_up`
    has_assigned = False

    def __init__(self) -> None:
        self.items = 0
        self.next = 0
        #: raised by the next calls
        self.interrupts: list[BaseException] = []
        self.submitted: list[tuple[Any, ...]] = []
        self.called: list[tuple[Any, ...]] = []

    def check_open(self) -> None:
        """Always open."""

    def close(self) -> None:
        """No call is open."""

    def end(self, grace_period_s: float | None) -> None:
        """No actor ends."""

    def call(self, method: str, *arguments: Any, wait_s: float | None = None) -> Any:
        """Give the next items, or raise what the test wants."""
        self.called.append((method, *arguments))
        if self.interrupts:
            raise self.interrupts.pop(0)
        if method != "take" or self.next + arguments[1] > self.items:
            return None
        first, self.next = self.next, self.next + arguments[1]
        return first, arguments[1]

    async def call_async(self, method: str, *arguments: Any) -> Any:
        """As `call`."""
        return self.call(method, *arguments[:2])

    def give_up(self, request: int) -> bool:
        """Note the call."""
        self.submitted.append(("give_up", request))
        return self.has_assigned

    def submit(self, *call: Any) -> None:
        """Note the call."""
        self.submitted.append(call)


class AloneQueue(Queue):
    """A handle whose coordinator is a `Calls`."""

    def _make_coordinator(self) -> Any:
        return Calls()

    @property
    def actor(self) -> Any:
        """None is started."""
        return None


class Opened(QueueCluster):
    """A cluster, and the handles of this test."""

    def __init__(self) -> None:
        super().__init__()
        self.queues: list[AloneQueue] = []


@pytest.fixture
def cluster() -> Iterator[Opened]:
    cluster = Opened()
    yield cluster
    # A server waits for the streams of clients that are open.
    for queue in cluster.queues:
        queue.shutdown(force=True)
    cluster.close()


@pytest.fixture
def backend(cluster: Opened) -> FakeBackend:
    return cluster.backends[0]


def opened(cluster: Opened, **options: Any) -> tuple[AloneQueue, Calls]:
    queue = AloneQueue(NAME, cluster=cluster, **options)  # type: ignore[arg-type]
    cluster.queues.append(queue)
    calls: Any = queue._coordinator
    return queue, calls


def filled(cluster: Opened, *items: Any) -> tuple[AloneQueue, Calls]:
    """A queue of JSON. Bytes are put as they are."""
    queue, calls = opened(cluster, codec="json")
    for item in items:
        body = item if isinstance(item, bytes) else queue._codec.encode(item)
        message = queue._client().batcher.encoder.encode(
            NAME, body, properties=queue._properties, queue_id=0
        )
        queue._client().batcher.send(message).result(30)
    calls.items = len(items)
    return queue, calls


class Alarm(Exception):
    """What a signal handler raises."""


@pytest.mark.parametrize("has_assigned", [True, False])
@pytest.mark.parametrize("interrupt", [KeyboardInterrupt(), Alarm(), SystemExit()])
def test_an_interrupted_get_gives_its_claim_back(
    cluster: Opened, interrupt: BaseException, has_assigned: bool
) -> None:
    queue, calls = filled(cluster, "x")
    calls.interrupts, calls.has_assigned = [interrupt], has_assigned
    with pytest.raises(type(interrupt)):
        queue.get(timeout=30)
    ((_, number, _),) = calls.called
    assert calls.submitted == [("give_up", number)]
    # What was assigned to it before that is still this handle's. Otherwise its number is not served any more.
    assert queue.get() == "x"
    assert (calls.called[-1] == ("take", number, 1)) == has_assigned


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt(), Alarm()])
def test_an_interrupted_put_gives_its_room_back(cluster: Opened, interrupt: BaseException) -> None:
    queue, calls = opened(cluster, maxsize=2)
    calls.interrupts = [interrupt]
    with pytest.raises(type(interrupt)):
        queue.put("x")
    ((_, number, *_),) = calls.called
    assert calls.submitted == [("release", number, 0)]


def test_a_cancelled_wait_for_room_gives_the_room_back(cluster: Opened) -> None:
    queue, calls = opened(cluster, maxsize=2)
    calls.interrupts = [asyncio.CancelledError()]
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(queue.put_async("x"))
    ((_, number, *_),) = calls.called
    assert calls.submitted == [("release", number, 0)]


def test_a_request_for_room_that_was_released_gets_none(cluster: Opened) -> None:
    opened(cluster)

    async def main() -> None:
        coordinator = QueueCoordinator(cluster, NAME, 0)  # type: ignore[arg-type]
        assert await coordinator.reserve(1, 1, 1, 0.0)
        waiting = asyncio.create_task(coordinator.reserve(2, 1, 1, 30.0))
        while not coordinator._putters:
            await asyncio.sleep(0)
        await coordinator.release(2, 0)
        assert not await waiting
        # The room of the first one is free for a third one at once.
        await coordinator.release(1, 0)
        assert await coordinator.reserve(3, 1, 1, 0.0)
        await coordinator.close()

    asyncio.run(asyncio.wait_for(main(), 30))
    assert cluster.backends[0].bodies(TAKEN)


def test_a_call_that_is_forgotten_before_the_log_is_open_takes_nothing(
    cluster: Opened,
) -> None:
    opened(cluster)

    async def main() -> None:
        coordinator = QueueCoordinator(cluster, NAME, 0)  # type: ignore[arg-type]
        gone = asyncio.create_task(coordinator.take(1, 1, 30.0))
        # In the order in which one process calls: the first one waits for the log.
        await asyncio.sleep(0)
        await coordinator.forget(1)
        assert await gone is None
        assert not coordinator._arriving
        waiting = asyncio.create_task(coordinator.take(2, 1, 30.0))
        put_one(cluster.backends[0], PutRequest(NAME, 0, batch([b"x"]), None, 0, 0, "quorum"))
        assert await waiting == (0, 1)
        # The same request may come again.
        put_one(cluster.backends[0], PutRequest(NAME, 0, batch([b"y"]), None, 0, 0, "quorum"))
        assert await coordinator.take(1, 1, 30.0) == (1, 1)
        await coordinator.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_request_that_is_given_up_takes_nothing_even_if_its_call_comes_later(
    cluster: Opened,
) -> None:
    opened(cluster)

    def put() -> None:
        put_one(cluster.backends[0], PutRequest(NAME, 0, batch([b"x"]), None, 0, 0, "quorum"))

    async def main() -> None:
        coordinator = QueueCoordinator(cluster, NAME, 0)  # type: ignore[arg-type]
        assert not await coordinator.give_up(1)
        put()
        assert await coordinator.take(1, 1, 30.0) is None
        assert await coordinator.take(2, 1, 30.0) == (0, 1)
        # Items that are assigned stay assigned.
        assert await coordinator.give_up(2)
        assert await coordinator.take(2, 1, 0.0) == (0, 1)

        waiting = asyncio.create_task(coordinator.take(3, 1, 30.0))
        while not coordinator._getters:
            await asyncio.sleep(0)
        assert not await coordinator.give_up(3)
        assert await waiting is None
        await coordinator.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_one_item_that_cannot_be_decoded_takes_no_other_item_with_it(cluster: Opened) -> None:
    queue, _ = filled(cluster, 0, 1, b"{", 3, b"[", 5, 6)
    with pytest.raises(Rejected, match="offset 2 .* still in the topic") as refused:
        queue.get_nowait_batch(5)
    assert refused.value.field == "codec"
    assert "others" not in str(refused.value)
    assert queue.get() == 0
    assert asyncio.run(queue.get_async()) == 1
    with pytest.raises(Rejected, match="offset 4"):
        queue.get_nowait_batch(4)
    assert queue.get_nowait_batch(3) == [3, 5, 6]
    with pytest.raises(Empty):
        queue.get_nowait()


def test_a_batch_that_finds_too_few_items_keeps_those_that_were_left(cluster: Opened) -> None:
    queue, _ = filled(cluster, 0, b"{", 2, 3)
    with pytest.raises(Rejected):
        queue.get_nowait_batch(3)
    with pytest.raises(Empty):
        queue.get_nowait_batch(4)
    assert queue.get_nowait_batch(3) == [0, 2, 3]


def test_an_item_of_an_unknown_codec_takes_no_other_item_with_it(cluster: Opened) -> None:
    queue, _ = filled(cluster, 0, 1, 2)
    other, calls = opened(cluster, codec="msgpack")
    other._client().batcher.send(
        other._client().batcher.encoder.encode(NAME, b"\x01", properties=other._properties)
    ).result(30)
    calls.items = 4
    for _ in range(3):
        with pytest.raises(Rejected, match="accept"):
            other.get_nowait_batch(4 if not calls.next else 1)
    assert other.get() == 1


@pytest.mark.parametrize("fault", ["damaged", "deleted"])
def test_an_item_that_cannot_be_read_takes_no_other_item_with_it(
    cluster: Opened, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    queue, _ = filled(cluster, *range(6))
    client = queue._client()
    read = client.read
    bad = {1, 2} if fault == "deleted" else {2}

    def faulty(first: int, count: int) -> Any:
        if bad & set(range(first, first + count)):
            if fault == "deleted":
                raise OffsetOutOfRange("deleted", min=3, max=6)
            raise Corrupt("damaged", shard=0, offset=7)
        return read(first, count)

    monkeypatch.setattr(client, "read", faulty)
    kind: type[RayMQError] = Corrupt if fault == "damaged" else OffsetOutOfRange
    with pytest.raises(kind):
        queue.get_nowait_batch(5)
    left = [each for each in range(6) if each not in bad]
    assert queue.get_nowait_batch(len(left)) == left


KEYS: list[Any] = [(1, 2), (), ("a", (1, (b"b",))), 1, "s", b"b", None, True, 1.5]


@pytest.mark.parametrize("keys", [*itertools.combinations(KEYS, 2)], ids=repr)
def test_what_msgpack_takes_it_gives_back_with_the_same_keys(keys: tuple[Any, ...]) -> None:
    codec = codecs.codec("msgpack")
    value = {"outer": {key: [1, {key: "x"}] for key in keys}}
    assert codec.decode(codec.encode(value)) == value


def test_a_table_that_could_not_be_decoded_is_not_encoded() -> None:
    values = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")]
    )
    with pytest.raises(Rejected, match="UTF"):
        codecs.codec("arrow-ipc").encode(pa.table({"a": values}))
