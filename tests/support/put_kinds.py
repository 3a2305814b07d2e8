"""Puts the kinds of message_kinds into a store of ours: as a producer does, else as the store's own services do."""

from __future__ import annotations

import base64
from collections.abc import Iterable

import pyarrow as pa

from raymq.store.base import format as fmt
from raymq.store.delay.delay_hook import transform
from raymq.store.engine.message_store import MessageStore
from raymq.store.put.inner_message import InnerMessage
from raymq.store.records import record
from raymq.store.records.properties import encode as encode_properties
from raymq.store.records.requests import PutRequest
from tests.support.message_kinds import BORN_MS, IPV4, Kind

QUEUES = 4


def put_all(store: MessageStore, kinds: Iterable[Kind], *, producer_id: int | None = None) -> None:
    """Put each kind. A producer's stamps go into those that are ordinary puts."""
    sequences: dict[tuple[str, int], int] = {}
    for kind in kinds:
        if is_ordinary(kind):
            if kind["topic"] not in store.state.topics:
                store.topics.create(kind["topic"], QUEUES, [0])
            put(store, kind, producer_id, sequences)
        else:
            put_inner(store, kind)


def is_ordinary(kind: Kind) -> bool:
    """Whether it is what a producer may send to us."""
    brokers_own = kind.keys() & {"reconsume", "prepared", "dueInMs"}
    bits = kind.get("sysFlag", 0) & ~fmt.SYS_OF_SENDER
    names = kind["properties"].keys() & {"DELAY", "TIMER_DELIVER_MS", "long"}
    topic = kind["topic"].startswith(("RMQ_SYS", "%DLQ%"))
    return not (brokers_own or names or topic or bits)


def put(
    store: MessageStore, kind: Kind, producer_id: int | None, sequences: dict[tuple[str, int], int]
) -> None:
    """As a producer does."""
    bodies = [base64.b64decode(body) for body in kind.get("batch", [kind.get("body")])]
    properties = dict(kind["properties"])
    tag = properties.pop("TAGS", None)
    text = encode_properties(properties) if properties else None
    count = len(bodies)

    rows = pa.record_batch(
        [
            pa.array(bodies, pa.binary()),
            pa.array([tag] * count, pa.string()),
            pa.array([text] * count, pa.binary()),
            pa.array([BORN_MS] * count, pa.int64()),
        ],
        schema=record.PUT_SCHEMA,
    )
    host = None if kind["bornHost"] == IPV4 else fmt.pack_host(*kind["bornHost"])
    more = (kind.get("flag"), kind.get("sysFlag"), host)
    for field, value in zip(record.MORE_SCHEMA, more, strict=True):
        if value is not None:
            rows = rows.append_column(field, pa.array([value] * count, field.type))

    key = (kind["topic"], kind["queueId"])
    first = sequences.get(key, 0)
    store.put(PutRequest(*key, rows, producer_id, 0, first, "quorum"))
    sequences[key] = first + count


def put_inner(store: MessageStore, kind: Kind) -> None:
    """Put as the store's own services do, with the store's own host. A message for later goes to the timer topic."""
    properties = dict(kind["properties"])
    if "dueInMs" in kind:
        properties["TIMER_DELIVER_MS"] = str(store.clock.now_ms() + kind["dueInMs"])

    message = InnerMessage(
        kind["topic"],
        kind["queueId"],
        base64.b64decode(kind["body"]),
        properties,
        flag=kind.get("flag", 0),
        sys_flag=kind.get("sysFlag", 0),
        born_time_ms=kind["born"],
        born_host=tuple(kind["bornHost"]),
        reconsume_times=kind.get("reconsume", 0),
        prepared_transaction_offset=kind.get("prepared", 0),
    )

    store.put_inner([transform(message, store.clock.now_ms(), store.config)])
