"""Rows that are staged, as a client and a shard name them: where a row is to go, and which rows a write consists of."""

from __future__ import annotations

from typing import NamedTuple


def target_properties(topic: str, queue_id: int) -> bytes:
    """What the properties of a staged row begin with."""
    return f"REAL_TOPIC\x01{topic}\x02REAL_QID\x01{queue_id}\x02".encode()


class StagedRange(NamedTuple):
    """Rows of one producer in the staged topic. Rows of others may be between them."""

    producer_id: int
    first_offset: int
    last_offset: int
    #: how many rows are of that producer
    rows: int
