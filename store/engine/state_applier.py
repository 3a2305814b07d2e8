"""Applies the records of a log to the state of its shard, run by run: at recovery, and on a replica that follows."""

from __future__ import annotations

from raymq.store.log.commit_log import CommitLog
from raymq.store.log.epochs import EpochVisitor, state_records
from raymq.store.records import rows
from raymq.store.state.shard_state import (
    INTERNAL_TOPIC,
    NO_BUNDLE,
    PROGRESS,
    ShardState,
    bundle_range,
    reading_state_record,
)

#: columns of the runs that are applied
COLUMNS = (*rows.RUN_COLUMNS, "body")


class StateApplier:
    """Applies records in the order of the log. Callers: one thread; the put lock guards the state."""

    def __init__(self, log: CommitLog, state: ShardState) -> None:
        self._state = state
        self._epochs = EpochVisitor(log.chain_maker.epoch_starts, state)
        #: a snapshot was read, so that the records since then are all of the state
        self.has_snapshot = False
        #: the bundle that the last PROGRESS record begins
        self.bundle = NO_BUNDLE

    def apply(self, run: rows.RowRun) -> None:
        """Apply consecutive rows of one queue. Those of the internal topic need their bodies.

        Raises: Corrupt for a state record that no RayMQ store wrote.
        """
        if run.topic == INTERNAL_TOPIC:
            self._apply_state_records(run)

        self._state.apply_rows(
            run.topic,
            run.queue_id,
            run.first_offset,
            len(run.positions),
            int(run.positions[-1] + run.sizes[-1]),
            run.store_time_ms,
            producer_id=run.producer_id,
            epoch=run.epoch,
            first_sequence=run.first_sequence,
        )

    def _apply_state_records(self, run: rows.RowRun) -> None:
        """Apply records of the internal topic, and remember the bundle that the last of them begins."""
        for kind, body, at in state_records(run):
            with reading_state_record(kind, at):
                if kind == PROGRESS:
                    self.bundle = bundle_range(at, body)
                self.has_snapshot |= self._state.apply_state_record(kind, body)
            self._epochs.note(kind, at)
