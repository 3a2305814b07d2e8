"""What do three replicas cost, and how soon does another one lead? `python -m benchmarks.replicate [--quick]`

A cluster of one replica and one of three run side by side, in a Ray each, and take turns in each of three rounds. All
of them are on one disk. So three replicas write every byte three times to it, and a batch counts as stored only when
all three logs have it on disk. Then the leader's CommitLog is killed again and again while a producer sends one message
at a time: the gap is the longest time between two receipts.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import raymq
from benchmarks import floors
from benchmarks.floors import Line, at_least, at_most
from benchmarks.idle import cpu_s
from benchmarks.put import LARGE, ROUNDS, Rounds, await_prewritten, batch_of, percentile, send_ms
from raymq.cluster import replica_status
from raymq.cluster.produce.batch_sender import BatchSender
from raymq.cluster.transport.routes import Routes

#: how long replicas may take to be equal, or to lead
TIMEOUT_S = 60.0
KILLS, QUICK_KILLS = 20, 5


def wait_for(holds: Callable[[], bool], step_s: float = 0.01) -> None:
    """Wait until it holds. Raises: SystemExit after TIMEOUT_S."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not holds():
        if time.monotonic() > deadline_s:
            raise SystemExit("the replicas did not get there in time")
        time.sleep(step_s)


def are_equal(cluster: raymq.Cluster) -> bool:
    """Whether all replicas have the same log, synced."""
    rows = replica_status.statuses(cluster, 0)
    ends = {row.get("synced") for row in rows} | {row.get("appended") for row in rows}
    return len(ends) == 1 and None not in ends


def stored_rate(cluster: raymq.Cluster, count: int) -> float:
    """Messages of 1 KiB a second, in batches, until every replica has all of them on disk."""
    batch = batch_of(*LARGE)
    await_prewritten(cluster)
    sender = BatchSender(Routes.of(cluster))
    for future in [sender.send("t", 0, batch) for _ in range(32)]:
        future.result(60)
    wait_for(lambda: are_equal(cluster))
    begin = time.perf_counter()
    futures = [sender.send("t", 0, batch) for _ in range(count)]
    for future in futures:
        future.result(120)
    wait_for(lambda: are_equal(cluster))
    seconds = time.perf_counter() - begin
    sender.close()
    return count * LARGE[0] / seconds


def cpu_of(cluster: raymq.Cluster) -> float:
    """User and system time of all CommitLogs and satellites of the first shard so far, seconds."""
    pids: set[int] = set()
    for row in replica_status.statuses(cluster, 0):
        pids.add(int(row["pid"]))
        pids |= set(row["satellites"].values())
    return sum(cpu_s(pid) for pid in pids)


def complete_replicas(cluster: raymq.Cluster) -> list[dict[str, Any]]:
    """The status of all replicas, once one leads and all are complete."""
    found: list[list[dict[str, Any]]] = []

    def are_complete() -> bool:
        rows = replica_status.statuses(cluster, 0)
        found.append(rows)
        leads = replica_status.leader_of(rows) is not None
        return leads and all(row["mode"] and row["is_complete"] for row in rows)

    wait_for(are_complete, 0.1)
    return found[-1]


def gaps_ms(cluster: raymq.Cluster, kills: int) -> list[float]:
    """For each kill -9 of the leader's CommitLog: the longest time between two receipts of one producer."""
    gaps = []
    with cluster.producer(acks="quorum") as producer:
        for _ in range(kills):
            rows = complete_replicas(cluster)
            leader = replica_status.leader_of(rows)
            pid = next(int(row["pid"]) for row in rows if row["replica"] == leader)
            producer.send("t", b"before", queue_id=0).result(60)

            os.kill(pid, signal.SIGKILL)
            began = last = time.perf_counter()
            longest = 0.0
            while last - began < 1.0 + longest:
                producer.send("t", b"during", queue_id=0).result(60)
                now = time.perf_counter()
                longest, last = max(longest, now - last), now
            gaps.append(longest * 1000)
    return gaps


def run(directory: Path, quick: bool) -> tuple[Rounds, dict[str, Any]]:
    """All measurements: of the rounds, and single ones."""
    rounds, single = Rounds(), {}
    count = 40 if quick else 150
    places = {"one": directory / "replicate-one", "three": directory / "replicate-three"}
    for place in places.values():
        shutil.rmtree(place, ignore_errors=True)

    with (
        raymq.start(places["one"], name="replicate-one") as one,
        raymq.start(places["three"], name="replicate-three", replicas=3) as three,
    ):
        clusters = {"one": one, "three": three}
        for cluster in clusters.values():
            cluster.create_topic("t", queues=4)
            stored_rate(cluster, count)
        for _ in range(ROUNDS):
            for name, cluster in clusters.items():
                before = cpu_of(cluster)
                rounds.note(f"{name}_1KiB_msg_s", stored_rate(cluster, count))
                spent = cpu_of(cluster) - before
                rounds.note(f"{name}_cpu_s_per_GB", spent / (count * LARGE[0] * LARGE[1] / 1e9))
                rounds.note(f"{name}_ms", send_ms(cluster, 200 if quick else 1000)[0])
        single["gaps_ms"] = sorted(gaps_ms(three, QUICK_KILLS if quick else KILLS))

    for place in places.values():
        shutil.rmtree(place, ignore_errors=True)
    return rounds, single


def table(rounds: Rounds, single: dict[str, Any]) -> list[Line]:
    """The lines of the report."""
    gaps = single["gaps_ms"]
    rate, rate_ratio = (
        rounds.median("three_1KiB_msg_s"),
        rounds.ratio("three_1KiB_msg_s", "one_1KiB_msg_s"),
    )
    ms, ms_ratio = rounds.median("three_ms"), rounds.ratio("three_ms", "one_ms")
    cpu, cpu_ratio = (
        rounds.median("three_cpu_s_per_GB"),
        rounds.ratio("three_cpu_s_per_GB", "one_cpu_s_per_GB"),
    )
    median, worst = percentile(gaps, 0.5), gaps[-1]
    return [
        Line(
            "three replicas, batches of 1 KiB",
            f"{rate:,.0f} msg/s",
            f"{rate_ratio:.2f} x one",
            at_least(0.3),
            rate_ratio,
        ),
        Line("  one message", f"{ms:.2f} ms", f"{ms_ratio:.2f} x one", at_most(2), ms_ratio),
        Line("  CPU of all their processes", f"{cpu:.1f} s/GB", f"{cpu_ratio:.2f} x one"),
        Line(
            f"  {len(gaps)} leaders killed, writes back",
            f"{median:,.0f} ms",
            "median",
            at_most(2000),
            median,
        ),
        Line("", f"{worst:,.0f} ms", "worst", at_most(5000), worst),
    ]


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="shorter bursts, fewer kills")
    parser.add_argument("--directory", type=Path, default=Path.home() / ".raymq" / "bench")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    floors.options(parser)
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)

    rounds, single = run(options.directory, options.quick)
    if options.json:
        options.json.write_text(json.dumps({**rounds.all(), **single}, indent=1))
    sys.exit(floors.report(table(rounds, single), check=options.check))


if __name__ == "__main__":
    main()
