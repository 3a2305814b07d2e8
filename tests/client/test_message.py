"""The message model: keys, properties, codecs, and the way through columns and back."""

from __future__ import annotations

import copy
import pickle
import zlib
from dataclasses import asdict, replace
from typing import Any

import pyarrow as pa
import pytest

from raymq.client.messages.codecs import BytesCodec, codec, encode_all
from raymq.client.messages.columns import message_batch, put_batch
from raymq.client.messages.keys import key_properties, key_property, keys_of
from raymq.client.messages.message import (
    Message,
    encode_properties,
    property_bytes,
)
from raymq.client.messages.received import ReceivedMessage, received_messages
from raymq.store.base.errors import Rejected
from raymq.store.base.format import offset_message_id
from raymq.store.records.property_columns import PropertyColumns
from raymq.store.records.record import encode_record
from raymq.store.records.requests import PutRequest
from tests.support.batches import put_one
from tests.support.fake_backend import FakeBackend

KEYS = [b"text", None, b"", b"\xff\x00\xfe", b"a\x01b", b"\x02", "é".encode(), b"\x00", b"=", b"=="]


def raw(data: pa.RecordBatch | pa.Table) -> pa.Array:
    """The records of columns that went through a shard, as a fetch answers them."""
    backend = FakeBackend()
    backend.create("t")
    batch, _ = put_batch(data, now_ms=1000)
    put_one(backend, PutRequest("t", 0, batch, 1, 0, 0, "quorum"))
    return pa.array(backend.queues["t", 0].records, pa.binary())


def stored(data: pa.RecordBatch) -> pa.RecordBatch:
    """Columns as a consumer gets them."""
    return message_batch(3, raw(data))


def test_the_column_form_of_keys_is_the_scalar_form() -> None:
    column = pa.array([b"skipped", *KEYS], pa.binary()).slice(1)
    coded = key_properties(column)
    assert coded.to_pylist() == [None if key is None else key_property(key) for key in KEYS]
    assert keys_of(PropertyColumns(coded)).to_pylist() == KEYS


def test_columns_come_back_as_they_were_sent() -> None:
    data = pa.record_batch(
        {
            "body": pa.array([b"body%d" % n for n in range(len(KEYS))], pa.binary()),
            "key": pa.array(KEYS, pa.binary()),
            "tag": pa.array(["eu", None] * 5, pa.string()),
            "born_time_ms": pa.array(range(10), pa.int64()),
        }
    )
    found = stored(data)
    for name in data.schema.names:
        assert found.column(name).to_pylist() == data.column(name).to_pylist()
    assert found.column("offset").to_pylist() == list(range(10))
    assert set(found.column("shard").to_pylist()) == {3}


def test_rows_become_messages_with_hidden_system_properties() -> None:
    properties = encode_properties(b"\xffkey", ("one", "two"), {"a": "b", "ü": "ö"})
    data = pa.record_batch(
        {"body": pa.array([b"x"], pa.binary()), "properties": pa.array([properties], pa.binary())}
    )
    (message,) = received_messages(3, raw(data))
    assert (message.key, message.index_keys) == (b"\xffkey", ("one", "two"))
    assert message.properties == {"a": "b", "ü": "ö"}
    assert (message.topic, message.shard, message.queue_id, message.offset) == ("t", 3, 0, 0)
    assert message.born_time_ms == 1000
    assert message.message_id == "7F00000100002A9F0000000000000000"


def raw_records(*properties: bytes) -> pa.Array:
    made = [
        encode_record(topic="t", body=b"body", properties=each, queue_offset=at)
        for at, each in enumerate(properties)
    ]
    return pa.array(made, pa.binary())


def test_a_message_decodes_a_field_when_it_is_first_read() -> None:
    (message,) = received_messages(0, raw_records(b"TAGS\x01a\x02"))
    assert "body" not in vars(message)
    assert message.body == b"body"
    assert (vars(message)["offset"], vars(message)["_record"]) == (0, None)
    assert "tag" not in vars(message)
    assert message.tag == "a"
    assert vars(message)["key"] is None


def test_a_message_that_was_not_read_yet_is_equal_to_one_that_was() -> None:
    records = raw_records(b"KEYS\x01one two\x02x\x01y\x02")
    (read,), (unread,), (other,) = (received_messages(0, records) for _ in range(3))
    assert read.index_keys == ("one", "two")
    assert read == unread
    assert replace(other, tag="b").tag == "b"
    assert asdict(copy.copy(other)) == asdict(read)
    assert repr(other) == repr(read)


@pytest.mark.parametrize("topic", ["t", "x" * 127, "long" * 60, "ü"])
@pytest.mark.parametrize("born", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("store", ["10.0.0.1", "fe80::1"])
def test_a_record_of_any_form_becomes_the_message_that_its_columns_hold(
    topic: str, born: str, store: str
) -> None:
    texts = [b"", b"TAGS\x01a\x02", b"__SHARDINGKEY\x01k\x02KEYS\x01one two\x02x\x01y\x02"]
    made = [
        encode_record(
            topic=topic,
            body=b"body" * number,
            properties=text,
            queue_id=2,
            queue_offset=7 + number,
            physical_offset=1 << 40,
            born_time_ms=5,
            born_host=(born, 1),
            store_time_ms=6,
            store_host=(store, 10911),
        )
        for number, text in enumerate(texts)
    ]
    records = pa.array([b"skipped", *made], pa.binary()).slice(1)
    rows = message_batch(3, records).to_pylist()
    for message, row in zip(received_messages(3, records), rows, strict=True):
        names = (
            "topic",
            "shard",
            "queue_id",
            "offset",
            "store_time_ms",
            "born_time_ms",
            "key",
            "tag",
            "body",
        )
        assert {name: getattr(message, name) for name in names} == {
            name: row[name] for name in names
        }
        assert message.message_id == offset_message_id(store, 10911, 1 << 40)
        copied = pickle.loads(pickle.dumps(message))
        assert message == copied == ReceivedMessage(**vars(copied))
    assert message.index_keys == ("one", "two")
    assert message.properties == {"x": "y"}


def test_maps_and_text_columns_are_taken() -> None:
    kind = pa.map_(pa.string(), pa.string())
    data = pa.table(
        {
            "body": ["text", "more"],
            "key": ["k", "l"],
            "properties": pa.array([[("a", "b")], None], kind),
        }
    )
    found = received_messages(3, raw(data))
    assert [(m.body, m.key, m.properties) for m in found] == [
        (b"text", b"k", {"a": "b"}),
        (b"more", b"l", {}),
    ]


@pytest.mark.parametrize(
    ("columns", "field"),
    [
        ({"key": [b"k"]}, "body"),
        ({"body": [b"x"], "headers": [b"h"]}, "headers"),
        ({"body": [1]}, "body"),
        ({"body": [b"x"], "key": [1]}, "key"),
    ],
)
def test_a_wrong_column_is_named(columns: dict[str, list[Any]], field: str) -> None:
    with pytest.raises(Rejected) as refused:
        put_batch(pa.table(columns), now_ms=0)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"key": "text"}, "key"),
        ({"tag": ""}, "tag"),
        ({"tag": "a\x01"}, "tag"),
        ({"index_keys": "one"}, "index_keys"),
        ({"index_keys": ("a b",)}, "index_keys"),
        ({"properties": {"UNIQ_KEY": "x"}}, "properties"),
        ({"properties": {"a": 1}}, "properties"),
        ({"properties": {"a": "x" * 40_000}}, "properties"),
    ],
)
def test_a_message_that_cannot_be_stored_is_refused_by_field(
    message: dict[str, Any], field: str
) -> None:
    given: dict[str, Any] = {"key": None, "tag": None, "index_keys": (), "properties": None}
    with pytest.raises(Rejected) as refused:
        property_bytes(**{**given, **message})
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bytes", b"\x00\xff"),
        ("json", {"a": [1, "ü", None]}),
        ("msgpack", {"a": [1, b"\xff"]}),
        ("arrow-ipc", pa.table({"a": [1, 2]})),
    ],
)
def test_each_codec_decodes_what_it_encoded(name: str, value: Any) -> None:
    if name == "msgpack":
        pytest.importorskip("msgpack")
    body = codec(name).encode(value)
    properties = {} if name == "bytes" else {"content-type": name}
    assert Message(topic="t", body=body, properties=properties).value == value


@pytest.mark.parametrize(
    ("name", "value"),
    [("bytes", "text"), ("json", {1, 2}), ("json", float("nan")), ("arrow-ipc", 1)],
)
def test_a_codec_refuses_values_of_unknown_types(name: str, value: Any) -> None:
    with pytest.raises(Rejected) as refused:
        codec(name).encode(value)
    assert refused.value.field == "value"


def test_an_unknown_codec_is_refused_with_those_there_are() -> None:
    with pytest.raises(Rejected, match="arrow-ipc"):
        codec("pickle")


@pytest.mark.parametrize("name", ["bytes", "json"])
def test_values_are_encoded_together_as_one_by_one(name: str) -> None:
    values: list[Any] = ["a", 1, None]
    if name == "bytes":
        values = [b"a", bytearray(b"b"), memoryview(b"c")]
    one = codec(name)
    assert encode_all(one, iter(values)) == [one.encode(value) for value in values]
    assert encode_all(one, values[:1]) == [one.encode(values[0])]
    assert encode_all(one, []) == []


def test_one_refused_value_among_many_is_named() -> None:
    with pytest.raises(Rejected, match="codec bytes cannot encode str"):
        encode_all(codec("bytes"), [b"a", "b"])


def test_bytes_that_were_encoded_together_are_not_the_callers_list() -> None:
    values = [b"a"]
    encoded = encode_all(codec("bytes"), values)
    values.append(b"b")
    assert encoded == [b"a"]


class Zipped(BytesCodec):
    name = "zipped"

    def encode(self, value: Any) -> bytes:
        return zlib.compress(value)


class Text(BytesCodec):
    name = "text"

    def encode(self, value: Any) -> Any:
        return str(value)


def test_a_codec_of_ones_own_encodes_bytes_too() -> None:
    assert encode_all(Zipped(), [b"a"]) == [Zipped().encode(b"a")]


def test_a_codec_that_makes_something_else_than_bytes_is_refused() -> None:
    with pytest.raises(Rejected, match="cannot encode str"):
        encode_all(Text(), [1, 2])
