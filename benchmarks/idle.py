"""What does an idle cluster cost? `python -m benchmarks.idle [--seconds 20] [--json FILE]`

Two idle clusters are measured, one of four shards and one of a mirrored shard: processes, memory (PSS without file
pages) and CPU. As many bare Ray actors in the same Ray are measured right after each. CPU is the processes' own time
over the window, in percent of one core.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import ray

import raymq
from benchmarks import floors
from benchmarks.floors import Line, at_most
from benchmarks.put import cpu_s, memory_mb

#: how long the satellites of a replica may take to start
START_TIMEOUT_S = 60


def idle_percent(pids: list[int], seconds: float) -> float:
    """CPU of all of them together, percent of one core."""
    before = {pid: cpu_s(pid) for pid in pids}
    time.sleep(seconds)
    return sum(cpu_s(pid) - before[pid] for pid in pids) / seconds * 100


def processes(cluster: raymq.Cluster, replicas: int) -> dict[str, int]:
    """role -> pid of every process of every replica."""
    found = {}
    from raymq.cluster.deploy import actor_states

    for shard in range(cluster.shards):
        names = [(shard, replica, "commit_log") for replica in range(replicas)]
        for member in actor_states.find(ray, cluster.name, names):
            status = ray.get(member.handle.status.remote())
            # A satellite may still be starting.
            deadline_s = time.monotonic() + START_TIMEOUT_S
            while not all(facts["granted"] for facts in status["supervisor"]["roles"].values()):
                if time.monotonic() > deadline_s:
                    raise SystemExit(
                        f"a satellite of {member.name} did not start: {status['roles']}"
                    )
                time.sleep(0.1)
                status = ray.get(member.handle.status.remote())
            found[f"{member.name}"] = int(status["pid"])
            for role, facts in status["supervisor"]["roles"].items():
                found[f"{member.name}/{role}"] = int(facts["pid"])
    return found


class Bare:
    """An actor that does nothing."""

    def pid(self) -> int:
        """The id of its process."""
        return os.getpid()


def measure(directory: Path, seconds: float, **options: Any) -> dict[str, Any]:
    """Measure one cluster, and as many bare actors."""
    shutil.rmtree(directory, ignore_errors=True)
    with raymq.start(directory, name=directory.name, **options) as cluster:
        ray.init(cluster.ray_address, ignore_reinit_error=True, log_to_driver=False)
        ours = processes(cluster, 2 if options.get("replicas") == 2 else 1)
        make = ray.remote(Bare).options(num_cpus=0)
        actors: list[Any] = [make.remote() for _ in ours]
        bare = ray.get([actor.pid.remote() for actor in actors])

        time.sleep(5)
        facts = {
            "processes": len(ours),
            "memory_mb": round(sum(memory_mb(pid) for pid in ours.values()), 1),
            "bare_memory_mb": round(sum(memory_mb(pid) for pid in bare), 1),
            "cpu_percent": round(idle_percent(list(ours.values()), seconds), 2),
            "bare_cpu_percent": round(idle_percent(bare, seconds), 2),
        }
        ray.shutdown()

    shutil.rmtree(directory, ignore_errors=True)
    return facts


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="length of each window")
    parser.add_argument("--directory", type=Path, default=Path.home() / ".raymq" / "bench")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    floors.options(parser)
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)

    found = {
        "4 shards": measure(options.directory / "idle-four", options.seconds, shards=4),
        "1 shard, 2 replicas": measure(
            options.directory / "idle-mirror", options.seconds, replicas=2
        ),
    }

    if options.json:
        options.json.write_text(json.dumps(found, indent=1))

    lines = []
    for what, facts in found.items():
        ratio = facts["cpu_percent"] / max(facts["bare_cpu_percent"], 0.01)
        memory = f"{facts['memory_mb']} MB (bare actors {facts['bare_memory_mb']})"
        share = f"{ratio:.2f} x bare actors ({facts['bare_cpu_percent']} %)"
        lines += [
            Line(f"{what}, {facts['processes']} processes", memory),
            Line("  CPU of a core", f"{facts['cpu_percent']} %", share, at_most(2), ratio),
        ]

    sys.exit(floors.report(lines, check=options.check))


if __name__ == "__main__":
    main()
