"""The records LEASE and SETTLE as bytes.

A record has its form (1 byte), its group, the names of its topics, and entries of these. An entry begins with its kind
(1 byte). A topic is named by its place among the names. Texts have their length (2 bytes) before them, sessions, too
(1 byte); queue ids, delays and counts have 4 bytes, numbers and offsets 8, little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from raymq.store.base.errors import Rejected
from raymq.store.state.topics import QueueKey

from .entries import (
    EndEntry,
    Entry,
    ForgetEntry,
    HeldEntry,
    LeasedPart,
    LeaseEntry,
    LengthEntry,
    NumberEntry,
    PauseEntry,
    QueueEntry,
    ResetEntry,
    SessionEntry,
    Settled,
    SettleEntry,
    SettleOutcome,
    TimeEntry,
    TrimEntry,
)
from .offsets import pack_column, pack_offsets, read_column, read_offsets
from .pauses import PAUSES
from .reader import PackedReader

#: the form of a record that this version writes
FORM = 1
#: bytes of the id of a session
SESSION_BYTES_MAX = 64

_LENGTH = struct.Struct("<I")
_SHORT = struct.Struct("<H")
_KEY = struct.Struct("<HI")
_LEASE = struct.Struct("<qqIH")
_SETTLED = struct.Struct("<Bq")
_SIGNED = struct.Struct("<q")
_HELD = struct.Struct("<qI")
_SESSION = struct.Struct("<qqq")
_QUEUE = struct.Struct("<qqq")


class _Topics:
    """The names of a record's topics, in the order in which its entries name them."""

    def __init__(self) -> None:
        self.places: dict[str, int] = {}

    def key(self, key: QueueKey) -> bytes:
        place = self.places.setdefault(key[0], len(self.places))
        return _KEY.pack(place, key[1])


def pack(group: str, entries: Iterable[Entry]) -> bytes:
    """The body of a record. Raises: ValueError, struct.error for entries that could not be read."""
    topics = _Topics()
    parts: list[bytes] = []
    for entry in entries:
        kind, packer = _PACKERS[type(entry)]
        parts.append(bytes((kind,)))
        parts += packer(entry, topics)
    names = [_text(name) for name in topics.places]
    return b"".join((bytes((FORM,)), _text(group), _SHORT.pack(len(names)), *names, *parts))


def pack_checked(group: str, entries: Iterable[Entry]) -> bytes:
    """As `pack`, and read again. Raises: Rejected for entries that a replica could not read: no log may get them."""
    try:
        body = pack(group, entries)
        unpack(body)
    except (ValueError, LookupError, struct.error) as error:
        raise Rejected(
            f"no record can say this of the leases of group {group}: {error}", field="record"
        ) from error
    return body


def unpack(body: bytes) -> tuple[str, list[Entry]]:
    """The group and the entries of a record. Raises: ValueError for other bytes."""
    reader = PackedReader(body)
    form = reader.byte()
    if form != FORM:
        raise ValueError(f"a record of form {form}, this version knows {FORM}")
    group = reader.text()
    topics = [reader.text() for _ in range(reader.short())]
    entries: list[Entry] = []
    while not reader.is_done:
        kind = reader.byte()
        if kind not in _READERS:
            raise ValueError(f"an entry of kind {kind}")
        entries.append(_READERS[kind](reader, topics))
    return group, entries


def _text(text: str) -> bytes:
    data = text.encode()
    return _SHORT.pack(len(data)) + data


def _session(session: bytes) -> bytes:
    return bytes((len(session),)) + session


def _read_session(reader: PackedReader) -> bytes:
    return reader.take(reader.byte())


def _read_key(reader: PackedReader, topics: Sequence[str]) -> QueueKey:
    place, queue_id = reader.short(), reader.length()
    if place >= len(topics):
        raise ValueError(f"topic {place} of {len(topics)}")
    return topics[place], queue_id


# --- leases ---------------------------------------------------------------------------------------


def _pack_lease(entry: LeaseEntry, topics: _Topics) -> list[bytes]:
    head = _LEASE.pack(entry.number, entry.request, entry.lease_ms, len(entry.parts))
    packed = [head, _session(entry.session)]
    for part in entry.parts:
        packed.append(topics.key(part.key))
        packed += (pack_offsets(each) for each in (part.taken, part.filtered, part.passed))
        packed += (_LENGTH.pack(len(part.before)), pack_column(part.before))
    return packed


def _read_lease(reader: PackedReader, topics: Sequence[str]) -> LeaseEntry:
    number, request, lease_ms = reader.number(), reader.number(), reader.length()
    count = reader.short()
    session = _read_session(reader)
    parts = []
    for _ in range(count):
        key = _read_key(reader, topics)
        taken, filtered, passed = (read_offsets(reader) for _ in range(3))
        parts.append(LeasedPart(key, taken, filtered, passed, read_column(reader, reader.length())))
    return LeaseEntry(number, session, request, lease_ms, parts)


# --- settlements ----------------------------------------------------------------------------------


def _pack_groups(groups: Sequence[Settled], topics: _Topics) -> list[bytes]:
    packed = [_SHORT.pack(len(groups))]
    for group in groups:
        packed += (_SETTLED.pack(group.outcome, group.number), topics.key(group.key))
        packed.append(_LENGTH.pack(group.delay_ms))
        packed.append(pack_offsets(group.offsets))
    return packed


def _read_groups(reader: PackedReader, topics: Sequence[str]) -> list[Settled]:
    groups = []
    for _ in range(reader.short()):
        outcome, number = SettleOutcome(reader.byte()), reader.number()
        key, delay_ms = _read_key(reader, topics), reader.length()
        groups.append(Settled(outcome, number, key, delay_ms, read_offsets(reader)))
    return groups


def _pack_settle(entry: SettleEntry, topics: _Topics) -> list[bytes]:
    return [
        _SIGNED.pack(entry.settle),
        _session(entry.session),
        *_pack_groups(entry.groups, topics),
    ]


def _read_settle(reader: PackedReader, topics: Sequence[str]) -> SettleEntry:
    settle = reader.number()
    return SettleEntry(_read_session(reader), settle, _read_groups(reader, topics))


# --- other entries --------------------------------------------------------------------------------


def _pack_reset(entry: ResetEntry, topics: _Topics) -> list[bytes]:
    return [topics.key(entry.key), _SIGNED.pack(entry.offset)]


def _read_reset(reader: PackedReader, topics: Sequence[str]) -> ResetEntry:
    key, offset = _read_key(reader, topics), reader.signed()
    if offset < -1:
        raise ValueError(f"offset {offset}")
    return ResetEntry(key, offset)


def _pack_trim(entry: TrimEntry, topics: _Topics) -> list[bytes]:
    return [topics.key(entry.key), _SIGNED.pack(entry.min_offset)]


def _read_trim(reader: PackedReader, topics: Sequence[str]) -> TrimEntry:
    return TrimEntry(_read_key(reader, topics), reader.number())


def _pack_length(entry: LengthEntry, topics: _Topics) -> list[bytes]:
    return [_HELD.pack(entry.number, entry.lease_ms)]


def _read_length(reader: PackedReader, topics: Sequence[str]) -> LengthEntry:
    return LengthEntry(reader.number(), reader.length())


def _pack_forget(entry: ForgetEntry, topics: _Topics) -> list[bytes]:
    return [_LENGTH.pack(len(entry.sessions)), *map(_session, entry.sessions)]


def _read_forget(reader: PackedReader, topics: Sequence[str]) -> ForgetEntry:
    return ForgetEntry([_read_session(reader) for _ in range(reader.length())])


def _pack_end(entry: EndEntry, topics: _Topics) -> list[bytes]:
    return []


def _read_end(reader: PackedReader, topics: Sequence[str]) -> EndEntry:
    return EndEntry()


def _pack_time(entry: TimeEntry, topics: _Topics) -> list[bytes]:
    return [_SIGNED.pack(entry.at_ms)]


def _read_time(reader: PackedReader, topics: Sequence[str]) -> TimeEntry:
    return TimeEntry(reader.number())


def _pack_pause(entry: PauseEntry, topics: _Topics) -> list[bytes]:
    return [_text(entry.reason)]


def _read_pause(reader: PackedReader, topics: Sequence[str]) -> PauseEntry:
    entry = PauseEntry(reader.text())
    if entry.reason not in PAUSES:
        raise ValueError(f"a pause {entry.reason!r}")
    return entry


# --- snapshots ------------------------------------------------------------------------------------


def _pack_number(entry: NumberEntry, topics: _Topics) -> list[bytes]:
    return [_SIGNED.pack(entry.number)]


def _read_number(reader: PackedReader, topics: Sequence[str]) -> NumberEntry:
    return NumberEntry(reader.number())


def _pack_held(entry: HeldEntry, topics: _Topics) -> list[bytes]:
    return [_HELD.pack(entry.number, entry.lease_ms), _session(entry.session)]


def _read_held(reader: PackedReader, topics: Sequence[str]) -> HeldEntry:
    number, lease_ms = reader.number(), reader.length()
    return HeldEntry(number, _read_session(reader), lease_ms)


def _pack_known_session(entry: SessionEntry, topics: _Topics) -> list[bytes]:
    head = _SESSION.pack(entry.request, entry.number, entry.settle)
    return [head, _session(entry.session), *_pack_groups(entry.refused, topics)]


def _read_known_session(reader: PackedReader, topics: Sequence[str]) -> SessionEntry:
    request, number, settle = reader.number(), reader.number(), reader.number()
    session = _read_session(reader)
    return SessionEntry(session, request, number, settle, _read_groups(reader, topics))


def _pack_queue(entry: QueueEntry, topics: _Topics) -> list[bytes]:
    columns = (entry.numbers, entry.attempts, entry.delays_ms)
    head = _QUEUE.pack(entry.low, entry.first, entry.stop)
    return [
        topics.key(entry.key),
        head,
        pack_offsets(entry.settled),
        *map(pack_column, columns),
    ]


def _read_queue(reader: PackedReader, topics: Sequence[str]) -> QueueEntry:
    key = _read_key(reader, topics)
    low, first, stop = reader.number(), reader.number(), reader.number()
    settled = read_offsets(reader)
    count = stop - first - len(settled)
    if not low <= first <= stop or count < 0:
        raise ValueError(f"a queue from {low}, {first} to {stop}, with {len(settled)} settled")
    columns = [read_column(reader, count) for _ in range(3)]
    return QueueEntry(key, low, first, stop, settled, *columns)


#: kind of entry -> its class and how it becomes bytes, and back. A kind keeps its number for ever
_KINDS: tuple[tuple[int, type, Callable[..., list[bytes]], Callable[..., Any]], ...] = (
    (1, LeaseEntry, _pack_lease, _read_lease),
    (2, SettleEntry, _pack_settle, _read_settle),
    (3, ResetEntry, _pack_reset, _read_reset),
    (4, TrimEntry, _pack_trim, _read_trim),
    (5, LengthEntry, _pack_length, _read_length),
    (6, ForgetEntry, _pack_forget, _read_forget),
    (7, EndEntry, _pack_end, _read_end),
    (8, NumberEntry, _pack_number, _read_number),
    (9, HeldEntry, _pack_held, _read_held),
    (10, SessionEntry, _pack_known_session, _read_known_session),
    (11, QueueEntry, _pack_queue, _read_queue),
    (12, TimeEntry, _pack_time, _read_time),
    (13, PauseEntry, _pack_pause, _read_pause),
)
_PACKERS: dict[type, tuple[int, Callable[..., list[bytes]]]] = {
    each: (kind, packer) for kind, each, packer, _ in _KINDS
}
_READERS: dict[int, Callable[..., Any]] = {kind: reader for kind, _, _, reader in _KINDS}
