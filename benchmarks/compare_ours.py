"""RayMQ itself and Ray's queue, as `benchmarks.compare` drives them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow as pa
import ray
from ray.util.queue import Queue

import raymq
from benchmarks.compared import (
    BACKLOG,
    BATCH_ROWS,
    MESSAGE,
    ONE,
    Client,
    Found,
    produced,
    read,
    threads,
)
from benchmarks.limits import started
from raymq.cluster.bench.callers import Callers
from raymq.cluster.bench.plan import BenchPlan

#: rows of a batch of columns
ROWS = 900


@contextlib.contextmanager
def raymq_client(directory: Path, durable: bool) -> Iterator[Client]:
    """A new cluster with the default options, but `flush`."""
    with started(directory, "compare", flush="sync" if durable else "async") as cluster:
        for topic in (ONE, BACKLOG):
            cluster.create_topic(topic, queues=1)
        yield Client(
            threads=partial(_waiting, cluster, BenchPlan(api="messages", topic=ONE)),
            tasks=partial(_waiting, cluster, BenchPlan(api="tasks", topic=ONE)),
            producers={
                "produce_msg_s": partial(_send, cluster),
                "produce_batches_msg_s": partial(_send_batches, cluster),
            },
            readers={
                "read_msg_s": partial(_read, cluster, _poll),
                "read_batches_msg_s": partial(_read, cluster, _poll_batch),
            },
        )


def _waiting(cluster: raymq.Cluster, plan: BenchPlan, count: int, seconds: float) -> Found:
    one = replace(plan, queues=1, batch=1, in_flight=1, workers=count, duration_s=seconds)
    with Callers(cluster, one) as callers:
        found = callers.run()
    return found.rate, found.latency


def _send(cluster: raymq.Cluster, seconds: float) -> tuple[int, float]:
    with cluster.producer() as producer:

        def send() -> int:
            producer.send(BACKLOG, MESSAGE)
            return 1

        return produced(send, producer.flush, seconds)


def _send_batches(cluster: raymq.Cluster, seconds: float) -> tuple[int, float]:
    rows = pa.record_batch({"body": pa.array(ROWS * [MESSAGE], pa.binary())})
    with cluster.producer() as producer:

        def send() -> int:
            producer.send_batch(BACKLOG, rows)
            return ROWS

        return produced(send, producer.flush, seconds)


def _read(cluster: raymq.Cluster, poll: Callable[[raymq.Consumer], int], messages: int) -> float:
    with cluster.consumer(BACKLOG, start="earliest") as consumer:
        return read(partial(poll, consumer), messages)


def _poll(consumer: raymq.Consumer) -> int:
    messages = consumer.poll(max_records=BATCH_ROWS, timeout=10)
    for message in messages:
        len(message.body)
    return len(messages)


def _poll_batch(consumer: raymq.Consumer) -> int:
    return consumer.poll_batch(timeout=10).num_rows


@contextlib.contextmanager
def ray_client(directory: Path, durable: bool) -> Iterator[Client]:
    """A queue in the memory of an actor, in a Ray of its own. It writes nothing into `directory`."""
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        one, backlog = (Queue(actor_options={"num_cpus": 0}) for _ in range(2))

        # Different objects: of equal ones pickle would send one.
        batch = [bytes(bytearray(MESSAGE)) for _ in range(BATCH_ROWS)]

        def send() -> int:
            backlog.put_nowait_batch(batch)
            return BATCH_ROWS

        def poll() -> int:
            found = backlog.get_nowait_batch(min(BATCH_ROWS, backlog.qsize()))
            for each in found:
                len(each)
            return len(found)

        yield Client(
            threads=partial(threads, lambda: partial(one.put, MESSAGE)),
            producers={"produce_msg_s": partial(produced, send, lambda: None)},
            readers={"read_msg_s": partial(read, poll)},
        )
    finally:
        ray.shutdown()
