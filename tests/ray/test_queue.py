"""The durable Queue in a real Ray: shared by tasks and actors, and not harmed when any part of it is killed."""

from __future__ import annotations

import asyncio
import os
import pickle
import queue
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.queue import Empty, Full

import raymq
from raymq.cluster.deploy import owned_ray
from raymq.cluster.record.paths import ClusterPaths
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Rejected, Unavailable
from raymq.store.base.files import Files
from tests.support.ray_environment import ray_environment
from tests.support.waiting import until

ITEMS = 120


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("queue") / "data"


@pytest.fixture(scope="module")
def cluster(data_dir: Path) -> Iterator[raymq.Cluster]:
    with ray_environment(data_dir.parent):
        try:
            cluster = raymq.start(
                data_dir, name="queue", ephemeral=True, segment_size_bytes=16 * 1024 * 1024
            )
            yield cluster
            cluster.close()
        finally:
            ray.shutdown()
            owned_ray.stop_owned(ClusterPaths(data_dir), files=Files(), clock=Clock())


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def coordinator_pid(items: raymq.Queue) -> int:
    pid: int = ray.get(items.actor.describe.remote())["pid"]
    return pid


@ray.remote(num_cpus=0)
def put_some(items: raymq.Queue, worker: int, count: int) -> None:
    for number in range(count):
        items.put([worker, number])


@ray.remote(num_cpus=0)
class Taker:
    """Takes items until `stop`; remembers all of them."""

    def __init__(self, items: raymq.Queue) -> None:
        self._items = items

    def take(self, count: int) -> list[Any]:
        """So many."""
        return [self._items.get(timeout=60) for _ in range(count)]


@pytest.mark.timeout(120)
def test_methods_and_exceptions_are_those_of_rays_queue(cluster: raymq.Cluster) -> None:
    items = raymq.Queue("same", cluster=cluster)
    values = [None, 1, -2.5, "text", b"\x00\xff", [1, [2]], {"a": 1, 2: b"x"}]
    for value in values:
        items.put(value)
    assert (len(items), items.size(), items.qsize()) == (7, 7, 7)
    assert (items.empty(), items.full()) == (False, False)
    assert items.get() == values[0]
    assert items.get_nowait_batch(2) == values[1:3]
    with pytest.raises(Empty):
        items.get_nowait_batch(5)
    assert [items.get_nowait() for _ in range(4)] == values[3:]
    for attempt in (items.get_nowait, lambda: items.get(timeout=0.05)):
        with pytest.raises(queue.Empty):
            attempt()
    items.put_nowait_batch(range(5000))
    assert items.get_nowait_batch(5000) == list(range(5000))
    # Several parts.
    large = [b"%04d" % number * 300 for number in range(3000)]
    items.put_nowait_batch(large)
    assert items.get_nowait_batch(3000) == large
    assert items.empty()
    with pytest.raises(TypeError, match="Iterable"):
        items.put_nowait_batch(1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="int"):
        items.get_nowait_batch("1")  # type: ignore[arg-type]
    for wrong in (lambda: items.get_nowait_batch(-1), lambda: items.get(timeout=-1)):
        with pytest.raises(ValueError, match="non-?negative"):
            wrong()
    with pytest.raises(ValueError, match="non-negative"):
        items.put(1, timeout=-1)
    with pytest.raises(Rejected, match="msgpack"):
        items.put(object())
    assert items.get_nowait_batch(0) == []


@pytest.mark.timeout(120)
def test_a_full_queue_refuses_or_waits(cluster: raymq.Cluster) -> None:
    items = raymq.Queue("bounded", cluster=cluster, maxsize=3)
    for number in range(3):
        items.put_nowait(number)
    assert items.full()
    for attempt in (
        lambda: items.put_nowait(9),
        lambda: items.put(9, timeout=0.05),
        lambda: items.put_nowait_batch([9]),
        lambda: items.put_nowait_batch([9] * 4),
    ):
        with pytest.raises(Full):
            attempt()
    late = put_some.remote(items, 7, 1)
    assert [items.get() for _ in range(4)] == [0, 1, 2, [7, 0]]
    ray.get(late, timeout=30)
    items.put_nowait_batch([1, 2, 3])
    assert items.get_nowait_batch(3) == [1, 2, 3]


@pytest.mark.timeout(120)
def test_the_awaited_methods_and_a_cancelled_get(cluster: raymq.Cluster) -> None:
    items = raymq.Queue("awaited", cluster=cluster)

    async def main() -> None:
        await asyncio.gather(*(items.put_async(number) for number in range(20)))
        found = [await items.get_async() for _ in range(20)]
        assert sorted(found) == list(range(20))
        with pytest.raises(Empty):
            await items.get_async(block=False)
        for number in range(5):
            waiting = asyncio.ensure_future(items.get_async())
            await asyncio.sleep(0.01 * number)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await items.put_async(number)
            # The items that were given to the cancelled call come now.
            assert await items.get_async(timeout=30) == number

    asyncio.run(main())


@pytest.mark.timeout(120)
def test_an_item_that_is_put_after_an_interrupted_get_goes_to_the_next_get_of_any_handle(
    cluster: raymq.Cluster,
) -> None:
    items, other = (raymq.Queue("interrupted", cluster=cluster) for _ in range(2))

    def ring(*_: object) -> None:
        # Ray's own calls pass on no other exception of a signal handler.
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, ring)
    try:
        for number in range(3):
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(KeyboardInterrupt):
                items.get()
            other.put(number)
            assert other.get(timeout=30) == number
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.timeout(120)
def test_codecs_are_the_clients_affair_and_nothing_is_unpickled(cluster: raymq.Cluster) -> None:
    class Pickle:
        name = "pickle"

        def encode(self, value: Any) -> bytes:
            return pickle.dumps(value)

        def decode(self, body: bytes) -> Any:
            return pickle.loads(body)

    own = raymq.Queue("codecs", cluster=cluster, codec=Pickle(), accept=["json"])
    plain = raymq.Queue("codecs", cluster=cluster, codec="json")
    own.put({1, 2})
    assert own.get() == {1, 2}
    plain.put({"a": "é"})
    assert own.get() == {"a": "é"}
    own.put({3})
    with pytest.raises(Rejected, match="still in the topic"):
        plain.get()
    assert plain.empty()


@pytest.mark.timeout(120)
def test_lingering_puts_are_sent_by_flush_and_shutdown(cluster: raymq.Cluster) -> None:
    items = raymq.Queue("linger", cluster=cluster, linger_ms=60_000)
    for number in range(0, 1000, 5):
        items.put(number)
        items.put_nowait_batch(range(number + 1, number + 5))
    items.flush(30)
    assert items.qsize() == 1000
    items.put(1000)
    # More than waits for company: the end of it lingers.
    items.put_nowait_batch([bytes(1024)] * 5000)
    with pytest.raises(Rejected, match="the limit is 4194304"):
        items.put_nowait_batch([b"not sent", bytes(5 << 20)])
    items.shutdown()
    with pytest.raises(Rejected, match="shut down"):
        items.qsize()
    again = raymq.Queue("linger", cluster=cluster)
    assert again.get_nowait_batch(1001) == list(range(1001))
    assert again.get_nowait_batch(5000) == [bytes(1024)] * 5000
    assert again.empty()


@pytest.mark.timeout(120)
def test_tasks_and_actors_share_a_queue_while_its_processes_are_killed(
    cluster: raymq.Cluster,
) -> None:
    items = raymq.Queue("shared", cluster=cluster)
    takers = [Taker.remote(items) for _ in range(2)]  # type: ignore[attr-defined]
    taken = [taker.take.remote(ITEMS // 2) for taker in takers]
    puts = [put_some.remote(items, worker, ITEMS // 2) for worker in range(2)]
    ready, _ = ray.wait([*puts], num_returns=1, timeout=30)
    first = coordinator_pid(items)
    kill(first)
    kill(cluster.status()["shards"][0]["pid"])
    ray.get(puts, timeout=60)
    found = [each for some in ray.get(taken, timeout=90) for each in some]
    # Each item once, whichever process was killed in between.
    expected = [[worker, number] for worker in range(2) for number in range(ITEMS // 2)]
    assert sorted(found) == expected
    assert coordinator_pid(items) != first
    assert items.empty()
    # Every item ever put can be read again, and each putter's are in order.
    with cluster.consumer("shared", start="earliest") as consumer:
        read = [message.value for message in consumer.poll(ITEMS, timeout=30)]
        until(lambda: len(read) == ITEMS, lambda: read.extend(m.value for m in consumer.poll()))
    for worker in range(2):
        assert [n for w, n in read if w == worker] == list(range(ITEMS // 2))


@pytest.mark.timeout(120)
def test_a_cluster_that_stops_in_a_foreign_ray_leaves_no_coordinator_and_gets_none(
    cluster: raymq.Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raymq.cluster.queue.coordinator_calls.RETRY_TIMEOUT_S", 1.0)
    guest = raymq.start(
        tmp_path / "guest",
        name="guest",
        address=cluster.ray_address,
        ephemeral=True,
        segment_size_bytes=16 << 20,
    )
    items = raymq.Queue("left", cluster=guest)
    items.put(1)
    assert items.get() == 1
    found: list[BaseException | None] = []

    def wait_for_more() -> None:
        try:
            items.get()
        except Unavailable as error:
            found.append(error)

    # It asks for a coordinator again and again while the cluster stops.
    getter = threading.Thread(target=wait_for_more)
    getter.start()
    until(
        lambda: ray.get(items.actor.describe.remote())["getters"] == 1,
        lambda: getter.join(0.02),
    )
    assert guest.stop().ray == "left running"
    getter.join(30)
    assert len(found) == 1
    named = ray.util.list_named_actors(all_namespaces=True)
    assert [actor for actor in named if actor["name"].startswith("raymq:guest:")] == []
    # A handle of a stopped cluster is shut down without a word.
    items.shutdown()


@pytest.mark.thorough
@pytest.mark.timeout(120)
def test_items_are_there_after_ray_itself_was_started_again(
    cluster: raymq.Cluster, data_dir: Path
) -> None:
    items = raymq.Queue("kept", cluster=cluster)
    items.put_nowait_batch([1, 2, 3])
    assert items.get() == 1
    raymq.connect(data_dir).stop()
    # It ended that Ray, so this process has left it.
    assert not ray.is_initialized()
    raymq.start(data_dir).close()
    # The old handle finds the new Ray by itself.
    assert items.get() == 2
    with raymq.connect(data_dir) as again:
        assert raymq.Queue("kept", cluster=again).get() == 3
    assert items.empty()
