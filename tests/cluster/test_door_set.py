"""What a start refuses before it gives a cluster servers for RocketMQ's clients."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import raymq
from raymq.cluster.deploy import door_set
from raymq.cluster.record.cluster_record import (
    NO_PORT,
    ClusterRecord,
    StartOptions,
    new_record,
    resume_record,
)
from raymq.store.base.errors import Rejected
from tests.support.ports import free_port


def _no_actor(name: str, namespace: str) -> object:
    raise ValueError(name)


#: a Ray without actors
RAY: Any = SimpleNamespace(get_actor=_no_actor)


def record(port: int, **more: Any) -> ClusterRecord:
    return new_record(StartOptions(rocketmq_port=port, **more))


def test_a_port_that_another_program_has_is_refused_by_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Rejected, match=f"port {port} of 127.0.0.1 is taken"):
            door_set.check(RAY, record(port), before=None)
    door_set.check(RAY, record(port), before=None)


def test_servers_of_this_cluster_may_have_the_port() -> None:
    running: Any = SimpleNamespace(get_actor=lambda name, namespace: object())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ours = record(taken.getsockname()[1])
        door_set.check(running, ours, before=ours)


def test_before_there_is_a_ray_only_a_port_of_before_may_be_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        wanted = record(taken.getsockname()[1])
        door_set.check(None, wanted, before=wanted)
        for before in (None, record(free_port())):
            with pytest.raises(Rejected, match="is taken"):
                door_set.check(None, wanted, before=before)


def test_a_refused_first_start_leaves_neither_a_ray_nor_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door_set, "_orjson_version", lambda: ())
    with pytest.raises(Rejected, match="needs orjson"):
        raymq.start(tmp_path / "data", ephemeral=True, rocketmq=free_port())
    assert not (tmp_path / "data" / "cluster.json").exists()
    assert not (tmp_path / "data" / "ray.json").exists()


def test_without_orjson_a_start_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_set, "_orjson_version", lambda: (3, 9, 14))
    with pytest.raises(
        Rejected, match=r"orjson 3\.9\.15 or newer: pip install 'raymq\[rocketmq\]'"
    ):
        door_set.check(RAY, record(free_port()), before=None)
    door_set.check(RAY, new_record(StartOptions()), before=None)


def test_requests_without_a_key_are_for_this_machine_alone() -> None:
    wide = record(free_port(), host="0.0.0.0", insecure=True, rocketmq_access="open")
    with pytest.raises(Rejected, match="takes requests from each machine that reaches"):
        door_set.check(RAY, wide, before=None)


def test_a_later_start_keeps_changes_and_ends_the_servers() -> None:
    stored = record(19876)
    assert resume_record(stored, StartOptions()).rocketmq_port == 19876
    assert resume_record(stored, StartOptions(rocketmq_port=29876)).rocketmq_port == 29876
    ended = resume_record(stored, StartOptions(rocketmq_port=NO_PORT))
    assert (ended.rocketmq_port, ended.doors) == (None, ())
    assert ended.door_options != stored.door_options
    assert replace(ended, rocketmq_port=19876).door_options == stored.door_options


def test_a_port_that_is_none_is_refused() -> None:
    with pytest.raises(Rejected, match="rocketmq"):
        record(70_000)
