"""Finds out which other replicas of a shard this one can call, as their clients have to (R5 and R16 of docs/design.md).

A replica that calls others and hears them may itself be one that no other can call: its certificate is refused or has
expired, a firewall keeps connections from it, or it has no descriptor left for one. Connections that are open already
do not show that. So each question has a connection of its own, and each other replica a thread here.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable
from typing import Protocol

from raymq.replication.wire import ReplicaProcess
from raymq.store.base.clock import Clock
from raymq.store.base.errors import DeliveryUnknown, RayMQError, Unavailable, UntrustedServer

logger = logging.getLogger("raymq.elections")

#: from an answer, or a refused certificate, to the next question: gRPC prints a line for each refusal
QUESTION_S = 4.0
#: the same after any other failure
QUESTION_AGAIN_S = 0.5
#: how long an answer may take. One that is late is an answer
ANSWER_TIMEOUT_S = 3.0
#: a replica that answers no question for this long cannot be called. A refused certificate counts at once
UNANSWERED_MS = 5_000


class Question(Protocol):
    """A new connection to one other replica."""

    def replica_id(self, timeout_s: float) -> int:
        """Which replica it is. Raises: RayMQError, OSError."""

    def close(self) -> None:
        """Release the connection."""


class CallablePeers:
    """The other replicas of a shard, and whether each can be called. Callers: any thread."""

    def __init__(self, replicas: Iterable[int], connect: Callable[[int], Question]) -> None:
        """Args: `connect`: makes a connection to a replica."""
        #: the replicas that cannot be called
        self.uncallable: frozenset[int] = frozenset()
        #: held while `uncallable` changes
        self._lock = threading.Lock()
        self._peers = {each: _Peer(each, connect, self._note_outcomes) for each in replicas}

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
        """Begin to ask."""
        for peer in self._peers.values():
            peer.thread.start()

    def close(self) -> None:
        """Ask nothing more. Questions under way end by themselves."""
        for peer in self._peers.values():
            peer.close()


class _Peer:
    """The thread that asks one replica."""

    def __init__(
        self, replica: int, connect: Callable[[int], Question], on_outcome: Callable[[], None]
    ) -> None:
        """Args: `on_outcome`: called when `is_callable` may have changed."""
        #: whether its questions are answered, as far as is known
        self.is_callable = True
        #: why its certificate is refused; empty: it is not
        self.refusal = ""
        self._replica = replica
        self._connect = connect
        self._on_outcome = on_outcome
        self._clock = Clock()
        #: when the first question failed that came after the last answer; None: the last one was answered
        self._unanswered_since_ms: int | None = None
        #: the process of that replica that called last
        self._process: ReplicaProcess | None = None
        #: a question is due at once
        self._asks = True
        self._closed = False
        self._changed = threading.Condition()
        self.thread = threading.Thread(target=self._run, name=f"raymq-calls-{replica}", daemon=True)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    def hear(self, process: ReplicaProcess) -> None:
        """Note a call of a process of that replica. What failed before a new one listened says nothing about it."""
        if process == self._process:
            return
        with self._changed:
            self._process = process
            self._unanswered_since_ms = None
            if not self.refusal:
                self.is_callable = True
            self._asks = True
            self._changed.notify()
        self._on_outcome()

    def _run(self) -> None:
        while self._await_question():
            try:
                self._ask()
            except Exception as error:
                # No error is an answer. The thread must stay.
                self._note_failure(error)
            else:
                self._note_answer()

    def _await_question(self) -> bool:
        """Wait until a question is due. Returns: False after `close`."""
        with self._changed:
            is_failing = self._unanswered_since_ms is not None and not self.refusal
            wait_s = QUESTION_AGAIN_S if is_failing else QUESTION_S
            self._changed.wait_for(lambda: self._asks or self._closed, wait_s)
            self._asks = False
            return not self._closed

    def _ask(self) -> None:
        """Ask once, over a new connection. Raises: any error, if the replica cannot be called."""
        question = self._connect(self._replica)
        try:
            found = question.replica_id(ANSWER_TIMEOUT_S)
        finally:
            with contextlib.suppress(RayMQError, OSError):
                question.close()
        if found != self._replica:
            # At an address that is out of date.
            raise Unavailable(f"replica {found} listens where replica {self._replica} did")

    def _note_answer(self) -> None:
        with self._changed:
            was_callable, self.is_callable = self.is_callable, True
            self._unanswered_since_ms, self.refusal = None, ""
        if not was_callable:
            logger.warning("replica %d can be called again", self._replica)
            self._on_outcome()

    def _note_failure(self, error: Exception) -> None:
        """Find out whether a failed question means that the replica cannot be called."""
        refusal = ""
        if isinstance(error, UntrustedServer):
            refusal = error.message
        elif isinstance(error, RayMQError) and not isinstance(
            error, (Unavailable, DeliveryUnknown)
        ):
            # The replica itself has refused the call.
            self._note_answer()
            return

        now_ms = self._clock.monotonic_ms()
        with self._changed:
            if self._unanswered_since_ms is None:
                self._unanswered_since_ms = now_ms
            is_unanswered = now_ms - self._unanswered_since_ms >= UNANSWERED_MS
            was_callable = self.is_callable
            self.is_callable = was_callable and not refusal and not is_unanswered
            self.refusal = refusal or self.refusal
        if was_callable and not self.is_callable:
            logger.warning("replica %d cannot be called: %s", self._replica, error)
            self._on_outcome()
