"""Odd arguments are taken, or refused as Rejected with what to do: no error of Python's own comes out of a client."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from raymq.actors.protocol import flight_messages
from raymq.client.arguments import wait_s
from raymq.client.consume.async_consumer import AsyncConsumer
from raymq.client.consume.consumer import Consumer
from raymq.client.messages.codecs import codec
from raymq.client.messages.message import Message
from raymq.client.produce.async_producer import AsyncProducer
from raymq.client.produce.producer import Producer
from raymq.cluster.cli.put_back import of_line
from raymq.cluster.cluster import Cluster
from raymq.cluster.connect import connect
from raymq.cluster.queue.durable_queue import Queue
from raymq.store.base.errors import Rejected
from raymq.store.config.store_config import StoreConfig
from raymq.store.records.record import check_put
from tests.support.batches import batch
from tests.support.fake_backend import FakeBackend, FakeCluster

Make = Callable[..., Producer]

HALF = "\ud800"


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tag": HALF}, "tag"),
        ({"index_keys": ("a", HALF)}, "index_keys"),
        ({"properties": {"a": "b", "c": HALF}}, "properties"),
        ({"properties": {HALF: "b"}}, "properties"),
    ],
)
def test_half_of_a_surrogate_pair_is_refused_with_its_field(
    make: Make, backend: FakeBackend, fields: dict[str, Any], field: str
) -> None:
    producer = make()
    for send in (
        lambda: producer.send("t", b"x", **fields),
        lambda: producer.send_many([Message(topic="t", body=b"x", **fields)]),
    ):
        with pytest.raises(Rejected, match="half of a surrogate pair") as refused:
            send()
        assert refused.value.field == field
        # The text can be printed.
        str(refused.value).encode()
    assert not backend.puts


def test_the_property_with_half_of_a_surrogate_pair_is_named(make: Make) -> None:
    with pytest.raises(Rejected, match="property 'c' has half"):
        make().send("t", b"x", properties={"a": "b", "c": f"d{HALF}", "e": "f"})


@pytest.mark.parametrize("name", ["json", "msgpack"])
@pytest.mark.parametrize("value", [HALF, {HALF: 1}, nested(100_000)], ids=["text", "key", "deep"])
def test_a_value_that_a_codec_cannot_encode_is_refused(make: Make, name: str, value: Any) -> None:
    with pytest.raises(Rejected, match=f"codec {name} cannot encode"):
        make(codec=name).send("t", value)


@pytest.mark.parametrize(
    ("name", "body"),
    [("json", b"[" * 100_000 + b"]" * 100_000), ("msgpack", b"\x91" * 100_000 + b"\xc0")],
)
def test_a_body_that_is_nested_too_deeply_is_a_value_error(name: str, body: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        codec(name).decode(body)


def test_a_line_that_is_nested_too_deeply_is_named() -> None:
    with pytest.raises(Rejected, match="line 7 is not a message"):
        of_line(b'{"body": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 7)


# --- numbers --------------------------------------------------------------------------------------


def test_other_integers_go_over_the_wire_as_numbers() -> None:
    sent = flight_messages.pack({"queues": np.int64(3), "shards": [np.int32(0)]})
    assert sent == b'{"queues":3,"shards":[0]}'
    with pytest.raises(Rejected, match="is set, which no call takes"):
        flight_messages.pack({"queues": {1}})


@pytest.mark.parametrize("queues", [[np.int64(0), np.int32(1)], np.array([0, 1]), (1, 0, 1)])
def test_queues_may_be_numbers_of_numpy(cluster: FakeCluster, queues: Any) -> None:
    with Consumer(cluster, "t", start="earliest", queues=queues) as consumer:  # type: ignore[arg-type]
        assert sorted(consumer.positions()) == [0, 1]


def test_a_topic_may_be_made_with_numbers_of_numpy(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    handle = Cluster(
        name="fake", cluster_id=cluster.cluster_id, shards=1, token=cluster.token, endpoints={}
    )
    monkeypatch.setattr(
        "raymq.client.topics.new_topic.create_everywhere",
        lambda _, arguments, **__: asked.append(arguments),
    )
    monkeypatch.setattr(
        "raymq.client.topics.add_queues.add_queues", lambda *rest, **_: asked.append(rest[2])
    )
    handle.create_topic("n", queues=np.int64(3))  # type: ignore[arg-type]
    handle.add_queues("n", np.uint8(4))  # type: ignore[arg-type]
    assert [type(asked[0]["queues"]), type(asked[1])] == [int, int]


@pytest.mark.parametrize("start", [np.int64(1), {np.int64(q): np.int64(1) for q in range(4)}])
def test_a_start_may_be_a_number_of_numpy(cluster: FakeCluster, make: Make, start: Any) -> None:
    producer = make()
    for queue in range(4):
        producer.send_many([Message(topic="t", body=b"%d" % n) for n in range(2)], queue_id=queue)
    producer.flush(30)
    with Consumer(cluster, "t", start=start) as consumer:  # type: ignore[arg-type]
        assert consumer.positions() == dict.fromkeys(range(4), 1)


@pytest.mark.parametrize(
    ("start", "text"),
    [
        ({"0": 1}, "start has the key '0', a str; queue ids are numbers"),
        ({0: 1, 1: 1}, r"start names the queues \[0, 1\], and lacks some of \[0, 1, 2, 3\]"),
        ({}, "give {queue_id: offset} with each of"),
    ],
)
def test_a_start_of_wrong_queues_says_which(cluster: FakeCluster, start: Any, text: str) -> None:
    with pytest.raises(Rejected, match=text) as refused:
        Consumer(cluster, "t", start=start)  # type: ignore[arg-type]
    assert refused.value.field == "start"


@pytest.mark.parametrize("scheme", ["raymq", "raymq+tls"])
@pytest.mark.parametrize("port", ["99999", "65536", "0", "²"])
def test_a_port_that_is_none_is_refused(scheme: str, port: str) -> None:
    with pytest.raises(Rejected) as refused:
        Cluster.bootstrap(f"{scheme}://127.0.0.1:{port}", token="t")
    assert refused.value.field == "target"


# --- times ----------------------------------------------------------------------------------------


WAITS = ["flush", "result", "exception", "result of rows", "poll", "poll_batch", "next_message"]
WAITS += ["async poll", "async poll_batch", "async flush", "close"]


def waits(cluster: Any, make: Make) -> dict[str, Callable[[float | None], Any]]:
    """Every wait of a client, for something that is there already."""
    producer = make()

    def flush(timeout: float | None) -> None:
        producer.send("t", b"x")
        producer.flush(timeout)

    def rows() -> Any:
        return producer.send_batch("t", pa.table({"body": [b"x"]}))[0]

    def read(call: str) -> Callable[[float | None], Any]:
        def wait(timeout: float | None) -> Any:
            producer.send("t", b"x").result(30)
            with Consumer(cluster, "t", start="earliest") as consumer:
                found = getattr(consumer, call)(timeout=timeout)
            assert found is not None
            return found

        return wait

    def read_async(call: str) -> Callable[[float | None], Any]:
        async def wait(timeout: float | None) -> Any:
            async with AsyncConsumer(cluster, "t", start="earliest") as consumer:
                return await getattr(consumer, call)(timeout=timeout)

        def run(timeout: float | None) -> Any:
            producer.send("t", b"x").result(30)
            found = asyncio.run(wait(timeout))
            assert len(found)
            return found

        return run

    def flush_async(timeout: float | None) -> None:
        async def main() -> None:
            async with AsyncProducer(cluster) as sender:
                sender.send("t", b"x")
                await sender.flush(timeout)

        asyncio.run(main())

    return {
        "flush": flush,
        "result": lambda timeout: producer.send("t", b"x").result(timeout),
        "exception": lambda timeout: rows().exception(timeout),
        "result of rows": lambda timeout: rows().result(timeout),
        "poll": read("poll"),
        "poll_batch": read("poll_batch"),
        "next_message": read("next_message"),
        "async poll": read_async("poll"),
        "async poll_batch": read_async("poll_batch"),
        "async flush": flush_async,
        "close": producer.close,
    }


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_may_have_no_limit_and_refuses_what_is_no_time(
    cluster: FakeCluster, make: Make, name: str
) -> None:
    wait = waits(cluster, make)[name]
    for timeout in (math.nan, "5"):
        with pytest.raises(Rejected, match="give seconds, or None") as refused:
            wait(timeout)  # type: ignore[arg-type]
        assert refused.value.field == "timeout"
    for limit in (math.inf, 1e300, None, np.float64(30), 30):
        wait(limit)


def test_a_full_buffer_may_block_without_a_limit(make: Make, backend: FakeBackend) -> None:
    producer = make(max_block_ms=math.inf, buffer_bytes=1)
    backend.hold_answers()
    producer.send("t", b"x", queue_id=0)
    backend.wait_for(lambda: len(backend.puts) == 1)
    backend.release()
    assert producer.send("t", b"y", queue_id=0).result(30).offset == 1


def test_times_beyond_those_of_threads_are_no_limit() -> None:
    assert [wait_s(each) for each in (None, math.inf, 1e300, 0, -1, 2.5)] == [
        None,
        None,
        None,
        0.0,
        -1.0,
        2.5,
    ]


@pytest.mark.parametrize("timeout", [math.nan, -1, -math.inf])
def test_a_queue_refuses_a_timeout_that_is_none(timeout: float) -> None:
    queue = object.__new__(Queue)
    with pytest.raises(ValueError, match="non-negative"):
        queue._wait_times(True, timeout)


# --- advice ---------------------------------------------------------------------------------------


def test_a_body_that_is_too_large_names_the_options_that_help(make: Make) -> None:
    most = StoreConfig().max_message_bytes
    both = "raise max_message_bytes of the producer, and of the cluster .raymq config set, up to 32 MiB."
    with pytest.raises(Rejected, match=both):
        make().send("t", b"x" * (most + 1))
    with pytest.raises(Rejected, match="raise max_message_bytes of the producer") as refused:
        make(max_message_bytes=10).send("t", b"x" * 11)
    assert "cluster" not in str(refused.value)
    # The shard says so, too.
    with pytest.raises(Rejected, match="raise max_message_bytes of the store"):
        check_put("t", batch([b"x" * 11]), max_message_bytes=10)


def test_paths_and_names_in_advice_can_be_pasted_into_a_shell(
    tmp_path: Path, make: Make, cluster: FakeCluster
) -> None:
    directory = tmp_path / "my data; ls"
    directory.mkdir()
    with pytest.raises(Rejected) as refused:
        connect(str(directory))
    assert f"raymq start '{directory}'" in str(refused.value)
    with pytest.raises(Rejected, match=r"`raymq topic create 'a\|b'`"):
        make().send("a|b", b"x").result(30)
