"""The server for RocketMQ's clients as an actor: started, killed, switched off and on, with further shards."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from raymq.doors.rocketmq.codes import RequestCode, ResponseCode
from raymq.doors.rocketmq.command import RemotingCommand, encode
from raymq.doors.rocketmq.json_dialect import read_json
from raymq.doors.rocketmq.signature import signed
from tests.support.ports import free_port
from tests.support.remoting_client import RemotingClient
from tests.support.replicated_shard import TOPIC, ReplicatedShard, Target, pause, started_shard
from tests.support.waiting import until


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def shard(port: int) -> Iterator[ReplicatedShard]:
    with started_shard(1, "door", options=("--rocketmq", str(port))) as shard:
        yield shard


def rows(shard: ReplicatedShard) -> list[dict[str, Any]]:
    return shard.cluster.doors().get("rocketmq", [])


def route(shard: ReplicatedShard, address: object) -> dict[str, Any]:
    """The route of a topic, asked for as RocketMQ's clients do."""
    request = RemotingCommand(
        RequestCode.GET_ROUTEINFO_BY_TOPIC, 1, 0, {"topic": TOPIC}, b"", version=479
    )
    with RemotingClient(address) as client:
        client.socket.sendall(encode(signed(request, "raymq", shard.cluster.token.encode())))
        answer = client.next()
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    return read_json(bytes(answer.body))


def test_a_start_serves_signed_requests_at_the_port_that_it_was_given(
    shard: ReplicatedShard, port: int
) -> None:
    (row,) = rows(shard)
    assert row["node_port"] == port
    (broker,) = route(shard, f"127.0.0.1:{port}")["brokerDatas"]
    assert broker["brokerAddrs"] == {"0": row["address"]}
    with RemotingClient(f"127.0.0.1:{port}") as client:
        refused = client.call(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": TOPIC})
    assert refused.code == ResponseCode.NO_PERMISSION


def test_a_killed_server_returns_at_its_port_and_the_shard_does_not_notice(
    shard: ReplicatedShard, port: int
) -> None:
    (before,) = rows(shard)
    epoch = shard.status(0)["epoch"]
    with Target(before["pid"]) as target:
        target.send(signal.SIGKILL)
        until(target.ended, pause)
    until(lambda: any(row["pid"] != before["pid"] for row in rows(shard)), pause)
    (after,) = rows(shard)
    assert after["address"] == before["address"]
    assert shard.status(0)["epoch"] == epoch
    until(lambda: rows(shard)[0]["node_port"] == port, pause)
    assert route(shard, f"127.0.0.1:{port}")["queueDatas"]


def test_further_shards_get_servers_and_routes_name_them(shard: ReplicatedShard, port: int) -> None:
    shard.command("shard", "add", "-c", str(shard.paths.data_dir))
    until(lambda: {row["shard"] for row in rows(shard)} == {0, 1}, pause)
    shard.cluster.create_topic("wide", queues=2)
    assert {row["shard"] for row in rows(shard)} == {0, 1}


def test_it_is_switched_off_and_on_while_the_cluster_runs(
    shard: ReplicatedShard, port: int
) -> None:
    target = ("-c", str(shard.paths.data_dir))
    shard.command("door", "disable", "rocketmq", *target)
    assert rows(shard) == []
    with socket.create_server(("127.0.0.1", port)):
        taken = subprocess.run(
            [
                sys.executable,
                "-m",
                "raymq",
                "door",
                "enable",
                "rocketmq",
                "--port",
                str(port),
                *target,
            ],
            capture_output=True,
            text=True,
            check=False,
            env=shard.environment,
            timeout=120,
        )
    assert taken.returncode == 2
    assert f"port {port} of 127.0.0.1 is taken" in taken.stderr
    assert rows(shard) == []
    shard.command("door", "enable", "rocketmq", "--port", str(port), *target)
    assert any(row["node_port"] == port for row in rows(shard))
