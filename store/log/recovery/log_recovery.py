"""The recovery of one log: walk its records, decide where it ends, and make files, chain and marks agree with that."""

from __future__ import annotations

from collections.abc import Callable

from raymq.store.base.errors import StoreDamaged
from raymq.store.log.commit_log import CommitLog
from raymq.store.log.control_files.meta import ADOPTING
from raymq.store.log.unit_bounds import RecordStarts
from raymq.store.records import record

from .log_scan import HasUnit, NotedEnds, Scan, Visit, foreign_end, scan
from .recovery_table import Decision


def recover(
    log: CommitLog,
    scan_from: int,
    visit: Visit | None = None,
    truncate_queues: Callable[[int], None] | None = None,
    *,
    queues_end: int = 0,
    has_unit: HasUnit = lambda position, size: False,
) -> Scan:
    """Walk from `scan_from`, where a record starts, decide about the stop position, and finish the log.

    Args: `visit`: called with (view, segment_start, walk) for the valid records of each file in order.
    `truncate_queues`: called with the log's end before this boot is noted; it truncates consume queues that a power
    loss may have torn. Once the boot is noted, a restart trusts everything it finds. `queues_end`: the end of the
    last record that a consume queue knows. A log that RocketMQ wrote and closed in order ends there. `has_unit`: of
    `log_scan.scan`.
    Raises: StoreDamaged, with nothing changed, if the decision table says so.
    """
    log.pool.restore(log.marks.appended_end)
    starts = RecordStarts()

    def visit_and_note(view: memoryview, base: int, walk: record.Walk) -> None:
        starts.note(walk.positions)
        if visit is not None:
            visit(view, base, walk)

    found = _scan(log, scan_from, visit_and_note, queues_end, has_unit)
    _cut_files(log, found)
    _recover_chain(log, found, starts)
    _recover_marks(log)

    if truncate_queues is not None:
        truncate_queues(found.end)
    log.finish_recovery(found)
    return found


def _scan(log: CommitLog, scan_from: int, visit: Visit, queues_end: int, has_unit: HasUnit) -> Scan:
    """Find the log's end. Raises: StoreDamaged if the decision table says so."""
    appended = log.marks.appended_end
    if not log.is_own_store:
        appended = foreign_end(log.segments, queues_end, crashed=log.crashed)

    found = scan(
        log.segments,
        log.chain,
        NotedEnds(log.is_own_store, log.same_boot, log.synced, appended),
        files=log.files,
        scan_from=scan_from,
        visit=visit,
        has_unit=has_unit,
    )

    row = found.row
    if row.decision is Decision.CORRUPT:
        raise StoreDamaged(
            f"recovery stopped at offset {found.end} of {log.root / 'commitlog'} ({found.fault}): {row.cause} "
            f"(row {row.name}; synced {log.synced}, appended {appended}). Nothing was "
            "changed; `raymq store verify` names the fault.",
            path=str(log.root / "commitlog"),
            offset=found.end,
            rule=f"recovery row {row.name}",
        )

    return found


def _cut_files(log: CommitLog, found: Scan) -> None:
    """End the log and its files where the scan says."""
    end = found.end
    if found.row.decision is Decision.TRUNCATE:
        log.marks.lower(end)
        log.segments.truncate_to(end)
    elif log.end_max >= end + 2 * log.config.segment_size_bytes:
        # Whole files lie after the end.
        log.segments.truncate_to(end)

    log.end = end
    tail = log.segments.find(end)
    if tail is not None:
        # Zeros follow the end, but perhaps in reserved blocks only: write them ahead again.
        tail.prewritten = end - tail.start


def _recover_chain(log: CommitLog, found: Scan, starts: RecordStarts) -> None:
    """Give every byte of the log a unit. Durable: at return."""
    chain, end = log.chain, found.end
    log.chain_maker.epoch_starts.truncate(end)
    proven_end = min(found.proven_end, end)
    # A unit that has lost its end may begin before the walk, and before all EPOCH records that were read.
    log.chain_maker.note_epochs_from(proven_end, end)
    chain.truncate_to(proven_end)
    chain.sync()
    log.complete_chain(starts)
    log.epoch = log.last_epoch
    # From now on these units prove the recovered bytes, after another power loss too.
    chain.sync()


def _recover_marks(log: CommitLog) -> None:
    """Let the marks say what is there."""
    if not log.is_own_store:
        log.meta.update({ADOPTING: True})
    log.marks.lower(log.end)
    log.marks.appended_end = log.end
    if not log.same_boot:
        # The whole log was read from the disk. Acks do not sync the marks, so they are durable up to its end.
        log.sync()
        log.marks.lower(log.end)
