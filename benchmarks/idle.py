"""What does an idle cluster cost? `python -m benchmarks.idle [--seconds 20] [--json FILE]`

Two idle clusters are measured, one of four shards and one of a mirrored shard: processes, memory (PSS without file
pages) and CPU. As many bare Ray actors in the same Ray are measured right after each. CPU is the processes' own time
over the window, in percent of one core.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import ray

from benchmarks.floors import at_most
from benchmarks.limits import cpu_s, memory_mb, started
from benchmarks.rounds import Rounds, Row, run
from raymq.client import replica_status

#: after a start the shards pre-write their windows
SETTLE_S = 15


class Bare:
    """An actor that does nothing."""

    def pid(self) -> int:
        """The id of its process."""
        return os.getpid()


def measure_cluster(
    directory: Path, rounds: Rounds, name: str, seconds: float, shards: int, replicas: int
) -> None:
    """Note memory and CPU of an idle cluster per shard, then of as many bare actors."""
    with started(directory, f"idle-{name}", shards=shards, replicas=replicas) as cluster:
        ray.init(cluster.ray_address, ignore_reinit_error=True, log_to_driver=False)
        # All satellites are started then.
        time.sleep(SETTLE_S)
        pids = [
            pid
            for shard in range(shards)
            for row in replica_status.statuses(cluster, shard)
            for pid in (row["pid"], *row["satellites"].values())
        ]
        rounds.note(f"{name}_processes", len(pids))
        note(rounds, name, pids, seconds, shards)
        make = ray.remote(Bare).options(num_cpus=0)
        actors: list[Any] = [make.remote() for _ in pids]
        pids = ray.get([actor.pid.remote() for actor in actors])
        time.sleep(SETTLE_S)
        note(rounds, f"{name}_bare", pids, seconds, shards)
        ray.shutdown()


def note(rounds: Rounds, name: str, pids: list[int], seconds: float, shards: int) -> None:
    """Note the memory of all processes, and their CPU per shard in percent of a core."""
    rounds.note(f"{name}_memory_MB", sum(map(memory_mb, pids)))
    before = sum(map(cpu_s, pids))
    time.sleep(seconds)
    spent_s = sum(map(cpu_s, pids)) - before
    rounds.note(f"{name}_cpu_percent", max(spent_s, 0.01) / seconds / shards * 100)


#: figure -> (its name in the table, shards, replicas)
CLUSTERS = {"four": ("4 shards", 4, 1), "mirror": ("1 shard, 2 replicas", 1, 2)}
ROWS = []
for name, (what, _, _) in CLUSTERS.items():
    memory, cpu, bare_cpu = f"{name}_memory_MB", f"{name}_cpu_percent", f"{name}_bare_cpu_percent"
    ROWS += [
        Row(f"{what}: processes", f"{name}_processes"),
        Row("  memory", memory, f"{name}_bare_memory_MB", "bare actors"),
        Row("  bare actors, CPU of a core per shard", bare_cpu),
        Row(f"{what}, CPU of a core per shard", cpu, bare_cpu, "bare actors", at_most(2)),
    ]


def measure(options: argparse.Namespace, rounds: Rounds) -> None:
    """Both clusters."""
    for name, (_, shards, replicas) in CLUSTERS.items():
        measure_cluster(options.directory, rounds, name, options.seconds, shards, replicas)


if __name__ == "__main__":
    words = {"type": float, "default": 20.0, "help": "length of each window"}
    run(__doc__, measure, ROWS, options={"--seconds": words})
