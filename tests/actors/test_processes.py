"""Processes held by pidfd: the right one is killed, and only that one."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from raymq.actors.shared import processes
from raymq.actors.shared.processes import (
    BUSY_WEIGHT,
    LOOK_MS,
    SILENT_MIN_MS,
    ProcessHandle,
    ProcessIdentity,
    SilentTime,
    active_ms,
    identify,
    new_incarnation,
    own_identity,
)
from raymq.store.base.files import Files
from tests.support.waiting import until

FILES = Files()


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


def handle_on(process: subprocess.Popen[bytes]) -> ProcessHandle:
    identity = identify(process.pid, files=FILES)
    assert identity is not None
    handle = ProcessHandle.open(identity, files=FILES)
    assert handle is not None
    return handle


def test_a_killed_process_has_exited(child: subprocess.Popen[bytes]):
    handle = handle_on(child)
    assert not handle.exited()
    handle.kill()
    assert handle.wait_exit(10_000)
    # A zombie, which was not waited for, has exited all the same.
    assert handle.exited()
    assert child.wait() == -signal.SIGKILL
    handle.kill()
    handle.close()


def test_a_stopped_process_dies_too(child: subprocess.Popen[bytes]):
    handle = handle_on(child)
    os.kill(child.pid, signal.SIGSTOP)
    handle.kill()
    assert handle.wait_exit(10_000)
    handle.close()


def test_waiting_for_a_living_process_times_out(child: subprocess.Popen[bytes]):
    handle = handle_on(child)
    assert not handle.wait_exit(1)
    handle.close()


def test_a_reused_pid_is_not_the_old_process(child: subprocess.Popen[bytes]):
    identity = identify(child.pid, files=FILES)
    assert identity is not None
    old = ProcessIdentity(child.pid, identity.start_time - 1)
    assert ProcessHandle.open(old, files=FILES) is None
    assert child.poll() is None


def test_a_pid_without_a_process_has_no_handle(child: subprocess.Popen[bytes]):
    identity = identify(child.pid, files=FILES)
    assert identity is not None
    child.kill()
    child.wait()
    assert identify(child.pid, files=FILES) is None
    assert ProcessHandle.open(identity, files=FILES) is None
    assert ProcessHandle.open(ProcessIdentity(0, 0), files=FILES) is None


def test_a_command_with_spaces_and_parentheses_does_not_hide_the_start_time(tmp_path: Path):
    odd = tmp_path / "a) R 1 (b"
    odd.symlink_to(str(shutil.which("sleep")))
    process = subprocess.Popen([str(odd), "600"])
    try:
        identity = identify(process.pid, files=FILES)
        plain = own_identity(files=FILES)
        assert identity is not None
        assert identity.start_time >= plain.start_time > 0
    finally:
        process.kill()
        process.wait()


def test_closing_twice_is_harmless(child: subprocess.Popen[bytes]):
    handle = handle_on(child)
    handle.close()
    handle.close()
    assert child.poll() is None


def test_an_incarnation_and_a_fencing_token_fit_into_one_field():
    assert all(0 < new_incarnation() < 2**48 for _ in range(100))


def test_a_process_that_runs_is_active_and_one_that_is_stopped_is_not() -> None:
    spinning = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        began_ms = sum(active_ms(spinning.pid, files=FILES))
        until(
            lambda: sum(active_ms(spinning.pid, files=FILES)) > began_ms + 50,
            lambda: threading.Event().wait(0.01),
        )
        spinning.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, spinning.pid, os.WSTOPPED | os.WNOWAIT)
        stopped_ms = active_ms(spinning.pid, files=FILES)
        threading.Event().wait(0.1)
        assert active_ms(spinning.pid, files=FILES) == stopped_ms
    finally:
        spinning.kill()
        spinning.wait()
    assert active_ms(spinning.pid, files=FILES) == (0.0, 0.0)


def test_a_busy_process_is_excused_however_often_it_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_ms = 0
    # As the kernel counts it.
    monkeypatch.setattr(processes, "active_ms", lambda pid, *, files: (now_ms // 10 * 10, 0.0))
    silent = SilentTime(files=FILES)
    counted = 0.0
    for now_ms in range(0, 8_000, 3):
        counted = silent.count(1, now_ms, now_ms)
    least = SILENT_MIN_MS + (8_000 - SILENT_MIN_MS) * BUSY_WEIGHT
    assert least <= counted <= least + 2 * LOOK_MS
