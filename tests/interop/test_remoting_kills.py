"""RocketMQ's Java client in the middle of each kind of request while servers, leaders, satellites and connections end.

Sends and pulls: test_remoting_failover.py.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from raymq.client.group_facts import committed_offsets
from raymq.store.base.errors import RayMQError
from raymq.store.base.format import DLQ_PREFIX
from tests.support import tier
from tests.support.java_kills import JavaLoad, doubled, faults
from tests.support.oracle import Program
from tests.support.ports import free_port
from tests.support.replicated_shard import ReplicatedShard, pause, started_shard, wait_for_leader
from tests.support.waiting import until

pytestmark = [pytest.mark.ray, pytest.mark.faults, pytest.mark.thorough]

#: facts from one fault to the next
BETWEEN = 60
ROUNDS = tier.rounds("RAYMQ_REMOTING_KILLS", thorough=1, quick=1)

#: begins a load, by the name of its class and its arguments after the name server
Start = Callable[..., JavaLoad]


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def shard(port: int) -> Iterator[ReplicatedShard]:
    with started_shard(3, "kills", options=("--rocketmq", str(port))) as shard:
        yield shard


@pytest.fixture
def start(program: Program, tmp_path: Path, shard: ReplicatedShard, port: int) -> Iterator[Start]:
    loads: list[JavaLoad] = []

    def begin(name: str, *words: str) -> JavaLoad:
        token = shard.cluster.token
        load = JavaLoad(program, tmp_path, token, name, f"127.0.0.1:{port}", *words)
        loads.append(load)
        return load

    try:
        yield begin
    finally:
        for load in loads:
            load.close()


def kill_under(shard: ReplicatedShard, load: JavaLoad, kind: str, between: int = BETWEEN) -> int:
    """All faults of all rounds, and facts of a kind after each of them. Returns: how many faults."""
    count = 0
    load.wait_for(kind, between)
    for _ in range(ROUNDS):
        for name, fault in faults(shard, lambda: load.order("cut")):
            print(f"{name} after {len(load.said[kind])} {kind}")
            fault()
            count += 1
            load.wait_for(kind, between)
    return count


def open_halves(shard: ReplicatedShard) -> int:
    """Half messages of which nothing is decided; -1: the leader does not say."""
    try:
        found: int = shard.status(wait_for_leader(shard))["metrics"]["open_half_messages"]
    except (RayMQError, KeyError):
        return -1
    return found


def test_transactions_end_as_their_producers_have_decided(
    shard: ReplicatedShard, start: Start
) -> None:
    shard.cluster.create_topic("payments", queues=3)
    lost = start("KilledTransactions", "payments", "lost", "2", "false")
    living = start("KilledTransactions", "payments", "living", "2", "true")
    lost.wait_for("commit", BETWEEN)
    # What it has left is asked of the other producer of the group.
    lost.kill()
    kills = 1 + kill_under(shard, living, "commit")

    living.order("stop")
    until(lambda: bool(living.said["stopped"]), pause)
    until(lambda: open_halves(shard) == 0, pause)
    committed = living.ids("commit") | lost.ids("commit")
    until(lambda: committed <= living.ids("seen"), pause)
    living.order("stop")
    found = living.result()
    stored = [each.body.decode() for each in shard.read("payments")]
    unknown = len(living.said["unknown"])
    print(f"{kills} kills, {len(committed)} committed, {unknown} unknown, {found}")
    assert found["all"]
    assert found["rolled_back_seen"] == []
    assert committed <= set(stored)
    assert len(set(stored)) == len(stored)
    assert not {each for each in stored if int(each.rpartition("-")[2]) % 2}


class Work(NamedTuple):
    """One message in a consumer's hands."""

    queue: int
    offset: int
    begin_ns: int
    end_ns: int
    body: str
    consumer: int

    @classmethod
    def of(cls, words: str, consumer: int) -> Work:
        queue, offset, begin_ns, end_ns, body = words.split()
        return cls(int(queue), int(offset), int(begin_ns), int(end_ns), body, consumer)


def order_faults(works: Iterable[Work]) -> tuple[list[tuple[Work, Work]], int, int]:
    """Pairs of works of one queue that overlap, or leave messages out.

    Returns: also how often a queue was begun again at an offset of before, and how often it got another consumer.
    """
    faults: list[tuple[Work, Work]] = []
    again = moves = 0
    by_queue: dict[int, Work] = {}
    for work in sorted(works, key=lambda each: each.begin_ns):
        last = by_queue.get(work.queue, Work(work.queue, -1, 0, 0, "", work.consumer))
        if work.begin_ns < last.end_ns or work.offset > last.offset + 1:
            faults.append((last, work))
        again += work.offset <= last.offset
        moves += work.consumer != last.consumer
        by_queue[work.queue] = work
    return faults, again, moves


def test_consumers_in_order_never_share_a_queue(shard: ReplicatedShard, start: Start) -> None:
    shard.cluster.create_topic("ordered", queues=4)
    first = start("KilledOrder", "ordered", "2")
    second = start("KilledOrder", "ordered", "0")
    first.wait_for("work", BETWEEN)
    second.wait_for("work", 1)
    # A process that dies has locks, which end after 60 s. One that is closed gives them back.
    lost, closed = start("KilledOrder", "ordered", "0"), start("KilledOrder", "ordered", "0")
    lost.wait_for("work", 1)
    closed.wait_for("work", 1)
    kills = kill_under(shard, first, "ack", 2 * BETWEEN)
    lost.kill()
    closed.order("stop")
    closed.order("stop")
    kills += 1 + kill_under(shard, first, "ack", 2 * BETWEEN)

    first.order("stop")
    acked = first.ids("ack")
    loads = (first, second, lost, closed)

    def works() -> Iterator[Work]:
        for number, load in enumerate(loads):
            yield from (Work.of(each, number) for each in list(load.said["work"]))

    until(lambda: first.ids("ack") <= {each.body for each in works()}, pause)
    until(lambda: bool(first.said["stopped"]), pause)
    faults, again, moves = order_faults(works())
    print(
        f"{kills} kills, {len(acked)} acknowledged, {len(first.said['unknown'])} unknown, {again} begun again, {moves} "
        f"moves, {[len(each.said['work']) for each in loads]} works"
    )
    assert faults == []
    assert moves > 0


def languages(shard: ReplicatedShard, group: str) -> list[str]:
    """Those of a group's clients, as an operator sees them."""
    return [each["language"] for each in shard.cluster.describe_group(group)["clients"]]


def test_messages_that_come_later_or_again_are_not_lost(
    shard: ReplicatedShard, start: Start
) -> None:
    shard.cluster.create_topic("retried", queues=3)
    group, ended, went_back = "kill-retries", threading.Event(), []
    before: dict[int, int] = {}

    def watch() -> None:
        while not ended.wait(0.1):
            try:
                now = committed_offsets(shard.cluster, group, "retried")
            except RayMQError:
                continue
            went_back.extend(
                (queue, before[queue], offset)
                for queue, offset in now.items()
                if offset < before.get(queue, 0)
            )
            before.update(now)

    watcher = ThreadPoolExecutor(1)
    watching = watcher.submit(watch)
    try:
        load = start("KilledRetries", "retried", group, "2")
        kills = kill_under(shard, load, "ack", 2 * BETWEEN)
        load.order("stop")
        until(lambda: bool(load.said["stopped"]), pause)
        dead = load.ids("dead")

        def left() -> set[str]:
            return dead - {each.body.decode() for each in shard.read(f"{DLQ_PREFIX}{group}")}

        until(lambda: not left(), pause)
        # All servers, also those that have died, have said the same client.
        until(lambda: languages(shard, group) == ["JAVA"], pause)
        load.order("stop")
        found = load.result()
    finally:
        ended.set()
        watcher.shutdown()
    watching.result()
    print(f"{kills} kills, {len(dead)} dead, {len(load.said['unknown'])} unknown, {found}")
    assert found["all"], found["missing"]
    assert found["early"] == []
    assert len(before) == 3
    assert min(before.values()) > 0
    assert went_back == []
    assert doubled(shard, "retried") == {}


def test_what_tools_ask_again_is_done(shard: ReplicatedShard, start: Start) -> None:
    load = start("KilledTools")
    kills = kill_under(shard, load, "done", 15)
    load.order("stop")
    found = load.result()
    print(f"{kills} kills, {found}, {Counter(load.said['error'])}")
    assert found["faults"] == []
    assert not [each for each in shard.cluster.topics() if each.startswith("made-")]
