"""Exports a store's messages as Parquet files, one slice in memory at a time.

The target appears whole or not at all: files are written to another directory, which is renamed at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raymq.store.base import format as fmt
from raymq.store.base.errors import Corrupt, Rejected
from raymq.store.base.failpoints import fail_point
from raymq.store.base.files import Files
from raymq.store.records.record_decode import RECORD_SCHEMA, as_text
from raymq.store.records.rows import queued
from raymq.store.state.shard_state import INTERNAL_TOPIC

from .faults import ReportProgress
from .read_only import ReadOnlyStore
from .slices import RecordRange

#: bytes after which a new file begins
FILE_BYTES = 256 << 20

_TIME = pa.timestamp("ms", tz="UTC")
#: columns that are copied from the decoded record
_COPIED = (
    "topic",
    "queue_id",
    "queue_offset",
    "body",
    "born_host",
    "store_host",
    "physical_offset",
)
_NUMBERS = ("flag", "sys_flag", "body_crc", "reconsume_times", "prepared_transaction_offset")
#: one row per message, in the order of the log
SCHEMA = pa.schema(
    [
        pa.field("topic", pa.string(), nullable=False),
        pa.field("queue_id", pa.int32(), nullable=False),
        pa.field("queue_offset", pa.int64(), nullable=False),
        pa.field("body", pa.binary(), nullable=False),
        #: TAGS, __SHARDINGKEY, the words of KEYS, UNIQ_KEY: null if the message has none
        pa.field("tag", pa.string()),
        pa.field("sharding_key", pa.string()),
        pa.field("index_keys", pa.list_(pa.string())),
        pa.field("unique_key", pa.string()),
        #: all properties, including those above and internal ones
        pa.field("properties", pa.map_(pa.string(), pa.string()), nullable=False),
        pa.field("born_time", _TIME, nullable=False),
        pa.field("store_time", _TIME, nullable=False),
        pa.field("born_host", pa.string(), nullable=False),
        pa.field("store_host", pa.string(), nullable=False),
        #: RocketMQ's offsetMsgId
        pa.field("message_id", pa.string(), nullable=False),
        pa.field("physical_offset", pa.int64(), nullable=False),
        pa.field("record_bytes", pa.int32(), nullable=False),
        *map(RECORD_SCHEMA.field, _NUMBERS),
    ]
)
_PAIR = r"(?s)^(?P<k>[^\x01]+)\x01(?P<v>.+)$"


@dataclass(frozen=True, kw_only=True)
class ExportChoice:
    """The choice of messages to export. Queue offsets are half-open, [start, stop)."""

    #: None: all topics but RayMQ's own
    topic: str | None = None
    queue_id: int | None = None
    start: int | None = None
    stop: int | None = None
    #: export also the readable records after damage
    after_damage: bool = False

    def rows(self, batch: pa.RecordBatch) -> npt.NDArray[np.bool_]:
        """A mask of the chosen rows of a decoded slice. Rows without a queue are never chosen."""
        keep = queued(batch)
        topics = batch.column("topic")
        if self.topic is None:
            keep &= pc.not_equal(topics, INTERNAL_TOPIC).to_numpy(zero_copy_only=False)
        else:
            keep &= pc.equal(topics, self.topic).to_numpy(zero_copy_only=False)
        offsets = batch.column("queue_offset").to_numpy()
        if self.queue_id is not None:
            keep &= batch.column("queue_id").to_numpy() == self.queue_id
        if self.start is not None:
            keep &= offsets >= self.start
        if self.stop is not None:
            keep &= offsets < self.stop
        return keep


@dataclass(frozen=True)
class Exported:
    """The result of an export."""

    messages: int
    files: list[str]
    bytes: int
    #: damaged ranges of the log: nothing of them was exported
    damaged: list[tuple[int, int]]


def export(
    root: Path,
    target: Path,
    choice: ExportChoice | None = None,
    *,
    file_bytes: int = FILE_BYTES,
    files: Files | None = None,
    progress: ReportProgress | None = None,
) -> Exported:
    """Write the chosen messages of a store into the new directory `target`, as part-00000.parquet and so on.

    Raises: Rejected if `target` exists, `root` is not a store, or no message is of the topic. Raises Corrupt for a
    damaged log. With `after_damage` the readable rest is exported instead. Durable: at return.
    """
    files = files or Files()
    choice = choice or ExportChoice()
    if files.exists(target):
        raise Rejected(f"{target} exists; name a new directory", field="target", path=str(target))

    with closing(ReadOnlyStore(root, files, progress)) as store:
        store.scan()
        faults = store.faults.all()
        if faults and not choice.after_damage:
            raise Corrupt(
                f"the log is damaged: {faults[0].detail} ({faults[0].file} at {faults[0].offset}); "
                "--after-damage exports what can be read",
                path=str(root / faults[0].file),
                offset=faults[0].offset,
                rule=faults[0].rule,
            )

        _check_topic(store, choice)
        return _write(store, target, choice, file_bytes)


def _check_topic(store: ReadOnlyStore, choice: ExportChoice) -> None:
    """Check the choice's topic and queue. Raises: Rejected if no message is of them: the name may be misspelt."""
    if choice.topic is None:
        return

    queues = {number for topic, number, _ in store.queue_directories() if topic == choice.topic}
    if choice.queue_id in queues or (choice.queue_id is None and queues):
        return

    # The consume queues may be lost, so the records decide.
    wanted = replace(choice, start=None, stop=None)
    if not any(wanted.rows(part.decode()).any() for part in store.slices(after_damage=True)):
        known = sorted({topic for topic, _, _ in store.queue_directories()})
        queue = "" if choice.queue_id is None else f"queue {choice.queue_id} of "
        raise Rejected(
            f"the store has no message of {queue}topic {choice.topic!r}; it has "
            f"{', '.join(known) or 'no topics'}",
            field="topic",
            limit="a topic of the store",
        )


def _write(store: ReadOnlyStore, target: Path, choice: ExportChoice, file_bytes: int) -> Exported:
    """Write the files under a temporary name and rename their directory. After a failure nothing is left."""
    files = store.files
    temporary = target.with_name(target.name + ".tmp")
    files.remove_tree(temporary)
    files.make_dirs(temporary)
    parts: list[_Part] = []
    messages = 0

    try:
        # If no message is chosen, one empty table is written: readers refuse a directory without files.
        parts.append(_Part(temporary / "part-00000.parquet", files))
        for table in _tables(store, choice):
            if parts[-1].size >= file_bytes:
                parts[-1].close()
                parts.append(_Part(temporary / f"part-{len(parts):05d}.parquet", files))
            parts[-1].write(table)
            messages += table.num_rows

        parts[-1].close()
        files.sync_dir(temporary)
        fail_point("export.before_rename")
        files.rename(temporary, target)
        files.sync_dir(target.parent)
    except BaseException:
        for part in parts:
            part.abandon()
        files.remove_tree(temporary)
        raise

    names = [part.name for part in parts]
    return Exported(messages, names, sum(part.size for part in parts), list(store.damaged))


def _tables(store: ReadOnlyStore, choice: ExportChoice) -> Iterator[pa.Table]:
    for part in store.slices("export", after_damage=choice.after_damage):
        batch = part.decode()
        keep = choice.rows(batch)
        if keep.any():
            kept = batch if keep.all() else batch.filter(pa.array(keep))
            yield table_of(kept, part.select(keep))


def table_of(batch: pa.RecordBatch, part: RecordRange) -> pa.Table:
    """A decoded slice as a table of SCHEMA."""
    columns = {name: batch.column(name) for name in (*_COPIED, *_NUMBERS)}
    for name in ("born_time", "store_time"):
        columns[name] = batch.column(f"{name}_ms").cast(_TIME)

    rows, names, values = _pairs(batch.column("properties"))
    count = batch.num_rows
    offsets = np.zeros(count + 1, dtype=np.int32)
    np.cumsum(np.bincount(rows, minlength=count), out=offsets[1:])
    columns["properties"] = pa.MapArray.from_arrays(pa.array(offsets), names, values)

    for column, name in (
        ("tag", "TAGS"),
        ("sharding_key", "__SHARDINGKEY"),
        ("unique_key", "UNIQ_KEY"),
    ):
        columns[column] = _last_values(rows, names, values, name, count)

    words = pc.replace_substring_regex(_last_values(rows, names, values, "KEYS", count), " +", " ")
    columns["index_keys"] = pc.split_pattern(pc.utf8_trim(words, " "), " ")

    columns["message_id"] = _message_ids(batch.column("store_host"), part.positions)
    columns["record_bytes"] = pa.array(part.sizes.astype(np.int32))
    return pa.table([columns[name] for name in SCHEMA.names], schema=SCHEMA)


def _pairs(properties: pa.Array) -> tuple[npt.NDArray[np.int64], pa.Array, pa.Array]:
    """Row, name and value of every property. Incomplete pairs are dropped, as RocketMQ's readers do."""
    lists = pc.split_pattern(properties, b"\x02")
    rows = pc.list_parent_indices(lists).to_numpy()
    pairs = pc.extract_regex(pc.list_flatten(lists), _PAIR)
    whole = pairs.is_valid()
    pairs = pairs.filter(whole)
    kept = rows[whole.to_numpy(zero_copy_only=False)].astype(np.int64)
    return kept, as_text(pc.struct_field(pairs, 0)), as_text(pc.struct_field(pairs, 1))


def _last_values(
    rows: npt.NDArray[np.int64], names: pa.Array, values: pa.Array, name: str, count: int
) -> pa.Array:
    """The value of one property in each of `count` rows. Of a repeated property the last value counts."""
    pair_rows = np.flatnonzero(pc.equal(names, name).to_numpy(zero_copy_only=False))
    pair_of_row = np.full(count, -1, dtype=np.int64)
    pair_of_row[rows[pair_rows]] = pair_rows
    return values.take(pa.array(pair_of_row, mask=pair_of_row < 0))


def _message_ids(hosts: pa.Array, positions: npt.NDArray[np.int64]) -> pa.Array:
    """RocketMQ's offsetMsgId of each row: store host and physical offset in hex."""
    encoded = hosts.dictionary_encode()
    prefixes = []
    for host in encoded.dictionary.to_pylist():
        ip, _, port = host.rpartition(":")
        prefixes.append(fmt.pack_host(ip.strip("[]"), int(port)).hex().upper())
    digits = positions.astype(">i8").tobytes().hex().upper().encode()
    offsets = pa.array(np.frombuffer(digits, dtype="S16").astype("U16"), pa.string())
    prefix_of_row = pa.array(prefixes, pa.string()).take(encoded.indices)
    return pc.binary_join_element_wise(prefix_of_row, offsets, "")


class _Part:
    """One Parquet file, written through `Files`."""

    def __init__(self, path: Path, files: Files) -> None:
        self.name = path.name
        self._sink = _Sink(path, files)
        self._writer = pq.ParquetWriter(self._sink, SCHEMA, compression="zstd")

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._sink.tell()

    def write(self, table: pa.Table) -> None:
        """Write one row group."""
        self._writer.write_table(table)

    def close(self) -> None:
        """Finish and sync the file."""
        self._writer.close()
        self._sink.sync()
        self._sink.close()

    def abandon(self) -> None:
        """Close the file after a failure."""
        # pyarrow writes the footer when it closes the writer. That must not fail again.
        self._sink.discarding = True
        self._writer.close()
        self._sink.close()


class _Sink:
    """A writable file for pyarrow, on `Files`. pyarrow does not close a file that it was given."""

    def __init__(self, path: Path, files: Files) -> None:
        self._files = files
        self._fd = files.open_file(path, create=True)
        self._at = 0
        self.closed = False
        #: writes are dropped, after a failure
        self.discarding = False

    def write(self, data: Any) -> int:
        """Append `data`."""
        if not self.discarding:
            self._files.pwrite(self._fd, data, self._at)
            self._at += len(data)
        return len(data)

    def tell(self) -> int:
        """Bytes written."""
        return self._at

    def flush(self) -> None:
        """Nothing is buffered here."""

    def sync(self) -> None:
        """fsync the file."""
        self._files.sync(self._fd)

    def close(self) -> None:
        """Close the file without a sync."""
        if not self.closed:
            self.closed = True
            self._files.close(self._fd)
