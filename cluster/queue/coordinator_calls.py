"""`CoordinatorCalls`: how a handle of a queue reaches its coordinator, which it starts if it does not run."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Mapping
from typing import Any

import ray

from raymq.client.transport.actor_names import NAMESPACE, actor_name, coordinator_name
from raymq.cluster.cluster import Cluster
from raymq.store.base.clock import Clock
from raymq.store.base.errors import RayMQError, Rejected, Unavailable

from .coordinator import CoordinatorActor
from .local_socket import WAIT_S as SOCKET_WAIT_S
from .local_socket import NotLocal, local_client
from .queue_client import RETRY_TIMEOUT_S, attach, not_in_this_ray

#: concurrent calls of the coordinator: each waiting get or put is one
_CALLS_MAX = 10_000
RETRY_MS = 100
#: longest wait of a caller that was interrupted
GIVE_UP_S = 1.0


class CoordinatorAway(Unavailable):
    """The queue's coordinator does not answer. Its shard may."""


class CoordinatorCalls:
    """Calls of one queue's coordinator. They are repeated after its death, so each names a request number.

    Threads: any.
    """

    def __init__(
        self, cluster: Cluster, queue: str, shard: int, actor_options: Mapping[str, object]
    ) -> None:
        """Args: `actor_options`: Ray's options, used if this handle starts the coordinator."""
        self._cluster = cluster
        self._queue = queue
        self._shard = shard
        self._actor_options = actor_options
        self._lock = threading.Lock()
        self._clock = Clock()
        self._local = local_client(cluster, queue)
        self._actor: Any = None
        self.closed = False

    @property
    def actor(self) -> object:
        """The handle of the coordinator, which is started if it does not run."""
        self.check_open()
        attach(self._cluster)
        with self._lock:
            if self._actor is None:
                self._actor = self._start()
            return self._actor

    def check_open(self) -> None:
        """Raises: Rejected after `close`."""
        if self.closed:
            raise Rejected(
                f"this handle of queue {self._queue!r} was shut down; make another Queue",
                field="queue",
                limit="open",
            )

    def _start(self) -> object:
        self._check_running()
        options = {
            "num_cpus": 0,
            "max_restarts": -1,
            "max_concurrency": _CALLS_MAX,
            "lifetime": "detached",
            "enable_task_events": False,
            **self._actor_options,
            # `call` repeats calls itself, under their request numbers.
            "max_task_retries": 0,
            "name": coordinator_name(self._cluster.name, self._queue),
            "namespace": NAMESPACE,
            "get_if_exists": True,
        }

        coordinator = ray.remote(CoordinatorActor).options(**options)
        return coordinator.remote(self._cluster, self._queue, self._shard)

    def _check_running(self) -> None:
        """Check that the cluster runs: a stopped cluster would never end a new coordinator.

        A handle made with raymq:// does not know the cluster's Ray and is not checked.
        Raises: Unavailable.
        """
        if self._cluster.data_dir is None and self._cluster.transport != "ray":
            return
        for replica in range(self._cluster.replicas):
            name = actor_name(self._cluster.name, self._shard, replica, "commit_log")
            with contextlib.suppress(ValueError):
                ray.get_actor(name, namespace=NAMESPACE)
                return
        message = f"queue {self._queue!r}: {not_in_this_ray(self._cluster)}"
        raise CoordinatorAway(message, field="coordinator")

    def submit(self, method: str, *arguments: object) -> Any:
        """Send a call through Ray, without waiting. Returns: its object reference."""
        known = self._actor
        try:
            return getattr(self.actor, method).remote(*arguments)
        except RayMQError:
            raise
        except Exception:
            # This process has left the Ray of the known handle, perhaps for another one.
            if known is None:
                raise
        with self._lock:
            self._actor = None
        return getattr(self.actor, method).remote(*arguments)

    def give_up(self, request: int) -> bool:
        """Withdraw a request whose call was interrupted, and wait until that is done: it must not take the next item.

        Returns: whether items are assigned to it, so that it may be repeated. It must not be if they are not.
        Raises: ray.exceptions.RayError; then they may be.
        """
        return bool(ray.get(self.submit("give_up", request), timeout=GIVE_UP_S))

    def call_nearby(self, method: str, *arguments: object) -> Any:
        """Call through the local socket. Raises: NotLocal if the coordinator is on another host."""
        return self._local.call(method, *arguments)

    def call(self, method: str, *arguments: Any, wait_s: float | None = None) -> Any:
        """Call and wait for the answer, by the local socket if the call need not wait for long.

        Args: `wait_s`: how long the coordinator may wait, in seconds: the last argument of the methods that may wait.
        Raises: Unavailable if the coordinator does not answer for 60 s.
        """
        self.check_open()
        if wait_s is not None:
            arguments = (*arguments, wait_s)
        if wait_s is None or wait_s <= SOCKET_WAIT_S:
            with contextlib.suppress(NotLocal):
                return self.call_nearby(method, *arguments)

        until_s = self._clock.monotonic() + RETRY_TIMEOUT_S
        while True:
            try:
                return ray.get(self.submit(method, *arguments))
            except (ray.exceptions.RayActorError, Unavailable) as error:
                self._check_retry(error, until_s)
            self._clock.sleep_ms(RETRY_MS)

    async def call_async(self, method: str, *arguments: object) -> Any:
        """Like `call`, always through Ray."""
        until_s = self._clock.monotonic() + RETRY_TIMEOUT_S
        while True:
            try:
                return await self.submit(method, *arguments)
            except (ray.exceptions.RayActorError, Unavailable) as error:
                self._check_retry(error, until_s)
            await asyncio.sleep(RETRY_MS / 1000)

    def _check_retry(self, error: Exception, until_s: float) -> None:
        """Check that a failed call may be repeated: the next one looks the coordinator up again.

        Raises: the error itself if the shard failed and not the coordinator. Unavailable after `until_s`.
        """
        if isinstance(error, Unavailable) and not isinstance(error, CoordinatorAway):
            # The coordinator answers, but its shard does not.
            raise error
        with self._lock:
            self._actor = None
        if self._clock.monotonic() > until_s:
            raise CoordinatorAway(
                f"queue {self._queue!r}: its coordinator has not answered for {RETRY_TIMEOUT_S:g} s: {error}",
                field="coordinator",
            ) from error

    def close(self) -> None:
        """Refuse further calls: those that wait end with Rejected at their next try."""
        self.closed = True
        self._local.close()

    def end(self, grace_s: float | None) -> None:
        """End the coordinator, if it runs. `grace_s`: longest wait for its orderly end; None: end it at once."""
        try:
            attach(self._cluster)
            coordinator = ray.get_actor(
                coordinator_name(self._cluster.name, self._queue), namespace=NAMESPACE
            )
        except (RayMQError, ValueError):
            return
        if grace_s is not None:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(coordinator.close.remote(), timeout=grace_s)
        ray.kill(coordinator, no_restart=True)
