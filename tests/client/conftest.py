"""A shard in memory, served by real Flight, and idempotent senders to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from raymq.client.produce.batch_sender import BatchSender
from raymq.client.produce.producer import Producer
from tests.support.fake_backend import FakeBackend, FakeCluster


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    """One shard, with topic t of four queues."""
    cluster = FakeCluster()
    cluster.create_topic("t", queues=4)
    yield cluster
    cluster.close()


@pytest.fixture
def backend(cluster: FakeCluster) -> FakeBackend:
    return cluster.backends[0]


@pytest.fixture
def make(cluster: FakeCluster) -> Iterator[Callable[..., Producer]]:
    """Makes producers of the cluster. They are closed without a flush at the end."""
    made: list[Producer] = []

    def producer(**options: Any) -> Producer:
        made.append(Producer(cluster, **options))  # type: ignore[arg-type]
        return made[-1]

    yield producer
    for each in made:
        each._batcher.batch_sender.close()


@pytest.fixture
def make_sender(cluster: FakeCluster) -> Iterator[Callable[..., BatchSender]]:
    made: list[BatchSender] = []

    def sender(**options: Any) -> BatchSender:
        made.append(BatchSender(options.pop("routes", None) or cluster.routes(), **options))
        return made[-1]

    yield sender
    for each in made:
        each.close()
