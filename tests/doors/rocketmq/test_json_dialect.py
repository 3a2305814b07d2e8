"""The two dialects of JSON: golden bodies, round trips, and damage. tests/interop compares with Java's own bytes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymq.doors.rocketmq import json_dialect
from raymq.doors.rocketmq.json_dialect import JsonKey, object_key, read_json, write_json
from raymq.doors.rocketmq.malformed import Malformed

ROUTE = {
    "queueDatas": [{"brokerName": "raymq-0", "perm": 6, "readQueueNums": 4}],
    "brokerDatas": [{"brokerName": "raymq-0", "brokerAddrs": {10: "c", 0: "a:1", 2: "b"}}],
    "filterServerTable": {},
    "orderTopicConf": None,
}
QUEUE = JsonKey.of({"topic": "T", "brokerName": "raymq-0", "queueId": 0})
STATS = {"offsetTable": {QUEUE: {"maxOffset": 5, "minOffset": 1}}, "topicPutTps": 0.0}


def test_fastjson_writes_numeric_keys_without_quotes():
    assert write_json(ROUTE, standard=False) == (
        b'{"brokerDatas":[{"brokerAddrs":{0:"a:1",2:"b",10:"c"},"brokerName":"raymq-0"}],'
        b'"filterServerTable":{},"queueDatas":[{"brokerName":"raymq-0","perm":6,"readQueueNums":4}]}'
    )


def test_the_standard_dialect_writes_quoted_keys_in_the_same_order():
    body = write_json(ROUTE, standard=True)
    assert b'{"0":"a:1","2":"b","10":"c"}' in body
    assert json.loads(body)["filterServerTable"] == {}


def test_fastjson_writes_objects_as_keys():
    assert write_json(STATS, standard=False) == (
        b'{"offsetTable":{{"brokerName":"raymq-0","queueId":0,"topic":"T"}:'
        b'{"maxOffset":5,"minOffset":1}},"topicPutTps":0.0}'
    )


def test_the_standard_dialect_writes_objects_as_text():
    body = write_json(STATS, standard=True)
    assert body == (
        rb'{"offsetTable":{"{\"brokerName\":\"raymq-0\",\"queueId\":0,\"topic\":\"T\"}":'
        b'{"maxOffset":5,"minOffset":1}},"topicPutTps":0.0}'
    )


def test_both_dialects_are_read_to_the_same():
    for standard in (False, True):
        route = read_json(write_json(ROUTE, standard=standard))
        assert route["brokerDatas"][0]["brokerAddrs"] == {"0": "a:1", "2": "b", "10": "c"}
        table = read_json(write_json(STATS, standard=standard))["offsetTable"]
        assert {object_key(key): value for key, value in table.items()} == STATS["offsetTable"]


@pytest.mark.parametrize("key", ["T", "[1]", "{", '{{"a":1}:2}', 3, None])
def test_a_key_that_is_no_object_is_malformed(key):
    with pytest.raises(Malformed):
        object_key(key)


def test_a_key_is_the_same_whatever_the_order_of_its_items():
    one, other = JsonKey.of({"a": 1, "b": [{"c": 2}]}), JsonKey.of({"b": [{"c": 2}], "a": 1})
    assert one == other
    assert hash(one) == hash(other)
    assert write_json({one: 1}, standard=False) == b'{{"a":1,"b":[{"c":2}]}:1}'
    assert one.as_dict() == {"a": 1, "b": (JsonKey.of({"c": 2}),)}


def test_texts_are_escaped_as_java_does():
    text = '\0\b\t\n\x0b\f\r\x1f "\\/~\x7f\x9f\xa0é中\u2028\U0001f600'
    assert write_json(text, standard=False).decode() == (
        '"\\u0000\\b\\t\\n\\u000B\\f\\r\\u001F \\"\\\\/~\\u007F\\u009F\xa0é中\\u2028\U0001f600"'
    )
    assert write_json(text, standard=True) == (
        rb'"\u0000\b\t\n\u000B\f\r\u001F \"\\\/~\u007F\u009F\u00A0\u00E9\u4E2D\u2028\uD83D\uDE00"'
    )


def test_numbers_that_javascript_rounds_are_text_in_the_standard_dialect():
    value = [(1 << 53) - 1, 1 << 53, -(1 << 53), 1.5, float("nan"), True, None]
    assert write_json(value, standard=False) == (
        b"[9007199254740991,9007199254740992,-9007199254740992,1.5,null,true,null]"
    )
    assert write_json(value, standard=True) == (
        b'[9007199254740991,"9007199254740992","-9007199254740992",1.5,null,true,null]'
    )


def test_what_json_does_not_have_is_refused():
    with pytest.raises(TypeError, match="bytes"):
        write_json({"a": b"x"}, standard=False)


def test_half_of_a_surrogate_pair_is_written_as_a_question_mark():
    assert write_json("\ud800", standard=False) == b'"?"'


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
scalars = st.booleans() | st.integers(-(1 << 53) + 1, (1 << 53) - 1) | st.floats(-1e9, 1e9) | texts
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(texts, inner, max_size=3)
        | st.dictionaries(st.integers(-9, 99), inner, max_size=3)
        | st.dictionaries(
            st.fixed_dictionaries({"topic": texts, "queueId": st.integers(0, 9)}).map(JsonKey.of),
            inner,
            max_size=2,
        )
    ),
    max_leaves=8,
)


def as_read(value, standard):
    """A value as it is read back."""
    if isinstance(value, list):
        return [as_read(each, standard) for each in value]
    if not isinstance(value, dict):
        return value
    found = {}
    for key, inner in value.items():
        if isinstance(key, int):
            key = str(key)
        elif standard and isinstance(key, JsonKey):
            key = write_json(key, standard=True).decode()
        found[key] = as_read(inner, standard)
    return found


@given(values, st.booleans())
def test_a_body_read_back_is_its_value(value, standard):
    assert read_json(write_json(value, standard=standard)) == as_read(value, standard)


@given(values)
def test_the_tolerant_reader_reads_standard_json_as_others_do(value):
    body = write_json(value, standard=True)
    assert json_dialect._Reader(body.decode()).read() == json.loads(body)


def test_a_number_beyond_64_bits_is_read_as_a_float_in_both_dialects():
    for digits in (b"1" * 21, b"9" * 300, b"-" + b"7" * 40):
        assert read_json(b"[" + digits + b"]") == [float(digits)]
        assert read_json(b"{1:" + digits + b"}") == {"1": float(digits)}


def test_white_space_may_be_anywhere():
    body = b' { 0 : [ 1 , 2 ] , { "a" : 1 } : { } , -1.5e3 : [ ] , true : null }\n'
    assert read_json(body) == {
        "0": [1, 2],
        JsonKey.of({"a": 1}): {},
        "-1.5e3": [],
        "true": None,
    }


# --- damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b" ", b"{", b"}", b"[1,]", b"{1}", b"{1:}", b"{1:2", b"{1:2,}", b"{:1}", b"{1:2}3"),
        *(
            b"{[1]:2}",
            b"{{{1:2}:3}:4}",
            b"{a:1}",
            b"{'a':1}",
            b"nul",
            b"01",
            b"{01:1}",
            b"-",
            b"1.",
        ),
        *(b'"', b'"\\x"', b'"\n"', b'{1:"\\ud800"}', b"\xff", b"{1:\xff}", b"+1", b"NaN", b".5"),
        *(
            b"{1:" + b"9" * 5000 + b"}",
            b"{1:1e999}",
            b"9" * 5000,
            b"\xef\xbb\xbf{}",
            "{١:1}".encode(),
        ),
    ],
)
def test_damage_is_malformed(body):
    with pytest.raises(Malformed):
        read_json(body)


@pytest.mark.parametrize(
    ("opening", "closing"),
    [(b"[", b"]"), (b'{"a":', b"}"), (b"{1:", b"}"), (b"[1,", b"]")],
)
def test_the_depth_is_bounded(opening, closing):
    limit = json_dialect.DEPTH_MAX
    for depth in (limit, limit + 1, 900, 100_000):
        body = opening * depth + b"1" + closing * depth
        if depth == limit:
            read_json(body)
            continue
        with pytest.raises(Malformed, match="64 objects and arrays"):
            read_json(body)


def test_keys_within_keys_are_bounded_too():
    with pytest.raises(Malformed, match="64 objects and arrays"):
        read_json(b"{" * 100_000)


def test_the_size_is_bounded():
    assert read_json(b"[1]", max_bytes=3) == [1]
    with pytest.raises(Malformed, match="up to 2 bytes"):
        read_json(b"[1]", max_bytes=2)


@given(st.binary(max_size=40) | st.text("{}[]:,\"\\u0d8 1-.e'truefalsn", max_size=40))
def test_any_bytes_are_a_body_or_malformed(data):
    try:
        read_json(data if isinstance(data, bytes) else data.encode())
    except Malformed:
        pass


@given(values, st.integers(0, 200), st.integers(1, 255))
def test_a_flipped_byte_raises_no_other_error(value, at, flip):
    body = bytearray(write_json(value, standard=False))
    body[at % len(body)] ^= flip
    try:
        read_json(bytes(body))
    except Malformed:
        pass
