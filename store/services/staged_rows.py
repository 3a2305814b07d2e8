"""Staged rows: no reader sees them until their write is decided. Then each is published exactly once.

A task puts its rows to the staged topic of the shard of their queue, as a producer of its own. Each row names its real
topic and queue, as half messages do. The target of a row for later is the timer topic of that shard. A decision names
ranges of staged rows. `publish` puts the rows of such ranges to their queue, as rows of one producer whose id the
write's name makes: a row's sequence is its place among the write's rows of that queue. Batches of a stream share one
(stream_batches.py). So every published record says
how far the publication came, and the shard recognises what is stored. A call may be repeated by any client, also after
a crash in the middle. It stores what is missing.

The rows of an attempt that no decision names belong to no write. They are deleted with their commit log files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from raymq.store.base.arrays import Int64s
from raymq.store.base.errors import OffsetOutOfRange, Rejected, Unavailable, require
from raymq.store.base.format import STAGED_TOPIC, TIMER_TOPIC
from raymq.store.config.store_config import StoreConfig
from raymq.store.delay.delay_hook import DelayHook
from raymq.store.put.service_host import ServiceHost
from raymq.store.queues.raw_records import decode_records
from raymq.store.records import producer_stamp
from raymq.store.records.binary_columns import null_where, ranges, value_bytes, value_offsets
from raymq.store.records.key_check import check_keys
from raymq.store.records.properties import PROPERTY_SEPARATOR, TAG_NAME
from raymq.store.records.record import PUT_SCHEMA
from raymq.store.records.requests import AppendedRows, PutRequest
from raymq.store.records.small_batch import SmallBatch, more_columns
from raymq.store.records.staged_range import StagedRange, target_properties
from raymq.store.state.shard_state import TopicInfo
from raymq.store.state.topics import check_target

#: most bytes of staged records that are read and put together
SLICE_BYTES = 1024 * 1024
SLICE_ROWS = 4096
#: ranges of up to so many rows are decoded together
SMALL_ROWS = 512

#: rows to publish, with the CRCs of their bodies
_ROWS = PUT_SCHEMA.append(pa.field("body_crc", pa.int32(), nullable=False))
_COLUMNS = ("born_time_ms", "body_crc", "body", "properties")

# A record's properties begin with the producer's stamp and the tag. The rest is the text that the producer sent.
_TARGET = r"REAL_TOPIC\x01(?P<topic>[^\x02]+)\x02REAL_QID\x01(?P<queue>[0-9]{1,9})\x02"
_SENT = f"^{_TARGET}"


class Published(NamedTuple):
    """The result of one call of `publish`."""

    #: rows of the write in this queue that are published, those of earlier calls included
    rows: int
    is_complete: bool
    #: the last rows of this call; None: it had nothing to do
    appended: AppendedRows | None


class StagedGuard:
    """Opens the staged topic to the columns that producers put (`TopicGuard`)."""

    def __init__(self, config: StoreConfig, delay_hook: DelayHook) -> None:
        """Args: `delay_hook`: checks rows that the timer topic is to take."""
        self._delay_hook = delay_hook
        # A published record is smaller than the staged one: its topic was in the properties, too.
        self.record_bytes_max = config.record_bytes_max

    def check_batch(self, request: PutRequest, topics: Mapping[str, TopicInfo]) -> None:
        """Refuse columns with a row that could not be published. Raises: Rejected, Unavailable; nothing is stored then.

        A publication that is refused in the middle could never be completed. So it is not checked against what may have
        changed since: the clock, the switch of the timers, and how many rows wait for a second.
        """
        batch = request.batch
        if isinstance(batch, SmallBatch):
            batch = batch.to_batch()
        more = more_columns(batch)
        if more:
            raise Rejected(
                f"rows of a staged write have {', '.join(more)}, which their publication would lose; leave it out",
                field=next(iter(more)),
                limit="absent",
            )

        found = pc.extract_regex(batch.column("properties").fill_null(b""), _SENT)
        if request.queue_id or request.producer_id is None or found.null_count:
            raise Rejected(
                "rows of the staged topic are of a producer, in queue 0, and their properties begin with REAL_TOPIC "
                "and REAL_QID; use a staged write",
                field="properties",
                limit="REAL_TOPIC, REAL_QID",
            )

        topic, queue = pc.struct_field(found, "topic"), pc.struct_field(found, "queue")
        for raw in pc.unique(topic).to_pylist():
            rows = pc.equal(topic, raw)
            queue_ids = queue.filter(rows).cast(pa.string()).cast(pa.int64())
            name = raw.decode("utf-8", "replace")
            if name == TIMER_TOPIC:
                sent = request._replace(
                    queue_id=pc.max(queue_ids).as_py(), batch=_as_sent(batch, rows)
                )
                self._delay_hook.check_staged(sent, topics)
                continue
            check_target(name, pc.max(queue_ids).as_py(), topics)
            if topics[name].compacted:
                check_keys(name, batch, rows)


def _as_sent(batch: pa.RecordBatch, rows: pa.BooleanArray) -> pa.RecordBatch:
    """Some staged rows as they will be published: without their target."""
    batch = batch.filter(rows)
    texts = pc.replace_substring_regex(batch.column("properties"), _SENT, "", max_replacements=1)
    columns = [batch.column("body"), batch.column("tag"), texts, batch.column("born_time_ms")]
    return pa.record_batch(columns, schema=PUT_SCHEMA)


def publish(
    store: ServiceHost,
    topic: str,
    queue_id: int,
    *,
    producer_id: int,
    ranges: Sequence[StagedRange],
    is_over: Callable[[], bool],
    first_sequence: int = 0,
) -> Published:
    """Put the rows of `ranges`, in order, to their queue, unless an earlier call has. Callers: any thread.

    Args: `producer_id`: of the write in this queue. `ranges`: the same in each call for it. `is_over`: asked after each
    slice of about 1 MiB: whether this call shall return, although rows are left. `first_sequence`: of the first row; if
    it is that of a `StreamBatch`, all earlier batches are complete.
    Durable: nothing, as `MessageStore.put`.
    Raises: OffsetOutOfRange if staged rows were deleted; Rejected if there are not as many as `ranges` says;
    Unavailable while they cannot be read yet; as `MessageStore.put`. The call may be repeated after each.
    """
    total = sum(each.rows for each in ranges)

    def published() -> int:
        entry = store.state.producers.get((producer_id, topic, queue_id))
        rows = 0 if entry is None else entry.next_sequence - first_sequence
        # Rows of an earlier batch, or of a later one, which begins when all rows of this one are published.
        return min(max(rows, 0), total)

    appended: AppendedRows | None = None
    for first, batch in _joined(_rows_from(store, topic, queue_id, ranges, published())):
        if published() < first:
            raise Unavailable(
                "a change of the leader took published rows back; publish again",
                field="ranges",
            )
        sequence = first_sequence + first
        request = PutRequest(
            topic,
            queue_id,
            batch.select(PUT_SCHEMA.names),
            producer_id,
            0,
            sequence,
            "quorum",
            was_staged=True,
            body_crcs=batch.column("body_crc").to_numpy(),
            may_skip=not first and sequence > 0,
        )
        appended = store.put(request)
        rows = first + batch.num_rows
        if rows < total and is_over():
            return Published(rows, False, appended)

    return Published(total, True, appended)


def _joined(slices: Iterator[tuple[int, pa.RecordBatch]]) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Join slices that follow each other, up to the bytes and rows of one: many tasks stage few rows each."""
    begin, rows, size = 0, 0, 0
    batches: list[pa.RecordBatch] = []
    for first, batch in slices:
        if batches and (size + batch.nbytes > SLICE_BYTES or rows + batch.num_rows > SLICE_ROWS):
            yield begin, _as_one(batches)
            batches, rows, size = [], 0, 0
        begin = begin if batches else first
        batches.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
    if batches:
        yield begin, _as_one(batches)


def _as_one(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    if len(batches) == 1:
        return batches[0]
    (whole,) = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return whole


def _rows_from(
    store: ServiceHost, topic: str, queue_id: int, ranges: Sequence[StagedRange], done: int
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The rows of all ranges from number `done` on. Small ranges are decoded together."""
    end = 0
    small: list[_SmallRange] = []
    for each in ranges:
        begin, end = end, end + each.rows
        if end <= done:
            continue

        records = _records_of_small(store, each) if begin >= done else None
        if small and (records is None or _is_full(small, records)):
            yield from _rows_of_small(store, topic, queue_id, small)
            small = []
        if records is not None:
            small.append(_SmallRange(each, begin, records))
            continue

        for first, batch in _rows_of(store, topic, queue_id, each, max(done - begin, 0)):
            yield begin + first, batch

    if small:
        yield from _rows_of_small(store, topic, queue_id, small)


class _SmallRange(NamedTuple):
    """A range without rows of others, its first row's number in the write, and its records."""

    staged: StagedRange
    begin: int
    records: pa.Array


def _is_full(parts: list[_SmallRange], more: pa.Array) -> bool:
    """Whether a slice has no room for more records."""
    size = sum(each.records.nbytes for each in parts) + more.nbytes
    rows = sum(len(each.records) for each in parts) + len(more)
    return size > SLICE_BYTES or rows > SLICE_ROWS


def _records_of_small(store: ServiceHost, wanted: StagedRange) -> pa.Array | None:
    """The records of a small range; None if it is not small, or must be read with more care."""
    if (
        wanted.rows > min(SMALL_ROWS, SLICE_ROWS)
        or wanted.last_offset - wanted.first_offset != wanted.rows - 1
    ):
        return None
    try:
        found = store.fetch_whole(
            STAGED_TOPIC,
            0,
            wanted.first_offset,
            max_bytes=SLICE_BYTES,
            max_records=wanted.rows,
        )
    except OffsetOutOfRange:
        return None
    is_complete = found.records is not None and len(found.records) == wanted.rows
    return found.records if is_complete else None


def _rows_of_small(
    store: ServiceHost, topic: str, queue_id: int, parts: list[_SmallRange]
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The rows of small ranges that follow each other."""
    records = pa.concat_arrays([each.records for each in parts])
    decoded = decode_records(records, columns=_COLUMNS)
    producers = np.repeat(
        np.array([each.staged.producer_id for each in parts], dtype=np.uint64),
        [each.staged.rows for each in parts],
    )
    batch = _own_rows(decoded, topic, queue_id, producers)
    if batch.num_rows == len(records):
        yield parts[0].begin, batch
        return

    # A range is not what the decision says. Alone it says so.
    for each in parts:
        for first, rows in _rows_of(store, topic, queue_id, each.staged, 0):
            yield each.begin + first, rows


def _rows_of(
    store: ServiceHost, topic: str, queue_id: int, wanted: StagedRange, done: int
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The rows of a range from number `done` on: the number of the first one, and columns of PUT_SCHEMA."""
    offset, seen = wanted.first_offset, 0
    if wanted.last_offset - wanted.first_offset == wanted.rows - 1:
        # No other producer's row is between them.
        offset, seen = offset + done, done

    while offset <= wanted.last_offset:
        try:
            found = store.fetch_whole(
                STAGED_TOPIC,
                0,
                offset,
                max_bytes=SLICE_BYTES,
                max_records=min(SLICE_ROWS, wanted.last_offset + 1 - offset),
            )
        except OffsetOutOfRange as error:
            if offset >= int(error.fields.get("min", 0)):
                raise Unavailable(
                    f"staged row {offset} is not in the log of this leader; publish again",
                    field="ranges",
                ) from error
            raise OffsetOutOfRange(
                f"staged rows of queue {queue_id} of {topic} were deleted before they were published "
                "(file_reserved_hours, or a full disk with clean_file_forcibly). Rows of other queues may have been "
                "published: under another write id they would be stored twice",
                **{**error.fields, "field": "ranges"},
            ) from error
        if found.records is None or not len(found.records):
            raise Unavailable(
                f"staged row {offset} cannot be read yet; publish again", field="ranges"
            )

        records = decode_records(found.records, columns=_COLUMNS)
        batch = _own_rows(records, topic, queue_id, np.uint64(wanted.producer_id))
        rows = batch.num_rows
        if rows and seen + rows > done:
            skipped = max(0, done - seen)
            yield seen + skipped, batch.slice(skipped)
        seen += rows
        offset = found.next_offset

    if seen != wanted.rows:
        raise Rejected(
            f"the staged rows {wanted.first_offset} to {wanted.last_offset} have {seen} rows of the write's producer "
            f"for queue {queue_id} of {topic}, not {wanted.rows}",
            field="ranges",
            limit=wanted.rows,
            found=seen,
        )


def _own_rows(
    records: pa.RecordBatch,
    topic: str,
    queue_id: int,
    producers: np.uint64 | npt.NDArray[np.uint64],
) -> pa.RecordBatch:
    """The rows for one queue among staged records, as they were sent. Args: `producers`: of all rows, or of each."""
    properties = records.column("properties")
    stamps = producer_stamp.read_column(_first_bytes(properties))
    is_own = stamps.valid & (stamps.producer_ids == producers)
    target = target_properties(topic, queue_id)
    end = producer_stamp.STAMP_BYTES + len(target)
    begins = pc.binary_slice(properties, producer_stamp.STAMP_BYTES, end)
    if pc.all(pc.equal(begins, target)).as_py():
        # No row has a tag, and none is for another queue.
        tag = pa.nulls(len(records), pa.string())
        rest = _after(properties, end)
        rows = [records.column("body"), tag, rest, records.column("born_time_ms")]
        batch = _with_crcs(rows, records)
        return batch if is_own.all() else batch.filter(pa.array(is_own))

    found = _parts(properties, target)
    is_own &= found.is_here
    if not is_own.all():
        records = records.filter(pa.array(is_own))

    data = value_bytes(properties)
    rows = [
        records.column("body"),
        _text(data, found.tag_starts[is_own], found.tag_ends[is_own]).cast(pa.string()),
        _text(data, found.rest_starts[is_own], found.ends[is_own]),
        records.column("born_time_ms"),
    ]
    return _with_crcs(rows, records)


def _with_crcs(rows: list[pa.Array], records: pa.RecordBatch) -> pa.RecordBatch:
    """Columns of PUT_SCHEMA, and the CRCs that the records of the rows have."""
    return pa.record_batch([*rows, records.column("body_crc")], schema=_ROWS)


class _Parts(NamedTuple):
    """Where the parts of each row's properties are. A row without a tag has an empty one."""

    #: the row is for the queue
    is_here: npt.NDArray[np.bool_]
    tag_starts: Int64s
    tag_ends: Int64s
    #: what the task sent, up to the end of the row
    rest_starts: Int64s
    ends: Int64s


def _parts(properties: pa.BinaryArray, target: bytes) -> _Parts:
    """Find the parts: the producer's stamp, the tag if there is one, the target, and the rest."""
    data = value_bytes(properties)
    offsets = value_offsets(properties).astype(np.int64)
    ends = offsets[1:]
    begins = offsets[:-1] + producer_stamp.STAMP_BYTES
    tag_starts = tag_ends = targets = begins

    has_tag = _have(data, begins, ends, TAG_NAME)
    if has_tag.any():
        separators = np.append(np.flatnonzero(data == PROPERTY_SEPARATOR[0]), len(data))
        after = separators[np.searchsorted(separators, begins)]
        tag_starts = np.where(has_tag, begins + len(TAG_NAME), begins)
        tag_ends = np.where(has_tag, after, begins)
        targets = np.where(has_tag, after + 1, begins)

    return _Parts(
        _have(data, targets, ends, target), tag_starts, tag_ends, targets + len(target), ends
    )


def _have(
    data: npt.NDArray[np.uint8], starts: Int64s, ends: Int64s, text: bytes
) -> npt.NDArray[np.bool_]:
    """Whether each range begins with a text."""
    is_long_enough = ends - starts >= len(text)
    found = np.zeros(len(starts), dtype=np.bool_)
    places = starts[is_long_enough, None] + np.arange(len(text))
    found[is_long_enough] = (data[places] == np.frombuffer(text, dtype=np.uint8)).all(axis=1)
    return found


def _text(data: npt.NDArray[np.uint8], starts: Int64s, ends: Int64s) -> pa.BinaryArray:
    """The ranges as values; null where one is empty."""
    if bool((starts == ends).all()):
        return pa.nulls(len(starts), pa.binary())
    return _null_if_empty(ranges(data, starts, ends))


def _after(texts: pa.BinaryArray, bytes_: int) -> pa.BinaryArray:
    """What comes after so many bytes, which each value has; null where that is nothing."""
    offsets = value_offsets(texts).astype(np.int64)
    return _text(value_bytes(texts), offsets[:-1] + bytes_, offsets[1:])


def _null_if_empty(texts: pa.BinaryArray) -> pa.BinaryArray:
    is_empty = pc.equal(pc.binary_length(texts), 0)
    return null_where(is_empty, texts) if pc.any(is_empty).as_py() else texts


def _first_bytes(properties: pa.BinaryArray) -> npt.NDArray[np.uint8]:
    """The first 24 bytes of each value, uint8[n, 24]."""
    offsets = value_offsets(properties)
    require(
        bool((np.diff(offsets) >= producer_stamp.STAMP_BYTES).all()), "staged rows have a stamp"
    )
    heads = pc.binary_slice(properties, 0, producer_stamp.STAMP_BYTES)
    begin = int(value_offsets(heads)[0])
    data = value_bytes(heads)[begin : begin + len(heads) * producer_stamp.STAMP_BYTES]
    return data.reshape(-1, producer_stamp.STAMP_BYTES)
