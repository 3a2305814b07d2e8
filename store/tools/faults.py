"""The results of `verify`: faults, each with its file, offset and rule, and the decision of the next start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from raymq.store.base.errors import RayMQError
from raymq.store.base.rules import READABLE_RULE

#: most faults of one kind that are named in one file. The last one says how many more there are
NAMED_MAX = 20

#: called with the progress of a long walk: (what, bytes done, bytes in all)
ReportProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Fault:
    """One fault of a store."""

    #: relative to the store
    file: str
    #: in the commit log the physical offset, in any other file bytes from its start
    offset: int
    rule: str
    detail: str

    def as_dict(self) -> dict[str, object]:
        """For JSON output."""
        return {"kind": "fault", **vars(self)}


@dataclass(frozen=True)
class LogVerdict:
    """The decision of a start about the log's end: a row of the decision table of docs/recovery.md."""

    end: int
    #: keep | truncate | corrupt
    decision: str
    row: str
    #: the finding of the walk there
    found: str
    #: the physical event that can have caused it
    cause: str

    def as_dict(self) -> dict[str, object]:
        """For JSON output."""
        return dict(vars(self))

    def __str__(self) -> str:
        does = {"keep": "the log ends", "truncate": "a start cuts the log", "corrupt": "damage"}
        return f"{does[self.decision]} at {self.end} (row {self.row}; {self.found}): {self.cause}"


@dataclass
class Faults:
    """Collects faults, at most NAMED_MAX of a kind and file."""

    root: Path
    found: list[Fault] = field(default_factory=list)
    #: parts of caches that a crash left, and that the next start rebuilds from the log. They are not faults
    rebuilt_at_start: list[str] = field(default_factory=list)
    _counts: dict[tuple[str, str], int] = field(default_factory=dict)

    def add(self, file: Path, offset: int, rule: str, detail: str) -> None:
        """Add a fault. Beyond NAMED_MAX of its kind it is only counted."""
        name = str(file.relative_to(self.root))
        count = self._counts[name, rule] = self._counts.get((name, rule), 0) + 1
        if count <= NAMED_MAX:
            self.found.append(Fault(name, int(offset), rule, detail))

    def count_more(self, file: Path, rule: str, count: int) -> None:
        """Count further faults of a kind, after NAMED_MAX were added."""
        if count > 0:
            key = (str(file.relative_to(self.root)), rule)
            self._counts[key] = self._counts.get(key, 0) + count

    def error(self, error: RayMQError) -> None:
        """Add the error that reading a file raised."""
        self.found.append(from_error(self.root, error))

    def os_error(self, error: OSError) -> None:
        """Add the error of the operating system for a path: of another kind, or without permission."""
        path = str(error.filename or self.root)
        name = path.removeprefix(str(self.root)).lstrip("/") or "."
        detail = f"{path} cannot be read: {error.strerror}; move it elsewhere, or give access to it"
        self.found.append(Fault(name, 0, READABLE_RULE, detail))

    def all(self) -> list[Fault]:
        """Every fault. If some of a kind were left out, its last one says how many."""
        more = {key: count - NAMED_MAX for key, count in self._counts.items() if count > NAMED_MAX}
        faults: list[Fault] = []
        for fault in reversed(self.found):
            count = more.pop((fault.file, fault.rule), 0)
            if count:
                fault = replace(fault, detail=f"{fault.detail}; and {count} more")
            faults.append(fault)
        return faults[::-1]


def from_error(root: Path, error: RayMQError) -> Fault:
    """An error of a reader as a fault."""
    path = str(error.fields.get("path", root))
    name = path.removeprefix(str(root)).lstrip("/") or "."
    offset = int(error.fields.get("offset") or 0)
    return Fault(name, offset, str(error.fields.get("rule", "readable")), str(error))


@dataclass(frozen=True)
class Report:
    """The result of `check`."""

    faults: list[Fault]
    #: None if the log could not be walked or has no file
    verdict: LogVerdict | None
    #: files of caches that the next start rebuilds, in part or whole
    rebuilt_at_start: list[str] = field(default_factory=list)
