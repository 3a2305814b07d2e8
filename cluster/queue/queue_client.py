"""What one process holds open for a durable queue: a producer and a reader; and its way into Ray."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING

import pyarrow as pa
import ray

from raymq.cluster.deploy import ray_host
from raymq.cluster.deploy.ray_host import RayTarget
from raymq.cluster.messages import codecs
from raymq.cluster.messages.message import encode_properties
from raymq.cluster.paths import ClusterPaths
from raymq.cluster.produce.producer import Producer
from raymq.cluster.produce.queue_sequence import BatchReceipt
from raymq.cluster.transport.routes import Routes
from raymq.store.clock import Clock
from raymq.store.errors import RayMQError, Rejected
from raymq.store.files import Files
from raymq.store.records.binary_columns import binary_array

from .items import ItemReader, Items

if TYPE_CHECKING:
    from raymq.cluster.cluster import Cluster

#: a keeper that does not answer, or a shard that cannot be reached, is asked again for so long
PATIENCE_S = 60.0
#: at the end of a program, for what lingers
END_FLUSH_S = 30.0
#: for a putter that waits for its receipt: company comes while earlier batches are under way
_LINGER_MS = 5.0
#: of a batch that is waited for, about: while one part is synced, the next is under way
PART_BYTES = 1 << 20
#: of what lingers. Nobody waits for the first bytes of it, and each batch has costs of its own on both sides: with
#: 4 MiB an item takes a quarter less time than with 1, with 8 another 6 to 10 %
LINGER_BYTES = 8 << 20
#: on its way to the shard: of what lingers, one batch being made, sent, stored and synced each
LINGER_IN_FLIGHT_BYTES = 4 * LINGER_BYTES


class QueueClient:
    """One process's connections to a queue's shard, made when they are needed."""

    def __init__(
        self, cluster: Cluster, name: str, shard: int, linger_ms: float, codec: str
    ) -> None:
        self.process = os.getpid()
        self._name = name
        self.producer = Producer(
            cluster,
            linger_ms=linger_ms or _LINGER_MS,
            batch_bytes=LINGER_BYTES,
            in_flight_bytes=LINGER_IN_FLIGHT_BYTES,
        )
        self.producer.look_up(name)
        #: of each item, encoded
        self._properties = encode_properties(None, (), {codecs.CONTENT_TYPE: codec})
        self._reader = ItemReader(Routes.of(cluster), name, shard, Clock(), codec=codec)
        self._reading = threading.Lock()

    def send_parts(self, bodies: list[bytes]) -> list[Future[BatchReceipt]]:
        """Send items, as columns and in parts. Returns: the receipts."""
        encoded = pa.scalar(self._properties, pa.binary())
        found: list[Future[BatchReceipt]] = []
        for part, _ in _parts(bodies, sum(map(len, bodies)), PART_BYTES):
            rows = pa.record_batch(
                {
                    "body": binary_array(part),
                    "properties": pa.repeat(encoded, len(part)),
                }
            )
            found += self.producer.send_batch(self._name, rows, queue_id=0)
        return found

    def send_lingering(self, bodies: list[bytes]) -> None:
        """The same without receipts: items travel with their neighbours. Raises: Rejected, nothing was sent."""
        size = self.producer.check_bodies(bodies)
        for part, part_bytes in _parts(bodies, size, LINGER_BYTES // 2):
            self.producer.send_together(self._name, part, part_bytes, self._properties, queue_id=0)

    def read(self, first: int, count: int) -> list[Items]:
        """Items [first, first + count) in pieces."""
        with self._reading:
            return self._reader.read(first, count, timeout_s=PATIENCE_S)

    def close(self, timeout: float | None = None) -> None:
        """Send what lingers. Raises: the first failure that nobody was told."""
        if os.getpid() != self.process:
            return
        with self._reading:
            self._reader.close()
        self.producer.close(timeout)


def _parts(bodies: list[bytes], size: int, about_bytes: int) -> Iterator[tuple[list[bytes], int]]:
    """Parts and their bytes, of equal size: a last one of a few items would be an append and a sync of its own."""
    count = max(1, round(size / about_bytes))
    if count == 1:
        yield bodies, size
        return
    step = -(-len(bodies) // count)
    for start in range(0, len(bodies), step):
        part = bodies[start : start + step]
        yield part, sum(map(len, part))


def attach(cluster: Cluster) -> None:
    """Connect this process to Ray, if it is not: to the cluster's."""
    if ray.is_initialized():
        return
    target = None
    if cluster.data_dir is not None:
        target = ray_host.running_target(ClusterPaths(cluster.data_dir), Files())
    if target is None and cluster.ray_address is not None:
        target = RayTarget(address=cluster.ray_address)
    if target is None:
        raise Rejected(
            "a Queue needs Ray, and nobody knows here in which one the cluster runs: call ray.init(address=...) first",
            field="cluster",
            limit="a process that is connected to Ray",
        )
    ray_host.attach(target)


def not_in_this_ray(cluster: Cluster) -> str:
    """Which cluster a Queue looked for in the Ray of this process, and what to do when it is not there."""
    here = ray_host.connected_address()
    place = "" if cluster.data_dir is None else f" of {cluster.data_dir}"
    found = f"looked for cluster {cluster.name!r}{place} in the Ray at {here}, to which this process is connected"
    there = None
    if cluster.data_dir is not None:
        there = ray_host.running_target(ClusterPaths(cluster.data_dir), Files())
    if there is None or there.address == here:
        again = f"raymq start {cluster.data_dir or '<its data directory>'}"
        return f"{found}; it does not run. Start it: {again}"
    return (
        f"{found}; it runs in the Ray at {there.address}. Leave ray.init() out, a Queue then connects this process to "
        f"that Ray, or call ray.init(raymq.connect({cluster.name!r}).ray_address) instead"
    )


def end_quietly(link: QueueClient) -> None:
    """Close it when its queue's handle is gone, or the program ends."""
    # Nobody is left to be told.
    with contextlib.suppress(RayMQError):
        link.close(END_FLUSH_S)
