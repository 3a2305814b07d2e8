"""Refuses messages without KEYS for compacted topics.

RocketMQ stores them, and no reader ever gets them: reads of such a topic use the compacted log.
"""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc

from raymq.store.base.errors import Rejected
from raymq.store.base.status import PutStatus

from .keys import KEYS, key_column
from .small_batch import SmallBatch

#: rows that one refusal names
ROWS_NAMED_MAX = 4096


def check_keys(
    topic: str, batch: pa.RecordBatch | SmallBatch, rows: pa.BooleanArray | None = None
) -> None:
    """Refuse messages without KEYS for a compaction topic. Raises: Rejected (MESSAGE_ILLEGAL) naming them in `rows`.

    Args: `rows`: the rows that go to that topic; None: all.
    """
    if isinstance(batch, SmallBatch):
        batch = batch.to_batch()
    bare = key_column(batch.column("properties")).is_null()
    found = pc.indices_nonzero(bare if rows is None else pc.and_(bare, rows))
    if len(found):
        # Producers send the other rows again: one by one, that takes a round trip for each.
        named = found.slice(0, ROWS_NAMED_MAX).to_pylist()
        raise _without_key(topic, f"row {named[0]}", row=named[0], rows=named)


def check_key(topic: str, properties: Mapping[str, str]) -> None:
    """Refuse a single message without KEYS for a compaction topic. Raises: Rejected (MESSAGE_ILLEGAL)."""
    if not properties.get(KEYS, "").strip():
        raise _without_key(topic, "the message")


def _without_key(topic: str, what: str, **fields: object) -> Rejected:
    return Rejected(
        f"{what} has no KEYS; topic {topic} keeps the latest message of each key: set index_keys",
        field="KEYS",
        limit="a key",
        status=PutStatus.MESSAGE_ILLEGAL.value,
        **fields,
    )
