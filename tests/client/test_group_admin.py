"""Administration of consumer groups by handle and by command line, at two real shards."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import raymq
from raymq.client.consume.consumer import Consumer
from raymq.cluster.cluster import Cluster
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Fenced, OffsetOutOfRange, Rejected
from tests.cluster.test_query_commands import Shell
from tests.support.served_shard import ServedCluster
from tests.support.waiting import until

QUEUES = 4
MESSAGES = 5


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ServedCluster(tmp_path_factory.mktemp("groups")) as made:
        made.cluster.create_topic("t", queues=QUEUES)
        with made.cluster.producer() as producer:
            for number in range(QUEUES * MESSAGES):
                producer.send("t", b"%d" % number, queue_id=number % QUEUES).result(30)
        yield made.cluster


@pytest.fixture
def shell(cluster: Cluster) -> Shell:
    return Shell(cluster)


@pytest.fixture
def group(request: pytest.FixtureRequest) -> str:
    """A group of this test."""
    return str(request.node.name)[:60].replace("[", "-").replace("]", "")


def join(cluster: Cluster, group: str, **options: Any) -> Consumer:
    wanted = {"start": "earliest", "session_timeout_s": 1.0, **options}
    return cluster.consumer("t", group=group, **wanted)


def read(consumer: Consumer, count: int) -> list[tuple[int, int]]:
    """(queue, offset) of so many messages."""
    found: list[tuple[int, int]] = []

    def poll() -> None:
        found.extend((m.queue_id, m.offset) for m in consumer.poll(100, timeout=0.5))

    until(lambda: len(found) >= count, poll)
    return sorted(found)


def has_read_all(cluster: Cluster, group: str) -> None:
    """A member reads and commits everything, and leaves."""
    with join(cluster, group) as consumer:
        assert len(read(consumer, QUEUES * MESSAGES)) == QUEUES * MESSAGES
        consumer.commit()


def committed(cluster: Cluster, group: str) -> list[int | None]:
    return [queue["committed"] for queue in cluster.describe_group(group)["queues"]]


def printed(shell: Shell) -> Any:
    return json.loads(shell.stdout.getvalue())


def test_a_reset_says_what_it_changes_and_a_dry_run_only_says_it(
    cluster: Cluster, shell: Shell, group: str
) -> None:
    has_read_all(cluster, group)
    words = ("group", "reset", group, "--to", "earliest")
    assert shell.run(*words, "--dry-run") == 0, shell.err
    assert shell.stdout.getvalue().decode().splitlines() == [
        "topic\tqueue\tfrom\tto",
        *(f"t\t{queue_id}\t{MESSAGES}\t0" for queue_id in range(QUEUES)),
        f"{group}: nothing is changed",
    ]
    assert committed(cluster, group) == [MESSAGES] * QUEUES

    assert shell.run(*words, "--topic", "t", "--queue-id", "1", "2", "--json") == 0, shell.err
    rows = [{"topic": "t", "queue_id": each, "from": MESSAGES, "to": 0} for each in (1, 2)]
    assert printed(shell) == {"group": group, "dry_run": False, "queues": rows}
    assert committed(cluster, group) == [MESSAGES, 0, 0, MESSAGES]
    with join(cluster, group) as consumer:
        assert len(read(consumer, 2 * MESSAGES)) == 2 * MESSAGES


def test_a_reset_takes_an_offset_a_time_or_an_end(cluster: Cluster, group: str) -> None:
    rows = cluster.reset_group(group, 3, topic="t")
    assert [(row["from"], row["to"]) for row in rows] == [(None, 3)] * QUEUES
    assert committed(cluster, group) == [3] * QUEUES
    cluster.reset_group(group, "latest")
    assert committed(cluster, group) == [MESSAGES] * QUEUES
    third = cluster.message("t", 0, 2).store_time_ms
    cluster.reset_group(group, raymq.at_ms(third))
    assert committed(cluster, group)[0] in (1, 2)
    with pytest.raises(OffsetOutOfRange, match="holds 0..5, not 6"):
        cluster.reset_group(group, MESSAGES + 1)


@pytest.mark.parametrize(
    ("to", "options", "field"),
    [
        ("newest", {"topic": "t"}, "to"),
        (0, {"topic": "none"}, "topic"),
        (0, {"topic": "t", "queue_ids": [9]}, "queue_ids"),
        (0, {"queue_ids": [0]}, "topic"),
        (0, {}, "group"),
    ],
)
def test_a_wrong_reset_is_refused_by_name(cluster: Cluster, to, options, field) -> None:
    with pytest.raises(Rejected) as refused:
        cluster.reset_group("unknown", to, **options)
    assert refused.value.field == field


def test_a_reset_under_a_member_needs_force_and_the_member_begins_again(
    cluster: Cluster, shell: Shell, group: str
) -> None:
    with join(cluster, group) as consumer:
        read(consumer, QUEUES * MESSAGES)
        consumer.commit()
        before = consumer.assignment()
        words = ("group", "reset", group, "--to", "3")
        assert shell.run(*words) == 2
        assert "1 member(s) of group" in shell.err
        assert "--force" in shell.err
        assert committed(cluster, group) == [MESSAGES] * QUEUES

        assert shell.run(*words, "--force") == 0, shell.err
        with pytest.raises(Fenced):
            consumer.commit()
        # It hears of that by its heartbeat, and reads from the new offsets.
        assert read(consumer, 2 * QUEUES) == [(q, o) for q in range(QUEUES) for o in (3, 4)]
        consumer.commit()
        after = consumer.assignment()
    assert min(after.values()) > max(before.values())
    assert committed(cluster, group) == [MESSAGES] * QUEUES


def test_an_idle_member_hears_of_a_reset_without_a_commit(cluster: Cluster, group: str) -> None:
    has_read_all(cluster, group)
    with join(cluster, group) as consumer:
        assert consumer.poll(10, timeout=0.1) == []
        cluster.reset_group(group, 4, force=True)
        assert read(consumer, QUEUES) == [(queue_id, 4) for queue_id in range(QUEUES)]


def test_the_lag_is_shown_in_messages_and_seconds_and_as_an_exit_code(
    cluster: Cluster, shell: Shell, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.reset_group(group, 3, topic="t", queue_ids=[0, 2])
    stored_ms = cluster.message("t", 0, 3).store_time_ms
    assert shell.run("group", "lag", group, "--json") == 0, shell.err
    shown = printed(shell)
    age_s = time.time() - stored_ms / 1000
    assert shown["lag"] == 4
    assert 0 < shown["queues"][0]["lag_s"] <= shown["lag_s"] <= age_s + 0.01
    assert (shown["queues"][1]["lag"], shown["queues"][1]["lag_s"]) == (None, None)
    assert shell.run("group", "lag", group, "--max", "3") == 1
    assert shell.run("group", "lag", group, "--max", "4") == 0

    slept: list[float] = []

    def sleep(clock: Clock, ms: float) -> None:
        slept.append(ms)
        cluster.reset_group(group, 3 - len(slept), topic="t", queue_ids=[0])

    monkeypatch.setattr(Clock, "sleep_ms", sleep)
    assert shell.run("group", "lag", group, "--watch", "--max", "5") == 1
    lines = shell.stdout.getvalue().decode().splitlines()
    heads = [line.partition(" messages")[0] for line in lines if line.startswith(group)]
    assert (heads, slept) == ([f"{group}: {lag}" for lag in (4, 5, 6)], [2_000.0] * 2)
    assert shell.run("group", "lag", group, "--watch", "0.5", "--max", "0") == 1


def test_a_paused_group_gets_nothing_and_goes_on_where_it_was(
    cluster: Cluster, shell: Shell, group: str
) -> None:
    with join(cluster, group) as consumer:
        read(consumer, QUEUES * MESSAGES)
        consumer.commit()
        kept = consumer.assignment()
        assert shell.run("group", "pause", group, "--json") == 0, shell.err
        assert printed(shell) == {"group": group, "state": "paused"}
        until(lambda: consumer.assignment() == {}, lambda: threading.Event().wait(0.02))

        with cluster.producer() as producer:
            producer.send("t", b"new", queue_id=0).result(30)
        assert consumer.poll(10, timeout=0.3) == []
        with join(cluster, group) as late:
            assert late.poll(10, timeout=0.1) == []
        assert cluster.groups()[group]["state"] == "paused"
        assert shell.run("group", "describe", group) == 0
        assert shell.stdout.getvalue().decode().startswith(f"{group}: PAUSED, ")

        assert shell.run("group", "resume", group) == 0, shell.err
        assert read(consumer, 1) == [(0, MESSAGES)]
        assert consumer.assignment() == kept


def test_a_group_is_deleted_when_its_members_have_left(
    cluster: Cluster, shell: Shell, group: str
) -> None:
    with join(cluster, group) as consumer:
        read(consumer, QUEUES * MESSAGES)
        consumer.commit()
        assert shell.run("group", "delete", group) == 2
        assert "has 1 member(s)" in shell.err
    assert shell.run("group", "delete", group, "--json") == 0, shell.err
    assert printed(shell) == {"group": group, "topics": ["t"]}
    assert group not in cluster.groups()
    assert shell.run("group", "delete", group) == 2
    assert "does not exist" in shell.err
    with join(cluster, group) as anew:
        assert len(read(anew, QUEUES * MESSAGES)) >= QUEUES * MESSAGES


def test_a_group_goes_on_where_another_one_is(cluster: Cluster, shell: Shell, group: str) -> None:
    other = f"{group}-other"
    with cluster.consumer("t", group=other, queues=[0, 2], start="earliest") as consumer:
        consumer.commit({0: 3, 2: 5})
    assert shell.run("group", "reset", group, "--to", f"group:{other}", "--json") == 0
    rows = [(row["queue_id"], row["from"], row["to"]) for row in printed(shell)["queues"]]
    assert rows == [(0, None, 3), (2, None, 5)]
    with cluster.consumer("t", group=group, queues=[0, 2]) as consumer:
        assert consumer.committed() == {0: 3, 2: 5}
    with pytest.raises(Rejected, match="nobody-knows-it"):
        cluster.reset_group(group, "group:nobody-knows-it")


def test_what_workers_hold_is_taken_back(cluster: Cluster, shell: Shell, group: str) -> None:
    with cluster.workers("t", group=group, prefetch=0) as workers:
        message = workers.get(30)
        assert message is not None
        # Each shard may lease one ahead of the answer of the other.
        assert shell.run("lease", "release", group) == 0, shell.err
        shown = shell.stdout.getvalue().decode()
        assert shown.startswith(f"{group}: messages taken back from their workers: ")
        assert shown.strip()[-1] in "12"
        with pytest.raises(Fenced):
            message.ack()
    assert cluster.release_leases(group, topic="t") == 0
