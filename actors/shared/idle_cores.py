"""Whether the machine's cores have time to spare. If they have not, polling takes it from another program, or from the
very process that is waited for.
"""

from __future__ import annotations

from pathlib import Path

from raymq.store.base.clock import Clock
from raymq.store.base.files import Files

#: between two readings: 20 us each on two cores, more on a machine with many
PERIOD_MS = 500
#: of the time of all cores: programs that compute leave 0.2 %, one producer alone leaves 25 %
IDLE_SHARE_MIN = 0.03
#: the kernel's times of all cores together, in its first line
_TIMES = Path("/proc/stat")
#: columns after "cpu": idle, and waiting for a disk. From `_GUEST` on they count what is in others
_IDLE, _IOWAIT, _GUEST = 3, 4, 8


class IdleCores:
    """The idle time of all cores. Callers: any thread."""

    def __init__(self, *, clock: Clock, files: Files) -> None:
        self._clock = clock
        self._files = files
        #: idle and whole time at the last reading, in ticks of the kernel; None: not known
        self._last: tuple[int, int] | None = None
        self._read_ms = -PERIOD_MS
        self._are_idle = True

    def are_idle(self) -> bool:
        """Whether the cores had idle time lately. True before two readings, and where the kernel does not say.

        A container sees the times of its machine.
        """
        now_ms = self._clock.monotonic_ms()
        if now_ms - self._read_ms >= PERIOD_MS:
            self._read_ms = now_ms
            self._are_idle = self._read()
        return self._are_idle

    def _read(self) -> bool:
        try:
            line = self._files.read_file(_TIMES).split(b"\n", 1)[0]
            times = [int(each) for each in line.split()[1:]]
            now = times[_IDLE] + times[_IOWAIT], sum(times[:_GUEST])
        except (OSError, ValueError, IndexError):
            self._last = None
            return True

        last, self._last = self._last or now, now
        idle, whole = now[0] - last[0], now[1] - last[1]
        return whole <= 0 or idle >= whole * IDLE_SHARE_MIN
