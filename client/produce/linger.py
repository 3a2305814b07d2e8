"""The linger time of open batches, and the thread that closes and writes them at its end."""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Iterable

from raymq.client.client_thread import ClientThread
from raymq.store.base.clock import Clock

from .open_batch import OpenBatch
from .shard_sender import ShardSender

logger = logging.getLogger("raymq.producer")

#: how long a batch that cannot be written yet is kept open before the next check
STALLED_S = 0.005
#: entries among which closed batches do not matter
SWEEP_MIN = 1024


class LingerQueue:
    """Open batches in the order of their due times. Its thread starts with the first need.

    The thread does not keep an idle batcher alive: the batches refer to it, and the queue does not.
    """

    def __init__(
        self,
        changed: threading.Condition,
        clock: Clock,
        *,
        linger_s: float,
        delivery_timeout_s: float,
    ) -> None:
        """Args: `changed`: its lock is the batcher's, which all callers hold."""
        self._changed = changed
        self._clock = clock
        self._linger_s = linger_s
        self._delivery_timeout_s = delivery_timeout_s
        #: open batches, and some that are closed already
        self.by_due_time: deque[OpenBatch] = deque()
        #: with so many entries the closed ones are taken out
        self._sweep_at = SWEEP_MIN
        #: shard senders that the thread has write, besides those of due batches
        self._to_write: set[ShardSender] = set()
        self._thread: threading.Thread | None = None
        #: when the thread wakes by itself, seconds of the monotonic clock; 0: it is awake
        self._wakes_s = math.inf
        self._ended = False

    def add(self, batch: OpenBatch) -> None:
        """Have a new batch closed at its due time."""
        # Those that were answered in time are closed already.
        while self.by_due_time and self.by_due_time[0].closed:
            self.by_due_time.popleft()
        # An open one may keep closed ones after it for long, while its shard is away.
        if len(self.by_due_time) >= self._sweep_at:
            self.by_due_time = deque(each for each in self.by_due_time if not each.closed)
            self._sweep_at = max(SWEEP_MIN, 2 * len(self.by_due_time))
        self.by_due_time.append(batch)
        if self._wakes_s > batch.due_s:
            self._wake()

    def request(self, batch: OpenBatch) -> None:
        """Have a batch closed at once, however little it has lingered."""
        if not batch.closed and not batch.flush_requested:
            batch.flush_requested, batch.due_s = True, batch.begun_s
            self.by_due_time.appendleft(batch)
            self._wake()

    def check_soon(self, batch: OpenBatch, now_s: float) -> None:
        """Have a stalled batch closed as soon as it is not stalled any more."""
        if batch.due_s > now_s + STALLED_S:
            batch.due_s = now_s
            self.by_due_time.appendleft(batch)
            self._wake()

    def write(self, shard_senders: Iterable[ShardSender]) -> None:
        """Have the thread write what these shard senders have ready."""
        self._to_write.update(shard_senders)
        self._wake()

    def end(self) -> None:
        """End the thread."""
        self._ended = True
        self._changed.notify_all()

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = ClientThread(self._run, "raymq-linger")
            self._thread.start()
        else:
            self._changed.notify_all()

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._ended:
            try:
                self._close_and_write()
            except BaseException:
                # Without this thread no lingering batch would be sent.
                logger.exception("the linger time of batches")
                with self._changed:
                    self._changed.wait(STALLED_S)

    def _close_and_write(self) -> None:
        """Close batches whose linger time is over and write what is ready, until the thread must end."""
        was_busy = False
        while True:
            with self._changed:
                if self._ended:
                    return
                now_s = self._clock.monotonic()
                was_busy = was_busy or self._has_due(now_s)
                shard_senders = self._close_due(now_s)
                self._wakes_s = 0.0 if shard_senders else self._next_wakeup(now_s, was_busy)
                was_busy = bool(shard_senders)
                if not shard_senders:
                    idle = self._wakes_s == math.inf
                    self._changed.wait(None if idle else self._wakes_s - now_s)

            for shard_sender in shard_senders:
                try:
                    shard_sender.write_ready()
                except Exception:
                    # The thread that reads its acks sends again. This thread serves the other shards, too.
                    logger.exception("a write")

    def _close_due(self, now_s: float) -> set[ShardSender]:
        """Close the batches whose linger time is over. Returns: the shard senders that must write now."""
        to_write = self._to_write.copy()
        self._to_write.clear()
        kept: list[OpenBatch] = []
        while self._has_due(now_s):
            batch = self.by_due_time.popleft()
            if self._stays_open(batch, now_s):
                batch.due_s = now_s + STALLED_S
                kept.append(batch)
            else:
                batch.future.gathered = True
                if (shard_sender := batch.batcher.close_batch(batch)) is not None:
                    to_write.add(shard_sender)
        self.by_due_time.extendleft(reversed(kept))
        return to_write

    def _has_due(self, now_s: float) -> bool:
        """Whether the first linger time is over."""
        return bool(self.by_due_time) and (
            self.by_due_time[0].closed or self.by_due_time[0].due_s <= now_s
        )

    def _stays_open(self, batch: OpenBatch, now_s: float) -> bool:
        """Whether a batch whose linger time is over should collect more messages.

        A batch that cannot be written yet would only wait in the shard's queue. Kept open, it goes out as one larger
        batch. It is closed in any case once a caller waits for its receipt, or after `delivery_timeout_ms`. That
        timeout starts when a batch is closed, so an open batch would never expire.
        """
        expired = now_s - batch.begun_s >= self._delivery_timeout_s
        if batch.closed or batch.flush_requested or expired:
            return False
        return batch.is_stalled

    def _next_wakeup(self, now_s: float, was_busy: bool) -> float:
        """When the thread must wake by itself; math.inf: a message wakes it.

        A thread that `was_busy` stays for one more linger time, so that the next messages need not wake it.
        """
        if self.by_due_time:
            return self.by_due_time[0].due_s
        return now_s + self._linger_s if was_busy else math.inf
