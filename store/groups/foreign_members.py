"""The clients of other protocols that consume in groups, as their servers say. No record has it.

Such clients divide the queues among themselves, and know nothing of members. So a group has either members or such
clients at a time: those that come second are refused. The fence of a queue is its claim. This only says early, and in
words, what would otherwise be two readers of a queue.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from raymq.store.base.errors import Rejected

#: the word of a server holds so long, and it gives it again every 10 s
FOREIGN_HOLD_MS = 30_000
#: groups that one word names
FOREIGN_GROUPS_MAX = 1_000
#: clients of a group that one word names. Further ones are not shown
FOREIGN_CLIENTS_MAX = 1_000
#: characters of each text of a client
CLIENT_CHARS_MAX = 255
#: clients that the text of an error names: enough to find them
CLIENTS_SHOWN_MAX = 5


class ForeignClient(NamedTuple):
    """A client of another protocol, as its server knows it."""

    #: its id
    client: str
    #: host:port
    address: str
    language: str
    version: str
    #: since when its server has it in the group, ms since 1970
    since_ms: int


class ForeignReset(NamedTuple):
    """Offsets that an operator has set, of which clients have to hear."""

    group: str
    #: of `take_group_number`: one reset has one
    number: int
    #: topic -> queue -> offset
    offsets: Mapping[str, Mapping[int, int]]
    #: ids of those to which the server shall say it
    clients: Sequence[str]


@dataclass(slots=True)
class _Word:
    """What one server has said of one group."""

    protocol: str
    clients: Sequence[ForeignClient]
    until_ms: int


class ForeignMembers:
    """What a coordinator knows of them. Not thread-safe."""

    def __init__(self) -> None:
        #: group -> server -> its word
        self._words: dict[str, dict[str, _Word]] = {}
        #: server -> until when, and what it has to say to its clients
        self._resets: dict[str, list[tuple[int, ForeignReset]]] = {}
        self._look_ms = 0

    def note(
        self,
        protocol: str,
        server: str,
        groups: Mapping[str, Sequence[ForeignClient]],
        now_ms: int,
    ) -> None:
        """Take the word of a server. Args: `groups`: group -> its clients; none: there are none any more."""
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
            for other in list(self._resets):
                self._forget_resets(other, now_ms)

    def _forget(self, group: str, now_ms: int) -> None:
        words = self._words[group]
        for server in [each for each, word in words.items() if word.until_ms <= now_ms]:
            del words[server]
        if not words:
            del self._words[group]

    def _forget_resets(self, server: str, now_ms: int) -> None:
        left = [each for each in self._resets.get(server, ()) if each[0] > now_ms]
        if left:
            self._resets[server] = left
        else:
            self._resets.pop(server, None)

    def clients(self, group: str, now_ms: int) -> list[tuple[str, ForeignClient]]:
        """The clients of a group and their protocol, by id. One that several servers know has the oldest word."""
        found: dict[str, tuple[str, ForeignClient]] = {}
        for _, word in self._valid(group, now_ms):
            for each in word.clients:
                known = found.get(each.client)
                if known is None or each.since_ms < known[1].since_ms:
                    found[each.client] = word.protocol, each
        return [each for _, each in sorted(found.items())]

    def _valid(self, group: str, now_ms: int) -> Iterator[tuple[str, _Word]]:
        """The words on a group that hold, each with its server."""
        for server, word in sorted(self._words.get(group, {}).items()):
            if word.until_ms > now_ms:
                yield server, word

    def counts(self, now_ms: int) -> dict[str, int]:
        """Group -> how many clients it has, of those that have some."""
        found = {group: len(self.clients(group, now_ms)) for group in list(self._words)}
        return {group: count for group, count in found.items() if count}

    # --- resets -----------------------------------------------------------------------------------

    def note_reset(
        self, group: str, number: int, offsets: Mapping[str, Mapping[int, int]], now_ms: int
    ) -> list[str]:
        """Notify clients of offsets that were set. Returns: their ids, each of which one of its servers notifies."""
        left: set[str] = set()
        for server, word in self._valid(group, now_ms):
            mine = {each.client for each in word.clients} - left
            if mine:
                reset = ForeignReset(group, number, offsets, sorted(mine))
                self._resets.setdefault(server, []).append((now_ms + FOREIGN_HOLD_MS, reset))
            left |= mine
        return sorted(left)

    def resets(self, server: str, now_ms: int) -> list[ForeignReset]:
        """What a server has to say to its clients. It gets the same ones for a while: an answer may be lost."""
        self._forget_resets(server, now_ms)
        return [reset for _, reset in self._resets.get(server, ())]

    # --- members ----------------------------------------------------------------------------------

    def check_join(self, group: str, now_ms: int) -> None:
        """Raises: Rejected naming the clients, when there are any."""
        clients = self.clients(group, now_ms)
        if not clients:
            return
        found = [each.client for _, each in clients]
        shown = ", ".join(found[:CLIENTS_SHOWN_MAX])
        raise Rejected(
            f"clients of {clients[0][0]} consume in group {group}, such as {shown}. A group has clients of one "
            "kind at a time, which go on where those before have stopped: stop these clients first; or use another "
            "group, or queues=",
            field="group",
            limit="a group without clients of another protocol",
            found=found[:CLIENTS_SHOWN_MAX],
        )
