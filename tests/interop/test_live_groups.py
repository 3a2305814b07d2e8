"""RocketMQ opens the directories of three replicas on which consumer groups have lived, after they stopped in order.

Members joined, shared, committed and were killed. Topics that a group read were deleted, and one was made again.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import raymq
from raymq.store.config.store_config import StoreConfig
from raymq.store.tools.inspect import verify
from tests.support.group_members import MemberProcess, check_histories
from tests.support.lean_ray import LEAN
from tests.support.oracle import Line, RocketMQ
from tests.support.replicated_shard import (
    ASIDE,
    FILE_BYTES,
    QUEUES,
    TOPIC,
    ReplicatedShard,
    pause,
    started_shard,
)
from tests.support.store_facts import assert_same, differences, read_copy, table
from tests.support.waiting import until

pytestmark = pytest.mark.thorough

REPLICAS = 3
GROUP, TRIALS = "workers", "trials"
#: both are deleted, and the second one is made again
GONE, AGAIN = "trial-gone", "trial-again"
#: messages that are put into each queue at a time
COUNT = 60
SESSION_S = 2.0
#: of lines about a store
KINDS = ("record", "queue", "unit", "time", "key")

#: (topic, queue) -> its first offset and its end
Ranges = dict[tuple[str, int], tuple[int, int]]


class Stopped(NamedTuple):
    """What a cluster has left."""

    #: of the replicas
    roots: list[Path]
    #: of the topics that exist, as the cluster has said
    ranges: Ranges
    #: (group, topic) -> queue -> committed offset, as the cluster has said
    offsets: dict[tuple[str, str], dict[int, int]]


@pytest.fixture(scope="module")
def sized(config: StoreConfig) -> StoreConfig:
    """The options of the replicas' stores."""
    return StoreConfig(**{**vars(config), "segment_size_bytes": FILE_BYTES})


@pytest.fixture(scope="module")
def stopped(
    sized: StoreConfig, program: object, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stopped]:
    """Args: `program`: without it nothing need be started."""
    names = ("consume_queue_file_size_bytes", "max_hash_slot_num", "max_index_num")
    options = [word for name in names for word in ("--config", f"{name}={getattr(sized, name)}")]
    with started_shard(REPLICAS, "livegroups", LEAN, options=options) as shard:
        live_with_members(shard, tmp_path_factory.mktemp("members"))
        live_with_deleted_topics(shard.cluster)
        cluster = shard.cluster
        found: Ranges = {}
        for topic in (TOPIC, ASIDE, AGAIN):
            for each in cluster.describe_topic(topic)["queues"]:
                found[topic, each["queue_id"]] = each["min_offset"], each["max_offset"]
        pairs = ((GROUP, TOPIC), (TRIALS, AGAIN))
        committed = {pair: offsets(cluster, *pair) for pair in pairs}
        assert shard.command("stop", shard.paths.data_dir)["clean"]
        roots = [shard.paths.replica(0, replica) for replica in shard.replicas]
        yield Stopped(roots, found, committed)


def put(cluster: raymq.Cluster, topic: str, queues: int) -> None:
    """Put COUNT messages into each queue."""
    with cluster.producer(acks="quorum") as producer:
        for queue in range(queues):
            for number in range(COUNT):
                producer.send(topic, b"%d" % number, queue_id=queue, index_keys=(f"k{number}",))


def offsets(cluster: raymq.Cluster, group: str, topic: str) -> dict[int, int]:
    """Queue -> committed offset."""
    found = cluster.call(0, "offsets", {"group": group, "topic": topic})
    return {int(queue): int(offset) for queue, offset in found.items()}


def wait_for_commits(cluster: raymq.Cluster, offset: int) -> None:
    """The members have committed this offset of each queue."""
    wanted = dict.fromkeys(range(QUEUES), offset)
    until(lambda: offsets(cluster, GROUP, TOPIC) == wanted, pause)


def live_with_members(shard: ReplicatedShard, place: Path) -> None:
    """Two members share the queues, one of them is killed, and the other one reads the rest."""
    cluster, url = shard.cluster, str(shard.paths.data_dir)
    put(cluster, ASIDE, 1)
    members = [
        MemberProcess(url, TOPIC, GROUP, place / f"member{number}", session_timeout_s=SESSION_S)
        for number in range(2)
    ]
    killed, other = members

    def are_shared() -> bool:
        owned = [each.queues() for each in members]
        return all(owned) and sorted(q for each in owned for q in each) == list(range(QUEUES))

    try:
        until(are_shared, pause)
        put(cluster, TOPIC, QUEUES)
        wait_for_commits(cluster, COUNT)
        killed.end()
        put(cluster, TOPIC, QUEUES)
        wait_for_commits(cluster, 2 * COUNT)
        # It names none while it does not know whether it still has them.
        until(lambda: other.queues() == set(range(QUEUES)), pause)
        committed = offsets(cluster, GROUP, TOPIC)
        check_histories([each.history() for each in members], committed, committed)
    finally:
        for each in members:
            each.end()


def live_with_deleted_topics(cluster: raymq.Cluster) -> None:
    """A member reads and commits in two topics that are deleted, and in one of them that is made again."""
    for topic in (GONE, AGAIN):
        cluster.create_topic(topic, queues=2)
        put(cluster, topic, 2)
    seen: list[Any] = []
    with cluster.consumer(raymq.matching("trial-*"), group=TRIALS, start="earliest") as member:

        def step() -> None:
            seen.extend(member.poll(100, 0.2))
            member.commit()

        until(lambda: len(seen) >= 4 * COUNT, step)
        for topic in (GONE, AGAIN):
            cluster.delete_topic(topic)
        cluster.create_topic(AGAIN, queues=2)
        put(cluster, AGAIN, 2)
        until(lambda: len(seen) >= 6 * COUNT, step)
    assert len(seen) == 6 * COUNT
    assert {each.topic for each in seen[4 * COUNT :]} == {AGAIN}
    assert offsets(cluster, TRIALS, AGAIN) == dict.fromkeys(range(2), 2 * COUNT)


def ranges(lines: list[Line]) -> Ranges:
    """The queues that have messages."""
    return {
        (line["topic"], line["queueId"]): (line["min"], line["max"])
        for line in lines
        if line["kind"] == "queue" and line["max"]
    }


def stored_offsets(lines: list[Line], topic: str) -> dict[int, list[int]]:
    """Queue -> the offsets of its messages, in order."""
    found: dict[int, list[int]] = {}
    for line in lines:
        if line["kind"] == "unit" and line["topic"] == topic:
            found.setdefault(line["queueId"], []).append(line["offset"])
    return found


@pytest.mark.parametrize("replica", range(REPLICAS))
def test_rocketmq_reads_every_message_of_each_replica_and_leaves_it_to_us(
    rocketmq: RocketMQ, sized: StoreConfig, stopped: Stopped, replica: int
) -> None:
    root = stopped.roots[replica]
    theirs = rocketmq.resized(segment=FILE_BYTES).read(root)
    assert theirs[0]["ok"]
    assert not theirs[0]["crashed"]
    ours = read_copy(root, sized)
    assert_same(ours, theirs, deleted=(GONE, AGAIN))

    shown = ranges(theirs)
    for (topic, queue), (low, high) in stopped.ranges.items():
        # Of a topic that was made again it has the old messages, too.
        low = 0 if topic == AGAIN else low
        assert shown[topic, queue] == (low, high)
        assert stored_offsets(theirs, topic)[queue] == [*range(low, high)]
    assert stored_offsets(theirs, GONE) == {queue: [*range(COUNT)] for queue in range(2)}
    assert stored_offsets(ours, GONE) == {}
    assert stored_offsets(ours, AGAIN) == {queue: [*range(COUNT, 2 * COUNT)] for queue in range(2)}
    new = {key: line for key, line in table(theirs, "unit").items() if key[1] == AGAIN}
    new = {key: line for key, line in new.items() if line["offset"] >= COUNT}
    own = {key: line for key, line in table(ours, "unit").items() if key[1] == AGAIN}
    assert differences(own, new) == []

    (found,) = rocketmq.config(root)
    assert {TOPIC, ASIDE, AGAIN} <= found["topics"].keys()
    assert GONE not in found["topics"]
    for (group, topic), committed in stopped.offsets.items():
        wanted = {str(queue): offset for queue, offset in committed.items()}
        assert found["offsets"][f"{topic}@{group}"] == wanted
    assert not any(name.startswith(f"{GONE}@") for name in found["offsets"])

    # It opens the directory itself and stops in order.
    assert rocketmq.resized(segment=FILE_BYTES).write(root, []) == []
    assert verify(root) == []
    assert differences(table(ours, *KINDS), table(read_copy(root, sized), *KINDS)) == []
