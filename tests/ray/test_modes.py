"""The four modes (flush sync or async, transient pool off or on) in Ray, under load while processes die and stop."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import raymq
from raymq.client.consume.range_reader import read_range
from raymq.client.messages.columns import message_batch
from raymq.cluster.deploy import owned_ray, ray_host
from raymq.cluster.record.paths import ClusterPaths
from raymq.store.base.clock import Clock
from raymq.store.base.errors import RayMQError
from raymq.store.base.files import Files
from raymq.store.config.promise import ACKS
from raymq.store.log.transient_pool import NAME_FILE, SHM_DIR
from raymq.store.tools.inspect import verify
from tests.support.history import History, Load, Read, Reader, faults
from tests.support.lean_ray import LEAN
from tests.support.leftovers import disk_root
from tests.support.waiting import until

pytestmark = [pytest.mark.faults, pytest.mark.thorough]

PRODUCERS, QUEUES = 2, 2
#: how often each fault comes; `nox -s faults` takes more
ROUNDS = int(os.environ.get("RAYMQ_FAULT_ROUNDS", "1"))
LONG = ROUNDS > 1
#: modes that are tried at the same time
TOGETHER = 3
STOPPED_S = 1.0
#: longer than supervisor.STALE_MS
ALL_STOPPED_S = 2.5


class Mode(NamedTuple):
    """One of the four, kept once or twice."""

    flush: str
    pool: bool
    replicas: int = 1

    @property
    def name(self) -> str:
        """Of its cluster."""
        return f"{self.replicas}-{self.flush}-{'pool' if self.pool else 'plain'}"

    @property
    def roles(self) -> list[str]:
        """The processes beside CommitLog, and no others."""
        return [
            "group_commit" if self.flush == "sync" else "flush_real_time",
            *(["commit_real_time"] if self.pool else []),
            *(["replication"] if self.replicas > 1 else []),
        ]


MODES = [
    Mode("sync", True, 2),
    *(Mode(flush, pool) for flush in ("sync", "async") for pool in (True, False)),
    Mode("async", False, 2),
    *([Mode("async", True, 2)] if LONG else []),
]


class Home:
    """One Ray for all modes, started by the first cluster as a user does."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("RAY")},
            **LEAN,
            "RAYMQ_HOME": str(place / "home"),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(place / "ray-token"),
        }
        self.first = ClusterPaths(place / "first")

    def command(self, *words: str, expect: int = 0) -> str:
        """Run `raymq`. Returns: what it said."""
        done = subprocess.run(
            [sys.executable, "-m", "raymq", *words],
            capture_output=True,
            text=True,
            check=False,
            env=self.environment,
            timeout=120,
        )
        said = done.stdout + done.stderr
        assert done.returncode == expect, f"{words}: {done.returncode}\n{said}"
        return done.stdout if not expect else said

    def address(self) -> str:
        """Of the Ray."""
        owned = ray_host.load_owned(self.first, Files())
        assert owned is not None
        return owned.address


class Shard:
    """The only shard of a cluster in one mode."""

    def __init__(self, home: Home, paths: ClusterPaths) -> None:
        self.home, self.paths = home, paths
        self.cluster = raymq.connect(paths.data_dir)

    def pool(self) -> Path:
        """The leader's transient pool."""
        return Path(SHM_DIR, self.paths.replica(0, 0).joinpath(NAME_FILE).read_text())

    def status(self) -> dict[str, Any]:
        """{} while it does not serve."""
        try:
            facts: dict[str, Any] = self.cluster.status()["shards"][0]
        except RayMQError:
            return {}
        return facts if facts.get("state") == "RUNNING" else {}

    def pid(self, role: str) -> int:
        """Of the process that works in a role; 0 while none does."""
        facts = self.status()
        if not facts or role == "commit_log":
            return int(facts.get("pid", 0))
        lease = facts["supervisor"]["roles"][role]
        return int(lease["pid"]) if lease["granted"] else 0

    def await_role(self, load: Load, role: str, *, but: int = 0) -> int:
        """The pid of the process that works in a role, once it is another than `but`."""
        found = [0]

        def look() -> None:
            found[0] = self.pid(role)
            load.pause()

        until(lambda: found[0] not in (0, but), look)
        return found[0]

    def read(self, topic: str) -> Iterator[Read]:
        """Every message that is visible now."""
        for facts in self.cluster.describe_topic(topic)["queues"]:
            queue, shard = facts["queue_id"], facts["shard"]
            for records in read_range(
                self.cluster, topic, queue, shard, facts["min_offset"], facts["max_offset"]
            ):
                rows = message_batch(shard, records)
                offsets = rows.column("offset").to_pylist()
                for offset, text in zip(offsets, rows.column("body").to_pylist(), strict=True):
                    yield Read(queue, offset, text)


@contextlib.contextmanager
def targets(*pids: int) -> Iterator[list[int]]:
    """Processes pinned by descriptors: a signal never reaches another that got a pid."""
    with contextlib.ExitStack() as undo:
        found = [os.pidfd_open(pid) for pid in pids]
        for descriptor in found:
            undo.callback(os.close, descriptor)
        yield found


def send(descriptors: list[int], number: signal.Signals) -> None:
    """A signal to each; one that has ended needs none."""
    for descriptor in descriptors:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, number)


@pytest.fixture(scope="module")
def home() -> Iterator[Home]:
    # Not pytest's directory: it is under /tmp, which a cluster that is meant to last refuses.
    place = Path(tempfile.mkdtemp(prefix=".raymq-test-", dir=disk_root()))
    home = Home(place)
    try:
        home.command(
            "start", home.first.data_dir, "--name", "first", "--segment-size-bytes", "65536"
        )
        yield home
    finally:
        owned_ray.stop_owned(home.first, files=Files(), clock=Clock())
        for name in place.glob(f"*/shard-*/**/{NAME_FILE}"):
            Path(SHM_DIR, name.read_text()).unlink(missing_ok=True)
        shutil.rmtree(place)


def wait_for_writes(load: Load) -> None:
    """Both producers get receipts for what they send from now on."""
    sent = load.history.sent()
    until(lambda: load.history.acked_beyond(sent), load.pause)


@pytest.fixture(scope="module")
def runs(home: Home) -> Iterator[dict[Mode | None, Future[None]]]:
    """All on clusters of their own, several at a time: much of it is waiting for processes to come."""
    with ThreadPoolExecutor(TOGETHER) as threads:
        found: dict[Mode | None, Future[None]] = {
            mode: threads.submit(keep_promises, home, mode) for mode in MODES
        }
        found[None] = threads.submit(change_mode, home)
        yield found


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_a_mode_keeps_its_promise_while_its_processes_die(
    runs: dict[Mode | None, Future[None]], mode: Mode
) -> None:
    runs[mode].result()


SERVICES = {
    "group_commit": "GroupCommit",
    "flush_real_time": "FlushRealTime",
    "commit_real_time": "CommitRealTime",
    "replication": "Replication",
}


def keep_promises(home: Home, mode: Mode) -> None:
    """Kill and stop the processes of a mode under load, and look for what was promised."""
    paths = ClusterPaths(home.place / mode.name)
    home.command(
        *("start", paths.data_dir, "--name", mode.name, "--address", home.address()),
        *("--flush", mode.flush, "--transient-pool" if mode.pool else "--no-transient-pool"),
        *("--segment-size-bytes", str(1 << 20), "--replicas", str(mode.replicas)),
    )
    shard, history = Shard(home, paths), History()
    shard.cluster.create_topic("load", queues=QUEUES)
    with (
        shard.cluster,
        Load(shard.cluster, "load", history, producers=PRODUCERS, queues=QUEUES, acks=ACKS) as load,
        Reader(shard.cluster, "load") as reader,
    ):
        until(lambda: len(history.acked()) == PRODUCERS * QUEUES, load.pause)
        for role in mode.roles:
            shard.await_role(load, role)
        said = home.command("status", paths.data_dir, "--verbose")
        for role, name in SERVICES.items():
            assert (f"{name}: at " in said) == (role in mode.roles), said
        for _ in range(ROUNDS):
            # test_kill.py does the same to a mirror and to the processes of a mode without a pool: only the long run
            # repeats it here.
            if mode.pool or LONG:
                hurt_a_satellite(shard, load, "commit_real_time" if mode.pool else mode.roles[0])
            if (mode.pool and mode.replicas == 1) or LONG:
                hurt_commit_log(shard, load)
            hurt_all_processes(shard, load, mode)
        load.stop()
        reader.stop()
        acked = history.acked()
        total = sum(map(len, acked.values()))
        log: list[Read] = []

        def read() -> None:
            # Async with a pool, what was acknowledged is readable when it is committed; what the leader alone has
            # acknowledged, when the follower has it.
            log[:] = shard.read("load")
            load.ended.wait(Load.PACE_S)

        until(lambda: len(log) >= total, read)
        found = faults(acked, log, history.sent(), [reader.got])
        assert not found, f"{len(found)} faults, such as {found[:5]}"
        assert reader.got
    assert paths.replica(0, 0).joinpath(NAME_FILE).exists() == mode.pool
    stopped = json.loads(home.command("stop", paths.data_dir, "--json").splitlines()[-1])
    assert stopped["clean"]
    assert not paths.replica(0, 0).joinpath(NAME_FILE).exists()
    assert verify(paths.replica(0, 0)) == []


def hurt_a_satellite(shard: Shard, load: Load, role: str) -> None:
    """Kill it, and stop it: one that stands still is taken for dead and replaced."""
    for number in (signal.SIGKILL, signal.SIGSTOP):
        old = shard.await_role(load, role)
        with targets(old) as processes:
            send(processes, number)
            shard.await_role(load, role, but=old)
        wait_for_writes(load)


def hurt_commit_log(shard: Shard, load: Load) -> None:
    """Stop it and let it go on, then kill it; its satellites live."""
    old = shard.await_role(load, "commit_log")
    with targets(old) as processes:
        send(processes, signal.SIGSTOP)
        load.ended.wait(STOPPED_S)
        send(processes, signal.SIGCONT)
        wait_for_writes(load)
        assert shard.await_role(load, "commit_log") == old
        send(processes, signal.SIGKILL)
    shard.await_role(load, "commit_log", but=old)
    wait_for_writes(load)


def hurt_all_processes(shard: Shard, load: Load, mode: Mode) -> None:
    """Stop all processes at once and let them go on; then kill all, and if puts are synced lose the pool, too."""
    roles = ["commit_log", *mode.roles]
    with targets(*(shard.await_role(load, role) for role in roles)) as processes:
        send(processes, signal.SIGSTOP)
        load.ended.wait(ALL_STOPPED_S)
        send(processes, signal.SIGCONT)
        wait_for_writes(load)
    pids = [shard.await_role(load, role) for role in roles]
    with targets(*pids) as processes:
        if mode.pool and mode.flush == "sync":
            shard.pool().unlink()
        send(processes, signal.SIGKILL)
    shard.await_role(load, "commit_log", but=pids[0])
    wait_for_writes(load)


def test_a_mode_may_change_between_two_starts(runs: dict[Mode | None, Future[None]]) -> None:
    runs[None].result()


def change_mode(home: Home) -> None:
    """The same messages under each mode that follows."""
    paths = ClusterPaths(home.place / "changing")
    bodies = []
    for turn, options in enumerate(
        (["--transient-pool"], ["--flush", "async", "--no-transient-pool"])
    ):
        first = ("--name", "changing", "--segment-size-bytes", "65536") if not turn else ()
        home.command("start", paths.data_dir, "--address", home.address(), *first, *options)
        with raymq.connect(paths.data_dir) as cluster:
            assert cluster.status()["shards"][0]["transient_pool"] == (turn == 0)
            cluster.create_topic("t", queues=1)
            with cluster.producer() as producer:
                bodies.append(b"turn %d" % turn)
                producer.send("t", bodies[-1]).result(30)
        if turn == 0:
            said = home.command(
                "start",
                *(paths.data_dir, "--address", home.address(), "--no-transient-pool"),
                expect=2,
            )
            assert "transient_pool=False" in said
            home.command("stop", paths.data_dir)
    shard = Shard(home, paths)
    with shard.cluster:
        assert [read.body for read in shard.read("t")] == bodies
    home.command("stop", paths.data_dir)
