"""Options of the stores that change while the cluster runs: by a call, by a start, and on the command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_type_hints

import pytest

from raymq.cluster import start
from raymq.cluster.cluster import Cluster
from raymq.cluster.operations import set_config as operation
from raymq.cluster.record.cluster_record import StartOptions, new_record, save_record
from raymq.cluster.record.paths import ClusterPaths
from raymq.cluster.record.store_options import RunningOptions
from raymq.store.base.errors import Rejected, Unavailable
from raymq.store.base.files import Files
from raymq.store.config.store_config import IN_CLUSTER, WHILE_RUNNING
from tests.cluster.test_add_shards import Shard
from tests.cluster.test_cli import Terminal


class Shards(Cluster):
    """A cluster whose shards are in memory. `away` are those that take no change."""

    def __init__(self, count: int) -> None:
        super().__init__(name="orders", cluster_id="ab" * 16, shards=count, token="t", endpoints={})
        self.all = [Shard(number, count) for number in range(count)]
        self.away: set[int] = set()

    def call(  # type: ignore[override]
        self, shard: int, op: str, args: Mapping[str, Any], **options: float
    ) -> dict[str, Any]:
        if op == "set_config" and shard in self.away:
            raise Unavailable("the store takes no puts", field="flags")
        return self.all[shard].run(op, dict(args))


@pytest.fixture
def cluster() -> Shards:
    return Shards(3)


def values(cluster: Shards, name: str) -> list[Any]:
    return [getattr(shard.config, name) for shard in cluster.all]


def test_the_types_of_the_call_are_those_of_the_store() -> None:
    kinds = {name: each.__name__ for name, each in get_type_hints(RunningOptions).items()}
    assert kinds == {name: option.kind for name, option in WHILE_RUNNING.items()}


def test_a_change_is_made_on_every_shard(cluster: Shards) -> None:
    facts = cluster.set_config({"flush_interval_ms": 200, "warm_mapped_file": True})
    assert {name: each["value"] for name, each in facts.items()} == {
        "flush_interval_ms": 200,
        "warm_mapped_file": True,
    }
    assert values(cluster, "flush_interval_ms") == [200] * 3
    assert facts["flush_interval_ms"]["by"] == operation.operator_name()


def test_every_option_is_shown_with_its_default_and_when_it_changes(cluster: Shards) -> None:
    cluster.set_config({"flush_interval_ms": 200})
    facts = cluster.config()
    assert set(facts) == set(IN_CLUSTER)
    assert facts["segment_size_bytes"] == {
        "value": 1 << 30,
        "default": 1 << 30,
        "changes": "first start",
    }
    assert facts["flush_interval_ms"] == {
        "value": 200,
        "default": 500,
        "changes": "while running",
        "before": 500,
        "at_ms": 1,
        "by": operation.operator_name(),
    }


def test_a_shard_that_takes_no_change_does_not_keep_it_from_the_others(cluster: Shards) -> None:
    cluster.away = {1}
    with pytest.raises(Unavailable, match=r"shard 1: the store takes no puts. 2 of 3 shard\(s\)"):
        cluster.set_config({"flush_interval_ms": 200})
    assert values(cluster, "flush_interval_ms") == [200, 500, 200]
    assert cluster.config()["flush_interval_ms"]["by_shard"] == {0: 200, 1: 500, 2: 200}

    cluster.away = set()
    cluster.set_config({"flush_interval_ms": 200})
    assert "by_shard" not in cluster.config()["flush_interval_ms"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "config is empty; give an option and its value"),
        ({"flush_interval_ms": 0}, "flush_interval_ms is 0; it must be a whole number, 1 to"),
        ({"flush_intervall_ms": 1}, r"did you mean flush_interval_ms\?"),
        ({"segment_size_bytes": 1 << 20}, "the first start of a cluster decides it"),
        ({"message_delay_level": "1s"}, "the first start of a cluster decides it"),
        ({"flush": "async"}, "does not change while the cluster runs. .* start it with --flush"),
        ({"transient_pool": True}, "start it with --transient-pool"),
        ({"scrub_bytes_per_s": 1}, "start it with --config"),
        ({"brokerRole": "SLAVE"}, "RayMQ does not have RocketMQ's brokerRole"),
        ({"flush_least_pages": 1, "delete_when": "24"}, "use hours from 00 to 23"),
    ],
)
def test_a_wrong_change_is_refused_before_any_shard_has_it(
    cluster: Shards, config: Any, message: str
) -> None:
    with pytest.raises(Rejected, match=message):
        cluster.set_config(config)
    assert cluster.config() == Shards(3).config()


# --- a start --------------------------------------------------------------------------------------


def starting(paths: ClusterPaths, lines: list[str]) -> Any:
    return start._Start(lambda: paths, timeout_s=10, progress=lines.append)


def test_a_start_names_the_options_that_change_at_once(tmp_path: Any) -> None:
    paths, files = ClusterPaths(tmp_path), Files()
    config = {"flush_interval_ms": 200, "scrub_bytes_per_s": 0}
    wanted = StartOptions(config=config, file_reserved_hours=48, flush="async")
    save_record(paths, new_record(StartOptions()), files)
    plan = start.plan_start(paths, wanted, ephemeral=False, files=files)
    assert plan.running == {"flush_interval_ms": 200, "file_reserved_hours": 48}
    assert start.plan_start(paths, StartOptions(), ephemeral=False, files=files).running == {}


def test_the_value_that_was_given_last_holds(tmp_path: Any, cluster: Shards) -> None:
    lines: list[str] = []
    call = starting(ClusterPaths(tmp_path), lines)
    cluster.set_config({"flush_interval_ms": 200, "flush_least_pages": 9})
    call._set_options(cluster, {})
    assert values(cluster, "flush_interval_ms") == [200] * 3
    call._set_options(cluster, {"flush_interval_ms": 300})
    assert values(cluster, "flush_interval_ms") == [300] * 3
    assert values(cluster, "flush_least_pages") == [9] * 3
    assert lines == ["set flush_interval_ms=300"]
    # Nothing is written for what the shards have.
    call._set_options(cluster, {"flush_interval_ms": 300, "delete_when": "04"})
    assert lines == ["set flush_interval_ms=300"]


def test_a_start_whose_shard_takes_no_change_warns_and_goes_on(
    tmp_path: Any, cluster: Shards
) -> None:
    lines: list[str] = []
    cluster.away = {2}
    starting(ClusterPaths(tmp_path), lines)._set_options(cluster, {"flush_interval_ms": 300})
    assert values(cluster, "flush_interval_ms") == [300, 300, 500]
    (line,) = lines
    assert line.startswith("WARNING: flush_interval_ms: not every shard has the value")


# --- the command line -----------------------------------------------------------------------------


@pytest.fixture
def terminal(cluster: Shards) -> Terminal:
    made = Terminal()
    made.lifecycle.cluster = cluster  # type: ignore[assignment]
    return made


def test_config_set_prints_what_holds_now(terminal: Terminal, cluster: Shards) -> None:
    assert terminal.run("config", "set", "flush_interval_ms=200", "warm_mapped_file=true") == 0
    assert values(cluster, "warm_mapped_file") == [True] * 3
    assert b"flush_interval_ms=200" in terminal.out
    assert terminal.run("config", "get", "flush_interval_ms") == 0
    assert terminal.out == b"200\n"
    assert terminal.run("config", "get", "warm_mapped_file", "--json") == 0
    assert terminal.json()["warm_mapped_file"]["value"] is True


def test_config_list_shows_values_defaults_and_who_changed_them(
    terminal: Terminal, cluster: Shards
) -> None:
    assert terminal.run("config", "list", "--changed") == 0
    assert terminal.out == b""
    terminal.run("config", "set", "flush_interval_ms=200")
    assert terminal.run("config", "list", "--changed", "--json") == 0
    assert set(terminal.json()) == {"flush_interval_ms"}
    assert terminal.run("config", "list") == 0
    assert len(terminal.lines()) == len(IN_CLUSTER)
    assert b"segment_size_bytes=1073741824\tdecided at the first start" in terminal.lines()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("set", "flush_interval_ms"), "write NAME=VALUE"),
        (("set", "flush_interval_ms=0"), "it must be a whole number, 1 to"),
        (("set", "flush=async"), "start it with --flush"),
        (("get", "flush_intervall_ms"), "did you mean flush_interval_ms?"),
        (("set",), "values"),
    ],
)
def test_a_wrong_command_says_what_is_wrong(
    terminal: Terminal, words: tuple[str, ...], message: str
) -> None:
    assert terminal.run("config", *words) == 2
    assert terminal.err == "" or message in terminal.err
    assert terminal.lifecycle.calls == []
