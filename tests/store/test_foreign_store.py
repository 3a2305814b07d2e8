"""A store that RocketMQ wrote and partly deleted continues where RocketMQ would continue."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from raymq.store.base.errors import Corrupt
from raymq.store.base.files import Files
from raymq.store.config.store_config import StoreConfig
from raymq.store.engine.message_store import MessageStore
from raymq.store.index.index_file import HEADER
from raymq.store.log.control_files.marks import read_marks
from raymq.store.records import record
from raymq.store.tools.inspect import check
from tests.support.batches import request
from tests.support.clock import ManualClock
from tests.support.confirming import confirm, confirm_with_index
from tests.support.golden import unpack_golden

CONFIG = StoreConfig(segment_size_bytes=65_536, max_hash_slot_num=100, max_index_num=400)


def reopen(root: Path) -> MessageStore:
    return MessageStore.open(root, config=CONFIG, clock=ManualClock(1_800_000_000_000))


def log_files(root: Path) -> list[Path]:
    return sorted((root / "commitlog").iterdir())


def log_end(root: Path) -> tuple[Path, int]:
    """The last file, and the end of the records in it."""
    last = log_files(root)[-1]
    return last, record.walk(memoryview(last.read_bytes()), int(last.name)).end - int(last.name)


def first_record(root: Path) -> bytes:
    data = log_files(root)[0].read_bytes()
    return data[: int(record.walk(memoryview(data), 0, limit=1).sizes[0])]


def moved(data: bytes, position: int) -> bytes:
    """A record with another physical offset."""
    return data[:28] + position.to_bytes(8, "big") + data[36:]


#: old bytes after the end `at` of the file that begins at `base`
LEFTOVERS: dict[str, Callable[[bytes, int, int], tuple[int, bytes]]] = {
    "a record of another place": lambda old, base, at: (at, old),
    "the middle of a record": lambda old, base, at: (at, old[100:]),
    "a record of another place after a hole": lambda old, base, at: (at + 200, old),
    "the middle of a record, then a record of this place": lambda old, base, at: (
        at,
        old[100:] + moved(old, base + at + len(old) - 100),
    ),
}


@pytest.mark.parametrize(
    ("leftover", "ended"),
    [
        *((leftover, "in order") for leftover in LEFTOVERS),
        # After a crash the last kind is refused: see below.
        *((leftover, "by a crash") for leftover in list(LEFTOVERS)[:-1]),
    ],
)
def test_old_bytes_after_the_end_of_a_foreign_log_are_made_zero(tmp_path, leftover, ended):
    root = unpack_golden(tmp_path)
    if ended == "by a crash":
        (root / "abort").touch()
    file, at = log_end(root)
    position, data = LEFTOVERS[leftover](first_record(root), int(file.name), at)
    with file.open("r+b") as writer:
        writer.seek(position)
        writer.write(data)
    assert not check(root).faults
    store = reopen(root)
    assert store.log.end == int(file.name) + at
    assert not any(file.read_bytes()[at:])
    assert store.log.synced == store.log.end
    assert store.index.indexed <= store.log.end
    confirm_with_index(store)
    store.close()
    marks = read_marks(root / "raymq" / "marks", files=Files())
    assert max(marks) == store.log.end
    report = check(root)
    assert (report.verdict.row, report.faults) == ("E", [])
    for index in (root / "index").iterdir():
        assert HEADER.unpack(index.read_bytes()[: HEADER.size])[3] < store.log.end


def test_index_entries_beyond_the_end_of_a_crashed_foreign_log_are_cut(tmp_path):
    root = unpack_golden(tmp_path)
    (root / "abort").touch()
    (index,) = (root / "index").iterdir()
    header = HEADER.unpack(index.read_bytes()[: HEADER.size])
    with (root / "checkpoint").open("r+b") as writer:
        # RocketMQ says that all of the index was on the disk.
        writer.seek(16)
        writer.write((header[1] + 1).to_bytes(8, "big"))
    file, at = log_end(root)
    with file.open("r+b") as writer:
        writer.write(bytes(at))
    assert header[3] >= int(file.name)
    store = reopen(root)
    assert store.log.end == int(file.name)
    assert store.index.indexed <= store.log.end
    confirm_with_index(store)
    store.close()
    assert check(root).faults == []


def test_a_crashed_foreign_log_with_a_record_after_damage_is_not_cut(tmp_path):
    root = unpack_golden(tmp_path)
    (root / "abort").touch()
    file, at = log_end(root)
    old = first_record(root)
    data = old[100:] + moved(old, int(file.name) + at + len(old) - 100)
    with file.open("r+b") as writer:
        writer.seek(at)
        writer.write(data)
    before = file.read_bytes()
    with pytest.raises(Corrupt, match="row I"):
        reopen(root)
    assert file.read_bytes() == before


def test_damage_below_what_a_foreign_consume_queue_knows_is_not_cut(tmp_path):
    root = unpack_golden(tmp_path)
    file = log_files(root)[-2]
    with file.open("r+b") as writer:
        writer.seek(4)
        writer.write(bytes(4))
    before = file.read_bytes()
    with pytest.raises(Corrupt, match="row I"):
        reopen(root)
    assert file.read_bytes() == before


def test_a_queue_whose_messages_were_all_deleted_keeps_its_numbers(tmp_path):
    root = unpack_golden(tmp_path)
    # Both messages of this queue stood in the first file.
    (root / "commitlog" / f"{0:020d}").unlink()
    store = reopen(root)
    assert store.queue_range("TopicTest", 0) == (2, 2)
    store.create_topic("TopicTest", 4, [0])
    appended = store.put(request([b"third"], topic="TopicTest", queue=0))
    assert appended.first_offset == 2
    confirm(store)
    part = store.fetch("TopicTest", 0, 2, max_bytes=1 << 20, max_records=10)
    assert (part.next_offset, len(part.records)) == (3, 1)
    store.close()
