"""Equal files that are one sequence of bytes load, grow, are cut and survive crashes."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from raymq.store.base.errors import Corrupt, StorageFull, StoreDamaged, Unavailable, Unreadable
from raymq.store.base.files import Files
from raymq.store.base.rules import READABLE_RULE
from raymq.store.log.flush import FlushFailed
from raymq.store.log.segments import mapped_file_queue
from raymq.store.log.segments.log_files import read_each
from raymq.store.log.segments.mapped_file import MappedFile
from raymq.store.log.segments.mapped_file_queue import (
    PREWRITE_PAUSE_MS,
    FileAllocator,
    MappedFileQueue,
)
from tests.support.bad_sectors import SECTOR, BadSectors
from tests.support.clock import ManualClock
from tests.support.simulated_disk import SimulatedDisk

SIZE = 8192


@pytest.fixture
def queue(tmp_path):
    made = MappedFileQueue(tmp_path / "q", SIZE, files=Files())
    yield made
    made.close()


def reopened(queue):
    queue.close()
    queue.load()
    return queue


def fill(queue, count):
    for index in range(count):
        queue.create_next().pwrite(bytes([index + 1]) * SIZE, 0)


def test_files_are_named_by_their_first_offset_and_follow_each_other(queue):
    fill(queue, 3)
    names = [f"{start:020d}" for start in (0, SIZE, 2 * SIZE)]
    assert [file.path.name for file in queue.files] == names
    assert sorted(os.listdir(queue.directory)) == names
    assert [file.start for file in reopened(queue).files] == [0, SIZE, 2 * SIZE]
    assert queue.find(SIZE).read_view()[:2] == b"\2\2"


def test_a_queue_may_begin_anywhere_at_a_multiple_of_its_file_size(queue):
    assert queue.min_offset == 0
    assert queue.files == []
    queue.create_next(5 * SIZE + 17)
    assert queue.min_offset == 5 * SIZE
    assert queue.create_next().start == 6 * SIZE
    assert queue.files[-1].start == 6 * SIZE
    assert reopened(queue).min_offset == 5 * SIZE


@pytest.mark.parametrize(
    ("offset", "start"),
    [(5 * SIZE - 1, None), (5 * SIZE, 5 * SIZE), (6 * SIZE - 1, 5 * SIZE), (7 * SIZE, None)],
)
def test_an_offset_is_found_in_its_file_and_nowhere_else(queue, offset, start):
    assert queue.find(offset) is None
    queue.create_next(5 * SIZE)
    queue.create_next()
    found = queue.find(offset)
    assert (found and found.start) == start


def test_a_new_file_has_its_full_length_in_zeros(queue):
    file = queue.create_next()
    assert file.path.stat().st_size == SIZE
    assert file.path.stat().st_blocks * 512 >= SIZE
    assert bytes(file.read_view()) == bytes(SIZE)


@pytest.mark.parametrize("found", [0, 1, 4096])
def test_a_short_last_file_of_zeros_is_an_unfinished_creation_and_is_deleted(queue, found):
    fill(queue, 2)
    os.truncate(queue.files[1].path, 0)
    os.truncate(queue.files[1].path, found)
    assert [file.start for file in reopened(queue).files] == [0]
    assert os.listdir(queue.directory) == ["0" * 20]


@pytest.mark.parametrize(("index", "found"), [(0, 0), (0, 4096), (1, 4096), (1, 3 * SIZE)])
def test_any_other_wrong_length_is_damage_and_names_the_file(queue, index, found):
    fill(queue, 2)
    path = queue.files[index].path
    os.truncate(path, found)
    with pytest.raises(Corrupt) as caught:
        reopened(queue)
    assert (caught.value.rule, caught.value.path) == ("file length", str(path))
    assert (caught.value.expected, caught.value.found) == (SIZE, found)
    assert path.stat().st_size == found
    assert queue.files == []


def test_a_reader_leaves_an_unfinished_file_out_and_never_deletes_it(queue):
    fill(queue, 2)
    os.truncate(queue.files[1].path, 0)
    reader = MappedFileQueue(queue.directory, SIZE, files=Files(), writable=False)
    reader.load()
    assert len(reader.files) == 1
    assert len(os.listdir(queue.directory)) == 2


@pytest.mark.parametrize("name", ["holiday.jpg", "0000", "0" * 19 + "x", "0" * 20 + ".tmp"])
def test_a_foreign_name_is_damage_and_names_the_file(queue, name):
    fill(queue, 1)
    (queue.directory / name).write_bytes(b"")
    with pytest.raises(Corrupt, match="20-digit offset") as caught:
        reopened(queue)
    assert caught.value.path == str(queue.directory / name)


def test_a_missing_file_in_the_middle_is_damage(queue):
    fill(queue, 3)
    queue.files[1].destroy()
    with pytest.raises(StoreDamaged) as caught:
        reopened(queue)
    assert (caught.value.expected, caught.value.found) == (SIZE, 2 * SIZE)


def test_a_name_between_the_multiples_is_damage(queue):
    queue.create_next()
    os.rename(queue.files[0].path, queue.directory / f"{100:020d}")
    with pytest.raises(StoreDamaged, match="multiples"):
        reopened(queue)


@pytest.mark.parametrize("offset", [0, 1, 100, SIZE - 1, SIZE, SIZE + 1, 2 * SIZE, 3 * SIZE])
def test_after_a_cut_there_are_only_zeros_and_no_files(queue, offset):
    fill(queue, 3)
    before = b"".join(bytes(file.read_view()) for file in queue.files)
    queue.truncate_to(offset)
    after = b"".join(bytes(file.read_view()) for file in reopened(queue).files)
    assert after[:offset] == before[:offset]
    assert not any(after[offset:])
    assert len(after) == max(SIZE, -(-offset // SIZE) * SIZE)


def test_a_cut_below_the_oldest_file_leaves_it_empty(queue):
    queue.create_next(4 * SIZE).pwrite(b"x" * SIZE, 0)
    queue.truncate_to(0)
    assert [file.start for file in queue.files] == [4 * SIZE]
    assert not any(queue.files[0].read_view())


def test_a_cut_writes_only_where_something_stood(tmp_path):
    disk = SimulatedDisk()
    disk.make_dirs("/q")
    size = 8 << 20
    queue = MappedFileQueue(tmp_path / "q", size, files=disk)
    queue.create_next().pwrite(b"torn", 3 << 20)
    disk.calls.clear()
    queue.truncate_to(100)
    assert disk.calls["pwrite"] == 1
    assert not any(queue.files[0].read_view())


def test_a_reader_keeps_its_bytes_when_the_file_is_deleted(queue):
    fill(queue, 2)
    file = queue.files[1]
    piece = file.read_view()[10:20]
    queue.truncate_to(SIZE)
    assert piece == b"\2" * 10
    assert not file.path.exists()
    with pytest.raises(Unavailable, match="deleted meanwhile"):
        file.read_view()
    file.sync()
    file.close()


def test_only_the_files_of_a_range_are_synced(tmp_path):
    synced = []

    class Recorder(SimulatedDisk):
        def sync_data(self, fd):
            synced.append(fd)
            super().sync_data(fd)

    queue = MappedFileQueue(tmp_path / "q", SIZE, files=Recorder())
    for _ in range(4):
        queue.create_next()
    fds = [file._fd for file in queue.files]
    for start, stop, want in [
        (0, 1, fds[:1]),
        (SIZE - 1, SIZE + 1, fds[:2]),
        (SIZE, 2 * SIZE, fds[1:2]),
        (0, 4 * SIZE, fds),
        (SIZE, SIZE, []),
    ]:
        synced.clear()
        queue.sync_range(start, stop)
        assert synced == want, (start, stop)


def test_a_full_disk_leaves_no_half_file_and_the_next_try_works():
    disk = SimulatedDisk()
    disk.make_dirs("/s")
    queue = MappedFileQueue(Path("/s/q"), SIZE, files=disk)
    queue.create_next()
    disk.fail("allocate", error=errno.ENOSPC)
    with pytest.raises(StorageFull):
        queue.create_next()
    assert disk.list("/s/q") == ["0" * 20]
    assert queue.create_next().start == SIZE


def test_after_every_crash_of_growing_and_cutting_the_queue_loads():
    disk = SimulatedDisk()
    disk.make_dirs("/s")
    queue = MappedFileQueue(Path("/s/q"), SIZE, files=disk)
    fill(queue, 3)
    queue.sync_range(0, 3 * SIZE)
    disk.note(3 * SIZE)
    queue.truncate_to(100)
    disk.note(100)
    fill(queue, 1)
    count = 0
    for state in (*disk.crash_states(limit_per_point=32), *disk.kill_states()):
        count += 1
        again = MappedFileQueue(Path("/s/q"), SIZE, files=state)
        again.load()
        content = b"".join(bytes(file.read_view()) for file in again.files)
        if state.notes:
            assert content[:100] == b"\1" * 100
        if len(state.notes) == 2:
            assert not any(content[100:SIZE])
    assert count > 100


# --- files that are prepared ahead ----------------------------------------------------------------


@pytest.fixture
def file(tmp_path):
    made = MappedFile.create(tmp_path / ("0" * 20), 0, SIZE, files=Files())
    yield made
    made.close()


def test_prewriting_never_touches_what_was_written(file):
    file.pwrite(b"a" * 100, 0)
    assert file.prewritten == 100
    file.prewrite(5000)
    assert file.prewritten == 5000
    file.prewrite(200)
    file.prewrite(10 * SIZE)
    assert file.prewritten == SIZE
    assert bytes(file.read_view()) == b"a" * 100 + bytes(SIZE - 100)


def test_a_writer_beyond_the_window_is_not_zeroed_by_a_prewrite_under_way(tmp_path):
    writing, prewriting = threading.Event(), threading.Event()

    class Slow(Files):
        def zero(self, fd, start, stop):
            prewriting.set()
            assert not writing.wait(0.05), "the writer must wait for the claim"
            super().zero(fd, start, stop)

    file = MappedFile.create(tmp_path / "f", 0, SIZE, files=Slow())
    thread = threading.Thread(target=file.prewrite, args=(4096,))
    thread.start()
    assert prewriting.wait(10)
    file.pwrite(b"w" * 10, 0)
    writing.set()
    thread.join()
    assert file.read_view()[:10] == b"w" * 10
    file.close()


def test_prewriting_a_deleted_file_does_nothing_even_when_its_name_is_used_again(file, tmp_path):
    file.destroy()
    (tmp_path / ("0" * 20)).write_bytes(b"n" * SIZE)
    file.prewrite(SIZE)
    assert (tmp_path / ("0" * 20)).read_bytes() == b"n" * SIZE


def test_a_failed_sync_of_a_prewrite_is_left_for_the_witness_to_hear():
    disk = SimulatedDisk()
    disk.make_dirs("/s")
    used = []

    class Recorder:
        def __getattr__(self, name):
            if name == "sync_data":
                return lambda fd: used.append(fd)
            return getattr(disk, name)

    file = MappedFile.create(Path("/s/f"), 0, SIZE, files=Recorder())
    file.prewrite(4096)
    file.sync()
    assert used[0] != file._fd
    assert used[1] == file._fd


def test_a_failed_sync_of_a_prewrite_ends_the_worker_and_is_reported():
    disk = SimulatedDisk()
    disk.make_dirs("/s")
    queue = MappedFileQueue(Path("/s"), SIZE, files=disk)
    queue.create_next()
    reported = []
    allocator = FileAllocator(
        queue, lambda: 0, clock=ManualClock(), window_bytes=4096, on_sync_failed=reported.append
    )
    disk.fail("pwrite", error=errno.ENOSPC)
    assert not allocator.step()
    assert allocator.last_error is not None
    assert reported == [], "a full disk only stops the work"
    disk.fail("sync_data")
    assert not allocator.step()
    assert len(reported) == 1
    assert "fdatasync" in reported[0]
    syncs = disk.calls["sync_data"]
    assert not allocator.step()
    assert disk.calls["sync_data"] == syncs, "no second sync"
    with pytest.raises(FlushFailed):
        allocator.next_file(0)


def prepare(allocator: FileAllocator) -> int:
    """Let the worker work until there is nothing to do, the tail standing still. Returns: what is ready."""
    allocator.step()
    while allocator.step():
        pass
    return allocator.ready


def test_the_window_ahead_of_the_tail_is_written_and_the_next_file_made(queue):
    tail = 0
    allocator = FileAllocator(queue, lambda: tail, clock=ManualClock(), window_bytes=4096)
    assert not allocator.step()
    queue.create_next()
    assert prepare(allocator) == 4096
    assert (queue.files[0].prewritten, len(queue.files)) == (4096, 1)
    while tail < 5000:
        tail += 1000
        assert prepare(allocator) == 4096
    assert (queue.files[0].prewritten, len(queue.files)) == (SIZE, 2)
    assert queue.files[1].prewritten == 5000 + 4096 - SIZE
    while tail + 1000 < 2 * SIZE - 4096:
        tail += 1000
        prepare(allocator)
    assert queue.files[1].prewritten == tail + 4096 - SIZE
    assert len(queue.files) == 2


def test_the_window_doubles_when_half_of_it_was_used_up(queue):
    tail = 0
    queue.create_next()
    allocator = FileAllocator(queue, lambda: tail, clock=ManualClock(), window_bytes=2048)
    assert prepare(allocator) == 2048
    tail = 1000
    assert prepare(allocator) == 2048
    tail = 2100
    assert prepare(allocator) == 4096


def test_zeros_wait_while_the_tail_moves_and_half_of_the_window_is_left(queue):
    tail = 0
    queue.create_next()
    allocator = FileAllocator(queue, lambda: tail, clock=ManualClock(), window_bytes=4096)
    prepare(allocator)
    tail = 1000
    assert not allocator.step()
    assert allocator.ready == 3096
    assert allocator.step()
    assert allocator.ready == 4096


def test_zeros_pause_while_the_log_grows_fast(queue, monkeypatch):
    monkeypatch.setattr(mapped_file_queue, "PREWRITE_GROWTH_BYTES", 64)
    clock, tail, growth = ManualClock(), 0, 0
    prewrite = MappedFile.prewrite

    def prewrite_beside_appends(file: MappedFile, position: int) -> None:
        nonlocal tail
        prewrite(file, position)
        tail += growth

    monkeypatch.setattr(MappedFile, "prewrite", prewrite_beside_appends)
    queue.create_next()
    allocator = FileAllocator(queue, lambda: tail, clock=clock, window_bytes=512)
    prepare(allocator)

    def use_up() -> None:
        nonlocal tail
        tail += allocator.ready - 100

    growth = 64
    for _ in range(2):
        use_up()
        assert allocator.step(), "the log grew slowly"

    growth = 65
    use_up()
    assert allocator.step()
    growth = 0
    use_up()
    ready = allocator.ready
    assert not allocator.step(), "the log grew fast"
    clock.advance(PREWRITE_PAUSE_MS - 1)
    assert not allocator.step(), "the pause is not over"
    assert allocator.ready == ready
    clock.advance(1)
    assert prepare(allocator) > ready


def test_warm_files_are_written_ahead_of_a_log_that_grows_fast(queue, monkeypatch):
    monkeypatch.setattr(mapped_file_queue, "PREWRITE_GROWTH_BYTES", -1)
    queue.create_next()
    allocator = FileAllocator(queue, lambda: 0, clock=ManualClock(), window_bytes=1024, warm=True)
    assert prepare(allocator) == 2 * SIZE


def test_the_worker_waits_no_longer_than_the_pause(queue, monkeypatch):
    monkeypatch.setattr(mapped_file_queue, "PREWRITE_GROWTH_BYTES", -1)
    queue.create_next()
    allocator = FileAllocator(queue, lambda: 0, clock=ManualClock(), window_bytes=1024)
    waits = []
    monkeypatch.setattr(allocator._wake, "wait", waits.append)
    allocator.run(lambda: bool(waits))
    assert waits == [PREWRITE_PAUSE_MS / 1000]


def test_the_next_file_is_made_while_zeros_pause(queue, monkeypatch):
    monkeypatch.setattr(mapped_file_queue, "PREWRITE_GROWTH_BYTES", -1)
    tail = 0
    queue.create_next()
    allocator = FileAllocator(queue, lambda: tail, clock=ManualClock(), window_bytes=2048)
    assert allocator.step()
    tail = SIZE - 1
    assert allocator.step()
    assert len(queue.files) == 2
    assert not allocator.step()
    assert queue.files[1].prewritten == 0


def test_a_disk_that_fills_or_fails_stops_the_preparation_and_nothing_else():
    disk = SimulatedDisk()
    disk.make_dirs("/s")
    queue = MappedFileQueue(Path("/s/q"), SIZE, files=disk)
    queue.create_next()
    allocator = FileAllocator(queue, lambda: SIZE - 1, clock=ManualClock(), window_bytes=SIZE)
    allocator.step()
    disk.fail("allocate", error=errno.ENOSPC)
    assert not allocator.step()
    assert isinstance(allocator.last_error, StorageFull)
    disk.fail("sync", error=errno.EIO)
    assert not allocator.step()
    assert isinstance(allocator.last_error, OSError)
    assert allocator.step()
    assert allocator.last_error is None
    assert len(queue.files) == 2


def test_a_woken_worker_looks_whether_to_stop(queue):
    allocator = FileAllocator(queue, lambda: 0, clock=ManualClock(), window_bytes=1)
    stopping = threading.Event()
    worker = threading.Thread(target=allocator.run, args=(stopping.is_set,))
    worker.start()
    stopping.set()
    allocator.wake()
    worker.join(60)
    assert not worker.is_alive()


# --- many places ----------------------------------------------------------------------------------


def test_many_places_are_read_each_up_to_the_end_of_its_file(queue):
    fill(queue, 3)
    places = [2 * SIZE + 5, 2 * SIZE, SIZE - 3, 0, SIZE]
    at_the_end = b"\1" * 3 + bytes(5)
    found = read_each(queue, places, 8, 3 * SIZE)
    assert found == b"\3" * 16 + at_the_end + b"\1" * 8 + b"\2" * 8
    assert read_each(queue, [], 8, 3 * SIZE) == b""


def test_of_places_whose_file_was_deleted_there_are_zeros(queue):
    fill(queue, 3)
    queue.delete_first()
    assert read_each(queue, [SIZE, 7, 2 * SIZE], 2, 3 * SIZE) == b"\2\2\0\0\3\3"
    with pytest.raises(Corrupt, match="no commit log file holds"):
        read_each(queue, [3 * SIZE], 2, 3 * SIZE)
    assert all(file.retire()() for file in queue.files)


def test_a_bad_sector_among_many_places_is_corrupt_at_its_offset(tmp_path):
    files = BadSectors()
    queue = MappedFileQueue(tmp_path / "q", 2 * SECTOR, files=files)
    for _ in range(2):
        queue.create_next()
    files.lose(queue.files[1].path, SECTOR)
    good = 2 * SECTOR
    assert read_each(queue, [good, 0], 8, 4 * SECTOR) == bytes(16)
    for places in ([good, good + SECTOR], [good + SECTOR, 0], [good + SECTOR - 4]):
        with pytest.raises(Unreadable) as caught:
            read_each(queue, places, 8, 4 * SECTOR)
        assert (caught.value.offset, caught.value.rule) == (good + SECTOR, READABLE_RULE)
    queue.close()
