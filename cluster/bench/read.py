"""How a benchmark's worker reads: one consumer and one thread per topic, over its queues.

Live (mode e2e) it waits for new messages, and a latency counts from a message's due time to its read. On a backlog
(mode consume) a latency is the time of one poll. Does not import Ray.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent import futures

import numpy as np
import pyarrow as pa

from raymq.client.consume.consumer import Consumer
from raymq.cluster.cluster import Cluster
from raymq.store.base.errors import Unavailable

from .check import QueueChecks, Verdict
from .job import READY, BenchClock, Control, Job, Meter, ReceiveResult, Snapshot
from .messages import body_bytes

#: seconds without a message, although there are more, after which the worker gives up
SILENCE_S = 60.0
_POLL_S = 0.1


class Reading:
    """One reading worker."""

    def __init__(self, job: Job, cluster: Cluster, clock: BenchClock) -> None:
        self._job = job
        self._plan = job.plan
        self._cluster = cluster
        self._clock = clock
        self._start = 0.0

        #: guards everything below
        self._lock = threading.Lock()
        self._checks = QueueChecks(job.plan)
        #: queue index -> the offset before which it ends; None: not known yet
        self._ends: dict[int, int] | None = None
        if not job.live:
            self._ends = {span.queue_index: span.end for span in job.ranges}
        self._stopping = False
        self._last = 0.0
        self._meter: Meter

    def run(self, control: Control) -> Iterator[str | Snapshot | ReceiveResult]:
        """Yields: READY, from the common start to the ends one snapshot per tick, the result."""
        with contextlib.ExitStack() as stack:
            # A live reader waits at the end of its queues before the first message is sent. A backlog
            # is not read ahead before the start.
            consumers = self._consumers(stack) if self._job.live else {}
            yield READY
            self._start = self._last = self._clock.to_monotonic(control.start())
            self._meter = Meter("receive" if self._job.live else "poll", self._plan, self._start)
            self._clock.sleep_ms(max(0, round(1000 * (self._start - self._clock.monotonic()))))

            consumers = consumers or self._consumers(stack)
            with futures.ThreadPoolExecutor(max(1, len(consumers)), "raymq-bench-read") as pool:
                readers = [pool.submit(self._read, *each) for each in consumers.items()]
                try:
                    yield from self._watch(control, readers)
                finally:
                    with self._lock:
                        self._stopping = True
            for reader in readers:
                reader.result()

            yield self._result()

    def _consumers(self, stack: contextlib.ExitStack) -> dict[int, Consumer]:
        """topic number -> its consumer."""
        starts: dict[int, dict[int, int]] = {}
        for span in self._job.ranges:
            topic, queue = divmod(span.queue_index, self._plan.queues)
            starts.setdefault(topic, {})[queue] = span.start
        names = self._plan.topic_names
        return {
            topic: stack.enter_context(
                Consumer(self._cluster, names[topic], start=first, queues=list(first))
            )
            for topic, first in starts.items()
        }

    def _watch(self, control: Control, readers: list[futures.Future[None]]) -> Iterator[Snapshot]:
        """Yield the figures until all readers have ended, or one has failed."""
        while True:
            ends = control.ends() if self._ends is None else None
            with self._lock:
                self._ends = self._ends or ends
            now = self._clock.monotonic()
            wait_s = max(0.0, min(self._meter.end_of(now) - now, _POLL_S))
            ended, left = futures.wait(readers, wait_s, futures.FIRST_EXCEPTION)
            done = not left or any(reader.exception() for reader in ended)
            with self._lock:
                found = self._meter.take(None if done else self._meter.number(now))
            yield from found
            if done:
                return

    def _read(self, topic: int, consumer: Consumer) -> None:
        while not self._through(topic, consumer):
            began = self._clock.monotonic()
            batch = consumer.poll_batch(timeout=_POLL_S)
            if batch.num_rows:
                self._count(topic, batch, began)

    def _through(self, topic: int, consumer: Consumer) -> bool:
        """Whether everything was read. Raises: Unavailable when stored messages do not come."""
        with self._lock:
            if self._stopping:
                return True
            if self._ends is None:
                return False

            first = topic * self._plan.queues
            missing = {
                queue: self._ends[first + queue] - position
                for queue, position in consumer.positions().items()
                if position < self._ends[first + queue]
            }
            silent_s = self._clock.monotonic() - max(self._last, self._start)

        if missing and silent_s > SILENCE_S:
            raise Unavailable(
                f"{sum(missing.values())} stored messages of {consumer.topic} did not come within "
                f"{silent_s:.0f} s; see `raymq status`",
                topic=consumer.topic,
            )
        return not missing

    def _count(self, topic: int, batch: pa.RecordBatch, began: float) -> None:
        now, now_us = self._clock.monotonic(), self._clock.wall_us()
        bodies = batch.column("body")
        queue_index = topic * self._plan.queues + batch.column("queue_id")[0].as_py()
        with self._lock:
            headers = self._checks.feed(queue_index, bodies, check_bytes=False)
            self._last = now
            tick = self._meter.at(now)
            tick.messages += len(headers)
            tick.payload_bytes += body_bytes(bodies)
            if self._job.live:
                tick.latency.record(now_us - headers["due_us"].astype(np.int64))
            else:
                tick.latency.record_repeated(int((now - began) * 1e6), 1)

    def _result(self) -> ReceiveResult:
        rows, verdict = {}, Verdict()
        for where, check in self._checks.checks.items():
            rows[where] = check.verdict.read
            verdict.add(check.verdict)
        return ReceiveResult(rows, verdict, self._last - self._start)
