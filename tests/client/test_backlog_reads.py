"""What a client reads right after the start of a shard whose consume queues lack acknowledged messages."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from raymq.actors.supervise.dispatcher import Dispatcher
from raymq.client.consume.range_reader import read_range
from raymq.client.messages.message import queue_offsets
from tests.support.batches import put_one, request
from tests.support.served_shard import ServedShard
from tests.support.waiting import until

COUNT = 5


class Backlog:
    """A served shard that has acknowledged messages in queue 0 of t, and dispatches none before `dispatch`."""

    def __init__(self, shard: ServedShard, allowed: threading.Event) -> None:
        self.shard = shard
        self._allowed = allowed

    def dispatch(self) -> None:
        """Let the dispatcher work."""
        self._allowed.set()
        self.shard.host.dispatcher.wake()

    def answer(self, call: Any) -> Any:
        """What `call` returns. It is begun before the first dispatch, and must wait for it."""
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(call)
            until(
                lambda: asked.done() or self.shard.host.dispatcher._awaiting == 1,
                lambda: threading.Event().wait(0.001),
            )
            assert self.shard.host.store.queue_range("t", 0) == (0, 0)
            self.dispatch()
            return asked.result(30)


@pytest.fixture
def backlog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backlog]:
    allowed, step = threading.Event(), Dispatcher._step
    monkeypatch.setattr(Dispatcher, "_step", lambda self: allowed.is_set() and step(self))
    with ServedShard(tmp_path / "store") as shard:
        shard.start_flusher()
        shard.cluster.create_topic("t", queues=1)
        for number in range(COUNT):
            put_one(shard.host, request([b"%d" % number], producer_id=1, sequence=number)).wait(30)
        # As a kill leaves it.
        monkeypatch.setattr(shard.host.store, "close", shard.host.store.abandon)
        shard.down()
        shard.up()
        assert shard.host.store.dispatched < shard.host.log.confirmed
        yield Backlog(shard, allowed)


def test_the_ranges_of_queues_wait_for_the_dispatch_after_a_start(backlog: Backlog) -> None:
    facts = backlog.answer(lambda: backlog.shard.cluster.describe_topic("t"))
    assert facts["messages"] == COUNT


def test_a_bounded_read_gets_all_that_was_acknowledged_before_a_start(backlog: Backlog) -> None:
    def read() -> list[int]:
        cluster = backlog.shard.cluster
        (queue,) = cluster.describe_topic("t")["queues"]
        found = read_range(cluster, "t", 0, 0, queue["min_offset"], queue["max_offset"])
        return [offset for records in found for offset in queue_offsets(records)]

    assert backlog.answer(read) == list(range(COUNT))
