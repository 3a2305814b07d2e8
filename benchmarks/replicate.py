"""What do three replicas cost, and how soon are they whole again? `python -m benchmarks.replicate [--quick] [--check]`

A cluster of one replica and one of three run side by side, in a Ray each, and take turns in each of three rounds. All
of them are on one disk. So three replicas write every byte three times to it, and a batch counts as stored only when
all three logs have it on disk. Then the leader's CommitLog is killed again and again while a producer sends one message
at a time: the gap is the longest time between two receipts. It is measured, too, while all processes restart one
replica after the other.

After that a follower gets an empty successor, again in three rounds. Its catch-up begins with the first status of the
successor and ends when its synced end is the leader's. No other client sends meanwhile. The limit, measured right
before each, is a copy of the leader's log files: pread and pwrite of 4 MiB at a time, and an fdatasync every 16 MiB.
Both begin when no replica pre-writes files any more. One more catch-up runs while a producer sends one message at a
time. At last an idle cluster of four shards of three replicas is measured alone, and then as many bare Ray actors.
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
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray

import raymq
from benchmarks import floors, idle
from benchmarks.floors import Line, at_least, at_most
from benchmarks.put import (
    LARGE,
    ROUNDS,
    Rounds,
    await_prewritten,
    batch_of,
    cpu_s,
    memory_mb,
    percentile,
    send_ms,
)
from raymq.client import replica_status
from raymq.client.produce.batch_sender import BatchSender
from raymq.client.transport.routes import Routes
from raymq.cluster.record.paths import ClusterPaths

#: how long replicas may take to be equal, or to lead
TIMEOUT_S = 60.0
KILLS, QUICK_KILLS = 20, 5
#: log bytes that an empty follower gets, GB
LOG_GB, QUICK_LOG_GB = 2.0, 0.5
#: how long one catch-up may take
CATCH_UP_TIMEOUT_S = 180.0
#: between two looks at a follower that catches up
LOOK_S = 0.05
COPY_BLOCK_BYTES = 4 << 20
#: copies with one sync per file of 1 GiB were measured slower than catch-ups, so they are not a limit
COPY_SYNC_BYTES = 16 << 20
#: a CommitLog that writes less in QUIET_S pre-writes nothing
QUIET_BYTES, QUIET_S = 1 << 20, 1.0
IDLE_SHARDS, IDLE_REPLICAS = 4, 3
#: after a start the shards pre-write their windows
IDLE_SETTLE_S = 15


def wait_for(holds: Callable[[], bool], step_s: float = 0.01, timeout_s: float = TIMEOUT_S) -> None:
    """Wait until it holds. Raises: SystemExit after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
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


def restart_gap_ms(cluster: raymq.Cluster) -> float:
    """The longest time between two receipts of one producer while all replicas restart, one after the other."""
    complete_replicas(cluster)
    longest = 0.0
    with cluster.producer(acks="quorum") as producer, ThreadPoolExecutor(1) as pool:
        producer.send("t", b"before", queue_id=0).result(60)
        last = time.perf_counter()
        restarted = pool.submit(cluster.rolling_restart)
        while not restarted.done():
            producer.send("t", b"during", queue_id=0).result(60)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
        restarted.result()
    return longest * 1000


# --- catch-up -------------------------------------------------------------------------------------


def fill(cluster: raymq.Cluster, gigabytes: float) -> None:
    """Write until the log of the first shard has so many bytes, and every replica has all of them."""
    batch = batch_of(*LARGE)
    sender = BatchSender(Routes.of(cluster))
    while max(row["synced"] for row in complete_replicas(cluster)) < gigabytes * 1e9:
        for future in [sender.send("t", 0, batch) for _ in range(64)]:
            future.result(120)
    sender.close()
    wait_for(lambda: are_equal(cluster))


def written_bytes(pid: int) -> int:
    """Bytes that a process has given to write calls so far."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar:"))


def await_quiet(cluster: raymq.Cluster) -> None:
    """Wait until no replica pre-writes files and deletions are on disk, so that a figure has the disk alone."""
    os.sync()
    pids = [int(row["pid"]) for row in complete_replicas(cluster)]
    last: list[int] = []

    def are_quiet() -> bool:
        now = [written_bytes(pid) for pid in pids]
        quiet = bool(last) and sum(now) - sum(last) < QUIET_BYTES
        last[:] = now
        return quiet

    wait_for(are_quiet, QUIET_S)


def copy_rate(source: Path, directory: Path, end: int) -> float:
    """Bytes a second of a raw copy of the log files below `end`: pread, pwrite, and fdatasync."""
    target = directory / "replicate-copy"
    target.mkdir()
    buffer = memoryview(bytearray(COPY_BLOCK_BYTES))
    begin = time.perf_counter()
    for path in sorted(source.iterdir()):
        size = path.stat().st_size
        stop = min(size, end - int(path.name))
        if stop <= 0:
            continue
        reader = os.open(path, os.O_RDONLY)
        writer = os.open(target / path.name, os.O_RDWR | os.O_CREAT, 0o600)
        os.posix_fallocate(writer, 0, size)
        for at in range(0, stop, COPY_BLOCK_BYTES):
            block = buffer[: min(COPY_BLOCK_BYTES, stop - at)]
            os.preadv(reader, [block], at)
            os.pwrite(writer, block, at)
            after = at + len(block)
            if after == stop or after % COPY_SYNC_BYTES == 0:
                os.fdatasync(writer)
        os.close(writer)
        os.close(reader)
    seconds = time.perf_counter() - begin
    shutil.rmtree(target)
    return end / seconds


def catch_up_rate(cluster: raymq.Cluster, row: dict[str, Any], target: int) -> float:
    """Bytes a second of an empty successor of a follower, from its first status until `target` is synced.

    Args: `row`: the status of the follower before. Returns: the replacement is complete.
    """
    seen: list[tuple[float, int]] = []

    def look(replacing: Future[None]) -> bool:
        if replacing.done():
            # It may have failed.
            replacing.result()
        now = time.perf_counter()
        rows = replica_status.statuses(cluster, 0)
        new = next(each for each in rows if each["replica"] == row["replica"])
        if new["mode"] and new["generation"] > row["generation"] and new["synced"] is not None:
            seen.append((now, int(new["synced"])))
        return bool(seen) and seen[-1][1] >= target

    with ThreadPoolExecutor(1) as pool:
        replacing = pool.submit(cluster.replace_replica, 0, row["replica"])
        wait_for(lambda: look(replacing), LOOK_S, CATCH_UP_TIMEOUT_S)
        replacing.result()
    (began, had), (ended, has) = seen[0], seen[-1]
    return (min(has, target) - had) / (ended - began)


def follower_of(cluster: raymq.Cluster) -> tuple[dict[str, Any], dict[str, Any]]:
    """The status of the leader and of a follower, once all are complete."""
    rows = complete_replicas(cluster)
    leader = replica_status.leader_of(rows)
    follower = next(row for row in rows if row["replica"] != leader)
    return next(row for row in rows if row["replica"] == leader), follower


def measure_catch_up(
    cluster: raymq.Cluster, directory: Path, rounds: Rounds, quick: bool
) -> dict[str, Any]:
    """Rounds of a raw copy and a catch-up. Returns: what a producer meets during another catch-up."""
    fill(cluster, QUICK_LOG_GB if quick else LOG_GB)
    shard = ClusterPaths(directory / "replicate-three").replica(0, 0).parent

    def replace() -> float:
        leader, follower = follower_of(cluster)
        rate = catch_up_rate(cluster, follower, leader["synced"])
        for old in shard.glob("replaced-*"):
            shutil.rmtree(old)
        return rate

    for _ in range(ROUNDS):
        leader, _ = follower_of(cluster)
        log = shard / f"replica-{leader['replica']}" / "commitlog"
        await_quiet(cluster)
        rounds.note("copy_bytes_s", copy_rate(log, directory, leader["synced"]))
        await_quiet(cluster)
        rounds.note("catch_up_bytes_s", replace())

    await_quiet(cluster)
    alone_ms, _ = send_ms(cluster, 200 if quick else 1000)
    times: list[float] = []
    body = os.urandom(LARGE[1])
    with ThreadPoolExecutor(1) as pool, cluster.producer() as producer:
        replacing = pool.submit(replace)
        while not replacing.done():
            begin = time.perf_counter()
            producer.send("t", body, queue_id=0).result(60)
            times.append((time.perf_counter() - begin) * 1000)
    return {
        "alone_ms": alone_ms,
        "beside_ms": percentile(times, 0.5),
        "beside_p99_ms": percentile(times, 0.99),
        "beside_bytes_s": replacing.result(),
    }


# --- the idle cluster -----------------------------------------------------------------------------


def measure_idle(directory: Path, seconds: float) -> dict[str, Any]:
    """CPU and memory of an idle cluster of four shards of three replicas, and of as many bare Ray actors."""
    place = directory / "replicate-idle"
    shutil.rmtree(place, ignore_errors=True)
    with raymq.start(
        place, name="replicate-idle", shards=IDLE_SHARDS, replicas=IDLE_REPLICAS
    ) as cluster:
        ray.init(cluster.ray_address, ignore_reinit_error=True, log_to_driver=False)
        pids = list(idle.processes(cluster, IDLE_REPLICAS).values())
        time.sleep(IDLE_SETTLE_S)
        facts = {
            "processes": len(pids),
            "memory_mb": round(sum(memory_mb(pid) for pid in pids), 1),
            "cpu_percent_per_shard": round(idle.idle_percent(pids, seconds) / IDLE_SHARDS, 2),
        }

        make = ray.remote(idle.Bare).options(num_cpus=0)
        actors: list[Any] = [make.remote() for _ in pids]
        bare = ray.get([actor.pid.remote() for actor in actors])
        time.sleep(IDLE_SETTLE_S)
        facts["bare_memory_mb"] = round(sum(memory_mb(pid) for pid in bare), 1)
        bare_percent = idle.idle_percent(bare, seconds) / IDLE_SHARDS
        facts["bare_cpu_percent_per_shard"] = round(bare_percent, 2)
        ray.shutdown()
    shutil.rmtree(place, ignore_errors=True)
    return facts


# --- the run --------------------------------------------------------------------------------------


def run(directory: Path, quick: bool) -> tuple[Rounds, dict[str, Any]]:
    """All measurements: of the rounds, and single ones."""
    rounds, single = Rounds(), {}
    count = 40 if quick else 150
    places = {"one": directory / "replicate-one", "three": directory / "replicate-three"}
    for place in [*places.values(), directory / "replicate-copy"]:
        shutil.rmtree(place, ignore_errors=True)

    with raymq.start(places["three"], name="replicate-three", replicas=3) as three:
        with raymq.start(places["one"], name="replicate-one") as one:
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
        single["restart_gap_ms"] = restart_gap_ms(three)
        single["catch_up"] = measure_catch_up(three, directory, rounds, quick)

    for place in places.values():
        shutil.rmtree(place, ignore_errors=True)
    single["idle"] = measure_idle(directory, 10 if quick else 20)
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
    catch_up, catch_up_ratio = (
        rounds.median("catch_up_bytes_s"),
        rounds.ratio("catch_up_bytes_s", "copy_bytes_s"),
    )
    beside, resting = single["catch_up"], single["idle"]
    idle_cpu = resting["cpu_percent_per_shard"]
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
        Line(
            "  all replicas restarted, longest wait",
            f"{single['restart_gap_ms']:,.0f} ms",
            "",
            at_most(1000),
            single["restart_gap_ms"],
        ),
        Line(
            "  catch-up of an empty follower",
            f"{catch_up / 1e6:,.0f} MB/s",
            f"{catch_up_ratio:.2f} x raw copy",
            at_least(0.5),
            catch_up_ratio,
        ),
        Line(
            "  one message beside a catch-up",
            f"{beside['beside_ms']:.2f} ms",
            f"{beside['beside_ms'] / beside['alone_ms']:.2f} x without",
        ),
        Line(
            f"idle, {IDLE_SHARDS} shards x {IDLE_REPLICAS}: CPU of a core per shard",
            f"{idle_cpu} %",
            f"bare Ray actors {resting['bare_cpu_percent_per_shard']} %",
            floor=at_most(5),
            value=idle_cpu,
        ),
        Line(
            f"  PSS of {resting['processes']} processes",
            f"{resting['memory_mb']:,.0f} MB",
            f"bare Ray actors {resting['bare_memory_mb']:,.0f} MB",
        ),
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
