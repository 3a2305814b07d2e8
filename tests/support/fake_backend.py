"""A shard in memory: what a ShardBackend means, without a disk, with failures on demand."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from raymq.actors.api.leases import LeaseCall, LeasedMessages
from raymq.actors.api.shard_api import PutTicket, notify_all_done
from raymq.actors.server.flight.flight_server import Server, serve
from raymq.client.produce.open_batch import OpenBatch
from raymq.client.produce.producer import Producer
from raymq.client.transport.routes import Routes
from raymq.store.base.clock import Clock
from raymq.store.base.errors import (
    DeliveryUnknown,
    OffsetOutOfRange,
    RayMQError,
    Rejected,
    Unavailable,
)
from raymq.store.base.format import SCHEDULE_TOPIC, TIMER_TOPIC
from raymq.store.config.delay_levels import DEFAULT_LEVEL_COUNT
from raymq.store.config.store_config import StoreConfig
from raymq.store.delay.delay_hook import DelayHook, LevelGuard
from raymq.store.records import record
from raymq.store.records.producer_stamp import Stamp
from raymq.store.records.requests import FetchRequest, FetchSlice, PutOutcome, PutRequest
from raymq.store.state.shard_state import ShardState, TopicInfo
from raymq.store.state.topics import QueueKey
from tests.support.fake_groups import FakeGroups
from tests.support.fake_halves import HALF_OPERATIONS, FakeHalves
from tests.support.waiting import until

TOKEN = "t0ken"
#: how long a client may hold the port of a server that starts again
PORT_TAKEN_S = 10.0
CLUSTER_ID = "c" * 32


@dataclass
class FakeQueue:
    """Raw records from `min_offset` on."""

    min_offset: int = 0
    records: list[bytes] = field(default_factory=list)

    @property
    def max_offset(self) -> int:
        """The next record's offset."""
        return self.min_offset + len(self.records)


class Changed(threading.Condition):
    """A condition that also calls functions when it is notified."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: set[Callable[[], None]] = set()

    def notify_all(self) -> None:
        super().notify_all()
        for call in self.calls:
            call()


class FakeBackend:
    """Sequences, offsets, long poll and admission as in the real shard (store/state/shard_state.py decides)."""

    def __init__(
        self, shard: int = 0, *, cluster_id: str = CLUSTER_ID, max_message_bytes: int = 4 << 20
    ) -> None:
        self.shard = shard
        self.cluster_id = cluster_id
        self.max_message_bytes = max_message_bytes
        self.state = ShardState()
        self.queues: dict[tuple[str, int], FakeQueue] = {}
        self.routes: dict[str, str] = {}

        self.lease_calls: list[LeaseCall] = []
        #: every put that arrived, refused or not
        self.puts: list[PutRequest] = []
        #: raised by the next puts, one each; None lets one pass
        self.refusals: list[RayMQError | None] = []
        #: stored, then answered "unknown", that many times
        self.unknown = 0

        self.clock = Clock()
        self.groups = FakeGroups(self.state, self.clock)
        self.halves = FakeHalves()
        #: of the cluster
        self.shards = 1
        self.frames: list[tuple[bytes, bytes | None]] = []
        self._changed = Changed()
        self._held: list[Callable[[], None]] | None = None
        self._position = 0

    # --- what tests do ----------------------------------------------------------------------------

    def create(self, topic: str, queues: int = 1, shards: tuple[int, ...] = (0,)) -> None:
        """Make a topic."""
        self.state.topics[topic] = TopicInfo(topic, queues, shards)

    def bodies(self, topic: str, queue_id: int = 0) -> list[bytes]:
        """Every stored body of a queue."""
        raw = self.queues.get((topic, queue_id), FakeQueue()).records
        batch = decode_all(raw)
        found: list[bytes] = batch.column("body").to_pylist()
        return found

    def trim(self, topic: str, queue_id: int, upto: int) -> None:
        """Forget records below `upto`."""
        entry = self.queues[topic, queue_id]
        del entry.records[: upto - entry.min_offset]
        entry.min_offset = upto

    def hold_answers(self) -> None:
        """Store puts, but keep the answers until `release`."""
        with self._changed:
            self._held = []

    def release(self) -> None:
        """Answer the held puts, and each later one at once."""
        for answer in self.take_held():
            answer()

    def release_first(self) -> None:
        """Answer the held put that came first."""
        with self._changed:
            assert self._held, "no put is held"
            answer = self._held.pop(0)
        answer()

    def take_held(self) -> list[Callable[[], None]]:
        """Answer each later put at once. Returns: the answers of the held ones, for the caller to give."""
        with self._changed:
            held, self._held = self._held or [], None
        return held

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
        """Wait until something that a put or frame brings about is so."""
        with self._changed:
            assert self._changed.wait_for(condition, timeout_s), "it did not happen in time"

    # --- ShardBackend -----------------------------------------------------------------------------

    def identity(self) -> dict[str, Any]:
        """The identity of this shard."""
        return {"cluster_id": self.cluster_id, "shard": self.shard, "incarnation": 1}

    def put(
        self,
        requests: Sequence[PutRequest],
        notify: Callable[[], None] | None = None,
        *,
        producer_waits: bool = False,
    ) -> list[PutTicket | RayMQError]:
        """Store in memory, one after the other."""
        results: list[PutTicket | RayMQError] = []
        for request in requests:
            try:
                results.append(self._put_one(request, notify))
            except RayMQError as error:
                results.append(error)
        return results

    def _put_one(self, request: PutRequest, notify: Callable[[], None] | None) -> PutTicket:
        """Store in memory."""
        with self._changed:
            self.puts.append(request)
            self._changed.notify_all()
            if self.refusals:
                error = self.refusals.pop(0)
                if error is not None:
                    raise error

            ticket = PutTicket(notify)
            outcome = self._store(request)
            self._changed.notify_all()

            held = self._held
            if self.unknown:
                self.unknown -= 1
                late = DeliveryUnknown("late", status="FLUSH_DISK_TIMEOUT", append={})
                answer_put(ticket, late)
            elif held is not None:
                held.append(lambda: answer_put(ticket, outcome))
            else:
                answer_put(ticket, outcome)
            return ticket

    def _store(self, request: PutRequest) -> PutOutcome:
        info = self.state.topics.get(request.topic)
        if request.topic == TIMER_TOPIC:
            DelayHook(StoreConfig(), self.clock).check_batch(request, self.state.topics)
        elif request.topic == SCHEDULE_TOPIC:
            LevelGuard(StoreConfig()).check_batch(request, self.state.topics)
        elif info is None or not 0 <= request.queue_id < info.queues:
            raise Rejected(f"no queue {request.queue_id} of {request.topic}", field="topic")
        record.check_put(request.topic, request.batch, max_message_bytes=self.max_message_bytes)

        count = request.batch.num_rows
        skip, first = 0, -1
        stamp = None
        if request.producer_id is not None:
            admission = self.state.admit(
                request.producer_id,
                request.epoch,
                request.topic,
                request.queue_id,
                request.first_sequence,
                count,
            )
            skip, first = admission.duplicates, admission.first_offset
            stamp = Stamp(request.producer_id, request.epoch, request.first_sequence)

        entry = self.queues.setdefault((request.topic, request.queue_id), FakeQueue())
        now = self.clock.now_ms()
        if skip < count:
            offset = entry.max_offset
            entry.records += self._encode(request, stamp, skip, offset, now)
            self.state.apply_rows(
                request.topic,
                request.queue_id,
                offset,
                count - skip,
                0,
                now,
                producer_id=request.producer_id,
                epoch=request.epoch,
                first_sequence=request.first_sequence + skip,
            )
            first = first if skip else offset
        return PutOutcome(first, count, skip, now, self._position, first + count - 1)

    def _encode(
        self, request: PutRequest, stamp: Stamp | None, skip: int, offset: int, now: int
    ) -> list[bytes]:
        encoded = record.encode_batch(
            request.topic,
            request.queue_id,
            request.batch,
            stamp=stamp,
            store_host=("127.0.0.1", 10911),
        )
        records = encoded.records(
            skip,
            encoded.count,
            queue_offset=offset,
            physical_offset=self._position,
            store_time_ms=now,
        )
        data = bytes(records)
        self._position += len(data)

        found, start = [], 0
        for size in encoded.sizes[skip:].tolist():
            found.append(data[start : start + size])
            start += size
        return found

    def fetch(self, request: FetchRequest) -> list[FetchSlice]:
        """Wait for any of the queues."""
        deadline = self.clock.monotonic() + request.wait_ms / 1000
        with self._changed:
            while True:
                found = self._read(request)
                left = deadline - self.clock.monotonic()
                if found or left <= 0:
                    return found
                self._changed.wait(left)

    def hold(self, queues: Iterable[QueueKey], notify: Callable[[], None]) -> Callable[[], None]:
        """Each change is notified."""
        with self._changed:
            self._changed.calls.add(notify)

        def release() -> None:
            with self._changed:
                self._changed.calls.discard(notify)

        return release

    def _read(self, request: FetchRequest) -> list[FetchSlice]:
        found = []
        for (topic, queue_id), offset in request.queues().items():
            entry = self.queues.get((topic, queue_id), FakeQueue())
            shown = "" if topic == request.topic else topic
            low, high = entry.min_offset, entry.max_offset
            if not low <= offset <= high:
                error = OffsetOutOfRange(
                    f"queue {queue_id} holds {low} to {high}, not {offset}",
                    min=low,
                    max=high,
                    queue_id=queue_id,
                )
                found.append(
                    FetchSlice(queue_id, offset, offset, low, high, None, error, topic=shown)
                )
                continue

            records = entry.records[offset - low :][: request.max_records]
            size = 0
            for index, raw in enumerate(records):
                size += len(raw)
                if size > request.max_bytes and index:
                    records = records[:index]
                    break
            if records:
                end = offset + len(records)
                column = pa.array(records, pa.binary())
                found.append(
                    FetchSlice(queue_id, offset, end, low, high, column, None, topic=shown)
                )

        return found

    def lease(self, call: LeaseCall, is_left: Callable[[], bool]) -> LeasedMessages:
        """Keep the call, and lease nothing."""
        self.lease_calls.append(call)
        return LeasedMessages(call.request)

    def call(self, op: str, args: dict[str, Any]) -> dict[str, Any]:
        """The operations that clients use."""
        if op == "topics":
            return {info.name: info.shown() for info in self.state.topics.values()}

        if op == "routes":
            return dict(self.routes)
        if op == "status":
            return {**self.identity(), "state": "RUNNING"}
        if op == "describe":
            return {**self.identity(), "name": "fake", "shards": 1}

        if op == "queue_ranges":
            info = self.state.topics[args["topic"]]
            queues = [q for q in range(info.queues) if info.shard_of(q) == self.shard]
            entries = {q: self.queues.get((info.name, q), FakeQueue()) for q in queues}
            return {str(q): [e.min_offset, e.max_offset] for q, e in entries.items()}

        if op == "commit_offsets":
            return self.groups.commit(**args)
        if op == "find_coordinator":
            return self.groups.find_coordinator(args["group"], self.shards)
        if op == "group_beat":
            return self.groups.beat(args["beats"])
        if op == "claim_queues":
            return self.groups.claim(**args)
        if op == "release_claims":
            return self.groups.release(**args)
        if op == "offsets":
            table = self.state.offsets.get((args["group"], args["topic"]), {})
            return {str(q): o for q, o in table.items()}

        if op in HALF_OPERATIONS:
            return self.halves.call(op, args)

        if op == "init_producer":
            epoch = self.state.next_epoch(args["producer_id"])
            self.state.raise_epoch(args["producer_id"], epoch)
            return {"epoch": epoch}

        if op == "down":
            raise Unavailable("down", field="op")
        raise Rejected(f"unknown operation {op!r}", field="op", limit="a known operation")

    def replicate(
        self, frames: Iterator[tuple[bytes, Any]], send: Callable[[bytes, Any], None]
    ) -> None:
        """Keep and echo every frame."""
        for header, body in frames:
            with self._changed:
                self.frames.append((header, None if body is None else bytes(body)))
                self._changed.notify_all()
            send(b"ack:" + header, body)


def decode_all(raw: list[bytes]) -> pa.RecordBatch:
    """Raw records as RECORD_SCHEMA."""
    data, starts, at = b"".join(raw), [], 0
    for each in raw:
        starts.append(at)
        at += len(each)
    return record.decode(data, starts, [len(each) for each in raw])


class FakeCluster:
    """Fake shards with real Flight servers on 127.0.0.1, and what a Cluster handle offers."""

    def __init__(self, shards: int = 1) -> None:
        self.name = "fake"
        self.cluster_id = CLUSTER_ID
        self.token = TOKEN
        self.ca: bytes | None = None
        self.transport = "flight"
        self.shards = shards
        self.replicas = 1
        self.delay_levels = DEFAULT_LEVEL_COUNT
        self.replica_endpoints: dict[int, dict[int, str]] = {}
        self.backends = [FakeBackend(shard) for shard in range(shards)]
        for backend in self.backends:
            backend.shards = shards
        self.servers: dict[int, Server] = {}
        self.endpoints: dict[int, str] = {}
        self.resolver: Callable[[], dict[int, str]] | None = lambda: dict(self.endpoints)
        for shard in range(shards):
            self.up(shard)

    def up(self, shard: int = 0, port: int = 0) -> int:
        """Start a shard's server. Its memory is what it was.

        Args: `port`: one that a server had. A client that looks for it there may be connected to itself for a moment.
        """
        served: list[Server] = []
        end_s = time.monotonic() + PORT_TAKEN_S

        def try_to_serve() -> None:
            try:
                served.append(serve(self.backends[shard], host="127.0.0.1", port=port, token=TOKEN))
            except pa.ArrowException as error:
                if not port or time.monotonic() > end_s:
                    raise AssertionError(f"no server at port {port}") from error
                threading.Event().wait(0.02)

        until(lambda: bool(served), try_to_serve)
        (server,) = served
        self.servers[shard] = server
        self.endpoints[shard] = f"127.0.0.1:{server.port}"
        for backend in self.backends:
            backend.routes = {str(s): endpoint for s, endpoint in self.endpoints.items()}
        found: int = server.port
        return found

    def down(self, shard: int = 0) -> int:
        """Stop a shard's server. Returns: the port it had."""
        server = self.servers.pop(shard)
        port: int = server.port
        server.close()
        return port

    def create_topic(self, name: str, *, queues: int = 1) -> None:
        """Make a topic on all shards."""
        for backend in self.backends:
            backend.create(name, queues, tuple(range(self.shards)))

    def call(self, shard: int, op: str, args: dict[str, Any]) -> dict[str, Any]:
        """One operation of one shard."""
        return self.backends[shard].call(op, args)

    def learn_shards(self, count: int) -> range:
        """A handle on all shards learns nothing."""
        return range(self.shards, count)

    def routes(self) -> Routes:
        """New client routes."""
        return Routes(
            self.endpoints, self.token, cluster_id=self.cluster_id, resolver=self.resolver
        )

    def close(self) -> None:
        """Stop all."""
        for backend in self.backends:
            backend.release()
        for shard in list(self.servers):
            with contextlib.suppress(RayMQError):
                self.down(shard)


def answer_put(ticket: PutTicket, result: PutOutcome | RayMQError) -> None:
    """Finish a put, as the ack loop does."""
    ticket.finish(result)
    notify_all_done([ticket])


def open_batch(producer: Producer, topic: str, queue_id: int) -> OpenBatch:
    """The messages that a producer gathers for a queue. No public call shows them."""
    return producer._batcher._open[topic, queue_id]
