"""How fast are durable puts? `python -m benchmarks.put [--quick] [--check] [--sustained-gb 10] [--json FILE]`

Every figure is a median of three rounds. Its limit is a raw pwrite + fdatasync of equal blocks into pre-written
blocks, a Flight echo or a Ray round trip. A round measures a figure right after its limit, and a ratio is the median
of the rounds' ratios. Read the ratios: shared machines become faster and slower within seconds. Only the mirror, which
is a cluster of its own, is measured after all rounds of the single shard.
"""

from __future__ import annotations

import argparse
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

import raymq
from benchmarks import floors
from benchmarks.floors import Line, at_least, at_most
from raymq.actors.supervise.lease import FLUSH_ROLES
from raymq.client.produce.batch_sender import BatchSender
from raymq.client.produce.producer_config import IN_FLIGHT_BYTES
from raymq.client.transport.flight_client import ShardConnection
from raymq.client.transport.routes import Routes
from raymq.store.config.store_config import StoreConfig
from raymq.store.embedded.embedded_store import EmbeddedStore
from raymq.store.records.record import PUT_SCHEMA, batch_bytes
from raymq.store.records.requests import PutRequest

ROUNDS = 3
#: a message at a time takes less than a millisecond, and machines change within seconds: limit and figure take turns so
#: often in a round
TURNS = 5
#: bytes of a stored record beside its body
RECORD_OVERHEAD_BYTES = 126
#: (rows, body bytes)
LARGE, SMALL = (1024, 1024), (8192, 100)

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
    data = np.random.default_rng(1).bytes(rows * size)
    offsets = pa.py_buffer(np.arange(0, (rows + 1) * size, size, dtype=np.int32))
    body = pa.Array.from_buffers(pa.binary(), rows, [None, offsets, pa.py_buffer(data)])
    columns = [
        body,
        pa.nulls(rows, pa.string()),
        pa.nulls(rows, pa.binary()),
        pa.array(np.ones(rows, np.int64)),
    ]
    return pa.record_batch(columns, schema=PUT_SCHEMA)


def percentile(values: list[float], part: float) -> float:
    """A percentile of a list, in its unit."""
    return sorted(values)[min(len(values) - 1, int(len(values) * part))]


# --- limits ---------------------------------------------------------------------------------------


def raw_limit(directory: Path, block_bytes: int, count: int, *, fresh: bool = False) -> float:
    """Blocks a second: pwrite + fdatasync, one after the other, into blocks that were written before.

    `fresh`: into blocks that are only reserved, and pages that no cache holds yet. A writer that never pauses meets
    these in the end. So `count` must be as much as that writer writes.
    """
    path = directory / "raw"
    block = os.urandom(block_bytes)
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

    try:
        if fresh:
            os.posix_fallocate(fd, 0, block_bytes * count)
        else:
            for index in range(count):
                os.pwrite(fd, block, index * block_bytes)
        os.fsync(fd)

        begin = time.perf_counter()
        for index in range(count):
            os.pwrite(fd, block, index * block_bytes)
            os.fdatasync(fd)
        return count / (time.perf_counter() - begin)
    finally:
        os.close(fd)
        path.unlink()


def pin(pid: int, cores: set[int]) -> None:
    """Keep every thread of a process on these cores."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        # A thread may have ended meanwhile.
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), cores)


@contextlib.contextmanager
def echo_client(*, apart: bool = True, synced_to: Path | None = None) -> Iterator[tuple[Any, int]]:
    """A Flight client of an echo server in another process, and the pid of that process.

    `synced_to`: a file of a fixed size, into which the server writes and syncs each body before it answers.

    `apart`: client and server are kept on different cores, as a producer and a busy shard are. On the same core an
    echo takes half as long, and otherwise the scheduler would choose.
    """
    import pyarrow.flight as flight

    cores = sorted(os.sched_getaffinity(0))
    if apart:
        pin(os.getpid(), {cores[0]})
    arguments = [] if synced_to is None else [str(synced_to)]
    process = subprocess.Popen(
        [sys.executable, "-c", ECHO, *arguments], stdout=subprocess.PIPE, text=True
    )
    try:
        output = process.stdout
        port = int(output.readline()) if output is not None else 0
        if apart:
            pin(process.pid, set(cores[1:] or cores))
        client = flight.FlightClient(f"grpc://127.0.0.1:{port}")
        yield client, process.pid
        client.close()
    finally:
        process.kill()
        process.wait()
        # All of it: threads of gRPC would stay, and slow down the next measurement.
        pin(os.getpid(), set(cores))


class Exchanges(NamedTuple):
    """Exchanges of one message with a server in another process, one after the other."""

    p50_ms: float
    #: CPU time of both processes for one
    cpu_us: float


def flight_echo(size: int, count: int, *, synced_to: Path | None = None) -> Exchanges:
    """Exchanges with an echo server. Args: `synced_to`: as of `echo_client`.

    They are measured in a process of its own, with Flight as it comes: the connections of RayMQ change how this process
    reads its sockets (actors/protocol/grpc_polling.py).
    """
    program = (
        "import pathlib, sys; from benchmarks.put import echo; "
        f"print(*echo({size}, {count}, *map(pathlib.Path, sys.argv[1:])))"
    )
    arguments = [] if synced_to is None else [str(synced_to)]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, text=True, check=True
    )
    return Exchanges(*map(float, done.stdout.split()))


def echo(size: int, count: int, synced_to: Path | None = None) -> Exchanges:
    """`flight_echo`, measured in this process."""
    import pyarrow.flight as flight

    with echo_client(synced_to=synced_to) as (client, pid):
        writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(b"echo"))
        writer.begin(PUT_SCHEMA)
        batch = batch_of(1, size)
        times = []
        before_s = cpu_s(pid) + time.process_time()
        for _ in range(count):
            begin = time.perf_counter()
            writer.write_with_metadata(batch, b"{}")
            reader.read_chunk()
            times.append((time.perf_counter() - begin) * 1000)
        used_s = cpu_s(pid) + time.process_time() - before_s
        writer.close()
    return Exchanges(percentile(times, 0.5), 1e6 * used_s / count)


def echo_that_syncs(path: Path, size: int, count: int) -> Exchanges:
    """Exchanges with a server that makes the body durable before it answers.

    Client and server sleep while the disk works, and have to be woken: a sum of an echo and a sync does not have that.
    """
    path.write_bytes(bytes((size + RECORD_OVERHEAD_BYTES) * (count + 100)))
    with path.open("rb") as file:
        os.fsync(file.fileno())
    try:
        return flight_echo(size, count, synced_to=path)
    finally:
        path.unlink()


def ray_round_trip_ms(address: str, count: int) -> float:
    """Milliseconds of one actor call, p50."""
    os.environ["RAY_AUTH_MODE"] = "token"
    import ray

    ray.init(address=address, namespace="bench", log_to_driver=False, logging_level="ERROR")

    class Echo:
        def echo(self, value: bytes) -> bytes:
            return value

    actor: Any = ray.remote(num_cpus=0)(Echo).remote()
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        ray.get(actor.echo.remote(b"x" * 1024))
        times.append((time.perf_counter() - begin) * 1000)
    ray.shutdown()
    return percentile(times, 0.5)


# --- ours -----------------------------------------------------------------------------------------


class Embedded:
    """The engine in this process."""

    def __init__(self, directory: Path) -> None:
        self._root = directory / "embedded"
        shutil.rmtree(self._root, ignore_errors=True)
        config = StoreConfig(prewrite_window_bytes=512 << 20)
        self._store = EmbeddedStore(self._root, config=config)
        self._store.create_topic("t", 1)
        self._allocator = self._store.store.log.allocator
        self._producer_id = 100

    def rate(self, shape: tuple[int, int], count: int) -> float:
        """Messages a second, each batch synced before its receipt, as many bytes under way as a producer has."""
        batch = batch_of(*shape)
        under_way_max = max(1, IN_FLIGHT_BYTES // batch_bytes(batch))

        self._allocator.step()
        while self._allocator.step():
            pass

        self._producer_id += 1
        under_way: deque[Any] = deque()
        begin = time.perf_counter()
        for index in range(count):
            request = PutRequest("t", 0, batch, self._producer_id, 0, index * shape[0], "quorum")
            under_way.append(self._store.append(request))
            if len(under_way) >= under_way_max:
                self._store.wait(under_way.popleft())

        for appended in under_way:
            self._store.wait(appended)
        return count * shape[0] / (time.perf_counter() - begin)

    def __enter__(self) -> Embedded:
        return self

    def __exit__(self, *exc: object) -> None:
        self._store.close()
        shutil.rmtree(self._root, ignore_errors=True)


def await_prewritten(cluster: raymq.Cluster) -> None:
    """Wait until the shard has pre-written its window, so that a burst meets the same blocks as `embedded`."""
    last, ready = -1, 0
    while ready != last or not ready:
        time.sleep(0.5)
        last, ready = ready, cluster.status()["shards"][0]["prewritten_bytes"]


def flight_rate(cluster: raymq.Cluster, shape: tuple[int, int], count: int) -> float:
    """Messages a second through the client, acknowledged after fdatasync (and the mirror's, if there is one)."""
    batch = batch_of(*shape)
    await_prewritten(cluster)
    sender = BatchSender(Routes.of(cluster))
    # As many as may be under way: buffers of both sides are made.
    for future in [sender.send("t", 0, batch) for _ in range(32)]:
        future.result(60)
    begin = time.perf_counter()
    futures = [sender.send("t", 0, batch) for _ in range(count)]
    for future in futures:
        future.result(120)
    seconds = time.perf_counter() - begin
    sender.close()
    return count * shape[0] / seconds


def send_batch_rate(cluster: raymq.Cluster, shape: tuple[int, int], count: int) -> float:
    """Messages a second through `Producer.send_batch`: the same batches as `flight_rate`."""
    data = batch_of(*shape).select(["body"])
    await_prewritten(cluster)
    with cluster.producer() as producer:
        for future in [f for _ in range(32) for f in producer.send_batch("t", data, queue_id=0)]:
            future.result(60)
        begin = time.perf_counter()
        futures = [f for _ in range(count) for f in producer.send_batch("t", data, queue_id=0)]
        for future in futures:
            future.result(120)
        return count * shape[0] / (time.perf_counter() - begin)


def send_rate(cluster: raymq.Cluster, count: int) -> float:
    """Messages a second through `Producer.send` with the default options: 1 KiB, a key each, all receipts awaited."""
    bodies = [os.urandom(1024) for _ in range(64)]
    await_prewritten(cluster)
    with cluster.producer() as producer:
        begin = time.perf_counter()
        futures = [
            producer.send("t", bodies[index % 64], key=b"k%d" % (index % 1000))
            for index in range(count)
        ]
        for future in futures:
            future.result(120)
        return count / (time.perf_counter() - begin)


def send_ms(cluster: raymq.Cluster, count: int) -> tuple[float, float]:
    """One 1 KiB message at a time through `Producer.send`, each receipt awaited: p50 and p99."""
    body, times = os.urandom(1024), []
    with cluster.producer() as producer:
        for _ in range(count):
            begin = time.perf_counter()
            producer.send("t", body, queue_id=0).result(60)
            times.append((time.perf_counter() - begin) * 1000)
    return percentile(times, 0.5), percentile(times, 0.99)


def serial_ms(cluster: raymq.Cluster, count: int) -> tuple[float, float]:
    """One 1 KiB message at a time: p50 and p99."""
    sender = BatchSender(Routes.of(cluster))
    batch = batch_of(1, 1024)
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        sender.send("t", 0, batch).result(60)
        times.append((time.perf_counter() - begin) * 1000)
    sender.close()
    return percentile(times, 0.5), percentile(times, 0.99)


def syncs_of(cluster: raymq.Cluster) -> int:
    """fdatasync calls of the leader's flush service."""
    roles = cluster.status()["shards"][0]["supervisor"]["roles"]
    return sum(int(roles[name]["syncs"]) for name in FLUSH_ROLES if name in roles)


def grouping(cluster: raymq.Cluster, producers: int, count: int) -> float:
    """Messages per fsync with so many producers, each sending one message at a time."""
    before = syncs_of(cluster)
    batch = batch_of(1, 1024)
    endpoint = cluster.endpoints[0]

    def work(number: int) -> None:
        connection = ShardConnection(endpoint, cluster.token, cluster.cluster_id, 0)
        stream = connection.put_stream()
        pid = int.from_bytes(os.urandom(7), "big")

        for index in range(count):
            meta = {
                "id": index,
                "topic": "t",
                "queue": number % 4,
                "pid": pid,
                "epoch": 0,
                "seq": index,
            }
            stream.send({**meta, "acks": "quorum"}, batch)
            stream.receive()

        stream.close()
        connection.close()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(producers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return producers * count / max(1, syncs_of(cluster) - before)


def cpu_s(pid: int) -> float:
    """User and system time of a process, seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mb(pid: int) -> float:
    """PSS without file pages, MB."""
    found = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, value = line.split(":")
        found[name] = int(value.split()[0])
    return (found["Pss_Anon"] + found.get("Pss_Shmem", 0)) / 1024


def memories(cluster: raymq.Cluster) -> dict[str, float]:
    """Memory of the CommitLog process and its satellites, in MB."""
    shard = cluster.status()["shards"][0]
    pids = {"commit_log": shard["pid"]}
    pids |= {name: role["pid"] for name, role in shard["supervisor"]["roles"].items()}
    return {name: round(memory_mb(pid), 1) for name, pid in pids.items()}


def sustained(cluster: raymq.Cluster, directory: Path, gigabytes: float) -> dict[str, Any]:
    """Write so much at full speed: rate of each tenth, memory before and after, the limit of fresh blocks."""
    batch = batch_of(*LARGE)
    total = int(gigabytes * 1e9 / batch.nbytes)
    fresh = raw_limit(directory, 1140 * 1024, total, fresh=True) * LARGE[0]
    before = memories(cluster)

    sender = BatchSender(Routes.of(cluster))
    rates = []
    for tenth in range(10):
        begin = time.perf_counter()
        futures = [sender.send("t", 0, batch) for _ in range(max(1, total // 10))]
        for future in futures:
            future.result(300)
        rates.append(len(futures) * LARGE[0] / (time.perf_counter() - begin))
        print(
            f"  sustained {10 * (tenth + 1)} %: {rates[-1]:,.0f} msg/s", file=sys.stderr, flush=True
        )

    sender.close()
    return {
        "gigabytes": gigabytes,
        "fresh_msg_s": round(fresh),
        "median_msg_s": round(statistics.median(rates)),
        "slowest_tenth_msg_s": round(min(rates)),
        "memory_mb_before": before,
        "memory_mb_after": memories(cluster),
    }


# --- the run --------------------------------------------------------------------------------------


class Rounds:
    """Figures of all rounds by name. A ratio is of two figures of one round."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}

    def note(self, name: str, value: float) -> float:
        """Keep one round's figure. Returns: it."""
        self._values.setdefault(name, []).append(value)
        return value

    def median(self, name: str) -> float:
        """The median of the rounds."""
        return statistics.median(self._values[name])

    def ratio(self, name: str, of: str) -> float:
        """The median of the rounds' ratios."""
        pairs = zip(self._values[name], self._values[of], strict=True)
        return statistics.median(value / limit for value, limit in pairs)

    def all(self) -> dict[str, list[float]]:
        """For the JSON file."""
        return self._values


def measure_single(
    cluster: raymq.Cluster, embedded: Embedded, directory: Path, rounds: Rounds, quick: bool
) -> None:
    """Rounds of everything that has a limit in its own round, on an unreplicated shard."""
    count = 40 if quick else 150
    serial = 200 if quick else 2000

    for number in range(ROUNDS):
        print(f"  round {number + 1} of {ROUNDS}", file=sys.stderr, flush=True)
        raw = raw_limit(directory, 1140 * 1024, count)
        rounds.note("raw_1KiB_msg_s", raw * LARGE[0])
        rounds.note("embedded_1KiB_msg_s", embedded.rate(LARGE, count))
        rounds.note("single_1KiB_msg_s", flight_rate(cluster, LARGE, count))
        rounds.note("send_batch_1KiB_msg_s", send_batch_rate(cluster, LARGE, count))
        rounds.note("send_1KiB_msg_s", send_rate(cluster, count * 200))
        rounds.note("embedded_100B_msg_s", embedded.rate(SMALL, count))
        rounds.note("single_100B_msg_s", flight_rate(cluster, SMALL, count))

        await_prewritten(cluster)
        for _ in range(TURNS):
            measure_one_by_one(cluster, directory, rounds, serial // TURNS)

        for producers in (1, 4, 16, 64):
            share = grouping(cluster, producers, 40 if quick else 100)
            rounds.note(f"msgs_per_fsync_{producers}", share)


def measure_one_by_one(cluster: raymq.Cluster, directory: Path, rounds: Rounds, count: int) -> None:
    """One message at a time, and its limit."""
    limit = echo_that_syncs(directory / "synced", 1024, count)
    rounds.note("echo_that_syncs_ms", limit.p50_ms)
    for name, measure in (("serial", serial_ms), ("send", send_ms)):
        # The first messages of a connection are slower.
        measure(cluster, 10)
        p50, p99 = measure(cluster, count)
        rounds.note(f"{name}_p50_ms", p50)
        rounds.note(f"{name}_p99_ms", p99)


def run(directory: Path, quick: bool, gigabytes: float) -> tuple[Rounds, dict[str, Any]]:
    """All measurements: of the rounds, and single ones."""
    rounds = Rounds()
    single: dict[str, Any] = {"cores": os.cpu_count()}
    count = 40 if quick else 150

    for mode, replicas in (("single", 1), ("mirror", 2)):
        data = directory / mode
        shutil.rmtree(data, ignore_errors=True)
        with raymq.start(data, name=f"bench-{mode}", replicas=replicas) as cluster:
            cluster.create_topic("t", queues=4)
            # Bursts grow the window of pre-written blocks to the need of the measured ones.
            flight_rate(cluster, LARGE, count)

            if mode == "single":
                with Embedded(directory) as embedded:
                    measure_single(cluster, embedded, directory, rounds, quick)
                address = str(cluster.ray_address)
                single["ray_round_trip_ms"] = ray_round_trip_ms(address, 500)
                if gigabytes:
                    single["sustained"] = sustained(cluster, directory, gigabytes)
            else:
                for _ in range(ROUNDS):
                    rounds.note("mirror_1KiB_msg_s", flight_rate(cluster, LARGE, count))
            single[f"{mode}_memory_mb"] = memories(cluster)
        shutil.rmtree(data, ignore_errors=True)

    return rounds, single


def table(rounds: Rounds, single: dict[str, Any]) -> list[Line]:
    """All figures, with their limits and floors."""

    def rate(what: str, name: str, of: str = "", of_name: str = "", **floor: Any) -> Line:
        ratio = rounds.ratio(name, of) if of else 0.0
        share = f"{ratio:.2f} of {of_name}" if of else ""
        return Line(what, f"{rounds.median(name):,.0f} msg/s", share, value=ratio, **floor)

    def times(what: str, name: str, of: str, of_name: str, **floor: Any) -> Line:
        p50, p99 = rounds.median(f"{name}_p50_ms"), rounds.median(f"{name}_p99_ms")
        ratio = rounds.ratio(f"{name}_p50_ms", of)
        share = f"{ratio:.2f} x {of_name}"
        return Line(what, f"{p50:.2f} ms ({p99:.2f})", share, value=ratio, **floor)

    shares = [rounds.median(f"msgs_per_fsync_{n}") for n in (1, 4, 16, 64)]
    memory = single["single_memory_mb"]

    lines = [
        rate("raw pwrite + fdatasync, 1,140 KiB blocks", "raw_1KiB_msg_s", remark="limit"),
        rate(
            *("embedded, 1 KiB x 1,024", "embedded_1KiB_msg_s", "raw_1KiB_msg_s", "raw"),
            floor=at_least(0.25),
        ),
        rate(
            *("through Flight", "single_1KiB_msg_s", "embedded_1KiB_msg_s", "embedded"),
            floor=at_least(0.5),
        ),
        rate(
            *("  by Producer.send_batch", "send_batch_1KiB_msg_s", "single_1KiB_msg_s"),
            "the internal road",
            floor=at_least(0.8),
        ),
        rate("  by Producer.send, one object a message", "send_1KiB_msg_s"),
        rate(
            *("mirror", "mirror_1KiB_msg_s", "single_1KiB_msg_s", "single"),
            floor=at_least(0.4),
        ),
        rate("embedded, 100 B x 8,192", "embedded_100B_msg_s"),
        rate(
            *("through Flight, 100 B x 8,192", "single_100B_msg_s", "embedded_100B_msg_s"),
            "embedded",
            floor=at_least(0.6),
        ),
        Line(
            "Flight echo that syncs 1 KiB",
            f"{rounds.median('echo_that_syncs_ms'):.2f} ms",
            remark="limit",
        ),
        times(
            *("one message at a time, p50 (p99)", "serial", "echo_that_syncs_ms", "that"),
            floor=at_most(3),
        ),
        times(
            *("  by Producer.send", "send", "serial_p50_ms", "the internal road"),
            floor=at_most(1.5),
        ),
        Line("Ray round trip, p50", f"{single['ray_round_trip_ms']:.2f} ms", remark="limit"),
        Line(
            "messages per fsync, 1/4/16/64 producers",
            str([round(share, 1) for share in shares]),
            "64 beside 1",
            at_least(1.5),
            shares[-1] / max(shares[0], 0.01),
        ),
        Line(
            "memory without file pages, MB",
            str(memory),
            "CommitLog",
            at_most(150),
            memory["commit_log"],
        ),
        Line(
            "",
            "",
            "the largest of the others",
            at_most(75),
            max(size for role, size in memory.items() if role != "commit_log"),
        ),
    ]

    if "sustained" in single:
        facts = single["sustained"]
        burst = rounds.median("single_1KiB_msg_s")
        grown = facts["memory_mb_after"]["commit_log"] / facts["memory_mb_before"]["commit_log"]
        lines += [
            Line(
                "raw into fresh blocks, as many", f"{facts['fresh_msg_s']:,} msg/s", remark="limit"
            ),
            Line(
                f"sustained {facts['gigabytes']:g} GB, median (slowest tenth)",
                f"{facts['median_msg_s']:,} ({facts['slowest_tenth_msg_s']:,}) msg/s",
                f"{facts['median_msg_s'] / burst:.2f} of the burst, "
                f"{facts['median_msg_s'] / facts['fresh_msg_s']:.2f} of fresh",
            ),
            Line(
                "memory after it, MB",
                str(facts["memory_mb_after"]),
                f"before {facts['memory_mb_before']}",
                at_most(1.2),
                grown,
            ),
        ]

    return lines


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="shorter rounds")
    parser.add_argument(
        "--sustained-gb", type=float, default=0.0, help="also write so many GB (10 for the record)"
    )
    parser.add_argument("--directory", type=Path, default=Path.home() / ".raymq" / "bench")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    floors.options(parser)
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    rounds, single = run(options.directory, options.quick, options.sustained_gb)
    if options.json:
        options.json.write_text(json.dumps({**single, "rounds": rounds.all()}, indent=1))
    sys.exit(floors.report(table(rounds, single), check=options.check))


if __name__ == "__main__":
    main()
