"""How a CommitLog that hangs is noticed: one of its threads publishes a heartbeat, and its satellites check it.

The heartbeat stops when the process is stopped, when its interpreter does not run, and when its ack loop hangs. It goes
on through long recoveries, slow disks and orderly stops. A satellite kills a silent CommitLog by pidfd, and Ray starts
the next one. While a silent CommitLog is busy, time counts a quarter (`processes.SilentTime`).
"""

from __future__ import annotations

import contextlib
import logging
import threading

from raymq.store.base.clock import Clock
from raymq.store.base.files import Files

from .control_block import ControlBlock
from .processes import ProcessHandle, SilentTime, own_identity

logger = logging.getLogger("raymq.heartbeat")

#: how often CommitLog publishes a heartbeat, and satellites check it
PERIOD_MS = 500
#: a CommitLog that is silent for this long is killed. This is longer than a satellite's STALE_MS, because a restart of
#: CommitLog costs a recovery
HEARTBEAT_TIMEOUT_MS = 5_000
#: two checks that are further apart than this prove that the checking process did not run either
LATE_CHECK_MS = 3 * PERIOD_MS
#: the ack loop iterates at least every 500 ms. Calls that may take longer are inside `blocking_call`
ITERATION_MAX_MS = 10_000


class _BlockingCall:
    """Around a call that may block the ack loop for long: a sync, a lock that a slow disk holds, the end of a process.

    Calls of several threads may overlap, and one may be inside of another. This is not a generator, because the ack
    loop enters it in each iteration.
    """

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat
        #: an item for each call under way: threads append to a list and pop from it without a lock
        self._under_way: list[None] = []

    @property
    def active(self) -> bool:
        """Whether a blocking call is under way."""
        return bool(self._under_way)

    def __enter__(self) -> None:
        self._under_way.append(None)

    def __exit__(self, *exc: object) -> None:
        # Before the call counts as over: its time is none of the iteration's.
        self._heartbeat.restart_iteration()
        self._under_way.pop()


class Heartbeat:
    """CommitLog's side. Callers: `start` and `stop` by the thread that opens and closes the replica, once each.

    Uses the real clock, whatever clock the replica has: other processes compare it with theirs.
    """

    def __init__(self, control: ControlBlock, *, files: Files) -> None:
        self._control = control
        self._files = files
        self._clock = Clock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="raymq-heartbeat", daemon=True)
        self._started = False
        #: when the present iteration of the ack loop began; None: the loop is not running
        self._iteration_ms: int | None = None
        #: `with` it around a call that may block for long
        self.blocking_call = _BlockingCall(self)

    def start(self) -> None:
        """Begin the heartbeat: this process is killed when it stops. Callers: with the store's lock held."""
        self._control.start_heartbeat(own_identity(files=self._files), self._clock.monotonic_ms())
        self._started = True
        self._thread.start()

    def stop(self) -> None:
        """End the watch: a missing heartbeat means nothing from now on. Harmless without `start`."""
        if self._started:
            self._started = False
            self._control.heartbeat_on = 0
            self._stop.set()
            if self._thread.is_alive():
                # Otherwise the thread could not be started.
                self._thread.join()

    def note_iteration(self) -> None:
        """The ack loop begins an iteration."""
        self._iteration_ms = self._clock.monotonic_ms()

    def loop_ended(self) -> None:
        """The ack loop has ended: it cannot hang any more."""
        self._iteration_ms = None

    def restart_iteration(self) -> None:
        """Count the iteration under way, if there is one, from now on."""
        if self._iteration_ms is not None:
            self.note_iteration()

    def beat_if_alive(self) -> None:
        """Publish a heartbeat, unless the ack loop hangs."""
        now_ms, began_ms = self._clock.monotonic_ms(), self._iteration_ms
        if began_ms is None or self.blocking_call.active or now_ms - began_ms <= ITERATION_MAX_MS:
            self._control.heartbeat_ms = now_ms

    def _run(self) -> None:
        while not self._stop.wait(PERIOD_MS / 1000):
            self.beat_if_alive()


class HeartbeatMonitor:
    """A satellite's side. Callers: one thread, every PERIOD_MS, even during a sync of that satellite."""

    def __init__(self, control: ControlBlock, *, files: Files) -> None:
        self._control = control
        self._files = files
        self._own = own_identity(files=files)
        #: CommitLog's pid and its heartbeat at the last check
        self._last_heartbeat: tuple[int, int] | None = None
        self._checked_ms = 0
        self._silent_ms = 0
        self._silent_time = SilentTime(files=files)

    def check(self, now_ms: int) -> bool:
        """Kill CommitLog when punctual checks add up to HEARTBEAT_TIMEOUT_MS without heartbeat. Returns: killed.

        The time before a late check is not counted. This process did not run either, so the machine, or all processes
        of the replica, stood still. Time counted before stays: on a busy machine many checks are late. Time in which
        CommitLog was busy counts a quarter. A CommitLog that never started its heartbeat is left alone.
        """
        control = self._control
        heartbeat = (control.process.pid, control.heartbeat_ms)
        step_ms, self._checked_ms = now_ms - self._checked_ms, now_ms
        if not control.heartbeat_on or heartbeat != self._last_heartbeat:
            self._last_heartbeat, self._silent_ms = heartbeat, 0
            return False
        if step_ms <= LATE_CHECK_MS:
            self._silent_ms += step_ms
        counted_ms = self._silent_time.count(heartbeat[0], self._silent_ms, now_ms)
        return counted_ms > HEARTBEAT_TIMEOUT_MS and self._kill()

    def _kill(self) -> bool:
        process, self._silent_ms = self._control.process, 0
        if process == self._own:
            # Tests, and programs that embed both.
            return False

        handle = ProcessHandle.open(process, files=self._files)
        if handle is None:
            return False

        with contextlib.closing(handle):
            if not self._control.heartbeat_on or self._control.process != process:
                return False
            logger.error(
                "CommitLog (pid %d) had no heartbeat for more than %d ms and is killed; its successor recovers",
                process.pid,
                HEARTBEAT_TIMEOUT_MS,
            )
            handle.kill()
            return True
