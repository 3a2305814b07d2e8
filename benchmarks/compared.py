"""What `benchmarks.compare` asks of every system: loads of the same messages, timed by the same code."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from benchmarks.limits import BODY
from raymq.cluster.bench.histogram import Histogram

MESSAGE = bytes(range(256)) * (BODY // 256)
WAITING = 64
#: topics or streams: of callers that wait, and of the producer that does not
ONE, BACKLOG = "one", "backlog"
#: a consumer asks for so many messages at a time, and a pipeline has so many
BATCH_ROWS = 500

#: messages a second, and their times
Found = tuple[float, Histogram]


class Loads(NamedTuple):
    """How long each load runs."""

    seconds: float
    #: before them, so that Java compiles and buffers are made
    warm_up_s: float
    #: messages of the backlog that a consumer reads, at most
    read_most: int


@dataclass
class Client:
    """How one system is driven. A load that it lacks is left out."""

    #: (callers, seconds): threads that each wait for the acknowledgement of a message, then send the next one
    threads: Callable[[int, float], Found] | None = None
    #: the same, by tasks of asyncio
    tasks: Callable[[int, float], Found] | None = None
    #: figure -> sends to BACKLOG for so many seconds. Returns: messages, all acknowledged; messages a second
    producers: dict[str, Callable[[float], tuple[int, float]]] = field(default_factory=dict)
    #: figure -> reads so many messages from the first one on. Returns: messages a second
    readers: dict[str, Callable[[int], float]] = field(default_factory=dict)


def figures(client: Client, loads: Loads) -> dict[str, float]:
    """All figures of a system whose server has just started."""
    waiting = {"threads": client.threads, "tasks": client.tasks}
    for call in filter(None, waiting.values()):
        call(WAITING, loads.warm_up_s / 2)
    stored = sum(produce(loads.warm_up_s / 2)[0] for produce in client.producers.values())

    found: dict[str, float] = {}
    if one := client.threads or client.tasks:
        found["one_msg_s"], latency = one(1, loads.seconds)
        found["one_p50_ms"] = latency.percentile(50) / 1000
    for name, call in waiting.items():
        if call is not None:
            found[f"{name}_msg_s"] = call(WAITING, loads.seconds)[0]

    for name, produce in client.producers.items():
        count, found[name] = produce(loads.seconds)
        stored += count
    for name, read in client.readers.items():
        found[name] = read(min(stored, loads.read_most))
    return found


def threads(caller: Callable[[], Callable[[], object]], count: int, seconds: float) -> Found:
    """So many threads. Each gets a call of its own, which sends a message and waits until it is acknowledged."""
    times_us: list[list[float]] = [[] for _ in range(count)]
    ready = threading.Barrier(count + 1)

    def work(number: int) -> None:
        send = caller()
        # It opens the connection.
        send()
        ready.wait()
        begin = now = time.perf_counter()
        while now - begin < seconds:
            send()
            before, now = now, time.perf_counter()
            times_us[number].append(1e6 * (now - before))

    workers = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for each in workers:
        each.start()
    ready.wait()
    begin = time.perf_counter()
    for each in workers:
        each.join()

    rate, latency = sum(map(len, times_us)) / (time.perf_counter() - begin), Histogram()
    for some in times_us:
        latency.record(some)
    return rate, latency


def produced(
    send: Callable[[], int], flush: Callable[[], object], seconds: float
) -> tuple[int, float]:
    """Send for so long, and wait for what is not acknowledged then. `send` returns how many messages it sent.

    Returns: messages; messages a second.
    """
    # They open the connection.
    count = first = send()
    flush()
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        count += send()
    flush()
    return count, (count - first) / (time.perf_counter() - begin)


def read(poll: Callable[[], int], messages: int) -> float:
    """Messages a second of a consumer whose `poll` returns how many it got."""
    # The first answer opens the connection.
    got = first = poll()
    begin = time.perf_counter()
    while got < messages:
        got += poll()
    return (got - first) / (time.perf_counter() - begin)
