"""The consumer of one topic: reads its queues in order, from where it was told (design D10, D11)."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from raymq.store.errors import OffsetOutOfRange, Rejected, Unavailable
from raymq.store.record import RECORD_SCHEMA

from .flight_client import FetchStream, ShardConnection
from .message import ReceivedMessage, decode_records, messages

if TYPE_CHECKING:
    from .cluster import Cluster

RETRY_S = 0.1
MAX_RECORDS = 10_000


class Consumer:
    """Reads queues of one topic. One thread at a time; it neither pickles nor survives a fork.

    Nothing is committed unasked; a position outside a queue raises OffsetOutOfRange, it never jumps.
    """

    def __init__(
        self,
        cluster: Cluster,
        topic: str,
        *,
        group: str | None = None,
        start: str | int | Mapping[int, int] | None = None,
        queues: Sequence[int] | None = None,
        max_bytes: int = 4 << 20,
        timeout_ms: int = 30_000,
    ) -> None:
        """Args: group, whose committed offsets to start from; start, "earliest", "latest", an offset or
        {queue: offset}: where to begin without a committed offset; timeout_ms, how long an unreachable shard is
        waited for.

        Raises: Rejected for an unknown topic or queue, and when neither the group nor `start` says where to begin.
        """
        self._cluster = cluster
        self.topic = topic
        self.group = group
        self._max_bytes = max_bytes
        self._timeout_s = timeout_ms / 1000
        self._pid = os.getpid()
        facts = cluster.describe_topic(topic)
        self._shard_of = {f["queue"]: f["shard"] for f in facts["queues"]}
        self._ranges = {f["queue"]: (f["min_offset"], f["max_offset"]) for f in facts["queues"]}
        wanted = list(self._shard_of) if queues is None else list(queues)
        for queue in wanted:
            if queue not in self._shard_of:
                raise Rejected(
                    f"queue {queue} of topic {topic} does not exist; it has queues 0 to {len(self._shard_of) - 1}",
                    field="queues",
                    limit=len(self._shard_of) - 1,
                )
        #: queue -> next offset to read
        self._positions = self._begin(wanted, start)
        self._streams: dict[int, FetchStream] = {}
        self._connections: dict[int, ShardConnection] = {}
        self._ready: deque[tuple[int, pa.Array]] = deque()
        self._turn = 0

    def _begin(
        self, queues: list[int], start: str | int | Mapping[int, int] | None
    ) -> dict[int, int]:
        committed = self.committed() if self.group is not None else {}
        found: dict[int, int] = {}
        for queue in queues:
            low, high = self._ranges[queue]
            if queue in committed:
                found[queue] = committed[queue]
            elif start == "earliest":
                found[queue] = low
            elif start == "latest":
                found[queue] = high
            elif isinstance(start, int):
                found[queue] = start
            elif isinstance(start, Mapping):
                found[queue] = start.get(queue, low)
            else:
                who = f"group {self.group!r} has no committed offset" if self.group else "no group"
                raise Rejected(
                    f"{who} for queue {queue} of {self.topic}: say start='earliest', 'latest', an offset or "
                    "{queue: offset}",
                    field="start",
                    limit="earliest|latest|offset|{queue: offset}",
                )
        return found

    # --- reading --------------------------------------------------------------------------------------------------

    def poll(self, max_records: int = 500, timeout: float = 1.0) -> list[ReceivedMessage]:
        """Up to `max_records` messages; waits up to `timeout` seconds while there are none.

        Raises: OffsetOutOfRange, Unavailable when a shard stays unreachable.
        """
        found: list[ReceivedMessage] = []
        part = self._next(max_records, timeout)
        while part is not None:
            queue, records = part
            found += messages(records, self._shard_of[queue])
            if len(found) >= max_records or not self._ready:
                break
            part = self._next(max_records - len(found), 0)
        return found

    def poll_batch(self, max_records: int = MAX_RECORDS, timeout: float = 1.0) -> pa.RecordBatch:
        """Up to `max_records` rows of one queue as columns (record.RECORD_SCHEMA); empty when there are none."""
        part = self._next(max_records, timeout)
        if part is None:
            return pa.record_batch([pa.array([], f.type) for f in RECORD_SCHEMA], schema=RECORD_SCHEMA)
        return decode_records(part[1])

    def __iter__(self) -> Iterator[ReceivedMessage]:
        """Messages for ever; waits for new ones."""
        while True:
            yield from self.poll(timeout=5.0)

    def _next(self, max_records: int, timeout: float) -> tuple[int, pa.Array] | None:
        """The next piece of one queue, at most `max_records` long, and move its position behind it."""
        if os.getpid() != self._pid:
            raise Rejected(
                "this consumer was made before a fork; make one in this process", field="process", limit="one process"
            )
        if not self._ready:
            self._fill(timeout)
        if not self._ready:
            return None
        queue, records = self._ready.popleft()
        if len(records) > max_records:
            self._ready.appendleft((queue, records.slice(max_records)))
            records = records.slice(0, max_records)
        self._positions[queue] += len(records)
        return queue, records

    def _fill(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        shards = sorted({self._shard_of[q] for q in self._positions})
        while True:
            for _ in shards:
                self._turn += 1
                shard = shards[self._turn % len(shards)]
                left = max(0.0, end - time.monotonic())
                # Several shards share the wait, so that none hides the messages of another.
                wait = left if len(shards) == 1 else min(left, 0.05)
                if self._fetch(shard, wait):
                    return
            if time.monotonic() >= end:
                return

    def _fetch(self, shard: int, wait_s: float) -> bool:
        offsets = {q: o for q, o in self._positions.items() if self._shard_of[q] == shard}
        # Queues take turns at the front: a busy one must not starve the others.
        order = list(offsets)
        turn = self._turn % len(order)
        offsets = {q: offsets[q] for q in order[turn:] + order[:turn]}
        give_up = time.monotonic() + self._timeout_s
        while True:
            try:
                found = self._stream(shard).fetch(
                    self.topic,
                    offsets,
                    max_bytes=self._max_bytes,
                    max_records=MAX_RECORDS,
                    wait_ms=int(wait_s * 1000),
                )
                break
            except Unavailable:
                self._drop(shard)
                if time.monotonic() > give_up:
                    raise
                time.sleep(RETRY_S)
                self._cluster.refresh()
        failed = None
        for part in found:
            if part.error is not None or part.records is None:
                failed = failed or part.error
            elif part.first_offset == self._positions[part.queue_id]:
                self._ready.append((part.queue_id, part.records))
        if failed is not None and not self._ready:
            raise failed
        return bool(self._ready)

    def _stream(self, shard: int) -> FetchStream:
        stream = self._streams.get(shard)
        if stream is None:
            endpoint = self._cluster.endpoints.get(shard)
            if endpoint is None:
                raise Unavailable(f"shard {shard} is not known yet", shard=shard)
            connection = ShardConnection(
                endpoint, self._cluster.token, cluster_id=self._cluster.cluster_id, shard=shard
            )
            self._connections[shard] = connection
            stream = self._streams[shard] = connection.fetch_stream()
        return stream

    def _drop(self, shard: int) -> None:
        stream = self._streams.pop(shard, None)
        if stream is not None:
            stream.close()
        connection = self._connections.pop(shard, None)
        if connection is not None:
            connection.close()

    # --- positions ------------------------------------------------------------------------------------------------

    def position(self, queue_id: int) -> int:
        """The offset that is read next."""
        return self._positions[self._own(queue_id)]

    def positions(self) -> dict[int, int]:
        """queue -> the offset that is read next."""
        return dict(self._positions)

    def seek(self, queue_id: int, offset: int | str) -> None:
        """Read `queue_id` from `offset`, "earliest" or "latest" on.

        Raises: OffsetOutOfRange outside the queue's present range.
        """
        facts = self._cluster.describe_topic(self.topic)
        ranges = {f["queue"]: (f["min_offset"], f["max_offset"]) for f in facts["queues"]}
        low, high = ranges[self._own(queue_id)]
        if offset == "earliest":
            offset = low
        elif offset == "latest":
            offset = high
        if not isinstance(offset, int) or not low <= offset <= high:
            raise OffsetOutOfRange(
                f"queue {queue_id} of {self.topic} holds offsets {low} to {high}, not {offset!r}",
                min=low,
                max=high,
                offset=offset,
                queue_id=queue_id,
            )
        self._positions[queue_id] = offset
        self._ready = deque(item for item in self._ready if item[0] != queue_id)

    def _own(self, queue_id: int) -> int:
        if queue_id not in self._positions:
            raise Rejected(
                f"this consumer does not read queue {queue_id}; it reads {sorted(self._positions)}",
                field="queue_id",
                limit=str(sorted(self._positions)),
            )
        return queue_id

    def commit(self, offsets: Mapping[int, int] | None = None) -> None:
        """Store the next offsets of the group: everything polled so far, or what is given.

        Durable: as an acknowledged message. Raises: Rejected without a group.
        """
        if self.group is None:
            raise Rejected("a consumer without group= cannot commit", field="group", limit="a name")
        wanted = dict(self._positions if offsets is None else offsets)
        for shard in sorted({self._shard_of[self._own(q)] for q in wanted}):
            own = {str(q): o for q, o in wanted.items() if self._shard_of[q] == shard}
            self._cluster.call(
                shard,
                "commit_offsets",
                {"group": self.group, "topic": self.topic, "offsets": own},
            )

    def committed(self) -> dict[int, int]:
        """queue -> next offset as the group committed it last."""
        found: dict[int, int] = {}
        for shard in sorted(set(self._shard_of.values())):
            table = self._cluster.call(shard, "offsets", {"group": self.group, "topic": self.topic})
            found.update({int(q): int(o) for q, o in table.items()})
        return found

    # --- end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the streams; nothing is committed."""
        for shard in list(self._streams):
            self._drop(shard)

    def __enter__(self) -> Consumer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "consumers do not pickle: pickle the Cluster and make the consumer where it is used"
        )
