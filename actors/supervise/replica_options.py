"""What one replica is, and what the process around it gives it: the options of `ReplicaHost`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from raymq.actors.shared.control_block import COMMIT_REAL_TIME
from raymq.replication.election_limits import ElectionLimits
from raymq.store.base.clock import Clock
from raymq.store.base.errors import require
from raymq.store.base.files import Files
from raymq.store.config.store_config import StoreConfig

from .addresses import NO_ADDRESSES, PeerAddressBook
from .election_peers import PeerCalls


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions:
    """The options of one replica. They stay the same as long as its process."""

    #: facts that `identity` of the replica names: cluster id, shard, replica, incarnation and others
    identity: dict[str, Any]
    #: the roles of the satellites
    roles: tuple[str, ...]
    #: ids of all replicas of the shard; this one need not be among them
    members: Sequence[int] = (0,)
    #: those that may lead
    candidates: Sequence[int] = (0,)
    #: connects to another replica, for elections and repairs; None: there are none
    connect_peer: Callable[[int], PeerCalls] | None = None
    #: where the other replicas of the shard listen
    addresses: PeerAddressBook = NO_ADDRESSES
    limits: ElectionLimits | None = None
    #: an empty directory may be trusted to be a new one (rule R13 of docs/design.md)
    is_new_complete: bool = True
    #: as of `Elections`
    generations: Sequence[int] = ()
    least_epoch: int = 0
    #: called with the epoch that this replica leads from now on
    note_leadership: Callable[[int], None] | None = None
    #: ends this process soon, for a reason. Its successor recovers. None: stay, read only
    end_process: Callable[[str], None] | None = None
    files: Files = field(default_factory=Files)
    clock: Clock = field(default_factory=Clock)

    @property
    def replica_id(self) -> int:
        """The number of this replica in its shard."""
        return int(self.identity.get("replica", 0))

    @property
    def shard(self) -> int:
        """The number of its shard."""
        return int(self.identity["shard"])

    @property
    def all_members(self) -> tuple[int, ...]:
        """Ids of all replicas of the shard, this one included."""
        return tuple(sorted({*self.members, self.replica_id}))

    @property
    def others(self) -> list[int]:
        """Ids of the other replicas of the shard."""
        return [each for each in self.all_members if each != self.replica_id]

    @property
    def sole_candidate(self) -> int | None:
        """The only replica that may lead; None: there are several."""
        return self.candidates[0] if len(self.candidates) == 1 else None

    @property
    def is_sole_candidate(self) -> bool:
        """Whether this replica is the only one that may lead."""
        return self.sole_candidate == self.replica_id

    @property
    def has_followers(self) -> bool:
        """Whether this replica sends its log to others while it leads."""
        return "replication" in self.roles

    def check(self, config: StoreConfig) -> None:
        """Check that the satellites fit the store. Raises: Bug."""
        require(
            (COMMIT_REAL_TIME in self.roles) == config.transient_pool,
            "CommitRealTime runs with a transient pool and only with one",
            roles=self.roles,
        )

    def store_identity(self) -> dict[str, object]:
        """Whose store it is: another replica must not open it."""
        return {
            "cluster_id": self.identity["cluster_id"],
            "shard": self.identity["shard"],
            "replica": self.identity.get("replica", 0),
        }
