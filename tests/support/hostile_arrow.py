"""Arrow data whose offsets and indices lead out of it. Run as a program, because a wrong step ends the process.

`python -m tests.support.hostile_arrow codec|put|frame` prints a line for each kind: what became of it.
"""

from __future__ import annotations

import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from raymq.actors.protocol import flight_messages
from raymq.client.messages.codecs import codec
from raymq.store.base.errors import Rejected
from raymq.store.engine.message_store import MessageStore
from raymq.store.put.put_hooks import PutHook
from raymq.store.records import record
from raymq.store.records.record import batch_bytes
from raymq.store.records.requests import PutRequest
from tests.support.batches import batch

FAR = 1 << 30


def _ints(*values: int) -> pa.Buffer:
    return pa.py_buffer(struct.pack(f"<{len(values)}i", *values))


def _longs(*values: int) -> pa.Buffer:
    return pa.py_buffer(struct.pack(f"<{len(values)}q", *values))


def arrays() -> dict[str, pa.Array]:
    """Columns that a check of their lengths alone finds in order."""
    made, data = pa.Array.from_buffers, pa.py_buffer(b"abcdef")
    texts = made(pa.string(), 2, [None, _ints(0, FAR, 6), data])
    numbers, words = pa.array([1, 2, 3], pa.int64()), pa.array(["a", "b"])
    lists = pa.list_(pa.int64())

    return {
        "string": texts,
        "binary": made(pa.binary(), 2, [None, _ints(0, FAR, 6), data]),
        "backwards": made(pa.string(), 2, [None, _ints(0, -FAR, 6), data]),
        "large_string": made(pa.large_string(), 2, [None, _longs(0, 1 << 40, 6), data]),
        "list": pa.ListArray.from_buffers(lists, 2, [None, _ints(0, FAR, 3)], children=[numbers]),
        "dictionary": pa.DictionaryArray.from_arrays(
            pa.array([0, FAR], pa.int32()), words, safe=False
        ),
        "struct": pa.StructArray.from_arrays([texts], names=["x"]),
        "no utf-8": made(pa.string(), 1, [None, _ints(0, 2), pa.py_buffer(b"\xff\xfe")]),
    }


def bodies() -> Iterator[tuple[str, bytes]]:
    """Bodies of messages that name the codec arrow-ipc."""
    arrow = codec("arrow-ipc")
    for name, array in arrays().items():
        yield name, _encoded(pa.record_batch([array], names=["column"]))
    sound = arrow.encode(pa.table({"a": [1, 2, 3], "b": ["x", "y", "z"]}))
    yield "half", sound[: len(sound) // 2]
    yield "nothing", b""
    yield "something else", b"no Arrow at all"
    yield "rows without end", sound.replace(struct.pack("<q", 3), struct.pack("<q", 1 << 40))


def _encoded(rows: pa.RecordBatch) -> bytes:
    """As `ArrowIpcCodec.encode`, which would refuse these rows."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as writer:
        writer.write(rows)
    encoded: bytes = sink.getvalue().to_pybytes()
    return encoded


def batches() -> Iterator[tuple[str, pa.RecordBatch]]:
    """Batches as a server gets them from a producer."""
    sound = batch([b"a", b"b"], tag="t", properties=b"a\x01b\x02")
    for name, kind in (("body", pa.binary()), ("properties", pa.binary()), ("tag", pa.string())):
        wild = pa.Array.from_buffers(
            kind, 2, [None, _ints(0, FAR, 6), pa.py_buffer(b"a\x01b\x02cd")]
        )
        at = record.PUT_SCHEMA.names.index(name)
        yield name, sound.set_column(at, record.PUT_SCHEMA.field(at), wild)
    # Of a large batch its bytes are counted before anything else is done with it.
    rows = 37
    data = batch([b"x" * 10_000] * rows).serialize().to_pybytes()
    data = data.replace(struct.pack("<q", rows), struct.pack("<q", FAR))
    yield "rows without end", pa.ipc.read_record_batch(pa.py_buffer(data), record.PUT_SCHEMA)


class LookingHook(PutHook):
    """Trusts what it sees, as a hook may."""

    def before_batch(self, request: PutRequest) -> PutRequest:
        request.batch.to_pylist()
        return request


def _try_bodies() -> None:
    for name, body in bodies():
        try:
            codec("arrow-ipc").decode(body).to_pylist()
        except ValueError as error:
            print(f"{name}: {type(error).__name__}", flush=True)


def _try_batches() -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = MessageStore.open(Path(folder))
        store.topics.create("t", 1, [0])
        for hooked in (False, True):
            if hooked:
                store.hooks.append(LookingHook())
            for name, wild in batches():
                try:
                    batch_bytes(wild)
                    store.put(PutRequest("t", 0, wild, None, 0, 0, "quorum"))
                except Rejected as error:
                    print(f"{name}: {error.field}", flush=True)
        store.abandon()


def _try_frames() -> None:
    def column(*offsets: int) -> pa.Array:
        buffers = [None, _longs(*offsets), pa.py_buffer(b"abcdef")]
        return pa.Array.from_buffers(pa.large_binary(), len(offsets) - 1, buffers)

    sound = flight_messages.frame_batch(b"abcdef").serialize().to_pybytes()
    wild = sound.replace(_longs(0, 6).to_pybytes(), _longs(0, 1 << 40).to_pybytes())
    frames = {
        "offsets": pa.ipc.read_record_batch(pa.py_buffer(wild), flight_messages.FRAME_SCHEMA),
        "two rows": pa.record_batch([column(0, 1 << 40, 6)], schema=flight_messages.FRAME_SCHEMA),
        "another column": pa.record_batch([pa.array([1])], names=["bytes"]),
    }
    for name, frame in frames.items():
        try:
            bytes(flight_messages.frame_body(frame) or b"")
        except ValueError as error:
            print(f"{name}: {type(error).__name__}", flush=True)


if __name__ == "__main__":
    {"codec": _try_bodies, "put": _try_batches, "frame": _try_frames}[sys.argv[1]]()
