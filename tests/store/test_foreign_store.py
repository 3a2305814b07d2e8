"""A store that RocketMQ wrote and partly deleted continues where RocketMQ would continue."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from raymq.store.base import format as fmt
from raymq.store.base.errors import Corrupt, StoreDamaged
from raymq.store.base.files import Files
from raymq.store.config.store_config import StoreConfig
from raymq.store.engine.message_store import MessageStore
from raymq.store.index.index_file import HEADER
from raymq.store.log.control_files.marks import read_marks
from raymq.store.records import record
from raymq.store.tools.inspect import check
from raymq.store.tools.repair import Repair
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
    with pytest.raises(StoreDamaged, match="row I"):
        reopen(root)
    assert file.read_bytes() == before


def test_damage_below_what_a_foreign_consume_queue_knows_is_not_cut(tmp_path):
    root = unpack_golden(tmp_path)
    file = log_files(root)[-2]
    with file.open("r+b") as writer:
        writer.seek(4)
        writer.write(bytes(4))
    before = file.read_bytes()
    with pytest.raises(StoreDamaged, match="row I"):
        reopen(root)
    assert file.read_bytes() == before


def test_a_queue_whose_messages_were_all_deleted_keeps_its_numbers(tmp_path):
    root = unpack_golden(tmp_path)
    # Both messages of this queue stood in the first file.
    (root / "commitlog" / f"{0:020d}").unlink()
    store = reopen(root)
    assert store.queue_range("TopicTest", 0) == (2, 2)
    store.topics.create("TopicTest", 4, [0])
    appended = store.put(request([b"third"], topic="TopicTest", queue=0))
    assert appended.first_offset == 2
    confirm(store)
    part = store.fetch("TopicTest", 0, 2, max_bytes=1 << 20, max_records=10)
    assert (part.next_offset, len(part.records)) == (3, 1)
    store.close()


#: offsets of fields in a record, whose CRC covers neither
QUEUE_ID_AT, QUEUE_OFFSET_AT = 12, 20
#: the record of message 30 of queue 0 of RollT, and the messages of that queue
DAMAGED, MESSAGE, MESSAGES = 101_011, 30, 60
ENDS = ["in order", "by a crash"]


def end_by(root: Path, ended: str) -> None:
    if ended == "by a crash":
        (root / "abort").touch()


def roll_queue(root: Path) -> Path:
    return root / "consumequeue" / "RollT" / "0" / f"{0:020d}"


def flip(root: Path, position: int, mask: int) -> None:
    """Flip bits of one byte of the log."""
    path = root / "commitlog" / f"{position - position % 65_536:020d}"
    data = bytearray(path.read_bytes())
    data[position % 65_536] ^= mask
    path.write_bytes(data)


def drop_units(root: Path, first: int, count: int) -> None:
    """Units that a crash of the machine took."""
    data = bytearray(roll_queue(root).read_bytes())
    data[20 * first : 20 * (first + count)] = bytes(20 * count)
    roll_queue(root).write_bytes(data)


def served(store: MessageStore) -> list[int | str]:
    """What a reader of queue 0 of RollT gets at each offset: the offset, or the rule of the error."""
    low, high = store.queue_range("RollT", 0)
    found: list[int | str] = []
    while low < high:
        try:
            part = store.fetch("RollT", 0, low, max_bytes=1 << 20, max_records=10)
        except Corrupt as error:
            place = (error.topic, error.queue_id, error.offset)
            found.append(error.rule if place == ("RollT", 0, low) else str(error))
            low += 1
            continue
        found += range(low, part.next_offset)
        low = part.next_offset
    return found


@pytest.mark.parametrize("ended", ENDS)
@pytest.mark.parametrize(
    ("byte", "mask"),
    [
        (QUEUE_ID_AT + 3, 1),
        (QUEUE_ID_AT + 2, 16),
        (QUEUE_ID_AT, 128),
        (QUEUE_OFFSET_AT + 7, 1),
        (QUEUE_OFFSET_AT + 6, 1),
        (QUEUE_OFFSET_AT + 1, 1),
        (QUEUE_OFFSET_AT, 64),
        (QUEUE_OFFSET_AT, 128),
    ],
)
def test_a_sound_unit_of_rocketmq_outlives_a_flipped_bit_in_the_place_of_its_record(
    tmp_path, ended, byte, mask
):
    root = unpack_golden(tmp_path)
    end_by(root, ended)
    flip(root, DAMAGED + byte, mask)
    units = roll_queue(root).read_bytes()
    queues = sorted((root / "consumequeue").rglob("0*"))
    (fault,) = check(root).faults
    assert (fault.file, fault.offset, fault.rule) == (
        f"commitlog/{65_536:020d}",
        DAMAGED,
        "a record names the queue and offset of its unit",
    )
    for _ in range(2):
        store = reopen(root)
        confirm_with_index(store)
        assert served(store) == list(range(MESSAGES))
        assert store.state.next_offsets["RollT", 0] == MESSAGES
        store.close()
        assert roll_queue(root).read_bytes() == units
        assert not (set((root / "consumequeue" / "RollT").rglob("0*")) - set(queues))
        assert [found.offset for found in check(root).faults] == [DAMAGED]
    assert Repair(root).run().steps == ()
    Repair(root, rebuild=("consumequeue",)).run()
    assert roll_queue(root).read_bytes() == units


@pytest.mark.parametrize("mask", [1, 2, 64])
def test_a_queue_offset_that_only_its_own_record_contradicts_is_mended_after_a_crash(
    tmp_path, mask
):
    root = unpack_golden(tmp_path)
    end_by(root, "by a crash")
    units = roll_queue(root).read_bytes()
    flip(root, DAMAGED + QUEUE_OFFSET_AT + 7, mask)
    drop_units(root, 20, 40)
    (fault,) = check(root).faults
    assert (fault.offset, fault.rule) == (
        DAMAGED,
        "a record names the queue and offset of its unit",
    )
    store = reopen(root)
    confirm_with_index(store)
    assert served(store) == list(range(MESSAGES))
    store.close()
    assert roll_queue(root).read_bytes() == units


def test_a_message_without_unit_whose_record_names_another_queue_is_a_gap_that_readers_see(
    tmp_path,
):
    root = unpack_golden(tmp_path)
    end_by(root, "by a crash")
    flip(root, DAMAGED + QUEUE_ID_AT + 2, 16)
    drop_units(root, 20, 40)
    store = reopen(root)
    confirm_with_index(store)
    gap = "each queue offset has a message"
    assert served(store) == [*range(MESSAGE), gap, *range(MESSAGE + 1, MESSAGES)]
    assert store.queue_range("RollT", 4096) == (MESSAGE, MESSAGE + 1)
    found = store.get_message("RollT", 0, MESSAGE - 2, 32)
    assert (len(found.records), found.next_begin_offset) == (2, MESSAGE)
    with pytest.raises(Corrupt) as missing:
        store.get_message("RollT", 0, MESSAGE, 32)
    assert (missing.value.queue_id, missing.value.offset) == (0, MESSAGE)
    store.close()
    # RocketMQ leaves out the rest of a log file after a unit that points at nothing. It gets the next message twice.
    units = list(fmt.QUEUE_UNIT.iter_unpack(roll_queue(root).read_bytes()[: 20 * MESSAGES]))
    assert units[MESSAGE][:2] == units[MESSAGE + 1][:2]
    assert [(found.rule, found.offset) for found in check(root).faults] == [(gap, 20 * MESSAGE)]


@pytest.mark.parametrize("ended", ENDS)
@pytest.mark.parametrize("byte", [0, 5, 8, 10])
def test_a_damaged_unit_of_rocketmq_is_made_again_and_the_others_stay(tmp_path, ended, byte):
    root = unpack_golden(tmp_path)
    end_by(root, ended)
    units = roll_queue(root).read_bytes()
    data = bytearray(units)
    data[20 * MESSAGE + byte] ^= 0x80
    roll_queue(root).write_bytes(data)
    store = reopen(root)
    confirm_with_index(store)
    assert served(store) == list(range(MESSAGES))
    store.close()
    assert roll_queue(root).read_bytes() == units
    assert check(root).faults == []


@pytest.mark.parametrize("ended", ENDS)
@pytest.mark.parametrize("garbage", ["a unit", "an old unit", "no unit"])
def test_bytes_after_the_last_unit_of_rocketmqs_queue_are_no_message(tmp_path, ended, garbage):
    root = unpack_golden(tmp_path)
    end_by(root, ended)
    units = roll_queue(root).read_bytes()
    after = {
        "a unit": fmt.QUEUE_UNIT.pack(5_000, 300, 7),
        "an old unit": units[20:40],
        "no unit": b"\xff" * 20,
    }[garbage]
    data = bytearray(units)
    data[20 * MESSAGES : 20 * (MESSAGES + 1)] = after
    roll_queue(root).write_bytes(data)
    store = reopen(root)
    confirm_with_index(store)
    assert served(store) == list(range(MESSAGES))
    assert store.state.next_offsets["RollT", 0] == MESSAGES
    store.close()
    assert roll_queue(root).read_bytes() == units


@pytest.mark.parametrize("ended", ENDS)
@pytest.mark.parametrize(("record_at", "message"), [(DAMAGED, MESSAGE), (196_608, 59)])
def test_a_flipped_bit_in_the_physical_offset_of_a_record_is_no_end_of_the_log(
    tmp_path, ended, record_at, message
):
    root = unpack_golden(tmp_path)
    end_by(root, ended)
    flip(root, record_at + 33, 8)
    assert check(root).verdict.decision == "keep"
    for _ in range(2):
        store = reopen(root)
        confirm_with_index(store)
        assert served(store) == list(range(MESSAGES))
        store.close()
    assert check(root).verdict.decision == "keep"
