"""The nodes of replicas, and the checks of a replica before it opens its store."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from raymq.cluster.deploy import actor_set, node_labels, prepare_replica
from raymq.cluster.record import placement
from raymq.cluster.record.cluster_record import (
    StartOptions,
    load_record,
    new_record,
    resume_record,
    save_record,
)
from raymq.cluster.record.paths import ClusterPaths
from raymq.store.base.errors import Rejected, Unavailable
from raymq.store.base.files import Files
from raymq.store.log.control_files.meta import Meta
from tests.support.fake_ray import FakeRay


def fresh(**options: Any) -> Any:
    return new_record(StartOptions(**options))


# --- where replicas go ----------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [2, 3, 4, 5])
@pytest.mark.parametrize("shards", [1, 2, 3, 7, 24])
def test_a_follower_is_never_on_its_leaders_node_and_no_node_has_much_more(
    nodes: int, shards: int
) -> None:
    names = [f"n{i}" for i in range(nodes)]
    rows = placement.place_shards(names, shards, 2)
    assert all(leader != follower for leader, follower in rows)
    for replica in (0, 1):
        counts = [[row[replica] for row in rows].count(name) for name in names]
        assert sum(counts) == shards
        assert max(counts) - min(counts) <= (1 if replica == 0 else nodes - 1)


@pytest.mark.parametrize(("replicas", "nodes"), [(3, 3), (3, 4), (3, 7), (5, 5), (5, 6)])
def test_no_node_has_two_replicas_of_a_shard(replicas: int, nodes: int) -> None:
    names = [f"n{i}" for i in range(nodes)]
    rows = placement.place_shards(names, 24, replicas)
    assert all(len(row) == len(set(row)) == replicas for row in rows)
    counts = [sum(name in row for row in rows) for name in names]
    assert max(counts) <= 2 * min(counts)


def test_the_followers_of_one_nodes_leaders_are_on_all_the_others() -> None:
    rows = placement.place_shards(["a", "b", "c", "d"], 12, 2)
    assert {follower for leader, follower in rows if leader == "a"} == {"b", "c", "d"}


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        (["a", "a"], "twice"),
        (["a"], "2 nodes"),
        ([], "2 nodes"),
        (["a", "b c"], "letters"),
        (["a", "-b"], "letters"),
        (["a", "x" * 64], "letters"),
    ],
)
def test_a_list_of_nodes_that_cannot_be_is_refused(nodes: list[str], words: str) -> None:
    with pytest.raises(Rejected, match=words) as caught:
        placement.place_shards(nodes, 1, 2)
    assert caught.value.field == "nodes"


def test_the_placement_is_kept_and_a_later_start_cannot_change_it(tmp_path: Path) -> None:
    record = fresh(shards=3, nodes=["a", "b"])
    assert record.placement == (("a",), ("b",), ("a",))
    assert record.host == placement.NODE_HOST
    paths = ClusterPaths(tmp_path)
    save_record(paths, record, Files())
    stored = load_record(paths, Files())
    assert stored == record
    assert resume_record(record, StartOptions()) == record
    assert resume_record(record, StartOptions(nodes=["a", "b"])) == record
    with pytest.raises(Rejected, match="leave the option out"):
        resume_record(record, StartOptions(nodes=["a", "c"]))
    with pytest.raises(Rejected, match="leave the option out"):
        resume_record(fresh(), StartOptions(nodes=["a"]))


def test_a_single_address_is_none_for_several_nodes() -> None:
    with pytest.raises(Rejected, match="its own node's address"):
        fresh(nodes=["a"], host="192.0.2.5")
    assert fresh(nodes=["a"], host="0.0.0.0").host == "0.0.0.0"


def test_one_label_on_two_nodes_is_refused_and_a_missing_one_only_at_first() -> None:
    ray = FakeRay({node_labels.NODE_LABEL: "a"})
    assert node_labels.check_nodes(ray, ["a", "b"], first=False) == ["127.0.0.1"]
    with pytest.raises(Rejected, match="--labels raymq-node=b.* There are: a"):
        node_labels.check_nodes(ray, ["a", "b"], first=True)
    ray.others["n3"] = {node_labels.NODE_LABEL: "a"}
    with pytest.raises(Rejected, match="several nodes have the label raymq-node=a"):
        node_labels.check_nodes(ray, ["a"], first=False)


def test_every_role_of_a_replica_stays_with_its_disk(tmp_path: Path) -> None:
    ray = FakeRay({node_labels.NODE_LABEL: "a"})
    record = fresh(shards=2, replicas=2, nodes=["a", "b"])
    members, _ = actor_set.create(
        ray, record, actor_set.specs(record, ClusterPaths(tmp_path), "token", {})
    )
    for member in members:
        node = record.placement[member.shard][member.replica]
        assert ray.options[member.name]["label_selector"] == {node_labels.NODE_LABEL: node}


# --- the checks of a replica ----------------------------------------------------------------------


def spec(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    root = tmp_path / "data"
    return {
        "cluster_id": "ab" * 16,
        "shard": 0,
        "replica": 0,
        "candidates": (0,),
        "cluster_dir": str(root),
        "data_dir": str(root / "shard-0" / "replica-0"),
        "node": "a",
        "generation": 0,
        "formed": False,
        "ephemeral": True,
        "host": "127.0.0.1",
        "tls": False,
        "insecure": False,
        **changes,
    }


def make_store(found: dict[str, Any], **identity: Any) -> None:
    side = Path(found["data_dir"]) / "raymq"
    side.mkdir(parents=True)
    meta = Meta.open(side / "meta", files=Files())
    meta.update({name: found[name] for name in ("cluster_id", "shard", "replica")} | identity)
    meta.close()


def test_the_data_directory_is_made_private_where_the_actor_is(tmp_path: Path) -> None:
    address = prepare_replica.prepare_replica(spec(tmp_path), restarted=False)
    assert address == ("127.0.0.1", "127.0.0.1")
    assert os.stat(tmp_path / "data").st_mode & 0o777 == 0o700
    with pytest.raises(Rejected, match="ephemeral=True"):
        prepare_replica.prepare_replica(
            spec(tmp_path, cluster_dir="/tmp/none", ephemeral=False), restarted=False
        )


def test_a_directory_with_something_else_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "thesis.tex").write_text("")
    with pytest.raises(Rejected, match="not empty"):
        prepare_replica.prepare_replica(spec(tmp_path), restarted=False)


def test_a_replica_finds_its_own_store_again(tmp_path: Path) -> None:
    mine = spec(tmp_path, formed=True)
    make_store(mine)
    prepare_replica.prepare_replica(mine, restarted=True)


@pytest.mark.parametrize(
    ("name", "other"), [("cluster_id", "cd" * 16), ("shard", 1), ("replica", 1)]
)
def test_the_store_of_another_is_refused(name: str, other: Any, tmp_path: Path) -> None:
    mine = spec(tmp_path)
    make_store(mine, **{name: other})
    with pytest.raises(Rejected, match="is it the disk of another") as caught:
        prepare_replica.prepare_replica(mine, restarted=False)
    assert caught.value.field == name


def test_a_leader_does_not_begin_again_on_an_empty_disk(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="node a has no store"):
        prepare_replica.prepare_replica(spec(tmp_path, formed=True), restarted=False)
    with pytest.raises(Unavailable, match="mount its disk"):
        prepare_replica.prepare_replica(spec(tmp_path), restarted=True)
    # A follower gets everything from its leader again.
    follower = spec(tmp_path, formed=True, replica=1)
    prepare_replica.prepare_replica(follower, restarted=True)


def test_a_node_whose_address_others_reach_needs_tls_or_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_replica, "_node_address", lambda: "192.0.2.7")
    for host in (placement.NODE_HOST, "0.0.0.0"):
        with pytest.raises(Rejected, match="not encrypted"):
            prepare_replica.prepare_replica(spec(tmp_path, host=host), restarted=False)
        address = prepare_replica.prepare_replica(
            spec(tmp_path, host=host, tls=True), restarted=False
        )
        assert address.advertised == "192.0.2.7"
        assert address.bind == ("0.0.0.0" if host == "0.0.0.0" else "192.0.2.7")
