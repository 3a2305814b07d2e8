"""Wall clocks of single processes that a test sets while they run: `time.time` and `time.time_ns` of Python.

A module `sitecustomize`, which every Python of the environment imports at its start, replaces these two functions. They
add what a small file says for their process. The kernel and C++ know nothing of it, and monotonic time stays true, as
when a machine's clock is set.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Iterable
from pathlib import Path

#: names the file in the environment of the processes
VARIABLE = "TESTS_SKEWED_CLOCK"
#: a pid and the nanoseconds to add; pid 0: unused
ENTRY = struct.Struct("qq")
ENTRIES = 16


class SkewedClock:
    """The test's side."""

    def __init__(self, place: Path, *more: str) -> None:
        """Args: `place`: a new directory, which the processes can read while they run. `more`: modules that have an
        `install`, too, which every Python calls at its start.
        """
        place.mkdir()
        self._place = place
        self._file = place / "entries"
        self._file.write_bytes(bytes(ENTRY.size * ENTRIES))
        lines = [f"import {name}\n{name}.install()\n" for name in (__name__, *more)]
        (place / "sitecustomize.py").write_text("".join(lines))

    def variables(self) -> dict[str, str]:
        """Of the environment of the processes."""
        root = Path(__file__).resolve().parents[2]
        inherited = os.environ.get("PYTHONPATH", "")
        path = [str(self._place), str(root), *filter(None, [inherited])]
        return {VARIABLE: str(self._file), "PYTHONPATH": os.pathsep.join(path)}

    def set(self, pids: Iterable[int], ms: int) -> None:
        """Set the clocks of these processes ahead by `ms`, and those of all others right."""
        entries = b"".join(ENTRY.pack(pid, ms * 1_000_000) for pid in pids)
        with self._file.open("r+b") as file:
            file.write(entries.ljust(ENTRY.size * ENTRIES, b"\0"))


def install() -> None:
    """Replace the two functions in this process."""
    path = os.environ.get(VARIABLE)
    if path is None:
        return
    with open(path, "rb") as file:
        entries = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    time_ns = time.time_ns

    def skewed_ns() -> int:
        # Not once at the start: a process that is forked has another pid.
        own = os.getpid()
        return time_ns() + next((ns for pid, ns in ENTRY.iter_unpack(entries[:]) if pid == own), 0)

    time.time_ns = skewed_ns
    time.time = lambda: skewed_ns() / 1e9
