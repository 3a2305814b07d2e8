"""A second, slow decoder of RocketMQ records, written from the byte table alone.

It shares no code with the store, so that a mistake there is not repeated here.
"""

from __future__ import annotations

import ipaddress
import struct
import zlib
from typing import Any

#: magic of the record that fills the end of a file
BLANK = 0xCBD43194


class Reader:
    """Takes consecutive big-endian fields from bytes."""

    def __init__(self, data: bytes, at: int) -> None:
        self.data, self.at = data, at

    def take(self, count: int) -> bytes:
        if count < 0 or self.at + count > len(self.data):
            raise ValueError(f"{count} bytes at {self.at} of {len(self.data)}")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, code: str) -> int:
        return int(struct.unpack(">" + code, self.take(struct.calcsize(code)))[0])

    def host(self, six: bool) -> str:
        address = ipaddress.ip_address(self.take(16 if six else 4))
        text = ":".join(part.lstrip("0") or "0" for part in address.exploded.split(":"))
        return f"[{text}]:{self.number('i')}" if six else f"{address}:{self.number('i')}"


def decode_record(data: bytes, at: int = 0) -> dict[str, Any]:
    """The record at `at`, by the names of RECORD_SCHEMA and its size. Raises: ValueError."""
    reader = Reader(data, at)
    size, magic = reader.number("i"), reader.number("I")
    if magic not in (0xDAA320A7, 0xDAA320AB):
        raise ValueError(f"magic {magic:#x}")

    row: dict[str, Any] = {"size": size}
    for name, code in (
        ("body_crc", "i"),
        ("queue_id", "i"),
        ("flag", "i"),
        ("queue_offset", "q"),
        ("physical_offset", "q"),
        ("sys_flag", "i"),
        ("born_time_ms", "q"),
    ):
        row[name] = reader.number(code)

    row["born_host"] = reader.host(bool(row["sys_flag"] & 0x10))
    row["store_time_ms"] = reader.number("q")
    row["store_host"] = reader.host(bool(row["sys_flag"] & 0x20))
    row["reconsume_times"] = reader.number("i")
    row["prepared_transaction_offset"] = reader.number("q")
    row["body"] = reader.take(reader.number("i"))
    row["topic"] = reader.take(reader.number("b" if magic == 0xDAA320A7 else "h")).decode(
        errors="replace"
    )
    row["properties"] = reader.take(reader.number("h"))

    if reader.at - at != size:
        raise ValueError(f"size {size}, its parts have {reader.at - at}")
    if row["body"] and zlib.crc32(row["body"]) & 0x7FFFFFFF != row["body_crc"]:
        raise ValueError("body CRC")
    return row


def decode_log(log: bytes, file_bytes: int) -> list[dict[str, Any]]:
    """Every record of a commit log, which begins with its first byte. Args: `file_bytes`: of each of its files."""
    rows, at = [], 0
    while at < len(log):
        if struct.unpack_from(">I", log, at + 4)[0] == BLANK:
            at += file_bytes - at % file_bytes
            continue
        rows.append(decode_record(log, at))
        at += rows[-1]["size"]
    return rows


def decode_all(data: bytes) -> list[dict[str, Any]]:
    """Every record of `data`, which must hold nothing else."""
    rows, at = [], 0
    while at < len(data):
        rows.append(decode_record(data, at))
        at += rows[-1]["size"]
    return rows
