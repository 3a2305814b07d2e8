"""What every wire protocol of a shard keeps, whatever carries it: `ShardBackend` as a client sees it through one."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from raymq.actors.api.leases import LeaseCall, LeasedMessages, LeasedQueue
from raymq.client.transport.connection import Connection
from raymq.store.base.errors import (
    AnotherShard,
    Corrupt,
    OffsetOutOfRange,
    RayMQError,
    Rejected,
    StorageFull,
    Unavailable,
    from_wire,
)
from raymq.store.base.format import pack_host
from raymq.store.groups.leases.options import LeaseOptions
from raymq.store.records.record import SmallBatch, encode_batch, encode_record, small_batch
from raymq.store.records.requests import FetchRequest, FetchSlice, MessageSelector
from tests.support.batches import batch
from tests.support.fake_backend import CLUSTER_ID, FakeBackend
from tests.support.protocols import PROTOCOLS, Connect

MANY = 1 << 20


@pytest.fixture
def backend() -> FakeBackend:
    made = FakeBackend()
    made.create("t", 2)
    return made


@pytest.fixture(params=sorted(PROTOCOLS))
def connect(backend: FakeBackend, request: pytest.FixtureRequest) -> Iterator[Connect]:
    with PROTOCOLS[request.param](backend) as made:
        yield made
        backend.release()


@pytest.fixture
def connection(connect: Connect) -> Connection:
    return connect(CLUSTER_ID)


def meta(number: int, sequence: int | None = None, **changes: Any) -> dict[str, Any]:
    """Of a put: its id, and its sequence as one of a producer that sends one row at a time."""
    first = number - 1 if sequence is None else sequence
    head = {"id": number, "topic": "t", "queue": 0, "pid": 7, "epoch": 0, "seq": first}
    return {**head, "acks": "quorum", "read": -1, **changes}


def receive(stream: Any, count: int) -> list[dict[str, Any]]:
    acks: list[dict[str, Any]] = []
    while len(acks) < count:
        acks += stream.receive()
    return acks


def put(connection: Connection, *bodies: bytes, queue: int = 0) -> None:
    with closing(connection.put_stream()) as stream:
        stream.send(meta(1, pid=None, queue=queue), batch(list(bodies)))
        assert "error" not in receive(stream, 1)[0]


def fetch(connection: Connection, offsets: dict[int, int], **changes: Any) -> list[FetchSlice]:
    limits = {"max_bytes": MANY, "max_records": 10, "wait_ms": 0}
    with closing(connection.fetch_stream()) as stream:
        return stream.fetch(FetchRequest("t", offsets, **{**limits, **changes}))


def small(body: bytes, tag: str | None = None, properties: bytes | None = None) -> SmallBatch:
    return SmallBatch([body], [tag], [properties], [1])


# --- puts -----------------------------------------------------------------------------------------


def test_batches_are_stored_and_answered_in_the_order_of_the_sends(
    backend: FakeBackend, connection: Connection
) -> None:
    sizes = [10, 300_000, 10, 2_000_000, 10, 10] * 10
    with closing(connection.put_stream()) as stream:
        for number, size in enumerate(sizes, 1):
            stream.send(meta(number, read=number // 2), batch([b"x" * size]))
        acks = receive(stream, len(sizes))
    assert [ack["id"] for ack in acks] == list(range(1, len(sizes) + 1))
    assert [ack["first_offset"] for ack in acks] == list(range(len(sizes)))
    assert [len(body) for body in backend.bodies("t")] == sizes


def test_no_put_is_answered_before_it_is_confirmed(
    backend: FakeBackend, connection: Connection
) -> None:
    backend.hold_answers()
    got: list[dict[str, Any]] = []
    with closing(connection.put_stream()) as stream:
        for number in (1, 2, 3):
            stream.send(meta(number), batch([b"x"]))
        backend.wait_for(lambda: bool(backend.puts))
        receiving = threading.Thread(target=lambda: got.extend(receive(stream, 3)))
        receiving.start()
        receiving.join(0.05)
        assert got == []
        backend.release()
        receiving.join(30)
    assert [ack["first_offset"] for ack in got] == [0, 1, 2]


def test_a_refused_batch_is_answered_in_its_place_and_the_stream_goes_on(
    backend: FakeBackend, connection: Connection
) -> None:
    backend.max_message_bytes = 10
    backend.refusals = [None, StorageFull("full")]
    with closing(connection.put_stream()) as stream:
        stream.send(meta(1, 0), batch([b"first"]))
        stream.send(meta(2, 1), batch([b"full"]))
        stream.send(meta(3, 1), batch([b"x", None]))
        stream.send(meta(4, 1), batch([b"fine", b"y" * 11]))
        stream.send(meta(5, 1, topic="nowhere"), batch([b"x"]))
        stream.send(meta(6, 1, acks="some"), batch([b"x"]))
        stream.send(meta(7, 1), batch([b"last"]))
        first, *refused, last = receive(stream, 7)
    full, null, large, nowhere, acks = (from_wire(ack["error"]) for ack in refused)
    assert (first["first_offset"], last["first_offset"]) == (0, 1)
    assert isinstance(full, StorageFull)
    assert (null.field, null.row) == ("body", 1)
    assert (large.field, large.row, large.limit) == ("body", 1, 10)
    assert (nowhere.field, acks.field) == ("topic", "acks")
    assert backend.bodies("t") == [b"first", b"last"]


@pytest.mark.parametrize(
    ("row", "field"),
    [
        (small(b"y" * 11), "body"),
        (small(b"y", tag="a\x01b"), "tag"),
        (small(b"y", properties=b"no end"), "properties"),
        (small(b"y", properties=b"TAGS\x01own\x02"), "properties"),
    ],
)
@pytest.mark.parametrize("is_large", [False, True])
def test_a_small_batch_is_checked_as_a_large_one_is(
    backend: FakeBackend, connection: Connection, row: SmallBatch, field: str, is_large: bool
) -> None:
    backend.max_message_bytes = 10
    with closing(connection.put_stream()) as stream:
        if is_large:
            stream.send(meta(1), row.to_batch())
        else:
            stream.send_small([(meta(1), row)])
        assert from_wire(receive(stream, 1)[0]["error"]).field == field
    assert backend.bodies("t") == []


V4, V6 = ("192.0.2.1", 5000), ("2001:db8::1", 5001)
#: flag, sysFlag and born host of three rows; None: the default
HEADS: list[tuple[int | None, int | None, tuple[str, int] | None]] = [
    (7, 0x301, V4),
    (None, None, None),
    (-1, 0x2, V6),
]


def headed(names: Iterable[str]) -> SmallBatch:
    """Three rows, with the named columns of HEADS."""
    columns = {
        "flag": [flag for flag, _, _ in HEADS],
        "sys_flag": [bits for _, bits, _ in HEADS],
        "born_host": [None if host is None else pack_host(*host) for _, _, host in HEADS],
    }
    kept: Any = [columns[name] if name in names else None for name in columns]
    return SmallBatch([b"a", b"", b"c"], ["A", None, None], [None] * 3, [1, 2, 3], *kept)


@pytest.mark.parametrize("form", ["small", "columns", "many columns"])
@pytest.mark.parametrize(
    "names", [("flag", "sys_flag", "born_host"), ("flag",), ("sys_flag",), ("born_host",)]
)
def test_flags_and_born_host_are_stored_as_rocketmq_encodes_them(
    backend: FakeBackend, connection: Connection, names: tuple[str, ...], form: str
) -> None:
    rows, times = headed(names), 1 if form != "many columns" else 30_000
    columns = pa.concat_batches([rows.to_batch()] * times)
    with closing(connection.put_stream()) as stream:
        if form == "small":
            stream.send_small([(meta(1), rows), (meta(2, 3), small(b"plain"))])
        else:
            stream.send(meta(1), columns)
            stream.send(meta(2, 3 * times), batch([b"plain"]))
        receive(stream, 2)

    request = backend.puts[0]
    plain = backend.puts[1].batch
    assert (plain if isinstance(plain, SmallBatch) else small_batch(plain)).more == ()
    encoded = encode_batch("t", 0, request.batch, stamp=None, store_host=V4, born_host=("::1", 9))
    place = {"queue_offset": 0, "physical_offset": 0, "store_time_ms": 9}
    found = bytes(encoded.records(0, 3, **place))
    assert encoded.count == 3 * times

    expected = b""
    for row, (flag, bits, host) in enumerate(HEADS):
        expected += encode_record(
            topic="t",
            body=rows.bodies[row],
            properties=b"TAGS\x01A\x02" if row == 0 else b"",
            queue_offset=row,
            physical_offset=len(expected),
            flag=(flag or 0) if "flag" in names else 0,
            sys_flag=(bits or 0) if "sys_flag" in names else 0,
            born_time_ms=row + 1,
            born_host=(host or ("::1", 9)) if "born_host" in names else ("::1", 9),
            store_time_ms=9,
            store_host=V4,
        )
    assert found == expected


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"sys_flags": [0, 0x4, 0]}, "sys_flag"),
        ({"sys_flags": [0, 0x10, 0]}, "sys_flag"),
        ({"born_hosts": [None, b"192.0.2.1", None]}, "born_host"),
    ],
)
@pytest.mark.parametrize("is_large", [False, True])
def test_a_bit_or_a_host_that_no_sender_has_is_refused_with_its_row(
    backend: FakeBackend,
    connection: Connection,
    change: dict[str, Any],
    field: str,
    is_large: bool,
) -> None:
    rows = headed(())._replace(**change)
    with closing(connection.put_stream()) as stream:
        if is_large:
            stream.send(meta(1), rows.to_batch())
        else:
            stream.send_small([(meta(1), rows)])
        (ack,) = receive(stream, 1)
    error = from_wire(ack["error"])
    assert (ack["id"], error.field, error.row) == (1, field, 1)
    assert backend.bodies("t") == []


def test_a_repeated_batch_is_stored_once_and_gets_its_first_answer(
    backend: FakeBackend, connection: Connection
) -> None:
    with closing(connection.put_stream()) as stream:
        stream.send(meta(1, 0), batch([b"a", b"b"]))
        stream.send(meta(2, 0), batch([b"a", b"b"]))
        first, again = receive(stream, 2)
    assert (first["first_offset"], first["duplicates"]) == (0, 0)
    assert (again["first_offset"], again["duplicates"]) == (0, 2)
    assert backend.bodies("t") == [b"a", b"b"]


# --- fetches --------------------------------------------------------------------------------------


def test_a_fetch_gives_each_readable_queue_and_the_errors_of_the_others(
    connection: Connection,
) -> None:
    put(connection, b"a", b"b", b"c")
    found = {part.queue_id: part for part in fetch(connection, {0: 1, 1: 5})}
    assert (found[0].first_offset, found[0].next_offset, found[0].max_offset) == (1, 3, 3)
    assert found[0].records is not None
    assert len(found[0].records) == 2
    assert isinstance(found[1].error, OffsetOutOfRange)
    assert (found[1].error.min, found[1].error.max) == (0, 0)


@pytest.mark.parametrize("limit", [{"max_bytes": 1}, {"max_records": 1}])
def test_a_fetch_keeps_its_limits_and_gives_at_least_one_record(
    connection: Connection, limit: dict[str, int]
) -> None:
    put(connection, b"a", b"b", b"c")
    (part,) = fetch(connection, {0: 1}, **limit)
    assert (part.first_offset, part.next_offset) == (1, 2)


def test_a_fetch_waits_for_the_next_message_and_no_longer_than_asked(
    backend: FakeBackend, connection: Connection
) -> None:
    assert fetch(connection, {0: 0}) == []
    assert fetch(connection, {0: 0}, wait_ms=30) == []
    found: list[FetchSlice] = []
    waiting = threading.Thread(
        target=lambda: found.extend(fetch(connection, {0: 0, 1: 0}, wait_ms=60_000))
    )
    waiting.start()
    put(connection, b"late", queue=1)
    waiting.join(30)
    assert [(part.queue_id, part.next_offset) for part in found] == [(1, 1)]


def test_what_was_looked_at_in_vain_arrives_without_records(
    backend: FakeBackend, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(connection, b"a", b"b", b"c")
    wanted: list[MessageSelector | None] = []
    read = backend._read

    def in_vain(request: FetchRequest) -> list[FetchSlice]:
        wanted.append(request.wanted)
        return [part._replace(records=part.records and part.records[:0]) for part in read(request)]

    monkeypatch.setattr(backend, "_read", in_vain)
    selector = MessageSelector("TAG", "a || b")
    (part,) = fetch(connection, {0: 1}, wanted=selector)
    assert (part.first_offset, part.next_offset, part.error) == (1, 3, None)
    assert part.records is not None
    assert len(part.records) == 0
    assert set(wanted) == {selector}


# --- operations and identity ----------------------------------------------------------------------


def test_operations_answer_or_raise_what_the_shard_raised(connection: Connection) -> None:
    assert connection.call("topics") == {"t": {"queues": 2, "shards": [0]}}
    with pytest.raises(Rejected) as unknown:
        connection.call("nothing")
    assert unknown.value.field == "op"
    with pytest.raises(Rejected) as bad:
        connection.call("commit_offsets", {})
    assert bad.value.field == "args"
    with pytest.raises(Unavailable):
        connection.call("down")


def test_a_client_of_another_cluster_is_refused(connect: Connect) -> None:
    stranger = connect("f" * 32)

    def open_stream() -> None:
        """Gets the refusal at the first or the second step, as the network has it."""
        with closing(stranger.put_stream()) as stream:
            stream.opened()

    for attempt in (
        lambda: stranger.call("topics"),
        open_stream,
        lambda: fetch(stranger, {0: 0}),
    ):
        with pytest.raises(RayMQError) as refused:
            attempt()
        assert isinstance(refused.value, AnotherShard)
        assert refused.value.field == "cluster_id"


# --- leases ---------------------------------------------------------------------------------------


def lease_call(**changes: Any) -> LeaseCall:
    made = LeaseCall(
        *("g", ("t",), b"s" * 16, 1, 10, MANY, 0, "earliest"),
        LeaseOptions(),
        MessageSelector("TAG", "a || b"),
    )
    return made._replace(**changes)


@pytest.mark.parametrize("count", [1, 100])
def test_a_lease_brings_its_facts_and_its_messages(
    backend: FakeBackend, connection: Connection, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    offsets, attempts = np.arange(5, 5 + count), np.full(count, 3)
    damaged = {70: Corrupt("damaged", offset=7)}
    queue = LeasedQueue(("t", 1), offsets, attempts, np.array([80, 82]), damaged)
    records = pa.array([b"record %d" % number for number in range(count)], pa.binary())
    answer = LeasedMessages(1, 9, 60_000, [queue], records)
    calls: list[LeaseCall] = []

    def lease(call: LeaseCall, is_left: object) -> LeasedMessages:
        calls.append(call)
        return answer

    monkeypatch.setattr(backend, "lease", lease)
    with closing(connection.fetch_stream()) as stream:
        found = stream.lease(lease_call())
    assert calls == [lease_call()]
    assert (found.request, found.number, found.lease_ms) == (1, 9, 60_000)
    (part,) = found.queues
    assert part.key == ("t", 1)
    assert part.offsets.tolist() == offsets.tolist()
    assert part.attempts.tolist() == attempts.tolist()
    assert part.missing.tolist() == [80, 82]
    assert isinstance(part.damaged[70], Corrupt)
    assert found.records == records


def test_a_lease_without_messages_and_one_that_is_refused(
    backend: FakeBackend, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(connection.fetch_stream()) as stream:
        assert stream.lease(lease_call(request=4)) == LeasedMessages(4)
        with pytest.raises(Rejected, match="start is 'now'"):
            stream.lease(lease_call(start="now"))
        # The stream stays usable.
        assert stream.lease(lease_call(request=5)) == LeasedMessages(5)


def test_settlements_go_over_the_stream_and_refusals_leave_it_usable(
    backend: FakeBackend, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []

    def call(op: str, arguments: dict[str, Any]) -> dict[str, Any]:
        calls.append((op, arguments))
        if "wrong" in arguments:
            raise Rejected("no such argument", field="wrong")
        if "bad" in arguments:
            raise KeyError("group")
        return {"refused": []}

    monkeypatch.setattr(backend, "call", call)
    with closing(connection.fetch_stream()) as stream:
        for wrong in ("wrong", "bad"):
            with pytest.raises(RayMQError):
                stream.settle({wrong: 1})
        assert stream.settle({"group": "g", "settle": 2}) == {"refused": []}
    assert calls[-1] == ("settle", {"group": "g", "settle": 2})
