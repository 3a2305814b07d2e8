"""What a leader reports of itself: its part of the status, its failures, and the values of its metrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raymq.actors.api.status_rows import LeadingRow
from raymq.actors.shared.control_block import FollowerProgress, Leadership
from raymq.actors.shared.failures import FailureFile
from raymq.actors.supervise.lease import FLUSH_ROLES
from raymq.actors.supervise.replica_parts import ReplicaParts
from raymq.store.base.clock import Clock
from raymq.store.config.promise import own_durable

from . import leader_metrics
from .appender import Appender
from .group_progress import GroupProgress
from .metrics import ByTags
from .put_acks import PutAcks, PutCounters


class LeaderReport:
    """The report of one leader. Callers: any thread."""

    def __init__(
        self,
        parts: ReplicaParts,
        led: Leadership | None,
        *,
        counters: PutCounters,
        acks: PutAcks,
        appender: Appender,
        groups: GroupProgress,
        open_halves: Callable[[], tuple[int, int] | None],
        uncopied: Callable[[], int],
        transactions: Callable[[], ByTags],
        is_writable: Callable[[], bool],
    ) -> None:
        """Args: `led`: as of `Leader`. `open_halves`: see `Transactions`. `uncopied`: see `LeaseService`.
        `transactions`: see `LeaderCommits.counts`. `is_writable`: whether puts are taken now.
        """
        self._parts = parts
        self._led = led
        self._counters = counters
        self._acks = acks
        self._appender = appender
        self._groups = groups
        self._open_halves = open_halves
        self._uncopied = uncopied
        self._transactions = transactions
        self._is_writable = is_writable
        # The real clock, whatever clock this replica has, because Replication's process wrote the times in the file.
        self._replication_failure = FailureFile(
            parts.root, files=parts.options.files, clock=Clock()
        )

    @property
    def waiting_puts(self) -> int:
        """Puts that are not answered yet."""
        return self._appender.waiting + self._acks.waiting

    def failures(self) -> dict[str, str]:
        """part -> cause, of parts that fail at present."""
        found = {}
        refused = self._parts.log.allocator.last_error
        if refused is not None:
            found["allocate"] = str(refused)
        cause = self._stalled_followers()
        if cause is not None:
            found["replication"] = cause
        return found

    def damaged_places(self) -> list[int]:
        """Where Replication cannot read the log."""
        found = self._replication_failure.damaged_at()
        return [] if found is None else [found]

    def _stalled_followers(self) -> str | None:
        """Why followers get no log bytes; None: each of them does."""
        return self._replication_failure.read() if self._parts.options.has_followers else None

    def _followers(self) -> dict[int, FollowerProgress]:
        """Replica -> how far it is, of the followers that Replication serves in this epoch."""
        epoch = 0 if self._led is None else self._led.epoch
        control = self._parts.supervisor.control
        known = {each: control.followers[each].read() for each in self._parts.options.others}
        return {each: found for each, found in known.items() if found.epoch == epoch != 0}

    def status(self) -> LeadingRow:
        """Counters, metrics and services, for status displays and benchmarks."""
        parts = self._parts
        store, log = parts.store, parts.log
        return {
            "writable": self._is_writable(),
            "min_offset": log.start,
            "transient_pool": parts.config.transient_pool,
            "committed": log.committed,
            "prewritten_bytes": log.allocator.ready,
            "counters": vars(self._counters),
            "damage": [{"message": str(error), **error.fields} for error in store.damage],
            "compaction": {"error": parts.compaction.last_error},
            "metrics": leader_metrics.as_status(self.metrics()),
            "flags": store.flags.names(),
            "clean": {**store.clean_service.as_status(), "error": parts.maintenance.last_error},
            "upkeep": {"error": store.checkpoint_service.last_error},
            "store_stats": store.stats.as_status(),
        }

    def metrics(self) -> dict[str, Any]:
        """The values of METRICS. Callers: any thread; cheap enough for every few seconds, not for every put."""
        parts, counters = self._parts, self._counters
        store, log = parts.store, parts.log
        has_followers = parts.options.has_followers
        roles: dict[str, dict[str, Any]] = parts.supervisor.describe()["roles"]
        flushers = [roles[role] for role in FLUSH_ROLES if role in roles]
        confirmed = log.confirmed
        ends = log.ends
        durable = own_durable(parts.config.flush, ends)
        lag = max(0, durable - confirmed)
        followers = self._followers() if has_followers else {}
        incomplete = (
            len(parts.options.all_members)
            - 1
            - sum(each.is_complete for each in followers.values())
        )

        halves = self._open_halves()
        return {
            "raymq_append_batches_total": counters.puts,
            "raymq_append_messages_total": counters.rows - counters.duplicates,
            "raymq_append_bytes_total": counters.bytes,
            "raymq_append_seconds": self._acks.latency.read(),
            "raymq_flush_seconds": parts.supervisor.sync_latencies(),
            "raymq_fsyncs_total": sum(flusher["syncs"] for flusher in flushers),
            "raymq_duplicates_total": counters.duplicates,
            "raymq_rejected_total": counters.rejected,
            "raymq_unknown_total": counters.unknown,
            "raymq_slow_puts_total": self._acks.slow_puts.count,
            "raymq_slow_lock_waits_total": store.put_lock.slow_waits.count,
            "raymq_slow_syncs_total": sum(flusher["slow_syncs"] for flusher in flushers),
            "raymq_replica_timeouts_total": self._acks.late_replicas.count,
            "raymq_fetches_total": counters.fetches,
            "raymq_role_restarts_total": sum(max(0, role["grants"] - 1) for role in roles.values()),
            "raymq_scrub_bytes_total": parts.scrub.counters.bytes,
            "raymq_scrub_faults": leader_metrics.damaged_places(parts.scrub, store),
            "raymq_repaired_units_total": parts.repaired_units(),
            "raymq_start_time_seconds": parts.started_ms / 1000,
            "raymq_writable": int(self._is_writable()),
            "raymq_waiting_puts": self.waiting_puts,
            "raymq_log_start_bytes": log.start,
            "raymq_log_appended_bytes": log.end,
            "raymq_log_synced_bytes": log.synced,
            "raymq_log_confirmed_bytes": confirmed,
            "raymq_log_dispatched_bytes": store.dispatched,
            "raymq_replication_lag_bytes": lag if has_followers else None,
            "raymq_under_replicated": (
                int(self._stalled_followers() is not None) if has_followers else None
            ),
            "raymq_epoch": 0 if self._led is None else self._led.epoch,
            # Also those that were not heard in this epoch (rule R13 of docs/design.md).
            "raymq_incomplete_followers": incomplete if has_followers else None,
            "raymq_follower_match_lag_bytes": {
                (str(replica),): max(0, ends.appended - each.matched_end)
                for replica, each in followers.items()
            },
            "raymq_follower_sync_lag_bytes": {
                (str(replica),): max(0, durable - each.durable_end)
                for replica, each in followers.items()
            },
            "raymq_follower_durable_bytes": {
                (str(replica),): each.durable_end for replica, each in followers.items()
            },
            "raymq_unclean_recoveries": len(parts.election_loop.unclean_recoveries()),
            "raymq_consumer_lag_messages": self._groups.lags(),
            "raymq_consumer_lag_seconds": self._groups.lag_seconds(),
            "raymq_group_members": self._groups.members(),
            "raymq_open_half_messages": None if halves is None else halves[0],
            "raymq_oldest_half_message_seconds": None if halves is None else halves[1] // 1000,
            "raymq_transactions_total": self._transactions(),
            "raymq_leased_messages": self._groups.leased(),
            "raymq_undelivered_messages": self._groups.undelivered(),
            "raymq_lease_outcomes_total": self._groups.outcomes(),
            "raymq_highest_attempts": self._groups.highest_attempts(),
            "raymq_dead_letters": self._groups.dead_letters(),
            "raymq_paused_workers": self._groups.paused(),
            "raymq_uncopied_messages_total": self._uncopied(),
            "raymq_topic_messages": leader_metrics.topic_messages(store),
            "raymq_disk_used_bytes": leader_metrics.used_bytes(store),
            "raymq_disk_free_bytes": leader_metrics.free_bytes(log),
        }
