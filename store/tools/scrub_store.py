"""Scrubs a store that another process has open, or that is closed."""

from __future__ import annotations

from pathlib import Path

from raymq.store.base.errors import Rejected
from raymq.store.base.files import Files
from raymq.store.log.control_files.marks import read_marks
from raymq.store.log.scrub import Scrub
from raymq.store.log.segments.segment_paths import first_offset

from .read_only import ReadOnlyStore


def scrub_of(root: Path, *, bytes_per_s: int, files: Files | None = None) -> Scrub:
    """A scrub of a store that is open in another process, or closed. It reads from the disk, past the page cache.

    Raises: Rejected if `root` is not a store, or has no chain yet.
    """
    files = files or Files()
    store = ReadOnlyStore(root, files)
    size = store.segment_size_bytes
    store.close()
    if not store.is_own_store or not size or not files.exists(root / "raymq" / "chain"):
        raise Rejected(
            f"{root} has no chain to compare with: a store of RocketMQ gets it at its first start here; "
            "`raymq store verify` checks its body CRCs",
            field="DIR",
            limit="a store that RayMQ has opened",
        )

    return Scrub(
        root,
        size,
        start=lambda: first_offset(root / "commitlog", files=files),
        limit=lambda: read_marks(root / "raymq" / "marks", files=files).synced_end,
        files=files,
        bytes_per_s=bytes_per_s,
        pause_ms=0,
        progress_file="scrub-command",
        from_disk=True,
    )
