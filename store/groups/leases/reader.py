"""Reads numbers and texts of a packed record, one after the other."""

from __future__ import annotations

import struct

_LENGTH = struct.Struct("<I")
_SHORT = struct.Struct("<H")
_SIGNED = struct.Struct("<q")


class PackedReader:
    """A place in some bytes. Every method raises ValueError where they end too early."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def is_done(self) -> bool:
        """Whether everything is read."""
        return self._at == len(self._data)

    def take(self, count: int) -> bytes:
        """The next bytes."""
        end = self._at + count
        if end > len(self._data):
            raise ValueError(f"{len(self._data)} bytes, where {end} are needed")
        found = self._data[self._at : end]
        self._at = end
        return found

    def byte(self) -> int:
        """A number of 1 byte."""
        return self.take(1)[0]

    def short(self) -> int:
        """A number of 2 bytes."""
        return int(_SHORT.unpack(self.take(2))[0])

    def length(self) -> int:
        """A number of 4 bytes."""
        return int(_LENGTH.unpack(self.take(4))[0])

    def signed(self) -> int:
        """A number of 8 bytes, which may be negative."""
        return int(_SIGNED.unpack(self.take(8))[0])

    def number(self) -> int:
        """A number of 8 bytes. Raises: ValueError for a negative one."""
        found = self.signed()
        if found < 0:
            raise ValueError(f"number {found}")
        return found

    def text(self) -> str:
        """A name. Raises: ValueError unless it is UTF-8."""
        return self.take(self.short()).decode()
