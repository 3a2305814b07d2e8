"""A replica whose own store is damaged begins again with an empty one, if the other replicas can spare it.

It is a learner then: it gets everything from the leader, and does not count before it has it (rule R15 of
docs/design.md). The damaged store is moved aside and stays, because it may be the last copy of something. While an
older one is there nothing is moved: a disk that damages one store after the other needs an operator.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

from raymq.actors.shared.control_block import ControlBlock
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Corrupt
from raymq.store.base.files import Files

logger = logging.getLogger("raymq.commit_log")

#: of the directory that a damaged store gets
DAMAGED = "damaged"
#: rules of `Corrupt` that say that bytes of this store have changed, are gone, or cannot be trusted
_DAMAGE_RULES = ("poisoned", "one valid slot", "files are contiguous")
_RECOVERY_RULE = "recovery row "
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


def is_damage(error: Corrupt) -> bool:
    """Whether a store that cannot be opened has damaged bytes. Other causes are mistakes, and a copy mends none."""
    rule = str(error.rule or "")
    return rule in _DAMAGE_RULES or rule.startswith(_RECOVERY_RULE)


def begin_again(root: Path, *, files: Files, clock: Clock) -> Path | None:
    """Move the store of a replica aside. Callers: its CommitLog, which has no store open.

    A crash in between leaves no directory, as after the loss of a disk.
    Durable: at return. Returns: where the store is now; None: an older damaged one is there, and nothing was moved.
    Raises: OSError, Unavailable.
    """
    older = [name for name in files.list(root.parent) if _is_aside(name, root.name)]
    if older:
        logger.error(
            "%s is damaged, and so was %s: look at the disk, and remove or move the older one",
            root,
            root.with_name(older[0]),
        )
        return None

    aside = move_aside(root, DAMAGED, files=files, clock=clock, carried=_CARRIED)
    logger.error("the damaged store of %s is now %s: this replica begins again", root, aside)
    return aside


def move_aside(
    root: Path, prefix: str, *, files: Files, clock: Clock, carried: tuple[str, ...] = ()
) -> Path:
    """Rename a store's directory that no process has open, and keep its place empty.

    Args: `carried`: names in `raymq/`, and those of locks, that stay in place. Empty: the place is not made again.
    Durable: at return. Returns: the new path. Raises: OSError, Unavailable.
    """
    moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(clock.now_ms() / 1000))
    aside = root.with_name(f"{prefix}-{moment}-{root.name}")
    with files.opened(root / "lock", create=True) as lock:
        files.lock(lock)
        files.rename(root, aside)

    if carried:
        # Whole before it is in place: a satellite would make the files that it misses.
        made = root.with_name(f"new-{root.name}")
        files.make_dirs(made / "raymq", 0o700)
        for name in files.list(aside / "raymq"):
            if name in carried or name.endswith(".lock"):
                files.rename(aside / "raymq" / name, made / "raymq" / name)
        if files.exists(made / "raymq" / "control"):
            _forget_syncs(made / "raymq" / "control", files=files)
        files.rename(made, root)
    files.sync_dir(root.parent)
    return aside


def _forget_syncs(control: Path, *, files: Files) -> None:
    """Clear what the control block says of syncs: a failed one, or one that did not end, was of the moved store.

    Otherwise the next start would take the empty store for one whose sync has failed, and refuse it, too.
    """
    block = ControlBlock.open(str(control), files=files)
    try:
        for record in block.roles.values():
            record.clear(base=0)
    finally:
        block.close()


def _is_aside(name: str, store: str) -> bool:
    return name.startswith(f"{DAMAGED}-") and name.endswith(f"-{store}")
