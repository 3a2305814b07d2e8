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
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import raymq
from benchmarks import idle
from benchmarks.floors import Line, at_least, at_most
from benchmarks.limits import BODY, LARGE, UNLIMITED, await_prewritten, sent, started
from benchmarks.rounds import Rounds, Row, in_turn, lines_of, run
from raymq.client import replica_status
from raymq.cluster.bench.callers import Callers
from raymq.cluster.bench.histogram import Histogram
from raymq.cluster.bench.plan import BenchPlan
from raymq.cluster.record.paths import ClusterPaths

COPY_BLOCK_BYTES = 4 << 20
#: copies with one sync per file of 1 GiB were measured slower than catch-ups, so they are not a limit
COPY_SYNC_BYTES = 16 << 20
#: a CommitLog that writes less in QUIET_S pre-writes nothing
QUIET_BYTES, QUIET_S = 1 << 20, 1.0
IDLE_SHARDS, IDLE_REPLICAS = 4, 3
IDLE = f"idle, {IDLE_SHARDS} shards x {IDLE_REPLICAS}"
#: batches without a pause
BATCHES = BenchPlan(topic="t", queues=1, workers=1, in_flight=UNLIMITED, batch=LARGE[0])


def wait_for(holds: Callable[[], bool], step_s: float = 0.01, timeout_s: float = 60) -> None:
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
    await_prewritten(cluster)
    with Callers(cluster, BATCHES) as callers:
        callers.run(32)
        wait_for(lambda: are_equal(cluster))
        begin = time.perf_counter()
        callers.run(count)
        wait_for(lambda: are_equal(cluster))
        return count * LARGE[0] / (time.perf_counter() - begin)


def complete_replicas(cluster: raymq.Cluster) -> list[dict[str, Any]]:
    """The status of all replicas, once one leads and all are complete."""
    rows: list[dict[str, Any]] = []

    def are_complete() -> bool:
        rows[:] = replica_status.statuses(cluster, 0)
        leads = replica_status.leader_of(rows) is not None
        return leads and all(row["mode"] and row["is_complete"] for row in rows)

    wait_for(are_complete, 0.1)
    return rows


def waits_s(cluster: raymq.Cluster) -> Iterator[float]:
    """Send one message after the other. Yields: the seconds from each receipt to the next."""
    with cluster.producer(acks="quorum") as producer:
        body = bytes(BODY)
        producer.send("t", body, queue_id=0).result(60)
        last = time.perf_counter()
        while True:
            now = time.perf_counter()
            wait_s, last = now - last, now
            yield wait_s
            producer.send("t", body, queue_id=0).result(60)


def gap_ms(cluster: raymq.Cluster) -> float:
    """The longest time between two receipts of one producer, while the leader's CommitLog gets kill -9."""
    leader, _ = follower_of(cluster)
    longest = passed = 0.0
    for number, wait_s in enumerate(waits_s(cluster)):
        if not number:
            os.kill(int(leader["pid"]), signal.SIGKILL)
        longest, passed = max(longest, wait_s), passed + wait_s
        if passed >= 1.0 + longest:
            break
    return longest * 1000


def waits_beside_ms(cluster: raymq.Cluster, work: Callable[[], object]) -> list[float]:
    """The times between the receipts of one producer while something else is done."""
    times = []
    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work)
        for wait_s in waits_s(cluster):
            times.append(wait_s * 1000)
            if working.done():
                break
        working.result()
    return times


# --- catch-up -------------------------------------------------------------------------------------


def fill(cluster: raymq.Cluster, gigabytes: float) -> None:
    """Write until the log of the first shard has so many bytes, and every replica has all of them."""
    with Callers(cluster, BATCHES) as callers:
        while max(row["synced"] for row in complete_replicas(cluster)) < gigabytes * 1e9:
            callers.run(64)
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
        wait_for(lambda: look(replacing), 0.05, 180)
        replacing.result()
    (began, had), (ended, has) = seen[0], seen[-1]
    return (min(has, target) - had) / (ended - began)


def follower_of(cluster: raymq.Cluster) -> tuple[dict[str, Any], dict[str, Any]]:
    """The status of the leader and of a follower, once all are complete."""
    rows = complete_replicas(cluster)
    leader = replica_status.leader_of(rows)
    rows.sort(key=lambda row: row["replica"] != leader)
    return rows[0], rows[1]


def measure_catch_up(cluster: raymq.Cluster, directory: Path, rounds: Rounds, quick: bool) -> None:
    """Rounds of a raw copy and a catch-up, and what a producer meets during another catch-up."""
    fill(cluster, 0.5 if quick else 2)
    shard = ClusterPaths(directory / "replicate-three").replica(0, 0).parent

    def replace() -> None:
        leader, follower = follower_of(cluster)
        rounds.note("catch_up_MB_s", catch_up_rate(cluster, follower, leader["synced"]) / 1e6)
        for old in shard.glob("replaced-*"):
            shutil.rmtree(old)

    for _ in in_turn(what="catch-up"):
        leader, _ = follower_of(cluster)
        log = shard / f"replica-{leader['replica']}" / "commitlog"
        await_quiet(cluster)
        rounds.note("copy_MB_s", copy_rate(log, directory, leader["synced"]) / 1e6)
        await_quiet(cluster)
        replace()

    await_quiet(cluster)
    alone = sent(cluster, 200 if quick else 1000)
    rounds.note("alone_ms", alone.percentile_ms(50))
    beside = Histogram()
    beside.record([1000 * ms for ms in waits_beside_ms(cluster, replace)])
    # It runs beside a producer, so its rate belongs to no round.
    rounds.note("catch_up_beside_MB_s", rounds.values["catch_up_MB_s"].pop())
    rounds.note_times("beside", beside)


# --- the run --------------------------------------------------------------------------------------


def measure(options: argparse.Namespace, rounds: Rounds) -> None:
    """All measurements."""
    directory, quick, count = options.directory, options.quick, 40 if options.quick else 150
    shutil.rmtree(directory / "replicate-copy", ignore_errors=True)
    with started(directory, "replicate-three", replicas=3) as three:
        with started(directory, "replicate-one") as one:
            for cluster in (one, three):
                stored_rate(cluster, count)
            for _ in in_turn():
                for name, cluster in (("one", one), ("three", three)):
                    rounds.note(f"{name}_1KiB_msg_s", stored_rate(cluster, count))
                    one_by_one = sent(cluster, 200 if quick else 1000)
                    rounds.note(f"{name}_ms", one_by_one.percentile_ms(50))
        for _ in in_turn(5 if quick else 20, "kill"):
            rounds.note("gap_ms", gap_ms(three))
        complete_replicas(three)
        rounds.note("restart_gap_ms", max(waits_beside_ms(three, three.rolling_restart)))
        measure_catch_up(three, directory, rounds, quick)

    seconds = 10 if quick else 20
    idle.measure_cluster(directory, rounds, "replicate", seconds, IDLE_SHARDS, IDLE_REPLICAS)


def table(rounds: Rounds) -> list[Line]:
    """The lines of the report."""
    gaps = rounds.values["gap_ms"]
    rounds.note("worst_gap_ms", max(gaps))
    return lines_of(
        [
            Row(
                "three replicas, batches of 1 KiB",
                "three_1KiB_msg_s",
                "one_1KiB_msg_s",
                "one",
                at_least(0.3),
            ),
            Row("  one message", "three_ms", "one_ms", "one", at_most(2)),
            Row(f"  {len(gaps)} leaders killed, writes back", "gap_ms", floor=at_most(2000)),
            Row("  leaders killed, at worst", "worst_gap_ms", floor=at_most(5000)),
            Row("  all replicas restarted, longest wait", "restart_gap_ms", floor=at_most(1000)),
            Row(
                "  catch-up of an empty follower",
                "catch_up_MB_s",
                "copy_MB_s",
                "raw copy",
                at_least(0.5),
            ),
            Row("  one message beside a catch-up", "beside_p50_ms", "alone_ms", "without"),
            Row(f"{IDLE}: CPU of a core per shard", "replicate_cpu_percent", floor=at_most(5)),
            Row("  bare Ray actors", "replicate_bare_cpu_percent"),
            Row("  memory", "replicate_memory_MB", "replicate_bare_memory_MB", "bare Ray actors"),
        ],
        rounds,
    )


if __name__ == "__main__":
    run(__doc__, measure, table)
