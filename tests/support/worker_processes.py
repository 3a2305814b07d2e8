"""Processes that work on messages of a group (`tests.support.lease_worker`), and what their histories must say."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from .replicated_shard import Target

ROOT = Path(__file__).resolve().parents[2]

#: queue and offset
Place = tuple[int, int]
#: "got", "acked" or "fenced", the message, its attempt
Entry = tuple[str, Place, int]


class WorkerProcess:
    """A process that works."""

    def __init__(
        self, url: str, topic: str, group: str, place: Path, *, lease_s: float, work_s: float
    ) -> None:
        self.place = place
        words = [url, topic, group, str(place), str(lease_s), str(work_s)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.lease_worker", *words], cwd=ROOT
        )

    def history(self) -> list[Entry]:
        """What it did."""
        written = self.place.read_text() if self.place.exists() else ""
        # One that was killed may leave a part of a line.
        lines = written[: written.rfind("\n") + 1].splitlines()
        words = [line.split() for line in lines]
        return [
            (kind, (int(numbers[0]), int(numbers[1])), int(numbers[2]))
            for kind, *numbers in words
            if kind in ("got", "acked", "fenced")
        ]

    def count(self, kind: str) -> int:
        """How many entries of a kind it has written."""
        return sum(each == kind for each, _, _ in self.history())

    def held(self) -> Entry | None:
        """The message that it works on now."""
        entries = self.history()
        return entries[-1] if entries and entries[-1][0] == "got" else None

    def stop(self) -> Target:
        """Let it stand still until the target is left."""
        target = Target(self.process.pid)
        target.send(signal.SIGSTOP)
        return target

    def end(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()


def check_history(workers: Iterable[WorkerProcess], wanted: set[Place], *, killed: int) -> int:
    """Each message was settled once, and came at an attempt of its own each time, and not after its settlement.

    Args: `killed`: how many workers were killed: the last words of each may be missing. Returns: how many messages came
    again.
    """
    entries = [entry for each in workers for entry in each.history()]
    got: dict[Place, list[int]] = {}
    for kind, place, attempt in entries:
        if kind == "got":
            got.setdefault(place, []).append(attempt)
    acked = Counter(place for kind, place, _ in entries if kind == "acked")

    assert got.keys() == wanted, "a message was passed over"
    assert set(acked.values()) == {1}, "a settlement was said to be done twice"
    # The last word of a worker that was killed may be missing, and the answer of its call.
    assert len(wanted - acked.keys()) <= 2 * killed
    for place, attempts in got.items():
        assert len(set(attempts)) == len(attempts), f"two workers had one attempt of {place}"
    for kind, place, attempt in entries:
        if kind == "acked":
            assert attempt == max(got[place]), f"{place} came again after it was acknowledged"
    return sum(max(attempts) > 1 for attempts in got.values())
