"""The server's side of a put stream: batches in, acks out in the same order.

Each stream has one reader thread (Flight's handler) and one writer thread for acks that may have to wait. Bytes in
flight are bounded, so a slow disk slows its producers down instead of filling memory.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.flight as flight

from raymq.actors.api import puts
from raymq.actors.api.shard_api import PutTicket, ShardBackend
from raymq.actors.protocol import flight_messages
from raymq.store.base.errors import RayMQError, Rejected
from raymq.store.records.record import batch_bytes

from .receive_memory import LIMIT_BYTES, ReceiveMemory

#: limit of one batch; clients send parts of a few MiB
RECEIVED_BATCH_BYTES_MAX = 64 << 20
#: metadata of a put that are not counted
METADATA_BYTES = 512
#: limit of acks in one message
ACKS_MAX = 256
#: unread bytes of acks up to which a write cannot block: HTTP/2 lets 64 KiB pass
UNREAD_BYTES_MAX = 16 << 10
#: with this many bytes on their way in, the write of an ack may wait for the read of a batch
BUSY_BYTES = 128 << 10

#: exceptions of a stream whose other side has left
GONE = (flight.FlightError, pa.ArrowException, OSError)


def chunks(reader: flight.MetadataRecordBatchReader) -> Iterator[Any]:
    """The messages of a stream until the client ends it or leaves."""
    while True:
        try:
            chunk = reader.read_chunk()
        except (StopIteration, *GONE):
            return
        yield chunk
        # Release its memory while waiting for the next one.
        del chunk


class _Answer(NamedTuple):
    """The ticket or error of one batch, and the bytes it holds."""

    number: int
    result: PutTicket | RayMQError
    size: int

    @property
    def ready(self) -> bool:
        """Whether the ack can be sent."""
        return not isinstance(self.result, PutTicket) or self.result.done


class PutStreamServer:
    """One producer's stream. A refused batch leaves the stream usable.

    The thread that finishes a put writes its ack, usually the shard's ack loop: handing each ack to a thread of the
    stream would cost a thread switch. A client that does not read could block such a write. So unread acks are bounded,
    and beyond the bound the stream's writer thread, which may block, takes over.
    """

    def __init__(
        self,
        backend: ShardBackend,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
        memory: ReceiveMemory | None = None,
        born_host: tuple[str, int] | None = None,
    ) -> None:
        """Args: `memory`: shared by all streams of the server. `born_host`: as of `PutRequest`."""
        self._backend = backend
        self._born_host = born_host
        self._memory = memory or ReceiveMemory()
        #: the `stream_limit_bytes` that the client knows
        self._limit_sent = LIMIT_BYTES
        #: bytes of all batches that were read; written by the reader thread
        self._taken_bytes = 0
        #: bytes of all batches answered so far; written under `_send_lock`
        self._answered_bytes = 0

        self._reader = reader
        self._writer = writer
        #: answers in the order of the batches; bytes are sent unchanged
        self._answers: deque[_Answer | bytes] = deque()
        #: held while answers are taken and written
        self._send_lock = threading.Lock()
        #: (number of its last ack, bytes) of each unread message
        self._unread: deque[tuple[int, int]] = deque()
        #: bytes of all messages read; written by the reader thread. The other one is written under `_send_lock`.
        self._read_bytes = 0
        self._sent_bytes = 0

        #: wakes the writer thread
        self._write_wake = threading.Event()
        self._ended = False
        self._gone = False

    def run(self) -> None:
        """Read until the producer ends; returns when every batch that was read is answered."""
        # Before the client sees the stream open: it has its share then.
        with self._memory.shared():
            self._serve()

    def _serve(self) -> None:
        self._writer.begin(flight_messages.FETCH_SCHEMA)
        writer = threading.Thread(target=self._write, name="raymq-put-acks", daemon=True)
        writer.start()

        try:
            window = self._window()
            if window is not None:
                self._send_bytes(puts.pack_acks([], window))
            for chunk in chunks(self._reader):
                self._take(chunk)
                # The batch belongs to the shard now; this name would keep its memory until the next one arrives.
                del chunk
                if self._gone:
                    return
        finally:
            self._ended = True
            self._write_wake.set()
            writer.join()
            self._send_rest()

    def _take(self, chunk: Any) -> None:
        # Small batches arrive in the metadata.
        size = len(chunk.app_metadata or b"")
        if chunk.data is not None:
            # Without columns of MORE_SCHEMA the metadata are no more than a hundred bytes.
            size = batch_bytes(chunk.data) + (size if size > METADATA_BYTES else 0)
        if self._memory.acquire(size, lambda: self._gone):
            self._taken_bytes += size
            self._put(chunk, size)

    def _write(self) -> None:
        """The writer thread: its writes may block."""
        while not self._ended:
            self._write_wake.wait()
            self._write_wake.clear()
            self._send_ready(may_block=True)

    def _send_rest(self) -> None:
        """Answer all batches. Then no thread may write: the native writer is freed with the handler."""
        while self._answers:
            with contextlib.suppress(IndexError, RayMQError):
                head = self._answers[0]
                if isinstance(head, _Answer) and isinstance(head.result, PutTicket):
                    head.result.wait()
            self._send_ready(may_block=True)
        with self._send_lock:
            self._gone = True

    def goaway(self) -> None:
        """Send GOAWAY after the acks of all batches: the server stops."""
        self._answers.append(flight_messages.GOAWAY)
        self._write_wake.set()

    def _put(self, chunk: Any, size: int) -> None:
        """Put the batches of one message together, and queue their answers."""
        received = puts.unpack_message(
            bytes(chunk.app_metadata or b""), chunk.data, self._born_host
        )
        requests = received.requests
        if size > RECEIVED_BATCH_BYTES_MAX:
            requests = [_too_large(size)] * len(requests)
        self._note_read(received.read)
        results = puts.put_all(
            self._backend, requests, self._send_ready, producer_waits=received.producer_waits
        )

        last = len(results) - 1
        for at, (number, result) in enumerate(zip(received.ids, results, strict=True)):
            # The memory of the message is held until its last answer.
            self._answers.append(_Answer(number, result, size if at == last else 0))
        # The puts may have been finished before their answers were queued.
        self._send_ready()

    def _note_read(self, number: int) -> None:
        """Note that the client has read the acks up to `number`."""
        unread = self._unread
        while unread and unread[0][0] <= number:
            self._read_bytes += unread.popleft()[1]

    def _send_ready(self, *, may_block: bool = False) -> None:
        """Write the answers that are ready, in order, unless another thread is writing: it sees these, too."""
        while self._ready() and self._send_lock.acquire(blocking=may_block):
            try:
                while self._ready():
                    if not may_block and self._may_block():
                        self._write_wake.set()
                        return
                    self._send_some()
            finally:
                self._send_lock.release()

    def _may_block(self) -> bool:
        """Whether a write may block: the client may not be reading, or many bytes are on their way in.

        While a large batch was being read, the write of an ack was measured to take milliseconds.
        """
        unread = self._sent_bytes - self._read_bytes
        in_flight = self._taken_bytes - self._answered_bytes
        return unread > UNREAD_BYTES_MAX or in_flight > BUSY_BYTES

    def _ready(self) -> bool:
        try:
            head = self._answers[0]
        except IndexError:
            return False
        return not isinstance(head, _Answer) or head.ready

    def _send_some(self) -> None:
        """Write one message with the answers that are ready; none waits for a later one."""
        acks: list[tuple[int, PutTicket | RayMQError]] = []
        size = number = 0
        while self._ready() and len(acks) < ACKS_MAX:
            item = self._answers[0]
            if not isinstance(item, _Answer):
                if not acks:
                    self._answers.popleft()
                    self._send_bytes(item)
                break

            self._answers.popleft()
            number = item.number
            acks.append((number, item.result))
            size += item.size

        if acks:
            message = puts.pack_acks(acks, self._window())
            self._unread.append((number, len(message)))
            self._sent_bytes += len(message)
            self._send_bytes(message)
        self._answered_bytes += size
        self._memory.release(size)

    def _window(self) -> int | None:
        """The client's new limit of bytes in flight; None while it is unchanged."""
        limit = self._memory.stream_limit_bytes
        if limit == self._limit_sent:
            return None
        self._limit_sent = limit
        return limit

    def _send_bytes(self, metadata: bytes) -> None:
        if self._gone:
            return
        try:
            self._writer.write_metadata(metadata)
        except GONE:
            # Stored batches stay stored. The producer sends them again with the same sequences.
            self._gone = True
            self._memory.wake()


def _too_large(size: int) -> Rejected:
    return Rejected(
        f"the batch has {size} bytes; send it in parts of at most {RECEIVED_BATCH_BYTES_MAX}",
        field="batch",
        limit=RECEIVED_BATCH_BYTES_MAX,
    )
