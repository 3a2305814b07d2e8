"""The workers of a benchmark, as plain processes or as Ray tasks.

The order of calls: the constructor (workers start and report READY), `go`, `events` until none is left, `close`.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any

from raymq.cluster.cluster import Cluster
from raymq.store.base.errors import Bug, RayMQError

from .job import Job
from .worker import serve, work

#: seconds between the moment at which the last worker is ready and the common start
LEAD_S = 0.2
_JOIN_S = 5.0

#: number of the worker, and its report; None: the worker has ended
Event = tuple[int, Any]


class LocalWorkers:
    """One process of this machine per worker, with a pipe."""

    def __init__(self, cluster: Cluster, jobs: Sequence[Job]) -> None:
        context = multiprocessing.get_context("spawn")
        self._processes: list[Any] = []
        self._pipes: dict[Connection, int] = {}
        for number, job in enumerate(jobs):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, job, cluster), daemon=True)
            process.start()
            # While this copy is open, the end of the worker's process would not be noticed.
            theirs.close()
            self._processes.append(process)
            self._pipes[ours] = number

    def events(self, timeout_s: float) -> list[Event]:
        """Wait up to `timeout_s`, then return the reports of workers so far. Raises: RayMQError of a worker."""
        found: list[Event] = []
        for pipe in wait(list(self._pipes), timeout_s):
            if not isinstance(pipe, Connection):
                continue

            number = self._pipes[pipe]
            try:
                item = pipe.recv()
            except EOFError:
                self._processes[number].join(_JOIN_S)
                message = (
                    f"bench worker {number} died, exit code {self._processes[number].exitcode}"
                )
                raise Bug(message) from None

            if isinstance(item, RayMQError):
                raise item
            if item is None:
                del self._pipes[pipe]
                pipe.close()
            found.append((number, item))

        return found

    def go(self, start_s: float) -> None:
        """Let all workers begin at `start_s`, wall clock."""
        self._send(start_s)

    def end(self, ends: dict[int, int]) -> None:
        """Set the ends of live readers. Args: `ends`: queue index -> offset."""
        self._send(ends)

    def _send(self, message: object) -> None:
        for pipe in self._pipes:
            # A worker that ended just now is reported by `events`.
            with contextlib.suppress(OSError):
                pipe.send(message)

    def close(self) -> None:
        """End the workers that still run."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(0.0 if self._pipes else _JOIN_S)
            if process.is_alive():
                process.terminate()
                process.join(_JOIN_S)
            process.close()


class Gate:
    """A Ray actor on which the tasks wait for the common start."""

    def __init__(self) -> None:
        self._started = asyncio.Event()
        self._start_s = 0.0
        self._ends: dict[int, int] | None = None

    async def open(self, start_s: float) -> None:
        """Let all tasks begin at `start_s`."""
        self._start_s = start_s
        self._started.set()

    async def passed(self) -> float:
        """Wait until it is opened. Returns: the time to begin."""
        await self._started.wait()
        return self._start_s

    async def end(self, ends: dict[int, int]) -> None:
        """Set the ends of live readers."""
        self._ends = ends

    async def ends(self) -> dict[int, int] | None:
        """The ends of all queues; None: not known yet."""
        return self._ends


class RayControl:
    """The control of a Ray task: it asks the gate, one call at a time."""

    def __init__(self, ray: ModuleType, gate: Any) -> None:
        self._ray = ray
        self._gate = gate
        self._asked: Any = None

    def start(self) -> float:
        """See Control."""
        return float(self._ray.get(self._gate.passed.remote()))

    def ends(self) -> dict[int, int] | None:
        """See Control."""
        if self._asked is None:
            self._asked = self._gate.ends.remote()
        ready, _ = self._ray.wait([self._asked], timeout=0)
        if not ready:
            return None
        asked, self._asked = self._asked, None
        found: dict[int, int] | None = self._ray.get(asked)
        return found


def ray_task(job: Job, cluster: Cluster, gate: object) -> Iterator[object]:
    """The body of a Ray task."""
    import ray

    # Ray sends values into the generator. `yield from` would pass them on to the inner generator.
    for item in work(job, cluster, RayControl(ray, gate)):  # noqa: UP028
        yield item


class RayWorkers:
    """One Ray task per worker, spread over the nodes. Its items are streamed back.

    Tasks ask Ray for no CPU: all must run at once, even on a small cluster.
    """

    def __init__(self, ray: ModuleType, cluster: Cluster, jobs: Sequence[Job]) -> None:
        self._ray = ray
        self._gate = ray.remote(num_cpus=0)(Gate).remote()
        options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": "SPREAD"}
        task = ray.remote(num_returns="streaming", **options)(ray_task)
        # The handle travels once, not with every task.
        shared = ray.put(cluster)
        self._streams = {task.remote(job, shared, self._gate): n for n, job in enumerate(jobs)}

    def events(self, timeout_s: float) -> list[Event]:
        """See LocalWorkers."""
        streams = list(self._streams)
        ready, _ = self._ray.wait(streams, num_returns=len(streams), timeout=0, fetch_local=False)
        if not ready:
            ready, _ = self._ray.wait(streams, timeout=timeout_s, fetch_local=False)

        found: list[Event] = []
        for stream in ready:
            number = self._streams[stream]
            try:
                item = self._ray.get(next(stream))
            except StopIteration:
                del self._streams[stream]
                item = None
            except self._ray.exceptions.RayTaskError as error:
                cause = error.cause
                if isinstance(cause, RayMQError):
                    raise cause from None
                raise Bug(f"bench worker {number} ended with {cause!r}") from error
            except self._ray.exceptions.RayError as error:
                raise Bug(f"bench worker {number} died: {error}") from error
            found.append((number, item))

        return found

    def go(self, start_s: float) -> None:
        """See LocalWorkers."""
        self._ray.get(self._gate.open.remote(start_s))

    def end(self, ends: dict[int, int]) -> None:
        """See LocalWorkers."""
        self._ray.get(self._gate.end.remote(ends))

    def close(self) -> None:
        """See LocalWorkers."""
        for stream in self._streams:
            self._ray.cancel(stream, force=True)
        self._ray.kill(self._gate)


#: running workers. Both kinds have the same methods
WorkerPool = LocalWorkers | RayWorkers
