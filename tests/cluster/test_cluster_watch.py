"""What a controller concludes from rows of replicas over time."""

from __future__ import annotations

from typing import Any

import pytest

from raymq.cluster.controller.cluster_watch import (
    LAG_S,
    QUIET_S,
    STEADY_S,
    ClusterWatch,
    Move,
    ReplicaFacts,
)

STEP_S = 2.0


class World:
    """Shards of three replicas. Replica 0 leads each of them at first; a test changes rows and lets time pass."""

    def __init__(self, shards: int = 1) -> None:
        self.now_s = 100.0
        self.watch = ClusterWatch()
        self.rows = {
            (shard, replica): ReplicaFacts(
                shard, replica, "RUNNING", replica == 0, 1, True, 1000, 10 * shard + replica + 1
            )
            for shard in range(shards)
            for replica in range(3)
        }
        self.forbidden: set[tuple[int, int]] = set()
        self.suggested: list[Move] = []
        self.look()

    def set(self, replica: int, shard: int = 0, **facts: Any) -> None:
        self.rows[shard, replica] = self.rows[shard, replica]._replace(**facts)

    def look(self, seconds: float = STEP_S) -> None:
        """Let time pass, with a look every STEP_S."""
        for _ in range(int(seconds / STEP_S)):
            self.now_s += STEP_S
            self.watch.observe(self.now_s, self.rows.values())
            move = self.watch.suggest(lambda *each: each not in self.forbidden)
            if move is not None:
                self.suggested.append(move)

    def elect(self, leader: int, shard: int = 0) -> None:
        """Let another replica lead in the next epoch. One that does not answer hears nothing of it."""
        epoch = max(row.epoch for key, row in self.rows.items() if key[0] == shard) + 1
        for replica in range(3):
            if self.rows[shard, replica].is_running:
                self.set(replica, shard, leads=replica == leader, epoch=epoch)

    def crash(self, replica: int, shard: int = 0) -> None:
        self.set(replica, shard, state="DOWN", leads=False, is_complete=False, pid=None)

    def restart(self, replica: int, shard: int = 0) -> None:
        epoch = max(row.epoch for row in self.rows.values())
        pid = 100 + int(self.now_s)
        self.set(replica, shard, state="RUNNING", is_complete=True, pid=pid, epoch=epoch)

    def fail_over(self, shard: int = 0) -> None:
        """Replica 0 is lost, replica 1 leads, replica 0 is back as a follower."""
        self.crash(0, shard)
        self.look()
        self.elect(1, shard)
        self.look()
        self.restart(0, shard)
        self.look()

    def metric(self, name: str) -> Any:
        return self.watch.metrics()[f"raymq_{name}"]


# --- metrics --------------------------------------------------------------------------------------


def test_a_whole_cluster_lacks_nothing() -> None:
    world = World(shards=2)
    world.look(60)
    assert world.watch.leaders() == {0: 0, 1: 0}
    assert world.watch.metrics() == {
        "raymq_shards_without_leader": 0,
        "raymq_shard_without_leader_seconds": {("0",): 0, ("1",): 0},
        "raymq_under_replicated_shards": 0,
        "raymq_down_replicas": 0,
        "raymq_incomplete_replicas": 0,
        "raymq_leader_changes_total": {("0",): 0, ("1",): 0},
    }
    assert world.suggested == []


def test_the_time_without_a_leader_grows_until_another_one_leads() -> None:
    world = World(shards=2)
    world.crash(0)
    world.look()
    assert world.metric("shards_without_leader") == 1
    world.look(6)
    assert world.metric("shard_without_leader_seconds") == {("0",): 6, ("1",): 0}
    assert world.watch.leaders() == {1: 0}
    world.elect(2)
    world.look()
    assert world.metric("shards_without_leader") == 0
    assert world.metric("shard_without_leader_seconds") == {("0",): 0, ("1",): 0}
    assert world.metric("leader_changes_total") == {("0",): 1, ("1",): 0}


def test_a_leader_that_begins_another_epoch_is_no_change() -> None:
    world = World()
    world.crash(0)
    world.look()
    world.restart(0)
    world.elect(0)
    world.look()
    assert world.watch.leaders() == {0: 0}
    assert world.metric("leader_changes_total") == {("0",): 0}


def test_a_leader_of_an_older_epoch_leads_no_more() -> None:
    world = World()
    # Replica 0 is cut off from the others, and not from the controller.
    for replica in (1, 2):
        world.set(replica, leads=replica == 1, epoch=2)
    world.look()
    assert world.watch.leaders() == {0: 1}
    world.crash(1)
    world.look()
    assert world.watch.leaders() == {}


def test_a_leader_that_only_reads_does_not_count() -> None:
    world = World()
    world.set(0, state="READ_ONLY")
    world.look()
    assert world.metric("shards_without_leader") == 1
    assert world.metric("down_replicas") == 1


@pytest.mark.parametrize(
    ("facts", "down", "incomplete"),
    [
        ({"state": "DOWN", "is_complete": False}, 1, 0),
        ({"state": "MISSING", "is_complete": False}, 1, 0),
        ({"is_complete": False}, 0, 1),
    ],
)
def test_a_replica_that_does_not_count_makes_its_shard_under_replicated(
    facts: dict[str, Any], down: int, incomplete: int
) -> None:
    world = World(shards=2)
    world.set(2, shard=1, **facts)
    world.look()
    assert world.metric("under_replicated_shards") == 1
    assert world.metric("down_replicas") == down
    assert world.metric("incomplete_replicas") == incomplete


def test_a_replica_lags_that_lacks_for_long_what_its_leader_had_confirmed() -> None:
    world = World()
    for second in range(int(LAG_S / STEP_S) + 2):
        # Under load the answers of one look are never equal.
        world.set(0, confirmed=2000 + 1000 * second)
        world.set(1, confirmed=1900 + 1000 * second)
        world.look()
        late = second * STEP_S >= LAG_S
        assert world.metric("under_replicated_shards") == late, second
    world.set(2, confirmed=world.rows[0, 1].confirmed)
    world.look()
    assert world.metric("under_replicated_shards") == 0


def test_what_an_earlier_leader_had_confirmed_is_no_measure() -> None:
    world = World()
    world.look(20)
    world.set(0, confirmed=9000)
    world.look(20)
    assert world.metric("under_replicated_shards") == 1
    world.crash(0)
    world.elect(1)
    world.look()
    world.restart(0)
    world.look(20)
    # The followers have all that the new leader had confirmed ten seconds ago.
    assert world.metric("under_replicated_shards") == 0


# --- suggestions ----------------------------------------------------------------------------------


def test_a_lost_leader_gets_its_leadership_back_when_all_has_been_quiet() -> None:
    world = World()
    world.fail_over()
    world.look(QUIET_S - STEP_S)
    assert world.suggested == []
    world.look()
    assert world.suggested == [Move(0, 0, 1)]


@pytest.mark.parametrize(
    "facts", [{"state": "DOWN"}, {"is_complete": False}, {"confirmed": 1}, {"pid": 77}]
)
def test_nothing_is_suggested_while_anything_changes_or_lacks(facts: dict[str, Any]) -> None:
    world = World(shards=2)
    for row in range(3):
        world.set(row, confirmed=5000)
        world.set(row, shard=1, confirmed=5000)
    world.look(20)
    world.fail_over()
    world.look(QUIET_S - STEP_S)
    world.set(2, shard=1, **facts)
    world.look(QUIET_S - STEP_S)
    assert world.suggested == []


def test_an_operators_move_stays() -> None:
    world = World()
    world.elect(2)
    world.look(1000)
    assert world.suggested == []
    # Also after the new leader was lost: it is home now.
    world.crash(2)
    world.elect(0)
    world.look()
    world.restart(2)
    world.look(QUIET_S + STEP_S)
    assert world.suggested == [Move(0, 2, 0)]


def test_a_node_that_was_drained_and_restarted_gets_nothing_back() -> None:
    world = World()
    world.elect(1)
    world.look()
    world.crash(0)
    world.look(60)
    world.restart(0)
    world.look(1000)
    assert world.suggested == []


def test_a_leader_whose_process_was_replaced_between_two_looks_was_lost() -> None:
    world = World()
    world.elect(1)
    world.restart(0)
    world.look(QUIET_S + STEP_S)
    assert world.suggested == [Move(0, 0, 1)]


def test_one_move_is_suggested_at_a_time() -> None:
    world = World(shards=3)
    for shard in range(2):
        world.fail_over(shard)
    world.look(QUIET_S)
    assert world.suggested == [Move(0, 0, 1)]
    world.elect(0)
    world.look(QUIET_S)
    assert len(world.suggested) == 1
    world.look()
    assert world.suggested[1:] == [Move(1, 0, 1)]


def test_a_suggestion_that_was_refused_is_repeated_after_the_same_time() -> None:
    world = World()
    world.fail_over()
    world.look(QUIET_S)
    world.look(QUIET_S - STEP_S)
    assert world.suggested == [Move(0, 0, 1)]
    world.look()
    assert world.suggested == [Move(0, 0, 1)] * 2


def test_a_replica_that_may_not_lead_is_not_suggested() -> None:
    world = World(shards=2)
    world.fail_over(0)
    world.fail_over(1)
    world.forbidden = {(0, 0)}
    world.look(QUIET_S)
    assert world.suggested == [Move(1, 0, 1)]


def test_a_replica_that_is_lost_again_soon_after_its_return_is_home_no_more() -> None:
    world = World()
    for returned_for_s in (STEADY_S, STEADY_S / 2):
        world.suggested.clear()
        world.fail_over()
        world.look(QUIET_S)
        assert world.suggested == [Move(0, 0, 1)]
        world.elect(0)
        world.look(returned_for_s)
    world.suggested.clear()
    world.fail_over()
    world.look(10 * QUIET_S)
    assert world.suggested == []


def test_a_new_watch_suggests_nothing_for_what_it_did_not_see() -> None:
    world = World()
    world.fail_over()
    world.watch = ClusterWatch()
    world.look(1000)
    assert world.suggested == []
