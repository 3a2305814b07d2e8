"""RocketMQ's own Java client, unmodified, in front of a shard: what it sends and reads."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from raymq.client.produce.half_message import CheckedHalf
from raymq.doors.rocketmq.codes import ResponseCode
from raymq.doors.rocketmq.rocketmq_server import RocketMQServer
from raymq.store.base.errors import Rejected
from raymq.store.services import half_messages
from raymq.store.services.transaction import TransactionService
from tests.support.oracle import JAVA_OPTIONS, SOURCES, Program
from tests.support.served_shard import ServedShard
from tests.support.waiting import until

#: of each kind: sync, async, one-way, in a batch; and one large message
COUNT = 40
MESSAGES = 4 * COUNT + 1
#: half messages: a third of them is committed at once, a third is rolled back
COUNT_HALVES = 30
#: half messages of each of two clients that answer for each other
COUNT_SHARED = 6
#: messages that are read in order
COUNT_IN_ORDER = 800

Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedShard]:
    with ServedShard(tmp_path_factory.mktemp("remoting") / "store") as served:
        served.start_flusher()
        yield served


@pytest.fixture(scope="module")
def server(shard: ServedShard) -> Iterator[RocketMQServer]:
    with RocketMQServer(shard.cluster) as running:
        yield running


@pytest.fixture(scope="module")
def run(shard: ServedShard, server: RocketMQServer, program: Program, tmp_path_factory) -> Run:
    """Runs a scenario in a process of Java."""
    home = tmp_path_factory.mktemp("home")

    def run_scenario(scenario: str, topic: str, *words: object, options=()) -> dict[str, Any]:
        """Args: `words`: of the scenario. `options`: of Java."""
        arguments = [scenario, f"127.0.0.1:{server.listen(0)}", topic, *map(str, words)]
        done = subprocess.run(
            [
                program.java,
                *JAVA_OPTIONS,
                f"-Duser.home={home}",
                f"-Drmq.logback.configurationFile={SOURCES / 'logback.xml'}",
                f"-Draymq.secret={shard.cluster.token}",
                *options,
                *("-cp", program.class_path, "ClientScenarios", *arguments),
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return found

    return run_scenario


@pytest.mark.parametrize("header_type", ["JSON", "ROCKETMQ"])
def test_the_java_client_sends_in_each_way_and_reads_all_of_it(
    run: Run, shard: ServedShard, header_type: str
) -> None:
    topic = f"orders_{header_type}"
    shard.cluster.create_topic(topic, queues=4)
    options = (f"-Drocketmq.serialize.type={header_type}",)
    sent = run("send", topic, COUNT, options=options)
    assert sent == {
        "async_answered": True,
        "async_failed": 0,
        "batch": "SEND_OK",
        "batch_ids": COUNT,
        "has_unique_id": True,
        "large": "SEND_OK",
        "offset_id_length": 32,
        "queue": "raymq-0",
        "sync": {"SEND_OK": COUNT},
    }

    group = f"push_{header_type}"
    read = run("push", topic, MESSAGES, group, "*", options=options)
    assert (read["all"], read["received"], read["distinct"]) == (True, MESSAGES, MESSAGES)
    assert read["queues"] == [f"raymq-0/{number}" for number in range(4)]
    # The client has inflated what it had compressed.
    assert read["bytes"]["large"] == 200_000
    # The client commits without waiting for an answer when it ends.
    pause = threading.Event()
    until(lambda: _lag(shard, topic, group) == 0, lambda: pause.wait(0.02))


@pytest.mark.thorough
def test_the_java_consumer_goes_on_when_its_topic_is_deleted_and_made_again(
    run: Run, shard: ServedShard
) -> None:
    topic, group, count = "made_again", "goes_on", 20
    pause = threading.Event()

    def send() -> None:
        with shard.cluster.producer() as producer:
            for number in range(count):
                producer.send(topic, b"%d" % number, tag="a", queue_id=number % 2).result(30)

    def committed() -> int:
        return sum(shard.cluster.call(0, "offsets", {"group": group, "topic": topic}).values())

    shard.cluster.create_topic(topic, queues=2)
    send()
    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(run, "push", topic, 2 * count, group, "*")
        until(lambda: committed() == count, lambda: pause.wait(0.05))
        shard.cluster.delete_topic(topic)
        shard.cluster.create_topic(topic, queues=2)
        send()
        read = reading.result()
    assert (read["all"], read["received"]) == (True, 2 * count)


def _lag(shard: ServedShard, topic: str, group: str) -> int:
    """How many messages a group has not committed."""
    offsets = shard.cluster.call(0, "offsets", {"group": group, "topic": topic})
    ends = shard.cluster.describe_topic(topic)["queues"]
    return sum(each["max_offset"] - offsets.get(str(each["queue_id"]), 0) for each in ends)


@pytest.mark.thorough
def test_the_java_client_reads_by_tag_by_sql_and_with_queues_of_its_choice(
    run: Run, shard: ServedShard
) -> None:
    shard.cluster.create_topic("filtered", queues=4)
    run("send", "filtered", COUNT)
    by_tag = run("push", "filtered", COUNT, "by_tag", "sync")
    assert (by_tag["received"], list(by_tag["bytes"])) == (COUNT, ["sync"])
    expression = "sql:number < 10 AND TAGS = 'async'"
    by_sql = run("push", "filtered", 10, "by_sql", expression)
    assert (by_sql["received"], list(by_sql["bytes"])) == (10, ["async"])
    assert run("pull", "filtered", MESSAGES, "pulling") == {"distinct": MESSAGES, "queues": 4}


@pytest.mark.thorough
def test_the_java_client_makes_transactions_and_consumers_see_the_committed_ones(
    run: Run, shard: ServedShard
) -> None:
    shard.cluster.create_topic("paid", queues=4)
    found = run("transact", "paid", COUNT_HALVES)
    third = COUNT_HALVES // 3
    assert found == {
        "asked": True,
        "checked": third,
        "states": {"SEND_OK": COUNT_HALVES},
        "wrong": 0,
    }
    # Those that were committed at once, and those that were committed when the server asked.
    read = run("push", "paid", 2 * third, "accounts", "half")
    assert (read["all"], read["received"], read["distinct"]) == (True, 2 * third, 2 * third)


@pytest.mark.thorough
def test_a_java_producer_and_one_of_raymq_answer_for_the_half_messages_of_each_other(
    run: Run, shard: ServedShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TransactionService, "immunity_ms", lambda self, properties: 2_000)
    monkeypatch.setattr(half_messages, "CHECK_PAUSE_MS", 1_000)
    shard.cluster.create_topic("shared", queues=4)
    with shard.cluster.producer() as producer:
        ours = [
            producer.send_half(
                "shared",
                f"ours-{number}".encode(),
                tag="ours",
                index_keys=(f"key-ours-{number}",),
                properties={"number": str(number)},
                group="both-pay",
            ).result(30)
            for number in range(COUNT_SHARED)
        ]
        found = run("answer", "shared", COUNT_SHARED, "both-pay")
        assert (found["asked"], found["wrong"]) == (True, 0)
        assert found["checked"] == sorted(each.transaction_id for each in ours)
        assert found["states"] == {"SEND_OK": COUNT_SHARED}
        # The answer of the Java client was the first one.
        with pytest.raises(Rejected, match="resolved as COMMIT"):
            ours[0].rollback()

        halves: dict[str, CheckedHalf] = {}

        def answer(half: CheckedHalf) -> str:
            halves[half.id] = half
            return "commit"

        producer.check(answer, group="both-pay")
        bodies: list[bytes] = []
        with shard.cluster.consumer("shared", start="earliest") as consumer:
            until(
                lambda: len(bodies) == 2 * COUNT_SHARED,
                lambda: bodies.extend(each.body for each in consumer.poll(timeout=1)),
            )
    named = [f"{tag}-{number}" for tag in ("half", "ours") for number in range(COUNT_SHARED)]
    assert sorted(bodies) == sorted(each.encode() for each in named)
    assert len(halves) == COUNT_SHARED
    for half in halves.values():
        number = half.properties["number"]
        assert (half.topic, half.tag, half.flag) == ("shared", "half", int(number))
        assert half.index_keys == (f"key-half-{number}",)
        assert half.body == f"half-{number}".encode()


@pytest.mark.thorough
def test_the_java_clients_that_read_in_order_share_the_queues_and_take_them_over(
    run: Run, shard: ServedShard
) -> None:
    shard.cluster.create_topic("in_order", queues=4)
    found = run("orderly", "in_order", COUNT_IN_ORDER, "keepers")
    assert (found["half"], found["all"], found["queues"]) == (True, True, 4)
    assert (found["wrong"], found["together"]) == (0, 0)
    assert min(found["by_first"], found["by_second"]) > 0
    assert found["by_first"] + found["by_second"] == COUNT_IN_ORDER
    # A queue is unlocked when its last message was handled and its offset is on the way.
    assert found["repeated"] == 0
    pause = threading.Event()
    until(lambda: _lag(shard, "in_order", "keepers") == 0, lambda: pause.wait(0.02))


@pytest.mark.thorough
def test_a_java_client_and_a_consumer_of_raymq_go_on_one_after_the_other(
    run: Run, server: RocketMQServer, shard: ServedShard
) -> None:
    shard.cluster.create_topic("in_turn", queues=4)
    sent = run("send", "in_turn", COUNT)
    assert sent["batch"] == "SEND_OK"
    read = run("push", "in_turn", MESSAGES, "both", "*")
    assert (read["all"], read["distinct"]) == (True, MESSAGES)
    pause = threading.Event()
    until(lambda: _lag(shard, "in_turn", "both") == 0, lambda: pause.wait(0.02))
    run("send", "in_turn", COUNT)
    with shard.cluster.consumer("in_turn", group="both", start="earliest") as consumer:
        bodies: list[bytes] = []
        until(
            lambda: len(bodies) == MESSAGES,
            lambda: bodies.extend(each.body for each in consumer.poll(timeout=1)),
        )
        consumer.commit()

        # A client of RocketMQ that starts meanwhile waits, and begins by itself.
        run("send", "in_turn", COUNT)
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(run, "push", "in_turn", MESSAGES, "both", "*")
            refusals = server.counts.refusals
            until(lambda: refusals[ResponseCode.NO_PERMISSION] > 1, lambda: pause.wait(0.1))
            consumer.close()
            again = waiting.result()
    assert (again["received"], again["distinct"]) == (MESSAGES, MESSAGES)
