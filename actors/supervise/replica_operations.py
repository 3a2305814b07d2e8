"""The operations that any replica answers, whatever its role. Each `_op_NAME` is the operation NAME."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raymq.actors.api.call_arguments import check_integer, check_known
from raymq.actors.protocol.log_units import pack_sound_bytes
from raymq.replication.wire import PROBE_LIMIT
from raymq.store.base.errors import Rejected, Unavailable
from raymq.store.log.mending.sound_bytes import find_match, read_sound_bytes

from .addresses import ClusterAddresses
from .replica_parts import ReplicaParts
from .replica_status import ReplicaStatus
from .roles import Roles

#: operations about the whole cluster, of which a shard that is being added does not know all yet
_OF_ALL_SHARDS = ("describe", "routes", "replicas", "topics")


class ReplicaOperations:
    """The operations of one replica. Callers: any thread."""

    def __init__(
        self,
        parts: ReplicaParts,
        roles: Roles,
        status: ReplicaStatus,
        addresses: ClusterAddresses,
    ) -> None:
        self._parts = parts
        self._roles = roles
        self._status = status
        self._addresses = addresses

    def call(self, op: str, args: dict[str, Any]) -> dict[str, Any]:
        """See `ShardBackend.call`. Operations of any replica are answered here, the others by its role."""
        parts = self._parts
        if op in _OF_ALL_SHARDS and parts.identity.is_joining():
            raise Unavailable(
                "this shard is being added, and may lack topics: ask another one",
                field="joining",
                shard=parts.options.identity["shard"],
            )
        handler: Callable[..., dict[str, Any]] | None = getattr(self, f"_op_{op}", None)
        return self._roles.role.call(op, args) if handler is None else handler(**args)

    def _op_describe(self) -> dict[str, Any]:
        return self._parts.identity.facts()

    def _op_replica_id(self) -> dict[str, Any]:
        return {"replica": self._parts.options.replica_id}

    def _op_status(self) -> dict[str, Any]:
        return self._status.as_json()

    def _op_leader(self) -> dict[str, Any]:
        return self._parts.election_loop.leader_hint()

    def _op_routes(self) -> dict[str, Any]:
        return self._addresses.routes(self._parts.election_loop.leader_id)

    def _op_topics(self) -> dict[str, Any]:
        topics = self._parts.store.confirmed_topics(self._roles.role.visible_end)
        return {topic.name: topic.shown() for topic in topics}

    def _op_check_record(self, topic: str, queue_id: int, offset: int) -> dict[str, Any]:
        """Whether the message at an offset is whole here, or is mended now. Raises: Corrupt naming file and place."""
        store = self._parts.store
        info = store.state.topics[check_known(topic, store.state.topics)]
        check_integer("queue_id", queue_id, 0, info.queues - 1)
        check_integer("offset", offset, 0)
        store.check_record(topic, queue_id, offset)
        return {}

    def _op_replicas(self) -> dict[str, Any]:
        return self._addresses.replicas()

    def _op_elect(self, frame: str, replica: int, endpoints: dict[str, str]) -> dict[str, Any]:
        """Take a message of another replica's elections.

        Args: `replica`: the sender. `endpoints`: replica -> where it listens, as the sender knows.
        """
        answers = self._parts.election_loop.elect(bytes.fromhex(frame))
        # After the message was taken: that of a replaced replica is refused, and so is its address.
        for each, endpoint in endpoints.items():
            self._addresses.note(int(each), endpoint, is_own=int(each) == replica)
        return {"frames": [each.hex() for each in answers]}

    def _op_log_units(self, start: int, stop: int) -> dict[str, Any]:
        """Log bytes for another replica whose own are damaged. Raises: Corrupt, if these are damaged, too."""
        check_integer("start", start)
        check_integer("stop", stop)
        return pack_sound_bytes(read_sound_bytes(self._parts.log, start, stop))

    def _op_log_match(self, candidates: list[list[int]]) -> dict[str, Any]:
        """Up to where the log of another replica, with these (unit end, chain value), equals this one."""
        if not 0 < len(candidates) <= PROBE_LIMIT:
            raise Rejected(
                f"candidates must be 1 to {PROBE_LIMIT} places, got {len(candidates)}",
                field="candidates",
                limit=PROBE_LIMIT,
                found=len(candidates),
            )
        places = [(int(end), int(value)) for end, value in candidates]
        return {"candidate": find_match(self._parts.log, places), "last_end": places[-1][0]}
