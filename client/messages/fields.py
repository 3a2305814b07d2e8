"""The fields of a message, each declared once: its type, its place in a record, its column, its JSON, its limits.

`columns`, the command line, the names that a schema may not take, and docs/reference/message.md are made of this table.
`Message`, `ReceivedMessage`, the sends, the encoder and Spark's columns are written out, because they are hot, typed or
in an order of their own. `tests/client/test_fields.py` compares them with the table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pyarrow as pa

from raymq.store.records.properties import DELAY, TAGS, WAIT

from .keys import BASE64_KEY, TEXT_KEY

#: RocketMQ's property for the index keys
INDEX_KEYS = "KEYS"
#: property of a null value, whose body is empty
NULL_VALUE = "_N"


class JsonForm(NamedTuple):
    """A value in a line of `raymq consume -o json` and `raymq produce --input`."""

    #: whether a line may have it, if it is not null; None: any value
    fits: Callable[[Any], bool] | None
    wanted: str
    #: an example, for the help
    example: str = "..."


class Column(NamedTuple):
    """A column of `Consumer.poll_batch`."""

    type: pa.DataType
    #: columns of RECORD_SCHEMA that it is made of; empty: it is not of the record
    made_of: tuple[str, ...]
    nullable: bool = False
    #: whether `Producer.send_batch` takes it
    is_sent: bool = False
    #: None: it has the field's name
    name: str | None = None


class MessageField(NamedTuple):
    """One field."""

    name: str
    #: as the reference shows it
    type: str
    doc: str
    #: where a record has it, in words
    stored: str
    #: its limits, in words
    limits: str = ""
    #: the properties that hold it: no user property has these names
    properties: tuple[str, ...] = ()
    #: of a message that does not name it
    default: Any = None
    #: whether `Message` and the sends have it, and whether `ReceivedMessage` gives what the record has
    is_sent: bool = True
    is_read: bool = True
    #: None: batches have no such column
    column: Column | None = None
    #: None: no line has it
    json: JsonForm | None = None
    #: whether a line of `raymq consume` has it, and whether `raymq produce` sends it again
    is_printed: bool = True
    is_put_back: bool = True
    #: the column of a read in Spark, and that of a write; None: Spark has none
    spark: str | None = None
    spark_sink: str | None = None

    @property
    def column_name(self) -> str:
        """Of its column in batches."""
        return self.name if self.column is None else self.column.name or self.name


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_int(value: object) -> bool:
    return type(value) is int


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_key(value: object) -> bool:
    # A number as its text.
    return _is_text(value) or type(value) in (int, float)


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_named_texts(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_text, value.values()))


_TEXT = JsonForm(_is_text, "a text")
_COUNT = JsonForm(_is_count, "a whole number of at least 0")
_NUMBER = JsonForm(_is_int, "a whole number")
_ANY = JsonForm(None, "")
_NAMED_TEXTS = JsonForm(_is_named_texts, "an object of texts", "{...}")

#: in the order of columns
FIELDS = (
    MessageField(
        "topic",
        "str",
        "the topic",
        "the record's topic",
        limits="letters, digits and `%|_-`, up to 127",
        column=Column(pa.string(), ("topic",)),
        json=_TEXT,
        spark="topic",
        spark_sink="topic",
    ),
    MessageField(
        "shard",
        "int",
        "the shard that has it",
        "the log",
        is_sent=False,
        column=Column(pa.int32(), ()),
        is_printed=False,
        spark="shard",
    ),
    MessageField(
        "queue_id",
        "int",
        "its queue",
        "header: queue id",
        is_sent=False,
        column=Column(pa.int32(), ("queue_id",)),
        json=_COUNT,
        spark="partition",
        spark_sink="partition",
    ),
    MessageField(
        "offset",
        "int",
        "its offset in the queue",
        "header: queue offset",
        is_sent=False,
        column=Column(pa.int64(), ("queue_offset",)),
        json=_ANY,
        is_put_back=False,
        spark="offset",
    ),
    MessageField(
        "store_time_ms",
        "int",
        "when the shard stored it, ms since 1970",
        "header: store time",
        is_sent=False,
        column=Column(pa.int64(), ("store_time_ms",)),
        json=_ANY,
        is_put_back=False,
        spark="timestamp",
    ),
    MessageField(
        "born_time_ms",
        "int",
        "when the producer made it, by the producer's clock",
        "header: born time",
        is_sent=False,
        column=Column(pa.int64(), ("born_time_ms",), is_sent=True),
        json=_ANY,
        is_put_back=False,
    ),
    MessageField(
        "key",
        "bytes | None",
        "partition and ordering key: messages with one key go to one queue, in order",
        f"property `{TEXT_KEY}`, or `{BASE64_KEY}` in base64",
        limits="32,767 bytes with tag and properties",
        properties=(TEXT_KEY, BASE64_KEY),
        column=Column(pa.binary(), ("properties",), nullable=True, is_sent=True),
        json=JsonForm(_is_key, "a text or a number"),
        spark="key",
        spark_sink="key",
    ),
    MessageField(
        "tag",
        "str | None",
        "one word that readers see, and by which readers filter",
        f"property `{TAGS}`",
        limits="not empty, no `\\x01` and `\\x02`",
        properties=(TAGS,),
        column=Column(pa.string(), ("properties",), nullable=True, is_sent=True),
        json=_TEXT,
        spark="tag",
        spark_sink="tag",
    ),
    MessageField(
        "body",
        "bytes",
        "the value: any bytes, or the output of a codec",
        "the record's body",
        limits="4 MiB",
        column=Column(pa.binary(), ("body", "sys_flag", "properties"), nullable=True, is_sent=True),
        json=_ANY,
        spark="value",
        spark_sink="value",
    ),
    MessageField(
        "properties",
        "dict[str, str]",
        "names and values that travel with it",
        "the other properties",
        limits="not empty, no `\\x01` and `\\x02`, no name of the system",
        column=Column(pa.binary(), ("properties",), is_sent=True),
        json=_NAMED_TEXTS,
        spark="properties",
        spark_sink="properties",
    ),
    MessageField(
        "store_host",
        "str",
        "address and port of the shard that stored it",
        "header: store host",
        is_sent=False,
        is_read=False,
        column=Column(pa.string(), ("store_host",)),
        is_printed=False,
    ),
    MessageField(
        "physical_offset",
        "int",
        "its place in the shard's log",
        "header: physical offset",
        is_sent=False,
        is_read=False,
        column=Column(pa.int64(), ("physical_offset",)),
        is_printed=False,
    ),
    MessageField(
        "flag",
        "int",
        "RocketMQ's flag: a number that readers see",
        "header: flag",
        limits="32 bits",
        # Schemas of users have a column `flag`.
        column=Column(pa.int32(), ("flag",), is_sent=True, name="message_flag"),
        json=_NUMBER,
        spark="message_flag",
        default=0,
    ),
    MessageField(
        "sys_flag",
        "int",
        "RocketMQ's sysFlag, the bits that a sender sets: a compressed body and how, several tags",
        "header: system flag",
        limits="bits of `0x303`",
        column=Column(pa.int32(), ("sys_flag", "body"), is_sent=True),
        json=_COUNT,
        spark="sys_flag",
        default=0,
    ),
    MessageField(
        "born_host",
        "str | None",
        "address and port of its sender; by default those of the producer's connection",
        "header: born host",
        limits="an IP address and a port",
        column=Column(pa.string(), ("born_host",), is_sent=True),
        json=_TEXT,
        # Who sends a message again is a sender of its own.
        is_put_back=False,
        spark="born_host",
    ),
    MessageField(
        "index_keys",
        "tuple[str, ...]",
        "words by which the engine finds it, and the key of a compacted topic",
        f"property `{INDEX_KEYS}`",
        limits="no blanks",
        properties=(INDEX_KEYS,),
        json=JsonForm(_is_texts, "a list of texts", "[...]"),
        spark="index_keys",
        spark_sink="index_keys",
        default=(),
    ),
    MessageField(
        "deliver_at_ms",
        "int | None",
        "when readers are to get it, ms since 1970",
        "property `TIMER_DELIVER_MS`, until it is delivered",
        limits="three days ahead",
        properties=("TIMER_DELIVER_MS", "TIMER_OUT_MS", "UNIQ_KEY"),
        is_read=False,
        json=_COUNT,
        is_printed=False,
        spark="deliver_at",
        spark_sink="deliver_at",
    ),
    MessageField(
        "delay_level",
        "int",
        "RocketMQ's delay level in the place of a time: 1 s at level 1 to 2 h at level 18",
        f"property `{DELAY}`",
        limits="1 to 18, or as many as the first start of the cluster has chosen; higher ones count as the highest",
        properties=(DELAY,),
        is_read=False,
        json=_COUNT,
        is_printed=False,
        default=0,
    ),
    MessageField(
        "wait_store_ok",
        "bool",
        "False: the receipt waits neither for the flush nor for replicas, whatever `acks` are",
        f"property `{WAIT}`",
        limits="not together with `acks` of the call",
        properties=(WAIT,),
        is_read=False,
        json=JsonForm(_is_flag, "true or false"),
        is_printed=False,
        default=True,
    ),
    MessageField(
        "message_id",
        "str",
        "RocketMQ's offset message id",
        "store host and physical offset",
        is_sent=False,
        json=_ANY,
        is_put_back=False,
    ),
    MessageField(
        "is_null",
        "bool",
        "whether the value is null, and not empty bytes",
        f"property `{NULL_VALUE}`",
        properties=(NULL_VALUE,),
        is_sent=False,
        is_printed=False,
        default=False,
    ),
)
#: name -> field
BY_NAME = {field.name: field for field in FIELDS}


def message_schema(fields: tuple[MessageField, ...] = FIELDS) -> pa.Schema:
    """The columns of `Consumer.poll_batch`."""
    return pa.schema(
        [
            pa.field(each.column_name, each.column.type, nullable=each.column.nullable)
            for each in fields
            if each.column is not None
        ]
    )


def sent_columns(fields: tuple[MessageField, ...] = FIELDS) -> tuple[str, ...]:
    """The columns of `Producer.send_batch`."""
    return tuple(
        each.column_name for each in fields if each.column is not None and each.column.is_sent
    )


def property_names(fields: tuple[MessageField, ...] = FIELDS) -> frozenset[str]:
    """The properties that hold fields."""
    return frozenset(name for each in fields for name in each.properties)


def taken_names(fields: tuple[MessageField, ...] = FIELDS) -> frozenset[str]:
    """The names that reads and writes give to the parts of a message: no schema has such a column."""
    names = {each.column_name for each in fields if each.column is not None or each.is_sent}
    spark = {name for each in fields for name in (each.spark, each.spark_sink) if name is not None}
    return frozenset(names | spark)


def printed_fields(fields: tuple[MessageField, ...] = FIELDS) -> tuple[MessageField, ...]:
    """Those of a line of `raymq consume -o json`, the body last: it may be long."""
    found = [each for each in fields if each.json is not None and each.is_printed]
    return tuple(sorted(found, key=lambda each: each.name == "body"))


def put_back_fields(fields: tuple[MessageField, ...] = FIELDS) -> tuple[MessageField, ...]:
    """Those that a line of `raymq produce --input` may have and that are sent."""
    return tuple(each for each in fields if each.json is not None and each.is_put_back)
