"""One worker of a benchmark: it sends, reads or verifies.

Every job is a generator: READY, then after the common start its figures tick by tick, then its
result. The same code runs in a plain process (`serve`) and as a Ray task. Does not import Ray.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from multiprocessing.connection import Connection

from raymq.cluster.cluster import Cluster
from raymq.store.base.errors import Bug, RayMQError, require

from .check import verify
from .job import READY, BenchClock, Control, Job
from .messages import payload_block
from .read import Reading
from .send import BatchTransport, BenchTransport, MessageTransport, Sending


def work(
    job: Job, cluster: Cluster, control: Control, clock: BenchClock | None = None
) -> Iterator[object]:
    """Do a job.

    Yields: READY, then for "produce" and "read" Snapshots and at the end SendResult or ReceiveResult. For
    "verify": the rows of each piece and at the end a Verdict.
    Raises: RayMQError, the error that ended the job.
    """
    clock = clock or BenchClock()
    # Made before the start: it would slow the first batch down.
    payload_block()
    if job.kind == "produce":
        yield from _produce(job, cluster, control, clock)
    elif job.kind == "read":
        yield from Reading(job, cluster, clock).run(control)
    else:
        yield READY
        control.start()
        yield from verify(cluster, job.plan, list(job.ranges), list(job.ledgers))


def _produce(job: Job, cluster: Cluster, control: Control, clock: BenchClock) -> Iterator[object]:
    require(job.plan.api in ("batches", "messages"), "an api of workers", api=job.plan.api)
    kind = MessageTransport if job.plan.api == "messages" else BatchTransport
    transport: BenchTransport = kind(cluster, job.plan)
    with contextlib.closing(transport):
        for topic in job.plan.topic_names:
            transport.prepare(topic)
        sending = Sending(job, transport, clock)
        yield READY
        yield from sending.run(clock.to_monotonic(control.start()))


class PipeControl:
    """The control of a plain process: messages of its pipe."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def start(self) -> float:
        """See Control."""
        return float(self._pipe.recv())

    def ends(self) -> dict[int, int] | None:
        """See Control."""
        found: dict[int, int] | None = self._pipe.recv() if self._pipe.poll() else None
        return found


def serve(pipe: Connection, job: Job, cluster: Cluster) -> None:
    """The main function of a plain worker process: it writes every item to the pipe, then None.

    An error is written as itself. When the other end is closed, the process ends.
    """
    try:
        try:
            for item in work(job, cluster, PipeControl(pipe)):
                pipe.send(item)
        except RayMQError as error:
            pipe.send(error)
        except EOFError:
            raise
        except Exception as error:
            pipe.send(Bug(f"a worker ended with {type(error).__name__}: {error}"))
        pipe.send(None)
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        # The process that wanted the result has ended, or is ending everything.
        return
