"""One message of every kind that a store can hold, in a form that RocketMQ and RayMQ can both put.

A kind is a dict in the words of the oracle (tests/interop/java/StoreWriter.java).
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

Kind = dict[str, Any]

TOPIC = "TopicTest"
#: 151 characters: its records are of version 2
LONG_TOPIC = "%RETRY%" + "g" * 144
BORN_MS = 1_700_000_000_000
IPV4 = ("127.0.0.1", 10911)
IPV6 = ("2001:db8::2", 10911)
PROPERTIES_MAX_BYTES = 32_767

COMPRESSED_ZLIB = 0x301
MULTI_TAGS = 0x2
PREPARED, COMMIT, ROLLBACK = 0x4, 0x8, 0xC


def kind(
    body: bytes,
    *,
    topic: str = TOPIC,
    queue: int = 0,
    properties: Mapping[str, str] | None = None,
    **others: Any,
) -> Kind:
    """A message; `others` are flag, sysFlag, bornHost, storeHost, reconsume, prepared, batchProperties, dueInMs."""
    made = {
        "topic": topic,
        "queueId": queue,
        "body": base64.b64encode(body).decode(),
        "properties": dict(properties or {}),
        "born": BORN_MS,
        "bornHost": IPV4,
        "storeHost": IPV4,
    }
    return {**made, **others}


def batch(bodies: Sequence[bytes], **options: Any) -> Kind:
    """Messages that are put at once and stand together."""
    made = kind(b"", **options)
    del made["body"]
    return {**made, "batch": [base64.b64encode(body).decode() for body in bodies]}


def half(body: bytes, *, now_ms: int) -> Kind:
    """The first half of a transaction, as a producer sends it, to be prepared by a broker."""
    properties = {
        "PGROUP": "g",
        "UNIQ_KEY": f"ID{body.decode()}",
        "TAGS": "TagA",
        "TRAN_MSG": "true",
    }
    made = kind(body, queue=1, properties=properties, flag=3)
    return {**made, "action": "prepare", "born": now_ms}


def limit_properties(reserved_bytes: int = 0) -> dict[str, str]:
    """Properties whose string is as long as its length field allows, less what the store adds itself."""
    return {"long": "v" * (PROPERTIES_MAX_BYTES - len("long\x01\x02") - reserved_bytes)}


def ordinary() -> list[Kind]:
    """A message as every producer sends it."""
    return [
        kind(b"Hello RocketMQ"),
        kind(b""),
        kind(b"tagged", properties={"TAGS": "TagA"}, queue=1),
        # Java's hash of it is the smallest number there is. The next two have the same hash.
        kind(b"tagged", properties={"TAGS": "polygenelubricants"}),
        kind(b"tagged", properties={"TAGS": "Aa"}),
        kind(b"tagged", properties={"TAGS": "BB"}),
        kind(b"tagged", properties={"TAGS": "\u6807\u7b7e \U0001f600"}),
        kind(
            b"keyed", properties={"KEYS": "k1 k2", "UNIQ_KEY": "7F000001000100000000000000000001"}
        ),
        kind(b"keyed", properties={"KEYS": "k2  k3", "TAGS": "TagB"}, queue=2),
        kind(b"keys of one hash", properties={"KEYS": "Aa"}),
        kind(b"keys of one hash", properties={"KEYS": "BB"}),
        kind(b"named", properties={"a": "1", "b": "\u00fc", "c": "x" * 300}),
        kind(bytes(range(256)) * 800, properties={"TAGS": "large"}, queue=1),
        kind(b"far", topic=LONG_TOPIC, properties={"KEYS": "far"}),
        batch([b"one", b"", b"three"], queue=3, properties={"TAGS": "TagX", "KEYS": "batch"}),
    ]


def special() -> list[Kind]:
    """Fields that only brokers write, or only some clients."""
    return [
        kind(b"six", bornHost=("2001:db8::1", 54321), storeHost=IPV6, properties={"KEYS": "k6"}),
        kind(b"born six", bornHost=("2001:db8::1", 54321)),
        kind(b"stored six", storeHost=IPV6, topic=LONG_TOPIC),
        kind(b"flag", flag=7, reconsume=3, sysFlag=MULTI_TAGS, properties={"TAGS": "a||b"}),
        kind(zlib.compress(b"z" * 5000), sysFlag=COMPRESSED_ZLIB, properties={"KEYS": "zip"}),
        kind(b"limit", properties=limit_properties()),
        kind(b"half", sysFlag=PREPARED, properties={"KEYS": "t1", "PGROUP": "g"}),
        kind(b"half", sysFlag=COMMIT, prepared=12_345, properties={"KEYS": "t1"}),
        kind(b"half", sysFlag=ROLLBACK, prepared=12_345, properties={"KEYS": "t1"}),
        kind(b"half", topic="RMQ_SYS_TRANS_HALF_TOPIC", properties={"TRAN_MSG": "true"}),
        kind(b"0,1,", topic="RMQ_SYS_TRANS_OP_HALF_TOPIC", properties={"TAGS": "d"}),
        kind(b"dead", topic="%DLQ%group", reconsume=16, properties={"RETRY_TOPIC": TOPIC}),
    ]


def doubled() -> list[Kind]:
    """A batch with properties of its own, which RocketMQ writes after those of each message: the last ones count."""
    twice = {"TAGS": "outer", "KEYS": "outer"}
    return [batch([b"1", b"2"], properties={"TAGS": "in", "KEYS": "in"}, batchProperties=twice)]


def rolling(count: int = 40) -> list[Kind]:
    """Enough to end a commit log file of 1 MiB twice, and several consume queue files of 100 units."""
    rows = [
        kind(bytes([i]) * 60_000, topic="RollT", properties={"KEYS": f"r{i}"}) for i in range(count)
    ]
    small = [b"%d" % i for i in range(250)]
    return [*rows, batch(small, topic="RollT", queue=1)]


def delayed() -> list[Kind]:
    """Messages for later, by level: brokers rewrite them."""
    return [
        kind(b"level 3", properties={"DELAY": "3", "TAGS": "TagA", "KEYS": "late"}, queue=1),
        kind(b"level 18", properties={"DELAY": "18"}),
        kind(b"beyond", properties={"DELAY": "99"}),
    ]


def timed(now_ms: int) -> list[Kind]:
    """Messages for any time: brokers with timers rewrite them. The last one is late and goes to its topic at once."""
    day = 86_400_000
    return [
        kind(b"tomorrow", properties={"TIMER_DELIVER_MS": str(now_ms + day), "KEYS": "timed"}),
        kind(b"full second", properties={"TIMER_DELIVER_MS": str(now_ms // 1000 * 1000 + day)}),
        kind(b"yesterday", properties={"TIMER_DELIVER_MS": str(now_ms - day)}),
    ]
