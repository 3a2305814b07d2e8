"""The table of a message's fields, and every place that is written out beside it."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import raymq
from raymq.client.messages import columns
from raymq.client.messages.fields import (
    BY_NAME,
    FIELDS,
    Column,
    JsonForm,
    MessageField,
    message_schema,
    printed_fields,
    property_names,
    put_back_fields,
    sent_columns,
    taken_names,
)
from raymq.client.messages.message import SYSTEM_PROPERTIES, Message
from raymq.client.messages.received import ReceivedMessage
from raymq.client.messages.topic_schema import TAKEN
from raymq.client.produce.message_encoder import MessageEncoder
from raymq.client.produce.producer_config import ProducerConfig
from raymq.cluster.cli import grammar, put_back
from raymq.spark import columns as spark_columns
from raymq.spark import sink_columns
from raymq.store.base.clock import Clock
from raymq.store.records.properties import decode
from raymq.store.records.record import MORE_SCHEMA, RECORD_SCHEMA

ROOT = Path(__file__).parents[2]
#: a value of each field that a send takes, none of them its default
SENT: dict[str, Any] = {
    "topic": "t",
    "key": b"key",
    "tag": "tag",
    "body": b"body",
    "properties": {"name": "value"},
    "flag": -7,
    "sys_flag": 0x301,
    "born_host": "192.0.2.1:5000",
    "index_keys": ("one", "two"),
    "deliver_at_ms": None,
    "delay_level": 3,
    "wait_store_ok": False,
}
#: a field that no message has
MADE_UP = MessageField(
    "colour",
    "str | None",
    "its colour",
    "property `COLOUR`",
    properties=("COLOUR",),
    column=Column(pa.string(), ("properties",), nullable=True, is_sent=True),
    json=JsonForm(lambda value: isinstance(value, str), "a text"),
    spark="paint",
)


def sent_fields() -> list[MessageField]:
    return [each for each in FIELDS if each.is_sent]


# --- what is made of the table --------------------------------------------------------------------


def test_a_field_that_is_added_to_the_table_is_in_all_that_is_made_of_it() -> None:
    more = (*FIELDS, MADE_UP)
    assert message_schema(more).field("colour") == pa.field("colour", pa.string())
    assert sent_columns(more) == (*sent_columns(), "colour")
    assert property_names(more) - property_names() == {"COLOUR"}
    assert taken_names(more) - taken_names() == {"colour", "paint"}
    assert printed_fields(more)[-2:] == (MADE_UP, BY_NAME["body"])
    assert put_back_fields(more)[-1] == MADE_UP


def test_columns_and_names_are_those_of_the_table() -> None:
    assert message_schema() == columns.MESSAGE_SCHEMA
    assert sent_columns() == columns._COLUMNS
    assert property_names() <= SYSTEM_PROPERTIES
    assert taken_names() <= TAKEN


def test_a_field_is_declared_once_and_sent_or_read() -> None:
    names = [each.name for each in FIELDS]
    assert len(set(names)) == len(names)
    properties = [name for each in FIELDS for name in each.properties]
    assert len(set(properties)) == len(properties)
    for each in FIELDS:
        assert each.is_sent or each.is_read or each.column is not None
        assert each.column is None or set(each.column.made_of) <= set(RECORD_SCHEMA.names)
        assert each.json is not None or not (each.is_printed and each.is_put_back and each.is_sent)


# --- what is written out beside it ----------------------------------------------------------------


def test_a_message_and_each_send_have_the_fields_that_are_sent() -> None:
    names = {each.name for each in sent_fields()}
    assert {each.name for each in fields(Message)} == names
    for send in (raymq.Producer.send, raymq.AsyncProducer.send, MessageEncoder.encode):
        assert names <= set(inspect.signature(send).parameters)


def test_a_received_message_has_the_fields_that_are_read() -> None:
    own = {name for name in vars(ReceivedMessage)["__annotations__"] if not name.startswith("_")}
    assert own == {each.name for each in FIELDS if each.is_read}


def test_a_field_that_is_left_out_has_the_default_of_the_table() -> None:
    message = Message(topic="t", body=b"")
    for each in sent_fields():
        if each.name not in ("topic", "body", "properties"):
            assert getattr(message, each.name) == each.default


@pytest.mark.parametrize("kind", [Message, ReceivedMessage])
def test_a_field_has_the_type_of_the_table(kind: type) -> None:
    for name, annotation in vars(kind)["__annotations__"].items():
        assert annotation == BY_NAME[name].type


def test_the_encoder_puts_each_field_where_the_table_says() -> None:
    assert set(SENT) == {each.name for each in sent_fields()}
    encoder = MessageEncoder(ProducerConfig(), Clock())
    for given in (SENT, {**SENT, "delay_level": 0, "deliver_at_ms": Clock().now_ms() + 60_000}):
        encoded = encoder.encode(Message(**given))
        found = set(decode((encoded.properties or b"") + (encoded.later or b"")))
        assert found <= property_names() | {"name"}
        for each in sent_fields():
            is_default = given[each.name] in (None, 0)
            if each.properties and each.name != "tag" and not is_default:
                assert found & set(each.properties), each.name
        assert (encoded.topic, encoded.body, encoded.tag) == ("t", b"body", "tag")
        assert encoded.head is not None
        heads = [each.name for each in FIELDS if each.name in MORE_SCHEMA.names]
        assert heads == MORE_SCHEMA.names
        assert encoded.head[:2] == (given["flag"], given["sys_flag"])


def test_a_line_has_the_fields_of_the_table() -> None:
    given = {each.name for each in FIELDS if each.json is not None}
    assert {*put_back._FIELDS, "body"} == given
    as_they_are = {each.name for each in put_back_fields() if each.is_sent}
    assert {*put_back._SENT, *put_back._OWN_FORM} == as_they_are


def test_the_help_of_produce_names_each_field_that_a_line_may_have() -> None:
    text = " ".join(inspect.getsource(grammar).split())
    shown = re.search(r'or (\{"body": .*?\}) \(default: lines of text', text)
    assert shown is not None
    found = dict(re.findall(r'"(\w+)": (\.\.\.|\[\.\.\.\]|\{\.\.\.\})', shown[1]))
    assert found == {
        each.name: each.json.example for each in put_back_fields() if each.json is not None
    }


def test_spark_reads_and_writes_the_columns_of_the_table() -> None:
    read = {each.spark for each in FIELDS if each.spark is not None}
    written = {each.spark_sink for each in FIELDS if each.spark_sink is not None}
    assert set(spark_columns.COLUMNS) == read | {"timestampType", "headers"}
    assert set(sink_columns.COLUMNS) == written | {"headers"}
    assert set(spark_columns.BY_NAME) <= read


def test_the_page_about_messages_has_a_row_for_each_field_that_is_sent() -> None:
    text = (ROOT / "docs/concepts/messages.md").read_text(encoding="utf-8")
    rows = text.partition("\n|---")[2].partition("\n\n")[0]
    named = re.findall(r"`(\w+)`", "".join(re.findall(r"^\|([^|]*)\|", rows, re.MULTILINE)))
    assert set(named) == {each.name for each in sent_fields()}


def test_the_table_has_no_field_without_a_line_of_its_reference() -> None:
    text = (ROOT / "docs/reference/message.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)`", text, re.MULTILINE) == [each.name for each in FIELDS] * 2
