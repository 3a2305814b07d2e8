"""Replication's connection to a follower: which thread sends a frame, which one hears of an answer, and how it ends."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from raymq.actors.satellites import follower_connection
from raymq.actors.satellites.follower_connection import FollowerConnection
from raymq.replication.log_sender import Connected, Disconnected, FrameReceived
from raymq.replication.wire import Ack, FrameHeader, ReplicaProcess, encode
from raymq.store.base.errors import Unavailable

TIMEOUT_S = 20.0
HEADER = FrameHeader(b"c" * 16, 0, ReplicaProcess(1, 7), ReplicaProcess(0, 5), 1, 1)
ANSWER = encode(HEADER, Ack(0, 0, 0))


class Stream:
    """A stream whose follower answers and reads as the test says."""

    def __init__(self) -> None:
        self.answers: queue.Queue[bytes | None] = queue.Queue()
        #: name of the sending thread and frame
        self.sent: queue.Queue[tuple[str, bytes]] = queue.Queue()
        self.reads = threading.Event()
        self.reads.set()
        self.aborted = threading.Event()
        self.closed = threading.Event()

    def send(self, header: bytes, body: Any) -> None:
        self.sent.put((threading.current_thread().name, header))
        assert self.reads.wait(TIMEOUT_S)
        if self.aborted.is_set():
            raise Unavailable("aborted")

    def receive(self) -> tuple[bytes, Any]:
        answer = self.answers.get(timeout=TIMEOUT_S)
        if answer is None:
            raise Unavailable("the stream has ended")
        return answer, None

    def abort(self) -> None:
        self.aborted.set()
        self.reads.set()
        self.answers.put(None)

    def close(self) -> None:
        self.closed.set()


class World:
    """A connection and its stream."""

    def __init__(self) -> None:
        self.stream = Stream()
        self.wakeups: queue.Queue[None] = queue.Queue()
        #: names of the threads that had a frame
        self.frames: queue.Queue[str] = queue.Queue()
        self.connection = FollowerConnection(
            self,
            lambda: "host:1",
            log_start=lambda: 0,
            wake=lambda: self.wakeups.put(None),
            on_frame=lambda: self.frames.put(threading.current_thread().name),
        )
        self.connection.connect()
        self.wakeups.get(timeout=TIMEOUT_S)
        assert self.connection.take_events() == [Connected(0)]

    def connect(self, endpoint: str) -> Stream:
        assert endpoint == "host:1"
        return self.stream

    def sent(self) -> tuple[str, bytes]:
        return self.stream.sent.get(timeout=TIMEOUT_S)


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.connection.close()


def test_a_frame_that_cannot_block_is_sent_by_the_caller(world: World) -> None:
    world.connection.send(b"small", None, cannot_block=True)
    assert world.sent() == (threading.current_thread().name, b"small")


def test_a_frame_that_may_block_is_sent_by_the_sending_thread(world: World) -> None:
    world.stream.reads.clear()
    world.connection.send(b"large", None)
    assert world.sent() == ("raymq-replica-send", b"large")
    # It is still being sent: the order of frames stays.
    world.connection.send(b"next", None, cannot_block=True)
    world.stream.reads.set()
    assert world.sent() == ("raymq-replica-send", b"next")


def test_the_receiving_thread_says_that_a_frame_has_arrived(world: World) -> None:
    world.stream.answers.put(ANSWER)
    assert world.frames.get(timeout=TIMEOUT_S) == "raymq-replica-receive"
    assert world.connection.take_events() == [FrameReceived(HEADER, Ack(0, 0, 0))]


@pytest.mark.parametrize("cannot_block", [True, False])
def test_a_frame_that_cannot_be_sent_means_that_the_connection_is_lost(
    world: World, cannot_block: bool
) -> None:
    world.stream.aborted.set()
    world.connection.send(b"frame", None, cannot_block=cannot_block)
    world.wakeups.get(timeout=TIMEOUT_S)
    (event,) = world.connection.take_events()
    assert isinstance(event, Disconnected)
    assert "aborted" in event.reason


def test_a_dropped_connection_is_aborted_and_its_events_are_forgotten(world: World) -> None:
    world.connection.disconnect()
    assert world.stream.closed.wait(TIMEOUT_S)
    assert world.stream.aborted.is_set()
    assert world.connection.take_events() == []


def test_the_last_frame_is_sent_before_the_end(world: World) -> None:
    world.connection.disconnect(b"last")
    assert world.sent() == ("raymq-replica-send", b"last")
    # An abort would overtake the frame.
    assert not world.stream.aborted.wait(0.05)
    assert world.stream.closed.wait(TIMEOUT_S)


def test_a_follower_that_reads_nothing_does_not_keep_a_dropped_connection(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower_connection, "LAST_FRAME_S", 0.01)
    world.stream.reads.clear()
    world.connection.send(b"large", None)
    assert world.sent() == ("raymq-replica-send", b"large")
    world.connection.disconnect(b"last")
    assert world.stream.closed.wait(TIMEOUT_S)
