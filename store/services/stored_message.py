"""One stored message with all its fields, for the store's services, which put single messages again with changes.

Readers of many messages use columns (`QueueReader.fetch`, `record.decode`) instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from raymq.store.base.errors import OffsetOutOfRange
from raymq.store.base.format import host_of
from raymq.store.put.inner_message import InnerMessage
from raymq.store.put.service_host import ServiceHost
from raymq.store.queues.raw_records import decode_records
from raymq.store.records import properties as props

#: most bytes read at a time
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

    def moved(
        self, topic: str, queue_id: int, properties: Mapping[str, str], **changes: object
    ) -> InnerMessage:
        """The message to put into another queue. But for `changes`, body, flags, born time and host are the same."""
        names = ("flag", "sys_flag", "born_time_ms", "born_host", "reconsume_times")
        kept = {name: getattr(self, name) for name in (*names, "prepared_transaction_offset")}
        return InnerMessage(topic, queue_id, self.body, properties, **{**kept, **changes})


def read(
    store: ServiceHost, topic: str, queue_id: int, offset: int, *, max_records: int
) -> tuple[list[StoredMessage], int]:
    """Messages of one queue from `offset` on, up to the queue's end, and the offset after them.

    Raises: OffsetOutOfRange below the queue's first message, Corrupt if the first message read is damaged.
    """
    part = store.fetch_whole(topic, queue_id, offset, max_bytes=READ_BYTES, max_records=max_records)
    if part.records is None or not len(part.records):
        return [], part.next_offset
    rows = decode_records(part.records).to_pylist()
    return [_from_row(row) for row in rows], part.next_offset


def read_one(store: ServiceHost, topic: str, queue_id: int, offset: int) -> StoredMessage | None:
    """The message at an offset of a queue; None if it is deleted or does not exist yet."""
    try:
        found, _ = read(store, topic, queue_id, offset, max_records=1)
    except OffsetOutOfRange:
        return None
    return found[0] if found and found[0].queue_offset == offset else None


def _from_row(row: dict[str, Any]) -> StoredMessage:
    fields = {name: row[name] for name in StoredMessage._fields if name in row}
    fields["born_host"] = host_of(row["born_host"])
    fields["store_host"] = host_of(row["store_host"])
    fields["properties"] = props.decode(row["properties"])
    return StoredMessage(**fields)
