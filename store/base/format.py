"""Byte formats of RocketMQ's commit log and consume queue: the one place that knows them.

All integers are big-endian and signed unless said otherwise, all times are ms since 1970.

A message record (offsets for IPv4 hosts; each IPv6 host adds 12 bytes)::

      0  4  size            whole record
      4  4  magic           V1 or V2; a blank record has MAGIC_BLANK
      8  4  body_crc        CRC-32 of the body & 0x7FFFFFFF, 0 for an empty body
     12  4  queue_id
     16  4  flag            the user's, opaque
     20  8  queue_offset    0 for PREPARED and ROLLBACK
     28  8  physical_offset of byte 0 of this record in the whole log
     36  4  sys_flag        SYS_* below
     40  8  born_time_ms    the client's clock
     48  8  born_host       address 4 (or 16), port int32
     56  8  store_time_ms   the store's clock
     64  8  store_host      address 4 (or 16), port int32
     72  4  reconsume_times
     76  8  prepared_transaction_offset
     84  4  body_length n
     88  n  body
         1  topic_length t  2 bytes in V2
         t  topic
         2  properties_length p
         p  properties      name 0x01 value 0x02, repeated

A blank record fills the rest of a file: 4 bytes the rest's length, 4 bytes MAGIC_BLANK. At least 8 bytes follow a
record in its file, so that a blank always fits.

A consume queue unit: 8 bytes physical offset, 4 record size, 8 tags code.

Source: MessageExtEncoder, CommitLog#checkMessageAndReturnSize, ConsumeQueue of RocketMQ 5.3.3.
"""

from __future__ import annotations

import ipaddress
import re
import struct
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from .errors import Rejected, require

MAGIC_V1 = 0xDAA320A7
MAGIC_V2 = 0xDAA320AB
MAGIC_BLANK = 0xCBD43194

#: size and magic: what every record, blank ones too, begins with
PREFIX = struct.Struct(">iI")
#: bytes kept free at the end of a file for a blank record
BLANK_BYTES = PREFIX.size

#: the body is compressed by the sender's client, and how (bits 8 and 9); several tags
SYS_COMPRESSED, SYS_MULTI_TAGS, SYS_COMPRESSION_TYPES = 0x1, 0x2, 0x300
#: the bits that a sender may set. The shard sets those of the hosts, and transactions and inner batches are not puts.
#: Source: MessageSysFlag, DefaultMQProducerImpl#sendKernelImpl
SYS_OF_SENDER = SYS_COMPRESSED | SYS_MULTI_TAGS | SYS_COMPRESSION_TYPES
SYS_TRANSACTION_MASK = 0xC
#: its values: no transaction, a half message, a committed message, a rollback
SYS_NO_TRANSACTION, SYS_PREPARED, SYS_COMMITTED, SYS_ROLLBACK = 0x0, 0x4, 0x8, 0xC
#: records of these two have queue offset 0 and no unit in a consume queue
SYS_UNQUEUED = (SYS_PREPARED, SYS_ROLLBACK)
SYS_BORN_HOST_V6 = 0x10
SYS_STORE_HOST_V6 = 0x20
SYS_ANY_HOST_V6 = SYS_BORN_HOST_V6 | SYS_STORE_HOST_V6

#: the largest properties string: its length is a signed short
PROPERTIES_MAX_BYTES = 32_767
#: the longest topic of a V1 record: its length is a signed byte
TOPIC_V1_MAX_CHARS = 127
#: the longest %RETRY% or %DLQ% topic (Validators, TopicValidator)
TOPIC_MAX_CHARS = 255

#: first parts of the names of a consumer group's topics for retries and for dead letters
RETRY_PREFIX = "%RETRY%"
DLQ_PREFIX = "%DLQ%"
#: topic of messages that wait for a delay level: those of level n are in queue n - 1
SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"
#: topic of messages that wait for a delivery time of their own, in queue 0
TIMER_TOPIC = "rmq_sys_wheel_timer"
#: topic of the rows of writes that are not decided yet, in queue 0. RayMQ's own
STAGED_TOPIC = "rmq_sys_raymq_staged"
#: topic of the decisions on such writes, in queue 0. RayMQ's own
DECISIONS_TOPIC = "rmq_sys_raymq_decisions"
#: topic of prepared messages: nothing is delivered there
HALF_TOPIC = "RMQ_SYS_TRANS_HALF_TOPIC"
#: topic of the traces of RocketMQ's clients. Its brokers make it by an option; here users make it like any other
TRACE_TOPIC = "RMQ_SYS_TRACE_TOPIC"
#: topics that RocketMQ reserves for itself (TopicValidator.SYSTEM_TOPIC_SET)
SYSTEM_TOPICS = frozenset(
    (
        "TBW102",
        SCHEDULE_TOPIC,
        "BenchmarkTest",
        HALF_TOPIC,
        TRACE_TOPIC,
        "RMQ_SYS_TRANS_OP_HALF_TOPIC",
        "TRANS_CHECK_MAX_TIME_TOPIC",
        "SELF_TEST_TOPIC",
        "OFFSET_MOVED_EVENT",
    )
)

#: one unit of a consume queue, 20 bytes
QUEUE_UNIT_DTYPE = np.dtype([("position", ">i8"), ("size", ">i4"), ("tags_code", ">i8")])
QUEUE_UNIT_BYTES = QUEUE_UNIT_DTYPE.itemsize
#: the same unit
QUEUE_UNIT = struct.Struct(">qiq")


def pack_queue_units(positions: Any, sizes: Any, tags_codes: Any) -> bytes:
    """The consume queue units of many messages, from arrays."""
    units = np.empty(len(positions), dtype=QUEUE_UNIT_DTYPE)
    units["position"] = positions
    units["size"] = sizes
    units["tags_code"] = tags_codes
    return units.tobytes()


def with_tags_code(units: bytes, tags_code: int) -> bytes:
    """Consume queue units with another tags code."""
    changed = np.frombuffer(units, dtype=QUEUE_UNIT_DTYPE).copy()
    changed["tags_code"] = tags_code
    return changed.tobytes()


@lru_cache(maxsize=4)
def header_dtype(born_v6: bool = False, store_v6: bool = False) -> np.dtype[Any]:
    """The fixed part of a record, up to and including body_length, as a packed numpy record."""
    return np.dtype(
        [
            ("size", ">i4"),
            ("magic", ">u4"),
            ("body_crc", ">i4"),
            ("queue_id", ">i4"),
            ("flag", ">i4"),
            ("queue_offset", ">i8"),
            ("physical_offset", ">i8"),
            ("sys_flag", ">i4"),
            ("born_time_ms", ">i8"),
            ("born_ip", "V16" if born_v6 else "V4"),
            ("born_port", ">i4"),
            ("store_time_ms", ">i8"),
            ("store_ip", "V16" if store_v6 else "V4"),
            ("store_port", ">i4"),
            ("reconsume_times", ">i4"),
            ("prepared_transaction_offset", ">i8"),
            ("body_length", ">i4"),
        ]
    )


HEADER_DTYPE = header_dtype()
HEADER_BYTES = HEADER_DTYPE.itemsize
IPV6_EXTRA_BYTES = 12


class HeaderFields(NamedTuple):
    """The values of `header_struct`, in its order."""

    size: int
    magic: int
    body_crc: int
    queue_id: int
    flag: int
    queue_offset: int
    physical_offset: int
    sys_flag: int
    born_time_ms: int
    born_host: bytes
    store_time_ms: int
    store_host: bytes
    reconsume_times: int
    prepared_transaction_offset: int
    body_length: int


@lru_cache(maxsize=4)
def header_struct(born_v6: bool = False, store_v6: bool = False) -> struct.Struct:
    """`header_dtype` for single records; each host is one value of 8 or 20 bytes."""
    born, store = 20 if born_v6 else 8, 20 if store_v6 else 8
    return struct.Struct(f">iIiiiqqiq{born}sq{store}siqi")


#: the header with hosts of IPv4
HEADER = header_struct()
#: only size, magic, body_crc, physical_offset, sys_flag, store_time_ms and body_length of the header
HEADER_ESSENTIALS = struct.Struct(">iIi16xqi16xq20xi")


def _field_at(name: str) -> int:
    require(HEADER_DTYPE.fields is not None, "the header has fields")
    return int(HEADER_DTYPE.fields[name][1])  # type: ignore[index]


#: positions of fields in a record
QUEUE_ID_AT = _field_at("queue_id")
QUEUE_OFFSET_AT = _field_at("queue_offset")
PHYSICAL_OFFSET_AT = _field_at("physical_offset")
SYS_FLAG_AT = _field_at("sys_flag")
BORN_HOST_AT = _field_at("born_ip")
#: with an IPv4 born host; an IPv6 one adds IPV6_EXTRA_BYTES
STORE_TIME_AT = _field_at("store_time_ms")
#: with two IPv4 hosts
BODY_LENGTH_AT = _field_at("body_length")
#: bytes of a record up to and with its store time, for any born host; no record is shorter
STORE_TIME_END_MAX = STORE_TIME_AT + IPV6_EXTRA_BYTES + 8
#: the shortest record: no body, a topic of one byte, no properties
RECORD_MIN_BYTES = HEADER_BYTES + 2 + 2
#: the smallest piece of which a disk has all or nothing
SECTOR_BYTES = 512

require(HEADER_BYTES == 88, "a record header has 88 bytes", found=HEADER_BYTES)
for _layout in (HEADER, HEADER_ESSENTIALS):
    require(_layout.size == HEADER_BYTES, "the header's layouts agree", found=_layout.size)
for _unit_bytes in (QUEUE_UNIT_BYTES, QUEUE_UNIT.size):
    require(_unit_bytes == 20, "a consume queue unit has 20 bytes", found=_unit_bytes)

_INT, _LONG = struct.Struct(">i"), struct.Struct(">q")
_TOPIC_BAD = re.compile(r"[^%|a-zA-Z0-9_-]")


def store_time_ms(record: bytes | memoryview) -> int:
    """The store time of a record, of which at least STORE_TIME_END_MAX bytes are given."""
    (sys_flag,) = _INT.unpack_from(record, SYS_FLAG_AT)
    extra = IPV6_EXTRA_BYTES if sys_flag & SYS_BORN_HOST_V6 else 0
    return int(_LONG.unpack_from(record, STORE_TIME_AT + extra)[0])


@lru_cache(maxsize=256)
def check_topic_name(topic: str) -> None:
    """Refuse a topic name that RocketMQ would refuse.

    A name has letters, digits and %|_- only, so a topic is a safe directory name. It has 1 to 127 characters, or up to
    255 in a %RETRY% or %DLQ% topic. Raises: Rejected. Source: TopicValidator#validateTopic.
    """
    long = isinstance(topic, str) and topic.startswith((RETRY_PREFIX, DLQ_PREFIX))
    _check_name("topic", topic, TOPIC_MAX_CHARS if long else TOPIC_V1_MAX_CHARS)


def check_group_name(group: str) -> None:
    """Refuse a group name that RocketMQ would refuse, or that makes too long a %RETRY% topic.

    Raises: Rejected. Source: Validators#checkGroup.
    """
    _check_name("group", group, TOPIC_MAX_CHARS - len(RETRY_PREFIX))


def _check_name(field: str, name: str, limit: int) -> None:
    if not isinstance(name, str):
        fault = f"the {field} is {name!r}, a {type(name).__name__}; give its name"
        raise Rejected(fault, field=field, limit="str", found=type(name).__name__)
    if not 1 <= len(name) <= limit:
        fault = f"the {field} name has {len(name)} characters; it may have 1 to {limit}"
        raise Rejected(fault, field=field, limit=limit, found=len(name))
    bad = _TOPIC_BAD.search(name)
    if bad:
        fault = f"{field} name {name!r} has the character {bad[0]!r}; use letters, digits, %|_-"
        raise Rejected(fault, field=field, limit="letters, digits, % | _ -", found=bad[0])


def java_hash(text: str) -> int:
    """Java's String.hashCode: over UTF-16 units, signed 32 bits."""
    value = 0
    units = text.encode("utf-16-be", "surrogatepass")
    for unit in struct.unpack(f">{len(units) // 2}H", units):
        value = (31 * value + unit) & 0xFFFFFFFF
    return value - (1 << 32) if value & 0x80000000 else value


@lru_cache(maxsize=256)
def tags_code(tags: str | None) -> int:
    """The tags code of a consume queue unit: the hash of the whole TAGS value, 0 without one.

    Source: MessageExtBrokerInner#tagsString2tagsCode.
    """
    return java_hash(tags) if tags else 0


@lru_cache(maxsize=1024)
def pack_host(ip: str, port: int) -> bytes:
    """A host field: 4 or 16 bytes address, int32 port. Raises: Rejected when `ip` is not an address."""
    try:
        return ipaddress.ip_address(ip).packed + port.to_bytes(4, "big", signed=True)
    except (ValueError, OverflowError, AttributeError) as error:
        raise Rejected(
            f"host {ip!r} port {port!r} is not an IP address and port; a record stores no names",
            field="host",
            limit="an IPv4 or IPv6 address",
        ) from error


#: bytes of a host field: IPv4, IPv6
HOST_BYTES = (8, 20)
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([0-9.]+)):([0-9]{1,5})", re.ASCII)


@lru_cache(maxsize=1024)
def parse_host(text: str) -> bytes:
    """The host field of a text like 1.2.3.4:5 or [2001:db8::1]:5. Raises: ValueError."""
    found = _HOST.fullmatch(text)
    if found is None or int(found[3]) > 0xFFFF:
        raise ValueError(f"{text!r} is not an IP address and a port")
    return ipaddress.ip_address(found[1] or found[2]).packed + int(found[3]).to_bytes(4, "big")


def host_flags(born: bytes, store: bytes) -> int:
    """The sysFlag bits of a record with these host fields."""
    flags = SYS_BORN_HOST_V6 if len(born) > 8 else 0
    return flags | (SYS_STORE_HOST_V6 if len(store) > 8 else 0)


def format_host(packed: bytes) -> str:
    """A host field as Java prints it: 1.2.3.4:5 or [2001:db8:0:0:0:0:0:1]:5 (nothing shortened)."""
    port = int.from_bytes(packed[-4:], "big", signed=True)
    if len(packed) == 8:
        return f"{packed[0]}.{packed[1]}.{packed[2]}.{packed[3]}:{port}"
    return f"[{':'.join(f'{unit:x}' for unit in struct.unpack('>8H', packed[:16]))}]:{port}"


@lru_cache(maxsize=1024)
def host_of(text: str) -> tuple[str, int]:
    """Address and port of a host as `format_host` shows it."""
    address, _, port = text.rpartition(":")
    return address.strip("[]"), int(port)


def offset_message_id(ip: str, port: int, offset: int) -> str:
    """RocketMQ's offsetMsgId: store host and physical offset in upper-case hex, 32 or 56 digits."""
    return (pack_host(ip, port) + offset.to_bytes(8, "big", signed=True)).hex().upper()


#: hex digits of a message id: store host and physical offset, with an IPv4 and an IPv6 host
ID_DIGITS, ID_DIGITS_V6 = 32, 56


def parse_message_id(message_id: str) -> tuple[str, int]:
    """Store host (as records show it) and physical offset of an offset message id. Raises: Rejected.

    Source: MessageDecoder#decodeMessageId.
    """
    try:
        packed = bytes.fromhex(message_id)
    except ValueError:
        packed = b""
    if len(message_id) not in (ID_DIGITS, ID_DIGITS_V6) or len(packed) * 2 != len(message_id):
        raise Rejected(
            f"{message_id!r} is not a message id: those have {ID_DIGITS} hex digits, {ID_DIGITS_V6} with an IPv6 host",
            field="message_id",
            limit=f"{ID_DIGITS} or {ID_DIGITS_V6} hex digits",
        )
    return format_host(packed[:-8]), int.from_bytes(packed[-8:], "big", signed=True)
