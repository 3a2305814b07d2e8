"""The server's end of a put stream, with a reader and a writer that tests control."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from raymq.actors.api.shard_api import PutTicket
from raymq.actors.protocol.small_puts import pack_puts
from raymq.actors.server.flight import put_stream
from raymq.actors.server.flight.put_stream import (
    BUSY_BYTES,
    RECEIVED_BATCH_BYTES_MAX,
    UNREAD_BYTES_MAX,
    PutStreamServer,
)
from raymq.actors.server.flight.receive_memory import LIMIT_BYTES, ReceiveMemory
from raymq.store.base.errors import RayMQError, Rejected, Unavailable
from raymq.store.records.record import SmallBatch
from raymq.store.records.requests import PutOutcome, PutRequest
from tests.support.batches import batch
from tests.support.fake_backend import answer_put
from tests.support.waiting import until

BYE = b"bye"


class Stream:
    """A stream, its backend and its client in one."""

    def __init__(self, memory: ReceiveMemory | None = None) -> None:
        self._chunks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._tick = threading.Event()
        self.tickets: list[PutTicket] = []
        #: (the writing thread, metadata)
        self.sent: list[tuple[threading.Thread, bytes]] = []
        #: of each put: the client had read all acks before it
        self.producer_waits: list[bool] = []
        self.refuse: RayMQError | None = None
        self.server = PutStreamServer(self, self, self, memory)  # type: ignore[arg-type]
        self._thread = threading.Thread(target=self.server.run, name="handler", daemon=True)
        self._thread.start()

    # the reader

    def read_chunk(self) -> Any:
        chunk = self._chunks.get()
        if chunk is None:
            raise StopIteration
        return chunk

    # the writer

    def begin(self, schema: object) -> None:
        return

    def write_metadata(self, metadata: bytes) -> None:
        self.sent.append((threading.current_thread(), bytes(metadata)))

    # the backend

    def put(
        self, requests: list[PutRequest], notify: Callable[[], None], *, producer_waits: bool
    ) -> list[PutTicket | RayMQError]:
        self.producer_waits.append(producer_waits)
        if self.refuse is not None:
            raise self.refuse
        tickets = [PutTicket(notify) for _ in requests]
        self.tickets += tickets
        return [*tickets]

    # what tests do

    def send_small(self, numbers: range, *, size: int = 1) -> None:
        fields = {"topic": "t", "queue": 0, "pid": None, "epoch": 0, "seq": 0, "acks": "quorum"}
        small = SmallBatch([b"x" * size], [None], [None], [0])
        puts = [({**fields, "id": number, "read": -1}, small) for number in numbers]
        self._chunks.put(SimpleNamespace(data=None, app_metadata=pack_puts(puts)))

    def send(self, number: int, *, size: int = 1, read: int = -1) -> None:
        meta = {"id": number, "topic": "t", "queue": 0, "read": read}
        self._chunks.put(
            SimpleNamespace(data=batch([b"x" * size]), app_metadata=json.dumps(meta).encode())
        )

    def wait_for(self, condition: Callable[[], bool]) -> None:
        until(condition, lambda: self._tick.wait(0.005))

    def complete(self, number: int) -> None:
        answer_put(self.tickets[number], PutOutcome(number, 1, 0, 0, 0, number))

    def end(self) -> None:
        self._chunks.put(None)
        self._thread.join(30)
        assert not self._thread.is_alive()

    def acks(self) -> list[int]:
        messages = [metadata for _, metadata in self.sent if metadata != BYE]
        return [ack["id"] for metadata in messages for ack in json.loads(metadata)["acks"]]

    def errors(self) -> list[tuple[int, str]]:
        """The number and the error's class of each refused batch."""
        acks = [ack for _, metadata in self.sent for ack in json.loads(metadata)["acks"]]
        return [(ack["id"], ack["error"]["kind"]) for ack in acks if "error" in ack]

    def windows(self) -> list[int]:
        """The limit of bytes in flight that the client was sent."""
        messages = [json.loads(metadata) for _, metadata in self.sent if metadata != BYE]
        return [message["window"] for message in messages if "window" in message]

    def bytes_by(self, thread: threading.Thread) -> int:
        return sum(len(metadata) for writer, metadata in self.sent if writer is thread)


@pytest.fixture
def stream() -> Iterator[Stream]:
    made = Stream()
    yield made
    for ticket in made.tickets:
        if not ticket.done:
            answer_put(ticket, PutOutcome(0, 1, 0, 0, 0, 0))
    made.end()


def test_the_thread_that_completes_a_put_sends_its_ack(stream: Stream) -> None:
    stream.send(0)
    stream.wait_for(lambda: len(stream.tickets) == 1)
    stream.complete(0)
    assert stream.acks() == [0]
    assert stream.sent[0][0] is threading.current_thread()


def test_acks_wait_for_the_ones_before_them(stream: Stream) -> None:
    for number in range(3):
        stream.send(number)
    stream.wait_for(lambda: len(stream.tickets) == 3)
    stream.complete(2)
    stream.complete(1)
    assert stream.acks() == []
    stream.complete(0)
    assert stream.acks() == [0, 1, 2]
    assert len(stream.sent) == 1


def test_only_the_writer_thread_writes_much_to_a_client_that_does_not_read(stream: Stream) -> None:
    count, me = 600, threading.current_thread()
    for number in range(count):
        stream.send(number)
    stream.wait_for(lambda: len(stream.tickets) == count)

    for number in range(count):
        stream.complete(number)
    stream.wait_for(lambda: len(stream.acks()) == count)
    assert stream.acks() == list(range(count))

    largest = max(len(metadata) for writer, metadata in stream.sent if writer is me)
    assert UNREAD_BYTES_MAX < stream.bytes_by(me) <= UNREAD_BYTES_MAX + largest

    # When it has read them, acks come directly again.
    stream.send(count, read=count - 1)
    stream.wait_for(lambda: len(stream.tickets) == count + 1)
    before = len(stream.sent)
    stream.complete(count)
    assert stream.sent[before][0] is me


def test_while_much_is_on_its_way_in_acks_are_the_writers(stream: Stream) -> None:
    for number in range(3):
        stream.send(number, size=BUSY_BYTES)
    stream.wait_for(lambda: len(stream.tickets) == 3)
    stream.complete(0)
    stream.complete(1)
    stream.wait_for(lambda: len(stream.acks()) == 2)
    assert stream.bytes_by(threading.current_thread()) == 0


def test_a_refusal_is_answered_in_its_place(stream: Stream) -> None:
    stream.send(0)
    stream.wait_for(lambda: len(stream.tickets) == 1)
    stream.refuse = Rejected("no", field="f", limit=1)
    stream.send(1)
    stream.wait_for(lambda: len(stream.server._answers) == 2)
    stream.refuse = None
    stream.send(2)
    stream.wait_for(lambda: len(stream.tickets) == 2)
    stream.complete(0)
    stream.complete(1)
    assert stream.acks() == [0, 1, 2]


def test_a_stream_answers_everything_then_says_bye(stream: Stream) -> None:
    stream.send(0, size=BUSY_BYTES)
    stream.send(1)
    stream.wait_for(lambda: len(stream.tickets) == 2)
    stream.server.goaway()
    ending = threading.Thread(target=stream.end)
    ending.start()
    stream.complete(1)
    stream.complete(0)
    ending.join(30)
    assert stream.acks() == [0, 1]
    assert stream.sent[-1][1] == BYE


def test_the_producer_waits_when_the_client_has_read_all_answers(stream: Stream) -> None:
    stream.send(0)
    stream.send(1)
    stream.wait_for(lambda: len(stream.tickets) == 2)
    stream.complete(0)
    stream.complete(1)
    stream.send(2, read=1)
    stream.wait_for(lambda: len(stream.tickets) == 3)
    assert stream.producer_waits == [True, False, True]


@pytest.fixture
def streams() -> Iterator[list[Stream]]:
    """Two streams that share memory for 1,000 bytes."""
    memory = ReceiveMemory(limit_bytes=1000, idle_s=0)
    made = [Stream(memory), Stream(memory)]
    yield made
    for each in made:
        for ticket in each.tickets:
            if not ticket.done:
                answer_put(ticket, PutOutcome(0, 1, 0, 0, 0, 0))
        each.end()


def test_all_streams_together_keep_to_one_limit_of_memory(streams: list[Stream]) -> None:
    first, second = streams
    first.send(0, size=600)
    first.wait_for(lambda: len(first.tickets) == 1)
    second.send(0, size=600)
    second.send(1, size=10)
    second.wait_for(lambda: second.server._memory._turns)
    assert second.tickets == []
    first.complete(0)
    second.wait_for(lambda: len(second.tickets) == 2)


def test_a_batch_above_the_limit_goes_alone(streams: list[Stream]) -> None:
    first, second = streams
    first.send(0, size=5000)
    first.wait_for(lambda: len(first.tickets) == 1)
    second.send(0)
    second.wait_for(lambda: second.server._memory._turns)
    first.complete(0)
    second.wait_for(lambda: len(second.tickets) == 1)


def test_each_stream_announces_its_share_of_the_memory() -> None:
    memory = ReceiveMemory()
    first = Stream(memory)
    first.send(0)
    first.wait_for(lambda: len(first.tickets) == 1)
    first.complete(0)
    second = Stream(memory)
    second.wait_for(lambda: second.windows())
    first.send(1)
    first.wait_for(lambda: len(first.tickets) == 2)
    first.complete(1)
    second.end()
    first.end()
    assert (first.windows(), second.windows()) == ([LIMIT_BYTES // 2], [LIMIT_BYTES // 2])


def test_memory_is_given_back_once_a_large_load_is_over() -> None:
    trimmed = threading.Event()
    memory = ReceiveMemory(idle_s=0, trim=trimmed.set)
    memory.acquire(LIMIT_BYTES, lambda: False)
    memory.release(LIMIT_BYTES)
    assert trimmed.wait(30)


def test_a_batch_that_is_too_large_is_refused_and_the_stream_stays_usable(stream: Stream) -> None:
    stream.send(0, size=RECEIVED_BATCH_BYTES_MAX + 1)
    stream.send(1)
    stream.wait_for(lambda: len(stream.tickets) == 1)
    stream.complete(0)
    answers = [a for _, metadata in stream.sent for a in json.loads(metadata)["acks"]]
    assert answers[0]["error"]["fields"]["limit"] == RECEIVED_BATCH_BYTES_MAX
    assert answers[1]["id"] == 1


def test_small_batches_of_a_replica_that_takes_no_puts_get_its_error(stream: Stream) -> None:
    stream.refuse = Unavailable("this replica is a follower")
    stream.send_small(range(2))
    stream.wait_for(lambda: len(stream.acks()) == 2)
    assert stream.errors() == [(0, "Unavailable"), (1, "Unavailable")]


def test_a_message_of_small_batches_has_the_size_limit_of_a_batch(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(put_stream, "RECEIVED_BATCH_BYTES_MAX", 500)
    stream.send_small(range(3), size=400)
    stream.wait_for(lambda: len(stream.acks()) == 3)
    assert stream.errors() == [(0, "Rejected"), (1, "Rejected"), (2, "Rejected")]
    assert not stream.tickets
