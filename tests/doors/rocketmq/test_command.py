"""Frames of the remoting protocol: golden bytes, round trips, and bytes that no client sends."""

from __future__ import annotations

import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymq.doors.rocketmq.codes import Language, MQVersion, RequestCode, ResponseCode
from raymq.doors.rocketmq.command import (
    FLAG_ONE_WAY,
    FLAG_RESPONSE,
    FRAME_BYTES_MAX,
    HEAD_BYTES,
    VERSION,
    FrameHead,
    RemotingCommand,
    answer,
    decode_header,
    encode,
)
from raymq.doors.rocketmq.malformed import Malformed

ROUTE = RemotingCommand(
    RequestCode.GET_ROUTEINFO_BY_TOPIC, 7, 0, {"topic": "T"}, b"", None, 479, "JAVA", "json"
)
#: what Java writes for ROUTE, but for the length
ROUTE_JSON = (
    b'{"code":105,"extFields":{"topic":"T"},"flag":0,"language":"JAVA","opaque":7,'
    b'"serializeTypeCurrentRPC":"JSON","version":479}'
)
ROUTE_BINARY = bytes.fromhex(
    "0069 00 01df 00000007 00000000 00000000"  # code, language, version, opaque, flag, no remark
    "0000000c 0005 746f706963 00000001 54"  # 12 bytes of fields: topic = T
)


def decode(frame: bytes) -> RemotingCommand:
    """The command of one whole frame, as a connection reads it."""
    head = FrameHead.parse(frame)
    body_at = HEAD_BYTES + head.header_bytes
    assert len(frame) == body_at + head.body_bytes
    found = decode_header(frame[HEAD_BYTES:body_at], head.header_type)
    return found._replace(body=frame[body_at:])


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
int32s = st.integers(-(1 << 31), (1 << 31) - 1)
int16s = st.integers(-(1 << 15), (1 << 15) - 1)


def commands(header_type, codes):
    return st.builds(
        RemotingCommand,
        code=codes,
        opaque=int32s,
        flag=int32s,
        fields=st.dictionaries(texts, texts, max_size=8),
        body=st.binary(max_size=50),
        remark=st.none() | texts.filter(bool),
        version=int16s,
        language=st.sampled_from([language.name for language in Language]) | st.just(77),
        header_type=st.just(header_type),
    )


def test_a_request_in_json_has_the_bytes_that_java_writes():
    length = 4 + len(ROUTE_JSON)
    assert encode(ROUTE) == struct.pack(">iI", length, len(ROUTE_JSON)) + ROUTE_JSON
    assert decode(encode(ROUTE)) == ROUTE


def test_a_request_in_binary_has_the_bytes_that_java_writes():
    command = ROUTE._replace(header_type="binary", body=b"abc")
    length = 4 + len(ROUTE_BINARY) + 3
    head = struct.pack(">iI", length, 1 << 24 | len(ROUTE_BINARY))
    assert encode(command) == head + ROUTE_BINARY + b"abc"
    assert decode(encode(command)) == command


@given(commands("json", int32s) | commands("binary", int16s))
def test_a_frame_read_back_is_the_command(command):
    assert decode(encode(command)) == command


def test_a_body_may_be_a_view_of_a_buffer():
    view = memoryview(b"..body..")[2:6]
    assert decode(encode(ROUTE._replace(body=view))).body == b"body"


def test_a_header_may_be_a_view_of_a_buffer():
    assert decode_header(memoryview(ROUTE_JSON), "json") == ROUTE
    assert decode_header(memoryview(ROUTE_BINARY), "binary").fields == {"topic": "T"}


def test_numbers_and_truth_values_of_cpp_clients_become_text():
    fields = {"queueId": 3, "offset": -(1 << 40), "m": True, "u": False, "rate": 1.5, "none": None}
    header = json.dumps({"code": 11, "opaque": 1, "language": 1, "extFields": fields}).encode()
    command = decode_header(header, "json")
    assert command.fields == {
        "queueId": "3",
        "offset": "-1099511627776",
        "m": "true",
        "u": "false",
        "rate": "1.5",
    }
    assert (command.language, command.flag, command.version) == ("CPP", 0, 0)


def test_a_header_without_fields_has_none():
    command = decode_header(b'{"code":34,"opaque":0,"extFields":null}', "json")
    assert (command.fields, command.remark, command.language) == ({}, None, "OTHER")


def test_an_answer_repeats_the_opaque_and_the_type_of_the_header():
    for header_type in ("json", "binary"):
        request = ROUTE._replace(header_type=header_type, flag=FLAG_ONE_WAY)
        made = answer(request, ResponseCode.TOPIC_NOT_EXIST, remark="create it")
        found = decode(encode(made))
        assert (found.code, found.opaque, found.remark) == (17, 7, "create it")
        assert (found.header_type, found.flag) == (header_type, FLAG_RESPONSE)
        assert (found.version, found.language) == (VERSION, "PYTHON")
        assert found.is_response
        assert not found.is_one_way
    assert (request.is_response, request.is_one_way) == (False, True)


def test_an_answer_in_json_always_has_fields():
    # Java's processSendResponse reads the map without a check.
    assert b'"extFields":{}' in encode(answer(ROUTE, ResponseCode.SUCCESS))


def test_answers_carry_the_version_of_5_3_3():
    assert VERSION == 479 > MQVersion.V4_9_4 > MQVersion.V4_9_3 > MQVersion.V4_1_0


def test_the_enumerations_can_be_codes_of_both_types():
    made = answer(ROUTE, ResponseCode.FLOW_CONTROL)
    assert decode(encode(made)).code == 215
    assert decode(encode(made._replace(header_type="binary"))).code == 215


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"code": RequestCode.POP_MESSAGE}, "code 200050 does not fit"),
        ({"version": 1 << 15}, "version 32768 does not fit"),
        ({"opaque": 1 << 31}, "cannot hold"),
        ({"remark": "\ud800"}, "surrogates"),
        ({"fields": {"x" * 40_000: "1"}}, "32767"),
    ],
)
def test_what_a_binary_header_cannot_hold_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        encode(ROUTE._replace(header_type="binary", **change))


def test_what_json_cannot_hold_is_refused():
    with pytest.raises(ValueError, match="surrogates"):
        encode(ROUTE._replace(remark="\ud800"))


# --- damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "word", "words"),
    [
        (3, 0, "4 to 16777212 bytes, not 3"),
        (-1, 0, "not -1"),
        (FRAME_BYTES_MAX - 3, 0, "16777212 bytes, not 16777213"),
        (100, 2 << 24 | 10, "not 2"),
        (100, 0x47 << 24 | 10, "not 71"),
        (100_000, (64 << 10) + 1, "65536 bytes, not 65537"),
        (100, 97, "no room for a header of 97"),
    ],
)
def test_a_head_beyond_a_limit_is_refused_and_the_limit_named(length, word, words):
    with pytest.raises(Malformed, match=words):
        FrameHead.parse(struct.pack(">iI", length, word))


def test_a_head_at_its_limits_is_taken():
    data = struct.pack(">iI", 996, 992)
    head = FrameHead.parse(data, max_frame_bytes=1000, max_header_bytes=992)
    assert head == FrameHead(992, 0, "json")
    with pytest.raises(Malformed, match="4 to 995"):
        FrameHead.parse(data, max_frame_bytes=999)
    with pytest.raises(Malformed, match="up to 991"):
        FrameHead.parse(data, max_header_bytes=991)
    with pytest.raises(Malformed, match="8 bytes, not 7"):
        FrameHead.parse(data[:7])


@given(st.binary(min_size=8, max_size=8))
def test_any_eight_bytes_are_a_head_or_malformed(data):
    try:
        head = FrameHead.parse(data)
    except Malformed:
        return
    assert HEAD_BYTES + head.header_bytes + head.body_bytes <= FRAME_BYTES_MAX


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b"\xff",
        b'{"code":105}',
        b'{"opaque":1}',
        b'{"code":"105","opaque":1}',
        b'{"code":1.5,"opaque":1}',
        b'{"code":true,"opaque":1}',
        b'{"code":2147483648,"opaque":1}',
        b'{"code":1e999,"opaque":1}',
        b'{"code":1,"opaque":[1]}',
        b'{"code":1,"opaque":1,"flag":{}}',
        b'{"code":1,"opaque":1,"version":"479"}',
        b'{"code":1,"opaque":1,"remark":3}',
        b'{"code":1,"opaque":1,"language":[]}',
        b'{"code":1,"opaque":1,"extFields":[]}',
        b'{"code":1,"opaque":1,"extFields":{"a":[]}}',
        b'{"code":1,"opaque":1,"extFields":{"a":{}}}',
        b'{"code":1,"opaque":1,"remark":"\\ud800"}',
        b"[" * 100_000,
    ],
)
def test_a_header_in_json_with_a_wrong_type_is_refused(header):
    with pytest.raises(Malformed):
        decode_header(header, "json")


@pytest.mark.parametrize("length", range(len(ROUTE_BINARY)))
def test_a_cut_binary_header_is_refused(length):
    with pytest.raises(Malformed):
        decode_header(ROUTE_BINARY[:length], "binary")


@pytest.mark.parametrize(
    "header",
    [
        ROUTE_BINARY + b"\0",
        ROUTE_BINARY[:13] + struct.pack(">i", -1) + ROUTE_BINARY[17:],
        ROUTE_BINARY[:13] + struct.pack(">i", 1 << 30) + ROUTE_BINARY[17:],
        ROUTE_BINARY[:21] + struct.pack(">h", -5) + ROUTE_BINARY[23:],
        ROUTE_BINARY[:28] + struct.pack(">i", 2) + ROUTE_BINARY[32:],
        ROUTE_BINARY[:-1] + b"\xff",
    ],
)
def test_a_damaged_binary_header_is_refused(header):
    with pytest.raises(Malformed):
        decode_header(header, "binary")


@given(st.sampled_from(["json", "binary"]), st.binary(max_size=80))
def test_any_bytes_are_a_header_or_malformed(header_type, data):
    try:
        decode_header(data, header_type)
    except Malformed:
        pass


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
NAMES = ("code", "opaque", "flag", "version", "language", "remark", "extFields")


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(NAMES, values)))
def test_any_values_in_json_are_a_header_or_malformed(header):
    try:
        found = decode_header(json.dumps(header).encode(), "json")
    except Malformed:
        return
    assert all(type(text) is str for text in (*found.fields, *found.fields.values()))
    assert decode(encode(found))._replace(body=b"") == found


@given(commands("binary", int16s), st.integers(0, 60), st.integers(1, 255))
def test_a_flipped_byte_of_a_binary_header_never_raises_another_error(command, at, flip):
    frame = bytearray(encode(command))
    header = frame[HEAD_BYTES : len(frame) - len(command.body)]
    header[at % len(header)] ^= flip
    try:
        decode_header(header, "binary")
    except Malformed:
        pass
