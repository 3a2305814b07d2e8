"""How a benchmark's worker sends: a closed loop, or an open one that keeps its times.

Coordinated omission: in an open loop every message has a time at which it is due, whatever happened to earlier
messages. Its latency counts from then, even when a stalled server kept the worker from sending it, and even when it was
never sent. Does not import Ray.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raymq.client.messages.keys import keys_of
from raymq.client.produce.batch_sender import BatchSender
from raymq.client.produce.producer import Producer
from raymq.client.transport.routes import Routes
from raymq.cluster.cluster import Cluster
from raymq.store.base.arrays import Int64s
from raymq.store.base.errors import RayMQError, Rejected, StorageFull, Unavailable
from raymq.store.records.property_columns import PropertyColumns

from .check import Ledger
from .histogram import Histogram
from .job import BenchClock, Job, Meter, SendResult, Snapshot
from .messages import RowMaker, body_bytes
from .plan import BenchPlan

#: seconds after the end until missing answers count as unknown
ANSWERS_TIMEOUT_S = 150.0
#: seconds after the end in which messages that were due before it are still sent
GRACE_S = 1.0
#: rows that were due and never sent are counted in parts of this size
_UNSENT_ROWS = 1_000_000
#: errors after which certainly nothing was stored
_REFUSALS = (Rejected, Unavailable, StorageFull)

#: called once for every part of a batch: its first row, its rows, the error or None
Done = Callable[[int, int, BaseException | None], None]


class BatchTransport:
    """Sends columns by BatchSender: one answer per batch."""

    def __init__(self, cluster: Cluster, plan: BenchPlan) -> None:
        self._sender = BatchSender(Routes.of(cluster), acks=plan.acks)

    def prepare(self, topic: str) -> None:
        """Look the topic up, so that the first send is as quick as the others."""
        self._sender.topic(topic)

    def send(self, topic: str, queue_id: int, rows: pa.RecordBatch, done: Done) -> None:
        """Send rows of PUT_SCHEMA; may block while buffers are full. Raises: RayMQError."""
        count = rows.num_rows
        future = self._sender.send(topic, queue_id, rows)
        future.add_done_callback(lambda ended: done(0, count, ended.exception()))

    def close(self) -> None:
        """Close; sends without an answer fail."""
        self._sender.close()


class MessageTransport:
    """Sends single messages through Producer: one answer per message."""

    def __init__(self, cluster: Cluster, plan: BenchPlan) -> None:
        # Here the linger time is the producer's: the schedule hands over due messages at once.
        self._producer = Producer(cluster, acks=plan.acks, linger_ms=plan.linger_ms)
        self._cluster = cluster

    def prepare(self, topic: str) -> None:
        """See BatchTransport."""
        Routes.of(self._cluster).topics.find(topic)

    def send(self, topic: str, queue_id: int, rows: pa.RecordBatch, done: Done) -> None:
        """See BatchTransport."""
        keys = keys_of(PropertyColumns(rows.column("properties"))).to_pylist()
        for row, body in enumerate(rows.column("body").to_pylist()):
            try:
                future = self._producer.send(topic, body, key=keys[row], queue_id=queue_id)
            except RayMQError as error:
                done(row, 1, error)
                continue
            future.add_done_callback(lambda ended, row=row: _report(ended, row, done))  # type: ignore[misc]

    def close(self) -> None:
        """See BatchTransport."""
        # Everything was answered, or timed out. Failures are in the ledger already.
        with contextlib.suppress(RayMQError):
            self._producer.close(timeout=1.0)


#: how rows get to the cluster; both kinds have the same methods
BenchTransport = BatchTransport | MessageTransport


def _report(ended: Any, row: int, done: Done) -> None:
    try:
        ended.result(0)
    except BaseException as error:
        done(row, 1, error)
    else:
        done(row, 1, None)


class Schedule:
    """Open loop: when each message of a worker is due, counted from the start of the run."""

    def __init__(self, plan: BenchPlan, worker: int, start: float) -> None:
        self._rate = (plan.rate or 0.0) / plan.workers
        # Workers take turns, instead of sending all at the same moments.
        self._start = start + (worker % plan.workers) / plan.workers / self._rate
        self._batch = plan.batch
        self._linger_s = 0.0 if plan.api == "messages" else plan.linger_ms / 1000
        #: messages taken so far
        self.taken = 0

    def due(self, number: int) -> float:
        """When a message is due, monotonic seconds."""
        return self._start + number / self._rate

    def waiting(self, now: float) -> int:
        """Messages that are due and not taken."""
        if now < self._start:
            return 0
        return max(int((now - self._start) * self._rate) + 1 - self.taken, 0)

    def take(self, now: float) -> npt.NDArray[np.float64] | None:
        """Due times of the next batch: a full one, or the messages that have waited for the linger time."""
        count = min(self.waiting(now), self._batch)
        if not count or (count < self._batch and now < self.next_time(now)):
            return None
        return self.skip(count)

    def skip(self, count: int) -> npt.NDArray[np.float64]:
        """Take `count` messages. Returns: when they were due."""
        first, self.taken = self.taken, self.taken + count
        return self._start + np.arange(first, first + count) / self._rate

    def next_time(self, now: float) -> float:
        """When `take` has something."""
        return min(self.due(self.taken) + self._linger_s, self.due(self.taken + self._batch - 1))


class Sending:
    """One sending worker: makes rows, sends them according to the plan, counts the answers."""

    def __init__(self, job: Job, transport: BenchTransport, clock: BenchClock) -> None:
        self._job = job
        self._plan = job.plan
        self._transport = transport
        self._clock = clock
        self._maker = RowMaker(job.plan, job.worker)
        self._window = job.plan.in_flight * job.plan.batch
        self._offset_us = 0.0

        #: guards everything below
        self._changed = threading.Condition()
        self._ledger = Ledger(job.worker)
        self._errors: dict[str, int] = {}
        self._first_error: str | None = None
        #: the first error that is not retriable
        self._fatal: RayMQError | None = None
        self._in_flight = 0
        self._sent = 0
        self._meter: Meter

    def run(self, start: float) -> Iterator[Snapshot | SendResult]:
        """From `start` (monotonic seconds) to the end of the plan, and until all is answered.

        Raises: the first error that is not retriable.
        """
        plan, clock = self._plan, self._clock
        self._offset_us = clock.wall_us() - clock.monotonic() * 1e6
        self._meter = Meter("send", plan, start)
        schedule = None if plan.rate is None else Schedule(plan, self._job.worker, start)
        end = start + plan.warmup_s + plan.duration_s
        if self._job.rows is not None:
            end = float("inf")

        self._wait(lambda: False, start)
        while (now := clock.monotonic()) < end and not self._enough():
            yield from self._snapshots(self._meter.number(now))
            if schedule is None:
                self._send_closed(min(end, self._meter.end_of(now)))
            else:
                due = schedule.take(now)
                if due is None:
                    deadline_s = min(end, self._meter.end_of(now), schedule.next_time(now))
                    self._wait(lambda: False, deadline_s)
                else:
                    self._send(due)

        unsent = 0 if schedule is None else self._finish_schedule(schedule, end)
        yield from self._wait_for_answers()

        if self._fatal is not None:
            raise self._fatal
        with self._changed:
            yield SendResult(self._ledger, unsent, self._errors, self._first_error)

    def _enough(self) -> bool:
        return self._job.rows is not None and self._sent >= self._job.rows

    def _send_closed(self, deadline_s: float) -> None:
        """Send the next batch when it fits into the window, or return at `deadline_s`."""
        count = self._plan.batch
        if self._job.rows is not None:
            count = min(count, self._job.rows - self._sent)
        if self._wait(lambda: self._in_flight + count <= self._window, deadline_s):
            self._send(np.full(count, self._clock.monotonic()))

    def _wait(self, ready: Callable[[], bool], deadline_s: float) -> bool:
        with self._changed:
            self._clock.wait_for(self._changed, ready, deadline_s - self._clock.monotonic())
            return ready()

    def _send(self, due: npt.NDArray[np.float64]) -> None:
        if self._fatal is not None:
            raise self._fatal
        due_us = (due * 1e6 + self._offset_us).astype(np.int64)
        self._sent += len(due)
        before = dict(self._maker.sequences)
        for queue_index, queue_due_us, rows in self._maker.make(due_us):
            first = before.get(queue_index, 0)
            sizes = body_bytes(rows.column("body")) / rows.num_rows
            with self._changed:
                self._in_flight += rows.num_rows
                self._ledger.leave_open(queue_index, first, rows.num_rows)

            done = functools.partial(self._done, queue_index, first, queue_due_us, sizes)
            topic, queue = self._plan.topic_and_queue(queue_index)
            try:
                self._transport.send(topic, queue, rows, done)
            except RayMQError as error:
                done(0, rows.num_rows, error)

    def _done(
        self,
        queue_index: int,
        first: int,
        due_us: Int64s,
        size: float,
        row: int,
        count: int,
        error: BaseException | None,
    ) -> None:
        """Count the answer to `count` rows from `row` on, of a batch that begins with sequence `first`."""
        now = self._clock.monotonic()
        now_us = int(now * 1e6 + self._offset_us)

        with self._changed:
            self._in_flight -= count
            if error is None:
                self._ledger.acknowledge(queue_index, first + row, count)
                tick = self._meter.at(now)
                tick.messages += count
                tick.payload_bytes += int(count * size)
                _record(tick.latency, now_us, due_us[row : row + count])
            else:
                if isinstance(error, _REFUSALS):
                    self._ledger.refuse(queue_index, first + row, count)
                kind = type(error).__name__
                self._errors[kind] = self._errors.get(kind, 0) + 1
                self._first_error = self._first_error or str(error)
                if isinstance(error, RayMQError) and not error.retriable:
                    self._fatal = self._fatal or error

            self._changed.notify_all()

    def _finish_schedule(self, schedule: Schedule, end: float) -> int:
        """Send the messages due before the end. Returns: how many messages could not be sent.

        These count with the time that they have waited so far.
        """
        # A message that is due at the end itself is not part of this run, whatever the rounding of two floats.
        last = end - 1e-6
        while schedule.waiting(last) and self._clock.monotonic() < end + GRACE_S:
            self._send(schedule.skip(min(schedule.waiting(last), self._plan.batch)))
        now, total = self._clock.monotonic(), schedule.waiting(last)
        now_us, left = int(now * 1e6 + self._offset_us), total
        while left:
            count = min(left, _UNSENT_ROWS)
            due_us = (schedule.skip(count) * 1e6 + self._offset_us).astype(np.int64)
            with self._changed:
                self._meter.at(now).latency.record(now_us - due_us)
            left -= count
        return total

    def _snapshots(self, before: int | None) -> list[Snapshot]:
        with self._changed:
            return self._meter.take(before)

    def _wait_for_answers(self) -> Iterator[Snapshot]:
        deadline_s = self._clock.monotonic() + ANSWERS_TIMEOUT_S
        while (now := self._clock.monotonic()) < deadline_s:
            yield from self._snapshots(self._meter.number(now))
            if self._wait(lambda: not self._in_flight, min(deadline_s, self._meter.end_of(now))):
                break
        yield from self._snapshots(None)


def _record(histogram: Histogram, now_us: int, due_us: Int64s) -> None:
    if due_us[0] == due_us[-1]:
        histogram.record_repeated(now_us - int(due_us[0]), len(due_us))
    else:
        histogram.record(now_us - due_us)
