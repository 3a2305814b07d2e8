"""The properties string that clients send, split into what a put takes, and joined again."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymq.doors.rocketmq.malformed import Malformed
from raymq.doors.rocketmq.property_text import PutProperties, join, split
from raymq.store.records.properties import decode, encode
from raymq.store.records.record import PUT_SCHEMA, check_put

names = st.sampled_from(
    ["TAGS", "WAIT", "_P", "KEYS", "UNIQ_KEY", "MYTAGS", "TAGSX", "AWAIT", "x_P"]
)
values = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\1\2"), max_size=9)


def text_of(pairs) -> str:
    return "".join(f"{name}\1{value}\2" for name, value in pairs)


def test_what_java_sends_is_split_into_tag_and_wait_and_the_rest():
    text = "KEYS\1k\2UNIQ_KEY\0017F00\2WAIT\1true\2TAGS\1a\2"
    assert split(text) == PutProperties("a", True, b"KEYS\1k\2UNIQ_KEY\0017F00\2")


def test_properties_without_tag_and_wait_stay_as_they_are():
    data = b"KEYS\1k\2MYWAIT\1 \2"
    assert split(data) == PutProperties(None, True, data)
    assert split(memoryview(data)).properties == data


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", (None, True, None)),
        ("TAGS\1a", ("a", True, None)),
        ("KEYS\1k", (None, True, b"KEYS\1k\2")),
        ("WAIT\1false\2", (None, False, None)),
        ("WAIT\1TRUE\2", (None, True, None)),
        ("WAIT\1no\2", (None, False, None)),
        ("WAIT\1\2", (None, True, None)),
        ("TAGS\1\2", (None, True, None)),
        ("TAGS\1a\2TAGS\1b\2", ("b", True, None)),
        ("MYTAGS\1a\2", (None, True, b"MYTAGS\1a\2")),
        ("WAIT\1true\2broken\2KEYS\1k\2", (None, True, b"broken\2KEYS\1k\2")),
        ("_P\1AAAAAAAAAAAAAAAAAAAA\2KEYS\1k\2", (None, True, b"KEYS\1k\2")),
        ("TAGS\1ä\2KEYS\1ö\2", ("ä", True, "KEYS\1ö\2".encode())),
    ],
)
def test_odd_properties_are_split_as_rocketmq_reads_them(text, parts):
    assert split(text) == parts
    assert split(text.encode()) == parts


def test_bytes_that_are_no_utf_8_are_replaced_in_a_tag_and_kept_elsewhere():
    assert split(b"TAGS\1\xff\2KEYS\1\xfe\2") == PutProperties("�", True, b"KEYS\1\xfe\2")


def test_half_of_a_surrogate_pair_is_malformed():
    with pytest.raises(Malformed):
        split("KEYS\1\ud800\2")


@given(st.lists(st.tuples(names, values), max_size=6))
def test_a_put_takes_what_is_split_and_readers_find_all_properties(pairs):
    text = text_of(pairs)
    parts = split(text)
    read = decode(text.encode())
    wanted = {name: value for name, value in read.items() if name not in ("TAGS", "WAIT", "_P")}
    assert decode(parts.properties or b"") == wanted
    assert parts.tag == read.get("TAGS")
    assert parts.wait_store_ok == (read.get("WAIT", "true").lower() == "true")

    columns = [[b"x"], [parts.tag], [parts.properties], [0]]
    arrays = [pa.array(each, kind) for each, kind in zip(columns, PUT_SCHEMA.types, strict=True)]
    check_put("T", pa.RecordBatch.from_arrays(arrays, schema=PUT_SCHEMA), max_message_bytes=9)


@given(
    st.none() | values.filter(bool),
    st.booleans(),
    st.none()
    | st.dictionaries(st.sampled_from(["KEYS", "MYTAGS"]), values.filter(bool), min_size=1),
)
def test_joined_parts_are_split_into_the_same(tag, wait_store_ok, properties):
    parts = PutProperties(tag, wait_store_ok, None if properties is None else encode(properties))
    assert split(join(parts)) == parts


@given(st.binary(max_size=60))
def test_any_bytes_are_split(data):
    parts = split(data)
    assert parts.properties is None or parts.properties.endswith(b"\2")
