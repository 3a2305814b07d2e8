"""Recovers a store before the first put, so that state, consume queues and log agree.

Queues    Leave a queue closed if the marks say where it ends. Open and check all others.
Log       Walk from the newest snapshot below any possible cut, and apply each record to the state.
Repair    Cut the queues to the log. Dispatch those with lost units again from the log's start.

Source: DefaultMessageStore#recover, #recoverTopicQueueTable, RocketMQ 5.3.3.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from raymq.store.log.commit_log import CommitLog
from raymq.store.log.control_files.meta import QUEUES_DOUBTFUL
from raymq.store.log.record_reads import may_be_record
from raymq.store.log.recovery.log_recovery import recover
from raymq.store.log.recovery.recovery_table import ENDS_IN_ZEROS
from raymq.store.log.recovery.snapshot_head import snapshot_starts
from raymq.store.put.snapshot_writer import SnapshotWriter
from raymq.store.queues.consume_queue import BLANK_SIZE, ConsumeQueue
from raymq.store.queues.consume_queues import ConsumeQueues
from raymq.store.queues.unit_places import OtherPlaces, UnitPlaces
from raymq.store.records import record, rows
from raymq.store.state.shard_state import INTERNAL_TOPIC, NO_BUNDLE, BundleRange, ShardState
from raymq.store.state.topics import QueueKey

from .state_applier import COLUMNS, StateApplier

#: bytes of the next record that a killed process may have written: size and magic
_PREFIX_BYTES = 8


class LostQueues(NamedTuple):
    """Consume queues that dispatch builds again, up to the log's end at recovery."""

    log_end: int
    #: the next offset that each had reached
    offsets: dict[QueueKey, int]


class QueueTrust(NamedTuple):
    """The ends up to which the consume queues are believed before the walk."""

    #: the end of the last record that one of them knows
    known_end: int
    #: they are complete up to this physical offset; -1, below every record: nothing in them counts
    trusted_end: int
    #: units above `trusted_end` may be torn: after a reboot, or a failed sync, only synced units are believed
    only_synced: bool
    #: the queues stay closed for now: the marks say where they end
    stay_closed: bool


class RecoveredStore(NamedTuple):
    """The result of recovery for the running store."""

    #: everything below this is in the consume queues
    dispatched: int
    #: each consume queue ends exactly where the log says; False in some stores of RocketMQ
    queues_exact: bool
    #: a snapshot was read, so that the log holds all of the state
    has_snapshot: bool
    #: None: no consume queue was lost
    rebuilding: LostQueues | None
    #: the last bundle of the log, of which a follower may have half
    bundle: BundleRange
    #: records that are in other places than they name
    other_places: OtherPlaces


class StoreRecovery:
    """The recovery of one store. Callers: once, before the first put."""

    def __init__(
        self,
        log: CommitLog,
        state: ShardState,
        *,
        queues: ConsumeQueues,
        snapshots: SnapshotWriter,
        follows: bool = False,
    ) -> None:
        """Args: `follows`: as for `MessageStore.open`."""
        self._log = log
        self._state = state
        self._queues = queues
        self._snapshots = snapshots
        self._follows = follows

        self._trust = QueueTrust(-1, -1, only_synced=False, stay_closed=False)
        #: `trusted_end`, until the walk finds damage or the queues begin again
        self._queues_end = -1
        #: the next offset of every queue at `_queues_end`
        self._offsets_at_queues_end: dict[QueueKey, int] | None = None
        #: the walk read a record that begins or ends at `_queues_end`
        self._queues_end_between_records = False
        #: compares the units with the walked records; None: the queues stay closed
        self._places: UnitPlaces | None = None
        self._applier = StateApplier(log, state)
        #: the next offsets in the snapshot that the walk has begun with
        self._queue_starts: dict[QueueKey, int] = {}
        self._may_begin_with_snapshot = True

    def run(self) -> RecoveredStore:
        """Recover. Raises: Corrupt if the store is damaged and must not be cut."""
        log = self._log
        log.pool.restore(log.marks.appended_end)

        self._trust = self._assess_queues()
        self._queues_end = self._trust.trusted_end
        scan_start = self._recover_log(self._trust.known_end)
        self._drop_half_bundle(scan_start)
        recovered = log.recovered
        if recovered is not None and recovered.row is ENDS_IN_ZEROS and not log.is_own_store:
            # RocketMQ's log has no synced end. This log ends in zeros, so all of its records count as synced.
            log.note_synced(log.end)

        lost = self._find_lost_queues()
        # A start that does not look at the queues would believe what such records say.
        plain = self._places is None or not self._places.others
        exact = not lost and self._queues_end >= 0 and self._queues_end_as_expected() and plain
        self._raise_next_offsets_to_queue_ends()

        rebuilding = None
        starts = self._starts_of_queues_without_units()
        if lost or self._queues_end < 0:
            rebuilding = LostQueues(log.end, {**starts, **lost})
            exact = self._begin_queues_again() and plain
        else:
            for (topic, queue_id), offset in starts.items():
                exact = False
                self._queues.begin_at(topic, queue_id, offset)

        dispatched = min(max(self._queues_end, log.start), log.end)
        if exact:
            log.marks.dispatched_end = dispatched

        self._snapshots.find_newest()
        others = {} if self._places is None else self._places.others
        return RecoveredStore(
            dispatched, exact, self._applier.has_snapshot, rebuilding, self._applier.bundle, others
        )

    # --- consume queues before the walk -----------------------------------------------------------

    def _assess_queues(self) -> QueueTrust:
        """Open the consume queues unless the marks say where they end. Returns: how far to believe them."""
        log = self._log
        # Consume queues are synced rarely, so that after a reboot they are trusted only below the queues' synced end.
        # The same holds after a failed sync, because their pages count as clean until they are written again.
        # Those of RocketMQ are compared with the log, unit by unit.
        has_doubt = not log.same_boot or log.meta.get(QUEUES_DOUBTFUL)
        only_synced = bool(log.crashed and has_doubt and log.is_own_store)
        if not only_synced and self._may_stay_closed():
            end = log.marks.dispatched_end
            return QueueTrust(end, end, only_synced=False, stay_closed=True)

        known_end = self._load_queues()
        trusted_end = min(known_end, log.marks.queues_synced_end) if only_synced else known_end
        self._places = UnitPlaces(
            self._queues,
            trusted_end,
            state=self._state,
            is_whole=log.start == 0,
        )
        return QueueTrust(known_end, trusted_end, only_synced=only_synced, stay_closed=False)

    def _may_stay_closed(self) -> bool:
        """Whether the marks are right about the consume queues: no other program has written here since."""
        log = self._log
        queues_end, appended = log.marks.dispatched_end, log.marks.appended_end
        if not log.is_own_store or not log.start < queues_end <= min(appended, log.end_max):
            return False
        if log.start and next(snapshot_starts(log, self._stable_below(queues_end)), None) is None:
            # RocketMQ deleted the snapshots that had the ends of the queues.
            return False
        file = log.segments.find(appended)
        if file is None:
            return True
        at = appended - file.start
        return not any(file.read(at, min(at + _PREFIX_BYTES, file.size)))

    def _load_queues(self) -> int:
        """Open every consume queue. Returns: the end of the last record that any of them has."""
        log = self._log
        log.marks.dispatched_end = 0
        # If the page cache is intact, only the last units can be half written.
        sound_below = log.end_max if log.same_boot else log.marks.queues_synced_end
        own = log.is_own_store
        self._queues.load(after_crash=log.crashed, sound_below=sound_below, erases=own)
        if not own:
            for queue in self._queues.all():
                queue.drop_end(partial(may_be_record, log.segments))
        return self._queues.max_physical_offset

    # --- the walk ---------------------------------------------------------------------------------

    def _recover_log(self, known_end: int) -> int:
        """Walk the log, cut it at its end, and cut the queues to it. Returns: the start of the walk."""
        low = self._stable_below(self._queues_end)
        scan_start = next(snapshot_starts(self._log, low), self._log.start)
        recover(
            self._log,
            scan_start,
            self._visit,
            self._truncate_queues,
            queues_end=known_end,
            has_unit=self._queues.has_unit,
        )
        return scan_start

    def _stable_below(self, queues_end: int) -> int:
        """An offset below which no torn tail begins, so a snapshot there stays. Args: `queues_end`: the end of the
        queues."""
        log = self._log
        return queues_end if log.same_boot or not log.is_own_store else min(queues_end, log.synced)

    def _visit(self, view: memoryview, base: int, walk: record.Walk) -> None:
        """Apply a piece of the log to the state."""
        if base <= self._queues_end <= walk.end:
            ends = walk.positions + walk.sizes
            if base == self._queues_end or (ends == self._queues_end).any():
                self._queues_end_between_records = True
        self._apply_walk(view, base, walk)

    def _truncate_queues(self, end: int) -> None:
        """Cut the consume queues to a log that ends at `end`, before this boot is noted."""
        log = self._log
        if self._places is not None:
            for run in self._places.end():
                self._apply_run(run)
        if not log.is_own_store:
            self._mend_foreign_queues(end)
            return

        damaged = log.start < self._queues_end < end and not self._queues_end_between_records

        if self._trust.stay_closed and not damaged and self._queues_end <= end:
            # A killed process wrote the units, which may be unsynced.
            ends = self._expected_ends()
            self._queues.load_known_ends(ends, self._queues_end, unsynced=log.crashed)
            return

        if self._trust.stay_closed:
            self._load_queues()
        if damaged:
            # The queues end inside a record, so all of them are built again.
            self._queues_end = -1

        # Above the trusted end a unit may be torn, so that it is dispatched again. Units of deleted log files were
        # synced before the deletion.
        trusted_end = (
            max(self._queues_end, log.start) if self._trust.only_synced or damaged else end
        )
        self._queues.truncate(min(end, trusted_end))

    def _mend_foreign_queues(self, end: int) -> None:
        """Cut what is wrong in the queues of RocketMQ's store: dispatch begins at the first record without a unit."""
        log, places = self._log, self._places
        if places is None:
            return
        self._queues.truncate(end)
        for key, offsets in places.claims():
            queue = self._queues.get(*key)
            wrong = [offset for offset in offsets if not self._points_at_record(queue, offset)]
            if wrong:
                queue.cut(wrong[0])
        for queue in self._queues.all():
            queue.erase_after_end()

        if places.first_missing is not None:
            self._queues_end = min(self._queues_end, places.first_missing)
            self._offsets_at_queues_end = {}
            # RocketMQ dispatches again from the file that its checkpoint names.
            log.checkpoint.logics_ms = 0
            log.checkpoint.sync()

    def _points_at_record(self, queue: ConsumeQueue, offset: int) -> bool:
        if offset < queue.min_offset:
            return False
        unit = queue.read(offset, 1)[0]
        position, size = int(unit["position"]), int(unit["size"])
        return size != BLANK_SIZE and may_be_record(self._log.segments, position, size)

    def _drop_half_bundle(self, scan_start: int) -> None:
        """Cut off a bundle of messages if a crash left only its first ones: it was never acknowledged.

        A follower may have acknowledged these bytes to a leader whose units end inside of the bundle. It waits for the
        rest, or drops them when it leads (`FollowedLog.end`). After a power loss with flush=async it has to catch up
        anyway, and the confirmed end may be inside of the bundle.
        """
        log = self._log
        if not self._applier.bundle.is_cut_at(log.end):
            return
        if self._follows and (log.same_boot or log.config.flush == "sync"):
            return
        start = self._applier.bundle.start
        # In memory mode the confirmed end may have followed the page cache into the bundle, which a power loss took.
        log.marks.lower(start)
        log.truncate(start)
        self._applier.bundle = NO_BUNDLE
        self._state.clear()
        for file in log.segments.files:
            if scan_start - file.size < file.start < log.end:
                self._apply_again(file.start, min(log.end, file.start + file.size))
        self._queues.truncate(log.end)

    def _apply_again(self, at: int, stop: int) -> None:
        """Apply the records of one file once more."""
        while at < stop:
            view, base, walk = self._log.reads.walk(at, stop, check_crc=False)
            self._apply_walk(view, base, walk)
            if walk.reason is not record.WalkStop.STOPPED:
                return
            at = walk.end

    def _apply_walk(self, view: memoryview, base: int, walk: record.Walk) -> None:
        """Apply walked records to the state, run by run."""
        runs = rows.runs(view, base, walk.positions, walk.sizes, columns=COLUMNS)
        if self._places is not None:
            runs = self._places.place_all(runs, (base, walk.end))
        for run in runs:
            self._apply_run(run)

    def _apply_run(self, run: rows.RowRun) -> None:
        self._note_offsets_at_queues_end(run)
        self._applier.apply(run)
        self._note_queue_starts(run)

    def _note_queue_starts(self, run: rows.RowRun) -> None:
        """Remember the next offsets in the snapshot that the walk begins with."""
        if run.topic != INTERNAL_TOPIC:
            self._may_begin_with_snapshot = False
        elif self._may_begin_with_snapshot and self._applier.has_snapshot:
            self._may_begin_with_snapshot = False
            self._queue_starts = dict(self._state.next_offsets)

    def _note_offsets_at_queues_end(self, run: rows.RowRun) -> None:
        """Remember the queues' next offsets at the end of the consume queues, when the walk passes it."""
        if self._offsets_at_queues_end is not None or run.positions[-1] < self._queues_end:
            return
        self._offsets_at_queues_end = dict(self._state.next_offsets)
        before = int(run.positions.searchsorted(self._queues_end))
        if before:
            self._offsets_at_queues_end[run.topic, run.queue_id] = run.first_offset + before

    # --- consume queues after the walk ------------------------------------------------------------

    def _expected_ends(self) -> dict[QueueKey, int]:
        """The ends of all consume queues, if they are complete up to `_queues_end`."""
        known = self._offsets_at_queues_end
        return self._state.next_offsets if known is None else known

    def _find_lost_queues(self) -> dict[QueueKey, int]:
        """Consume queues with fewer units than were dispatched, and the offset that each had reached.

        If there are any, all queues are open afterwards.
        """
        log = self._log
        self._queues.correct_min_offsets(log.start)
        if not log.is_own_store:
            # Every record of the log was compared with its unit.
            return {}
        expected = self._expected_ends()
        lost = {key: expected[key] for key in self._queues.missing()}
        for (topic, queue_id), offset in expected.items():
            if self._queues.is_unopened(topic, queue_id):
                continue
            queue = self._queues.find(topic, queue_id)
            if offset and (queue is None or queue.max_offset < offset):
                lost[topic, queue_id] = offset
        if lost and self._trust.stay_closed:
            self._load_queues()
            self._queues.correct_min_offsets(log.start)
        return lost

    def _starts_of_queues_without_units(self) -> dict[QueueKey, int]:
        """Where queues begin that have no unit, because the files of their messages are deleted.

        A crash may have come between the first file of such a log (`FollowedLog.begin_at`) and these queues.
        """
        if not self._log.start:
            return {}
        return {
            key: offset
            for key, offset in self._queue_starts.items()
            if offset
            and key[0] != INTERNAL_TOPIC
            # One that is not open yet has units.
            and not self._queues.is_unopened(*key)
            and not self._queues.range(*key)[1]
        }

    def _queues_end_as_expected(self) -> bool:
        ends = self._expected_ends()
        return all(ends.get(key, 0) == queue.max_offset for key, queue in self._queues.items())

    def _raise_next_offsets_to_queue_ends(self) -> None:
        """Give each queue at least the next offset of its consume queue.

        If RocketMQ deleted all messages of a queue, no record has its next offset.
        """
        offsets = self._state.next_offsets
        for key, queue in self._queues.items():
            offsets[key] = max(offsets.get(key, 0), queue.max_offset)

    def _begin_queues_again(self) -> bool:
        """Empty the consume queues: dispatch builds them again. Returns: whether they will end exactly where the log
        says."""
        log = self._log
        # The mark is durable before anything is built. After another crash gaps below the old mark would be trusted.
        log.marks.forget_queues(log.start)
        log.checkpoint.logics_ms = 0
        log.checkpoint.sync()
        self._queues.truncate(log.start)
        self._queues_end = log.start
        # Queues that begin empty grow with the records of the log.
        return not log.start and not any(queue.max_offset for queue in self._queues.all())
