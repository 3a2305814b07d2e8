"""A topic that is deleted and made again while groups read it, on two shards of three replicas, of which a leader dies.

The leader dies between the deletion on the first shard and that on the second one. All consumers are polled by one
thread, so that what they read has one order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import raymq
from raymq.client.consume.consumer import Consumer
from raymq.store.base.errors import (
    DeliveryUnknown,
    Fenced,
    OffsetOutOfRange,
    TopicDeleted,
    TopicMissing,
    Unavailable,
)
from tests.support.history import History, Load
from tests.support.lean_ray import LEAN
from tests.support.replicated_shard import (
    ReplicatedShard,
    check,
    check_logs,
    kill_leader,
    pause,
    started_shard,
    wait_for_leader,
)
from tests.support.waiting import until

pytestmark = [pytest.mark.faults, pytest.mark.thorough]

SHARDS, QUEUES = 2, 4
#: messages in each queue: of the deleted topic, of which most are not read before, and of the one that is made again
OLD, NEW = 200, 5
#: most messages of one poll: before the deletion, and then
FEW, MANY = 20, 500
#: longer than a fail-over takes
SESSION_S = 30.0

#: (topic, queue) -> (offset, body) of each message, in the order in which a group read them
Seen = dict[tuple[str, int], list[tuple[int, bytes]]]


class Program:
    """Reads as a member, commits what it got, and makes another consumer when it hears that its topic was deleted."""

    def __init__(self, cluster: raymq.Cluster, topics: Any, group: str, seen: Seen) -> None:
        """Args: `seen`: of the group."""
        self._cluster, self._topics, self._group, self._seen = cluster, topics, group, seen
        self._consumer: Consumer | None = None

    def step(self, count: int) -> None:
        """Poll once, and commit."""
        try:
            consumer = self._consumer or self._join()
            for each in consumer.poll(count, 0.02):
                read = self._seen.setdefault((each.topic, each.queue_id), [])
                read.append((each.offset, each.body))
            self._commit(consumer)
        except (TopicDeleted, TopicMissing):
            self.close()
            pause()
        except (Unavailable, DeliveryUnknown):
            pause()

    def _join(self) -> Consumer:
        self._consumer = self._cluster.consumer(
            self._topics, group=self._group, start="earliest", session_timeout_s=SESSION_S
        )
        return self._consumer

    def _commit(self, consumer: Consumer) -> None:
        """Commit before the next poll, which may give queues up."""
        done: list[bool] = []

        def try_again() -> None:
            try:
                consumer.commit()
            except Fenced:
                # Of queues of the deleted topic, which were taken away. Other offsets are stored.
                pass
            except OffsetOutOfRange:
                # The queues of the topic that was made again begin above. A member with a pattern passes them over.
                if not isinstance(self._topics, str):
                    raise
            except (Unavailable, DeliveryUnknown):
                pause()
                return
            done.append(True)

        until(lambda: bool(done), try_again)

    def close(self) -> None:
        """Leave the group."""
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None


@pytest.fixture(scope="module")
def shard() -> Iterator[ReplicatedShard]:
    with started_shard(3, "grouptopics", LEAN, shards=SHARDS) as world:
        yield world


def put(cluster: raymq.Cluster, topic: str, count: int, body: bytes) -> None:
    """Put so many messages into each queue."""
    with cluster.producer(acks="quorum") as producer:
        for queue in range(QUEUES):
            for _ in range(count):
                producer.send(topic, body, queue_id=queue)


def ranges(cluster: raymq.Cluster, topic: str) -> dict[int, tuple[int, int]]:
    """Queue -> its first offset and its end."""
    found = cluster.describe_topic(topic)["queues"]
    return {each["queue_id"]: (each["min_offset"], each["max_offset"]) for each in found}


def make_again(cluster: raymq.Cluster, topic: str) -> None:
    """Delete the topic on the shards that still have it, and make it again with new messages."""
    assert cluster.delete_topic(topic)
    assert cluster.create_topic(topic, queues=QUEUES)
    put(cluster, topic, NEW, b"new")


@pytest.mark.parametrize("killed", range(SHARDS))
def test_groups_read_a_topic_that_is_made_again_once_and_lose_nothing_of_another_one(
    shard: ReplicatedShard, killed: int
) -> None:
    cluster = shard.cluster
    again, kept = f"logs{killed}-again", f"logs{killed}-kept"
    for topic in (again, kept):
        cluster.create_topic(topic, queues=QUEUES)
    put(cluster, again, OLD, b"old")
    history = History()
    by_pattern: Seen = {}
    by_name: Seen = {}

    with contextlib.ExitStack() as stack:
        load = stack.enter_context(Load(cluster, kept, history, producers=1, queues=QUEUES))
        programs = [
            *(
                Program(cluster, raymq.matching(f"logs{killed}-*"), f"pattern{killed}", by_pattern)
                for _ in range(2)
            ),
            Program(cluster, again, f"name{killed}", by_name),
        ]
        for each in programs:
            stack.callback(each.close)
        alone = stack.enter_context(cluster.consumer(again, start="earliest"))

        def step(count: int = MANY) -> None:
            for each in programs:
                each.step(count)

        def have(seen: Seen, topic: str, ends: dict[int, int]) -> bool:
            """Whether each queue was read up to this offset."""
            read = {queue: seen.get((topic, queue), [(-1, b"")])[-1][0] for queue in ends}
            return all(read[queue] >= end - 1 for queue, end in ends.items())

        first = dict.fromkeys(range(QUEUES), 1)
        until(
            lambda: (
                have(by_pattern, again, first)
                and have(by_pattern, kept, first)
                and have(by_name, again, first)
            ),
            lambda: step(FEW),
        )
        assert alone.poll(1, 30.0)

        # The second shard has not heard of it yet.
        cluster.call(0, "delete_topic", {"name": again})
        kill_leader(shard.sibling(killed))
        with ThreadPoolExecutor(1) as threads:
            made = threads.submit(make_again, cluster, again)
            until(made.done, step)
            made.result()
        # No offset is used twice.
        assert ranges(cluster, again) == dict.fromkeys(range(QUEUES), (OLD, OLD + NEW))

        ends = dict.fromkeys(range(QUEUES), OLD + NEW)
        until(lambda: have(by_pattern, again, ends) and have(by_name, again, ends), step)
        load.stop()
        of_kept = {queue: end for queue, (_, end) in ranges(cluster, kept).items()}
        until(lambda: have(by_pattern, kept, of_kept), step)

        def poll_alone() -> None:
            with contextlib.suppress(Unavailable):
                alone.poll(MANY, 0.1)

        with pytest.raises(TopicDeleted, match=f"topic {again} was deleted"):
            until(lambda: False, poll_alone)

    for seen in (by_pattern, by_name):
        for queue in range(QUEUES):
            read = seen[again, queue]
            offsets = [offset for offset, _ in read]
            # Each once and in order: after a new message no old one.
            assert offsets == sorted(set(offsets))
            assert [offset for offset in offsets if offset >= OLD] == [*range(OLD, OLD + NEW)]
            assert all(body == (b"old" if offset < OLD else b"new") for offset, body in read)
    for queue, end in of_kept.items():
        assert [offset for offset, _ in by_pattern[kept, queue]] == [*range(end)]
    assert check(shard, history, topic=kept) == sum(of_kept.values()) > 0


@pytest.mark.parametrize("number", range(SHARDS))
def test_the_logs_are_the_same_bytes_after_all_of_it(shard: ReplicatedShard, number: int) -> None:
    one = shard.sibling(number)
    end = one.status(wait_for_leader(one))["appended"]
    until(lambda: one.says(wait_for_leader(one), lambda facts: facts["confirmed"] >= end), pause)
    assert check_logs(one) >= end > 0
