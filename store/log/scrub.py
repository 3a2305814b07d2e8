"""Reads all stored bytes again and again, a little at a time, and compares them with the chain's CRCs.

Bit rot shows only at a read. Bytes that are never read rot unnoticed, and so does the copy that could repair them.
RocketMQ has nothing like this: it compares body CRCs after a crash only. Bytes in the page cache are not read from the
disk. Old bytes are seldom cached, and `from_disk` drops those that are.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raymq.store.checksum import crc32c
from raymq.store.clock import Clock
from raymq.store.errors import Corrupt, RayMQError
from raymq.store.files import NOT_TRIED, READABLE, Files

from .chain import ChainReader, ChainUnit
from .commit_log import CommitLog
from .segment_paths import find_segment

#: a pass over a small log reads no faster than needed, but at least this many bytes per second
LEAST_BYTES_PER_S = 8 << 20
#: a log in which nothing is synced yet is looked at again after this
EMPTY_WAIT_S = 10.0
#: how often a pass begins and ends within the retention
PASSES_IN_RETENTION = 2
#: not more often, however short the retention is
INTERVAL_LEAST_MS = 10 * 60 * 1000
#: faults that are remembered; the others are counted
FAULTS_MAX = 100
#: the position is noted after this many bytes: each note costs the disk a sync
_SAVED_BYTES = 1 << 30
#: waits are cut into pieces of this length, so that a stop is quick
_WAIT_S = 5.0

RULE = "bytes equal their chain unit"
COVERED = "the chain covers the log"


@dataclass
class ScrubCounters:
    """Totals since this object was made, for metrics."""

    bytes: int = 0
    units: int = 0
    passes: int = 0
    faults: int = 0


@dataclass
class _State:
    """The state that a file keeps from start to start."""

    position: int = 0
    #: when the last whole pass ended, 0: never
    passed_ms: int = 0
    faults: list[dict[str, Any]] = field(default_factory=list)


#: shorter waits are added up
_NAP_S = 0.05
#: about how many bytes of units are read from the chain at a time
STEP_BYTES = 1 << 20


class Scrub:
    """The walk over one log. One thread calls `step` or `run`. Any may read the counters.

    Only bytes below `limit()` are read: those that are synced and never change again. A fault stops nothing: reads of
    these records compare the records' own body CRCs.
    """

    def __init__(
        self,
        root: Path,
        segment_size_bytes: int,
        *,
        start: Callable[[], int],
        limit: Callable[[], int],
        files: Files | None = None,
        clock: Clock | None = None,
        bytes_per_s: int,
        pause_ms: int,
        pass_ms: int = 0,
        memory: str = "scrub",
        from_disk: bool = False,
        on_fault: Callable[[Corrupt], None] | None = None,
    ) -> None:
        """Args: `pause_ms`, from the end of one pass to the beginning of the next; `pass_ms`, how long a pass should
        take: as long as that is possible with at most `bytes_per_s`. 0: always at `bytes_per_s`, without a limit if
        that is 0 too.
        """
        self._root = root
        self._size = segment_size_bytes
        self._start = start
        self._limit = limit
        self._files = files or Files()
        self._clock = clock or Clock()
        self._bytes_per_s = bytes_per_s
        self._pause_ms = pause_ms
        self._pass_ms = pass_ms
        self._memory = root / "raymq" / memory
        self._from_disk = from_disk
        self._on_fault = on_fault or (lambda fault: None)
        self._chain = ChainReader(root / "raymq" / "chain", segment_size_bytes, files=self._files)
        self._segment, self._fd, self._path = -1, -1, root
        self._state = self._remembered()
        self._saved_at = self._state.position
        #: units to come, the next one last
        self._units: list[ChainUnit] = []
        #: the last position at which no unit began
        self._gap = -1
        self._wake = threading.Event()
        self.counters = ScrubCounters()
        #: found, and not read well since
        self.faults: list[Corrupt] = [
            Corrupt(item["message"], **item["fields"]) for item in self._state.faults
        ]

    @property
    def position(self) -> int:
        """Everything below was compared in this pass."""
        return self._state.position

    def status(self) -> dict[str, Any]:
        """For `status` and metrics."""
        return {
            "position": self.position,
            "passed_ms": self._state.passed_ms,
            "bytes_per_s": self.pace(),
            "too_slow": self.too_slow(),
            **vars(self.counters),
            "found": [{"message": str(f), **f.fields} for f in self.faults],
        }

    def pace(self) -> int:
        """Bytes per second at which this pass reads; 0: as fast as the disk."""
        if not self._pass_ms:
            return self._bytes_per_s
        needed = self._log_bytes() * 1000 // self._pass_ms
        return min(self._bytes_per_s, max(LEAST_BYTES_PER_S, needed))

    def too_slow(self) -> str | None:
        """Advice when a pass over so large a log takes too long; None when it does not."""
        whole = self._log_bytes()
        if (
            not self._bytes_per_s
            or not self._pass_ms
            or whole * 1000 <= self._bytes_per_s * (self._pass_ms + self._pause_ms)
        ):
            return None
        return (
            f"a pass over {whole} bytes takes {whole // self._bytes_per_s // 3600} h at scrub_bytes_per_s "
            f"({self._bytes_per_s}); it should take {(self._pass_ms + self._pause_ms) // 3_600_000} h: raise it, or "
            "lengthen scrub_interval_ms"
        )

    def _log_bytes(self) -> int:
        return max(0, self._limit() - self._start())

    def restart(self) -> None:
        """Begin a new pass now."""
        self._state = _State()
        self.faults = []

    def step(self) -> float:
        """Read and compare one append unit. Returns: seconds to wait until the next step, below 0 when it took longer.

        Bytes that the disk does not give back are a fault, and the pass continues after them.
        Raises: OSError where it is not the disk that fails; the position stays.
        """
        now = self._clock.now_ms()
        due = self._state.passed_ms + self._pause_ms
        position = max(self._state.position, self._start())
        if not self._state.position and self._state.passed_ms and now < due:
            return (due - now) / 1000
        if position >= self._limit():
            if not self._state.position:
                # An empty log does not count as a pass: new records would wait for the next one.
                return EMPTY_WAIT_S
            self._end_pass()
            return self._pause_ms / 1000
        began = self._clock.monotonic()
        if not self._units or self._units[-1].start != position:
            self._units = self._chain.read_from(position, STEP_BYTES)[::-1]
        if not self._units:
            self._state.position = self._without_unit(position)
            return 0.0
        unit = self._units.pop()
        if unit.end > self._limit():
            # Of a unit over the limit only a part is certain: it is for the next pass.
            self._units = []
            self._end_pass()
            return self._pause_ms / 1000
        self._compare(unit)
        self._state.position = unit.end
        if unit.end - self._saved_at >= _SAVED_BYTES:
            self._save()
        pace = self.pace()
        if not pace:
            return 0.0
        spent = self._clock.monotonic() - began
        return (unit.end - unit.start) / pace - spent

    def one_pass(self, progress: Callable[[str, int, int], None] | None = None) -> list[Corrupt]:
        """From where the last one was interrupted to the end. Returns: the faults of the pass."""
        passes = self.counters.passes
        begin = self._start()
        while self.counters.passes == passes and (self.position or begin < self._limit()):
            wait_s = self.step()
            if self.counters.passes == passes and wait_s > 0:
                self._clock.sleep_ms(wait_s * 1000)
            if progress is not None:
                limit = max(1, self._limit() - begin)
                progress("scrub", max(0, self.position - begin) or limit, limit)
        return self.faults

    def run(self, stopping: Callable[[], bool]) -> None:
        """Walk until `stopping`: the body of a thread. A disk that fails is tried again."""
        owed_s = 0.0
        while not stopping():
            try:
                owed_s = max(owed_s, -_NAP_S) + self.step()
                if owed_s < _NAP_S:
                    # Small units are compared many at a time: a wait for each would cost more than they do.
                    continue
                wait_s, owed_s = owed_s, 0.0
            except (OSError, RayMQError) as error:
                wait_s = _WAIT_S * 12
                # A lack of descriptors or memory says nothing about the disk.
                if not (isinstance(error, OSError) and error.errno in NOT_TRIED):
                    # A fault that cannot be reported now is found again at the next try.
                    with contextlib.suppress(OSError, RayMQError):
                        self._report(self.position, f"cannot be read: {error}", READABLE)
            deadline = self._clock.monotonic() + wait_s
            while not stopping() and (left := deadline - self._clock.monotonic()) > 0:
                self._wake.wait(min(left, _WAIT_S))
                self._wake.clear()
        self.close()

    def wake(self) -> None:
        """Check `stopping` now."""
        self._wake.set()

    def close(self) -> None:
        """Remember the position and close the files."""
        self._save()
        self._chain.close()
        self._close_log()

    # --- one unit -------------------------------------------------------------------------------------------

    def _compare(self, unit: ChainUnit) -> None:
        self.counters.units += 1
        self.counters.bytes += unit.end - unit.start
        try:
            if self._is_whole(unit):
                if self.faults:
                    self.faults = [
                        f for f in self.faults if not unit.start <= f.fields["offset"] < unit.end
                    ]
                return
        except Corrupt as error:
            self._report(int(error.fields["offset"]), error.message, READABLE, end=unit.end)
            return
        # A cut or a change of leader may have replaced unit and bytes between the two reads.
        same = self._is_still_there(unit)
        whole = self._is_whole(unit)
        if same and not whole and unit.end <= self._limit():
            self._report(
                unit.start,
                f"the bytes [{unit.start}, {unit.end}) are not those that were stored",
                RULE,
                end=unit.end,
            )

    def _is_whole(self, unit: ChainUnit) -> bool:
        data = self._read(unit)
        return data is None or crc32c(data) == unit.crc

    def _is_still_there(self, unit: ChainUnit) -> bool:
        again = ChainReader(self._root / "raymq" / "chain", self._size, files=self._files)
        try:
            return again.read_from(unit.start, 1)[:1] == [unit]
        finally:
            again.close()

    def _read(self, unit: ChainUnit) -> bytes | None:
        """The bytes of a unit; None when its file has been deleted.

        Raises: Corrupt naming the first byte that the disk does not give back.
        """
        segment = unit.start // self._size * self._size
        if segment != self._segment:
            self._close_log()
            self._path = find_segment(self._root / "commitlog", segment, files=self._files)
            try:
                self._fd = self._files.open_file(self._path, writable=False)
                self._segment = segment
            except FileNotFoundError:
                return None
        length = unit.end - unit.start
        if self._from_disk:
            self._files.drop_cached(self._fd, unit.start - segment, length)
        first = unit.start - segment
        return self._files.read_range(
            self._fd, first, first + length, path=self._path, base=segment
        )

    def _without_unit(self, position: int) -> int:
        """Where to continue when no unit starts at a position."""
        segment = position // self._size * self._size
        if position > segment:
            if position == self._gap:
                self._report(position, "no chain unit: nothing vouches for the rest", COVERED)
                return segment + self._size
            # The chain was made again with other edges. Files and units begin together.
            self._gap = position
            return segment
        self._report(segment, "no chain unit: nothing vouches for this file", COVERED)
        return segment + self._size

    def _report(self, offset: int, detail: str, rule: str, **fields: Any) -> None:
        if offset < self._start():
            # The file has been deleted: zeroed for its next use, or without its part of the chain.
            return
        segment = offset // self._size * self._size
        path = find_segment(self._root / "commitlog", segment, files=self._files)
        fault = Corrupt(
            f"{path} at {offset}: {detail}; `raymq store verify` says more",
            path=str(path),
            offset=offset,
            rule=rule,
            **fields,
        )
        self.counters.faults += 1
        known = {(f.fields["offset"], f.fields["rule"]) for f in self.faults}
        if (offset, rule) not in known and len(self.faults) < FAULTS_MAX:
            self.faults.append(fault)
            self._save()
            self._on_fault(fault)

    def _end_pass(self) -> None:
        self.counters.passes += 1
        self._state.position = 0
        # Damage in deleted files no longer counts.
        self.faults = [f for f in self.faults if f.fields["offset"] >= self._start()]
        self._state.passed_ms = self._clock.now_ms()
        self._save()

    # --- memory ---------------------------------------------------------------------------------------------

    def _remembered(self) -> _State:
        """A file that cannot be read begins a new pass: nothing depends on it."""
        try:
            return _State(**json.loads(self._files.read_file(self._memory)))
        except (OSError, ValueError, TypeError, RayMQError):
            return _State()

    def _save(self) -> None:
        self._state.faults = [{"message": str(f), "fields": f.fields} for f in self.faults]
        self._saved_at = self._state.position
        # Nothing depends on it: after a full disk the next start reads more.
        with contextlib.suppress(OSError, RayMQError):
            self._files.write_file_atomic(self._memory, json.dumps(vars(self._state)).encode())

    def _close_log(self) -> None:
        if self._fd >= 0:
            self._files.close(self._fd)
        self._segment, self._fd = -1, -1


def scrub_of_log(log: CommitLog, *, on_fault: Callable[[Corrupt], None]) -> Scrub:
    """The scrub of a log that this process has open, within the shortest time after which its files are deleted."""
    config = log.config
    interval_ms = min(
        config.scrub_interval_ms, int(config.file_reserved_hours * 3_600_000) // PASSES_IN_RETENTION
    )
    interval_ms = max(interval_ms, min(config.scrub_interval_ms, INTERVAL_LEAST_MS))
    return Scrub(
        log.root,
        config.segment_size_bytes,
        start=lambda: log.start,
        limit=lambda: min(log.synced, log.confirmed),
        files=log.files,
        clock=log.clock,
        bytes_per_s=config.scrub_bytes_per_s,
        # Half of the interval is for reading, half for the pause.
        pause_ms=interval_ms // 2,
        pass_ms=max(1, interval_ms // 2),
        on_fault=on_fault,
    )
