"""Who this replica is and what it promised: two alternating 4 KiB slots, the valid one with the higher sequence counts.

A slot: magic, sequence, length, CRC-32C of the JSON, JSON. A crash while one slot is written leaves the other.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from .checksum import crc32c
from .errors import Rejected
from .failpoints import fail_point
from .files import Files

SLOT_BYTES = 4096
_HEAD = struct.Struct(">4sQII")
_MAGIC = b"RQM1"


class Meta:
    """The identity of a replica as a small dict."""

    def __init__(self, fd: int, sequence: int, values: dict[str, Any], files: Files) -> None:
        self._fd = fd
        self._sequence = sequence
        self._values = values
        self._files = files

    @classmethod
    def open(cls, path: Path, *, files: Files) -> Meta:
        """Open or create."""
        fd = files.open_file(path, create=True)
        if files.size(fd) < 2 * SLOT_BYTES:
            files.truncate(fd, 2 * SLOT_BYTES)
            files.sync(fd)
            files.sync_dir(path.parent)
        sequence, values = 0, {}
        for slot in (0, 1):
            found = _parse(files.pread(fd, SLOT_BYTES, slot * SLOT_BYTES))
            if found is not None and found[0] > sequence:
                sequence, values = found
        return cls(fd, sequence, values, files)

    def get(self, name: str) -> Any:
        """A value, None when it was never set."""
        return self._values.get(name)

    def update(self, values: dict[str, Any]) -> None:
        """Set values. Durable: at return."""
        merged = {**self._values, **values}
        text = json.dumps(merged, separators=(",", ":")).encode()
        if len(text) > SLOT_BYTES - _HEAD.size:
            raise Rejected(
                f"meta needs {len(text)} bytes; a slot has {SLOT_BYTES - _HEAD.size}",
                field="meta",
                limit=SLOT_BYTES - _HEAD.size,
            )
        sequence = self._sequence + 1
        head = _HEAD.pack(_MAGIC, sequence, len(text), crc32c(text))
        slot = (head + text).ljust(SLOT_BYTES, b"\0")
        self._files.pwrite(self._fd, slot, (sequence % 2) * SLOT_BYTES)
        fail_point("meta.slot_written_unsynced")
        self._files.sync_data(self._fd)
        self._sequence, self._values = sequence, merged

    def close(self) -> None:
        """Close the file."""
        self._files.close(self._fd)


def _parse(slot: bytes) -> tuple[int, dict[str, Any]] | None:
    if len(slot) < _HEAD.size:
        return None
    magic, sequence, length, crc = _HEAD.unpack_from(slot)
    text = slot[_HEAD.size : _HEAD.size + length]
    if magic != _MAGIC or len(text) != length or crc32c(text) != crc:
        return None
    values: dict[str, Any] = json.loads(text)
    return sequence, values
