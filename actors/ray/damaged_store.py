"""A replica whose own store is damaged begins again with an empty one, if the other replicas can spare it.

It is a learner then: it gets everything from the leader, and does not count before it has it (rule R15 of
docs/design.md). The damaged store is moved aside and stays, because it may be the last copy of something. While an
older one is there nothing is moved: a disk that damages one store after the other needs an operator.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from pathlib import Path

from raymq.actors.shared.control_block import ControlBlock
from raymq.store.base.clock import Clock
from raymq.store.base.errors import RayMQError
from raymq.store.base.files import Files

from .replica_files import write_last_end

logger = logging.getLogger("raymq.commit_log")

#: of the directory that a damaged store gets
DAMAGED = "damaged"
#: of that of a replaced replica
REPLACED = "replaced"
#: a directory that a new file system has at its top
LOST_AND_FOUND = "lost+found"
#: of the directory while things move into it, and of the `raymq/` that is made anew
_MOVING = "moving-"
_NEW_RAYMQ = "new-raymq"
#: a mount point; a parent that may not be written
_CANNOT_RENAME = (errno.EBUSY, errno.EXDEV, errno.EACCES, errno.EPERM, errno.EROFS)
#: files in `raymq/` that are not of the store. Satellites have some of them open, and go on with them
_CARRIED = (
    "control",
    "ring-replication",
    "generation",
    "endpoint",
    "peers",
    "routes",
    "replicas",
    "last-end",
)


def begin_again(root: Path, *, files: Files, clock: Clock) -> Path | None:
    """Move the store of a replica aside. Callers: its CommitLog, which has no store open.

    A crash in between leaves no directory, as after the loss of a disk.
    Durable: at return. Returns: where the store is now; None: an older damaged one is there, and nothing was moved.
    Raises: OSError, Unavailable.
    """
    real = Path(os.path.realpath(root))
    older = [
        place / name
        for place in (real.parent, real)
        for name in files.list(place)
        if name.startswith(f"{DAMAGED}-") and name.endswith(f"-{real.name}")
    ]
    if older:
        logger.error(
            "%s is damaged, and so was %s: look at the disk, and remove or move the older one",
            root,
            older[0],
        )
        return None

    aside = move_aside(root, DAMAGED, files=files, clock=clock, carried=_CARRIED)
    logger.error("the damaged store of %s is now %s: this replica begins again", root, aside)
    return aside


def move_aside(
    root: Path, prefix: str, *, files: Files, clock: Clock, carried: tuple[str, ...] = ()
) -> Path:
    """Move a store that no process has open out of its directory, which stays empty.

    The directory gets another name beside it. If it cannot, because it is a mount point or its parent may not be
    written, what is in it moves into a new directory inside of it. A symbolic link stays: its target counts.

    Args: `carried`: names in `raymq/`, and those of locks, that stay in place. Empty: the place is not made again.
    Durable: at return. Returns: the new path. Raises: OSError, Unavailable; everything is where it was then.
    """
    root = Path(os.path.realpath(root))
    moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(clock.now_ms() / 1000))
    name = f"{prefix}-{moment}-{root.name}"
    with files.opened(root / "lock", create=True) as lock:
        files.lock(lock)
        aside = root.with_name(name)
        try:
            files.rename(root, aside)
        except OSError as error:
            if error.errno not in _CANNOT_RENAME:
                raise
            return _move_inside(root, name, files=files, carried=carried)

    if carried:
        # Whole before it is in place: a satellite would make the files that it misses.
        made = root.with_name(f"new-{root.name}")
        try:
            _carry(aside / "raymq", made / "raymq", carried, files=files)
            files.rename(made, root)
        except (OSError, RayMQError):
            _carry_back(made / "raymq", aside / "raymq", files=files)
            files.remove_tree(made)
            files.rename(aside, root)
            raise
        _forget_syncs(root, files=files)

    files.sync_dir(root.parent)
    return aside


def finish_move(root: Path, *, files: Files) -> None:
    """Finish a move that a crash has ended in the middle. Callers: before the store is opened.

    One that had moved nothing is forgotten: whether the others can spare the store may have changed since.
    Raises: OSError, RayMQError; the next start tries again then.
    """
    root = Path(os.path.realpath(root))
    for entry in files.list(root):
        if entry.startswith(_MOVING) and not files.list(root / entry):
            os.rmdir(root / entry)
        elif entry.startswith(_MOVING):
            name = entry.removeprefix(_MOVING)
            carried = _CARRIED if name.startswith(f"{DAMAGED}-") else ()
            with files.opened(root / "lock", create=True) as lock:
                files.lock(lock)
                aside = _move_inside(root, name, files=files, carried=carried)
            logger.error(
                "the move of a store that a crash had ended is finished: it is now %s", aside
            )
            if carried:
                write_last_end(root, f"a crash ended its move; the damaged store is now {aside}")
    if not files.exists(root / "commitlog"):
        # A crash came before this, or there is nothing to forget.
        _forget_syncs(root, files=files)


def kept_entries(root: Path, *, files: Files) -> list[str]:
    """The entries of a directory that are no part of its store."""
    return [name for name in files.list(root) if name == LOST_AND_FOUND or _is_aside(name)]


def _move_inside(root: Path, name: str, *, files: Files, carried: tuple[str, ...]) -> Path:
    """Move what is in a directory into a new one in it. Callers: with the store's lock.

    The new directory has another name until it has everything, so that `finish_move` finds a move that was not ended.
    """
    moving, made = root / f"{_MOVING}{name}", root / _NEW_RAYMQ
    files.make_dirs(moving)
    moved: list[str] = []
    try:
        # With both the place was made again before a crash.
        if not (carried and files.exists(moving / "raymq") and files.exists(root / "raymq")):
            stay = {*kept_entries(root, files=files), moving.name, made.name, "lock"}
            for entry in files.list(root):
                if entry not in stay:
                    files.rename(root / entry, moving / entry)
                    moved.append(entry)
            if carried:
                _carry(moving / "raymq", made, carried, files=files)
                files.rename(made, root / "raymq")
    except (OSError, RayMQError):
        _carry_back(made, moving / "raymq", files=files)
        for entry in moved:
            files.rename(moving / entry, root / entry)
        for emptied in (made, moving):
            with contextlib.suppress(OSError):
                os.rmdir(emptied)
        raise

    if carried:
        _forget_syncs(root, files=files)
    files.sync_dir(moving)
    files.rename(moving, root / name)
    files.sync_dir(root)
    return root / name


def _carry(source: Path, target: Path, carried: tuple[str, ...], *, files: Files) -> None:
    """Move files of the replica, and not of the store, to a new `raymq/`."""
    files.make_dirs(target, 0o700)
    for name in files.list(source):
        if name in carried or name.endswith(".lock"):
            files.rename(source / name, target / name)


def _carry_back(source: Path, target: Path, *, files: Files) -> None:
    for name in files.list(source):
        files.rename(source / name, target / name)


def _forget_syncs(root: Path, *, files: Files) -> None:
    """Clear what the control block says of syncs: a failed one, or one that did not end, was of the moved store.

    Otherwise the next start would take the empty store for one whose sync has failed, and refuse it, too. Callers: when
    the store is away. A move that is taken back must keep what is said there.
    """
    control = root / "raymq" / "control"
    if not files.exists(control):
        return
    block = ControlBlock.open(str(control), files=files)
    try:
        for record in block.roles.values():
            record.clear(base=0)
    finally:
        block.close()


def _is_aside(name: str) -> bool:
    return name.startswith((f"{DAMAGED}-", f"{REPLACED}-"))
