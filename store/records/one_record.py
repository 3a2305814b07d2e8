"""One record, or some dozens, read without arrays: for so few records arrays cost more than the work."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from functools import cache

from raymq.store.base import format as fmt
from raymq.store.base.checksum import body_crc

_LONG, _INT, _SHORT = struct.Struct(">q"), struct.Struct(">i"), struct.Struct(">h")
_HEADER = fmt.HEADER_ESSENTIALS
_HEADER_BYTES = fmt.HEADER_BYTES
_V1, _V2 = fmt.MAGIC_V1, fmt.MAGIC_V2
_V6 = fmt.SYS_ANY_HOST_V6
_BYTE_MAX = 127

#: end, store time (ms), start and end of the topic, start and end of the body, CRC of the body. Starts and ends are
#: positions in the view
Parts = tuple[int, int, int, int, int, int, int]


def record_at(view: bytes | memoryview, at: int, base: int | None) -> Parts | None:
    """The record at `at` (0 or more) of a view that begins at physical offset `base`; None: any offset is right.

    Returns: None without a whole record there. The body is not checked; `is_whole` does that.
    `record_walk.records_at` does the same for many records.
    """
    try:
        size, magic, crc, position, flags, time_ms, body_length = _HEADER.unpack_from(view, at)
        body_at = at + _HEADER_BYTES
        if flags & _V6:
            born = fmt.IPV6_EXTRA_BYTES if flags & fmt.SYS_BORN_HOST_V6 else 0
            extra = born + (fmt.IPV6_EXTRA_BYTES if flags & fmt.SYS_STORE_HOST_V6 else 0)
            body_at += extra
            (time_ms,) = _LONG.unpack_from(view, at + fmt.STORE_TIME_AT + born)
            (body_length,) = _INT.unpack_from(view, at + fmt.BODY_LENGTH_AT + extra)
        body_end = body_at + body_length

        if magic == _V1:
            topic_at = body_end + 1
            topic_length = view[topic_at - 1]
            if topic_length > _BYTE_MAX:
                return None
        elif magic == _V2:
            topic_at = body_end + 2
            (topic_length,) = _SHORT.unpack_from(view, topic_at - 2)
        else:
            return None

        topic_end = topic_at + topic_length
        (properties_length,) = _SHORT.unpack_from(view, topic_end)
    except (IndexError, struct.error):
        # A wrong length leads out of the view.
        return None

    end: int = topic_end + 2 + properties_length
    if end != at + size or end > len(view):
        return None
    if body_length < 0 or topic_length < 1 or properties_length < 0:
        return None
    if base is not None and position != base + at:
        return None

    return end, time_ms, topic_at, topic_end, body_at, body_end, crc


def records_at_each(data: bytes, nbytes: int, offsets: Sequence[int]) -> Iterator[Parts | None]:
    """`record_at` of each offset; None also for a record of more than `nbytes`.

    Args: `data`: the first `nbytes` at each of these physical offsets, one after the other.
    """
    rows = zip(_header_every(nbytes).iter_unpack(data), range(0, len(data), nbytes), offsets)  # noqa: B905
    for (size, magic, crc, position, flags, time_ms, body_length), at, offset in rows:
        # Nearly all records have this form. They are read here, because a call per record takes a third longer.
        if (
            magic == _V1
            and position == offset
            and not flags & _V6
            and 0 <= body_length <= size - fmt.RECORD_MIN_BYTES
            and size <= nbytes
        ):
            body_at, end = at + _HEADER_BYTES, at + size
            body_end = body_at + body_length
            topic_length = data[body_end]
            topic_end = body_end + 1 + topic_length
            if (
                0 < topic_length <= _BYTE_MAX
                and topic_end + 2 <= end
                and ((data[topic_end] << 8) | data[topic_end + 1]) == end - topic_end - 2
            ):
                yield end, time_ms, body_end + 1, topic_end, body_at, body_end, crc
                continue

        parts = record_at(data, at, offset - at)
        yield None if parts is None or parts[0] > at + nbytes else parts


@cache
def _header_every(nbytes: int) -> struct.Struct:
    return struct.Struct(f"{_HEADER.format}{nbytes - _HEADER_BYTES}x")


def is_whole(
    view: bytes | memoryview, at: int, size: int, position: int | None, *, check_crc: bool
) -> bool:
    """Whether a record of `size` bytes is at `at` and has the physical offset `position`; None: any is right.

    Source: RocketMQ compares the CRC only if there is a body.
    """
    parts = record_at(view, at, None if position is None else position - at)
    if parts is None or parts[0] != at + size:
        return False
    *_, start, stop, crc = parts
    return not check_crc or start == stop or body_crc(view[start:stop]) == crc
