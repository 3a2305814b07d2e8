"""Active failures: several threads note and clear, and none loses a failure that another one noted."""

from __future__ import annotations

import threading
from collections.abc import Callable

from raymq.actors.shared.failures import ActiveFailures

#: long enough for a thread that does not wait for the lock. One that waits continues afterwards
MEANWHILE_S = 0.05


class Part(str):
    """A part name. At each comparison of it another thread acts."""

    __slots__ = ("meanwhile",)
    meanwhile: Callable[[], None]

    def _look(self) -> None:
        self.meanwhile()

    def __hash__(self) -> int:
        self._look()
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        self._look()
        return super().__ne__(other)


class OtherThreads:
    """Each thread notes its own part."""

    def __init__(self, failures: ActiveFailures) -> None:
        self._failures = failures
        self._threads: list[threading.Thread] = []

    def note_one(self) -> None:
        name = f"other {len(self._threads)}"
        thread = threading.Thread(target=lambda: self._failures.note(name, OSError("no room")))
        self._threads.append(thread)
        thread.start()
        thread.join(MEANWHILE_S)

    def noted(self) -> set[str]:
        for thread in self._threads:
            thread.join()
        return {f"other {number}" for number in range(len(self._threads))}


def test_a_note_keeps_what_other_threads_note_meanwhile() -> None:
    failures = ActiveFailures()
    others = OtherThreads(failures)
    part = Part("append")
    part.meanwhile = others.note_one
    failures.note(part, OSError("no descriptor"))
    part.meanwhile = lambda: None
    assert others.noted() | {"append"} == set(failures.as_status())


def test_a_clear_keeps_what_other_threads_note_meanwhile() -> None:
    failures = ActiveFailures()
    failures.note("append", OSError("no descriptor"))
    others = OtherThreads(failures)
    part = Part("append")
    part.meanwhile = others.note_one
    failures.clear(part)
    part.meanwhile = lambda: None
    assert others.noted() == set(failures.as_status())
