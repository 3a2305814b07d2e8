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
from . import rows
from .chain import Chain
from .config import StoreConfig
from .consume_queue import BLANK_SIZE, ConsumeQueue
from .errors import Corrupt, RayMQError, Rejected
from .files import Files
from .log_scan import Known, Scan, scan
from .mapped_file_queue import MappedFileQueue
from .marks import read_marks
from .meta import read_meta
from .properties import decode as decode_properties
from .recovery import Decision
from .segment_paths import other_directories

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


@dataclass(frozen=True)
class Verdict:
    """What a start would do where the log ends: a row of the decision table of docs/recovery.md."""

    end: int
    #: keep | truncate | corrupt
    decision: str
    row: str
    #: what the walk found there
    found: str
    #: what physically can have happened
    cause: str

    def as_dict(self) -> dict[str, Any]:
        """For JSON output."""
        return dict(vars(self))

    def __str__(self) -> str:
        does = {"keep": "the log ends", "truncate": "a start cuts the log", "corrupt": "damage"}
        return f"{does[self.decision]} at {self.end} (row {self.row}; {self.found}): {self.cause}"


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
        others = other_directories(root, files=self.files)
        self.segment_size_bytes = self._usual_size([root / "commitlog", *others])
        self.faults: list[Fault] = []
        self.log: MappedFileQueue | None = None
        if self.segment_size_bytes:
            self.log = MappedFileQueue(
                root / "commitlog",
                self.segment_size_bytes,
                files=self.files,
                writable=False,
                read_from=others,
            )
            self.log.load()
        self._meta = read_meta(root / "raymq" / "meta", files=self.files)
        #: before the scan: what is appended meanwhile stands above them
        self._marks = read_marks(root / "raymq" / "marks", files=self.files)
        self.own = self._meta.get("store_id") is not None
        self.verdict: Verdict | None = None
        self.start = self.log.min_offset if self.log is not None else 0
        self.end = self.start
        #: the valid records of each file: its view, its start, their positions and sizes
        self._records: list[tuple[memoryview, int, Int64s, Int64s]] = []

    def _usual_size(self, directories: list[Path]) -> int:
        """What most files have, so that one of a wrong length is the one that is named; 0 when all are empty."""
        sizes = Counter(
            self._size(directory / name)
            for directory in directories
            for name in self.files.list(directory)
            if name.isdigit()
        )
        # An unfinished file is shorter.
        return max(((n, size) for size, n in sizes.items() if size), default=(0, 0))[1]

    def _size(self, path: Path) -> int:
        fd = self.files.open_file(path, writable=False)
        try:
            return self.files.size(fd)
        finally:
            self.files.close(fd)

    def scan(self) -> None:
        """Walk the whole log in memory as recovery does; what recovery would report becomes a fault."""
        poisoned = self._meta.get("poisoned")
        if poisoned:
            self._fault(self.root / "raymq" / "meta", 0, "poisoned", str(poisoned))
        if self.log is None:
            return
        chain = self._chain()
        try:
            found = self._scan(self.log, chain)
        finally:
            if chain is not None:
                chain.close()
        self.end, row = found.end, found.row
        self.verdict = Verdict(found.end, row.decision.value, row.name, found.fault, row.cause)
        if row.decision is Decision.CORRUPT:
            file = self.log.find(found.end)
            self._fault(
                self.log.directory if file is None else file.path,
                found.end,
                f"recovery row {row.name}",
                f"{found.fault}: {row.cause}",
            )

    def _scan(self, log: MappedFileQueue, chain: Chain | None) -> Scan:
        marks = self._marks
        #: a cut that was begun: the next start finishes it before it looks at anything
        cut = self._meta.get("cut")
        return scan(
            log,
            chain,
            Known(
                self.own,
                self._same_boot,
                marks.synced_end if cut is None else min(cut, marks.synced_end),
                marks.appended_end if cut is None else min(cut, marks.appended_end),
            ),
            files=self.files,
            scan_from=self.start,
            visit=lambda view, base, walk: self._records.append(
                (view, base, walk.positions, walk.sizes)
            ),
            top=cut,
        )

    def _chain(self) -> Chain | None:
        directory = self.root / "raymq" / "chain"
        if not self.files.exists(directory):
            return None
        return Chain(directory, self.segment_size_bytes, files=self.files, writable=False)

    @property
    def _same_boot(self) -> bool:
        # What only the pool has is not looked at: without it the log ends as after a power loss.
        in_pool = self._meta.get("pool") is not None
        return bool(self._meta.get("boot_id") == self.files.boot_id()) and not in_pool

    def _fault(self, file: Path, offset: int, rule: str, detail: str) -> None:
        self.faults.append(Fault(str(file.relative_to(self.root)), offset, rule, detail))

    # --- consume queues -------------------------------------------------------------------------------------

    def queues(self) -> Iterator[tuple[str, int, ConsumeQueue]]:
        """Every consume queue on disk, by topic and queue id."""
        base = self.root / "consumequeue"
        if not self.files.exists(base):
            return
        found = [
            (topic, int(name), base / topic / name)
            for topic in self.files.list(base)
            for name in self.files.list(base / topic)
            if name.isdigit()
        ]
        size = self._usual_size([directory for _, _, directory in found])
        for topic, queue_id, directory in sorted(found) if size else []:
            queue = ConsumeQueue(directory, size, files=self.files, writable=False)
            queue.load()
            queue.recover()
            # Units of deleted log files may stay until their queue's file is only about such.
            queue.correct_min_offset(self.start)
            yield topic, queue_id, queue

    def check_queues(self) -> None:
        """Every unit points at the record it says, offsets are dense, nothing dispatched is missing.

        Units that a start would cut and make anew are left out: those of records behind the log's end, and after a
        power loss those above the dispatched mark.
        """
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
        units = queue.read(low, high - low)
        kept = units["position"].astype(np.int64) + units["size"] <= self._queues_end
        kept &= units["size"] != BLANK_SIZE
        if want is None:
            if kept.any():
                self._fault(directory, low, "units point at records", "the log has no such queue")
            return
        known = np.searchsorted(want["offset"], np.arange(low, high))
        for index in np.flatnonzero(kept).tolist():
            unit, at = units[index], int(known[index])
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

    @property
    def _queues_end(self) -> int:
        """Consume queues are believed up to here."""
        crashed = self.files.exists(self.root / "abort")
        if not self.own or self._same_boot or not crashed:
            return self.end
        return min(self.end, self._marks.dispatched_end)

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
        for view, base, positions, sizes in self._records:
            yield from rows.runs(view, base, positions, sizes)

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


@dataclass(frozen=True)
class Report:
    """What `check` found."""

    faults: list[Fault]
    #: None when the log could not be walked or has no file
    verdict: Verdict | None


def check(root: Path, files: Files | None = None) -> Report:
    """Every fault of a store, and what a start would do where its log ends.

    Raises: Rejected when `root` is no store. Changes nothing.
    """
    try:
        store = ReadOnlyStore(root, files)
    except Corrupt as error:
        return Report([_from_error(root, error)], None)
    try:
        store.scan()
        store.check_queues()
    except RayMQError as error:
        store.faults.append(_from_error(root, error))
    finally:
        store.close()
    return Report(store.faults, store.verdict)


def verify(root: Path, files: Files | None = None) -> list[Fault]:
    """Every fault of a store: file, offset, rule. Empty when there is none; a torn tail that a start cuts is none.

    Raises: Rejected when `root` is no store. Changes nothing.
    """
    return check(root, files).faults


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
            "verdict": None if store.verdict is None else store.verdict.as_dict(),
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
