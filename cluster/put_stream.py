"""The server's end of a put stream: batches in, acks out in the same order (design D1).

One reader thread (Flight's handler) and one writer thread a stream. Bytes in flight are bounded, so
a slow disk slows its producers down instead of filling memory.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.flight as flight

from raymq.actors.shard_api import PutTicket, ShardBackend
from raymq.store.errors import Bug, RayMQError, Rejected, to_wire
from raymq.store.put import PutRequest

from . import protocol

#: bytes of batches that one stream may have unanswered
IN_FLIGHT_BYTES_MAX = 64 << 20
#: acks in one message at most
ACKS_MAX = 256

#: how a stream ends when the other side is gone
GONE = (flight.FlightError, pa.ArrowException, OSError)


def chunks(reader: Any) -> Iterator[Any]:
    """The messages of a stream until the client ends it or is gone."""
    while True:
        try:
            chunk = reader.read_chunk()
        except (StopIteration, *GONE):
            return
        yield chunk


class _Answer(NamedTuple):
    """What one batch waits for, and the bytes it holds."""

    number: int
    result: PutTicket | RayMQError
    size: int


class PutStreamServer:
    """One producer's stream. A refused batch leaves the stream usable."""

    def __init__(self, backend: ShardBackend, reader: Any, writer: Any) -> None:
        self._backend = backend
        self._reader = reader
        self._writer = writer
        #: None ends the writer thread; bytes are sent as they are
        self._answers: queue.SimpleQueue[_Answer | bytes | None] = queue.SimpleQueue()
        self._in_flight = 0
        self._room = threading.Condition()
        self._gone = False

    def run(self) -> None:
        """Read until the producer ends; returns when every batch that was read is answered."""
        self._writer.begin(protocol.FETCH_SCHEMA)
        writer = threading.Thread(target=self._write, name="raymq-put-acks", daemon=True)
        writer.start()
        try:
            for chunk in chunks(self._reader):
                self._put(chunk)
                if self._gone:
                    return
        finally:
            self._answers.put(None)
            writer.join()

    def bye(self) -> None:
        """Tell the producer that the server stops, behind the acks of what was put."""
        self._answers.put(protocol.BYE)

    def _put(self, chunk: Any) -> None:
        batch: pa.RecordBatch | None = chunk.data
        size = 0 if batch is None else batch.nbytes
        with self._room:
            # A batch larger than the limit goes alone.
            while self._in_flight and self._in_flight + size > IN_FLIGHT_BYTES_MAX:
                if self._gone:
                    return
                self._room.wait()
            self._in_flight += size
        number = 0
        result: PutTicket | RayMQError
        try:
            meta = protocol.unpack(chunk.app_metadata)
            number = int(meta["id"])
            result = self._backend.put(_put_request(meta, batch))
        except RayMQError as error:
            result = error
        except (KeyError, TypeError, ValueError) as error:
            result = Rejected(
                f"bad put metadata: {error!r}", field="metadata", limit="cluster/protocol.py"
            )
        self._answers.put(_Answer(number, result, size))

    def _write(self) -> None:
        """Answers that are ready ride together; none waits for a later one."""
        acks: list[dict[str, Any]] = []
        size = 0
        while True:
            item = self._answers.get()
            if not isinstance(item, _Answer):
                self._send(acks, size)
                if item is None:
                    return
                self._send_bytes(item)
                acks, size = [], 0
                continue
            ready = not isinstance(item.result, PutTicket) or item.result.done
            if acks and (not ready or len(acks) >= ACKS_MAX):
                self._send(acks, size)
                acks, size = [], 0
            acks.append(_ack(item))
            size += item.size
            if self._answers.empty():
                self._send(acks, size)
                acks, size = [], 0

    def _send(self, acks: list[dict[str, Any]], size: int) -> None:
        if acks:
            self._send_bytes(protocol.pack({"acks": acks}))
        with self._room:
            self._in_flight -= size
            self._room.notify_all()

    def _send_bytes(self, metadata: bytes) -> None:
        if self._gone:
            return
        try:
            self._writer.write_metadata(metadata)
        except GONE:
            # What the producer sent stays stored; it will ask again with the same sequences.
            with self._room:
                self._gone = True
                self._room.notify_all()


def _put_request(meta: dict[str, Any], batch: pa.RecordBatch | None) -> PutRequest:
    if batch is None:
        raise Rejected("the message has no rows", field="batch", limit="a record batch")
    acks = meta.get("acks", "quorum")
    if acks not in ("quorum", "leader"):
        raise Rejected(f"acks is {acks!r}", field="acks", limit="quorum, leader")
    return PutRequest(
        str(meta["topic"]),
        int(meta["queue"]),
        batch,
        meta.get("pid"),
        int(meta.get("epoch", 0)),
        int(meta.get("seq", 0)),
        acks,
    )


def _ack(answer: _Answer) -> dict[str, Any]:
    try:
        if isinstance(answer.result, RayMQError):
            raise answer.result
        return {"id": answer.number, **answer.result.wait()._asdict()}
    except RayMQError as error:
        return {"id": answer.number, "error": to_wire(error)}
    except Exception as error:
        # An answer must go out: the producer would wait for ever for this batch and all behind it.
        return {"id": answer.number, "error": to_wire(Bug(f"put: {error!r}"))}
