"""The promise of a put in one table: the conditions of receipts and of reads, and the status of a missed deadline.

A shard has four ends (`Ends`). A promise names the ends that must have passed a put before its receipt. It also names
those that must have passed a record before readers see it. `PROMISES` is the table in README.md, which a test compares.

Source: CommitLog#handleDiskFlushAndHA, RocketMQ 5.3.3. A receipt waits for two futures: the flush future of the
leader's own ends, and the replica future. Without a replica to wait for, the replica future is complete from the start.
This module imports neither pyarrow nor numpy: the satellites use it too.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, get_args

from raymq.store.base.status import PutStatus

#: whether a shard syncs before it answers; the same for all its puts
Flush = Literal["sync", "async"]
#: the replicas that a receipt waits for: "quorum" is every replica that the promise counts, "leader" is one machine.
#: Append only: the position is the code on the wire (actors/protocol/small_puts.py). Only "quorum" may wait for
#: replicas.
Acks = Literal["quorum", "leader"]

FLUSHES: Final[tuple[Flush, ...]] = get_args(Flush)
ACKS: Final[tuple[Acks, ...]] = get_args(Acks)

#: an end above every log: a future with it is complete
COMPLETE: Final = 1 << 62


class Ends(NamedTuple):
    """The ends of one shard, as physical offsets. Invariant: synced <= committed <= appended, replicated <=
    committed."""

    #: everything below this is in the log: in the page cache, or in the transient pool
    appended: int
    #: everything below this is in the log's files
    committed: int
    #: everything below this is on the leader's disk
    synced: int
    #: everything below this is on the replicas, as durably as the flush mode asks
    replicated: int


class Promise(NamedTuple):
    """One row of the table. The tuples hold names of fields of `Ends`."""

    #: the ends that must have passed a put before its receipt
    acknowledged_by: tuple[str, ...]
    #: the ends that must have passed a record before readers see it
    readable_by: tuple[str, ...]

    @property
    def waits_for_nothing(self) -> bool:
        """Whether a put has its receipt as soon as it is appended."""
        return self.acknowledged_by == ("appended",)

    @property
    def waits_for_sync(self) -> bool:
        """Whether receipts wait for the leader's disk."""
        return "synced" in self.acknowledged_by

    @property
    def waits_for_replicas(self) -> bool:
        """Whether receipts wait for the replicas."""
        return "replicated" in self.acknowledged_by

    @property
    def readable_in_memory(self) -> bool:
        """Whether readers see records that are neither on disk nor on a replica."""
        return not {"synced", "replicated"}.intersection(self.readable_by)

    def acknowledged_end(self, ends: Ends) -> int:
        """The end up to which puts have kept their promise."""
        return _least(ends, self.acknowledged_by)

    def confirmed_end(self, ends: Ends) -> int:
        """The confirmed end: readers may see everything below it."""
        return _least(ends, self.readable_by)

    def flush_end(self, ends: Ends) -> int:
        """The end up to which the flush future of puts is complete."""
        return _least(ends, [name for name in self.acknowledged_by if name != "replicated"])

    def replica_end(self, ends: Ends) -> int:
        """The end up to which the replica future of puts is complete; above every log if receipts wait for no
        replica."""
        return ends.replicated if self.waits_for_replicas else COMPLETE

    def late_status(self, ends: Ends, end: int) -> PutStatus:
        """The status of a put that ends at `end`, was not acknowledged, and has waited long enough.

        If both futures are late, the replica's status wins.
        """
        if end > self.replica_end(ends):
            return PutStatus.FLUSH_SLAVE_TIMEOUT
        return PutStatus.FLUSH_DISK_TIMEOUT


#: (flush, whether there are followers, acks) -> the promise. Rows of one shard differ only in `acknowledged_by`.
PROMISES: Final[dict[tuple[Flush, bool, Acks], Promise]] = {
    ("sync", False, "quorum"): Promise(("synced",), ("synced",)),
    ("sync", False, "leader"): Promise(("synced",), ("synced",)),
    ("sync", True, "quorum"): Promise(("synced", "replicated"), ("synced", "replicated")),
    ("sync", True, "leader"): Promise(("synced",), ("synced", "replicated")),
    ("async", False, "quorum"): Promise(("appended",), ("committed",)),
    ("async", False, "leader"): Promise(("appended",), ("committed",)),
    ("async", True, "quorum"): Promise(("committed", "replicated"), ("committed", "replicated")),
    ("async", True, "leader"): Promise(("appended",), ("committed", "replicated")),
}


def promises(flush: Flush, *, has_followers: bool) -> dict[Acks, Promise]:
    """The rows of one shard, by ack mode."""
    return {acks: PROMISES[flush, has_followers, acks] for acks in ACKS}


def own_durable(flush: Flush, ends: Ends) -> int:
    """The end up to which one replica has its log as durably as the flush mode asks, whatever the others have."""
    return PROMISES[flush, False, "quorum"].confirmed_end(ends)


def awaits_commit(flush: Flush, *, has_followers: bool) -> bool:
    """Whether receipts wait until bytes have left the transient pool: each put's commit is urgent then."""
    rows = promises(flush, has_followers=has_followers).values()
    return not all(promise.waits_for_nothing for promise in rows)


def _least(ends: Ends, names: tuple[str, ...] | list[str]) -> int:
    least: int = min([getattr(ends, name) for name in names])
    return least
