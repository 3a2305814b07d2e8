"""The walk over record boundaries: the only loop over records, done by numpy if possible.

Source: CommitLog#checkMessageAndReturnSize. RayMQ also checks the physical offset, which RocketMQ trusts.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from raymq.store.base import format as fmt
from raymq.store.base.arrays import Bools, Int64s
from raymq.store.base.checksum import range_crcs
from raymq.store.base.errors import require

from .one_record import is_whole

if TYPE_CHECKING:
    from typing_extensions import Buffer

#: the magics of message records, as bytes of the log
MAGICS = (fmt.MAGIC_V1.to_bytes(4, "big"), fmt.MAGIC_V2.to_bytes(4, "big"))

#: records checked at a time: a limit for memory, and for the work done after a damaged record
BLOCK_RECORDS = 8192
#: after so many consecutive records of one size, numpy looks for more of that size
STRIDE_RECORDS = 4
#: up to this many records are checked one by one, which costs less than arrays
FEW_RECORDS = 16
#: records of the first look ahead; more while the size stays the same
STRIDE_LOOK_AHEAD = 256


class WalkStop(Enum):
    """The reason why a walk ended at its `end`."""

    #: `stop` or `limit` was reached after a whole record
    STOPPED = "stopped"
    #: size and magic are zeros
    END_OF_DATA = "end of data"
    #: a blank record: the log continues in the next file
    BLANK = "blank record"
    #: the magic is of neither a message nor a blank record
    BAD_MAGIC = "bad magic"
    #: the size is not the sum of the parts
    BAD_LENGTH = "bad length"
    #: the body's CRC differs
    BAD_CRC = "bad body CRC"
    #: the physical offset in the record is another one
    WRONG_POSITION = "wrong physical offset"
    #: the record continues after `stop`
    SHORT = "cut off"
    #: the disk cannot read the bytes
    UNREADABLE = "it cannot be read"


class Walk(NamedTuple):
    """Whole, valid records, one after the other."""

    #: physical offset of each record
    positions: Int64s
    #: bytes of each record
    sizes: Int64s
    #: physical offset after the last record: the position where the walk stopped
    end: int
    reason: WalkStop


def walk(
    data: Buffer,
    base_offset: int,
    *,
    stop: int | None = None,
    limit: int | None = None,
    check_crc: bool = True,
    check_position: bool = True,
) -> Walk:
    """Walk the records of `data`, whose first byte has the physical offset `base_offset`.

    Args: `stop`: bytes of `data` to walk (all by default). `limit`: most records. `check_position`: False for foreign
    logs. Bad bytes never raise, and bytes after `stop` are never read.
    """
    view = memoryview(data).cast("B")
    length = len(view) if stop is None else min(stop, len(view))
    view = view[: max(0, length)]

    found: list[Int64s] = []
    found_sizes: list[Int64s] = []
    position, left = 0, limit if limit is not None else len(view)
    reason = WalkStop.STOPPED
    while left > 0 and position < len(view):
        starts, sizes, reason = _scan(view, position, min(left, BLOCK_RECORDS))
        good, fault = _check(view, starts, sizes, base_offset, check_crc, check_position)
        if good:
            found.append(starts[:good])
            found_sizes.append(sizes[:good])
            position = int(starts[good - 1] + sizes[good - 1])
            left -= good
        if fault is not None:
            reason = fault
        if reason is not WalkStop.STOPPED:
            break

    positions = np.concatenate(found) + base_offset if found else np.empty(0, dtype=np.int64)
    all_sizes = np.concatenate(found_sizes) if found else np.empty(0, dtype=np.int64)
    return Walk(positions, all_sizes, base_offset + position, reason)


def _scan(view: memoryview, position: int, limit: int) -> tuple[Int64s, Int64s, WalkStop]:
    """Follow sizes from `position`. Returns: starts and sizes of the records that fit, and the reason for the stop.

    Only size and magic are read. `_check` checks the rest of all records at once.
    """
    #: one item per run of records of the same size
    sizes: list[int] = []
    counts: list[int] = []
    unpack = fmt.PREFIX.unpack_from
    total, at = len(view), position
    count = same = last = 0
    reason = WalkStop.STOPPED

    while count < limit and at < total:
        if total - at < fmt.BLANK_BYTES:
            reason = WalkStop.SHORT
            break
        size, magic = unpack(view, at)
        if magic != fmt.MAGIC_V1 and magic != fmt.MAGIC_V2:
            if magic == fmt.MAGIC_BLANK:
                reason = WalkStop.BLANK
            elif magic == 0 and size == 0:
                reason = WalkStop.END_OF_DATA
            else:
                reason = WalkStop.BAD_MAGIC
            break
        if size < fmt.RECORD_MIN_BYTES:
            reason = WalkStop.BAD_LENGTH
            break
        if at + size > total:
            reason = WalkStop.SHORT
            break

        same = same + 1 if size == last else 0
        last = size
        run = 1
        if same >= STRIDE_RECORDS:
            run = _stride(view, at, size, limit - count)
            same = 0

        sizes.append(size)
        counts.append(run)
        at += run * size
        count += run

    found = np.repeat(np.array(sizes, dtype=np.int64), counts)
    return position + np.cumsum(found) - found, found, reason


def _stride(view: memoryview, position: int, size: int, limit: int) -> int:
    """The number of records from `position` on that begin like this one; at least 1, which the caller has checked."""
    most = min(limit, (len(view) - position) // size)
    prefix = int.from_bytes(view[position : position + fmt.BLANK_BYTES], "big")
    run, look = 1, STRIDE_LOOK_AHEAD
    while run < most:
        count = min(look, most - run)
        prefixes = np.ndarray(
            (count,), dtype=">u8", buffer=view, offset=position + run * size, strides=(size,)
        )
        equal = prefixes == prefix
        if not equal.all():
            return run + int(equal.argmin())
        run += count
        look *= 4
    return run


def gather(view: Any, starts: Int64s, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Read one `dtype` item at each of `starts`, which need no alignment.

    Raises: Bug unless every item lies inside `view`.
    """
    if not len(starts):
        return np.empty(0, dtype=dtype)
    room = max(0, len(view) - dtype.itemsize + 1)
    # Negative numbers are large when read as unsigned ones.
    inside = bool((starts.view(np.uint64) < room).all())
    require(inside, "items lie inside their buffer", room=room)
    # With a window at every byte numpy copies whole items, which is far quicker than field by field.
    windows = np.ndarray((room,), dtype=f"V{dtype.itemsize}", buffer=view, strides=(1,))
    return windows[starts].view(dtype)


class Layout(NamedTuple):
    """The ranges of the variable parts of records in a buffer: half-open, one item per record."""

    body_start: Int64s
    body_end: Int64s
    topic_start: Int64s
    topic_end: Int64s
    properties_start: Int64s
    properties_end: Int64s


_BYTE = np.dtype(np.int8)
_SHORT = np.dtype(">i2")
_INT = np.dtype(">i4")


def layout(view: object, starts: Int64s, sizes: Int64s) -> tuple[Layout, Bools]:
    """The parts of records, and whether each record's parts add up to its size.

    If they do not, the parts mean nothing. Args: `starts`, `sizes`: every [start, start + size) lies inside `view` and
    has at least RECORD_MIN_BYTES.
    """
    return _layout(view, gather(view, starts, fmt.HEADER_DTYPE), starts, sizes)


def _layout(
    view: object, headers: npt.NDArray[Any], starts: Int64s, sizes: Int64s
) -> tuple[Layout, Bools]:
    """`layout` with headers that were gathered as those of IPv4 records."""
    # Most records are of V1 and have IPv4 hosts.
    extra: Int64s | int = 0
    topic_width: Int64s | int = 1
    sys_flags, v2 = headers["sys_flag"], headers["magic"] == fmt.MAGIC_V2
    any_v6 = (sys_flags & fmt.SYS_ANY_HOST_V6).any()
    any_v2 = v2.any()
    if any_v6:
        extra = fmt.IPV6_EXTRA_BYTES * (
            ((sys_flags & fmt.SYS_BORN_HOST_V6) != 0).astype(np.int64)
            + ((sys_flags & fmt.SYS_STORE_HOST_V6) != 0)
        )
    if any_v2:
        topic_width = np.where(v2, 2, 1)

    ends = starts + sizes
    body_start = starts + extra + fmt.HEADER_BYTES
    good = body_start + topic_width + 3 <= ends

    def inside(position: Int64s) -> Int64s:
        # A damaged record's parts may lie anywhere. Its start is always readable.
        return np.where(good, position, starts)

    body_length = headers["body_length"].astype(np.int64)
    if any_v6:
        at = inside(starts + extra + fmt.BODY_LENGTH_AT)
        body_length = gather(view, at, _INT).astype(np.int64)

    body_end = body_start + body_length
    good &= (body_length >= 0) & (body_end + topic_width + 3 <= ends)
    topic_length = gather(view, inside(body_end), _BYTE).astype(np.int64)
    if any_v2:
        wide = gather(view, inside(body_end), _SHORT)
        topic_length = np.where(v2, wide, topic_length)

    topic_start = body_end + topic_width
    topic_end = topic_start + topic_length
    good &= (topic_length >= 1) & (topic_end + 2 <= ends)

    properties_length = gather(view, inside(topic_end), _SHORT).astype(np.int64)
    properties_start = topic_end + 2
    properties_end = properties_start + properties_length
    good &= (properties_length >= 0) & (properties_end == ends)
    return Layout(
        body_start, body_end, topic_start, topic_end, properties_start, properties_end
    ), good


def _check(
    view: memoryview,
    starts: Int64s,
    sizes: Int64s,
    base_offset: int,
    check_crc: bool,
    check_position: bool,
) -> tuple[int, WalkStop | None]:
    """The number of valid records from the first on, and the fault of the next one if there is one."""
    if not len(starts):
        return 0, None
    headers = gather(view, starts, fmt.HEADER_DTYPE)
    positions = starts + base_offset if check_position else None
    return _first_wrong(view, headers, starts, sizes, positions, check_crc)


def _first_wrong(
    view: memoryview,
    headers: npt.NDArray[Any],
    starts: Int64s,
    sizes: Int64s,
    positions: Int64s | None,
    check_crc: bool,
) -> tuple[int, WalkStop | None]:
    """`_check` of records whose magics and sizes are right. Args: `positions`: None: any is right."""
    parts, good = _layout(view, headers, starts, sizes)
    count, fault = len(starts), None
    if not good.all():
        count, fault = int(good.argmin()), WalkStop.BAD_LENGTH

    if positions is not None:
        wrong = headers["physical_offset"][:count] != positions[:count]
        if wrong.any():
            count, fault = int(wrong.argmax()), WalkStop.WRONG_POSITION

    if check_crc and count:
        body_start, body_end = parts.body_start[:count], parts.body_end[:count]
        found = range_crcs(view, body_start, body_end)
        # Source: RocketMQ compares only if there is a body.
        wrong = (found != headers["body_crc"][:count]) & (body_end > body_start)
        if wrong.any():
            count, fault = int(wrong.argmax()), WalkStop.BAD_CRC

    return count, fault


class RecordFault(NamedTuple):
    """A damaged record: its row and the rule that it breaks."""

    row: int
    rule: str


def first_fault(
    view: memoryview,
    starts: Int64s,
    sizes: Int64s,
    positions: Int64s | None = None,
    *,
    check_crc: bool = True,
) -> RecordFault | None:
    """The first record that is not whole, as it was stored; None if all are.

    Args: `starts`, `sizes`: every [start, start + size) lies inside `view`. `positions`: the physical offsets that
    the records must have. Header, topic and properties have no CRC: only their sizes and lengths are checked.
    """
    if len(starts) <= FEW_RECORDS and _are_whole(view, starts, sizes, positions, check_crc):
        return None

    count, rule = len(starts), ""
    short = sizes < fmt.RECORD_MIN_BYTES
    if short.any():
        count, rule = int(short.argmax()), WalkStop.BAD_LENGTH.value

    headers = gather(view, starts[:count], fmt.HEADER_DTYPE)
    right = (headers["magic"] == fmt.MAGIC_V1) | (headers["magic"] == fmt.MAGIC_V2)
    right &= headers["size"] == sizes[:count]
    if not right.all():
        count, rule = int(right.argmin()), WalkStop.BAD_MAGIC.value + " or size"

    expected = None if positions is None else positions[:count]
    whole, fault = _first_wrong(
        memoryview(view), headers[:count], starts[:count], sizes[:count], expected, check_crc
    )

    if fault is not None:
        return RecordFault(whole, fault.value)
    return RecordFault(count, rule) if rule else None


def _are_whole(
    view: memoryview, starts: Int64s, sizes: Int64s, positions: Int64s | None, check_crc: bool
) -> bool:
    data, count = memoryview(view), len(starts)
    expected = [None] * count if positions is None else positions.tolist()
    rows = zip(starts.tolist(), sizes.tolist(), expected, strict=True)
    return all(is_whole(data, at, size, want, check_crc=check_crc) for at, size, want in rows)


class FoundRecords(NamedTuple):
    """The records at some positions of a buffer."""

    #: a mask of the positions at which a whole record begins
    is_record: Bools
    #: bytes and store times (ms) of those records
    sizes: Int64s
    times_ms: Int64s
    #: starts and ends of their bodies, relative to their records, and the CRCs that the bodies must have
    body_starts: Int64s
    body_ends: Int64s
    body_crcs: npt.NDArray[np.integer[Any]]

    def select(self, kept: Bools) -> FoundRecords:
        """Some of the records. The positions of the others count as having none."""
        is_record = self.is_record.copy()
        is_record[np.flatnonzero(is_record)[~kept]] = False
        columns = {name: getattr(self, name)[kept] for name in self._fields if name != "is_record"}
        return FoundRecords(is_record=is_record, **columns)


def records_at(view: memoryview, starts: Int64s, positions: Int64s) -> FoundRecords:
    """The records at `starts` (0 or more) of a buffer, which have these physical offsets.

    Bodies are not checked. `one_record.record_at` does the same for one record.
    """
    # The row of `starts` of each candidate.
    rows = np.flatnonzero(starts <= len(view) - fmt.RECORD_MIN_BYTES)
    headers = gather(view, starts[rows], fmt.HEADER_DTYPE)
    sizes = headers["size"].astype(np.int64)

    is_message = (headers["magic"] == fmt.MAGIC_V1) | (headers["magic"] == fmt.MAGIC_V2)
    is_in_place = headers["physical_offset"] == positions[rows]
    is_inside = (sizes >= fmt.RECORD_MIN_BYTES) & (starts[rows] + sizes <= len(view))
    is_possible = is_message & is_in_place & is_inside
    if not is_possible.all():
        rows = rows[is_possible]
        headers = headers[is_possible]
        sizes = sizes[is_possible]

    begins = starts[rows]
    parts, adds_up = _layout(view, headers, begins, sizes)
    times_ms = headers["store_time_ms"].astype(np.int64)
    is_v6 = adds_up & ((headers["sys_flag"] & fmt.SYS_BORN_HOST_V6) != 0)
    if is_v6.any():
        at = begins[is_v6] + fmt.STORE_TIME_AT + fmt.IPV6_EXTRA_BYTES
        times_ms[is_v6] = gather(view, at, np.dtype(">i8"))

    is_record = np.zeros(len(starts), dtype=np.bool_)
    is_record[rows] = True
    body_starts = parts.body_start - begins
    body_ends = parts.body_end - begins
    crcs = headers["body_crc"]
    found = FoundRecords(is_record, sizes, times_ms, body_starts, body_ends, crcs)
    return found if adds_up.all() else found.select(adds_up)
