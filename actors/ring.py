"""Single-producer single-consumer rings in a shared file: the lists between CommitLog and one satellite.

File `raymq/ring-<role>`, native byte order (it never leaves the machine), 8-byte words:

    word 0     requests: count of entries ever pushed (CommitLog writes)
    word 8     requests: count of entries ever taken  (the satellite writes)
    word 16    statuses: count ever pushed            (the satellite writes)
    word 24    statuses: count ever taken             (CommitLog writes)
    word 512   4096 requests of 4 words: sequence, end_offset, deadline_ms (monotonic), flags
    then       4096 statuses of 2 words: sequence, status code

An entry is written before the count that makes it visible. Both counts live in the file, so a new satellite
goes on where the dead one stopped; requests that died with it are answered by the flushed watermark or, at
their deadline, by CommitLog.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from raymq.store.errors import broken
from raymq.store.files import Files

#: entries of one ring, a power of two
CAPACITY = 4096

_WORD = 8
_REQUEST_WORDS = 4
_STATUS_WORDS = 2
_FIRST_REQUEST = 512
_FIRST_STATUS = _FIRST_REQUEST + CAPACITY * _REQUEST_WORDS
FILE_BYTES = (_FIRST_STATUS + CAPACITY * _STATUS_WORDS) * _WORD

#: the satellite answers this request by a status entry if it does not succeed; without it another role answers
FLAG_ANSWER = 1
#: done only when replicated too
FLAG_REPLICA = 2
#: done only when flushed
FLAG_FLUSH = 4


class Request(NamedTuple):
    """One put that waits, as CommitLog hands it to a satellite."""

    #: CommitLog's number of the put; statuses name it
    sequence: int
    #: the put is done when the watermark reaches this physical offset
    end_offset: int
    #: monotonic milliseconds
    deadline_ms: int
    #: FLAG_* bits
    flags: int


class Status(NamedTuple):
    """One put that did not succeed in time, as a satellite answers it."""

    sequence: int
    #: PutStatus code
    code: int


class Ring:
    """One direction. Callers: one thread at a time pushes, in one process; one takes, in one process."""

    def __init__(
        self, words: memoryview, *, pushed: int, taken: int, first: int, entry_words: int
    ) -> None:
        """Args: word indexes of the two counts and of the first entry; words of one entry."""
        self._words = words
        self._pushed = pushed
        self._taken = taken
        self._first = first
        self._entry_words = entry_words

    def __len__(self) -> int:
        count: int = self._words[self._pushed] - self._words[self._taken]
        if not 0 <= count <= CAPACITY:
            raise broken("ring counts are impossible", count=count)
        return count

    @property
    def full(self) -> bool:
        """Whether a push would be refused; for the producer, False stays False until it pushes."""
        return len(self) == CAPACITY

    def push(self, entry: Sequence[int]) -> bool:
        """Append an entry. Returns: False if the ring is full; nothing was written then."""
        if self.full:
            return False
        words = self._words
        count: int = words[self._pushed]
        at = self._first + (count & (CAPACITY - 1)) * self._entry_words
        for word in entry:
            words[at] = word
            at += 1
        words[self._pushed] = count + 1
        return True

    def take_all(self) -> list[list[int]]:
        """Take every entry that is there, oldest first."""
        words = self._words
        if words[self._pushed] == words[self._taken]:
            return []
        count = len(self)
        taken: int = words[self._taken]
        step = self._entry_words
        entries = []
        for number in range(taken, taken + count):
            at = self._first + (number & (CAPACITY - 1)) * step
            entries.append(words[at : at + step].tolist())
        words[self._taken] = taken + count
        return entries


class RoleRings:
    """Both rings of one role."""

    def __init__(self, view: memoryview, *, files: Files) -> None:
        self._view = view
        self._files = files
        self._words = view.cast("q")
        self._requests = Ring(
            self._words, pushed=0, taken=8, first=_FIRST_REQUEST, entry_words=_REQUEST_WORDS
        )
        self._statuses = Ring(
            self._words, pushed=16, taken=24, first=_FIRST_STATUS, entry_words=_STATUS_WORDS
        )

    @classmethod
    def open(cls, path: str, *, files: Files) -> RoleRings:
        """Map the file, made if it is not there."""
        return cls(map_shared(path, FILE_BYTES, files=files), files=files)

    def reset(self) -> None:
        """Empty both. Callers: CommitLog, while no satellite of the role is granted."""
        for word in (0, 8, 16, 24):
            self._words[word] = 0

    @property
    def full(self) -> bool:
        """Whether `request` would be refused."""
        return self._requests.full

    def request(self, request: Request) -> bool:
        """CommitLog hands a put over. Returns: False when full (back-pressure)."""
        return self._requests.push(request)

    def take_requests(self) -> list[Request]:
        """The satellite takes all that wait."""
        entries = self._requests.take_all()
        return [Request(*entry) for entry in entries] if entries else []

    def answer(self, status: Status) -> bool:
        """The satellite reports an exception. Returns: False when full; CommitLog's deadline then answers."""
        return self._statuses.push(status)

    def take_statuses(self) -> list[Status]:
        """CommitLog takes all that are there."""
        entries = self._statuses.take_all()
        return [Status(*entry) for entry in entries] if entries else []

    def close(self) -> None:
        """Unmap."""
        self._words.release()
        self._files.unmap(self._view)


def map_shared(path: str, size_bytes: int, *, files: Files) -> memoryview:
    """A writable map of a small shared file, made zeroed if it is not there; several processes may race here."""
    fd = files.open_file(path, create=True)
    try:
        if files.size(fd) < size_bytes:
            files.allocate(fd, size_bytes)
        return files.map_words(fd, size_bytes)
    finally:
        files.close(fd)
