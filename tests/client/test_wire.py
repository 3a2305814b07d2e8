"""Server and client of the wire, over real Flight on 127.0.0.1."""

from __future__ import annotations

import re
import struct
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight
import pytest

from raymq.actors.protocol import flight_messages
from raymq.actors.protocol.column_puts import pack_put
from raymq.actors.protocol.small_puts import pack_puts, unpack_puts
from raymq.actors.ray.replica_transport import ReplicaTransport
from raymq.client.transport.flight_client import ShardConnection
from raymq.store.base.errors import Rejected, Unavailable, from_wire
from raymq.store.records.record import SmallBatch
from raymq.store.records.requests import FetchRequest
from tests.support.batches import batch
from tests.support.fake_backend import CLUSTER_ID, TOKEN, FakeCluster
from tests.support.tcp_proxy import TcpProxy


@pytest.fixture
def connection(cluster: FakeCluster) -> Iterator[ShardConnection]:
    connection = ShardConnection(cluster.endpoints[0], TOKEN, CLUSTER_ID, 0)
    yield connection
    connection.close()


def meta(number: int, sequence: int = 0, **more: Any) -> dict[str, Any]:
    return {"id": number, "topic": "t", "queue": 0, "pid": 7, "epoch": 0, "seq": sequence, **more}


def receive(stream: Any, count: int) -> list[dict[str, Any]]:
    acks: list[dict[str, Any]] = []
    while len(acks) < count:
        acks += stream.receive()
    return acks


def open_stream(connection: ShardConnection) -> None:
    """Gets the refusal at the first or the second step, as the network has it."""
    stream = connection.put_stream()
    try:
        stream.opened()
    finally:
        stream.close()


def test_a_producer_that_does_not_read_its_acks_delays_no_other(
    cluster: FakeCluster, connection: ShardConnection
) -> None:
    backend, count = cluster.backends[0], 3000
    stream = connection.put_stream()
    backend.hold_answers()
    for number in range(count):
        stream.send(meta(number, number), batch([b"a"]))
    backend.wait_for(lambda: len(backend.puts) == count)

    # The shard's ack loop: 300 KB of acks do not fit what HTTP/2 lets pass unread.
    acking = threading.Thread(target=backend.release, daemon=True)
    acking.start()
    acking.join(30)
    assert not acking.is_alive()

    other = ShardConnection(cluster.endpoints[0], TOKEN, CLUSTER_ID, 0)
    second = other.put_stream()
    second.send(meta(1, pid=8), batch([b"b"]))
    assert receive(second, 1)[0]["first_offset"] == count
    second.close()
    other.close()

    assert [ack["id"] for ack in receive(stream, count)] == list(range(count))
    stream.close()


def test_every_put_of_a_stream_names_the_address_of_its_client(cluster: FakeCluster) -> None:
    small = {"read": -1, "acks": "quorum"}
    with closing(TcpProxy(cluster.servers[0].port)) as proxy:
        connection = ShardConnection(f"127.0.0.1:{proxy.port}", TOKEN, CLUSTER_ID, 0)
        stream = connection.put_stream()
        stream.send(meta(1, 0), batch([b"large" * 60_000]))
        stream.send_small([(meta(2, 1, **small), SmallBatch([b"a"], [None], [None], [0]))])
        receive(stream, 2)
        # The client that the server sees is the proxy.
        (born_host,) = {put.born_host for put in cluster.backends[0].puts}
        assert born_host in proxy.addresses()
        assert born_host != ("127.0.0.1", proxy.port)
        stream.close()
        connection.close()


def test_wrong_columns_are_named_with_what_was_expected_and_found(cluster: FakeCluster) -> None:
    client = flight.FlightClient(f"grpc://{cluster.endpoints[0]}")
    options = flight.FlightCallOptions(headers=[(b"authorization", flight_messages.bearer(TOKEN))])
    command = flight_messages.pack({"op": "put"})
    writer, reader = client.do_exchange(
        flight.FlightDescriptor.for_command(command), options=options
    )

    rows = pa.record_batch(
        {"body": ["text"], "tag": ["t"], "properties": [b"p"], "born_time_ms": [1]}
    )
    writer.begin(rows.schema)
    writer.write_with_metadata(rows, flight_messages.pack(meta(1)))
    error = from_wire(flight_messages.unpack(reader.read_chunk().app_metadata)["acks"][0]["error"])
    writer.done_writing()

    with pytest.raises(StopIteration):
        reader.read_chunk()
    writer.close()
    client.close()

    assert isinstance(error, Rejected)
    assert error.field == "body"
    assert "string" in str(error)
    assert "binary" in str(error)


def test_bad_metadata_is_refused_in_band(connection: ShardConnection) -> None:
    stream = connection.put_stream()
    stream._write(b"not json", batch([b"x"]))
    stream.send(meta(2, acks="all"), batch([b"x"]))
    stream.send(meta(3), batch([b"x"]))
    acks = receive(stream, 3)
    stream.close()
    assert from_wire(acks[0]["error"]).field == "metadata"
    assert from_wire(acks[1]["error"]).field == "acks"
    assert acks[2]["first_offset"] == 0


@pytest.mark.parametrize("token", ["", "wrong"])
def test_a_wrong_token_is_refused(cluster: FakeCluster, token: str) -> None:
    connection = ShardConnection(cluster.endpoints[0], token)
    with pytest.raises(Rejected) as refused:
        connection.call("describe")
    with pytest.raises(Rejected) as stream_refused:
        open_stream(connection)
    connection.close()
    assert refused.value.field == "token"
    assert "data directory" in str(refused.value)
    assert stream_refused.value.field == "token"


def test_a_missing_token_is_refused(cluster: FakeCluster) -> None:
    client = flight.FlightClient(f"grpc://{cluster.endpoints[0]}")
    with pytest.raises(flight.FlightUnauthenticatedError, match="no token"):
        list(client.do_action(flight.Action("describe", b"{}")))
    client.close()


@pytest.mark.parametrize("second", [TOKEN, "wrong"])
def test_a_second_authorization_header_is_refused(cluster: FakeCluster, second: str) -> None:
    client = flight.FlightClient(f"grpc://{cluster.endpoints[0]}")
    headers = [(b"authorization", flight_messages.bearer(token)) for token in (TOKEN, second)]
    with pytest.raises(flight.FlightUnauthenticatedError, match="2 authorization headers"):
        list(
            client.do_action(
                flight.Action("describe", b"{}"), flight.FlightCallOptions(headers=headers)
            )
        )
    client.close()


@pytest.mark.parametrize(
    ("identity", "field"), [(("d" * 32, 0), "cluster_id"), ((CLUSTER_ID, 1), "shard")]
)
def test_another_shard_on_a_reused_port_refuses(
    cluster: FakeCluster, identity: tuple[str, int], field: str
) -> None:
    connection = ShardConnection(cluster.endpoints[0], TOKEN, *identity)
    with pytest.raises(Rejected) as refused:
        connection.call("topics")
    with pytest.raises(Rejected) as stream_refused:
        open_stream(connection)
    connection.close()
    assert refused.value.field == field
    assert stream_refused.value.field == field


def test_a_server_that_is_not_there_is_unavailable(cluster: FakeCluster) -> None:
    port = cluster.down()
    connection = ShardConnection(f"127.0.0.1:{port}", TOKEN)
    with pytest.raises(Unavailable) as missing:
        connection.call("describe")
    connection.close()
    assert str(port) in str(missing.value)
    assert "Detail" not in str(missing.value)


def test_an_answer_is_one_message_a_queue(
    cluster: FakeCluster, connection: ShardConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = connection.put_stream()
    for number, queue in enumerate((0, 1), start=1):
        stream.send(meta(number) | {"queue": queue}, batch([b"x"]))
        receive(stream, 1)
    stream.close()

    reads = connection.fetch_stream()
    read, messages = reads._read, []
    monkeypatch.setattr(reads, "_read", lambda: messages.append(read()) or messages[-1])
    for offsets, count in (({0: 0}, 1), ({0: 0, 1: 0}, 2), ({0: 0, 1: 9}, 2), ({2: 0}, 1)):
        messages.clear()
        request = FetchRequest("t", offsets, max_bytes=1 << 20, max_records=10, wait_ms=0)
        reads.fetch(request)
        assert len(messages) == count
    reads.close()


def test_a_stopping_server_says_so_on_every_stream(
    cluster: FakeCluster, connection: ShardConnection
) -> None:
    put, reads = connection.put_stream(), connection.fetch_stream()
    put.send(meta(1), batch([b"a"]))
    receive(put, 1)
    assert reads.fetch(FetchRequest("t", {0: 0}, max_bytes=1000, max_records=1, wait_ms=0))
    stopper = threading.Thread(target=cluster.down)
    stopper.start()
    for read in (put.receive, reads._read):
        with pytest.raises(Unavailable, match="stops"):
            read()
    put.close()
    reads.close()
    stopper.join()


@pytest.mark.parametrize(
    ("metadata", "fault"),
    [
        (None, "no frame"),
        (b"abc", "no frame"),
        (b"\0\0\0\5abcd", "4 bytes of 5"),
        (b"\xff\xff\xff\xff", "0 bytes of 4294967295"),
    ],
)
def test_a_frame_that_is_cut_short_is_refused(metadata: bytes | None, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        flight_messages.unpack_frame(metadata, None)


def test_replica_frames_go_both_ways(cluster: FakeCluster) -> None:
    transport = ReplicaTransport(TOKEN, cluster_id=CLUSTER_ID, shard=0)
    stream = transport.connect(cluster.endpoints[0])
    stream.send(b"hello")
    assert stream.receive() == (b"ack:hello", None)
    for size in (1, flight_messages.INLINE_BYTES_MAX, flight_messages.INLINE_BYTES_MAX + 1):
        stream.send(b"append", memoryview(bytes(size)))
        header, body = stream.receive()
        assert (header, bytes(body)) == (b"ack:append", bytes(size))

    stopper = threading.Thread(target=cluster.down)
    stopper.start()
    with pytest.raises(Unavailable):
        stream.receive()
    stream.close()
    stopper.join()


@pytest.mark.parametrize(
    "rows", [1, 3, flight_messages.INLINE_ROWS_MAX, flight_messages.INLINE_ROWS_MAX + 1]
)
@pytest.mark.parametrize("size", [0, 100, 20_000])
def test_records_come_as_they_went_with_a_batch_and_without(rows: int, size: int) -> None:
    values = [bytes([row]) * (size + row) for row in range(rows)]
    whole = pa.array([b"before", *values], pa.binary())
    for records in (
        pa.array(values, pa.binary()),
        whole.slice(1),
        whole.take(pa.array(range(1, rows + 1))),
    ):
        metadata, batch = flight_messages.pack_records({"id": 1, "queue": 2}, records)
        head, found = flight_messages.unpack_records(pa.py_buffer(metadata), batch)
        assert (head["id"], head["queue"]) == (1, 2)
        assert found.to_pylist() == values
        found.validate(full=True)
    is_small = (
        rows <= flight_messages.INLINE_ROWS_MAX
        and sum(map(len, values)) <= flight_messages.INLINE_BYTES_MAX
    )
    assert (flight_messages.pack_records({}, pa.array(values, pa.binary()))[1] is None) == is_small


def test_a_part_of_a_column_takes_only_its_own_bytes_along() -> None:
    many = pa.array([bytes(1_000)] * 1_000, pa.binary())
    metadata, batch = flight_messages.pack_records({}, many.slice(0, 2))
    assert batch is None
    assert len(metadata) < 2_100


@pytest.mark.parametrize("place", ["head", "rows", "first", "order", "last", "short"])
def test_records_with_wrong_offsets_are_refused(place: str) -> None:
    metadata, _ = flight_messages.pack_records({}, pa.array([b"ab", b"cd"], pa.binary()))
    json_size = int.from_bytes(metadata[:4], "big")
    edges_at = 4 + json_size
    assert metadata[4:edges_at] == b'{"rows":2}'
    edges = {"first": (1, 2, 4), "order": (0, 5, 4), "last": (0, 2, 3)}.get(place, (0, 2, 4))
    wrong = {
        "head": b"\0\0\1\0" + metadata[4:],
        "rows": metadata[:4] + b'{"rows":9}' + metadata[edges_at:],
        "short": b"\0\0",
    }.get(place, metadata[:edges_at] + struct.pack("<3i", *edges) + metadata[edges_at + 12 :])
    with pytest.raises(ValueError, match="records|JSON|Expecting|Extra|codec"):
        flight_messages.unpack_records(pa.py_buffer(wrong), None)


@pytest.mark.parametrize(
    "metadata",
    [b"\0\0", b"\0\0\0\2{}", b'\0\0\0\r{"rows":null}', b'\0\0\0\x11{"rows":Infinity}', b"[1]"],
)
def test_a_message_that_is_no_answer_is_reported(
    connection: ShardConnection, monkeypatch: pytest.MonkeyPatch, metadata: bytes
) -> None:
    stream = connection.put_stream()
    stream.send(meta(1), batch([b"a"]))
    receive(stream, 1)
    stream.close()

    monkeypatch.setattr(flight_messages, "pack_records", lambda head, records: (metadata, None))
    reads = connection.fetch_stream()
    with pytest.raises(Unavailable, match="not an answer of a shard"):
        reads.fetch(FetchRequest("t", {0: 0}, max_bytes=1000, max_records=1, wait_ms=0))
    reads.close()


ROWS = [
    (b"body", "tag", b"k\x01v\x02", 7),
    (b"", None, None, 0),
    (bytes(range(256)), "", b"", -1),
]


def small(*rows: tuple[bytes, str | None, bytes | None, int]) -> SmallBatch:
    """These rows as columns."""
    return SmallBatch(*map(list, zip(*rows, strict=True)))


@pytest.mark.parametrize("words", [{}, {"pid": None, "acks": "leader"}, {"pid": 2**64 - 1}])
def test_small_batches_come_as_they_went(words: dict[str, object]) -> None:
    want = {**meta(3), "acks": "quorum", "read": 2, **words}
    one_by_one = [(want, small(row)) for row in ROWS]
    for put in one_by_one:
        assert unpack_puts(pack_puts([put])) == [put]
    together = [*one_by_one, ({**want, "id": 4, "topic": "ü", "queue": 5}, small(*ROWS))]
    assert unpack_puts(pack_puts(together)) == together
    more = {
        "flags": [7, -1, 0],
        "sys_flags": [0x301, 0, 2],
        "born_hosts": [bytes(8), None, bytes(20)],
    }
    for name, column in more.items():
        assert unpack_puts(pack_puts([(want, small(*ROWS)._replace(**{name: column}))])) == [
            (want, small(*ROWS)._replace(**{name: column}))
        ]
    mixed = [(want, small(*ROWS)._replace(**more)), *together]
    assert unpack_puts(pack_puts(mixed)) == mixed


def test_a_small_put_without_further_columns_keeps_its_bytes() -> None:
    words = {**meta(3, 5), "queue": 1, "epoch": 2, "acks": "quorum", "read": 2}
    assert pack_puts([(words, small((b"body", "tag", b"k\x01v\x02", 9)))]) == bytes.fromhex(
        "01 01 01000000 0300000000000000 0200000000000000 0700000000000000 0200000000000000"
        "0500000000000000 0100 0100 74 0900000000000000 04000000 03000000 04000000 746167 6b017602 626f6479"
    )


def test_damaged_further_columns_are_refused_in_band(connection: ShardConnection) -> None:
    words = {**meta(1), "acks": "quorum", "read": 0}
    row = small((b"x", "tag", None, 7))._replace(flags=[7], sys_flags=[1], born_hosts=[bytes(8)])
    whole, plain = pack_put(words, row.to_batch())
    stream = connection.put_stream()

    def refused(metadata: bytes) -> dict[str, Any]:
        stream._write(metadata, plain)
        (ack,) = stream.receive()
        assert isinstance(from_wire(ack["error"]), Rejected)
        return ack

    for length in range(1, len(whole), 3):
        refused(whole[:length])
    text_at, size = 5, int.from_bytes(whole[1:5], "little")
    text = whole[text_at : text_at + size]
    for wrong in (b'["flag","tag"]', b'["sys_flag","flag","born_host"]', b"7", b"[]"):
        changed = re.sub(rb'"more":\[[^]]*\]', b'"more":' + wrong, text)
        head = whole[:1] + len(changed).to_bytes(4, "little") + changed
        rest = whole[-(-(text_at + size) // 8 * 8) :]
        assert refused(head.ljust(-(-len(head) // 8 * 8)) + rest)["id"] == 1
    assert refused(pack_put(words, pa.concat_batches([row.to_batch()] * 2))[0])["id"] == 1

    stream._write(whole, plain)
    assert stream.receive()[0]["first_offset"] == 0
    stream.close()


def test_cut_small_batches_are_refused_in_band(connection: ShardConnection) -> None:
    words = {**meta(1), "acks": "quorum", "read": 0}
    row = small((b"", "tag", b"k\x01v\x02", 7))
    whole = pack_puts([(words, row._replace(flags=[7], sys_flags=[1], born_hosts=[bytes(8)]))])
    stream = connection.put_stream()
    for length in range(2, len(whole)):
        stream._write(whole[:length])
        error = from_wire(stream.receive()[0]["error"])
        assert isinstance(error, Rejected)
        assert error.field == "metadata"
    stream._write(whole)
    assert stream.receive()[0]["first_offset"] == 0
    stream.close()
