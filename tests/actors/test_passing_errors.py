"""Transient errors (no descriptor, no memory, a write that is refused once) never stop a replica for good."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raymq.actors.replica import open_replica
from raymq.actors.satellites.service import EXIT_BUG
from raymq.actors.shared.control_block import ControlBlock, shared_file
from raymq.actors.shared.failures import FailureFile
from raymq.actors.shared.maintenance import Maintenance
from raymq.actors.supervise.replica_host import ReplicaHost
from raymq.store.base.checksum import crc32c
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Bug, NotLeading, StorageFull, Unavailable
from raymq.store.base.files import Files, PathLike
from raymq.store.base.running_flags import DISK_FULL
from raymq.store.config.store_config import StoreConfig
from raymq.store.log.chain import ChainUnit
from raymq.store.log.control_files.meta import TRUNCATING
from raymq.store.records.requests import FetchRequest
from tests.support.batches import put_one, request
from tests.support.roles import log_of
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[2]
CONFIG = StoreConfig(
    segment_size_bytes=256 * 1024, prewrite_window_bytes=64 * 1024, sync_flush_timeout_ms=10_000
)
BODY = bytes(20_000)
FLUSHER = """
import errno, sys
from raymq.actors.satellites.flush_service import FlushService
from raymq.store.config.store_config import StoreConfig
from raymq.store.base.files import Files

class Disk(Files):
    def open_file(self, path, **options):
        if sys.argv[2] == "no descriptors" and "/commitlog/" in str(path):
            raise OSError(errno.EMFILE, "Too many open files")
        return super().open_file(path, **options)

FlushService(
    sys.argv[1], "group_commit", StoreConfig(segment_size_bytes=262144), files=Disk()
).run()
"""


class Disk(Files):
    """Refuses the next calls of one kind, on paths that contain a text."""

    def __init__(self) -> None:
        super().__init__()
        self._paths: dict[int, str] = {}
        #: (call, text of the path, error) -> how often
        self.refusals: dict[tuple[str, str, int], int] = {}
        #: only calls of this thread are refused
        self.of_thread: threading.Thread | None = None

    def refuse(self, call: str, word: str, code: int) -> None:
        self.refusals = {(call, word, code): 1}

    def refuse_appends(self, times: int) -> None:
        """Refuse appends of the calling thread only. Another thread prewrites."""
        self.of_thread = threading.current_thread()
        self.refusals = {("pwrite", "commitlog/", errno.EIO): times}

    def _enter(self, call: str, path: str) -> None:
        if self.of_thread not in (None, threading.current_thread()):
            return
        for (kind, word, code), times in list(self.refusals.items()):
            if kind == call and word in path and times:
                self.refusals[kind, word, code] = times - 1
                if code == errno.ENOSPC:
                    raise StorageFull("no room", field="disk")
                raise OSError(code, f"refused {call} of {word}")

    def open_file(self, path: PathLike, *, create: bool = False, writable: bool = True) -> int:
        self._enter("open_file", str(path))
        fd = super().open_file(path, create=create, writable=writable)
        self._paths[fd] = str(path)
        return fd

    def pwrite(self, fd: int, data: Any, offset: int) -> None:
        self._enter("pwrite", self._paths.get(fd, ""))
        super().pwrite(fd, data, offset)

    def allocate(self, fd: int, size: int) -> None:
        self._enter("allocate", self._paths.get(fd, ""))
        super().allocate(fd, size)

    def truncate(self, fd: int, size: int) -> None:
        self._enter("truncate", self._paths.get(fd, ""))
        super().truncate(fd, size)

    def make_dir(self, path: PathLike, mode: int = 0o700) -> None:
        self._enter("make_dir", str(path))
        super().make_dir(path, mode)

    @property
    def all_met(self) -> bool:
        return not any(self.refusals.values())


class Shard:
    """A leader in this process, its flusher in another. Every put is repeated until it is stored, as producers do."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.disk = Disk()
        self.gave_up: list[str] = []
        #: queue_id -> messages that were stored
        self.counts: dict[int, int] = {}
        self.host = self.open()
        self.flusher = self.start_flusher()

    def open(self) -> ReplicaHost:
        return open_replica(
            self.root,
            CONFIG,
            identity={"cluster_id": "c", "shard": 0},
            roles=("group_commit",),
            files=self.disk,
            end_process=self.gave_up.append,
        )

    def end(self) -> None:
        """End both processes."""
        self.host.close(0.0)
        self.flusher.kill()
        self.flusher.wait()

    def begin(self) -> None:
        """Start both again."""
        self.host = self.open()
        self.flusher = self.start_flusher()

    def start_flusher(self, lacks: str = "nothing") -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-c", FLUSHER, str(self.root), lacks],
            cwd=ROOT,
            env=dict(os.environ),
            stderr=subprocess.DEVNULL,
        )

    def try_put(self, queue: int = 0) -> bool:
        put = request([BODY], queue=queue, producer_id=1 + queue, sequence=self.sent_to(queue))
        try:
            put_one(self.host, put).wait(20)
        except (Unavailable, StorageFull):
            # A producer sends it again with the same sequence.
            threading.Event().wait(0.02)
            return False
        self.counts[queue] = self.sent_to(queue) + 1
        return True

    def sent_to(self, queue: int) -> int:
        return self.counts.setdefault(queue, 0)

    def put(self, queue: int = 0) -> None:
        done: list[bool] = []
        until(lambda: any(done), lambda: done.append(self.try_put(queue)))

    def read(self, queue: int) -> int:
        """How many messages of a queue a reader gets."""
        at, end = 0, self.sent_to(queue)

        def look() -> None:
            nonlocal at
            try:
                for part in self.host.fetch(FetchRequest("t", {queue: at}, 1 << 20, 1000, 1000)):
                    assert part.error is None
                    at = part.next_offset
            except Unavailable:
                threading.Event().wait(0.02)

        until(lambda: at >= end, look)
        return at

    def is_well(self) -> bool:
        facts = self.host.status()
        well = facts["state"] == "RUNNING" and facts["writable"] and facts["error"] is None
        return bool(well and self.host.metrics()["raymq_writable"])

    def close(self) -> None:
        self.disk.refusals.clear()
        self.host.close(1.0)
        self.flusher.kill()
        self.flusher.wait()


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[Shard]:
    made = Shard(tmp_path / "store")
    try:
        made.host.call("create_topic", {"name": "t", "queues": 64, "shards": [0]})
        yield made
    finally:
        made.close()


KINDS = [
    *(("pwrite", word) for word in ("commitlog", "chain", "consumequeue")),
    *(("open_file", word) for word in ("commitlog", "chain", "consumequeue")),
    ("allocate", "commitlog"),
    ("truncate", "consumequeue"),
    ("make_dir", "consumequeue"),
]


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE, errno.ENOMEM, errno.ENOSPC])
def test_no_single_refusal_stops_a_leader(shard: Shard, code: int) -> None:
    for queue, (call, word) in enumerate(KINDS):
        shard.disk.refuse(call, word, code)

        def work(queue: int = queue) -> None:
            shard.put(queue)
            shard.read(queue)

        until(lambda: shard.disk.all_met, work)
        shard.put(queue)
        assert shard.read(queue) == shard.sent_to(queue)
        until(shard.is_well, lambda: threading.Event().wait(0.01))
        assert shard.host.serving.stop_error is None, (call, word)
    assert not shard.gave_up


def refuse_and_put(shard: Shard) -> None:
    """A put meets a disk that takes no writes of the log any more, so that its bytes cannot be taken back either."""
    shard.disk.refusals = {("pwrite", "commitlog/", errno.EIO): 1 << 20}
    assert not shard.try_put()
    facts = shard.host.status()
    assert facts["state"] == "READ_ONLY"
    assert "could not be taken back" in facts["error"]
    assert shard.host.metrics()["raymq_writable"] == 0


def test_an_append_that_cannot_be_undone_is_taken_back_later_and_the_leader_goes_on(
    shard: Shard,
) -> None:
    shard.put()
    refuse_and_put(shard)
    assert not shard.try_put()
    assert shard.read(0) == 1

    shard.disk.refusals.clear()
    shard.put()
    assert shard.is_well()
    assert not shard.gave_up
    assert shard.host.serving.stop_error is None

    # The next start does not cut at the place of the failed append.
    shard.end()
    shard.begin()
    shard.put()
    assert shard.read(0) == 3
    assert shard.is_well()


def test_an_append_that_cannot_be_undone_is_taken_back_without_another_put(shard: Shard) -> None:
    shard.put()
    refuse_and_put(shard)
    shard.disk.refusals.clear()
    until(lambda: shard.host.report.state == "RUNNING", lambda: threading.Event().wait(0.01))
    assert not shard.gave_up


def test_a_start_after_an_append_that_was_not_taken_back_goes_on(shard: Shard) -> None:
    shard.put()
    refuse_and_put(shard)
    shard.end()
    shard.disk.refusals.clear()
    shard.begin()
    shard.put()
    assert shard.read(0) == 2
    assert shard.is_well()
    assert not shard.gave_up


def test_the_log_takes_nothing_before_the_cut_at_a_failed_append_is_noted_as_done(
    shard: Shard,
) -> None:
    shard.put()
    refuse_and_put(shard)
    log = shard.host.log
    # The ack loop does not try meanwhile.
    with shard.host.store.put_lock:
        shard.disk.refusals = {("pwrite", "raymq/meta", errno.EIO): 1}
        assert not log.health.take_back()
        assert "cannot be noted" in str(log.health.poisoned)
        assert log.meta.get(TRUNCATING) == log.end
        assert log.health.take_back()
        assert log.meta.get(TRUNCATING) is None
    shard.put()
    assert shard.read(0) == 2


def test_a_candidate_of_three_ends_its_process_so_that_another_one_leads(tmp_path: Path) -> None:
    disk, gave_up = Disk(), []
    host = open_replica(
        tmp_path,
        CONFIG,
        identity={"cluster_id": "c", "shard": 0},
        roles=("group_commit", "replication"),
        members=range(3),
        candidates=range(3),
        files=disk,
        end_process=gave_up.append,
    )
    with contextlib.closing(host):
        disk.refuse_appends(2)
        with pytest.raises(OSError, match="refused pwrite"):
            append(host, b"abc")
        until(lambda: bool(gave_up), lambda: threading.Event().wait(0.01))
    assert "could not be taken back" in gave_up[0]


def test_status_and_metrics_show_the_append_that_was_refused_last(shard: Shard) -> None:
    shard.put()
    shard.disk.refuse_appends(1)
    assert not shard.try_put()
    facts = shard.host.status()
    assert (facts["state"], facts["writable"]) == ("RUNNING", False)
    assert "refused pwrite" in facts["failures"]["append"]
    assert "refused pwrite" in facts["error"]
    assert shard.host.metrics()["raymq_writable"] == 0
    shard.put()
    assert shard.is_well()


def test_status_names_a_full_disk_as_the_cause(shard: Shard) -> None:
    shard.host.store.flags.set(DISK_FULL)
    facts = shard.host.status()
    assert (facts["state"], facts["writable"]) == ("READ_ONLY", False)
    assert "DISK_FULL" in facts["error"]
    shard.host.store.flags.clear(DISK_FULL)
    shard.put()
    assert shard.is_well()


def test_status_names_the_followers_cause_until_replication_ends_it(tmp_path: Path) -> None:
    cause = "the follower refused: the disk is full"
    roles = ("group_commit", "replication")
    host = open_replica(tmp_path, CONFIG, identity={"cluster_id": "c", "shard": 0}, roles=roles)
    with contextlib.closing(host):
        # As Replication writes it.
        file = FailureFile(tmp_path, files=Files(), clock=Clock())
        file.write(cause)
        assert host.store.topics.create("t", 1, [0]) is not None
        host.log.sync()
        facts = host.status()
        assert facts["confirmed"] < facts["synced"]
        assert facts["failures"] == {"replication": cause}
        assert facts["error"] == f"replication: {cause}"

        # Of three replicas two confirm: that the third is away is shown nevertheless.
        host.log.note_confirmed(host.log.end)
        assert host.status()["failures"] == {"replication": cause}
        assert host.metrics()["raymq_under_replicated"] == 1

        file.write("")
        facts = host.status()
        assert (facts["failures"], facts["error"]) == ({}, None)
        assert host.metrics()["raymq_under_replicated"] == 0


def test_a_put_that_is_stored_and_not_accounted_for_ends_the_process(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard.put()

    def no_memory(*args: Any, **options: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(shard.host.store.state, "apply_rows", no_memory)
        with pytest.raises(Bug):
            put_one(shard.host, request([BODY], producer_id=1, sequence=1)).wait(20)
    assert "MemoryError" in shard.gave_up[0]
    assert shard.host.status()["state"] == "READ_ONLY"


def test_a_lack_of_descriptors_during_supervision_is_transient(shard: Shard) -> None:
    shard.put()
    shard.flusher.kill()
    shard.flusher.wait()
    shard.flusher = shard.start_flusher()

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.dup(0)]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(held) + 1, hard))
        until(lambda: "acks" in shard.host.failures, lambda: threading.Event().wait(0.01))
        assert "Too many open files" in str(shard.host.report.cause)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in held:
            os.close(fd)

    shard.put()
    until(shard.is_well, lambda: threading.Event().wait(0.01))
    assert not shard.gave_up


def test_a_flusher_that_cannot_open_a_file_is_replaced_and_poisons_nothing(shard: Shard) -> None:
    shard.put()
    shard.flusher.kill()
    shard.flusher.wait()
    shard.flusher = shard.start_flusher("no descriptors")

    def grants() -> int:
        return int(shard.host.status()["supervisor"]["roles"]["group_commit"]["grants"])

    until(lambda: grants() == 2, lambda: threading.Event().wait(0.01))
    ticket = put_one(shard.host, request([BODY], producer_id=1, sequence=1))
    assert shard.flusher.wait(30) == EXIT_BUG
    # Ray starts the next one, which has descriptors.
    shard.flusher = shard.start_flusher()
    ticket.wait(20)
    assert shard.host.supervisor.poisoned is None
    assert shard.is_well()


THREADS = {
    "leader": "heartbeat append acks dispatch delays allocate maintenance compaction scrub",
    "follower": "heartbeat acks dispatch allocate maintenance compaction scrub",
}


def start(root: Path, kind: str) -> ReplicaHost:
    replica = 0 if kind == "leader" else 1
    return open_replica(
        root,
        CONFIG,
        identity={"cluster_id": "c", "shard": 0, "replica": replica, "incarnation": 1},
        roles=("group_commit",),
    )


def open_things() -> tuple[list[str], list[str]]:
    """The files that this process has open, and its threads."""
    names = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("raymq-")]
    return sorted(name for name in names if not name.startswith("/proc")), sorted(threads)


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in THREADS.items() for name in names.split()]
)
def test_a_start_that_lacks_a_thread_releases_everything_and_the_next_one_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, name: str
) -> None:
    start(tmp_path, kind).close(0.0)
    before = open_things()
    real = threading.Thread.start

    def lacking(thread: threading.Thread) -> None:
        if thread.name == f"raymq-{name}":
            raise RuntimeError("can't start new thread")
        real(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lacking)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            start(tmp_path, kind)
    assert open_things() == before
    page = ControlBlock.open(shared_file(str(tmp_path), "control"), files=Files())
    assert not page.heartbeat_on
    page.close()
    host = start(tmp_path, kind)
    assert host.report.state == "RUNNING"
    host.close(0.0)


@pytest.mark.parametrize("kind", list(THREADS))
def test_a_start_that_lacks_memory_releases_everything_and_the_next_one_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    start(tmp_path, kind).close(0.0)
    before = open_things()

    def no_memory(*args: Any, **options: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Maintenance, "__init__", no_memory)
        with pytest.raises(MemoryError):
            start(tmp_path, kind)
    assert open_things() == before
    host = start(tmp_path, kind)
    assert host.report.state == "RUNNING"
    host.close(0.0)


@pytest.fixture
def follower(tmp_path: Path) -> Iterator[tuple[ReplicaHost, Disk, list[str]]]:
    disk, gave_up = Disk(), []
    host = open_replica(
        tmp_path / "store",
        CONFIG,
        identity={"cluster_id": "c", "shard": 0, "replica": 1, "incarnation": 1},
        roles=("group_commit",),
        files=disk,
        end_process=gave_up.append,
    )
    yield host, disk, gave_up
    host.close(0.0)


def test_a_follower_refuses_puts_so_that_the_producer_asks_for_the_leader(
    follower: tuple[ReplicaHost, Disk, list[str]],
) -> None:
    host, _, _ = follower
    puts = [request([b"x"])] * 2
    with pytest.raises(NotLeading, match="does not lead"):
        put_one(host, puts[0])
    refusals = host.put(puts)
    assert [type(refusal) for refusal in refusals] == [NotLeading, NotLeading]


def append(host: ReplicaHost, data: bytes) -> None:
    start, value, _ = log_of(host).tail()
    log_of(host).append_units(
        [ChainUnit(start, start + len(data), 0, crc32c(data), value)], memoryview(data)
    )


def test_a_follower_stores_units_after_a_refused_write(
    follower: tuple[ReplicaHost, Disk, list[str]],
) -> None:
    host, disk, gave_up = follower
    disk.refuse_appends(1)
    with pytest.raises(OSError, match="refused pwrite"):
        append(host, b"abc")
    facts = host.status()
    assert facts["state"] == "RUNNING"
    assert "refused pwrite" in facts["error"]
    append(host, b"abc")
    assert host.status()["error"] is None
    assert not gave_up


def test_a_follower_whose_write_cannot_be_undone_ends_its_process(
    follower: tuple[ReplicaHost, Disk, list[str]],
) -> None:
    host, disk, gave_up = follower
    disk.refuse_appends(2)
    with pytest.raises(OSError, match="refused pwrite"):
        append(host, b"abc")
    until(lambda: bool(gave_up), lambda: threading.Event().wait(0.01))
    facts = host.status()
    assert facts["state"] == "READ_ONLY"
    assert "could not be taken back" in facts["error"]
