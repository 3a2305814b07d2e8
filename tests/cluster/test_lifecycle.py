"""start, connect, stop and the actors they make, over a Ray without processes."""

from __future__ import annotations

import os
import pickle
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from raymq.actors.shared import memory_order
from raymq.actors.shared.wakeup import Wakeup, wakeup_directory
from raymq.client.topics import new_topic
from raymq.client.transport.routes import Routes
from raymq.cluster import start as lifecycle
from raymq.cluster.cluster import Cluster
from raymq.cluster.connect import connect
from raymq.cluster.deploy import (
    actor_end,
    actor_states,
    owned_ray,
    ray_client,
    ray_host,
    ray_release,
)
from raymq.cluster.deploy.ray_host import RayTarget
from raymq.cluster.record.cluster_record import StartOptions, load_record, new_record
from raymq.cluster.record.paths import ClusterPaths
from raymq.cluster.stop import stop
from raymq.store.base.errors import AnotherShard, Corrupt, DeliveryUnknown, Rejected, Unavailable
from raymq.store.base.files import Files
from tests.support.clock import ManualClock
from tests.support.fake_backend import TOKEN, FakeCluster
from tests.support.fake_ray import (
    FakeActor,
    FakeRay,
    GetTimeoutError,
    JumpingClock,
    RayActorError,
    install,
)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeRay:
    """A Ray that is always there, in place of the real one."""
    fake = FakeRay({ray_host.HOST_LABEL: "here"})
    install(fake, monkeypatch, tmp_path / "home")
    return fake


def begin(tmp_path: Path, **options: Any) -> Cluster:
    return lifecycle.start(tmp_path / "data", address="auto", ephemeral=True, **options)


def roles(ray: FakeRay) -> list[str]:
    return [name.removeprefix("raymq:default:") for name in ray.actors]


# --- start ----------------------------------------------------------------------------------------


def test_a_mirrored_shard_gets_its_five_actors_followers_first(
    ray: FakeRay, tmp_path: Path
) -> None:
    begin(tmp_path, replicas=2)
    assert roles(ray) == [
        "shard-0:replica-1:commit_log",
        "shard-0:replica-1:group_commit",
        "shard-0:replica-0:commit_log",
        "shard-0:replica-0:group_commit",
        "shard-0:replica-0:replication",
    ]
    leader = ray.actors["raymq:default:shard-0:replica-0:commit_log"].spec
    assert leader["candidates"] == (0,)
    directory = str(tmp_path / "data" / "shard-0" / "replica-1")
    assert leader["peers"] == {1: [directory, "raymq:default:shard-0:replica-1:commit_log"]}
    assert leader["data_dir"] == str(tmp_path / "data" / "shard-0" / "replica-0")


def test_every_actor_outlives_its_starter_restarts_and_never_retries(
    ray: FakeRay, tmp_path: Path
) -> None:
    begin(tmp_path, flush="async")
    assert {options["shell"] for options in ray.options.values()} == {
        "CommitLogActor",
        "FlushActor",
    }
    for options in ray.options.values():
        assert options["namespace"] == "raymq"
        assert options["lifetime"] == "detached"
        assert options["get_if_exists"] is True
        assert options["max_restarts"] == -1
        assert options["max_task_retries"] == 0
        assert options["num_cpus"] == 0
        assert options["label_selector"] == {ray_host.HOST_LABEL: "here"}


def test_another_architecture_is_refused_before_anything_is_made(
    ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = os.uname()
    other = os.uname_result((*machine[:4], "riscv64"))
    monkeypatch.setattr(os, "uname", lambda: other)
    with pytest.raises(Rejected, match="order that riscv64 does not keep") as refusal:
        begin(tmp_path)
    assert refusal.value.field == "machine"
    assert not (tmp_path / "data").exists()
    assert not ray.actors


def test_an_experimental_architecture_is_named_at_each_start(
    ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = os.uname_result((*os.uname()[:4], "aarch64"))
    monkeypatch.setattr(os, "uname", lambda: other)
    monkeypatch.setattr(memory_order, "check_architecture", lambda machine: None)
    for _ in range(2):
        lines: list[str] = []
        lifecycle.start(tmp_path / "data", address="auto", ephemeral=True, progress=lines.append)
        (warning,) = [line for line in lines if line.startswith("WARNING")]
        assert "aarch64 is experimental" in warning


def test_a_ray_without_our_label_pins_the_actors_to_this_node(ray: FakeRay, tmp_path: Path) -> None:
    ray.labels = {}
    begin(tmp_path)
    assert {str(o["label_selector"]) for o in ray.options.values()} == {"{'ray.io/node-id': 'n1'}"}


def test_the_store_gets_its_options_apart_from_flush(ray: FakeRay, tmp_path: Path) -> None:
    begin(tmp_path, segment_size_bytes=8192)
    spec = ray.actors["raymq:default:shard-0:replica-0:commit_log"].spec
    assert spec["flush"] == "sync"
    assert spec["options"]["segment_size_bytes"] == 8192
    assert "flush" not in spec["options"]


def test_every_leader_learns_the_endpoints_of_all(ray: FakeRay, tmp_path: Path) -> None:
    cluster = begin(tmp_path, shards=2)
    assert cluster.endpoints == {0: "127.0.0.1:7000", 1: "127.0.0.1:7001"}
    for shard in range(2):
        actor = ray.actors[f"raymq:default:shard-{shard}:replica-0:commit_log"]
        assert actor.routes == {"0": "127.0.0.1:7000", "1": "127.0.0.1:7001"}


def test_start_waits_for_recovery_and_reports_each_change_once(
    ray: FakeRay, tmp_path: Path
) -> None:
    starting = {"state": "STARTING", "endpoint": None, "error": None}
    locked = {"state": "STARTING", "endpoint": None, "error": "store is open by pid 7"}

    def slow(actor: FakeActor) -> None:
        actor.states[:0] = [starting, starting, locked, locked, RayActorError("x\nworker died")]

    ray.on_create = slow
    lines: list[str] = []
    begin(tmp_path, progress=lines.append)
    assert [line for line in lines if line.startswith("shard 0")] == [
        "shard 0 replica 0: STARTING",
        "shard 0 replica 0: STARTING (store is open by pid 7)",
        "shard 0 replica 0: DOWN (worker died)",
        "shard 0 replica 0: RUNNING",
    ]


def test_start_waits_for_every_satellite_because_ray_starts_none_without_its_head(
    ray: FakeRay, tmp_path: Path
) -> None:
    def slow(actor: FakeActor) -> None:
        missing = {**actor.states[0], "missing_roles": ["group_commit"]}
        actor.states[:0] = [missing, missing]

    ray.on_create = slow
    lines: list[str] = []
    begin(tmp_path, progress=lines.append)
    assert [line for line in lines if line.startswith("shard 0")] == [
        "shard 0 replica 0: RUNNING (waiting for group_commit)",
        "shard 0 replica 0: RUNNING",
    ]


def test_a_shard_that_does_not_come_up_is_named_with_its_error(
    ray: FakeRay, tmp_path: Path
) -> None:
    def broken(actor: FakeActor) -> None:
        if actor.spec["shard"] == 1:
            actor.states = [{"state": "STARTING", "endpoint": None, "error": "no room"}]

    ray.on_create = broken
    with pytest.raises(Unavailable) as caught:
        begin(tmp_path, shards=2, timeout_s=5)
    assert "1 of 2" in str(caught.value)
    assert "shard 1 replica 0: STARTING (no room)" in str(caught.value)
    assert list(caught.value.shards) == ["raymq:default:shard-1:replica-0:commit_log"]
    # The started processes keep trying, and `stop` knows where they are.
    target = ray_host.load_target(ClusterPaths(tmp_path / "data"), Files())
    assert target == RayTarget(address="10.0.0.1:6379")


def test_a_shard_that_only_reads_is_up_and_says_why(
    ray: FakeRay, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def reading(actor: FakeActor) -> None:
        if actor.spec["shard"] == 1:
            actor.states = [{**actor.states[0], "state": "READ_ONLY", "error": "EIO"}]

    ray.on_create = reading
    lines: list[str] = []
    cluster = begin(tmp_path, shards=2, timeout_s=0, progress=lines.append)
    reported = "shard 1 replica 0: READ_ONLY (EIO)"
    assert reported in lines
    begin(tmp_path, shards=2)
    assert [each.message for each in caplog.records if each.levelname == "WARNING"] == [reported]
    assert cluster.endpoints == {0: "127.0.0.1:7000", 1: "127.0.0.1:7001"}


def test_damage_is_reported_at_once(ray: FakeRay, tmp_path: Path) -> None:
    def damaged(actor: FakeActor) -> None:
        starting = {"state": "STARTING", "endpoint": None}
        actor.states = [{**starting, "error": "Corrupt: chain", "is_damaged": True}]

    ray.on_create = damaged
    with pytest.raises(Corrupt, match=r"shard 0 replica 0: STARTING \(Corrupt: chain\)"):
        begin(tmp_path, timeout_s=10**9)


@pytest.mark.parametrize(("lost", "may"), [((2,), True), ((2,), False), ((1, 2), True)])
def test_a_damaged_replica_of_three_is_waited_for_if_it_begins_again(
    ray: FakeRay, tmp_path: Path, lost: tuple[int, ...], may: bool
) -> None:
    error = "Corrupt: recovery stopped at offset 7"
    starting = {
        "state": "STARTING",
        "endpoint": None,
        "error": error,
        "mode": None,
        "epoch": 0,
        "missing_roles": [],
        "is_damaged": True,
        "may_begin_again": may,
    }

    def damaged(actor: FakeActor) -> None:
        if any(actor.name.endswith(f"replica-{each}:commit_log") for each in lost):
            actor.states = [starting, starting, *actor.states]

    ray.on_create = damaged
    lines: list[str] = []
    if may and len(lost) == 1:
        begin(tmp_path, replicas=3, progress=lines.append)
        assert f"shard 0 replica 2: STARTING ({error})" in lines
    else:
        with pytest.raises(Corrupt, match="recovery stopped"):
            begin(tmp_path, replicas=3, timeout_s=10**9)


def test_an_actor_that_ray_has_not_started_yet_is_pending(ray: FakeRay, tmp_path: Path) -> None:
    def pending(actor: FakeActor) -> None:
        actor.states = [GetTimeoutError()]

    ray.on_create = pending
    with pytest.raises(Unavailable, match="PENDING"):
        begin(tmp_path, timeout_s=1)


def test_starting_again_keeps_the_running_actors_and_their_owner(
    ray: FakeRay, tmp_path: Path
) -> None:
    first = begin(tmp_path)
    actors = dict(ray.actors)
    second = begin(tmp_path)
    assert ray.actors == actors
    assert second.cluster_id == first.cluster_id
    with second:
        pass
    assert ray.actors == actors
    with first:
        pass
    assert ray.actors == {}


def test_another_cluster_of_the_same_name_is_refused(ray: FakeRay, tmp_path: Path) -> None:
    begin(tmp_path)
    with pytest.raises(Rejected, match="another cluster named 'default'"):
        lifecycle.start(tmp_path / "other", address="auto", ephemeral=True)


def test_the_flush_mode_of_a_running_cluster_stays_and_is_not_recorded_otherwise(
    ray: FakeRay, tmp_path: Path
) -> None:
    begin(tmp_path)
    with pytest.raises(Rejected, match="flush='sync'"):
        begin(tmp_path, flush="async")
    stop(tmp_path / "data")
    begin(tmp_path)
    assert "shard-0:replica-0:group_commit" in roles(ray)


def test_a_data_directory_once_declared_ephemeral_needs_no_second_word(
    ray: FakeRay, tmp_path: Path
) -> None:
    begin(tmp_path)
    stop(tmp_path / "data")
    assert lifecycle.start(tmp_path / "data", address="auto").shards == 1


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "example.org", "::"])
def test_a_host_that_others_reach_is_refused_unless_accepted(
    host: str, ray: FakeRay, tmp_path: Path
) -> None:
    with pytest.raises(Rejected, match="insecure=True"):
        begin(tmp_path, host=host)
    assert not (tmp_path / "data").exists()
    begin(tmp_path, host=host, insecure=True)


def test_a_ray_client_address_is_refused(ray: FakeRay, tmp_path: Path) -> None:
    with pytest.raises(Rejected, match="Ray Client"):
        lifecycle.start(tmp_path / "data", address="ray://head:10001", ephemeral=True)


def test_a_first_start_that_finds_no_ray_decides_nothing(
    ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_ray(*args: Any, **options: Any) -> Any:
        raise Unavailable("Ray ended while it started")

    with monkeypatch.context() as patched:
        patched.setattr(ray_host, "session", no_ray)
        with pytest.raises(Unavailable):
            begin(tmp_path, shards=1)
        patched.setattr(owned_ray, "start_owned", no_ray)
        with pytest.raises(Unavailable):
            lifecycle.start(tmp_path / "data", shards=1, ephemeral=True)
    assert begin(tmp_path, shards=2).shards == 2


def test_a_first_start_whose_ray_neither_comes_up_nor_ends_leaves_it_to_stop(
    ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owned = ray_host.OwnedRay(
        address="127.0.0.1:1",
        pid=2**22 + 1,
        start_time=1,
        boot_id=1,
        mark="none",
        temp_dir=str(tmp_path / "ray"),
        auth_mode="disabled",
        auth_token_path=None,
    )

    def stuck(paths: ClusterPaths, **options: Any) -> Any:
        ray_host.save_target(paths, RayTarget(address=owned.address, owned=owned), Files())
        raise Unavailable("Ray could not be ended")

    monkeypatch.setattr(owned_ray, "start_owned", stuck)
    with pytest.raises(Unavailable, match="could not be ended"):
        lifecycle.start(tmp_path / "data", ephemeral=True)
    assert stop(tmp_path / "data").ray == "not running"
    assert not (tmp_path / "data" / "ray.json").exists()


def test_an_address_where_nothing_listens_is_said_at_once(tmp_path: Path) -> None:
    for address in ("127.0.0.1:1", "[::1]:1"):
        with pytest.raises(Unavailable, match="nothing listens there"):
            lifecycle.start(tmp_path / "data", address=address, ephemeral=True)


def test_the_shells_environment_names_the_ray(
    ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.9.9.9:6379")
    cluster = lifecycle.start(tmp_path / "data", ephemeral=True)
    # The address that Ray reports, not the given one: "auto" means something else in another shell.
    assert cluster.ray_address == "10.0.0.1:6379"


# --- stop -----------------------------------------------------------------------------------------


def test_stop_closes_leaders_then_followers_then_satellites_and_leaves_a_foreign_ray(
    ray: FakeRay, tmp_path: Path
) -> None:
    begin(tmp_path, replicas=2)
    report = stop(tmp_path / "data")

    assert report.clean
    assert report.ray == "left running"
    assert set(report.actors.values()) == {"closed"}

    order = [name.removeprefix("raymq:default:shard-0:") for _, name in ray.events]
    assert order == [
        *["replica-0:commit_log"] * 2,
        *["replica-1:commit_log"] * 2,
        # Their CommitLogs have let them finish.
        *["replica-0:replication", "replica-0:group_commit", "replica-1:group_commit"],
    ]

    assert (tmp_path / "data" / "cluster.json").exists()
    assert not (tmp_path / "data" / "ray.json").exists()


def test_a_shard_that_does_not_close_is_ended_and_the_stop_is_not_clean(
    ray: FakeRay, tmp_path: Path
) -> None:
    begin(tmp_path)
    leader = ray.actors["raymq:default:shard-0:replica-0:commit_log"]
    leader.close_failure = RayActorError("the worker died\nstack")
    report = stop(tmp_path / "data")
    assert not report.clean
    assert report.actors == {
        leader.name: "was down: the worker died",
        leader.name.replace("commit_log", "group_commit"): "its CommitLog did not close; ended",
    }
    assert ray.actors == {}


class HangingRay(FakeRay):
    """A Ray whose first calls are not answered: each takes the time that its caller grants."""

    def __init__(self, other: FakeRay, hanging: int) -> None:
        super().__init__()
        self.actors = other.actors
        self.hanging = hanging
        self.clock = JumpingClock()
        self.granted: list[float] = []

    def get(self, calls: Any, timeout: float) -> Any:
        self.granted.append(timeout)
        if len(self.granted) > self.hanging:
            return super().get(calls, timeout)
        self.clock.sleep_ms(1000 * timeout)
        raise GetTimeoutError

    def close(self, data_dir: Path, timeout_s: float) -> list[str]:
        """The outcomes of the CommitLogs."""
        record = load_record(ClusterPaths(data_dir), Files())
        assert record is not None
        outcomes = actor_end.close(self, record, clock=self.clock, timeout_s=timeout_s)
        return [outcome for name, outcome in outcomes.items() if name.endswith("commit_log")]


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_stop_takes_its_time_once_however_many_shards_hang(
    ray: FakeRay, tmp_path: Path, replicas: int
) -> None:
    begin(tmp_path, shards=3, replicas=replicas)
    hanging = HangingRay(ray, 3 * replicas)
    outcomes = hanging.close(tmp_path / "data", timeout_s=10.0)
    assert hanging.clock.monotonic() == pytest.approx(10.0)
    assert outcomes == ["did not close in time; ended"] * 3 * replicas


def test_a_leader_that_hangs_leaves_followers_the_time_to_close(
    ray: FakeRay, tmp_path: Path
) -> None:
    begin(tmp_path, shards=3, replicas=2)
    hanging = HangingRay(ray, 1)
    outcomes = hanging.close(tmp_path / "data", timeout_s=10.0)
    # A leader that has closed meanwhile answers without any wait.
    assert hanging.granted == pytest.approx([5.0, 0.0, 0.0, 5.0, 5.0, 5.0])
    assert outcomes == ["did not close in time; ended"] + ["closed"] * 5


def test_stop_ends_the_coordinators_of_its_own_queues_last(ray: FakeRay, tmp_path: Path) -> None:
    begin(tmp_path)
    others = "raymq:other:queue:jobs"
    for name in ("raymq:default:queue:jobs", others):
        ray.actors[name] = FakeActor(ray, name, "queue", {"shard": 0})
    report = stop(tmp_path / "data")
    assert report.clean
    assert ray.events[-1] == ("kill", "raymq:default:queue:jobs")
    assert report.actors["raymq:default:queue:jobs"] == "closed"
    assert list(ray.actors) == [others]


def test_stop_leaves_another_cluster_of_its_name_in_a_new_ray_alone(
    ray: FakeRay, tmp_path: Path
) -> None:
    begin(tmp_path, shards=2)
    # Ray was started again at its address, and another cluster started in it.
    ray.actors.clear()
    other = lifecycle.start(tmp_path / "other", shards=2, address="auto", ephemeral=True)
    actors = dict(ray.actors)
    silent = ray.actors["raymq:default:shard-0:replica-0:commit_log"]
    silent.status_failure = GetTimeoutError()
    report = stop(tmp_path / "data")
    assert (report.clean, report.actors, report.ray) == (True, {}, "not running")
    assert not (tmp_path / "data" / "ray.json").exists()
    assert ray.actors == actors
    other.stop()
    assert ray.actors == {}


def test_stop_removes_the_directory_of_a_replicas_wakeup_sockets(
    ray: FakeRay, tmp_path: Path
) -> None:
    begin(tmp_path)
    replica = str(ClusterPaths(tmp_path / "data").replica(0, 0))
    Wakeup(replica, "commit_log", files=Files()).close()
    assert Path(wakeup_directory(replica)).exists()
    stop(tmp_path / "data")
    assert not Path(wakeup_directory(replica)).exists()


def test_stopping_twice_is_not_an_error(ray: FakeRay, tmp_path: Path) -> None:
    begin(tmp_path)
    stop(tmp_path / "data")
    report = stop(tmp_path / "data")
    assert report.clean
    assert report.ray == "not running"


def test_stop_of_something_else_is_refused(ray: FakeRay, tmp_path: Path) -> None:
    with pytest.raises(Rejected, match=r"no cluster\.json"):
        stop(tmp_path)
    with pytest.raises(Rejected, match="known: none"):
        stop("orders")
    with pytest.raises(Rejected, match="on the machine with the data directory"):
        stop("raymq://127.0.0.1:7000")


def test_stop_without_a_target_says_what_it_stops_and_refuses_to_choose(
    ray: FakeRay, tmp_path: Path
) -> None:
    lifecycle.start(tmp_path / "a", name="default", address="auto", ephemeral=True)
    said: list[str] = []
    assert stop(progress=said.append).clean
    assert said[0] == f"stopping cluster 'default' of {tmp_path / 'a'}"
    lifecycle.start(tmp_path / "b", name="b", address="auto", ephemeral=True)
    actors = dict(ray.actors)
    with pytest.raises(Rejected, match="several clusters are known here") as refused:
        stop()
    assert f"b in {tmp_path / 'b'}; default in {tmp_path / 'a'} (does not run)" in str(
        refused.value
    )
    assert ray.actors == actors
    assert stop("b").clean


# --- connect --------------------------------------------------------------------------------------


OWNED = ray_host.OwnedRay(
    address="127.0.0.1:7",
    pid=1,
    start_time=0,
    boot_id=0,
    mark="m",
    temp_dir="/x",
    auth_mode="token",
    auth_token_path="/x/token",
)


@pytest.mark.parametrize(
    ("environment", "adopted"),
    [
        ({}, True),
        ({"RAY_ADDRESS": "127.0.0.1:7"}, True),
        ({"RAY_ADDRESS": "10.0.0.1:6379"}, False),
        ({"RAY_AUTH_MODE": "disabled"}, False),
    ],
)
def test_connecting_lets_this_process_join_the_ray_of_the_cluster(
    environment: dict[str, str],
    adopted: bool,
    ray: FakeRay,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begin(tmp_path)
    own = RayTarget(address=OWNED.address, owned=OWNED)
    monkeypatch.setattr(ray_host, "running_target", lambda paths, files: own)
    monkeypatch.setattr(ray_release, "reload_authentication", lambda: None)
    monkeypatch.setattr(ray_host, "_adopted", {})
    monkeypatch.setattr(os, "environ", {"RAYMQ_HOME": os.environ["RAYMQ_HOME"], **environment})
    cluster = connect()
    assert cluster.ray_address == OWNED.address
    assert (os.environ.get("RAY_AUTH_TOKEN_PATH") == "/x/token") is adopted


def test_a_cluster_is_found_by_directory_name_or_as_the_only_one(
    ray: FakeRay, tmp_path: Path
) -> None:
    started = begin(tmp_path, name="orders")
    endpoint = ClusterPaths(tmp_path / "data").replica(0, 0) / "raymq" / "endpoint"
    endpoint.parent.mkdir(parents=True)
    endpoint.write_text('{"host": "127.0.0.1", "port": 7123}')
    for target in (None, "orders", tmp_path / "data"):
        cluster = connect(target)
        assert cluster.cluster_id == started.cluster_id
        assert cluster.token == started.token
        assert cluster.endpoints == {0: "127.0.0.1:7123"}


def test_of_several_clusters_one_must_be_named(ray: FakeRay, tmp_path: Path) -> None:
    for name in ("a", "b"):
        lifecycle.start(tmp_path / name, name=name, address="auto", ephemeral=True)
    with pytest.raises(Rejected, match="a, b"):
        connect()
    assert connect("b").name == "b"


def test_a_name_that_is_not_known_here_is_asked_of_ray(
    ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = begin(tmp_path, name="orders", shards=2)
    monkeypatch.setenv("RAYMQ_HOME", str(tmp_path / "elsewhere"))
    with pytest.raises(Rejected, match="set RAY_ADDRESS"):
        connect("orders")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    cluster = connect("orders")
    assert cluster.token == started.token
    assert cluster.endpoints == {0: "127.0.0.1:7000", 1: "127.0.0.1:7001"}
    with pytest.raises(Rejected, match="no cluster 'x'"):
        connect("x")
    with pytest.raises(Rejected, match="the machine that has"):
        cluster.stop()


def test_a_shell_whose_ray_address_is_ray_clients_looks_the_name_up_through_it(
    ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = begin(tmp_path, name="orders")
    urls: list[str] = []

    def connect_url(url: str) -> Cluster:
        urls.append(url)
        return started

    monkeypatch.setattr(ray_client, "connect_url", connect_url)
    monkeypatch.setenv("RAYMQ_HOME", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    assert connect("orders").cluster_id == started.cluster_id
    assert urls == ["ray://head:10001/orders"]


@pytest.mark.parametrize("url", ["raymq://", "raymq://host", "raymq://host:port"])
def test_a_malformed_url_is_refused(url: str) -> None:
    with pytest.raises(Rejected, match="raymq://host:port"):
        connect(url, token="t")


def test_a_url_needs_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAYMQ_TOKEN", raising=False)
    with pytest.raises(Rejected, match="RAYMQ_TOKEN"):
        connect("raymq://host:1")


def test_the_newline_at_the_end_of_a_token_is_not_part_of_it() -> None:
    shard = FakeCluster()
    with (
        closing(shard),
        connect(f"raymq://{shard.endpoints[0]}", token=f"{TOKEN}\n") as found,
    ):
        assert found.token == TOKEN


@pytest.mark.parametrize("token", ["two words", "a\x00b", "tokén", "a\nb"])
def test_a_token_with_characters_that_no_token_has_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(Rejected, match="content of the file") as refused:
        connect("raymq://127.0.0.1:1", token=token)
    assert refused.value.field == "token"
    assert token not in str(refused.value)


# --- the handle -----------------------------------------------------------------------------------


def test_a_handle_pickles_and_its_copy_does_not_stop_the_cluster(
    ray: FakeRay, tmp_path: Path
) -> None:
    cluster = begin(tmp_path)
    copy = pickle.loads(pickle.dumps(cluster))
    assert copy.endpoints == cluster.endpoints
    assert copy.token == cluster.token
    with copy:
        pass
    assert ray.actors


class Shards(Cluster):
    """A cluster whose shards answer from a table."""

    answers: dict[tuple[int, str], Any]
    asked: list[tuple[int, str]]

    def _routes(self) -> Routes:
        return RoutesOfTable.of(self)

    def __del__(self) -> None:
        """Do nothing: the connections hold nothing open."""

    def answer(self, shard: int, op: str) -> dict[str, Any]:
        self.asked.append((shard, op))
        answer = self.answers.get((shard, op), Unavailable(f"shard {shard} is down"))
        if isinstance(answer, list):
            answer = answer.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return dict(answer)


class RoutesOfTable(Routes):
    """The routes to these shards."""

    cluster: Any

    @classmethod
    def of(cls, cluster: Any) -> RoutesOfTable:
        routes: Any = super().of(cluster)
        routes.cluster = cluster
        return routes

    def _connect_to(self, shard: int, endpoint: str) -> Any:
        return ShardOfTable(self.cluster, shard)


class ShardOfTable:
    """A connection to one of these shards."""

    def __init__(self, cluster: Shards, shard: int) -> None:
        self.cluster, self.shard = cluster, shard

    def call(self, op: str, args: dict[str, Any], timeout: float) -> dict[str, Any]:
        return self.cluster.answer(self.shard, op)

    def close(self) -> None:
        """Nothing is open."""


def shards(answers: dict[tuple[int, str], Any], count: int = 2, **options: Any) -> Shards:
    options.setdefault("resolver", dict)
    cluster = Shards(
        name="c",
        cluster_id="ab" * 16,
        shards=count,
        token="t",
        endpoints={shard: f"h:{shard}" for shard in range(count)},
        **options,
    )
    cluster.answers = answers
    cluster.asked = []
    return cluster


def test_status_is_degraded_when_one_shard_is_down() -> None:
    running = {"shard": 0, "state": "RUNNING"}
    cluster = shards({(0, "status"): running})
    facts = cluster.status()
    assert facts["state"] == "DEGRADED"
    assert facts["shards"][1]["error"] == "shard 1 is down"
    assert shards({}).status()["state"] == "DOWN"
    both = {(0, "status"): running, (1, "status"): {**running, "shard": 1}}
    assert shards(both).status()["state"] == "RUNNING"


def test_a_broken_connection_is_opened_again_at_the_shards_new_endpoint() -> None:
    topics = {"t": {"queues": 1, "shards": [0]}}
    cluster = shards({(0, "topics"): [Unavailable("gone"), topics]}, resolver=lambda: {0: "h:99"})
    assert cluster.topics() == topics
    assert cluster.endpoints[0] == "h:99"


def test_a_port_that_another_shard_took_over_is_not_asked_again() -> None:
    stranger = AnotherShard("this is shard 1, not 0", field="shard", limit=1)
    cluster = shards({(0, "status"): [stranger, {"state": "RUNNING"}]}, count=1)
    assert cluster.status()["state"] == "RUNNING"
    wrong = Rejected("unknown operation", field="op")
    with pytest.raises(Rejected, match="unknown operation"):
        shards({(0, "x"): [wrong, {}]}).call(0, "x", {})


def test_any_shard_answers_for_all_and_internal_topics_stay_hidden() -> None:
    topics = {"t": {"queues": 1, "shards": [0]}, "rmq_sys_raymq": {"queues": 1, "shards": [0]}}
    cluster = shards({(1, "topics"): topics})
    assert list(cluster.topics()) == ["t"]


def test_a_topic_is_made_on_every_shard() -> None:
    cluster = shards(
        {(0, "create_topic"): {"created": False}, (1, "create_topic"): {"created": True}}
    )
    assert cluster.create_topic("t", queues=3)
    assert [shard for shard, _ in cluster.asked] == [0, 1]


def test_a_topic_whose_creation_is_unknown_at_once_is_asked_for_with_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = ManualClock()
    monkeypatch.setattr(new_topic, "Clock", lambda: clock)
    late = DeliveryUnknown("late", status="FLUSH_DISK_TIMEOUT")
    cluster = shards({(0, "create_topic"): [late, late, {"created": False}]}, count=1)
    assert cluster.create_topic("t")
    assert clock.slept == [new_topic.CREATE_PAUSE_MS] * 2
    never = shards({(0, "create_topic"): late}, count=1)
    with pytest.raises(DeliveryUnknown):
        never.create_topic("t")
    tries = new_topic.CREATE_TIMEOUT_S * 1000 / new_topic.CREATE_PAUSE_MS
    assert len(never.asked) == tries + 1


def test_a_topic_whose_creation_is_unknown_is_asked_for_again() -> None:
    late = DeliveryUnknown("late", status="FLUSH_DISK_TIMEOUT")
    cluster = shards({(0, "create_topic"): [late, {"created": False}]}, count=1)
    assert cluster.create_topic("t")
    assert [op for _, op in cluster.asked] == ["create_topic"] * 2


def test_a_topic_is_described_from_the_shards_that_have_its_queues() -> None:
    cluster = shards(
        {
            (0, "topics"): {"t": {"queues": 3, "shards": [0, 1]}},
            (0, "queue_ranges"): {"0": [0, 5], "2": [1, 2]},
            (1, "queue_ranges"): {"1": [0, 7], "0": [0, 0]},
        }
    )
    facts = cluster.describe_topic("t")
    assert facts["messages"] == 13
    assert [(q["queue_id"], q["shard"]) for q in facts["queues"]] == [(0, 0), (1, 1), (2, 0)]
    with pytest.raises(Rejected, match="raymq topic create x"):
        cluster.describe_topic("x")


def test_all_actor_keys_cover_every_flush_mode() -> None:
    record = new_record(StartOptions(shards=2, replicas=2))
    assert len(actor_states.all_actor_keys(record)) == 2 * 2 * 6


@pytest.mark.parametrize(
    "line",
    [
        "Local node IP: 192.0.2.2",
        "\x1b[37mLocal node IP\x1b[39m: \x1b[1m192.0.2.2\x1b[22m",
        "2026-01-02 INFO scripts.py:1043 -- \x1b[37mLocal node IP\x1b[39m: \x1b[1m192.0.2.2\x1b[22m",
    ],
)
def test_rays_address_is_found_however_ray_prints_it(line: str) -> None:
    assert owned_ray.node_address(f"usage stats\n{line}\nRay runtime started.\n") == "192.0.2.2"
