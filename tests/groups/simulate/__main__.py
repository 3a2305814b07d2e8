"""Long runs, in parts that go on where the last one ended: `python -m tests.groups.simulate [--steps N] [--minutes M]`.

Random runs of each world in turns, every one beside the second model of the rules, until so many steps are made in all
parts together. Then searches of all schedules with each fault and each pair of faults, each for `--search-s` seconds.
What was done is in a file, build/simulated_groups.json unless `--state` names another one: a run that was interrupted
loses one part at most. A fault ends the run with the seed and the schedule that lead there, and exit code 1.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from .compared import ComparedWorld
from .search import search
from .walks import run_seeds
from .world import Broken
from .worlds import KINDS, SMALL, WORLDS

ROOT = Path(__file__).resolve().parents[3]
#: runs of one part, and the steps of a run
PART_RUNS, RUN_STEPS = 250, 400
#: the seeds of the long runs: no test run has them
FIRST_SEED, WORLD_SEEDS = 100_000_000, 10_000_000


class Progress:
    """What was done so far, in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        empty: dict[str, Any] = {"worlds": {}, "searches": {}, "minutes": 0.0}
        self.done = json.loads(path.read_text()) if path.exists() else empty

    @property
    def steps(self) -> int:
        """Of all worlds."""
        return sum(each["steps"] for each in self.done["worlds"].values())

    def runs(self, world: str) -> int:
        """How many runs of a world were made."""
        return int(self.done["worlds"].get(world, {}).get("runs", 0))

    def note_part(self, world: str, figures: Counter[str], minutes: float) -> None:
        """Keep the figures of one part."""
        total = Counter(self.done["worlds"].get(world, {})) + figures
        self.done["worlds"][world] = dict(total)
        self._save(minutes)

    def note_search(self, name: str, found: Any, minutes: float) -> None:
        """Keep how far a search came."""
        self.done["searches"][name] = found._asdict()
        self._save(minutes)

    def _save(self, minutes: float) -> None:
        self.done["minutes"] += minutes
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(self.done, indent=1))
        new.replace(self._path)


def walk(progress: Progress, steps: int, until_s: float) -> None:
    """Make parts until there are so many steps, or it is too late. Raises: Broken."""
    for number, name in itertools.cycle(enumerate(WORLDS)):
        began_s = time.monotonic()
        if progress.steps >= steps or began_s >= until_s:
            return
        first = FIRST_SEED + number * WORLD_SEEDS + progress.runs(name)
        seeds = range(first, first + PART_RUNS)
        figures = run_seeds(seeds, WORLDS[name], steps=RUN_STEPS, make=ComparedWorld)
        progress.note_part(name, figures, (time.monotonic() - began_s) / 60)
        print(
            f"{name}: seeds {seeds.start} to {seeds.stop - 1}, {figures['steps']:,} steps; "
            f"{progress.steps:,} of {steps:,} in all",
            flush=True,
        )


def search_all(progress: Progress, seconds: float, until_s: float) -> None:
    """Search all schedules with each fault, and with each pair. Raises: Broken."""
    singles = [((kind, 1),) for kind in KINDS]
    pairs = [((one, 1), (other, 1)) for one, other in itertools.combinations(KINDS, 2)]
    searches = {" and ".join(kind for kind, _ in each): each for each in [*singles, *pairs]}
    for name, faults in searches.items():
        began_s = time.monotonic()
        if began_s >= until_s:
            return
        if name in progress.done["searches"]:
            continue
        found = search(replace(SMALL, faults=faults), states=sys.maxsize, seconds=seconds)
        progress.note_search(name, found, (time.monotonic() - began_s) / 60)
        print(f"{name}: {found}", flush=True)


def report(progress: Progress) -> None:
    """Print what was done in all parts."""
    worlds = progress.done["worlds"]
    names = sorted({kind for figures in worlds.values() for kind in figures})
    for name in names:
        total = sum(figures.get(name, 0) for figures in worlds.values())
        print(f"{name:14} {total:>12,}", *(f"{each.get(name, 0):>12,}" for each in worlds.values()))
    for name, found in progress.done["searches"].items():
        whole = ", all" if found["is_whole"] else ""
        print(f"search {name}: {found['states']:,} states, {found['depth']} events deep{whole}")
    print(f"{progress.done['minutes']:.1f} minutes")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50_000_000, help="in all parts together")
    parser.add_argument("--minutes", type=float, default=1e6, help="of this part")
    parser.add_argument("--search-s", type=float, default=15.0, help="seconds of each search")
    parser.add_argument("--state", type=Path, default=ROOT / "build" / "simulated_groups.json")
    options = parser.parse_args()
    os.nice(19)
    until_s = time.monotonic() + options.minutes * 60
    progress = Progress(options.state)
    try:
        walk(progress, options.steps, until_s)
        if options.search_s:
            search_all(progress, options.search_s, until_s)
    except Broken as broken:
        print("a rule is broken:", *broken.args, sep="\n", file=sys.stderr)
        return 1
    report(progress)
    return 0


if __name__ == "__main__":
    sys.exit(main())
