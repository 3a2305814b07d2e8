"""Carries the messages of elections between the CommitLog processes of a shard.

A message is a call of the operation `elect` at the other replica. The call returns that replica's messages to this one,
so a question and its answer are one exchange. Each other replica has a thread here, because a call may block. A message
that cannot be delivered is dropped: the machine asks again. Elections need no Ray, because replicas keep each other's
addresses (`PeerAddresses`).

The outcomes of the calls say whether this replica can call another one (R5 and R16 of docs/design.md). A replica that
calls others and hears them may itself be one that no other can call: its certificate is refused, or a firewall keeps
calls from it. A thread that has had no message for a while calls with a question of its own.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from raymq.replication.wire import ReplicaProcess
from raymq.store.base.clock import Clock
from raymq.store.base.errors import DeliveryUnknown, RayMQError, Rejected, Unavailable
from raymq.store.log.mending.fitting import SoundBytes

logger = logging.getLogger("raymq.elections")

#: messages to one replica that wait while a call is under way. A newer one makes older ones worthless
QUEUED_MAX = 8
#: how long a call may take: a message that is older than an election is worthless
CALL_TIMEOUT_S = 1.0
#: from a failed call to the next one
RETRY_S = 0.1
#: from the last call to a question whether the other replica can be called
QUESTION_S = 3.0
#: the same while calls are not answered; not for a refused certificate, of which gRPC prints a line each time
QUESTION_AGAIN_S = 0.5
#: a replica of which no call was answered for this long cannot be called. A refused certificate counts at once
UNANSWERED_MS = 5_000
#: fields of the errors of a refused certificate, as `cluster.transport.tls.failure` names them
CERTIFICATE_FIELDS = ("ca", "RAY_TLS_SERVER_CERT")


class PeerCalls(Protocol):
    """Calls of one other replica. Callers: one thread."""

    def elect(self, frame: bytes, timeout_s: float) -> list[bytes]:
        """Deliver a message. Returns: the messages that answer it. Raises: RayMQError, OSError."""

    def replica_id(self, timeout_s: float) -> int:
        """Which replica it is. Raises: RayMQError, OSError."""

    def log_units(self, start: int, stop: int, timeout_s: float) -> SoundBytes:
        """Log bytes [start, stop) of that replica, for `LogRepair`. Raises: RayMQError, OSError."""

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
        #: the replicas that cannot be called
        self.uncallable: frozenset[int] = frozenset()
        #: held while `uncallable` changes
        self._lock = threading.Lock()
        self._peers = {
            each: _Peer(each, connect, receive, on_outcome=self._note_outcomes) for each in replicas
        }

    def send(self, replica: int, frame: bytes) -> None:
        """Deliver a message soon or never. Returns at once."""
        self._peers[replica].send(frame)

    def hear(self, process: ReplicaProcess) -> None:
        """Note that a process of another replica has called this one."""
        if process.id in self._peers:
            self._peers[process.id].hear(process)

    def refused_certificates(self) -> dict[int, str]:
        """The replicas whose certificates are refused, and why."""
        found = {replica: peer.refusal for replica, peer in self._peers.items()}
        return {replica: refusal for replica, refusal in found.items() if refusal}

    def _note_outcomes(self) -> None:
        with self._lock:
            self.uncallable = frozenset(
                replica for replica, peer in self._peers.items() if not peer.is_callable
            )

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
        *,
        on_outcome: Callable[[], None],
    ) -> None:
        """Args: `on_outcome`: called when `is_callable` may have changed."""
        self._clock = Clock()
        self._on_outcome = on_outcome
        #: whether calls of this replica are answered, as far as is known
        self.is_callable = True
        #: why its certificate is refused; empty: it is not
        self.refusal = ""
        #: when the first of the calls failed that came after the last answer; None: the last call was answered
        self._unanswered_since_ms: int | None = None
        #: a question is due, whether or not there is a message
        self._asks = False
        #: the process of that replica that called last
        self._process: ReplicaProcess | None = None
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

    def hear(self, process: ReplicaProcess) -> None:
        """Note a call of a process of that replica. What failed before a new one listened says nothing about it."""
        with self._changed:
            if process == self._process:
                return
            self._process = process
            self._unanswered_since_ms = None
            if not self.refusal:
                self.is_callable = True
            self._asks = True
            self._changed.notify()
        self._on_outcome()

    def _note_answer(self) -> None:
        with self._changed:
            was_callable, self.is_callable = self.is_callable, True
            self._unanswered_since_ms, self.refusal = None, ""
        if not was_callable:
            logger.warning("replica %d can be called again", self._replica)
            self._on_outcome()

    def _note_failure(self, error: Exception) -> None:
        """Find out whether a failed call means that the replica cannot be called."""
        if isinstance(error, Rejected) and error.fields.get("field") in CERTIFICATE_FIELDS:
            refusal = error.message
        elif isinstance(error, (Unavailable, DeliveryUnknown, OSError)):
            refusal = ""
        elif isinstance(error, RayMQError):
            # The replica itself has refused the call.
            self._note_answer()
            return
        else:
            return

        now_ms = self._clock.monotonic_ms()
        with self._changed:
            if self._unanswered_since_ms is None:
                self._unanswered_since_ms = now_ms
            is_unanswered = now_ms - self._unanswered_since_ms >= UNANSWERED_MS
            was_callable = self.is_callable
            self.is_callable = not refusal and not is_unanswered and self.is_callable
            self.refusal = refusal or self.refusal
            has_changed = was_callable != self.is_callable
        if has_changed:
            logger.warning("replica %d cannot be called: %s", self._replica, error)
            self._on_outcome()

    def _run(self) -> None:
        calls: PeerCalls | None = None
        while (frame := self._take()) is not None:
            # A connection that was used before may lead to a process that has ended: a new one is tried at once.
            tries = 1 if calls is None else 2

            for _ in range(tries):
                try:
                    calls = calls or self._connect(self._replica)
                    answers = self._call(calls, frame)
                    break
                except Exception as error:
                    self._note_failure(error)
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

    def _call(self, calls: PeerCalls, frame: bytes) -> list[bytes]:
        """Deliver a message, or ask whether the replica answers. Raises: any error."""
        if frame:
            answers = calls.elect(frame, CALL_TIMEOUT_S)
            # Another replica, at an address that is out of date, gives no answer.
            is_answered = bool(answers)
        else:
            answers, found = [], calls.replica_id(CALL_TIMEOUT_S)
            is_answered = found == self._replica
            if not is_answered:
                raise Unavailable(f"replica {found} listens where replica {self._replica} did")
        if is_answered:
            self._note_answer()
        return answers

    def _take_answers(self, answers: list[bytes]) -> None:
        try:
            for answer in answers:
                self._receive(answer)
        except Exception:
            # An answer that cannot be taken is one that is lost. The thread must stay.
            logger.exception("replica %d", self._replica)

    def _take(self) -> bytes | None:
        """The next message. Empty: none came for a while. None: `close` was called."""
        with self._changed:
            is_answered = self._unanswered_since_ms is None
            wait_s = QUESTION_S if is_answered or self.refusal else QUESTION_AGAIN_S
            self._changed.wait_for(lambda: self._frames or self._asks or self._closed, wait_s)
            self._asks = False
            if self._closed:
                return None
            return self._frames.popleft() if self._frames else b""

    def _pause(self) -> None:
        """Wait before the next call. Messages that wait are as old as the one that failed."""
        with self._changed:
            self._frames.clear()
            self._changed.wait_for(lambda: self._closed, RETRY_S)


def _close(calls: PeerCalls | None) -> None:
    if calls is not None:
        with contextlib.suppress(RayMQError, OSError):
            calls.close()
