"""What `set_replicas` refuses, and what it writes down."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raymq.cluster.deploy import actor_set
from raymq.cluster.operations.set_replicas import check_number
from raymq.cluster.record.cluster_record import (
    ClusterRecord,
    StartOptions,
    load_record,
    resume_record,
    save_record,
)
from raymq.cluster.record.paths import ClusterPaths
from raymq.store.base.errors import Rejected
from raymq.store.base.files import Files
from tests.cluster.test_replace_replica import record


@pytest.mark.parametrize("replicas", [0, 1, 4, 6])
def test_a_number_of_replicas_that_cannot_be_is_refused(replicas: int) -> None:
    with pytest.raises(Rejected, match="can get 2, 3, 5 replicas") as caught:
        check_number(record(), replicas)
    assert caught.value.field == "replicas"


@pytest.mark.parametrize(("have", "wanted"), [(3, 5), (5, 3), (3, 2), (2, 3)])
def test_only_a_cluster_of_one_replica_gets_others(have: int, wanted: int) -> None:
    with pytest.raises(Rejected, match=f"has {have} replicas"):
        check_number(record(replicas=have), wanted)


@pytest.mark.parametrize("replicas", [2, 3, 5])
def test_a_growth_that_ended_early_may_be_repeated(replicas: int) -> None:
    check_number(record(), replicas)
    check_number(record().with_added_replicas(replicas, None), replicas)
    check_number(record(replicas=replicas), replicas)


def test_new_replicas_get_the_log_before_they_count() -> None:
    begun = record(shards=2).with_added_replicas(3, None)
    assert (begun.replicas, begun.voters, begun.candidates) == (3, (0,), (0,))
    assert begun.roles(0) == ("commit_log", "group_commit", "replication")
    assert begun.roles(1) == begun.roles(2) == ("commit_log", "group_commit")
    # Their directories are empty, and those of no lost replicas. That of the first one must be there.
    assert begun.generations == ((0, 1, 1), (0, 1, 1))
    assert begun.formed


def test_of_three_all_may_lead_when_they_count_and_of_two_the_first() -> None:
    for replicas, candidates in ((2, (0,)), (3, (0, 1, 2)), (5, (0, 1, 2, 3, 4))):
        ended = _ended(record().with_added_replicas(replicas, None))
        assert ended.voters == tuple(range(replicas))
        assert ended.candidates == candidates


def _ended(begun: ClusterRecord) -> ClusterRecord:
    return replace(begun, added_replicas=0)


def test_every_actor_is_told_which_replicas_count(tmp_path: Path) -> None:
    paths = ClusterPaths(str(tmp_path))
    begun = record().with_added_replicas(3, None)
    for found, voters in ((begun, (0,)), (_ended(begun), (0, 1, 2))):
        specs = actor_set.specs(found, paths, "token", {})
        assert {spec["voters"] for spec in specs} == {voters}


def test_a_later_start_goes_on_with_the_growth_and_cannot_begin_one(tmp_path: Path) -> None:
    paths, files = ClusterPaths(str(tmp_path)), Files()
    begun = record().with_added_replicas(3, None)
    save_record(paths, begun, files)
    stored = load_record(paths, files)
    assert stored == begun
    assert resume_record(stored, StartOptions()).voters == (0,)
    with pytest.raises(Rejected, match="raymq shard set-replicas"):
        resume_record(record(), StartOptions(replicas=3))


@pytest.mark.parametrize(
    ("options", "nodes", "field", "words"),
    [
        ({"transient_pool": True}, None, "transient_pool", "with 3 replicas"),
        ({}, ["a", "b", "c"], "nodes", "stays on one machine"),
        ({"nodes": ["a"]}, None, "nodes", "3 replicas need 3 nodes"),
        ({"nodes": ["a"]}, ["a", "b"], "nodes", "3 replicas need 3 nodes"),
        ({"nodes": ["a"]}, ["b", "c", "d"], "nodes", "the replicas on a stay"),
        ({"nodes": ["a"]}, ["a", "b", "b"], "nodes", "names a node twice"),
    ],
)
def test_options_that_do_not_go_with_more_replicas_are_refused(
    options: dict[str, Any], nodes: list[str] | None, field: str, words: str
) -> None:
    with pytest.raises(Rejected, match=words) as caught:
        record(**options).with_added_replicas(3, nodes)
    assert caught.value.field == field


def test_no_replica_moves_to_another_node_and_no_node_gets_two_of_a_shard() -> None:
    before = record(nodes=["a", "b"], shards=4)
    after = before.with_added_replicas(3, ["a", "b", "c", "d"])
    assert before.placement is not None
    assert after.placement is not None
    assert [row[0] for row in after.placement] == [node for (node,) in before.placement]
    assert all(len(set(row)) == 3 for row in after.placement)
    assert {node for row in after.placement for node in row} == {"a", "b", "c", "d"}
    assert after.nodes == ("a", "b", "c", "d")
