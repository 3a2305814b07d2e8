"""Values to bodies and back, on the client's side only; the name stands in property `content-type`.

Nothing here ever unpickles (design D9).
"""

from __future__ import annotations

import importlib
import json
import threading
from collections.abc import Iterable
from typing import Any, Protocol

import pyarrow as pa

from raymq.store.errors import Rejected

#: property that names the codec; bodies without it are plain bytes
CONTENT_TYPE = "content-type"


class Codec(Protocol):
    """A way to make bytes of values."""

    name: str

    def encode(self, value: Any) -> bytes:
        """Raises: Rejected when the value is of no kind that it knows."""

    def decode(self, body: bytes) -> Any:
        """Raises: ValueError when the body is damaged or of another codec."""


class BytesCodec:
    """Bytes as they are."""

    name = "bytes"

    def encode(self, value: Any) -> bytes:
        """Anything with the buffer protocol."""
        if type(value) is bytes:
            return value
        try:
            return bytes(memoryview(value))
        except TypeError as error:
            raise _wrong(self.name, value, "give bytes, or choose another codec") from error

    def decode(self, body: bytes) -> bytes:
        """The body."""
        return body


class JsonCodec:
    """JSON in UTF-8, without spaces."""

    name = "json"

    def encode(self, value: Any) -> bytes:
        """NaN and infinities are refused: no other JSON reader takes them."""
        try:
            text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise _wrong(self.name, value, str(error)) from error
        return text.encode()

    def decode(self, body: bytes) -> Any:
        """What the JSON says."""
        return json.loads(body)


class MsgpackCodec:
    """MessagePack; needs the package msgpack."""

    name = "msgpack"

    def __init__(self) -> None:
        self._own = threading.local()
        try:
            self._msgpack: Any = importlib.import_module("msgpack")
        except ImportError as error:
            raise Rejected(
                "codec msgpack needs the package msgpack: pip install msgpack",
                field="codec",
                limit="an installed package",
            ) from error

    def encode(self, value: Any) -> bytes:
        """As msgpack.packb: strings in UTF-8, tuples as lists."""
        own = self._own
        try:
            # One packer a thread: to make one costs more than to use it.
            packer = own.packer
        except AttributeError:
            packer = own.packer = self._msgpack.Packer()
        try:
            body: bytes = packer.pack(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise _wrong(self.name, value, str(error)) from error
        return body

    def decode(self, body: bytes) -> Any:
        """As msgpack.unpackb; keys of maps may be anything that they could be when they were packed."""
        return self._msgpack.unpackb(body, strict_map_key=False)


class ArrowIpcCodec:
    """A RecordBatch or Table as an Arrow IPC stream; decoded to a Table."""

    name = "arrow-ipc"

    def encode(self, value: Any) -> bytes:
        """A RecordBatch or Table with its schema."""
        if not isinstance(value, pa.RecordBatch | pa.Table):
            raise _wrong(self.name, value, "give a RecordBatch or Table")
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, value.schema) as writer:
            writer.write(value)
        body: bytes = sink.getvalue().to_pybytes()
        return body

    def decode(self, body: bytes) -> pa.Table:
        """The rows of the stream, checked as a whole: Arrow follows offsets and indices wherever they lead."""
        try:
            with pa.ipc.open_stream(pa.py_buffer(body)) as reader:
                table = reader.read_all()
            table.validate(full=True)
        except (pa.ArrowException, OSError, MemoryError) as error:
            raise ValueError(f"the body is no valid Arrow IPC stream: {error}") from error
        return table


_CODECS: dict[str, type[Codec]] = {
    BytesCodec.name: BytesCodec,
    JsonCodec.name: JsonCodec,
    MsgpackCodec.name: MsgpackCodec,
    ArrowIpcCodec.name: ArrowIpcCodec,
}
_made: dict[str, Codec] = {}


def codec(name: str) -> Codec:
    """The codec of a name. Raises: Rejected when there is none, or its package is missing."""
    made = _made.get(name)
    if made is None:
        kind = _CODECS.get(name)
        if kind is None:
            raise Rejected(
                f"there is no codec {name!r}; there are {', '.join(_CODECS)}",
                field="codec",
                limit=", ".join(_CODECS),
            )
        made = _made[name] = kind()
    return made


def encode_all(codec: Codec, values: Iterable[Any]) -> list[bytes]:
    """The bytes of many values. Raises: Rejected, as `encode` for the first that it refuses; for what is not bytes."""
    values = list(values)
    if type(codec) is not BytesCodec:
        values = [codec.encode(value) for value in values]
    if set(map(type, values)) <= {bytes}:
        # The rule; a call each costs as much as the rest of a put.
        return values
    to_bytes = BytesCodec().encode
    return [to_bytes(value) for value in values]


def _wrong(name: str, value: Any, advice: str) -> Rejected:
    return Rejected(
        f"codec {name} cannot encode {type(value).__name__}: {advice}", field="value", limit=name
    )
