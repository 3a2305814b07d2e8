"""The next file of the log: which thread makes it, how long a put waits for it, and its directory."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from raymq.store.base.errors import Corrupt, StorageFull, Unavailable
from raymq.store.base.files import Files
from raymq.store.base.status import PutStatus
from raymq.store.config.store_config import StoreConfig
from raymq.store.embedded.embedded_store import EmbeddedStore
from raymq.store.engine.message_store import MessageStore
from raymq.store.log.segments.mapped_file_queue import FileAllocator
from raymq.store.log.segments.segment_paths import find_segment, list_segments
from raymq.store.put.put_errors import status_of
from raymq.store.tools.inspect import verify
from tests.support.batches import request
from tests.support.clock import ManualClock
from tests.support.confirming import confirm
from tests.support.simulated_disk import SimulatedDisk
from tests.support.waiting import until

SIZE = 64 * 1024
CONFIG = StoreConfig(
    clean_file_forcibly=True,
    segment_size_bytes=SIZE,
    consume_queue_file_size_bytes=2000,
    prewrite_window_bytes=4096,
    allocate_timeout_ms=20_000,
)


class Stalling(Files):
    """`allocate` fails with an error, or waits until it is let go on."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()
        self.go_on.set()
        self.error: OSError | StorageFull | None = None
        self.asked = threading.Event()
        self.tries = 0

    def allocate(self, fd: int, size: int) -> None:
        self.tries += 1
        self.asked.set()
        self.go_on.wait(20)
        if self.error is not None:
            raise self.error
        super().allocate(fd, size)


def pause() -> None:
    """Let other threads run."""
    threading.Event().wait(0.001)


@contextmanager
def worker(store: MessageStore) -> Iterator[FileAllocator]:
    """The store's worker, on a thread."""
    allocator = store.log.allocator
    ending = threading.Event()
    thread = threading.Thread(target=lambda: allocator.run(ending.is_set))
    thread.start()
    until(lambda: allocator._running, pause)
    try:
        yield allocator
    finally:
        ending.set()
        allocator.wake()
        thread.join()


def open_store(root: Path, files: Files, config: StoreConfig = CONFIG) -> MessageStore:
    store = MessageStore.open(root, config=config, files=files)
    store.topics.create("t", 1, [0])
    return store


def fill(store: MessageStore) -> None:
    """Put until the next one needs another file."""
    while store.log.room() > 9000:
        store.put(request([b"x" * 8000]))


def test_a_put_waits_for_the_file_that_the_worker_makes(tmp_path: Path) -> None:
    files = Stalling()
    store = open_store(tmp_path, files)
    fill(store)
    files.go_on.clear()
    tries = files.tries
    done: list[int] = []
    with worker(store):
        putting = threading.Thread(
            target=lambda: done.append(store.put(request([b"x" * 9000])).physical_offset)
        )
        putting.start()
        until(lambda: files.tries > tries, pause)
        assert not done
        files.go_on.set()
        putting.join()
    assert done[0] > SIZE
    store.close()


def test_a_put_that_waits_too_long_is_refused_and_a_later_one_finds_the_file(
    tmp_path: Path,
) -> None:
    files = Stalling()
    store = open_store(tmp_path, files, replace(CONFIG, allocate_timeout_ms=1))
    fill(store)
    files.go_on.clear()
    files.asked.clear()
    end = store.log.end
    with worker(store):
        with pytest.raises(Unavailable, match="allocate_timeout_ms") as refused:
            store.put(request([b"x" * 9000]))
        assert status_of(refused.value) is PutStatus.CREATE_MAPPED_FILE_FAILED
        assert store.log.end == end
        files.go_on.set()
        until(lambda: len(store.log.segments.files) == 2, pause)
        assert store.put(request([b"x" * 9000])).physical_offset > SIZE
    store.close()


@pytest.mark.parametrize(
    ("error", "kind"),
    [(OSError(errno.EIO, "no answer"), Unavailable), (StorageFull("full"), StorageFull)],
    ids=["EIO", "ENOSPC"],
)
def test_after_a_failure_puts_are_refused_at_once_until_the_worker_succeeds(
    tmp_path: Path, error: OSError | StorageFull, kind: type[Exception]
) -> None:
    files = Stalling()
    store = open_store(tmp_path, files)
    fill(store)
    files.error = error
    with worker(store) as allocator:
        for _ in range(3):
            # No call waits the 20 seconds.
            with pytest.raises(kind) as refused:
                store.put(request([b"x" * 9000]))
            assert status_of(refused.value) is PutStatus.CREATE_MAPPED_FILE_FAILED
        tries = files.tries
        until(lambda: files.tries > tries, pause)
        assert allocator.last_error is not None
        files.error = None
        until(lambda: len(store.log.segments.files) == 2, pause)
        store.put(request([b"x" * 9000]))
    store.close()


def test_a_worker_that_ends_leaves_no_append_waiting(tmp_path: Path) -> None:
    files = Stalling()
    store = open_store(tmp_path, files)
    fill(store)
    files.error = OSError(errno.EIO, "no answer")
    with worker(store), pytest.raises(Unavailable):
        store.put(request([b"x" * 9000]))
    files.error = None
    # From now on the thread that needs a file makes it.
    assert store.put(request([b"x" * 9000])).physical_offset > SIZE
    store.close()


# --- several directories --------------------------------------------------------------------------

SPREAD = replace(
    CONFIG, commit_log_paths=("/disk1/log", "/disk2/log"), read_only_commit_log_paths=("/old/log",)
)
ROOT = Path("/s")


def places(disk: SimulatedDisk) -> dict[int, str]:
    """Number of each commit log file -> its directory."""
    return {
        int(Path(path).name) // SIZE: str(Path(path).parent)
        for path in disk.tree()
        if Path(path).name.isdigit() and "log" in Path(path).parent.name
    }


def spread(disk: SimulatedDisk, config: StoreConfig = SPREAD) -> MessageStore:
    return MessageStore.open(ROOT, config=config, files=disk, clock=ManualClock())


def put_files(store: MessageStore, count: int) -> None:
    until_end = store.log.end + count * SIZE
    while store.log.end < until_end:
        store.put(request([b"x" * 8000]))
    confirm(store)


def test_new_files_go_to_the_directories_in_turn_and_all_are_found_again() -> None:
    disk = SimulatedDisk(record=False)
    store = spread(disk)
    store.topics.create("t", 1, [0])
    put_files(store, 4)
    assert places(disk) == {
        0: "/disk1/log",
        1: "/disk2/log",
        2: "/disk1/log",
        3: "/disk2/log",
        4: "/disk1/log",
    }
    end = store.log.end
    store.abandon()
    assert verify(ROOT, disk) == []
    # Even by a start without options, which makes new files in the usual place.
    store = spread(disk, CONFIG)
    assert store.log.end == end
    put_files(store, 1)
    assert places(disk)[5] == "/s/commitlog"
    assert find_segment(ROOT / "commitlog", SIZE, files=disk) == Path(f"/disk2/log/{SIZE:020d}")
    store.close()
    assert verify(ROOT, disk) == []


def test_a_directory_that_is_too_full_gets_no_file_while_another_has_room() -> None:
    disk = SimulatedDisk(record=False)
    store = spread(disk)
    store.topics.create("t", 1, [0])
    disk.used["/disk2/log"] = 86
    store.clean_service.run_once()
    put_files(store, 3)
    assert set(places(disk).values()) == {"/disk1/log"}
    assert store.flags.writable
    disk.used["/disk1/log"] = 95
    store.clean_service.run_once()
    # The emptiest directory decides about refused puts and early deletions. If all are full, all are used.
    assert store.flags.writable
    assert store.clean_service.log_ratio == 86
    put_files(store, 2)
    assert set(places(disk).values()) == {"/disk1/log", "/disk2/log"}
    store.close()


def test_old_files_are_deleted_wherever_they_are() -> None:
    disk = SimulatedDisk(record=False)
    store = spread(disk)
    store.topics.create("t", 1, [0])
    put_files(store, 3)
    disk.used["/disk1/log"] = disk.used["/disk2/log"] = 86
    assert store.clean_service.run_once() == 3
    assert places(disk) == {3: "/disk2/log"}
    store.abandon()
    store = spread(disk)
    assert store.log.start == 3 * SIZE
    store.close()


def test_a_file_that_is_there_twice_is_damage() -> None:
    disk = SimulatedDisk(record=False)
    for directory in ("/a", "/b"):
        disk.make_dirs(directory)
        disk.close(disk.open_file(f"{directory}/00000000000000000000", create=True))
    with pytest.raises(Corrupt, match="each file once"):
        list_segments([Path("/a"), Path("/b")], files=disk)


def test_the_flusher_finds_files_in_every_directory(tmp_path: Path) -> None:
    config = replace(
        CONFIG, commit_log_paths=(str(tmp_path / "d1" / "log"), str(tmp_path / "d2" / "log"))
    )
    store = EmbeddedStore(tmp_path / "s", config=config)
    store.create_topic("t", 1)
    for _ in range(20):
        store.put(request([b"x" * 8000]))
    store.close()
    assert json.loads((tmp_path / "s" / "raymq" / "paths").read_text())["paths"] == list(
        config.commit_log_paths
    )
    assert len(list((tmp_path / "d2" / "log").iterdir())) >= 1
    assert not list((tmp_path / "s" / "commitlog").iterdir())
    assert verify(tmp_path / "s") == []


def test_a_store_that_is_moved_finds_the_files_of_the_directories_inside_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outside, inside = tmp_path / "d2", Path("s/d1")
    config = replace(CONFIG, commit_log_paths=(str(inside), str(outside)))
    store = MessageStore.open(Path("s"), config=config)
    store.topics.create("t", 1, [0])
    put_files(store, 3)
    end = store.log.end
    store.close()
    Path("s").rename("moved")
    assert json.loads((tmp_path / "moved/raymq/paths").read_text())["paths"] == ["d1", str(outside)]
    monkeypatch.chdir("/")
    assert verify(tmp_path / "moved") == []
    store = MessageStore.open(tmp_path / "moved", config=CONFIG)
    assert (store.log.start, store.log.end) == (0, end)
    store.close()
