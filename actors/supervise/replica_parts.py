"""What the roles of a replica work with: the open store, and the parts of the process that outlive a role."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from raymq.actors.shared.failures import ActiveFailures
from raymq.actors.shared.heartbeat import Heartbeat
from raymq.actors.shared.maintenance import Maintenance
from raymq.store.base.clock import Clock
from raymq.store.compaction.compaction_store import CompactionService
from raymq.store.config.running_config import RunningConfig
from raymq.store.engine.message_store import MessageStore
from raymq.store.log.commit_log import CommitLog
from raymq.store.log.scrub import Scrub

from .dispatcher import Dispatcher
from .election_loop import ElectionLoop
from .elections import Elections
from .log_guard import LogGuard
from .replica_identity import ReplicaIdentity
from .replica_options import ReplicaOptions
from .serving import Serving
from .supervisor import Supervisor


@dataclass(frozen=True, kw_only=True)
class ReplicaParts:
    """The parts of one replica, whatever its role. A role takes those that it uses."""

    #: the directory of the store
    root: Path
    config: RunningConfig
    clock: Clock
    options: ReplicaOptions
    identity: ReplicaIdentity
    store: MessageStore
    log: CommitLog
    log_guard: LogGuard
    supervisor: Supervisor
    heartbeat: Heartbeat
    serving: Serving
    #: operations that fail at present and are tried again
    failures: ActiveFailures
    elections: Elections
    election_loop: ElectionLoop
    dispatcher: Dispatcher
    maintenance: Maintenance
    compaction: CompactionService
    scrub: Scrub
    #: how many damaged units were mended with the bytes of other replicas
    repaired_units: Callable[[], int]
    #: wall clock, when the process began
    started_ms: int
