"""The adapter of Ray Serve's task consumers: a task queue is a topic, and the replicas are its workers."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Callable
from typing import Any

from raymq.cluster.deploy.ray_release import installed

try:
    from ray.serve.schema import TaskProcessorAdapter, TaskProcessorConfig, TaskResult
except ImportError as error:
    raise ImportError(
        f"task consumers need Ray Serve of 2.51 or newer, and this is Ray {installed()}: "
        "pip install -U 'ray[serve]'"
    ) from error

from raymq.client.arguments import check_number, check_text
from raymq.client.messages import codecs
from raymq.client.messages.codecs import CONTENT_TYPE
from raymq.client.produce.producer import Producer
from raymq.client.workers.workers import Workers
from raymq.cluster.cluster import Cluster
from raymq.store.base.clock import Clock
from raymq.store.base.errors import RayMQError, Rejected

from .adapter_config import RayMQAdapterConfig
from .lag_policy import connected
from .task_message import TASK_CODECS, Task, body_of, checked_call
from .task_results import PENDING, REVOKED, STORE_TIMEOUT_S, StoredResult, TaskResults
from .task_runner import TaskHandler, TaskRunner

#: a property of a task's message: the name of its handler, by which operators see what waits
TASK_PROPERTY = "task"


class RayMQTaskProcessorAdapter(TaskProcessorAdapter):
    """Lets task consumers of Ray Serve have their tasks in a topic, without a broker beside Ray.

    A task is a message of the topic `queue_name`, durable when `enqueue_task_sync` returns. A replica leases it, calls
    its handler, stores the result and acknowledges. The task of a replica that dies comes to another one when its lease
    is over. A handler that raises is called again after a pause, `max_retries` times, which counts attempts of replicas
    that died, too. After that the task is a dead letter of the group, or goes to `failed_task_queue_name`. A message
    that no handler takes is a dead letter at once, or goes to `unprocessable_task_queue_name`.

    Handlers may be coroutine functions. A replica does `max_ongoing_requests` tasks at the same time, as Serve says.
    Serve has this interface since Ray 2.51.

    Example:
        ```python
        from ray.serve.schema import TaskProcessorConfig
        from ray.serve.task_consumer import instantiate_adapter_from_config
        from raymq.serve import RayMQAdapterConfig, RayMQTaskProcessorAdapter

        config = TaskProcessorConfig(
            queue_name="thumbnails",
            adapter=RayMQTaskProcessorAdapter,
            adapter_config=RayMQAdapterConfig(cluster="raymq-data"),
        )
        adapter = instantiate_adapter_from_config(config)
        task = adapter.enqueue_task_sync("shrink", args=["cat.png"])
        print(adapter.get_task_status_sync(task.id).status)
        adapter.stop_consumer()
        ```

    Guarantees:
        Each task is done at least once, and counts once: it has one result. A task that has one is not done again: the
        replica died between the result and the acknowledgement. Two replicas do one task at the same time only if one
        of them hangs for longer than its lease.
    """

    def __init__(self, config: TaskProcessorConfig) -> None:
        """Take the options. Raises: Rejected."""
        super().__init__()  # type: ignore[no-untyped-call]
        options = config.adapter_config
        if not isinstance(options, RayMQAdapterConfig):
            raise Rejected(
                f"adapter_config is {type(options).__name__}; give a raymq.serve.RayMQAdapterConfig",
                field="adapter_config",
                limit="RayMQAdapterConfig",
            )
        check_text("queue_name", config.queue_name)
        if config.max_retries is not None:
            check_number("max_retries", config.max_retries, 0)
        check_number("queues", options.queues, 1)
        if options.codec not in TASK_CODECS:
            raise Rejected(
                f"codec is {options.codec!r}; tasks are stored as one of {TASK_CODECS}",
                field="codec",
                limit=TASK_CODECS,
            )

        self._config = config
        self._options = options
        self._codec = codecs.codec(options.codec)
        self._workers_config = options.workers(config.queue_name, config.max_retries)
        self._workers_config.check_values()

        self._handlers: dict[str, TaskHandler] = {}
        self._concurrency = 1
        self._lock = threading.Lock()
        self._cluster: Cluster | None = None
        self._results: TaskResults | None = None
        self._producer: Producer | None = None
        self._runner: TaskRunner | None = None

    def initialize(self, consumer_concurrency: int = 1) -> None:
        """Connect to the cluster, and create the topics that are missing. Raises: RayMQError.

        Args: `consumer_concurrency`: how many tasks this replica does at the same time.
        """
        check_number("consumer_concurrency", consumer_concurrency, 1)
        self._concurrency = consumer_concurrency
        config, options = self._config, self._options
        cluster = self._cluster = connected(options.cluster)
        topics = cluster.topics()
        wanted = (
            config.queue_name,
            config.failed_task_queue_name,
            config.unprocessable_task_queue_name,
        )
        for name in wanted:
            if name is not None and name not in topics:
                cluster.create_topic(name, queues=options.queues)
        if options.results:
            self._results = TaskResults(cluster, config.queue_name, options.queues, self._codec)

    # --- tasks ------------------------------------------------------------------------------------

    def enqueue_task_sync(
        self,
        task_name: str,
        args: Any | None = None,
        kwargs: Any | None = None,
        *,
        task_id: str | None = None,
        delay_s: float = 0,
        **options: object,
    ) -> TaskResult:
        """Add a task. It is durable at return.

        Args:
            task_name: the name of a handler.
            args: a list of its arguments; None (default): none.
            kwargs: a dict of its keyword arguments; None (default): none.
            task_id: the name of the task. A task whose name has a result already is not done. None (default): a new
                one.
            delay_s: seconds until it can be done (default 0), at most three days.
            options: none: any other one is refused.

        Raises: Rejected for an argument that the codec does not take, or an unknown option. Otherwise as
            `raymq.Producer.send`.
        """
        task, message = self._message(task_name, args, kwargs, task_id, delay_s, options)
        self._open_producer().send(self._config.queue_name, **message).result(STORE_TIMEOUT_S)
        return TaskResult(id=task.id, status=PENDING, created_at=task.created_at, result=None)

    async def enqueue_task_async(
        self, task_name: str, args: Any | None = None, kwargs: Any | None = None, **options: Any
    ) -> TaskResult:
        """As `enqueue_task_sync`."""
        return await asyncio.to_thread(self.enqueue_task_sync, task_name, args, kwargs, **options)

    def _message(
        self,
        task_name: str,
        args: object,
        kwargs: object,
        task_id: str | None,
        delay_s: float,
        options: dict[str, object],
    ) -> tuple[Task, dict[str, Any]]:
        """A task, and the arguments of its `send`."""
        if options:
            raise Rejected(
                f"a task has no option {', '.join(sorted(options))}; there are task_id and delay_s",
                field="options",
                limit="task_id, delay_s",
            )
        _check_word("task_name", task_name)
        check_number("delay_s", delay_s, 0, 3 * 86_400, whole=False)
        if task_id is None:
            task_id = uuid.uuid4().hex
        _check_word("task_id", task_id)

        now_ms = Clock().now_ms()
        task = Task(task_id, task_name, *checked_call(args, kwargs), now_ms / 1000)
        return task, {
            "body": body_of(task, self._codec),
            "index_keys": (task.id,),
            "properties": {CONTENT_TYPE: self._codec.name, TASK_PROPERTY: task.name},
            "deliver_at_ms": now_ms + round(1000 * delay_s) if delay_s else None,
        }

    def get_task_status_sync(self, task_id: str) -> TaskResult:
        """What became of a task: PENDING (also of an unknown one), SUCCESS, FAILURE or REVOKED.

        The result of a failed task is the text of its exception. A task whose replicas died in each attempt has none,
        and stays PENDING: it is a dead letter of the group.
        Raises: Rejected if results are not kept; RayMQError.
        """
        found = self._kept_results().find(task_id) or StoredResult(PENDING)
        return TaskResult(
            id=task_id, status=found.status, created_at=found.created_at, result=found.result
        )

    async def get_task_status_async(self, task_id: str) -> TaskResult:
        """As `get_task_status_sync`."""
        return await asyncio.to_thread(self.get_task_status_sync, task_id)

    def cancel_task_sync(self, task_id: str) -> bool:
        """Let a task not be done, if it is not done yet. One that runs goes on, and has a result.

        Returns: False if it has a result already. Raises: as `get_task_status_sync`.
        """
        results = self._kept_results()
        if results.find(task_id) is not None:
            return False
        revoked = StoredResult(REVOKED, created_at=Clock().now_ms() / 1000)
        results.store(self._open_producer(), task_id, results.body_of(revoked))
        return True

    async def cancel_task_async(self, task_id: str) -> bool:
        """As `cancel_task_sync`."""
        return await asyncio.to_thread(self.cancel_task_sync, task_id)

    def forget_result(self, task_id: str) -> None:
        """Drop the result of a task. Results are kept until then: they do not expire. Raises: RayMQError."""
        self._kept_results().store(self._open_producer(), task_id, None)

    def _kept_results(self) -> TaskResults:
        if self._results is None:
            raise Rejected(
                "the results of tasks are not kept: make RayMQAdapterConfig with results=True",
                field="results",
                limit=True,
            )
        return self._results

    # --- the consumer -----------------------------------------------------------------------------

    def register_task_handle(self, func: Callable[..., Any], name: str | None = None) -> None:
        """Let a function, which may be a coroutine function, handle the tasks of a name (default: its own)."""
        self._handlers[name or func.__name__] = func

    def start_consumer(self, **kwargs: object) -> None:
        """Do tasks, with threads of this process, until `stop_consumer`. Raises: RayMQError."""
        producer = self._open_producer()
        with self._lock:
            if self._runner is not None and self._runner.is_running:
                return
            config, workers = self._config, self._workers_config
            self._runner = TaskRunner(
                Workers(self._connected(), config.queue_name, **vars(workers)),
                producer,
                self._handlers,
                concurrency=self._concurrency,
                codec=self._codec,
                max_attempts=workers.max_attempts,
                results=self._results,
                failed_topic=config.failed_task_queue_name,
                unprocessable_topic=config.unprocessable_task_queue_name,
            )

    def stop_consumer(self, timeout: float = 10.0) -> None:
        """Take no further tasks, and wait up to `timeout` seconds for those that run.

        Others get a task that still runs then when its lease is over.
        """
        with self._lock:
            runner, self._runner = self._runner, None
            producer, self._producer = self._producer, None
        if runner is not None:
            runner.stop(timeout)
        if producer is not None:
            producer.close()

    def shutdown(self) -> None:
        """As `stop_consumer`. Ray 2.53 and older call it."""
        self.stop_consumer()

    def get_metrics_sync(self) -> dict[str, Any]:
        """What waits and runs.

        Returns: {"queue", "group", "lag": unsettled tasks of the group, "leased": those that replicas have, "running":
        tasks of this process, "outcomes": {what became of tasks of this process: how many}}. Raises: RayMQError.
        """
        group = self._workers_config.group
        try:
            facts = self._connected().describe_group(group)
        except Rejected:
            # No replica has begun.
            facts = {"lag": 0, "queues": []}
        runner = self._runner
        return {
            "queue": self._config.queue_name,
            "group": group,
            "lag": facts["lag"],
            "leased": sum(queue["leased"] or 0 for queue in facts["queues"]),
            "running": 0 if runner is None else runner.running,
            "outcomes": {} if runner is None else dict(runner.outcomes),
        }

    async def get_metrics_async(self) -> dict[str, Any]:
        """As `get_metrics_sync`."""
        return await asyncio.to_thread(self.get_metrics_sync)

    def health_check_sync(self) -> list[dict[str, Any]]:
        """Whether each shard answers, and whether tasks can be leased.

        Returns: one dict for each shard, {"shard", "ok", "error"}, and {"consumer", "ok", "error"} after
        `start_consumer`.
        """
        cluster = self._connected()
        found: list[dict[str, Any]] = []
        for shard in range(cluster.shards):
            error = None
            try:
                cluster.call(shard, "leader", {})
            except RayMQError as failure:
                error = str(failure)
            found.append({"shard": shard, "ok": error is None, "error": error})
        runner = self._runner
        if runner is not None:
            error = None if runner.error is None else str(runner.error)
            is_ok = runner.is_running and error is None
            found.append({"consumer": self._workers_config.group, "ok": is_ok, "error": error})
        return found

    async def health_check_async(self) -> list[dict[str, Any]]:
        """As `health_check_sync`."""
        return await asyncio.to_thread(self.health_check_sync)

    # --- connections ------------------------------------------------------------------------------

    def _connected(self) -> Cluster:
        if self._cluster is None:
            raise Rejected(
                "the adapter is not initialized: make it by ray.serve.task_consumer.instantiate_adapter_from_config",
                field="adapter",
                limit="initialize()",
            )
        return self._cluster

    def _open_producer(self) -> Producer:
        cluster = self._connected()
        with self._lock:
            if self._producer is None:
                self._producer = cluster.producer()
            return self._producer


def _check_word(field: str, word: str) -> None:
    """Raises: Rejected for a text that is empty or has spaces: ids are index keys."""
    check_text(field, word)
    if not word or word.split() != [word]:
        raise Rejected(f"{field} is {word!r}; give one word", field=field, limit="one word")
