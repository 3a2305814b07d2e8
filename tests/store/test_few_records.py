"""Few records are read without arrays: the answers must be those of the general way."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from raymq.store.base.errors import RayMQError
from raymq.store.config.store_config import StoreConfig
from raymq.store.engine.message_store import MessageStore
from raymq.store.queues import reader as reader_module
from tests.support.batches import request
from tests.support.confirming import confirm

#: files end in the middle of what is read
CONFIG = StoreConfig(segment_size_bytes=64 * 1024, consume_queue_file_size_bytes=600)
SIZES = [0, 1, 700, 9_000, 30]


def answer(store: MessageStore, queue: int, offset: int, **limits: int) -> object:
    """What a fetch returns or raises, comparable."""
    try:
        found = store.fetch("t", queue, offset, **limits)
    except RayMQError as error:
        return type(error), str(error)
    return found._replace(records=None if found.records is None else found.records.to_pylist())


def assert_the_same(store: MessageStore, monkeypatch: pytest.MonkeyPatch, queues: int) -> None:
    for queue in range(queues):
        low, high = store.queue_range("t", queue)
        limits = product(range(low, high + 1), (1, 2, 5, 64), (1, 1_000, 20_000))
        for offset, max_records, max_bytes in limits:
            few = answer(store, queue, offset, max_records=max_records, max_bytes=max_bytes)
            with monkeypatch.context() as patch:
                patch.setattr(reader_module, "FEW_RECORDS", 0)
                want = answer(store, queue, offset, max_records=max_records, max_bytes=max_bytes)
            assert few == want, (queue, offset, max_records, max_bytes)


@pytest.fixture
def store(tmp_path: Path) -> MessageStore:
    opened = MessageStore.open(tmp_path / "s", config=CONFIG)
    opened.topics.create("t", 2, [0])
    for number in range(60):
        bodies = [bytes(SIZES[(number + row) % len(SIZES)]) for row in range(number % 4 + 1)]
        opened.put(request(bodies, queue=1 if number % 5 == 0 else 0))
    confirm(opened)
    return opened


def test_few_records_are_read_as_many_are(
    store: MessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(store.log.segments.files) > 3
    queue = store.consume_queues.get("t", 0)
    found = [store.reader._few_neighbours(queue, offset, 2, 20_000) for offset in range(80)]
    # Both ways are taken.
    assert 0 < found.count(None) < len(found)
    assert_the_same(store, monkeypatch, 2)
    store.close()


def test_a_damaged_consume_queue_gives_the_same_answers(
    store: MessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = store.consume_queues.get("t", 0)._queue.files[0]
    unit = 20
    # A wrong position, a wrong size, no position, and units that point at nothing.
    for at, wrong in ((0, b"\x7f"), (8, b"\x40"), (0, b"\xff"), (8, b"\x7f\xff\xff\xff")):
        for row in (0, 3, 7):
            with file.path.open("r+b") as opened:
                opened.seek(row * unit + at)
                kept = opened.read(len(wrong))
                opened.seek(row * unit + at)
                opened.write(wrong)
                opened.flush()
                assert_the_same(store, monkeypatch, 1)
                opened.seek(row * unit + at)
                opened.write(kept)
    store.close()
