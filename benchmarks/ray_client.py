"""How fast is the Ray client API? `python -m benchmarks.ray_client [--quick] [--check] [--json FILE]`

One message at a time goes through actor methods. Its limit is the sum of a Ray round trip and an fdatasync, measured
apart.

Batches of 1 MiB by methods are compared with Flight. Both through ray:// are compared with Ray Client's own round trip
and `ray.put`. The actors of the limits have the shard's concurrency groups. There are five rounds, each figure right
after its limit. A ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import ray

import raymq
from benchmarks import limits
from benchmarks.floors import at_least, at_most
from benchmarks.limits import LARGE, RECORD_BYTES, UNLIMITED, batch_rate, call_ms, sent
from benchmarks.rounds import Rounds, Row, in_turn, run
from raymq.actors.server.ray.concurrency_groups import GROUP_OF, GROUPS
from raymq.cluster.deploy import ray_host
from raymq.cluster.record.paths import ClusterPaths
from raymq.store.base.files import Files

MIB = 1 << 20
ROUNDS = 5

# Like the shard's own method. Set at import, because Ray Client does not support all of it later.
in_group: Any = ray.method(concurrency_group=GROUP_OF["append"], enable_task_events=False)


class Bare:
    """The actor that the limits are measured with."""

    @in_group
    def echo(self, value: bytes) -> bytes:
        """The value itself."""
        return value


def method_ms(method: Any, count: int) -> float:
    """Milliseconds of one actor call with a record, p50."""
    value = os.urandom(RECORD_BYTES)
    return call_ms(lambda: ray.get(method.remote(value)), count)


def new_bare() -> Any:
    """A bare actor that has answered."""
    # Ray's types leave the concurrency groups of an actor out.
    options: dict[str, Any] = {"num_cpus": 0, "concurrency_groups": dict(GROUPS)}
    remote: Any = ray.remote(**options)(Bare)
    actor = remote.remote()
    ray.get(actor.echo.remote(b""))
    return actor


def measure_inside(
    flight: raymq.Cluster, directory: Path, rounds: Rounds, serial: int, count: int
) -> None:
    """One round of a driver of the cluster's Ray."""
    methods = raymq.connect(flight.name, transport="ray")
    limits.await_prewritten(flight)
    bare = new_bare()
    sync = rounds.note("fdatasync_ms", 1000 / limits.raw_limit(directory, RECORD_BYTES, serial))
    rounds.note("round_trip_and_fdatasync_ms", method_ms(bare.echo, serial) + sync)
    ray.kill(bare)

    rounds.note_times("serial", sent(methods, serial, api="batches").latency)
    flight_ms = sent(flight, serial, api="batches").percentile_ms(50)
    rounds.note("flight_serial_ms", flight_ms)
    rounds.note("flight_msg_s", batch_rate(flight, LARGE, count))
    rounds.note("methods_msg_s", batch_rate(methods, LARGE, count))


def measure_outside(url: str, serial: int, count: int) -> dict[str, float]:
    """One round of a process that reaches only the port of Ray Client."""
    cluster, value = raymq.connect(url), os.urandom(MIB)
    batches = {"api": "batches", "batch": LARGE[0], "in_flight": UNLIMITED}
    return {
        "client_round_trip_ms": method_ms(new_bare().echo, serial),
        "client_serial_ms": sent(cluster, serial, api="batches").percentile_ms(50),
        "client_put_MiB_s": 1000
        * count
        / call_ms(lambda: [ray.put(value) for _ in range(count)], 1),
        "client_MiB_s": sent(cluster, count, 1, **batches).rate,
    }


def client_url(data: Path) -> str:
    """The address at which the cluster's own Ray serves Ray Client."""
    owned = ray_host.load_owned(ClusterPaths(data), Files())
    words = [] if owned is None else Path(f"/proc/{owned.pid}/cmdline").read_bytes().split(b"\0")
    (word,) = [each for each in words if each.startswith(b"--ray-client-server-port=")]
    return f"ray://127.0.0.1:{int(word.partition(b'=')[2])}"


def measure(options: argparse.Namespace, rounds: Rounds) -> None:
    """All rounds on one cluster."""
    if options.outside:
        url, *numbers = options.outside
        print(json.dumps(measure_outside(url, *map(int, numbers))))
        ray.shutdown()
        sys.exit()

    serial, count = (200, 40) if options.quick else (1000, 150)
    with limits.started(options.directory, "ray") as cluster:
        ray.init(cluster.ray_address, log_to_driver=False, logging_level="ERROR")
        batch_rate(cluster, LARGE, count)
        for _ in in_turn(ROUNDS):
            measure_inside(cluster, options.directory, rounds, serial, count)
            words = [client_url(options.directory / "ray"), str(serial // 4), str(count // 2)]
            program = [sys.executable, "-m", "benchmarks.ray_client", "--outside", *words]
            found = json.loads(limits.output_of(program).splitlines()[-1])
            for name, value in found.items():
                rounds.note(name, value)
            sync = rounds.values["fdatasync_ms"][-1]
            rounds.note("client_limit_ms", found["client_round_trip_ms"] + sync)
        ray.shutdown()


TRIP, FLIGHT, PUT = "round_trip_and_fdatasync_ms", "flight_msg_s", "client_put_MiB_s"
CLIENT = "client_limit_ms"
ROWS = [
    Row("Ray round trip + fdatasync, p50", TRIP, remark="limit"),
    Row("one message at a time by methods, p50 (p99)", "serial_p50_ms", TRIP, "that", at_most(1.5)),
    Row("the same through Flight, p50", "flight_serial_ms"),
    Row("1 MiB batches through Flight", FLIGHT, remark="limit"),
    Row("1 MiB batches by methods", "methods_msg_s", FLIGHT, "Flight", at_least(0.5)),
    Row("ray:// round trip + fdatasync", CLIENT, remark="limit"),
    Row("one message at a time, p50", "client_serial_ms", CLIENT, "that", at_most(1.5)),
    Row("ray:// put of 1 MiB", PUT, remark="limit"),
    Row("1 MiB batches", "client_MiB_s", PUT, "ray.put", at_least(0.5)),
]

if __name__ == "__main__":
    outside = {"nargs": 3, "help": argparse.SUPPRESS}
    run(__doc__, measure, ROWS, options={"--outside": outside})
