"""A consumer of the nearest replica while the leader changes, and followers lag or are away: replicas in memory."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from raymq.client.consume.consumer import Consumer
from raymq.client.transport import connection as connection_module
from raymq.client.transport import nearest as nearest_module
from raymq.client.transport import routes as routes_module
from raymq.store.records.requests import PutRequest
from tests.support.batches import batch, put_one
from tests.support.moving_shard import MovingShard
from tests.support.waiting import until

SEED = 20261124
TURNS = 60


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas that are away are noticed soon, and tried again soon."""
    monkeypatch.setattr(routes_module, "LEADER_TIMEOUT_S", 0.5)
    monkeypatch.setattr(connection_module, "FOLLOWED_WAIT_MS", 50)
    monkeypatch.setattr(nearest_module, "REPLICA_WAIT_MS", 50)
    monkeypatch.setattr(nearest_module, "BEHIND_MS", 100)
    monkeypatch.setattr(nearest_module, "BEHIND_PAUSE_MS", 10)
    monkeypatch.setattr(nearest_module, "RETRY_MS", 10)
    monkeypatch.setattr(nearest_module, "RETRY_MS_MAX", 40)


@pytest.fixture
def shard() -> Iterator[MovingShard]:
    """Topic t of two queues, whose followers serve reads."""
    shard = MovingShard()
    shard.create("t", queues=2)
    for replica in shard.replicas:
        replica.serves_reads = True
    yield shard
    shard.close()


@pytest.fixture
def make(shard: MovingShard) -> Iterator[Callable[..., Consumer]]:
    made: list[Consumer] = []

    def consumer(**options: Any) -> Consumer:
        wanted = {"start": "earliest", "read_from": "nearest", **options}
        made.append(Consumer(shard.cluster(), "t", **wanted))
        return made[-1]

    yield consumer
    for each in made:
        each.close()


class History:
    """The messages of a shard whose leader the test chooses, and what a consumer got of them."""

    def __init__(self, shard: MovingShard, consumer: Consumer) -> None:
        self.shard = shard
        self.consumer = consumer
        self.leader = shard.replicas[0]
        self.epoch = 1
        self.sent = {0: 0, 1: 0}
        self.got: dict[int, list[tuple[int, bytes]]] = {0: [], 1: []}

    def put(self, queue: int, count: int) -> None:
        """Store messages at the leader, whose bodies are their offsets."""
        first = self.sent[queue]
        rows: list[bytes | None] = [b"%d" % (first + n) for n in range(count)]
        put_one(self.leader, PutRequest("t", queue, batch(rows), None, 0, 0, "quorum"))
        self.sent[queue] += count

    def elect(self, number: int) -> None:
        """Let another replica lead. A majority has all messages, so that it has them, too."""
        kept = self.leader.kept()
        self.leader.step_down()
        self.epoch += 1
        self.leader = self.shard.elect(number, self.epoch, of=kept)

    def poll(self, timeout: float = 0.05) -> None:
        """Take what the consumer has, and check that it goes on without a gap."""
        for message in self.consumer.poll(100, timeout):
            mine = self.got[message.queue_id]
            assert message.offset == len(mine), f"queue {message.queue_id}: {message.offset}"
            assert message.body == b"%d" % message.offset
            mine.append((message.offset, message.body))

    def poll_all(self) -> None:
        """Wait until the consumer got everything."""
        until(lambda: all(len(self.got[q]) == self.sent[q] for q in (0, 1)), self.poll)


def test_a_history_has_no_gap_and_no_repetition_whichever_replica_is_read(
    shard: MovingShard, make: Callable[..., Consumer]
) -> None:
    history = History(shard, make())
    chance = random.Random(SEED)
    print(f"seed {SEED}")
    for _ in range(TURNS):
        step = chance.choice(["put", "put", "copy", "copy", "elect", "away", "poll"])
        followers = [each for each in shard.replicas if each is not history.leader]
        follower = chance.choice(followers)
        if step == "put":
            history.put(chance.choice([0, 1]), chance.randint(1, 4))
        elif step == "copy":
            # It may lack messages that the consumer has from the leader, for a while.
            follower.copy(history.leader.kept())
        elif step == "elect":
            history.elect(follower.number)
        elif step == "away":
            follower.serves_reads = not follower.serves_reads
            shard.proxies[follower.number].cut()
        history.poll(0.02)
    history.poll_all()
    assert sum(each.answered for each in shard.replicas if each is not history.leader) > 0


def test_a_follower_that_lags_behind_the_consumer_is_not_believed(
    shard: MovingShard, make: Callable[..., Consumer]
) -> None:
    history = History(shard, make())
    history.put(0, 5)
    # The followers know nothing of these messages: the leader has to answer.
    history.poll_all()
    answered = [each.answered for each in shard.replicas]
    history.put(0, 3)
    history.poll_all()
    assert history.consumer.positions() == {0: 8, 1: 0}
    assert [each.answered for each in shard.replicas[1:]] == answered[1:]


def test_a_follower_of_an_older_epoch_is_not_believed(
    shard: MovingShard, make: Callable[..., Consumer]
) -> None:
    history = History(shard, make())
    history.elect(2)
    old, away, _ = shard.replicas
    old.serves_reads = away.serves_reads = False
    history.put(0, 3)
    history.poll_all()

    # It has all messages, and has not heard of the new leader.
    old.hear(None, 1)
    old.serves_reads = True
    for _ in range(5):
        history.put(0, 1)
        old.copy(history.leader.kept())
        history.poll_all()
    assert old.answered == 0
    old.hear(2, 2)

    def put_and_read() -> None:
        history.put(0, 1)
        old.copy(history.leader.kept())
        history.poll_all()

    until(lambda: old.answered > 0, put_and_read)


def test_a_consumer_reads_a_follower_while_no_replica_leads(
    shard: MovingShard, make: Callable[..., Consumer]
) -> None:
    history = History(shard, make())
    history.put(0, 4)
    for each in shard.replicas[1:]:
        each.copy(history.leader.kept())
    kept = history.leader.kept()
    history.leader.step_down()
    history.poll_all()
    shard.elect(1, 2, of=kept)


def test_a_consumer_that_waits_at_a_follower_gets_a_message_when_the_follower_has_it(
    shard: MovingShard, make: Callable[..., Consumer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nearest_module, "REPLICA_WAIT_MS", 10_000)
    monkeypatch.setattr(connection_module, "FOLLOWED_WAIT_MS", 10_000)
    history = History(shard, make())
    followers = shard.replicas[1:]
    got: list[int] = []
    waiting = threading.Thread(
        target=lambda: got.extend(m.offset for m in history.consumer.poll(10, 30))
    )
    waiting.start()
    history.put(0, 1)
    for each in followers:
        each.copy(history.leader.kept())
    waiting.join(30)
    assert got == [0]
    assert shard.replicas[0].answered == 0
