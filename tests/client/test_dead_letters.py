"""Dead letters of groups over two served shards: pauses, lists, and the way back."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from raymq.actors.api.leases import check_options, pack_options
from raymq.client.workers.leased import LeasedMessage
from raymq.client.workers.workers import Workers
from raymq.cluster.cluster import Cluster
from raymq.store.base.errors import Rejected
from raymq.store.groups.leases.options import LeaseOptions
from tests.cluster.test_query_commands import Shell
from tests.support.served_shard import ServedCluster
from tests.support.waiting import until

QUEUES = 4
WAIT_S = 20.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ServedCluster(tmp_path_factory.mktemp("dead")) as made:
        yield made.cluster


@pytest.fixture
def shell(cluster: Cluster) -> Shell:
    return Shell(cluster)


@pytest.fixture
def group(cluster: Cluster, request: pytest.FixtureRequest) -> str:
    """A group of this test, and the name of its topic."""
    name = str(request.node.name)[:60].replace("[", "-").replace("]", "")
    cluster.create_topic(name, queues=QUEUES)
    return name


def put(cluster: Cluster, topic: str, count: int, **options: object) -> None:
    """Messages with the numbers from 0 on as bodies, in all queues in turn."""
    with cluster.producer() as producer:
        for number in range(count):
            wanted = {"queue_id": number % QUEUES, **options}
            producer.send(topic, b"%d" % number, **wanted)  # type: ignore[arg-type]


def take(workers: Workers) -> LeasedMessage:
    message = workers.get(WAIT_S)
    assert message is not None, "no message came"
    return message


def absent(workers: Workers) -> None:
    assert workers.get(0.1) is None


def printed(shell: Shell, *words: str) -> str:
    assert shell.run(*words) == 0, shell.err
    return shell.stdout.getvalue().decode()


# --- pauses ---------------------------------------------------------------------------------------


def test_a_group_of_which_too_many_messages_die_pauses_until_it_is_resumed(
    cluster: Cluster, group: str, shell: Shell, caplog: pytest.LogCaptureFixture
) -> None:
    put(cluster, group, 8, queue_id=0)
    with cluster.workers(group, group=group, dlq_rate=2, prefetch=0) as workers:
        for _ in range(3):
            take(workers).reject()
        with caplog.at_level(logging.WARNING, "raymq.client"):
            text = "is paused on shard 0 (dead letters)"
            until(lambda: text in caplog.text, lambda: absent(workers))
        assert caplog.text.count(text) == 1
        assert cluster.groups()[group]["state"] == "paused: dead letters"
        assert f"{group}\tworkers\tpaused: dead letters" in printed(shell, "group", "list")
        facts = cluster.describe_group(group)
        assert facts["pauses"] == [{"shard": 0, "reason": "dead letters"}]
        assert "PAUSED: dead letters on shard 0, " in printed(shell, "group", "describe", group)

        assert "resumed" in printed(shell, "group", "resume", group)
        assert take(workers).body == b"3"
        assert cluster.groups()[group]["state"] == "empty"
        assert not cluster.describe_group(group)["paused"]


def test_an_operator_pauses_workers_on_all_shards(cluster: Cluster, group: str) -> None:
    put(cluster, group, 8, queue_id=0)
    with cluster.workers(group, group=group, prefetch=0) as workers:
        first = take(workers)
        cluster.pause_group(group)
        assert workers.get(0.1) is None
        assert cluster.groups()[group]["state"] == "paused"
        assert [each["shard"] for each in cluster.describe_group(group)["pauses"]] == [0, 1]
        first.ack()
        found: list[LeasedMessage] = []
        waiting = threading.Thread(target=lambda: found.append(take(workers)))
        waiting.start()
        # Those that wait get the next message at once.
        cluster.resume_group(group)
        waiting.join(WAIT_S)
        assert found[0].body != first.body


def test_a_group_that_nothing_has_used_cannot_be_paused(cluster: Cluster) -> None:
    with pytest.raises(Rejected, match="has had no member"):
        cluster.pause_group("unknown")


def test_options_of_earlier_clients_have_the_usual_rate() -> None:
    usual = pack_options(LeaseOptions(), None)["options"]
    assert isinstance(usual, dict)
    # A shard of an earlier version takes them, too.
    assert "dead_rate" not in usual
    assert check_options("options", usual).dead_rate == 1_000
    for rate in (None, 7):
        packed = pack_options(LeaseOptions(dead_rate=rate), None)["options"]
        assert check_options("options", packed).dead_rate == rate
    with pytest.raises(Rejected, match="dead_rate"):
        check_options("options", {**usual, "dead_rate": 0})
