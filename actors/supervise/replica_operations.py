"""The operations that any replica answers, whatever its role."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from raymq.actors.api.call_arguments import check_integer, check_known, check_name, wrong_value
from raymq.actors.api.operations import Argument, integer, operation
from raymq.actors.protocol.log_units import pack_sound_bytes
from raymq.actors.shared.control_block import REPLICAS_MAX
from raymq.replication.wire import PROBE_LIMIT
from raymq.store.base.errors import Unavailable
from raymq.store.base.format import pack_host
from raymq.store.config.store_config import IN_CLUSTER
from raymq.store.log.mending.sound_bytes import find_match, read_sound_bytes
from raymq.store.put.option_records import option_facts

from .addresses import ClusterAddresses
from .doors import PROTOCOLS, Doors, HostPort
from .replica_parts import ReplicaParts
from .replica_status import ReplicaStatus
from .roles import Roles

#: operations about the whole cluster, of which a shard that is being added does not know all yet
_OF_ALL_SHARDS = ("describe", "routes", "replicas", "topics")
#: of a chain value
_UNSIGNED_MAX = 2**64 - 1


class ReplicaScope(NamedTuple):
    """What the operations of any replica work on."""

    parts: ReplicaParts
    roles: Roles
    report: ReplicaStatus
    addresses: ClusterAddresses
    doors: Doors


def call_replica(scope: ReplicaScope, op: str, args: Mapping[str, object]) -> dict[str, object]:
    """See `ShardBackend.call`. Operations of any replica are answered here, the others by its role."""
    parts = scope.parts
    if op in _OF_ALL_SHARDS and parts.identity.is_joining():
        raise Unavailable(
            "this shard is being added, and may lack topics: ask another one",
            field="joining",
            shard=parts.options.identity["shard"],
        )
    found = OPERATIONS.get(op)
    return scope.roles.role.call(op, args) if found is None else found.call(scope, op, args)


# --- the replica and its cluster ------------------------------------------------------------------


def describe(replica: ReplicaScope) -> dict[str, Any]:
    """Facts of this process."""
    return replica.parts.identity.facts()


def status(replica: ReplicaScope) -> dict[str, Any]:
    """See `ReplicaStatus.as_json`, and `Doors.known`."""
    return {**replica.report.as_json(), "doors": replica.doors.known()}


def leader(replica: ReplicaScope) -> dict[str, object]:
    """See `ElectionLoop.leader_hint`."""
    return {**replica.parts.election_loop.leader_hint()}


def routes(replica: ReplicaScope) -> dict[str, object]:
    """See `ClusterAddresses.routes`."""
    return replica.addresses.routes(replica.parts.election_loop.leader_id)


def replicas(replica: ReplicaScope) -> dict[str, object]:
    """See `ClusterAddresses.replicas`."""
    return replica.addresses.replicas()


def set_door(
    scope: ReplicaScope,
    protocol: str,
    replica: int,
    address: HostPort | None = None,
    node_port: int | None = None,
    pid: int | None = None,
) -> dict[str, object]:
    """Take note of the door of a replica of this shard. Records of this replica name its own door's address.

    Args: `address`: where it listens; None: it has ended.
    """
    if address is None:
        scope.doors.forget(protocol, replica)
        return {}
    scope.doors.note(protocol, replica, address, node_port=node_port, pid=pid)
    if replica == scope.parts.options.replica_id:
        scope.parts.log.store_host = address
    return {}


def doors(replica: ReplicaScope) -> dict[str, Any]:
    """The servers of this shard, see `Doors.known`, and the replica that leads, as far as this one knows."""
    return {"leader": replica.parts.election_loop.leader_id, "doors": replica.doors.known()}


def topics(replica: ReplicaScope) -> dict[str, object]:
    """The topics that readers see."""
    state = replica.parts.store.state
    found: dict[str, Any] = {
        topic.name: topic.shown()
        for topic in state.confirmed_topics(replica.roles.role.visible_end)
    }
    for name in found.keys() & state.deleted_topics.keys():
        found[name]["generation"] = state.generation(name)
    return found


def config(replica: ReplicaScope) -> dict[str, object]:
    """The options that a cluster takes, as they are here, with what operators have set."""
    return {"options": option_facts(replica.parts.store, IN_CLUSTER)}


def check_record(
    replica: ReplicaScope, topic: str, queue_id: int, offset: int
) -> dict[str, object]:
    """Whether the message at an offset is whole here, or is mended now. Raises: Corrupt naming file and place."""
    store = replica.parts.store
    info = store.state.topics[check_known(topic, store.state.topics)]
    check_integer("queue_id", queue_id, 0, info.queues - 1)
    store.check_record(topic, queue_id, offset)
    return {}


# --- between replicas -----------------------------------------------------------------------------


def replica_id(replica: ReplicaScope) -> dict[str, object]:
    """Which replica this is: the answer proves that it can be called."""
    return {"replica": replica.parts.options.replica_id}


def elect(
    scope: ReplicaScope, frame: bytes, replica: int, endpoints: dict[int, str]
) -> dict[str, object]:
    """Take a message of another replica's elections.

    Args: `replica`: the sender. `endpoints`: replica -> where it listens, as the sender knows.
    """
    answers = scope.parts.election_loop.elect(frame)
    # After the message was taken: that of a replaced replica is refused, and so is its address.
    for each, endpoint in endpoints.items():
        scope.addresses.note(each, endpoint, is_own=each == replica)
    return {"frames": [each.hex() for each in answers]}


def log_units(replica: ReplicaScope, start: int, stop: int) -> dict[str, object]:
    """Log bytes for another replica whose own are damaged. Raises: Corrupt, if these are damaged, too."""
    return pack_sound_bytes(read_sound_bytes(replica.parts.log, start, stop))


def log_match(replica: ReplicaScope, candidates: list[tuple[int, int]]) -> dict[str, object]:
    """Up to where the log of another replica, with these (unit end, chain value), equals this one."""
    return {
        "candidate": find_match(replica.parts.log, candidates),
        "last_end": candidates[-1][0],
    }


# --- arguments ------------------------------------------------------------------------------------


def _frame(field: str, value: object) -> bytes:
    """A message of elections, which JSON has as hexadecimal text. Raises: Rejected."""
    try:
        return bytes.fromhex(check_name(field, value))
    except ValueError:
        raise wrong_value(field, value, "give bytes as hexadecimal text", "hexadecimal") from None


def _protocol(field: str, value: object) -> str:
    """The name of a protocol that has a server. Raises: Rejected for another one."""
    if value not in PROTOCOLS:
        known = ", ".join(PROTOCOLS)
        raise wrong_value(field, value, f"use {known}", known)
    return str(value)


def _address(field: str, value: object) -> HostPort:
    """An IP address and a port, of [address, port]. Raises: Rejected."""
    advice, limit = "give a list of an IP address and a port", "[address, port]"
    if type(value) is not list or len(value) != 2 or type(value[0]) is not str:
        raise wrong_value(field, value, advice, limit)
    host, port = value
    pack_host(host, check_integer(field, port, 1, 65_535))
    return host, port


def _endpoints(field: str, value: object) -> dict[int, str]:
    """replica -> endpoint. JSON has the replicas as text. Raises: Rejected."""
    advice, limit = "give replicas with their endpoints", "{replica: endpoint}"
    if type(value) is not dict:
        raise wrong_value(field, value, advice, limit)
    found = {}
    for replica, endpoint in value.items():
        is_number = type(replica) is str and replica.isascii() and replica.isdigit()
        if not is_number or len(replica) > 3 or type(endpoint) is not str:
            raise wrong_value(field, {replica: endpoint}, advice, limit)
        found[int(replica)] = endpoint
    return found


def _candidates(field: str, value: object) -> list[tuple[int, int]]:
    """Places in a log: lists of a unit's end, and the chain value after it. Raises: Rejected."""
    if type(value) is not list or not 0 < len(value) <= PROBE_LIMIT:
        raise wrong_value(field, value, f"give a list of 1 to {PROBE_LIMIT} places", PROBE_LIMIT)
    found = []
    for place in value:
        if type(place) is not list or len(place) != 2:
            raise wrong_value(field, place, "give lists of a unit's end and a chain value", 2)
        end, chain_value = place
        found.append(
            (check_integer(field, end), check_integer(field, chain_value, 0, _UNSIGNED_MAX))
        )
    return found


OPERATIONS = {
    "describe": operation(describe),
    "status": operation(status),
    "leader": operation(leader),
    "routes": operation(routes),
    "replicas": operation(replicas),
    "set_door": operation(
        set_door,
        protocol=_protocol,
        replica=integer(0, REPLICAS_MAX - 1),
        address=Argument(_address, is_optional=True),
        node_port=Argument(integer(1, 65_535), is_optional=True),
        pid=Argument(integer(1), is_optional=True),
    ),
    "doors": operation(doors),
    "topics": operation(topics),
    "config": operation(config),
    "check_record": operation(check_record, topic=check_name, queue_id=integer(), offset=integer()),
    "replica_id": operation(replica_id),
    "elect": operation(elect, frame=_frame, replica=integer(), endpoints=_endpoints),
    "log_units": operation(log_units, start=integer(), stop=integer()),
    "log_match": operation(log_match, candidates=_candidates),
}
