"""The whole suite as plain pytests, two at a time: `python -m tests` without the names of tests.

Each lane is one pytest process with its own output in build/tests. Most of the time of a lane with Rays or JVMs is
waiting, so that another one beside it costs little. The summary of all of them is printed last, as one of pytest.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from tests.support import durations, tier
from tests.support.workers import end_with_parent

ROOT = Path(__file__).resolve().parents[1]
#: output and durations of the last run
BUILD = ROOT / "build" / "tests"
DURATIONS = ROOT / "build" / "durations.json"
#: lanes that run at the same time
SLOTS = 2
#: between two lines of progress, and two looks at the lanes
REPORT_S, LOOK_S = 30.0, 0.2
#: a lane that was interrupted ends what it began in this time
END_S = 90.0
#: what only .ci/run and `--thorough` prove
QUICK = "not thorough"
#: of pytest's last line
COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped|deselected|xfailed|xpassed|warnings?)")


#: where a sync takes no time, and what a run needs there at most
MEMORY, MEMORY_BYTES_MIN = Path("/dev/shm"), 4 << 30


def in_memory() -> dict[str, str]:
    """The variables of tests whose stores end with them: these are in memory if it has room."""
    try:
        free_bytes = shutil.disk_usage(MEMORY).free
    except OSError:
        return {}
    return {"PYTEST_DEBUG_TEMPROOT": str(MEMORY)} if free_bytes >= MEMORY_BYTES_MIN else {}


class Lane(NamedTuple):
    """The tests that one pytest runs."""

    name: str
    #: of the marks of these tests
    expression: str
    #: of its environment
    variables: Mapping[str, str] = MappingProxyType({})


JVM = "spark or interop"
PROCESSES = "ray or program or beside"
#: the longest first
LANES = (
    Lane("served", f"served and not ({PROCESSES} or {JVM} or alone)", in_memory()),
    Lane("plain", f"not (served or {PROCESSES} or {JVM} or alone)", in_memory()),
    Lane("live", f"({PROCESSES}) and not (faults or {JVM} or alone)"),
    Lane("faults", f"faults and ({PROCESSES}) and not ({JVM} or alone)"),
    Lane("jvm", f"({JVM}) and not alone"),
)
#: no other Ray may run beside it
LAST = Lane("alone", "alone")


def command(expression: str, words: Sequence[str]) -> list[str]:
    """The pytest of some marks. Args: `words`: its further arguments."""
    return [sys.executable, "-m", "tests", "--one", "-q", "-m", expression, *words]


class Running:
    """A lane under way."""

    def __init__(self, lane: Lane, words: Sequence[str], *, quick: bool) -> None:
        """Args: `words`: further arguments of pytest."""
        self.lane = lane
        self.begun = time.monotonic()
        self.log = BUILD / f"{lane.name}.log"
        expression = f"({lane.expression}) and {QUICK}" if quick else lane.expression
        with self.log.open("wb") as file:
            self.process = subprocess.Popen(
                command(expression, words),
                cwd=ROOT,
                env={**os.environ, **lane.variables, **({tier.VARIABLE: "1"} if quick else {})},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                # Ctrl-C on a terminal interrupts this process, which interrupts each lane once.
                start_new_session=True,
                preexec_fn=end_with_parent,
            )

    @property
    def text(self) -> str:
        """Its output up to now."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    @property
    def progress(self) -> str:
        """Name and share of its tests that are done."""
        shares = re.findall(r"\[ *(\d+)%\]", self.text)
        return f"{self.lane.name} {shares[-1] if shares else 0} %"

    def report(self) -> Counter[str]:
        """Print what failed. Returns: how many tests have each outcome."""
        lines = self.text.splitlines()
        last = next((line for line in reversed(lines) if COUNT.search(line)), "")
        found = Counter({word.rstrip("s"): int(count) for count, word in COUNT.findall(last)})
        code = self.process.returncode
        say(f"{self.lane.name}: {last.strip('= ') or 'no test ended'}")
        # 5: none of its tests was chosen.
        if code not in (0, 5):
            begins = [
                at for at, line in enumerate(lines) if re.match(r"=+ (FAILURES|ERRORS)", line)
            ]
            print("\n".join(lines[begins[0] if begins else 0 :]), flush=True)
            if not found["failed"] and not found["error"]:
                found["error"] += 1
        return found

    @property
    def failures(self) -> list[str]:
        """The lines of pytest's summary."""
        return [line for line in self.text.splitlines() if re.match(r"(FAILED|ERROR) ", line)]


def say(text: str) -> None:
    """Print a line."""
    print(text, flush=True)


def run(words: Sequence[str], *, quick: bool) -> int:
    """Run all lanes. Returns: an exit code. Args: `words`: further arguments of each pytest."""
    BUILD.mkdir(parents=True, exist_ok=True)
    lines = BUILD / "durations"
    lines.write_bytes(b"")
    os.environ[durations.VARIABLE] = str(lines)
    begun, done = time.monotonic(), []
    outcomes: Counter[str] = Counter()
    waits: list[float] = []
    for group in (LANES, (LAST,)):
        for each in run_lanes(group, words, quick=quick, begun=begun, waits=waits):
            outcomes += each.report()
            done.append(each)

    seconds, cpu_s = durations.write(lines, DURATIONS)
    slow = durations.over_budget(seconds, durations.read_budgets(), waits, cpu_s)
    failures = [*(line for each in done for line in each.failures), *slow]
    outcomes["error"] += len(slow)
    if failures:
        say("=========================== short test summary info ============================")
        say("\n".join(failures))
    shown = ", ".join(
        f"{outcomes[word]} {word}"
        for word in ("failed", "passed", "skipped", "error")
        if outcomes[word]
    )
    say(f"======== {shown or 'no tests ran'} in {time.monotonic() - begun:.2f}s ========")
    return 1 if outcomes["failed"] or outcomes["error"] or not outcomes["passed"] else 0


def run_lanes(
    lanes: Sequence[Lane],
    words: Sequence[str],
    *,
    quick: bool,
    begun: float,
    waits: list[float],
) -> list[Running]:
    """Run some lanes, SLOTS at a time, to their ends. Ctrl-C and SIGTERM end them in order.

    Args: `waits` gets the `core_wait` of now and then.
    """
    waiting, running, ended = list(lanes), [], []
    reported = time.monotonic()
    try:
        while waiting or running:
            while waiting and len(running) < SLOTS:
                running.append(Running(waiting.pop(0), words, quick=quick))
            time.sleep(LOOK_S)
            for each in [each for each in running if each.process.poll() is not None]:
                running.remove(each)
                ended.append(each)
            if running and time.monotonic() - reported >= REPORT_S:
                reported = time.monotonic()
                waits.append(durations.core_wait())
                minutes, seconds = divmod(round(reported - begun), 60)
                say(f"{minutes:3d}:{seconds:02d}  {', '.join(each.progress for each in running)}")
    except BaseException:
        for each in running:
            each.process.send_signal(signal.SIGINT)
        for each in running:
            try:
                each.process.wait(END_S)
            except subprocess.TimeoutExpired:
                each.process.kill()
        raise
    return ended
