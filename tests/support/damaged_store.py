"""Small stores, made once and copied, to be damaged by hand."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from raymq.store.config.store_config import StoreConfig
from raymq.store.embedded.embedded_store import EmbeddedStore
from raymq.store.records import record
from tests.support.batches import request

from .golden import unpack_golden

SEGMENT = 64 * 1024
CONFIG = StoreConfig(segment_size_bytes=SEGMENT, consume_queue_file_size_bytes=2000)
FIRST_LOG = "commitlog/00000000000000000000"


def make_own(root: Path) -> Path:
    """A store of ours that ended in order: two topics, three queues, 360 messages, several log files."""
    store = EmbeddedStore(root, config=CONFIG)
    store.create_topic("t", 2)
    store.create_topic("u", 1)
    for batch in range(12):
        bodies = [b"%03d-%02d " % (batch, i) * 30 for i in range(10)]
        for topic, queue in (("t", 0), ("t", 1), ("u", 0)):
            store.put(request(bodies, topic=topic, queue=queue, tag="TagA"))
    store.fetch("t", 0, 0)
    store.close()
    return root


def make_golden(root: Path) -> Path:
    """The store that RocketMQ wrote, with `config/topics.json` and its backup beside it."""
    root.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(unpack_golden(root.parent / "unpacked"), root)
    return root


def copy(root: Path, target: Path) -> Path:
    """A copy to damage."""
    shutil.copytree(root, target)
    return target


def patch(path: Path, offset: int, data: bytes) -> None:
    """Overwrite bytes in the middle of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def flip(path: Path, offset: int) -> None:
    """Change one byte."""
    patch(path, offset, bytes([path.read_bytes()[offset] ^ 0x55]))


def tree(root: Path) -> dict[str, bytes]:
    """Every file and its content."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def bodies(root: Path, topic: str, queue_id: int) -> list[bytes]:
    """Open a store of ours for work and read a queue."""
    store = EmbeddedStore(root, config=CONFIG)
    try:
        found: list[bytes] = []
        offset = store.store.queue_range(topic, queue_id)[0]
        while True:
            part = store.fetch(topic, queue_id, offset)
            if part.records is None or not len(part.records):
                return found
            for raw in part.records.to_pylist():
                row = record.decode(raw, np.array([0]), np.array([len(raw)]))
                found.append(row.column("body")[0].as_py())
            offset = part.next_offset
    finally:
        store.close()
