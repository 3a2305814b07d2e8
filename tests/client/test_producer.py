"""The producer of messages, against a shard in memory with real Flight."""

from __future__ import annotations

import asyncio
import pickle
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from raymq.client import forks
from raymq.client.messages.message import Message, Receipt
from raymq.client.messages.partitioner import queue_of
from raymq.client.produce.open_batch import OpenBatch
from raymq.client.produce.producer import Producer
from raymq.client.transport.routes import Routes
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Bug, Rejected, StorageFull, Unavailable
from raymq.store.base.format import TIMER_TOPIC
from raymq.store.records import record
from raymq.store.records.properties import decode
from tests.support.fake_backend import FakeBackend, FakeCluster, decode_all, open_batch
from tests.support.waiting import until

Make = Callable[..., Producer]

#: longer than any test: only what ends the linger time sends
FOREVER_MS = 3_600_000


def test_a_receipt_says_where_the_message_is(make: Make, backend: FakeBackend) -> None:
    receipt = make(linger_ms=0).send("t", b"x", key=b"k", queue_id=2).result(10)
    assert receipt == Receipt("t", 2, 0, 0, receipt.store_time_ms, False)
    assert backend.bodies("t", 2) == [b"x"]


def test_messages_of_one_key_go_to_kafkas_queue_in_order(make: Make, backend: FakeBackend) -> None:
    with make() as producer:
        futures = [producer.send("t", b"%d" % n, key=b"k%d" % (n % 3)) for n in range(30)]
    for key in range(3):
        queue = queue_of(b"k%d" % key, 4)
        mine = [b for b in backend.bodies("t", queue) if int(b) % 3 == key]
        assert mine == [b"%d" % n for n in range(key, 30, 3)]
    assert all(future.done() for future in futures)


def test_bodies_added_together_keep_their_place_among_messages(
    make: Make, backend: FakeBackend
) -> None:
    backend.hold_answers()
    with make(linger_ms=FOREVER_MS, batch_bytes=2000) as producer:
        # Nothing is under way, so that it goes at once.
        producer.send("t", b"0", queue_id=1)
        backend.wait_for(lambda: backend.bodies("t", 1) == [b"0"])
        for start in (1, 4):
            bodies = [b"%d" % n for n in range(start, start + 3)]
            producer._batcher.add_bodies("t", bodies, 3, None, queue_id=1)
        assert backend.bodies("t", 1) == [b"0"]
        # Full: it goes without a flush.
        producer._batcher.add_bodies("t", [b"7" * 2000], 2000, None, queue_id=1)
        backend.wait_for(lambda: len(backend.bodies("t", 1)) == 8)
        backend.release()
        producer.send("t", b"8", queue_id=1)
    assert backend.bodies("t", 1) == [b"%d" % n for n in range(7)] + [b"7" * 2000, b"8"]
    backend.refusals += [Rejected("no", field="body")]
    with pytest.raises(Rejected), make(linger_ms=FOREVER_MS) as producer:
        producer._batcher.add_bodies("t", [b"9"], 1, None, queue_id=1)


def test_a_batch_that_cannot_be_made_fails_alone(make: Make, backend: FakeBackend) -> None:
    bad: Any = ["text"]
    backend.hold_answers()
    with make(linger_ms=FOREVER_MS) as producer:
        producer.send("t", b"under way", queue_id=1)
        producer._batcher.add_bodies("t", [b"a"], 1, None, queue_id=1)
        producer._batcher.add_bodies("t", bad, 4, None, queue_id=1)
        backend.release()
        with pytest.raises(Rejected, match="cannot be sent as it is"):
            producer.flush(10)
        producer._batcher.add_bodies("t", [b"b", b"c"], 2, None, queue_id=1)
    assert backend.bodies("t", 1) == [b"under way", b"b", b"c"]


@pytest.mark.parametrize("tags", [[None] * 3, ["a"] * 3, ["a", "b", "a"], [None, "a", None]])
@pytest.mark.parametrize("headers", [[{}] * 3, [{"p": "1"}] * 3, [{"p": "1"}, {}, {"p": "1"}]])
def test_each_message_of_a_batch_keeps_its_tag_and_properties(
    make: Make, backend: FakeBackend, tags: list[str | None], headers: list[dict[str, str]]
) -> None:
    with make(linger_ms=FOREVER_MS) as producer:
        for tag, properties in zip(tags, headers, strict=True):
            producer.send("t", b"x", tag=tag, properties=properties, queue_id=1)
    stored = decode_all(backend.queues["t", 1].records)
    found = [decode(properties) for properties in stored.column("properties").to_pylist()]
    assert [each.get("TAGS") for each in found] == tags
    assert [{"p": each["p"]} if "p" in each else {} for each in found] == headers


def test_messages_without_a_key_fill_one_batch_then_the_next_queue(
    make: Make, backend: FakeBackend
) -> None:
    producer = make(linger_ms=FOREVER_MS)
    backend.hold_answers()
    producer.send("t", b"under way")
    for _ in range(2):
        for _ in range(5):
            producer.send("t", b"x")
        producer._batcher.flush_open()
    backend.release()
    producer.flush(10)
    assert [put.batch.num_rows for put in backend.puts] == [1, 5, 5]
    _, first, second = (put.queue_id for put in backend.puts)
    assert second == (first + 1) % 4


def test_without_linger_a_send_goes_at_once(make: Make, backend: FakeBackend) -> None:
    make(linger_ms=0).send("t", b"x")
    backend.wait_for(lambda: len(backend.puts) == 1)


def test_linger_ends_by_itself(make: Make, backend: FakeBackend) -> None:
    make(linger_ms=1).send("t", b"x")
    backend.wait_for(lambda: len(backend.puts) == 1)


def test_a_full_batch_does_not_linger(make: Make, backend: FakeBackend) -> None:
    make(linger_ms=FOREVER_MS, batch_bytes=1000).send("t", b"x" * 1000)
    backend.wait_for(lambda: len(backend.puts) == 1)


def test_asking_for_the_receipt_ends_the_linger_time(make: Make) -> None:
    assert make(linger_ms=FOREVER_MS).send("t", b"x").result(10).offset == 0


def test_a_send_can_be_awaited(make: Make) -> None:
    producer = make(linger_ms=FOREVER_MS)

    async def send() -> list[Receipt]:
        async def one(number: int) -> Receipt:
            return await producer.send("t", b"%d" % number, queue_id=0)

        return list(await asyncio.gather(*(one(n) for n in range(10))))

    assert [receipt.offset for receipt in asyncio.run(send())] == list(range(10))


def test_a_callback_runs_when_it_is_done(make: Make) -> None:
    called = threading.Event()
    future = make(linger_ms=0).send("t", b"x")
    future.add_done_callback(lambda done: done.done() and called.set())
    assert called.wait(10)


def test_a_message_object_is_sent_with_all_it_has(make: Make, cluster: FakeCluster) -> None:
    message = Message(
        topic="t", body=b"b", key=b"k", tag="eu", index_keys=("i",), properties={"a": "b"}
    )
    make().send(message).result(10)
    put = cluster.backends[0].puts[0]
    assert put.batch.tags == ["eu"]
    assert put.batch.properties == [b"__SHARDINGKEY\x01k\x02KEYS\x01i\x02a\x01b\x02"]


def test_a_codec_makes_the_body_and_names_itself(make: Make, backend: FakeBackend) -> None:
    make(codec="json").send("t", {"a": 1}, queue_id=0).result(10)
    assert backend.bodies("t") == [b'{"a":1}']
    assert backend.puts[0].batch.properties == [b"content-type\x01json\x02"]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"body": "text"}, "value"),
        ({"body": b"x" * 11}, "body"),
        ({"body": b"x", "tag": "\x02"}, "tag"),
        ({"body": b"x", "queue_id": 4}, "queue_id"),
        ({"body": b"x", "deliver_at_ms": 1 << 50}, "deliver_at_ms"),
        ({"body": b"x", "deliver_at_ms": "soon"}, "deliver_at_ms"),
        ({"body": b"x", "topic": "nowhere"}, "topic"),
    ],
)
def test_a_bad_message_is_refused_at_once_and_alone(
    make: Make, arguments: dict[str, Any], field: str
) -> None:
    producer = make(linger_ms=FOREVER_MS, max_message_bytes=10)
    good = producer.send("t", b"good", queue_id=0)
    with pytest.raises(Rejected) as refused:
        producer.send(**{"topic": "t", **arguments})
    assert refused.value.field == field
    assert good.result(10).offset == 0


def test_an_unknown_option_is_refused(make: Make) -> None:
    with pytest.raises(TypeError, match="lingerms"):
        make(lingerms=1)


def test_a_full_buffer_blocks_up_to_max_block_ms(make: Make, backend: FakeBackend) -> None:
    producer = make(linger_ms=FOREVER_MS, buffer_bytes=1000, max_block_ms=50)
    backend.hold_answers()
    producer.send("t", b"x" * 500)
    with pytest.raises(Unavailable, match="buffer_bytes"):
        producer.send("t", b"y" * 500)
    # Lingering messages were sent to make room.
    backend.wait_for(lambda: len(backend.puts) == 1)
    backend.release()
    # A busy machine may take longer than `max_block_ms` for the answer that makes room.
    producer.flush()
    assert producer.send("t", b"y" * 500).result(10).offset == 0


def is_stalled(producer: Producer) -> bool:
    """Whether a message to queue 0 of topic t would wait for the answers of others."""
    sender = producer._batcher.batch_sender.shard_sender_of("t", 0)
    assert sender is not None
    return sender.stalled


def stalled_batch(producer: Producer, backend: FakeBackend) -> OpenBatch:
    """An open batch whose linger time is over. Of two earlier batches one is written and one waits."""

    backend.hold_answers()
    pause = threading.Event()
    for number in range(2):
        producer.send("t", b"x" * 600, queue_id=0)
        closed = number + 1
        until(
            lambda count=closed: producer.statistics()["under_way_batches"] == count,
            lambda: pause.wait(0.001),
        )

    until(lambda: is_stalled(producer), lambda: pause.wait(0.001))
    producer.send("t", b"first", queue_id=0)
    batch = open_batch(producer, "t", 0)
    due_s = batch.due_s
    until(lambda: batch.due_s > due_s, lambda: pause.wait(0.001))
    return batch


def test_a_batch_that_cannot_be_written_yet_takes_more_messages(
    make: Make, backend: FakeBackend
) -> None:
    producer = make(linger_ms=1, in_flight_bytes=1000)
    stalled_batch(producer, backend)
    producer.send("t", b"second", queue_id=0)
    backend.release()
    backend.wait_for(lambda: len(backend.puts) == 3)
    assert backend.bodies("t")[2:] == [b"first", b"second"]


def test_a_stalled_batch_stays_open_no_longer_than_its_delivery_timeout(
    make: Make, backend: FakeBackend
) -> None:
    producer = make(linger_ms=1, in_flight_bytes=1000)
    batch = stalled_batch(producer, backend)
    batch.begun_s -= producer.config.delivery_timeout_ms / 1000
    pause = threading.Event()
    until(lambda: batch.closed, lambda: pause.wait(0.001))
    assert is_stalled(producer)


def test_a_full_buffer_waits_for_acks_and_not_for_the_linger_time(
    make: Make, backend: FakeBackend
) -> None:
    producer = make(linger_ms=FOREVER_MS, in_flight_bytes=1000, buffer_bytes=3000, batch_bytes=900)
    backend.hold_answers()

    producer.send("t", b"a" * 900, queue_id=0)
    producer.send("t", b"b" * 900, queue_id=0)
    pause = threading.Event()
    until(lambda: is_stalled(producer), lambda: pause.wait(0.001))
    producer.send("t", b"c" * 300, queue_id=0)

    late = threading.Thread(target=producer.send, args=("t", b"d" * 1700), kwargs={"queue_id": 0})
    late.start()
    batcher = producer._batcher
    until(
        lambda: batcher._linger.by_due_time[0].due_s < batcher._clock.monotonic() + 1,
        lambda: late.join(0.001),
    )

    backend.release()
    late.join(10)
    backend.wait_for(lambda: len(backend.bodies("t")) == 4)
    assert [body[:1] for body in backend.bodies("t")] == [b"a", b"b", b"c", b"d"]


def test_leaving_the_context_raises_the_first_failure_that_no_caller_has_seen(
    make: Make, backend: FakeBackend
) -> None:
    backend.refusals = [Rejected("first", field="body"), Rejected("second", field="body")]
    producer = make(linger_ms=0)

    def block() -> None:
        with producer:
            seen = producer.send("t", b"1", queue_id=0)
            with pytest.raises(Rejected, match="first"):
                seen.result(10)
            producer.send("t", b"2", queue_id=1)

    with pytest.raises(Rejected, match="second"):
        block()


def test_leaving_the_context_does_not_hide_the_blocks_own_failure(
    make: Make, backend: FakeBackend
) -> None:
    backend.refusals = [Rejected("no", field="body")]
    producer = make(linger_ms=0)

    def block() -> None:
        with producer:
            producer.send("t", b"1")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        block()


def test_a_failure_of_the_disk_is_waited_out(make: Make, backend: FakeBackend) -> None:
    backend.refusals = [StorageFull("full")]
    assert make(linger_ms=0).send("t", b"x").result(10).offset == 0


def test_after_close_nothing_is_taken(make: Make) -> None:
    producer = make()
    producer.close()
    producer.close()
    with pytest.raises(Rejected, match="closed"):
        producer.send("t", b"x")


def test_a_message_sent_while_another_thread_closes_fails(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = make(linger_ms=FOREVER_MS)
    done: list[bool] = []

    def flushed(timeout: float | None) -> None:
        # After the flush, before the end.
        producer.send("t", b"late").add_done_callback(lambda future: done.append(future.done()))

    monkeypatch.setattr(producer._batcher, "flush", flushed)
    with pytest.raises(Rejected, match="closed"):
        producer.close()
    assert done == [True]
    assert producer.statistics()["open_batches"] == 0


def test_a_producer_refuses_pickling_and_says_what_to_do(make: Make) -> None:
    with pytest.raises(Rejected, match=r"pickle the Cluster"):
        pickle.dumps(make())


def test_a_producer_refuses_to_work_in_a_forked_child(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = make()
    monkeypatch.setattr(forks, "count", forks.count + 1)
    with pytest.raises(Rejected, match="spawn or forkserver"):
        producer.send("t", b"x")
    monkeypatch.undo()


def test_each_fork_is_counted_in_the_child() -> None:
    code = (
        "import os\n"
        "from raymq.client import forks\n"
        "child = os.fork() or os._exit(forks.count)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), forks.count)"
    )
    words = [sys.executable, "-c", code]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout == "1 0\n"


def test_a_process_forked_after_a_connection_is_told_how_to_start(backend: FakeBackend) -> None:
    code = """
import os, sys
from raymq.client.transport.flight_client import ShardConnection
from raymq.store.base.errors import Rejected

def connect():
    ShardConnection("127.0.0.1:1", "token").close()

def child(function):
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        function()
    except Rejected as error:
        os._exit(3 if "spawn" in str(error) else 4)
    os._exit(0)

before = child(connect)
connect()
print(before, child(connect))
"""
    words = [sys.executable, "-c", code]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout == "0 3\n"


def test_columns_go_to_the_queues_of_their_keys(make: Make, backend: FakeBackend) -> None:
    producer = make()
    keys = [b"k%d" % (n % 7) for n in range(100)]
    data = pa.table({"body": [b"%d" % n for n in range(100)], "key": keys})
    receipts = [future.result(10) for future in producer.send_batch("t", data)]
    assert sum(receipt.count for receipt in receipts) == 100
    for queue in range(4):
        expected = [b"%d" % n for n in range(100) if queue_of(keys[n], 4) == queue]
        assert backend.bodies("t", queue) == expected


def test_columns_with_one_bad_row_are_refused_as_a_whole(make: Make, backend: FakeBackend) -> None:
    rows = 5_000
    tags = ["good"] * (rows - 1) + ["b\x01ad"]
    data = pa.table({"body": [b"x" * 2_000] * rows, "tag": tags})
    with make() as producer, pytest.raises(Rejected) as caught:
        producer.send_batch("t", data, queue_id=0)
    assert (caught.value.field, caught.value.row) == ("tag", rows - 1)
    assert backend.bodies("t", 0) == []


def test_columns_that_do_not_fit_the_buffer_have_a_future_for_each_part(
    make: Make, backend: FakeBackend
) -> None:
    producer = make(buffer_bytes=10 << 20, max_block_ms=1)
    backend.hold_answers()
    data = pa.table({"body": [b"%07d" % n + b"x" * 2_000 for n in range(10_000)]})
    futures = producer.send_batch("t", data, queue_id=0)
    backend.release()
    rows, refused = 0, 0
    for future in futures:
        try:
            rows += future.result(10).count
        except Unavailable:
            refused += 1
    assert 0 < rows < 10_000
    assert refused > 0
    # What was sent are the first rows.
    assert backend.bodies("t", 0) == data["body"].to_pylist()[:rows]


def test_columns_are_cut_by_the_bytes_of_their_rows(make: Make, backend: FakeBackend) -> None:
    sizes = [100] * 20_000 + [1 << 20] * 10
    data = pa.table({"body": [bytes(size) for size in sizes]})
    with make() as producer:
        counts = [future.result(10).count for future in producer.send_batch("t", data, queue_id=0)]
    ends = [sum(counts[:place]) for place in range(len(counts) + 1)]
    parts = [sum(sizes[low:high]) for low, high in pairwise(ends)]
    assert ends[-1] == len(sizes)
    assert max(parts) <= 4 << 20


def test_any_integer_is_a_queue_id(make: Make, backend: FakeBackend) -> None:
    with make() as producer:
        for _ in range(200):
            producer.send("t", b"x", queue_id=np.int64(2))  # type: ignore[arg-type]
        (batch,) = producer.send_batch("t", pa.table({"body": [b"y"] * 100}), queue_id=np.int32(2))  # type: ignore[arg-type]
        assert batch.result(10).count == 100
    assert backend.bodies("t", 2) == [b"x"] * 200 + [b"y"] * 100


def test_an_unexpected_error_of_a_sender_is_survived(
    make: Make, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = [PermissionError("of the resolver"), TypeError("of a stream")]
    connect_leader = Routes.connect_leader

    def fails_twice(self: Routes, shard: int) -> Any:
        if broken:
            raise broken.pop()
        return connect_leader(self, shard)

    monkeypatch.setattr(Routes, "connect_leader", fails_twice)
    with make() as producer:
        assert producer.send("t", b"x", queue_id=1).result(10).offset == 0
    assert broken == []


def test_a_batch_whose_encoding_fails_unexpectedly_fails_its_messages(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: OpenBatch) -> None:
        raise MemoryError

    monkeypatch.setattr(OpenBatch, "encode", fail)
    producer = make()
    with pytest.raises(Bug, match="MemoryError"):
        producer.send("t", b"x", queue_id=1).result(10)
    producer.send("t", b"x", queue_id=1)
    with pytest.raises(Bug):
        producer.close()


def test_delayed_messages_without_a_key_go_to_one_queue_after_the_other(
    make: Make, backend: FakeBackend
) -> None:
    at_ms = Clock().now_ms() + 60_000
    with make() as producer:
        for _ in range(40):
            producer.send("t", b"x", deliver_at_ms=at_ms)
    rows = decode_all(backend.queues[TIMER_TOPIC, 0].records).to_pylist()
    queues = Counter(decode(row["properties"])["REAL_QID"] for row in rows)
    assert queues == {"0": 10, "1": 10, "2": 10, "3": 10}


def test_columns_cannot_be_cancelled(make: Make, backend: FakeBackend) -> None:
    producer = make()
    backend.hold_answers()
    (future,) = producer.send_batch("t", pa.table({"body": [b"x"]}), queue_id=0)
    assert not future.cancel()
    backend.release()
    producer.flush(10)
    assert future.result(0).count == 1
    assert producer.statistics()["buffered_bytes"] == 0


def test_columns_come_after_earlier_sends(make: Make, backend: FakeBackend) -> None:
    producer = make(linger_ms=FOREVER_MS)
    producer.send("t", b"first", queue_id=1)
    producer.send_batch("t", pa.table({"body": [b"second", b"third"]}), queue_id=1)
    producer.flush(10)
    assert backend.bodies("t", 1) == [b"first", b"second", b"third"]


def test_threads_share_a_producer(make: Make, backend: FakeBackend) -> None:
    producer = make(linger_ms=1, batch_bytes=2000)

    def send(thread: int) -> None:
        for number in range(200):
            producer.send("t", b"%d:%d" % (thread, number), queue_id=0)

    threads = [threading.Thread(target=send, args=(t,)) for t in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    producer.flush(20)
    bodies = backend.bodies("t")
    for thread in range(4):
        mine = [body for body in bodies if body.startswith(b"%d:" % thread)]
        assert mine == [b"%d:%d" % (thread, number) for number in range(200)]


def test_a_delayed_message_waits_on_its_queues_shard_and_a_late_one_is_sent_at_once(
    make: Make, backend: FakeBackend
) -> None:
    at = Clock().now_ms() + 60_000
    with make(linger_ms=FOREVER_MS) as producer:
        futures = [
            producer.send("t", b"%d" % n, queue_id=n, tag="a", deliver_at_ms=at) for n in range(4)
        ]
        late = producer.send(Message(topic="t", body=b"late", key=b"k", deliver_at_ms=10**12))

    receipts = [future.result(10) for future in futures]
    assert [receipt[:4] for receipt in receipts] == [(TIMER_TOPIC, 0, 0, n) for n in range(4)]
    assert late.result(10).topic == "t"

    rows = [
        record.decode(raw, [0], [len(raw)]).to_pylist()[0]
        for raw in backend.queues[TIMER_TOPIC, 0].records
    ]

    properties = [decode(row["properties"]) for row in rows]
    assert [each.pop("_P") != "" for each in properties] == [True] * 4
    unique = [each.pop("UNIQ_KEY") for each in properties]
    assert len(set(unique)) == 4
    assert all(re.fullmatch("[0-9A-F]{32}", each) for each in unique)
    assert properties == [
        {
            "TAGS": "a",
            "TIMER_DELIVER_MS": str(at),
            "TIMER_OUT_MS": str(-(-at // 1000) * 1000 - 1000),
            "REAL_TOPIC": "t",
            "REAL_QID": str(n),
        }
        for n in range(4)
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("acks", "all"),
        ("linger_ms", float("nan")),
        ("linger_ms", -1),
        ("batch_bytes", 0),
        ("buffer_bytes", "64"),
        ("delivery_timeout_ms", 0),
        ("max_message_bytes", 1.5),
    ],
)
def test_an_option_without_a_meaning_is_refused_by_name(make: Make, name: str, value: Any) -> None:
    with pytest.raises(Rejected, match=f"{name} is {value!r}; use") as refused:
        make(**{name: value})
    assert refused.value.field == name


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("topic", {"topic": 5}),
        ("queue_id", {"queue_id": "0"}),
        ("queue_id", {"queue_id": 4}),
        ("index_keys", {"index_keys": 5}),
        ("index_keys", {"index_keys": (5,)}),
        ("properties", {"properties": [("a", "b")]}),
        ("tag", {"tag": 5}),
        ("key", {"key": "text"}),
    ],
)
def test_an_argument_of_another_type_is_refused_by_name(
    make: Make, field: str, options: dict[str, Any]
) -> None:
    with pytest.raises(Rejected) as refused:
        make(linger_ms=0).send(**{"topic": "t", "body": b"x", **options})
    assert refused.value.field == field
