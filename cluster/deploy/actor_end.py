"""Ending the Ray actors of one cluster, in the order in which they need each other.

Functions over an initialised `ray` module.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType

from raymq.client.transport.actor_names import (
    NAMESPACE,
    actor_name,
    coordinator_name,
)
from raymq.cluster.record.cluster_record import ClusterRecord
from raymq.store.base.clock import Clock
from raymq.store.base.errors import RayMQError, Unavailable

from . import node_labels
from .actor_states import (
    CLOSING_RANK,
    DOOR_ROLES,
    LOOKUP_TIMEOUT_S,
    Member,
    actor_names,
    all_actor_keys,
    ask_all,
    find,
    leaders_of,
    node_of,
)

logger = logging.getLogger("raymq")

#: how long a door may take to send its clients away
DOOR_CLOSE_S = 5.0
#: how a stop says that it killed a satellite whose CommitLog did not close. The next start recovers the log
WITHOUT_COMMIT_LOG = "its CommitLog did not close; ended"


def end_replica(
    ray: ModuleType, record: ClusterRecord, shard: int, replica: int, *, clock: Clock
) -> None:
    """End all actors of one replica without an orderly close, and wait until Ray has forgotten them.

    Raises: Unavailable when Ray does not end one.
    """
    keys = [key for key in all_actor_keys(record) if key[:2] == (shard, replica)]
    members = find(ray, record.name, keys)
    for member in members:
        ray.kill(member.handle, no_restart=True)
    _wait_gone(ray, record.name, members, clock)


def end_doors(
    ray: ModuleType, record: ClusterRecord, *, clock: Clock, for_good: bool = False
) -> None:
    """End the servers for foreign clients, and wait until Ray has forgotten them.

    Args: `for_good`: the cluster has none from now on. Raises: Unavailable when Ray does not end one.
    """
    keys = [key for key in all_actor_keys(record) if key[2] in DOOR_ROLES]
    members = find(ray, record.name, keys)
    calls = [member.handle.close.remote(DOOR_CLOSE_S / 2, for_good=for_good) for member in members]
    deadline_s = clock.monotonic() + DOOR_CLOSE_S
    for member, call in zip(members, calls, strict=True):
        outcome = _outcome(ray, call, clock, deadline_s)
        if outcome != "closed":
            logger.warning("%s: %s", member.name, outcome)
        ray.kill(member.handle, no_restart=True)
    _wait_gone(ray, record.name, members, clock)


def close_replica(
    ray: ModuleType,
    record: ClusterRecord,
    shard: int,
    replica: int,
    *,
    clock: Clock,
    timeout_s: float,
) -> None:
    """Close the actors of one replica in order, end them, and wait until Ray has forgotten them.

    Raises: Unavailable when Ray does not end one.
    """
    keys = [key for key in all_actor_keys(record) if key[:2] == (shard, replica)]
    members = sorted(find(ray, record.name, keys), key=lambda each: CLOSING_RANK[each.role])
    for member in members:
        if member.role == "commit_log":
            call = member.handle.close.remote(timeout_s / 2)
            outcome = _outcome(ray, call, clock, clock.monotonic() + timeout_s)
            if outcome != "closed":
                logger.warning("%s: %s", member.name, outcome)
        ray.kill(member.handle, no_restart=True)
    _wait_gone(ray, record.name, members, clock)


def close(
    ray: ModuleType, record: ClusterRecord, *, clock: Clock, timeout_s: float
) -> dict[str, str]:
    """Close every actor in order, end it, and wait until Ray has forgotten it.

    The caller has ended the controller, which would make them again. First come doors, then leaders: they answer
    waiting calls and sync the rest of the log, for which the satellites must still run and followers must answer. Then
    followers, then satellites. Coordinators of durable queues come last and lose nothing. A waiting getter asks for a
    new one at once, and is refused only when the shards have ended.

    Args: `timeout_s`: how long the orderly close of all CommitLogs may take, of which leaders leave half to followers.
    Returns: actor name -> "closed" or why it was ended without an orderly close.
    """
    outcomes: dict[str, str] = {}
    members = find(ray, record.name, all_actor_keys(record))
    present = node_labels.present(ray) if record.placement else {}

    leaders = _leading(ray, record, members, present, clock)

    def rank(member: Member) -> tuple[int, int]:
        """The order of closing: within a role leaders before followers."""
        return CLOSING_RANK[member.role], int(member.name not in leaders)

    deadline_s = clock.monotonic() + timeout_s
    waves_left = len({rank(member) for member in members if member.role == "commit_log"})
    for _, group in itertools.groupby(sorted(members, key=rank), key=rank):
        wave, calls = list(group), []
        # Leaders that hang leave time to followers, which would otherwise be ended without a try.
        wave_s = max(0.0, deadline_s - clock.monotonic()) / max(1, waves_left)
        wave_deadline_s = clock.monotonic() + wave_s
        if wave[0].role in DOOR_ROLES:
            wave_s, wave_deadline_s = DOOR_CLOSE_S, clock.monotonic() + DOOR_CLOSE_S
        else:
            waves_left -= 1
        for member in wave:
            node = node_of(record, member.shard, member.replica)
            if node is not None and node not in present:
                outcomes[member.name] = f"its node {node} is away; ended"
                continue
            if member.role == "commit_log" or member.role in DOOR_ROLES:
                calls.append((member, member.handle.close.remote(wave_s / 2)))
            else:
                # A CommitLog that closes syncs everything itself, and lets its satellites finish.
                log = actor_name(record.name, member.shard, member.replica, "commit_log")
                outcomes[member.name] = (
                    "closed" if outcomes.get(log) == "closed" else WITHOUT_COMMIT_LOG
                )

        for member, call in calls:
            outcomes[member.name] = _outcome(ray, call, clock, wave_deadline_s)
        for member in wave:
            # `kill` ends the process and frees the name. After close() alone Ray would restart the actor.
            ray.kill(member.handle, no_restart=True)

    _wait_gone(ray, record.name, members, clock)
    coordinators = coordinator_name(record.name, "")
    for name in actor_names(ray):
        if not name.startswith(coordinators):
            continue
        with contextlib.suppress(ValueError):
            ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)
        outcomes[name] = "closed"

    return outcomes


def _leading(
    ray: ModuleType,
    record: ClusterRecord,
    members: list[Member],
    present: Mapping[str, object],
    clock: Clock,
) -> set[str]:
    """The actors of replicas that lead, all roles of them."""
    led = {(shard, 0) for shard in range(record.shards)}
    if len(record.candidates) > 1:
        logs = [
            replace(each, node=node_of(record, each.shard, each.replica))
            for each in members
            if each.role == "commit_log"
        ]
        asked = [each for each in logs if each.node is None or each.node in present]
        states = {
            each.name: state
            for each, state in ask_all(ray, asked, clock, int(LOOKUP_TIMEOUT_S * 1000))
        }
        led = {(each.shard, each.replica) for each in leaders_of(asked, states).values()}
    return {each.name for each in members if (each.shard, each.replica) in led}


def _outcome(ray: ModuleType, call: object, clock: Clock, deadline_s: float) -> str:
    """How the call of `close` of a CommitLog ended: "closed", or why it did not close."""
    try:
        ray.get(call, timeout=max(0.0, deadline_s - clock.monotonic()))
    except ray.exceptions.GetTimeoutError:
        return "did not close in time; ended"
    except ray.exceptions.RayActorError as error:
        return f"was down: {str(error).strip().splitlines()[0]}"
    except (RayMQError, ray.exceptions.RayTaskError) as error:
        return f"failed to close: {str(error).strip().splitlines()[-1]}"
    return "closed"


def _wait_gone(ray: ModuleType, cluster: str, members: list[Member], clock: Clock) -> None:
    deadline_ms = clock.monotonic_ms() + 10_000
    for member in members:
        while find(ray, cluster, [(member.shard, member.replica, member.role)]):
            if clock.monotonic_ms() > deadline_ms:
                raise Unavailable(f"Ray has not ended the actor {member.name} within 10 s")
            clock.sleep_ms(50)
