"""CommitRealTime in a process of its own, under a real CommitLog: killed, stopped, and refused by the disk."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from raymq.actors.api.shard_api import PutTicket
from raymq.actors.replica import open_replica
from raymq.actors.satellites.service import EXIT_BUG, EXIT_STOPPED_BY_COMMIT_LOG
from raymq.actors.supervise.replica_host import ReplicaHost
from raymq.store.base.errors import Bug, DeliveryUnknown, StorageFull, Unavailable
from raymq.store.base.files import Files
from raymq.store.config.store_config import StoreConfig
from raymq.store.log.transient_pool import NAME_FILE, SHM_DIR
from raymq.store.records.requests import FetchRequest
from raymq.store.tools.inspect import verify
from tests.support.batches import put_one, request
from tests.support.roles import leader_of
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[2]
SEGMENT = 256 * 1024
BODY = b"." * 1000

SATELLITE = """
import errno, os, sys
from raymq.actors.satellites.commit_service import CommitService
from raymq.actors.satellites.flush_service import FlushService
from raymq.store.config.store_config import StoreConfig
from raymq.store.base.errors import StorageFull
from raymq.store.base.files import Files

class Refusing(Files):
    def pwrite(self, fd, data, offset):
        raise OSError(errno.EIO, "the disk does not answer")

class Full(Files):
    # Has no space for the commit log until the test says so; counts the tries.
    def pwrite(self, fd, data, offset):
        if "/commitlog/" in os.readlink(f"/proc/self/fd/{fd}") and not os.path.exists(f"{root}/room"):
            with open(f"{root}/tries", "a") as tries:
                tries.write("x")
            raise StorageFull("the disk is full", field="disk")
        super().pwrite(fd, data, offset)

root, role, flush, disk = sys.argv[1:]
files = {"broken": Refusing, "full": Full, "whole": Files}[disk]()
timed = not os.path.exists(f"{root}/untimed")
commit_ms = 3_600_000 if os.path.exists(f"{root}/slow") else 200
if role == "commit_real_time":
    config = StoreConfig(
        segment_size_bytes=262144, transient_pool_slice_bytes=65536, flush_commit_log_timed=timed,
        commit_interval_ms=commit_ms, commit_thorough_interval_ms=commit_ms)
    service = CommitService(root, config, eager=flush == "sync", files=files)
else:
    interval_ms = 20 if timed else 3_600_000
    config = StoreConfig(
        segment_size_bytes=262144, flush_interval_ms=interval_ms, flush_thorough_interval_ms=100,
        flush_least_pages=4 if timed else 0, flush_commit_log_timed=timed)
    service = FlushService(root, role, config)
loaded = sorted({"numpy", "pyarrow", "ray"} & set(sys.modules))
if loaded:
    raise SystemExit(f"a satellite imports {loaded}")
service.run()
"""

#: puts for ever. A line on stdout for each that was acknowledged
HOST = """
import sys
from pathlib import Path
sys.path.insert(0, ".")
from tests.actors.test_commit_service import config_of, identity_of, roles_of
from tests.support.batches import put_one, request
from raymq.actors.replica import open_replica
from raymq.actors.supervise.replica_host import ReplicaHost
from raymq.store.base.errors import DeliveryUnknown, Unavailable

host = open_replica(
    Path(sys.argv[1]), config_of(sys.argv[2]), identity=identity_of(), roles=roles_of(sys.argv[2]))
host.call("create_topic", {"name": "t", "queues": 1, "shards": [0]})
number = 0
while True:
    put = request([b"%d/" % number + b"." * 1000], producer_id=5, sequence=number)
    try:
        put_one(host, put).wait(30)
    except (DeliveryUnknown, Unavailable):
        continue
    print(number, flush=True)
    number += 1
"""


def config_of(flush: str) -> StoreConfig:
    return StoreConfig(
        segment_size_bytes=SEGMENT,
        prewrite_window_bytes=64 * 1024,
        sync_flush_timeout_ms=10_000,
        flush=flush,  # type: ignore[arg-type]
        transient_pool=True,
        transient_pool_slice_bytes=64 * 1024,
    )


def roles_of(flush: str) -> tuple[str, ...]:
    return ("group_commit" if flush == "sync" else "flush_real_time"), "commit_real_time"


def identity_of() -> dict[str, object]:
    return {"cluster_id": "c", "shard": 0}


class Shard:
    """One replica: its satellites in processes that are started again when they end, as Ray does."""

    def __init__(self, root: Path, flush: str) -> None:
        self.root, self.flush = root, flush
        self.roles = roles_of(flush)
        self.children: dict[str, list[subprocess.Popen[bytes]]] = {role: [] for role in self.roles}
        self.hosts: list[subprocess.Popen[str]] = []
        self.host: ReplicaHost | None = None

    def open(self, config: StoreConfig | None = None, files: Files | None = None) -> ReplicaHost:
        self.host = open_replica(
            self.root,
            config or config_of(self.flush),
            identity=identity_of(),
            roles=self.roles,
            files=files,
        )
        return self.host

    def serve(self) -> ReplicaHost:
        host = self.open()
        for role in self.roles:
            self.spawn(role)
        host.call("create_topic", {"name": "t", "queues": 1, "shards": [0]})
        return host

    def spawn(self, role: str, disk: str = "whole") -> subprocess.Popen[bytes]:
        child = subprocess.Popen(
            [sys.executable, "-c", SATELLITE, str(self.root), role, self.flush, disk],
            cwd=ROOT,
            env=dict(os.environ),
            stderr=subprocess.DEVNULL,
        )
        self.children[role].append(child)
        return child

    def spawn_host(self) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-c", HOST, str(self.root), self.flush],
            cwd=ROOT,
            env=dict(os.environ),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.hosts.append(child)
        return child

    def mind(self, pause_s: float = 0.01) -> None:
        """Start the processes that have ended again."""
        for role, children in self.children.items():
            if children and children[-1].poll() is not None:
                self.spawn(role)
        PAUSE.wait(pause_s)

    def lease(self, role: str) -> dict[str, object]:
        assert self.host is not None
        found: dict[str, object] = self.host.status()["supervisor"]["roles"][role]
        return found

    def await_grant(self, role: str, *, but: int = 0) -> int:
        until(
            lambda: bool(self.lease(role)["granted"]) and self.lease(role)["pid"] != but, self.mind
        )
        pid = self.lease(role)["pid"]
        assert isinstance(pid, int)
        return pid

    def bodies(self, count: int) -> list[int]:
        """The numbers of all messages, once so many are readable."""
        assert self.host is not None
        host, found = self.host, []

        def read() -> None:
            self.mind()
            for part in host.fetch(FetchRequest("t", {0: len(found)}, 1 << 20, 10_000, 50)):
                for record in part.records.to_pylist() if part.records is not None else []:
                    text = record[: record.index(BODY)]
                    # The body is "number/....": its digits end at the last slash before the dots.
                    digits = text[:-1].rpartition(b"\x00")[2]
                    found.append(int(bytes(c for c in digits if 48 <= c <= 57) or b"-1"))

        until(lambda: len(found) >= count, read)
        return found

    def end_all(self) -> None:
        for children in self.children.values():
            for child in children:
                child.kill()
                child.wait()
        for host in self.hosts:
            host.kill()
            host.wait()
            if host.stdout is not None:
                host.stdout.close()

    def close(self) -> None:
        if self.host is not None:
            self.host.close(1.0)
            self.host = None
        self.end_all()
        pool = self.root / NAME_FILE
        if pool.exists():
            Path(SHM_DIR, pool.read_text()).unlink(missing_ok=True)


PAUSE = threading.Event()
MODES = pytest.mark.parametrize("flush", ["sync", "async"])


@pytest.fixture
def shard(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Shard]:
    flush = request.node.callspec.params.get("flush") if hasattr(request.node, "callspec") else None
    made = Shard(tmp_path / "store", flush or "sync")
    yield made
    made.close()


def put(host: ReplicaHost, number: int) -> PutTicket:
    return put_one(host, request([b"%d/" % number + BODY], producer_id=5, sequence=number))


class Writer:
    """Puts one message after the other, trying again as a producer does, until it is stopped."""

    def __init__(self, host: ReplicaHost) -> None:
        self.host = host
        self.acked = 0
        self.failure: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                try:
                    put(self.host, self.acked).wait(30)
                except (DeliveryUnknown, Unavailable):
                    continue
                self.acked += 1
        except BaseException as error:
            self.failure = error

    def await_more(self, count: int, shard: Shard) -> None:
        want = self.acked + count
        until(lambda: self.acked >= want or self.failure is not None, shard.mind)
        if self.failure is not None:
            raise self.failure

    def stop(self) -> int:
        self._stop.set()
        self._thread.join(60)
        if self.failure is not None:
            raise self.failure
        return self.acked


@MODES
def test_puts_go_through_the_pool_and_come_back(shard: Shard, flush: str):
    host = shard.serve()
    tickets = [put(host, number) for number in range(600)]
    offsets = [ticket.wait(30).first_offset for ticket in tickets]
    assert offsets == list(range(600))
    assert shard.bodies(600) == list(range(600))
    status = host.status()
    assert status["transient_pool"]
    assert set(status["supervisor"]["roles"]) == set(roles_of(flush))
    assert status["dispatched"] <= status["confirmed"] <= status["committed"] <= status["appended"]
    until(lambda: host.status()["synced"] == host.status()["appended"], shard.mind)
    assert int(str(shard.lease("commit_real_time")["syncs"])) > 0


def test_the_interval_of_the_async_mode_commits_few_bytes_too(tmp_path: Path):
    shard = Shard(tmp_path / "store", "async")
    try:
        host = shard.serve()
        shard.await_grant("commit_real_time")
        put(host, 0).wait(30)
        assert shard.bodies(1) == [0]
    finally:
        shard.close()


def test_a_commit_from_the_pool_wakes_a_flush_real_time_that_is_not_timed(tmp_path: Path):
    shard = Shard(tmp_path / "store", "async")
    shard.root.mkdir()
    # Its flusher would wait for an hour.
    (shard.root / "untimed").touch()
    try:
        host = shard.serve()
        for role in shard.roles:
            shard.await_grant(role)
        put(host, 0).wait(30)
        until(lambda: host.status()["synced"] == host.status()["appended"], shard.mind)
    finally:
        shard.close()


def test_commit_real_time_follows_options_that_are_set_while_it_works(tmp_path: Path):
    shard = Shard(tmp_path / "store", "async")
    shard.root.mkdir()
    # It would commit in an hour.
    (shard.root / "slow").touch()
    try:
        host = shard.serve()
        for role in shard.roles:
            shard.await_grant(role)
        put(host, 0).wait(30)
        values = {"commit_interval_ms": 20, "commit_thorough_interval_ms": 20}
        host.call("set_config", {"values": values, "by": "ann@here"})
        assert shard.bodies(1) == [0]
    finally:
        shard.close()


@MODES
def test_commits_go_on_after_kill_9_of_commit_real_time(shard: Shard, flush: str):
    host = shard.serve()
    writer = Writer(host)
    for _ in range(3):
        writer.await_more(100, shard)
        old = shard.await_grant("commit_real_time")
        os.kill(old, signal.SIGKILL)
        shard.await_grant("commit_real_time", but=old)
    writer.await_more(100, shard)
    acked = writer.stop()
    assert shard.bodies(acked)[:acked] == list(range(acked))
    shard.close()
    assert verify(shard.root) == []


@MODES
def test_a_stopped_commit_real_time_is_replaced(shard: Shard, flush: str):
    host = shard.serve()
    writer = Writer(host)
    writer.await_more(50, shard)
    old = shard.await_grant("commit_real_time")
    os.kill(old, signal.SIGSTOP)
    shard.await_grant("commit_real_time", but=old)
    writer.await_more(50, shard)
    acked = writer.stop()
    assert shard.bodies(acked)[:acked] == list(range(acked))


@pytest.mark.parametrize("everything", [False, True], ids=["host", "everything"])
@MODES
def test_what_a_killed_host_acknowledged_is_there(shard: Shard, flush: str, everything: bool):
    for role in shard.roles:
        shard.spawn(role)

    acked = -1
    for _ in range(2):
        process = shard.spawn_host()
        assert process.stdout is not None
        least = acked + 150
        for line in process.stdout:
            acked = max(acked, int(line))
            if acked >= least:
                break
            shard.mind(0.0)

        process.kill()
        # The end that it published before its death counts.
        acked = max([acked, *map(int, process.stdout)])
        process.wait()
        if everything:
            for children in shard.children.values():
                children[-1].kill()
                children[-1].wait()
        shard.mind()

    shard.open()
    found = shard.bodies(acked + 1)
    assert found == list(range(len(found)))
    # The host ended those of the dead one. A slow machine starts others in more time than a put has.
    for role in shard.roles:
        shard.await_grant(role)
    assert shard.host is not None
    put(shard.host, len(found)).wait(30)
    shard.close()
    assert verify(shard.root) == []


def test_without_commit_real_time_a_sync_put_is_unknown_and_a_full_pool_refuses(shard: Shard):
    host = shard.open(replace(config_of("sync"), sync_flush_timeout_ms=200))
    assert host.store.topics.create("t", 1, [0]) is not None
    shard.spawn("group_commit")
    tickets = [put_one(host, request([b"%d/" % number + BODY])) for number in range(200)]

    found: dict[type, int] = {DeliveryUnknown: 0, Unavailable: 0}
    for ticket in tickets:
        with pytest.raises((DeliveryUnknown, Unavailable)) as why:
            ticket.wait(30)
        found[why.type] += 1
        if why.type is Unavailable:
            assert why.value.fields["field"] == "transient_pool"
        else:
            assert why.value.fields["status"] == "FLUSH_DISK_TIMEOUT"

    stored = found[DeliveryUnknown]
    assert 100 < stored < 128
    assert found[Unavailable] == 200 - stored

    shard.spawn("commit_real_time")
    assert shard.bodies(stored) == list(range(stored))
    host.config = config_of("sync")
    assert put_one(host, request([b"x"])).wait(30).first_offset == stored


def test_a_failed_write_ends_the_process_and_the_next_one_commits(shard: Shard):
    host = shard.open()
    assert host.store.topics.create("t", 1, [0]) is not None
    shard.spawn("group_commit")
    broken = shard.spawn("commit_real_time", "broken")
    ticket = put(host, 0)
    assert broken.wait(30) == EXIT_BUG
    assert not ticket.done
    shard.spawn("commit_real_time")
    assert ticket.wait(30).first_offset == 0
    assert host.status()["state"] == "RUNNING"


def test_a_full_disk_is_retried_with_pauses_despite_wakeups(shard: Shard):
    host = shard.open()
    assert host.store.topics.create("t", 1, [0]) is not None
    shard.spawn(shard.roles[0])
    child = shard.spawn("commit_real_time", "full")
    tries, room = shard.root / "tries", shard.root / "room"

    tickets = [put(host, 0)]
    until(tries.exists, lambda: PAUSE.wait(0.01))
    for number in range(1, 20):
        tickets.append(put(host, number))
        PAUSE.wait(0.005)

    assert len(tries.read_text()) <= 2
    assert child.poll() is None
    room.touch()
    assert [ticket.wait(30).first_offset for ticket in tickets] == list(range(20))
    assert shard.bodies(20) == list(range(20))
    assert shard.lease("commit_real_time")["pid"] == child.pid


@MODES
def test_an_orderly_close_commits_all_and_leaves_no_pool(shard: Shard, flush: str):
    host = shard.serve()
    pool = Path(SHM_DIR, (shard.root / NAME_FILE).read_text())
    assert pool.exists()
    shard.await_grant("commit_real_time")
    for number in range(100):
        put(host, number).wait(30)
    child = shard.children["commit_real_time"][-1]
    host.close(5.0)
    shard.host = None
    assert child.wait(30) == EXIT_STOPPED_BY_COMMIT_LOG
    assert not pool.exists()
    assert not (shard.root / "abort").exists()
    assert verify(shard.root) == []


class FullDisk(Files):
    """Refuses writes to the commit log while `refusing`."""

    full = False

    def pwrite(self, fd: int, data: object, offset: int) -> None:
        if self.full and "/commitlog/" in os.readlink(f"/proc/self/fd/{fd}"):
            raise StorageFull("the disk is full", field="disk")
        super().pwrite(fd, data, offset)


def test_a_stop_that_cannot_commit_raises_and_the_next_start_commits(tmp_path: Path):
    shard, files = Shard(tmp_path / "store", "async"), FullDisk()
    try:
        host = shard.open(files=files)
        assert host.store.topics.create("t", 1, [0]) is not None
        for number in range(20):
            put(host, number).wait(30)

        files.full = True
        with pytest.raises(Unavailable, match="last writes before its stop failed: the disk is"):
            host.close(1.0)
        assert (shard.root / "abort").exists()
        shard.open()
        assert shard.bodies(20) == list(range(20))
    finally:
        shard.close()

    assert verify(shard.root) == []


def test_an_older_committed_end_never_replaces_a_newer_one(tmp_path: Path):
    shard = Shard(tmp_path / "store", "async")
    try:
        host = shard.open()
        with leader_of(host).acks._progress_lock:
            waiter = threading.Thread(target=leader_of(host).acks.await_pool_space, daemon=True)
            waiter.start()
            waiter.join(0.05)
            assert waiter.is_alive()
        waiter.join(30)
        assert not waiter.is_alive()
    finally:
        shard.close()


def test_a_pool_without_its_role_is_a_bug(tmp_path: Path):
    with pytest.raises(Bug):
        open_replica(
            tmp_path / "s", config_of("sync"), identity=identity_of(), roles=("group_commit",)
        )
