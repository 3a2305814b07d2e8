"""The limits and peers that several benchmarks have beside their figures, and what they ask a cluster about itself."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa

import raymq
from raymq.actors.supervise.lease import FLUSH_ROLES
from raymq.cluster.bench.callers import Callers, Measured, rows_of
from raymq.cluster.bench.plan import BenchPlan, FixedSize
from raymq.store.embedded.embedded_store import EmbeddedStore
from raymq.store.records.record import PUT_SCHEMA
from raymq.store.records.requests import PutRequest

BODY = 1024
#: a stored record with a body of 1 KiB, and a stored batch of 1,024 of them
RECORD_BYTES, BLOCK_BYTES = 1150, 1140 * 1024
#: (rows, body bytes)
LARGE, SMALL = (1024, BODY), (8192, 100)
#: more than a sender has under way
UNLIMITED = 100_000

#: with an argument it writes each body to that file, and syncs the file, before it answers
ECHO = """
import os, sys
import pyarrow.flight as flight
file = os.open(sys.argv[1], os.O_RDWR) if len(sys.argv) > 1 else None
size = os.fstat(file).st_size if file is not None else 0
end = 0
def store(data):
    global end
    end = end if end + len(data) <= size else 0
    end += os.pwrite(file, data, end)
    os.fdatasync(file)
class Echo(flight.FlightServerBase):
    def do_exchange(self, context, descriptor, reader, writer):
        writer.begin(reader.schema)
        while True:
            try:
                chunk = reader.read_chunk()
            except StopIteration:
                return
            if file is not None:
                store(chunk.data.column(0).buffers()[2])
            writer.write_metadata(chunk.app_metadata)
server = Echo("grpc://127.0.0.1:0")
print(server.port, flush=True)
server.serve()
"""


def batch_of(rows: int, size: int) -> pa.RecordBatch:
    """Random bodies, no tag, no properties."""
    return rows_of(BenchPlan(batch=rows, size=FixedSize(size)))


# --- the machine ----------------------------------------------------------------------------------


def cleared(path: Path) -> Path:
    """The path of a directory that is gone."""
    shutil.rmtree(path, ignore_errors=True)
    return path


def raw_limit(
    directory: Path, block_bytes: int, count: int, *, fresh: bool = False, synced: bool = True
) -> float:
    """Blocks a second: pwrite and, if `synced`, fdatasync, one after the other, into blocks that were written before.

    `fresh`: into blocks that are only reserved, and pages that no cache holds yet. A writer that never pauses meets
    these in the end. So `count` must be as much as that writer writes.
    """
    block = os.urandom(block_bytes)
    with tempfile.TemporaryFile(dir=directory) as file:
        fd = file.fileno()

        def write_all(*, synced: bool) -> None:
            for index in range(count):
                os.pwrite(fd, block, index * block_bytes)
                if synced:
                    os.fdatasync(fd)

        if fresh:
            os.posix_fallocate(fd, 0, block_bytes * count)
        else:
            write_all(synced=False)
        if synced:
            os.fsync(fd)
        return 1000 * count / call_ms(lambda: write_all(synced=synced), 1)


def pin(pid: int, cores: set[int]) -> None:
    """Keep every thread of a process on these cores."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        # A thread may have ended meanwhile.
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), cores)


def flight_echo(
    size: int, count: int, *, window: int = 1, synced_in: Path | None = None
) -> tuple[float, float]:
    """Exchanges of one message with an echo server in another process, so many under way at a time.

    With a directory `synced_in` the server makes each body durable before it answers. Client and server sleep while the
    disk works, and have to be woken: a sum of an echo and a sync does not have that.

    They are measured in a process of its own, with Flight as it comes: the connections of RayMQ change how this process
    reads its sockets (actors/protocol/grpc_polling.py). Client and server are kept on different cores, as a producer
    and a busy shard are. On the same core an echo takes half as long, and otherwise the scheduler would choose.

    Returns: milliseconds from one answer to the next, p50; microseconds of CPU of both processes for one exchange.
    """
    with contextlib.ExitStack() as stack:
        files = []
        if synced_in is not None:
            file = stack.enter_context(tempfile.NamedTemporaryFile(dir=synced_in))
            file.write(bytes((size + RECORD_BYTES - BODY) * (count + 100)))
            file.flush()
            os.fsync(file.fileno())
            files = [file.name]
        pool = stack.enter_context(ProcessPoolExecutor(1, multiprocessing.get_context("spawn")))
        return pool.submit(_echo, size, count, window, files).result()


def _echo(size: int, count: int, window: int, synced_to: list[str]) -> tuple[float, float]:
    import pyarrow.flight as flight

    cores = sorted(os.sched_getaffinity(0))
    pin(os.getpid(), {cores[0]})
    words = [sys.executable, "-c", ECHO, *synced_to]
    server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        output = server.stdout
        port = int(output.readline()) if output is not None else 0
        pin(server.pid, set(cores[1:] or cores))
        with flight.FlightClient(f"grpc://127.0.0.1:{port}") as client:
            writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(b"echo"))
            writer.begin(PUT_SCHEMA)
            batch = batch_of(1, size)
            for _ in range(window - 1):
                writer.write_with_metadata(batch, b"{}")
            before_s = cpu_s(server.pid) + time.process_time()

            def exchange() -> None:
                writer.write_with_metadata(batch, b"{}")
                reader.read_chunk()

            p50_ms = call_ms(exchange, count)
            used_s = cpu_s(server.pid) + time.process_time() - before_s
            writer.close()
        return p50_ms, 1e6 * used_s / count
    finally:
        server.kill()
        server.wait()


def call_ms(call: Callable[[], object], count: int) -> float:
    """Milliseconds of one of so many calls, p50."""
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1000)
    return statistics.median(times)


def output_of(words: list[str]) -> str:
    """The output of a program. Raises: CalledProcessError when it fails."""
    return subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout


# --- processes ------------------------------------------------------------------------------------


def cpu_s(pid: int) -> float:
    """User and system time of a process, seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mb(pid: int) -> float:
    """PSS without file pages, MB."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(map(int, re.findall(r"^Pss_(?:Anon|Shmem): +(\d+)", text, re.MULTILINE))) / 1024


# --- a cluster ------------------------------------------------------------------------------------


@contextlib.contextmanager
def started(directory: Path, name: str, **options: Any) -> Iterator[raymq.Cluster]:
    """A new cluster with the topic t of four queues; its files are deleted at the end."""
    data = cleared(directory / name)
    with raymq.start(data, name=f"bench-{name}", **options) as cluster:
        cluster.create_topic("t", queues=4)
        yield cluster
    cleared(data)


def satellites_of(shard: Mapping[str, Any]) -> dict[str, int]:
    """Role -> pid, of the status of a shard."""
    return {name: role["pid"] for name, role in shard["supervisor"]["roles"].items()}


def await_prewritten(cluster: raymq.Cluster) -> None:
    """Wait until the shard has pre-written its window, so that a burst meets blocks that were written before."""
    last, ready = -1, 0
    while ready != last or not ready:
        time.sleep(0.5)
        last, ready = ready, cluster.status()["shards"][0]["prewritten_bytes"]


def syncs_of(cluster: raymq.Cluster) -> int:
    """fdatasync calls of the leader's flush service."""
    roles = cluster.status()["shards"][0]["supervisor"]["roles"]
    return sum(int(roles[name]["syncs"]) for name in FLUSH_ROLES if name in roles)


def sent(
    cluster: raymq.Cluster,
    sends: int,
    warm_up: int = 10,
    before_close: Callable[[], None] = lambda: None,
    **plan: Any,
) -> Measured:
    """So many sends of a plan, whose connection is in use already. Without more words: one message at a time.

    Args: `before_close`: called when the last send is acknowledged.
    """
    options = {"api": "messages", "topic": "t", "queues": 1, "workers": 1, "in_flight": 1}
    with Callers(cluster, BenchPlan(**{**options, "batch": 1, **plan})) as callers:
        callers.run(warm_up)
        found = callers.run(sends)
        before_close()
        return found


def batch_rate(
    cluster: raymq.Cluster, shape: tuple[int, int], count: int, api: str = "batches"
) -> float:
    """Messages a second of a burst of batches, each acknowledged as the cluster promises."""
    rows, size = shape
    await_prewritten(cluster)
    # As many as may be under way before: buffers of both sides are made.
    plan = {"api": api, "batch": rows, "size": FixedSize(size), "in_flight": UNLIMITED}
    return rows * sent(cluster, count, 32, **plan).rate


def append_all(store: EmbeddedStore, requests: Iterable[PutRequest], in_flight: int) -> None:
    """Append to the engine in this process, some appends on their way at a time, and wait for all of them."""
    under_way: deque[Any] = deque()
    for request in requests:
        under_way.append(store.append(request))
        if len(under_way) >= in_flight:
            store.wait(under_way.popleft())
    while under_way:
        store.wait(under_way.popleft())
