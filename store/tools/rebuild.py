"""Rebuilds derived files of a store from its log: consume queues, chain, checkpoint, marks, config.

Each is built under another name, synced, and renamed. Callers: with the store's lock.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from raymq.store.base.checksum import crc32c
from raymq.store.base.failpoints import fail_point
from raymq.store.base.files import Files
from raymq.store.base.format import pack_queue_units
from raymq.store.config.store_config import StoreConfig
from raymq.store.config_files import config_json
from raymq.store.groups.leases.lease_table import LeaseTable
from raymq.store.log.chain import Chain, ChainUnit
from raymq.store.log.control_files import checkpoint
from raymq.store.log.control_files.marks import FILE_BYTES
from raymq.store.log.epochs import EpochStarts, EpochVisitor
from raymq.store.log.segments.log_files import read_of
from raymq.store.log.unit_bounds import RecordStarts, unit_bytes
from raymq.store.queues.consume_queue import ConsumeQueue, may_be_queue, queue_directory
from raymq.store.queues.queue_files import OpenFiles
from raymq.store.queues.unit_places import OFFSET_MAX
from raymq.store.records import rows
from raymq.store.state.shard_state import INTERNAL_TOPIC, ShardState
from raymq.store.state.topics import QueueKey

from .read_only import ReadOnlyStore
from .slices import in_log_order
from .verify_files import newest_store_time, readable


def replace_directory(target: Path, *, files: Files) -> None:
    """Replace the directory `target` by `<target>.new`. Durable: at return."""
    new, old = target.with_name(f"{target.name}.new"), target.with_name(f"{target.name}.old")
    files.remove_tree(old)
    if files.exists(target):
        files.rename(target, old)
    fail_point("repair.between_renames")
    files.rename(new, target)
    files.sync_dir(target.parent)
    files.remove_tree(old)


def make_empty(target: Path, *, files: Files) -> Path:
    """Make the empty directory `<target>.new`, in which the files of `target` are built."""
    new = target.with_name(f"{target.name}.new")
    files.remove_tree(new)
    files.make_dirs(new)
    return new


def rebuild_consume_queues(store: ReadOnlyStore, names: Iterable[str], upto: int) -> None:
    """Rebuild the consume queues of the records that end at or below `upto`.

    Args: `names`: directories such as `consumequeue/<topic>/<queue id>`. `consumequeue` means all queues of the log.
    """
    files = store.files
    size = store.usual_size([directory for _, _, directory in store.queue_directories()])
    size = size or StoreConfig().consume_queue_file_size_bytes

    wanted: set[QueueKey] = set()
    for name in names:
        topic, _, number = name.removeprefix("consumequeue").lstrip("/").rpartition("/")
        wanted |= {(topic, int(number))} if topic else _queues_of_log(store)

    new: dict[QueueKey, ConsumeQueue] = {}
    opened = OpenFiles(files)
    for topic, queue_id in sorted(wanted):
        directory = queue_directory(store.root, topic, queue_id)
        new[topic, queue_id] = ConsumeQueue(
            make_empty(directory, files=files), size, files=files, opened=opened
        )

    try:
        _append_records(store, new, upto)
        for queue in new.values():
            queue.sync()
        opened.sync_names()
    finally:
        for queue in new.values():
            queue.close()

    for topic, queue_id in new:
        replace_directory(queue_directory(store.root, topic, queue_id), files=files)


def _append_records(store: ReadOnlyStore, queues: dict[QueueKey, ConsumeQueue], upto: int) -> None:
    """Write the units of all records that end at or below `upto`."""
    for part in store.slices("consume queues"):
        part = part.select(part.positions + part.sizes <= upto)
        if not len(part.positions):
            break
        for run in in_log_order(part, store.other_places, store.levels_ms):
            queue = queues.get((run.topic, run.queue_id))
            # A start passes over such records, too.
            if queue is not None and not queue.jumps_to(int(run.offsets[0])):
                units = pack_queue_units(run.positions, run.sizes, run.tags_codes)
                queue.append(int(run.offsets[0]), units)


def _queues_of_log(store: ReadOnlyStore) -> set[QueueKey]:
    found: set[QueueKey] = set()
    for part in store.slices():
        for run in in_log_order(part, store.other_places):
            if may_be_queue(run.topic, run.queue_id) and 0 <= run.offsets[0] < OFFSET_MAX:
                found.add((run.topic, run.queue_id))
    return found


def rebuild_chain(store: ReadOnlyStore) -> None:
    """Rebuild the whole chain, in units of the largest append of one epoch, as recovery makes them."""
    files, target = store.files, store.root / "raymq" / "chain"
    size = store.segment_size_bytes
    bytes_max = StoreConfig(segment_size_bytes=size).append_unit_bytes
    made = Chain(make_empty(target, files=files), size, files=files)
    made.load()

    epochs = EpochStarts()
    _state(store, epochs)
    starts = RecordStarts()
    for part in store.records:
        starts.note(part.positions)
    position = store.start
    while position < store.end and store.log is not None:
        file = store.log.find(position)
        if file is None:
            break
        stop = min(store.end, file.start + size, epochs.next_start(position) or store.end)
        read = partial(read_of, store.log, end=store.end)
        data = unit_bytes(read, position, stop, bytes_max, starts)
        end, epoch = position + len(data), epochs.epoch_at(position)
        made.append([ChainUnit(position, end, epoch, crc32c(data), made.value)])
        position = end
        store.progress("chain", position - store.start, store.end - store.start)

    made.sync()
    made.close()
    replace_directory(target, files=files)


def write_checkpoint(store: ReadOnlyStore) -> None:
    """Write the checkpoint: the newest store time for log and queues, and index time 0, so that a start checks all its
    files."""
    newest = newest_store_time(store)
    data = struct.pack(">5q", newest, newest, 0, 0, 0).ljust(checkpoint.FILE_BYTES, b"\0")
    store.files.write_file_atomic(store.root / "checkpoint", data)


def write_marks(store: ReadOnlyStore) -> None:
    """Write marks of the bytes that were just read and synced. The next leader finds the confirmed end again."""
    if store.log is not None:
        store.log.sync_range(store.start, store.end)
    data = struct.pack("=4q", store.end, store.end, 0, 0).ljust(FILE_BYTES, b"\0")
    store.files.write_file_atomic(store.root / "raymq" / "marks", data)


def rebuild_config_file(store: ReadOnlyStore, name: str) -> None:
    """Rebuild a config file from its backup, or from the log. RocketMQ begins a missing file as an empty one."""
    files, path = store.files, store.root / "config" / name
    backup = path.with_name(f"{name}.bak")
    table: dict[Any, Any] = {}
    if readable(files, backup):
        files.write_file_atomic(path, files.read_file(backup))
        return

    if name == config_json.TOPICS:
        state = _state(store)
        config_json.add_topics(table, _queue_counts(store, state), state.topics)
    elif name == config_json.CONSUMER_OFFSETS and store.is_own_store:
        config_json.add_offsets(table, _state(store).offsets)
    else:
        files.unlink(path)
        files.sync_dir(path.parent)
        return

    files.write_file_atomic(path, config_json.encode(table, 0))


def _state(store: ReadOnlyStore, epochs: EpochStarts | None = None) -> ShardState:
    """Topics and offsets, as the records of the log have them. Args: `epochs` gets where epochs begin."""
    # The offsets of workers are in their leases.
    state = ShardState(packed_parts=[LeaseTable()])
    visitor = EpochVisitor(EpochStarts() if epochs is None else epochs, state)
    for part in store.slices():
        batch = part.decode()
        is_own = np.equal(batch.column("topic").to_numpy(False), INTERNAL_TOPIC)
        own, positions = batch.filter(is_own), part.positions[is_own].tolist()
        tags = rows.tag_column(own.column("properties")).to_pylist()
        for tag, body, at in zip(tags, own.column("body").to_pylist(), positions, strict=True):
            kind = (tag or b"").decode()
            # What a record of leases changes may be damaged before it. The group goes on at an earlier offset then.
            with suppress(*((ValueError, LookupError) if kind in LeaseTable.packed_kinds else ())):
                state.apply_state_record(kind, body)
            visitor.note(kind, at)
    return state


def _queue_counts(store: ReadOnlyStore, state: ShardState) -> dict[str, int]:
    queues = {name: info.queues for name, info in state.topics.items()}
    for topic, queue_id in _queues_of_log(store):
        # A queue of a name that was deleted may be the earlier topic's.
        if topic not in state.deleted_topics:
            queues[topic] = max(queues.get(topic, 0), queue_id + 1)
    return queues
