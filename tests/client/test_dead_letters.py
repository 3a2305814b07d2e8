"""Dead letters of groups over two served shards: pauses, lists, and the way back."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from raymq.actors.api.leases import check_options, pack_options, packed_offsets
from raymq.client.dead_letters import redrive
from raymq.client.workers.leased import LeasedMessage
from raymq.client.workers.workers import Workers
from raymq.cluster.cluster import Cluster
from raymq.store.base.errors import DeliveryUnknown, Rejected
from raymq.store.groups.leases.options import LeaseOptions
from raymq.store.groups.leases.requests import offsets_of
from tests.cluster.test_query_commands import Shell
from tests.support.clock import ManualClock
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


# --- what there is --------------------------------------------------------------------------------


def bury(cluster: Cluster, topic: str, count: int, **options: object) -> None:
    """Let messages of a topic be dead letters of the group with its name."""
    with cluster.workers(topic, group=topic, **options) as workers:  # type: ignore[arg-type]
        for _ in range(count):
            take(workers).reject()


def bodies(cluster: Cluster, topic: str, count: int) -> dict[bytes, tuple[int, dict[str, str]]]:
    """Body -> queue and properties, of so many messages of a topic."""
    found: dict[bytes, tuple[int, dict[str, str]]] = {}
    seen: list[bytes] = []
    with cluster.consumer(topic, start="earliest") as consumer:

        def poll() -> None:
            for each in consumer.poll(timeout=0.2):
                found[each.body] = each.queue_id, each.properties
                seen.append(each.body)

        until(lambda: len(seen) >= count, poll)
    assert len(seen) == count
    return found


def test_dead_letters_are_listed_and_say_why(cluster: Cluster, group: str, shell: Shell) -> None:
    put(cluster, group, 8, key=b"alice", tag="new", properties={"price": "7"})
    before = cluster.dead_letter_groups()
    bury(cluster, group, 8)
    assert group not in before
    facts = cluster.dead_letter_groups(group)[group]
    assert facts["count"] == 8
    letters = cluster.dead_letters(group)
    assert {each.message.body for each in letters} == {b"%d" % number for number in range(8)}
    assert facts["oldest_ms"] == letters[0].message.store_time_ms
    assert facts["newest_ms"] == letters[-1].message.store_time_ms
    for each in letters:
        assert (each.original_topic, each.original_queue_id) == (group, int(each.message.body) % 4)
        assert (each.attempts, each.reason, each.redrives) == (1, "rejected", 0)
        assert len(each.holder or "") == 32
        assert (each.message.key, each.message.tag) == (b"alice", "new")

    assert f"{group}\t8 dead letters\t" in printed(shell, "dlq", "list")
    lines = printed(shell, "dlq", "show", group, "--max", "3").splitlines()
    assert len(lines) == 3
    assert f"from {group}/" in lines[0]
    assert "1 attempts  rejected" in lines[0]
    (first, *_) = json.loads(printed(shell, "dlq", "show", group, "--json"))
    assert first["properties"]["price"] == "7"
    assert cluster.dead_letters(group, where="price > 7") == []
    assert len(cluster.dead_letters(group, where="price = 7")) == 8


def test_a_group_without_dead_letters_is_refused(cluster: Cluster, shell: Shell) -> None:
    for call in (cluster.dead_letters, cluster.redrive):
        with pytest.raises(Rejected, match="has no dead letters"):
            call("unknown")
    assert cluster.dead_letter_groups("unknown") == {}
    assert printed(shell, "dlq", "list", "unknown") == "no dead letters\n"


# --- the way back ---------------------------------------------------------------------------------


def test_dead_letters_go_back_to_their_queues_once(
    cluster: Cluster, group: str, shell: Shell
) -> None:
    put(cluster, group, 8, key=b"alice", tag="new", properties={"price": "7"})
    sent = bodies(cluster, group, 8)
    bury(cluster, group, 8)
    assert "8 would go to" in printed(shell, "dlq", "redrive", group, "--dry-run")
    assert len(cluster.dead_letters(group)) == 8

    report = json.loads(printed(shell, "dlq", "redrive", group, "--json"))
    assert (report["redriven"], report["topics"], report["refused"]) == (8, {group: 8}, [])
    assert cluster.dead_letters(group) == []
    assert group not in cluster.dead_letter_groups()
    back = bodies(cluster, group, 16)
    assert {
        body: (queue_id, {**found, "REDRIVES": "1"}) for body, (queue_id, found) in sent.items()
    } == back

    with cluster.workers(group, group=group, prefetch=0) as workers:
        for _ in range(8):
            message = take(workers)
            assert (message.attempts, message.key, message.tag) == (1, b"alice", "new")
            message.reject()
    assert {each.redrives for each in cluster.dead_letters(group)} == {1}
    assert cluster.redrive(group)["redriven"] == 8
    assert cluster.redrive(group)["redriven"] == 0
    assert not any(name.startswith("%REDRIVE%") for name in cluster.groups())


def test_some_dead_letters_go_back_and_the_others_stay(cluster: Cluster, group: str) -> None:
    with cluster.producer() as producer:
        for number in range(8):
            properties = {"price": str(number)}
            producer.send(group, b"%d" % number, queue_id=number % 4, properties=properties)
    bury(cluster, group, 8)
    assert cluster.redrive(group, where="price >= 6")["redriven"] == 2
    assert cluster.dead_letter_groups(group)[group]["count"] == 6
    assert cluster.redrive(group, max_records=3)["redriven"] == 3
    left = {each.message.body for each in cluster.dead_letters(group)}
    assert len(left) == 3
    back = cluster.redrive(group)
    assert (back["redriven"], back["by_others"]) == (3, 0)
    assert len(bodies(cluster, group, 16)) == 8


def test_dead_letters_go_to_another_topic(cluster: Cluster, group: str, shell: Shell) -> None:
    put(cluster, group, 8)
    bury(cluster, group, 8)
    cluster.create_topic("second-chance", queues=2)
    assert cluster.redrive(group, to="second-chance")["topics"] == {"second-chance": 8}
    assert len(bodies(cluster, "second-chance", 8)) == 8

    put(cluster, group, 8)
    bury(cluster, group, 8)
    cluster.create_topic("narrow", queues=1)
    for topic in ("narrow", "unknown", f"%DLQ%{group}"):
        with pytest.raises(Rejected, match=topic):
            cluster.redrive(group, to=topic)
    assert shell.run("dlq", "redrive", group, "--to", "narrow") == 2
    assert "has no queue on shard 1" in shell.err
    assert cluster.dead_letter_groups(group)[group]["count"] == 8


def test_a_dead_letter_whose_topic_is_gone_stays(
    cluster: Cluster, group: str, shell: Shell
) -> None:
    cluster.create_topic("gone", queues=QUEUES)
    put(cluster, "gone", 4)
    put(cluster, group, 4)
    with cluster.workers(["gone", group], group=group, prefetch=0) as workers:
        for _ in range(8):
            take(workers).reject()
    cluster.delete_topic("gone")
    assert shell.run("dlq", "redrive", group) == 1
    shown = shell.stdout.getvalue().decode()
    assert f"4 went to {group}" in shown
    assert "topic gone does not exist" in shown
    assert {each.original_topic for each in cluster.dead_letters(group)} == {"gone"}
    # With fewer queues it takes those that it has.
    cluster.create_topic("gone", queues=2)
    report = cluster.redrive(group)
    assert report["redriven"] == 2
    assert {"gone has no queue" in each["why"] for each in report["refused"]} == {True}


def test_what_was_sent_back_goes_back_to_its_queue(cluster: Cluster, group: str) -> None:
    put(cluster, group, 8)
    with cluster.consumer(group, group=group, start="earliest") as consumer:
        found: list[int] = []

        def poll() -> None:
            for each in consumer.poll(timeout=0.2):
                consumer.send_back(each, delay_level=-1)
                found.append(each.queue_id)

        until(lambda: len(found) == 8, poll)
    letters = cluster.dead_letters(group)
    assert {(each.original_topic, each.reason) for each in letters} == {(group, None)}
    queues = {body: queue_id for body, (queue_id, _) in bodies(cluster, group, 8).items()}
    assert cluster.redrive(group)["redriven"] == 8
    back = bodies(cluster, group, 16)
    assert {body: queue_id for body, (queue_id, _) in back.items()} == queues


def test_two_redrives_at_once_put_each_dead_letter_back_once(cluster: Cluster, group: str) -> None:
    put(cluster, group, 400)
    bury(cluster, group, 400)
    reports: list[dict[str, object]] = []
    threads = [
        threading.Thread(target=lambda: reports.append(cluster.redrive(group))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(int(str(each["redriven"])) for each in reports) == 400
    assert len(bodies(cluster, group, 800)) == 400


def test_a_repeated_call_gets_its_first_answer(cluster: Cluster, group: str) -> None:
    put(cluster, group, 4, queue_id=0)
    bury(cluster, group, 4)
    call = {
        "group": group,
        "session": "5e" * 16,
        "settle": 1,
        "offsets": {"0": packed_offsets(offsets_of([0, 1, 9]))},
    }
    first = cluster.call(0, "redrive", call)
    assert first == {"topics": {group: 2}, "stays": [[0, 9, "refused", "the queue ends at 4"]]}
    assert cluster.call(0, "redrive", call) == first
    assert len(bodies(cluster, group, 6)) == 4
    cluster.call(0, "redrive", {**call, "settle": 2})
    with pytest.raises(Rejected, match="newer request"):
        cluster.call(0, "redrive", call)
    assert len(bodies(cluster, group, 6)) == 4


def test_a_rate_paces_and_progress_is_shown(cluster: Cluster, group: str) -> None:
    put(cluster, group, 12)
    bury(cluster, group, 12)
    clock, shown = ManualClock(), list[str]()
    report = redrive(
        cluster,
        group,
        max_records=None,
        rate=4,
        to=None,
        where=None,
        dry_run=False,
        progress=shown.append,
        clock=clock,
    )
    assert report["redriven"] == 12
    assert clock.monotonic() >= 2.5
    assert shown[0].endswith("of up to 12 dead letters put back")


def test_a_lost_answer_is_asked_for_again(
    cluster: Cluster, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(cluster, group, 8)
    bury(cluster, group, 8)
    call, lost = cluster.call, list[str]()

    def losing(shard: int, op: str, arguments: Any, **more: Any) -> dict[str, Any]:
        answer = call(shard, op, arguments, **more)
        if op == "redrive" and len(lost) < 3:
            lost.append(op)
            raise DeliveryUnknown("the answer is lost", shard=shard)
        return answer

    monkeypatch.setattr(cluster, "call", losing)
    report = cluster.redrive(group)
    assert len(lost) == 3
    assert (report["redriven"], report["by_others"]) == (8, 0)
    assert len(bodies(cluster, group, 16)) == 8
