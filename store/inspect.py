"""Look into a store directory without changing it: `verify` names every fault, `dump` prints every message.

Sizes are taken from the files, recovery happens in memory, nothing is locked: a store of RocketMQ or of ours,
running or not.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from . import format as fmt
from . import record, rows
from .chain import Chain
from .checksum import crc32c
from .config import StoreConfig
from .consume_queue import ConsumeQueue
from .errors import Corrupt, RayMQError, Rejected
from .files import Files
from .mapped_file_queue import MappedFileQueue
from .properties import decode as decode_properties
from .record import WalkStop

Int64s = npt.NDArray[np.int64]
_NO_QUEUE = (0x4, 0xC)


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong."""

    file: str
    offset: int
    rule: str
    detail: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON output."""
        return {"kind": "fault", **vars(self)}


class ReadOnlyStore:
    """The files of a store, opened for reading only."""

    def __init__(self, root: Path, files: Files | None = None) -> None:
        self.root = root
        self.files = files or Files()
        if not self.files.exists(root / "commitlog"):
            raise Rejected(
                f"{root} is no store: it has no commitlog directory",
                field="DIR",
                limit="a store directory",
            )
        names = [n for n in self.files.list(root / "commitlog") if n.isdigit()]
        #: what most files have, so that one of a wrong length is the one that is named
        sizes = Counter(self._size(root / "commitlog" / name) for name in names)
        self.segment_size_bytes = sizes.most_common(1)[0][0] if sizes else 0
        self.faults: list[Fault] = []
        self.log: MappedFileQueue | None = None
        if names:
            self.log = MappedFileQueue(
                root / "commitlog", self.segment_size_bytes, files=self.files, writable=False
            )
            self.log.load()
        self.own = self.files.exists(root / "raymq" / "meta")
        self.start = self.log.min_offset if self.log is not None else 0
        self.end = self.start
        self.positions: list[Int64s] = []
        self.sizes: list[Int64s] = []

    def _size(self, path: Path) -> int:
        fd = self.files.open_file(path, writable=False)
        try:
            return self.files.size(fd)
        finally:
            self.files.close(fd)

    def scan(self) -> None:
        """Walk the whole log in memory; a stop that is no clean end becomes a fault."""
        size = self.segment_size_bytes
        for file in self.log.files if self.log is not None else []:
            view = file.read_view()
            walk = record.walk(view, file.start, stop=size, check_position=self.own)
            self.positions.append(walk.positions)
            self.sizes.append(walk.sizes)
            self.end = walk.end
            if walk.reason is WalkStop.BLANK:
                self.end = file.start + size
                continue
            rest = np.frombuffer(view, dtype=np.uint8)[walk.end - file.start :]
            last = self.log is not None and file is self.log.files[-1]
            if rest.any() or walk.reason is not WalkStop.END_OF_DATA:
                self._fault(
                    file.path,
                    walk.end,
                    "records are valid up to the end of the log",
                    f"{walk.reason.value} at {walk.end}; non-zero bytes follow",
                )
            elif not last and self.log is not None and self._has_records(file.start + size):
                self._fault(
                    file.path,
                    walk.end,
                    "every file but the newest ends with a blank record",
                    "zeros in the middle of the log",
                )
            break

    def _has_records(self, from_offset: int) -> bool:
        for file in self.log.files if self.log is not None else []:
            if file.start >= from_offset:
                walk = record.walk(
                    file.read_view(), file.start, stop=self.segment_size_bytes, limit=1
                )
                if len(walk.positions):
                    return True
        return False

    def _fault(self, file: Path, offset: int, rule: str, detail: str) -> None:
        self.faults.append(Fault(str(file.relative_to(self.root)), offset, rule, detail))

    # --- consume queues -------------------------------------------------------------------------------------

    def queues(self) -> Iterator[tuple[str, int, ConsumeQueue]]:
        """Every consume queue on disk, by topic and queue id."""
        base = self.root / "consumequeue"
        if not self.files.exists(base):
            return
        for topic in self.files.list(base):
            for name in sorted((n for n in self.files.list(base / topic) if n.isdigit()), key=int):
                directory = base / topic / name
                names = self.files.list(directory)
                if not names:
                    continue
                queue = ConsumeQueue(
                    directory, self._size(directory / names[0]), files=self.files, writable=False
                )
                queue.load()
                queue.recover()
                yield topic, int(name), queue

    def check_queues(self) -> None:
        """Every unit points at the record it says, offsets are dense, nothing dispatched is missing."""
        expected = self._expected()
        seen: set[tuple[str, int]] = set()
        for topic, queue_id, queue in self.queues():
            seen.add((topic, queue_id))
            self._check_queue(topic, queue_id, queue, expected.get((topic, queue_id)))
            queue.close()
        if self.own or not expected:
            # Consume queues are caches: what is not there is rebuilt from the log at the next start.
            return
        for topic, queue_id in sorted(set(expected) - seen):
            self._fault(
                self.root / "consumequeue" / topic / str(queue_id),
                0,
                "every queue of the log has a consume queue",
                "missing",
            )

    def _check_queue(
        self, topic: str, queue_id: int, queue: ConsumeQueue, want: dict[str, Int64s] | None
    ) -> None:
        directory = self.root / "consumequeue" / topic / str(queue_id)
        low, high = queue.min_offset, queue.max_offset
        if want is None:
            if high > low:
                self._fault(directory, low, "units point at records", "the log has no such queue")
            return
        units = queue.read(low, high - low)
        known = np.searchsorted(want["offset"], np.arange(low, high))
        for index, unit in enumerate(units):
            at = int(known[index])
            offset = low + index
            found = at < len(want["offset"]) and int(want["offset"][at]) == offset
            if not found or int(want["position"][at]) != int(unit["position"]):
                self._fault(
                    directory,
                    offset,
                    "a unit points at its record",
                    f"unit of queue offset {offset} says {int(unit['position'])}"
                    + (
                        f", the record is at {int(want['position'][at])}"
                        if found
                        else ", no record"
                    ),
                )
                return
            if int(want["size"][at]) != int(unit["size"]):
                self._fault(
                    directory,
                    offset,
                    "a unit has its record's size",
                    f"{int(unit['size'])} instead of {int(want['size'][at])}",
                )
                return

    def _expected(self) -> dict[tuple[str, int], dict[str, Int64s]]:
        parts: dict[tuple[str, int], list[rows.RowRun]] = {}
        for run in self._runs():
            parts.setdefault((run.topic, run.queue_id), []).append(run)
        return {
            key: {
                "offset": np.concatenate(
                    [np.arange(r.first_offset, r.first_offset + len(r.positions)) for r in runs]
                ),
                "position": np.concatenate([r.positions for r in runs]),
                "size": np.concatenate([r.sizes for r in runs]),
            }
            for key, runs in parts.items()
        }

    def _runs(self) -> Iterator[rows.RowRun]:
        files = self.log.files if self.log is not None else []
        for file, positions, sizes in zip(files, self.positions, self.sizes, strict=False):
            yield from rows.runs(file.read_view(), file.start, positions, sizes)

    def check_chain(self) -> None:
        """The bytes of every chain unit have its CRC-32C."""
        directory = self.root / "raymq" / "chain"
        if not self.files.exists(directory) or self.log is None:
            return
        chain = Chain(directory, self.segment_size_bytes, files=self.files, writable=False)
        chain.load()
        at = None
        for unit in chain.units(self.start, self.end):
            file = self.log.find(unit.start)
            if file is None or unit.end > self.end:
                break
            if at is not None and unit.start != at:
                self._fault(
                    directory, unit.start, "chain units are contiguous", f"gap before, at {at}"
                )
                break
            at = unit.end
            data = file.read_view()[unit.start - file.start : unit.end - file.start]
            if crc32c(data) != unit.crc:
                self._fault(
                    file.path,
                    unit.start,
                    "bytes have the CRC-32C of their chain unit",
                    f"unit [{unit.start}, {unit.end})",
                )
        chain.close()

    # --- messages -------------------------------------------------------------------------------------------

    def messages(self) -> Iterator[dict[str, Any]]:
        """Every message by topic and queue in queue order, with its consume queue unit when there is one."""
        units: dict[tuple[str, int], Any] = {}
        for topic, queue_id, queue in self.queues():
            low, high = queue.min_offset, queue.max_offset
            found = queue.read(low, high - low).copy()
            units[topic, queue_id] = (low, found)
            queue.close()
        parts: dict[tuple[str, int], list[rows.RowRun]] = {}
        for run in self._runs():
            parts.setdefault((run.topic, run.queue_id), []).append(run)
        for (topic, queue_id), runs in sorted(parts.items()):
            low, found = units.get((topic, queue_id), (0, None))
            count = 0
            for run in runs:
                for index, row in enumerate(run.batch.to_pylist()):
                    at = run.first_offset + index - low
                    unit = found[at] if found is not None and 0 <= at < len(found) else None
                    yield _message(row, int(run.positions[index]), int(run.sizes[index]), unit)
                    count += 1
            first = runs[0].first_offset
            yield {
                "kind": "queue",
                "topic": topic,
                "queueId": queue_id,
                "min": first,
                "max": runs[-1].first_offset + len(runs[-1].positions),
                "read": count,
            }

    def close(self) -> None:
        """Close every file."""
        if self.log is not None:
            self.log.close()


def _message(row: dict[str, Any], position: int, size: int, unit: Any) -> dict[str, Any]:
    properties = decode_properties(row["properties"])
    host, _, port = row["store_host"].rpartition(":")
    body: bytes = row["body"]
    return {
        "kind": "msg",
        "ok": True,
        "topic": row["topic"],
        "queueId": row["queue_id"],
        "queueOffset": row["queue_offset"],
        "phy": position,
        "size": size,
        "cqPos": None if unit is None else int(unit["position"]),
        "cqSize": None if unit is None else int(unit["size"]),
        "cqTags": None if unit is None else int(unit["tags_code"]),
        "batchNum": 1,
        "sysFlag": row["sys_flag"],
        "flag": row["flag"],
        "bodyCRC": row["body_crc"],
        "born": row["born_time_ms"],
        "bornHost": "/" + row["born_host"],
        "stored": row["store_time_ms"],
        "storeHost": "/" + row["store_host"],
        "reconsume": row["reconsume_times"],
        "prepared": row["prepared_transaction_offset"],
        "msgId": fmt.offset_message_id(host.strip("[]"), int(port), position),
        "tags": properties.get("TAGS"),
        "keys": properties.get("KEYS"),
        "bodyLen": len(body),
        "bodySha256": hashlib.sha256(body).hexdigest(),
        "body64": base64.b64encode(body).decode(),
        "props": dict(sorted(properties.items())),
    }


def verify(root: Path) -> list[Fault]:
    """Every fault of a store: file, offset, rule. Empty when there is none.

    Raises: Rejected when `root` is no store. Changes nothing.
    """
    try:
        store = ReadOnlyStore(root)
    except Corrupt as error:
        return [_from_error(root, error)]
    try:
        store.scan()
        store.check_queues()
        store.check_chain()
    except (Corrupt, RayMQError) as error:
        store.faults.append(_from_error(root, error))
    finally:
        store.close()
    return store.faults


def _from_error(root: Path, error: RayMQError) -> Fault:
    path = str(error.fields.get("path", root))
    name = path.removeprefix(str(root)).lstrip("/") or "."
    return Fault(
        name,
        int(error.fields.get("offset", 0)),
        str(error.fields.get("rule", "readable")),
        str(error),
    )


def dump(root: Path) -> Iterator[dict[str, Any]]:
    """One dict a message, one a queue, and a last one of kind `end`, in the words of RocketMQ's fields."""
    store = ReadOnlyStore(root)
    try:
        store.scan()
        count = 0
        for item in store.messages():
            count += item["kind"] == "msg"
            yield item
        yield {
            "kind": "end",
            "messages": count,
            "errors": len(store.faults),
            "maxPhy": store.end,
            "faults": [fault.as_dict() for fault in store.faults],
        }
    finally:
        store.close()


def store_config_of(root: Path) -> StoreConfig:
    """The file sizes of an existing store as a config to open it with."""
    files = Files()

    def first_size(directory: Path) -> int | None:
        if not files.exists(directory):
            return None
        for name in files.list(directory):
            if name.isdigit() and len(name) == 20:
                fd = files.open_file(directory / name, writable=False)
                try:
                    return files.size(fd)
                finally:
                    files.close(fd)
        return None

    options: dict[str, int] = {}
    segment = first_size(root / "commitlog")
    if segment:
        options["segment_size_bytes"] = segment
    base = root / "consumequeue"
    for topic in files.list(base) if files.exists(base) else []:
        for queue in files.list(base / topic):
            size = first_size(base / topic / queue)
            if size:
                options["consume_queue_file_size_bytes"] = size
    return StoreConfig(**options)  # type: ignore[arg-type]
