"""Is this tree quicker than an earlier commit? `python -m benchmarks.turns [COMMIT] [--rounds N] [--busy] [--check]`

It checks the commit out into a directory of its own and starts a cluster of each tree, in a Ray each. Both take turns
with bursts of a second: one thread and 64 threads that wait for each receipt, batches of 20 and of 900 rows of which 16
are under way. A burst begins when neither shard writes zeros ahead any more. Every message has 1 KiB and is on disk
before its receipt. A ratio is the median of the rounds' ratios, so that a machine whose speed changes from minute to
minute changes both alike. The default commit is the last one before small messages were gathered, which the floors are
about.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks import floors, machine_load
from benchmarks.floors import Floor, Line, at_least
from benchmarks.put import Rounds

ROOT = Path(__file__).resolve().parents[1]
#: small messages were not gathered yet
BEFORE = "31cce810^"
ROUNDS = 10
SECONDS = 1.0
#: burst -> what it is, and the floor of its ratio to BEFORE
BURSTS: dict[str, tuple[str, Floor | None]] = {
    "one_thread": ("one thread", None),
    "64_threads": ("64 threads", at_least(5)),
    "batches_of_20": ("batches of 20 rows", None),
    "batches_of_900": ("batches of 900 rows", at_least(1.15)),
}


class Worker:
    """A process with the cluster of one tree."""

    def __init__(self, tree: Path, directory: Path) -> None:
        # The source is passed on: the older tree has no such module, and the folder of this one has a `queue.py`.
        source = (ROOT / "benchmarks" / "turns_worker.py").read_text(encoding="utf-8")
        self._process = subprocess.Popen(
            [sys.executable, "-c", source, str(directory)],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        imported = self._read()
        if not Path(imported).is_relative_to(tree):
            raise RuntimeError(f"{imported} was imported instead of the code of {tree}")

    def run(self, burst: str, seconds: float) -> float:
        """Messages or batches per second."""
        print(burst, seconds, file=self._process.stdin, flush=True)
        return float(self._read())

    def close(self) -> None:
        """End the cluster and its process."""
        self._process.communicate()

    def _read(self) -> str:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise RuntimeError(f"a worker ended with exit code {self._process.wait()}")
        return line.strip()


@contextlib.contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """A directory with the files of a commit."""
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def measure(before: Worker, now: Worker, rounds: int, seconds: float) -> Rounds:
    """Let both take turns. The one that begins changes from round to round."""
    found = Rounds()
    for number in range(rounds):
        print(f"  round {number + 1} of {rounds}", file=sys.stderr, flush=True)
        for burst in BURSTS:
            sides = [("before", before), ("now", now)]
            for name, worker in sides if number % 2 else sides[::-1]:
                found.note(f"{burst}_{name}", worker.run(burst, seconds))
    return found


def table(found: Rounds, *, has_floors: bool) -> Iterator[Line]:
    """The lines of the report. Args: `has_floors`: the commit is the one that the floors are about."""
    for burst, (what, floor) in BURSTS.items():
        before, now = found.median(f"{burst}_before"), found.median(f"{burst}_now")
        ratio = found.ratio(f"{burst}_now", f"{burst}_before")
        figure = f"{now:,.0f}/s, before {before:,.0f}/s"
        yield Line(what, figure, f"{ratio:.2f} x", floor if has_floors else None, ratio)


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commit", nargs="?", default=BEFORE, metavar="COMMIT")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--quick", action="store_true", help="three rounds")
    parser.add_argument("--directory", type=Path, default=Path.home())
    machine_load.option(parser)
    floors.options(parser)
    options = parser.parse_args()

    options.directory.mkdir(parents=True, exist_ok=True)
    rounds = 3 if options.quick else options.rounds
    with checked_out(options.commit) as tree, contextlib.ExitStack() as workers:
        before = workers.enter_context(contextlib.closing(Worker(tree, options.directory)))
        now = workers.enter_context(contextlib.closing(Worker(ROOT, options.directory)))
        with machine_load.load(options.busy):
            found = measure(before, now, rounds, SECONDS)
    lines = list(table(found, has_floors=options.commit == BEFORE))
    title = f"now, beside {options.commit}" + (
        f"; {machine_load.BUSY_TITLE}" if options.busy else ""
    )
    return floors.report(lines, check=options.check, title=title)


if __name__ == "__main__":
    sys.exit(main())
