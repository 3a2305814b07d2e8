"""Single-producer single-consumer rings in a shared file: the lists between CommitLog and Replication.

File `raymq/ring-replication`, native byte order (it never leaves the machine), 8-byte words:

    word 0     requests: count of entries ever pushed (CommitLog writes)
    word 8     requests: count of entries ever taken  (Replication writes)
    word 16    late puts: count ever pushed           (Replication writes)
    word 24    late puts: count ever taken            (CommitLog writes)
    word 512   4096 requests of 3 words: number, end_offset, since_ms (monotonic)
    then       4096 late puts of 3 words: number, end_offset, status code

Only puts whose promise names replicas are entered. An entry covers every put up to its number that ends at its end
offset or before: see replication/combiner.py. CommitLog and Replication both continue when a ring is full. A later
request covers the same puts, and CommitLog answers late puts itself a little later. Success is reported by a field of
the control block, so only the answers to late puts wait for an entry.

An entry is written before the count that makes it visible. Both counts are in the file, so a new Replication continues
where the dead one stopped. CommitLog answers the requests that the dead one had taken.
"""

from __future__ import annotations

import os

from raymq.store.base.errors import broken
from raymq.store.base.files import Files

from .memory_order import check_architecture, shared_words

#: entries of one ring, a power of two
CAPACITY = 4096

_WORD = 8
_ENTRY_WORDS = 3
#: words of the counts, in different cache lines because different processes write them
_REQUESTS_PUSHED, _REQUESTS_TAKEN, _LATE_PUSHED, _LATE_TAKEN = 0, 8, 16, 24
_FIRST_REQUEST = 512
_FIRST_LATE = _FIRST_REQUEST + CAPACITY * _ENTRY_WORDS
FILE_BYTES = (_FIRST_LATE + CAPACITY * _ENTRY_WORDS) * _WORD

#: (number, end_offset, since_ms) of a request, (number, end_offset, status code) of late puts
RingEntry = tuple[int, int, int]


class Ring:
    """One direction. Callers: one process pushes, one process takes, each with one thread at a time."""

    def __init__(self, words: memoryview, *, pushed: int, taken: int, first: int) -> None:
        """Args: `pushed`, `taken`, `first`: word indexes of the two counts and of the first entry."""
        self._words = words
        self._pushed = pushed
        self._taken = taken
        self._first = first

    def __len__(self) -> int:
        count: int = self._words[self._pushed] - self._words[self._taken]
        if not 0 <= count <= CAPACITY:
            raise broken("ring counts are impossible", count=count)
        return count

    def push(self, entry: RingEntry) -> bool:
        """Append an entry. Returns: False if the ring is full, with nothing written."""
        if len(self) == CAPACITY:
            return False
        words = self._words
        count: int = words[self._pushed]
        at = self._first + (count & (CAPACITY - 1)) * _ENTRY_WORDS
        words[at], words[at + 1], words[at + 2] = entry
        words[self._pushed] = count + 1
        return True

    def take_all(self) -> list[RingEntry]:
        """Take every entry that is there, oldest first."""
        words = self._words
        if words[self._pushed] == words[self._taken]:
            return []
        count = len(self)
        taken: int = words[self._taken]
        entries = []
        for number in range(taken, taken + count):
            at = self._first + (number & (CAPACITY - 1)) * _ENTRY_WORDS
            entries.append((words[at], words[at + 1], words[at + 2]))
        words[self._taken] = taken + count
        return entries


class ReplicationRings:
    """Both rings."""

    def __init__(self, view: memoryview, *, files: Files) -> None:
        self._view = view
        self._files = files
        self._words = shared_words(view)
        #: CommitLog reports puts that wait for replicas, Replication takes them
        self.requests = Ring(
            self._words, pushed=_REQUESTS_PUSHED, taken=_REQUESTS_TAKEN, first=_FIRST_REQUEST
        )
        #: Replication reports puts that missed their deadline, CommitLog takes them
        self.late = Ring(self._words, pushed=_LATE_PUSHED, taken=_LATE_TAKEN, first=_FIRST_LATE)

    @classmethod
    def open(cls, path: str, *, files: Files) -> ReplicationRings:
        """Map the file, made if it is not there."""
        return cls(map_shared(path, FILE_BYTES, files=files), files=files)

    def reset(self) -> None:
        """Empty both. Callers: CommitLog, while no Replication is granted."""
        for word in (_REQUESTS_PUSHED, _REQUESTS_TAKEN, _LATE_PUSHED, _LATE_TAKEN):
            self._words[word] = 0

    def close(self) -> None:
        """Unmap."""
        self._words.release()
        self._files.unmap(self._view)


def map_shared(path: str, size_bytes: int, *, files: Files) -> memoryview:
    """A writable map of a small shared file, made zeroed if it is not there. Several processes may race here.

    Raises: Rejected, with no file made, on an architecture that does not keep the order of stores.
    """
    check_architecture(os.uname().machine)
    with files.opened(path, create=True) as fd:
        if files.size(fd) < size_bytes:
            files.allocate(fd, size_bytes)
        return files.map_words(fd, size_bytes)
