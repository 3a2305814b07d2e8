"""Reads all stored bytes repeatedly, a little at a time, and compares them with the chain's CRCs.

Bit rot shows only at a read. Bytes that are never read rot unnoticed, and so does the copy that could repair them.
RocketMQ has nothing like this: it compares body CRCs after a crash only. Bytes in the page cache are not read from the
disk. Old bytes are seldom cached, and `from_disk` drops those that are.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from raymq.store.base.checksum import crc32c
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Corrupt, RayMQError
from raymq.store.base.files import NOT_TRIED, Files
from raymq.store.base.rules import COVERAGE_RULE, CRC_RULE, READABLE_RULE
from raymq.store.config.store_config import StoreConfig
from raymq.store.log.segments.segment_paths import find_segment, segment_start_of

from .chain import ChainReader, ChainUnit
from .commit_log import CommitLog

#: a pass over a small log reads no faster than needed, but at least this many bytes per second
LEAST_BYTES_PER_S = 8 << 20
#: pause before the next check of a log in which nothing is synced yet
EMPTY_WAIT_S = 10.0
#: how often a pass begins and ends within the retention
PASSES_IN_RETENTION = 2
#: shortest interval between two passes, however short the retention
INTERVAL_LEAST_MS = 10 * 60 * 1000
#: most faults that are remembered; further faults are only counted
FAULTS_MAX = 100
#: the position is noted after this many bytes: each note costs the disk a sync
_SAVED_BYTES = 1 << 30
#: waits are cut into pieces of this length, so that a stop is quick
_WAIT_S = 5.0
#: the pause after a failure of the disk
RETRY_S = 60.0
#: shorter waits are added up: a wait for each of many small units would cost more than comparing them
_NAP_S = 0.05
#: about how many bytes of units are read from the chain at a time
STEP_BYTES = 1 << 20


@dataclass
class ScrubCounters:
    """Totals since this object was made, for metrics."""

    bytes: int = 0
    units: int = 0
    passes: int = 0
    faults: int = 0


class _Throttle:
    """Adds up the waits between reads, so that reads keep a rate."""

    def __init__(self) -> None:
        #: the wait that is due; negative after slow reads
        self._owed_s = 0.0

    def wait_s(self, planned_s: float, spent_s: float) -> float:
        """The wait after a read that may take `planned_s` and took `spent_s`; 0: it is still too short."""
        # Reads after slow ones catch up by one nap at most.
        self._owed_s = max(self._owed_s, -_NAP_S) + planned_s - spent_s
        if self._owed_s < _NAP_S:
            return 0.0
        wait_s, self._owed_s = self._owed_s, 0.0
        return wait_s


@dataclass(eq=False)
class Scrub:
    """The walk over one log. Callers: one thread calls `step` or `run`, any may read the counters.

    Only bytes below `limit()` are read: synced bytes, which never change again. A fault stops nothing: reads compare
    the records' own body CRCs.
    """

    root: Path
    segment_size_bytes: int
    _: KW_ONLY
    start: Callable[[], int]
    limit: Callable[[], int]
    files: Files = field(default_factory=Files)
    clock: Clock = field(default_factory=Clock)
    #: most bytes read per second; 0: no limit
    bytes_per_s: int
    #: pause between two passes
    pause_ms: int
    #: duration of a pass, if `bytes_per_s` permits; 0: every pass reads at `bytes_per_s`
    pass_ms: int = 0
    #: name of the file in `raymq/` that keeps the position and the faults from start to start
    progress_file: str = "scrub"
    #: read past the page cache
    from_disk: bool = False
    on_fault: Callable[[Corrupt], None] | None = None

    def __post_init__(self) -> None:
        self._chain = ChainReader(
            self.root / "raymq" / "chain", self.segment_size_bytes, files=self.files
        )
        self._segment_start = self._fd = -1
        self._path = self.root
        #: the next units of the chain, the first of them last
        self._units: list[ChainUnit] = []
        #: the last position at which no unit began
        self._gap = -1
        self._wake = threading.Event()
        self._throttle = _Throttle()
        #: held while `faults` and the progress file change
        self._faults_lock = threading.Lock()

        self.counters = ScrubCounters()
        #: everything below this was compared in this pass
        self.position = 0
        #: end of the last complete pass, ms; 0: there was none
        self._last_pass_end_ms = 0
        #: faults that were found, and whose bytes were not read correctly since
        self.faults: list[Corrupt] = []

        self._load_progress()
        self._saved_at = self.position

    def status(self) -> dict[str, Any]:
        """For `status` and metrics."""
        return {
            "position": self.position,
            "passed_ms": self._last_pass_end_ms,
            "bytes_per_s": self.pace(),
            "advice": self.slowness_advice(),
            **vars(self.counters),
            "found": [{"message": str(fault), **fault.fields} for fault in self.faults],
        }

    def pace(self) -> int:
        """Bytes per second at which this pass reads; 0: as fast as the disk."""
        if not self.pass_ms:
            return self.bytes_per_s
        needed = self._log_bytes() * 1000 // self.pass_ms
        return min(self.bytes_per_s, max(LEAST_BYTES_PER_S, needed))

    def slowness_advice(self) -> str | None:
        """Advice if a pass over so large a log takes too long; None if it does not."""
        log_bytes, interval_ms = self._log_bytes(), self.pass_ms + self.pause_ms
        unlimited = not self.bytes_per_s or not self.pass_ms
        if unlimited or log_bytes * 1000 <= self.bytes_per_s * interval_ms:
            return None
        return (
            f"a pass over {log_bytes} bytes takes {log_bytes // self.bytes_per_s // 3600} h at scrub_bytes_per_s "
            f"({self.bytes_per_s}); it should take {interval_ms // 3_600_000} h: raise it, or "
            "lengthen scrub_interval_ms"
        )

    def _log_bytes(self) -> int:
        return max(0, self.limit() - self.start())

    def restart(self) -> None:
        """Begin a new pass now."""
        self.position = self._last_pass_end_ms = 0
        self.faults = []

    def forget(self, is_sound: Callable[[int], bool]) -> None:
        """Forget the faults at physical offsets that are sound again. Callers: any thread."""
        with self._faults_lock:
            self.faults = [f for f in self.faults if not is_sound(int(f.fields["offset"]))]
        self._save_progress()

    def step(self) -> float:
        """Read and compare one append unit. Returns: seconds to wait until the next step.

        Unreadable bytes are a fault, and the pass continues after them. Raises: OSError if something else than the disk
        fails. The position stays then.
        """
        position = max(self.position, self.start())
        if not self.position and self._last_pass_end_ms:
            due_in_ms = self._last_pass_end_ms + self.pause_ms - self.clock.now_ms()
            # More than the pause is left only if the wall clock was ahead when the last pass ended.
            if 0 < due_in_ms <= self.pause_ms:
                return due_in_ms / 1000

        if position >= self.limit():
            if not self.position:
                # An empty log does not count as a pass: new records would wait for the next one.
                return EMPTY_WAIT_S
            self._end_pass()
            return self.pause_ms / 1000

        began_s = self.clock.monotonic()
        if not self._units or self._units[-1].start != position:
            self._units = self._chain.read_from(position, STEP_BYTES)[::-1]
        if not self._units:
            self.position = self._skip_without_unit(position)
            return 0.0

        unit = self._units.pop()
        if unit.end > self.limit():
            # Only a part of a unit over the limit is certain: the next pass compares the unit.
            self._units = []
            self._end_pass()
            return self.pause_ms / 1000

        self._compare(unit)
        self.position = unit.end
        if unit.end - self._saved_at >= _SAVED_BYTES:
            self._save_progress()

        pace = self.pace()
        if not pace:
            return 0.0
        spent_s = self.clock.monotonic() - began_s
        return self._throttle.wait_s((unit.end - unit.start) / pace, spent_s)

    def one_pass(self, progress: Callable[[str, int, int], None] | None = None) -> list[Corrupt]:
        """Continue an interrupted pass, or begin one, and finish it. Returns: its faults."""
        passes = self.counters.passes
        begin = self.start()
        while self.counters.passes == passes and (self.position or begin < self.limit()):
            wait_s = self.step()
            if self.counters.passes == passes and wait_s > 0:
                self.clock.sleep_ms(wait_s * 1000)
            if progress is not None:
                total = max(1, self.limit() - begin)
                # After the last step of the pass the position is 0.
                done = max(0, self.position - begin) if self.position else total
                progress("scrub", done, total)
        return self.faults

    def run(self, stopping: Callable[[], bool]) -> None:
        """Walk until `stopping` returns True: the body of a thread. After a failure of the disk it tries again."""
        while not stopping():
            try:
                wait_s = self.step()
            except (OSError, RayMQError) as error:
                wait_s = RETRY_S
                # A lack of descriptors or memory says nothing about the disk.
                if not (isinstance(error, OSError) and error.errno in NOT_TRIED):
                    # If the fault cannot be reported now, the next try finds it again.
                    with contextlib.suppress(OSError, RayMQError):
                        self._report(self.position, f"cannot be read: {error}", READABLE_RULE)

            deadline_s = self.clock.monotonic() + wait_s
            while not stopping() and (left_s := deadline_s - self.clock.monotonic()) > 0:
                self._wake.wait(min(left_s, _WAIT_S))
                self._wake.clear()

        self.close()

    def wake(self) -> None:
        """Check `stopping` now."""
        self._wake.set()

    def close(self) -> None:
        """Remember the position and close the files."""
        self._save_progress()
        self._chain.close()
        self._close_log()

    # --- one unit ---------------------------------------------------------------------------------

    def _compare(self, unit: ChainUnit) -> None:
        """Compare the bytes of a unit with its CRC. A difference is reported, an old fault of intact bytes dropped."""
        self.counters.units += 1
        self.counters.bytes += unit.end - unit.start

        try:
            if self._is_undamaged(unit):
                offsets = range(unit.start, unit.end)
                with self._faults_lock:
                    self.faults = [f for f in self.faults if f.fields["offset"] not in offsets]
                return
        except Corrupt as error:
            self._report(int(error.fields["offset"]), error.message, READABLE_RULE, end=unit.end)
            return

        # A cut or a change of leader may have replaced unit and bytes between the two reads, and a repair the file.
        self._close_log()
        same = self._is_still_there(unit)
        undamaged = self._is_undamaged(unit)
        if same and not undamaged and unit.end <= self.limit():
            detail = f"the bytes [{unit.start}, {unit.end}) are not those that were stored"
            self._report(unit.start, detail, CRC_RULE, end=unit.end)

    def _is_undamaged(self, unit: ChainUnit) -> bool:
        data = self._read(unit)
        return data is None or crc32c(data) == unit.crc

    def _is_still_there(self, unit: ChainUnit) -> bool:
        self._chain.close()
        return self._chain.read_from(unit.start, 1)[:1] == [unit]

    def _read(self, unit: ChainUnit) -> bytes | None:
        """The bytes of a unit; None if its file was deleted. Raises: Corrupt naming the first unreadable byte."""
        segment_start = segment_start_of(unit.start, self.segment_size_bytes)
        if segment_start != self._segment_start:
            self._close_log()
            self._path = find_segment(self.root / "commitlog", segment_start, files=self.files)
            try:
                self._fd = self.files.open_file(self._path, writable=False)
                self._segment_start = segment_start
            except FileNotFoundError:
                return None
        first, length = unit.start - segment_start, unit.end - unit.start
        if self.from_disk:
            self.files.drop_cached(self._fd, first, length)
        return self.files.read_range(
            self._fd, first, first + length, path=self._path, base=segment_start
        )

    def _skip_without_unit(self, position: int) -> int:
        """Report bytes that no unit covers. Returns: the position to continue at if no unit starts at `position`."""
        segment_start = segment_start_of(position, self.segment_size_bytes)
        if position > segment_start:
            if position == self._gap:
                self._report(
                    position, "no chain unit: no CRC covers the rest of the file", COVERAGE_RULE
                )
                return segment_start + self.segment_size_bytes
            # The chain was made again with other edges. But its first unit begins with the file.
            self._gap = position
            return segment_start
        self._report(segment_start, "no chain unit: no CRC covers this file", COVERAGE_RULE)
        return segment_start + self.segment_size_bytes

    def _report(self, offset: int, detail: str, rule: str, **fields: object) -> None:
        """Count a fault, and call `on_fault` with a new one."""
        if offset < self.start():
            # The file has been deleted: zeroed for its next use, or without its part of the chain.
            return

        segment_start = segment_start_of(offset, self.segment_size_bytes)
        path = find_segment(self.root / "commitlog", segment_start, files=self.files)
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
            with self._faults_lock:
                self.faults = [*self.faults, fault]
            self._save_progress()
            if self.on_fault is not None:
                self.on_fault(fault)

    def _end_pass(self) -> None:
        self.counters.passes += 1
        self.position = 0
        # Damage in deleted files does not count any more.
        with self._faults_lock:
            self.faults = [f for f in self.faults if f.fields["offset"] >= self.start()]
        self._last_pass_end_ms = self.clock.now_ms()
        self._save_progress()

    # --- progress on disk -------------------------------------------------------------------------

    @property
    def _progress_path(self) -> Path:
        return self.root / "raymq" / self.progress_file

    def _load_progress(self) -> None:
        """Continue where the last process stopped. Without a readable file begin a new pass: nothing depends on it."""
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, RayMQError):
            saved = json.loads(self.files.read_file(self._progress_path))
            faults = [Corrupt(item["message"], **item["fields"]) for item in saved["faults"]]
            self.position, self._last_pass_end_ms = saved["position"], saved["passed_ms"]
            self.faults = faults

    def _save_progress(self) -> None:
        with self._faults_lock:
            self._write_progress()

    def _write_progress(self) -> None:
        faults = [{"message": str(fault), "fields": fault.fields} for fault in self.faults]
        saved = {"position": self.position, "passed_ms": self._last_pass_end_ms, "faults": faults}
        self._saved_at = self.position
        # Nothing depends on the file: after a full disk the next start reads more.
        with contextlib.suppress(OSError, RayMQError):
            self.files.write_file_atomic(self._progress_path, json.dumps(saved).encode())

    def _close_log(self) -> None:
        if self._fd >= 0:
            self.files.close(self._fd)
        self._segment_start = self._fd = -1


def scrub_of_log(log: CommitLog, *, on_fault: Callable[[Corrupt], None]) -> Scrub:
    """The scrub of a log that this process has open. Its interval is shorter than the retention."""
    config = log.config
    pause_ms, pass_ms = scrub_times_ms(config)
    return Scrub(
        log.root,
        config.segment_size_bytes,
        start=lambda: log.start,
        limit=lambda: min(log.synced, log.confirmed),
        files=log.files,
        clock=log.clock,
        bytes_per_s=config.scrub_bytes_per_s,
        pause_ms=pause_ms,
        pass_ms=pass_ms,
        on_fault=on_fault,
    )


def scrub_times_ms(config: StoreConfig) -> tuple[int, int]:
    """How long a pass may take, and the pause before the next: half of the interval each, which fits the retention."""
    interval_ms = min(
        config.scrub_interval_ms, int(config.file_reserved_hours * 3_600_000) // PASSES_IN_RETENTION
    )
    interval_ms = max(interval_ms, min(config.scrub_interval_ms, INTERVAL_LEAST_MS))
    return interval_ms // 2, max(1, interval_ms // 2)
