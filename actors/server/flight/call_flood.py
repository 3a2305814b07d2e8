"""Keeps a server's interpreter usable while thousands of calls begin at once.

Flight begins a thread for each call, and each asks for the interpreter. A thread that waits for it wakes up once in a
*switch interval*, to ask the one that has it for its turn. CommitLog's interval is short, 0.5 ms, so that no ack waits
for a busy thread. With 10,000 waiting threads these are 20 million wakeups a second: nothing else runs, for minutes.
So during a flood the interval grows with the number of threads. A thread that ends its work lets the next one in at
once, whatever the interval is.

Arrow offers no limit of the calls or streams of a Flight server (docs/operating/security.md).
"""

from __future__ import annotations

import sys
import threading

from raymq.store.base.clock import Clock
from raymq.store.base.files import Files

#: calls between two looks at the clock
STEP_CALLS = 64
#: a flood begins: that many calls began within this time
STEP_BEGIN_S = 0.064
#: as many threads may wait at the usual interval
USUAL_THREADS = 16
INTERVAL_MAX_S = 0.5
#: a flood is over when a thread has its turn soon after each of so many pauses
CALM_PAUSE_S = 0.1
CALM_PAUSES = 5
CALM_DELAY_S = 0.05


class CallFlood:
    """Notices a flood of calls. Callers: any thread, while it holds the interpreter."""

    def __init__(self, *, clock: Clock | None = None, files: Files | None = None) -> None:
        self._clock = clock or Clock()
        self._files = files or Files()
        self._calls = 0
        self._looked_s = float("-inf")
        #: the interval before the flood; None: there is no flood
        self._usual_s: float | None = None
        self._lock = threading.Lock()

    def note_call(self) -> None:
        """A call begins."""
        # Calls that are not counted because two threads are here at once do not matter.
        self._calls += 1
        if self._calls % STEP_CALLS:
            return
        now_s = self._clock.monotonic()
        step_s, self._looked_s = now_s - self._looked_s, now_s
        if self._usual_s is None and step_s < STEP_BEGIN_S:
            self._begin()
        if self._usual_s is not None:
            # Here, and not in the thread that waits for the end: this thread has the interpreter.
            self._follow_threads()

    def _follow_threads(self) -> None:
        """Let the interval grow with the number of threads."""
        try:
            threads = self._threads()
        except OSError:
            # No descriptor is free, for example. The call is none the worse for it.
            return
        with self._lock:
            # The flood may have ended while the file was read.
            if self._usual_s is not None:
                interval_s = self._usual_s * max(1.0, threads / USUAL_THREADS)
                sys.setswitchinterval(min(interval_s, INTERVAL_MAX_S))

    def _begin(self) -> None:
        with self._lock:
            if self._usual_s is not None:
                return
            self._usual_s = sys.getswitchinterval()
            sys.setswitchinterval(INTERVAL_MAX_S)
        try:
            threading.Thread(target=self._run, name="raymq-call-flood", daemon=True).start()
        except RuntimeError:
            # No thread is to be had at present: the next step of the flood tries again.
            self._end()

    def _run(self) -> None:
        """Wait for the end of the flood."""
        calm = 0
        while calm < CALM_PAUSES:
            began_s = self._clock.monotonic()
            self._clock.sleep_ms(CALM_PAUSE_S * 1000)
            is_late = self._clock.monotonic() - began_s > CALM_PAUSE_S + CALM_DELAY_S
            calm = 0 if is_late else calm + 1
        self._end()

    def _end(self) -> None:
        with self._lock:
            usual_s, self._usual_s = self._usual_s, None
            if usual_s is not None:
                sys.setswitchinterval(usual_s)

    def _threads(self) -> int:
        """The threads of this process, also those that Python does not know yet."""
        stat = self._files.read_file("/proc/self/stat")
        return int(stat[stat.rindex(b")") + 2 :].split()[17])
