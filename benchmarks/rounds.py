"""What all benchmarks share: rounds of figures, the rows of their tables, the command line."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.floors import Floor, Line, report
from raymq.cluster.bench.histogram import Histogram
from raymq.cluster.record.paths import in_home, nearest_existing, why_not_writable
from raymq.store.base.files import Files

ROUNDS = 3
#: with fewer rounds even the least and the greatest ratio do not have the median between them with 95 %
INTERVAL_ROUNDS = 6
#: end of a figure's name -> how the figure is printed
FORMS = {
    "_msg_s": "{:,.0f} msg/s",
    "_rows_s": "{:,.0f} rows/s",
    "_items_s": "{:,.0f} items/s",
    "_MB_s": "{:,.0f} MB/s",
    "_MiB_s": "{:,.0f} MiB/s",
    "_per_s": "{:,.0f}/s",
    "_MiB": "{:,.1f} MiB",
    "_MB": "{:,.1f} MB",
    "_percent": "{:,.2f} %",
    "_ms": "{:,.2f} ms",
    "_us": "{:,.2f} us",
    "_s": "{:,.3f} s",
}


def _outside(rounds: int) -> int:
    """How many sorted ratios lie outside on each side, where the true median is with less than 2.5 %."""
    below = 0.0
    for count in range(rounds):
        # Each ratio is below the true median with one half: so many of them are, or fewer.
        below += math.comb(rounds, count) / 2**rounds
        if below >= 0.025:
            return count - 1
    raise AssertionError("a fair coin shows heads")


class Rounds:
    """Figures of all rounds by name. A ratio is of two figures of one round."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}

    def note(self, name: str, value: float) -> float:
        """Keep one round's figure. Returns: it."""
        self.values.setdefault(name, []).append(value)
        return value

    def note_times(self, name: str, latency: Histogram) -> None:
        """Keep the p50 and the p99 of one round."""
        for percent in (50, 99):
            self.note(f"{name}_p{percent}_ms", latency.percentile(percent) / 1000)

    def median(self, name: str) -> float:
        """The median of the rounds."""
        return statistics.median(self.values[name])

    def ratio(self, name: str, of: str) -> float:
        """The median of the rounds' ratios."""
        return statistics.median(self._ratios(name, of))

    def interval(self, name: str, of: str) -> str:
        """Where the median of the ratios lies with 95 %, for the table. Empty for fewer than `INTERVAL_ROUNDS`."""
        ratios = self._ratios(name, of)
        if len(ratios) < INTERVAL_ROUNDS:
            return ""
        outside = _outside(len(ratios))
        return f" ({ratios[outside]:.2f} to {ratios[-1 - outside]:.2f})"

    def _ratios(self, name: str, of: str) -> list[float]:
        pairs = zip(self.values[name], self.values[of], strict=True)
        return sorted(value / limit for value, limit in pairs)

    def printed(self, name: str) -> str:
        """The median with its unit. A p50 has its p99 in brackets."""
        form = next((form for end, form in FORMS.items() if name.endswith(end)), "{:,.2f}")
        p99 = name.removesuffix("_p50_ms") + "_p99_ms"
        after = f" ({self.median(p99):.2f})" if p99 != name and p99 in self.values else ""
        return form.format(self.median(name)) + (after if name.endswith("_p50_ms") else "")


class Row(NamedTuple):
    """One row of a benchmark's table, left out if its figure was not measured."""

    what: str
    #: the figure
    name: str
    #: the limit or peer of the same round, and its name in the table
    of: str = ""
    beside: str = ""
    #: of the ratio, or of the figure itself if there is nothing beside it
    floor: Floor | None = None
    #: in the place of a floor
    remark: str = ""

    def line(self, rounds: Rounds) -> Line:
        """The row with its figures."""
        value = rounds.ratio(self.name, self.of) if self.of else rounds.median(self.name)
        share = (
            f"{value:.2f} x {self.beside}{rounds.interval(self.name, self.of)}"
            if self.of
            else self.beside
        )
        figure = rounds.printed(self.name)
        return Line(self.what, figure, share, self.floor, value, self.remark)


def lines_of(rows: Iterable[Row], rounds: Rounds) -> list[Line]:
    """The lines of the rows whose figures were measured."""
    have = rounds.values
    return [row.line(rounds) for row in rows if row.name in have and (row.of or row.name) in have]


def in_turn(rounds: int = ROUNDS, what: str = "round") -> Iterator[int]:
    """The numbers of the rounds, each of which is announced."""
    for number in range(rounds):
        tell(f"{what} {number + 1} of {rounds}")
        yield number


def usual_directory() -> Path:
    """~/.raymq/bench. For a user without a home that it can write: build/bench in the checkout."""
    files = Files()
    for own in in_home(".raymq"):
        if why_not_writable(nearest_existing(own, files)) is None:
            return own / "bench"
    return Path(__file__).resolve().parents[1] / "build" / "bench"


def tell(line: str) -> None:
    """Print progress at once."""
    print(f"  {line}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def load(busy: bool) -> Iterator[None]:
    """A process on every core that computes all the time, if `busy`."""
    count = len(os.sched_getaffinity(0)) if busy else 0
    processes = [multiprocessing.Process(target=_compute, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def _compute() -> None:
    while True:
        sum(range(10_000))


def run(
    description: str | None,
    measure: Callable[[argparse.Namespace, Rounds], object],
    table: Sequence[Row] | Callable[[Rounds], Sequence[Line]],
    *,
    parts: Sequence[str] = (),
    options: dict[str, dict[str, Any]] | None = None,
) -> None:
    """The command line of a benchmark: measure, print, write JSON, exit.

    Args: `measure` notes all figures. It gets the options, with `only` as the parts that are wanted. `options`: more
    arguments of the command.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="shorter rounds")
    parser.add_argument("--busy", action="store_true", help="with a load on every core")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a floor is missed")
    parser.add_argument("--directory", type=Path, default=usual_directory())
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    if parts:
        parser.add_argument("--only", choices=parts, action="append", help="may be repeated")
    for name, given in (options or {}).items():
        parser.add_argument(name, **given)
    found = parser.parse_args()
    found.only = getattr(found, "only", None) or list(parts)
    found.directory.mkdir(parents=True, exist_ok=True)

    rounds = Rounds()
    with load(found.busy):
        measure(found, rounds)
    if found.json:
        figures = {"cores": os.cpu_count(), "rounds": rounds.values}
        found.json.write_text(json.dumps(figures, indent=1))
    lines = table(rounds) if callable(table) else lines_of(table, rounds)
    busy = "busy: beside the measurement, one process per core computed all the time"
    sys.exit(report(lines, check=found.check, title=busy if found.busy else ""))
