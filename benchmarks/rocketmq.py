"""RocketMQ's own Java client against RayMQ and against a broker. `python -m benchmarks.rocketmq [--quick] [--check]`

    client  a Java process with RocketMQ's client, unmodified, beside RayMQ and beside RocketMQ 5.3.3, by turns: sends
            of 1 KiB, one at a time and by 64 threads, batches of 32, sends that do not wait, a backlog that is read,
            and messages that are due 2,000 times a second from then until their listener has them. Both sync before
            they answer, but for the sends that do not wait
    own     the same messages by RayMQ's own client, 64 threads, and the CPU of the servers for each
    idle    the server without clients, and with 1,000 idle connections
    hostile the server while garbage comes, and the puts of others meanwhile

`--check` ends with exit code 1 when a floor is missed. It needs Java and Maven.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, cast

import raymq
from benchmarks import rocketmq_broker
from benchmarks.floors import at_least, at_most
from benchmarks.limits import cpu_s, memory_mb, satellites_of, sent, started
from benchmarks.rounds import Rounds, Row, in_turn, run, tell
from raymq.cluster.deploy.owned_ray import free_ports
from tests.support import oracle

PARTS = ("client", "own", "idle", "hostile")
SOURCE = Path(__file__).parent / "java" / "RemotingBench.java"
TOPICS = ("one", "backlog", "loop")
#: of each topic, as a broker makes them by itself
QUEUES = 4
#: connections of clients that say nothing
IDLE_CONNECTIONS = 1_000
#: of clients that send frames without an end
HOSTILE, HOSTILE_BYTES = 10, 64 << 20


class JavaClient:
    """The process of RemotingBench."""

    def __init__(self, java: Sequence[str], names: str) -> None:
        words = [*java, "-Xmx1g", "RemotingBench", names]
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._input = cast(IO[str], self._process.stdin)
        self._output = cast(IO[str], self._process.stdout)
        self._answer()

    def _answer(self) -> str:
        line = self._output.readline()
        if not line:
            raise RuntimeError("the Java process has ended")
        return line

    def load(self, name: str, seconds: float) -> dict[str, float]:
        """Run a load. Returns: its figures."""
        print(name, seconds, file=self._input, flush=True)
        words = self._answer().split()
        return {key: float(value) for key, value in zip(words[::2], words[1::2], strict=True)}

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()


@contextlib.contextmanager
def raymq_server(directory: Path, name: str, flush: str) -> Iterator[tuple[raymq.Cluster, str]]:
    """A new cluster that serves RocketMQ's clients, and the address of its name server."""
    (port,) = free_ports(1)
    with started(directory, name, flush=flush, rocketmq=port, rocketmq_access="open") as cluster:
        for topic in TOPICS:
            cluster.create_topic(topic, queues=QUEUES)
        yield cluster, f"127.0.0.1:{port}"


def door_pid(cluster: raymq.Cluster) -> int:
    """The process of the server."""
    return int(cluster.doors()["rocketmq"][0]["pid"])


def server_pids(cluster: raymq.Cluster) -> list[int]:
    """Each process of the shard that a send goes through."""
    (shard,) = cluster.status()["shards"]
    return [door_pid(cluster), shard["pid"], *satellites_of(shard).values()]


def measure_client(options: argparse.Namespace, rounds: Rounds) -> None:
    """The same loads of the same client, beside a broker and beside RayMQ by turns."""
    directory: Path = options.directory
    seconds = 3.0 if options.quick else 10.0
    java = java_command(directory)
    for _ in in_turn(what="client"):
        with rocketmq_broker.servers(directory, durable=True) as broker:
            note_client(rounds, "broker", java, broker.names, seconds, broker.pids)
        with raymq_server(directory, "remoting", "sync") as (cluster, names):
            note_client(rounds, "raymq", java, names, seconds, server_pids(cluster))
        with rocketmq_broker.servers(directory, durable=False) as broker:
            note_async(rounds, "broker", java, broker.names, seconds)
        with raymq_server(directory, "remoting", "async") as (_, names):
            note_async(rounds, "raymq", java, names, seconds)


def note_client(
    rounds: Rounds, side: str, java: list[str], names: str, seconds: float, pids: Sequence[int]
) -> None:
    """The figures of one side."""
    with contextlib.closing(JavaClient(java, names)) as client:
        # Java compiles what is hot.
        for load in ("one", "threads", "batches"):
            client.load(load, seconds / 3)
        found = client.load("one", seconds)
        before_s = sum(map(cpu_s, pids))
        by_threads = client.load("threads", seconds)
        spent_s = sum(map(cpu_s, pids)) - before_s
        found["server_us"] = 1e6 * spent_s / by_threads.pop("sends")
        found |= by_threads
        found |= client.load("batches", seconds)
        del found["sends"]
        found |= client.load("read", seconds)
        found |= client.load("loop", seconds)
    for name, value in found.items():
        rounds.note(f"{side}_{name}", value)


def note_async(rounds: Rounds, side: str, java: list[str], names: str, seconds: float) -> None:
    """Sends that do not wait, without a sync before the answer."""
    with contextlib.closing(JavaClient(java, names)) as client:
        client.load("async", seconds / 2)
        rounds.note(f"{side}_async_msg_s", client.load("async", seconds)["async_msg_s"])


def java_command(directory: Path) -> list[str]:
    """Java with RocketMQ's client and the program. Raises: oracle.Missing, oracle.Failed."""
    cache = directory / "rocketmq-jars"
    cache.mkdir(exist_ok=True)
    program = oracle.prepare(cache)
    classes = cache / "remoting"
    classes.mkdir(exist_ok=True)
    words = [oracle.find("javac"), "--release", "17", "-XDsuppressNotes", "-proc:none"]
    words += ["-d", str(classes), "-cp", program.class_path, str(SOURCE)]
    subprocess.run(words, check=True)
    home = cache / "home"
    home.mkdir(exist_ok=True)
    return [
        program.java,
        f"-Duser.home={home}",
        f"-Drmq.logback.configurationFile={oracle.SOURCES / 'logback.xml'}",
        *("-cp", f"{classes}{os.pathsep}{program.class_path}"),
    ]


# --- beside RayMQ's own client --------------------------------------------------------------------


def measure_own(options: argparse.Namespace, rounds: Rounds) -> None:
    """64 threads that each send one message at a time, by either client."""
    directory: Path = options.directory
    seconds = 3.0 if options.quick else 10.0
    java = java_command(directory)
    with (
        raymq_server(directory, "remoting", "sync") as (cluster, names),
        contextlib.closing(JavaClient(java, names)) as client,
    ):
        pids = server_pids(cluster)
        client.load("threads", seconds)
        for _ in in_turn(what="own"):
            before_s = sum(map(cpu_s, pids))
            found = client.load("threads", seconds)
            spent_s = sum(map(cpu_s, pids)) - before_s
            rounds.note("door_msg_s", found["threads_msg_s"])
            rounds.note("door_server_us", 1e6 * spent_s / found["sends"])

            before_s = sum(map(cpu_s, pids))
            count = int(found["sends"] / 64)
            own = sent(cluster, count, topic="one", queues=QUEUES, workers=64)
            spent_s = sum(map(cpu_s, pids)) - before_s
            rounds.note("own_msg_s", own.rate)
            rounds.note("own_server_us", 1e6 * spent_s / (64 * count))


# --- idle and hostile -----------------------------------------------------------------------------


def measure_idle(options: argparse.Namespace, rounds: Rounds) -> None:
    """The server without requests."""
    seconds = 10.0 if options.quick else 30.0
    with raymq_server(options.directory, "remoting", "sync") as (cluster, names):
        pid = door_pid(cluster)
        time.sleep(5)
        before_s = cpu_s(pid)
        time.sleep(seconds)
        rounds.note("idle_percent", 100 * (cpu_s(pid) - before_s) / seconds)
        before_mb = rounds.note("idle_MB", memory_mb(pid))
        with contextlib.ExitStack() as stack:
            for _ in range(IDLE_CONNECTIONS):
                stack.enter_context(connected(names))
            time.sleep(2)
            rounds.note("connections_MB", max(0.0, memory_mb(pid) - before_mb))


def measure_hostile(options: argparse.Namespace, rounds: Rounds) -> None:
    """Puts of RayMQ's own client beside a server that gets garbage, and what that server takes."""
    count = 500 if options.quick else 2_000
    with raymq_server(options.directory, "remoting", "sync") as (cluster, names):
        pid = door_pid(cluster)
        put_p50_ms(cluster, count)
        for _ in in_turn(6, what="hostile"):
            rounds.note("quiet_put_ms", put_p50_ms(cluster, count))
            with flooded(names):
                rounds.note("flooded_put_ms", put_p50_ms(cluster, count))
        with contextlib.ExitStack() as stack:
            head = (HOSTILE_BYTES).to_bytes(4, "big")
            for _ in range(HOSTILE):
                hostile = stack.enter_context(connected(names))
                threading.Thread(target=send_all, args=(hostile, head), daemon=True).start()
            time.sleep(5)
            rounds.note("hostile_MB", memory_mb(pid))


def put_p50_ms(cluster: raymq.Cluster, count: int) -> float:
    """One put at a time."""
    times = []
    with cluster.producer() as producer:
        for _ in range(count):
            began_s = time.perf_counter()
            producer.send("one", b"x" * 1024).result(30)
            times.append(1000 * (time.perf_counter() - began_s))
    return statistics.median(times)


def connected(names: str) -> socket.socket:
    """A connection to the server."""
    host, _, port = names.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=10)


def send_all(hostile: socket.socket, head: bytes) -> None:
    """The head of a frame, and bytes for it as long as the server takes them."""
    with contextlib.suppress(OSError):
        hostile.sendall(head)
        for _ in range(HOSTILE_BYTES >> 16):
            hostile.sendall(bytes(1 << 16))


@contextlib.contextmanager
def flooded(names: str) -> Iterator[None]:
    """A thread that connects and sends garbage, 200 times a second, and leaves connections open."""
    over = threading.Event()

    def flood() -> None:
        held: list[socket.socket] = []
        while not over.wait(0.005):
            with contextlib.suppress(OSError):
                made = connected(names)
                made.sendall(os.urandom(64))
                held.append(made)
            if len(held) > 500:
                held.pop(0).close()
        for each in held:
            each.close()

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


# --- the whole ------------------------------------------------------------------------------------

_MEASURES = {
    "client": measure_client,
    "own": measure_own,
    "idle": measure_idle,
    "hostile": measure_hostile,
}


def measure(options: argparse.Namespace, rounds: Rounds) -> None:
    """All parts that are wanted."""
    for part in options.only:
        tell(part)
        _MEASURES[part](options, rounds)


# why some floors are below those of a broker: docs/decisions/0039-the-cost-of-the-remoting-server.md
ROWS = [
    Row("one message, p50", "raymq_one_p50_ms", "broker_one_p50_ms", "RocketMQ", at_most(1.8)),
    Row("64 threads", "raymq_threads_msg_s", "broker_threads_msg_s", "RocketMQ", at_least(0.8)),
    Row("  CPU of the servers", "raymq_server_us", "broker_server_us", "RocketMQ", at_most(1.5)),
    Row("batches of 32", "raymq_batches_msg_s", "broker_batches_msg_s", "RocketMQ", at_least(0.65)),
    Row(
        "sends that do not wait, no sync",
        "raymq_async_msg_s",
        "broker_async_msg_s",
        "RocketMQ",
        at_least(0.2),
    ),
    Row(
        "a backlog that is read", "raymq_read_msg_s", "broker_read_msg_s", "RocketMQ", at_least(0.6)
    ),
    Row(
        "2,000 msg/s until a listener has them, p50",
        "raymq_loop_p50_ms",
        "broker_loop_p50_ms",
        "RocketMQ",
        at_most(3.5),
    ),
    Row("  p99", "raymq_loop_p99_ms", "broker_loop_p99_ms", "RocketMQ", at_most(6)),
    Row("64 threads of Java", "door_msg_s", "own_msg_s", "RayMQ's client", at_least(0.3)),
    Row("  CPU of the servers", "door_server_us", "own_server_us", "RayMQ's client", at_most(5)),
    Row("idle server: CPU of a core", "idle_percent", floor=at_most(1)),
    Row("  memory", "idle_MB", floor=at_most(90)),
    Row("  1,000 idle connections", "connections_MB", floor=at_most(40)),
    Row("a put beside a flood of garbage", "flooded_put_ms", "quiet_put_ms", "quiet", at_most(1.2)),
    Row("10 frames without an end: memory", "hostile_MB", floor=at_most(400)),
]

if __name__ == "__main__":
    run(__doc__, measure, ROWS, parts=PARTS)
