"""RocketMQ opens a store of ours that died: from the checkpoint on, with its topics and offsets, whatever its size."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import pytest

from raymq.store.config.store_config import StoreConfig
from raymq.store.engine.message_store import MessageStore
from raymq.store.services.checkpoint_service import PAUSE_MIN_MS
from tests.support import message_kinds as kinds
from tests.support.batches import request
from tests.support.clock import ManualClock
from tests.support.confirming import confirm_with_index
from tests.support.oracle import RocketMQ
from tests.support.put_kinds import put_all
from tests.support.store_facts import assert_same, differences, expected_keys, read_copy, table

#: RocketMQ goes back so far from the times of a checkpoint
BACK_MS = 3000
TOPICS, QUEUES = 3, 100


def run_checkpoint_service(store: MessageStore, clock: ManualClock) -> None:
    """As the slow thread of a shard does: what is known first, and written a few seconds later."""
    store.checkpoint_service.run_once()
    clock.advance(PAUSE_MIN_MS)
    store.checkpoint_service.run_once()


def test_rocketmq_recovers_a_crashed_store_of_ours_from_its_checkpoint_and_knows_its_topics(
    rocketmq: RocketMQ, config: StoreConfig, tmp_path: Path
) -> None:
    root = tmp_path / "store"
    clock = ManualClock(now_ms=int(time.time() * 1000) - 120_000)
    store = MessageStore.open(root, config=config, clock=clock)
    for number in range(50):
        body = bytes([number]) * 60_000
        put_all(store, [kinds.kind(body, queue=number % 4, properties={"KEYS": f"k{number}"})])
        clock.advance(1000)
    store.commit_offsets("g", kinds.TOPIC, {0: 3, 2: 1})
    confirm_with_index(store)
    run_checkpoint_service(store, clock)
    put_all(store, [kinds.kind(b"behind the checkpoint", properties={"KEYS": "late"})])
    confirm_with_index(store)
    put_all(store, [kinds.kind(b"in no consume queue", properties={"KEYS": "later"})])
    store.log.sync()
    store.abandon()
    times = struct.unpack_from(">2q", (root / "checkpoint").read_bytes())
    assert min(times) > 0
    theirs = rocketmq.read(root)
    assert (theirs[0]["ok"], theirs[0]["crashed"]) == (True, True)
    ours = read_copy(root, config)
    what = ("record", "queue", "unit", "time")
    assert differences(table(ours, *what), table(theirs, *what)) == []
    # It throws the index of a crashed store away and fills it from where its recovery begins: in the file of the
    # newest first record that the checkpoint proves, and not in the oldest one.
    stored = {line["phy"]: line["stored"] for line in theirs if line["kind"] == "record"}
    size = config.segment_size_bytes
    begin = max(at for at, ms in stored.items() if at % size == 0 and ms <= min(times) - BACK_MS)
    assert begin >= 2 * size
    assert table(theirs, "key") == expected_keys(
        {**line, "keys": line["keys"] if line["phy"] >= begin else ""}
        if line["kind"] == "record"
        else line
        for line in ours
    ) | {
        key: {**line, "found": []}
        for key, line in expected_keys(
            line for line in ours if line["kind"] == "record" and line["phy"] < begin
        ).items()
    }
    (found,) = rocketmq.config(root)
    assert (
        found["topics"][kinds.TOPIC]["readQueueNums"],
        found["topics"][kinds.TOPIC]["perm"],
    ) == (
        4,
        6,
    )
    assert found["offsets"] == {f"{kinds.TOPIC}@g": {"0": 3, "2": 1}}
    assert "g" in found["groups"]


@pytest.mark.parametrize("end", ["closed", "crashed"])
def test_rocketmq_opens_a_store_of_many_sparse_queues(
    rocketmq: RocketMQ, config: StoreConfig, tmp_path: Path, end: str
) -> None:
    root = tmp_path / "store"
    usual = StoreConfig(**{**vars(config), "consume_queue_file_size_bytes": 6_000_000})
    store = MessageStore.open(root, config=usual)
    for topic in range(TOPICS):
        store.topics.create(f"topic{topic}", QUEUES, [0])
        for queue in range(QUEUES):
            store.put(request([b"first", b"second"], topic=f"topic{topic}", queue=queue, tag="x"))
    confirm_with_index(store)
    if end == "closed":
        store.close()
    else:
        store.abandon()
    places = [path for path in (root / "consumequeue").rglob("*") if path.is_file()]
    assert sum(path.stat().st_blocks * 512 for path in places) <= 4096 * len(places)
    theirs = rocketmq.resized(queue=6_000_000).read(root)
    assert_same(read_copy(root, usual), theirs)
    assert sum(line["kind"] == "queue" for line in theirs) == TOPICS * QUEUES + 1
