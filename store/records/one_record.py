"""One record, looked at without arrays: for few of them those would cost more than the work."""

from __future__ import annotations

import struct

from raymq.store import format as fmt
from raymq.store.checksum import body_crc
from raymq.store.errors import require

#: size, magic, physical_offset, sys_flag, store_time_ms and body_length of fmt.HEADER_DTYPE
_HEADER = struct.Struct(">iI20xqi16xq20xi")
_LONG, _INT, _SHORT = struct.Struct(">q"), struct.Struct(">i"), struct.Struct(">h")
_STORE_TIME_AT, _BODY_LENGTH_AT, _HEADER_BYTES = 56, 84, _HEADER.size
_CRC_AT = 8
_V1, _V2 = fmt.MAGIC_V1, fmt.MAGIC_V2
_V6 = fmt.SYS_BORN_HOST_V6 | fmt.SYS_STORE_HOST_V6
_BYTE_MAX = 127

require(_HEADER_BYTES == fmt.HEADER_BYTES, "a header is one", found=_HEADER_BYTES)


def record_at(view: memoryview, at: int, base: int) -> tuple[int, int, int, int] | None:
    """The record at `at` (0 or more) of a file that begins at physical offset `base`.

    Returns: its end, its store time (ms), and where its topic begins and ends, places relative to `view`; None where no
    whole record stands. The body is not looked at. `record_walk.records_at` does the same for many.
    """
    try:
        size, magic, position, flags, time_ms, body_length = _HEADER.unpack_from(view, at)
        body_at = at + _HEADER_BYTES
        if flags & _V6:
            born = fmt.IPV6_EXTRA_BYTES if flags & fmt.SYS_BORN_HOST_V6 else 0
            extra = born + (fmt.IPV6_EXTRA_BYTES if flags & fmt.SYS_STORE_HOST_V6 else 0)
            body_at += extra
            (time_ms,) = _LONG.unpack_from(view, at + _STORE_TIME_AT + born)
            (body_length,) = _INT.unpack_from(view, at + _BODY_LENGTH_AT + extra)
        if magic == _V1:
            topic_at = body_at + body_length + 1
            topic_length = view[topic_at - 1]
            if topic_length > _BYTE_MAX:
                return None
        elif magic == _V2:
            topic_at = body_at + body_length + 2
            (topic_length,) = _SHORT.unpack_from(view, topic_at - 2)
        else:
            return None
        topic_end = topic_at + topic_length
        (properties_length,) = _SHORT.unpack_from(view, topic_end)
    except (IndexError, struct.error):
        # A length that is none leads out of the file.
        return None
    end: int = topic_end + 2 + properties_length
    if (
        end != at + size
        or end > len(view)
        or position != base + at
        or body_length < 0
        or topic_length < 1
        or properties_length < 0
    ):
        return None
    return end, time_ms, topic_at, topic_end


def body_is_right(view: memoryview, at: int, topic_at: int) -> bool:
    """Whether the body of a record that `record_at` found has the record's CRC.

    Source: RocketMQ compares only when there is a body.
    """
    _, magic, _, flags, _, _ = _HEADER.unpack_from(view, at)
    start, stop = at + _HEADER_BYTES, topic_at - (1 if magic == _V1 else 2)
    if flags & _V6:
        start += fmt.IPV6_EXTRA_BYTES if flags & fmt.SYS_BORN_HOST_V6 else 0
        start += fmt.IPV6_EXTRA_BYTES if flags & fmt.SYS_STORE_HOST_V6 else 0
    return start >= stop or body_crc(view[start:stop]) == _INT.unpack_from(view, at + _CRC_AT)[0]
