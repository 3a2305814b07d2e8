"""What `replace_replica` refuses, what it writes down, and the directory that the new replica gets."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raymq.actors.ray.replica_files import generation_of
from raymq.cluster.deploy import actor_set
from raymq.cluster.deploy.node_labels import NODE_LABEL
from raymq.cluster.deploy.replaced_store import take_place
from raymq.cluster.operations import context
from raymq.cluster.operations import replace_replica as replacing
from raymq.cluster.operations.context import ELECTION_WAIT_MS, await_leader, check_compacted
from raymq.cluster.operations.replace_replica import check_place, check_replaceable
from raymq.cluster.record.cluster_record import (
    ClusterRecord,
    StartOptions,
    load_record,
    new_record,
    resume_record,
    save_record,
)
from raymq.cluster.record.paths import ClusterPaths
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Rejected, Unavailable
from raymq.store.base.files import Files
from tests.support.clock import ManualClock
from tests.support.fake_ray import FakeRay

#: 2026-11-24, 18:00:00 UTC
NOW_MS = 1_795_543_200_000


def record(**options: Any) -> ClusterRecord:
    return new_record(StartOptions(**options))


def rows(**changes: Any) -> list[dict[str, Any]]:
    """Three replicas, of which replica 0 leads. Args: `changes`: of replica 0, 1 or 2, as r0, r1, r2."""
    found = []
    for replica in range(3):
        row = {
            "shard": 0,
            "replica": replica,
            "mode": "leader" if replica == 0 else "follower",
            "state": "RUNNING",
            "is_complete": True,
            "epoch": 4,
            "min_offset": 0,
        }
        found.append({**row, **changes.get(f"r{replica}", {})})
    return found


DOWN = {"mode": None, "state": "DOWN"}
#: a row of a replica that does not answer has no such field
SILENT = {**DOWN, "is_complete": None}


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "shard", "replica", "node", "field", "words"),
    [
        ({"replicas": 3, "shards": 2}, 2, 1, None, "shard", "has 0 to 1"),
        ({"replicas": 3}, 0, 3, None, "replica", "has 0 to 2"),
        ({"replicas": 1}, 0, 0, None, "replica", "led by this replica only"),
        ({"replicas": 2}, 0, 0, None, "replica", "led by this replica only"),
        ({"replicas": 3}, 0, 1, "b", "node", "on one machine"),
        ({"replicas": 3, "nodes": ["a", "b", "c"]}, 0, 1, "c", "node", "has replica 2"),
        ({"replicas": 3, "nodes": ["a", "b", "c"]}, 0, 1, "b c", "nodes", "letters"),
    ],
)
def test_a_place_that_cannot_be_is_refused(
    options: dict[str, Any], shard: int, replica: int, node: str | None, field: str, words: str
) -> None:
    with pytest.raises(Rejected, match=words) as caught:
        check_place(record(**options), shard, replica, node)
    assert caught.value.field == field


def test_the_follower_of_two_and_a_node_that_is_new_are_accepted() -> None:
    check_place(record(replicas=2), 0, 1, None)
    placed = record(replicas=3, nodes=["a", "b", "c"])
    check_place(placed, 0, 1, "b")
    check_place(placed, 0, 1, "d")


def test_a_replica_that_leads_is_refused_and_the_command_that_helps_is_named() -> None:
    with pytest.raises(Rejected, match="raymq shard move-leader 0 --to REPLICA"):
        check_replaceable(record(replicas=3), rows(), 0)


@pytest.mark.parametrize("other", [SILENT, {"is_complete": False}, {"state": "READ_ONLY"}])
def test_a_replica_is_kept_while_it_may_have_the_last_copy(other: dict[str, Any]) -> None:
    with pytest.raises(Rejected, match=r"2 must be complete and answer.*: \[0\]") as caught:
        check_replaceable(record(replicas=3), rows(r1=other), 2)
    assert (caught.value.limit, caught.value.fields["found"]) == (2, 1)


def test_without_a_leader_nothing_is_replaced() -> None:
    with pytest.raises(Unavailable, match="no replica leads shard 0"):
        check_replaceable(record(replicas=3), rows(r0={"mode": "follower"}), 2)


class Topics:
    """A cluster that knows its topics."""

    def __init__(self, topics: dict[str, dict[str, Any]]) -> None:
        self._topics = topics

    def call(self, shard: int, op: str, args: dict[str, Any]) -> dict[str, Any]:
        assert (shard, op, args) == (0, "topics", {})
        return self._topics


def test_messages_that_only_compacted_queues_have_forbid_a_new_replica() -> None:
    cluster: Any = Topics({"plain": {"queues": 1}, "states": {"queues": 1, "compacted": True}})
    with pytest.raises(Rejected, match=r"begins at 1048576.*\['states'\]") as caught:
        check_compacted(cluster, rows(r0={"min_offset": 1 << 20}))
    assert caught.value.fields["found"] == 1 << 20
    check_compacted(cluster, rows())
    plain: Any = Topics({"plain": {"queues": 1}})
    check_compacted(plain, rows(r0={"min_offset": 1 << 20}))


@pytest.mark.parametrize("lost", [SILENT, {"is_complete": False}, {}])
def test_a_follower_is_replaced_whatever_it_is_when_the_others_are_complete(
    lost: dict[str, Any],
) -> None:
    check_replaceable(record(replicas=3), rows(r2=lost), 2)


def test_a_replica_that_is_not_complete_itself_is_replaced_whatever_the_others_are() -> None:
    incomplete = {"is_complete": False}
    check_replaceable(record(replicas=3), rows(r1=incomplete, r2=incomplete), 2)


def test_the_leader_alone_is_enough_for_the_follower_of_two() -> None:
    check_replaceable(record(replicas=2), rows(r1=SILENT)[:2], 1)


def test_an_election_that_is_under_way_is_awaited_but_not_for_ever() -> None:
    none, some = rows(r0={"mode": "follower"}), rows()
    looks = iter([none, none, some])
    assert await_leader(lambda: next(looks), ManualClock()) == some
    clock = ManualClock()
    assert await_leader(lambda: none, clock) == none
    assert clock.monotonic_ms() >= ELECTION_WAIT_MS


def test_a_node_that_is_not_there_is_refused() -> None:
    ray = FakeRay({NODE_LABEL: "a"})
    placed = record(replicas=3, nodes=["a", "b", "c"])
    context.check_node(ray, placed, 0, 1, "a")
    context.check_node(ray, record(replicas=3), 0, 1, None)
    for node in (None, "d"):
        with pytest.raises(Rejected, match=f"raymq-node={node or 'b'}.*There are: a"):
            context.check_node(ray, placed, 0, 1, node)


def test_another_machine_than_that_of_the_data_directory_is_refused() -> None:
    cluster: Any = SimpleNamespace(data_dir=None, name="orders")
    with pytest.raises(Rejected, match="not on this machine"):
        replacing.replace_replica(cluster, 0, 1)


# --- what is written down -------------------------------------------------------------------------


def test_the_record_keeps_where_the_new_replica_is_and_how_often_it_was_replaced(
    tmp_path: Path,
) -> None:
    first = record(shards=2, replicas=3, nodes=["a", "b", "c"])
    assert first.generation_of(1, 2) == 0
    second = first.with_new_replica(1, 2, "d").with_new_replica(1, 2, None)
    assert second.placement == (("a", "b", "c"), ("b", "c", "d"))
    assert second.generations == ((0, 0, 0), (0, 0, 2))
    assert second.formed

    paths = ClusterPaths(tmp_path)
    save_record(paths, second, Files())
    stored = load_record(paths, Files())
    assert stored == second
    # The nodes of the first start are still accepted.
    assert resume_record(second, StartOptions(nodes=["a", "b", "c"])) == second

    found = actor_set.specs(second, paths, "token", {})
    generations = {(each["shard"], each["replica"]): each["generation"] for each in found}
    assert [key for key, generation in generations.items() if generation] == [(1, 2)]
    assert {(each["shard"], each["generations"]) for each in found} == {
        (0, (0, 0, 0)),
        (1, (0, 0, 2)),
    }
    assert {each["node"] for each in found if (each["shard"], each["replica"]) == (1, 2)} == {"d"}


# --- the directory of the new replica -------------------------------------------------------------


class FixedClock(Clock):
    def now_ms(self) -> int:
        return NOW_MS


class BusyFiles(Files):
    """A disk on which no name can be changed."""

    def rename(self, source: Any, target: Any) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "shard-0" / "replica-2"


def prepare(root: Path, generation: int, files: Files | None = None) -> None:
    spec = {"data_dir": str(root), "replica": 2, "generation": generation}
    take_place(spec, files or Files(), FixedClock())


def make_old(root: Path) -> None:
    (root / "commitlog").mkdir(parents=True)
    (root / "commitlog" / ("0" * 20)).write_bytes(b"messages")


def test_what_is_there_of_the_old_replica_is_moved_aside_once(root: Path) -> None:
    make_old(root)
    prepare(root, 1)
    (aside,) = root.parent.glob("replaced-*")
    assert aside.name == "replaced-20261124T180000Z-replica-2"
    assert (aside / "commitlog" / ("0" * 20)).read_bytes() == b"messages"
    assert [each.name for each in root.iterdir()] == ["raymq"]
    assert generation_of(root) == 1

    # A restart of the same replica keeps what it has by then.
    (root / "commitlog").mkdir()
    prepare(root, 1)
    assert (root / "commitlog").is_dir()


@pytest.mark.parametrize("made", [False, True])
def test_a_missing_or_empty_directory_leaves_nothing_aside(root: Path, made: bool) -> None:
    if made:
        (root / "lost+found").mkdir(parents=True)
    prepare(root, 3)
    assert list(root.parent.glob("replaced-*")) == []
    assert generation_of(root) == 3


def test_a_replica_that_was_never_replaced_touches_nothing(root: Path) -> None:
    prepare(root, 0)
    assert not root.exists()
    make_old(root)
    prepare(root, 0)
    assert [each.name for each in root.iterdir()] == ["commitlog"]


def test_a_process_of_the_replaced_replica_does_not_open_the_new_directory(root: Path) -> None:
    prepare(root, 2)
    for generation in (0, 1):
        with pytest.raises(Rejected, match="belongs to generation 2") as caught:
            prepare(root, generation)
        assert caught.value.field == "generation"


@pytest.fixture
def holder(root: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has the old store open."""
    make_old(root)
    program = (
        "import fcntl, sys; f = open(sys.argv[1], 'wb'); fcntl.lockf(f, fcntl.LOCK_EX, 1);"
        "print('locked', flush=True); sys.stdin.read()"
    )
    held = subprocess.Popen(
        [sys.executable, "-c", program, str(root / "lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert held.stdout is not None
    assert held.stdout.readline() == b"locked\n"
    yield held
    held.communicate()


def test_a_directory_that_a_process_has_open_is_not_moved(
    root: Path, holder: subprocess.Popen[bytes]
) -> None:
    with pytest.raises(Unavailable, match=f"already open by process {holder.pid}"):
        prepare(root, 1)
    assert (root / "commitlog").is_dir()


def test_a_directory_that_cannot_be_moved_says_what_to_do(root: Path) -> None:
    make_old(root)
    with pytest.raises(Unavailable, match="Device or resource busy.*mount an empty one"):
        prepare(root, 1, BusyFiles())
    assert (root / "commitlog").is_dir()
    assert generation_of(root) == 0
