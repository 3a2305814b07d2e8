"""The paths of the files of one commit log, in one directory or spread over several disks.

`raymq/paths` names the directories besides `commitlog/`, so that flush satellites and tools find every file by
themselves. It must import neither pyarrow nor numpy: flush satellites use it.
Source: MultiPathMappedFileQueue, RocketMQ 5.3.3.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from raymq.store.base.errors import Corrupt
from raymq.store.base.files import Files
from raymq.store.base.rules import FILE_NAME_RULE


def segment_start_of(offset: int, segment_size_bytes: int) -> int:
    """Start of the file that holds `offset`."""
    return offset - offset % segment_size_bytes


def file_name(offset: int) -> str:
    """The name of the file that starts at an offset: 20 decimal digits."""
    return f"{offset:020d}"


def find_segment(commitlog_dir: Path, start: int, *, files: Files) -> Path:
    """The path of the file that begins at `start`; below `commitlog_dir` if there is none."""
    name = file_name(start)
    usual = commitlog_dir / name
    if not files.exists(usual):
        for directory in other_directories(commitlog_dir.parent, files=files):
            if files.exists(directory / name):
                return directory / name
    return usual


def offset_names(directory: Path, *, files: Files) -> list[str]:
    """The names in a directory that are offsets of 20 digits, ascending."""
    return [name for name in files.list(directory) if len(name) == 20 and name.isdigit()]


def list_segments(directories: Sequence[Path], *, files: Files) -> list[Path]:
    """Every file of the directories, by name. Raises: Corrupt if two files have one name."""
    found: dict[str, Path] = {}
    for directory in directories:
        for name in files.list(directory):
            if name in found:
                raise Corrupt(
                    f"{name} is in {found[name].parent} and in {directory}; a commit log has each file once",
                    path=str(directory / name),
                    rule=FILE_NAME_RULE,
                )
            found[name] = directory / name
    return [found[name] for name in sorted(found)]


def first_offset(commitlog_dir: Path, *, files: Files) -> int:
    """The first offset that a commit log has on the disk; 0 without a file."""
    others = other_directories(commitlog_dir.parent, files=files)
    found = list_segments([commitlog_dir, *others], files=files)
    return int(found[0].name) if found else 0


def other_directories(root: Path, *, files: Files) -> list[Path]:
    """The directories of a store's commit log besides `commitlog/`."""
    path = root / "raymq" / "paths"
    if not files.exists(path):
        return []
    names = json.loads(files.read_file(path))["paths"]
    return [(root / name).absolute() for name in names]


def note_directories(root: Path, directories: Sequence[Path], *, files: Files) -> None:
    """Remember the directories (absolute) besides `commitlog/`, and those of earlier starts that still have files.

    Directories inside the store move with it, so their relative paths are noted. Durable: at return.
    """
    known = other_directories(root, files=files)
    left = [path for path in known if path not in directories and files.list(path)]
    wanted = [*directories, *left]
    if wanted != known:
        home = root.absolute()
        names = [path.relative_to(home) if path.is_relative_to(home) else path for path in wanted]
        text = json.dumps({"paths": [str(name) for name in names]})
        files.write_file_atomic(root / "raymq" / "paths", text.encode())
