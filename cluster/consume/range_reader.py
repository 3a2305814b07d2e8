"""Reads a fixed range of one queue, for batch readers such as Spark tasks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from raymq.cluster.messages.message import queue_offsets
from raymq.cluster.transport.connection import FetchStream
from raymq.cluster.transport.routes import Routes
from raymq.store.errors import Unavailable

from .checked import checked

if TYPE_CHECKING:
    from raymq.cluster.cluster import Cluster

RETRY_S = 0.1
FETCH_BYTES = 4 << 20
FETCH_RECORDS = 10_000


def read_range(
    cluster: Cluster,
    topic: str,
    queue_id: int,
    shard: int,
    first: int,
    last: int,
    *,
    timeout_s: float = 60.0,
) -> Iterator[pa.Array]:
    """Raw records of the offsets [first, last), in pieces. Waits for an unreachable shard.

    Raises: OffsetOutOfRange; Corrupt for a damaged message, after all messages before it; Unavailable after `timeout_s`
    without progress.
    """
    stream: FetchStream | None = None
    give_up = time.monotonic() + timeout_s
    try:
        while first < last:
            try:
                routes = Routes.of(cluster)
                if stream is None:
                    stream = routes.fetch_stream(shard)
                found = stream.fetch(
                    topic,
                    {queue_id: first},
                    max_bytes=FETCH_BYTES,
                    max_records=min(FETCH_RECORDS, last - first),
                    wait_ms=1000,
                )
                found = checked(found, routes, topic, shard)
            except Unavailable:
                if stream is not None:
                    stream.close()
                    stream = None
                if time.monotonic() > give_up:
                    raise
                time.sleep(RETRY_S)
                cluster.refresh()
                continue
            if not found and time.monotonic() > give_up:
                raise Unavailable(
                    f"no message of {topic} queue {queue_id} at offset {first} or after it arrived in {timeout_s:g} s; "
                    f"the range ends at {last}",
                    shard=shard,
                )
            for part in found:
                if part.error is not None or part.records is None:
                    raise part.error or Unavailable("an empty answer", shard=shard)
                give_up = time.monotonic() + timeout_s
                first, records = part.next_offset, part.records
                if first > last:
                    # After a gap of a compacted topic the next record may belong to another range.
                    records = records.slice(0, int(np.searchsorted(queue_offsets(records), last)))
                if len(records):
                    yield records
    finally:
        if stream is not None:
            stream.close()
