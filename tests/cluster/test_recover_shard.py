"""When a shard may be recovered without a majority of its replicas, and what is written down of it."""

from __future__ import annotations

from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import pytest

from raymq.cluster.cli import main
from raymq.cluster.cli.console import Console
from raymq.cluster.cluster import Cluster
from raymq.cluster.operations import recover_shard as recovering
from raymq.cluster.operations.recover_shard import RecoveryPlan, plan_recovery
from raymq.cluster.record.cluster_record import load_record, save_record
from raymq.cluster.record.paths import ClusterPaths
from raymq.store.base.errors import Rejected
from raymq.store.base.files import Files
from tests.cluster.test_replace_replica import DOWN, record
from tests.support.clock import ManualClock

SURVIVOR = {
    "state": "RUNNING",
    "mode": "follower",
    "epoch": 7,
    "appended": 900,
    "confirmed": 800,
    "is_complete": True,
}
LOST = {**DOWN, "node": "b", "error": "no answer", "is_complete": None, "epoch": None}
ROTTEN = {**SURVIVOR, "is_complete": False}


def rows(*replicas: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"shard": 0, "replica": number, **facts} for number, facts in enumerate(replicas)]


def test_the_plan_names_what_is_left_and_what_is_lost() -> None:
    plan = plan_recovery(record(replicas=3), rows(LOST, SURVIVOR, LOST))
    assert plan.lost_replicas == [0, 2]
    (survivor,) = plan.survivors
    assert survivor == {
        "replica": 1,
        "epoch": 7,
        "appended": 900,
        "confirmed": 800,
        "is_complete": True,
    }
    assert plan.facts(5) == {"at_ms": 5, "shard": 0, "lost": [0, 2], "survivors": [survivor]}
    lines = plan.lines()
    assert "DATA-LOSS-POSSIBLE" in lines[0]
    assert "[0, 2]" in lines[0]
    assert lines[1] == "survivor 1: log of 900 bytes, confirmed 800, epoch 7, complete"
    assert lines[2] == "lost 0 on node b: no answer"
    assert "machines of the lost replicas are off" in lines[-1]


def test_a_survivor_that_is_not_complete_is_a_plan_too() -> None:
    plan = plan_recovery(record(replicas=3), rows(ROTTEN, SURVIVOR, LOST))
    assert plan.lost_replicas == [2]
    assert "not complete" in plan.lines()[1]


@pytest.mark.parametrize(
    ("replicas", "words"),
    [
        ([{**SURVIVOR, "mode": "leader"}, LOST, LOST], "replica 0 leads it"),
        ([SURVIVOR, SURVIVOR, SURVIVOR], "all of its replicas answer"),
        ([SURVIVOR, SURVIVOR, LOST], r"\[0, 1\] have every confirmed message"),
        ([SURVIVOR, SURVIVOR, SURVIVOR, LOST, LOST], r"\[0, 1, 2\] have every"),
        ([LOST, SURVIVOR], "only replica 0 may lead"),
        ([SURVIVOR, LOST, {**LOST, "state": "STARTING"}], "replica 2 is there, and STARTING"),
        ([SURVIVOR, LOST, {**LOST, "state": "UNREACHABLE"}], "replica 2 is there, and UNREACHABLE"),
        (
            [SURVIVOR, {**SURVIVOR, "state": "READ_ONLY", "error": "full"}, LOST],
            r"READ_ONLY \(full\)",
        ),
        ([LOST], "only replica 0 may lead"),
        ([LOST, LOST, LOST], "no replica of shard 0 answers"),
    ],
)
def test_a_recovery_that_is_not_needed_or_cannot_be_is_refused(
    replicas: list[dict[str, Any]], words: str
) -> None:
    with pytest.raises(Rejected, match=words) as caught:
        plan_recovery(record(replicas=len(replicas)), rows(*replicas))
    assert caught.value.field == "shard"


def test_the_record_keeps_what_was_given_up_and_an_epoch_that_never_falls(tmp_path: Path) -> None:
    paths = ClusterPaths(tmp_path)
    facts = plan_recovery(record(replicas=3), rows(LOST, SURVIVOR, LOST)).facts(5)
    new = record(replicas=3, shards=2).with_recovery(0, facts, 1_000_007)
    again = new.with_recovery(0, {**facts, "lost": [0]}, 9).with_recovery(
        1, {**facts, "at_ms": 6}, 3
    )
    assert [again.least_epoch(shard) for shard in (0, 1)] == [1_000_007, 3]
    assert again.unclean_recoveries == ({**facts, "lost": [0]}, {**facts, "at_ms": 6})
    save_record(paths, again, Files())
    assert load_record(paths, Files()) == again


def test_a_program_must_say_that_it_accepts_the_loss() -> None:
    with pytest.raises(Rejected, match="accept_loss=True") as caught:
        Cluster.recover_shard(None, None, accept_loss=False)  # type: ignore[arg-type]
    assert caught.value.field == "accept_loss"


def test_two_successors_on_one_node_are_refused() -> None:
    placed = record(replicas=3, nodes=["a", "b", "c"])
    replicas = rows(SURVIVOR, LOST, LOST)
    assert plan_recovery(placed, replicas, {1: "d", 2: "e"}).lost_replicas == [1, 2]
    with pytest.raises(Rejected, match="node d has replica 1"):
        plan_recovery(placed, replicas, {1: "d", 2: "d"})
    with pytest.raises(Rejected, match="replica 0 is not lost"):
        plan_recovery(placed, replicas, {0: "d"})


def test_no_replica_is_given_up_that_the_operator_has_not_named() -> None:
    members = record(replicas=5)
    accepted = plan_recovery(members, rows(SURVIVOR, SURVIVOR, LOST, LOST, LOST))
    less = plan_recovery(members, rows(SURVIVOR, SURVIVOR, ROTTEN, LOST, LOST))
    more = plan_recovery(members, rows(SURVIVOR, LOST, LOST, LOST, LOST))
    recovering._check_same(accepted, accepted)
    recovering._check_same(accepted, less)
    with pytest.raises(Rejected, match=r"replicas \[1\] of shard 0 have stopped to answer"):
        recovering._check_same(accepted, more)


def test_a_recovery_that_was_interrupted_and_begins_again_is_one_recovery() -> None:
    first = plan_recovery(record(replicas=5), rows(SURVIVOR, SURVIVOR, LOST, LOST, LOST))
    begun = record(replicas=5).with_recovery(0, first.facts(5), 1_000_007)
    # Two successors run, and a survivor is lost, too.
    left = rows(SURVIVOR, LOST, ROTTEN, ROTTEN, LOST)
    facts = recovering._facts(begun, plan_recovery(begun, left), left, ManualClock())
    assert facts == {**first.facts(5), "lost": [1, 2, 3, 4]}
    assert begun.with_recovery(0, facts, 8).unclean_recoveries == (facts,)

    # One that the log has is over.
    noted = [{**row, "unclean_recoveries": [first.facts(5)]} for row in left]
    other = recovering._facts(begun, plan_recovery(begun, noted), noted, ManualClock(77))
    assert other["at_ms"] == 77


# --- the command ----------------------------------------------------------------------------------


class Recovered:
    """A cluster whose shard 0 has lost two replicas."""

    name = "orders"

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __enter__(self) -> Recovered:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def plan_recovery(self, shard: int, nodes: Any) -> RecoveryPlan:
        return plan_recovery(record(replicas=3), rows(LOST, SURVIVOR, LOST))

    def recover_shard(self, plan: RecoveryPlan, **options: Any) -> None:
        self.calls.append({"shard": plan.shard, **options, "progress": None})


class Lifecycle:
    def __init__(self, cluster: Recovered) -> None:
        self.connect = lambda *args, **options: cluster


def run(cluster: Recovered, *words: str, answers: str = "") -> tuple[int, str, str]:
    console = Console(
        stdin=BytesIO(answers.encode()),
        stdout=BytesIO(),
        stderr=StringIO(),
        lifecycle=Lifecycle(cluster),
    )
    code = main.main(["shard", "recover", "0", *words], console=console)
    return code, console.stdout.getvalue().decode(), console.stderr.getvalue()  # type: ignore[attr-defined]


def test_the_command_asks_twice_and_then_recovers() -> None:
    cluster = Recovered()
    code, out, notes = run(cluster, "--unclean", "--node", "2=d", answers="orders\nlose messages\n")
    assert code == 0, notes
    assert "goes on without [0, 2]" in out
    assert "DATA-LOSS-POSSIBLE" in notes
    assert cluster.calls == [
        {"shard": 0, "accept_loss": True, "nodes": {2: "d"}, "timeout_s": 600, "progress": None}
    ]


@pytest.mark.parametrize("answers", ["", "other\n", "orders\n", "orders\nyes\n"])
def test_without_both_answers_nothing_is_changed(answers: str) -> None:
    cluster = Recovered()
    code, _, notes = run(cluster, "--unclean", answers=answers)
    assert code != 0
    assert "nothing was changed" in notes
    assert cluster.calls == []


def test_scripts_answer_with_a_flag() -> None:
    cluster = Recovered()
    assert run(cluster, "--unclean", "--yes-lose-messages")[0] == 0
    assert len(cluster.calls) == 1


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ([], "`--unclean` goes on without one"),
        (["--unclean", "--node", "d"], "is not REPLICA=LABEL"),
        (["--unclean", "--node", "x=d"], "is not REPLICA=LABEL"),
        (["--unclean", "--node", "1="], "is not REPLICA=LABEL"),
    ],
)
def test_bad_options_are_refused_before_anything_is_asked(words: list[str], fault: str) -> None:
    cluster = Recovered()
    code, _, notes = run(cluster, *words)
    assert code != 0
    assert fault in notes
    assert cluster.calls == []
