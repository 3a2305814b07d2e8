"""Put requests for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from raymq.actors.api.shard_api import PutTicket, ShardBackend
from raymq.store.base.errors import RayMQError
from raymq.store.records import record
from raymq.store.records.requests import PutRequest


def batch(
    bodies: list[bytes | None], *, tag: str | None = None, properties: bytes | None = None
) -> pa.RecordBatch:
    """A PUT_SCHEMA batch of these bodies."""
    n = len(bodies)
    return pa.record_batch(
        [
            pa.array(bodies, pa.binary()),
            pa.array([tag] * n, pa.string()),
            pa.array([properties] * n, pa.binary()),
            pa.array([1_700_000_000_000] * n, pa.int64()),
        ],
        schema=record.PUT_SCHEMA,
    )


def request(
    bodies: list[bytes | None],
    *,
    topic: str = "t",
    queue: int = 0,
    tag: str | None = None,
    producer_id: int | None = None,
    epoch: int = 0,
    sequence: int = 0,
) -> PutRequest:
    """One batch of one queue."""
    return PutRequest(topic, queue, batch(bodies, tag=tag), producer_id, epoch, sequence, "quorum")


def put_one(
    backend: ShardBackend,
    put: PutRequest,
    notify: Callable[[], None] | None = None,
    *,
    producer_waits: bool = False,
) -> PutTicket:
    """Put one batch. Raises: its refusal."""
    (result,) = backend.put([put], notify, producer_waits=producer_waits)
    if isinstance(result, RayMQError):
        raise result
    return result
