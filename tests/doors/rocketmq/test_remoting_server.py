"""Connections, frames and the processor table: what every client meets, whichever request it sends."""

from __future__ import annotations

import struct
import threading

import pytest

from raymq.doors.rocketmq.codes import RequestCode, ResponseCode
from raymq.doors.rocketmq.command import HEADER_BYTES_MAX, RemotingCommand, encode
from raymq.doors.rocketmq.rocketmq_server import RocketMQServer
from raymq.doors.rocketmq.signature import signed
from raymq.store.base.errors import Rejected
from tests.support.remoting_client import RemotingClient
from tests.support.waiting import until


def test_an_unknown_request_is_answered_with_the_page_that_says_what_is_supported(
    client: RemotingClient,
) -> None:
    found = client.call(9_999, {})
    assert found.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
    assert "9999" in (found.remark or "")
    assert "docs/guides/from-rocketmq.md" in (found.remark or "")


def test_a_one_way_request_is_never_answered(client: RemotingClient) -> None:
    client.send(9_999, {}, one_way=True)
    client.send(RequestCode.GET_MAX_OFFSET, {}, one_way=True)
    found = client.call(9_998, {})
    assert "9998" in (found.remark or "")
    assert not client.pushed


@pytest.mark.parametrize("header_type", ["json", "binary"])
def test_an_answer_has_the_header_of_its_request(server: RocketMQServer, header_type) -> None:
    with RemotingClient(server.addresses[0], header_type=header_type) as client:
        assert client.call(9_999, {}).header_type == header_type


def test_requests_that_come_in_pieces_and_together_are_answered_each(
    server: RocketMQServer,
) -> None:
    with RemotingClient(server.addresses[0]) as client:
        sent: list[bytes] = []
        client.socket, connected = _Recorder(sent), client.socket
        opaques = [client.send(9_000 + number, {"a": "b" * number}) for number in range(20)]
        client.socket = connected
        data = b"".join(sent)
        for at in range(0, len(data), 7):
            connected.sendall(data[at : at + 7])
        connected.sendall(data)
        for opaque in opaques * 2:
            assert client.answer(opaque).code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED


class _Recorder:
    """A socket that keeps what is sent."""

    def __init__(self, sent: list[bytes]) -> None:
        self._sent = sent

    def sendall(self, data: bytes) -> None:
        self._sent.append(data)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        struct.pack(">iI", 0x7FFFFFFF, 10),
        struct.pack(">iI", -5, 10),
        struct.pack(">iI", 4 + HEADER_BYTES_MAX + 1, HEADER_BYTES_MAX + 1),
        struct.pack(">iI", 8, 4) + b"nope",
        struct.pack(">iI", 8, 4) + b"[12]",
        struct.pack(">iI", 8, 2 << 24 | 4) + b"{}{}",
    ],
    ids=["HTTP", "2 GiB", "negative", "long header", "no JSON", "a list", "unknown type"],
)
def test_bytes_that_are_no_frame_end_their_connection_and_no_other(
    server: RocketMQServer, client: RemotingClient, data: bytes
) -> None:
    with RemotingClient(server.addresses[0]) as hostile:
        hostile.socket.sendall(data)
        assert hostile.is_closed()
    assert client.call(9_999, {}).code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED


def test_a_client_that_says_tls_without_a_certificate_here_is_disconnected(
    server: RocketMQServer,
) -> None:
    with RemotingClient(server.addresses[0]) as client:
        client.socket.sendall(b"\x16\x03\x01")
        assert client.is_closed()


def test_frames_that_wait_for_memory_are_all_taken_in_the_end(
    server: RocketMQServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = server._server.memory
    monkeypatch.setattr(memory, "_free_bytes", 300_000)
    monkeypatch.setattr(memory, "_limit_bytes", 300_000)
    clients = [RemotingClient(server.addresses[0]) for _ in range(8)]
    opaques = [client.send(9_999, {}, b"x" * 200_000) for client in clients]
    for client, opaque in zip(clients, opaques, strict=True):
        assert client.answer(opaque).code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
        client.close()
    until(lambda: memory._free_bytes == 300_000, _pause)


def test_a_half_sent_frame_gives_its_memory_back_with_its_connection(
    server: RocketMQServer,
) -> None:
    memory = server._server.memory
    free = memory._free_bytes
    with RemotingClient(server.addresses[0]) as client:
        client.socket.sendall(struct.pack(">iI", 1 << 20, 100) + b"x" * 200)
        until(lambda: memory._free_bytes < free, _pause)
    until(lambda: memory._free_bytes == free, _pause)


def test_more_requests_than_an_executor_takes_are_refused_as_busy(
    server: RocketMQServer, client: RemotingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = server.table.find(RequestCode.GET_MAX_OFFSET)
    assert entry is not None
    full = entry._replace(executor=entry.executor._replace(requests_max=0))
    monkeypatch.setitem(server.table._entries, RequestCode.GET_MAX_OFFSET, full)
    found = client.call(RequestCode.GET_MAX_OFFSET, {"topic": "t", "queueId": 0})
    assert found.code == ResponseCode.SYSTEM_BUSY


def test_a_server_that_stops_tells_its_clients_to_go_away(shard) -> None:
    server = RocketMQServer(shard.cluster, access="open")
    with RemotingClient(server.addresses[0]) as client:
        assert client.call(9_999, {}).code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
        server._loop.call_soon_threadsafe(setattr, server._server, "_goes_away", True)
        until(lambda: client.call(9_999, {}).code == ResponseCode.GO_AWAY, _pause)
        server.close()
        assert client.is_closed()


def test_a_port_that_is_taken_is_said(shard, server: RocketMQServer) -> None:
    with pytest.raises(OSError, match="Address already in use"):
        RocketMQServer(shard.cluster, shard_ports={0: server.addresses[0].port})


def test_a_request_without_the_right_signature_is_refused_and_its_connection_ends(shard) -> None:
    with RocketMQServer(shard.cluster) as server:
        address, secret = server.addresses[0], shard.cluster.token.encode()
        with RemotingClient(address) as client:
            found = client.call(9_999, {})
            assert found.code == ResponseCode.NO_PERMISSION
            assert "AccessKey raymq" in (found.remark or "")
            assert client.is_closed()
        for user, key in (("raymq", b"wrong"), ("other", secret)):
            with RemotingClient(address) as client:
                asked = signed(RemotingCommand(9_999, 1, fields={"a": "b"}), user, key)
                client.socket.sendall(encode(asked))
                assert client.answer(1).code == ResponseCode.NO_PERMISSION
                assert client.is_closed()
        with RemotingClient(address) as client:
            asked = signed(RemotingCommand(9_999, 1, fields={"a": "b"}, body=b"x"), "raymq", secret)
            client.socket.sendall(encode(asked))
            assert client.answer(1).code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
            # The same bytes with another body.
            client.socket.sendall(encode(asked._replace(body=b"y")))
            assert client.answer(1).code == ResponseCode.NO_PERMISSION


def test_a_server_without_keys_listens_on_this_machine_alone(shard) -> None:
    with pytest.raises(Rejected, match=r"0\.0\.0\.0.*127\.0\.0\.1"):
        RocketMQServer(shard.cluster, host="0.0.0.0", access="open")


def _pause() -> None:
    threading.Event().wait(0.01)
