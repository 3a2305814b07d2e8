"""Threads that answer others have short time slices, where the kernel has them."""

from __future__ import annotations

import ctypes
import os
import platform
import queue
import subprocess
import sys
import threading

import pytest

from raymq.actors.ray.actor_classes import start_thread
from raymq.actors.shared import time_slice
from raymq.actors.shared.time_slice import SLICE_NS, shorten_time_slice
from raymq.cluster.consume.consumer import Consumer
from raymq.cluster.produce.producer import Producer
from tests.support.fake_backend import FakeCluster


def kernel_has_slices() -> bool:
    """Whether this is Linux 6.12 or later."""
    major, minor = platform.release().split(".")[:2]
    return (int(major), int(minor)) >= (6, 12)


def slice_ns(thread: int = 0) -> int:
    """The slice of a thread, by its number in the kernel; 0: the calling one. Before Linux 6.12: 0."""
    held = ctypes.create_string_buffer(time_slice.ATTRIBUTES.size)
    assert not ctypes.CDLL(None).syscall(time_slice.SCHED_GETATTR, thread, held, len(held), 0)
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
    taken, now = in_a_thread(lambda: (shorten_time_slice(inherited=True), slice_ns()))
    assert taken == kernel_has_slices()
    assert now == (SLICE_NS if taken else usual)
    assert slice_ns() == usual, "the slice of another thread has changed"


@pytest.mark.parametrize("inherited", [True, False])
def test_threads_that_it_starts_have_the_same_slice_only_if_they_should(inherited):
    def of_another() -> int:
        shorten_time_slice(inherited=inherited)
        return in_a_thread(slice_ns)

    is_short = inherited and kernel_has_slices()
    assert in_a_thread(of_another) == (SLICE_NS if is_short else slice_ns())


def test_nice_stays_as_it_was():
    program = (
        "import os; from raymq.actors.shared.time_slice import shorten_time_slice as shorten; "
        "os.nice(7); shorten(inherited=True); print(os.nice(0))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert int(done.stdout) == os.nice(0) + 7


def test_a_thread_without_slices_is_left_as_it_is():
    def idle() -> tuple[bool, int]:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        return shorten_time_slice(inherited=True), os.sched_getscheduler(0)

    assert in_a_thread(idle) == (False, os.SCHED_IDLE)


def test_another_machine_is_left_as_it_is(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert not in_a_thread(lambda: shorten_time_slice(inherited=True))


def test_the_work_of_an_actor_has_short_slices():
    slices: queue.Queue = queue.Queue()
    start_thread(lambda number: slices.put((number, slice_ns())), 5)
    assert slices.get(timeout=10) == (5, SLICE_NS if kernel_has_slices() else slice_ns())


def test_the_threads_of_a_client_that_receive_have_short_slices():
    cluster = FakeCluster()
    cluster.create_topic("t", queues=1)
    with Producer(cluster) as producer, Consumer(cluster, "t", start="earliest") as consumer:
        producer.send("t", b"m").result(10)
        assert [message.body for message in consumer.poll(timeout=10)] == [b"m"]
        slices = {thread.name: slice_ns(thread.native_id) for thread in threading.enumerate()}
    cluster.close()

    short = SLICE_NS if kernel_has_slices() else slice_ns()
    assert slices["raymq-sender-0"] == slices["raymq-reader-0"] == short
    assert slices["MainThread"] == slice_ns()
