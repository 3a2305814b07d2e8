"""The server beside a replica: where it listens, what it says of it, and what others know, over a real shard."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from raymq.doors.rocketmq.codes import RequestCode, ResponseCode
from raymq.doors.rocketmq.door import DoorOptions, RocketMQDoor
from raymq.doors.rocketmq.json_dialect import read_json
from raymq.doors.rocketmq.topology import BrokerAddress, BrokerTable
from raymq.store.base.errors import Rejected
from tests.support.ports import free_port
from tests.support.remoting_client import RemotingClient
from tests.support.served_shard import CLUSTER_ID, TOKEN, ServedShard
from tests.support.waiting import until


class Place:
    """The directory of a replica, in memory."""

    def __init__(self, endpoint: Callable[[], str | None]) -> None:
        self.endpoint = endpoint
        self.port = 0

    def kept_port(self) -> int:
        return self.port

    def keep_port(self, host: str, port: int) -> None:
        self.port = port

    def forget_port(self) -> None:
        self.port = 0


@pytest.fixture
def served(tmp_path) -> Iterator[ServedShard]:
    with ServedShard(tmp_path / "store") as served:
        served.start_flusher()
        served.cluster.create_topic("orders", queues=2)
        yield served


@contextmanager
def running(place: Place, port: int, *, replica: int = 0) -> Iterator[RocketMQDoor]:
    options = DoorOptions(
        CLUSTER_ID,
        shard=0,
        replica=replica,
        token=TOKEN,
        ca=None,
        bind="127.0.0.1",
        advertised="127.0.0.1",
        port=port,
        access="open",
        insecure=False,
    )
    door = RocketMQDoor(options, place)
    thread = threading.Thread(target=door.run, daemon=True)
    thread.start()
    try:
        yield door
    finally:
        door.close(10)
        thread.join()


def pause() -> None:
    threading.Event().wait(0.02)


def has_node_port(door: RocketMQDoor) -> bool:
    return door.status()["node_port"] is not None


def endpoint_of(served: ServedShard) -> Callable[[], str | None]:
    return lambda: served.endpoints[0]


def brokers_of(port: int) -> list[dict[str, str]]:
    """The addresses in the route of a topic, as a client gets them at the port of the node."""
    with RemotingClient(f"127.0.0.1:{port}") as client:
        answer = client.call(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "orders"})
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    return [each["brokerAddrs"] for each in read_json(bytes(answer.body))["brokerDatas"]]


def test_clients_find_the_server_at_the_port_of_the_node_and_records_name_it(served) -> None:
    port = free_port()
    with running(Place(endpoint_of(served)), port) as door:
        until(lambda: has_node_port(door), pause)
        address = door.status()["address"]
        assert brokers_of(port) == [{"0": address}]
        host, _, number = address.rpartition(":")
        assert served.host.log.store_host == (host, int(number))
        (row,) = served.cluster.doors()["rocketmq"]
        assert row["address"] == address
        assert row["leads"]


def test_a_server_takes_the_port_that_it_had_before_and_another_one_when_that_is_taken(
    served,
) -> None:
    place = Place(endpoint_of(served))
    with running(place, free_port()) as door:
        until(lambda: door.status()["address"] is not None, pause)
        before = place.port
    with running(place, free_port()) as door:
        until(lambda: door.status()["address"] is not None, pause)
        assert place.port == before
    with (
        socket.create_server(("127.0.0.1", before)),
        running(place, free_port()) as door,
    ):
        until(lambda: door.status()["address"] is not None, pause)
        assert place.port != before


def test_a_server_that_ends_is_forgotten_at_once(served) -> None:
    with running(Place(endpoint_of(served)), free_port()) as door:
        until(lambda: "rocketmq" in served.cluster.doors(), pause)
        door.close(10)
        assert served.cluster.doors() == {}


def test_another_server_of_the_node_takes_its_port_over(served) -> None:
    port = free_port()
    with (
        running(Place(endpoint_of(served)), port, replica=1) as second,
        running(Place(endpoint_of(served)), port) as first,
    ):
        until(lambda: has_node_port(first) != has_node_port(second), pause)
        until(lambda: len(served.cluster.doors()["rocketmq"]) == 2, pause)
        holder, other = (first, second) if has_node_port(first) else (second, first)
        assert "in use" in other.status()["node_port_error"]
        holder.close(10)
        until(lambda: has_node_port(other), pause)
        assert other.status()["node_port_error"] is None


def test_a_server_waits_for_its_replica_and_says_so(served) -> None:
    endpoints: list[str] = []
    place = Place(lambda: endpoints[0] if endpoints else None)
    with running(place, free_port()) as door:
        until(lambda: door.status()["error"] is not None, pause)
        assert door.status()["state"] == "STARTING"
        assert "has not said where it listens" in door.status()["error"]
        endpoints.append(served.endpoints[0])
        until(lambda: door.status()["state"] == "RUNNING", pause)
        assert door.status()["error"] is None


def test_a_replica_refuses_a_protocol_or_an_address_that_it_does_not_know(served) -> None:
    call = served.cluster.call
    with pytest.raises(Rejected, match="use rocketmq"):
        call(0, "set_door", {"protocol": "kafka", "replica": 0, "address": ["127.0.0.1", 1]})
    with pytest.raises(Rejected, match="not an IP address"):
        call(0, "set_door", {"protocol": "rocketmq", "replica": 0, "address": ["here", 1]})
    with pytest.raises(Rejected, match="address and a port"):
        call(0, "set_door", {"protocol": "rocketmq", "replica": 0, "address": ["127.0.0.1"]})


FIRST, SECOND, THIRD = (BrokerAddress("10.0.0.1", each) for each in (1, 2, 3))


def test_the_server_of_the_leader_has_id_0_and_the_others_follow_in_order() -> None:
    brokers = BrokerTable()
    brokers.note(0, 1, {0: FIRST, 1: SECOND, 2: THIRD})
    assert brokers.of(0) == {0: SECOND, 1: FIRST, 2: THIRD}


def test_without_the_leaders_server_another_one_has_id_0_because_queues_would_be_hidden() -> None:
    brokers = BrokerTable()
    brokers.note(0, 1, {0: FIRST, 2: THIRD})
    assert brokers.of(0) == {0: FIRST, 1: THIRD}
    brokers.note(0, None, {})
    assert brokers.leader(0) == FIRST


def test_a_replica_that_has_started_since_hears_of_the_server(
    served, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ServedShard(tmp_path / "other") as other:
        # The server's own handle does not know it.
        replicas = {"0": {"0": served.endpoints[0], "1": other.endpoints[0]}}
        monkeypatch.setattr(served.host.addresses, "replicas", lambda: replicas)
        with running(Place(endpoint_of(served)), free_port()) as door:
            until(lambda: "rocketmq" in other.cluster.doors(), pause)
            (row,) = other.cluster.doors()["rocketmq"]
            # It is announced before it is running.
            until(lambda: door.status()["state"] == "RUNNING", pause)
            assert row["address"] == door.status()["address"]
