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
from pathlib import Path
from typing import Any

import pytest

import raymq
from raymq.cluster import ray_host
from raymq.cluster.columns import message_batch
from raymq.cluster.paths import ClusterPaths
from raymq.cluster.range_reader import read_range
from raymq.store.clock import Clock
from raymq.store.errors import RayMQError
from raymq.store.files import Files
from raymq.store.inspect import verify
from raymq.store.transient_pool import NAME_FILE, SHM_DIR
from tests.support.history import History, Load, Read, faults
from tests.support.waiting import until

PRODUCERS, QUEUES = 2, 2
MODES = [
    *(
        pytest.param(flush, pool, "single", id=f"{flush}, pool {'on' if pool else 'off'}")
        for flush in ("sync", "async")
        for pool in (False, True)
    ),
    pytest.param("async", True, "mirror", id="mirror, async, pool on"),
]


class Home:
    """One Ray for all modes, started by the first cluster as a user does."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("RAY")},
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
        seat = facts["roles"]["roles"][role]
        return int(seat["pid"]) if seat["granted"] else 0

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
            queue, shard = facts["queue"], facts["shard"]
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
    place = Path(tempfile.mkdtemp(prefix=".raymq-test-", dir=Path.home()))
    home = Home(place)
    try:
        home.command(
            "start", home.first.data_dir, "--name", "first", "--segment-size-bytes", "65536"
        )
        yield home
    finally:
        ray_host.stop_owned(home.first, files=Files(), clock=Clock())
        for name in place.glob(f"*/shard-*/**/{NAME_FILE}"):
            Path(SHM_DIR, name.read_text()).unlink(missing_ok=True)
        shutil.rmtree(place)


def wait_for_writes(load: Load) -> None:
    """Both producers get receipts for what they send from now on."""
    sent = load.history.sent()
    until(lambda: load.history.acked_beyond(sent), load.pause)


@pytest.mark.slow
@pytest.mark.parametrize(("flush", "pool", "replication"), MODES)
def test_a_mode_keeps_its_promise_while_its_processes_die(
    home: Home, flush: str, pool: bool, replication: str
):
    name = f"{replication}-{flush}-{'pool' if pool else 'plain'}"
    paths = ClusterPaths(home.place / name)
    home.command(
        *("start", paths.data_dir, "--name", name, "--address", home.address()),
        *("--flush", flush, "--transient-pool" if pool else "--no-transient-pool"),
        *("--segment-size-bytes", str(1 << 20), "--replication", replication),
    )
    flusher = "group_commit" if flush == "sync" else "flush_real_time"
    roles = [flusher, *(["commit_real_time"] if pool else [])]
    if replication == "mirror":
        roles.append("replication")
    shard = Shard(home, paths)
    shard.cluster.create_topic("load", queues=QUEUES)
    history = History()
    with (
        shard.cluster,
        Load(shard.cluster, "load", history, producers=PRODUCERS, queues=QUEUES) as load,
    ):
        until(lambda: len(history.acked()) == PRODUCERS * QUEUES, load.pause)
        for role in roles:
            shard.await_role(load, role)
        said = home.command("status", paths.data_dir)
        for role in ("group_commit", "flush_real_time", "commit_real_time", "replication"):
            assert (f"{role}: at " in said) == (role in roles), said
        for number in (signal.SIGKILL, signal.SIGSTOP):
            for role in roles[1:]:
                old = shard.await_role(load, role)
                with targets(old) as processes:
                    send(processes, number)
                    # One that stands still is taken for dead and replaced.
                    shard.await_role(load, role, but=old)
                wait_for_writes(load)
        old = shard.await_role(load, "commit_log")
        with targets(old) as processes:
            send(processes, signal.SIGSTOP)
            load.ended.wait(0.5)
            send(processes, signal.SIGCONT)
            wait_for_writes(load)
            send(processes, signal.SIGKILL)
        old = shard.await_role(load, "commit_log", but=old)
        wait_for_writes(load)
        everybody = [old, *(shard.await_role(load, role) for role in roles)]
        with targets(*everybody) as processes:
            send(processes, signal.SIGKILL)
        shard.await_role(load, "commit_log", but=old)
        wait_for_writes(load)
        load.stop()
        acked = history.acked()
        total = sum(map(len, acked.values()))
        seen: list[Read] = []

        def read() -> None:
            # Async with a pool, what was acknowledged is readable when it is committed.
            seen[:] = shard.read("load")
            load.ended.wait(Load.PACE_S)

        until(lambda: len(seen) >= total, read)
        found = faults(acked, seen, history.sent())
        assert not found, f"{len(found)} faults, such as {found[:5]}"
    name_file = paths.replica(0, 0) / NAME_FILE
    assert name_file.exists() == pool
    stopped = json.loads(home.command("stop", paths.data_dir, "--json").splitlines()[-1])
    assert stopped["clean"]
    assert not name_file.exists()
    assert verify(paths.replica(0, 0)) == []


@pytest.mark.slow
def test_a_mode_may_change_between_two_starts(home: Home):
    paths = ClusterPaths(home.place / "changing")
    bodies = []
    for turn, options in enumerate(
        (["--transient-pool"], ["--flush", "async"], ["--no-transient-pool"])
    ):
        first = ("--name", "changing", "--segment-size-bytes", "65536") if not turn else ()
        home.command("start", paths.data_dir, "--address", home.address(), *first, *options)
        with raymq.connect(paths.data_dir) as cluster:
            facts = cluster.status()["shards"][0]
            assert facts["transient_pool"] == (turn < 2)
            cluster.create_topic("t", queues=1)
            with cluster.producer() as producer:
                bodies.append(b"turn %d" % turn)
                producer.send("t", bodies[-1]).result(30)
        if turn == 1:
            said = home.command(
                "start",
                *(paths.data_dir, "--address", home.address(), "--no-transient-pool"),
                expect=2,
            )
            assert "transient_pool=False" in said
        if turn < 2:
            home.command("stop", paths.data_dir)
    with raymq.connect(paths.data_dir) as cluster:
        shard = Shard(home, paths)
        assert [read.body for read in shard.read("t")] == bodies
    home.command("stop", paths.data_dir)
