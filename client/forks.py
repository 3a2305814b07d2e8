"""Tells an object of this process from one that was made before a fork."""

from __future__ import annotations

import os

from raymq.store.base.errors import Rejected

#: forks between the start of the first process and this one. Comparing it is quicker than `os.getpid`, a system call
count = 0
#: the value of `count` when this process, or the one that it was forked from, connected first
_connected: int | None = None


def _count_fork() -> None:
    global count
    count += 1


def check_connects() -> None:
    """Note that this process connects. Raises: Rejected if it was forked from one that had connected.

    gRPC does not survive a fork: calls of the child hang, or end it.
    """
    global _connected
    if _connected is None:
        _connected = count
    if _connected != count:
        raise Rejected(
            "this process was forked from one that had connected to RayMQ, and connections do not survive a fork; "
            "start it by spawn or forkserver, or fork before the first call",
            field="fork",
            limit="spawn, forkserver",
        )


os.register_at_fork(after_in_child=_count_fork)
