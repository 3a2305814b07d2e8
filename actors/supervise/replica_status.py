"""What one replica reports of itself: its status, why it serves less than usual, and its metrics."""

from __future__ import annotations

from typing import Any

from raymq.actors.api.status_rows import LastRecovery, ReplicaRow

from .log_repair import LogRepair
from .peers import Peers
from .replica_parts import ReplicaParts
from .roles import Roles


class ReplicaStatus:
    """The status of one replica. Callers: any thread."""

    def __init__(
        self, parts: ReplicaParts, roles: Roles, peers: Peers | None, repair: LogRepair | None
    ) -> None:
        """Args: `peers`: None, if no other replica may lead. `repair`: None, if there are no other replicas."""
        self._parts = parts
        self._roles = roles
        self._peers = peers
        self._repair = repair

    @property
    def state(self) -> str:
        """RUNNING, or READ_ONLY while every write is refused."""
        parts = self._parts
        is_refusing = parts.serving.stop_error or parts.log.health.poisoned
        return "READ_ONLY" if is_refusing or not self._roles.role.is_serving else "RUNNING"

    @property
    def cause(self) -> str | None:
        """Why nothing is written, or which operations fail at present; None: none."""
        parts = self._parts
        if parts.serving.stop_error:
            return str(parts.serving.stop_error)
        failures = [f"{part}: {cause}" for part, cause in self._active_failures().items()]
        poisoned = [parts.log.health.poisoned] if parts.log.health.poisoned else []
        return "; ".join([*poisoned, *failures, *self._roles.role.causes()]) or None

    def _active_failures(self) -> dict[str, str]:
        parts = self._parts
        found = {**parts.failures.as_status(), **self._roles.role.failures()}
        refused = {} if self._peers is None else self._peers.refused_certificates()
        if refused:
            found["certificates"] = "; ".join(
                f"replica {replica} cannot be called, and leads only if no other can: {refusal}"
                for replica, refusal in sorted(refused.items())
            )
        if not parts.elections.is_complete and parts.store.lacks_compacted:
            found["compaction"] = (
                f"the log of this replica begins at {parts.log.start}, and older messages of compacted topics are not "
                "here: it can neither count nor lead. Bring the disk of the replica before it back, or delete these "
                "topics"
            )
        return found

    def as_json(self) -> dict[str, object]:
        """Ends and satellites, for status displays."""
        parts, log, recovered = self._parts, self._parts.log, self._parts.log.recovered
        recovery: LastRecovery | None = None
        if recovered is not None:
            recovery = {"row": recovered.row.name, "end": recovered.end}

        row: ReplicaRow = {
            "mode": self._roles.mode,
            "state": self.state,
            "error": self.cause,
            "failures": self._active_failures(),
            "appended": log.end,
            "synced": log.synced,
            "confirmed": log.confirmed,
            "dispatched": parts.store.dispatched,
            "epoch": parts.elections.epoch,
            "leader": parts.election_loop.leader_id,
            "is_complete": parts.elections.is_complete,
            "uncallable": sorted(parts.elections.uncallable),
            "unclean_recoveries": parts.election_loop.unclean_recoveries(),
            "recovery": recovery,
            "scrub": parts.scrub.status(),
            "repair": None if self._repair is None else self._repair.status(),
            "supervisor": parts.supervisor.describe(),
        }
        return {**parts.identity.facts(), **row, **self._roles.role.status()}

    def metrics(self) -> dict[str, Any]:
        """The values of METRICS; none while another replica leads."""
        return self._roles.role.metrics()
