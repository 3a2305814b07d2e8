"""The codecs beside RocketMQ 5.3.3's own classes: frames, bodies, codes, batches, signatures."""

from __future__ import annotations

import os
from base64 import b64decode, b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raymq.client.messages.compressed_body import inflate
from raymq.doors.rocketmq import codes
from raymq.doors.rocketmq.codes import RequestCode, ResponseCode
from raymq.doors.rocketmq.command import (
    FLAG_ONE_WAY,
    HEAD_BYTES,
    FrameHead,
    RemotingCommand,
    answer,
    decode_header,
    encode,
)
from raymq.doors.rocketmq.json_dialect import JsonKey, object_key, read_json, write_json
from raymq.doors.rocketmq.message_batch import decode_batch, encode_batch
from raymq.doors.rocketmq.property_text import split
from raymq.doors.rocketmq.signature import sign
from raymq.store.base.format import SYS_COMPRESSED
from raymq.store.records.properties import decode as decode_properties
from tests.support.oracle import Missing, Oracle, prepare

pytestmark = pytest.mark.interop

SECRET = "secret ö"
SEND = RemotingCommand(
    RequestCode.SEND_MESSAGE_V2,
    -5,
    FLAG_ONE_WAY,
    {"a": "group", "b": "T", "e": "3", "i": "KEYS\1kö\2WAIT\1true\2TAGS\1中\2", "n": "raymq-0"},
    bytes(range(256)),
    None,
    401,
    "JAVA",
)
COMMANDS = [
    SEND,
    SEND._replace(fields={"a": "1"}, body=b"", remark="why: \0\x7f\u2028 \U0001f600 中"),
    SEND._replace(fields={}, language="GO", version=0, flag=0, opaque=(1 << 31) - 1),
    answer(SEND, ResponseCode.SUCCESS, {"msgId": "7F", "queueId": "0", "queueOffset": "9"}),
    answer(SEND, ResponseCode.TOPIC_NOT_EXIST, remark="create it"),
]
BOTH_TYPES = [each._replace(header_type=kind) for each in COMMANDS for kind in ("json", "binary")]

ROUTE = {
    "brokerDatas": [
        {
            "brokerAddrs": {0: "10.0.0.1:10911", 1: "10.0.0.2:10911", 2: "h:1", 10: "h:2"},
            "brokerName": f"raymq-{shard}",
            "cluster": "ä/b",
            "enableActingMaster": False,
        }
        for shard in range(2)
    ],
    "filterServerTable": {},
    "queueDatas": [
        {
            "brokerName": f"raymq-{shard}",
            "perm": 6,
            "readQueueNums": 4,
            "topicSysFlag": 0,
            "writeQueueNums": 4,
        }
        for shard in range(2)
    ],
}
QUEUES = [JsonKey.of({"brokerName": "raymq-0", "queueId": n, "topic": "T"}) for n in range(2)]
OFFSETS = {"lastUpdateTimestamp": 7, "maxOffset": 5, "minOffset": 1}
#: with one queue each: the order of more is that of Java's hash table
BODIES = {
    "TopicRouteData": ROUTE,
    "TopicStatsTable": {"offsetTable": {QUEUES[0]: OFFSETS}, "topicPutTps": 0.0},
    "ResetOffsetBody": {"offsetTable": {QUEUES[1]: 1 << 40}},
}


@pytest.fixture(scope="module")
def java(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oracle]:
    """RocketMQ's classes in a process. Left out where it cannot run, unless RAYMQ_INTEROP requires it."""
    cache: Any = getattr(pytestconfig, "cache", None)
    place = Path(cache.mkdir("oracle")) if cache else tmp_path_factory.mktemp("oracle")
    try:
        program = prepare(place)
    except Missing as error:
        if os.environ.get("RAYMQ_INTEROP") == "required":
            pytest.fail(str(error), pytrace=False)
        pytest.skip(str(error))
    oracle = Oracle(program, tmp_path_factory.mktemp("remoting") / "home")
    yield oracle
    oracle.close()


def ask(java: Oracle, what: str, **more: Any) -> list[dict[str, Any]]:
    return java.ask({"do": "remoting", "what": what, **more})


def text(data: bytes | memoryview) -> str:
    return b64encode(data).decode()


def decode(frame: bytes) -> RemotingCommand:
    head = FrameHead.parse(frame)
    body_at = HEAD_BYTES + head.header_bytes
    return decode_header(frame[HEAD_BYTES:body_at], head.header_type)._replace(body=frame[body_at:])


def test_our_codes_are_those_of_rocketmq(java):
    (found,) = ask(java, "codes")
    for kind in (codes.RequestCode, codes.ResponseCode, codes.Language, codes.MQVersion):
        known = found[kind.__name__]
        assert {each.name: known.get(each.name) for each in kind} == {
            each.name: each.value for each in kind
        }
    assert len(codes.Language) == len(found["Language"])


def test_rocketmq_reads_our_frames(java):
    frames = [text(encode(each)) for each in BOTH_TYPES]
    for command, line in zip(BOTH_TYPES, ask(java, "decode", frames=frames), strict=True):
        assert line == {
            "kind": "command",
            "code": command.code,
            "opaque": command.opaque,
            "flag": command.flag,
            "version": command.version,
            "language": command.language,
            "remark": command.remark,
            # Of a binary header without fields Java makes no map.
            "fields": command.fields or ({} if command.header_type == "json" else None),
            "body": text(command.body),
            "type": command.header_type,
            "response": command.is_response,
            "oneWay": command.is_one_way,
        }


def test_we_read_and_sign_the_frames_of_rocketmq(java):
    lines = ask(
        java,
        "encode",
        commands=[
            {**each._asdict(), "body": text(each.body), "type": each.header_type, "secret": SECRET}
            for each in BOTH_TYPES
        ],
    )
    for command, line in zip(BOTH_TYPES, lines, strict=True):
        frame = b64decode(line["frame"])
        assert decode(frame) == command
        assert sign(command, SECRET.encode()) == line["signature"]
        # Java's hash table chooses the order of several fields, orjson writes escapes in small letters.
        if len(command.fields) < 2 and not command.remark:
            assert encode(command) == frame


def test_bodies_are_byte_for_byte_those_of_rocketmq(java):
    for standard in (False, True):
        bodies = [
            {"type": name, "body": text(write_json(value, standard=standard))}
            for name, value in BODIES.items()
        ]
        lines = ask(java, "bodies", bodies=bodies)
        for value, line in zip(BODIES.values(), lines, strict=True):
            assert b64decode(line["dialect"]) == write_json(value, standard=False)
            assert b64decode(line["standard"]) == write_json(value, standard=True)


def test_we_read_the_objects_that_rocketmq_has_as_keys(java):
    body = write_json(BODIES["ResetOffsetBody"], standard=False)
    (line,) = ask(java, "bodies", bodies=[{"type": "ResetOffsetBody", "body": text(body)}])
    for dialect in ("dialect", "standard"):
        table = read_json(b64decode(line[dialect]))["offsetTable"]
        assert {object_key(key): int(value) for key, value in table.items()} == {QUEUES[1]: 1 << 40}


def test_texts_and_numbers_are_written_as_by_rocketmq(java):
    characters = "".join(map(chr, range(0x400))) + "\u2027\u2028\u2029\u202a\ufeff\uffff\U0001f600"
    values = [characters, {"n": [0, -1, 1 << 31, (1 << 53) - 1, 1 << 53, -(1 << 53), 1.5, True]}]
    for value, line in zip(values, ask(java, "texts", texts=values), strict=True):
        assert b64decode(line["dialect"]) == write_json(value, standard=False)
        assert b64decode(line["standard"]) == write_json(value, standard=True)


def test_batches_are_those_of_rocketmq(java):
    columns = ([5, -1], [b"ab", b"\0"], [b"KEYS\1k\2TAGS\1a\2", "KEYS\1中\2".encode()])
    body = encode_batch(*columns)
    *messages, made = ask(java, "batch", body=text(body))
    assert b64decode(made["body"]) == body
    assert decode_batch(b64decode(made["body"])) == columns
    assert [line["flag"] for line in messages] == columns[0]
    assert [line["properties"] for line in messages] == list(map(decode_properties, columns[2]))


def test_we_inflate_what_clients_compress(java):
    body = b"hello, \0 " * 1000
    lines = ask(java, "compress", body=text(body))
    assert [line["type"] for line in lines] == ["LZ4", "ZSTD", "ZLIB"]
    for line in lines:
        packed = b64decode(line["body"])
        assert len(packed) < len(body)
        assert inflate(packed, SYS_COMPRESSED | line["flag"], len(body)) == body


def test_properties_are_split_as_rocketmq_reads_them(java):
    texts = [
        "KEYS\1k\2WAIT\1false\2TAGS\1a\2",
        "TAGS\1a\2TAGS\1b",
        "TAGS\1\2x\2\1y\2\2KEYS\1k\1l\2WAIT\1TRUE",
        "TAGS\1ä\2MYTAGS\1b\2",
    ]
    for sent, line in zip(texts, ask(java, "properties", texts=texts), strict=True):
        found, parts = line["found"], split(sent)
        assert parts.tag == found.pop("TAGS", None)
        assert parts.wait_store_ok == (found.pop("WAIT", "true").lower() == "true")
        assert decode_properties(parts.properties or b"") == found
