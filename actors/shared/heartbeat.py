"""How a CommitLog that hangs is noticed: a thread of it beats, and its satellites look.

A stopped process, an interpreter that does not come to run and an ack loop that does not come round are silent. Long
recoveries, disks that take their time and orderly stops are not: the thread beats beside them. A satellite kills a
silent CommitLog by pidfd, and Ray starts the next one.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

from raymq.store.clock import Clock
from raymq.store.files import Files

from .control_block import ControlBlock
from .processes import ProcessHandle, own_identity

log = logging.getLogger("raymq.heartbeat")

#: how often CommitLog beats, and satellites look
PERIOD_MS = 500
#: a CommitLog that is silent for so long is killed. Longer than a satellite may be silent: its restart costs a recovery
SILENT_MS = 5_000
#: a look that comes later than this after the one before proves that the looking process did not run either
LATE_MS = 3 * PERIOD_MS
#: the ack loop comes round every 200 ms; a call of it that may take longer is announced (`long_call`)
ROUND_MS = 10_000


class Heartbeat:
    """CommitLog's side. Callers: `start` and `stop` by the thread that opens and closes the replica, once each.

    Time is the real one, whatever clock the replica has: other processes judge it.
    """

    def __init__(self, control: ControlBlock, *, files: Files) -> None:
        self._control = control
        self._files = files
        self._clock = Clock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="raymq-heartbeat", daemon=True)
        self._started = False
        #: when the ack loop came round last; None: it is not running
        self._round_ms: int | None = None
        #: announced long calls under way
        self._long_calls = 0

    def start(self) -> None:
        """From now on this process is killed when it is silent. Callers: with the store's lock held."""
        self._control.begin_beating(own_identity(files=self._files), self._clock.monotonic_ms())
        self._started = True
        self._thread.start()

    def stop(self) -> None:
        """From now on silence means nothing; harmless without `start`."""
        if self._started:
            self._started = False
            self._control.end_beating()
            self._stop.set()
            if self._thread.is_alive():
                # Otherwise `start` was refused the thread.
                self._thread.join()

    def come_round(self) -> None:
        """The ack loop begins a round."""
        self._round_ms = self._clock.monotonic_ms()

    def rest(self) -> None:
        """The ack loop has ended: its silence means nothing."""
        self._round_ms = None

    @contextlib.contextmanager
    def long_call(self) -> Iterator[None]:
        """Around a call during which the ack loop may stand still: a sync, the wait for the end of a process."""
        self._long_calls += 1
        try:
            yield
        finally:
            self.come_round_if_running()
            self._long_calls -= 1

    def come_round_if_running(self) -> None:
        """A long call has ended: its time does not count."""
        if self._round_ms is not None:
            self.come_round()

    def beat_if_well(self) -> None:
        """Beat, unless the ack loop hangs."""
        now_ms, round_ms = self._clock.monotonic_ms(), self._round_ms
        if round_ms is None or self._long_calls or now_ms - round_ms <= ROUND_MS:
            self._control.beat(now_ms)

    def _run(self) -> None:
        while not self._stop.wait(PERIOD_MS / 1000):
            self.beat_if_well()


class HeartbeatWatch:
    """A satellite's side. Callers: one thread, every PERIOD_MS, also during a sync of that satellite."""

    def __init__(self, control: ControlBlock, *, files: Files) -> None:
        self._control = control
        self._files = files
        self._own = own_identity(files=files)
        self._seen: tuple[int, int] | None = None
        self._looked_ms = 0
        self._silent_ms = 0

    def look(self, now_ms: int) -> bool:
        """Kill CommitLog when it was silent through SILENT_MS of looks in time. Returns: whether it was killed.

        Time that this process did not run itself proves nothing and is not counted: the machine, or all processes of
        the replica, stood still. What was counted before stays: on a busy machine many looks are late. A CommitLog that
        never announced its beats is left alone.
        """
        control = self._control
        seen = (control.process.pid, control.heartbeat_ms)
        step_ms, self._looked_ms = now_ms - self._looked_ms, now_ms
        if not control.beating or seen != self._seen:
            self._seen, self._silent_ms = seen, 0
            return False
        if step_ms <= LATE_MS:
            self._silent_ms += step_ms
        return self._silent_ms > SILENT_MS and self._kill()

    def _kill(self) -> bool:
        process, self._silent_ms = self._control.process, 0
        if process == self._own:
            # Tests, and programs that embed both.
            return False
        handle = ProcessHandle.open(process, files=self._files)
        if handle is None:
            return False
        try:
            if not self._control.beating or self._control.process != process:
                return False
            log.error(
                "CommitLog (pid %d) was silent for more than %d ms and is killed; its successor recovers",
                process.pid,
                SILENT_MS,
            )
            handle.kill()
            return True
        finally:
            handle.close()
