"""The Ray transport without Ray: real methods and real client streams, with a handle that runs calls in threads."""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures import as_completed
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pytest
import ray.exceptions

import raymq
from raymq.actors.api.fetches import pack_request
from raymq.actors.api.puts import pack_acks, put_request, unpack_acks, unpack_message
from raymq.actors.api.shard_api import PutTicket
from raymq.actors.protocol import ray_calls
from raymq.actors.protocol.column_puts import pack_put
from raymq.actors.protocol.ray_calls import INLINE_BYTES, Call, pack_call, unpack_call
from raymq.actors.protocol.small_puts import pack_puts
from raymq.actors.server.ray import ray_methods
from raymq.actors.server.ray.concurrency_groups import GROUPS
from raymq.actors.server.ray.ray_methods import EARLY_MAX, STREAMS_MAX, RayMethods
from raymq.client.consume.consumer import Consumer
from raymq.client.produce import batch_sender as batch_sender_module
from raymq.client.produce import send_window
from raymq.client.produce.batch_sender import BatchSender
from raymq.client.transport import connection as connection_module
from raymq.client.transport import routes as routes_module
from raymq.client.transport.connection import open_connection
from raymq.client.transport.ray_connection import (
    CALLS_MAX,
    RayFetchStream,
    RayPutStream,
    RayShardConnection,
    translate,
)
from raymq.client.transport.routes import Routes
from raymq.cluster import cluster as cluster_module
from raymq.cluster.cluster import Cluster
from raymq.cluster.deploy import ray_client
from raymq.store.base.errors import (
    DeliveryUnknown,
    Rejected,
    Unavailable,
    to_wire,
)
from raymq.store.records.record import SMALL_BYTES_MAX, SmallBatch
from raymq.store.records.requests import FetchRequest, PutOutcome
from tests.support.batches import batch, put_one
from tests.support.clock import ManualClock
from tests.support.fake_backend import CLUSTER_ID, TOKEN, FakeBackend
from tests.support.moving_shard import MovingShard
from tests.support.ray_handle import Handle, HandleConnection, Method, Reference
from tests.support.waiting import until

TOPIC = "t"


@pytest.fixture
def backend() -> FakeBackend:
    found = FakeBackend()
    found.create(TOPIC)
    return found


@pytest.fixture
def handle(backend: FakeBackend) -> Iterator[Handle]:
    found = Handle(RayMethods(backend, turn_wait_s=0.5))
    yield found
    backend.release()
    found.close()


class FakeRoutes(Routes):
    """Routes whose connections go to a handle."""

    def __init__(self, handle: Handle) -> None:
        super().__init__({0: "shard-0"}, TOKEN, cluster_id=CLUSTER_ID, resolver=dict)
        self.handle = handle

    def _connect_to(self, shard: int, endpoint: str) -> RayShardConnection:
        """A connection, without asking Ray for the actor."""
        return HandleConnection(self.handle)


def put_stream(handle: Handle, cluster_id: str = CLUSTER_ID) -> RayPutStream:
    return RayPutStream(handle, "shard-0", cluster_id)


def meta(number: int, *, sequence: int | None = None, **changes: Any) -> dict[str, Any]:
    first = number - 1 if sequence is None else sequence
    head = {"id": number, "topic": TOPIC, "queue": 0, "pid": 7, "epoch": 0, "seq": first}
    return {**head, "acks": "quorum", **changes}


def packed(body: bytes) -> Any:
    return batch([body])


def append(
    methods: RayMethods, stream: str, number: int, *puts: tuple[dict[str, Any], Any]
) -> list[dict[str, Any]]:
    return acks_of(methods.append(*pack_call(stream, number, puts)))


def acks_of(answer: bytes) -> list[dict[str, Any]]:
    return unpack_acks(answer)[0]


def appends(handle: Handle) -> list[Call]:
    """Every call of a put stream."""
    return [unpack_call(*args) for method, args in handle.calls if method == "append"]


def number_of(method: str, args: tuple[Any, ...]) -> int:
    """The number of a call of a put stream; 0 for other calls."""
    return unpack_call(*args).number if method == "append" else 0


def receive(stream: RayPutStream, count: int) -> list[dict[str, Any]]:
    acks: list[dict[str, Any]] = []
    while len(acks) < count:
        acks += stream.receive()
    return acks


# --- put streams ----------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, -1, 1 << 62, 1 << 70])
@pytest.mark.parametrize("count", [1, 2])
def test_acks_are_read_as_they_were_written(number: int, count: int) -> None:
    stored, refused = PutOutcome(5, 3, 1, 1 << 40, 1 << 50, 7), Rejected("no", field="tag")
    ticket = PutTicket()
    ticket.finish(stored)
    reported = {"id": number, **stored._asdict()}
    assert unpack_acks(pack_acks([(number, ticket)] * count)) == ([reported] * count, None)
    reported = {"id": number, "error": to_wire(refused)}
    assert unpack_acks(pack_acks([(number, refused)] * count, 9)) == ([reported] * count, 9)


def test_batches_that_wait_for_a_call_share_the_next_one(
    handle: Handle, backend: FakeBackend
) -> None:
    backend.hold_answers()
    stream = put_stream(handle)
    for number in range(1, CALLS_MAX + 51):
        stream.send(meta(number), batch([b"x"]))
    backend.wait_for(lambda: len(backend.puts) == CALLS_MAX)
    backend.release()
    receive(stream, CALLS_MAX + 50)
    sizes = [len(call.messages) for call in appends(handle)]
    assert sizes == [1] * CALLS_MAX + [50]


def test_a_producer_waits_for_a_call_before_which_it_has_read_all_acks(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    methods, put = RayMethods(backend), backend.put
    stream = methods.open_stream(CLUSTER_ID)
    producer_waits: list[bool] = []

    def spy(requests: Any, **options: Any) -> Any:
        producer_waits.append(options["producer_waits"])
        return put(requests, **options)

    monkeypatch.setattr(backend, "put", spy)
    small = SmallBatch([b"small"], [None], [None], [0])
    append(methods, stream, 1, (meta(1, read=0), small))
    append(methods, stream, 2, (meta(2, read=0), batch([b"large"])))
    append(methods, stream, 3, (meta(3, read=2), batch([b"large"])), (meta(4, read=2), small))
    assert producer_waits == [True, False, True]


@pytest.mark.parametrize("size", [100, INLINE_BYTES])
def test_a_call_carries_the_messages_of_flight_small_ones_itself_and_large_ones_beside_it(
    size: int,
) -> None:
    small = SmallBatch([b"small"], [None], [None], [7])
    rows = batch([b"x" * size])
    headed = SmallBatch([b"x" * size], [None], [None], [7], flags=[1]).to_batch()
    puts = [(meta(number, read=2), small) for number in (1, 2)]
    puts += [(meta(3), rows), (meta(4), headed), (meta(5, read=2), small)]
    args = pack_call("s", 7, puts)
    assert len(args) == (1 if size == 100 else 2)

    stream, number, messages = unpack_call(*args)
    assert (stream, number) == ("s", 7)
    assert [metadata for metadata, _ in messages] == [
        pack_puts(puts[:2]),
        pack_put(*puts[2])[0],
        pack_put(*puts[3])[0],
        pack_puts(puts[4:]),
    ]
    requests = [put for each in messages for put in unpack_message(*each).requests]
    assert [put.batch for put in requests] == [small, small, rows, headed, small]


@pytest.mark.parametrize("cut", [0, 5, 40])
@pytest.mark.parametrize("count", [1, 3])
def test_small_batches_travel_as_bytes(backend: FakeBackend, cut: int, count: int) -> None:
    puts = [
        (meta(number, read=2), SmallBatch([b"body"], ["tag"], [None], [number]))
        for number in range(3, 3 + count)
    ]
    (call,) = pack_call("0" * 16, 7, puts)
    assert unpack_call(call) == ("0" * 16, 7, [(pack_puts(puts), None)])
    with pytest.raises(Rejected):
        RayMethods(backend).append(call[: 1 + cut])


@pytest.mark.parametrize(("node_ip", "born_host"), [(None, None), ("192.0.2.7", ("192.0.2.7", 0))])
def test_puts_name_the_node_of_the_process_that_calls(
    backend: FakeBackend, node_ip: str | None, born_host: tuple[str, int] | None
) -> None:
    methods = RayMethods(backend)
    stream = methods.open_stream(CLUSTER_ID, node_ip)
    append(methods, stream, 1, (meta(1, read=-1), SmallBatch([b"body"], [None], [None], [0])))
    append(methods, stream, 2, (meta(2), batch([b"body"])))
    assert [put.born_host for put in backend.puts] == [born_host, born_host]


def test_a_node_that_is_no_ip_address_is_refused(backend: FakeBackend) -> None:
    with pytest.raises(Rejected, match="not an IP address"):
        RayMethods(backend).open_stream(CLUSTER_ID, "host.example")


def test_small_batches_of_one_call_are_put_together(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    methods = RayMethods(backend)
    stream = methods.open_stream(CLUSTER_ID)
    small = SmallBatch([b"body"], [None], [None], [0])
    puts = [(meta(number) | {"read": -1}, small) for number in range(1, 4)]
    together: list[int] = []
    put = backend.put

    def spy(requests: Any, **options: Any) -> Any:
        together.append(len(requests))
        return put(requests, **options)

    monkeypatch.setattr(backend, "put", spy)
    acks = append(methods, stream, 1, *puts)
    assert [ack["first_offset"] for ack in acks] == [0, 1, 2]
    assert together == [3]

    monkeypatch.setattr(backend, "put", Mock(side_effect=Unavailable("a follower")))
    acks = append(methods, stream, 2, *puts)
    assert [ack["error"]["kind"] for ack in acks] == ["Unavailable"] * 3


def test_a_malformed_message_is_refused_in_its_place(backend: FakeBackend) -> None:
    methods = RayMethods(backend)
    stream = methods.open_stream(CLUSTER_ID)
    whole, _ = pack_call(stream, 1, [(meta(1), batch([b"x" * INLINE_BYTES]))])
    (ack,) = acks_of(methods.append(whole, [pa.py_buffer(b"no batch")]))
    assert (ack["id"], ack["error"]["fields"]["field"]) == (1, "metadata")
    (call,) = pack_call(
        stream, 2, [(meta(1), batch([b"first"])), (meta(2, sequence=0), batch([b"second"]))]
    )
    first, second = acks_of(methods.append(call.replace(b'"queue":0', b'"queue" 0', 1)))
    assert (first["id"], first["error"]["kind"], second["count"]) == (0, "Rejected", 1)


def malformed() -> Iterator[tuple[Any, ...]]:
    yield from [(b"",), (b"{}", []), (bytes(32), [b""]), (b"\xff" * 40,), (None,)]
    (call,) = pack_call("s", 1, [(meta(1), batch([b"x"]))])
    for length in range(len(call)):
        yield (call[:length],)
    yield (call + b"\0",)
    beside, buffers = pack_call("s", 1, [(meta(1), batch([b"x" * INLINE_BYTES]))])
    yield from [(beside, []), (beside, buffers * 2), (beside, 7)]


def test_a_malformed_call_is_refused(backend: FakeBackend) -> None:
    for wrong in malformed():
        with pytest.raises(Rejected) as caught:
            RayMethods(backend).append(*wrong)
        assert caught.value.field == "call", wrong


def test_a_slice_of_a_large_batch_travels_without_the_rest(handle: Handle) -> None:
    stream = put_stream(handle)
    stream.send(meta(1), batch([b"x" * 1000] * 1000).slice(500, 1))
    receive(stream, 1)
    ((_, data),) = appends(handle)[0].messages
    assert data is not None
    assert data.size < 2000


def test_a_call_that_comes_early_waits_for_its_predecessor(
    handle: Handle, backend: FakeBackend
) -> None:
    late = threading.Event()

    def hold_first(method: str, args: tuple[Any, ...]) -> None:
        if number_of(method, args) == 1:
            late.wait(10)
        if number_of(method, args) == 2:
            late.set()

    handle.before = hold_first
    stream = put_stream(handle)
    for number in (1, 2, 3):
        stream.send(meta(number), batch([b"%d" % number]))
    assert [ack["first_offset"] for ack in receive(stream, 3)] == [0, 1, 2]
    assert backend.bodies(TOPIC) == [b"1", b"2", b"3"]


def test_when_a_call_never_arrives_later_calls_are_refused_and_store_nothing(
    backend: FakeBackend,
) -> None:
    methods = RayMethods(backend, turn_wait_s=0.05)
    stream = methods.open_stream(CLUSTER_ID)
    with pytest.raises(Unavailable):
        append(methods, stream, 2, (meta(2, sequence=0), packed(b"2")))
    # Also the missing one, when it comes at last: its sender knows that the stream broke.
    with pytest.raises(Unavailable):
        append(methods, stream, 1, (meta(1), packed(b"1")))
    assert backend.bodies(TOPIC) == []


def test_a_call_is_taken_once(backend: FakeBackend) -> None:
    methods = RayMethods(backend)
    stream = methods.open_stream(CLUSTER_ID)
    append(methods, stream, 1, (meta(1), packed(b"1")))
    with pytest.raises(Unavailable):
        append(methods, stream, 1, (meta(1), packed(b"1")))


def test_calls_that_wait_for_their_turn_leave_threads_for_those_whose_turn_it_is(
    handle: Handle, backend: FakeBackend
) -> None:
    handle.methods._turn_wait_s = 30.0
    streams = [handle.methods.open_stream(CLUSTER_ID) for _ in range(GROUPS["append"])]
    early = [
        handle.append.remote(*pack_call(stream, 2, [(meta(2, pid=pid, sequence=1), packed(b"2"))]))
        for pid, stream in enumerate(streams)
    ]

    # Half of them wait, the others are refused at once instead of taking the last threads.
    ended = as_completed([reference.future() for reference in early], 10)
    for _ in range(GROUPS["append"] - EARLY_MAX):
        assert isinstance(next(ended).exception(), Unavailable)

    for pid, stream in enumerate(streams):
        waiting = early[pid].future()
        if not waiting.done():
            first = handle.append.remote(*pack_call(stream, 1, [(meta(1, pid=pid), packed(b"1"))]))
            assert acks_of(first.future().result(10))[0]["count"] == 1
            assert acks_of(waiting.result(10))[0]["count"] == 1

    assert len(backend.bodies(TOPIC)) == 2 * EARLY_MAX


def test_unused_streams_are_forgotten(backend: FakeBackend) -> None:
    methods = RayMethods(backend)
    first = methods.open_stream(CLUSTER_ID)
    kept = methods.open_stream(CLUSTER_ID)
    for _ in range(STREAMS_MAX - 2):
        methods.open_stream(CLUSTER_ID)
    append(methods, kept, 1, (meta(1), packed(b"1")))
    for _ in range(2):
        methods.open_stream(CLUSTER_ID)
    assert len(methods._streams) == STREAMS_MAX
    with pytest.raises(Unavailable):
        append(methods, first, 1, (meta(2), packed(b"2")))
    append(methods, kept, 2, (meta(2), packed(b"2")))


def test_a_stream_that_is_aborted_wakes_its_receiver(handle: Handle, backend: FakeBackend) -> None:
    backend.hold_answers()
    for sent in (0, 1):
        stream, failed = put_stream(handle), threading.Event()

        def wait(stream: RayPutStream = stream, failed: threading.Event = failed) -> None:
            with pytest.raises(Unavailable):
                stream.receive()
            failed.set()

        if sent:
            stream.send(meta(1), batch([b"1"]))
        waiting = threading.Thread(target=wait)
        waiting.start()
        stream.abort()
        stream.abort()
        assert failed.wait(10)
        waiting.join()
        with pytest.raises(Unavailable):
            stream.send(meta(2), batch([b"2"]))


# --- retries --------------------------------------------------------------------------------------


#: bodies of batches that travel in a call each
LARGE = [b"%d" % number + bytes(SMALL_BYTES_MAX) for number in range(40)]


@pytest.mark.parametrize("lost", ["call", "answer"])
def test_a_batch_whose_call_or_answer_was_lost_is_stored_once(
    handle: Handle, backend: FakeBackend, lost: str
) -> None:
    left, run = [3], handle.run

    def lose(method: str, args: tuple[Any, ...]) -> Any:
        losing = number_of(method, args) == 2 and bool(left)
        if losing:
            left.pop()
        if losing and lost == "call":
            raise ray.exceptions.ActorUnavailableError("restarting", None)
        answer = run(method, args)
        if losing:
            raise ray.exceptions.ActorUnavailableError("restarting", None)
        return answer

    handle.run = lose  # type: ignore[method-assign]
    with contextlib.closing(BatchSender(FakeRoutes(handle))) as sender:
        futures = [sender.send(TOPIC, 0, batch([body])) for body in LARGE]
        offsets = [future.result(30).first_offset for future in futures]
    assert offsets == list(range(40))
    assert backend.bodies(TOPIC) == LARGE
    assert not left


def test_a_call_that_could_not_be_made_is_made_again_in_order(
    handle: Handle, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, remote = [2], Method.remote

    def refuse(method: Method, *args: Any) -> Reference:
        if number_of(method.name, args) == 3 and full:
            full.pop()
            raise ray.exceptions.ObjectStoreFullError("no room")
        return remote(method, *args)

    monkeypatch.setattr(Method, "remote", refuse)
    with contextlib.closing(BatchSender(FakeRoutes(handle))) as sender:
        futures = [sender.send(TOPIC, 0, batch([body])) for body in LARGE]
        offsets = [future.result(30).first_offset for future in futures]
    assert offsets == list(range(40))
    assert backend.bodies(TOPIC) == LARGE
    assert not full


def test_a_stream_opens_however_many_operations_wait(
    handle: Handle, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = threading.Event()
    call = backend.call

    def wait(op: str, args: dict[str, Any]) -> dict[str, Any]:
        slow.wait(10)
        return call(op, args)

    monkeypatch.setattr(backend, "call", wait)
    waiting = [
        handle.call.remote(CLUSTER_ID, "topics", {}).future() for _ in range(GROUPS["admin"])
    ]
    stream = put_stream(handle)
    stream.send(meta(1), batch([b"1"]))
    assert receive(stream, 1)[0]["first_offset"] == 0
    assert not any(each.done() for each in waiting)
    slow.set()


READ = pack_request(FetchRequest(TOPIC, {0: 0}, max_bytes=1, max_records=1, wait_ms=0))


# --- reads ----------------------------------------------------------------------------------------


def test_a_read_waits_for_the_next_record_over_several_calls(
    handle: Handle, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_methods, "READ_WAIT_MS_MAX", 20)
    stream = RayFetchStream(handle, "shard-0", CLUSTER_ID)
    third = threading.Event()

    def count(method: str, args: tuple[Any, ...]) -> None:
        if sum(name == "read" for name, _ in handle.calls) >= 3:
            third.set()

    handle.before = count

    def put() -> None:
        third.wait(10)
        methods = handle.methods
        append(
            methods,
            methods.open_stream(CLUSTER_ID),
            1,
            (meta(1), packed(b"late")),
        )

    putting = threading.Thread(target=put)
    putting.start()
    (found,) = stream.fetch(
        FetchRequest(TOPIC, {0: 0}, max_bytes=1 << 20, max_records=10, wait_ms=10_000)
    )
    putting.join()
    assert (found.first_offset, found.next_offset) == (0, 1)
    assert isinstance(found.records, pa.Array)
    assert b"late" in found.records[0].as_py()


def test_many_long_polls_wait_shortly_so_that_all_get_a_thread(backend: FakeBackend) -> None:
    methods, waits = RayMethods(backend), []
    fetch = backend.fetch

    def note(request: Any) -> Any:
        waits.append(request.wait_ms)
        return fetch(request._replace(wait_ms=0))

    backend.fetch = note  # type: ignore[method-assign]
    methods.read(CLUSTER_ID, {**READ, "wait_ms": 60_000})
    # This number of idle readers is allowed: each must not cost a call every 100 ms.
    methods._reading = 40
    methods.read(CLUSTER_ID, {**READ, "wait_ms": 60_000})
    methods._reading = ray_methods.CROWD
    methods.read(CLUSTER_ID, {**READ, "wait_ms": 60_000})
    longest, shortest = ray_calls.READ_WAIT_MS_MAX, ray_methods.CROWDED_WAIT_MS
    assert waits == [longest, longest, shortest]


# --- errors ---------------------------------------------------------------------------------------


def test_errors_are_those_of_the_shard() -> None:
    refused = Rejected("no", field="x", limit=3)
    wrapped = ray.exceptions.RayTaskError("f", "traceback", refused)
    for error in (refused, wrapped, wrapped.as_instanceof_cause()):
        found = translate(error, "shard-0")
        assert type(found) is Rejected
        assert found.fields == {"field": "x", "limit": 3}
    broken = ray.exceptions.RayTaskError("f", "traceback", KeyError("k"))
    for failure in (broken, ray.exceptions.ActorUnavailableError("gone", None), OSError("gone")):
        assert type(translate(failure, "shard-0")) is Unavailable


@pytest.fixture
def two_shards(handle: Handle, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """A cluster of two shards over Ray, whose calls both run on the handle."""
    monkeypatch.setattr(Routes, "connect", lambda routes, shard: HandleConnection(handle))
    return Cluster(
        name="n", cluster_id=CLUSTER_ID, shards=2, token=TOKEN, endpoints={}, transport="ray"
    )


def test_status_asks_all_shards_at_the_same_time(
    two_shards: Cluster, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Barrier(2)

    def answer(op: str, args: dict[str, Any]) -> dict[str, Any]:
        # Asked one by one, the first shard would wait here forever.
        asked.wait(30)
        return {"state": "RUNNING"}

    monkeypatch.setattr(cluster_module, "STATUS_TIMEOUT_S", 60.0)
    monkeypatch.setattr(backend, "call", answer)
    assert two_shards.status()["state"] == "RUNNING"


def test_a_silent_shard_delays_no_answer_of_another_one(
    two_shards: Cluster, handle: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, end = iter(range(10)), threading.Event()

    def hold(method: str, args: tuple[Any, ...]) -> None:
        if next(calls) % 2 == 0:
            end.wait(60)

    handle.before = hold
    assert list(two_shards.topics()) == [TOPIC]
    monkeypatch.setattr(cluster_module, "STATUS_TIMEOUT_S", 0.2)
    states = [shard["state"] for shard in two_shards.status()["shards"]]
    end.set()
    assert "UNREACHABLE" in states


def test_an_operation_that_all_shards_are_asked_raises_the_error_of_a_shard(
    two_shards: Cluster,
) -> None:
    with pytest.raises(Rejected, match="unknown operation"):
        two_shards.call(None, "nothing", {})


def test_a_process_without_ray_gets_the_advice_to_connect() -> None:
    with pytest.raises(Rejected) as caught:
        open_connection("ray", "name", token=TOKEN, cluster_id=CLUSTER_ID, shard=0)
    assert caught.value.field == "transport"


def test_an_unknown_transport_is_refused() -> None:
    with pytest.raises(Rejected) as caught:
        raymq.connect("somewhere", transport="pigeon")  # type: ignore[arg-type]
    assert caught.value.field == "transport"


# --- the leader changes ---------------------------------------------------------------------------


class Actors:
    """The actors of a shard's replicas, by their names."""

    def __init__(self, shard: MovingShard) -> None:
        self.handles = {
            f"raymq:fake:shard-0:replica-{replica.number}:commit_log": Handle(RayMethods(replica))
            for replica in shard.replicas
        }
        #: set at the end: until then a stopped replica answers nothing
        self.end = threading.Event()

    def handle(self, replica: int) -> Handle:
        return list(self.handles.values())[replica]

    def kill(self, replica: int) -> None:
        """End an actor: its calls fail."""

        def fail(method: str, args: tuple[Any, ...]) -> None:
            raise ray.exceptions.ActorUnavailableError("restarting", None)

        self.handle(replica).before = fail

    def stop(self, replica: int) -> None:
        """Stop an actor like SIGSTOP: its calls are not answered."""
        self.handle(replica).before = lambda method, args: None if self.end.wait(60) else None

    def close(self) -> None:
        self.end.set()
        for handle in self.handles.values():
            handle.close()


class ActorConnection(HandleConnection):
    """A connection to the actor of one replica."""

    def __init__(self, actors: Actors, name: str) -> None:
        super().__init__(actors.handles[name])
        self.endpoint = name

    def call(
        self, op: str, args: dict[str, Any] | None = None, timeout: float = 30.0
    ) -> dict[str, Any]:
        """Call without `ray.get`."""
        try:
            return self.begin(op, args or {}).result(timeout)
        except FutureTimeoutError as error:
            raise DeliveryUnknown("no answer in time", status="UNKNOWN_ERROR") from error


@pytest.fixture
def replicated(monkeypatch: pytest.MonkeyPatch) -> Iterator[MovingShard]:
    monkeypatch.setattr(routes_module, "LEADER_TIMEOUT_S", 0.5)
    for module in (send_window, connection_module, routes_module):
        monkeypatch.setattr(module, "SILENT_MS", 100)
    for module in (batch_sender_module, connection_module):
        monkeypatch.setattr(module, "CHECK_S", 0.02)
    monkeypatch.setattr(connection_module, "FOLLOWED_WAIT_MS", 50)
    shard = MovingShard()
    shard.create(TOPIC)
    yield shard
    shard.close()


@pytest.fixture
def actors(replicated: MovingShard, monkeypatch: pytest.MonkeyPatch) -> Iterator[Actors]:
    actors = Actors(replicated)
    connect = lambda routes, shard, endpoint: ActorConnection(actors, endpoint)  # noqa: E731
    monkeypatch.setattr(Routes, "_connect_to", connect)
    yield actors
    for replica in replicated.replicas:
        replica.release()
    actors.close()


@pytest.mark.parametrize("fate", ["refuses", "dead", "hangs"])
def test_clients_follow_the_leader_by_the_names_of_the_actors(
    replicated: MovingShard, actors: Actors, fate: str
) -> None:
    old = replicated.replicas[0]
    handle = replicated.cluster(transport="ray", replica_endpoints={})
    with (
        handle as cluster,
        contextlib.closing(BatchSender(Routes.of(cluster))) as sender,
        Consumer(cluster, TOPIC, group="g", start="earliest") as consumer,
    ):
        assert sender.send(TOPIC, 0, batch([b"0"])).result(20).first_offset == 0
        assert [message.body for message in consumer.poll(1, 20)] == [b"0"]

        if fate != "refuses":
            old.hold_answers()
        lost = sender.send(TOPIC, 0, batch([b"1"]))
        old.wait_for(lambda: len(old.puts) == 2)
        kept = old.kept()
        {"refuses": lambda number: old.step_down(), "dead": actors.kill, "hangs": actors.stop}[
            fate
        ](0)
        new = replicated.elect(2, 2, of=kept)

        assert lost.result(20).first_offset == 1
        assert sender.send(TOPIC, 0, batch([b"2"])).result(20).first_offset == 2
        read: list[bytes] = []
        until(lambda: len(read) == 2, lambda: read.extend(m.body for m in consumer.poll(9, 5)))
        consumer.commit()
        assert new.state.offsets["g", TOPIC] == {0: 3}
        assert cluster.call(0, "init_producer", {"producer_id": 1}) == {"epoch": 0}
    assert (new.bodies(TOPIC), read) == ([b"0", b"1", b"2"], [b"1", b"2"])


def test_a_consumer_reads_from_the_actors_of_followers_and_leaves_one_that_is_gone(
    replicated: MovingShard, actors: Actors
) -> None:
    leader, *followers = replicated.replicas
    put_one(leader, put_request({"topic": TOPIC, "queue": 0}, batch([b"0", b"1"])))
    for each in followers:
        each.serves_reads = True
        each.copy(leader.kept())

    with (
        replicated.cluster(transport="ray", replica_endpoints={}) as cluster,
        Consumer(cluster, TOPIC, start="earliest", read_from="nearest") as consumer,
    ):
        assert [message.body for message in consumer.poll(2, 20)] == [b"0", b"1"]
        assert leader.answered == 0
        reader = consumer._assigned._readers[0]
        for number in (1, 2):
            actors.kill(number)
        put_one(leader, put_request({"topic": TOPIC, "queue": 0}, batch([b"2"])))
        assert [message.body for message in consumer.poll(1, 20)] == [b"2"]
        assert leader.answered > 0
        assert reader._nearest is not None
        assert reader._nearest.seen_epoch == 1


class DyingProxy:
    """Ray's module, whose proxy starts processes that die and reports it late."""

    exceptions = ray.exceptions

    def __init__(self, clock: ManualClock, failures: list[Exception]) -> None:
        self.clock, self.failures = clock, failures

    def init(self, address: str, **options: Any) -> None:
        """Takes half a minute to fail."""
        if self.failures:
            self.clock.advance(30_000)
            raise self.failures.pop(0)

    def shutdown(self) -> None:
        """Nothing is left."""


def test_a_connect_whose_server_died_is_tried_again_however_long_it_took() -> None:
    clock = ManualClock()
    died = ConnectionAbortedError("Initialization failure from server")
    ray_client._init(DyingProxy(clock, [died] * (ray_client.TRIES - 1)), "ray://a:1", clock)
    with pytest.raises(Unavailable):
        ray_client._init(DyingProxy(clock, [died] * ray_client.TRIES), "ray://a:1", clock)


def test_a_connect_without_an_answer_for_long_is_not_repeated() -> None:
    clock = ManualClock()
    proxy = DyingProxy(clock, [ConnectionError("ray client connection timeout")] * 2)
    with pytest.raises(Unavailable):
        ray_client._init(proxy, "ray://a:1", clock)
    assert len(proxy.failures) == 1


def test_ray_client_without_grpcio_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Rejected, match=r"pip install 'ray\[client\]'"):
        raymq.connect("ray://127.0.0.1:1")


def test_the_handle_remembers_its_transport() -> None:
    cluster = Cluster(
        name="n", cluster_id=CLUSTER_ID, shards=2, token=TOKEN, endpoints={}, transport="ray"
    )
    copy = pickle.loads(pickle.dumps(cluster))
    assert copy.transport == "ray"
    assert Routes.of(copy).endpoints[1] == "raymq:n:shard-1:replica-0:commit_log"
    with pytest.raises(Rejected):
        Routes.of(copy).connect(1)
