"""What adding shards writes down and refuses, and topics that are created at the same time."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raymq.actors.api.operations import call_leader
from raymq.actors.leader.operations.table import OPERATIONS
from raymq.client.topics.new_topic import create_everywhere
from raymq.cluster.deploy import actor_set, actor_states, node_labels
from raymq.cluster.operations import add_shards as adding
from raymq.cluster.operations.add_shards import check_led, default_nodes, plan_shards
from raymq.cluster.operations.set_config import set_config
from raymq.cluster.record import cluster_record
from raymq.cluster.record.cluster_record import (
    ClusterRecord,
    StartOptions,
    load_record,
    new_record,
    resume_record,
    save_record,
)
from raymq.cluster.record.paths import ClusterPaths
from raymq.store.base.errors import Rejected, Unavailable
from raymq.store.base.files import Files
from raymq.store.config.running_config import RunningConfig
from raymq.store.config.store_config import IN_CLUSTER, StoreConfig
from raymq.store.put.inner_message import ServiceProgress
from raymq.store.put.option_records import option_facts
from raymq.store.records.requests import AppendedRows
from raymq.store.state.shard_state import COMPACTION, OPTIONS, SHARDS, ShardState
from raymq.store.state.topics import check_more_queues, check_new_topic
from tests.support.fake_ray import FakeRay


def record(**options: Any) -> ClusterRecord:
    return new_record(StartOptions(**options)).now_formed()


# --- what is written down -------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_new_shards_are_where_a_first_start_would_have_placed_them(
    replicas: int, count: int
) -> None:
    options = {"replicas": replicas, "nodes": ["a", "b", "c", "d"]}
    grown = record(shards=3, **options).with_more_shards(count)
    assert grown.placement == record(shards=3 + count, **options).placement


def test_the_record_of_an_addition_survives_and_counts_the_new_shards_at_its_end(
    tmp_path: Path,
) -> None:
    first = record(shards=2, replicas=3, nodes=["a", "b", "c"]).with_new_replica(1, 2, "d")
    first = first.with_recovery(0, {"at_ms": 1, "shard": 0}, 7)
    grown = first.with_more_shards(2)
    assert (grown.shards, grown.joined, grown.formed) == (4, 2, True)
    assert [grown.is_formed(shard) for shard in range(4)] == [True, True, False, False]
    assert grown.generations == ((0, 0, 0), (0, 0, 1), (0, 0, 0), (0, 0, 0))
    assert grown.least_epochs == (7, 0, 0, 0)

    paths = ClusterPaths(tmp_path)
    save_record(paths, grown, Files())
    assert load_record(paths, Files()) == grown
    formed = grown.now_formed()
    assert all(formed.is_formed(shard) for shard in range(4))
    assert formed.joined == 2


def test_a_later_start_may_name_the_first_number_of_shards_or_the_present_one() -> None:
    grown = record(shards=2).with_more_shards(1).with_more_shards(2)
    for shards in (None, 2, 5):
        assert resume_record(grown, StartOptions(shards=shards)) == grown
    for shards in (3, 6):
        with pytest.raises(Rejected, match="a start cannot change"):
            resume_record(grown, StartOptions(shards=shards))


def test_each_actor_knows_whether_its_shard_is_new(tmp_path: Path) -> None:
    grown = record(shards=2, replicas=3).with_more_shards(1)
    specs = actor_set.specs(grown, ClusterPaths(tmp_path), "token", {})
    facts = {(each["shard"], each["shards"], each["formed"], each["joining"]) for each in specs}
    # A new shard takes topics that are on itself from clients that count it already.
    assert facts == {(0, 2, True, False), (1, 2, True, False), (2, 3, False, True)}


# --- what is refused ------------------------------------------------------------------------------


def test_more_than_256_shards_are_refused() -> None:
    assert record(shards=255).with_more_shards(1).shards == 256
    for shards, count, field in ((255, 2, "shards"), (256, 1, "shards"), (1, 0, "count")):
        with pytest.raises(Rejected) as caught:
            record(shards=shards).with_more_shards(count)
        assert caught.value.field == field


def test_nodes_that_cannot_have_the_new_shards_are_refused() -> None:
    with pytest.raises(Rejected, match="on one machine"):
        record().with_more_shards(1, ["a"])
    placed = record(replicas=2, nodes=["a", "b"])
    with pytest.raises(Rejected, match="2 replicas need 2 nodes"):
        placed.with_more_shards(1, ["c"])
    assert placed.with_more_shards(1, ["c", "d"]).placement == (("a", "b"), ("d", "c"))


def test_without_a_word_about_nodes_those_are_used_that_are_there() -> None:
    placed = record(shards=1, replicas=2, nodes=["a", "b", "c"]).with_new_replica(0, 1, "d")
    assert default_nodes(placed, ["a", "b", "c", "d", "x"]) == ["a", "b", "c", "d"]
    # The replica on b was given up with its node.
    plan = plan_shards(placed, 1, None, present=["a", "c", "d"])
    assert plan.placement == (("a", "d"), ("c", "d"))
    with pytest.raises(Rejected, match="need 2 nodes"):
        plan_shards(placed, 1, None, present=["a"])


def test_an_interrupted_addition_is_completed_before_another_one() -> None:
    pending = record(replicas=2, nodes=["a", "b", "c"]).with_more_shards(1)
    for nodes in (None, ["a", "b", "c"]):
        assert plan_shards(pending, 1, nodes, present=[]) == pending
    with pytest.raises(Rejected, match=r"\[1\] was interrupted.*count=1"):
        plan_shards(pending, 2, None, present=[])
    with pytest.raises(Rejected, match=r"placed on \['b', 'c'\]"):
        plan_shards(pending, 1, ["a", "b"], present=[])


def test_a_cluster_whose_first_start_has_not_ended_gets_no_shards() -> None:
    for options in ({"replicas": 3}, {"nodes": ["a"]}):
        begun = new_record(StartOptions(**options))
        with pytest.raises(Unavailable, match="run `raymq start` first"):
            plan_shards(begun, 1, None, present=["a"])
    # One machine and one candidate: no start looks for the store.
    plan_shards(new_record(StartOptions()), 1, None, present=[])


def test_every_shard_must_have_a_leader() -> None:
    row = {"mode": "leader", "state": "RUNNING", "epoch": 1, "replica": 0}
    rows = [{**row, "shard": 0}, {**row, "shard": 1}]
    check_led(record(shards=2), rows)
    with pytest.raises(Unavailable, match="no replica leads shard 1 now"):
        check_led(record(shards=2), rows[:1])
    # Those of an interrupted addition are not asked yet.
    check_led(record(shards=2).with_more_shards(1), rows)


# --- who finds the new shards ---------------------------------------------------------------------


def test_the_actors_of_a_cluster_are_found_by_their_names(tmp_path: Path) -> None:
    ray = FakeRay({node_labels.NODE_LABEL: "a"})
    for name in ("o.1", "o-1"):
        cluster = new_record(StartOptions(name=name, shards=12))
        actor_set.create(ray, cluster, actor_set.specs(cluster, ClusterPaths(tmp_path), "t", {}))
    assert sorted(actor_states.endpoints(ray, "o.1")) == list(range(12))


# --- topics that are created at the same time -----------------------------------------------------


class Shard:
    """A shard's state, its real operations on it, and no log."""

    def __init__(self, number: int, shards: int) -> None:
        self.number = number
        self.spec_shards = shards
        self.state = ShardState()
        self.config = RunningConfig.of(StoreConfig())
        self.store: Any = self
        self.topics: Any = self
        self.options: Any = self
        self.parts: Any = SimpleNamespace(identity=SimpleNamespace(facts=self.identity))
        self.log = SimpleNamespace(end=0)

    def run(self, op: str, args: dict[str, Any]) -> dict[str, Any]:
        if op == "config":
            # Any replica answers it.
            return {"options": option_facts(self, IN_CLUSTER)}  # type: ignore[arg-type]
        return call_leader(OPERATIONS, self, op, args)

    def create(
        self, name: str, queues: int, shards: list[int], attributes: Any, **added: int
    ) -> AppendedRows | None:
        info = check_new_topic(name, queues, tuple(shards), self.state.topics, attributes)
        if info is None:
            return None
        self.state.topics[name] = replace(info, **added)
        return AppendedRows.up_to(0)

    def add_queues(
        self, name: str, queues: int, shards: list[int], *, are_hidden: bool, copied: Any
    ) -> AppendedRows | None:
        known = self.state.topics
        info = check_more_queues(name, queues, tuple(shards), known, are_hidden=are_hidden)
        if info is not None and copied is not None:
            info = replace(info, former_queues=copied[0], hidden_queues=copied[1])
        if info is not None:
            known[name] = info
        return AppendedRows.up_to(0)

    def end_of(self, name: str) -> int:
        return 0

    def set(self, values: dict[str, Any], *, by: str) -> None:
        entries = {
            name: {"value": value, "before": getattr(self.config, name), "at_ms": 1, "by": by}
            for name, value in values.items()
            if value != getattr(self.config, name)
        }
        if entries:
            self.put_inner([], progress=ServiceProgress(OPTIONS, entries))
            self.config.follow(self.state.changed_options())

    def put_inner(self, messages: list[Any], *, progress: ServiceProgress) -> None:
        assert messages == []
        self.state.progress.setdefault(progress.service, {}).update(progress.values)

    def identity(self) -> dict[str, Any]:
        joined = self.state.progress.get(SHARDS, {}).get("joined", 0)
        return {"shard": self.number, "shards": max(self.spec_shards, joined)}

    def check_serving(self) -> None: ...

    def await_dispatch(self) -> None: ...

    def publish(self, appended: AppendedRows) -> None: ...

    def await_promise(self, appended: AppendedRows) -> None: ...


class Handle:
    """What `create_everywhere` and `join` use of a Cluster. Args: `turns`: says when each call may begin."""

    def __init__(self, shards: list[Shard], count: int, turns: Turns | None = None) -> None:
        self._all = shards
        self.shards = count
        self._turns = turns
        self.data_dir = "/nowhere"

    def call(self, shard: int, op: str, args: dict[str, Any]) -> dict[str, Any]:
        if self._turns is not None:
            self._turns.await_turn()
        try:
            return self._all[shard].run(op, args)
        finally:
            if self._turns is not None:
                self._turns.end_turn()

    def learn_shards(self, count: int) -> None:
        self.shards = max(self.shards, count)


class Turns:
    """Lets a client's calls run at chosen places between those of the addition."""

    def __init__(self) -> None:
        self._begin = threading.Semaphore(0)
        self._ended = threading.Semaphore(0)
        self._is_over = False

    def run_client(self, handle: Handle, arguments: dict[str, Any]) -> None:
        """Create a topic. Runs in a thread."""
        self.run(lambda: create_everywhere(handle, arguments))  # type: ignore[arg-type]

    def run(self, call: Callable[[], object]) -> None:
        """Run what a client does. Callers: a thread."""
        try:
            call()
        finally:
            self._is_over = True
            self._ended.release()

    def await_turn(self) -> None:
        self._begin.acquire()

    def end_turn(self) -> None:
        self._ended.release()

    def run_one(self) -> None:
        """Let the client make one call, if it makes another one."""
        if not self._is_over:
            self._begin.release()
            assert self._ended.acquire(timeout=10)


class JoiningRoutes:
    """`Routes` of the addition."""

    def __init__(self, handle: Handle, before: Any) -> None:
        self._handle = handle
        self._before = before

    def learn_shards(self, shards: range) -> None: ...

    def call(self, shard: int, op: str, args: dict[str, Any]) -> dict[str, Any]:
        self._before()
        return self._handle.call(shard, op, args)


def world(old: int, added: int) -> tuple[list[Shard], ClusterRecord]:
    """Shards of which the last are being added."""
    grown = record(shards=old).with_more_shards(added)
    shards = [Shard(number, old if number < old else old + added) for number in range(old + added)]
    return shards, grown


def join(
    monkeypatch: pytest.MonkeyPatch, shards: list[Shard], grown: ClusterRecord, before: Any
) -> Handle:
    handle = Handle(shards, grown.joined)
    routes = SimpleNamespace(of=lambda cluster: JoiningRoutes(handle, before))
    monkeypatch.setattr(adding, "Routes", routes)
    monkeypatch.setattr(cluster_record, "save_record", lambda *args: None)
    adding.join(handle, grown, Files(), lambda line: None)  # type: ignore[arg-type]
    return handle


def check_same(shards: list[Shard]) -> None:
    assert all(shard.state.topics == shards[0].state.topics for shard in shards)


def run_at(schedule: tuple[int, ...], turns: Turns) -> Callable[[], None]:
    """Called before each call of the addition: lets the client make the calls that are due."""
    calls, left = itertools.count(1), list(schedule)

    def before() -> None:
        at = next(calls)
        while left and left[0] < at:
            left.pop(0)
            turns.run_one()

    return before


def schedules() -> Iterator[tuple[int, ...]]:
    """Where the client's calls are: after so many calls of the addition."""
    yield from itertools.combinations_with_replacement(range(15), 3)


def test_a_topic_that_is_created_meanwhile_is_on_every_shard_in_any_order_of_the_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spreads = set()
    for schedule in schedules():
        shards, grown = world(2, 1)
        turns = Turns()
        client = Handle(shards, 2, turns)
        arguments = {"name": "t", "queues": 4, "shards": [0, 1]}
        thread = threading.Thread(target=turns.run_client, args=(client, arguments), daemon=True)
        thread.start()
        handle = join(monkeypatch, shards, grown, run_at(schedule, turns))
        for _ in range(3):
            turns.run_one()
        thread.join(10)
        assert not thread.is_alive(), schedule
        check_same(shards)
        assert "t" in shards[2].state.topics, schedule
        assert handle.shards == 3
        spreads.add((client.shards, shards[0].state.topics["t"].shards))
    # Some clients learned of the new shard, and some had ended before.
    assert spreads == {(2, (0, 1)), (3, (0, 1))}


def test_an_option_that_is_set_meanwhile_is_set_on_every_shard_in_any_order_of_the_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for schedule in schedules():
        shards, grown = world(2, 1)
        for shard in shards[:2]:
            shard.set({"flush_least_pages": 7, "delete_when": "05"}, by="earlier")
        turns = Turns()
        client: Any = Handle(shards, 2, turns)
        change = partial(set_config, client, {"delete_when": "06"})
        calling = threading.Thread(target=turns.run, args=(change,), daemon=True)
        calling.start()
        join(monkeypatch, shards, grown, run_at(schedule, turns))
        for _ in range(3):
            turns.run_one()
        calling.join(10)
        assert not calling.is_alive(), schedule
        found = [(each.config.delete_when, each.config.flush_least_pages) for each in shards]
        assert found == [("06", 7)] * 3, schedule


def test_every_topic_is_copied_with_its_queues_and_attributes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shards, grown = world(2, 2)
    early = Handle(shards, 2)
    attributes = {"cleanup.policy": COMPACTION}
    create_everywhere(early, {"name": "a", "queues": 3, "shards": [0, 1]})  # type: ignore[arg-type]
    compacted = {"name": "c", "queues": 1, "shards": [1], "attributes": attributes}
    create_everywhere(early, compacted)  # type: ignore[arg-type]
    # Its creation was interrupted.
    shards[0].run("create_topic", {"name": "half", "queues": 2, "shards": [0, 1]})
    # Queues were added to this one, and some more are not shown yet.
    create_everywhere(early, {"name": "g", "queues": 2, "shards": [0, 1]})  # type: ignore[arg-type]
    for queues, are_hidden in ((4, False), (5, True)):
        growth = {"name": "g", "queues": queues, "shards": [0, 1], "are_hidden": are_hidden}
        for shard in shards[:2]:
            shard.run("add_queues", growth)

    # The new shard got this topic before.
    shards[3].run("create_topic", {"name": "g", "queues": 2, "shards": [0, 1]})

    join(monkeypatch, shards, grown, lambda: None)
    check_same(shards)
    assert set(shards[3].state.topics) == {"a", "c", "g", "half"}
    assert shards[3].state.topics["g"].former_queues == (2, 4)
    assert shards[3].state.topics["g"].hidden_queues == 1
    assert shards[3].state.topics["c"].compacted
    # Once more changes nothing: an addition that was interrupted at its end.
    before = [dict(shard.state.topics) for shard in shards]
    join(monkeypatch, shards, grown, lambda: None)
    assert [shard.state.topics for shard in shards] == before


def test_a_topic_that_is_older_than_a_shard_keeps_its_queues_when_it_is_created_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shards, grown = world(2, 1)
    early: Any = Handle(shards, 2)
    assert create_everywhere(early, {"name": "t", "queues": 4, "shards": [0, 1]})
    late: Any = join(monkeypatch, shards, grown, lambda: None)
    again = {"name": "t", "queues": 4, "shards": [0, 1, 2]}
    assert not create_everywhere(late, again)
    assert shards[2].state.topics["t"].shards == (0, 1)
    with pytest.raises(Rejected, match="exists with 4 queues") as caught:
        create_everywhere(late, {**again, "queues": 5})
    assert (caught.value.field, caught.value.limit) == ("queues", 4)

    # A handle that does not know the new shard learns of it.
    assert create_everywhere(early, {"name": "u", "queues": 4, "shards": [0, 1]}, on_all=True)
    assert early.shards == 3
    assert [shard.state.topics["u"].shards for shard in shards] == [(0, 1, 2)] * 3
    # One that has its place keeps it.
    assert create_everywhere(early, {"name": "v", "queues": 1, "shards": [1]})
    assert not create_everywhere(early, {"name": "t", "queues": 4, "shards": [0]}, on_all=True)


def test_a_topic_on_a_shard_that_does_not_exist_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shards, grown = world(2, 1)
    for topic_shards in ([2], [0, 1, 2]):
        with pytest.raises(Rejected, match="shards"):
            shards[0].run("create_topic", {"name": "t", "queues": 1, "shards": topic_shards})
    join(monkeypatch, shards, grown, lambda: None)
    shards[0].run("create_topic", {"name": "t", "queues": 1, "shards": [2]})
