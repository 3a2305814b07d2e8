"""The clients of other protocols that consume in groups, as their servers say. No record has it.

Such clients divide the queues among themselves, and know nothing of members. So a group has either members or such
clients at a time: those that come second are refused. The fence of a queue is its claim. This only says early, and in
words, what would otherwise be two readers of a queue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raymq.store.base.errors import Rejected

#: the word of a server holds so long, and it gives it again every 10 s
FOREIGN_HOLD_MS = 30_000
#: groups that one word names
FOREIGN_GROUPS_MAX = 1_000
#: clients of a group that one word names: enough to find them
CLIENTS_SHOWN_MAX = 5


@dataclass(slots=True)
class _Word:
    """What one server has said of one group."""

    protocol: str
    clients: Sequence[str]
    until_ms: int


class ForeignMembers:
    """What a coordinator knows of them. Not thread-safe."""

    def __init__(self) -> None:
        #: group -> server -> its word
        self._words: dict[str, dict[str, _Word]] = {}
        self._look_ms = 0

    def note(
        self, protocol: str, server: str, groups: Mapping[str, Sequence[str]], now_ms: int
    ) -> None:
        """Take the word of a server. Args: `groups`: group -> some of its clients; none: there are none any more."""
        for group, clients in groups.items():
            if clients:
                word = _Word(protocol, clients, now_ms + FOREIGN_HOLD_MS)
                self._words.setdefault(group, {})[server] = word
            else:
                self._words.get(group, {}).pop(server, None)
        if now_ms >= self._look_ms:
            self._look_ms = now_ms + FOREIGN_HOLD_MS
            for group in list(self._words):
                self._forget(group, now_ms)

    def _forget(self, group: str, now_ms: int) -> None:
        words = self._words[group]
        for server in [each for each, word in words.items() if word.until_ms <= now_ms]:
            del words[server]
        if not words:
            del self._words[group]

    def check_join(self, group: str, now_ms: int) -> None:
        """Raises: Rejected naming the clients, when there are any."""
        words = [each for each in self._words.get(group, {}).values() if each.until_ms > now_ms]
        found = sorted({client for word in words for client in word.clients})
        if not found:
            return
        shown = ", ".join(found[:CLIENTS_SHOWN_MAX])
        raise Rejected(
            f"clients of {words[0].protocol} consume in group {group}, such as {shown}. A group has clients of one "
            "kind at a time, which go on where those before have stopped: stop these clients first; or use another "
            "group, or queues=",
            field="group",
            limit="a group without clients of another protocol",
            found=found,
        )
