"""The adapter of Ray Serve's task consumers, over served shards: tasks, results, failures, cancelled tasks."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.schema import TaskProcessorConfig
from ray.serve.task_consumer import instantiate_adapter_from_config

from raymq.client.messages.codecs import CONTENT_TYPE
from raymq.serve import LagAutoscalingPolicy, RayMQAdapterConfig, RayMQTaskProcessorAdapter
from raymq.store.base.errors import Rejected
from raymq.store.state.topics import dlq_topic
from tests.support.served_shard import ServedCluster
from tests.support.waiting import until

Make = Callable[..., RayMQTaskProcessorAdapter]
QUEUE = "thumbnails"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedCluster]:
    with ServedCluster(tmp_path_factory.mktemp("tasks")) as made:
        yield made


@pytest.fixture
def queue(request: pytest.FixtureRequest) -> str:
    """A task queue of its own for each test."""
    return f"{QUEUE}-{abs(hash(request.node.name)) % 10**9}"


@pytest.fixture
def make(served: ServedCluster, queue: str) -> Iterator[Make]:
    made: list[RayMQTaskProcessorAdapter] = []

    def adapter(
        handlers: dict[str, Callable[..., Any]] | None = None,
        *,
        options: dict[str, Any] | None = None,
        **config: Any,
    ) -> RayMQTaskProcessorAdapter:
        own = {"cluster": served.cluster, "backoff": (0,), **(options or {})}
        found = instantiate_adapter_from_config(
            TaskProcessorConfig(
                queue_name=queue,
                adapter=RayMQTaskProcessorAdapter,
                adapter_config=RayMQAdapterConfig(**own),
                **config,
            )
        )
        made.append(found)
        for name, handler in (handlers or {}).items():
            found.register_task_handle(handler, name)
        if handlers:
            found.start_consumer()
        return found

    yield adapter
    for each in made:
        each.stop_consumer(timeout=5)


def pause() -> None:
    threading.Event().wait(0.01)


def status_of(adapter: RayMQTaskProcessorAdapter, task_id: str, *, wanted: str) -> Any:
    """The result of a task, once it has this status."""
    until(lambda: adapter.get_task_status_sync(task_id).status == wanted, pause)
    return adapter.get_task_status_sync(task_id).result


def outcomes(adapter: RayMQTaskProcessorAdapter) -> dict[str, int]:
    return dict(adapter.get_metrics_sync()["outcomes"])


def read_all(served: ServedCluster, topic: str) -> list[Any]:
    """All messages of a topic."""
    count = served.cluster.describe_topic(topic)["messages"]
    found: list[Any] = []
    with served.cluster.consumer(topic, start="earliest") as consumer:
        while len(found) < count:
            found += consumer.poll(timeout=10)
    return found


def test_a_task_is_done_with_its_arguments_and_has_a_result(make: Make) -> None:
    adapter = make({"add": lambda a, b=0: a + b})
    task = adapter.enqueue_task_sync("add", args=[1], kwargs={"b": 2})
    assert (task.status, task.result) == ("PENDING", None)
    assert status_of(adapter, task.id, wanted="SUCCESS") == 3
    assert adapter.get_task_status_sync("unknown").status == "PENDING"
    until(lambda: outcomes(adapter) == {"succeeded": 1}, pause)
    until(lambda: adapter.get_metrics_sync()["lag"] == 0, pause)


def test_coroutine_functions_are_handlers_too(make: Make) -> None:
    async def later(value: str) -> str:
        await asyncio.sleep(0)
        return value.upper()

    adapter = make({"later": later})
    task = asyncio.run(adapter.enqueue_task_async("later", args=["a"]))
    assert status_of(adapter, task.id, wanted="SUCCESS") == "A"
    assert asyncio.run(adapter.get_task_status_async(task.id)).result == "A"
    assert all(each["ok"] for each in asyncio.run(adapter.health_check_async()))


def test_a_replica_does_as_many_tasks_at_a_time_as_serve_says(make: Make) -> None:
    together = threading.Barrier(3)
    adapter = make()
    adapter.initialize(consumer_concurrency=3)
    adapter.register_task_handle(lambda: together.wait(30), "meet")
    adapter.start_consumer()
    adapter.start_consumer()  # it runs already
    tasks = [adapter.enqueue_task_sync("meet") for _ in range(3)]
    assert sorted(status_of(adapter, each.id, wanted="SUCCESS") for each in tasks) == [0, 1, 2]


def test_a_task_that_fails_is_done_again_until_it_succeeds(make: Make) -> None:
    attempts: list[int] = []

    def flaky() -> int:
        attempts.append(1)
        if len(attempts) < 3:
            raise ValueError("not yet")
        return len(attempts)

    adapter = make({"flaky": flaky})
    task = adapter.enqueue_task_sync("flaky")
    assert status_of(adapter, task.id, wanted="SUCCESS") == 3
    until(lambda: outcomes(adapter) == {"failed": 2, "succeeded": 1}, pause)


def test_a_task_that_fails_for_good_is_a_dead_letter_and_has_the_error_as_its_result(
    served: ServedCluster, make: Make, queue: str
) -> None:
    def fail() -> None:
        raise ValueError("no such file")

    adapter = make({"fail": fail}, max_retries=1)
    task = adapter.enqueue_task_sync("fail")
    assert status_of(adapter, task.id, wanted="FAILURE") == "ValueError: no such file"
    until(lambda: outcomes(adapter) == {"failed": 1, "given up": 1}, pause)
    (dead,) = read_all(served, dlq_topic(queue))
    assert dead.index_keys == (task.id,)


def test_failed_and_unprocessable_tasks_go_to_the_topics_of_the_configuration(
    served: ServedCluster, make: Make, queue: str
) -> None:
    failed, unprocessable = f"{queue}-failed", f"{queue}-unprocessable"

    def fail() -> None:
        raise KeyError("x")

    adapter = make(
        {"fail": fail},
        max_retries=0,
        failed_task_queue_name=failed,
        unprocessable_task_queue_name=unprocessable,
    )
    task = adapter.enqueue_task_sync("fail")
    other = adapter.enqueue_task_sync("not-handled")
    with served.cluster.producer() as producer:
        producer.send(queue, b"\xff\xfe").result(30)
    until(lambda: outcomes(adapter) == {"given up": 1, "unprocessable": 2}, pause)

    (message,) = read_all(served, failed)
    assert message.index_keys == (task.id,)
    assert message.properties["error"] == "KeyError: 'x'"
    errors = [each.properties["error"] for each in read_all(served, unprocessable)]
    assert any("no handler is named 'not-handled'; there are: fail" in each for each in errors)
    assert any("the body is not msgpack" in each for each in errors)
    assert adapter.get_task_status_sync(other.id).status == "PENDING"
    assert served.cluster.describe_topic(dlq_topic(queue))["messages"] == 0


def test_other_programs_send_tasks_as_json(served: ServedCluster, make: Make, queue: str) -> None:
    adapter = make({"add": lambda a, b: a + b})
    task = {"task": "add", "args": [1, 2], "id": "by-hand"}
    with served.cluster.producer() as producer:
        producer.send(queue, json.dumps(task).encode(), properties={CONTENT_TYPE: "json"}).result(
            30
        )
    assert status_of(adapter, "by-hand", wanted="SUCCESS") == 3


def test_a_cancelled_task_is_not_done(make: Make) -> None:
    done: list[str] = []
    adapter = make()
    first, second = (adapter.enqueue_task_sync("note", args=[each]) for each in ("a", "b"))
    assert adapter.cancel_task_sync(first.id)
    adapter.register_task_handle(done.append, "note")
    adapter.start_consumer()
    status_of(adapter, second.id, wanted="SUCCESS")
    until(lambda: outcomes(adapter) == {"revoked": 1, "succeeded": 1}, pause)
    assert done == ["b"]
    assert adapter.get_task_status_sync(first.id).status == "REVOKED"
    assert not adapter.cancel_task_sync(second.id)


def test_a_task_that_has_its_result_is_not_done_again(make: Make) -> None:
    done: list[str] = []
    adapter = make({"note": done.append})
    for _ in range(2):
        adapter.enqueue_task_sync("note", args=["a"], task_id="once")
        status_of(adapter, "once", wanted="SUCCESS")
    until(lambda: outcomes(adapter) == {"succeeded": 1, "done before": 1}, pause)
    assert done == ["a"]
    adapter.forget_result("once")
    assert adapter.get_task_status_sync("once").status == "PENDING"


def test_a_result_that_cannot_be_stored_is_a_failure_of_the_task(make: Make) -> None:
    adapter = make({"odd": lambda: object()}, max_retries=0)
    task = adapter.enqueue_task_sync("odd")
    assert "msgpack" in status_of(adapter, task.id, wanted="FAILURE")


def test_a_delayed_task_waits(served: ServedCluster, make: Make, queue: str) -> None:
    adapter = make()
    adapter.enqueue_task_sync("later", delay_s=3_600)
    assert served.cluster.describe_topic(queue)["messages"] == 0


def test_without_results_there_is_no_status(make: Make) -> None:
    done: list[str] = []
    adapter = make({"note": done.append}, options={"results": False})
    task = adapter.enqueue_task_sync("note", args=["a"])
    until(lambda: done == ["a"], pause)
    for refused in (adapter.get_task_status_sync, adapter.cancel_task_sync, adapter.forget_result):
        with pytest.raises(Rejected, match="results=True"):
            refused(task.id)


def test_a_task_that_a_stopped_replica_has_not_ended_goes_to_another_one(make: Make) -> None:
    began, ends = threading.Event(), threading.Event()

    def hang() -> str:
        began.set()
        ends.wait(60)
        return "first"

    options = {"lease_s": 1}
    hanging = make({"work": hang}, options=options)
    task = hanging.enqueue_task_sync("work")
    assert began.wait(30)
    hanging.stop_consumer(timeout=0)
    try:
        other = make({"work": lambda: "second"}, options=options)
        assert status_of(other, task.id, wanted="SUCCESS") == "second"
    finally:
        ends.set()


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"options": {"codec": "bytes"}}, "codec"),
        ({"options": {"lease_s": 0}}, "lease_s"),
        ({"options": {"queues": 0}}, "queues"),
        ({"options": {"backoff": ()}}, "backoff"),
        ({"max_retries": -1}, "max_retries"),
    ],
)
def test_wrong_options_are_refused_by_name(make: Make, config: dict[str, Any], field: str) -> None:
    with pytest.raises(RuntimeError, match=field):
        make(**config)


def test_wrong_tasks_are_refused(make: Make) -> None:
    adapter = make()
    for arguments, field in (
        ({"task_name": ""}, "task_name"),
        ({"task_name": "t", "args": "abc"}, "args"),
        ({"task_name": "t", "kwargs": [1]}, "kwargs"),
        ({"task_name": "t", "countdown": 3}, "options"),
        ({"task_name": "t", "delay_s": -1}, "delay_s"),
        ({"task_name": "t", "task_id": ""}, "task_id"),
        ({"task_name": "t", "task_id": "two words"}, "task_id"),
    ):
        with pytest.raises(Rejected) as caught:
            adapter.enqueue_task_sync(**arguments)
        assert caught.value.fields["field"] == field
    with pytest.raises(Rejected, match="object"):
        adapter.enqueue_task_sync("t", args=[object()])


@pytest.mark.parametrize("group", [None, "another-group"])
def test_as_many_replicas_are_wanted_as_there_are_tasks(
    served: ServedCluster, make: Make, queue: str, group: str | None
) -> None:
    adapter = make(options={"group": group})
    policy = LagAutoscalingPolicy(queue, cluster=served.cluster, group=group, poll_interval_s=0.1)

    def wanted(replicas: int) -> int | float:
        config = SimpleNamespace(get_target_ongoing_requests=lambda: 2.0)
        found, state = policy(
            SimpleNamespace(
                current_num_replicas=replicas,
                target_num_replicas=7,
                total_num_requests=0,
                config=config,
            )
        )
        assert set(state) == {"lag"}
        return found

    # The cluster was not asked yet.
    assert wanted(1) == 7
    until(lambda: wanted(0) == 0, pause)
    for _ in range(6):
        adapter.enqueue_task_sync("note")
    until(lambda: wanted(0) == 1, pause)
    until(lambda: wanted(2) == 3, pause)

    adapter.register_task_handle(lambda: None, "note")
    adapter.start_consumer()
    until(lambda: wanted(2) == 0, pause)
