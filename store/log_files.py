"""The files of a commit log: where they are, and their bytes beside those of another replica."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .chain import ChainUnit, check_units
from .config import StoreConfig
from .errors import require
from .files import Files
from .mapped_file_queue import MappedFileQueue
from .segment_paths import note_directories, other_directories
from .spare_files import SpareFiles


def open_log_files(root: Path, config: StoreConfig, *, files: Files) -> MappedFileQueue:
    """The queue of a store's commit log files, not loaded, in all the directories that they are in.

    Deletes the spares of an earlier life.
    """
    directories = [
        Path(name) for name in (*config.commit_log_paths, *config.read_only_commit_log_paths)
    ]
    note_directories(root, directories, files=files)
    write_to = [Path(name) for name in config.commit_log_paths]
    for path in write_to:
        files.make_dirs(path)
    queue = MappedFileQueue(
        root / "commitlog",
        config.segment_size_bytes,
        files=files,
        write_to=write_to,
        read_from=other_directories(root, files=files),
    )
    spares = root / "raymq" / "spare"
    if config.recycle_commit_log_files or files.exists(spares):
        found = SpareFiles(spares, config.segment_size_bytes, files=files)
        queue.spares = found if config.recycle_commit_log_files else None
    return queue


def same_until(queue: MappedFileQueue, end: int, units: list[ChainUnit], data: memoryview) -> int:
    """Where a log's bytes first differ from the units' bytes, or the end of the shorter of both.

    Raises: Corrupt when `data` has not the CRCs of its units: then it proves nothing.
    """
    check_units(units, data)
    position = base = units[0].start
    stop = min(units[-1].end, end)
    while position < stop:
        file = queue.find(position)
        require(file is not None, "the log holds what it is compared with", position=position)
        view, start = file.read_view(), file.start  # type: ignore[union-attr]
        upto = min(stop, start + queue.file_size)
        mine = np.frombuffer(view[position - start : upto - start], dtype=np.uint8)
        theirs = np.frombuffer(data[position - base : upto - base], dtype=np.uint8)
        different = mine != theirs
        if different.any():
            return position + int(np.argmax(different))
        position = upto
    return stop
