"""Workers whose connections are cut at any moment, or let nothing pass for longer than a lease."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from raymq.cluster.cluster import Cluster
from raymq.store.base.errors import Fenced
from tests.support.served_shard import CLUSTER_ID, TOKEN, ServedShard
from tests.support.tcp_proxy import TcpProxy
from tests.support.waiting import until

QUEUES, MESSAGES, WORKERS = 3, 400, 3
CUTS = 25
LEASE_S = 1.0

#: queue and offset
Place = tuple[int, int]


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[ServedShard]:
    with ServedShard(tmp_path) as made:
        made.start_flusher()
        made.cluster.create_topic("t", queues=QUEUES)
        with made.cluster.producer() as producer:
            for number in range(MESSAGES):
                producer.send("t", b"%d" % number, queue_id=number % QUEUES)
        yield made
    made.stop_flusher()


class Histories:
    """What became of the messages. Threads: any may note."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.got: dict[Place, list[int]] = {}
        self.acked: dict[Place, list[int]] = {}

    def note(self, table: dict[Place, list[int]], place: Place, attempt: int) -> None:
        with self._lock:
            table.setdefault(place, []).append(attempt)


def work(cluster: Cluster, histories: Histories, is_over: threading.Event) -> None:
    options = {"lease_s": LEASE_S, "backoff": (0,), "unavailable_timeout_ms": 90_000}
    with cluster.workers("t", group="g", **options) as workers:
        while not is_over.is_set():
            message = workers.get(0.2)
            if message is None:
                continue
            place = message.queue_id, message.offset
            histories.note(histories.got, place, message.attempts)
            # One whose lease is over comes again.
            with contextlib.suppress(Fenced):
                message.ack()
                histories.note(histories.acked, place, message.attempts)


@pytest.mark.parametrize("is_frozen", [False, True])
def test_each_message_is_settled_once_however_often_answers_are_lost(
    shard: ServedShard, is_frozen: bool
) -> None:
    chance = random.Random(7)
    proxy = TcpProxy(int(shard.endpoints[0].rpartition(":")[2]))
    endpoints = {0: f"127.0.0.1:{proxy.port}"}
    shard.host.addresses.set_routes({"0": endpoints[0]})
    cluster = Cluster(
        name="cut",
        cluster_id=CLUSTER_ID,
        shards=1,
        token=TOKEN,
        endpoints=endpoints,
        resolver=lambda: dict(endpoints),
    )
    histories, is_over = Histories(), threading.Event()
    threads = [
        threading.Thread(target=work, args=(cluster, histories, is_over)) for _ in range(WORKERS)
    ]
    for thread in threads:
        thread.start()
    try:
        for cut in range(CUTS):
            least = cut * MESSAGES // (2 * CUTS)
            until(lambda: len(histories.got) > least, lambda: is_over.wait(0.01))  # noqa: B023
            is_over.wait(chance.random() / 50)
            if is_frozen and cut % 8 == 0:
                proxy.freeze()
                # Longer than a lease: others could get what these workers have, if there were any.
                is_over.wait(1.5 * LEASE_S)
                proxy.cut()
                proxy.thaw()
            else:
                proxy.cut()
        until(lambda: shard.cluster.describe_group("g")["lag"] == 0, lambda: is_over.wait(0.05))
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
        cluster.close()
        proxy.close()

    wanted = {(n % QUEUES, n // QUEUES) for n in range(MESSAGES)}
    assert histories.got.keys() == wanted, "a message was passed over"
    for place, attempts in histories.got.items():
        assert len(set(attempts)) == len(attempts), f"two workers had one attempt of {place}"
    for place, attempts in histories.acked.items():
        assert attempts == [max(histories.got[place])], f"{place} was settled twice"
    assert histories.acked.keys() == wanted, "a settlement was lost"
