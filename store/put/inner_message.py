"""Messages that the store itself puts: any topic and queue, any field. A bundle is stored whole or not at all.

Delay levels, timers, transactions and retries move a message and note the move in the same append. A crash therefore
never delivers the message twice or not at all. In RocketMQ a crash can do both.
Source: MessageExtBrokerInner, RocketMQ 5.3.3.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from raymq.store.base import format as fmt
from raymq.store.records import properties as props
from raymq.store.records import record
from raymq.store.records.producer_stamp import STAMP_NAME, without_stamp
from raymq.store.state.shard_state import INTERNAL_QUEUE, INTERNAL_TOPIC, PROGRESS

_LONG = struct.Struct(">q")
_END_DIGITS = 20


@dataclass(frozen=True)
class InnerMessage:
    """One message to put, as the log will have it. Times in ms."""

    topic: str
    queue_id: int
    body: bytes
    properties: Mapping[str, str] = field(default_factory=dict)
    flag: int = 0
    sys_flag: int = 0
    born_time_ms: int = 0
    #: (IP, port); None: the store's own
    born_host: tuple[str, int] | None = None
    reconsume_times: int = 0
    prepared_transaction_offset: int = 0
    #: instead of `properties`: the encoded string, stored as it is but for a producer's stamp
    properties_text: bytes | None = None


class ServiceProgress(NamedTuple):
    """The progress of one service of the store, a part of the shard's state (`ShardState.progress`)."""

    service: str
    #: key -> any JSON value; None removes the key
    values: Mapping[str, Any]


class EncodedInner:
    """A message encoded but for the fields that need the put lock: queue offset, physical offset, store time."""

    def __init__(self, message: InnerMessage, *, store_host: tuple[str, int]) -> None:
        """Raises: Rejected when properties or topic are too long, or a property has a separator in it."""
        self.topic, self.queue_id = message.topic, message.queue_id
        if message.properties_text is not None:
            self.properties = without_stamp(message.properties_text)
        else:
            # A producer's stamp counts only in the producer's own record: a moved message is not a row of its sequence.
            self.properties = props.encode(
                {name: value for name, value in message.properties.items() if name != STAMP_NAME}
            )

        #: False: prepared or rolled back; it belongs to no queue and its queue offset is 0
        self.queued = message.sys_flag & fmt.SYS_TRANSACTION_MASK not in fmt.SYS_UNQUEUED

        born_host = message.born_host or store_host
        self._data = bytearray(
            record.encode_record(
                topic=message.topic,
                body=message.body,
                properties=self.properties,
                queue_id=message.queue_id,
                flag=message.flag,
                sys_flag=message.sys_flag,
                born_time_ms=message.born_time_ms,
                born_host=born_host,
                store_host=store_host,
                reconsume_times=message.reconsume_times,
                prepared_transaction_offset=message.prepared_transaction_offset,
            )
        )
        self._store_time_at = fmt.BORN_HOST_AT + len(fmt.pack_host(*born_host))

    @property
    def size(self) -> int:
        """Bytes of the record."""
        return len(self._data)

    def record(
        self, *, queue_offset: int, physical_offset: int, store_time_ms: int
    ) -> bytes | bytearray:
        """The record."""
        _LONG.pack_into(self._data, fmt.QUEUE_OFFSET_AT, queue_offset if self.queued else 0)
        _LONG.pack_into(self._data, fmt.PHYSICAL_OFFSET_AT, physical_offset)
        _LONG.pack_into(self._data, self._store_time_at, store_time_ms)
        return self._data


class ProgressRecord:
    """The record that a bundle begins with. It says where the bundle ends: an incomplete one does not count."""

    def __init__(
        self, progress: ServiceProgress, *, now_ms: int, store_host: tuple[str, int]
    ) -> None:
        """Args: `now_ms` is its born time."""
        text = json.dumps(
            {"service": progress.service, "set": dict(progress.values)}, separators=(",", ":")
        )
        # The end's place is at the end of the body, of fixed width.
        self._head = text[:-1] + ',"end":"'
        self._now_ms, self._store_host = now_ms, store_host
        #: bytes of the record, wherever the bundle ends
        self.size = self.ending_at(0)[0].size

    def ending_at(self, end: int) -> tuple[EncodedInner, bytes]:
        """The record and its body for a bundle that ends at a physical offset."""
        body = f'{self._head}{end:0{_END_DIGITS}d}"}}'.encode()
        message = InnerMessage(
            INTERNAL_TOPIC, INTERNAL_QUEUE, body, {props.TAGS: PROGRESS}, born_time_ms=self._now_ms
        )
        return EncodedInner(message, store_host=self._store_host), body
