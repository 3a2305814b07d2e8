"""The demo interrupted at a moment of it, and what is left then."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from .lean_ray import LEAN
from .leftovers import claim, disk_root
from .quick_java import QUICK_JAVA

ROOT = Path(__file__).resolve().parents[2]
#: the second half of `run.py demo`, in this environment
DEMO = """
import os, sys
import run
run.listen_to_signals()
try:
    sys.exit(run.run_demo([sys.executable, "examples/flights.py", *sys.argv[1:]], os.environ))
except run.Interrupted as interrupted:
    sys.exit(128 + interrupted.number)
"""
#: in the environment of everything that the demo starts
VARIABLE = "RAYMQ_TEST_OF_DEMO"


class Demo:
    """A demo of a few rows in a process group of its own, as a shell would start it."""

    def __init__(self, directory: Path) -> None:
        self.data_dir = directory / "data"
        self.said = directory / "said"
        self.mark = str(directory)

        words = [sys.executable, "-c", DEMO, "--rows", "3000", "--data-dir", str(self.data_dir)]
        inherited = {name: text for name, text in os.environ.items() if not name.startswith("RAY")}

        with self.said.open("wb") as file:
            self.process = subprocess.Popen(
                words,
                cwd=ROOT,
                env={
                    **inherited,
                    **LEAN,
                    **QUICK_JAVA,
                    VARIABLE: self.mark,
                    "RAYMQ_HOME": str(directory / "home"),
                    "RAY_AUTH_TOKEN_PATH": str(directory / "ray-token"),
                },
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def text(self) -> str:
        return self.said.read_text(errors="replace")

    def wait_until(self, seen: Callable[[Demo], bool]) -> None:
        deadline = time.monotonic() + 200
        while not seen(self):
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.02)

    def left(self) -> list[str]:
        """The commands of the processes that the demo started and that run."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                environment = (entry / "environ").read_bytes().split(b"\0")
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            of_demo = f"{VARIABLE}={self.mark}".encode() in environment
            if of_demo or (command.startswith(b"ray::") and self.mark in _maps(entry)):
                found.append(command.decode(errors="replace"))
        return found


def _maps(process: Path) -> str:
    """A worker of Ray overwrites its environment. One of a shard has its files open."""
    try:
        return (process / "maps").read_text()
    except OSError:
        return ""


#: what is seen when the signal goes out
MOMENTS: dict[str, Callable[[Demo], bool]] = {
    "as_it_begins": lambda demo: len(demo.left()) > 1,
    "while_ray_starts": lambda demo: (demo.data_dir / "ray.json").exists(),
    "while_spark_starts": lambda demo: (demo.data_dir / "flights.csv").exists(),
    "while_spark_writes": lambda demo: "kill -9" in demo.text(),
    "at_the_end": lambda demo: "Came back as they went in?" in demo.text(),
}


class Interruption(NamedTuple):
    """How a demo ended that got a signal."""

    exit_status: int
    #: lines after the signal
    said: list[str]
    #: commands of processes that still run
    left: list[str]
    data_is_left: bool


def interrupt(case: tuple[str, int]) -> Interruption:
    """Start the demo and send a signal at a moment: (key of MOMENTS, signal number).

    SIGINT goes to the whole process group, as from a terminal. Another signal to the first process.
    """
    moment, number = case
    # Not under /tmp: a cluster that is meant to last would be refused there.
    with tempfile.TemporaryDirectory(prefix=".raymq-test-", dir=disk_root()) as directory:
        claim(Path(directory))
        demo = Demo(Path(directory))
        try:
            demo.wait_until(MOMENTS[moment])
            before = demo.text()
            if number == signal.SIGINT:
                os.killpg(demo.process.pid, number)
            else:
                demo.process.send_signal(number)
            exit_status = demo.process.wait(120)
            said = demo.text().removeprefix(before).strip().splitlines()
            return Interruption(exit_status, said, demo.left(), demo.data_dir.exists())
        finally:
            if demo.process.poll() is None:
                os.killpg(demo.process.pid, signal.SIGTERM)
            demo.process.wait()
