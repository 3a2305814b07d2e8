"""Records read from a log: by pread, so that a bad sector is an error at an offset, and checked before their use.

Damage is raised as `Corrupt` with the file and the offset of the record. Bytes for a follower are checked by their
chain units instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from raymq.store.base import format as fmt
from raymq.store.base.arrays import Bools, Int64s
from raymq.store.base.checksum import range_crcs
from raymq.store.base.errors import Corrupt, Unreadable
from raymq.store.base.rules import UNIT_RECORD_RULE
from raymq.store.log.segments.log_files import read_into, read_of
from raymq.store.log.segments.mapped_file_queue import MappedFileQueue
from raymq.store.log.segments.read_together import read_together
from raymq.store.records import record
from raymq.store.records.record_walk import FoundRecords, first_fault, gather, records_at

_INT = np.dtype(">i4")

#: bytes read at an offset at which a record may begin. A larger record is read whole
FIRST_READ_BYTES = 2048
#: a larger record is read in two parts where only its properties are wanted: a second read costs as much as such a body
WHOLE_BYTES = 16 << 10
#: bytes read at a time on a walk. A larger record is read whole
WALK_BYTES = 1 << 20
#: most bytes of a record besides its body
_HEADER_MAX = fmt.HEADER_BYTES + 2 * fmt.IPV6_EXTRA_BYTES
_REST_MAX = _HEADER_MAX + 4 + 2 * 0x7FFF
#: least bytes of a record after its body
_TAIL_MIN = 4


class Records(NamedTuple):
    """Records of a log in one buffer, with the bytes between them."""

    data: memoryview
    #: start of each record in `data`, and its size
    starts: Int64s
    sizes: Int64s


class WalkedPiece(NamedTuple):
    """A range of a log file, and the records that a walk over it found."""

    view: memoryview
    #: physical offset of the first byte of `view`
    base: int
    walk: record.Walk


def damaged(segments: MappedFileQueue, offset: int, fault: str) -> Corrupt:
    """The error for a record at a physical offset."""
    file = segments.find(offset)
    path = segments.directory if file is None else file.path
    return Corrupt(
        f"{path}: the record at offset {offset} is damaged ({fault}); `raymq store verify` says more",
        path=str(path),
        offset=offset,
        rule=fault,
    )


def read_records(
    segments: MappedFileQueue,
    positions: Int64s,
    sizes: Int64s,
    end: int,
    *,
    check_crc: bool = True,
    check_position: bool = True,
) -> Records:
    """The records at ascending physical offsets, in any files of the log, which ends at `end`.

    Raises: OffsetOutOfRange below the log's start, Corrupt for the first offset with a damaged, unreadable or no
    record.
    """
    found = read_unchecked(segments, positions, sizes, end)
    fault = first_fault(
        found.data, found.starts, sizes, positions if check_position else None, check_crc=check_crc
    )
    if fault is not None:
        raise damaged(segments, int(positions[fault.row]), fault.rule)
    return found


def read_unchecked(
    segments: MappedFileQueue,
    positions: Int64s,
    sizes: Int64s,
    end: int,
    *,
    overlapping: bool = False,
) -> Records:
    """`read_records` without a check of the records. Each must lie inside its file."""
    if not len(positions):
        return Records(memoryview(b""), positions, sizes)

    ends = _checked_ends(segments, positions, sizes, overlapping=overlapping)
    data, starts = read_together(
        lambda begin, stop: read_of(segments, begin, stop, end),
        lambda target, begin: read_into(segments, target, begin, end),
        positions,
        ends,
        apart=positions[1:] // segments.file_size > positions[:-1] // segments.file_size,
    )
    return Records(data, starts, sizes)


def _checked_ends(
    segments: MappedFileQueue, positions: Int64s, sizes: Int64s, *, overlapping: bool = False
) -> Int64s:
    """Where records end. Raises: Corrupt unless each may be a record inside its file, after the one before it."""
    size = segments.file_size
    ends = positions + sizes
    good = (sizes >= fmt.RECORD_MIN_BYTES) & (positions >= 0) & (positions % size + sizes <= size)
    if overlapping:
        ends = np.maximum.accumulate(ends)
    else:
        good[1:] &= positions[1:] >= ends[:-1]

    if not good.all():
        row = int(good.argmin())
        raise Corrupt(
            f"a consume queue or index names a record of {int(sizes[row])} bytes at offset {int(positions[row])}, but "
            "no record can be there; run `raymq store verify`",
            path=str(segments.directory),
            offset=int(positions[row]),
            rule=UNIT_RECORD_RULE,
        )
    return ends


def read_properties(
    segments: MappedFileQueue,
    positions: Int64s,
    sizes: Int64s,
    end: int,
    *,
    check_position: bool = True,
) -> pa.Array:
    """The properties strings of the records at ascending physical offsets, a binary column.

    The body of a record of more than WHOLE_BYTES is not read, and that of no record is compared with its CRC.
    Raises: as `read_records`.
    """
    is_small = sizes <= WHOLE_BYTES
    if not is_small.all():
        _checked_ends(segments, positions, sizes)
    small = read_records(
        segments,
        positions[is_small],
        sizes[is_small],
        end,
        check_crc=False,
        check_position=check_position,
    )
    found = record.decode(*small, columns=("properties",)).column(0)
    if is_small.all():
        return found

    large = [
        _properties_at(segments, *place, end, check_position=check_position)
        for place in zip(positions[~is_small].tolist(), sizes[~is_small].tolist(), strict=True)
    ]
    rows = np.empty(len(sizes), dtype=np.int64)
    rows[is_small] = np.arange(len(found))
    rows[~is_small] = np.arange(len(found), len(sizes))
    return pa.concat_arrays([found, pa.array(large, pa.binary())]).take(pa.array(rows))


def _properties_at(
    segments: MappedFileQueue, position: int, size: int, end: int, *, check_position: bool
) -> bytes:
    """The properties string of one large record: its head is read, and what follows its body. Raises: as `records`."""
    head = read_of(segments, position, position + _HEADER_MAX, end)
    noted, magic, _, noted_position, *_ = fmt.HEADER_ESSENTIALS.unpack_from(head)
    if check_position and noted_position != position:
        raise damaged(segments, position, record.WalkStop.WRONG_POSITION.value)
    if magic not in (fmt.MAGIC_V1, fmt.MAGIC_V2):
        raise damaged(segments, position, record.WalkStop.BAD_MAGIC.value)

    body_end = _body_end(head)
    if noted == size and fmt.HEADER_BYTES <= body_end <= size - _TAIL_MIN:
        tail = read_of(segments, position + body_end, position + size, end)
        width = 1 if magic == fmt.MAGIC_V1 else 2
        at = width + int.from_bytes(tail[:width], "big")
        # Both lengths must lead to the end of the record.
        if len(tail) == at + 2 + int.from_bytes(tail[at : at + 2], "big"):
            return tail[at + 2 :]
    raise damaged(segments, position, record.WalkStop.BAD_LENGTH.value)


def may_be_record(segments: MappedFileQueue, position: int, size: int) -> bool:
    """Whether a unit of a consume queue may be right: it points at a record of its size, or at a deleted one.

    The CRC of the body does not count: damage of a body is no reason to doubt the unit.
    """
    start, end = segments.min_offset, segments.files[-1].start if segments.files else 0
    if position >= 0 and position + size <= start:
        return True
    if size < fmt.RECORD_MIN_BYTES or not start <= position < end + segments.file_size:
        return False
    one = np.array([position], dtype=np.int64), np.array([size], dtype=np.int64)
    try:
        read_records(
            segments, *one, end + segments.file_size, check_crc=False, check_position=False
        )
    except Corrupt:
        return False
    return True


class RecordsAtOffsets(NamedTuple):
    """The records at some offsets of a log."""

    #: a mask of the offsets at which a whole record begins
    is_record: Bools
    #: those records, raw, and their store times (ms)
    records: pa.Array
    times_ms: Int64s


def stored_at(segments: MappedFileQueue, offsets: Int64s, end: int) -> RecordsAtOffsets:
    """The records at ascending physical offsets. Perhaps no record begins at an offset.

    Raises: OffsetOutOfRange below the log's start, Corrupt for a damaged or unreadable body.
    """
    is_possible, read = _candidates(segments, offsets, end)
    candidates = offsets[is_possible]
    found = records_at(read.data, read.starts, candidates)
    records = record.select(read.data, read.starts[found.is_record], found.sizes)
    wrong = _first_wrong_body(records, found)
    if wrong is not None:
        offset = int(candidates[found.is_record][wrong])
        raise damaged(segments, offset, record.WalkStop.BAD_CRC.value)
    is_record = np.zeros(len(offsets), dtype=np.bool_)
    is_record[is_possible] = found.is_record
    return RecordsAtOffsets(is_record, records, found.times_ms)


def _candidates(segments: MappedFileQueue, offsets: Int64s, end: int) -> tuple[Bools, Records]:
    """A mask of the offsets at which a record of a possible size may begin, and its bytes: the first bytes, or all."""
    room = segments.file_size - offsets % segments.file_size
    has_head = room >= fmt.RECORD_MIN_BYTES
    head_lengths = np.minimum(room[has_head], FIRST_READ_BYTES)
    heads = read_unchecked(segments, offsets[has_head], head_lengths, end, overlapping=True)
    sizes = np.zeros(len(offsets), dtype=np.int64)
    sizes[has_head] = gather(heads.data, heads.starts, _INT)
    is_possible = (sizes >= fmt.RECORD_MIN_BYTES) & (sizes <= room)
    possible_sizes = sizes[is_possible]
    if (possible_sizes > FIRST_READ_BYTES).any():
        # A candidate may not be a record, and its size may reach into the next one.
        whole = read_unchecked(
            segments, offsets[is_possible], possible_sizes, end, overlapping=True
        )
        return is_possible, whole
    starts = heads.starts[is_possible[has_head]]
    return is_possible, Records(heads.data, starts, possible_sizes)


def _first_wrong_body(records: pa.Array, found: FoundRecords) -> int | None:
    """Row of the first record whose body has another CRC; None: all are right."""
    if not len(records):
        return None
    # In the column the bodies lie close together, which halves the time of their CRCs.
    _, edges, data = records.buffers()
    begins = np.frombuffer(edges, np.int32)[records.offset :][: len(records)].astype(np.int64)
    starts = begins + found.body_starts
    ends = begins + found.body_ends
    is_wrong = range_crcs(memoryview(data), starts, ends) != found.body_crcs
    is_wrong &= ends > starts
    return int(is_wrong.argmax()) if is_wrong.any() else None


def walk_piece(
    read: Callable[[int, int], bytes],
    at: int,
    stop: int,
    *,
    limit: int | None = None,
    nbytes: int = WALK_BYTES,
    check_crc: bool = True,
    check_position: bool = True,
) -> WalkedPiece:
    """Read and walk records from `at` up to `stop`, which is in the same file.

    Args: `read`: from (start, stop) to log bytes, as `read_of`. A piece ends after about `nbytes`, as STOPPED. It has
    at least one record if a whole one follows. Unreadable bytes end the walk as UNREADABLE.
    Raises: OffsetOutOfRange below the log's start.
    """
    # Sectors of the file are sectors of the piece.
    base = at - at % fmt.SECTOR_BYTES
    upto = min(stop, at + nbytes)

    while True:
        data, readable = _readable(read, base, upto)
        walk = record.walk(
            memoryview(data)[at - base :],
            at,
            limit=limit,
            check_crc=check_crc,
            check_position=check_position,
        )

        is_cut_off = walk.reason is record.WalkStop.SHORT
        if readable < upto:
            if is_cut_off or walk.end >= readable or readable <= at:
                walk = walk._replace(reason=record.WalkStop.UNREADABLE)
        elif is_cut_off and upto < stop and len(walk.positions):
            # The next piece begins with the record that this one has in part.
            walk = walk._replace(reason=record.WalkStop.STOPPED)
        elif is_cut_off and upto < stop:
            first_end = _end_of_first(data[at - base :][:_HEADER_MAX], at, stop)
            if first_end is None:
                walk = walk._replace(reason=record.WalkStop.BAD_LENGTH)
            elif upto < first_end <= stop:
                upto = first_end
                continue
        return WalkedPiece(memoryview(data), base, walk)


def _end_of_first(head: bytes, at: int, stop: int) -> int | None:
    """The end of the record at `at`, of which a piece has only the first bytes; None: no record has the size there.

    If the head is not whole either, the end of a larger piece.
    """
    if len(head) < _HEADER_MAX:
        return min(stop, at + WALK_BYTES)
    size = _size_of(head)
    return None if size is None else at + size


def _size_of(head: bytes) -> int | None:
    """The size in the head of a record; None if its body's length makes that size impossible."""
    size = int.from_bytes(head[:4], "big", signed=True)
    at = _body_length_at(head)
    rest = size - int.from_bytes(head[at : at + 4], "big")
    return size if fmt.RECORD_MIN_BYTES <= rest <= _REST_MAX else None


def _body_length_at(head: bytes) -> int:
    """Where the head of a record has the length of the body."""
    *_, flags, _, _ = fmt.HEADER_ESSENTIALS.unpack_from(head)
    at = fmt.BODY_LENGTH_AT
    for flag in (fmt.SYS_BORN_HOST_V6, fmt.SYS_STORE_HOST_V6):
        at += fmt.IPV6_EXTRA_BYTES if flags & flag else 0
    return at


def _body_end(head: bytes) -> int:
    """Where the body of a record ends, from the start of the record."""
    at = _body_length_at(head)
    return at + 4 + int.from_bytes(head[at : at + 4], "big")


def _readable(read: Callable[[int, int], bytes], start: int, stop: int) -> tuple[bytes, int]:
    """Bytes from `start` on, and the end of the readable ones."""
    try:
        return read(start, stop), stop
    except Unreadable as error:
        bad = int(error.fields["offset"])
    # The caller begins after `start`. The bad sector may be in between.
    return (read(start, bad) if bad > start else b""), bad
