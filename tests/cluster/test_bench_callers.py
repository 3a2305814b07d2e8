"""The load of callers of one process, against a shard in memory with real Flight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from raymq.cluster.bench.callers import Callers
from raymq.cluster.bench.job import Job
from raymq.cluster.bench.plan import BenchPlan, FixedSize, Keys
from raymq.cluster.bench.worker import work
from raymq.store.base.errors import Bug, Rejected
from tests.support.fake_backend import FakeCluster

QUEUES = 4


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    fake = FakeCluster()
    fake.create_topic("t", queues=QUEUES)
    yield fake
    fake.close()


def plan(**options: Any) -> BenchPlan:
    words = {"topic": "t", "workers": 3, "in_flight": 2, "batch": 1, "size": FixedSize(100)}
    return BenchPlan(**{**words, **options})


def stored(cluster: FakeCluster) -> list[int]:
    """Messages of each queue."""
    return [len(cluster.backends[0].bodies("t", queue)) for queue in range(QUEUES)]


@pytest.mark.parametrize(
    ("api", "batch"), [("batches", 10), ("columns", 10), ("messages", 1), ("tasks", 1)]
)
def test_every_caller_sends_its_share_and_waits_for_all_receipts(
    cluster: FakeCluster, api: str, batch: int
) -> None:
    with Callers(cluster, plan(api=api, batch=batch)) as callers:
        callers.run(2)
        found = callers.run(5)
    assert sum(stored(cluster)) == (2 + 5) * 3 * batch
    assert found.sends == found.latency.count == 15
    assert found.rate == pytest.approx(15 / found.seconds)
    assert 0 < found.percentile_ms(50) <= found.percentile_ms(99)


def test_without_a_number_of_sends_callers_go_on_for_the_duration_of_the_plan(
    cluster: FakeCluster,
) -> None:
    with Callers(cluster, plan(api="messages", duration_s=0.2)) as callers:
        found = callers.run()
    assert found.seconds >= 0.2
    assert found.sends == sum(stored(cluster)) > 0


def test_batches_go_to_all_queues_in_turn_and_messages_by_key(cluster: FakeCluster) -> None:
    with Callers(cluster, plan(api="batches", batch=5, workers=1)) as callers:
        callers.run(QUEUES)
    assert stored(cluster) == [5] * QUEUES
    with Callers(cluster, plan(api="messages", workers=1, keys=Keys(1))) as callers:
        callers.run(7)
    assert sorted(stored(cluster)) == [5, 5, 5, 12]


def test_with_one_queue_all_messages_go_to_it(cluster: FakeCluster) -> None:
    with Callers(cluster, plan(api="messages", queues=1)) as callers:
        callers.run(3)
    assert stored(cluster) == [9, 0, 0, 0]


def test_the_error_of_a_caller_is_raised(cluster: FakeCluster) -> None:
    unknown = Callers(cluster, plan(api="messages", topic="unknown"))
    with unknown as callers, pytest.raises(Rejected, match="unknown"):
        callers.run(1)


def test_workers_refuse_a_plan_that_is_for_callers(cluster: FakeCluster) -> None:
    with pytest.raises(Bug, match="an api of workers"):
        list(work(Job(plan(api="columns"), "produce"), cluster, control=None))  # type: ignore[arg-type]
