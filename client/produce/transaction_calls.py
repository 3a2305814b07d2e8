"""Calls that decide transactions, each repeated under its name until there is an answer."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from raymq.actors.api.transactions import unpack_outcome
from raymq.client.transport.ask import may_have_run, search_pauses
from raymq.client.transport.routes import Routes
from raymq.store.base.clock import Clock
from raymq.store.base.errors import CommitUnknown, DeliveryUnknown, RayMQError, Unavailable
from raymq.store.groups.transaction_requests import ABORTED, TransactionOutcome

#: how long one try may take at most
TRY_TIMEOUT_S = 30.0
#: a session that was not used for so long is not used again: its shard forgets it after a day
SESSION_IDLE_S = 3_600.0


class CommitName(NamedTuple):
    """What a shard recognises a transaction by."""

    shard: int
    #: 32 hexadecimal digits
    session: str
    number: int


class TransactionCalls:
    """Names the transactions of a producer, and has them decided. Threads: any.

    A session has one transaction under way at a time. The next one takes it when the outcome is known.
    """

    def __init__(self, routes: Callable[[], Routes], clock: Clock) -> None:
        """Args: `routes`: those of the producer; it raises Rejected when that is closed."""
        self._routes = routes
        self._clock = clock
        self._lock = threading.Lock()
        #: shard -> sessions without a transaction: id, next number, when it was used, seconds of the monotonic clock
        self._free: dict[int, list[tuple[str, int, float]]] = {}

    def take(self, shard: int) -> CommitName:
        """A name for a transaction on a shard."""
        oldest_s = self._clock.monotonic() - SESSION_IDLE_S
        with self._lock:
            free = self._free.setdefault(shard, [])
            if free and free[-1][2] < oldest_s:
                # The last one was used last.
                free.clear()
            if free:
                session, number, _ = free.pop()
                return CommitName(shard, session, number)
        return CommitName(shard, secrets.token_hex(16), 1)

    def _release(self, name: CommitName, *, is_decided: bool) -> None:
        """The outcome of a name is known. Args: `is_decided`: the shard has it; otherwise it may be used again."""
        number = name.number + 1 if is_decided else name.number
        with self._lock:
            self._free.setdefault(name.shard, []).append(
                (name.session, number, self._clock.monotonic())
            )

    def commit(
        self,
        name: CommitName,
        parts: Mapping[str, object],
        limit_s: float,
        *,
        may_have_run: bool = False,
    ) -> TransactionOutcome:
        """Have a transaction committed.

        Args: `limit_s`: how long the call is repeated. `may_have_run`: an earlier call raised CommitUnknown.
        Returns: the first decision on it. Raises: CommitUnknown, if there may be one that could not be read; any other
        error: it is not committed, and no try of this call can change that.
        """
        tries = _Tries(may_have_run)
        arguments = {"session": name.session, "number": name.number, **parts}
        try:
            found = self._repeat(name.shard, "commit_transaction", arguments, limit_s, tries)
        except RayMQError as error:
            if not tries.may_have_run:
                self._release(name, is_decided=False)
                raise
            if isinstance(error, (Unavailable, DeliveryUnknown)):
                raise _unknown(name, error) from error
            # A try without an answer may still come there, and be taken.
            found = self.abort(name, limit_s)
            if found.decision == ABORTED:
                raise
            return found
        self._release(name, is_decided=True)
        return found

    def abort(self, name: CommitName, limit_s: float) -> TransactionOutcome:
        """Decide that a transaction is not committed, unless it is decided. Returns: the first decision.

        Raises: CommitUnknown, when no shard answers in time.
        """
        arguments = {"session": name.session, "number": name.number}
        try:
            found = self._repeat(name.shard, "abort_transaction", arguments, limit_s, _Tries())
        except (Unavailable, DeliveryUnknown) as error:
            raise _unknown(name, error) from error
        self._release(name, is_decided=True)
        return found

    def _repeat(
        self,
        shard: int,
        op: str,
        arguments: Mapping[str, Any],
        limit_s: float,
        tries: _Tries,
    ) -> TransactionOutcome:
        """Call an operation until it is answered, or the time is up. Raises: as the last try."""
        until_s = self._clock.monotonic() + limit_s
        pauses = search_pauses()
        while True:
            left_s = max(0.1, until_s - self._clock.monotonic())
            try:
                answer = self._routes().call(
                    shard, op, arguments, min(TRY_TIMEOUT_S, left_s), on_failed=tries.note
                )
                return unpack_outcome(answer)
            except (Unavailable, DeliveryUnknown) as error:
                tries.note(error)
                pause_s = next(pauses) / 1000
                if self._clock.monotonic() + pause_s >= until_s:
                    raise
            self._clock.sleep_ms(1000 * pause_s)


class _Tries:
    """Whether a call without a good answer may have run. Threads: any."""

    def __init__(self, may_have_run: bool = False) -> None:
        self.may_have_run = may_have_run

    def note(self, error: RayMQError) -> None:
        """Take note of a try that failed."""
        if may_have_run(error):
            self.may_have_run = True


def _unknown(name: CommitName, error: RayMQError) -> CommitUnknown:
    return CommitUnknown(
        f"shard {name.shard} has not said whether the transaction is committed ({error}): call its commit() again, "
        "which asks again, or abort()",
        shard=name.shard,
    )
