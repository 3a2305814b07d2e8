"""A command of the remoting protocol, request or answer: the bytes of a frame, and what they say.

A frame is its length (of what follows, 4 bytes), the type and length of the header (1 and 3 bytes), header and body.

Source: RemotingCommand, RocketMQSerializable, NettyDecoder.
"""

from __future__ import annotations

import struct
from typing import Any, Literal, NamedTuple, TypeAlias

import orjson

from .codes import Language, MQVersion
from .malformed import Malformed as Malformed

HeaderType: TypeAlias = Literal["json", "binary"]

#: bytes in front of each header
HEAD_BYTES = 8
#: the largest frame that RocketMQ's clients and brokers take, its first 4 bytes included
FRAME_BYTES_MAX = 16 << 20
#: the longest header. A message's properties, up to 32,767 bytes, are in it: twice as long if JSON escapes each byte
HEADER_BYTES_MAX = 64 << 10
#: the version of each answer: clients compare it with those that brought a feature
VERSION = MQVersion.V5_3_3.value

FLAG_RESPONSE, FLAG_ONE_WAY = 0x1, 0x2

_HEAD = struct.Struct(">iI")
#: the header's length is the lower 24 bits
_HEADER_LENGTH_MASK = 0xFFFFFF
#: the length counts the word with the header's length, and not itself
_WORD_BYTES = 4
_TYPES: tuple[HeaderType, ...] = ("json", "binary")

#: code, language, version, opaque, flag, length of the remark
_FIXED = struct.Struct(">hbhiii")
_INT = struct.Struct(">i")
_SHORT = struct.Struct(">h")
_INT32_MIN, _INT32_MAX = -(1 << 31), (1 << 31) - 1
_INT16_MIN, _INT16_MAX = -(1 << 15), (1 << 15) - 1

_ONLY_TEXT = frozenset((str,))
_LANGUAGE_NAMES = {language.value: language.name for language in Language}
_LANGUAGE_CODES: dict[str, int] = {language.name: language.value for language in Language}


class RemotingCommand(NamedTuple):
    """One request or answer. The default is a request without fields and body."""

    #: RequestCode of a request, ResponseCode of an answer
    code: int
    #: of a request: chosen by the sender; an answer repeats it
    opaque: int
    #: FLAG_RESPONSE, FLAG_ONE_WAY
    flag: int = 0
    #: the header's own fields (extFields). The default is shared: do not change it
    fields: dict[str, str] = {}
    body: bytes | memoryview = b""
    #: why a request failed
    remark: str | None = None
    #: MQVersion of the sender
    version: int = VERSION
    #: the name of a Language, else what the sender wrote
    language: str | int = Language.PYTHON.name
    #: how the header is written
    header_type: HeaderType = "json"

    @property
    def is_response(self) -> bool:
        """Whether this answers a request."""
        return self.flag & FLAG_RESPONSE != 0

    @property
    def is_one_way(self) -> bool:
        """Whether the sender wants no answer, not even one of a failure."""
        return self.flag & FLAG_ONE_WAY != 0


class FrameHead(NamedTuple):
    """The first HEAD_BYTES of a frame."""

    header_bytes: int
    body_bytes: int
    header_type: HeaderType

    @classmethod
    def parse(
        cls,
        data: bytes | bytearray | memoryview,
        *,
        max_frame_bytes: int = FRAME_BYTES_MAX,
        max_header_bytes: int = HEADER_BYTES_MAX,
    ) -> FrameHead:
        """Read the head at the begin of `data`, which has HEAD_BYTES or more.

        Args:
            max_frame_bytes: limit of the whole frame.
            max_header_bytes: limit of its header.

        Raises: Malformed for a length beyond its limit, lengths that contradict each other, and an unknown type.
        """
        if len(data) < HEAD_BYTES:
            raise Malformed(f"the head of a frame has {HEAD_BYTES} bytes, not {len(data)}")
        length, word = _HEAD.unpack_from(data)
        if not _WORD_BYTES <= length <= max_frame_bytes - _WORD_BYTES:
            raise Malformed(
                f"the length of a frame is {_WORD_BYTES} to {max_frame_bytes - _WORD_BYTES} bytes, not {length}"
            )

        header_bytes, kind = word & _HEADER_LENGTH_MASK, word >> 24
        if kind >= len(_TYPES):
            raise Malformed(f"the type of a header is 0 (JSON) or 1 (binary), not {kind}")
        if header_bytes > max_header_bytes:
            raise Malformed(f"a header has up to {max_header_bytes} bytes, not {header_bytes}")

        body_bytes = length - _WORD_BYTES - header_bytes
        if body_bytes < 0:
            raise Malformed(
                f"a frame of length {length} has no room for a header of {header_bytes}"
            )
        return cls(header_bytes, body_bytes, _TYPES[kind])


# --- reading a header -----------------------------------------------------------------------------


def decode_header(
    header: bytes | bytearray | memoryview, header_type: HeaderType
) -> RemotingCommand:
    """The command of a header, with an empty body.

    Numbers and truth values among the fields, which C++ clients send, become text.
    Raises: Malformed.
    """
    return _decode_json(header) if header_type == "json" else _decode_binary(header)


def _decode_json(header: bytes | bytearray | memoryview) -> RemotingCommand:
    try:
        found = orjson.loads(header)
    except orjson.JSONDecodeError as error:
        raise Malformed(f"the header is not JSON: {error.msg}") from None
    if type(found) is not dict:
        raise Malformed("a header in JSON is an object")

    code = _number(found, "code")
    opaque = _number(found, "opaque")
    if code is None or opaque is None:
        raise Malformed("a header in JSON has code and opaque")

    remark = found.get("remark")
    if remark is not None and type(remark) is not str:
        raise Malformed("the remark of a header is text")
    fields = found.get("extFields")
    return RemotingCommand(
        code,
        opaque,
        _number(found, "flag") or 0,
        {} if fields is None else _texts(fields),
        b"",
        remark,
        _number(found, "version") or 0,
        _language(found.get("language")),
        "json",
    )


def _language(value: object) -> str | int:
    """A name or number of JSON as a name, if it is known. Raises: Malformed."""
    if type(value) is str:
        return value
    if type(value) is int:
        return _LANGUAGE_NAMES.get(value, value)
    if value is None:
        return Language.OTHER.name
    raise Malformed("the language of a header is a name or a number")


def _number(found: dict[str, Any], name: str) -> int | None:
    """The value of a name, None without one. Raises: Malformed for what is not a 32-bit number."""
    value = found.get(name)
    if value is None:
        return None
    if type(value) is not int or not _INT32_MIN <= value <= _INT32_MAX:
        raise Malformed(f"{name} of a header is a number of 32 bits")
    return value


def _texts(fields: object) -> dict[str, str]:
    """The fields, their values as text. Raises: Malformed."""
    if type(fields) is not dict:
        raise Malformed("the fields (extFields) of a header are an object")
    # Nearly all clients send texts alone.
    if _ONLY_TEXT.issuperset(map(type, fields.values())):
        return fields
    return {name: _text(name, value) for name, value in fields.items() if value is not None}


def _text(name: str, value: object) -> str:
    if type(value) is str:
        return value
    if type(value) is bool:
        return "true" if value else "false"
    if type(value) is int or type(value) is float:
        return str(value)
    raise Malformed(f"the field {name!r} of a header is text, a number or a truth value")


def _decode_binary(header: bytes | bytearray | memoryview) -> RemotingCommand:
    # Slices of bytes have `decode`.
    data = header if type(header) is bytes else bytes(header)
    try:
        code, language, version, opaque, flag, remark_bytes = _FIXED.unpack_from(data)
        at = _FIXED.size
        remark, at = _read(data, at, remark_bytes)
        (field_bytes,) = _INT.unpack_from(data, at)
        at += _INT.size
        if field_bytes != len(data) - at:
            raise Malformed(f"{field_bytes} bytes of fields in a header that has {len(data) - at}")

        fields = {}
        while at < len(data):
            (count,) = _SHORT.unpack_from(data, at)
            name, at = _read(data, at + _SHORT.size, count)
            (count,) = _INT.unpack_from(data, at)
            fields[name], at = _read(data, at + _INT.size, count)
    except struct.error:
        raise Malformed(f"a binary header of {len(data)} bytes ends inside a field") from None
    except UnicodeDecodeError:
        raise Malformed("the texts of a binary header are UTF-8") from None

    name_or_number = _LANGUAGE_NAMES.get(language, language)
    return RemotingCommand(
        code, opaque, flag, fields, b"", remark or None, version, name_or_number, "binary"
    )


def _read(data: bytes, at: int, count: int) -> tuple[str, int]:
    """Text of `count` bytes, and where it ends. Raises: Malformed, UnicodeDecodeError."""
    end = at + count
    if count < 0 or end > len(data):
        raise Malformed(f"a text of {count} bytes in a header with {len(data) - at} left")
    return data[at:end].decode(), end


# --- writing a frame ------------------------------------------------------------------------------


def encode(command: RemotingCommand) -> bytes:
    """The whole frame of a command.

    Raises: ValueError for what its header cannot hold: in a binary one a code or version beyond 16 bits, in both text
    that UTF-8 cannot hold.
    """
    is_binary = command.header_type == "binary"
    header = _encode_binary(command) if is_binary else _encode_json(command)
    length = _WORD_BYTES + len(header) + len(command.body)
    head = _HEAD.pack(length, is_binary << 24 | len(header))
    return b"".join((head, header, command.body))


def _encode_json(command: RemotingCommand) -> bytes:
    header: dict[str, Any] = {
        "code": command.code,
        # Java fails on an answer to a send that has none.
        "extFields": command.fields,
        "flag": command.flag,
        "language": command.language,
        "opaque": command.opaque,
    }
    if command.remark is not None:
        header["remark"] = command.remark
    header["serializeTypeCurrentRPC"] = "JSON"
    header["version"] = command.version
    try:
        return orjson.dumps(header)
    except orjson.JSONEncodeError as error:
        raise ValueError(f"a header that JSON cannot hold: {error}") from None


def _encode_binary(command: RemotingCommand) -> bytes:
    language = command.language
    if type(language) is str:
        language = _LANGUAGE_CODES.get(language, Language.OTHER.value)
    for name, value in (("code", command.code), ("version", command.version)):
        if not _INT16_MIN <= value <= _INT16_MAX:
            raise ValueError(f"{name} {value} does not fit into the 16 bits of a binary header")

    remark = (command.remark or "").encode()
    parts: list[bytes] = []
    for field, text in command.fields.items():
        name_bytes, value_bytes = field.encode(), text.encode()
        if len(name_bytes) > _INT16_MAX:
            raise ValueError(f"a field's name has up to {_INT16_MAX} bytes, not {len(name_bytes)}")
        parts += (
            _SHORT.pack(len(name_bytes)),
            name_bytes,
            _INT.pack(len(value_bytes)),
            value_bytes,
        )
    fields = b"".join(parts)

    try:
        fixed = _FIXED.pack(
            command.code, language, command.version, command.opaque, command.flag, len(remark)
        )
    except struct.error as error:
        raise ValueError(
            f"a binary header cannot hold {command._replace(body=b'')}: {error}"
        ) from None
    return b"".join((fixed, remark, _INT.pack(len(fields)), fields))


def answer(
    request: RemotingCommand,
    code: int,
    fields: dict[str, str] | None = None,
    body: bytes | memoryview = b"",
    remark: str | None = None,
) -> RemotingCommand:
    """The answer to a request, in the type of its header.

    Args:
        code: ResponseCode.
        remark: why it failed; clients show it to their users.
    """
    return RemotingCommand(
        code,
        request.opaque,
        FLAG_RESPONSE,
        {} if fields is None else fields,
        body,
        remark,
        header_type=request.header_type,
    )
