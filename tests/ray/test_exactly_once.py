"""Many messages, read, worked on and sent as one on three replicas, while programs and leaders are killed.

Results and messages are compared as columns. RAYMQ_ONCE_MESSAGES and RAYMQ_ONCE_KILLS make a longer run of it: a
million messages and 50 kills take some minutes.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tests.support.lean_ray import LEAN_WITH_CLIENT
from tests.support.replicated_shard import (
    QUEUES,
    TOPIC,
    ReplicatedShard,
    kill_leader,
    pause,
    started_shard,
    wait_for_leader,
)
from tests.support.tier import rounds
from tests.support.waiting import DEADLINE_S, until

pytestmark = [pytest.mark.faults, pytest.mark.thorough]

MESSAGES = rounds("RAYMQ_ONCE_MESSAGES", thorough=30_000, quick=30_000)
KILLS = rounds("RAYMQ_ONCE_KILLS", thorough=4, quick=4)
PROGRAMS = 3
#: messages of one transaction at most, and of one put
BATCH, PUT = 500, 5_000
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def shard() -> Iterator[ReplicatedShard]:
    with started_shard(3, "once", LEAN_WITH_CLIENT) as world:
        yield world


class Programs:
    """Processes that commit results with their progress (`tests.support.transaction_worker`)."""

    def __init__(self, words: list[str], place: Path) -> None:
        self._words = words
        self._place = place
        self._count = 0
        self._running: list[subprocess.Popen[bytes]] = []
        for _ in range(PROGRAMS):
            self._start()

    def _start(self) -> None:
        self._count += 1
        place = self._place / str(self._count)
        words = [sys.executable, "-m", "tests.support.transaction_worker", *self._words]
        self._running.append(subprocess.Popen([*words, str(place), str(BATCH)], cwd=ROOT))

    def kill_one(self) -> None:
        """Kill one, and start another."""
        victim = self._running.pop(random.randrange(len(self._running)))
        victim.kill()
        victim.wait()
        self._start()

    def end(self) -> None:
        """Kill all."""
        for each in self._running:
            each.kill()
            each.wait()


def ends(shard: ReplicatedShard, topic: str) -> dict[int, int]:
    """queue -> the offset of its end."""
    queues = shard.cluster.describe_topic(topic)["queues"]
    return {int(each["queue_id"]): int(each["max_offset"]) for each in queues}


def put(shard: ReplicatedShard) -> None:
    """Put the messages of both runs."""
    with shard.cluster.producer(acks="quorum") as producer:
        for number in range(-(-MESSAGES // PUT)):
            rows = min(PUT, MESSAGES - number * PUT)
            table = pa.table({"body": pa.array([b"x" * 100] * rows, pa.binary())})
            for future in producer.send_batch(TOPIC, table, queue_id=number % QUEUES):
                future.result(DEADLINE_S)


def progress(shard: ReplicatedShard, group: str) -> dict[int, int]:
    """queue -> the group's offset."""
    found = shard.cluster.call(0, "offsets", {"group": group, "topic": TOPIC})
    return {int(queue): int(offset) for queue, offset in found.items()}


def results(shard: ReplicatedShard, topic: str) -> dict[int, np.ndarray]:
    """queue -> the offsets of the messages whose results the topic has, ascending."""
    count, columns = sum(ends(shard, topic).values()), []
    with shard.cluster.consumer(topic, start="earliest") as consumer:
        while count:
            batch = consumer.poll_batch(50_000, DEADLINE_S)
            assert batch.num_rows, "the results cannot be read"
            columns.append(batch.column("body"))
            count -= batch.num_rows
    bodies = pa.chunked_array(columns, pa.binary()).cast(pa.string())
    pairs = pa.compute.split_pattern(bodies, " ").combine_chunks()
    numbers = pairs.flatten().cast(pa.int64()).to_numpy().reshape(-1, 2)
    return {
        int(queue): np.sort(numbers[numbers[:, 0] == queue, 1])
        for queue in np.unique(numbers[:, 0])
    }


@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("kind", ["workers", "members"])
def test_each_message_has_one_result_whatever_is_killed(
    shard: ReplicatedShard, tmp_path: Path, kind: str
) -> None:
    out, group = f"out-{kind}", f"g-{kind}"
    shard.cluster.create_topic(out, queues=2)
    if not sum(ends(shard, TOPIC).values()):
        put(shard)
    wanted = ends(shard, TOPIC)
    programs = Programs([kind, str(shard.paths.data_dir), TOPIC, out, group], tmp_path)
    try:
        for kill in range(KILLS):
            least = sum(wanted.values()) * (kill + 1) // (KILLS + 2)
            until(lambda: sum(progress(shard, group).values()) >= least, pause)  # noqa: B023
            if kill % 2:
                kill_leader(shard)
                wait_for_leader(shard)
            else:
                programs.kill_one()
        until(lambda: progress(shard, group) == wanted, pause)
    finally:
        programs.end()

    found = results(shard, out)
    assert found.keys() == wanted.keys()
    for queue, end in wanted.items():
        assert np.array_equal(found[queue], np.arange(end)), f"queue {queue}: lost or doubled"
    print(f"{kind}: {sum(wanted.values()):,} messages, {KILLS} kills, one result each")
