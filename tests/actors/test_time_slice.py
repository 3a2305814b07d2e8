"""Threads that answer others have short time slices, where the kernel has them."""

from __future__ import annotations

import ctypes
import os
import platform
import queue
import subprocess
import sys
import threading

from raymq.actors.ray.actor_classes import start_thread
from raymq.actors.shared import time_slice
from raymq.actors.shared.time_slice import SLICE_NS, shorten_time_slice


def kernel_has_slices() -> bool:
    """Whether this is Linux 6.12 or later."""
    major, minor = platform.release().split(".")[:2]
    return (int(major), int(minor)) >= (6, 12)


def slice_ns() -> int:
    """The slice of the calling thread. Before Linux 6.12: 0."""
    held = ctypes.create_string_buffer(time_slice.ATTRIBUTES.size)
    assert not ctypes.CDLL(None).syscall(time_slice.SCHED_GETATTR, 0, held, len(held), 0)
    return time_slice.ATTRIBUTES.unpack(held.raw)[5]


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
    assert taken == kernel_has_slices()
    assert now == (SLICE_NS if taken else usual)
    assert slice_ns() == usual, "the slice of another thread has changed"


def test_threads_that_it_starts_have_the_same_slice():
    def inherited() -> int:
        shorten_time_slice()
        return in_a_thread(slice_ns)

    assert in_a_thread(inherited) == (SLICE_NS if kernel_has_slices() else slice_ns())


def test_nice_stays_as_it_was():
    program = (
        "import os; from raymq.actors.shared.time_slice import shorten_time_slice as shorten; "
        "os.nice(7); shorten(); print(os.nice(0))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert int(done.stdout) == os.nice(0) + 7


def test_a_thread_without_slices_is_left_as_it_is():
    def idle() -> tuple[bool, int]:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        return shorten_time_slice(), os.sched_getscheduler(0)

    assert in_a_thread(idle) == (False, os.SCHED_IDLE)


def test_another_machine_is_left_as_it_is(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert not in_a_thread(shorten_time_slice)


def test_the_work_of_an_actor_has_short_slices():
    slices: queue.Queue = queue.Queue()
    start_thread(lambda number: slices.put((number, slice_ns())), 5)
    assert slices.get(timeout=10) == (5, SLICE_NS if kernel_has_slices() else slice_ns())
