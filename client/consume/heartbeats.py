"""Sends the heartbeats of all members of this process to one coordinator, from one thread."""

from __future__ import annotations

import threading
from typing import ClassVar, Protocol

from raymq.client import forks
from raymq.client.client_thread import ClientThread, join_at_close
from raymq.client.transport.routes import Routes
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Bug, RayMQError, from_wire
from raymq.store.groups.heartbeat import Beat, BeatAnswer, pack_beat, unpack_answer

#: heartbeats that are due within this time go together
TOGETHER_MS = 50
#: after a call that failed
RETRY_MS = 200
#: how often to look for members that were abandoned
LOOK_AGAIN_MS = 5_000
#: how long one call may take: a coordinator that has moved is looked for meanwhile
CALL_TIMEOUT_S = 5.0
#: heartbeats in one call
BEATS_MAX = 1_000


class HeartbeatSender(Protocol):
    """A member whose heartbeats are sent. Its methods must not block."""

    group: str
    #: when its next heartbeat is due, on the clock of this process; None: not before `Heartbeats.wake`
    due_ms: int | None
    #: no heartbeat is sent any more
    is_over: bool

    def next_beat(self) -> Beat:
        """The heartbeat to send now."""

    def take_answer(self, beat: Beat, answer: BeatAnswer | RayMQError, sent_ms: int) -> None:
        """Take the answer, or the refusal, and set `due_ms`."""

    def note_failure(self, error: RayMQError) -> None:
        """Take note that no answer came. The heartbeat is repeated."""


class Heartbeats:
    """The heartbeats to one coordinator. Threads: any may call; one sends."""

    #: (cluster id, shard, transport, forks) -> the sender of this process
    _made: ClassVar[dict[tuple[object, ...], Heartbeats]] = {}
    _made_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, key: tuple[object, ...], routes: Routes, shard: int, clock: Clock) -> None:
        self._key = key
        self._routes = routes
        self._shard = shard
        self._clock = clock
        self._changed = threading.Condition()
        self._senders: list[HeartbeatSender] = []
        self._thread = ClientThread(self._run, f"raymq-heartbeats-{shard}")

    @classmethod
    def add(cls, sender: HeartbeatSender, routes: Routes, shard: int, clock: Clock) -> Heartbeats:
        """Send the heartbeats of a member from now on. Returns: what sends them."""
        key = (routes.cluster_id, shard, routes.transport, id(clock), forks.count)
        with cls._made_lock:
            found = cls._made.get(key)
            if found is None:
                found = cls(key, routes, shard, clock)
                found._senders.append(sender)
                found._thread.start()
                cls._made[key] = found
            else:
                with found._changed:
                    found._senders.append(sender)
                    found._changed.notify_all()
        return found

    def remove(self, sender: HeartbeatSender) -> None:
        """Send no more heartbeats of a member. The thread ends after the last one."""
        with self._changed:
            if sender in self._senders:
                self._senders.remove(sender)
            self._changed.notify_all()

    def join_if_over(self) -> None:
        """Wait for the thread, after the last member has gone."""
        if not self._senders:
            join_at_close(self._thread, self._routes.transport)

    def wake(self) -> None:
        """Look at `due_ms` again."""
        with self._changed:
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            due = self._await_due()
            if due:
                self._send_each(due)
            elif self._has_retired():
                return

    def _await_due(self) -> list[HeartbeatSender]:
        """The members whose heartbeats are due. None: all members have gone."""
        with self._changed:
            while True:
                # Those that were abandoned have said so without a lock.
                self._senders = [each for each in self._senders if not each.is_over]
                if not self._senders:
                    return []
                now_ms = self._clock.monotonic_ms()
                dues = [(each.due_ms, each) for each in self._senders]
                times = [due_ms for due_ms, _ in dues if due_ms is not None]
                if times and min(times) <= now_ms:
                    limit_ms = now_ms + TOGETHER_MS
                    due = [
                        each for due_ms, each in dues if due_ms is not None and due_ms <= limit_ms
                    ]
                    return due[:BEATS_MAX]
                wait_ms = min(times) - now_ms if times else LOOK_AGAIN_MS
                self._changed.wait(min(wait_ms, LOOK_AGAIN_MS) / 1000)

    def _has_retired(self) -> bool:
        """Whether the thread ends: no member came since."""
        with self._made_lock, self._changed:
            if self._senders:
                return False
            if self._made.get(self._key) is self:
                del self._made[self._key]
            return True

    def _send_each(self, due: list[HeartbeatSender]) -> None:
        """Send heartbeats. If a call refuses all of them, they are sent one by one: one must not end the others."""
        failure = self._try_to_send(due)
        if failure is None:
            return
        if not failure.retriable and len(due) > 1:
            for sender in due:
                failure = self._try_to_send([sender])
                if failure is not None:
                    sender.note_failure(failure)
        else:
            for sender in due:
                sender.note_failure(failure)
        with self._changed:
            self._changed.wait_for(lambda: not self._senders, RETRY_MS / 1000)

    def _try_to_send(self, due: list[HeartbeatSender]) -> RayMQError | None:
        """Send heartbeats. Returns: why there are no answers."""
        try:
            self._send(due)
        except BaseException as error:
            # Without this thread all sessions would end.
            return error if isinstance(error, RayMQError) else Bug(f"heartbeats: {error!r}")
        return None

    def _send(self, due: list[HeartbeatSender]) -> None:
        """Send heartbeats, and hand out the answers. Raises: RayMQError when there are none."""
        sent_ms = self._clock.monotonic_ms()
        beats = [each.next_beat() for each in due]
        packed = [pack_beat(sender.group, beat) for sender, beat in zip(due, beats, strict=True)]
        answer = self._routes.call(self._shard, "group_beat", {"beats": packed}, CALL_TIMEOUT_S)

        for sender, beat, fields in zip(due, beats, answer["answers"], strict=True):
            found = from_wire(fields["error"]) if "error" in fields else unpack_answer(fields)
            sender.take_answer(beat, found, sent_ms)
