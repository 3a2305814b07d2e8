"""How a benchmark's worker reads: one consumer and one thread per topic, over its queues.

Live (mode e2e) it waits for new messages, and a latency counts from a message's due time to its read. On a backlog
(mode consume) a latency is that of one poll. Does not import Ray.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from raymq.cluster.consume.consumer import Consumer
from raymq.store.errors import Unavailable

from .check import QueueChecks, Verdict
from .job import READY, BenchClock, Control, Job, Meter, Received, Snapshot
from .messages import body_bytes

if TYPE_CHECKING:
    import pyarrow as pa

    from raymq.cluster.cluster import Cluster

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
        self._changed = threading.Condition()
        self._checks = QueueChecks(job.plan)
        #: queue index -> the offset before which it ends; None: not known yet
        self._ends: dict[int, int] | None = None
        if not job.live:
            self._ends = {place.queue_index: place.last for place in job.ranges}
        self._running = 0
        self._stopping = False
        self._error: BaseException | None = None
        self._last = 0.0
        self._meter: Meter

    def run(self, control: Control) -> Iterator[str | Snapshot | Received]:
        """Yields: READY, from the common start to the ends one snapshot per tick, the result."""
        with contextlib.ExitStack() as stack:
            # A live reader waits at the end of its queues before the first message is sent. A backlog
            # is not read ahead before the start.
            consumers = self._consumers(stack) if self._job.live else {}
            yield READY
            self._start = self._last = self._clock.to_monotonic(control.start())
            self._meter = Meter("receive" if self._job.live else "poll", self._plan, self._start)
            with self._changed:
                wait = self._start - self._clock.monotonic()
                self._clock.wait_for(self._changed, lambda: False, wait)
            threads = self._threads(consumers or self._consumers(stack))
            try:
                yield from self._watch(control)
            finally:
                with self._changed:
                    self._stopping = True
                for thread in threads:
                    thread.join()
            yield self._result()

    def _consumers(self, stack: contextlib.ExitStack) -> dict[int, Consumer]:
        """topic number -> its consumer."""
        starts: dict[int, dict[int, int]] = {}
        for place in self._job.ranges:
            topic, queue = divmod(place.queue_index, self._plan.queues)
            starts.setdefault(topic, {})[queue] = place.first
        names = self._plan.topic_names
        return {
            topic: stack.enter_context(
                Consumer(self._cluster, names[topic], start=first, queues=list(first))
            )
            for topic, first in starts.items()
        }

    def _threads(self, consumers: dict[int, Consumer]) -> list[threading.Thread]:
        self._running = len(consumers)
        threads = [
            threading.Thread(target=self._read, args=each, name="raymq-bench-read", daemon=True)
            for each in consumers.items()
        ]
        for thread in threads:
            thread.start()
        return threads

    def _watch(self, control: Control) -> Iterator[Snapshot]:
        """Yield the figures until all threads have ended."""
        while True:
            ends = control.ends() if self._ends is None else None
            with self._changed:
                self._ends = self._ends or ends
                now = self._clock.monotonic()
                wait = min(self._meter.end_of(now) - now, _POLL_S)
                self._clock.wait_for(self._changed, lambda: not self._running, wait)
                done = not self._running
                found = self._meter.take(None if done else self._meter.number(now))
            yield from found
            if done:
                return

    def _read(self, topic: int, consumer: Consumer) -> None:
        try:
            while not self._through(topic, consumer):
                began = self._clock.monotonic()
                batch = consumer.poll_batch(timeout=_POLL_S)
                if batch.num_rows:
                    self._count(topic, batch, began)
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def _through(self, topic: int, consumer: Consumer) -> bool:
        """Whether everything was read. Raises: Unavailable when stored messages do not come."""
        with self._changed:
            if self._stopping or self._error is not None:
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
        with self._changed:
            headers = self._checks.feed(queue_index, bodies, check_bytes=False)
            self._last = now
            tick = self._meter.at(now)
            tick.messages += len(headers)
            tick.payload_bytes += body_bytes(bodies)
            if self._job.live:
                tick.latency.record(now_us - headers["due_us"].astype(np.int64))
            else:
                tick.latency.record_repeated(int((now - began) * 1e6), 1)

    def _result(self) -> Received:
        """Raises: what ended a thread early."""
        if self._error is not None:
            raise self._error
        rows, verdict = {}, Verdict()
        for where, check in self._checks.checks.items():
            rows[where] = check.verdict.read
            verdict.add(check.verdict)
        return Received(rows, verdict, self._last - self._start)
