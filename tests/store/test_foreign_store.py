"""A store that RocketMQ wrote and partly deleted goes on where RocketMQ would go on."""

from __future__ import annotations

import tarfile
from pathlib import Path

from raymq.store.config import StoreConfig
from raymq.store.message_store import MessageStore
from tests.support.batches import request
from tests.support.clock import ManualClock
from tests.support.confirming import confirm

GOLDEN = Path(__file__).parent.parent / "golden" / "rocketmq-5.3.3-clean.tar.xz"
CONFIG = StoreConfig(segment_size_bytes=65_536, max_hash_slot_num=100, max_index_num=400)


def test_a_queue_whose_messages_were_all_deleted_keeps_its_numbers(tmp_path):
    with tarfile.open(GOLDEN) as archive:
        archive.extractall(tmp_path, filter="data")
    root = tmp_path / "golden"
    # Both messages of this queue stood in the first file.
    (root / "commitlog" / f"{0:020d}").unlink()
    store = MessageStore.open(root, config=CONFIG, clock=ManualClock(1_800_000_000_000))
    assert store.queue_range("TopicTest", 0) == (2, 2)
    store.create_topic("TopicTest", 4, [0])
    appended = store.put(request([b"third"], topic="TopicTest", queue=0))
    assert appended.first_offset == 2
    confirm(store)
    part = store.fetch("TopicTest", 0, 2, max_bytes=1 << 20, max_records=10)
    assert (part.next_offset, len(part.records)) == (3, 1)
    store.close()
