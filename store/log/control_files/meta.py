"""The identity and promises of a replica: two alternating 4 KiB slots, of which the newest valid one counts.

Each slot, big-endian: magic (4 bytes), sequence (8), length of the JSON (4), CRC-32C of sequence, length and JSON (4),
JSON. A crash while one slot is written leaves the other.
"""

from __future__ import annotations

import json
import struct
import threading
from pathlib import Path
from typing import Any

from raymq.store.base.checksum import crc32c
from raymq.store.base.errors import Corrupt, Rejected, StoreDamaged
from raymq.store.base.failpoints import fail_point
from raymq.store.base.files import Files

SLOT_BYTES = 4096
_HEAD = struct.Struct(">4sQII")
_CHECKED = struct.Struct(">QI")
_MAGIC = b"RQM1"

#: a sync of a consume queue failed, and its bytes in the page cache may never reach the disk
QUEUES_DOUBTFUL = "queues_doubtful"
#: where the log is truncated; the next start finishes a truncation that a crash interrupted
TRUNCATING = "cut"
#: the first start of a store that RocketMQ wrote is unfinished, so there are marks but no identity
ADOPTING = "adopting"
#: bytes that were not synced may be gone with the power; elections take note and clear it
POWER_LOST = "power_lost"
#: where the log of a new replica began after 0, and the chain value there
CHAIN_BEGIN = "chain_begin"
#: the option `message_delay_level`, if it is not the default: repairs make consume queues by it
DELAY_LEVELS = "delay_levels"


class Meta:
    """The identity of a replica as a small dict."""

    def __init__(self, fd: int, sequence: int, values: dict[str, Any], files: Files) -> None:
        self._fd = fd
        self._sequence = sequence
        self._values = values
        self._files = files
        #: held by updates: any thread may note a failed sync
        self._update_lock = threading.Lock()

    @classmethod
    def open(cls, path: Path, *, files: Files) -> Meta:
        """Open or create the file.

        Raises: Corrupt if both slots were written and neither is valid: a crash damages at most one.
        """
        fd = files.open_file(path, create=True)
        if files.size(fd) < 2 * SLOT_BYTES:
            files.truncate(fd, 2 * SLOT_BYTES)
            files.sync(fd)
            files.sync_dir(path.parent)
        data = files.pread(fd, 2 * SLOT_BYTES, 0)
        try:
            sequence, values = _newest_slot(data, path)
        except Corrupt:
            files.close(fd)
            raise
        return cls(fd, sequence, values, files)

    def get(self, name: str) -> Any:
        """A value; None if it was never set."""
        return self._values.get(name)

    def update(self, values: dict[str, Any]) -> None:
        """Set values. Durable: at return. Callers: any thread."""
        room = SLOT_BYTES - _HEAD.size
        with self._update_lock:
            merged = {**self._values, **values}
            text = json.dumps(merged, separators=(",", ":")).encode()
            if len(text) > room:
                fault = f"meta needs {len(text)} bytes; a slot has {room}"
                raise Rejected(fault, field="meta", limit=room)

            sequence = self._sequence + 1
            head = _HEAD.pack(_MAGIC, sequence, len(text), _crc(sequence, text))
            slot = (head + text).ljust(SLOT_BYTES, b"\0")
            self._files.pwrite(self._fd, slot, (sequence % 2) * SLOT_BYTES)
            fail_point("meta.slot_written_unsynced")
            self._files.sync_data(self._fd)
            self._sequence, self._values = sequence, merged

    def close(self) -> None:
        """Close the file."""
        self._files.close(self._fd)


def read_meta(path: Path, *, files: Files) -> dict[str, Any]:
    """The values without opening them for writing; empty if there are none. Raises: as `Meta.open`."""
    return _newest_slot(files.read_file(path), path)[1] if files.exists(path) else {}


def _newest_slot(data: bytes, path: Path) -> tuple[int, dict[str, object]]:
    """Sequence and values of the valid slot with the higher sequence. Raises: as `Meta.open`."""
    slots = [data[:SLOT_BYTES], data[SLOT_BYTES : 2 * SLOT_BYTES]]
    found = [parsed for parsed in map(_parse_slot, slots) if parsed is not None]
    if not found and all(any(slot) for slot in slots):
        raise StoreDamaged(
            f"{path} is damaged: neither slot is valid, so the promises of this replica are "
            "unknown. Rebuild the replica from its peer, or restore the file.",
            path=str(path),
            rule="one valid slot",
        )
    return max(found, key=lambda slot: slot[0], default=(0, {}))


def _parse_slot(slot: bytes) -> tuple[int, dict[str, object]] | None:
    """Sequence and values of a slot; None if it is not valid."""
    if len(slot) < _HEAD.size:
        return None
    magic, sequence, length, crc = _HEAD.unpack_from(slot)
    text = slot[_HEAD.size : _HEAD.size + length]
    if magic != _MAGIC or len(text) != length or _crc(sequence, text) != crc:
        return None
    values: dict[str, Any] = json.loads(text)
    return sequence, values


def _crc(sequence: int, text: bytes) -> int:
    return crc32c(text, crc32c(_CHECKED.pack(sequence, len(text))))
