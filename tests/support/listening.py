"""Which TCP sockets processes listen on, from the kernel's tables."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_LISTEN = "0A"


class Listening(NamedTuple):
    """A listening socket of a process."""

    address: str
    port: int
    program: str


def listening(pids: Iterable[int]) -> list[Listening]:
    """Every TCP socket that one of these processes listens on."""
    owners: dict[str, str] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            program = Path(f"/proc/{pid}/comm").read_text().strip()
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    owners[os.readlink(entry)] = program

    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            program = owners.get(f"socket:[{fields[9]}]", "")
            if fields[3] == _LISTEN and program:
                host, _, port = fields[1].partition(":")
                found.append(Listening(_address(host), int(port, 16), program))
    return found


def _address(text: str) -> str:
    """The kernel writes addresses as words of four bytes in the machine's own order."""
    words = [int(text[i : i + 8], 16) for i in range(0, len(text), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, packed)
