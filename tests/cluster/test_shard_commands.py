"""The commands on shards and replicas that change something, over a cluster that is only pretended."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace
from typing import Any

import pytest

from raymq.cluster.cli.console import Console
from raymq.cluster.cli.main import main
from raymq.cluster.operations.drain_node import DrainReport
from raymq.store.base.errors import RayMQError, Rejected, Unavailable


class FakeCluster:
    """Notes how it is called."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.failure: RayMQError | None = None

    def _called(self, *call: Any) -> None:
        self.calls.append(call)
        if self.failure is not None:
            raise self.failure

    def move_leader(self, shard: int, replica: int) -> None:
        self._called("move_leader", shard, replica)

    def replace_replica(self, shard: int, replica: int, *, progress: Any, **options: Any) -> None:
        progress("shard 0 replica 2: 10 of 20 bytes, not complete")
        self._called("replace_replica", shard, replica, options)

    def add_shards(self, count: int, *, progress: Any, **options: Any) -> list[int]:
        progress("adding the shard(s) [2]")
        self._called("add_shards", count, options)
        self.shards = 2 + count
        return list(range(2, self.shards))

    def drain_node(self, node: str, *, progress: Any, **options: Any) -> DrainReport:
        progress("shard 0: replica 1 leads")
        self._called("drain_node", node, options)
        return DrainReport(node=node, moved={0: 1}, followers=[(0, 0), (1, 2)])

    def __enter__(self) -> FakeCluster:
        return self

    def __exit__(self, *exc: object) -> None:
        return


class Terminal:
    """Runs commands and keeps what they print."""

    def __init__(self) -> None:
        self.cluster = FakeCluster()

    def run(self, *words: str) -> int:
        out, err = io.BytesIO(), io.StringIO()
        lifecycle = SimpleNamespace(connect=lambda *args, **options: self.cluster)
        code = main(words, console=Console(stdout=out, stderr=err, lifecycle=lifecycle))
        self.out, self.err = out.getvalue().decode(), err.getvalue()
        return code


@pytest.fixture
def terminal() -> Terminal:
    return Terminal()


def test_a_leader_is_moved(terminal: Terminal) -> None:
    assert terminal.run("shard", "move-leader", "1", "--to", "2") == 0
    assert terminal.cluster.calls == [("move_leader", 1, 2)]
    assert terminal.out == "replica 2 leads shard 1\n"


def test_a_replica_is_replaced_and_its_progress_is_no_part_of_the_result(
    terminal: Terminal,
) -> None:
    assert terminal.run("shard", "replace-replica", "0", "2") == 0
    assert terminal.cluster.calls == [("replace_replica", 0, 2, {"node": None, "timeout_s": 600})]
    assert terminal.err == "shard 0 replica 2: 10 of 20 bytes, not complete\n"
    assert terminal.out == "replica 2 of shard 0 is complete\n"

    words = ("shard", "replace-replica", "3", "1", "--node", "d", "--timeout-s", "9", "--json")
    assert terminal.run(*words) == 0
    assert terminal.cluster.calls[-1] == ("replace_replica", 3, 1, {"node": "d", "timeout_s": 9})
    assert json.loads(terminal.out) == {"shard": 3, "replica": 1, "is_complete": True}


def test_shards_are_added(terminal: Terminal) -> None:
    assert terminal.run("shard", "add") == 0
    assert terminal.cluster.calls == [("add_shards", 1, {"nodes": None, "timeout_s": 600})]
    assert terminal.err == "adding the shard(s) [2]\n"
    assert terminal.out == "shard(s) 2 added; the cluster has 3\n"

    words = ("--count", "2", "--nodes", "a,b", "--timeout-s", "9", "--json")
    assert terminal.run("shard", "add", *words) == 0
    assert terminal.cluster.calls[-1] == ("add_shards", 2, {"nodes": ["a", "b"], "timeout_s": 9})
    assert json.loads(terminal.out) == {"added": [2, 3], "shards": 4}


def test_a_node_is_drained_and_what_stays_there_is_named(terminal: Terminal) -> None:
    assert terminal.run("shard", "drain-node", "a", "--timeout-s", "5") == 0
    assert terminal.cluster.calls == [("drain_node", "a", {"timeout_s": 5})]
    assert terminal.err == "shard 0: replica 1 leads\n"
    assert terminal.out.splitlines() == [
        "node a leads nothing; 1 shard(s) are led elsewhere now",
        "followers that stay there: shard 0 replica 0, shard 1 replica 2",
    ]
    assert terminal.run("shard", "drain-node", "a", "--json") == 0
    assert json.loads(terminal.out) == {
        "node": "a",
        "moved": {"0": 1},
        "followers": [[0, 0], [1, 2]],
    }


@pytest.mark.parametrize(
    "words",
    [
        ("shard", "replace-replica", "0"),
        ("shard", "replace-replica", "0", "two"),
        ("shard", "replace-replica", "-1", "0"),
        ("shard", "replace-replica", "0", "1", "--timeout-s", "0"),
        ("shard", "add", "2"),
        ("shard", "add", "--count", "0"),
        ("shard", "drain-node"),
        ("shard", "drain-node", "a", "b"),
    ],
)
def test_a_wrong_command_does_nothing(terminal: Terminal, words: tuple[str, ...]) -> None:
    assert terminal.run(*words) == 2
    assert terminal.cluster.calls == []


@pytest.mark.parametrize(
    ("failure", "code"),
    [(Rejected("replica 2 leads shard 0", field="replica"), 2), (Unavailable("not complete"), 3)],
)
@pytest.mark.parametrize("words", [("replace-replica", "0", "2"), ("drain-node", "a"), ("add",)])
def test_an_error_is_one_line_and_an_exit_code(
    terminal: Terminal, words: tuple[str, ...], failure: RayMQError, code: int
) -> None:
    terminal.cluster.failure = failure
    assert terminal.run("shard", *words) == code
    assert terminal.err.splitlines()[-1] == f"raymq: {failure}"
    assert terminal.out == ""
