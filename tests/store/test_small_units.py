"""Small batches that come together are one append unit, and each is answered as if it had come alone."""

from __future__ import annotations

import errno
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raymq.store.base.errors import Bug, Fenced, RayMQError, Rejected
from raymq.store.base.files import Files
from raymq.store.config.store_config import StoreConfig
from raymq.store.embedded.embedded_store import EmbeddedStore
from raymq.store.log.chain import CHAIN_UNIT_BYTES
from raymq.store.records import record
from raymq.store.records.requests import AppendedRows, PutRequest
from raymq.store.records.small_batch import SMALL_ROWS_MAX
from tests.support.batches import request
from tests.support.clock import ManualClock

SMALL = StoreConfig(segment_size_bytes=32 * 1024, consume_queue_file_size_bytes=2000)
QUEUES = 3


class Disk(Files):
    """Refuses one write of records."""

    refuse = False

    def pwrite(self, fd: int, data: Any, position: int) -> None:
        if self.refuse and len(data) > CHAIN_UNIT_BYTES:
            self.refuse = False
            raise OSError(errno.EIO, "the disk does not answer")
        super().pwrite(fd, data, position)


def open_store(root: Path, files: Files | None = None) -> EmbeddedStore:
    store = EmbeddedStore(root, config=SMALL, clock=ManualClock(), files=files)
    if not store.store.state.topics:
        store.create_topic("t", QUEUES)
    return store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[EmbeddedStore]:
    opened = open_store(tmp_path / "store")
    yield opened
    opened.close()


def append(store: EmbeddedStore, *puts: PutRequest) -> list[AppendedRows | RayMQError | OSError]:
    path = store.store.put_path
    return path.append_many([path.check(put) for put in puts])


def begun(store: EmbeddedStore, *producers: int) -> None:
    """Store the first row of each producer in each queue."""
    for producer_id in producers:
        for queue in range(QUEUES):
            store.append(request([b"first"], queue=queue, producer_id=producer_id))


def row(
    queue: int, producer_id: int | None, sequence: int, *, epoch: int = 0, rows: int = 1
) -> PutRequest:
    bodies = [b"%d/%d" % (queue, sequence + number) for number in range(rows)]
    return request(bodies, queue=queue, producer_id=producer_id, sequence=sequence, epoch=epoch)


def units(store: EmbeddedStore) -> int:
    chain = store.store.log.chain
    return len(chain.units(0, store.store.log.end))


def bodies(store: EmbeddedStore, queue: int) -> list[bytes]:
    store.store.log.sync()
    found: list[bytes] = []
    while True:
        part = store.fetch("t", queue, len(found), max_bytes=1 << 24)
        if part.records is None or not len(part.records):
            return found
        records = part.records.to_pylist()
        sizes = np.array([*map(len, records)])
        columns = record.decode(b"".join(records), np.cumsum(sizes) - sizes, sizes)
        found += columns.column("body").to_pylist()


def test_batches_of_several_queues_and_producers_are_one_unit(store: EmbeddedStore) -> None:
    begun(store, 7, 8)
    before, end = units(store), store.store.log.end
    answers = append(store, row(0, 7, 1), row(1, 7, 1, rows=3), row(0, 8, 1), row(2, None, 0))
    assert units(store) == before + 1
    assert [(a.first_offset, a.last_offset, a.count) for a in answers] == [
        (2, 2, 1),
        (2, 4, 3),
        (3, 3, 1),
        (2, 2, 1),
    ]
    starts = [answer.physical_offset for answer in answers]
    ends = [answer.end_offset for answer in answers]
    assert starts == [end, *ends[:-1]]
    assert ends[-1] == store.store.log.end


def test_each_batch_is_refused_for_itself(store: EmbeddedStore) -> None:
    begun(store, 7, 8)
    store.append(row(0, 8, 1, epoch=1))
    gap, fenced, again, good = append(
        store, row(0, 7, 5), row(1, 8, 1, epoch=0), row(1, 7, 0), row(2, 7, 1)
    )
    assert isinstance(gap, Rejected)
    assert isinstance(fenced, Fenced)
    assert isinstance(again, AppendedRows)
    assert (again.duplicates, again.first_offset) == (1, 0)
    assert isinstance(good, AppendedRows)
    assert bodies(store, 2)[-1] == b"2/1"


def test_batches_of_one_sequence_keep_their_order(store: EmbeddedStore) -> None:
    begun(store, 7)
    first, gap, again, second = append(
        store, row(0, 7, 1), row(0, 7, 3), row(0, 7, 1, rows=2), row(0, 7, 3)
    )
    assert isinstance(gap, Rejected)
    assert [first.first_offset, again.first_offset, second.first_offset] == [1, 1, 3]
    assert (again.duplicates, again.count, again.last_offset) == (1, 2, 2)
    assert bodies(store, 0)[1:] == [b"0/1", b"0/2", b"0/3"]


def test_an_epoch_fences_the_batches_after_it(store: EmbeddedStore) -> None:
    begun(store, 7)
    new, old = append(store, row(0, 7, 1, epoch=1), row(1, 7, 1, epoch=0))
    assert isinstance(new, AppendedRows)
    assert isinstance(old, Fenced)


def test_an_unexpected_error_of_one_batch_leaves_the_others(
    store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(store, 7)
    admit = store.store.state.admit

    def faulty(
        producer_id: int, epoch: int, topic: str, queue_id: int, *rest: int, **options: bool
    ) -> Any:
        if queue_id == 1:
            raise ValueError("a bug")
        return admit(producer_id, epoch, topic, queue_id, *rest, **options)

    monkeypatch.setattr(store.store.state, "admit", faulty)
    first, faulted, last = append(store, row(0, 7, 1), row(1, 7, 1), row(2, 7, 1))
    assert isinstance(faulted, Bug)
    assert [first.first_offset, last.first_offset] == [1, 1]
    assert bodies(store, 2)[-1] == b"2/1"


def test_a_unit_that_cannot_be_written_fails_its_batches_and_no_others(tmp_path: Path) -> None:
    files = Disk()
    store = open_store(tmp_path / "store", files)
    begun(store, 7)
    files.refuse = True
    failed = append(store, row(0, 7, 1), row(1, 7, 1))
    assert [type(error) for error in failed] == [OSError, OSError]
    stored = append(store, row(0, 7, 1), row(1, 7, 1))
    assert [(a.first_offset, a.duplicates) for a in stored] == [(1, 0), (1, 0)]
    store.close()


@pytest.mark.parametrize("seed", range(3))
def test_any_batches_are_answered_and_stored_as_one_by_one(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    together, alone = open_store(tmp_path / "together"), open_store(tmp_path / "alone")
    sent: dict[tuple[int, int], int] = {}
    for _ in range(30):
        group = [any_batch(dice, sent) for _ in range(dice.randint(1, 12))]
        # Checked together, as the puts of several streams are.
        answers = append(together, *group)
        expected = [append(alone, put)[0] for put in group]
        assert list(map(seen, answers)) == list(map(seen, expected))

    for queue in range(QUEUES):
        assert bodies(together, queue) == bodies(alone, queue)
    together.close()
    again = open_store(tmp_path / "together")
    for key, entry in alone.store.state.producers.recent.items():
        kept = again.store.state.producers.get(key)
        assert kept is not None
        assert kept.next_sequence == entry.next_sequence
    assert again.store.state.next_offsets["t", 0] == alone.store.state.next_offsets["t", 0]
    again.close()
    alone.close()


def any_batch(dice: random.Random, sent: dict[tuple[int, int], int]) -> PutRequest:
    """New rows, or some sent before, or a gap; small or large."""
    queue, producer_id = dice.randrange(QUEUES), dice.choice([None, 7, 8, 9])
    rows = dice.choice([1, 1, 2, 5, SMALL_ROWS_MAX, SMALL_ROWS_MAX + 1])
    if producer_id is None:
        return row(queue, None, 0, rows=rows)
    key = (queue, producer_id)
    at = sent.get(key, 0)
    first = at if dice.random() < 0.8 else max(0, at + dice.randint(-3, 2))
    if first <= at:
        sent[key] = max(at, first + rows)
    return row(queue, producer_id, first, rows=rows)


def seen(answer: AppendedRows | RayMQError | OSError) -> object:
    """The part of an answer that a producer sees."""
    if isinstance(answer, AppendedRows):
        return answer.first_offset, answer.last_offset, answer.count, answer.duplicates
    return type(answer), answer.args
