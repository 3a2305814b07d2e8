"""Values of a shard's state as readers may see them: without what a leader has appended and not confirmed yet.

A leader that is cut off from its followers goes on appending for a while, and another leader's log may lack those
records. So an answer from the state must not contain them. The state itself does, because later appends rest on them.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

#: entries of one key. Beyond it the last two are one, so that a confirmed value is seen late, and none too early.
REPLACED_MAX = 64


class ReplacedValues(Generic[K, V]):
    """The values that a leader's unconfirmed records replaced, by key. Not thread-safe."""

    def __init__(self) -> None:
        #: key -> (end of a record as physical offset, the value that counts while the confirmed end is below it).
        #: None: there was no value.
        self._replaced: dict[K, deque[tuple[int, V | None]]] = {}

    def note(self, key: K, value: V | None, end: int, confirmed: int) -> None:
        """Keep the value that a record with this end replaces. Args: `confirmed`: the confirmed end by now."""
        own = self._replaced.setdefault(key, deque())
        while own and own[0][0] <= confirmed:
            own.popleft()
        if len(own) == REPLACED_MAX:
            value = own.pop()[1]
        own.append((end, value))

    def confirmed_value(self, key: K, value: V | None, confirmed: int) -> V | None:
        """The value of a key at the confirmed end. Args: `value`: that of the state."""
        own = self._replaced.get(key, ())
        return next((before for end, before in own if end > confirmed), value)

    def clear(self) -> None:
        """Forget everything: the state is made again."""
        self._replaced.clear()
