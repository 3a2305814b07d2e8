"""One stored message with all its fields, for the store's services: they move single messages on, with changes.

Readers of many messages take columns (`Reader.fetch`, `record.decode`) instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from raymq.store import record
from raymq.store.errors import OffsetOutOfRange
from raymq.store.put.inner_message import InnerMessage
from raymq.store.records import properties as props

if TYPE_CHECKING:
    from raymq.store.message_store import MessageStore

#: read at a time
READ_BYTES = 1 << 20


class StoredMessage(NamedTuple):
    """A message as the log has it. Times in ms."""

    topic: str
    queue_id: int
    queue_offset: int
    physical_offset: int
    store_time_ms: int
    born_time_ms: int
    flag: int
    sys_flag: int
    reconsume_times: int
    prepared_transaction_offset: int
    born_host: tuple[str, int]
    store_host: tuple[str, int]
    body: bytes
    properties: Mapping[str, str]
    size: int

    def moved(
        self, topic: str, queue_id: int, properties: Mapping[str, str], **changes: Any
    ) -> InnerMessage:
        """The message to put into another queue: body, flags, born time and host stay but for `changes`."""
        kept = {
            "flag": self.flag,
            "sys_flag": self.sys_flag,
            "born_time_ms": self.born_time_ms,
            "born_host": self.born_host,
            "reconsume_times": self.reconsume_times,
            "prepared_transaction_offset": self.prepared_transaction_offset,
        }
        return InnerMessage(topic, queue_id, self.body, properties, **{**kept, **changes})


def read(
    store: MessageStore,
    topic: str,
    queue_id: int,
    offset: int,
    *,
    max_records: int,
    max_bytes: int = READ_BYTES,
) -> tuple[list[StoredMessage], int]:
    """Messages of one queue from `offset` on, up to the queue's end, and the offset after them.

    Raises: OffsetOutOfRange below the queue's first message; Corrupt where the first of them is damaged.
    """
    found = store.fetch_whole(topic, queue_id, offset, max_bytes=max_bytes, max_records=max_records)
    raws: list[bytes] = [] if found.records is None else found.records.to_pylist()
    messages: list[StoredMessage] = []
    if raws:
        sizes = [len(raw) for raw in raws]
        ends = np.cumsum(sizes)
        batch = record.decode(b"".join(raws), ends - sizes, np.array(sizes))
        for row, size in zip(batch.to_pylist(), sizes, strict=True):
            messages.append(_from_row(row, size))
    return messages, found.next_offset


def read_one(store: MessageStore, topic: str, queue_id: int, offset: int) -> StoredMessage | None:
    """The message at an offset of a queue; None where it is deleted or does not exist yet."""
    try:
        found, _ = read(store, topic, queue_id, offset, max_records=1)
    except OffsetOutOfRange:
        return None
    return found[0] if found and found[0].queue_offset == offset else None


def _from_row(row: dict[str, Any], size: int) -> StoredMessage:
    fields = {name: row[name] for name in StoredMessage._fields if name in row}
    fields["born_host"] = _host(row["born_host"])
    fields["store_host"] = _host(row["store_host"])
    fields["properties"] = props.decode(row["properties"])
    return StoredMessage(size=size, **fields)


def _host(text: str) -> tuple[str, int]:
    ip, _, port = text.rpartition(":")
    return ip.strip("[]"), int(port)
