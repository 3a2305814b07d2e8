"""Tells an object of this process from one that was made before a fork."""

from __future__ import annotations

import os

#: forks between the start of the first process and this one. Comparing it is quicker than `os.getpid`, a system call
count = 0


def _count_fork() -> None:
    global count
    count += 1


os.register_at_fork(after_in_child=_count_fork)
