"""Threads that answer others have short time slices, where the kernel has them."""

from __future__ import annotations

import ctypes
import os
import queue
import subprocess
import sys
import threading
from types import SimpleNamespace

from raymq.actors.ray.actor_classes import start_thread
from raymq.actors.shared import time_slice
from raymq.actors.shared.time_slice import SLICE_NS, shorten_time_slice


def slice_ns(thread: int = 0) -> int:
    """The slice of a thread, by its number in the kernel; 0: the calling one. Before Linux 6.12: 0."""
    held = ctypes.create_string_buffer(time_slice.ATTRIBUTES.size)
    _, number = time_slice.CALLS[os.uname().machine]
    assert not ctypes.CDLL(None).syscall(number, thread, held, len(held), 0)
    return time_slice.ATTRIBUTES.unpack(held.raw)[5]


def short_ns() -> int:
    """The slice of a thread that asked for a short one. Before Linux 6.12: 0."""
    return SLICE_NS if slice_ns() else 0


def in_a_thread(work):
    """The result of `work` in a thread that ends, so that the others keep their slices."""
    results: queue.Queue = queue.Queue()
    thread = threading.Thread(target=lambda: results.put(work()))
    thread.start()
    thread.join()
    return results.get_nowait()


def test_the_slice_is_as_short_as_the_kernel_has_it():
    usual = slice_ns()
    taken, now = in_a_thread(lambda: (shorten_time_slice(), slice_ns()))
    assert taken == bool(usual)
    assert now == short_ns()
    assert slice_ns() == usual, "the slice of another thread has changed"


def test_threads_that_it_starts_have_the_same_slice():
    def of_another() -> int:
        shorten_time_slice()
        return in_a_thread(slice_ns)

    assert in_a_thread(of_another) == short_ns()


def test_nice_stays_as_it_was():
    program = (
        "import os; from raymq.actors.shared.time_slice import shorten_time_slice as shorten; "
        "before = os.nice(19 - os.nice(0)); print(shorten(), before, os.nice(0))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout.split() == [str(bool(slice_ns())).encode(), b"19", b"19"]


def test_an_older_kernel_is_asked_for_nothing(monkeypatch):
    calls = []

    def call(number: int, thread: int, held, *rest: int) -> int:
        calls.append(number)
        held[:] = time_slice.ATTRIBUTES.pack(48, 0, 0, 0, 0, 0, 0, 0)
        return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(syscall=call))
    assert not shorten_time_slice()
    assert calls == [time_slice.CALLS[os.uname().machine][1]]


def test_a_sandbox_may_refuse_the_calls(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(syscall=lambda *args: -1))
    assert not shorten_time_slice()


def test_a_thread_without_slices_is_left_as_it_is():
    def idle() -> tuple[bool, int]:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        return shorten_time_slice(), os.sched_getscheduler(0)

    assert in_a_thread(idle) == (False, os.SCHED_IDLE)


def test_another_machine_is_left_as_it_is(monkeypatch):
    other = SimpleNamespace(sysname="Linux", machine="riscv64")
    monkeypatch.setattr(os, "uname", lambda: other)
    assert not in_a_thread(shorten_time_slice)


def test_the_work_of_an_actor_has_short_slices():
    slices: queue.Queue = queue.Queue()
    start_thread(lambda number: slices.put((number, slice_ns())), 5)
    assert slices.get(timeout=10) == (5, short_ns())
