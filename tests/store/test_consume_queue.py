from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymq.store.base import format as fmt
from raymq.store.base.errors import Bug, Corrupt
from raymq.store.base.files import Files
from raymq.store.config.store_config import StoreConfig
from raymq.store.log.segments.segment_paths import file_name
from raymq.store.queues.consume_queue import BLANK_SIZE, MISSING_CODE, ConsumeQueue
from raymq.store.queues.consume_queues import ConsumeQueues
from tests.support.consume_queue_units import check_units

UNITS = 10
FILE_SIZE = UNITS * fmt.QUEUE_UNIT_BYTES
SIZE = 100

Opener = Callable[..., ConsumeQueue]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opener]:
    """Opens the queue of this test, again and again; the last state is checked at the end."""
    queues: list[ConsumeQueue] = []

    def open_queue(*, after_crash: bool = False, writable: bool = True) -> ConsumeQueue:
        queue = ConsumeQueue(tmp_path / "t" / "0", FILE_SIZE, files=Files(), writable=writable)
        queue.load()
        queue.recover(after_crash=after_crash)
        queues.append(queue)
        return queue

    yield open_queue
    check_units(queues[-1])
    for queue in queues:
        queue.close()


def put(queue: ConsumeQueue, first: int, count: int, *, shift: int = 0) -> None:
    """Units [first, first + count); the record of queue offset n stands at n * SIZE + shift."""
    rows = np.arange(first, first + count, dtype=np.int64)
    queue.append(first, fmt.pack_queue_units(rows * SIZE + shift, SIZE, rows % 3 - 1))


def offsets(queue: ConsumeQueue) -> list[int]:
    """Queue offsets by the records that the readable units point at, -1 for blanks."""
    units = queue.read(queue.min_offset, queue.max_offset - queue.min_offset)
    return [-1 if size == BLANK_SIZE else position // SIZE for position, size, _ in units.tolist()]


def file_units(queue: ConsumeQueue, start: int) -> list[tuple[int, int, int]]:
    data = (queue.directory / file_name(start * fmt.QUEUE_UNIT_BYTES)).read_bytes()
    return np.frombuffer(data, fmt.QUEUE_UNIT_DTYPE).tolist()


def poke(queue: ConsumeQueue, offset: int, data: bytes) -> None:
    """Overwrite a unit on disk."""
    at = offset * fmt.QUEUE_UNIT_BYTES
    path = queue.directory / file_name(at - at % FILE_SIZE)
    content = bytearray(path.read_bytes())
    content[at % FILE_SIZE : at % FILE_SIZE + len(data)] = data
    path.write_bytes(content)


def test_a_queue_without_messages_has_no_files(opened, tmp_path):
    queue = opened()
    assert (queue.min_offset, queue.max_offset, queue.max_physical_offset) == (0, 0, -1)
    queue.sync()
    queue.truncate(0)
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("after_crash", [False, True])
def test_units_are_read_back_after_reopening_over_several_files(opened, after_crash):
    put(opened(), 0, 37)
    queue = opened(after_crash=after_crash)
    assert (queue.min_offset, queue.max_offset) == (0, 37)
    assert queue.max_physical_offset == 37 * SIZE
    assert offsets(queue) == list(range(37))
    assert queue.read(5, 2)["tags_code"].tolist() == [1, -1]


def test_a_read_is_cut_at_the_end(opened):
    queue = opened()
    put(queue, 0, 12)
    assert len(queue.read(11, 50)) == 1
    assert len(queue.read(12, 50)) == 0


def test_units_are_rocketmqs_bytes(opened):
    queue = opened()
    queue.append(0, fmt.QUEUE_UNIT.pack(0, 245, 2598919))
    data = (queue.directory / file_name(0)).read_bytes()
    assert data[:20].hex() == "0000000000000000000000f5000000000027a807"
    assert data[20:] == bytes(FILE_SIZE - 20)


def test_a_queue_that_begins_later_is_blank_up_to_its_first_unit(opened):
    queue = opened()
    put(queue, 13, 2)
    assert file_units(queue, 10)[:4] == [(0, BLANK_SIZE, 0)] * 3 + [(1300, SIZE, 0)]
    for again in (queue, opened(), opened(after_crash=True)):
        assert (again.min_offset, again.max_offset) == (13, 15)
        assert again.max_physical_offset == 1500


def test_dispatching_again_changes_nothing(opened):
    queue = opened()
    put(queue, 0, 12)
    before = queue.read(0, 12).tobytes()
    put(queue, 0, 12, shift=0)
    put(queue, 3, 4)
    assert (queue.max_offset, queue.read(0, 12).tobytes()) == (12, before)


def test_only_the_new_part_of_a_batch_is_written(opened):
    queue = opened()
    put(queue, 0, 8)
    put(queue, 5, 20)
    assert offsets(queue) == list(range(25))


def test_offsets_below_the_end_are_left_out_even_with_later_positions(opened):
    queue = opened()
    put(queue, 0, 8)
    put(queue, 6, 4, shift=10_000)
    assert queue.read(0, 10)["position"].tolist() == [n * 100 for n in range(8)] + [10_800, 10_900]


def test_the_units_of_a_gap_have_no_message_and_point_at_the_next_one_for_rocketmq(opened):
    queue = opened()
    put(queue, 0, 8)
    put(queue, 12, 3)
    for again in (queue, opened(), opened(after_crash=True)):
        assert offsets(again) == [*range(8), -1, -1, -1, -1, 12, 13, 14]
        assert again.max_offset == 15
    units = [*file_units(queue, 0)[8:], *file_units(queue, 10)[:3]]
    assert [unit[:2] for unit in units] == [(1200, SIZE)] * 5
    # RocketMQ takes such codes for addresses in a file that it does not have, and then looks at no tag.
    assert {code for _, _, code in units[:4]} == {MISSING_CODE}
    assert MISSING_CODE < -(1 << 31)


def test_a_queue_whose_messages_before_a_gap_are_deleted_begins_after_the_gap(opened):
    queue = opened()
    put(queue, 0, 8)
    put(queue, 12, 3)
    queue.correct_min_offset(12 * SIZE)
    assert (queue.min_offset, queue.max_offset) == (12, 15)


@pytest.mark.parametrize("after", [b"\1" * 20, fmt.QUEUE_UNIT.pack(900, SIZE, 3), b"\xff" * 20])
@pytest.mark.parametrize("how", ["recover", "resume"])
def test_bytes_after_the_last_unit_are_erased_when_the_queue_is_opened(tmp_path, after, how):
    queue = ConsumeQueue(tmp_path / "0", FILE_SIZE, files=Files())
    put(queue, 0, 8)
    poke(queue, 8, after)
    queue.close()
    queue.load()
    if how == "resume":
        queue.resume(8, 8 * SIZE)
    else:
        queue.recover(after_crash=False)
    if how == "resume" or after == b"\xff" * 20:
        assert file_units(queue, 0)[8:] == [(0, 0, 0)] * 2
        assert queue.max_offset == 8
    queue.close()


@pytest.mark.parametrize("count", [3, UNITS, UNITS + 3])
def test_a_queue_that_a_cut_empties_has_no_file_for_rocketmq_to_read(opened, count):
    queue = opened()
    put(queue, 0, count)
    queue.truncate(10)
    assert list(queue.directory.iterdir()) == []
    put(queue, 0, 2)
    assert offsets(opened()) == [0, 1]


def test_blanks_whose_unit_was_not_written_are_dropped_at_recovery(opened):
    queue = opened()
    put(queue, 0, 8)
    put(queue, 12, 1)
    poke(queue, 12, bytes(20))
    again = opened()
    assert (again.max_offset, again.max_physical_offset) == (8, 800)
    put(again, 12, 1)
    assert offsets(again) == [*range(8), -1, -1, -1, -1, 12]


def test_a_gap_of_a_file_is_corrupt_and_writes_nothing(opened):
    queue = opened()
    put(queue, 0, 1)
    with pytest.raises(Corrupt) as caught:
        put(queue, 1 + UNITS, 1)
    assert caught.value.found == 1 + UNITS
    assert queue.max_offset == 1


def test_a_part_of_a_unit_is_our_bug(opened):
    with pytest.raises(Bug):
        opened().append(0, bytes(fmt.QUEUE_UNIT_BYTES + 1))


@pytest.mark.parametrize("keep", [0, 1, 9, 10, 11, 20, 24, 25])
def test_truncation_drops_units_of_records_that_end_above_and_zeroes_them(opened, keep):
    queue = opened()
    put(queue, 0, 25)
    queue.truncate(keep * SIZE + SIZE // 2)
    for again in (queue, opened()):
        assert offsets(again) == list(range(keep))
        assert again.max_physical_offset == (keep * SIZE if keep else -1)
    last = keep - keep % UNITS if keep < 25 else 20
    if (queue.directory / file_name(last * fmt.QUEUE_UNIT_BYTES)).exists():
        assert all(unit == (0, 0, 0) for unit in file_units(queue, last)[keep - last :])
    put(queue, keep, 30)
    assert offsets(opened()) == list(range(keep + 30))


def test_a_queue_truncated_to_nothing_keeps_its_next_offset(opened):
    put(opened(), 13, 5)
    queue = opened()
    queue.truncate(0)
    for again in (queue, opened()):
        assert (again.min_offset, again.max_offset, again.max_physical_offset) == (13, 13, -1)


def test_after_a_crash_units_after_a_hole_are_erased(opened):
    queue = opened()
    put(queue, 0, 35)
    poke(queue, 12, bytes(20))
    again = opened(after_crash=True)
    assert (again.max_offset, again.max_physical_offset) == (12, 1200)
    assert file_units(again, 10)[2:] == [(0, 0, 0)] * 8
    put(again, 12, 1)
    assert offsets(opened()) == list(range(13))


def test_a_reader_that_may_not_write_erases_nothing(opened):
    queue = opened()
    put(queue, 0, 35)
    poke(queue, 12, bytes(20))
    before = [path.read_bytes() for path in sorted(queue.directory.iterdir())]
    assert opened(after_crash=True, writable=False).max_offset == 12
    assert [path.read_bytes() for path in sorted(queue.directory.iterdir())] == before


@pytest.mark.parametrize(
    ("min_physical", "expected"), [(0, 3), (301, 4), (2000, 20), (2450, 25), (2500, 25)]
)
def test_the_min_offset_is_that_of_the_first_record_left(opened, min_physical, expected):
    queue = opened()
    put(queue, 3, 22)
    queue.correct_min_offset(min_physical)
    assert (queue.min_offset, queue.max_offset) == (expected, 25)


def test_only_what_was_written_is_synced(tmp_path):
    synced: list[int] = []

    class Recorded(Files):
        def sync_data(self, fd: int) -> None:
            synced.append(fd)
            super().sync_data(fd)

    queue = ConsumeQueue(tmp_path / "0", FILE_SIZE, files=Recorded())
    put(queue, 0, 5)
    queue.sync()
    assert len(synced) == 1
    queue.sync()
    assert len(synced) == 1
    put(queue, 5, 10)
    queue.sync()
    assert len(synced) == 3
    queue.close()


def test_a_wrong_file_length_is_corrupt(opened):
    queue = opened()
    put(queue, 0, 5)
    path = queue.directory / file_name(0)
    broken = ConsumeQueue(queue.directory, FILE_SIZE + 20, files=Files())
    with pytest.raises(Corrupt) as caught:
        broken.load()
    assert str(path) in caught.value.message


@given(st.lists(st.tuples(st.sampled_from(["put", "again", "cut", "open"]), st.integers(0, 25))))
def test_a_queue_is_a_list_of_units_whatever_is_done(tmp_path_factory, steps):
    directory = tmp_path_factory.mktemp("queue") / "0"
    model: list[int] = []
    queue = ConsumeQueue(directory, FILE_SIZE, files=Files())
    for step, number in steps:
        if step == "put":
            put(queue, len(model), number)
            model.extend(range(len(model), len(model) + number))
        elif step == "again":
            first = max(0, len(model) - number)
            put(queue, first, len(model) - first)
        elif step == "cut":
            queue.truncate(number * SIZE)
            del model[number:]
        else:
            queue.sync()
            queue.close()
            queue = ConsumeQueue(directory, FILE_SIZE, files=Files())
            queue.load()
            queue.recover(after_crash=bool(number % 2))
        assert offsets(queue) == model
        assert queue.max_offset == len(model)
        check_units(queue)
    queue.close()


@pytest.mark.parametrize(
    ("topic", "queue_id"), [("../../x", 0), ("a/b", 0), ("..", 0), ("", 0), ("a\0", 0), ("t", -1)]
)
def test_no_record_names_a_directory_elsewhere(tmp_path: Path, topic: str, queue_id: int) -> None:
    queues = ConsumeQueues(tmp_path, StoreConfig(), files=Files())
    with pytest.raises(Corrupt, match="not a directory of a store"):
        queues.get(topic, queue_id)
    assert queues.keys() == []


def test_units_appended_while_a_sync_chooses_its_files_are_left_for_the_next_sync(
    opened, monkeypatch
):
    queue = opened()
    put(queue, 0, UNITS)
    synced: list[int] = []
    files = queue._queue
    choose = files.overlapping

    def choose_then_append(start: int, stop: int):
        chosen = choose(start, stop)
        synced.extend(file.start // FILE_SIZE for file in chosen)
        if queue.max_offset == UNITS:
            # As the dispatching thread does at this moment: into the next file.
            put(queue, UNITS, 1)
        return chosen

    monkeypatch.setattr(files, "overlapping", choose_then_append)
    queue.sync()
    assert queue.dirty
    queue.sync()
    assert synced == [0, 1]
    assert not queue.dirty
