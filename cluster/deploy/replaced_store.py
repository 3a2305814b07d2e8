"""The directory of a replica that takes the place of one that an operator gave up.

The new replica begins with an empty directory at the same path. What is there of the old one is moved aside and stays,
because it may be the last copy of something.
"""

from __future__ import annotations

import logging
from pathlib import Path

from raymq.actors.ray.actor_spec import ActorSpec
from raymq.actors.ray.damaged_store import REPLACED, finish_move, kept_entries, move_aside
from raymq.actors.ray.replica_files import generation_of, write_generation
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Rejected, Unavailable
from raymq.store.base.files import Files

logger = logging.getLogger("raymq.commit_log")


def take_place(spec: ActorSpec, files: Files, clock: Clock) -> None:
    """Give a replica of a new generation its empty directory. Callers: its CommitLog, before it opens its store.

    Durable: at return, the generation in the directory. Raises: Rejected when the directory is that of a newer
    generation; Unavailable when the old directory is open, or cannot be moved.
    """
    root, wanted = Path(spec["data_dir"]), int(spec["generation"])
    try:
        finish_move(root, files=files)
    except OSError as error:
        message = f"the move of the damaged store in {root} cannot be finished: {error.strerror}"
        raise Unavailable(message, path=str(root)) from error
    found = generation_of(root)
    if found > wanted:
        message = (
            f"{root} belongs to generation {found} of replica {spec['replica']}: this process is of the replaced "
            f"generation {wanted}, and must not open it"
        )
        raise Rejected(message, field="generation", limit=found, found=wanted)
    if found == wanted:
        return

    try:
        if set(files.list(root)) - {*kept_entries(root, files=files), "lock"}:
            aside = move_aside(root, REPLACED, files=files, clock=clock)
            logger.warning("the directory of the replaced replica is now %s", aside)
        files.make_dirs(root / "raymq", 0o700)
        write_generation(root, wanted)
    except OSError as error:
        message = (
            f"the directory of the replaced replica cannot be moved aside: {error.strerror} ({root}). If its disk is "
            "bad, mount an empty one there; if its file system is bad, unmount it"
        )
        raise Unavailable(message, path=str(root)) from error
