"""A plan's load from callers of this process: threads or tasks that each wait for their own receipts.

The workers of a whole run make each row for itself, so that it can be verified. Here the rows are made before. So a
figure is the cost of sending alone, and can stand beside a limit of the machine. Does not import Ray.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from raymq.client.produce.async_producer import AsyncProducer
from raymq.client.produce.batch_sender import BatchSender
from raymq.client.produce.producer import Producer
from raymq.client.transport.routes import Routes
from raymq.cluster.cluster import Cluster

from .histogram import Histogram
from .messages import RowMaker
from .plan import BenchPlan

#: how long a receipt may take
_RECEIPT_TIMEOUT_S = 300.0


class Measured(NamedTuple):
    """The result of a run."""

    #: acknowledged messages, or batches
    sends: int
    seconds: float
    #: from the send to the receipt, microseconds
    latency: Histogram

    @property
    def rate(self) -> float:
        """Sends a second."""
        return self.sends / self.seconds

    def percentile_ms(self, percent: float) -> float:
        """A percentile of the latencies."""
        return self.latency.percentile(percent) / 1000


class Callers:
    """`plan.workers` callers of one sender, each with `plan.in_flight` sends without a receipt.

    What `plan.api` sends, in turn over topics and queues:
        batches   the same rows over and over, by BatchSender
        columns   the same by `Producer.send_batch`
        messages  single messages by `Producer.send`. With one queue they go to it; else the producer chooses
        tasks     single messages by `AsyncProducer.send`, of an asyncio task for each caller
    """

    def __init__(
        self, cluster: Cluster, plan: BenchPlan, rows: pa.RecordBatch | None = None
    ) -> None:
        """Args: `rows`: of PUT_SCHEMA, to be sent instead of rows with the plan's sizes."""
        self._cluster = cluster
        self._plan = plan
        self._rows = rows_of(plan) if rows is None else rows
        self._body: bytes = self._rows["body"][0].as_py()
        self._topics = plan.topic_names
        self._times: list[float] = []
        self._sender: Any = None

    def __enter__(self) -> Callers:
        if self._plan.api == "batches":
            self._sender = BatchSender(Routes.of(self._cluster), acks=self._plan.acks)
        elif self._plan.api != "tasks":
            self._sender = Producer(self._cluster, acks=self._plan.acks)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._sender is not None:
            self._sender.close()

    def run(self, sends: int | None = None) -> Measured:
        """Send for the plan's duration, or so many times for each caller, and wait for all receipts.

        Raises: RayMQError, the first one of a caller.
        """
        self._times = []
        begin, callers = time.perf_counter(), range(self._plan.workers)
        end = begin + self._plan.duration_s if sends is None else float("inf")
        share = float("inf") if sends is None else sends * self._plan.workers

        if self._plan.api == "tasks":
            asyncio.run(self._await_all(share, end))
        else:
            with ThreadPoolExecutor(self._plan.workers) as pool:
                calls = [pool.submit(self._call, number, share, end) for number in callers]
            for call in calls:
                call.result()

        seconds, latency = time.perf_counter() - begin, Histogram()
        latency.record(np.array(self._times) * 1e6)
        return Measured(len(self._times), seconds, latency)

    def _call(self, number: int, share: float, end: float) -> None:
        step, in_flight = self._plan.workers, self._plan.in_flight
        now, note = time.perf_counter, self._times.append
        sends = {"batches": self._send_rows, "columns": self._send_columns}
        send = sends.get(self._plan.api, self._send_message)
        under_way: deque[tuple[float, Any]] = deque()
        while True:
            if number < share and len(under_way) < in_flight and now() < end:
                under_way.append((now(), send(number)))
                number += step
            elif under_way:
                begin, future = under_way.popleft()
                future.result(_RECEIPT_TIMEOUT_S)
                note(now() - begin)
            else:
                return

    def _place(self, number: int) -> tuple[str, int]:
        topics = len(self._topics)
        return self._topics[number % topics], number // topics % self._plan.queues

    def _send_rows(self, number: int) -> Any:
        return self._sender.send(*self._place(number), self._rows)

    def _send_columns(self, number: int) -> Any:
        topic, queue = self._place(number)
        return self._sender.send_batch(topic, self._rows.select(["body"]), queue_id=queue)[0]

    def _send_message(self, number: int) -> Any:
        keys, queue = self._plan.keys, 0 if self._plan.queues == 1 else None
        key = None if keys is None else b"key-%d" % (number % keys.count)
        topic = self._topics[number % len(self._topics)]
        return self._sender.send(topic, self._body, key=key, queue_id=queue)

    async def _await_all(self, share: float, end: float) -> None:
        async with AsyncProducer(self._cluster, acks=self._plan.acks) as producer:

            async def call(number: int) -> None:
                while number < share and (begin := time.perf_counter()) < end:
                    await producer.send(self._topics[number % len(self._topics)], self._body)
                    self._times.append(time.perf_counter() - begin)
                    number += self._plan.workers

            await asyncio.gather(*(call(number) for number in range(self._plan.workers)))


def rows_of(plan: BenchPlan) -> pa.RecordBatch:
    """A batch of PUT_SCHEMA, as the plan has it."""
    return RowMaker(plan, 0).make(np.full(plan.batch, 1000))[0][2]
