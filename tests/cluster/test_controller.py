"""The rounds of a controller, over a Ray without processes and real files; how start and stop treat its actor."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raymq.client.replica_status import leader_of
from raymq.cluster import start as lifecycle
from raymq.cluster.cluster import Cluster
from raymq.cluster.controller.cluster_watch import QUIET_S
from raymq.cluster.controller.controller import MAKE_PAUSE_S, Controller
from raymq.cluster.controller.controller_metrics import CONTROLLER_METRICS
from raymq.cluster.deploy import ray_host
from raymq.cluster.deploy.resolve import load_endpoints
from raymq.cluster.operations.drain_node import drain_node
from raymq.cluster.operations.rolling_restart import to_give_back
from raymq.cluster.record import cluster_record
from raymq.cluster.record.cluster_record import ClusterRecord
from raymq.cluster.record.paths import ClusterPaths
from raymq.cluster.stop import stop
from raymq.store.base.files import Files
from tests.cluster.test_paths import HOLDER
from tests.support.clock import ManualClock
from tests.support.fake_ray import FakeActor, FakeRay, GetTimeoutError, install

CONTROLLER = "raymq:default:controller"
NODES = ("a", "b", "c")


def log_name(replica: int, shard: int = 0) -> str:
    return f"raymq:default:shard-{shard}:replica-{replica}:commit_log"


class World:
    """A cluster in a Ray without processes, and a controller whose rounds a test makes."""

    def __init__(self, ray: FakeRay, data: Path) -> None:
        self.ray = ray
        self.paths = ClusterPaths(data)
        self.clock = ManualClock()
        self.values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self.controller = self.make_controller()

    def make_controller(self) -> Controller:
        return Controller(
            self.ray, self.paths.data_dir, make_instrument=self._instrument, clock=self.clock
        )

    def _instrument(self, is_counter: bool, name: str, help_: str, tags: tuple[str, ...]) -> Any:
        def record(value: float, given: dict[str, str]) -> None:
            assert set(given) == set(tags)
            key = (name, tuple(sorted(given.items())))
            self.values[key] = value + (self.values.get(key, 0) if is_counter else 0)

        return record

    def start(self, **options: Any) -> Cluster:
        options = {"replicas": 3, "ephemeral": True, **options}
        return lifecycle.start(self.paths.root, address="auto", **options)

    @property
    def record(self) -> ClusterRecord:
        record = cluster_record.load_record(self.paths, Files())
        assert record is not None
        return record

    def actor(self, replica: int, shard: int = 0) -> FakeActor:
        return self.ray.actors[log_name(replica, shard)]

    def set(self, replica: int, shard: int = 0, **state: Any) -> None:
        actor = self.actor(replica, shard)
        actor.states = [{**actor.states[-1], **state}]

    def rounds(self, seconds: float = 2.0) -> dict[str, Any]:
        """Let time pass, with a round every two seconds. Returns: the controller's status."""
        for _ in range(int(seconds / 2)):
            self.clock.advance(2000)
            self.controller.round()
        return self.controller.status()

    def metric(self, name: str) -> Any:
        return self.controller.status()["metrics"][f"raymq_{name}"]

    def fail_over(self, shard: int = 0) -> None:
        """Replica 0 is lost, replica 1 leads, replica 0 is back as a follower."""
        self.set(0, shard, state="DOWN", mode=None, pid=None, is_complete=False)
        self.rounds()
        self.set(1, shard, mode="leader", epoch=2)
        self.rounds()
        self.set(0, shard, state="RUNNING", mode="follower", pid=9, is_complete=True, epoch=2)
        self.rounds()

    def asked_moves(self) -> list[tuple[str, dict[str, Any]]]:
        """(actor, arguments) of each `move_leader`."""
        return [
            (name, args)
            for name, actor in self.ray.actors.items()
            for op, args in actor.operations
            if op == "move_leader"
        ]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> World:
    fake = FakeRay({ray_host.HOST_LABEL: "here"})
    install(fake, monkeypatch, tmp_path / "home")
    return World(fake, tmp_path / "data")


@pytest.fixture
def spread(world: World) -> World:
    """A cluster over three nodes: shard 0 on a, b, c, shard 1 on b, c, a."""
    world.ray.others = {f"node-{label}": {"raymq-node": label} for label in NODES}
    world.start(shards=2, nodes=NODES, insecure=True)
    assert world.record.placement == (("a", "b", "c"), ("b", "c", "a"))
    world.rounds()
    return world


# --- its actor ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("replicas", "made"), [(1, False), (2, False), (3, True), (5, True)])
def test_a_cluster_has_a_controller_if_its_replicas_can_take_over(
    world: World, replicas: int, made: bool
) -> None:
    world.start(replicas=replicas)
    assert (CONTROLLER in world.ray.actors) == made
    if made:
        options = world.ray.options[CONTROLLER]
        assert options["shell"] == "ControllerActor"
        assert options["lifetime"] == "detached"
        assert options["get_if_exists"] is True
        assert (options["max_restarts"], options["max_task_retries"], options["num_cpus"]) == (
            -1,
            0,
            0,
        )
        assert options["label_selector"] == {ray_host.HOST_LABEL: "here"}


def test_every_start_makes_a_new_controller_and_keeps_all_other_actors(world: World) -> None:
    world.start()
    before = dict(world.ray.actors)
    del world.ray.actors[CONTROLLER]
    world.start()
    first = world.ray.actors[CONTROLLER]
    world.start()
    assert world.ray.actors[CONTROLLER] is not first
    kept = {name: actor for name, actor in world.ray.actors.items() if name != CONTROLLER}
    assert kept == {name: actor for name, actor in before.items() if name != CONTROLLER}


def test_stop_ends_the_controller_before_all_others(world: World) -> None:
    world.start()
    report = stop(world.paths.root)
    assert world.ray.actors == {}
    assert world.ray.events[0] == ("kill", CONTROLLER)
    assert report.actors[CONTROLLER] == "closed"
    assert report.clean


def test_the_controller_loads_neither_arrow_nor_numpy() -> None:
    code = """
import sys
import raymq.cluster.controller.actor
from raymq.cluster.deploy import actor_end, actor_set, actor_states
from raymq.actors.ray import actor_classes
print([name for name in ("pyarrow", "numpy", "ray") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")


# --- looks ----------------------------------------------------------------------------------------


def test_a_round_reports_every_metric_of_a_whole_cluster(world: World) -> None:
    world.start(shards=2)
    status = world.rounds()
    assert status["errors"] == {}
    assert status["leaders"] == {0: 0, 1: 0}
    gauges = {metric.name for metric in CONTROLLER_METRICS if metric.kind == "gauge"}
    # A counter without a count is not exported.
    assert {name for name, _ in world.values} == gauges
    assert set(status["metrics"]) == {metric.name for metric in CONTROLLER_METRICS}
    assert world.values["raymq_shards_without_leader", (("cluster", "default"),)] == 0
    seconds = "raymq_shard_without_leader_seconds"
    assert world.values[seconds, (("cluster", "default"), ("shard", "1"))] == 0


def test_a_replica_that_hangs_gets_one_call_until_it_answers(world: World) -> None:
    world.start()
    world.rounds()
    hanging: Any = world.actor(2)
    states, calls = hanging.states, list[str]()

    def ready() -> Any:
        calls.append("ready")
        return hanging.on_ready

    hanging.ready = SimpleNamespace(remote=ready)
    hanging.states = [GetTimeoutError()]
    world.rounds(10)
    assert len(calls) == 1
    assert world.metric("down_replicas") == 1
    hanging.states = states
    world.rounds(4)
    assert len(calls) == 2
    assert world.metric("down_replicas") == 0


def test_a_replica_of_an_absent_node_is_down_and_is_not_asked(spread: World) -> None:
    del spread.ray.others["node-c"]
    spread.actor(2).states = [AssertionError("asked")]
    assert spread.rounds()["errors"] == {}
    assert spread.metric("down_replicas") == 2
    assert spread.metric("under_replicated_shards") == 2


def test_a_step_that_fails_is_reported_and_the_next_round_goes_on(world: World) -> None:
    world.start()
    world.rounds()
    text = world.paths.cluster.read_text(encoding="utf-8")
    world.paths.cluster.write_text("{", encoding="utf-8")
    assert "is damaged" in world.rounds()["errors"]["look"]
    world.paths.cluster.unlink()
    assert "has no cluster.json" in world.rounds()["errors"]["look"]
    world.paths.cluster.write_text(text, encoding="utf-8")
    assert world.rounds()["errors"] == {}


# --- forgotten actors -----------------------------------------------------------------------------


def forget(world: World, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Let Ray forget an actor. Returns: its spec and its options."""
    actor = world.ray.actors.pop(name)
    return actor.spec, world.ray.options.pop(name)


@pytest.mark.parametrize("role", ["commit_log", "group_commit", "replication"])
def test_a_forgotten_actor_is_made_again_as_a_start_makes_it(world: World, role: str) -> None:
    world.start()
    # The specs of a first start say that no store has been made yet.
    stop(world.paths.root)
    world.start()
    name = f"raymq:default:shard-0:replica-2:{role}"
    lost = forget(world, name)
    before = dict(world.ray.actors)
    status = world.rounds()
    assert status["errors"] == {}
    made = world.ray.actors[name]
    assert (made.spec, world.ray.options[name]) == lost
    assert {each: actor for each, actor in world.ray.actors.items() if each != name} == before
    assert world.metric("controller_restarts_total") == 1


def test_its_place_is_the_one_in_the_record_now(spread: World) -> None:
    forget(spread, log_name(1))
    record = spread.record.with_new_replica(0, 1, "d")
    cluster_record.save_record(spread.paths, record, Files())
    spread.rounds()
    assert spread.ray.options[log_name(1)]["label_selector"] == {"raymq-node": "d"}
    assert spread.actor(1).spec["generation"] == 1


@contextlib.contextmanager
def command(world: World) -> Iterator[None]:
    """A command that works on the data directory."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, world.paths.data_dir],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        yield


def test_nothing_is_made_while_a_command_has_the_directory_or_after_stop(world: World) -> None:
    world.start()
    world.rounds()
    with command(world):
        forget(world, log_name(1))
        assert world.rounds()["errors"] == {}
        assert log_name(1) not in world.ray.actors
    world.rounds()
    assert log_name(1) in world.ray.actors

    # A controller that is cut off from Ray outlives `stop`.
    stop(world.paths.root)
    world.clock.advance(1000 * MAKE_PAUSE_S)
    assert world.rounds()["errors"] == {}
    assert world.ray.actors == {}
    assert world.metric("down_replicas") == 3


def test_nothing_is_made_in_a_ray_that_is_not_the_clusters(world: World) -> None:
    world.start()
    forget(world, log_name(1))
    ray_host.save_target(world.paths, ray_host.RayTarget(address="10.0.0.1:7777"), Files())
    world.rounds()
    assert log_name(1) not in world.ray.actors


def test_an_actor_that_is_forgotten_at_once_again_is_not_made_all_the_time(world: World) -> None:
    world.start()
    for _ in range(int(MAKE_PAUSE_S / 2)):
        world.ray.actors.pop(log_name(1), None)
        world.rounds()
    assert world.metric("controller_restarts_total") == 1
    world.ray.actors.pop(log_name(1), None)
    world.rounds(MAKE_PAUSE_S)
    assert world.metric("controller_restarts_total") == 2


def test_two_controllers_make_one_actor(world: World) -> None:
    world.start()
    other = world.make_controller()
    forget(world, log_name(1))
    world.rounds()
    made = world.actor(1)
    other.round()
    assert world.actor(1) is made
    assert other.status()["metrics"]["raymq_controller_restarts_total"] == 0


# --- routes ---------------------------------------------------------------------------------------


def test_all_replicas_learn_where_the_others_listen_when_that_changes(spread: World) -> None:
    spread.set(1, endpoint="10.0.0.2:9999", mode="leader", epoch=2)
    spread.set(2, state="DOWN", endpoint=None)
    known = spread.actor(0).replicas
    assert known is not None
    spread.rounds()
    for replica, shard in ((0, 0), (1, 0), (0, 1), (1, 1), (2, 1)):
        actor = spread.actor(replica, shard)
        assert actor.routes == {"0": "10.0.0.2:9999", "1": "127.0.0.1:7001"}
        assert actor.replicas is not None
        # What is known of the one that does not answer stays known.
        assert actor.replicas["0"] == {**known["0"], "1": "10.0.0.2:9999"}
    assert load_endpoints(spread.paths, Files())[0] == "10.0.0.2:9999"

    spread.actor(0).routes = None
    assert spread.rounds(10)["errors"] == {}
    assert spread.actor(0).routes is None


# --- moves ----------------------------------------------------------------------------------------


def test_a_leader_is_asked_to_hand_over_to_the_replica_that_was_lost(spread: World) -> None:
    spread.fail_over()
    spread.rounds(QUIET_S - 2)
    assert spread.asked_moves() == []
    status = spread.rounds()
    assert spread.asked_moves() == [(log_name(1), {"replica": 0})]
    assert status["errors"] == {}
    assert spread.metric("controller_moves_total") == 1


def test_on_one_machine_nothing_is_moved(world: World) -> None:
    world.start()
    world.rounds()
    world.fail_over()
    world.rounds(4 * QUIET_S)
    assert world.asked_moves() == []


def test_nothing_is_moved_while_a_command_has_the_directory(spread: World) -> None:
    spread.fail_over()
    with command(spread):
        spread.rounds(QUIET_S)
        assert spread.asked_moves() == []
    spread.rounds(QUIET_S)
    assert len(spread.asked_moves()) == 1


def test_a_drained_node_gets_no_leadership_back_until_the_next_start(
    spread: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    spread.fail_over()
    monkeypatch.setattr("raymq.client.replica_status.statuses", lambda *args: rows(spread))
    cluster: Any = SimpleNamespace(
        placement=spread.record.placement, replicas=3, data_dir=spread.paths.data_dir
    )
    # It leads nothing now: shard 0 went away from it, and would come back.
    assert drain_node(cluster, "a").moved == {}
    assert spread.record.drained_nodes == ("a",)
    spread.rounds(4 * QUIET_S)
    assert spread.asked_moves() == []
    spread.start()
    assert spread.record.drained_nodes == ()


def rows(world: World) -> list[dict[str, Any]]:
    """As of `replica_status.statuses`."""
    return [
        {"shard": shard, "replica": replica, "synced": 0, **world.actor(replica, shard).states[-1]}
        for shard in range(2)
        for replica in range(3)
    ]


def test_a_rolling_restart_gives_the_leaderships_back_but_not_to_a_drained_node(
    spread: World,
) -> None:
    spread.set(0, 1, mode="follower")
    spread.set(2, 1, mode="leader")
    before = rows(spread)
    assert leader_of(before[3:]) == 2
    assert to_give_back(spread.record, before) == {0: 0, 1: 2}
    assert to_give_back(replace(spread.record, drained_nodes=("b",)), before) == {0: 0, 1: 2}
    # Replica 0 of shard 0 and replica 2 of shard 1 are on node a.
    assert to_give_back(replace(spread.record, drained_nodes=("a",)), before) == {}
    on_one_machine = replace(spread.record, placement=None)
    assert to_give_back(on_one_machine, before) == {}
