"""What does not work at present: several threads note and clear, and none loses what another one noted."""

from __future__ import annotations

import threading
from collections.abc import Callable

from raymq.actors.shared.troubles import Troubles

#: long enough for a thread that nothing holds up; one that waits for the lock goes on afterwards
MEANWHILE_S = 0.05


class Part(str):
    """A part at each look at whose name another thread does something."""

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
    """Each notes a part of its own."""

    def __init__(self, troubles: Troubles) -> None:
        self._troubles = troubles
        self._threads: list[threading.Thread] = []

    def note_one(self) -> None:
        name = f"other {len(self._threads)}"
        thread = threading.Thread(target=lambda: self._troubles.note(name, OSError("no room")))
        self._threads.append(thread)
        thread.start()
        thread.join(MEANWHILE_S)

    def noted(self) -> set[str]:
        for thread in self._threads:
            thread.join()
        return {f"other {number}" for number in range(len(self._threads))}


def test_a_note_keeps_what_other_threads_note_meanwhile() -> None:
    troubles = Troubles()
    others = OtherThreads(troubles)
    part = Part("append")
    part.meanwhile = others.note_one
    troubles.note(part, OSError("no descriptor"))
    part.meanwhile = lambda: None
    assert others.noted() | {"append"} == set(troubles.as_status())


def test_a_clear_keeps_what_other_threads_note_meanwhile() -> None:
    troubles = Troubles()
    troubles.note("append", OSError("no descriptor"))
    others = OtherThreads(troubles)
    part = Part("append")
    part.meanwhile = others.note_one
    troubles.clear(part)
    part.meanwhile = lambda: None
    assert others.noted() == set(troubles.as_status())
