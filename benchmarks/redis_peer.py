"""Redis 7 as a peer: XADD with `appendfsync always`, so that each answer follows a sync, or with `everysec`."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.compared import BACKLOG, BATCH_ROWS, Client, produced, read
from benchmarks.limits import BODY, output_of
from raymq.cluster.bench.histogram import Histogram

PORT = 7391
STREAM, FIELDS = "s", {"b": BODY * b"x"}


def is_installed() -> bool:
    """Whether the server and its own client are there."""
    return all(map(shutil.which, ("redis-server", "redis-benchmark")))


def has_python_client() -> bool:
    """Whether redis-py is there, too."""
    return is_installed() and importlib.util.find_spec("redis") is not None


@contextlib.contextmanager
def server(directory: Path, sync: str = "always") -> Iterator[None]:
    """A server with its file in `directory`, synced as its option `appendfsync` says."""
    directory.mkdir(parents=True, exist_ok=True)
    words = ["redis-server", "--port", str(PORT), "--bind", "127.0.0.1", "--save", ""]
    words += ["--appendonly", "yes", "--appendfsync", sync]
    words += ["--auto-aof-rewrite-percentage", "0", "--dir", str(directory)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    try:
        time.sleep(1)
        yield
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(directory, ignore_errors=True)


def c_client_rate(clients: int, count: int) -> float:
    """XADDs a second of so many clients of `redis-benchmark` that each wait for the answer."""
    words = ["redis-benchmark", "-p", str(PORT), "-c", str(clients), "-n", str(count)]
    found = output_of([*words, "--csv", "XADD", STREAM, "*", "b", "x" * BODY])
    return float(found.splitlines()[-1].rpartition(BODY * "x")[2].split(",")[1].strip('"'))


def threads(count: int, seconds: float) -> tuple[float, Histogram]:
    """So many threads of this program with a connection each. Returns: XADDs a second; their times."""
    import redis

    latency, added = Histogram(), [0] * count
    times_us: list[list[float]] = [[] for _ in range(count)]
    ready = threading.Barrier(count + 1, timeout=60)

    def work(number: int) -> None:
        with redis.Redis(port=PORT) as client:
            client.xadd(STREAM, FIELDS)
            ready.wait()
            begin = now = time.perf_counter()
            while now - begin < seconds:
                client.xadd(STREAM, FIELDS)
                before, now = now, time.perf_counter()
                times_us[number].append(1e6 * (now - before))
            added[number] = len(times_us[number])

    workers = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for each in workers:
        each.start()
    ready.wait()
    begin = time.perf_counter()
    for each in workers:
        each.join()
    rate = sum(added) / (time.perf_counter() - begin)
    for some in times_us:
        latency.record(some)
    return rate, latency


def tasks(count: int, seconds: float) -> tuple[float, Histogram]:
    """The same with so many tasks of asyncio."""
    return asyncio.run(_tasks(count, seconds))


async def _tasks(count: int, seconds: float) -> tuple[float, Histogram]:
    from redis import asyncio as redis

    times_us: list[float] = []
    clients: list[Any] = [redis.Redis(port=PORT) for _ in range(count)]
    for client in clients:
        await client.xadd(STREAM, FIELDS)

    async def work(client: Any) -> None:
        now = time.perf_counter()
        while now - begin < seconds:
            await client.xadd(STREAM, FIELDS)
            before, now = now, time.perf_counter()
            times_us.append(1e6 * (now - before))

    begin = time.perf_counter()
    await asyncio.gather(*map(work, clients))
    rate = len(times_us) / (time.perf_counter() - begin)
    for client in clients:
        await client.aclose()
    latency = Histogram()
    latency.record(times_us)
    return rate, latency


# --- the loads of benchmarks.compare --------------------------------------------------------------


@contextlib.contextmanager
def redis_client(directory: Path, durable: bool) -> Iterator[Client]:
    """A server of its own."""
    with server(directory / "redis", "always" if durable else "everysec"):
        yield Client(
            threads=threads,
            tasks=tasks,
            producers={"produce_msg_s": _produce},
            readers={"read_msg_s": _read},
        )


def _produce(seconds: float) -> tuple[int, float]:
    import redis

    with redis.Redis(port=PORT) as client:

        def send() -> int:
            pipeline = client.pipeline(transaction=False)
            for _ in range(BATCH_ROWS):
                pipeline.xadd(BACKLOG, FIELDS)
            return len(pipeline.execute())

        return produced(send, lambda: None, seconds)


def _read(messages: int) -> float:
    import redis

    last = "-"
    with redis.Redis(port=PORT) as client:

        def poll() -> int:
            nonlocal last
            found = client.xrange(BACKLOG, last, count=BATCH_ROWS)
            for _, fields in found:
                len(fields[b"b"])
            last = f"({found[-1][0].decode()}"
            return len(found)

        return read(poll, messages)


#: figure of `benchmarks.small` -> the same load of redis-py
LIKE: dict[str, Callable[[float], tuple[float, Histogram]]] = {
    "1_threads": lambda seconds: threads(1, seconds),
    "64_threads": lambda seconds: threads(64, seconds),
    "64_tasks": lambda seconds: tasks(64, seconds),
}
