"""Finds the offset up to which two logs are equal, by asking the follower which of the leader's chain values it has.

Equal chain values at one offset mean equal logs below that offset. The answers are therefore monotone, and a few rounds
of evenly spaced candidates are enough. A segment's start is a unit boundary on every replica, whatever units are cached
for the segment. If a segment has no match at all, the search continues in the segment before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from raymq.store.log.chain import ChainUnit
from raymq.store.log.segments.segment_paths import segment_start_of

from .wire import PROBE_LIMIT, Probe

#: more than any segment holds
_WHOLE_SEGMENT = 1 << 62


class ChainView(Protocol):
    """The leader's chain below its committed end, which never changes while the leader runs."""

    def read_from(self, offset: int, max_bytes: int) -> list[ChainUnit]:
        """Units of one segment from the one that starts at `offset`, at least one, while they fit `max_bytes`."""


class Match(NamedTuple):
    """Both logs are equal below `end`, where the chain value is `value`."""

    end: int
    value: int


class MatchSearch:
    """One search: send `probe`, pass the reply to `answer`, until `found` or `failed`."""

    def __init__(
        self, chain: ChainView, upto: int, *, log_start: int, segment_size_bytes: int
    ) -> None:
        """Args: `upto`: the end of the shorter log."""
        self._chain = chain
        self._log_start = log_start
        self._size = segment_size_bytes
        self._upto = upto
        self._boundaries: list[Match] = []
        self._asked: list[Match] = []
        #: the match, once known
        self.found: Match | None = None
        #: even the start of the leader's log does not match
        self.failed = False

        if upto < log_start or not upto:
            # Nothing to compare: an empty follower matches an empty beginning.
            self._finish(upto)
        else:
            self._load(segment_start_of(upto - 1, segment_size_bytes))

    def probe(self) -> Probe:
        """The next request."""
        return Probe(tuple(self._asked))

    def answer(self, candidate: int, last_end: int) -> None:
        """Note the highest candidate that matched. A reply to another probe than the last is ignored."""
        if self.found is not None or self.failed or not -1 <= candidate < len(self._asked):
            return
        if self._asked[-1].end != last_end:
            return

        if candidate < 0:
            # The first candidate is the first boundary that is left, and it does not match either.
            start = self._boundaries[0].end
            if start <= self._log_start:
                self._finish(start)
            else:
                self._load(start - self._size)
            return

        at = self._boundaries.index(self._asked[candidate])
        after = (
            self._boundaries.index(self._asked[candidate + 1])
            if candidate + 1 < len(self._asked)
            else len(self._boundaries)
        )
        self._boundaries = self._boundaries[at:after]

        if len(self._boundaries) == 1:
            self.found = self._boundaries[0]
        else:
            self._ask()

    def _finish(self, start: int) -> None:
        """End the search at the lowest offset that can be compared: a match only at 0."""
        # Logs that begin at 0 are equal there. Bytes that a leader has deleted cannot be compared.
        if start == self._log_start == 0:
            self.found = Match(0, 0)
        else:
            self.failed = True

    def _load(self, segment: int) -> None:
        """Search among the boundaries of one segment: the starts of its units, and the end of the last."""
        start = max(segment, self._log_start)
        units = self._chain.read_from(start, _WHOLE_SEGMENT)
        # Those beyond are still being written, and may be seen in part.
        units = [unit for unit in units if unit.start < unit.end <= self._upto]
        self._boundaries = [Match(unit.start, unit.previous) for unit in units]

        if units:
            self._boundaries.append(Match(units[-1].end, units[-1].value))
        elif start == 0:
            self.found = Match(0, 0)
            return
        else:
            head = self._chain.read_from(start, 1)
            self._boundaries = [Match(start, head[0].previous)] if head else []

        if not self._boundaries:
            self.failed = True
            return
        self._ask()

    def _ask(self) -> None:
        """Choose the candidates of the next probe."""
        self._asked = _spread(self._boundaries, PROBE_LIMIT)


def _spread(items: Sequence[Match], limit: int) -> list[Match]:
    """At most `limit` of the items, the first and the last among them, evenly apart."""
    if len(items) <= limit:
        return list(items)
    last = len(items) - 1
    return [items[step * last // (limit - 1)] for step in range(limit)]
