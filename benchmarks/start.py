"""How long does a cluster take to start, and does its first minute serve less? `python -m benchmarks.start [--check]`

A start is that of a new cluster of one replica with a Ray of its own, in a new process, until its first message is
durable. The limit is an empty Ray with as many bare actors, also in a new process, by turns. It is started by the same
`ray start --head`, which takes a second longer than `ray.init` alone: it serves Ray Client, too.

A cluster of three replicas then serves one message after the other, from its start on: the rate of its first 20
seconds is compared with that of the 20 seconds after a minute.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import raymq
from benchmarks.floors import at_least, at_most
from benchmarks.limits import BODY, cleared, started
from benchmarks.rounds import Rounds, Row, in_turn, run, tell

PARTS = ("cold", "first-minute")
#: seconds after the start, of the two windows
EARLY, LATE = (0, 20), (60, 80)
#: CommitLog and GroupCommit
ACTORS = 2

RAYMQ = """
import sys, time
begin = time.perf_counter()
import raymq
with raymq.start(sys.argv[1], name="cold") as cluster:
    cluster.create_topic("t", queues=1)
    with cluster.producer() as producer:
        producer.send("t", b"first").result(60)
    print(time.perf_counter() - begin, flush=True)
"""
RAY = """
import sys, time
begin = time.perf_counter()
from raymq.cluster.deploy import owned_ray, ray_host
from raymq.cluster.record.paths import ClusterPaths
from raymq.store.base.clock import Clock
from raymq.store.base.files import Files
paths, files, clock = ClusterPaths(sys.argv[1]), Files(), Clock()
files.make_dirs(paths.root, 0o700)
try:
    quiet = {"progress": lambda line: None, "meanwhile": lambda: __import__("ray")}
    owned = owned_ray.start_owned(paths, files=files, clock=clock, **quiet)
    with ray_host.session(ray_host.RayTarget(address=owned.address, owned=owned)) as ray:
        class Bare:
            def ping(self):
                pass
        kind = ray.remote(num_cpus=0)(Bare)
        actors = [kind.remote() for _ in range(int(sys.argv[2]))]
        ray.get([actor.ping.remote() for actor in actors])
        print(time.perf_counter() - begin, flush=True)
finally:
    owned_ray.stop_owned(paths, files=files, clock=clock)
"""


def seconds(program: str, *words: str) -> float:
    """What a program prints, in a new process."""
    command = [sys.executable, "-c", program, *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    return float(done.stdout.splitlines()[-1])


def measure_cold(directory: Path, rounds: Rounds, count: int) -> None:
    """Start both by turns."""
    for _ in in_turn(count):
        data, temp = cleared(directory / "cold"), cleared(directory / "ray")
        ray_s = rounds.note("ray_s", seconds(RAY, str(temp), str(ACTORS)))
        own_s = rounds.note("start_s", seconds(RAYMQ, str(data)))
        rounds.note("beyond_ray_s", own_s - ray_s)
        tell(f"  Ray {ray_s:.1f} s, RayMQ {own_s:.1f} s")
        cleared(data)
        cleared(temp)


def served(producer: raymq.Producer, begin: float, window: tuple[int, int]) -> float:
    """Messages a second, one after the other, from one time after `begin` to another."""
    first, last = (begin + at for at in window)
    sent, since = 0, 0.0
    while (now := time.monotonic()) < last:
        producer.send("t", bytes(BODY)).result(60)
        if now >= first:
            since = since or now
            sent += 1
    return sent / (time.monotonic() - since)


def measure_first_minute(directory: Path, rounds: Rounds, count: int) -> None:
    """The rates of both windows."""
    for _ in in_turn(count):
        with (
            started(directory, "three", replicas=3) as cluster,
            cluster.producer() as producer,
        ):
            begin = time.monotonic()
            early = rounds.note("early_per_s", served(producer, begin, EARLY))
            late = rounds.note("late_per_s", served(producer, begin, LATE))
            tell(f"  early {early:.0f}/s, later {late:.0f}/s")


def measure(options: argparse.Namespace, rounds: Rounds) -> None:
    """The parts that are wanted."""
    if "cold" in options.only:
        measure_cold(options.directory, rounds, 3 if options.quick else 7)
    if "first-minute" in options.only:
        measure_first_minute(options.directory, rounds, 1 if options.quick else 3)


ROWS = [
    Row("an empty Ray with two bare actors", "ray_s", remark="limit"),
    Row("a cluster, until its first message", "start_s", "ray_s", "the empty Ray"),
    Row("  beyond the empty Ray", "beyond_ray_s", floor=at_most(1)),
    Row("three replicas, one by one, after a minute", "late_per_s", remark="limit"),
    Row("  in the first 20 s", "early_per_s", "late_per_s", "later", at_least(0.8)),
]

if __name__ == "__main__":
    run(__doc__, measure, ROWS, parts=PARTS)
