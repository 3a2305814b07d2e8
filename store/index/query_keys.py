"""Finding the messages of many keys at once: what a table join or a gateway under load asks for.

RocketMQ answers one key a request. Here all chains of the index are followed in step, and each record is read once,
however many of its keys are asked for. One key alone goes the way of `key_search`, which for it is the shorter one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raymq.store import record
from raymq.store.errors import OffsetOutOfRange, Rejected
from raymq.store.log.commit_log import CommitLog
from raymq.store.records.keys import keys_of
from raymq.store.records.properties import PROPERTY_SEPARATOR

from .index_keys import Int64s, key_hashes
from .index_service import IndexService
from .key_search import newest, raw_column
from .query import TIME_MAX_MS

Bools = npt.NDArray[np.bool_]

#: keys that are looked up one by one: that costs less than to follow few chains in step
FEW_KEYS = 8


class KeyHits(NamedTuple):
    """Messages found: hit i says that key `keys[i]` is one of message `rows[i]` of `records`."""

    keys: Int64s
    rows: Int64s
    #: raw RocketMQ records, in the order of the log, each once
    records: pa.Array


class _Round(NamedTuple):
    """`KeyHits` of some keys, and the physical offsets of its records."""

    keys: Int64s
    rows: Int64s
    places: Int64s
    records: pa.Array


def by_keys(
    log: CommitLog,
    index: IndexService,
    topic: str,
    keys: Sequence[str],
    *,
    max_num: int,
    begin_ms: int = 0,
    end_ms: int = TIME_MAX_MS,
    exact: bool = False,
) -> KeyHits:
    """The newest messages of a topic with each of some keys or unique keys, stored in [begin_ms, end_ms].

    Args: `max_num`, of each key, at most `config.max_msgs_num_batch`; `exact`: as of `Query.by_key`.
    Raises: Rejected for a number, topic or key that is none.
    """
    separator = PROPERTY_SEPARATOR.decode()
    bad = next((key for key in keys if not key or separator in key), None)
    if max_num < 1 or not topic or bad is not None:
        raise Rejected(
            f"a query has a topic, keys and a max_num of 1 or more, not {topic!r}, {bad!r}, {max_num}",
            field="key" if bad is not None else "topic" if not topic else "max_num",
            limit="topic, keys, max_num >= 1",
        )
    limit = min(max_num, log.config.max_msgs_num_batch)
    span = (begin_ms, end_ms)
    if len(keys) == 1:
        alone = newest(log, index, topic, keys[0], limit, span, exact=exact)
        raws = [alone[place] for place in sorted(alone)]
        return KeyHits(np.zeros(len(raws), np.int64), np.arange(len(raws)), raw_column(raws))
    asked, wanted = np.arange(len(keys)), limit
    rounds: list[_Round] = []
    while True:
        some = [keys[row] for row in asked.tolist()]
        found, offsets = _candidates(index, topic, some, wanted, *span)
        places, hits = _look_at(log, topic, some, found, offsets, span, exact=exact)
        full = np.bincount(found, minlength=len(some)) >= wanted
        # Of another time or key, or the same message twice: behind these there may be more.
        again = full & (np.bincount(hits.keys, minlength=len(some)) < limit)
        kept = ~again[hits.keys]
        if wanted > limit:
            kept &= _newest(hits.keys, limit)
        rounds.append(_Round(asked[hits.keys[kept]], hits.rows[kept], places, hits.records))
        if not again.any():
            return _together(rounds)
        asked, wanted = asked[again], 2 * wanted


def _look_at(
    log: CommitLog,
    topic: str,
    keys: Sequence[str],
    found: Int64s,
    offsets: Int64s,
    span: tuple[int, int],
    *,
    exact: bool,
) -> tuple[Int64s, KeyHits]:
    """Physical offsets of the records that are there, and which of them are hits, in the order of the log."""
    kept = (offsets >= log.start) & (offsets < log.confirmed)
    # A key that stands twice in a message has two entries.
    pairs = np.sort(offsets[kept] * len(keys) + found[kept])
    pairs = pairs[_changes(pairs)]
    offsets, found = pairs // max(len(keys), 1), pairs % max(len(keys), 1)
    first = _changes(offsets)
    places, rows = offsets[first], np.cumsum(first) - 1
    there, times, records = _read(log, places)
    good = there.copy()
    good[there] = (times >= span[0]) & (times <= span[1])
    # Rows among the records that were read: those of deleted files are not.
    hits = KeyHits(found, (np.cumsum(there) - 1)[rows], records)
    right = good[rows]
    if exact:
        right &= _exactly(hits, topic, keys, right)
    return places[there], KeyHits(hits.keys[right], hits.rows[right], records)


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


def _together(rounds: list[_Round]) -> KeyHits:
    if len(rounds) == 1:
        return KeyHits(*rounds[0][:2], rounds[0].records)
    _, first, rows = np.unique(
        np.concatenate([each.places for each in rounds]), return_index=True, return_inverse=True
    )
    starts = np.cumsum([0, *(len(each.places) for each in rounds)])
    hits = [start + each.rows for start, each in zip(starts[:-1], rounds, strict=True)]
    records = pa.concat_arrays([each.records for each in rounds])
    return KeyHits(
        np.concatenate([each.keys for each in rounds]),
        rows[np.concatenate(hits)],
        records.take(pa.array(first)),
    )


def _candidates(
    index: IndexService, topic: str, keys: Sequence[str], wanted: int, begin_ms: int, end_ms: int
) -> tuple[Int64s, Int64s]:
    """Rows of `keys`, and physical offsets of records that may match."""
    if len(keys) > FEW_KEYS:
        return index.find_many(key_hashes(topic, keys), wanted, begin_ms, end_ms)
    rows: list[int] = []
    offsets: list[int] = []
    for row, key in enumerate(keys):
        parts = index.find(topic, key, begin_ms, end_ms, wanted)
        some = list(islice(chain.from_iterable(parts), wanted))
        rows += [row] * len(some)
        offsets += some
    return np.array(rows, dtype=np.int64), np.array(offsets, dtype=np.int64)


def _read(log: CommitLog, places: Int64s) -> tuple[Bools, Int64s, pa.Array]:
    """Which of the places have a record, those records' store times, and the records, raw. Args: ascending.

    Raises: Corrupt for a record whose body is damaged, or that the disk does not give back.
    """
    there = np.zeros(len(places), dtype=bool)
    # Deleted meanwhile.
    first = int(np.searchsorted(places, log.start))
    if first == len(places):
        return there, np.empty(0, np.int64), pa.array([], pa.binary())
    try:
        found = log.records_at(places[first:])
    except OffsetOutOfRange:
        return _read(log, places)
    there[first:] = found.there
    return there, found.times_ms, found.records


def _exactly(hits: KeyHits, topic: str, keys: Sequence[str], asked: Bools) -> Bools:
    """Which hits are of messages that have the topic and the very key."""
    raws = hits.records.to_pylist()
    sizes = np.array([len(raw) for raw in raws], dtype=np.int64)
    batch = record.decode(b"".join(raws), np.cumsum(sizes) - sizes, sizes)
    topics = batch.column("topic").to_pylist()
    names = [set(keys_of(text)) for text in batch.column("properties").to_pylist()]
    pairs = zip(hits.keys.tolist(), hits.rows.tolist(), asked.tolist(), strict=True)
    return np.array(
        [wanted and topics[row] == topic and keys[key] in names[row] for key, row, wanted in pairs],
        dtype=bool,
    )
