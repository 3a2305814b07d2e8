"""Named points at every durable step, at which tests make the process die, fail or wait.

Off, a failpoint is one dict look-up. Across processes they are set by the environment variable
RAYMQ_FAILPOINTS, for example "log.after_store=kill;log.roll=kill".
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: every failpoint, and the step that is just done when it is reached
NAMES: dict[str, str] = {
    "log.before_store": "a unit is encoded, none of its bytes are written",
    "log.after_store": "bytes, chain unit and mark of a unit are written, nothing is published",
    "log.roll": "the blank record is written, the next file may not exist",
    "log.after_snapshot": "a new file begins with its snapshot, the batch is not in it yet",
    "log.cut_after_zero": "the tail was cut and zeroed, the chain still has its units",
    "config.imported": "a RocketMQ configuration file is imported into the log, the note of the import is not there",
    "config.backed_up": "a configuration file's old content is in its .bak, the new one is not written",
    "files.allocated": "a new file has its blocks, its directory entry is not synced",
    "files.moved_to_spares": "an old file is moved to the spares, no directory is synced",
    "files.spare_zeroed": "a spare is zeroed and synced, it is not used yet",
    "files.unlinked": "an old file has no name any more, its directory is not synced",
    "clean.after_segments": "old segments are deleted, their chain, consume queues and indexes are not",
    "clean.after_chain": "the chain of deleted segments is gone, consume queues still have its units",
    "clean.after_queues": "old consume queue files are deleted, derived stores still have them",
    "pool.stored": "a unit's bytes are in the transient pool, its chain unit is not written",
    "pool.restored": "the pool of the process before was written into the files, nothing is recovered",
    "commit.before_write": "CommitRealTime is about to write pool bytes into the files",
    "commit.after_write_before_report": "pool bytes are in the files, the watermark is not published",
    "delay.bundle_appended": "delayed messages and the progress of their service are appended",
    "groups.appended": "the records of a step of a consumer group are appended, none is confirmed",
    "groups.confirmed": "the records of a step of a consumer group are confirmed, no answer has left",
    "groups.claim_appended": "the claim of a queue is appended, it is not confirmed",
    "groups.lease_appended": "a lease of messages is appended, it is not confirmed",
    "groups.settle_appended": "the settlement of leased messages is appended, it is not confirmed",
    "transactions.begin": "a leader has got a transaction, nothing of it is decided",
    "transactions.appended": "a transaction is decided and in the log, it is not confirmed",
    "transactions.confirmed": "the decision on a transaction is confirmed, no answer has left",
    "groups.redrive_appended": "dead letters that go back are appended with their settlement, not confirmed",
    "timer.files_synced": "timer log and wheel are synced, timercheck is not written",
    "meta.slot_written_unsynced": "a meta slot is written and not synced",
    "mend.copied": "the new file of a damaged segment is complete and synced, the old one has the name",
    "repair.planned": "a repair has written its plan beside the copies, nothing is changed",
    "repair.kept": "the bytes to be cut are copied aside, nothing is cut",
    "repair.cut_after_zero": "a repair cut and zeroed the log's tail, the chain still has its units",
    "repair.between_renames": "the old files are moved away, those made again are not in their place",
    "repair.done": "everything of a repair is in its place",
    "export.before_rename": "all Parquet files are written and synced, under a temporary name",
    "compaction.built": "compacted files are complete and synced, the old ones count",
    "compaction.committed": "the swap is noted, no file is moved",
    "compaction.moved": "the files of one directory of a compacted queue are moved, its names are not synced",
    "index.file_created": "a new index file has its name, no entry",
    "index.entries_written": "index entries are written, no slot points at them",
    "index.slots_written": "index entries and slots are written, the header does not count them",
    "index.synced": "index files are synced, the mark does not cover it",
    "flush.before_sync": "a flush service is about to fdatasync",
    "flush.after_sync_before_report": "fdatasync returned, the watermark is not published",
}

_active: dict[str, Callable[[], None]] = {}


class FailPointReached(Exception):  # noqa: N818 (an event, not an error)
    """The error of the action "raise"."""


def fail_point(name: str) -> None:
    """Run the action set for this point, if any."""
    action = _active.get(name)
    if action is not None:
        action()


def activate(name: str, action: Callable[[], None] | str) -> None:
    """Set an action: a callable, "kill" (SIGKILL to this process) or "raise"."""
    if name not in NAMES:
        raise KeyError(f"no failpoint {name!r}; known: {', '.join(sorted(NAMES))}")
    if action == "kill":
        _active[name] = lambda: os.kill(os.getpid(), signal.SIGKILL)
    elif action == "raise":

        def reached() -> None:
            raise FailPointReached(name)

        _active[name] = reached
    elif callable(action):
        _active[name] = action
    else:
        raise ValueError(f"unknown failpoint action {action!r}; use 'kill', 'raise' or a callable")


@contextmanager
def failpoint(name: str, action: Callable[[], None] | str) -> Iterator[None]:
    """Set an action for the time of a with block."""
    activate(name, action)
    try:
        yield
    finally:
        _active.pop(name, None)


def _from_environment() -> None:
    for item in filter(None, os.environ.get("RAYMQ_FAILPOINTS", "").split(";")):
        name, _, action = item.partition("=")
        activate(name, action)


_from_environment()
