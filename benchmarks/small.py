"""What do small messages cost? `python -m benchmarks.small [--quick] [--check] [--busy] [--only PART] [--json FILE]`

It measures producers that wait for each receipt, producers with some messages in flight, small batches, and messages
on their way to a consumer at fixed rates. Small batches also go over up to 1,000 topics. All messages are durable
before their receipts, with the default options. The limits are a Flight echo and an fdatasync, measured in the same
round. The peer is Redis 7 with `appendfsync always` and XADD, driven right before the figure that is compared with it,
if `redis-server` is installed: by `redis-py`, which is Python as our clients are, in threads and in tasks of asyncio;
and by its own C client `redis-benchmark`. End to end is measured with the default linger time and with 0.

Each figure is a median of three rounds, a ratio the median of the rounds' ratios. `--busy` runs a process that computes
on each core at the same time. CPU times are of CommitLog, its satellites and this process, per message or per batch.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

import raymq
from benchmarks import limits, redis_peer
from benchmarks.floors import Line, at_least, at_most
from benchmarks.limits import BODY, cpu_s
from benchmarks.read import read_rate
from benchmarks.rounds import ROUNDS, Rounds, Row, in_turn, lines_of, run
from raymq.client.messages.columns import put_batch
from raymq.client.produce.producer_config import ProducerConfig
from raymq.cluster.bench.callers import Callers
from raymq.cluster.bench.histogram import Histogram
from raymq.cluster.bench.plan import BenchPlan, FixedSize, Keys
from raymq.store.records.keys import KEYS
from raymq.store.records.properties import encode

#: batches of 20 rows go over so many topics
TOPICS = (1, 100, 1000)
#: Python runs it at the start of a process. A loop that polls yields its core at each step, every few microseconds.
#: The CPU time between two yields that follow each other so closely is that of one step
COUNT_POLLING = """
import os, pathlib, threading, time
STEP_NS_MAX, WRITE_NS = 20_000, 50_000_000
yield_core, thread, written_ns = os.sched_yield, threading.local(), 0
polled_ns = 0
path = pathlib.Path(__file__).with_name(f"polled-{os.getpid()}")
def sched_yield():
    global polled_ns, written_ns
    yield_core()
    now_ns = time.thread_time_ns()
    step_ns = now_ns - getattr(thread, "last_ns", 0)
    thread.last_ns = now_ns
    if step_ns < STEP_NS_MAX:
        polled_ns += step_ns
    elif time.monotonic_ns() - written_ns > WRITE_NS:
        written_ns = time.monotonic_ns()
        path.write_text(str(polled_ns / 1e9))
os.sched_yield = sched_yield
"""


def plan(callers: int, in_flight: int, topics: int = 1, queues: int = 4, **more: Any) -> BenchPlan:
    """Single messages of 1 KiB over topics of so many queues, unless the options say something else."""
    options = {"api": "messages", "batch": 1, "topics": topics, "queues": queues, **more}
    topic = f"small-{topics}-{queues}"
    return BenchPlan(topic=topic, workers=callers, in_flight=in_flight, **options)


def batches(rows: int, topics: int = 1) -> BenchPlan:
    """Batches of which 16 have no receipt yet. Figures are per batch."""
    return plan(1, 16, topics, api="batches", batch=rows)


KEYED = {"keys": Keys(1_000_000)}
#: the threads of this program stay on one core. The cluster, which runs already, keeps all cores
ON_ONE_CORE = "64_threads_of_a_program_on_one_core"
#: large batches with a tag, and with a key of its own in each row -> its column. "key" decides the queue. "properties"
#: has KEYS, by which a message is found
KINDS = {"batch_900": "", "batch_900_tag_and_key": "key", "batch_900_tag_and_KEYS": "properties"}
#: part -> figure -> its plan
LOADS: dict[str, dict[str, BenchPlan]] = {
    "waiting": {
        **{f"{count}_threads": plan(count, 1) for count in (1, 4, 16, 64, 256)},
        **{f"64_threads_keyed_{n}_queues": plan(64, 1, 1, n, **KEYED) for n in (4, 64)},
        ON_ONE_CORE: plan(64, 1),
    },
    "in-flight": {
        "64_futures": plan(1, 64),
        "64_futures_100B": plan(1, 64, size=FixedSize(100)),
        "1000_futures": plan(1, 1000),
        **{f"64_futures_keyed_{n}_queues": plan(1, 64, 1, n, **KEYED) for n in (1, 4, 64)},
        **{f"{count}_tasks": plan(count, 1, api="tasks") for count in (64, 1000)},
    },
    "batches": {f"batch_{rows}": batches(rows) for rows in (1, 20, 100)},
    "topics": {
        **{f"batch_20_over_{count}_topics": batches(20, count) for count in TOPICS},
        "64_threads_over_100_topics": plan(64, 1, 100),
    },
}
#: of messages on their way to a consumer
RATES = (500, 2_000, 10_000)
PARTS = (*LOADS, "end-to-end", "objects")
#: figure -> clients of Redis whose rate is measured right before it
REDIS = {"1_threads": 1, "64_threads": 64, "64_futures": 64}
SIDES = ("commit_log", "satellites", "client")


def tagged(column: str) -> pa.RecordBatch | None:
    """The rows of KINDS; None: without tag and keys."""
    if not column:
        return None
    keys = [b"k%d" % row for row in range(900)]
    if column == "properties":
        keys = [encode({KEYS: key.decode()}) for key in keys]
    data = {"body": limits.batch_of(900, BODY)["body"], "tag": pa.repeat("tag", 900)}
    return put_batch(pa.table({**data, column: pa.array(keys, pa.binary())}), now_ms=1)[0]


class Bench:
    """A running cluster, the rounds' figures, and the processes of the shards."""

    def __init__(self, cluster: raymq.Cluster, rounds: Rounds, *, quick: bool) -> None:
        self.cluster = cluster
        self.rounds = rounds
        self.seconds, self.serial = (1.0, 200) if quick else (3.0, 1000)
        shards = cluster.status()["shards"]
        self.commit_logs = [shard["pid"] for shard in shards]
        self.satellites = [pid for each in shards for pid in limits.satellites_of(each).values()]

    def spent(self) -> list[float]:
        """CPU seconds so far of CommitLogs, satellites and this process."""
        servers = [sum(map(cpu_s, self.commit_logs)), sum(map(cpu_s, self.satellites))]
        return [*servers, time.process_time()]

    def run(self, name: str, load: BenchPlan, rows: pa.RecordBatch | None = None) -> None:
        """Note the rate of a load, its p50, p99 and CPU."""
        cores = os.sched_getaffinity(0)
        for topic in load.topic_names:
            self.cluster.create_topic(topic, queues=load.queues)
        if name == ON_ONE_CORE:
            limits.pin(os.getpid(), {min(cores)})
        with Callers(self.cluster, replace(load, duration_s=self.seconds), rows) as callers:
            limits.await_prewritten(self.cluster)
            before = self.spent()
            found = callers.run()
            used = [now - then for now, then in zip(self.spent(), before, strict=True)]
        limits.pin(os.getpid(), cores)

        self.rounds.note(f"{name}_per_s", found.rate)
        self.rounds.note_times(name, found.latency)
        for side, seconds in zip((*SIDES, "cpu"), (*used, sum(used)), strict=True):
            self.rounds.note(f"{name}_{side}_us", 1e6 * seconds / found.sends)

    def open_loop(self, name: str, rate: int, linger_ms: float) -> None:
        """Messages at fixed times, from when each is due until a consumer has it."""
        count, pad = int(rate * self.seconds), bytes(BODY - 24)
        latency, times_us = Histogram(), list[float]()
        self.cluster.create_topic("one", queues=1)
        with (
            ThreadPoolExecutor(1) as pool,
            self.cluster.producer(linger_ms=linger_ms) as producer,
            self.cluster.consumer("one", start="latest") as consumer,
        ):
            consumer.poll(timeout=0.2)

            def receive() -> None:
                poll = partial(consumer.poll, max_records=5000, timeout=30)
                while len(times_us) < count and (found := poll()):
                    for each in found:
                        times_us.append(1e6 * (time.perf_counter() - float(each.body[:24])))

            received = pool.submit(receive)
            begin = time.perf_counter()
            for number in range(count):
                due = begin + number / rate
                if (left_s := due - time.perf_counter()) > 0:
                    time.sleep(left_s)
                producer.send("one", b"%024.6f" % due + pad)
            received.result()
        latency.record(times_us)
        self.rounds.note_times(name, latency)

    def send_objects(self) -> None:
        """Messages sent one by one: CPU of the caller's thread, which also encodes and writes its full batches."""
        count, body = int(20_000 * self.seconds), os.urandom(100)
        with self.cluster.producer() as producer:
            producer.send("t", body).result(60)
            begin_ns = time.thread_time_ns()
            for _ in range(count):
                producer.send("t", body)
            self.rounds.note("send_us", (time.thread_time_ns() - begin_ns) / count / 1000)

    def poll_objects(self) -> None:
        """Messages with key and tag, read one by one from a backlog; body, key and tag are looked at."""
        count, body = int(20_000 * self.seconds), os.urandom(100)
        self.cluster.create_topic("objects", queues=1)
        with self.cluster.producer() as producer:
            for n in range(count):
                producer.send("objects", body, key=b"k%d" % (n % 1000), tag="tag")

        def poll(consumer: raymq.Consumer) -> int:
            return looked_at(consumer.poll(max_records=500, timeout=10))

        self.rounds.note("poll_objects_msg_s", read_rate(self.cluster, count, poll, "objects"))

        async def read_all() -> None:
            async with self.cluster.async_consumer("objects", start="earliest") as consumer:
                read, begin = 0, time.perf_counter()
                async for batch in consumer.batches(max_records=500):
                    read += looked_at(batch)
                    if read >= count:
                        break
                self.rounds.note("async_for_objects_msg_s", read / (time.perf_counter() - begin))

        asyncio.run(read_all())

    def polling(self, directory: Path) -> None:
        """The part of a core that polls while one producer sends one by one. The cluster must be `counted`."""
        counts = [directory / f"polled-{pid}" for pid in self.commit_logs + self.satellites]

        def polled_s() -> float:
            return sum(float(path.read_text()) for path in counts if path.exists())

        load = replace(plan(1, 1), topic="t", duration_s=self.seconds)
        with Callers(self.cluster, load) as callers:
            for _ in range(ROUNDS):
                limits.await_prewritten(self.cluster)
                before = polled_s()
                seconds = callers.run().seconds
                self.rounds.note("polling_cores", (polled_s() - before) / seconds)


def looked_at(messages: Sequence[raymq.Message]) -> int:
    """Look at body, key and tag of all. Returns: how many there are."""
    seen = 0
    for message in messages:
        seen += len(message.body) + len(message.key or b"") + len(message.tag or "")
    return len(messages)


@contextlib.contextmanager
def counted(directory: Path) -> Iterator[None]:
    """Let the processes that are started in the block count the CPU time of their polling."""
    module, before = directory / "sitecustomize.py", os.environ.get("PYTHONPATH", "")
    module.write_text(COUNT_POLLING)
    os.environ["PYTHONPATH"] = f"{directory}{os.pathsep}{before}"
    try:
        yield
    finally:
        os.environ["PYTHONPATH"] = before
        module.unlink()
        for path in directory.glob("polled-*"):
            path.unlink()


# --- the run --------------------------------------------------------------------------------------


def measure_redis(bench: Bench, directory: Path, name: str) -> None:
    """The rates of Redis right before a figure that has it as a peer."""
    rounds, clients, like = bench.rounds, REDIS.get(name), redis_peer.LIKE.get(name)
    if clients is not None and redis_peer.is_installed():
        with redis_peer.server(directory):
            count = bench.serial * (2 if clients == 1 else 40)
            rate = redis_peer.c_client_rate(clients, count)
        rounds.note(f"redis_beside_{name}_per_s", rate)
    if like is not None and redis_peer.has_python_client():
        with redis_peer.server(directory):
            rate, latency = like(bench.seconds)
        rounds.note(f"redis_py_{name}_per_s", rate)
        rounds.note_times(f"redis_py_{name}", latency)


def measure_round(bench: Bench, directory: Path, parts: list[str]) -> None:
    """One round of every part."""
    rounds, serial = bench.rounds, bench.serial
    sync_ms = 1000 / limits.raw_limit(directory, limits.RECORD_BYTES, serial)
    rounds.note("echo_and_fdatasync_ms", limits.flight_echo(BODY, serial)[0] + sync_ms)
    synced_ms, used_us = limits.flight_echo(BODY, serial, synced_in=directory)
    rounds.note("echo_that_syncs_ms", synced_ms)
    rounds.note("echo_that_syncs_cpu_us", used_us)

    for part in ("waiting", "in-flight", "batches", "topics"):
        for name, plan_ in LOADS[part].items() if part in parts else ():
            # The speed of a shared machine changes within a round: the peer of a figure is measured beside it.
            measure_redis(bench, directory / "redis", name)
            bench.run(name, plan_)
    # By turns: their ratios are near 1, and the machine changes by more than that within a round.
    for name, column in 4 * list(KINDS.items()) if "batches" in parts else ():
        bench.run(name, batches(900), tagged(column))
    if "end-to-end" in parts:
        for rate in RATES:
            bench.open_loop(f"open_{rate}", rate, ProducerConfig.linger_ms)
            bench.open_loop(f"open_{rate}_without_linger", rate, 0)
    if "objects" in parts:
        bench.send_objects()
        bench.poll_objects()


def measure(options: argparse.Namespace, rounds: Rounds) -> None:
    """All rounds."""
    directory, parts, quick = options.directory, options.only, options.quick
    if options.busy:
        rounds.note("busy", 1)
    with limits.started(directory, "small") as cluster:
        bench = Bench(cluster, rounds, quick=quick)
        for _ in in_turn():
            measure_round(bench, directory, parts)

    if "waiting" in parts:
        with counted(directory), limits.started(directory, "small") as cluster:
            Bench(cluster, rounds, quick=quick).polling(directory)


ECHO, SYNCED, USED = "echo_and_fdatasync_ms", "echo_that_syncs_ms", "echo_that_syncs_cpu_us"
P50, CPU, KEY = "1_threads_p50_ms", "1_threads_cpu_us", "batch_900_tag_and_key_per_s"
INDEX_KEY, PLAIN = "batch_900_tag_and_KEYS_per_s", "batch_900_per_s"
FEW, MANY_TOPICS = "batch_20_over_1_topics_per_s", "batch_20_over_100_topics_per_s"
WAITING, FUTURES, ONE_CORE = "64_threads_per_s", "64_futures_per_s", f"{ON_ONE_CORE}_per_s"
LIMITS = [
    Row("Flight echo + fdatasync of 1 KiB", ECHO, remark="limit"),
    Row("Flight echo that writes and syncs 1 KiB", SYNCED, remark="limit"),
    Row("  its CPU", USED, remark="limit"),
]
FLOORS = [
    Row("one by one, p50 (p99)", P50, SYNCED, "an echo that syncs"),
    Row("one by one, CPU of all processes", CPU, floor=at_most(700)),
    Row("  beside it", CPU, USED, "an echo that syncs"),
    # Threads of Python that change cores take three times the CPU (docs/operating/capacity.md); the peer's are in C.
    Row("64 threads", WAITING, f"redis_beside_{WAITING}", "Redis", at_least(0.25)),
    Row("  on one core", ONE_CORE, f"redis_beside_{WAITING}", "Redis", at_least(0.45)),
    Row("64 in flight", FUTURES, f"redis_beside_{FUTURES}", "Redis", at_least(0.6)),
    Row("one by one, polling: cores", "polling_cores", floor=at_most(0.1)),
    Row("a batch of 20 rows, CPU of CommitLog", "batch_20_commit_log_us", floor=at_most(350)),
    Row("a batch of 900 rows with tag and key", KEY, PLAIN, "without", at_least(0.9)),
    # The index: docs/decisions/0005.
    Row("a batch of 900 rows with tag and KEYS", INDEX_KEY, PLAIN, "without", at_least(0.75)),
    Row("one by one, p50 (p99)", P50, f"redis_py_{P50}", "redis-py", at_most(2)),
    Row("64 threads", WAITING, f"redis_py_{WAITING}", "redis-py", at_least(1.5)),
    Row("64 tasks", "64_tasks_per_s", "redis_py_64_tasks_per_s", "redis-py", at_least(1.3)),
    Row("end to end at 500 msg/s, p50 (p99)", "open_500_p50_ms"),
    Row("end to end at 2,000 msg/s, p50 (p99)", "open_2000_p50_ms", floor=at_most(3)),
    Row("end to end at 2,000 msg/s, p99", "open_2000_p99_ms", floor=at_most(20)),
    Row("end to end at 10,000 msg/s, p50 (p99)", "open_10000_p50_ms", floor=at_most(10)),
    *(
        Row(
            f"end to end at {rate:,} msg/s, linger 0, p50 (p99)",
            f"open_{rate}_without_linger_p50_ms",
            f"open_{rate}_p50_ms",
            "the default linger",
            at_most(1.1),
        )
        for rate in RATES
    ),
    Row("batches of 20 rows over 100 topics", MANY_TOPICS, FEW, "one topic", at_least(0.8)),
    Row("send, caller's thread, a message", "send_us", floor=at_most(3)),
    Row("messages read as objects", "poll_objects_msg_s", floor=at_least(150_000)),
    Row("  the same by async for", "async_for_objects_msg_s", floor=at_least(150_000)),
]


def table(rounds: Rounds) -> list[Line]:
    """All figures that were measured, with their limits and floors."""
    rows = [*LIMITS]
    for name in rounds.values:
        stem = name.removesuffix("_client_us")
        if name != stem:
            cpu = (f"{side} {rounds.median(f'{stem}_{side}_us'):.0f}" for side in SIDES)
            rows.append(Row(stem.replace("_", " "), f"{stem}_per_s"))
            rows.append(Row("", f"{stem}_p50_ms", beside=f"us of CPU: {', '.join(cpu)}"))
        if name.startswith("redis"):
            rows.append(Row(name.replace("_", " "), name, remark="limit"))
    # Two wakeups between processes, CommitLog's and GroupCommit's, come to the echo and the sync.
    most = at_most(3 if "busy" in rounds.values else 2.25)
    first = Row("one by one, p50 (p99)", P50, ECHO, "echo + fdatasync", most)
    return lines_of([*rows, first, *FLOORS], rounds)


if __name__ == "__main__":
    run(__doc__, measure, table, parts=PARTS)
