"""Asks a program what has become of half messages that no answer has come for.

One thread asks all shards, one after the other, and calls the callbacks. The shards know which half messages are due,
count how often each was asked about, and give up those that were asked about too often: see `store/services/`.
"""

from __future__ import annotations

import logging
import threading
from base64 import b64decode
from collections.abc import Callable
from typing import Any

from raymq.client.arguments import check_number
from raymq.client.client_thread import ClientThread, join_at_close
from raymq.store.base.clock import Clock
from raymq.store.base.errors import RayMQError, Rejected
from raymq.store.base.format import check_group_name

from .half_message import CheckedHalf, checked_half
from .half_sender import DECISIONS, HalfSender

logger = logging.getLogger("raymq.producer")

#: how often a shard is asked for half messages: at least, and at most when it names none
ASK_S, ASK_S_MIN = 5.0, 0.05
#: longest wait for its answer. The other shards wait as well
ASK_TIMEOUT_S = 5.0
#: how long an answer is repeated. Without it the half message is asked about again
END_LIMIT_S = 10.0
#: half messages of one answer. Those whose turn comes too late would be named to another producer
HALVES_MAX = 8
#: producer groups of one producer
GROUPS_MAX = 1_000

#: "commit", "rollback", or None as long as the answer is not known
CheckCallback = Callable[[CheckedHalf], Any]


class HalfChecks:
    """The checks of a producer. Threads: any may call; one asks."""

    def __init__(
        self,
        sender: HalfSender,
        clock: Clock,
        transport: str,
        ask: Callable[[CheckCallback, CheckedHalf], object] = lambda callback, half: callback(half),
    ) -> None:
        """Args: `ask`: calls a callback and returns what it says. `transport`: that of the cluster."""
        self._sender = sender
        self._clock = clock
        self._transport = transport
        self._ask_program = ask
        #: guards the fields below
        self._lock = threading.Lock()
        self._callbacks: dict[str, CheckCallback] = {}
        #: shard -> when it is asked next, seconds of the monotonic clock
        self._due_s: dict[int, float] = {}
        #: shards that did not answer the last time: one warning is enough
        self._failed: set[int] = set()
        self._thread: threading.Thread | None = None
        self._changed = threading.Event()
        self.is_ending = False

    def add(self, group: str, callback: CheckCallback) -> None:
        """See `Producer.check`."""
        check_group_name(group)
        if not callable(callback):
            raise Rejected(
                f"callback is {callback!r}; give a function of one half message that returns 'commit', 'rollback' or "
                "None",
                field="callback",
                limit="a function",
            )
        self._sender.check_open()
        with self._lock:
            check_number("groups", len({*self._callbacks, group}), 1, GROUPS_MAX)
            self._callbacks[group] = callback
            self._due_s.clear()
            self._changed.set()
            if self._thread is None:
                self._thread = ClientThread(self._run, "raymq-half-checks")
                self._thread.start()

    def stop(self) -> None:
        """Begin no callback any more."""
        self.is_ending = True
        # In a forked child the lock of the event may be held by a thread of the parent.
        if self._sender.in_own_process:
            self._changed.set()

    def close(self, *, joins: bool = True) -> None:
        """`stop`, and wait for the callback under way and its answer. Args: `joins`: False: it is what calls this."""
        self.stop()
        thread = self._thread
        if joins and thread is not None and thread is not threading.current_thread():
            join_at_close(thread, self._transport)

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self.is_ending:
            self._changed.clear()
            pause_s = ASK_S
            try:
                pause_s = self._ask_due_ones()
            except BaseException:
                # Without this thread no half message would be asked about any more.
                if not self.is_ending:
                    logger.exception("half messages")
            if not self.is_ending:
                self._changed.wait(pause_s)

    def _ask_due_ones(self) -> float:
        """Ask the shards whose time has come. Returns: how long none is due, in seconds."""
        routes = self._sender.routes
        # Shards may be added.
        routes.topics.look_for_queues()
        shards = routes.known_shards()
        for shard in shards:
            if self.is_ending:
                return 0.0
            if self._due_s.get(shard, 0.0) <= self._clock.monotonic():
                pause_s = self._ask(shard)
                with self._lock:
                    self._due_s[shard] = self._clock.monotonic() + pause_s

        with self._lock:
            next_s = min((self._due_s.get(shard, 0.0) for shard in shards), default=None)
        return ASK_S if next_s is None else max(0.0, next_s - self._clock.monotonic())

    def _ask(self, shard: int) -> float:
        """Ask a shard, and answer it. Returns: the pause until it is asked again, in seconds."""
        with self._lock:
            groups = list(self._callbacks)
        wanted = {"groups": groups, "max_records": HALVES_MAX}
        try:
            found = self._sender.routes.call(shard, "halves_to_check", wanted, ASK_TIMEOUT_S)
        except RayMQError as error:
            level = logging.DEBUG if shard in self._failed else logging.WARNING
            self._failed.add(shard)
            logger.log(level, "half messages of shard %d are asked about later: %s", shard, error)
            return ASK_S

        self._failed.discard(shard)
        for half in found["halves"]:
            if self.is_ending:
                # The shard names it to another producer of the group, or to the next program.
                return 0.0
            try:
                record, checks = b64decode(half["record"]), int(half["checks"])
                self._answer(checked_half(self._sender.cluster_id, shard, record, checks))
            except Exception:
                # Such as one with properties that make no message. It must not hold up the others.
                logger.exception("half message %s of shard %d", half.get("offset"), shard)
        if found["next_ms"] is None:
            return ASK_S
        least_s = 0.0 if found["halves"] else ASK_S_MIN
        return min(ASK_S, max(least_s, float(found["next_ms"]) / 1000))

    def _answer(self, half: CheckedHalf) -> None:
        """Ask the program about a half message, and end it if the program knows."""
        decision = self._decision(half)
        if decision is None:
            return
        try:
            self._sender.end(half.id, decision, END_LIMIT_S)
        except RayMQError as error:
            # Rejected: another producer, or the program itself, has answered meanwhile. The first answer counts.
            level = logging.INFO if isinstance(error, Rejected) else logging.WARNING
            logger.log(level, "the %s of half message %s: %s", decision, half.id, error)

    def _decision(self, half: CheckedHalf) -> str | None:
        """What the program says of a half message; None: it does not know, or its callback fails."""
        with self._lock:
            callback = self._callbacks.get(half.group)
        if callback is None:
            return None
        try:
            found = self._ask_program(callback, half)
        except BaseException:
            # It may be SystemExit: on this thread it ends no program.
            logger.exception(
                "the check of half message %s failed: it stays open, and is asked about again",
                half.id,
            )
            return None

        if found is None:
            return None
        if isinstance(found, str) and found in DECISIONS:
            return found
        logger.error(
            "the check of half message %s returned %r; return 'commit', 'rollback' or None. It stays open",
            *(half.id, found),
        )
        return None
