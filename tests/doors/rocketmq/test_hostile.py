"""Clients that send garbage, lie, wait, or never read: they cost bounded memory, and others are served meanwhile."""

from __future__ import annotations

import contextlib
import json
import logging
import random
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from raymq.doors.rocketmq import client_manage, connection, pull_message, remoting_server
from raymq.doors.rocketmq.codes import RequestCode, ResponseCode
from raymq.doors.rocketmq.command import RemotingCommand, encode
from raymq.doors.rocketmq.rocketmq_server import RocketMQServer
from raymq.doors.rocketmq.signature import signed
from tests.support import tier
from tests.support.certificates import make_certificates
from tests.support.hostile_remoting import garbage, lying_frames, resident_bytes
from tests.support.remoting_client import RemotingClient
from tests.support.remoting_requests import SUBSCRIPTION, beat, pull_fields, send
from tests.support.served_shard import ServedShard
from tests.support.waiting import until

MIB = 1 << 20
GARBAGE = tier.rounds("RAYMQ_GARBAGE_FRAMES", thorough=100_000, quick=3_000)
HALF_OPEN = tier.rounds("RAYMQ_HALF_OPEN", thorough=1_000, quick=300)
CONSUMERS = tier.rounds("RAYMQ_REMOTING_CONSUMERS", thorough=500, quick=100)
#: what all hostile clients of a test may cost, beside what the test itself keeps
BOUND_BYTES = 96 * MIB
#: a request of a client that does no harm is answered within this time, on a busy machine too
SERVED_S = 5.0


@contextlib.contextmanager
def served_meanwhile(server: RocketMQServer) -> Iterator[None]:
    """Another client asks all the time, and is answered. The memory of the server stays bounded."""
    stop, slowest_s = threading.Event(), [0.0]
    failed: list[BaseException] = []

    def ask() -> None:
        try:
            with RemotingClient(server.addresses[0]) as client:
                while not stop.wait(0.02):
                    began = time.monotonic()
                    found = client.call(9_999, {})
                    assert found.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
                    slowest_s[0] = max(slowest_s[0], time.monotonic() - began)
        except BaseException as error:
            failed.append(error)

    asker = threading.Thread(target=ask)
    before = resident_bytes()
    asker.start()
    try:
        yield
    finally:
        stop.set()
        asker.join()
    assert not failed
    assert slowest_s[0] < SERVED_S
    assert resident_bytes() - before < BOUND_BYTES


def open_socket(server: RocketMQServer) -> socket.socket:
    """A connection."""
    address = server.addresses[0]
    return socket.create_connection((address.host, address.port), timeout=20)


def is_ended(connected: socket.socket) -> bool:
    """Whether the server has ended a connection. Answers before the end are dropped."""
    waiting = select.poll()
    waiting.register(connected, select.POLLIN)
    while waiting.poll(0):
        try:
            if not connected.recv(1 << 16):
                return True
        except ConnectionError:
            return True
    return False


def pause() -> None:
    """Wait for the server."""
    threading.Event().wait(0.01)


@pytest.mark.parametrize("name", lying_frames())
def test_a_frame_that_lies_ends_its_connection(server: RocketMQServer, name: str) -> None:
    with open_socket(server) as hostile:
        hostile.sendall(lying_frames()[name])
        until(lambda: is_ended(hostile), pause)


def test_garbage_ends_its_connections_and_nothing_else(
    server: RocketMQServer, caplog: pytest.LogCaptureFixture
) -> None:
    # Pytest keeps all lines, with what they refer to.
    caplog.set_level(logging.CRITICAL, "raymq.rocketmq")
    chance = random.Random(43)
    with served_meanwhile(server):
        hostile = open_socket(server)
        for number in range(GARBAGE):
            try:
                hostile.sendall(garbage(chance))
                ended = number % 16 == 0 or is_ended(hostile)
            except ConnectionError:
                ended = True
            if ended:
                hostile.close()
                hostile = open_socket(server)
        hostile.close()
    until(lambda: server.connections == 0, pause)


def test_a_frame_byte_by_byte_is_answered(server: RocketMQServer) -> None:
    with RemotingClient(server.addresses[0]) as client, served_meanwhile(server):
        for byte in encode(RemotingCommand(9_999, 1, fields={"a": "b"})):
            client.socket.sendall(bytes((byte,)))
            threading.Event().wait(0.001)
        assert client.answer(1).code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED


def test_half_open_connections_end(server: RocketMQServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remoting_server, "FIRST_BYTE_S", 1.0)
    monkeypatch.setattr(remoting_server, "IDLE_S", 1.0)
    monkeypatch.setattr(remoting_server, "SWEEP_S", 0.2)
    with RocketMQServer(server._handle, access="open") as hasty, contextlib.ExitStack() as stack:
        with served_meanwhile(hasty):
            sockets = [stack.enter_context(open_socket(hasty)) for _ in range(HALF_OPEN)]
            # Some say nothing, some begin a frame, some send a part of a large one.
            parts = (b"", b"\0", struct.pack(">iI", 1000, 100), struct.pack(">iI", MIB, 100) + b"x")
            for number, each in enumerate(sockets):
                each.sendall(parts[number % len(parts)])
            left = set(sockets)

            def look() -> None:
                left.difference_update([each for each in left if is_ended(each)])
                pause()

            until(lambda: not left, look)
        memory = hasty._server.memory
        until(lambda: memory._free_bytes == memory._limit_bytes, pause)


def test_large_frames_that_never_end_do_not_keep_others_from_sending(
    shard: ServedShard, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remoting_server, "SWEEP_S", 0.1)
    monkeypatch.setattr(connection, "FRAME_S", 0.5)
    with RocketMQServer(shard.cluster, access="open") as server, contextlib.ExitStack() as stack:
        head = struct.pack(">iI", 15 * MIB, 100)
        sockets = [stack.enter_context(open_socket(server)) for _ in range(6)]
        for each in sockets:
            each.sendall(head + b"x" * 1000)
        until(lambda: len(server._server.memory._waiting) > 0, pause)
        ending = threading.Event()

        def dribble() -> None:
            # They are never idle.
            while not ending.wait(0.02):
                for each in sockets:
                    with contextlib.suppress(OSError):
                        each.sendall(b"x")

        dribbler = threading.Thread(target=dribble)
        dribbler.start()
        try:
            with RemotingClient(server.addresses[0]) as client:
                assert send(client, topic, b"y" * 100_000)["queueOffset"] == "0"
        finally:
            ending.set()
            dribbler.join()


def test_wrong_signatures_are_refused_again_and_again(shard: ServedShard) -> None:
    with RocketMQServer(shard.cluster) as server:
        before = resident_bytes()
        for number in range(GARBAGE // 10):
            with open_socket(server) as hostile:
                asked = RemotingCommand(
                    9_999, 1, fields={"a": "b" * (number % 50)}, body=b"x" * 999
                )
                hostile.sendall(encode(signed(asked, "raymq", b"wrong %d" % number)) * 3)
                with contextlib.suppress(ConnectionError):
                    while hostile.recv(1 << 16):
                        pass
        assert server.counts.refusals[ResponseCode.NO_PERMISSION] == GARBAGE // 10
        until(lambda: server.connections == 0, pause)
        assert resident_bytes() - before < BOUND_BYTES


@pytest.mark.parametrize("kind", ["pulls", "requests"])
def test_a_client_that_never_reads_holds_little(
    shard: ServedShard, server: RocketMQServer, topic: str, kind: str
) -> None:
    with RemotingClient(server.addresses[0]) as client:
        for _ in range(6):
            send(client, topic, b"x" * 50_000)
    if kind == "pulls":
        # About 250 KiB of answer for 300 bytes of request.
        fields = pull_fields(topic, 0, sysFlag=SUBSCRIPTION)
        asked, count = RemotingCommand(RequestCode.PULL_MESSAGE, 1, fields=texts(fields)), 2_000
    else:
        asked, count = RemotingCommand(9_999, 1), 400_000
    frame = encode(asked)
    with served_meanwhile(server), open_socket(server) as hostile:
        hostile.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        hostile.settimeout(1.0)
        with contextlib.suppress(TimeoutError):
            for _ in range(count // 100):
                hostile.sendall(frame * 100)
        found: list[connection.ClientConnection] = []

        def look() -> None:
            own = hostile.getsockname()
            found[:] = [each for each in server._server.connections if each.peer == own]
            pause()

        until(lambda: bool(found), look)
        transport = found[0]._open_transport
        until(lambda: transport.get_write_buffer_size() > connection.UNSENT_BYTES_MAX, pause)
        threading.Event().wait(0.5)
        # The fetches that were under way are answered.
        over = connection.FETCHES_MAX * pull_message.ANSWER_BYTES + MIB
        assert transport.get_write_buffer_size() < connection.UNSENT_BYTES_MAX + over


def test_many_clients_that_never_read_hold_little_together(
    shard: ServedShard, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remoting_server, "ANSWER_MEMORY_BYTES", 24 * MIB)
    with RocketMQServer(shard.cluster, access="open") as server, contextlib.ExitStack() as stack:
        with RemotingClient(server.addresses[0]) as client:
            for _ in range(6):
                send(client, topic, b"x" * 50_000)
        frame = encode(
            RemotingCommand(RequestCode.PULL_MESSAGE, 1, fields=texts(pull_fields(topic, 0)))
        )
        sockets = [stack.enter_context(open_socket(server)) for _ in range(8)]
        with served_meanwhile(server):
            for each in sockets:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                each.sendall(frame * 100)
            until(lambda: server.connections <= 6, pause)
            threading.Event().wait(0.3)
            held = sum(each.unsent_bytes for each in server._server.connections)
            assert held < 36 * MIB
        # A client that takes its answers has them all.
        with RemotingClient(server.addresses[0]) as client:
            for _ in range(40):
                asked = client.call(RequestCode.PULL_MESSAGE, pull_fields(topic, 0))
                assert asked.code == ResponseCode.SUCCESS


def test_a_client_that_reads_late_gets_all_answers(server: RocketMQServer) -> None:
    count = 100_000
    with RemotingClient(server.addresses[0]) as client:
        frame = encode(RemotingCommand(9_999, 1))
        writer = threading.Thread(target=lambda: client.socket.sendall(frame * count))
        writer.start()
        until(lambda: any(each._is_full for each in server._server.connections), pause)
        for _ in range(count):
            assert client.next().code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
        writer.join()


def test_a_client_that_never_reads_over_tls_holds_little(
    shard: ServedShard, tmp_path: Path
) -> None:
    certificates = make_certificates(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.certificate, certificates.key)
    trusting = ssl.create_default_context(cafile=certificates.ca)
    count = 100_000
    with (
        RocketMQServer(shard.cluster, access="open", tls=context) as server,
        served_meanwhile(server),
        RemotingClient(server.addresses[0]) as client,
    ):
        # One thread at a time uses a TLS socket: what is sent waits until the server reads on.
        client.socket = trusting.wrap_socket(client.socket, server_hostname="127.0.0.1")
        client.socket.settimeout(1.0)
        frames, sent = encode(RemotingCommand(9_999, 1)) * 100, 0
        with contextlib.suppress(TimeoutError):
            while sent < count:
                client.socket.sendall(frames)
                sent += 100
        held = max(each.unsent_bytes for each in server._server.connections)
        assert held < connection.UNSENT_BYTES_MAX + 2 * MIB
        # Those that were sent whole are answered.
        client.socket.settimeout(20.0)
        for _ in range(sent):
            assert client.next().code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED


def texts(fields: dict[str, object]) -> dict[str, str]:
    """The fields of a header as a client writes them."""
    return {name: str(value) for name, value in fields.items()}


def test_a_changed_route_finds_all_consumers_with_few_notifications(
    shard: ServedShard, server: RocketMQServer, topic: str
) -> None:
    group = "many" + topic
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(RemotingClient(server.addresses[0])) for _ in range(CONSUMERS)
        ]
        began = time.monotonic()
        for number, client in enumerate(clients):
            beat(client, f"c{number}", group, topic)
        # All the same notifications to each: one in `NOTIFY_AFTER_S`, while members come.
        rounds = (time.monotonic() - began) / client_manage.NOTIFY_AFTER_S + 2
        pushed = drained(clients)
        assert max(pushed) <= rounds
        assert sum(pushed) <= rounds * CONSUMERS

        # A member leaves: one notification to each other one.
        clients.pop().close()
        until(lambda: server.connections == CONSUMERS - 1, pause)
        assert drained(clients) == [1] * len(clients)

        # The topic gets queues: routes are asked for, not pushed.
        shard.cluster.add_queues(topic, 8)
        left = set(range(len(clients)))

        def look() -> None:
            for number in list(left):
                found = clients[number].call(
                    RequestCode.GET_ROUTEINFO_BY_TOPIC,
                    {"topic": topic, "acceptStandardJsonOnly": True},
                )
                (queues,) = json.loads(bytes(found.body))["queueDatas"]
                if queues["readQueueNums"] != 8:
                    # Servers look again every 5 s.
                    threading.Event().wait(0.2)
                    return
                left.discard(number)

        until(lambda: not left, look)
        assert drained(clients) == [0] * len(clients)
        with RemotingClient(server.addresses[0]) as client:
            found = client.call(RequestCode.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": group})
            assert len(json.loads(bytes(found.body))["consumerIdList"]) == len(clients)


def drained(clients: list[RemotingClient]) -> list[int]:
    """How many notifications each has got, now that no more come."""
    threading.Event().wait(3 * client_manage.NOTIFY_AFTER_S)
    for client in clients:
        # What was pushed before the answer has come.
        client.call(9_999, {})
    found = [
        sum(each.code == RequestCode.NOTIFY_CONSUMER_IDS_CHANGED for each in client.pushed)
        for client in clients
    ]
    for client in clients:
        client.pushed.clear()
    return found
