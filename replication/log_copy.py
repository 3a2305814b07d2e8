"""A log that is copied before an election, from a replica that cannot lead: a pure machine.

A replica of which a sync has failed leads no more, and still votes. If its log has more than that of each replica that
could lead, none is elected. So one of these copies what it lacks, and asks for votes then. The source gives whole units
up to its last synced byte, and they never change. Nothing is acknowledged: the copied log is one that an earlier
leader's stream could have left here as well. `ElectionMachine.may_copy` says when bytes may be taken.

    find the end up to which both logs are equal (`MatchSearch`)  ->  ask for the bytes from there on, range by range
"""

from __future__ import annotations

from typing import NamedTuple

from raymq.store.log.mending.fitting import SoundBytes, are_linked
from raymq.store.log.segments.segment_paths import segment_start_of

from .match import ChainView, MatchSearch
from .wire import AppendEntries, Probe


class LogRange(NamedTuple):
    """The bytes [start, stop) of the source's log, which lie in one segment."""

    start: int
    stop: int


class LogCopy:
    """One copy: send `question`, pass its answer, until there is no question."""

    def __init__(
        self,
        chain: ChainView,
        end: int,
        source: tuple[int, int],
        *,
        log_start: int,
        segment_size_bytes: int,
        range_bytes: int,
    ) -> None:
        """Args: `chain`, `end`, `log_start`: of the log here. `source`: epoch and end of what the source gives.

        `range_bytes`: most bytes of one question.
        """
        self._search = MatchSearch(
            chain,
            min(end, source[1]),
            log_start=log_start,
            segment_size_bytes=segment_size_bytes,
        )
        self._source_epoch, self._source_end = source
        self._size = segment_size_bytes
        self._range_bytes = range_bytes
        #: end and chain value of what was taken last; None: the search goes on
        self._last: tuple[int, int] | None = None
        #: bytes from there on that are no whole unit yet
        self._part = b""
        self._take_match()

    @property
    def question(self) -> Probe | LogRange | None:
        """What to ask next; None: the log is copied, or cannot be."""
        if self._search.failed:
            return None
        if self._last is None:
            return self._search.probe()

        start = self._last[0] + len(self._part)
        if start >= self._source_end:
            return None
        segment_end = segment_start_of(start, self._size) + self._size
        return LogRange(start, min(start + self._range_bytes, segment_end, self._source_end))

    @property
    def failed(self) -> bool:
        """The source has deleted the place at which both logs are equal, or they are not equal anywhere."""
        return self._search.failed

    def take_match(self, candidate: int, last_end: int) -> None:
        """Take the answer to a Probe: the fields of a ProbeReply."""
        self._search.answer(candidate, last_end)
        self._take_match()

    def _take_match(self) -> None:
        found = self._search.found
        if found is not None:
            self._last = (found.end, found.value)

    def take_range(self, found: SoundBytes) -> tuple[AppendEntries, memoryview] | None:
        """Take the answer to a LogRange. Returns: what a `LogReceiver` takes next; None: there is no whole unit yet.

        An answer to another question is ignored.
        """
        wanted, last = self.question, self._last
        if last is None or not isinstance(wanted, LogRange) or found.start != wanted.start:
            return None
        end, value = last
        begins = [(unit.start, unit.previous) for unit in found.units[:1]]
        newest = max((unit.epoch for unit in found.units), default=0)
        if begins != [(end, value)] or not are_linked(found.units) or newest > self._source_epoch:
            # It is not the log that was compared, or offered.
            self._search.failed = True
            return None

        data = self._part + found.data
        units = [unit for unit in found.units if unit.end <= end + len(data)]
        if not units:
            self._part = data
            return None
        # No byte that is equal here is cut: the confirmed end may be above what this replica knows.
        message = AppendEntries(end, value, units[-1].end, tuple(units))
        self._last = (units[-1].end, units[-1].value)
        self._part = data[units[-1].end - end :]
        return message, memoryview(data)[: units[-1].end - end]
