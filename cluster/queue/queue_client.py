"""A process's producer and reader for one durable queue, and its connection to Ray."""

from __future__ import annotations

import contextlib
import os
import shlex
import threading
from collections.abc import Iterator
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import ray

from raymq.client.consume.range_reader import RangeReader
from raymq.client.messages import codecs
from raymq.client.messages.message import encode_properties
from raymq.client.produce.message_batcher import MessageBatcher
from raymq.client.produce.send_future import BatchFuture
from raymq.client.transport.routes import Routes
from raymq.client.unclosed import report_unreceipted
from raymq.cluster.cluster import Cluster
from raymq.cluster.deploy import ray_host
from raymq.cluster.deploy.ray_host import RayTarget
from raymq.store.base.errors import RayMQError, Rejected
from raymq.store.queues.raw_records import decode_records
from raymq.store.records.binary_columns import binary_array

#: a call is repeated for this long while the coordinator or the shard cannot be reached
RETRY_TIMEOUT_S = 60.0
#: longest flush of lingering items at the end of a program
END_FLUSH_S = 30.0
#: linger of a put that waits for its receipt: puts join a batch while earlier batches are in flight
_LINGER_MS = 5.0
#: approximate size of one part of a batch: one part is synced while the next is in flight
PART_BYTES = 1 << 20
#: batch size of lingering puts. Large, because no caller waits for the first bytes and each batch costs both sides. An
#: item takes a quarter less time with 4 MiB than with 1 MiB, and with 8 MiB another 6 to 10 % less
LINGER_BYTES = 8 << 20
#: bytes of lingering items in flight to the shard: one batch each being built, sent, stored and synced
LINGER_IN_FLIGHT_BYTES = 4 * LINGER_BYTES


#: limits of one fetch
FETCH_BYTES = 8 << 20
FETCH_RECORDS = 10_000
#: read-ahead of the first fetch, doubled each time that this reader takes neighbouring items
AHEAD_BYTES = 128 << 10
AHEAD_RECORDS = 128
#: the largest factor of the two above
AHEAD_TIMES_MAX = 32

_CODEC_NAME = rf"(?:^|\x02){codecs.CONTENT_TYPE}\x01(?P<v>[^\x02]+)"


class Items(NamedTuple):
    """Items of consecutive offsets: their bodies, and the codec that each names."""

    first: int
    bodies: list[bytes]
    codecs: list[str | None]

    @property
    def end(self) -> int:
        """The offset after the last item."""
        return self.first + len(self.bodies)

    def part(self, first: int, last: int) -> Items:
        """The items of [first, last) that are here."""
        rows = slice(first - self.first, last - self.first)
        return Items(first, self.bodies[rows], self.codecs[rows])


class ItemReader:
    """Reads items by offset over one stream that stays open. One thread at a time."""

    def __init__(self, routes: Routes, topic: str, shard: int, *, codec: str = "bytes") -> None:
        """Args: `codec`: the codec that most items name. Those are recognised faster."""
        self._reader = RangeReader(routes, topic, 0, shard)
        self._codec = codec
        self._usual = encode_properties(None, (), {codecs.CONTENT_TYPE: codec})
        #: the latest fetch: items never change
        self._ahead = Items(0, [], [])
        self._ahead_times = 1
        #: end of the latest read
        self._last = 0

    def read(self, first: int, count: int, *, timeout_s: float) -> list[Items]:
        """Items [first, first + count), in one or more runs.

        Raises: OffsetOutOfRange; Unavailable when the shard cannot be reached for `timeout_s`.
        """
        found: list[Items] = []
        last = first + count
        if first != self._last:
            self._ahead_times = 1
        self._last = last
        while first < last:
            if not self._ahead.first <= first < self._ahead.end:
                # The following items will probably be read next.
                self._ahead = self._fetch(first, last - first, timeout_s)
                self._ahead_times = min(2 * self._ahead_times, AHEAD_TIMES_MAX)
            found.append(self._ahead.part(first, last))
            first = found[-1].end
        return found

    def _fetch(self, first: int, count: int, timeout_s: float) -> Items:
        rows = AHEAD_RECORDS * self._ahead_times
        if self._ahead_times == 1 and count > 1:
            rows = count
        records, _ = self._reader.fetch(
            first,
            first + count,
            max_bytes=FETCH_BYTES if count > 1 else AHEAD_BYTES * self._ahead_times,
            max_records=min(FETCH_RECORDS, max(count, rows)),
            timeout_s=timeout_s,
        )
        return self._items(first, records)

    def _items(self, first: int, records: pa.Array) -> Items:
        columns = decode_records(records, columns=("body", "properties"))
        properties = columns.column("properties")
        names: list[str | None] = [self._codec] * len(columns)
        if not pc.all(pc.starts_with(properties, self._usual)).as_py():
            found = pc.struct_field(pc.extract_regex(properties, _CODEC_NAME), 0)
            names = [
                None if name is None else name.decode(errors="replace")
                for name in found.to_pylist()
            ]
        return Items(first, columns.column("body").to_pylist(), names)

    def close(self) -> None:
        """Close the stream. The next read opens another."""
        self._reader.close()


class QueueClient:
    """One process's connections to a queue's shard, opened on first use."""

    def __init__(
        self, cluster: Cluster, name: str, shard: int, linger_ms: float, codec: str
    ) -> None:
        self.process = os.getpid()
        self._name = name
        self.batcher = MessageBatcher(
            cluster,
            linger_ms=linger_ms or _LINGER_MS,
            batch_bytes=LINGER_BYTES,
            in_flight_bytes=LINGER_IN_FLIGHT_BYTES,
            owner="Queue",
            flushes_at_exit=False,
        )
        # Looked up here: no put in an event loop waits for a shard.
        self.batcher.batch_sender.topic(name)
        #: encoded properties of every item
        self._properties = encode_properties(None, (), {codecs.CONTENT_TYPE: codec})
        self._reader = ItemReader(Routes.of(cluster), name, shard, codec=codec)
        self._read_lock = threading.Lock()

    def send_parts(self, bodies: list[bytes]) -> list[BatchFuture]:
        """Send items as columns, in parts. Returns: one receipt future per part."""
        encoded = pa.scalar(self._properties, pa.binary())
        futures: list[BatchFuture] = []
        for part, _ in _parts(bodies, sum(map(len, bodies)), PART_BYTES):
            rows = pa.record_batch(
                {"body": binary_array(part), "properties": pa.repeat(encoded, len(part))}
            )
            futures += self.batcher.add_columns(self._name, rows, 0)
        return futures

    def send_lingering(self, bodies: list[bytes]) -> None:
        """Send items without receipts, in shared batches. Raises: Rejected; nothing was sent."""
        self.batcher.encoder.check_size(max(map(len, bodies)))
        for part, part_bytes in _parts(bodies, sum(map(len, bodies)), LINGER_BYTES // 2):
            self.batcher.add_bodies(self._name, part, part_bytes, self._properties, queue_id=0)

    def read(self, first: int, count: int) -> list[Items]:
        """Items [first, first + count), in one or more runs."""
        with self._read_lock:
            return self._reader.read(first, count, timeout_s=RETRY_TIMEOUT_S)

    def close(self, timeout: float | None = None) -> None:
        """Send lingering items. Raises: the first failure that no caller has seen."""
        if os.getpid() != self.process:
            return
        with self._read_lock:
            self._reader.close()
        self.batcher.close(timeout)
        self.batcher.batch_sender.raise_failure()


def _parts(bodies: list[bytes], size: int, about_bytes: int) -> Iterator[tuple[list[bytes], int]]:
    """Parts of equal size, each with its bytes: a small last part would cost its own append and sync."""
    count = max(1, round(size / about_bytes))
    if count == 1:
        yield bodies, size
        return
    step = -(-len(bodies) // count)
    for start in range(0, len(bodies), step):
        part = bodies[start : start + step]
        yield part, sum(map(len, part))


def attach(cluster: Cluster) -> None:
    """Connect this process to the cluster's Ray, unless it is connected to a Ray."""
    if ray.is_initialized():
        return
    target = ray_host.running_target_of(cluster.data_dir)
    if target is None and cluster.ray_address is not None:
        target = RayTarget(address=cluster.ray_address)
    if target is None:
        raise Rejected(
            "a Queue needs Ray, and this handle does not know the cluster's Ray: call ray.init(address=...) first",
            field="cluster",
            limit="a process that is connected to Ray",
        )
    ray_host.attach(target)


def not_in_this_ray(cluster: Cluster) -> str:
    """The text of an error: which cluster a Queue did not find in this process's Ray, and what to do."""
    here = ray_host.connected_address()
    place = "" if cluster.data_dir is None else f" of {cluster.data_dir}"
    found = f"looked for cluster {cluster.name!r}{place} in the Ray at {here}, to which this process is connected"
    target = ray_host.running_target_of(cluster.data_dir)
    if target is None or target.address == here:
        known = cluster.data_dir
        again = f"raymq start {shlex.quote(known) if known else '<its data directory>'}"
        return f"{found}; it does not run. Start it: {again}"
    return (
        f"{found}; it runs in the Ray at {target.address}. Leave ray.init() out, a Queue then connects this process to "
        f"that Ray, or call ray.init(raymq.connect({cluster.name!r}).ray_address) instead"
    )


def end_quietly(client: QueueClient) -> None:
    """Close the client when its queue's handle is deleted, or the program ends."""
    with contextlib.suppress(TimeoutError, RayMQError, KeyboardInterrupt):
        client.batcher.flush(END_FLUSH_S)
    # No caller is left to see a failure.
    report_unreceipted("Queue", client.batcher.count_unreceipted())
    with contextlib.suppress(RayMQError):
        client.close(0)
