"""What do small messages cost? `python -m benchmarks.small [--quick] [--check] [--busy] [--only PART] [--json FILE]`

It measures producers that wait for each receipt, producers with some messages in flight, small batches, and messages
on their way to a consumer at fixed rates. Small batches also go over up to 1,000 topics and to clusters of up to 4
shards. All messages are durable before their receipts, with the default options. The limits are a Flight echo and an
fdatasync, measured in the same round. The peer is Redis 7 with `appendfsync always` and XADD, driven by its own C
client `redis-benchmark` right before the figure that is compared with it, if `redis-server` is installed.

Each figure is a median of three rounds, a ratio the median of the rounds' ratios. `--busy` runs a process that computes
on each core at the same time. CPU times are of CommitLog, its satellites and this process, per message or per batch.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import ray

import raymq
from benchmarks import floors, machine_load
from benchmarks.floors import Line, at_least, at_most
from benchmarks.machine_load import load
from benchmarks.put import (
    ROUNDS,
    Rounds,
    await_prewritten,
    batch_of,
    cpu_s,
    echo_that_syncs,
    flight_echo,
    percentile,
    pin,
    raw_limit,
)
from raymq.client.messages.columns import put_batch
from raymq.client.produce.batch_sender import BatchSender
from raymq.client.transport.routes import Routes
from raymq.store.records.keys import KEYS
from raymq.store.records.properties import encode

PARTS = ("waiting", "in-flight", "batches", "end-to-end", "topics", "objects", "methods", "shards")
BODY = 1024
#: a record with a body of 1 KiB
RECORD_BYTES = 1150
REDIS_PORT = 7391
#: batches of `batches` that are under way
UNDER_WAY = 16
#: how often each round measures each kind of large batch
KIND_TURNS = 4
#: batches of 20 rows go over so many topics
TOPICS = (1, 100, 1000)
SHARDS = (1, 2, 4)
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

#: threads that wake each other in a ring: no producer can answer so many callers faster
WAKE_EACH_OTHER = """
import sys, threading, time
locks = [threading.Lock() for _ in range(int(sys.argv[1]))]
woken = 0
def work(number):
    global woken
    mine, after = locks[number], locks[(number + 1) % len(locks)]
    while True:
        mine.acquire()
        woken += 1
        after.release()
for number, lock in enumerate(locks):
    lock.acquire()
    threading.Thread(target=work, args=(number,), daemon=True).start()
begin = time.perf_counter()
locks[0].release()
time.sleep(float(sys.argv[2]))
print(woken / (time.perf_counter() - begin))
"""


class Spent(NamedTuple):
    """CPU seconds of the processes that a message passes."""

    commit_log: float
    satellites: float
    client: float

    def since(self, before: Spent) -> Spent:
        """The difference."""
        return Spent(*(now - then for now, then in zip(self, before, strict=True)))

    def each(self, count: int) -> str:
        """Microseconds of each process for one of `count`."""
        names = ("CommitLog", "satellites", "client")
        return ", ".join(
            f"{name} {1e6 * seconds / max(count, 1):.0f}"
            for name, seconds in zip(names, self, strict=True)
        )


class Bench:
    """A running cluster, the rounds' figures, and the processes of the shards."""

    def __init__(
        self, cluster: raymq.Cluster, rounds: Rounds, cpu: dict[str, str], *, seconds: float
    ) -> None:
        """Args: `cpu`: takes the CPU times of the last round by figure."""
        self.cluster = cluster
        self.rounds = rounds
        self.seconds = seconds
        self.body = os.urandom(BODY)
        self.cpu = cpu
        #: ends the names of all figures
        self.suffix = ""
        shards = cluster.status()["shards"]
        self.commit_logs = [shard["pid"] for shard in shards]
        self.satellites = [
            role["pid"] for shard in shards for role in shard["supervisor"]["roles"].values()
        ]

    def spent(self) -> Spent:
        """CPU seconds so far."""
        return Spent(
            sum(map(cpu_s, self.commit_logs)),
            sum(map(cpu_s, self.satellites)),
            time.process_time(),
        )

    @contextlib.contextmanager
    def measured(self, name: str) -> Iterator[list[float]]:
        """Note the rate of the messages whose milliseconds the block appends to a list, p50, p99 and CPU."""
        name += self.suffix
        times: list[float] = []
        await_prewritten(self.cluster)
        before, begin = self.spent(), time.perf_counter()
        yield times
        seconds = time.perf_counter() - begin
        spent = self.spent().since(before)

        self.rounds.note(f"{name}_msg_s", len(times) / seconds)
        self.rounds.note(f"{name}_p50_ms", percentile(times, 0.5))
        self.rounds.note(f"{name}_p99_ms", percentile(times, 0.99))
        self.rounds.note(f"{name}_commit_log_us", 1e6 * spent.commit_log / len(times))
        self.rounds.note(f"{name}_cpu_us", 1e6 * sum(spent) / len(times))
        self.cpu[name] = spent.each(len(times))


# --- producers ------------------------------------------------------------------------------------


@contextlib.contextmanager
def on_one_core() -> Iterator[None]:
    """Keep all threads of this program on one core. The cluster, which runs already, keeps all cores."""
    before = os.sched_getaffinity(0)
    pin(os.getpid(), {min(before)})
    try:
        yield
    finally:
        pin(os.getpid(), before)


def waiting_threads(
    bench: Bench, threads: int, *, topic: str = "t4", keyed: bool = False, suffix: str = ""
) -> None:
    """So many threads of one producer, each waiting for its receipt before it sends again."""
    name = f"{threads}_threads" + (f"_keyed_{topic}" if keyed else "") + suffix
    with bench.cluster.producer() as producer, bench.measured(name) as times:
        stop = time.perf_counter() + bench.seconds

        def work(number: int) -> None:
            sent = 0
            while time.perf_counter() < stop:
                begin = time.perf_counter()
                key = b"%d-%d" % (number, sent) if keyed else None
                producer.send(topic, bench.body, key=key).result(60)
                times.append((time.perf_counter() - begin) * 1000)
                sent += 1

        _run_together([threading.Thread(target=work, args=(n,)) for n in range(threads)])


def futures_in_flight(
    bench: Bench, count: int, *, topic: str = "t4", keyed: bool = False, size: int = BODY
) -> None:
    """One thread with so many messages without a receipt."""
    name = (
        f"{count}_futures"
        + (f"_keyed_{topic}" if keyed else "")
        + ("" if size == BODY else "_100B")
    )
    body = bench.body[:size]
    with bench.cluster.producer() as producer, bench.measured(name) as times:
        stop = time.perf_counter() + bench.seconds
        under_way: deque[tuple[float, Any]] = deque()
        number = 0
        while time.perf_counter() < stop or under_way:
            if time.perf_counter() < stop and len(under_way) < count:
                key = b"k%d" % number if keyed else None
                under_way.append((time.perf_counter(), producer.send(topic, body, key=key)))
                number += 1
            else:
                begin, future = under_way.popleft()
                future.result(60)
                times.append((time.perf_counter() - begin) * 1000)


def tasks_in_flight(bench: Bench, count: int) -> None:
    """So many asyncio tasks, each awaiting its receipt before it sends again."""

    async def main() -> None:
        async with bench.cluster.async_producer() as producer:
            with bench.measured(f"{count}_tasks") as times:
                stop = time.perf_counter() + bench.seconds

                async def work() -> None:
                    while time.perf_counter() < stop:
                        begin = time.perf_counter()
                        await producer.send("t4", bench.body)
                        times.append((time.perf_counter() - begin) * 1000)

                await asyncio.gather(*(work() for _ in range(count)))

    asyncio.run(main())


def awaited_together(bench: Bench, count: int) -> None:
    """One asyncio task that sends so many messages together, and awaits all their receipts before it sends again."""

    async def main() -> None:
        async with bench.cluster.async_producer() as producer:
            messages = [raymq.Message(topic="t4", body=bench.body) for _ in range(count)]
            with bench.measured(f"{count}_awaited_together") as times:
                stop = time.perf_counter() + bench.seconds
                while time.perf_counter() < stop:
                    begin = time.perf_counter()
                    await producer.send_many(messages)
                    times += [(time.perf_counter() - begin) * 1000] * count

    asyncio.run(main())


def small_batches(
    bench: Bench, batch: pa.RecordBatch, name: str, topics: Sequence[str] = ("t4",)
) -> None:
    """Batches over topics of four queues, UNDER_WAY of them without a receipt; figures are per batch."""
    sender = BatchSender(Routes.of(bench.cluster))
    under_way: deque[tuple[float, Any]] = deque()
    with bench.measured(name) as times:
        stop = time.perf_counter() + bench.seconds
        number = 0
        while time.perf_counter() < stop or under_way:
            if time.perf_counter() < stop and len(under_way) < UNDER_WAY:
                topic, queue = topics[number % len(topics)], number // len(topics) % 4
                under_way.append((time.perf_counter(), sender.send(topic, queue, batch)))
                number += 1
            else:
                begin, future = under_way.popleft()
                future.result(60)
                times.append((time.perf_counter() - begin) * 1000)
    sender.close()


def tagged(batch: pa.RecordBatch, column: str) -> pa.RecordBatch:
    """The batch with a tag, and with a key of its own in each row.

    Args: `column`: "key", which decides the queue, or "properties": KEYS, by which a message is found.
    """
    keys = [b"k%d" % row for row in range(batch.num_rows)]
    if column == "properties":
        keys = [encode({KEYS: key.decode()}) for key in keys]
    data = {
        "body": batch["body"],
        "tag": pa.repeat("tag", batch.num_rows),
        column: pa.array(keys, pa.binary()),
    }
    return put_batch(pa.table(data), now_ms=1)[0]


def create_topics(bench: Bench) -> list[str]:
    """The names of as many topics of four queues as TOPICS asks for. They are created in the first round."""
    names = [f"many{number}" for number in range(max(TOPICS))]
    begin = time.perf_counter()
    for name in names:
        if not bench.cluster.create_topic(name, queues=4):
            return names
    seconds = time.perf_counter() - begin
    bench.rounds.note("create_topics_ms", 1000 * seconds / len(names))
    return names


def threads_over_topics(bench: Bench, names: Sequence[str]) -> None:
    """64 threads that wait for their receipts. Each sends one message to one topic after the other."""
    topics = len(names)
    name = f"64_threads_one_message_each_over_{topics}_topics"
    with bench.cluster.producer() as producer, bench.measured(name) as times:
        stop = time.perf_counter() + bench.seconds

        def work(number: int) -> None:
            sent = number
            while time.perf_counter() < stop:
                begin = time.perf_counter()
                producer.send(names[sent % topics], bench.body).result(60)
                times.append((time.perf_counter() - begin) * 1000)
                sent += 1

        _run_together([threading.Thread(target=work, args=(n,)) for n in range(64)])


def polling(bench: Bench, directory: Path) -> None:
    """The part of a core that polls while one producer sends one by one. The cluster must be `counted`."""
    counts = [directory / f"polled-{pid}" for pid in bench.commit_logs + bench.satellites]

    def polled_s() -> float:
        return sum(float(path.read_text()) for path in counts if path.exists())

    with bench.cluster.producer() as producer:
        for _ in range(ROUNDS):
            await_prewritten(bench.cluster)
            begin, before = time.perf_counter(), polled_s()
            while (seconds := time.perf_counter() - begin) < bench.seconds:
                producer.send("t4", bench.body).result(60)
            bench.rounds.note("polling_cores", (polled_s() - before) / seconds)


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


def _run_together(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# --- consumers ------------------------------------------------------------------------------------


def open_loop(bench: Bench, rate: int) -> None:
    """Messages at fixed times, from when each is due until a consumer has it."""
    count = int(rate * bench.seconds)
    pad = bytes(BODY - 24)
    with bench.cluster.consumer("t1", start="latest") as consumer:
        consumer.poll(timeout=0.2)
        with bench.measured(f"open_{rate}") as times:
            ended = threading.Event()

            def receive() -> None:
                while len(times) < count and not ended.is_set():
                    for message in consumer.poll(max_records=5000, timeout=1.0):
                        due = float(message.body[:24])
                        times.append((time.perf_counter() - due) * 1000)

            receiver = threading.Thread(target=receive)
            receiver.start()
            with bench.cluster.producer() as producer:
                begin = time.perf_counter()
                for number in range(count):
                    due = begin + number / rate
                    now = time.perf_counter()
                    if due > now:
                        time.sleep(due - now)
                    producer.send("t1", b"%024.6f" % due + pad)
            receiver.join(30)
            ended.set()
            receiver.join()


def send_objects(bench: Bench) -> None:
    """Messages sent one by one: CPU of the caller's thread, which also encodes and writes its full batches."""
    count = int(20_000 * bench.seconds)
    body = bench.body[:100]
    for name, key in (("send_us", None), ("send_with_key_us", b"k17")):
        with bench.cluster.producer() as producer:
            producer.send("t4", body).result(60)
            begin_ns = time.thread_time_ns()
            for _ in range(count):
                producer.send("t4", body, key=key)
            bench.rounds.note(name, (time.thread_time_ns() - begin_ns) / count / 1000)


def poll_objects(bench: Bench) -> None:
    """Messages with key and tag, read one by one from a backlog; body, key and tag are looked at."""
    count = int(20_000 * bench.seconds)
    with bench.cluster.producer() as producer:
        futures = [
            producer.send(
                "objects", bench.body[:100], key=b"k%d" % (n % 1000), tag="tag", queue_id=0
            )
            for n in range(count)
        ]
        for future in futures:
            future.result(60)
    with bench.cluster.consumer("objects", start="earliest") as consumer:
        read = seen = 0
        begin = time.perf_counter()
        while read < count:
            for message in consumer.poll(max_records=500, timeout=10):
                seen += len(message.body) + len(message.key or b"") + len(message.tag or "")
                read += 1
        bench.rounds.note("poll_objects_msg_s", read / (time.perf_counter() - begin))
        bench.rounds.note("poll_objects_bytes", seen)
    asyncio.run(_iterate_objects(bench, count))


async def _iterate_objects(bench: Bench, count: int) -> None:
    """The same messages, from `async for` over batches."""
    async with bench.cluster.async_consumer("objects", start="earliest") as consumer:
        read = seen = 0
        begin = time.perf_counter()
        async for batch in consumer.batches(max_records=500):
            for message in batch:
                seen += len(message.body) + len(message.key or b"") + len(message.tag or "")
            read += len(batch)
            if read >= count:
                break
        bench.rounds.note("async_for_objects_msg_s", read / (time.perf_counter() - begin))


# --- limits ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def redis_server(directory: Path) -> Iterator[bool]:
    """A Redis that syncs each write, if it is installed. Yields: whether it is."""
    program = shutil.which("redis-server")
    if program is None or shutil.which("redis-benchmark") is None:
        yield False
        return
    directory.mkdir(parents=True, exist_ok=True)
    words = [program, "--port", str(REDIS_PORT), "--bind", "127.0.0.1", "--save", ""]
    words += ["--appendonly", "yes", "--appendfsync", "always"]
    words += ["--auto-aof-rewrite-percentage", "0", "--dir", str(directory)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    try:
        time.sleep(1)
        yield True
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(directory, ignore_errors=True)


def note_redis(bench: Bench, directory: Path, name: str, clients: int, serial: int) -> None:
    """Note what Redis does right before a figure of that name, if it is installed.

    The speed of a shared machine changes within a round: the peer of a figure is measured beside it.
    """
    with redis_server(directory / "redis") as there:
        if there:
            rate = redis_rate(clients, serial * (2 if clients == 1 else 40))
            bench.rounds.note(f"redis_beside_{name}_msg_s", rate)


def redis_rate(clients: int, count: int) -> float:
    """XADDs a second of so many clients that each wait for the answer."""
    words = [
        "redis-benchmark",
        "-p",
        str(REDIS_PORT),
        "-c",
        str(clients),
        "-n",
        str(count),
        "--csv",
    ]
    words += ["XADD", "s", "*", "b", "x" * BODY]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout.splitlines()[-1].rpartition(BODY * "x")[2].split(",")[1].strip('"'))


def woken_threads_rate(threads: int, seconds: float) -> float:
    """How often a second one thread wakes the next, in a process whose threads do nothing else."""
    done = subprocess.run(
        [sys.executable, "-c", WAKE_EACH_OTHER, str(threads), str(seconds)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return float(done.stdout)


# --- the run --------------------------------------------------------------------------------------


def measure(bench: Bench, directory: Path, parts: tuple[str, ...], *, quick: bool) -> None:
    """One round of every part."""
    serial = 200 if quick else 1000
    rounds = bench.rounds
    sync_ms = 1000 / raw_limit(directory, RECORD_BYTES, serial)
    rounds.note("echo_and_fdatasync_ms", flight_echo(BODY, serial).p50_ms + sync_ms)
    synced = echo_that_syncs(directory / "synced", BODY, serial)
    rounds.note("echo_that_syncs_ms", synced.p50_ms)
    rounds.note("echo_that_syncs_cpu_us", synced.cpu_us)

    if "waiting" in parts:
        for threads in (1, 4, 16, 64, 256):
            if threads in (1, 64):
                note_redis(bench, directory, f"{threads}_threads", threads, serial)
            waiting_threads(bench, threads)
        rounds.note("woken_threads_s", woken_threads_rate(64, bench.seconds))
        for topic in ("t4", "t64"):
            waiting_threads(bench, 64, topic=topic, keyed=True)
        with on_one_core():
            waiting_threads(bench, 64, suffix="_of_a_program_on_one_core")
    if "in-flight" in parts:
        note_redis(bench, directory, "64_futures", 64, serial)
        futures_in_flight(bench, 64)
        futures_in_flight(bench, 64, size=100)
        futures_in_flight(bench, 1000)
        for topic in ("t1", "t4", "t64"):
            futures_in_flight(bench, 64, topic=topic, keyed=True)
        for count in (64, 1000):
            tasks_in_flight(bench, count)
        awaited_together(bench, 64)
    if "batches" in parts:
        for rows in (1, 20, 100):
            small_batches(bench, batch_of(rows, BODY), f"batch_{rows}")
        plain = batch_of(900, BODY)
        kinds = {
            "batch_900": plain,
            "batch_900_tag_and_key": tagged(plain, "key"),
            "batch_900_tag_and_index_key": tagged(plain, "properties"),
        }
        # By turns: their ratios are near 1, and the machine changes by more than that within a round.
        for name, batch in list(kinds.items()) * KIND_TURNS:
            small_batches(bench, batch, name)
    if "end-to-end" in parts:
        for rate in (500, 2_000, 10_000):
            open_loop(bench, rate)
    if "topics" in parts:
        names = create_topics(bench)
        batch = batch_of(20, BODY)
        for topics in TOPICS:
            small_batches(bench, batch, f"batch_20_over_{topics}_topics", names[:topics])
        for topics in TOPICS[:2]:
            threads_over_topics(bench, names[:topics])
    if "objects" in parts:
        send_objects(bench)
        poll_objects(bench)
    if "methods" in parts:
        measure_methods(bench)


def measure_methods(bench: Bench) -> None:
    """One round of the part "methods": the same calls through Ray instead of Flight."""
    ray.init(bench.cluster.ray_address, log_to_driver=False, logging_level="ERROR")
    try:
        with raymq.connect(bench.cluster.name, transport="ray") as cluster:
            by_methods = Bench(cluster, bench.rounds, bench.cpu, seconds=bench.seconds)
            by_methods.suffix = "_by_methods"
            for threads in (1, 64):
                waiting_threads(by_methods, threads)
            futures_in_flight(by_methods, 64)
            small_batches(by_methods, batch_of(20, BODY), "batch_20")
    finally:
        ray.shutdown()


def measure_shards(bench: Bench, shards: int) -> None:
    """One round of the part "shards"."""
    bench.suffix = f"_on_{shards}_shards"
    waiting_threads(bench, 64)
    futures_in_flight(bench, 64)
    small_batches(bench, batch_of(20, BODY), "batch_20")


def run(
    directory: Path, parts: tuple[str, ...], *, quick: bool, busy: bool
) -> tuple[Rounds, dict[str, str]]:
    """All rounds. Returns: the figures, and the CPU times of the last round by figure."""
    rounds = Rounds()
    cpu: dict[str, str] = {}
    seconds = 1.0 if quick else 3.0
    with started(directory, 1) as cluster, load(busy):
        bench = Bench(cluster, rounds, cpu, seconds=seconds)
        for number in range(ROUNDS):
            print(f"  round {number + 1} of {ROUNDS}", file=sys.stderr, flush=True)
            measure(bench, directory, parts, quick=quick)

    if "waiting" in parts:
        with counted(directory), started(directory, 1) as cluster, load(busy):
            polling(Bench(cluster, rounds, cpu, seconds=seconds), directory)
    for shards in SHARDS if "shards" in parts else ():
        print(f"  {shards} shards", file=sys.stderr, flush=True)
        with started(directory, shards) as cluster, load(busy):
            bench = Bench(cluster, rounds, cpu, seconds=seconds)
            for _ in range(ROUNDS):
                measure_shards(bench, shards)
    return rounds, cpu


@contextlib.contextmanager
def started(directory: Path, shards: int) -> Iterator[raymq.Cluster]:
    """A new cluster with its topics; its files are deleted at the end."""
    data = directory / "small"
    shutil.rmtree(data, ignore_errors=True)
    with raymq.start(data, name="bench-small", shards=shards) as cluster:
        for name, queues in (("t1", 1), ("t4", 4), ("t64", 64), ("objects", 1)):
            cluster.create_topic(name, queues=queues)
        yield cluster
    shutil.rmtree(data, ignore_errors=True)


def table(rounds: Rounds, cpu: dict[str, str], *, busy: bool) -> list[Line]:
    """All figures that were measured, with their limits and floors."""
    figures = rounds.all()
    echo = rounds.median("echo_and_fdatasync_ms")
    synced = rounds.median("echo_that_syncs_ms")
    lines = [
        Line("Flight echo + fdatasync of 1 KiB", f"{echo:.2f} ms", remark="limit"),
        Line(
            "Flight echo that writes and syncs 1 KiB",
            f"{synced:.2f} ms",
            f"us of CPU: {rounds.median('echo_that_syncs_cpu_us'):.0f}; limit",
        ),
    ]
    for name in figures:
        if name.startswith("redis_beside_"):
            beside = name.removeprefix("redis_beside_").removesuffix("_msg_s").replace("_", " ")
            what = f"Redis, appendfsync always, beside {beside}"
            lines.append(Line(what, f"{rounds.median(name):,.0f} msg/s", remark="limit"))
    if "woken_threads_s" in figures:
        woken = f"{rounds.median('woken_threads_s'):,.0f}/s"
        lines.append(Line("64 threads that only wake each other", woken, remark="limit"))

    names = [name.removesuffix("_p50_ms") for name in figures if name.endswith("_p50_ms")]
    for name in names:
        p50, p99 = rounds.median(f"{name}_p50_ms"), rounds.median(f"{name}_p99_ms")
        figure = f"{rounds.median(f'{name}_msg_s'):,.0f}/s, {p50:.2f} ms ({p99:.2f})"
        lines.append(Line(name.replace("_", " "), figure, f"us of CPU: {cpu[name]}"))
    if "create_topics_ms" in figures:
        created = f"{rounds.median('create_topics_ms'):.1f} ms"
        lines.append(Line(f"create one of {max(TOPICS):,} topics", created))
    lines += _floors(rounds, busy=busy)
    return lines


def _floors(rounds: Rounds, *, busy: bool) -> Iterator[Line]:
    figures = rounds.all()

    def line(what: str, value: float, unit: str, floor: floors.Floor) -> Line:
        return Line(what, f"{value:,.2f} {unit}", "", floor, value)

    if "1_threads_p50_ms" in figures:
        ratio = rounds.ratio("1_threads_p50_ms", "echo_and_fdatasync_ms")
        yield line("one by one, p50", ratio, "x echo + fdatasync", at_most(3 if busy else 2))
        ratio = rounds.ratio("1_threads_p50_ms", "echo_that_syncs_ms")
        yield Line("  beside an echo that syncs", f"{ratio:,.2f} x that")
        cpu_us = rounds.median("1_threads_cpu_us")
        yield line("one by one, CPU of all processes", cpu_us, "us", at_most(700))
        used = rounds.ratio("1_threads_cpu_us", "echo_that_syncs_cpu_us")
        yield Line("  beside an echo that syncs", f"{used:,.2f} x that")
        if "redis_beside_64_threads_msg_s" in figures:
            ratio = rounds.ratio("64_threads_msg_s", "redis_beside_64_threads_msg_s")
            yield line("64 threads", ratio, "x Redis", at_least(0.5))
        if "polling_cores" in figures:
            cores = rounds.median("polling_cores")
            yield line("one by one, polling", cores, "cores", at_most(0.1))
    if "redis_beside_64_futures_msg_s" in figures:
        ratio = rounds.ratio("64_futures_msg_s", "redis_beside_64_futures_msg_s")
        yield line("64 in flight", ratio, "x Redis", at_least(0.6))
    if "batch_20_commit_log_us" in figures:
        cpu_us = rounds.median("batch_20_commit_log_us")
        yield line("a batch of 20 rows, CPU of CommitLog", cpu_us, "us", at_most(350))
        what = "a batch of 900 rows with tag and"
        ratio = rounds.ratio("batch_900_tag_and_key_msg_s", "batch_900_msg_s")
        yield line(f"{what} key", ratio, "x without", at_least(0.9))
        ratio = rounds.ratio("batch_900_tag_and_index_key_msg_s", "batch_900_msg_s")
        yield line(f"{what} KEYS", ratio, "x without", at_least(0.9))
    if "open_2000_p50_ms" in figures:
        for rate, p50_ms in ((2_000, 3), (10_000, 10)):
            p50 = rounds.median(f"open_{rate}_p50_ms")
            yield line(f"end to end at {rate:,} msg/s, p50", p50, "ms", at_most(p50_ms))
        p99 = rounds.median("open_2000_p99_ms")
        yield line("end to end at 2,000 msg/s, p99", p99, "ms", at_most(20))
    if "batch_20_over_100_topics_msg_s" in figures:
        ratio = rounds.ratio("batch_20_over_100_topics_msg_s", "batch_20_over_1_topics_msg_s")
        yield line("batches of 20 rows over 100 topics", ratio, "x one topic", at_least(0.8))
    if "send_us" in figures:
        yield line("send, caller's thread", rounds.median("send_us"), "us a message", at_most(3))
        yield Line("send with a key", f"{rounds.median('send_with_key_us'):.2f} us a message")
    if "poll_objects_msg_s" in figures:
        rate = statistics.median(figures["poll_objects_msg_s"])
        yield line("messages read as objects", rate, "msg/s", at_least(150_000))
        rate = statistics.median(figures["async_for_objects_msg_s"])
        yield line("  the same by async for", rate, "msg/s", at_least(150_000))


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="shorter rounds")
    machine_load.option(parser)
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--directory", type=Path, default=Path.home() / ".raymq" / "bench")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    floors.options(parser)
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    parts = (options.only,) if options.only else PARTS
    rounds, cpu = run(options.directory, parts, quick=options.quick, busy=options.busy)
    if options.json:
        options.json.write_text(json.dumps({"cpu": cpu, "rounds": rounds.all()}, indent=1))
    title = machine_load.BUSY_TITLE if options.busy else ""
    lines = table(rounds, cpu, busy=options.busy)
    sys.exit(floors.report(lines, check=options.check, title=title))


if __name__ == "__main__":
    main()
