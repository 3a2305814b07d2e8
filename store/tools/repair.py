"""Repairs a store that is not open: prints a plan, and carries it out when the operator asks for it.

Derived files are rebuilt from the log. The log itself is only cut, at an offset that the operator names. Files are
copied before they are changed. RocketMQ has no such tool: it cuts a log at the first bad record without asking.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import closing
from dataclasses import KW_ONLY, asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path

import numpy as np

from raymq.store.base.clock import Clock
from raymq.store.base.errors import Rejected
from raymq.store.base.failpoints import fail_point
from raymq.store.base.files import Files
from raymq.store.base.rules import FILE_NAME_RULE
from raymq.store.log.chain import Chain
from raymq.store.log.control_files.abort_lock import StoreLock
from raymq.store.log.control_files.marks import Marks
from raymq.store.log.control_files.meta import TRUNCATING, Meta
from raymq.store.log.recovery.recovery_table import Decision
from raymq.store.log.segments.mapped_file_queue import MappedFileQueue
from raymq.store.log.segments.segment_paths import file_name, other_directories

from . import rebuild
from .faults import Fault, LogVerdict, ReportProgress
from .inspect import check, check_derived
from .read_only import ReadOnlyStore
from .rebuild_index import rebuild_index
from .repair_backup import RepairBackup
from .slices import by_queue
from .verify_chain import crc_is_wrong

#: parts that can be rebuilt from the log
PARTS = ("consumequeue", "chain", "index", "checkpoint", "marks", "config")


_ACTIONS = {
    "consumequeue": "make consume queues again from the log",
    "chain": "make the chain again from the log",
    "index": "make the index again from the log",
    "checkpoint": "write the checkpoint again",
    "marks": "write the marks again",
    "config": "write config files from their backups, or from the log",
}
#: parts that are not a file or directory of their name
_FILES = {
    "chain": {"raymq/chain"},
    "marks": {"raymq/marks"},
    "config": {"config/topics.json"},
    "index": {"index", "raymq/index"},
}


@dataclass(frozen=True)
class Step:
    """One step of a repair."""

    #: `log`, or one of PARTS
    part: str
    action: str
    #: files that are changed or removed, relative to the store. Each is copied before
    files: tuple[str, ...]


@dataclass(frozen=True)
class Lost:
    """Readable messages of one queue that a cut removes: queue offsets [first, last]."""

    topic: str
    queue_id: int
    first: int
    last: int
    messages: int


@dataclass(frozen=True)
class Truncation:
    """The cut that a damaged log needs before it can be opened."""

    offset: int
    lost: tuple[Lost, ...]
    #: unreadable physical ranges [start, stop)
    unreadable: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        count = sum(lost.messages for lost in self.lost)
        per_queue = ", ".join(
            f"{lost.messages} of queue {lost.queue_id} of {lost.topic} "
            f"(offsets {lost.first} to {lost.last})"
            for lost in self.lost
        )
        gone = sum(stop - start for start, stop in self.unreadable)
        return (
            f"a cut at {self.offset} loses {count} readable messages{f': {per_queue}' if per_queue else ''}, "
            f"and {gone} bytes that cannot be read"
        )


@dataclass(frozen=True)
class Plan:
    """The steps of a repair that was not run."""

    steps: tuple[Step, ...]
    faults: tuple[Fault, ...]
    #: the cut that is needed, if the log is damaged and no cut was requested
    needs_truncation: Truncation | None = None
    #: the requested cut
    truncation: Truncation | None = None

    def as_dict(self) -> dict[str, object]:
        """For JSON output."""
        return asdict(self)


@dataclass(frozen=True)
class Repaired:
    """The result of a repair."""

    steps: tuple[Step, ...]
    #: the needed cut: the log is damaged and no cut was requested, so nothing was done
    needs_truncation: Truncation | None
    #: directory of the copies; None if nothing was changed
    kept: Path | None
    #: the faults that `verify` still finds
    faults: list[Fault]


@dataclass(eq=False)
class Repair:
    """A repair of one store."""

    root: Path
    _: KW_ONLY
    #: offset at which a damaged log is cut
    truncate_at: int | None = None
    #: PARTS to rebuild whatever `verify` says of them
    rebuild: Iterable[str] = ()
    #: directory of the copies; None: one in the store
    keep: Path | None = None
    files: Files = field(default_factory=Files)
    clock: Clock = field(default_factory=Clock)
    progress: ReportProgress | None = None

    def __post_init__(self) -> None:
        unknown = set(self.rebuild) - set(PARTS)
        if unknown:
            raise Rejected(
                f"{sorted(unknown)} cannot be rebuilt; choose from {', '.join(PARTS)}",
                field="rebuild",
                limit=", ".join(PARTS),
            )
        #: end of the last record that any consume queue knows
        self._queues_known = -1

    def plan(self) -> Plan:
        """The steps that `run` would take. Changes nothing.

        Raises: Rejected for a cut that is not needed or not at a record. Corrupt if files are missing or have other
        sizes, which no repair can mend.
        """
        with self._opened() as store:
            return self._plan(store)

    def _opened(self) -> closing[ReadOnlyStore]:
        return closing(ReadOnlyStore(self.root, self.files, self.progress))

    def run(self) -> Repaired:
        """Make the plan under the store's lock and carry it out.

        Raises: as `plan`, and Unavailable while the store is open. Durable: each step at its end. Run an interrupted
        repair again.
        """
        lock = StoreLock(self.root, files=self.files)
        lock.acquire()
        try:
            return self._run()
        finally:
            lock.release()

    def _run(self) -> Repaired:
        plan = self.plan()
        if not plan.steps:
            return Repaired((), plan.needs_truncation, None, list(plan.faults))

        backup = RepairBackup(self.root, self._backup_directory(), files=self.files)
        self.files.make_dirs(backup.directory)
        report = json.dumps({"store": str(self.root), **plan.as_dict()}, indent=1).encode()
        self.files.write_file_atomic(backup.directory / "plan.json", report)
        fail_point("repair.planned")

        if plan.truncation is not None:
            self._truncate(plan.truncation.offset, backup)
        with self._opened() as store:
            rebuilding = self._find_rebuild_steps(store)
            self._rebuild_derived(store, rebuilding, backup)

        steps = (*(step for step in plan.steps if step.part == "log"), *rebuilding)
        return Repaired(steps, None, backup.directory, check(self.root, self.files).faults)

    def _backup_directory(self) -> Path:
        if self.keep is not None:
            if self.files.exists(self.keep) and self.files.list(self.keep):
                raise Rejected(
                    f"{self.keep} is not empty; name another directory for the copies",
                    field="keep",
                    path=str(self.keep),
                )
            return self.keep
        now = datetime.fromtimestamp(self.clock.now_ms() / 1000, timezone.utc)
        return self.root / "raymq" / f"repair-{now:%Y%m%dT%H%M%S%f}"

    # --- the plan ---------------------------------------------------------------------------------

    def _plan(self, store: ReadOnlyStore) -> Plan:
        wanted = self._scan(store)
        needed_truncation = self._find_needed_truncation(store)
        self._check_requested_truncation(needed_truncation)
        self._queues_known = check_derived(store)
        faults = tuple(store.faults.all())

        if needed_truncation is None:
            return Plan(tuple(_steps(faults, wanted)), faults)
        if self.truncate_at is None:
            return Plan((), faults, needs_truncation=needed_truncation)
        steps = (self._truncation_step(store, needed_truncation), *_steps(faults, wanted))
        return Plan(steps, faults, truncation=needed_truncation)

    def _find_rebuild_steps(self, store: ReadOnlyStore) -> list[Step]:
        """The steps besides the cut, which changes the contents that the other files must have."""
        wanted = self._scan(store)
        # Damage that the cut left ends the repair, if no record starts at the cut any more.
        self._find_needed_truncation(store)
        self._queues_known = check_derived(store)
        return _steps(tuple(store.faults.all()), wanted)

    def _scan(self, store: ReadOnlyStore) -> set[str]:
        """Scan the log. Returns: the parts to rebuild whatever `verify` says of them."""
        store.scan()
        wanted = set(self.rebuild)
        if _is_corrupt(store.verdict) and ("chain" in wanted or crc_is_wrong(store, store.end)):
            # The chain may be what is damaged: judge the log without it.
            wanted.add("chain")
            store.forget()
            store.scan(trust_chain=False)
        return wanted

    def _find_needed_truncation(self, store: ReadOnlyStore) -> Truncation | None:
        """The cut without which a start refuses the log, at the requested offset if one was requested."""
        if not _is_corrupt(store.verdict):
            return None
        return self._describe_truncation(
            store, store.end if self.truncate_at is None else self.truncate_at
        )

    def _check_requested_truncation(self, needed_truncation: Truncation | None) -> None:
        if self.truncate_at is not None and needed_truncation is None:
            raise Rejected(
                "a start would open this log as it is; a cut is for a log that it refuses",
                field="truncate_at",
                limit="a damaged log",
            )

    def _describe_truncation(self, store: ReadOnlyStore, offset: int) -> Truncation:
        """The records that a cut at `offset` removes. Raises: Rejected if no record starts there."""
        starts = np.concatenate([[store.end], *(part.positions for part in store.records)])
        if offset not in starts:
            raise Rejected(
                f"no record starts at {offset} below the damage at {store.end}; cut there, or at a record before",
                field="truncate_at",
                limit=store.end,
            )

        found: dict[tuple[str, int], tuple[int, int, int]] = {}
        for part in store.slices(after_damage=True):
            for rows in by_queue(part.select(part.positions >= offset)):
                low, high = int(rows.offsets.min()), int(rows.offsets.max())
                key = (rows.topic, rows.queue_id)
                first, last, count = found.get(key, (low, high, 0))
                found[key] = (min(first, low), max(last, high), count + len(rows.offsets))

        lost = tuple(Lost(*key, *found[key]) for key in sorted(found))
        # Only the marks still have the end of missing files.
        damaged = store.damaged or [(store.end, max(store.end, store.marks.appended_end))]
        return Truncation(offset, lost, tuple(damaged))

    def _truncation_step(self, store: ReadOnlyStore, truncation: Truncation) -> Step:
        log = store.log
        changed = (
            [] if log is None else [f for f in log.files if f.start + f.size > truncation.offset]
        )
        names = tuple(f"commitlog/{file.path.name}" for file in changed)
        pool = (
            "; bytes that are only in the transient pool go too" if store.meta.get("pool") else ""
        )
        return Step("log", f"cut the log: {truncation}{pool}", names)

    # --- the steps --------------------------------------------------------------------------------

    def _truncate(self, offset: int, backup: RepairBackup) -> None:
        """Truncate the log as recovery does: the next start finishes an interrupted cut."""
        root, files = self.root, self.files
        with self._opened() as store:
            size = store.segment_size_bytes

        others = other_directories(root, files=files)
        segments = MappedFileQueue(root / "commitlog", size, files=files, read_from=others)
        with closing(segments):
            segments.load()

            for file in segments.files:
                if file.start + file.size > offset:
                    start = max(offset, file.start)
                    name = f"{file_name(start)}.cut"
                    backup.copy_range(file.path, start - file.start, file.size, name)

            side = root / "raymq"
            for name in ("meta", "marks", "chain"):
                backup.copy(side / name)
            fail_point("repair.kept")

            meta = Meta.open(side / "meta", files=files) if files.exists(side / "meta") else None
            if meta is not None:
                meta.update({TRUNCATING: offset, "pool": None})
            if files.exists(side / "marks"):
                marks = Marks.open(side / "marks", files=files)
                marks.lower(offset)
                marks.close()

            segments.truncate_to(offset)
            fail_point("repair.cut_after_zero")
            if files.exists(side / "chain"):
                chain = Chain(side / "chain", size, files=files)
                chain.load()
                chain.truncate_to(offset)
                chain.sync()
                chain.close()

            if meta is not None:
                meta.update({TRUNCATING: None})
                meta.close()

    def _rebuild_derived(
        self, store: ReadOnlyStore, steps: list[Step], backup: RepairBackup
    ) -> None:
        parts = {step.part: step.files for step in steps}
        for step in steps:
            for name in step.files:
                backup.copy(self.root / name)

        if "chain" in parts:
            rebuild.rebuild_chain(store)
        if "consumequeue" in parts:
            rebuild.rebuild_consume_queues(store, parts["consumequeue"], self._units_upto(store))
        if "index" in parts:
            rebuild_index(store)
        if "checkpoint" in parts:
            rebuild.write_checkpoint(store)
        if "marks" in parts:
            rebuild.write_marks(store)
        for name in parts.get("config", ()):
            rebuild.rebuild_config_file(store, Path(name).name)

        fail_point("repair.done")

    def _units_upto(self, store: ReadOnlyStore) -> int:
        """The end up to which units exist: the confirmed end, or that of the last unit. A start dispatches later
        records."""
        confirmed = store.marks.confirmed_end if store.is_own_store else store.end
        return min(store.end, max(confirmed, self._queues_known))


def _is_corrupt(verdict: LogVerdict | None) -> bool:
    return verdict is not None and verdict.decision == Decision.CORRUPT.value


def _steps(faults: tuple[Fault, ...], wanted: set[str]) -> list[Step]:
    """The steps that rebuild the damaged or named parts."""
    damaged: dict[str, set[str]] = {part: set() for part in PARTS}
    for fault in faults:
        names = fault.file.split("/")
        is_stray = len(names) == 3 and fault.rule == FILE_NAME_RULE
        if names[0] == "consumequeue" and len(names) >= 3 and not is_stray:
            damaged["consumequeue"].add("/".join(names[:3]))
        elif names[0] in ("checkpoint", "index"):
            damaged[names[0]] |= _FILES.get(names[0], {names[0]})
        elif names[0] == "config":
            damaged["config"].add(fault.file)
        elif names[0] == "raymq" and names[1:] and names[1] in ("chain", "marks"):
            damaged[names[1]].add("/".join(names[:2]))

    for part in wanted:
        damaged[part] |= _FILES.get(part, {part})

    return [
        Step(part, _ACTIONS[part], tuple(sorted(damaged[part]))) for part in PARTS if damaged[part]
    ]
