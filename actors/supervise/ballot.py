"""The ballot of a replica in its `raymq/meta`, as the processes of the replica read it."""

from __future__ import annotations

from pathlib import Path

from raymq.store.base.files import Files
from raymq.store.log.control_files.meta import read_meta

#: in `raymq/meta`: the highest epoch that this replica has heard, its vote in that epoch, whether it is complete, and
#: the generations of all replicas that it has heard of
BALLOT = "ballot"


def read_generations(root: Path, files: Files) -> tuple[int, ...]:
    """By replica id: the newest generation that the replica in `root` has heard of. Raises: Corrupt."""
    ballot = read_meta(root / "raymq" / "meta", files=files).get(BALLOT) or {}
    return tuple(int(each) for each in ballot.get("generations", ()))
