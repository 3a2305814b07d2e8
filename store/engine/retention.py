"""What of a log may be deleted, and what goes with it: the store's side of `CleanService`."""

from __future__ import annotations

from collections.abc import Callable

from raymq.store.base.failpoints import fail_point
from raymq.store.config.delay_levels import LEVELS_SERVICE, TIMERS_SERVICE
from raymq.store.log.clean import Derived, LastingFloor
from raymq.store.log.commit_log import CommitLog
from raymq.store.put.put_lock import PutLock
from raymq.store.queues.consume_queues import ConsumeQueues
from raymq.store.state.shard_state import ShardState


class Retention:
    """The parts of one store that follow the log's start.

    Args: `derived`: stores that forget messages which the log deletes. `floors`: each returns the physical offset from
    which it still needs records; None: it needs none. Both lists may change later. `sync_queues`: syncs the consume
    queues and notes how far.
    """

    def __init__(
        self,
        log: CommitLog,
        state: ShardState,
        *,
        queues: ConsumeQueues,
        put_lock: PutLock,
        derived: list[Derived],
        floors: list[Callable[[], int | None]],
        sync_queues: Callable[[], None],
    ) -> None:
        self._log = log
        self._state = state
        self._queues = queues
        self._put_lock = put_lock
        self._derived = derived
        self._floors = floors
        self._sync_queues = sync_queues
        self._lasting_floor = LastingFloor(log)

    def advance_deletable_end(self) -> int:
        """Sync the consume queues: after a power loss none may end below the log's start.

        Returns: the end at or above which no record may be deleted.
        """
        self._sync_queues()

        floors = tuple(self._floors)
        needed = [find_needed_from() for find_needed_from in floors]
        synced_end = self._log.marks.queues_synced_end
        deletable = min([synced_end, *(end for end in needed if end is not None)])
        progress = self._state.progress
        if not progress.get(LEVELS_SERVICE) and not progress.get(TIMERS_SERVICE):
            return deletable

        # A delivered message waits no more. But before its original record is deleted, its delivery must be on disk and
        # confirmed: another leader may cut it off, and deliver the original record.
        return self._lasting_floor.advance(deletable, floors)

    def forget_before(self, start: int) -> None:
        """Messages below physical offset `start` are out of range from now on."""
        self._queues.correct_min_offsets(start)

    def delete_derived(self, start: int) -> None:
        """Delete chain, consume queue files and indexes of records below `start`."""
        with self._put_lock:
            self._log.chain.delete_before(start)
        fail_point("clean.after_chain")
        self._queues.delete_expired()
        fail_point("clean.after_queues")
        for derived in self._derived:
            derived.delete_expired(start)
