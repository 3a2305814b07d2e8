"""The flights through a plan that differs in each attempt, while parts of Spark and of the cluster are killed.

RAYMQ_FLIGHT_RUNS and RAYMQ_FLIGHT_ROWS make it the long test of `nox -s flights`: 20 runs of all 336,776 flights.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import raymq
from tests.support.leftovers import disk_root
from tests.support.quick_java import QUICK_JAVA
from tests.support.ray_environment import ray_environment

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "examples" / "flights.py"
RUNS = int(os.environ.get("RAYMQ_FLIGHT_RUNS", "1"))
ROWS = int(os.environ.get("RAYMQ_FLIGHT_ROWS", "12000"))
SHARDS, QUEUES = 2, 8
#: how long a driver may take
RUN_S = 300.0
#: tasks that have begun when a fault of staging comes
BEGUN = 5

#: the faults of each run. A driver that dies is started again, with the same write id
FAULTS = (
    ("worker", "zombie", "leader while publishing"),
    ("driver while publishing", "leader while staging"),
    ("executor",),
    ("leader while staging",),
    ("leader while publishing",),
    ("driver while staging",),
    ("driver while publishing",),
    ("zombie",),
    ("executor", "leader while staging", "driver while publishing"),
    ("driver while staging", "worker", "leader while publishing"),
)


class Place:
    """A cluster, the flights, and the drivers of one run after the other."""

    def __init__(self, directory: Path, cluster: raymq.Cluster) -> None:
        self.directory = directory
        self.cluster = cluster
        spec = importlib.util.spec_from_file_location("raymq_flights_demo", DEMO)
        assert spec is not None
        assert spec.loader is not None
        demo = importlib.util.module_from_spec(spec)
        # The dataclasses of the module look it up.
        sys.modules[spec.name] = demo
        spec.loader.exec_module(demo)
        self.csv: Path = demo.prepare(directory, ROWS)

    def driver(self, topic: str, scratch: Path, faults: tuple[str, ...]) -> subprocess.Popen[bytes]:
        """Start a driver, in a process group of its own."""
        settings = {}
        if "zombie" in faults:
            settings = {
                "spark.speculation": "true",
                "spark.speculation.multiplier": "1.1",
                "spark.speculation.quantile": "0.1",
                "spark.speculation.minTaskRuntime": "1s",
            }
        options = {
            "cluster": self.cluster.data_dir,
            "csv": str(self.csv),
            "scratch": str(scratch),
            "topic": topic,
            "kills": "worker" in faults,
            "slows": "zombie" in faults,
            "settings": settings,
        }
        words = [sys.executable, "-m", "tests.support.flight_driver", json.dumps(options)]
        with (scratch / "said").open("a") as said, (scratch / "answer").open("w") as answer:
            return subprocess.Popen(
                words,
                cwd=ROOT,
                env={**os.environ, **QUICK_JAVA, "PYTHONPATH": str(ROOT)},
                stdout=answer,
                stderr=said,
                start_new_session=True,
            )

    def stored(self, topic: str) -> int:
        """The messages of a topic; -1 while a shard does not answer."""
        try:
            return int(self.cluster.describe_topic(topic)["messages"])
        except raymq.errors.RayMQError:
            return -1

    def kill_leader(self, shard: int) -> None:
        """Kill the CommitLog of a shard."""
        pid = next(
            each["pid"] for each in self.cluster.status()["shards"] if each["shard"] == shard
        )
        os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    # Not pytest's directory: it is under /tmp, which a cluster that is meant to last refuses.
    directory = Path(tempfile.mkdtemp(prefix=".raymq-flights-", dir=disk_root()))
    try:
        with ray_environment(directory):
            cluster = raymq.start(directory / "data", name="flights", shards=SHARDS)
            try:
                yield Place(directory, cluster)
            finally:
                cluster.stop()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def wait_until(reached: Callable[[], bool], driver: subprocess.Popen[bytes]) -> bool:
    """Wait for a moment of a write. Returns: whether it came before the driver ended."""
    until = time.monotonic() + RUN_S
    while driver.poll() is None and time.monotonic() < until:
        if reached():
            return True
        time.sleep(0.02)
    return False


def executors(driver: subprocess.Popen[bytes]) -> list[int]:
    """The pids of a driver's executors."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes()
                group = os.getpgid(int(entry.name))
            except OSError:
                continue
            if group == driver.pid and b"CoarseGrainedExecutorBackend" in words:
                found.append(int(entry.name))
    return found


def strike(place: Place, topic: str, scratch: Path, faults: set[str], dice: random.Random) -> Any:
    """Start a driver, and let the faults happen, each once. Returns: the answer; None if the driver was killed."""
    driver = place.driver(topic, scratch, tuple(faults))
    published = dice.uniform(0.05, 0.9) * ROWS
    moments: list[tuple[str, Callable[[], bool]]] = [
        ("staging", lambda: len(list(scratch.glob("began-*"))) >= BEGUN),
        ("publishing", lambda: place.stored(topic) >= published),
    ]
    try:
        for phase, reached in moments:
            due = [each for each in sorted(faults) if each.endswith(f"while {phase}")]
            due += ["executor"] if phase == "staging" and "executor" in faults else []
            if not due or not wait_until(reached, driver):
                continue
            for fault in due:
                faults.discard(fault)
                if fault == "executor":
                    os.kill(dice.choice(executors(driver)), signal.SIGKILL)
                elif fault.startswith("leader"):
                    place.kill_leader(dice.randrange(SHARDS))
            if f"driver while {phase}" in due:
                os.kill(driver.pid, signal.SIGKILL)
                return None
        assert driver.wait(timeout=RUN_S) == 0, (scratch / "said").read_text()[-4000:]
        return json.loads((scratch / "answer").read_text().splitlines()[-1])
    finally:
        with_children(driver)


def with_children(driver: subprocess.Popen[bytes]) -> None:
    """End what a driver has left."""
    try:
        os.killpg(driver.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    driver.wait()


@pytest.mark.thorough
@pytest.mark.timeout(RUN_S * 3)
@pytest.mark.parametrize("number", range(RUNS))
def test_every_flight_is_stored_once_whatever_is_killed(place: Place, number: int) -> None:
    dice = random.Random(number)
    faults = set(FAULTS[number % len(FAULTS)])
    topic = f"flights-{number}"
    place.cluster.create_topic(topic, queues=QUEUES)
    scratch = place.directory / topic
    scratch.mkdir()

    begin = time.monotonic()
    answer = None
    while answer is None:
        answer = strike(place, topic, scratch, faults, dice)
    assert answer["written"] == ROWS
    assert answer["found"] == answer["expected"]
    assert answer["found"][0] == place.stored(topic) == ROWS
    print(f"run {number}: {FAULTS[number % len(FAULTS)]}: {time.monotonic() - begin:.0f} s")
