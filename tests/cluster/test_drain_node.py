"""Which leaderships `drain_node` hands over, to which replicas, and when it gives up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raymq.client import replica_status
from raymq.cluster.operations.drain_node import DrainReport, drain_node
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Rejected, Unavailable

PLACEMENT = (("a", "b", "c"), ("b", "c", "a"), ("a", "c", "d"))


class JumpingClock(Clock):
    """Sleeps in no time at all."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic_ms(self) -> int:
        return int(self.now)

    def sleep_ms(self, ms: float) -> None:
        self.now += ms


class Shards:
    """Shards whose leaders a test changes."""

    def __init__(self, placement: Any = PLACEMENT) -> None:
        self.leaders = dict.fromkeys(range(3), 0)
        self.facts: dict[tuple[int, int], dict[str, Any]] = {}
        self.refusing: set[int] = set()
        self.asked: list[tuple[int, int]] = []
        self.cluster: Any = SimpleNamespace(placement=placement, replicas=3, data_dir=None)

    def statuses(self, cluster: Any, shard: int | None = None) -> list[dict[str, Any]]:
        return [
            {
                "shard": each,
                "replica": replica,
                "mode": "leader" if self.leaders[each] == replica else "follower",
                "state": "RUNNING",
                "is_complete": True,
                "epoch": 1,
                "synced": 100,
                **self.facts.get((each, replica), {}),
            }
            for each in range(3)
            for replica in range(3)
        ]

    def move_leader(
        self, cluster: Any, shard: int, replica: int, *, pause: Callable[[float], None]
    ) -> None:
        self.asked.append((shard, replica))
        if replica in self.refusing:
            pause(15)
            raise Unavailable(f"replica {replica} does not lead shard {shard}")
        self.leaders[shard] = replica

    def drain(self, node: str) -> DrainReport:
        self.lines: list[str] = []
        return drain_node(self.cluster, node, progress=self.lines.append, clock=JumpingClock())


@pytest.fixture
def shards(monkeypatch: pytest.MonkeyPatch) -> Shards:
    made = Shards()
    monkeypatch.setattr(replica_status, "statuses", made.statuses)
    monkeypatch.setattr(replica_status, "move_leader", made.move_leader)
    return made


def test_each_leadership_of_a_node_goes_elsewhere_and_its_followers_are_named(
    shards: Shards,
) -> None:
    report = shards.drain("a")
    assert report.moved == {0: 1, 2: 1}
    assert report.followers == [(0, 0), (1, 2), (2, 0)]
    assert shards.leaders == {0: 1, 1: 0, 2: 1}
    assert shards.lines == ["shard 0: replica 1 leads", "shard 2: replica 1 leads"]


def test_a_node_that_leads_nothing_is_left_as_it_is(shards: Shards) -> None:
    assert shards.drain("d") == DrainReport(node="d", moved={}, followers=[(2, 2)])
    assert shards.asked == []


def test_only_complete_replicas_that_run_are_asked_and_the_most_recent_one_first(
    shards: Shards,
) -> None:
    shards.facts = {
        (0, 1): {"is_complete": False},
        (2, 1): {"synced": 90},
    }
    assert shards.drain("a").moved == {0: 2, 2: 2}


def test_a_replica_that_does_not_take_over_is_followed_by_another_try(shards: Shards) -> None:
    shards.refusing = {1}
    assert shards.drain("a").moved == {0: 2, 2: 2}
    assert "shard 0: replica 1 does not lead shard 0" in shards.lines


def test_a_node_that_leads_to_the_end_of_the_time_is_an_error(shards: Shards) -> None:
    shards.facts = {(0, 1): {"state": "READ_ONLY"}, (0, 2): {"state": "DOWN"}}
    with pytest.raises(Unavailable, match=r"still leads shard\(s\) 0: no other replica"):
        shards.drain("a")
    assert shards.leaders[2] == 1
    assert shards.lines.count("shard 0: waiting for a complete replica on another node") == 1


def test_a_node_without_a_replica_is_refused(shards: Shards) -> None:
    with pytest.raises(Rejected, match="some: a, b, c, d") as caught:
        shards.drain("z")
    assert caught.value.field == "node"


def test_a_cluster_on_one_machine_has_no_node_to_drain(shards: Shards) -> None:
    shards.cluster.placement = None
    with pytest.raises(Rejected, match="on one machine"):
        shards.drain("a")


def test_leaderships_that_no_other_replica_can_take_are_refused(shards: Shards) -> None:
    shards.cluster.replicas = 2
    with pytest.raises(Rejected, match=r"leads shard\(s\) 0, 2, and of 2 replica"):
        shards.drain("a")
    assert shards.asked == []
    # A node of followers can go at any time.
    assert shards.drain("d").moved == {}


def test_a_node_is_drained_although_the_record_of_the_cluster_is_lost(
    shards: Shards, tmp_path: Path
) -> None:
    shards.cluster.data_dir = str(tmp_path)
    assert shards.drain("a").moved == {0: 1, 2: 1}
