"""Finding the messages of many keys together, as a table join or a gateway under load needs them.

RocketMQ answers one key per request. Here all chains of the index are followed in step, and each record is read once,
however many of its keys are asked for. For a single key the loop of `key_search` is quicker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raymq.store.arrays import Int64s
from raymq.store.errors import OffsetOutOfRange, Rejected
from raymq.store.log.commit_log import CommitLog
from raymq.store.records.keys import keys_of
from raymq.store.records.properties import PROPERTY_SEPARATOR
from raymq.store.records.record_decode import decode_column

from .index_keys import key_hashes
from .index_service import IndexService
from .key_search import KeyHits

Bools = npt.NDArray[np.bool_]

#: keys that are looked up one by one: that costs less than to follow few chains in step
FEW_KEYS = 8


def check_query(topic: str, keys: Sequence[str], max_num: int) -> None:
    """Raises: Rejected for a bad number, topic or key."""
    separator = PROPERTY_SEPARATOR.decode()
    bad = next((key for key in keys if not key or separator in key), None)
    if max_num < 1 or not topic or bad is not None:
        raise Rejected(
            f"a query has a topic, keys and a max_num of 1 or more, not {topic!r}, {bad!r}, {max_num}",
            field="key" if bad is not None else "topic" if not topic else "max_num",
            limit="topic, keys, max_num >= 1",
        )


@dataclass(frozen=True)
class KeyQuery:
    """One query for several keys. Rows are numbers into the keys that one round asks for."""

    log: CommitLog
    index: IndexService
    topic: str
    #: the first and the last store time (ms)
    span: tuple[int, int]
    exact: bool

    def find(self, keys: Sequence[str], limit: int) -> KeyHits:
        """At most `limit` messages of each key: twice as many candidates are asked for until that many are hits."""
        asked, wanted = np.arange(len(keys)), limit
        rounds: list[KeyHits] = []
        while True:
            some = [keys[row] for row in asked.tolist()]
            found, offsets = self._candidates(some, wanted)
            hits = self._hits_among(some, found, offsets)
            # Candidates may be of another time or key, or name a message twice: after these there may be more.
            has_more = np.bincount(found, minlength=len(some)) >= wanted
            again = has_more & (np.bincount(hits.keys, minlength=len(some)) < limit)
            kept = ~again[hits.keys]
            if wanted > limit:
                kept &= _newest(hits.keys, limit)
            rounds.append(hits._replace(keys=asked[hits.keys[kept]], rows=hits.rows[kept]))
            if not again.any():
                return _together(rounds)
            asked, wanted = asked[again], 2 * wanted

    def _candidates(self, keys: Sequence[str], wanted: int) -> tuple[Int64s, Int64s]:
        """Rows of `keys`, and physical offsets of records that may match."""
        if len(keys) > FEW_KEYS:
            return self.index.find_many(key_hashes(self.topic, keys), wanted, *self.span)
        rows: list[int] = []
        offsets: list[int] = []
        for row, key in enumerate(keys):
            parts = self.index.find(self.topic, key, *self.span, wanted)
            some = list(islice(chain.from_iterable(parts), wanted))
            rows += [row] * len(some)
            offsets += some
        return np.array(rows, dtype=np.int64), np.array(offsets, dtype=np.int64)

    def _hits_among(self, keys: Sequence[str], found: Int64s, offsets: Int64s) -> KeyHits:
        """The hits among the candidates, and all their records, in the order of the log."""
        inside = (offsets >= self.log.start) & (offsets < self.log.confirmed)
        found, offsets = _each_once(found[inside], offsets[inside], len(keys))
        # Several keys of one message are candidates of one record, which is read once.
        first = _changes(offsets)
        places, place_of = offsets[first], np.cumsum(first) - 1
        there, times_ms, records = self._read(places)
        in_span = there.copy()
        in_span[there] = (times_ms >= self.span[0]) & (times_ms <= self.span[1])
        # Records are numbered among those that were read: those of deleted files are not.
        record_of = np.cumsum(there) - 1
        hits = KeyHits(found, record_of[place_of], places[there], records)
        right = in_span[place_of]
        if self.exact:
            right &= self._have_key(hits, keys, right)
        return hits._replace(keys=hits.keys[right], rows=hits.rows[right])

    def _read(self, places: Int64s) -> tuple[Bools, Int64s, pa.Array]:
        """Which of the places have a record, those records' store times, and the records, raw. Args: ascending.

        Raises: Corrupt for a record whose body is damaged, or that the disk does not give back.
        """
        there = np.zeros(len(places), dtype=bool)
        # Records below the log's start were deleted.
        first = int(np.searchsorted(places, self.log.start))
        if first == len(places):
            return there, np.empty(0, np.int64), pa.array([], pa.binary())
        try:
            found = self.log.records_at(places[first:])
        except OffsetOutOfRange:
            return self._read(places)
        there[first:] = found.is_record
        return there, found.times_ms, found.records

    def _have_key(self, hits: KeyHits, keys: Sequence[str], asked: Bools) -> Bools:
        """Which of the `asked` hits are of messages that have the topic and the very key."""
        batch = decode_column(hits.records)
        topics = batch.column("topic").to_pylist()
        names = [set(keys_of(text)) for text in batch.column("properties").to_pylist()]
        rows = zip(hits.keys.tolist(), hits.rows.tolist(), asked.tolist(), strict=True)
        return np.array(
            [
                wanted and topics[row] == self.topic and keys[key] in names[row]
                for key, row, wanted in rows
            ],
            dtype=bool,
        )


def _each_once(found: Int64s, offsets: Int64s, key_count: int) -> tuple[Int64s, Int64s]:
    """Candidates in the order of the log, each once: a key that stands twice in a message has two entries."""
    # One number for both, so that one sort orders by offset, then key.
    pairs = np.sort(offsets * key_count + found)
    pairs = pairs[_changes(pairs)]
    return pairs % max(key_count, 1), pairs // max(key_count, 1)


def _changes(values: Int64s) -> Bools:
    """Where a value differs from the one before it."""
    changes = np.ones(len(values), dtype=bool)
    changes[1:] = values[1:] != values[:-1]
    return changes


def _newest(keys: Int64s, limit: int) -> Bools:
    """Which rows are among the last `limit` of their key."""
    newest_first = keys[::-1]
    order = np.argsort(newest_first, kind="stable")
    ordered = newest_first[order]
    kept = np.empty(len(keys), dtype=bool)
    kept[order] = np.arange(len(keys)) - np.searchsorted(ordered, ordered) < limit
    return kept[::-1]


def _together(rounds: list[KeyHits]) -> KeyHits:
    if len(rounds) == 1:
        return rounds[0]
    places, first, rows = np.unique(
        np.concatenate([each.places for each in rounds]), return_index=True, return_inverse=True
    )
    starts = np.cumsum([0, *(len(each.places) for each in rounds)])
    hits = [start + each.rows for start, each in zip(starts[:-1], rounds, strict=True)]
    records = pa.concat_arrays([each.records for each in rounds])
    return KeyHits(
        np.concatenate([each.keys for each in rounds]),
        rows[np.concatenate(hits)],
        places,
        records.take(pa.array(first)),
    )
