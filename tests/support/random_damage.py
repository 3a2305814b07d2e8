"""Random damage of a closed store, of one seed: as disks, crashes and operators leave stores."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from raymq.store.base import format as fmt
from raymq.store.index.index_file import HEADER
from raymq.store.records import record

#: name, offset and size of the fields of a record up to its body, with IPv4 hosts
FIELDS = (
    ("total size", 0, 4),
    ("magic", 4, 4),
    ("body CRC", 8, 4),
    ("queue id", 12, 4),
    ("flag", 16, 4),
    ("queue offset", 20, 8),
    ("physical offset", 28, 8),
    ("sys flag", 36, 4),
    ("born time", 40, 8),
    ("born host", 48, 8),
    ("store time", 56, 8),
    ("store host", 64, 8),
    ("reconsume times", 72, 4),
    ("prepared offset", 76, 8),
    ("body length", 84, 4),
)


class Place(NamedTuple):
    """A record in a file."""

    path: Path
    at: int
    size: int


class Damage:
    """Damages one store. `said` names what was done."""

    def __init__(self, root: Path, seed: str) -> None:
        self._root = root
        self._random = random.Random(seed)
        self.said: list[str] = []

    def run(self) -> str:
        """Damage the store once, seldom twice, and perhaps exchange how it ended. Returns: what was done."""
        kinds: list[Callable[[], str]] = [
            *[self._flip_field] * 8,
            *[self._flip_rest] * 3,
            *[self._flip_unit] * 5,
            self._flip_index,
            self._lose_last_log_file,
            self._shorten_last_log_file,
            self._lose_tail_of_log,
            self._lose_last_queue_file,
            self._shorten_queue_file,
            *[self._lose_units] * 3,
            self._lose_queues,
            *[self._add_after_units] * 2,
            self._add_after_log,
        ]
        for _ in range(self._random.choice((1, 1, 1, 1, 2))):
            # The first damage may have left neither records nor units.
            if self._records() and self._queue_files():
                self.said.append(self._random.choice(kinds)())

        if self._random.random() < 0.3:
            abort = self._root / "abort"
            self.said.append("no abort" if abort.exists() else "abort")
            abort.unlink() if abort.exists() else abort.touch()
        if self._random.random() < 0.2:
            (self._root / "checkpoint").unlink(missing_ok=True)
            self.said.append("no checkpoint")
        return ", ".join(self.said)

    # --- places -----------------------------------------------------------------------------------

    def _files(self, *parts: str) -> list[Path]:
        return sorted(path for path in (self._root.joinpath(*parts)).rglob("*") if path.is_file())

    def _records(self) -> list[Place]:
        found = []
        for path in self._files("commitlog"):
            walk = record.walk(path.read_bytes(), int(path.name), check_position=False)
            pairs = zip(walk.positions.tolist(), walk.sizes.tolist(), strict=True)
            found += [Place(path, at - int(path.name), size) for at, size in pairs]
        return found

    def _queue_files(self) -> list[tuple[Path, int]]:
        """The files with units, and how many each has."""
        found = []
        for path in self._files("consumequeue"):
            units = path.read_bytes().rstrip(b"\0")
            if units:
                found.append((path, -(-len(units) // fmt.QUEUE_UNIT_BYTES)))
        return found

    def _flip(self, path: Path, at: int, length: int, what: str) -> str:
        at += self._random.randrange(length)
        bit = self._random.randrange(8)
        with path.open("r+b") as file:
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ (1 << bit)]))
        return f"bit {bit} of byte {at} of {path.relative_to(self._root)} ({what})"

    def _write(self, path: Path, at: int, data: bytes) -> None:
        with path.open("r+b") as file:
            file.seek(at)
            file.write(data)

    # --- the log ----------------------------------------------------------------------------------

    def _flip_field(self) -> str:
        place = self._random.choice(self._records())
        name, at, length = self._random.choice(FIELDS)
        return self._flip(place.path, place.at + at, length, name)

    def _flip_rest(self) -> str:
        place = self._random.choice(self._records())
        return self._flip(place.path, place.at + 88, place.size - 88, "body, topic or properties")

    def _lose_last_log_file(self) -> str:
        path = self._files("commitlog")[-1]
        path.unlink()
        return f"no {path.name}"

    def _shorten_last_log_file(self) -> str:
        path = self._files("commitlog")[-1]
        length = self._random.randrange(path.stat().st_size)
        with path.open("r+b") as file:
            file.truncate(length)
        return f"{path.name} has {length} bytes"

    def _lose_tail_of_log(self) -> str:
        place = self._random.choice(self._records()[-12:])
        at = place.at + self._random.randrange(place.size)
        size = place.path.stat().st_size
        self._write(place.path, at, bytes(size - at))
        for path in self._files("commitlog"):
            if path.name > place.path.name:
                path.unlink()
        return f"zeros from {at} of {place.path.name} on"

    def _add_after_log(self) -> str:
        last = self._records()[-1]
        at = last.at + last.size
        room = last.path.stat().st_size - at
        old = self._random.choice(self._records())
        data = self._random.choice(
            (self._random.randbytes(40), old.path.read_bytes()[old.at : old.at + old.size])
        )
        self._write(last.path, at, data[: max(0, room - 8)])
        return f"{len(data)} bytes after the log"

    # --- queues and index -------------------------------------------------------------------------

    def _flip_unit(self) -> str:
        path, count = self._random.choice(self._queue_files())
        name, at, length = self._random.choice((("position", 0, 8), ("size", 8, 4), ("tag", 12, 8)))
        at += self._random.randrange(count) * fmt.QUEUE_UNIT_BYTES
        return self._flip(path, at, length, name)

    def _lose_last_queue_file(self) -> str:
        path, _ = self._random.choice(self._queue_files())
        last = sorted(path.parent.iterdir())[-1]
        last.unlink()
        return f"no {last.relative_to(self._root)}"

    def _shorten_queue_file(self) -> str:
        path, _ = self._random.choice(self._queue_files())
        length = self._random.randrange(path.stat().st_size)
        with path.open("r+b") as file:
            file.truncate(length)
        return f"{path.relative_to(self._root)} has {length} bytes"

    def _lose_units(self) -> str:
        path, count = self._random.choice(self._queue_files())
        first = self._random.randrange(count)
        lost = count - first if self._random.random() < 0.7 else 1
        at = first * fmt.QUEUE_UNIT_BYTES
        self._write(path, at, bytes(lost * fmt.QUEUE_UNIT_BYTES))
        return f"{lost} units from {first} on of {path.relative_to(self._root)} are zeros"

    def _lose_queues(self) -> str:
        path, _ = self._random.choice(self._queue_files())
        lost = self._random.choice((path.parent, self._root / "consumequeue"))
        shutil.rmtree(lost)
        return f"no {lost.relative_to(self._root)}"

    def _add_after_units(self) -> str:
        path, count = self._random.choice(self._queue_files())
        at = count * fmt.QUEUE_UNIT_BYTES
        if at + fmt.QUEUE_UNIT_BYTES > path.stat().st_size:
            return "nothing"
        old = path.read_bytes()[: fmt.QUEUE_UNIT_BYTES]
        kinds = (
            ("an old unit", old),
            ("a unit", fmt.QUEUE_UNIT.pack(self._random.randrange(200_000), 300, 7)),
            ("garbage", self._random.randbytes(fmt.QUEUE_UNIT_BYTES)),
        )
        name, data = self._random.choice(kinds)
        self._write(path, at, data)
        return f"{name} after the units of {path.relative_to(self._root)}"

    def _flip_index(self) -> str:
        files = self._files("index")
        if not files:
            return "nothing"
        path = self._random.choice(files)
        return self._flip(path, 0, min(HEADER.size + 2000, path.stat().st_size), "index")
