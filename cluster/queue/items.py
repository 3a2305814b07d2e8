"""Reads the items of a durable queue by offset, and reads ahead."""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from raymq.cluster.consume.range_reader import RangeReader
from raymq.cluster.messages import codecs
from raymq.cluster.messages.message import encode_properties
from raymq.cluster.transport.routes import Routes
from raymq.store.clock import Clock
from raymq.store.queues.raw_records import decode_records

#: limits of one fetch
FETCH_BYTES = 8 << 20
FETCH_RECORDS = 10_000
#: what the first fetch reads ahead; doubled each time that this reader takes neighbouring items
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

    def __init__(
        self, routes: Routes, topic: str, shard: int, clock: Clock, *, codec: str = "bytes"
    ) -> None:
        """Args: `codec` is the codec that most items name; those are recognised faster."""
        self._reader = RangeReader(routes, topic, 0, shard, clock)
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
        """Close the stream; the next read opens another."""
        self._reader.close()
