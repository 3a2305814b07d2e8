"""A shard that has lost two of three replicas for good goes on with what is left, when its operator says so."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator

import pytest

from raymq.cluster.operations.recover_shard import EPOCHS_SKIPPED
from raymq.store.base.errors import Rejected
from tests.ray.test_replace_replica import World, started_world
from tests.support.replicated_shard import pause
from tests.support.waiting import until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180), pytest.mark.thorough]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with started_world(["a", "b", "c", "d", "e"]) as world:
        yield world


def test_a_shard_that_can_elect_needs_no_recovery(world: World) -> None:
    with pytest.raises(Rejected, match="leads it"):
        world.cluster.plan_recovery(0)


def test_a_survivor_leads_after_two_nodes_and_their_disks_are_gone(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(5):
        world.send()
    # The node a has Ray's head.
    survivor, lost = 0, [1, 2]
    world.cluster.move_leader(0, 1)
    world.send()
    end = world.rows()[world.leader()]["confirmed"]
    until(lambda: world.rows()[survivor]["synced"] >= end, pause)
    for replica in lost:
        world.nodes.remove("abc"[replica])
        shutil.rmtree(world.paths.replica(0, replica))

    plan = world.cluster.plan_recovery(0)
    assert plan.lost_replicas == lost
    assert [row["replica"] for row in plan.survivors] == [survivor]
    with pytest.raises(Rejected, match=f"has replica {survivor}"):
        world.cluster.plan_recovery(0, nodes={lost[0]: "abc"[survivor]})
    with pytest.raises(Rejected, match="has replica 1 of shard 0"):
        world.cluster.plan_recovery(0, nodes=dict.fromkeys(lost, "d"))
    before = world.record()
    with pytest.raises(Rejected, match="no node of this Ray has the label"):
        world.cluster.recover_shard(plan, accept_loss=True, nodes={lost[0]: "d"})
    assert world.record() == before

    places = dict(zip(lost, "de", strict=True))
    with caplog.at_level(logging.WARNING, logger="raymq"):
        world.cluster.recover_shard(plan, accept_loss=True, nodes=places, timeout_s=90)
        world.send()
        assert world.read() == world.sent
    assert "DATA-LOSS-POSSIBLE" in caplog.text

    rows = world.rows()
    assert all(row["is_complete"] for row in rows.values())
    assert rows[survivor]["epoch"] > EPOCHS_SKIPPED
    # It is in the log, and so on every replica that has dispatched it.
    until(lambda: all(row["unclean_recoveries"] for row in world.rows().values()), pause)
    (facts,) = world.rows()[lost[0]]["unclean_recoveries"]
    assert facts["lost"] == lost
    assert world.record()["unclean_recoveries"] == [facts]


def test_the_successors_lead_and_count(world: World) -> None:
    successor = world.follower()
    world.cluster.move_leader(0, successor)
    world.send()
    assert world.read() == world.sent
    with pytest.raises(Rejected, match="leads it"):
        world.cluster.plan_recovery(0)
    # An interrupted recovery may not have written into the log. The next call does, once.
    assert len(world.rows()[successor]["unclean_recoveries"]) == 1
