"""Leases tasks, runs their handlers, and settles them, with some threads of a replica."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from raymq.client.client_thread import ClientThread
from raymq.client.messages.codecs import Codec
from raymq.client.produce.producer import Producer
from raymq.client.workers.leased import LeasedMessage
from raymq.client.workers.workers import Workers
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Fenced, RayMQError, Rejected

from .task_message import NotATask, Task, task_of
from .task_results import FAILURE, REVOKED, STORE_TIMEOUT_S, SUCCESS, StoredResult, TaskResults

logger = logging.getLogger("raymq")

#: how soon a thread without a task notices that it has to end
LOOK_S = 0.5
#: after an error of the cluster
RETRY_S = 1.0

TaskHandler = Callable[..., Any]


class TaskRunner:
    """The threads of one replica. Threads: any may call."""

    def __init__(
        self,
        workers: Workers,
        producer: Producer,
        handlers: Mapping[str, TaskHandler],
        *,
        concurrency: int,
        codec: Codec,
        max_attempts: int | None,
        results: TaskResults | None,
        failed_topic: str | None,
        unprocessable_topic: str | None,
    ) -> None:
        """Start. Args: `failed_topic`, `unprocessable_topic`: where tasks go that failed for good, and messages that no
        handler takes; None: they are dead letters of the group.
        """
        self._workers = workers
        self._producer = producer
        self._handlers = handlers
        self._codec = codec
        self._max_attempts = max_attempts
        self._results = results
        self._failed_topic = failed_topic
        self._unprocessable_topic = unprocessable_topic

        self._stops = threading.Event()
        self._lock = threading.Lock()
        #: how many tasks are running, and how many ended in which way
        self.running = 0
        self.outcomes: Counter[str] = Counter()
        #: why no task can be leased
        self.error: RayMQError | None = None
        #: runs handlers that are coroutine functions; made with the first one
        self._loop: asyncio.AbstractEventLoop | None = None

        self._threads = [
            ClientThread(self._run, f"raymq-tasks-{number}") for number in range(concurrency)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_running(self) -> bool:
        """Whether a thread takes tasks."""
        return any(thread.is_alive() for thread in self._threads)

    def stop(self, timeout_s: float) -> bool:
        """Take no further tasks, and wait for those that run. Returns: whether all have ended in time.

        A task that has not goes to another replica when its lease is over.
        """
        self._stops.set()
        clock = Clock()
        until_s = clock.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until_s - clock.monotonic()))
        self._workers.close()
        with self._lock:
            loop = self._loop
        if loop is not None and not self.is_running:
            loop.call_soon_threadsafe(loop.stop)
        return not self.is_running

    def _run(self) -> None:
        while not self._stops.is_set():
            try:
                message = self._workers.get(LOOK_S)
                self.error = None
            except RayMQError as error:
                # A damaged message is settled already; a shard that is away may come back.
                self.error = error
                logger.error("tasks of group %s: %s", self._workers.group, error)
                if isinstance(error, Rejected):
                    return
                self._stops.wait(RETRY_S)
                continue
            if message is not None:
                with self._lock:
                    self.running += 1
                outcome = self._handled(message)
                with self._lock:
                    self.running -= 1
                    self.outcomes[outcome] += 1

    def _handled(self, message: LeasedMessage) -> str:
        """Do a task and settle its message. Returns: what became of it."""
        try:
            try:
                task = task_of(message, self._codec)
                handler = self._handlers.get(task.name)
                if handler is None:
                    known = ", ".join(sorted(self._handlers))
                    raise NotATask(f"no handler is named {task.name!r}; there are: {known}")
            except NotATask as error:
                return self._give_up(message, None, error, self._unprocessable_topic)
            return self._done(message, task, handler)
        except Fenced as error:
            # Another replica has it: the task is done twice, and its result is stored twice.
            logger.warning("a task took longer than its lease: %s", error)
            return "lost"
        except Exception:
            # The message comes again when its lease is over, if not before.
            logger.exception("a task could not be settled")
            return "unsettled"

    def _done(self, message: LeasedMessage, task: Task, handler: TaskHandler) -> str:
        """Do a task, store its result, and settle its message."""
        results = self._results
        if results is not None:
            before = results.find(task.id)
            if before is not None and before.status in (SUCCESS, REVOKED):
                # It was cancelled; or its replica died between the result and the acknowledgement.
                message.ack()
                return "revoked" if before.status == REVOKED else "done before"

        try:
            found = self._call(handler, task)
            body = b""
            if results is not None:
                done = StoredResult(SUCCESS, found, message.attempts, task.created_at)
                body = results.body_of(done)
        except Exception as error:
            is_last = self._max_attempts is not None and message.attempts >= self._max_attempts
            if is_last:
                return self._give_up(message, task, error, self._failed_topic)
            logger.warning(
                "task %s (%s) failed in attempt %d: %r", task.name, task.id, message.attempts, error
            )
            message.nack()
            return "failed"

        if results is not None:
            results.store(self._producer, task.id, body)
        message.ack()
        return "succeeded"

    def _call(self, handler: TaskHandler, task: Task) -> Any:
        """What a handler returns. Raises: what it raises."""
        found = handler(*task.args, **task.kwargs)
        if inspect.isawaitable(found):
            return asyncio.run_coroutine_threadsafe(_awaited(found), self._event_loop()).result()
        return found

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = loop = asyncio.new_event_loop()
                ClientThread(lambda: _run_and_close(loop), "raymq-tasks-loop").start()
            return self._loop

    def _give_up(
        self, message: LeasedMessage, task: Task | None, error: Exception, topic: str | None
    ) -> str:
        """Settle a message for good: it goes to a topic, or to the dead letters of its group."""
        logger.error("a task is given up after attempt %d: %r", message.attempts, error)
        if task is not None and self._results is not None:
            text = f"{type(error).__name__}: {error}"
            failed = StoredResult(FAILURE, text, message.attempts, task.created_at)
            self._results.store(self._producer, task.id, self._results.body_of(failed))

        if topic is None:
            message.reject()
        else:
            self._producer.send(
                topic,
                message.body,
                key=message.key,
                index_keys=message.index_keys,
                properties={
                    **message.properties,
                    "error": f"{type(error).__name__}: {error}"[:500],
                },
            ).result(STORE_TIMEOUT_S)
            message.ack()
        return "unprocessable" if task is None else "given up"


def _run_and_close(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


async def _awaited(found: Any) -> Any:
    return await found
