"""Ctrl-C at any moment of the demo: two lines, everything stopped, nothing left, exit 130."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.leftovers import claim

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

    def __init__(self, place: Path) -> None:
        self.data_dir = place / "data"
        self.said = place / "said"
        self.mark = str(place)
        words = [sys.executable, "-c", DEMO, "--rows", "3000", "--data-dir", str(self.data_dir)]
        inherited = {name: text for name, text in os.environ.items() if not name.startswith("RAY")}
        with self.said.open("wb") as file:
            self.process = subprocess.Popen(
                words,
                cwd=ROOT,
                env={
                    **inherited,
                    VARIABLE: self.mark,
                    "RAYMQ_HOME": str(place / "home"),
                    "RAY_AUTH_TOKEN_PATH": str(place / "ray-token"),
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
    """A worker of Ray overwrites its environment; one of a shard has its files open."""
    try:
        return (process / "maps").read_text()
    except OSError:
        return ""


@pytest.fixture
def demo() -> Iterator[Demo]:
    # Not under /tmp, where a cluster that is meant to last would be refused.
    with tempfile.TemporaryDirectory(prefix=".raymq-test-", dir=Path.home()) as place:
        claim(Path(place))
        demo = Demo(Path(place))
        yield demo
        if demo.process.poll() is None:
            os.killpg(demo.process.pid, signal.SIGTERM)
        demo.process.wait()


#: what is seen when the signal goes out
MOMENTS: dict[str, Callable[[Demo], bool]] = {
    "as_it_begins": lambda demo: len(demo.left()) > 1,
    "while_ray_starts": lambda demo: (demo.data_dir / "ray.json").exists(),
    "while_spark_starts": lambda demo: (demo.data_dir / "flights.csv").exists(),
    "while_spark_writes": lambda demo: "kill -9" in demo.text(),
    "at_the_end": lambda demo: "Came back as they went in?" in demo.text(),
}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c_ends_everything_with_two_lines_and_130(demo: Demo, moment: str) -> None:
    demo.wait_until(MOMENTS[moment])
    before = demo.text()
    os.killpg(demo.process.pid, signal.SIGINT)
    assert demo.process.wait(120) == 130
    said = demo.text().removeprefix(before).strip().splitlines()
    lines = [line for line in said if "kill -9" not in line]
    assert [line.split(" ")[0].strip() for line in lines[-2:]] == ["Interrupted", "Stopped:"], said
    if moment != "at_the_end":
        # There the tables may be half written.
        assert len(lines) == 2, said
    assert demo.left() == []
    assert not demo.data_dir.exists()


def test_sigterm_ends_it_likewise_with_143(demo: Demo) -> None:
    demo.wait_until(MOMENTS["while_ray_starts"])
    demo.process.send_signal(signal.SIGTERM)
    assert demo.process.wait(120) == 143
    assert demo.left() == []
    assert not demo.data_dir.exists()
