"""Operations on the shard itself: who leads, what was lost, the other shards of the cluster, old files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raymq.actors.api import call_arguments
from raymq.actors.api.operations import integer, operation
from raymq.store.config.store_config import WHILE_RUNNING, check_in_cluster
from raymq.store.put.inner_message import ServiceProgress
from raymq.store.put.option_records import option_facts
from raymq.store.records.requests import AppendedRows
from raymq.store.state.shard_state import SHARDS, UNCLEAN_RECOVERIES
from raymq.store.state.topics import is_system_topic

from .scope import LeaderScope, created_shards, joined_shards

#: of the name of an operator, which stays in the state
OPERATOR_CHARACTERS_MAX = 200


def move_leader(leader: LeaderScope, replica: int) -> dict[str, object]:
    """Let another replica lead, once its log has all of this one."""
    leader.check_serving()
    leader.parts.election_loop.hand_over(replica)
    return {}


def note_unclean_recovery(leader: LeaderScope, facts: Mapping[str, object]) -> dict[str, object]:
    """Write into the log what an operator gave up. Args: `facts`: as of `cluster.recover_shard`."""
    leader.check_serving()
    store, key = leader.store, str(facts["at_ms"])
    if key not in store.state.progress.get(UNCLEAN_RECOVERIES, {}):
        store.put_inner([], progress=ServiceProgress(UNCLEAN_RECOVERIES, {key: facts}))
        # Not awaited: as long as the successors copy the log, no majority confirms anything.
        leader.publish(AppendedRows.up_to(store.log.end))
    return {}


def note_shards(leader: LeaderScope, known: int, joined: int) -> dict[str, object]:
    """Note in the log that the cluster has more shards. Returns: all topics that were created before that.

    Args: `known`: so many exist. `joined`: so many know every topic. From now on each answer to `create_topic`
    names that number, so that its caller creates the topic there, too.
    """
    leader.check_serving()
    call_arguments.check_integer("joined", joined, 1, known)
    noted = leader.store.state.progress.get(SHARDS, {})
    wanted = {
        name: max(number, noted.get(name, 0))
        for name, number in (("known", known), ("joined", joined))
    }
    # A consumer group stays with its coordinator (groups.find_coordinator).
    wanted["created"] = created_shards(leader)
    if wanted != noted:
        leader.store.put_inner([], progress=ServiceProgress(SHARDS, wanted))

    # The record of an earlier call may still wait for a follower that is away, and so may topics.
    leader.await_promise(AppendedRows.up_to(leader.store.log.end))
    topics: dict[str, dict[str, Any]] = {
        info.name: {
            "queues": info.queues,
            "shards": list(info.shards),
            "attributes": dict(info.attributes),
            "former_queues": list(info.former_queues),
            "hidden_queues": info.hidden_queues,
        }
        for info in list(leader.store.state.topics.values())
        if not is_system_topic(info.name)
    }
    for name in topics.keys() & leader.store.state.deleted_topics.keys():
        topics[name]["generation"] = leader.store.state.generation(name)
    return {"topics": topics}


def set_config(leader: LeaderScope, values: dict[str, Any], by: str) -> dict[str, object]:
    """Set options of the store while it is open. Args: `by`: the operator. Returns: what `config` says of them."""
    leader.check_serving()
    store = leader.store
    store.options.set(values, by=by)
    # The record of an earlier call may still wait for a follower that is away.
    leader.await_promise(AppendedRows.up_to(store.log.end))
    return {"options": option_facts(store, values), "shards": joined_shards(leader)}


def delete_expired_files(leader: LeaderScope) -> dict[str, object]:
    """Delete expired files now. Source: TRIGGER_DELETE_FILES (27)."""
    leader.parts.maintenance.delete_now()
    return {}


def _recovery_facts(field: str, value: object) -> dict[str, object]:
    """An object with the time of the recovery. Raises: Rejected."""
    if type(value) is not dict:
        raise call_arguments.wrong_value(field, value, "give an object", "{at_ms, ...}")
    call_arguments.check_integer("at_ms", value.get("at_ms"), 0)
    return value


def _options(field: str, value: object) -> dict[str, Any]:
    """Options that may change while a store is open, with values that it takes. Raises: Rejected."""
    if type(value) is not dict or not value:
        raise call_arguments.wrong_value(
            field, value, "give options with their values", "{name: value}"
        )
    for name, each in value.items():
        if name not in WHILE_RUNNING:
            advice, limit = "name an option that may change while the cluster runs", "an option"
            raise call_arguments.wrong_value(field, name, advice, limit)
        check_in_cluster(WHILE_RUNNING[name], each)
    return value


def _operator(field: str, value: object) -> str:
    """A name for the audit. Raises: Rejected."""
    name = call_arguments.check_name(field, value)
    if len(name) > OPERATOR_CHARACTERS_MAX:
        limit = OPERATOR_CHARACTERS_MAX
        raise call_arguments.wrong_value(field, value, f"use at most {limit} characters", limit)
    return name


OPERATIONS = {
    "move_leader": operation(move_leader, replica=integer()),
    "note_unclean_recovery": operation(note_unclean_recovery, facts=_recovery_facts),
    "note_shards": operation(
        note_shards,
        known=integer(1, call_arguments.SHARDS_MAX),
        joined=integer(1, call_arguments.SHARDS_MAX),
    ),
    "set_config": operation(set_config, values=_options, by=_operator),
    "delete_expired_files": operation(delete_expired_files),
}
