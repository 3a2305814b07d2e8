"""A follower process whose log begins where its leader's oldest file does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from raymq.actors.replica import open_replica
from raymq.actors.supervise.replica_host import ReplicaHost
from raymq.store.engine.message_store import MessageStore
from raymq.store.state.shard_state import CLEANUP_POLICY, COMPACTION
from tests.actors.test_maintenance import CONFIG, SIZE, fill
from tests.support.replica_pair import wait_until
from tests.support.roles import log_of


def leader_that_has_deleted(root: Path, *, compacted: bool) -> MessageStore:
    """A store whose first file is deleted."""
    store = MessageStore.open(root, config=CONFIG)
    store.topics.create("t", 1, [0])
    if compacted:
        store.topics.create("states", 1, [0], {CLEANUP_POLICY: COMPACTION})
    fill(store, 3)
    store.log.sync()
    store.log.note_confirmed(store.log.end)
    while store.dispatched < store.log.end:
        store.dispatch(store.log.end)
    store.log.delete_first()
    store.retention.forget_before(store.log.start)
    store.retention.delete_derived(store.log.start)
    return store


@pytest.fixture
def follower(tmp_path: Path) -> Iterator[ReplicaHost]:
    host = open_replica(
        tmp_path / "follower",
        CONFIG,
        identity={"cluster_id": "c", "shard": 0, "replica": 1, "incarnation": 1},
        roles=("group_commit",),
        members=(0, 1, 2),
        candidates=(0, 1, 2),
        is_new_complete=False,
    )
    yield host
    host.close(0.1)


@pytest.mark.parametrize("compacted", [False, True])
def test_it_serves_what_the_leader_has_and_says_if_compacted_messages_are_missing(
    tmp_path: Path, follower: ReplicaHost, compacted: bool
) -> None:
    leader = leader_that_has_deleted(tmp_path / "leader", compacted=compacted)
    port = log_of(follower)
    assert port.is_empty()
    units = leader.log.chain.units(leader.log.start, leader.log.end)
    port.begin_at(units[0].start, units[0].previous)
    for unit in units:
        port.append_units([unit], memoryview(leader.log.reads.raw(unit.start, unit.end)))
    follower.log.sync()
    port.note_progress()
    port.advance_confirmed(leader.log.end)
    wait_until(lambda: follower.store.dispatched == leader.log.end, "all is dispatched")

    assert follower.log.start == SIZE
    assert follower.store.queue_range("t", 0) == leader.queue_range("t", 0)
    assert follower.store.lacks_compacted == compacted
    assert ("compaction" in follower.status()["failures"]) == compacted
    leader.abandon()
