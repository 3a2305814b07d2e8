"""Is this tree quicker than an earlier commit? `python -m benchmarks.turns [COMMIT] [--rounds N] [--busy] [--check]`

It checks the commit out into a directory of its own and starts a cluster of each tree, in a Ray each. Both take turns
with bursts: one thread and 64 threads that wait for each receipt, 16 threads that do so with a producer each, batches
of 20 and of 900 rows of which 16 are under way, a thread that polls each message that it sent, a consumer that reads
all of it. A burst begins when neither shard writes zeros ahead any more. Every message has 1 KiB and is on disk before
its receipt. A ratio is the median of the rounds' ratios, so that a machine whose speed changes from minute to minute
changes both alike. Beside it stands its interval: one burst of 64 threads may be twice as quick as the next one of the
same tree, so that ten rounds of equal code give medians from 0.8 to 1.25. The default commit is the last one before
small messages were gathered, which the floors are about.
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
from typing import Any

from benchmarks.floors import Floor, at_least
from benchmarks.rounds import Rounds, Row, in_turn, run, tell

ROOT = Path(__file__).resolve().parents[1]
#: small messages were not gathered yet
BEFORE = "31cce810^"
ROUNDS = 10
#: burst -> what it is, and the floor of its ratio to BEFORE
BURSTS: dict[str, tuple[str, Floor | None]] = {
    "one_thread": ("one thread", None),
    "64_threads": ("64 threads", at_least(5)),
    "16_producers": ("16 producers, a thread each", None),
    "batches_of_20": ("batches of 20 rows", None),
    "batches_of_900": ("batches of 900 rows", at_least(1.15)),
    "polled": ("one message, sent and polled", None),
    "read": ("all messages, read", None),
}
BURST_S = 0.5


class Worker:
    """A process with the cluster of one tree."""

    def __init__(self, tree: Path, directory: Path, replicas: int) -> None:
        # The source is passed on: the older tree has no such module, and the folder of this one has a `queue.py`.
        source = (ROOT / "benchmarks" / "turns_worker.py").read_text(encoding="utf-8")
        self._process = subprocess.Popen(
            [sys.executable, "-c", source, str(directory), str(replicas)],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        imported = self._read()
        if not Path(imported).is_relative_to(tree):
            raise RuntimeError(f"{imported} was imported instead of the code of {tree}")

    def run(self, burst: str) -> float:
        """Messages or batches per second."""
        print(burst, BURST_S, file=self._process.stdin, flush=True)
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


def measure(options: argparse.Namespace, rounds: Rounds) -> None:
    """Let both take turns. The one that begins changes from round to round."""
    tell(f"beside {options.commit}")
    side = "before" if options.commit == BEFORE else "other"
    with checked_out(options.commit) as tree, contextlib.ExitStack() as workers:
        before, now = (
            workers.enter_context(
                contextlib.closing(Worker(side_tree, options.directory, options.replicas))
            )
            for side_tree in (tree, ROOT)
        )
        for number in in_turn(3 if options.quick else options.rounds):
            for burst in options.only:
                sides = [(f"_{side}", before), ("", now)]
                for end, worker in sides if number % 2 else sides[::-1]:
                    rounds.note(f"{burst}{end}_per_s", worker.run(burst))


#: floors are of the default commit
ROWS = [
    Row(what, f"{name}_per_s", f"{name}_{side}_per_s", side, floor if side == "before" else None)
    for name, (what, floor) in BURSTS.items()
    for side in ("before", "other")
]

if __name__ == "__main__":
    more: dict[str, dict[str, Any]] = {"--rounds": {"type": int, "default": ROUNDS}}
    more["--replicas"] = {"type": int, "default": 1}
    more["commit"] = {"nargs": "?", "default": BEFORE, "metavar": "COMMIT"}
    run(__doc__, measure, ROWS, parts=list(BURSTS), options=more)
