"""Carries the messages of elections between the CommitLog processes of a shard.

A message is a call of the operation `elect` at the other replica. The call returns that replica's messages to this one,
so a question and its answer are one exchange. Each other replica has a thread here, because a call may block. A message
that cannot be delivered is dropped: the machine asks again. Elections need no Ray, because replicas keep each other's
addresses (`PeerAddresses`).
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from raymq.replication.delays import CallTimeout
from raymq.store.base.clock import Clock
from raymq.store.base.errors import RayMQError
from raymq.store.log.mending.fitting import SoundBytes

logger = logging.getLogger("raymq.elections")

#: messages to one replica that wait while a call is under way. A newer one makes older ones worthless
QUEUED_MAX = 3
#: how long a call may take. An answer that comes too late is lost, so calls wait longer where answers come late
CALL_MS_LEAST, CALL_MS_MOST = 1_000, 8_000
#: from a failed call to the next one
RETRY_S = 0.1


class PeerCalls(Protocol):
    """Calls of one other replica. Callers: one thread."""

    def elect(self, frame: bytes, timeout_s: float) -> list[bytes]:
        """Deliver a message. Returns: the messages that answer it. Raises: RayMQError, OSError."""

    def replica_id(self, timeout_s: float) -> int:
        """Which replica it is, for `CallablePeers`. Raises: RayMQError, OSError."""

    def log_units(self, start: int, stop: int, timeout_s: float) -> SoundBytes:
        """Log bytes [start, stop) of that replica, for `LogRepair` and `LogCopier`. Raises: RayMQError, OSError."""

    def log_match(self, candidates: Sequence[tuple[int, int]], timeout_s: float) -> tuple[int, int]:
        """The last (unit end, chain value) that the log of that replica has, and the end of the last one asked.

        -1: it has none. For `LogCopier`. Raises: RayMQError, OSError.
        """

    def close(self) -> None:
        """Release the connection."""


class ElectionPeers:
    """The other replicas of a shard, as elections reach them. Callers: any thread."""

    def __init__(
        self,
        replicas: Iterable[int],
        connect: Callable[[int], PeerCalls],
        *,
        receive: Callable[[bytes], None],
    ) -> None:
        """Args: `connect`: makes the calls of a replica. `receive`: takes an answer."""
        self._peers = {each: _Peer(each, connect, receive) for each in replicas}

    def send(self, replica: int, frame: bytes) -> None:
        """Deliver a message soon or never. Returns at once."""
        self._peers[replica].send(frame)

    def start(self) -> None:
        """Begin to deliver."""
        for peer in self._peers.values():
            peer.thread.start()

    def close(self) -> None:
        """Deliver nothing more. Calls under way end by themselves."""
        for peer in self._peers.values():
            peer.close()


class _Peer:
    """The thread that calls one replica."""

    def __init__(
        self,
        replica: int,
        connect: Callable[[int], PeerCalls],
        receive: Callable[[bytes], None],
    ) -> None:
        self._replica = replica
        self._connect = connect
        self._receive = receive
        self._frames: deque[bytes] = deque(maxlen=QUEUED_MAX)
        self._changed = threading.Condition()
        self._closed = False
        self.thread = threading.Thread(target=self._run, name=f"raymq-elect-{replica}", daemon=True)

    def send(self, frame: bytes) -> None:
        with self._changed:
            self._frames.append(frame)
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _run(self) -> None:
        calls: PeerCalls | None = None
        timeout, clock = CallTimeout(least_ms=CALL_MS_LEAST, most_ms=CALL_MS_MOST), Clock()
        while (frame := self._take()) is not None:
            # A connection that was used before may lead to a process that has ended: a new one is tried at once.
            tries = 1 if calls is None else 2

            for _ in range(tries):
                begun_ms = clock.monotonic_ms()
                try:
                    calls = calls or self._connect(self._replica)
                    answers = calls.elect(frame, timeout.value_ms / 1000)
                    timeout.note_answer(clock.monotonic_ms() - begun_ms)
                    break
                except Exception as error:
                    timeout.note_failure(clock.monotonic_ms() - begun_ms)
                    # Whatever it is, the message is lost as in a broken network. The thread must stay.
                    expected = isinstance(error, (RayMQError, OSError))
                    level = logging.DEBUG if expected else logging.ERROR
                    logger.log(level, "replica %d: %s", self._replica, error, exc_info=not expected)
                    _close(calls)
                    calls = None
            else:
                self._pause()
                continue
            self._take_answers(answers)
        _close(calls)

    def _take_answers(self, answers: list[bytes]) -> None:
        try:
            for answer in answers:
                self._receive(answer)
        except Exception:
            # An answer that cannot be taken is one that is lost. The thread must stay.
            logger.exception("replica %d", self._replica)

    def _take(self) -> bytes | None:
        """The next message; None after `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._frames or self._closed)
            return None if self._closed else self._frames.popleft()

    def _pause(self) -> None:
        """Wait before the next call. Messages that wait are as old as the one that failed."""
        with self._changed:
            self._frames.clear()
            self._changed.wait_for(lambda: self._closed, RETRY_S)


def _close(calls: PeerCalls | None) -> None:
    if calls is not None:
        with contextlib.suppress(RayMQError, OSError):
            calls.close()
