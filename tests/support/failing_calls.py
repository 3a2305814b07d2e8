"""System calls that fail with EIO in running processes while a test says so: `os.fdatasync` and `os.pwrite` of Python.

A module `sitecustomize`, which every Python of the environment imports at its start, replaces these two functions. They
fail for the files below a directory that a small file names. The kernel knows nothing of it: a sync that fails here was
never tried, so what it would have written stays in the page cache, as after an error that the kernel reports once.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

#: names the directory of the small files in the environment of the processes
VARIABLE = "TESTS_FAILING_CALLS"
SYNC, WRITE = "fdatasync", "pwrite"


class FailingCalls:
    """The test's side."""

    def __init__(self, place: Path) -> None:
        """Args: `place`: a new directory, which the processes can read and write while they run."""
        place.mkdir()
        self._place = place
        (place / "sitecustomize.py").write_text(f"import {__name__}\n{__name__}.install()\n")

    def variables(self) -> dict[str, str]:
        """Of the environment of the processes."""
        root = Path(__file__).resolve().parents[2]
        inherited = os.environ.get("PYTHONPATH", "")
        path = [str(self._place), str(root), *filter(None, [inherited])]
        return {VARIABLE: str(self._place), "PYTHONPATH": os.pathsep.join(path)}

    @contextlib.contextmanager
    def failing(self, call: str, under: Path) -> Iterator[Callable[[], int]]:
        """One call (SYNC or WRITE) fails for all files below a directory. Yields: how often it has failed."""
        rule, failed = self._place / call, self._place / f"failed-{call}"
        failed.write_bytes(b"")
        # In one step: a process that reads half of a path would fail for other files.
        whole = rule.with_suffix(".part")
        whole.write_text(f"{under}/")
        whole.rename(rule)
        try:
            yield lambda: failed.stat().st_size
        finally:
            rule.unlink()


def install() -> None:
    """Replace the two functions in this process."""
    place = os.environ.get(VARIABLE)
    if place is not None:
        for name in (SYNC, WRITE):
            setattr(
                os, name, _failing(getattr(os, name), f"{place}/{name}", f"{place}/failed-{name}")
            )


def _failing(real: Callable[..., Any], rule: str, failed: str) -> Callable[..., Any]:
    """A function that fails for the files that `rule` names, and adds a byte to `failed` then."""

    def call(descriptor: int, *rest: Any) -> Any:
        if not os.path.exists(rule):
            return real(descriptor, *rest)
        with contextlib.suppress(FileNotFoundError), open(rule, encoding="utf-8") as file:
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith(file.read()):
                with open(failed, "ab") as count:
                    count.write(b".")
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, *rest)

    return call
