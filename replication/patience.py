"""How long a replica waits for the others: its times grow with the slowest delay that it measured lately."""

from __future__ import annotations

from .delays import SlowestDelay
from .election_events import Received
from .election_limits import ElectionLimits
from .wire import EpochReply, PreVote, PreVoteReply, RequestVote, VoteReply

#: questions whose answers may still come
ASKED_MAX = 16


class Patience:
    """The times of one replica's elections, and the delays that they follow. No promise depends on them."""

    def __init__(self, limits: ElectionLimits) -> None:
        self._limits = limits
        self._delay = SlowestDelay(
            most_ms=limits.delay_most_ms,
            halving_ms=limits.delay_halving_ms,
            step_ms=limits.delay_step_ms,
        )
        #: (kind of a question, its number or epoch) -> when it was asked
        self._asked_ms: dict[tuple[type, int], int] = {}

    def slowest_ms(self, now_ms: int) -> int:
        """The slowest delay of a message, or of this process, that was measured lately."""
        return self._delay.value_ms(now_ms)

    def election_ms(self, now_ms: int) -> int:
        """A leader that is not heard for so long may have ended."""
        return self._limits.election_ms + 2 * self.slowest_ms(now_ms)

    def silence_ms(self, now_ms: int) -> int:
        """A leader whom no majority answers for so long may be cut off."""
        return self._limits.majority_silence_ms + 3 * self.slowest_ms(now_ms)

    def note_asked(self, kind: type, number: int, now_ms: int) -> None:
        """Note when a question was asked: the delay of its answers shows how long a candidacy must wait."""
        self._asked_ms[kind, number] = now_ms
        if len(self._asked_ms) > ASKED_MAX:
            del self._asked_ms[next(iter(self._asked_ms))]

    def measure_answer(self, event: Received, now_ms: int) -> None:
        """Note how long an answer took, that to an earlier question too."""
        message, asked_ms = event.message, None
        if isinstance(message, (PreVoteReply, EpochReply)):
            asked_ms = self._asked_ms.get((PreVote, message.number))
        elif isinstance(message, VoteReply):
            asked_ms = self._asked_ms.get((RequestVote, event.epoch))
        if asked_ms is not None:
            self._delay.note(now_ms - asked_ms, now_ms)

    def measure_gap(self, gap_ms: int, now_ms: int) -> None:
        """Note for how long heartbeats, or the answers to them, did not come."""
        self._delay.note(gap_ms - self._limits.heartbeat_ms, now_ms)
