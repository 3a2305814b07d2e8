"""Base of clients with open connections: they do not pickle, and warn when they are dropped. No Ray.

A program that ends without `close` waits for its receipts for EXIT_FLUSH_S. If some messages have none then, one line
on stderr says how many: exit code 0 would otherwise look like success.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import warnings
import weakref
from collections import Counter
from typing import ClassVar, NoReturn, Protocol

from raymq.store.base.clock import Clock
from raymq.store.base.errors import RayMQError, Rejected

#: longest wait at the end of a program for the receipts of all its unclosed producers
EXIT_FLUSH_S = 5.0


class OpenClient:
    """The base of clients with open connections, which do not pickle."""

    #: kind of client, and the method of Cluster that makes one
    made_as: ClassVar[tuple[str, str]]

    def __reduce__(self) -> NoReturn:
        kind, method = self.made_as
        raise Rejected(
            f"a {kind} has open connections and does not pickle: pickle the Cluster and call cluster.{method}() where "
            "it is used",
            field="pickle",
        )


def warn_unclosed(client: object, name: str, advice: str) -> None:
    """Warn as Python does about unclosed files: `python -X dev` shows the warning and the line that made `client`."""
    warnings.warn(f"unclosed {name}: {advice}", ResourceWarning, stacklevel=3, source=client)


class HoldsMessages(Protocol):
    """A client that may hold messages without a receipt."""

    @property
    def owner(self) -> str:
        """The class that the user knows it by."""

    def flush(self, timeout: float | None) -> None:
        """Wait up to `timeout` seconds until every send has an outcome. Raises: TimeoutError; RayMQError."""

    def count_unreceipted(self) -> int:
        """Messages without a receipt whose failure no caller has seen; 0 after `close`, and in a forked child."""


_holders: weakref.WeakSet[HoldsMessages] = weakref.WeakSet()


def flush_at_exit(client: HoldsMessages) -> None:
    """Have the end of the program wait for a client, unless the client was closed or collected before."""
    if not _holders:
        # Registered late: exit functions run in reverse order, and Ray's must come after the flush.
        atexit.unregister(_flush_all)
        atexit.register(_flush_all)
    _holders.add(client)


def _flush_all() -> None:
    until_s = Clock().monotonic() + EXIT_FLUSH_S
    counts: Counter[str] = Counter()
    for client in list(_holders):
        if client.count_unreceipted():
            # Ctrl-C ends the wait, too: what has no receipt by then is counted.
            with contextlib.suppress(RayMQError, TimeoutError, KeyboardInterrupt):
                client.flush(max(0.0, until_s - Clock().monotonic()))
            counts[client.owner] += client.count_unreceipted()
    for owner, count in counts.items():
        report_unreceipted(owner, count)


def report_unreceipted(owner: str, count: int) -> None:
    """Print how many messages of an unclosed client have no receipt, if there are any."""
    if count and sys.stderr is not None:
        print(
            f"raymq: {count} messages of an unclosed {owner} have no receipt and may be lost: use it in a "
            "with block, or call close(), which raises what was not stored",
            file=sys.stderr,
            flush=True,
        )
