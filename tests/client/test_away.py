"""Look-ups of the drivers of Spark and Ray Data wait for a shard that is away."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import raymq
from raymq.client.transport import away
from raymq.client.transport.away import while_away
from raymq.cluster.ray_data import topic_source
from raymq.data import TopicSink
from raymq.spark import cluster_options
from raymq.spark.batch_plan import plan_batch
from raymq.spark.queue_lookup import QueueLookup, connect, values_of
from raymq.spark.source_options import SourceOptions
from raymq.store.base.errors import DeliveryUnknown, RayMQError, Rejected, Unavailable
from tests.support.fake_backend import FakeCluster
from tests.support.moving_shard import MovingShard
from tests.support.served_shard import ServedShard
from tests.support.waiting import until

GONE = Unavailable("nothing listens there")


@pytest.fixture
def waits(caplog: pytest.LogCaptureFixture) -> Callable[[], bool]:
    """Whether a look-up has failed once, and goes on."""
    caplog.set_level(logging.WARNING, "raymq")
    return lambda: "no answer yet" in caplog.text


def answer(call: Callable[[], Any], waits: Callable[[], bool], back: Callable[[], object]) -> Any:
    """What a call returns that begins while the shard is away, and that waits before `back` brings it back."""
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(call)
        until(lambda: waits() or found.done(), lambda: wait([found], 0.02))
        assert not found.done(), found
        back()
        return found.result(60)


@pytest.mark.parametrize("errors", [[], [GONE], [GONE, DeliveryUnknown("late"), GONE]], ids=len)
def test_a_lookup_is_repeated_until_the_shard_answers_and_says_so_once(
    errors: list[RayMQError], caplog: pytest.LogCaptureFixture
) -> None:
    left = list(errors)

    def call() -> str:
        if left:
            raise left.pop(0)
        return "answer"

    assert while_away(call) == "answer"
    assert len(caplog.records) == min(len(errors), 1)


def test_an_error_of_the_caller_and_the_end_of_the_time_end_a_lookup(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def call(error: RayMQError) -> None:
        calls.append(error)
        raise error

    calls: list[RayMQError] = []
    with pytest.raises(Rejected):
        while_away(lambda: call(Rejected("no such topic", field="topic")))
    monkeypatch.setattr(away, "AWAY_S", 0)
    with pytest.raises(Unavailable):
        while_away(lambda: call(GONE))
    assert len(calls) == 2


@pytest.fixture
def fake() -> Iterator[FakeCluster]:
    made = FakeCluster()
    made.create_topic("t", queues=2)
    yield made
    made.close()


def options(fake: FakeCluster) -> SourceOptions:
    given = {"raymq.address": f"raymq://{fake.endpoints[0]}", "raymq.token": fake.token}
    return SourceOptions.parse({**given, "subscribe": "t"})


@pytest.mark.parametrize("part", ["connect", "values", "queues"])
def test_the_driver_of_spark_plans_although_a_leader_restarts(
    fake: FakeCluster, waits: Callable[[], bool], part: str
) -> None:
    asked = options(fake)
    with connect(asked) as cluster:
        lookup = QueueLookup(cluster, asked.subscription)
        calls: dict[str, Callable[[], Any]] = {
            "connect": lambda: connect(asked),
            "values": lambda: values_of(cluster, asked.subscription).names,
            "queues": lambda: len(plan_batch(lookup, asked)),
        }
        port = fake.down()
        found = answer(calls[part], waits, lambda: fake.up(port=port))
    if part == "connect":
        found.close()
    else:
        assert found == {"values": ["value"], "queues": 0}[part]


def test_the_options_of_spark_name_all_replicas_so_that_it_connects_without_the_leader() -> None:
    with closing(MovingShard()) as shard:
        shard.create("t", queues=2)
        with shard.cluster() as cluster:
            given = cluster_options.options(cluster)
        assert given["raymq.address"].split(",") == [
            f"raymq://{shard.endpoints[replica]}" for replica in (0, 1, 2)
        ]
        shard.elect(1, 2, of=shard.replicas[0].kept())
        shard.proxies[0].cut(refuse=True)
        asked = SourceOptions.parse({**given, "subscribe": "t"})
        with connect(asked) as cluster:
            assert values_of(cluster, asked.subscription).names == ["value"]
            assert cluster.endpoints[0] == shard.endpoints[1]


def test_the_driver_of_ray_data_plans_although_a_leader_restarts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, waits: Callable[[], bool]
) -> None:
    with ServedShard(tmp_path / "shard") as shard:
        shard.start_flusher()
        shard.cluster.create_topic("t", queues=2)
        calls: list[Callable[[raymq.Cluster], Any]] = [
            lambda cluster: topic_source.values_of(cluster, "t").names,
            lambda cluster: list(topic_source._ranges(cluster, "t", ["t"], "earliest", "latest")),
            lambda cluster: TopicSink(cluster, "t").get_name(),
        ]
        found = []
        for call in calls:
            caplog.clear()
            shard.down()
            found.append(answer(lambda call=call: call(shard.cluster), waits, shard.up))
        assert found == [["value"], [], "RayMQ(t)"]
