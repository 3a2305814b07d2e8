"""Encode values as message bodies and decode them, in the client only. Property `content-type` names the codec.

Stored bytes are never unpickled.
"""

from __future__ import annotations

import functools
import importlib
import json
import threading
from collections.abc import Iterable
from typing import Any, Protocol

import pyarrow as pa

from raymq.store.base.errors import Rejected

#: property that names the codec. Bodies without it are plain bytes
CONTENT_TYPE = "content-type"


class Codec(Protocol):
    """Encodes values as bytes."""

    name: str

    def encode(self, value: Any) -> bytes:
        """Encode a value. Raises: Rejected for a value of a type that the codec does not take."""

    def decode(self, body: bytes) -> Any:
        """Decode a body. Raises: ValueError for a damaged body or a body of another codec."""


class BytesCodec:
    """Bytes, unchanged."""

    name = "bytes"

    def encode(self, value: Any) -> bytes:
        """Take any object with the buffer protocol."""
        if type(value) is bytes:
            return value
        try:
            return bytes(memoryview(value))
        except TypeError as error:
            raise _wrong(self.name, value, "give bytes, or choose another codec") from error

    def decode(self, body: bytes) -> bytes:
        """Return the body."""
        return body


class JsonCodec:
    """JSON in UTF-8, without spaces."""

    name = "json"

    def encode(self, value: Any) -> bytes:
        """Encode as JSON. NaN and infinities are refused: other JSON readers do not take them."""
        try:
            text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
            return text.encode()
        except UnicodeEncodeError as error:
            why = "it has half of a surrogate pair, which UTF-8 cannot hold; replace that character"
            raise _wrong(self.name, value, why) from error
        except RecursionError as error:
            raise _wrong(self.name, value, "it is nested too deeply") from error
        except (TypeError, ValueError) as error:
            raise _wrong(self.name, value, str(error)) from error

    def decode(self, body: bytes) -> Any:
        """Decode JSON."""
        try:
            return json.loads(body)
        except RecursionError as error:
            raise ValueError("the body is nested too deeply") from error


class MsgpackCodec:
    """MessagePack. Needs the package msgpack."""

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
        """Like msgpack.packb: strings become UTF-8, tuples become lists, but tuples in keys of maps come back."""
        own = self._own
        try:
            # One packer per thread: making one costs more than using it.
            packer = own.packer
        except AttributeError:
            packer = own.packer = self._msgpack.Packer()
        try:
            body: bytes = packer.pack(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise _wrong(self.name, value, str(error)) from error
        return body

    def decode(self, body: bytes) -> Any:
        """Like msgpack.unpackb. Map keys may have any type that can be packed."""
        try:
            return self._msgpack.unpackb(body, strict_map_key=False)
        except TypeError:
            # A list is no key. Most bodies have none, so that this costs nothing.
            return self._msgpack.unpackb(
                body, strict_map_key=False, object_pairs_hook=_with_tuple_keys
            )


class ArrowIpcCodec:
    """A RecordBatch or Table as an Arrow IPC stream, decoded to a Table."""

    name = "arrow-ipc"

    def encode(self, value: Any) -> bytes:
        """Encode a RecordBatch or Table with its schema."""
        if not isinstance(value, pa.RecordBatch | pa.Table):
            raise _wrong(self.name, value, "give a RecordBatch or Table")
        try:
            # `decode` refuses what is not valid, and a Queue would have removed the item by then.
            value.validate(full=True)
        except pa.ArrowException as error:
            raise _wrong(self.name, value, f"its rows are not valid: {error}") from error
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, value.schema) as writer:
            writer.write(value)
        body: bytes = sink.getvalue().to_pybytes()
        return body

    def decode(self, body: bytes) -> pa.Table:
        """Decode and validate all rows: Arrow itself trusts the offsets and indices of a stream."""
        try:
            with pa.ipc.open_stream(pa.py_buffer(body)) as reader:
                table = reader.read_all()
            table.validate(full=True)
        except (pa.ArrowException, OSError, MemoryError) as error:
            raise ValueError(f"the body is not a valid Arrow IPC stream: {error}") from error
        return table


def _with_tuple_keys(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """A map of pairs whose keys may be lists, which were tuples."""
    return {_as_key(key): value for key, value in pairs}


def _as_key(key: Any) -> Any:
    return tuple(map(_as_key, key)) if isinstance(key, list) else key


_KINDS: tuple[type[Codec], ...] = (BytesCodec, JsonCodec, MsgpackCodec, ArrowIpcCodec)
_CODECS = {kind.name: kind for kind in _KINDS}


@functools.cache
def codec(name: str) -> Codec:
    """The codec with this name. Raises: Rejected for an unknown name or a missing package."""
    if name not in _CODECS:
        known = ", ".join(_CODECS)
        raise Rejected(f"there is no codec {name!r}; there are {known}", field="codec", limit=known)
    return _CODECS[name]()


def encode_all(codec: Codec, values: Iterable[Any]) -> list[bytes]:
    """Encode many values. Raises: Rejected for the first value that the codec does not take."""
    values = list(values)
    if type(codec) is not BytesCodec:
        values = [codec.encode(value) for value in values]
    if set(map(type, values)) <= {bytes}:
        # The usual case: one call per value would cost as much as the rest of a put.
        return values
    to_bytes = BytesCodec().encode
    return [to_bytes(value) for value in values]


def _wrong(name: str, value: Any, advice: str) -> Rejected:
    return Rejected(
        f"codec {name} cannot encode {type(value).__name__}: {advice}", field="value", limit=name
    )
