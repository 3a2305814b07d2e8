"""How fast is the Ray client API? `python -m benchmarks.ray_client [--quick] [--check] [--json FILE]`

One message at a time goes through actor methods. Its limit is the sum of a Ray round trip and an fdatasync, measured
apart. An actor that only writes and syncs its argument is shown, too. It takes longer than the sum, because a disk that
was left alone for a millisecond syncs slower than one in a loop.

Batches of 1 MiB by methods are compared with Flight. Both through ray:// are compared with Ray Client's own round trip
and `ray.put`. The actors of the limits have the shard's concurrency groups. There are five rounds, each figure right
after its limit. A ratio is the median of the rounds' ratios (see benchmarks/put.py).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ray

import raymq
from benchmarks import floors
from benchmarks.floors import Line, at_least, at_most
from benchmarks.put import (
    LARGE,
    Rounds,
    await_prewritten,
    batch_of,
    flight_rate,
    percentile,
    raw_limit,
    serial_ms,
)
from raymq.actors.server.ray.concurrency_groups import GROUP_OF, GROUPS
from raymq.client.produce.batch_sender import BatchSender
from raymq.client.transport.routes import Routes
from raymq.cluster.deploy import ray_host
from raymq.cluster.record.paths import ClusterPaths
from raymq.store.base.files import Files

MIB = 1 << 20
ROUNDS = 5
#: a record with a body of 1 KiB
RECORD_BYTES = 1150


# Like the shard's own method. Set at import, because Ray Client does not support all of it later.
in_group: Any = ray.method(concurrency_group=GROUP_OF["append"], enable_task_events=False)


class Bare:
    """The actor that the limits are measured with."""

    def open(self, path: str, blocks: int) -> None:
        """A file whose blocks are written already, for `sync`."""
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        os.pwrite(self._file, bytes(blocks * RECORD_BYTES), 0)
        os.fsync(self._file)
        self._at = 0

    @in_group
    def echo(self, value: bytes) -> bytes:
        """The value itself."""
        return value

    @in_group
    def sync(self, value: bytes) -> bytes:
        """Write and sync the value."""
        os.pwrite(self._file, value, self._at)
        os.fdatasync(self._file)
        self._at += len(value)
        return value


def call_ms(method: Any, count: int) -> float:
    """Milliseconds of one actor call with a record, p50."""
    times, value = [], os.urandom(RECORD_BYTES)
    for _ in range(count):
        begin = time.perf_counter()
        ray.get(method.remote(value))
        times.append((time.perf_counter() - begin) * 1000)
    return percentile(times, 0.5)


def new_bare() -> Any:
    """A bare actor that has answered."""
    # Ray's types leave the concurrency groups of an actor out.
    options: dict[str, Any] = {"num_cpus": 0, "concurrency_groups": dict(GROUPS)}
    remote: Any = ray.remote(**options)(Bare)
    actor = remote.remote()
    ray.get(actor.echo.remote(b""))
    return actor


def put_rate(count: int) -> float:
    """MiB/s of `ray.put` of 1 MiB, one after the other."""
    value = os.urandom(MIB)
    begin = time.perf_counter()
    for _ in range(count):
        ray.put(value)
    return count / (time.perf_counter() - begin)


def batch_rate(cluster: raymq.Cluster, count: int) -> float:
    """MiB/s of batches of 1 MiB, all acknowledged."""
    batch = batch_of(*LARGE)
    with contextlib.closing(BatchSender(Routes.of(cluster))) as sender:
        sender.send("t", 0, batch).result(60)
        begin = time.perf_counter()
        for future in [sender.send("t", 0, batch) for _ in range(count)]:
            future.result(120)
        return count / (time.perf_counter() - begin)


def measure_inside(
    flight: raymq.Cluster, directory: Path, rounds: Rounds, serial: int, count: int
) -> None:
    """One round of a driver of the cluster's Ray."""
    methods = raymq.connect(flight.name, transport="ray")
    await_prewritten(flight)
    bare, path = new_bare(), directory / "bare"
    ray.get(bare.open.remote(str(path), serial))
    rounds.note("bare_sync_ms", call_ms(bare.sync, serial))
    sync = rounds.note("fdatasync_ms", 1000 / raw_limit(directory, RECORD_BYTES, serial))
    trip = rounds.note("round_trip_ms", call_ms(bare.echo, serial))
    rounds.note("round_trip_and_fdatasync_ms", trip + sync)

    ray.kill(bare)
    path.unlink()

    p50, p99 = serial_ms(methods, serial)
    rounds.note("serial_p50_ms", p50)
    rounds.note("serial_p99_ms", p99)
    rounds.note("flight_serial_p50_ms", serial_ms(flight, serial)[0])
    rounds.note("flight_msg_s", flight_rate(flight, LARGE, count))
    rounds.note("methods_msg_s", flight_rate(methods, LARGE, count))


def measure_outside(url: str, serial: int, count: int) -> dict[str, float]:
    """One round of a process that reaches only the port of Ray Client."""
    cluster = raymq.connect(url)
    found = {"client_round_trip_ms": call_ms(new_bare().echo, serial)}
    found["client_serial_p50_ms"], _ = serial_ms(cluster, serial)
    found["client_put_mib_s"] = put_rate(count)
    found["client_mib_s"] = batch_rate(cluster, count)
    ray.shutdown()
    return found


def client_url(data: Path) -> str:
    """The address at which the cluster's own Ray serves Ray Client."""
    owned = ray_host.load_owned(ClusterPaths(data), Files())
    words = [] if owned is None else Path(f"/proc/{owned.pid}/cmdline").read_bytes().split(b"\0")
    (word,) = [each for each in words if each.startswith(b"--ray-client-server-port=")]
    return f"ray://127.0.0.1:{int(word.partition(b'=')[2])}"


def run(directory: Path, quick: bool) -> Rounds:
    """All rounds on one cluster."""
    rounds, data = Rounds(), directory / "ray"
    serial, count = (200, 40) if quick else (1000, 150)
    shutil.rmtree(data, ignore_errors=True)

    with raymq.start(data, name="bench-ray") as cluster:
        cluster.create_topic("t", queues=4)
        ray.init(cluster.ray_address, log_to_driver=False, logging_level="ERROR")
        flight_rate(cluster, LARGE, count)
        for number in range(ROUNDS):
            print(f"  round {number + 1} of {ROUNDS}", file=sys.stderr, flush=True)
            measure_inside(cluster, directory, rounds, serial, count)
            words = [client_url(data), str(serial // 4), str(count // 2)]
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.ray_client", "--outside", *words],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )

            for name, value in json.loads(done.stdout.splitlines()[-1]).items():
                rounds.note(name, value)

            sync = rounds.all()["fdatasync_ms"][-1]
            trip = rounds.all()["client_round_trip_ms"][-1]
            rounds.note("client_round_trip_and_fdatasync_ms", trip + sync)
        ray.shutdown()
    shutil.rmtree(data, ignore_errors=True)
    return rounds


def table(rounds: Rounds) -> list[Line]:
    """All figures, with their limits and floors."""

    def ms(what: str, name: str, of: str = "", **floor: Any) -> Line:
        ratio = rounds.ratio(name, of) if of else 0.0
        share = f"{ratio:.2f} x" if of else ""
        return Line(what, f"{rounds.median(name):.2f} ms", share, value=ratio, **floor)

    def rate(what: str, name: str, unit: str, of: str = "", of_name: str = "", **more: Any) -> Line:
        ratio = rounds.ratio(name, of) if of else 0.0
        share = f"{ratio:.2f} of {of_name}" if of else ""
        return Line(what, f"{rounds.median(name):,.0f} {unit}", share, value=ratio, **more)

    trip, outside = "round_trip_and_fdatasync_ms", "client_round_trip_and_fdatasync_ms"
    serial = f"one message at a time by methods, p50 (p99 {rounds.median('serial_p99_ms'):.2f})"

    return [
        ms("Ray round trip + fdatasync, p50", trip, remark="limit"),
        ms(serial, "serial_p50_ms", trip, floor=at_most(1.5)),
        ms("an actor that only writes and syncs, p50", "bare_sync_ms", trip),
        ms("the same through Flight, p50", "flight_serial_p50_ms"),
        rate("1 MiB batches through Flight", "flight_msg_s", "msg/s", remark="limit"),
        rate(
            *("1 MiB batches by methods", "methods_msg_s", "msg/s", "flight_msg_s", "Flight"),
            floor=at_least(0.5),
        ),
        ms("ray:// round trip + fdatasync", outside, remark="limit"),
        ms("one message at a time, p50", "client_serial_p50_ms", outside, floor=at_most(1.5)),
        rate("ray:// put of 1 MiB", "client_put_mib_s", "MiB/s", remark="limit"),
        rate(
            *("1 MiB batches", "client_mib_s", "MiB/s", "client_put_mib_s", "ray.put"),
            floor=at_least(0.5),
        ),
    ]


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="shorter rounds")
    parser.add_argument("--directory", type=Path, default=Path.home() / ".raymq" / "bench")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--outside", nargs=3, help=argparse.SUPPRESS)
    floors.options(parser)
    options = parser.parse_args()

    if options.outside:
        url, serial, count = options.outside
        print(json.dumps(measure_outside(url, int(serial), int(count))))
        return

    options.directory.mkdir(parents=True, exist_ok=True)
    rounds = run(options.directory, options.quick)
    if options.json:
        options.json.write_text(
            json.dumps({"cores": os.cpu_count(), "rounds": rounds.all()}, indent=1)
        )
    sys.exit(floors.report(table(rounds), check=options.check))


if __name__ == "__main__":
    main()
