"""RocketMQ opens a store in which a consumer group has lived: it reads every message, and has the group's offsets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raymq.store.config.store_config import StoreConfig
from raymq.store.engine.message_store import MessageStore
from raymq.store.groups.claims import Claim, claim_value
from raymq.store.groups.coordinator import Coordinator
from raymq.store.groups.heartbeat import Beat, BeatAnswer, JoinRequest
from raymq.store.groups.members import CLAIM, MemberFacts, TopicSubscription
from raymq.store.state.shard_state import OFFSETS, offsets_body
from tests.support import message_kinds as kinds
from tests.support.confirming import confirm_with_index
from tests.support.oracle import RocketMQ
from tests.support.put_kinds import put_all
from tests.support.store_facts import assert_same, read_copy

GROUP = "g"
TOPICS = {kinds.TOPIC: 4}
SESSION_MS = 3_000


class Life:
    """A group whose records go into a store."""

    def __init__(self, store: MessageStore) -> None:
        self.store = store
        self.coordinator = Coordinator(store.groups)
        self.now_ms = 0

    def append(self, kind: str, body: bytes) -> None:
        """One record."""
        self.store.inner_put.put_decided(lambda: [(kind, body)])

    def beat(self, *beats: Beat) -> list[Any]:
        """A step of the group. Returns: its answers."""
        step = self.coordinator.step(GROUP, beats, TOPICS, self.now_ms)
        for kind, value in step.records:
            self.append(kind, json.dumps(value).encode())
        return self.coordinator.answers(step)

    def join(self, member: str, instance: str = "") -> Any:
        """A new member. Returns: the answer."""
        facts = MemberFacts(TopicSubscription((kinds.TOPIC,)), instance, "host:1", SESSION_MS)
        (answer,) = self.beat(Beat(member, join=JoinRequest(facts)))
        assert isinstance(answer, BeatAnswer)
        return answer

    def own(self, member: str, answer: BeatAnswer, offsets: dict[int, int]) -> None:
        """Claim what a member was given, and commit."""
        assert answer.assignment is not None
        numbers = {queue: number for (_, queue), number in answer.assignment.items()}
        claims = {queue: Claim(number, member) for queue, number in numbers.items()}
        self.append(CLAIM, json.dumps(claim_value(GROUP, kinds.TOPIC, claims)).encode())
        self.append(OFFSETS, offsets_body(GROUP, kinds.TOPIC, offsets))


def live(store: MessageStore) -> None:
    """Members join, share, are replaced, fall silent, and leave; offsets go forward and, by a seek, back."""
    life = Life(store)
    first = life.join("a" * 32, "i")
    life.own("a" * 32, first, {0: 2, 1: 1, 2: 3})
    life.join("b" * 32)
    # It has released what the other one gets.
    told = life.beat(Beat("a" * 32, first.version, first.assignment))[0]
    life.beat(Beat("a" * 32, told.version, told.assignment))
    given = life.beat(Beat("b" * 32))[0]
    life.own("b" * 32, given, {queue: 4 for _, queue in given.assignment})
    store.begin_next_file()
    life.join("c" * 32, "i")
    life.now_ms += SESSION_MS
    life.beat(Beat("b" * 32, given.version, given.assignment))
    life.now_ms += SESSION_MS
    # Only this one is left.
    last = life.join("d" * 32)
    assert len(last.assignment) == 4
    life.own("d" * 32, last, {3: 1})
    life.beat(Beat("d" * 32, is_leaving=True))


@pytest.mark.parametrize("end", ["closed", "crashed"])
def test_rocketmq_opens_a_store_after_the_life_of_a_group(
    rocketmq: RocketMQ, config: StoreConfig, tmp_path: Path, end: str
) -> None:
    root = tmp_path / "store"
    store = MessageStore.open(root, config=config)
    put_all(store, kinds.ordinary())
    live(store)
    put_all(store, kinds.ordinary())
    offsets = store.state.offsets[(GROUP, kinds.TOPIC)]
    assert offsets.keys() == {0, 1, 2, 3}
    confirm_with_index(store)
    if end == "closed":
        store.close()
    else:
        store.log.sync()
        store.abandon()

    theirs = rocketmq.read(root)
    assert theirs[0]["ok"]
    assert_same(read_copy(root, config), theirs)
    if end == "closed":
        (found,) = rocketmq.config(root)
        wanted = {str(queue): offset for queue, offset in offsets.items()}
        assert found["offsets"][f"{kinds.TOPIC}@{GROUP}"] == wanted
        assert GROUP in found["groups"]
    again = MessageStore.open(root, config=config)
    assert again.state.offsets[(GROUP, kinds.TOPIC)] == offsets
    assert again.groups.groups[GROUP].members == {}
    again.abandon()
