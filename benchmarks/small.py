"""What do small messages cost? `python -m benchmarks.small [--quick] [--check] [--busy] [--only PART] [--json FILE]`

It measures producers that wait for each receipt, producers with some messages in flight, small batches, and messages
on their way to a consumer at fixed rates. All messages are durable before their receipts, with the default options. The
limits are a Flight echo and an fdatasync, measured in the same round. The peer is Redis 7 with `appendfsync always` and
XADD, driven by its own C client `redis-benchmark`, if `redis-server` is installed.

Each figure is a median of three rounds, a ratio the median of the rounds' ratios. `--busy` runs a process that computes
on each core at the same time. CPU times are of CommitLog, its satellites and this process, per message or per batch.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import raymq
from benchmarks import floors
from benchmarks.floors import Line, at_least, at_most
from benchmarks.put import (
    ROUNDS,
    Rounds,
    await_prewritten,
    batch_of,
    flight_echo_ms,
    percentile,
    raw_limit,
)
from raymq.cluster.produce.batch_sender import BatchSender
from raymq.cluster.transport.routes import Routes

PARTS = ("waiting", "in-flight", "batches", "end-to-end", "topics", "objects")
BODY = 1024
#: a record with a body of 1 KiB
RECORD_BYTES = 1150
REDIS_PORT = 7391
#: batches of `batches` that are under way
UNDER_WAY = 16
TOPICS = 100


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
    """A running cluster of one shard, the rounds' figures, and the processes of the shard."""

    def __init__(self, cluster: raymq.Cluster, rounds: Rounds, *, seconds: float) -> None:
        self.cluster = cluster
        self.rounds = rounds
        self.seconds = seconds
        self.body = os.urandom(BODY)
        #: of the last round
        self.cpu: dict[str, str] = {}
        shard = cluster.status()["shards"][0]
        self._commit_log = shard["pid"]
        self._satellites = [role["pid"] for role in shard["roles"]["roles"].values()]

    def spent(self) -> Spent:
        """CPU seconds so far."""
        return Spent(
            _cpu_seconds(self._commit_log),
            sum(map(_cpu_seconds, self._satellites)),
            time.process_time(),
        )

    @contextlib.contextmanager
    def measured(self, name: str) -> Iterator[list[float]]:
        """Note the rate of the messages whose milliseconds the block appends to a list, p50, p99 and CPU."""
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


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# --- producers ------------------------------------------------------------------------------------


def waiting_threads(bench: Bench, threads: int, *, topic: str = "t4", keyed: bool = False) -> None:
    """So many threads of one producer, each waiting for its receipt before it sends again."""
    name = f"{threads}_threads" + (f"_keyed_{topic}" if keyed else "")
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


def small_batches(bench: Bench, rows: int) -> None:
    """Batches of so many rows, UNDER_WAY of them without a receipt; figures are per batch."""
    batch = batch_of(rows, BODY)
    sender = BatchSender(Routes.of(bench.cluster))
    under_way: deque[tuple[float, Any]] = deque()
    with bench.measured(f"batch_{rows}") as times:
        stop = time.perf_counter() + bench.seconds
        number = 0
        while time.perf_counter() < stop or under_way:
            if time.perf_counter() < stop and len(under_way) < UNDER_WAY:
                under_way.append((time.perf_counter(), sender.send("t4", number % 4, batch)))
                number += 1
            else:
                begin, future = under_way.popleft()
                future.result(60)
                times.append((time.perf_counter() - begin) * 1000)
    sender.close()


def many_topics(bench: Bench, topics: int) -> None:
    """64 threads that wait for their receipts, over so many topics of four queues."""
    names = [f"many{number}" for number in range(topics)]
    for name in names:
        bench.cluster.create_topic(name, queues=4)
    with bench.cluster.producer() as producer, bench.measured(f"{topics}_topics") as times:
        stop = time.perf_counter() + bench.seconds

        def work(number: int) -> None:
            sent = number
            while time.perf_counter() < stop:
                begin = time.perf_counter()
                producer.send(names[sent % topics], bench.body).result(60)
                times.append((time.perf_counter() - begin) * 1000)
                sent += 1

        _run_together([threading.Thread(target=work, args=(n,)) for n in range(64)])


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


def _compute() -> None:
    while True:
        sum(range(10_000))


@contextlib.contextmanager
def load(busy: bool) -> Iterator[None]:
    """A process on every core that computes all the time, if `busy`."""
    count = len(os.sched_getaffinity(0)) if busy else 0
    processes = [multiprocessing.Process(target=_compute, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


# --- the run --------------------------------------------------------------------------------------


def measure(bench: Bench, directory: Path, parts: tuple[str, ...], *, quick: bool) -> None:
    """One round of every part."""
    serial = 200 if quick else 1000
    rounds = bench.rounds
    echo, sync = flight_echo_ms(BODY, serial), 1000 / raw_limit(directory, RECORD_BYTES, serial)
    rounds.note("echo_and_fdatasync_ms", echo + sync)
    with redis_server(directory / "redis") as there:
        if there:
            rounds.note("redis_1_msg_s", redis_rate(1, serial * 2))
            rounds.note("redis_64_msg_s", redis_rate(64, serial * 40))

    if "waiting" in parts:
        for threads in (1, 4, 16, 64, 256):
            waiting_threads(bench, threads)
        for topic in ("t4", "t64"):
            waiting_threads(bench, 64, topic=topic, keyed=True)
    if "in-flight" in parts:
        futures_in_flight(bench, 64)
        futures_in_flight(bench, 64, size=100)
        futures_in_flight(bench, 1000)
        for topic in ("t1", "t4", "t64"):
            futures_in_flight(bench, 64, topic=topic, keyed=True)
        for count in (64, 1000):
            tasks_in_flight(bench, count)
    if "batches" in parts:
        for rows in (1, 20, 100, 900):
            small_batches(bench, rows)
    if "end-to-end" in parts:
        for rate in (500, 2_000, 10_000):
            open_loop(bench, rate)
    if "topics" in parts:
        for topics in (1, TOPICS):
            many_topics(bench, topics)
    if "objects" in parts:
        poll_objects(bench)


def run(
    directory: Path, parts: tuple[str, ...], *, quick: bool, busy: bool
) -> tuple[Rounds, dict[str, str]]:
    """All rounds. Returns: the figures, and the CPU times of the last round by figure."""
    rounds = Rounds()
    data = directory / "small"
    shutil.rmtree(data, ignore_errors=True)
    with raymq.start(data, name="bench-small") as cluster:
        for name, queues in (("t1", 1), ("t4", 4), ("t64", 64), ("objects", 1)):
            cluster.create_topic(name, queues=queues)
        bench = Bench(cluster, rounds, seconds=1.0 if quick else 3.0)
        with load(busy):
            for number in range(ROUNDS):
                print(f"  round {number + 1} of {ROUNDS}", file=sys.stderr, flush=True)
                measure(bench, directory, parts, quick=quick)
    shutil.rmtree(data, ignore_errors=True)
    return rounds, bench.cpu


def table(rounds: Rounds, cpu: dict[str, str], *, busy: bool) -> list[Line]:
    """All figures that were measured, with their limits and floors."""
    figures = rounds.all()
    echo = rounds.median("echo_and_fdatasync_ms")
    lines = [Line("Flight echo + fdatasync of 1 KiB", f"{echo:.2f} ms", remark="limit")]
    for clients in (1, 64):
        name = f"redis_{clients}_msg_s"
        if name in figures:
            what = f"Redis, appendfsync always, {clients} clients"
            lines.append(Line(what, f"{rounds.median(name):,.0f} msg/s", remark="limit"))
    has_redis = "redis_64_msg_s" in figures

    names = [name.removesuffix("_p50_ms") for name in figures if name.endswith("_p50_ms")]
    for name in names:
        p50, p99 = rounds.median(f"{name}_p50_ms"), rounds.median(f"{name}_p99_ms")
        figure = f"{rounds.median(f'{name}_msg_s'):,.0f}/s, {p50:.2f} ms ({p99:.2f})"
        lines.append(Line(name.replace("_", " "), figure, f"us of CPU: {cpu[name]}"))
    lines += _floors(rounds, has_redis=has_redis, busy=busy)
    return lines


def _floors(rounds: Rounds, *, has_redis: bool, busy: bool) -> Iterator[Line]:
    figures = rounds.all()

    def line(what: str, value: float, unit: str, floor: floors.Floor) -> Line:
        return Line(what, f"{value:,.2f} {unit}", "", floor, value)

    if "1_threads_p50_ms" in figures:
        ratio = rounds.ratio("1_threads_p50_ms", "echo_and_fdatasync_ms")
        yield line("one by one, p50", ratio, "x echo + fdatasync", at_most(3 if busy else 2))
        cpu_us = rounds.median("1_threads_cpu_us")
        yield line("one by one, CPU of all processes", cpu_us, "us", at_most(700))
        if has_redis:
            ratio = rounds.ratio("64_threads_msg_s", "redis_64_msg_s")
            yield line("64 threads", ratio, "x Redis", at_least(0.5))
    if "64_futures_msg_s" in figures and has_redis:
        ratio = rounds.ratio("64_futures_msg_s", "redis_64_msg_s")
        yield line("64 in flight", ratio, "x Redis", at_least(0.6))
    if "batch_20_commit_log_us" in figures:
        cpu_us = rounds.median("batch_20_commit_log_us")
        yield line("a batch of 20 rows, CPU of CommitLog", cpu_us, "us", at_most(350))
    if "open_2000_p50_ms" in figures:
        for rate, p50_ms in ((2_000, 3), (10_000, 10)):
            p50 = rounds.median(f"open_{rate}_p50_ms")
            yield line(f"end to end at {rate:,} msg/s, p50", p50, "ms", at_most(p50_ms))
        p99 = rounds.median("open_2000_p99_ms")
        yield line("end to end at 2,000 msg/s, p99", p99, "ms", at_most(20))
    if f"{TOPICS}_topics_msg_s" in figures:
        ratio = rounds.ratio(f"{TOPICS}_topics_msg_s", "1_topics_msg_s")
        yield line(f"{TOPICS} topics", ratio, "x one topic", at_least(0.8))
    if "poll_objects_msg_s" in figures:
        rate = statistics.median(figures["poll_objects_msg_s"])
        yield line("messages read as objects", rate, "msg/s", at_least(150_000))


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="shorter rounds")
    parser.add_argument("--busy", action="store_true", help="with a load on every core")
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
    sys.exit(floors.report(table(rounds, cpu, busy=options.busy), check=options.check))


if __name__ == "__main__":
    main()
