"""The clock of retention: the wall clock, but not at once when it jumps ahead.

The wall clock of a machine may be wrong for hours, until it is set right. What retention deleted by it would be lost.
"""

from __future__ import annotations

from .commit_log import CommitLog
from .control_files.marks import ClockLook

#: a larger difference of wall and monotonic clock between two looks is a jump
JUMP_MS = 3_600_000
#: a jump ahead that is older is believed
JUMP_BELIEVED_MS = 24 * 3_600_000


class BelievedClock:
    """The wall clock of one replica, without a jump ahead that is not a day old.

    What it knows is in the log's marks: neither a restart of the process nor a change of role forgets a jump.
    Callers: one thread, often, because a jump is noticed between two looks.
    """

    def __init__(self, log: CommitLog) -> None:
        self._clock = log.clock
        self._marks = log.marks
        self._boot_id_hash = log.files.boot_id_hash()

    def begin(self, newest_ms: int) -> None:
        """Look at the clocks for the first time since the machine was started.

        If the newest store time in the log is older than a jump, the wall clock counts as jumped by that much: the
        machine may have been off for so long, or its clock is wrong, and no other clock says which.
        Args: `newest_ms`: that store time; 0: the log is empty. Callers: every start, before the first put.
        """
        if self._marks.clock_look.boot_id_hash == self._boot_id_hash:
            return
        wall_ms, monotonic_ms = self._clock.now_ms(), self._clock.monotonic_ms()
        age_ms = wall_ms - newest_ms if newest_ms else 0
        jumped_ms = age_ms if age_ms > JUMP_MS else 0
        self._note(jumped_ms, monotonic_ms, wall_ms, monotonic_ms)

    def now_ms(self) -> int:
        """The wall clock as far as it is believed, ms since 1970."""
        wall_ms, monotonic_ms = self._clock.now_ms(), self._clock.monotonic_ms()
        last = self._marks.clock_look
        jumped_ms, jumped_at_ms = last.jumped_ms, last.jumped_at_ms

        jump_ms = wall_ms - last.wall_ms - (monotonic_ms - last.monotonic_ms)
        if abs(jump_ms) > JUMP_MS:
            jumped_ms, jumped_at_ms = max(0, jumped_ms + jump_ms), monotonic_ms
        elif monotonic_ms - jumped_at_ms > JUMP_BELIEVED_MS:
            jumped_ms = 0

        self._note(jumped_ms, jumped_at_ms, wall_ms, monotonic_ms)
        return wall_ms - jumped_ms

    def _note(self, jumped_ms: int, jumped_at_ms: int, wall_ms: int, monotonic_ms: int) -> None:
        self._marks.clock_look = ClockLook(
            jumped_ms, jumped_at_ms, wall_ms, monotonic_ms, self._boot_id_hash
        )
