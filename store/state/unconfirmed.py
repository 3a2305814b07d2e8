"""Values of a shard's state as readers may see them: without what a leader has appended and not confirmed yet.

A leader that is cut off from its followers goes on appending for a while, and another leader's log may lack those
records. So an answer from the state must not contain them. The state itself does, because later appends rest on them.
"""

from __future__ import annotations

from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

#: values of one key that are kept. Beyond it the second last one is forgotten: until the last record is confirmed,
#: readers see an older value than they might.
REPLACED_MAX = 64


class ReplacedValues(Generic[K, V]):
    """The values that a leader's unconfirmed records replaced, by key.

    Threads: one writes, and any may read. A reader takes the state's value first, because the writer notes the old one
    before it changes the state.
    """

    def __init__(self) -> None:
        #: key -> (end of a record as physical offset, the value that counts while the confirmed end is below it).
        #: None: there was no value. Tuples are replaced and never changed, because readers hold no lock.
        self._replaced: dict[K, tuple[tuple[int, V | None], ...]] = {}

    def note(self, key: K, value: V | None, end: int, confirmed: int) -> None:
        """Keep the value that a record with this end replaces. Args: `confirmed`: the confirmed end by now."""
        kept = tuple(each for each in self._replaced.get(key, ()) if each[0] > confirmed)
        if len(kept) == REPLACED_MAX:
            value, kept = kept[-1][1], kept[:-1]
        self._replaced[key] = (*kept, (end, value))

    def confirmed_value(self, key: K, value: V | None, confirmed: int) -> V | None:
        """The value of a key at the confirmed end. Args: `value`: that of the state, taken before."""
        own = self._replaced.get(key, ())
        return next((before for end, before in own if end > confirmed), value)

    def clear(self) -> None:
        """Forget everything: the state is made again."""
        self._replaced.clear()
