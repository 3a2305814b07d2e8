"""Threads that run calls which wait for a shard: as many as are needed at a time, up to a limit."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from raymq.client.client_thread import ClientThread
from raymq.store.base.errors import Unavailable

from .producer_config import closed_error

#: a thread that has had nothing to do for so long ends
IDLE_S = 1.0


class CallThreads:
    """Runs calls. Threads: any may call; calls begin in their order."""

    def __init__(self, threads_max: int, name: str) -> None:
        """Args: `name`: of each thread."""
        self._threads_max = threads_max
        self._name = name
        self._changed = threading.Condition()
        self._waiting: deque[Callable[[], None]] = deque()
        self._idle = 0
        self._threads: set[threading.Thread] = set()
        self._closed = False

    def run(self, call: Callable[[], None]) -> None:
        """Run a call, which must not raise, as soon as a thread is free.

        Raises: Rejected after `close`; Unavailable if there is not one thread.
        """
        with self._changed:
            if self._closed:
                raise closed_error()
            self._waiting.append(call)
            if len(self._waiting) > self._idle and len(self._threads) < self._threads_max:
                self._start(call)
            self._changed.notify()

    def _start(self, call: Callable[[], None]) -> None:
        thread = ClientThread(self._run, self._name)
        try:
            thread.start()
        except RuntimeError as error:
            # At the limit of threads, and with Python 3.12 at the end of the program. Others may go on.
            if not self._threads:
                self._waiting.remove(call)
                raise Unavailable(f"no thread could be started: {error}") from error
        else:
            self._threads.add(thread)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                self._changed.wait_for(lambda: self._waiting or self._closed, IDLE_S)
                self._idle -= 1
                if not self._waiting:
                    self._threads.discard(threading.current_thread())
                    return
                call = self._waiting.popleft()
            call()
            # It would keep what it was called for until the next one comes.
            del call

    def close(self, *, joins: bool) -> None:
        """Begin no call any more. Args: `joins`: wait for those under way, but for the one that calls this."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()
            threads = self._threads - {threading.current_thread()}
        if joins:
            for thread in threads:
                thread.join()
