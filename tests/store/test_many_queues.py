"""A store with many queues: what they cost in files, syncs and descriptors, and what a start looks at."""

from __future__ import annotations

import contextlib
import errno
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from raymq.store.base.errors import Corrupt, StorageFull
from raymq.store.base.files import Data, Files, PathLike
from raymq.store.base.format import pack_queue_units
from raymq.store.config.store_config import StoreConfig
from raymq.store.engine.message_store import MessageStore
from raymq.store.log.control_files.marks import Marks
from raymq.store.log.segments.segment_paths import file_name
from raymq.store.put.inner_message import InnerMessage
from raymq.store.queues.consume_queue import ConsumeQueue
from raymq.store.queues.queue_files import OPEN_FILES_MAX, OpenFiles, QueueFiles
from raymq.store.records.requests import PutRequest
from raymq.store.tools.inspect import verify
from tests.support.batches import batch, request
from tests.support.clock import ManualClock
from tests.support.confirming import confirm, confirm_only, confirm_with_index, dispatch_all
from tests.support.simulated_disk import SimulatedDisk

QUEUES, TOPICS = 300, 3
BLOCK = 4096
CONFIG = StoreConfig(segment_size_bytes=1 << 20, message_index=False, prewrite_window_bytes=0)
SMALL = StoreConfig(
    segment_size_bytes=16 * 1024,
    consume_queue_file_size_bytes=400,
    message_index=False,
    file_reserved_hours=1,
)


class Watched(Files):
    """The real files, which record the operations below `consumequeue/`."""

    def __init__(self, boot: int = 1) -> None:
        super().__init__()
        self.boot = boot
        self.calls: Counter[str] = Counter()
        self.read_bytes = 0
        #: the number of a write that fails; 0: none does
        self.refused_write = 0
        self._queue_fds: set[int] = set()

    def boot_id(self) -> str:
        return f"boot {self.boot}"

    def open_file(self, path: PathLike, *, create: bool = False, writable: bool = True) -> int:
        fd = super().open_file(path, create=create, writable=writable)
        if "/consumequeue/" in str(path):
            self.calls["open"] += 1
            self._queue_fds.add(fd)
        return fd

    def close(self, fd: int) -> None:
        self._queue_fds.discard(fd)
        super().close(fd)

    def pread(self, fd: int, nbytes: int, offset: int) -> bytes:
        data = super().pread(fd, nbytes, offset)
        if fd in self._queue_fds:
            self.calls["pread"] += 1
            self.read_bytes += len(data)
        return data

    def list(self, path: PathLike) -> list[str]:
        self.calls["list"] += "/consumequeue" in str(path)
        return super().list(path)

    def pwrite(self, fd: int, data: Data, offset: int) -> None:
        if fd in self._queue_fds:
            self.calls["pwrite"] += 1
            if self.calls["pwrite"] == self.refused_write:
                raise OSError(errno.EIO, "the disk does not answer")
        super().pwrite(fd, data, offset)

    def sync_data(self, fd: int) -> None:
        self.calls["sync"] += fd in self._queue_fds
        super().sync_data(fd)

    def sync_dir(self, path: PathLike) -> None:
        self.calls["sync_dir"] += "/consumequeue" in str(path)
        super().sync_dir(path)

    @property
    def open_queue_files(self) -> int:
        return len(self._queue_fds)


def open_store(root: Path, boot: int = 1) -> tuple[MessageStore, Watched]:
    files = Watched(boot)
    return MessageStore.open(root, config=CONFIG, files=files), files


def put_to_all(store: MessageStore) -> None:
    for number in range(QUEUES):
        where = {"topic": f"t{number % TOPICS}", "queue": number // TOPICS}
        store.put(request([b"first", b"second"], **where))  # type: ignore[arg-type]


def check_all(store: MessageStore, count: int = 2) -> None:
    for number in range(QUEUES):
        topic, queue = f"t{number % TOPICS}", number // TOPICS
        assert store.queue_range(topic, queue) == (0, count)
        part = store.fetch(topic, queue, 0, max_bytes=1 << 20, max_records=100)
        assert part.next_offset == count


@pytest.fixture
def many(tmp_path: Path) -> Iterator[tuple[MessageStore, Watched]]:
    """A new store, and its files. Every queue has two messages that wait for the dispatch."""
    store, files = open_store(tmp_path / "s")
    for topic in range(TOPICS):
        store.topics.create(f"t{topic}", QUEUES // TOPICS, [0])
    put_to_all(store)
    store.log.sync()
    store.log.note_confirmed(store.log.end)
    yield store, files
    store.abandon()


def test_what_waits_for_one_queue_is_written_together(tmp_path: Path) -> None:
    store, files = open_store(tmp_path / "s")
    store.topics.create("t", 2, [0])
    confirm(store)
    before = files.calls["pwrite"]
    for number in range(10):
        store.put(request([b"%d" % number], queue=number // 5))
    confirm(store)
    assert files.calls["pwrite"] == before + 2
    assert [store.queue_range("t", queue) for queue in (0, 1)] == [(0, 5), (0, 5)]
    store.abandon()


@pytest.mark.parametrize("refused", [1, 2, 3])
def test_a_dispatch_that_fails_between_two_queues_leaves_and_repeats_no_unit(
    tmp_path: Path, refused: int
) -> None:
    stored = []
    for name, refused_write in (("whole", 0), ("failing", refused)):
        store, files = open_store(tmp_path / name)
        store.topics.create("t", 3, [0])
        confirm(store)
        for number in range(12):
            store.put(request([b"%d" % number], queue=number % 3))
        confirm_only(store)

        files.refused_write = files.calls["pwrite"] + refused_write if refused_write else 0
        before = store.dispatched
        if refused_write:
            with pytest.raises(OSError, match="does not answer"):
                store.dispatch(store.log.confirmed)
            assert store.dispatched == before
        dispatch_all(store)
        stored.append([path.read_bytes() for path in queue_paths(store)])
        store.abandon()
    assert stored[0] == stored[1]


def queue_paths(store: MessageStore) -> list[Path]:
    found = (store.log.root / "consumequeue" / "t").rglob("*")
    return sorted(path for path in found if path.is_file())


def test_the_first_messages_of_many_queues_wait_for_no_sync_and_take_a_block_each(
    many: tuple[MessageStore, Watched],
) -> None:
    store, files = many
    dispatch_all(store)
    assert (files.calls["sync"], files.calls["sync_dir"]) == (0, 0)
    places = [path for path in (store.log.root / "consumequeue").rglob("*") if path.is_file()]
    assert len(places) == QUEUES + 1
    assert {path.stat().st_size for path in places} == {CONFIG.consume_queue_file_size_bytes}
    assert sum(path.stat().st_blocks * 512 for path in places) <= len(places) * BLOCK
    # Then once each: the units, the queues' names in their topic, the topics' names.
    store.sync_queues()
    assert files.calls["sync"] == QUEUES + 1
    assert files.calls["sync_dir"] == (QUEUES + 1) + (TOPICS + 1) + 1
    store.sync_queues()
    assert files.calls["sync"] == QUEUES + 1


def test_many_queues_share_a_bounded_number_of_descriptors(
    many: tuple[MessageStore, Watched],
) -> None:
    store, files = many
    dispatch_all(store)
    check_all(store)
    assert files.open_queue_files == OPEN_FILES_MAX == store.consume_queues.opened.count
    store.sync_queues()
    put_to_all(store)
    confirm(store)
    check_all(store, 4)
    assert files.open_queue_files == OPEN_FILES_MAX
    store.close()
    assert files.open_queue_files == 0


def open_below(root: Path, *kinds: str) -> int:
    """How many descriptors this process has of the files in these directories of a store."""
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += entry.readlink().parent in [root / kind for kind in kinds]
    return found


def test_each_log_file_takes_three_descriptors_at_most_and_each_index_file_two(
    tmp_path: Path,
) -> None:
    root = tmp_path / "s"
    config = StoreConfig(segment_size_bytes=65_536, max_hash_slot_num=10, max_index_num=20)
    store = MessageStore.open(root, config=config)
    store.topics.create("t", 1, [0])
    keys = [f"k{number}" for number in range(60)]
    for key in keys:
        values = batch([bytes(4000)], properties=f"KEYS{key}".encode())
        store.put(PutRequest("t", 0, values, None, 0, 0, "quorum"))
    confirm_with_index(store)

    for written in (True, False):
        logs, indexes = (len(list((root / kind).iterdir())) for kind in ("commitlog", "index"))
        assert logs >= 3
        assert indexes >= 3
        # A read maps a file, and a map has a descriptor of its own.
        assert len(store.query.by_keys("t", keys, max_num=1).records) == len(keys)
        assert open_below(root, "commitlog", "raymq/chain") <= 3 * logs
        assert open_below(root, "index") <= 2 * indexes
        store.close()
        if written:
            store = MessageStore.open(root, config=config)


def test_a_start_after_a_kill_opens_no_consume_queue_before_its_first_use(
    many: tuple[MessageStore, Watched],
) -> None:
    store, _ = many
    dispatch_all(store)
    store.abandon()
    again, files = open_store(store.log.root)
    assert again.dispatched == store.dispatched
    assert files.calls == Counter({"sync_dir": 0, "list": 0})
    assert len(again.queues()) == QUEUES + 1
    assert again.queue_range("t0", 5) == (0, 2)
    assert files.calls["open"] == 0
    assert again.fetch("t0", 5, 0, max_bytes=1, max_records=1).next_offset == 1
    assert files.calls["open"] == 1
    check_all(again)
    put_to_all(again)
    confirm(again)
    check_all(again, 4)
    again.close()
    assert verify(again.log.root) == []


def test_what_a_killed_process_left_unsynced_is_synced_before_the_synced_end_says_so(
    many: tuple[MessageStore, Watched],
) -> None:
    store, _ = many
    dispatch_all(store)
    store.abandon()
    again, files = open_store(store.log.root)
    again.sync_queues()
    assert files.calls["sync"] == QUEUES + 1
    assert files.calls["sync_dir"] == (QUEUES + 1) + (TOPICS + 1) + 1
    assert again.log.marks.queues_synced_end == again.dispatched
    again.close()


def test_a_start_after_a_power_loss_reads_no_empty_tails(
    many: tuple[MessageStore, Watched],
) -> None:
    store, _ = many
    dispatch_all(store)
    store.sync_queues()
    store.abandon()
    again, files = open_store(store.log.root, boot=2)
    assert files.read_bytes < (QUEUES + 1) * 5 * BLOCK
    assert again.dispatched == store.dispatched
    check_all(again)
    again.abandon()


# --- a start that knows the queues' ends ----------------------------------------------------------


@pytest.fixture
def disk() -> SimulatedDisk:
    return SimulatedDisk(record=False)


def small_store(disk: SimulatedDisk, clock: ManualClock | None = None) -> MessageStore:
    store = MessageStore.open(Path("/s"), config=SMALL, files=disk, clock=clock or ManualClock())
    for topic in ("t", "a", "b", "little", "large"):
        store.topics.create(topic, 1, [0])
    return store


def test_a_kill_between_messages_of_one_batch_costs_no_rebuild(disk: SimulatedDisk) -> None:
    store = small_store(disk)
    ends = [store.put(request([b"x" * 100] * 5)).end_offset for _ in range(4)]
    store.log.sync()
    store.log.note_confirmed(ends[1])
    dispatch_all(store)
    store.abandon()
    again = small_store(disk)
    # One run of twenty messages in the log, ten of which have units.
    assert again.dispatched == ends[1]
    assert again.queue_range("t", 0) == (0, 10)
    confirm(again)
    assert again.queue_range("t", 0) == (0, 20)
    again.abandon()


@pytest.mark.parametrize("lost", [1, 4, 5])
@pytest.mark.parametrize("late", [False, True])
def test_the_last_units_of_a_queue_are_made_again_after_its_first_use_and_the_next_start_looks(
    disk: SimulatedDisk, lost: int, late: bool
) -> None:
    store = small_store(disk)
    for topic in "ab":
        store.put(request([b"x"] * 5, topic=topic))
    confirm(store)
    store.abandon()
    fd = disk.open_file(f"/s/consumequeue/a/0/{0:020d}")
    disk.pwrite(fd, bytes(20 * lost), (5 - lost) * 20)
    disk.close(fd)
    again = small_store(disk)
    if late:
        # A new message comes before the lost units, and is no gap.
        again.put(request([b"late"], topic="a"))
        confirm_only(again)
    again.fetch("a", 0, 0, max_bytes=1, max_records=1)
    assert again.log.marks.dispatched_end == 0
    assert again.reput.units_behind
    again.dispatch(again.log.confirmed)
    count = 5 + late
    assert again.queue_range("a", 0) == (0, count)
    part = again.fetch("a", 0, 0, max_bytes=1 << 20, max_records=10)
    assert (part.next_offset, len(part.records)) == (count, count)
    again.close()
    assert verify(Path("/s"), disk) == []


def test_a_queue_whose_file_is_gone_is_rebuilt_by_the_next_start(disk: SimulatedDisk) -> None:
    store = small_store(disk)
    for topic in "ab":
        store.put(request([b"x"] * 5, topic=topic))
    confirm(store)
    store.abandon()
    again = small_store(disk)
    disk.unlink(f"/s/consumequeue/a/0/{0:020d}")
    with pytest.raises(Corrupt, match="does not end at offset 5"):
        again.fetch("a", 0, 0, max_bytes=1, max_records=1)
    again.abandon()
    third = small_store(disk)
    confirm(third)
    assert third.queue_range("a", 0) == third.queue_range("b", 0) == (0, 5)
    third.close()


def test_retention_deletes_the_files_of_queues_that_are_not_open(disk: SimulatedDisk) -> None:
    clock = ManualClock()
    store = small_store(disk, clock)
    store.put(request([b"only"], topic="little"))
    while store.log.end < 3 * SMALL.segment_size_bytes:
        store.put(request([b"x" * 500] * 4, topic="large"))
    confirm(store)
    store.close()
    clock.advance(3 * 3_600_000)
    again = small_store(disk, clock)
    before = len(disk.list("/s/consumequeue/large/0"))
    again.clean_service.delete_now()
    assert again.clean_service.run_once() > 0
    assert len(disk.list("/s/consumequeue/large/0")) < before
    low, high = again.queue_range("large", 0)
    assert 0 < low < high
    assert again.queue_range("little", 0) == (1, 1)
    again.close()
    assert verify(Path("/s"), files=disk) == []


def test_a_message_to_a_queue_that_rests_goes_on_where_it_ended(disk: SimulatedDisk) -> None:
    store = small_store(disk)
    for _ in range(25):
        store.put_inner([InnerMessage("t", 0, b"x")])
    confirm(store)
    store.close()
    again = small_store(disk)
    assert again.put_inner([InnerMessage("t", 0, b"y")])[0].first_offset == 25
    confirm(again)
    units = again.consume_queues.get("t", 0).read(0, 99)
    assert (np.diff(units["position"].astype(np.int64)) > 0).all()
    assert len(units) == 26
    again.close()


# --- one queue's files ----------------------------------------------------------------------------

SIZE = 400


def queue_on(files: Files, root: Path, opened: OpenFiles | None = None) -> ConsumeQueue:
    return ConsumeQueue(root / "consumequeue" / "t" / "0", SIZE, files=files, opened=opened)


def append(queue: ConsumeQueue, first: int, count: int) -> None:
    rows = np.arange(first, first + count, dtype=np.int64)
    queue.append(first, pack_queue_units(rows * 100, 100, rows))


def test_a_file_that_is_used_again_takes_the_place_of_the_one_that_was_not_used_for_longest(
    tmp_path: Path,
) -> None:
    files = Watched()
    opened = OpenFiles(files, limit=2)
    queue = queue_on(files, tmp_path, opened)
    append(queue, 0, 60)
    assert opened.count == files.open_queue_files == 2
    before = files.calls["open"]
    queue.read(45, 1)
    assert files.calls["open"] == before
    for at in (0, 20, 40):
        assert queue.read(at, 1)["position"].tolist() == [at * 100]
    assert opened.count == files.open_queue_files == 2
    queue.close()
    assert opened.count == files.open_queue_files == 0


def test_the_name_of_a_file_is_durable_before_the_next_one_is_made(tmp_path: Path) -> None:
    files = Watched()
    queue = queue_on(files, tmp_path)
    append(queue, 0, 20)
    assert files.calls["sync_dir"] == 0
    append(queue, 20, 1)
    # Of the file, the queue and the topic.
    assert files.calls["sync_dir"] == 3
    append(queue, 21, 20)
    assert files.calls["sync_dir"] == 4
    queue.close()


def test_a_file_that_was_never_finished_ends_its_queue(tmp_path: Path) -> None:
    queue = queue_on(Files(), tmp_path)
    append(queue, 0, 60)
    queue.close()
    os.truncate(queue.directory / file_name(SIZE), 0)
    again = queue_on(Files(), tmp_path)
    again.load()
    again.recover()
    assert (again.max_offset, len(os.listdir(again.directory))) == (20, 1)
    append(again, 20, 20)
    assert again.max_offset == 40
    again.close()


def test_a_sector_that_cannot_be_read_is_corrupt_at_its_place(tmp_path: Path) -> None:
    class Bad(Files):
        def pread(self, fd: int, nbytes: int, offset: int) -> bytes:
            if offset >= 100:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().pread(fd, nbytes, offset)

    queue = queue_on(Bad(), tmp_path)
    append(queue, 0, 30)
    assert len(queue.read(0, 5)) == 5
    with pytest.raises(Corrupt, match="Input/output error") as caught:
        queue.read(25, 5)
    assert (caught.value.offset, Path(caught.value.path).name) == (SIZE + 100, f"{SIZE:020d}")
    queue.close()


def test_a_file_that_was_cut_is_corrupt_and_never_read_as_zeros(tmp_path: Path) -> None:
    queue = queue_on(Files(), tmp_path)
    append(queue, 0, 20)
    os.truncate(queue.directory / file_name(0), 100)
    with pytest.raises(Corrupt, match="ends at 100"):
        queue.read(3, 5)
    queue.close()


def test_a_full_disk_is_an_error_and_the_next_try_goes_on(tmp_path: Path) -> None:
    class Full(Files):
        full = False

        def pwrite(self, fd: int, data: Data, offset: int) -> None:
            if self.full:
                super().pwrite(fd, memoryview(data)[: len(data) // 2], offset)
                raise StorageFull("the disk is full", field="disk")
            super().pwrite(fd, data, offset)

    files = Full()
    queue = queue_on(files, tmp_path)
    append(queue, 0, 5)
    files.full = True
    with pytest.raises(StorageFull):
        append(queue, 5, 30)
    assert queue.max_offset == 5
    files.full = False
    append(queue, 5, 30)
    assert queue.read(0, 99)["position"].tolist() == [at * 100 for at in range(20)] + [
        at * 100 for at in range(20, 35)
    ]
    queue.close()


def test_a_file_that_cannot_get_its_length_leaves_nothing(disk: SimulatedDisk) -> None:
    disk.make_dirs("/s/consumequeue")
    opened = OpenFiles(disk)
    queue = QueueFiles(Path("/s/consumequeue/t/0"), SIZE, opened=opened)
    disk.fail("truncate", error=errno.ENOSPC)
    with pytest.raises(StorageFull):
        queue.create_next()
    assert disk.list("/s/consumequeue/t/0") == []
    assert opened.count == 0
    assert queue.create_next().path.name == f"{0:020d}"


def test_a_cut_below_where_consume_queues_reach_makes_the_next_start_look_at_them(
    tmp_path: Path,
) -> None:
    marks = Marks.open(tmp_path / "marks", files=Files())
    marks.dispatched_end = 500
    marks.lower(600)
    assert marks.dispatched_end == 500
    marks.lower(499)
    assert marks.dispatched_end == 0
    marks.close()
