"""From a simulated disk's trace to the disks that a crash may leave.

The trace is replayed. On top of its certain content, each file has the versions that its blocks and its length had
since its last sync. Each directory has the changes since its last sync. Each combination of choices among them is a
legal disk. All are made if they are no more than the limit, else a seeded sample with the extremes in it.
"""

from __future__ import annotations

import functools
import itertools
import posixpath
import random
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .simulated_disk import Base, Killed, Op, SimulatedDisk

if TYPE_CHECKING:
    from .simulated_disk import Blocks

#: (place in the trace, content); None: zeros
Version = tuple[int, bytes | None]

SECTOR_BYTES = 512
#: what is there lives in memory: kept by a kill, gone with the machine
VOLATILE = "/dev/shm"


@functools.lru_cache(maxsize=1 << 15)
def block_key(position: int, content: bytes) -> int:
    """A hash of a block at a position of a file, the same for every block size. Zeros have 0."""
    key = 0
    for at in range(0, len(content), SECTOR_BYTES):
        sector = content[at : at + SECTOR_BYTES]
        if sector.count(0) != len(sector):
            key ^= hash((position + at, sector))
    return key


def file_key(blocks: Blocks, size: int, width: int) -> int:
    """A hash of a file's length and content."""
    key = 0
    for block, content in blocks.items():
        key ^= block_key(block * width, content)
    return hash((size, key))


class FileState:
    """The certain and the possible contents of one file on disk."""

    def __init__(self, blocks: Blocks, size: int, width: int) -> None:
        self.blocks = blocks
        self.size = size
        self.width = width
        self.versions: dict[int, list[Version]] = {}
        #: (place in the trace, new length)
        self.sizes: list[tuple[int, int]] = []
        #: blocks of a failed sync that were not written since: no sync settles them
        self.stuck: set[int] = set()
        self._key: int | None = None

    def apply(self, at: int, op: Op) -> None:
        self._key = None
        if op.kind == "write":
            blocks, size = op.value
            for block, content in blocks.items():
                self._write(at, block, content)
            if size is not None:
                self.sizes.append((at, size))
        elif op.kind == "resize":
            self.sizes.append((at, op.value))
        elif op.kind == "sync":
            self.settle()
        elif op.kind == "sync_failed":
            self.stuck = set(self.versions)

    def _write(self, at: int, block: int, content: bytes) -> None:
        kept = content if content.count(0) != len(content) else None
        versions = self.versions.get(block)
        before = versions[-1][1] if versions else self.blocks.get(block)
        if kept != before or self.sizes or block in self.stuck:
            self.versions.setdefault(block, []).append((at, kept))
            self.stuck.discard(block)

    def choices(self) -> list[tuple[int | str, int]]:
        """(what, number of versions beside the one on disk): blocks, and "size"."""
        found: list[tuple[int | str, int]] = [(b, len(v)) for b, v in self.versions.items()]
        if self.sizes:
            found.append(("size", len(self.sizes)))
        return found

    def image(self, chosen: dict[int | str, int]) -> tuple[Blocks, int]:
        """Content with the chosen versions. Blocks that are not named are as on disk."""
        if not chosen:
            return self.blocks, self.size
        width = self.width

        reached = self.sizes[: chosen.get("size", 0)]
        size = reached[-1][1] if reached else self.size
        blocks = dict(self.blocks)
        written: dict[int, int] = {}

        for block, versions in self.versions.items():
            version = chosen.get(block, 0)
            if version:
                written[block], content = versions[version - 1]
                if content is None:
                    blocks.pop(block, None)
                else:
                    blocks[block] = content

        # A length that fell and rose again has zeros after the cut, unless they were rewritten.
        cuts, before = [], self.size
        for at, length in reached:
            if length < before:
                cuts.append((at, length))
            before = length
        for at, cut in [*cuts, (1 << 62, size)]:
            for block in [b for b in blocks if (b + 1) * width > cut and written.get(b, -1) < at]:
                if block * width >= cut:
                    del blocks[block]
                else:
                    keep = blocks[block][: cut - block * width]
                    blocks[block] = keep.ljust(width, b"\0")

        return blocks, size

    def settle(self) -> None:
        """A successful sync."""
        chosen: dict[int | str, int] = {
            b: len(v) for b, v in self.versions.items() if b not in self.stuck
        }
        chosen["size"] = len(self.sizes)
        self.blocks, self.size = self.image(chosen)
        self.versions = {b: v for b, v in self.versions.items() if b in self.stuck}
        self.sizes = []

    def key(self) -> int:
        """The hash of the content on disk."""
        if self._key is None:
            self._key = file_key(self.blocks, self.size, self.width)
        return self._key


class DirState:
    """The certain entries of one directory on disk, and the possible changes."""

    def __init__(self, names: dict[str, int]) -> None:
        self.names = names
        self.changes: list[Op] = []

    def image(self, chosen: list[Op]) -> dict[str, int]:
        """Names after the chosen changes."""
        if not chosen:
            return self.names
        names = dict(self.names)
        for op in chosen:
            if op.kind == "unlink":
                names.pop(op.value, None)
            elif op.kind == "rename":
                old, new, number = op.value
                if names.get(old) == number:
                    del names[old]
                names[new] = number
            else:
                names[op.value[0]] = op.value[1]
        return names

    def settle(self) -> None:
        """An fsync of the directory."""
        self.names = self.image(self.changes)
        self.changes = []


class Replay:
    """The state of a disk at one place of its trace."""

    def __init__(self, disk: SimulatedDisk) -> None:
        width = disk.block_bytes
        self.disk = disk
        self.notes: tuple[Any, ...] = disk.notes
        durable = disk.durable
        self.files = {n: FileState(b, s, width) for n, (b, s) in durable.files.items()}
        self.dirs = {n: DirState(names) for n, names in durable.dirs.items()}
        self._volatile = {n for path, n in disk._dirs.items() if path.startswith(VOLATILE)}
        self._in_memory = {n for d in self._volatile for n in durable.dirs.get(d, {}).values()}
        self._seen: set[tuple[int, int]] = set()

    def apply(self, at: int, op: Op) -> None:
        if op.kind == "note":
            self.notes = (*self.notes, op.value)
        elif op.kind == "stores":
            for store in op.value:
                self.apply(at, store)
        elif op.kind in ("link", "mkdir", "unlink", "rename", "moved_in"):
            self.dirs[op.node].changes.append(op)
            if op.kind == "mkdir":
                self.dirs[op.value[1]] = DirState({})
            elif op.kind == "link":
                self.files[op.value[1]] = FileState({}, 0, self.disk.block_bytes)
                if op.node in self._volatile:
                    self._in_memory.add(op.value[1])
        elif op.kind == "sync_dir":
            self.dirs[op.node].settle()
        else:
            self.files[op.node].apply(at, op)

    def settle_all(self) -> None:
        for file in self.files.values():
            if file.versions or file.sizes:
                file.stuck = set()
                file.settle()
        for directory in self.dirs.values():
            if directory.changes:
                directory.settle()

    def forget(self) -> None:
        """Forget the disks that there were."""
        self._seen.clear()

    def choices(self) -> list[tuple[Any, int]]:
        """Open questions: (node, block or "size" or change), answers beside "not on disk"."""
        found: list[tuple[Any, int]] = []
        for number, file in self.files.items():
            if (file.versions or file.sizes) and number not in self._in_memory:
                found += [((number, what), count) for what, count in file.choices()]
        for number, directory in self.dirs.items():
            if number not in self._volatile:
                found += [((number, index), 1) for index in range(len(directory.changes))]
        return found

    @property
    def open_names(self) -> frozenset[tuple[int, Op]]:
        """The names that a power loss could take or bring back."""
        return frozenset(
            (number, change)
            for number, each in self.dirs.items()
            if number not in self._volatile
            for change in each.changes
        )

    def image(
        self, at: int, answers: dict[Any, int], *, boot: int, killed: Killed | None = None
    ) -> SimulatedDisk | None:
        """The disk with these answers, or None if it was there before with the same notes."""
        of_file: dict[int, dict[int | str, int]] = {}
        of_dir: dict[int, set[int]] = {}
        for (number, what), answer in answers.items():
            if answer and number in self.dirs:
                of_dir.setdefault(number, set()).add(what)
            elif answer:
                of_file.setdefault(number, {})[what] = answer

        files: dict[int, tuple[Blocks, int]] = {}
        dirs: dict[int, dict[str, int]] = {}
        parts: list[Any] = []
        waiting = [(0, "/")]
        while waiting:
            number, path = waiting.pop()
            directory = self.dirs[number]
            chosen = of_dir.get(number, ())
            changes = [directory.changes[index] for index in sorted(chosen)]
            names = directory.image(changes)
            if number in self._volatile and boot != self.disk.boot:
                names = {}
            dirs[number] = names
            for name, child in names.items():
                if child in self.dirs:
                    waiting.append((child, f"{path}{name}/"))
                    parts.append((path, name))
                    continue
                file = self.files[child]
                mine = of_file.get(child)
                if mine:
                    blocks, size = files[child] = file.image(mine)
                    parts.append((path, name, file_key(blocks, size, file.width)))
                else:
                    files[child] = file.blocks, file.size
                    parts.append((path, name, file.key()))

        key = hash(frozenset(parts))
        if (key, len(self.notes)) in self._seen:
            return None
        self._seen.add((key, len(self.notes)))

        made = SimulatedDisk(
            block_bytes=self.disk.block_bytes,
            record=False,
            boot=boot,
            base=Base(files, dirs),
            killed=killed,
        )
        made.crashed_at, made.notes, made.key = at, self.notes, key
        return made


def power_loss_states(
    disk: SimulatedDisk, limit_per_point: int, seed: int
) -> Iterator[SimulatedDisk]:
    """Every place of the trace, up to `limit_per_point` combinations at each, and none twice."""
    replay = Replay(disk)
    for at, op in _points(disk, replay):
        if op is not None:
            replay.apply(at, op)
        for answers in _combinations(replay.choices(), limit_per_point, f"{seed}/{at}"):
            image = replay.image(at, answers, boot=disk.boot + 1)
            if image is not None:
                yield image


def kill_states(disk: SimulatedDisk) -> Iterator[SimulatedDisk]:
    """Every place of the trace with all that was written before it, and places inside a pwrite."""
    #: what the page cache shows, and what the disk has
    replay, durable = Replay(disk), Replay(disk)
    trace = disk.snapshot()

    def killed(done: int, *torn: Op) -> Killed:
        return Killed(disk.durable, trace, done, torn, disk.last_number, durable.open_names)

    points = zip(_points(disk, replay), _points(disk, durable), strict=True)
    for (at, op), _ in points:
        if op is not None and op.kind == "write" and len(op.value[0]) > 1:
            yield from _torn(replay, at, op, killed)
        if op is not None:
            replay.apply(at, op)
            durable.apply(at, op)
        replay.settle_all()
        image = replay.image(at, {}, boot=disk.boot, killed=killed(at))
        if image is not None:
            yield image


def last_states(
    disk: SimulatedDisk, limit: int, seed: int
) -> tuple[SimulatedDisk, list[SimulatedDisk]]:
    """The disks that a kill or a power loss may leave at the end of the trace."""
    replay = Replay(disk)
    at = 0
    for at, op in _points(disk, replay):
        if op is not None:
            replay.apply(at, op)

    lost = [
        image
        for answers in _combinations(replay.choices(), limit, f"{seed}/{at}")
        if (image := replay.image(at, answers, boot=disk.boot + 1)) is not None
    ]

    left = Killed(disk.durable, disk.snapshot(), at, (), disk.last_number, replay.open_names)
    replay.settle_all()
    replay.forget()
    killed = replay.image(at, {}, boot=disk.boot, killed=left)
    assert killed is not None
    return killed, lost


def lost_names(disk: SimulatedDisk) -> Iterator[SimulatedDisk]:
    """The disks after a power loss at the end of the trace: each unsettled name lost alone, and all of them."""
    replay = Replay(disk)
    at = 0
    for at, op in _points(disk, replay):
        if op is not None:
            replay.apply(at, op)
    newest = dict(replay.choices())
    names = [name for name in newest if name[0] in replay.dirs]
    for lost in ([], *([name] for name in names), names):
        answers = {**newest, **dict.fromkeys(lost, 0)}
        image = replay.image(at, answers, boot=disk.boot + 1)
        if image is not None:
            yield image


def _torn(
    replay: Replay, at: int, op: Op, killed: Callable[..., Killed]
) -> Iterator[SimulatedDisk]:
    """The first blocks of one pwrite, and the length as far as it came."""
    file = replay.files[op.node]
    content, new_size = op.value
    blocks = sorted(content)

    for count in sorted({1, len(blocks) // 2, len(blocks) - 1}):
        end = None
        if new_size is not None:
            end = max(file.size, min((blocks[count - 1] + 1) * file.width, new_size))
        torn = Op("write", op.node, ({b: content[b] for b in blocks[:count]}, end))
        part = FileState(file.blocks, file.size, file.width)
        part.apply(at, torn)
        part.settle()
        replay.files[op.node] = part
        image = replay.image(at, {}, boot=replay.disk.boot, killed=killed(at - 1, torn))
        if image is not None:
            yield image

    replay.files[op.node] = file


def _points(disk: SimulatedDisk, replay: Replay) -> Iterator[tuple[int, Op | None]]:
    """The points before the first operation and after each: (operations done, the last of them).

    What a killed process did is done, and what it noted is known.
    """
    for at, op in enumerate(disk.snapshot()[: disk.begins_at], start=1):
        if op.kind != "note":
            replay.apply(at, op)
    yield disk.begins_at, None
    yield from enumerate(disk.snapshot()[disk.begins_at :], start=disk.begins_at + 1)


def _combinations(
    choices: list[tuple[Any, int]], limit: int, seed: str
) -> Iterator[dict[Any, int]]:
    total = 1
    for _, count in choices:
        total *= count + 1
        if total > limit:
            break
    else:
        names = [name for name, _ in choices]
        for answers in itertools.product(*(range(count + 1) for _, count in choices)):
            yield dict(zip(names, answers, strict=True))
        return

    chance = random.Random(seed)
    newest = dict(choices)
    yield {}
    yield newest

    # Exactly one thing on disk, exactly one thing lost: most protocols break here.
    singles = [(name, lost) for name, _ in choices for lost in (False, True)]
    chance.shuffle(singles)
    singles = singles[: limit // 2]
    for name, lost in singles:
        yield {**newest, name: 0} if lost else {name: newest[name]}

    for _ in range(limit - 2 - len(singles)):
        yield {name: chance.randint(0, count) for name, count in choices}


def disk_of(tree: Mapping[str, bytes], *, boot: int, block_bytes: int = 512) -> SimulatedDisk:
    """A disk with these files, all of it durable: for a state that a test makes by hand."""
    files: dict[int, tuple[Blocks, int]] = {}
    dirs: dict[int, dict[str, int]] = {0: {}}
    numbers = {"/": 0}

    def add(path: str) -> int:
        directory, name = posixpath.split(path)
        if directory not in numbers:
            dirs[add(directory)] = {}
        numbers[path] = dirs[numbers[directory]][name] = len(numbers)
        return numbers[path]

    for path, data in tree.items():
        starts = range(0, len(data), block_bytes)
        blocks = {at // block_bytes: data[at : at + block_bytes] for at in starts}
        kept = {
            block: content.ljust(block_bytes, b"\0")
            for block, content in blocks.items()
            if content.count(0) != len(content)
        }
        files[add(path)] = kept, len(data)
    base = Base(files, dirs)
    return SimulatedDisk(block_bytes=block_bytes, record=False, boot=boot, base=base)
