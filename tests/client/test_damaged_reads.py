"""Bytes damaged on the shard's disk or on the way reach no reader: a real shard with real Flight."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from raymq.actors.replica import open_replica
from raymq.actors.server.flight.flight_server import serve
from raymq.client.consume import shard_reader
from raymq.client.consume.async_consumer import AsyncConsumer
from raymq.client.consume.consumer import Consumer
from raymq.client.consume.range_reader import read_range
from raymq.client.consume.verify_crcs import verify_slices
from raymq.client.transport.routes import Routes
from raymq.cluster.queue.durable_queue import Queue
from raymq.cluster.queue.queue_client import ItemReader
from raymq.store.base import format as fmt
from raymq.store.base.errors import Corrupt, RayMQError
from raymq.store.config.store_config import StoreConfig
from raymq.store.queues.raw_records import decode_records
from raymq.store.records.requests import FetchRequest, PutRequest
from tests.support.batches import batch, put_one, request
from tests.support.damaged_store import FIRST_LOG, flip
from tests.support.fake_backend import FakeBackend
from tests.support.roles import leader_of

CLUSTER_ID, TOKEN = "c" * 32, "t0ken"
BODIES = [b"pay %03d EUR " % number * 20 for number in range(50)]
ROTTEN = 30


class Shard:
    """Shard 0 of a cluster of one, with 50 messages in queue 0 of t."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.host = open_replica(
            root,
            StoreConfig(segment_size_bytes=1 << 20, flush="async", scrub_bytes_per_s=0),
            identity={"cluster_id": CLUSTER_ID, "shard": 0, "incarnation": 1},
            roles=(),
        )

        self.server = serve(self.host, host="127.0.0.1", port=0, token=TOKEN)
        endpoint = f"127.0.0.1:{self.server.port}"
        self.host.addresses.set_routes({"0": endpoint})

        self.cluster: Any = SimpleNamespace(
            transport="flight",
            endpoints={0: endpoint},
            token=TOKEN,
            cluster_id=CLUSTER_ID,
            resolver=None,
            ca=None,
            shards=1,
            replicas=1,
            delay_levels=18,
            replica_endpoints={},
        )

        self.host.call("create_topic", {"name": "t", "queues": 1, "shards": [0]})
        put_one(self.host, request(list(BODIES))).wait(30)
        leader_of(self.host).await_dispatch()

    def position(self, offset: int) -> int:
        """The physical offset of a message's record."""
        units = self.host.store.consume_queues.get("t", 0).read(offset, 1)
        return int(units["position"][0])

    def rot(self, offset: int) -> int:
        """A byte of a message's body changes on disk. Returns: its record's position."""
        position = self.position(offset)
        flip(self.root / FIRST_LOG, position + 100)
        return position

    def close(self) -> None:
        self.server.close()
        self.host.close()


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[Shard]:
    made = Shard(tmp_path / "s")
    yield made
    made.close()


def read_all(consumer: Consumer) -> tuple[list[bytes], RayMQError | None]:
    """Bodies up to the end of the queue, or to an error."""
    found: list[bytes] = []
    while len(found) < len(BODIES):
        try:
            found += [message.body for message in consumer.poll(100, 10)]
        except RayMQError as error:
            return found, error
    return found, None


def check_error(error: RayMQError | None, shard: Shard, position: int) -> None:
    assert isinstance(error, Corrupt)
    assert (error.shard, error.path, error.offset) == (0, str(shard.root / FIRST_LOG), position)
    assert error.rule == "bad body CRC"
    assert str(error).startswith("shard 0: ")


def test_a_consumer_gets_all_before_the_damage_then_the_error_until_it_seeks_on(
    shard: Shard,
) -> None:
    position = shard.rot(ROTTEN)
    with Consumer(shard.cluster, "t", start="earliest") as consumer:
        found, error = read_all(consumer)
        assert found == BODIES[:ROTTEN]
        check_error(error, shard, position)

        with pytest.raises(Corrupt):
            consumer.poll(1, 0)
        with pytest.raises(Corrupt):
            consumer.poll_batch(1, 0)
        with pytest.raises(Corrupt):
            consumer.next_message(0)

        assert consumer.position(0) == ROTTEN
        consumer.seek(0, ROTTEN + 1)
        assert consumer.poll_batch(100, 10).column("body").to_pylist() == BODIES[ROTTEN + 1 :]

    status = shard.host.call("status", {})
    assert [each["offset"] for each in status["damage"]] == [position]
    assert status["metrics"]["scrub_faults"] == 1


def test_an_async_consumer_gets_the_same(shard: Shard) -> None:
    position = shard.rot(0)

    async def read() -> None:
        async with AsyncConsumer(shard.cluster, "t", start="earliest") as consumer:
            with pytest.raises(Corrupt) as caught:
                await consumer.poll(100, 10)
            check_error(caught.value, shard, position)
            await consumer.seek(0, 1)
            assert (await consumer.poll(1, 10))[0].body == BODIES[1]

    asyncio.run(read())


def test_a_range_reader_and_a_queue_get_the_same(shard: Shard) -> None:
    position = shard.rot(ROTTEN)
    found: list[bytes] = []

    def read() -> None:
        for records in read_range(shard.cluster, "t", 0, 0, 0, len(BODIES)):
            found.extend(decode_records(records, columns=("body",)).column(0).to_pylist())

    with pytest.raises(Corrupt) as caught:
        read()
    assert found == BODIES[:ROTTEN]
    check_error(caught.value, shard, position)
    reader = ItemReader(Routes.of(shard.cluster), "t", 0)
    try:
        (items,) = reader.read(ROTTEN - 2, 2, timeout_s=10)
        assert items.bodies == BODIES[ROTTEN - 2 : ROTTEN]
        with pytest.raises(Corrupt) as caught:
            reader.read(ROTTEN, 1, timeout_s=10)
        check_error(caught.value, shard, position)
    finally:
        reader.close()


class GivenItems:
    """A coordinator that is a table: a request gets the same items whenever it asks."""

    def __init__(self) -> None:
        self.given: dict[int, tuple[int, int]] = {}
        self.next = ROTTEN - 1
        #: raised by the next call, when the items are given
        self.failure: RayMQError | None = None

    def check_open(self) -> None:
        """Nothing closes it."""

    def call(self, method: str, *arguments: Any, wait_s: float | None = None) -> Any:
        request, count = arguments
        if request not in self.given:
            self.given[request] = (self.next, count)
            self.next += count
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure
        return self.given[request]

    async def call_async(self, method: str, *arguments: Any) -> Any:
        return self.call(method, *arguments[:2])


class QueueOnShard(Queue):
    """A handle whose coordinator is a table."""

    def __init__(self, shard: Shard) -> None:
        self.name, self._cluster, self._shard = "t", shard.cluster, 0
        self._codec_option, self._accept, self._linger_ms = "bytes", (), 0
        self._begin()
        self.table = GivenItems()
        self._coordinator: Any = self.table


@pytest.fixture
def items(shard: Shard) -> Iterator[QueueOnShard]:
    made = QueueOnShard(shard)
    yield made
    made._client().close()


def test_a_queue_raises_once_for_a_damaged_item_and_goes_on_after_it(
    shard: Shard, items: QueueOnShard
) -> None:
    position = shard.rot(ROTTEN)
    shard.rot(ROTTEN + 2)
    assert items.get() == BODIES[ROTTEN - 1]
    with pytest.raises(Corrupt, match="taken from queue 't'.* still in the topic") as caught:
        items.get()
    check_error(caught.value, shard, position)
    assert items.get() == BODIES[ROTTEN + 1]
    with pytest.raises(Corrupt, match="still in the topic"):
        asyncio.run(items.get_async())
    assert asyncio.run(items.get_async()) == BODIES[ROTTEN + 3]


def test_damage_that_the_coordinator_meets_takes_no_item_from_a_queue(items: QueueOnShard) -> None:
    items.table.failure = Corrupt("the record of what was given is damaged")
    with pytest.raises(Corrupt):
        items.get()
    assert items.get() == BODIES[ROTTEN - 1]


@pytest.mark.parametrize("at", [0, 4, 84])
def test_damaged_sizes_and_magics_are_corrupt_and_no_bug(shard: Shard, at: int) -> None:
    flip(shard.root / FIRST_LOG, shard.position(ROTTEN) + at)
    with Consumer(shard.cluster, "t", start="earliest") as consumer:
        found, error = read_all(consumer)
    assert found == BODIES[:ROTTEN]
    assert isinstance(error, Corrupt)


def test_a_byte_that_changes_on_the_way_is_fetched_once_more(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed: list[int] = []
    real = verify_slices

    def on_the_way(found: list[Any], *rest: Any) -> list[Any]:
        if not changed and found and found[0].records is not None:
            rows = found[0].records.to_pylist()
            rows[5] = rows[5][:150] + bytes([rows[5][150] ^ 1]) + rows[5][151:]
            changed.append(len(rows))
            found = [found[0]._replace(records=pa.array(rows, "binary"))]
            found[0] = found[0]._replace(records=found[0].records.slice(5), first_offset=5)
        return real(found, *rest)

    monkeypatch.setattr(shard_reader, "verify_slices", on_the_way)
    with Consumer(shard.cluster, "t", start={0: 5}) as consumer:
        found: list[bytes] = []
        while len(found) < len(BODIES) - 5:
            found += [message.body for message in consumer.poll(100, 10)]
    assert changed
    assert found == BODIES[5:]
    assert shard.host.store.damage == []


def test_damage_of_one_queue_is_not_an_error_of_another(shard: Shard) -> None:
    shard.host.call("create_topic", {"name": "two", "queues": 2, "shards": [0]})
    for queue in (0, 1):
        put_one(shard.host, request([b"a" * 100, b"b" * 100], topic="two", queue=queue)).wait(30)
    leader_of(shard.host).await_dispatch()
    position = int(shard.host.store.consume_queues.get("two", 0).read(0, 1)["position"][0])
    flip(shard.root / FIRST_LOG, position + 100)
    with Consumer(shard.cluster, "two", start="earliest") as consumer:
        bodies: list[tuple[int, bytes]] = []

        def take(count: int) -> None:
            while len(bodies) < count:
                bodies.extend((each.queue_id, each.body) for each in consumer.poll(100, 10))

        with pytest.raises(Corrupt):
            take(4)
        consumer.seek(0, 1)
        take(3)
    assert sorted(bodies) == [(0, b"b" * 100), (1, b"a" * 100), (1, b"b" * 100)]


def test_damage_after_messages_that_a_filter_left_out_is_looked_for_where_it_is() -> None:
    backend = FakeBackend()
    backend.create("t")
    put_one(backend, PutRequest("t", 0, batch([b"%d" % n for n in range(5)]), None, 0, 0, "quorum"))
    (part,) = backend.fetch(FetchRequest("t", {0: 3}, 1 << 20, 1, 0))
    damaged = bytearray(part.records[0].as_py())
    damaged[fmt.BODY_LENGTH_AT + 4] ^= 1
    part = part._replace(
        first_offset=0, next_offset=5, records=pa.array([bytes(damaged)], pa.binary())
    )
    asked: list[int] = []

    def call(shard: int, op: str, arguments: dict[str, Any]) -> dict[str, Any]:
        asked.append(arguments["offset"])
        raise Corrupt("it is damaged", offset=7)

    routes: Any = SimpleNamespace(call=call)
    (found,) = verify_slices([part], routes, FetchRequest("t", {0: 0}, 1, 1, 0), 0, None)
    assert isinstance(found.error, Corrupt)
    assert asked == [3]
