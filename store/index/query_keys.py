"""Finding the messages of many keys together, as a table join needs them, or a gateway with many users.

RocketMQ answers one key per request. Here all chains of the index are followed in step. Each record is read once,
however many of its keys are queried. For a single key the loop of `key_search` is quicker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
import pyarrow as pa

from raymq.store.base.arrays import Bools, Int64s
from raymq.store.base.errors import OffsetOutOfRange, Rejected
from raymq.store.log.commit_log import CommitLog
from raymq.store.records.keys import keys_of
from raymq.store.records.properties import PROPERTY_SEPARATOR
from raymq.store.records.record_decode import decode_column

from .index_keys import key_hashes
from .index_service import IndexService
from .key_search import KeyHits

#: up to so many keys are looked up one by one: that costs less than to follow few chains in step
FEW_KEYS = 8


def check_query(topic: str, keys: Sequence[str], max_num: int) -> None:
    """Raises: Rejected for a bad number, topic or key."""
    separator = PROPERTY_SEPARATOR.decode()
    bad = next((key for key in keys if not key or separator in key), None)
    if bad is not None:
        field, fault = "key", f"key {bad!r} is empty or contains a separator; give another key"
    elif not topic:
        field, fault = "topic", "topic is empty; give its name"
    elif max_num < 1:
        field, fault = "max_num", f"max_num is {max_num}; give 1 or more"
    else:
        return
    raise Rejected(fault, field=field, limit="topic, keys, max_num >= 1")


@dataclass(frozen=True)
class KeyQuery:
    """One query for several keys. Rows are indexes into the keys of one round."""

    log: CommitLog
    index: IndexService
    topic: str
    #: the first and the last store time (ms)
    span: tuple[int, int]
    exact: bool

    def find(self, keys: Sequence[str], limit: int) -> KeyHits:
        """At most `limit` messages of each key. Each round doubles the candidates until that many are hits."""
        asked, wanted = np.arange(len(keys)), limit
        rounds: list[KeyHits] = []
        while True:
            hits, is_unfinished = self._round([keys[row] for row in asked.tolist()], wanted, limit)
            rounds.append(hits._replace(keys=asked[hits.keys]))
            if not is_unfinished.any():
                return _together(rounds)
            asked = asked[is_unfinished]
            wanted *= 2

    def _round(self, keys: Sequence[str], wanted: int, limit: int) -> tuple[KeyHits, Bools]:
        """Check `wanted` candidates of each key. Returns: the hits of finished keys, and a mask of the unfinished keys.

        Candidates may be of another time or key, or name a message twice. So more hits may follow them.
        """
        candidate_keys, offsets = self._candidates(keys, wanted)
        hits = self._hits_among(keys, candidate_keys, offsets)
        has_more = np.bincount(candidate_keys, minlength=len(keys)) >= wanted
        has_few = np.bincount(hits.keys, minlength=len(keys)) < limit
        is_unfinished = has_more & has_few
        kept = ~is_unfinished[hits.keys]
        if wanted > limit:
            kept &= _newest(hits.keys, limit)
        return hits.select(kept), is_unfinished

    def _candidates(self, keys: Sequence[str], wanted: int) -> tuple[Int64s, Int64s]:
        """Rows of `keys`, and physical offsets of records that may match."""
        if len(keys) > FEW_KEYS:
            return self.index.find_many(key_hashes(self.topic, keys), wanted, *self.span)
        rows: list[int] = []
        offsets: list[int] = []
        for row, key in enumerate(keys):
            parts = self.index.find(self.topic, key, *self.span, wanted)
            found = list(islice(chain.from_iterable(parts), wanted))
            rows += [row] * len(found)
            offsets += found
        return np.array(rows, dtype=np.int64), np.array(offsets, dtype=np.int64)

    def _hits_among(self, keys: Sequence[str], found: Int64s, offsets: Int64s) -> KeyHits:
        """The hits among the candidates, and all their records, in the order of the log."""
        is_confirmed = (offsets >= self.log.start) & (offsets < self.log.confirmed)
        found, offsets = _each_once(found[is_confirmed], offsets[is_confirmed], len(keys))

        # Several keys of one message are candidates of one record, which is read once.
        is_new_offset = _changes(offsets)
        distinct_offsets = offsets[is_new_offset]
        distinct_of_candidate = np.cumsum(is_new_offset) - 1

        is_record, times_ms, records = self._read(distinct_offsets)
        in_span = is_record.copy()
        in_span[is_record] = (times_ms >= self.span[0]) & (times_ms <= self.span[1])

        # Only records that were read have a number: those of deleted files have none.
        record_of_distinct = np.cumsum(is_record) - 1
        record_of_candidate = record_of_distinct[distinct_of_candidate]
        hits = KeyHits(found, record_of_candidate, distinct_offsets[is_record], records)

        is_hit = in_span[distinct_of_candidate]
        if self.exact:
            is_hit &= self._have_key(hits, keys, is_hit)
        return hits.select(is_hit)

    def _read(self, offsets: Int64s) -> tuple[Bools, Int64s, pa.Array]:
        """A mask of the offsets at which a record begins, those records' store times, and the raw records.

        Args: `offsets`: ascending. Raises: Corrupt for a record that is unreadable or whose body is damaged.
        """
        is_record = np.zeros(len(offsets), dtype=bool)
        # Records below the log's start were deleted.
        first = int(np.searchsorted(offsets, self.log.start))
        if first == len(offsets):
            return is_record, np.empty(0, np.int64), pa.array([], pa.binary())
        try:
            found = self.log.reads.records_at(offsets[first:])
        except OffsetOutOfRange:
            return self._read(offsets)
        is_record[first:] = found.is_record
        return is_record, found.times_ms, found.records

    def _have_key(self, hits: KeyHits, keys: Sequence[str], asked: Bools) -> Bools:
        """A mask of the `asked` hits whose message has the topic and the very key."""
        batch = decode_column(hits.records)
        topics = batch.column("topic").to_pylist()
        names = [set(keys_of(text)) for text in batch.column("properties").to_pylist()]
        rows = zip(hits.keys.tolist(), hits.rows.tolist(), asked.tolist(), strict=True)
        has_key = [
            wanted and topics[row] == self.topic and keys[key] in names[row]
            for key, row, wanted in rows
        ]
        return np.array(has_key, dtype=bool)


def _each_once(found: Int64s, offsets: Int64s, key_count: int) -> tuple[Int64s, Int64s]:
    """Candidates in the order of the log, each once: a message that has a key twice has two entries."""
    # One number for both, so that one sort orders by offset, then key.
    pairs = np.sort(offsets * key_count + found)
    pairs = pairs[_changes(pairs)]
    return pairs % max(key_count, 1), pairs // max(key_count, 1)


def _changes(values: Int64s) -> Bools:
    """A mask of the values that differ from the one before."""
    changes = np.ones(len(values), dtype=bool)
    changes[1:] = values[1:] != values[:-1]
    return changes


def _newest(keys: Int64s, limit: int) -> Bools:
    """A mask of the rows that are among the last `limit` of their key."""
    newest_first = keys[::-1]
    order = np.argsort(newest_first, kind="stable")
    ordered = newest_first[order]
    kept = np.empty(len(keys), dtype=bool)
    kept[order] = np.arange(len(keys)) - np.searchsorted(ordered, ordered) < limit
    return kept[::-1]


def _together(rounds: list[KeyHits]) -> KeyHits:
    """The hits of all rounds, with each record once."""
    if len(rounds) == 1:
        return rounds[0]

    # The records of all rounds, one round after the other, are "joined" records here.
    joined_offsets = np.concatenate([each.offsets for each in rounds])
    offsets, joined_of_record, record_of_joined = np.unique(
        joined_offsets, return_index=True, return_inverse=True
    )
    starts = np.cumsum([0, *(len(each.offsets) for each in rounds)])
    joined_of_hit = [start + each.rows for start, each in zip(starts[:-1], rounds, strict=True)]
    joined_records = pa.concat_arrays([each.records for each in rounds])
    return KeyHits(
        np.concatenate([each.keys for each in rounds]),
        record_of_joined[np.concatenate(joined_of_hit)],
        offsets,
        joined_records.take(pa.array(joined_of_record)),
    )
