"""Rebuilds the index files of a store from its log, in the order of IndexService.

Source: IndexFile#putKey, IndexService#buildIndex, RocketMQ 5.3.3.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from raymq.store.base.files import Files
from raymq.store.index.index_file import ENTRY_BYTES, HEADER, SLOT_BYTES, IndexFile

from .read_only import ReadOnlyStore
from .rebuild import make_empty, replace_directory
from .verify_index import ENTRIES_PER_SLOT, PER_SLOT_BYTES, hashes_of_batch, slots_of

#: maxHashSlotNum
SLOTS = 5_000_000


def rebuild_index(store: ReadOnlyStore) -> None:
    """Index all keys of all records, in files of the size that most have (RocketMQ's default without any)."""
    files, target = store.files, store.root / "index"
    sizes = _sizes(store)
    directory = make_empty(target, files=files)
    file: IndexFile | None = None

    try:
        for part in store.slices("index"):
            batch = part.decode()
            rows, hashes = hashes_of_batch(batch)
            positions = part.positions[rows]
            times_ms = batch.column("store_time_ms").to_numpy()[rows]
            done = 0
            while done < len(rows):
                if file is None or not file.room:
                    file = _next_file(directory, file, int(times_ms[done]), sizes, files)
                stop = min(len(rows), done + file.room)
                file.append(hashes[done:stop], positions[done:stop], times_ms[done:stop])
                done = stop

        if file is not None:
            file.sync()
    finally:
        if file is not None:
            file.close()

    files.sync_dir(directory)
    # The mark belongs to the old files. Without a mark a start uses a complete index as it is.
    files.unlink(store.root / "raymq" / "index")
    replace_directory(target, files=files)


def _next_file(
    directory: Path, last: IndexFile | None, time_ms: int, sizes: tuple[int, int], files: Files
) -> IndexFile:
    """The file after `last`, which is synced and closed. Its name is the local time as yyyyMMddHHmmssSSS."""
    name = f"{datetime.fromtimestamp(time_ms / 1000):%Y%m%d%H%M%S}{time_ms % 1000:03d}"
    if last is None:
        return IndexFile.create(directory / name, *sizes, None, files=files)
    last.sync()
    last.close()
    name = max(name, f"{int(last.path.name) + 1:017d}")
    return IndexFile.create(directory / name, *sizes, last.header, files=files)


def _sizes(store: ReadOnlyStore) -> tuple[int, int]:
    """Slots and entries of the present files, or of RocketMQ's defaults without a file."""
    target, files = store.root / "index", store.files
    size = store.usual_size([target])
    for name in files.list(target) if size > HEADER.size + PER_SLOT_BYTES else ():
        if files.size_of(target / name) == size:
            with files.opened(target / name, writable=False) as fd:
                view = files.map_checked(fd, size, target / name)
            slots = slots_of(view)
            files.unmap(view)
            if slots is not None:
                return slots, (size - HEADER.size - SLOT_BYTES * slots) // ENTRY_BYTES
    return SLOTS, ENTRIES_PER_SLOT * SLOTS
