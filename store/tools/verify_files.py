"""The small files of a store: checkpoint, marks, config JSON, timer wheel and timer log.

Source: StoreCheckpoint, ConfigManager, TimerWheel, TimerLog of RocketMQ 5.3.3.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

from raymq.store.base import format as fmt
from raymq.store.base.arrays import leading
from raymq.store.base.errors import Corrupt
from raymq.store.base.files import Files
from raymq.store.base.rules import FILE_NAME_RULE
from raymq.store.config_files import fastjson
from raymq.store.delay.timer_log import TIMER_UNIT_BYTES, TIMER_UNIT_DTYPE
from raymq.store.log.control_files.marks import FILE_BYTES
from raymq.store.log.recovery.recovery_table import Decision
from raymq.store.log.segments.mapped_file_queue import MappedFileQueue
from raymq.store.queues.consume_queue import sub_directories

from .read_only import ReadOnlyStore, joined

CHECKPOINT_LENGTH_RULE = "the checkpoint has its five longs"
CHECKPOINT_TIMES_RULE = "checkpoint times are not later than the log"
CONFIG_JSON_RULE = "a config file is a JSON object"
MARKS_RULE = "marks are one page of offsets"
TIMER_UNIT_RULE = "timer log units are whole and follow each other"
TIMER_RECORD_RULE = "a timer log unit points at a record"
TIMER_SLOT_RULE = "a timer wheel slot points into the timer log"

TIMER_SLOT_DTYPE = np.dtype(
    [("time", ">i8"), ("first", ">i8"), ("last", ">i8"), ("count", ">i4"), ("magic", ">i4")]
)
_BLANK_MAGIC_AT = 12


def check_checkpoint(store: ReadOnlyStore) -> None:
    """Check length and times of `checkpoint`, which a store need not have."""
    path = store.root / "checkpoint"
    if not store.files.exists(path):
        return

    data = store.files.read_file(path)
    if len(data) < 40:
        # A crash may come between its creation and its first write.
        if not store.crashed:
            store.faults.add(path, 0, CHECKPOINT_LENGTH_RULE, f"{len(data)} bytes")
        return

    cut = store.verdict is None or store.verdict.decision != Decision.KEEP.value
    newest = 0 if cut or store.crashed else newest_store_time(store)
    times = zip(("log", "queues", "index"), struct.unpack_from(">3q", data), strict=True)

    for index, (name, value) in enumerate(times):
        detail = f"{name}: {value}"
        if newest and name != "index" and value > newest:
            detail += f", the newest record is of {newest}"
        elif value >= 0:
            continue
        store.faults.add(path, 8 * index, CHECKPOINT_TIMES_RULE, detail)


def newest_store_time(store: ReadOnlyStore) -> int:
    """The greatest store time of the last two files' records, because it may fall within a file; 0 without any."""
    newest = 0
    for each in store.records[-2:]:
        for part in each.slices():
            times_ms = part.decode().column("store_time_ms").to_numpy()
            newest = max(newest, int(times_ms.max()))
    return newest


def check_marks(store: ReadOnlyStore) -> None:
    """Check `raymq/marks` of a store that was stopped in order."""
    path = store.root / "raymq" / "marks"
    if not store.is_own_store or store.crashed:
        return
    size = store.files.size_of(path) if store.files.exists(path) else 0
    if size < FILE_BYTES:
        store.faults.add(path, 0, MARKS_RULE, f"{size} bytes")
        return
    for index, (name, value) in enumerate(store.marks._asdict().items()):
        if not 0 <= value <= store.marks.appended_end:
            store.faults.add(
                path, 8 * index, MARKS_RULE, f"{name} {value}, appended {store.marks.appended_end}"
            )


def check_config(store: ReadOnlyStore) -> None:
    """Check that every `config/*.json` can be read, or is empty, when its backup counts."""
    directory = store.root / "config"
    for name in store.files.list(directory):
        if name.endswith(".json") and not store.files.is_dir(directory / name):
            text = store.files.read_file(directory / name)
            wrong = json_fault(text) if text.strip() else None
            if wrong is not None:
                store.faults.add(directory / name, wrong[0], CONFIG_JSON_RULE, wrong[1])


def json_fault(data: bytes) -> tuple[int, str] | None:
    """The offset and the reason why bytes are not a JSON object in fastjson's dialect; None if they are one."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start, "not UTF-8"
    try:
        value = fastjson.loads(text)
    except fastjson.NotJson as error:
        return error.at, str(error)
    return None if isinstance(value, dict) else (0, "not an object")


def check_strays(store: ReadOnlyStore) -> None:
    """Name the files in `consumequeue`, where only the directories of topics and queues belong."""
    files, base = store.files, store.root / "consumequeue"
    topics = [base / topic for topic in sub_directories(base, files)]
    inside = [
        each / name for each in (base, *topics) if files.is_dir(each) for name in files.list(each)
    ]
    for path in inside if files.is_dir(base) or not files.exists(base) else [base]:
        if not files.is_dir(path):
            detail = (
                f"{path} is a file where directories belong; nothing reads it; move it elsewhere"
            )
            store.faults.add(path, 0, FILE_NAME_RULE, detail)


def check_timer(store: ReadOnlyStore) -> None:
    """Check `timerlog` unit by unit against the commit log, and `timerwheel` against the timer log's end."""
    directory = store.root / "timerlog"
    if not store.files.exists(directory):
        return

    size = store.usual_size([directory])
    end = 0
    if size:
        queue = MappedFileQueue(directory, size, files=store.files, writable=False)
        try:
            queue.load()
            end = _check_timer_log(store, queue)
        except Corrupt as error:
            store.faults.error(error)
            return
        finally:
            queue.close()

    wheel = store.root / "timerwheel"
    if store.files.exists(wheel) and not store.crashed:
        _check_wheel(store, wheel, end)


def _check_timer_log(store: ReadOnlyStore, queue: MappedFileQueue) -> int:
    """Check every unit. Returns: the end of the units."""
    starts, _ = joined(store.records)
    end = queue.min_offset
    for file in queue.files:
        room = file.size // TIMER_UNIT_BYTES
        view = memoryview(file.read(0, file.size))
        units = np.frombuffer(view, dtype=TIMER_UNIT_DTYPE, count=room)
        count = leading(units["size"] == TIMER_UNIT_BYTES)
        units = units[:count]
        unit_positions = file.start + np.arange(count) * TIMER_UNIT_BYTES
        end = file.start + count * TIMER_UNIT_BYTES

        wrong = (units["previous"] >= unit_positions) | (units["previous"] < -1)
        for row in np.flatnonzero(wrong).tolist():
            detail = f"the unit before is said to be at {int(units['previous'][row])}"
            store.faults.add(
                file.path, int(unit_positions[row]) - file.start, TIMER_UNIT_RULE, detail
            )

        positions = units["position"].astype(np.int64)
        found = np.searchsorted(starts, positions)
        at = starts[np.minimum(found, len(starts) - 1)] if len(starts) else positions - 1
        lost = (positions >= store.start) & (positions < store.end) & (at != positions)
        for row in np.flatnonzero(lost).tolist():
            detail = f"no record starts at {int(positions[row])}"
            store.faults.add(
                file.path, int(unit_positions[row]) - file.start, TIMER_RECORD_RULE, detail
            )

        magic_at = count * TIMER_UNIT_BYTES + _BLANK_MAGIC_AT
        if view[magic_at : magic_at + 4] != fmt.MAGIC_BLANK.to_bytes(4, "big"):
            break
        end = file.start + file.size

    return end


def _check_wheel(store: ReadOnlyStore, path: Path, end: int) -> None:
    """Check that each used slot of the wheel points into the timer log, which ends at `end`."""
    data = store.files.read_file(path)
    count = len(data) // TIMER_SLOT_DTYPE.itemsize
    slots: Any = np.frombuffer(data, dtype=TIMER_SLOT_DTYPE, count=count)
    used = slots["count"] > 0
    wrong = used & ((slots["last"] >= end) | (slots["first"] > slots["last"]))
    for index in np.flatnonzero(wrong).tolist():
        slot = slots[index]
        store.faults.add(
            path,
            index * TIMER_SLOT_DTYPE.itemsize,
            TIMER_SLOT_RULE,
            f"units {int(slot['first'])} to {int(slot['last'])}; the timer log ends at {end}",
        )


def readable(files: Files, path: Path) -> bool:
    """Whether a config file can be read and is not empty."""
    if not files.exists(path):
        return False
    data = files.read_file(path)
    return bool(data.strip()) and json_fault(data) is None
