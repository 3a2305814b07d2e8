"""A store whose log another replica writes.

Units arrive as the leader wrote them. Their records reach the state and the consume queues once they are confirmed, in
one walk over the log. So a truncation, which is above the confirmed end, takes nothing back, except after a start:
recovery applies the whole log, because a leader needs that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from raymq.store.base.errors import require
from raymq.store.log.chain import ChainUnit
from raymq.store.log.commit_log import CommitLog
from raymq.store.log.recovery.snapshot_head import snapshot_starts
from raymq.store.log.segments.segment_paths import segment_start_of
from raymq.store.log.unit_bounds import whole_range
from raymq.store.put.put_lock import PutLock
from raymq.store.queues.reput_service import ReputService
from raymq.store.records import record, rows
from raymq.store.state.shard_state import INTERNAL_TOPIC, NO_BUNDLE, BundleRange, ShardState
from raymq.store.state.topics import QueueKey

from .state_applier import COLUMNS, StateApplier


class FollowedLog:
    """The writing side of a store that follows. Callers: one thread writes, the dispatching thread applies."""

    def __init__(
        self,
        log: CommitLog,
        state: ShardState,
        *,
        put_lock: PutLock,
        reput: ReputService,
        last_bundle: BundleRange = NO_BUNDLE,
        awaits_snapshot: bool = False,
        on_snapshot: Callable[[dict[QueueKey, int]], None] = lambda _: None,
    ) -> None:
        """Callers: after recovery, or a leadership, which have applied all records.

        Args: `last_bundle`: the last bundle that recovery has read. The log may end in half of it.
        `awaits_snapshot`: the oldest files of the log are deleted, and no snapshot was read. `on_snapshot`: called with
        the next offset of each queue in the snapshot that such a log begins with, before a message after it is
        dispatched.
        """
        self._log = log
        self._state = state
        self._lock = put_lock
        self._reput = reput
        self._applier = StateApplier(log, state)
        self._applier.bundle = last_bundle
        #: all records are in the state, and this replica may append
        self.ended = False
        #: the log begins with a snapshot that was not applied yet
        self._awaits_snapshot = awaits_snapshot
        #: the next offsets of all queues in that snapshot, until `on_snapshot` was called
        self._queue_starts: dict[QueueKey, int] | None = None
        self._on_snapshot = on_snapshot
        with put_lock:
            #: records below this are in the state
            self.applied = log.end
            # A leader remembers what it appended. A new leader may cut some of it off.
            reput.forget_appended()
            reput.on_run = self._apply_dispatched

    def end(self) -> None:
        """Apply the rest of the log, because this replica leads now. It takes as long as the unconfirmed records.

        Half a bundle at the end is cut off: what the leader begins after it would be read as the rest.
        Callers: nothing is appended any more. If half a bundle is cut off, no satellite runs.
        Raises: Corrupt if a record that was not confirmed is damaged, or half a bundle was: another replica has to
        lead.
        """
        if self.ended:
            return
        ends_in_half_bundle = self.apply_all()
        self._report_snapshot()
        with self._lock:
            if ends_in_half_bundle:
                self._log.truncate(self._applier.bundle.start)
                self._apply_again()
            self._reput.on_run = None
            self.ended = True

    def apply_all(self) -> bool:
        """Apply the rest of the log. Returns: whether it ends in half a bundle, which `end` cuts off.

        Raises: Corrupt if a record that was not confirmed is damaged.
        """
        if self.ended:
            return False
        with self._lock:
            self._apply_to_end()
            log = self._log
            if self.applied < log.end:
                raise log.reads.damage(self.applied, "it ends the records of the log")
            return self._applier.bundle.is_cut_at(log.end)

    def append_units(self, units: list[ChainUnit], data: memoryview, *, epoch: int = 0) -> None:
        """`CommitLog.append_units`, for the leader of an epoch. Raises: Unavailable when that epoch is over."""
        with self._lock:
            self._log.check_epoch(epoch)
            self._log.append_units(units, data)

    def adopt_units(self, units: list[ChainUnit], data: memoryview, *, epoch: int = 0) -> None:
        """`CommitLog.adopt_units`, for the leader of an epoch. Raises: Unavailable when that epoch is over."""
        with self._lock:
            self._log.check_epoch(epoch)
            self._log.adopt_units(units, data)

    def truncate(self, offset: int, *, epoch: int = 0) -> None:
        """Cut the log for the leader of an epoch. The state loses the records that are cut.

        The cut is at the start of the record or bundle that `offset` is in, if it is inside of one. Two leaders'
        records may begin alike, so their bytes differ somewhere inside. Durable, Raises: as `CommitLog.truncate`;
        Unavailable when that epoch is over.
        """
        with self._lock:
            self._log.check_epoch(epoch)
            dispatched = self._reput.dispatched
            # The consume queues would keep units of the records that are cut.
            require(
                offset >= dispatched,
                "a follower dispatches confirmed records only, and none of them is cut",
                offset=offset,
                dispatched=dispatched,
            )
            end = self._end_of_whole(offset)
            self._log.truncate(end)
            if end < self.applied:
                self._apply_again()

    def begin_at(self, start: int, chain_value: int, *, epoch: int = 0) -> None:
        """`CommitLog.begin_at`, for the leader of an epoch. The state begins with a snapshot there.

        Callers: nothing is dispatched meanwhile. Raises: Unavailable when that epoch is over.
        """
        with self._lock:
            self._log.check_epoch(epoch)
            self._log.begin_at(start, chain_value)
            self._state.clear()
            self._state.on_options()
            self._applier = StateApplier(self._log, self._state)
            self._reput.dispatched = self.applied = start
            self._awaits_snapshot = start > 0
            self._queue_starts = None

    def _end_of_whole(self, offset: int) -> int:
        """The end of the last record or bundle that ends at or below `offset`, which is not below the confirmed end."""
        log = self._log
        unit = log.chain.unit_at(offset)
        # Each of these begins a record.
        begin = max(
            self._reput.dispatched,
            segment_start_of(offset, log.config.segment_size_bytes),
            log.chain.end if unit is None else unit.start,
        )
        if begin >= offset:
            return offset
        return max(whole_range(log.reads.raw(begin, offset), begin).end, log.confirmed)

    def _apply_again(self) -> None:
        """Make the state from the newest snapshot that is left, and the records after it."""
        log = self._log
        self._state.clear()
        self._applier = StateApplier(log, self._state)
        self.applied = next(snapshot_starts(log, log.end), log.start)
        self._apply_to_end()
        # The record of an option may be cut off.
        self._state.on_options()

    def _apply_to_end(self) -> None:
        """Apply the records that are not in the state. Needs the put lock."""
        log = self._log
        while self.applied < log.end:
            view, base, walk = log.reads.walk(
                self.applied, log.end, check_crc=False, limit=rows.DECODED_ROWS_MAX
            )
            for run in rows.runs(view, base, walk.positions, walk.sizes, columns=COLUMNS):
                self._apply(run)
            following = log.reads.next_walk_start(self.applied, walk)
            if following == self.applied and walk.reason is not record.WalkStop.STOPPED:
                return
            self.applied = following

    def _apply_dispatched(self, view: memoryview, base: int, run: rows.RowRun) -> None:
        """Apply rows that are about to be dispatched, unless they are in the state already."""
        end = int(run.positions[-1] + run.sizes[-1])
        # A truncation may be making the state again: `applied` means nothing without the lock.
        with self._lock:
            if end > self.applied:
                for each in self._rows_to_apply(view, base, run):
                    self._apply(each)
                self.applied = end
        self._report_snapshot()

    def _apply(self, run: rows.RowRun) -> None:
        """Apply a run. Needs the put lock."""
        self._applier.apply(run)
        if self._awaits_snapshot and self._applier.has_snapshot:
            self._awaits_snapshot = False
            self._queue_starts = dict(self._state.next_offsets)

    def _report_snapshot(self) -> None:
        """Call `on_snapshot` once. Callers: the thread that dispatches, or while it is paused."""
        if self._queue_starts is not None:
            self._on_snapshot(self._queue_starts)
            self._queue_starts = None

    def _rows_to_apply(
        self, view: memoryview, base: int, run: rows.RowRun
    ) -> Iterable[rows.RowRun]:
        """The rows of a run that are not in the state yet. Those of the internal topic have their bodies."""
        first = int(run.positions.searchsorted(self.applied))
        is_internal = run.topic == INTERNAL_TOPIC
        if not first and not is_internal:
            return [run]
        # After a start `applied` may be inside of the run.
        columns = COLUMNS if is_internal else rows.RUN_COLUMNS
        return rows.runs(view, base, run.positions[first:], run.sizes[first:], columns=columns)
