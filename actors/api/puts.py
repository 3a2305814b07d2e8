"""Puts and their acks as a client and a shard exchange them, whatever carries them.

    message  {"id","topic","queue","pid","epoch","seq","acks","read"} and PUT_SCHEMA. Ids grow. "read" is the id of the
             last ack that the client has read. Without it acks may come a little later.
             Columns that few puts have travel in the metadata: protocol/column_puts.py
             Small puts travel as bytes without an Arrow batch instead, many in one message: protocol/small_puts.py
    acks     {"acks": [{"id","first_offset","count","duplicates","store_time_ms",...} or {"id","error"}, ...]}, in the
             order of the puts; sometimes with "window": how many unanswered bytes the client may send

A new field of a put that is one for the batch is added here, to `PutRequest` and to `put_request`, which checks it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from raymq.actors.protocol import flight_messages
from raymq.actors.protocol.column_puts import unpack_columns, unpack_meta
from raymq.actors.protocol.small_puts import unpack_puts
from raymq.store.base.errors import Bug, RayMQError, Rejected, to_wire
from raymq.store.config.promise import ACKS
from raymq.store.records.record import SmallBatch
from raymq.store.records.requests import PutOutcome, PutRequest

from .call_arguments import check_integer, check_name, wrong_value
from .shard_api import PutTicket, ShardBackend

#: the ack of a stored put, filled with its id and its PutOutcome: as JSON makes it, in a third of the time
_ACK_TEMPLATE = (
    b'{"id":%d,' + b",".join(b'"%b":%%d' % field.encode() for field in PutOutcome._fields) + b"}"
)


class ReceivedPuts(NamedTuple):
    """The puts of one message, each as a request or the error that refuses it."""

    #: of the puts, or [0] if they cannot be read
    ids: list[int]
    requests: Sequence[PutRequest | RayMQError]
    #: id of the last ack that the client has read
    read: int

    @property
    def producer_waits(self) -> bool:
        """Whether the client has read all earlier acks, and so may be waiting for these."""
        return self.read == self.ids[0] - 1


def unpack_message(
    metadata: bytes,
    columns: pa.RecordBatch | pa.Buffer | None,
    born_host: tuple[str, int] | None = None,
) -> ReceivedPuts:
    """The puts of a message, all of them refused if one is malformed. Args: `born_host`: as of `PutRequest`."""
    ids, read = [0], -1
    try:
        puts: Sequence[tuple[dict[str, Any], Any]] | None
        puts = unpack_puts(metadata) if columns is None else None
        if puts is None:
            meta, rest = unpack_meta(metadata)
            ids = [int(meta["id"])]
            puts = [(meta, unpack_columns(meta, columns, rest))]
        else:
            ids = [meta["id"] for meta, _ in puts]
        read = int(puts[0][0].get("read", -1))
        requests = [put_request(meta, batch, born_host) for meta, batch in puts]
        return ReceivedPuts(ids, requests, read)
    except (KeyError, TypeError, ValueError, pa.ArrowException) as error:
        bad = f"bad put metadata: {error!r}"
        refusal = Rejected(bad, field="metadata", limit="raymq.actors.protocol")
        return ReceivedPuts(ids, [refusal] * len(ids), read)
    except Exception as error:
        return ReceivedPuts(ids, [_as_answer(error)] * len(ids), read)


def put_request(
    meta: dict[str, Any],
    batch: pa.RecordBatch | SmallBatch,
    born_host: tuple[str, int] | None = None,
) -> PutRequest:
    """A put as it came over the network. Args: `meta`: its metadata. `born_host`: as of `PutRequest`.

    Raises: Rejected; KeyError, TypeError, ValueError for other metadata.
    """
    if isinstance(batch, SmallBatch):
        # The fields of `unpack_puts` have their types.
        return PutRequest(
            meta["topic"],
            meta["queue"],
            batch,
            meta["pid"],
            meta["epoch"],
            meta["seq"],
            meta["acks"],
            born_host=born_host,
        )

    acks = meta.get("acks", "quorum")
    if acks not in ACKS:
        raise wrong_value("acks", acks, f"use {' or '.join(map(repr, ACKS))}", ", ".join(ACKS))

    producer_id, epoch, first_sequence = meta.get("pid"), meta.get("epoch", 0), meta.get("seq", 0)
    # Ranges are checked with the batch, under the same names. To a producer "sequence" would mean a gap.
    numbers = {"queue_id": meta["queue"], "epoch": epoch, "first_sequence": first_sequence}
    for field, value in numbers.items():
        if type(value) is not int:
            check_integer(field, value)
    if producer_id is not None and type(producer_id) is not int:
        check_integer("producer_id", producer_id)

    topic = check_name("topic", meta["topic"])
    return PutRequest(
        topic,
        meta["queue"],
        batch,
        producer_id,
        epoch,
        first_sequence,
        acks,
        born_host=born_host,
    )


def put_all(
    backend: ShardBackend,
    requests: Sequence[PutRequest | RayMQError],
    notify: Callable[[], None] | None = None,
    *,
    producer_waits: bool,
) -> list[PutTicket | RayMQError]:
    """Put requests together, in their order. The answer to an error is itself. Args: as of `ShardBackend.put`."""
    sound = [each for each in requests if isinstance(each, PutRequest)]
    if not sound:
        return [each for each in requests if isinstance(each, RayMQError)]
    try:
        results = iter(backend.put(sound, notify=notify, producer_waits=producer_waits))
    except Exception as error:
        results = iter([_as_answer(error)] * len(sound))
    return [each if isinstance(each, RayMQError) else next(results) for each in requests]


def pack_acks(
    answers: Iterable[tuple[int, PutTicket | RayMQError]], window: int | None = None
) -> bytes:
    """Acks of the puts with these ids as one message. Waits until they are finished.

    Args: `window`: how many unanswered bytes the client may send; None: as many as before.
    """
    acks = b",".join([_pack_ack(number, result) for number, result in answers])
    return b'{"acks":[%b]%b}' % (acks, b"" if window is None else b',"window":%d' % window)


def unpack_acks(message: object) -> tuple[list[dict[str, Any]], int | None]:
    """The inverse of `pack_acks`: the acks and the window. Args: `message`: a buffer."""
    fields = flight_messages.unpack(message)
    return fields["acks"], fields.get("window")


def _pack_ack(number: int, result: PutTicket | RayMQError) -> bytes:
    try:
        if isinstance(result, RayMQError):
            raise result
        return _ACK_TEMPLATE % (number, *result.wait())
    except Exception as error:
        return flight_messages.pack({"id": number, "error": to_wire(_as_answer(error))})


def _as_answer(error: Exception) -> RayMQError:
    """An error as the answer of a put: without one the producer would wait for it and all later ones without end."""
    return error if isinstance(error, RayMQError) else Bug(f"put: {error!r}")
