"""Deleted files that become new ones, and files that are kept in memory."""

from __future__ import annotations

import errno
import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest

from raymq.store.base.failpoints import FailPointReached, failpoint
from raymq.store.base.files import Files
from raymq.store.config.store_config import StoreConfig
from raymq.store.engine.message_store import MessageStore
from raymq.store.tools.inspect import verify
from tests.support.batches import request
from tests.support.clock import ManualClock
from tests.support.confirming import confirm
from tests.support.simulated_disk import SimulatedDisk

ROOT = Path("/s")
SIZE = 16 * 1024
CONFIG = StoreConfig(
    segment_size_bytes=SIZE,
    consume_queue_file_size_bytes=400,
    max_message_bytes=2000,
    prewrite_window_bytes=4096,
    file_reserved_hours=0,
    delete_when=";".join(f"{hour:02d}" for hour in range(24)),
    recycle_commit_log_files=True,
)


def open_store(files: Files, config: StoreConfig = CONFIG, root: Path = ROOT) -> MessageStore:
    store = MessageStore.open(root, config=config, files=files, clock=ManualClock())
    store.topics.create("t", 1, [0])
    return store


def fill(store: MessageStore, files: int) -> None:
    until_end = store.log.end + files * SIZE
    while store.log.end < until_end:
        store.put(request([b"x" * 900]))
    confirm(store)


def prepare(store: MessageStore) -> None:
    """Let the worker do all that it finds to do."""
    allocator = store.log.allocator
    allocator.step()
    while allocator.step():
        pass


def spares(files: Files, root: Path = ROOT) -> list[int]:
    return [int(name) // SIZE for name in files.list(root / "raymq" / "spare")]


def numbers(disk: SimulatedDisk) -> set[int]:
    """The numbers of the files in the log: a recycled one keeps its own."""
    return set(disk._names["/s/commitlog"].values())


def test_a_deleted_file_becomes_the_next_one_once_its_reader_is_gone() -> None:
    disk = SimulatedDisk(record=False)
    store = open_store(disk)
    fill(store, 1)
    part = store.log.segments.files[0].read_view()[:2000]
    kept = bytes(part)
    old = numbers(disk)
    assert store.clean_service.run_once() == 1
    assert spares(disk) == [0]
    prepare(store)
    fill(store, 1)
    # Its reader still holds it: the new file is another one.
    assert len(numbers(disk) & old) == 1
    assert bytes(part) == kept
    part.release()
    del part
    prepare(store)
    while spares(disk):
        fill(store, 1)
    assert len(numbers(disk) & old) == 2
    end = store.log.end
    store.abandon()
    assert verify(ROOT, disk) == []
    again = open_store(disk)
    assert again.log.end == end
    again.close()


def test_a_recycled_file_has_no_bytes_of_its_former_use() -> None:
    disk = SimulatedDisk(record=False)
    store = open_store(disk)
    fill(store, 1)
    store.clean_service.run_once()
    prepare(store)
    seen = disk._names["/s/raymq/spare"]["0" * 20]
    assert disk._nodes[seen].data == bytes(SIZE)
    store.log.segments.create_next()
    assert disk._names["/s/commitlog"][f"{store.log.segments.files[-1].start:020d}"] == seen
    assert bytes(store.log.segments.files[-1].read_view()) == bytes(SIZE)
    store.abandon()


def test_more_than_two_are_just_deleted_and_a_start_deletes_all() -> None:
    disk = SimulatedDisk(record=False)
    store = open_store(disk)
    fill(store, 5)
    assert store.clean_service.run_once() == 5
    assert spares(disk) == [0, 1]
    store.abandon()
    store = open_store(disk, replace(CONFIG, recycle_commit_log_files=False))
    assert spares(disk) == []
    assert store.log.segments.spares is None
    store.close()


def test_a_file_on_another_disk_is_deleted() -> None:
    disk = SimulatedDisk(record=False)
    store = open_store(disk, replace(CONFIG, commit_log_paths=("/other/log",)))
    fill(store, 2)
    assert store.clean_service.run_once() == 2
    assert spares(disk) == []
    assert store.log.start == 2 * SIZE
    store.close()


def test_a_spare_that_cannot_be_zeroed_is_none() -> None:
    disk = SimulatedDisk(record=False)
    store = open_store(disk)
    fill(store, 1)
    store.clean_service.run_once()
    prepare(store)
    disk.fail("sync_data")
    spare = store.log.segments.spares
    assert spare is not None
    spare._spares[0].zeroed = 0
    assert not store.log.allocator.step()
    assert spares(disk) == []
    fill(store, 2)
    store.close()


@pytest.mark.parametrize(
    "point", ["files.moved_to_spares", "files.spare_zeroed", "clean.after_segments"]
)
def test_a_kill_on_the_way_to_a_spare_loses_nothing(point: str) -> None:
    disk = SimulatedDisk(record=False)
    store = open_store(disk)
    fill(store, 3)
    high = store.queue_range("t", 0)[1]
    try:
        with failpoint(point, "raise"):
            store.clean_service.run_once()
            prepare(store)
    except FailPointReached:
        pass
    store.abandon()
    store = open_store(disk)
    assert verify(ROOT, disk) == []
    fill(store, 1)
    assert store.queue_range("t", 0)[1] > high
    assert spares(disk) == []
    store.close()


def test_every_power_loss_while_a_file_is_recycled_leaves_a_whole_log() -> None:
    disk = SimulatedDisk(record=True)
    store = open_store(disk)
    fill(store, 2)
    disk.note("begin")
    store.clean_service.run_once()
    prepare(store)
    fill(store, 3)
    disk.note("end")
    seen = 0
    for image in disk.crash_states(limit_per_point=3):
        seen += "begin" in image.notes
        if "begin" not in image.notes or seen % 5:
            continue
        again = open_store(image)
        assert verify(ROOT, image) == []
        fill(again, 1)
        low, high = again.queue_range("t", 0)
        assert high - low > 10
        again.abandon()
    assert seen > 100


# --- warm files -----------------------------------------------------------------------------------


class Locking(Files):
    """Remembers the locked pages, and refuses when `refused` is set."""

    def __init__(self, error: OSError | None = None) -> None:
        super().__init__()
        self.locked: list[int] = []
        self.unlocked: list[int] = []
        self.error = error

    def lock_memory(self, view: memoryview) -> None:
        if self.error is not None:
            raise self.error
        self.locked.append(id(view))

    def unlock_memory(self, view: memoryview) -> None:
        self.unlocked.append(id(view))


WARM = replace(CONFIG, warm_mapped_file=True, recycle_commit_log_files=False)


def test_warm_files_are_written_ahead_whole_and_locked_until_they_are_full(tmp_path: Path) -> None:
    files = Locking()
    store = open_store(files, WARM, tmp_path)
    prepare(store)
    queue = store.log.segments
    assert [file.prewritten for file in queue.files] == [SIZE, SIZE]
    assert files.locked == [id(file.read_view()) for file in queue.files]
    first = id(queue.files[0].read_view())
    fill(store, 1)
    prepare(store)
    assert [file.prewritten for file in queue.files] == [SIZE, SIZE, SIZE]
    assert files.unlocked == [first]
    assert len(files.locked) == len(set(files.locked)) == 3
    store.close()


def test_where_locking_is_not_permitted_a_warning_is_logged_and_puts_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(Locking(OSError(errno.ENOMEM, "Cannot allocate memory")), WARM, tmp_path)
    with caplog.at_level(logging.WARNING, "raymq.store"):
        prepare(store)
    assert len(caplog.records) == 2
    assert "not locked in memory: [Errno 12]" in caplog.text
    fill(store, 1)
    store.close()


def test_a_real_lock_is_held_or_refused_with_its_reason(tmp_path: Path) -> None:
    files = Files()
    fd = files.open_file(tmp_path / "f", create=True)
    files.allocate(fd, 1 << 20)
    view = files.map_read(fd, 1 << 20)

    def locked_kb() -> int:
        lines = files.read_file("/proc/self/status").decode().splitlines()
        return int(next(line for line in lines if line.startswith("VmLck")).split()[1])

    before = locked_kb()
    refused = 0
    try:
        files.lock_memory(view)
    except OSError as error:
        refused = error.errno or 0
    assert refused in (0, errno.EPERM, errno.ENOMEM, errno.EAGAIN)
    assert locked_kb() == before + (0 if refused else 1024)
    files.unlock_memory(view)
    assert locked_kb() == before
    assert view[:4] == bytes(4)
    files.unmap(view)
    os.close(fd)
