"""Calls of another replica whose address may be out of date.

A failed call lets the next connection try another address, and lets a thread ask Ray. Elections do not wait for Ray,
whose head may be away.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from raymq.store.base.clock import Clock
from raymq.store.base.errors import Corrupt

if TYPE_CHECKING:
    # Satellites, which stay small, import this module, too.
    from raymq.store.log.mending.fitting import SoundBytes

logger = logging.getLogger("raymq")

#: from one question about a replica whose known address fails to the next one
ASK_AGAIN_MS = 5_000

T = TypeVar("T")


class EndpointQuestions:
    """Questions to Ray where other replicas listen. A replica has at most one under way. Callers: any thread.

    Each runs in a thread of its own, because a question may hang for long while Ray's head is away.
    """

    def __init__(
        self,
        ask: Callable[[int], str | None],
        note: Callable[[int, str], None],
        *,
        clock: Clock | None = None,
    ) -> None:
        """Args: `ask`: asks Ray where a replica listens. None: its actor does not answer. `note`: takes each answer."""
        self._ask = ask
        self._note = note
        self._clock = clock or Clock()
        self._lock = threading.Lock()
        #: replica -> the last question
        self._questions: dict[int, _Question] = {}

    def ask(self, replica: int, timeout_s: float) -> str | None:
        """Ask now, or join the question under way. Returns: the answer; None: there is none in time."""
        question = self._begin(replica, pause_ms=0)
        question.answered.wait(timeout_s)
        return question.endpoint

    def begin(self, replica: int) -> None:
        """Ask without waiting, unless the last question is younger than ASK_AGAIN_MS."""
        self._begin(replica, pause_ms=ASK_AGAIN_MS)

    def _begin(self, replica: int, *, pause_ms: int) -> _Question:
        now_ms = self._clock.monotonic_ms()
        with self._lock:
            last = self._questions.get(replica)
            if last is not None and (
                not last.answered.is_set() or now_ms - last.begun_ms < pause_ms
            ):
                return last
            question = self._questions[replica] = _Question(now_ms)

        name = f"raymq-where-{replica}"
        try:
            threading.Thread(
                target=self._run, args=(replica, question), name=name, daemon=True
            ).start()
        except RuntimeError:
            # The next failed call tries again.
            logger.exception("no thread could be started")
            question.answered.set()
        return question

    def _run(self, replica: int, question: _Question) -> None:
        try:
            question.endpoint = self._ask(replica)
            if question.endpoint is not None:
                self._note(replica, question.endpoint)
        except Exception:
            # After any error there is no answer. The next question may get one.
            logger.exception("replica %d", replica)
        finally:
            question.answered.set()


class _Question:
    """One question to Ray."""

    def __init__(self, begun_ms: int) -> None:
        self.begun_ms = begun_ms
        self.endpoint: str | None = None
        self.answered = threading.Event()


class NotedCalls:
    """Calls of another replica that note whether its address works. Callers: one thread."""

    def __init__(
        self,
        calls: Any,
        *,
        note_answer: Callable[[], None],
        note_failure: Callable[[], None],
    ) -> None:
        """Args: `calls`: a PeerCalls that can also say the replica's `status`."""
        self._calls = calls
        self._note_answer = note_answer
        self._note_failure = note_failure

    def elect(self, frame: bytes, timeout_s: float) -> list[bytes]:
        """See `PeerCalls.elect`."""
        answers: list[bytes] = self._noting(lambda: self._calls.elect(frame, timeout_s))
        # A replica gives no answer to a message that is addressed to another one.
        if answers:
            self._note_answer()
        return answers

    def replica_id(self, timeout_s: float) -> int:
        """See `PeerCalls.replica_id`."""
        found: int = self._noting(lambda: self._calls.replica_id(timeout_s))
        return found

    def log_units(self, start: int, stop: int, timeout_s: float) -> SoundBytes:
        """See `PeerCalls.log_units`."""
        units: SoundBytes = self._noting(lambda: self._calls.log_units(start, stop, timeout_s))
        return units

    def log_match(self, candidates: Sequence[tuple[int, int]], timeout_s: float) -> tuple[int, int]:
        """See `PeerCalls.log_match`."""
        found: tuple[int, int] = self._noting(lambda: self._calls.log_match(candidates, timeout_s))
        return found

    def status(self, timeout_s: float) -> dict[str, Any]:
        """What that replica says of itself. Raises: RayMQError."""
        status: dict[str, Any] = self._noting(lambda: self._calls.status(timeout_s))
        return status

    def close(self) -> None:
        """Release the connection."""
        self._calls.close()

    def _noting(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except Corrupt:
            # That replica has answered: its own bytes are damaged, too.
            raise
        except Exception:
            self._note_failure()
            raise
