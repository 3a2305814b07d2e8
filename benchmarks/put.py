"""How fast are durable puts? `python -m benchmarks.put [--quick] [--check] [--sustained-gb 10] [--json FILE]`

Every figure is a median of three rounds. Its limit is a raw pwrite + fdatasync of equal blocks into pre-written
blocks, or a Flight echo. A round measures a figure right after its limit, and a ratio is the median of the rounds'
ratios. Read the ratios: shared machines become faster and slower within seconds. Only the mirror, which is a cluster of
its own, is measured after all rounds of the single shard.
"""

from __future__ import annotations

import argparse
import os
import statistics
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import raymq
from benchmarks import limits
from benchmarks.floors import at_least, at_most
from benchmarks.limits import BLOCK_BYTES, BODY, LARGE, SMALL, UNLIMITED, batch_of, batch_rate, sent
from benchmarks.rounds import Rounds, Row, in_turn, run, tell
from raymq.client.produce.producer_config import IN_FLIGHT_BYTES
from raymq.cluster.bench.callers import Callers
from raymq.cluster.bench.plan import BenchPlan, Keys
from raymq.store.config.store_config import StoreConfig
from raymq.store.embedded.embedded_store import EmbeddedStore
from raymq.store.records.record import batch_bytes
from raymq.store.records.requests import PutRequest

#: a message at a time takes less than a millisecond, and machines change within seconds: limit and figure take turns so
#: often in a round
TURNS = 5
PRODUCERS = (1, 4, 16, 64)


def embedded_rate(store: EmbeddedStore, shape: tuple[int, int], count: int) -> float:
    """Messages a second, each batch synced before its receipt, as many bytes under way as a producer has."""
    batch = batch_of(*shape)
    under_way_max = max(1, IN_FLIGHT_BYTES // batch_bytes(batch))
    while store.store.log.allocator.step():
        pass

    producer_id = int.from_bytes(os.urandom(7), "big")
    requests = [
        PutRequest("t", 0, batch, producer_id, 0, index * shape[0], "quorum")
        for index in range(count)
    ]
    ms = limits.call_ms(lambda: limits.append_all(store, requests, under_way_max), 1)
    return 1000 * count * shape[0] / ms


def grouping(cluster: raymq.Cluster, producers: int, count: int) -> float:
    """Messages per fsync with so many producers, each sending one message at a time."""
    with ExitStack() as stack, ThreadPoolExecutor(producers) as pool:
        plan = BenchPlan(api="batches", topic="t", workers=1, in_flight=1, batch=1)
        callers = [stack.enter_context(Callers(cluster, plan)) for _ in range(producers)]
        before = limits.syncs_of(cluster)
        list(pool.map(lambda each: each.run(count), callers))
        return producers * count / max(1, limits.syncs_of(cluster) - before)


def note_memory(cluster: raymq.Cluster, rounds: Rounds, name: str) -> None:
    """Note the memory of the CommitLog process and of each of its satellites."""
    shard = cluster.status()["shards"][0]
    pids = {"commit_log": shard["pid"], **limits.satellites_of(shard)}
    sizes = {
        role: rounds.note(f"{name}_{role}_MB", limits.memory_mb(pid)) for role, pid in pids.items()
    }
    largest = max(size for role, size in sizes.items() if role != "commit_log")
    rounds.note(f"{name}_largest_other_MB", largest)


def sustained(cluster: raymq.Cluster, directory: Path, gigabytes: float, rounds: Rounds) -> None:
    """Write so much at full speed: rate of each tenth, memory before and after, the limit of fresh blocks."""
    rows, _ = LARGE
    tenth = max(1, int(gigabytes * 1e8 / batch_of(*LARGE).nbytes))
    blocks_s = limits.raw_limit(directory, BLOCK_BYTES, 10 * tenth, fresh=True)
    rounds.note("fresh_msg_s", blocks_s * rows)
    note_memory(cluster, rounds, "before_sustained")

    plan = BenchPlan(topic="t", queues=1, workers=1, in_flight=UNLIMITED, batch=rows)
    with Callers(cluster, plan) as callers:
        rates = [rows * callers.run(tenth).rate for _ in range(10)]
    tell(f"sustained, each tenth: {', '.join(f'{rate:,.0f} msg/s' for rate in rates)}")
    rounds.note("sustained_msg_s", statistics.median(rates))
    rounds.note("slowest_tenth_msg_s", min(rates))
    rounds.note("burst_msg_s", rounds.median("single_1KiB_msg_s"))
    note_memory(cluster, rounds, "after_sustained")


# --- the run --------------------------------------------------------------------------------------


def measure_single(
    cluster: raymq.Cluster, store: EmbeddedStore, directory: Path, rounds: Rounds, quick: bool
) -> None:
    """A round of everything that has a limit in its own round, on an unreplicated shard."""
    count, serial = (40, 40) if quick else (150, 400)
    rounds.note("raw_1KiB_msg_s", limits.raw_limit(directory, BLOCK_BYTES, count) * LARGE[0])
    rounds.note("embedded_1KiB_msg_s", embedded_rate(store, LARGE, count))
    rounds.note("single_1KiB_msg_s", batch_rate(cluster, LARGE, count))
    rounds.note("send_batch_1KiB_msg_s", batch_rate(cluster, LARGE, count, "columns"))
    limits.await_prewritten(cluster)
    keyed = sent(cluster, count * 200, queues=4, in_flight=UNLIMITED, keys=Keys(1000))
    rounds.note("send_1KiB_msg_s", keyed.rate)
    rounds.note("embedded_100B_msg_s", embedded_rate(store, SMALL, count))
    rounds.note("single_100B_msg_s", batch_rate(cluster, SMALL, count))

    limits.await_prewritten(cluster)
    for _ in range(TURNS):
        limit_ms, _ = limits.flight_echo(BODY, serial, synced_in=directory)
        rounds.note("echo_that_syncs_ms", limit_ms)
        for name, api in (("serial", "batches"), ("send", "messages")):
            rounds.note_times(name, sent(cluster, serial, api=api).latency)

    for producers in PRODUCERS:
        share = grouping(cluster, producers, 40 if quick else 100)
        rounds.note(f"msgs_per_fsync_{producers}", share)


def measure(options: argparse.Namespace, rounds: Rounds) -> None:
    """All measurements."""
    directory, quick, count = options.directory, options.quick, 40 if options.quick else 150

    for mode, replicas in (("single", 1), ("mirror", 2)):
        with limits.started(directory, mode, replicas=replicas) as cluster:
            # Bursts grow the window of pre-written blocks to the need of the measured ones.
            batch_rate(cluster, LARGE, count)
            if mode == "single":
                root = limits.cleared(directory / "embedded")
                config = StoreConfig(prewrite_window_bytes=512 << 20)
                with closing(EmbeddedStore(root, config=config)) as store:
                    store.create_topic("t", 1)
                    for _ in in_turn():
                        measure_single(cluster, store, directory, rounds, quick)
                limits.cleared(root)
                if options.sustained_gb:
                    sustained(cluster, directory, options.sustained_gb, rounds)
            else:
                for _ in in_turn(what="mirror, round"):
                    rounds.note("mirror_1KiB_msg_s", batch_rate(cluster, LARGE, count))
            note_memory(cluster, rounds, mode)


RAW, EMBEDDED, BATCH = "raw_1KiB_msg_s", "embedded_1KiB_msg_s", "single_1KiB_msg_s"
SMALLEST, ONE = "embedded_100B_msg_s", "serial_p50_ms"
FRESH, KEPT = "fresh_msg_s", "after_sustained_commit_log_MB"
ROWS = [
    Row("raw pwrite + fdatasync, 1,140 KiB blocks", RAW, remark="limit"),
    Row("embedded, 1 KiB x 1,024", EMBEDDED, RAW, "raw", at_least(0.25)),
    Row("through Flight", BATCH, EMBEDDED, "embedded", at_least(0.5)),
    Row("  by send_batch", "send_batch_1KiB_msg_s", BATCH, "the internal road", at_least(0.8)),
    Row("  by Producer.send, one object a message", "send_1KiB_msg_s"),
    # Both replicas write to one disk with the same cores, so that about half of the rate is left.
    Row("mirror", "mirror_1KiB_msg_s", BATCH, "single", at_least(0.33)),
    Row("embedded, 100 B x 8,192", SMALLEST),
    Row("through Flight, 100 B", "single_100B_msg_s", SMALLEST, "embedded", at_least(0.6)),
    Row("Flight echo that syncs 1 KiB", "echo_that_syncs_ms", remark="limit"),
    Row("one message at a time, p50 (p99)", ONE, "echo_that_syncs_ms", "that", at_most(3)),
    Row("one message by Producer.send", "send_p50_ms", ONE, "the internal road", at_most(1.5)),
    *(Row(f"messages per fsync, producers: {n}", f"msgs_per_fsync_{n}") for n in PRODUCERS[:-1]),
    Row("messages per fsync, 64", "msgs_per_fsync_64", "msgs_per_fsync_1", "one", at_least(1.5)),
    Row("memory without file pages, CommitLog", "single_commit_log_MB", floor=at_most(150)),
    Row("memory, the largest of the others", "single_largest_other_MB", floor=at_most(75)),
    Row("  CommitLog of the mirror", "mirror_commit_log_MB"),
    Row("raw into fresh blocks, as many", FRESH, remark="limit"),
    Row("sustained, median of the tenths", "sustained_msg_s", FRESH, "fresh"),
    Row("  beside the burst", "sustained_msg_s", "burst_msg_s", "the burst"),
    Row("  slowest tenth", "slowest_tenth_msg_s"),
    Row("memory after it", KEPT, "before_sustained_commit_log_MB", "before", at_most(1.2)),
]


if __name__ == "__main__":
    words = {"type": float, "default": 0.0, "help": "also write so many GB (10 for the record)"}
    run(__doc__, measure, ROWS, options={"--sustained-gb": words})
