"""Failpoints of processes that run: the first one that comes to an armed point dies there, and no other one.

Every Python of the environment calls `install` at its start (`tests.support.skewed_clock`).
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path

#: names the directory, in the environment of the processes. A file of the name of a failpoint arms it
VARIABLE = "TESTS_ARMED_FAILPOINTS"


class ArmedFailpoints:
    """The test's side."""

    def __init__(self, place: Path) -> None:
        """Args: `place`: a new directory, which the processes can change while they run."""
        place.mkdir()
        self._place = place

    def variables(self) -> dict[str, str]:
        """Of the environment of the processes."""
        return {VARIABLE: str(self._place)}

    def arm(self, name: str) -> None:
        """Let the first process that comes to this point die."""
        (self._place / name).touch()

    def is_armed(self, name: str) -> bool:
        """Whether no process has come to this point."""
        return (self._place / name).exists()


def install() -> None:
    """Set the points of groups and transactions in this process."""
    place = os.environ.get(VARIABLE)
    if place is None:
        return
    from raymq.store.base import failpoints

    for name in failpoints.NAMES:
        if name.startswith(("groups.", "transactions.")):
            failpoints.activate(name, partial(_die_if_armed, Path(place) / name))


def _die_if_armed(path: Path) -> None:
    with suppress(FileNotFoundError):
        path.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
