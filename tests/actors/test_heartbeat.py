"""A CommitLog that hangs is killed by its satellites. A slow one is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from raymq.actors.replica import open_replica
from raymq.actors.shared import heartbeat, processes
from raymq.actors.shared.control_block import ControlBlock, shared_file
from raymq.actors.shared.heartbeat import (
    HEARTBEAT_TIMEOUT_MS,
    ITERATION_MAX_MS,
    LATE_CHECK_MS,
    PERIOD_MS,
    Heartbeat,
    HeartbeatMonitor,
)
from raymq.actors.shared.processes import ProcessIdentity, identify
from raymq.store.base.files import Files
from raymq.store.config.store_config import StoreConfig
from raymq.store.engine.message_store import MessageStore
from tests.support.clock import ManualClock
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[2]
FILES = Files()

#: a satellite with a short heartbeat timeout
FLUSHER = """
import sys
from raymq.actors.satellites import satellite
from raymq.actors.shared import heartbeat
from raymq.actors.satellites.flush_service import FlushService
from raymq.store.config.store_config import StoreConfig
heartbeat.HEARTBEAT_TIMEOUT_MS, heartbeat.LATE_CHECK_MS, satellite.HEARTBEAT_PERIOD_MS = 400, 2000, 50
FlushService(sys.argv[1], sys.argv[2], StoreConfig(segment_size_bytes=262144)).run()
"""
HOST = """
import sys, threading
from pathlib import Path
from raymq.actors.shared import heartbeat
from raymq.actors.replica import open_replica
from raymq.store.config.store_config import StoreConfig
heartbeat.PERIOD_MS = 50
replica = 0 if sys.argv[3] == "leader" else 1
host = open_replica(
    Path(sys.argv[1]),
    StoreConfig(segment_size_bytes=262144, prewrite_window_bytes=65536),
    identity={"cluster_id": "c", "shard": 0, "replica": replica, "incarnation": 1},
    roles=(sys.argv[2],),
)
print(host.status()["state"], flush=True)
threading.Event().wait()
"""


@pytest.fixture
def control(tmp_path: Path) -> Iterator[ControlBlock]:
    (tmp_path / "raymq").mkdir()
    page = ControlBlock.open(shared_file(str(tmp_path), "control"), files=FILES)
    yield page
    page.close()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(["sleep", "600"])
    yield child
    child.kill()
    child.wait()


def identity_of(child: subprocess.Popen[bytes]) -> ProcessIdentity:
    found = identify(child.pid, files=FILES)
    assert found is not None
    return found


class Looking:
    """A satellite that checks the heartbeat every PERIOD_MS."""

    def __init__(self, control: ControlBlock) -> None:
        self.monitor = HeartbeatMonitor(control, files=FILES)
        self.now_ms = 1_000_000

    def check(self, after_ms: int = PERIOD_MS) -> bool:
        self.now_ms += after_ms
        return self.monitor.check(self.now_ms)

    def checks(self, total_ms: int) -> bool:
        return any(self.check() for _ in range(total_ms // PERIOD_MS))


def test_a_commit_log_that_is_silent_through_punctual_checks_is_killed(
    control: ControlBlock, sleeper: subprocess.Popen[bytes]
) -> None:
    control.start_heartbeat(identity_of(sleeper), 7)
    satellite = Looking(control)
    assert not satellite.checks(HEARTBEAT_TIMEOUT_MS)
    assert satellite.checks(2 * PERIOD_MS)
    assert sleeper.wait(10) == -signal.SIGKILL


@pytest.mark.parametrize(("share", "is_spared"), [(1.0, True), (0.2, True), (0.05, False)])
def test_a_commit_log_that_is_busy_gets_four_times_as_long(
    control: ControlBlock,
    sleeper: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
    share: float,
    is_spared: bool,
) -> None:
    control.start_heartbeat(identity_of(sleeper), 7)
    satellite = Looking(control)
    # As long as the process runs, or waits for a core.
    monkeypatch.setattr(processes, "active_ms", lambda pid, *, files: (satellite.now_ms * share, 0))
    assert satellite.checks(3 * HEARTBEAT_TIMEOUT_MS) is not is_spared
    # It may be busy with an endless loop.
    assert not is_spared or satellite.checks(HEARTBEAT_TIMEOUT_MS + 4 * PERIOD_MS)
    assert sleeper.wait(10) == -signal.SIGKILL


def test_a_commit_log_that_hangs_after_it_was_busy_is_killed_soon(
    control: ControlBlock, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    control.start_heartbeat(identity_of(sleeper), 7)
    satellite = Looking(control)
    busy_until_ms = satellite.now_ms + 2 * HEARTBEAT_TIMEOUT_MS
    monkeypatch.setattr(
        processes, "active_ms", lambda pid, *, files: (0, min(satellite.now_ms, busy_until_ms))
    )
    assert not satellite.checks(2 * HEARTBEAT_TIMEOUT_MS)
    assert satellite.checks(HEARTBEAT_TIMEOUT_MS)


def test_late_checks_of_a_busy_commit_log_excuse_no_more_than_they_count(
    control: ControlBlock, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    control.start_heartbeat(identity_of(sleeper), 7)
    satellite = Looking(control)
    monkeypatch.setattr(processes, "active_ms", lambda pid, *, files: (satellite.now_ms, 0))
    rounds = 0
    while not satellite.check() and not satellite.check(LATE_CHECK_MS + 100):
        rounds += 1
    # Of each round one check counts, a quarter.
    assert rounds * PERIOD_MS < 5 * HEARTBEAT_TIMEOUT_MS


def test_a_commit_log_with_a_heartbeat_is_not_killed(
    control: ControlBlock, sleeper: subprocess.Popen[bytes]
) -> None:
    control.start_heartbeat(identity_of(sleeper), 7)
    satellite = Looking(control)
    for beat in range(5):
        assert not satellite.checks(HEARTBEAT_TIMEOUT_MS - PERIOD_MS)
        control.heartbeat_ms = 100 + beat
    assert sleeper.poll() is None


def test_time_in_which_the_satellite_did_not_run_either_does_not_count(
    control: ControlBlock, sleeper: subprocess.Popen[bytes]
) -> None:
    control.start_heartbeat(identity_of(sleeper), 7)
    satellite = Looking(control)
    assert not satellite.checks(HEARTBEAT_TIMEOUT_MS - PERIOD_MS)
    for _ in range(5):
        # All processes stood still, or the machine did.
        assert not satellite.check(LATE_CHECK_MS + 1)
    assert not satellite.check(10 * HEARTBEAT_TIMEOUT_MS)
    assert sleeper.poll() is None


def test_late_checks_on_a_busy_machine_do_not_hide_a_commit_log_that_hangs(
    control: ControlBlock, sleeper: subprocess.Popen[bytes]
) -> None:
    control.start_heartbeat(identity_of(sleeper), 7)
    satellite = Looking(control)
    assert not satellite.checks(HEARTBEAT_TIMEOUT_MS - PERIOD_MS)
    assert not satellite.check(LATE_CHECK_MS + 1)
    assert satellite.checks(3 * PERIOD_MS)
    assert sleeper.wait(30) != 0


def test_a_commit_log_whose_heartbeat_was_stopped_or_never_started_is_not_killed(
    control: ControlBlock, sleeper: subprocess.Popen[bytes]
) -> None:
    satellite = Looking(control)
    control.begin(5, identity_of(sleeper), 0, 7)
    assert not satellite.checks(3 * HEARTBEAT_TIMEOUT_MS)
    control.start_heartbeat(identity_of(sleeper), 8)
    control.heartbeat_on = 0
    assert not satellite.checks(3 * HEARTBEAT_TIMEOUT_MS)
    assert sleeper.poll() is None


def test_the_next_process_with_the_same_pid_is_not_killed(
    control: ControlBlock, sleeper: subprocess.Popen[bytes]
) -> None:
    found = identity_of(sleeper)
    control.start_heartbeat(found._replace(start_time=found.start_time - 1), 7)
    assert not Looking(control).checks(3 * HEARTBEAT_TIMEOUT_MS)
    assert sleeper.poll() is None


def test_the_heartbeat_stops_with_an_ack_loop_that_hangs(
    control: ControlBlock, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    beating = Heartbeat(control, files=FILES)
    monkeypatch.setattr(beating, "_clock", clock)

    def beats() -> bool:
        before = control.heartbeat_ms
        beating.beat_if_alive()
        return control.heartbeat_ms > before

    # During recovery the ack loop is not running.
    clock.advance(10 * ITERATION_MAX_MS)
    assert beats()
    beating.note_iteration()
    clock.advance(ITERATION_MAX_MS)
    assert beats()
    clock.advance(1)
    assert not beats()
    beating.note_iteration()
    with beating.blocking_call:
        with beating.blocking_call:
            pass
        clock.advance(10 * ITERATION_MAX_MS)
        assert beats()
    clock.advance(ITERATION_MAX_MS)
    assert beats()
    clock.advance(ITERATION_MAX_MS)
    assert not beats()
    beating.loop_ended()
    clock.advance(1)
    assert beats()


def test_a_heartbeat_whose_thread_could_not_be_started_is_stopped(
    control: ControlBlock, monkeypatch: pytest.MonkeyPatch
) -> None:
    beating = Heartbeat(control, files=FILES)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            beating.start()
    beating.stop()
    assert not control.heartbeat_on


def test_a_commit_log_has_a_heartbeat_while_it_recovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "PERIOD_MS", 10)
    recover = MessageStore._recover
    seen: list[int] = []

    def slowly(store: MessageStore, follows: bool) -> None:
        page = ControlBlock.open(shared_file(str(tmp_path), "control"), files=FILES)
        try:
            assert page.heartbeat_on
            assert page.process.pid == os.getpid()
            until(
                lambda: len(set(seen)) > 3,
                lambda: (seen.append(page.heartbeat_ms), threading.Event().wait(0.005)),
            )
        finally:
            page.close()
        recover(store, follows)

    monkeypatch.setattr(MessageStore, "_recover", slowly)
    host = open_replica(
        tmp_path,
        StoreConfig(segment_size_bytes=256 * 1024, prewrite_window_bytes=64 * 1024),
        identity={"cluster_id": "c", "shard": 0},
        roles=("group_commit",),
    )
    host.close(0.0)
    assert len(set(seen)) > 3
    page = ControlBlock.open(shared_file(str(tmp_path), "control"), files=FILES)
    assert not page.heartbeat_on
    page.close()


@pytest.mark.parametrize(
    ("kind", "role"), [("leader", "group_commit"), ("follower", "flush_real_time")]
)
def test_a_stopped_process_of_a_commit_log_is_killed_by_its_satellite(
    tmp_path: Path, kind: str, role: str
) -> None:
    words = [str(tmp_path / "store"), role, kind]
    host = subprocess.Popen([sys.executable, "-c", HOST, *words], cwd=ROOT, stdout=subprocess.PIPE)
    flusher = subprocess.Popen([sys.executable, "-c", FLUSHER, *words], cwd=ROOT)

    try:
        assert host.stdout is not None
        assert host.stdout.readline() == b"RUNNING\n"
        page = ControlBlock.open(shared_file(words[0], "control"), files=FILES)
        until(lambda: page.roles[role].granted, lambda: threading.Event().wait(0.01))
        page.close()
        host.send_signal(signal.SIGSTOP)
        assert host.wait(30) == -signal.SIGKILL
        assert flusher.poll() is None
    finally:
        for child in (host, flusher):
            child.kill()
            child.communicate()
