"""Rows that stop in the middle of a job, in each task, until the test has killed a leader."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.replicated_shard import ReplicatedShard, kill_leader
from tests.support.waiting import until

#: how long a task waits for the kill, and between two looks
STOP_S, LOOK_S = 60.0, 0.02


def stop_until_killed(place: str) -> None:
    """Say that a task is in the middle, and wait for the kill. Callers: a task, in a process of its own."""
    (Path(place) / "begun").touch()
    deadline_s = time.monotonic() + STOP_S
    while not (Path(place) / "killed").exists():
        if time.monotonic() > deadline_s:
            raise TimeoutError("no leader was killed")
        time.sleep(LOOK_S)


@contextmanager
def leader_killed(shard: ReplicatedShard, place: Path) -> Iterator[str]:
    """The leader is killed once a task of the job in the body is in the middle. Yields: `stop_until_killed`'s place."""
    place.mkdir()
    ended = threading.Event()

    def run() -> None:
        until(lambda: ended.is_set() or (place / "begun").exists(), lambda: ended.wait(LOOK_S))
        if not ended.is_set():
            kill_leader(shard)
            (place / "killed").touch()

    killer = threading.Thread(target=run)
    killer.start()
    try:
        yield str(place)
    finally:
        ended.set()
        killer.join()
    assert (place / "killed").exists(), "the job ended before its middle"
