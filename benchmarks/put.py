"""How fast are durable puts? `python -m benchmarks.put [--quick] [--json FILE]`

Every figure is a median of three beside its own limit of the same run: raw pwrite + fdatasync of equal blocks into
pre-written blocks, a Flight echo, a Ray round trip. Times on shared machines are noisy: read the ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import raymq
from raymq.cluster.batch_sender import BatchSender
from raymq.cluster.flight_client import ShardConnection
from raymq.cluster.routes import Routes
from raymq.store.config import StoreConfig
from raymq.store.embedded import EmbeddedStore
from raymq.store.put import PutRequest
from raymq.store.record import PUT_SCHEMA

ROUNDS = 3
#: (rows, body bytes)
LARGE, SMALL = (1024, 1024), (8192, 100)

ECHO = """
import pyarrow.flight as flight
class Echo(flight.FlightServerBase):
    def do_exchange(self, context, descriptor, reader, writer):
        writer.begin(reader.schema)
        while True:
            try:
                chunk = reader.read_chunk()
            except StopIteration:
                return
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


def median_of(measure: Callable[[], float]) -> float:
    """The median of three rounds."""
    return statistics.median(measure() for _ in range(ROUNDS))


def percentile(values: list[float], part: float) -> float:
    """Of a list, in its unit."""
    return sorted(values)[min(len(values) - 1, int(len(values) * part))]


# --- limits -------------------------------------------------------------------------------------------------


def raw_limit(directory: Path, block_bytes: int, count: int) -> float:
    """Blocks a second: pwrite + fdatasync, one after the other, into blocks that were written before."""
    path = directory / "raw"
    block = os.urandom(block_bytes)
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        for index in range(count):
            os.pwrite(fd, block, index * block_bytes)
        os.fsync(fd)

        def measure() -> float:
            begin = time.perf_counter()
            for index in range(count):
                os.pwrite(fd, block, index * block_bytes)
                os.fdatasync(fd)
            return count / (time.perf_counter() - begin)

        return median_of(measure)
    finally:
        os.close(fd)
        path.unlink()


def flight_echo_ms(size: int, count: int) -> float:
    """Milliseconds of one exchange with an echo server in another process, p50; median of three servers.

    Client and server are kept on different cores, as a producer and a busy shard are: on the same core an echo
    takes half as long, and which of both it is would be the scheduler's mood.
    """
    import pyarrow.flight as flight

    def measure() -> float:
        process = subprocess.Popen([sys.executable, "-c", ECHO], stdout=subprocess.PIPE, text=True)
        try:
            require = process.stdout
            port = int(require.readline()) if require is not None else 0
            for task in Path(f"/proc/{process.pid}/task").iterdir():
                os.sched_setaffinity(int(task.name), others)
            client = flight.FlightClient(f"grpc://127.0.0.1:{port}")
            writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(b"echo"))
            writer.begin(PUT_SCHEMA)
            batch = batch_of(1, size)
            times = []
            for _ in range(count):
                begin = time.perf_counter()
                writer.write_with_metadata(batch, b"{}")
                reader.read_chunk()
                times.append((time.perf_counter() - begin) * 1000)
            writer.close()
            client.close()
            return percentile(times, 0.5)
        finally:
            process.kill()
            process.wait()

    cores = sorted(os.sched_getaffinity(0))
    others = set(cores[1:] or cores)
    own = threading.get_native_id()
    os.sched_setaffinity(own, {cores[0]})
    try:
        return median_of(measure)
    finally:
        os.sched_setaffinity(own, set(cores))


def ray_round_trip_ms(address: str, count: int) -> float:
    """Milliseconds of one actor call, p50."""
    os.environ["RAY_AUTH_MODE"] = "token"
    import ray

    ray.init(address=address, namespace="bench", log_to_driver=False, logging_level="ERROR")

    class Echo:
        def echo(self, value: bytes) -> bytes:
            return value

    actor = ray.remote(num_cpus=0)(Echo).remote()
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        ray.get(actor.echo.remote(b"x" * 1024))
        times.append((time.perf_counter() - begin) * 1000)
    ray.shutdown()
    return percentile(times, 0.5)


# --- ours ---------------------------------------------------------------------------------------------------


def embedded_rate(directory: Path, shape: tuple[int, int], count: int) -> float:
    """Messages a second of the engine in this process, each batch synced before its receipt, four under way."""
    root = directory / "embedded"
    shutil.rmtree(root, ignore_errors=True)
    store = EmbeddedStore(root, config=StoreConfig(prewrite_window_bytes=512 << 20))
    try:
        store.create_topic("t", 1)
        ahead = store.store.log.allocate_ahead()
        while ahead.step():
            pass
        batch = batch_of(*shape)
        producer = [100]

        def measure() -> float:
            producer[0] += 1
            under_way: deque[Any] = deque()
            begin = time.perf_counter()
            for index in range(count):
                request = PutRequest("t", 0, batch, producer[0], 0, index * shape[0], "quorum")
                under_way.append(store.append(request))
                if len(under_way) > 4:
                    store.wait(under_way.popleft())
            for append in under_way:
                store.wait(append)
            return count * shape[0] / (time.perf_counter() - begin)

        return median_of(measure)
    finally:
        store.close()
        shutil.rmtree(root, ignore_errors=True)


def await_prewritten(cluster: raymq.Cluster) -> None:
    """Wait until the shard has pre-written its window, so that a burst meets what the raw limit and `embedded` do."""
    last, ready = -1, 0
    while ready != last or not ready:
        time.sleep(0.5)
        last, ready = ready, cluster.status()["shards"][0]["prewritten_bytes"]


def flight_rate(cluster: raymq.Cluster, shape: tuple[int, int], count: int) -> float:
    """Messages a second through the client, acknowledged after fdatasync (and the mirror's, if there is one)."""
    batch = batch_of(*shape)

    def measure() -> float:
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

    return median_of(measure)


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
    return int(cluster.status()["shards"][0]["roles"]["roles"]["group_commit"]["syncs"])


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


def memory_mb(pid: int) -> float:
    """PSS without file pages, MB."""
    found = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, value = line.split(":")
        found[name] = int(value.split()[0])
    return (found["Pss_Anon"] + found.get("Pss_Shmem", 0)) / 1024


def memories(cluster: raymq.Cluster) -> dict[str, float]:
    """Of the CommitLog process and its satellites."""
    shard = cluster.status()["shards"][0]
    pids = {"commit_log": shard["pid"]}
    pids |= {name: role["pid"] for name, role in shard["roles"]["roles"].items()}
    return {name: round(memory_mb(pid), 1) for name, pid in pids.items()}


def sustained(cluster: raymq.Cluster, gigabytes: float) -> dict[str, Any]:
    """Write so much at full speed: rate of each tenth, memory before and after."""
    batch = batch_of(*LARGE)
    total = int(gigabytes * 1e9 / batch.nbytes)
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
        "median_msg_s": round(statistics.median(rates)),
        "slowest_tenth_msg_s": round(min(rates)),
        "memory_mb_before": before,
        "memory_mb_after": memories(cluster),
    }


# --- the run ------------------------------------------------------------------------------------------------


def run(directory: Path, quick: bool, gigabytes: float) -> dict[str, Any]:
    """All measurements."""
    count = 40 if quick else 200
    serial = 200 if quick else 2000
    found: dict[str, Any] = {"cores": os.cpu_count(), "rounds": ROUNDS}
    block = 1140 * 1024
    found["raw_blocks_1140KiB_s"] = raw_limit(directory, block, count)
    found["raw_1KiB_s"] = raw_limit(directory, 1150, serial)
    found["embedded_1KiB_msg_s"] = embedded_rate(directory, LARGE, count)
    found["embedded_100B_msg_s"] = embedded_rate(directory, SMALL, count // 2)
    found["flight_echo_ms"] = flight_echo_ms(1024, serial)
    for mode in ("single", "mirror"):
        data = directory / mode
        shutil.rmtree(data, ignore_errors=True)
        with raymq.start(data, name=f"bench-{mode}", replication=mode) as cluster:
            cluster.create_topic("t", queues=4)
            # Bursts grow the window of pre-written blocks to what the measured ones need.
            flight_rate(cluster, LARGE, count)
            found[f"{mode}_1KiB_msg_s"] = flight_rate(cluster, LARGE, count)
            if mode == "single":
                found["single_100B_msg_s"] = flight_rate(cluster, SMALL, count // 2)
                found["serial_p50_ms"], found["serial_p99_ms"] = serial_ms(cluster, serial)
                found["msgs_per_fsync"] = {
                    str(n): round(grouping(cluster, n, 40 if quick else 100), 1)
                    for n in (1, 4, 16, 64)
                }
                found["ray_round_trip_ms"] = ray_round_trip_ms(
                    str(cluster.ray_address), serial // 4
                )
                if gigabytes:
                    found["sustained"] = sustained(cluster, gigabytes)
            found[f"{mode}_memory_mb"] = memories(cluster)
        shutil.rmtree(data, ignore_errors=True)
    return found


def table(found: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """(what, figure, ratio, floor)."""
    raw = found["raw_blocks_1140KiB_s"] * LARGE[0]
    sync_ms = 1000 / found["raw_1KiB_s"]
    limit_ms = found["flight_echo_ms"] + sync_ms

    def row(
        what: str, value: float, of: float, name: str, floor: float
    ) -> tuple[str, str, str, str]:
        return what, f"{value:,.0f} msg/s", f"{value / of:.2f} of {name}", f">= {floor}"

    rows = [
        ("raw pwrite + fdatasync, 1,140 KiB blocks", f"{raw:,.0f} msg/s", "limit", ""),
        row("embedded, 1 KiB x 1,024", found["embedded_1KiB_msg_s"], raw, "raw", 0.25),
        row(
            "through Flight",
            found["single_1KiB_msg_s"],
            found["embedded_1KiB_msg_s"],
            "embedded",
            0.5,
        ),
        row("mirror", found["mirror_1KiB_msg_s"], found["single_1KiB_msg_s"], "single", 0.4),
        ("embedded, 100 B x 8,192", f"{found['embedded_100B_msg_s']:,.0f} msg/s", "", ""),
        (
            "through Flight, 100 B x 8,192",
            f"{found['single_100B_msg_s']:,.0f} msg/s",
            "",
            ">= 1,000,000",
        ),
        ("Flight echo + fdatasync of 1 KiB", f"{limit_ms:.2f} ms", "limit", ""),
        (
            "one message at a time, p50 (p99)",
            f"{found['serial_p50_ms']:.2f} ms ({found['serial_p99_ms']:.2f})",
            f"{found['serial_p50_ms'] / limit_ms:.2f} x",
            "<= 3",
        ),
        ("Ray round trip, p50", f"{found['ray_round_trip_ms']:.2f} ms", "", ""),
        (
            "messages per fsync, 1/4/16/64 producers",
            str(list(found["msgs_per_fsync"].values())),
            "",
            "grows",
        ),
        ("memory without file pages, MB", str(found["single_memory_mb"]), "", "<= 150 / 75"),
    ]
    if "sustained" in found:
        facts = found["sustained"]
        rows.append(
            (
                f"sustained {facts['gigabytes']:g} GB, median (slowest tenth)",
                f"{facts['median_msg_s']:,} ({facts['slowest_tenth_msg_s']:,}) msg/s",
                f"{facts['median_msg_s'] / found['single_1KiB_msg_s']:.2f} of the burst",
                "",
            )
        )
    return rows


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, for CI")
    parser.add_argument(
        "--sustained-gb", type=float, default=0.0, help="also write so many GB (10 for the record)"
    )
    parser.add_argument("--directory", type=Path, default=Path.home() / ".raymq" / "bench")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    found = run(options.directory, options.quick, options.sustained_gb)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    rows = table(found)
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))


if __name__ == "__main__":
    main()
