"""What the CommitLog process of a replica does while it leads, or while it follows: `ReplicaRole`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from raymq.actors.api.leases import LeaseCall, LeasedMessages
from raymq.actors.api.shard_api import PutTicket
from raymq.actors.api.status_rows import LeaderRow
from raymq.store.base.errors import NotLeading, RayMQError
from raymq.store.base.status import PutStatus
from raymq.store.log.clean import CleanService
from raymq.store.records.requests import FetchRequest, FetchSlice, PutRequest

Body = Callable[[], None]


class ReplicaRole(ABC):
    """One leadership, or the time between two of them. `Roles` makes one, and calls `end` before the next.

    `put`, `fetch`, `lease` and `call` are those of `shard_api.ShardBackend`.
    """

    #: "leader" or "follower"
    mode: str
    #: how error messages call this replica
    display_name: str
    #: see `Dispatcher.linger_s`
    dispatch_linger_s: float

    @abstractmethod
    def put(
        self,
        requests: Sequence[PutRequest],
        notify: Callable[[], None] | None = None,
        *,
        producer_waits: bool = False,
    ) -> list[PutTicket | RayMQError]:
        """Append batches, in their order."""

    @abstractmethod
    def fetch(self, request: FetchRequest) -> list[FetchSlice]:
        """Read queues."""

    @abstractmethod
    def lease(self, call: LeaseCall, is_left: Callable[[], bool]) -> LeasedMessages:
        """Lease messages to a worker."""

    @abstractmethod
    def call(self, op: str, args: Mapping[str, object]) -> dict[str, Any]:
        """Run an administrative operation."""

    @abstractmethod
    def make_cleaner(self) -> CleanService:
        """What deletes old files."""

    @abstractmethod
    def step(self) -> None:
        """Wait for the satellites, supervise them, and note their progress. Raises: Unavailable, when poisoned."""

    def loops(self) -> dict[str, Body]:
        """The service loops of this role. After a transient error they begin again."""
        return {}

    def on_dispatched(self) -> None:
        """Take note that messages were dispatched. It must not block or raise."""
        return

    def upkeep(self) -> None:
        """Do what is due every second. Callers: the maintenance loop."""
        return

    def answer_waiting(self) -> None:
        """Answer the requests that no thread will answer any more."""
        return

    def drain(self, deadline_ms: int) -> None:
        """Wait until the puts under way are answered, or the time is up."""
        return

    def stop(self) -> None:
        """End `loops` soon."""
        return

    def end(self) -> None:
        """Leave the role, after `stop` and the end of its loops: the store stays open."""
        self.answer_waiting()

    @abstractmethod
    def close(self) -> None:
        """Close the store in order, after `stop`. Raises: Unavailable when a step failed, with all released."""

    @property
    @abstractmethod
    def visible_end(self) -> int:
        """The physical offset below which topics and offsets are visible."""

    @property
    def is_serving(self) -> bool:
        """Whether this replica does what its role asks of it, puts included."""
        return True

    @property
    def takes_appends(self) -> bool:
        """Whether the disk took the last append."""
        return True

    def causes(self) -> list[str]:
        """Why less is served than usual."""
        return []

    def failures(self) -> dict[str, str]:
        """part -> cause, of parts of this role that fail at present."""
        return {}

    def end_damaged_file(self) -> None:
        """End the file that is written, of which some bytes are in memory only. Raises: RayMQError, OSError."""
        return

    def damaged_places(self) -> list[int]:
        """Physical offsets of damage that a process of this role met."""
        return []

    def status(self) -> Mapping[str, Any]:
        """What it adds to the status of its replica."""
        return {}

    def metrics(self) -> dict[str, Any]:
        """The values of METRICS; none while another replica leads."""
        return {}


class LeaderHint(Protocol):
    """The part of `ElectionLoop` that knows who leads."""

    def leader_hint(self) -> LeaderRow:
        """The leader, as far as it is known."""


def not_leading(elections: LeaderHint) -> NotLeading:
    """The refusal of a replica that another one leads, with the address of the leader as far as it is known."""
    hint = elections.leader_hint()
    where = f"replica {hint['replica']} does" if hint["replica"] is not None else "ask again"
    return NotLeading(
        f"this replica does not lead the shard: {where} (epoch {hint['epoch']}); nothing was stored",
        field="leader",
        limit=hint["endpoint"],
        endpoint=hint["endpoint"],
        epoch=hint["epoch"],
        status=PutStatus.SERVICE_NOT_AVAILABLE.value,
    )
