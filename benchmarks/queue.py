"""How fast is the durable Queue, compared with `ray.util.queue.Queue`?

`python -m benchmarks.queue [--quick] [--check] [--json FILE]`

Both run in the same Ray, one after the other in each of three rounds. A ratio is the median of the rounds' ratios.
Items are bytes of 1 KiB. Ours are synced to disk: each before its `put` returns, or with `linger_ms=5` by the end of
the measured time, which includes the flush. As in benchmarks.put, a burst finds pre-written blocks.

The floor of lingering batches is twice the original's rate. It is for batches that fit the original's actor calls
badly. The original moves a batch of 5,000 through memory in about 10 ms, at half a GB/s and 2 us of CPU an item. Twice
that, on disk, is more than two cores can do.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import ray
from ray.util.queue import Queue as RayQueue

import raymq
from benchmarks.floors import at_least
from benchmarks.limits import await_prewritten, call_ms, started
from benchmarks.rounds import Rounds, Row, in_turn, run

#: different objects: of equal ones pickle would send one
ITEMS = [os.urandom(1024) for _ in range(5000)]
SIZES = (100, 1_000, len(ITEMS))


def put(queue: Any, count: int, size: int = 0) -> None:
    """Items, or batches of a size, one after the other; they are synced at the end."""
    for _ in range(count):
        if size:
            queue.put_nowait_batch(ITEMS[:size])
        else:
            queue.put(ITEMS[0])
    if isinstance(queue, raymq.Queue):
        queue.flush()


def get(queue: Any, count: int, size: int = 0) -> None:
    """Items, or batches of a size, one after the other."""
    for _ in range(count):
        if size:
            queue.get_nowait_batch(size)
        else:
            queue.get()


def drain(queue: Any) -> None:
    """Take all there is."""
    queue.get_nowait_batch(queue.qsize())


def measure_round(
    cluster: raymq.Cluster, ours: Any, lingering: Any, theirs: Any, rounds: Rounds, scale: int
) -> None:
    """One round: each figure of ours right after the original's."""
    one = 250 * scale

    def note(name: str, queue: Any, items: int, work: Callable[..., object], *words: int) -> None:
        prefix = "" if isinstance(queue, raymq.Queue) else "ray_"
        ms = call_ms(partial(work, queue, *words), 1)
        rounds.note(f"{prefix}{name}_items_s", 1000 * items / ms)

    for queue in (theirs, ours):
        note("put", queue, one, put, one)
        note("get", queue, one, get, one)
    note("put_linger", lingering, 80 * one, put, 80 * one)
    drain(lingering)

    for size, count in zip(SIZES, (one // 5, one // 10, 4 * scale), strict=True):
        for queue in (theirs, ours):
            # Zeros that are written after one burst would slow the other one down.
            await_prewritten(cluster)
            note(f"put_batch_{size}", queue, count * size, put, count, size)
            note(f"get_batch_{size}", queue, count * size, get, count, size)
        # Enough that the last flush does not decide.
        many = max(count, 80_000 * scale // size)
        await_prewritten(cluster)
        note(f"put_batch_linger_{size}", lingering, many * size, put, many, size)
        drain(lingering)


def measure(options: argparse.Namespace, rounds: Rounds) -> None:
    """All rounds."""
    scale = 1 if options.quick else 4
    with started(options.directory, "queue") as cluster, ExitStack() as cleanup:
        # Ray must not end before this process has left it.
        cleanup.callback(ray.shutdown)
        ours = raymq.Queue("bench", cluster=cluster, codec="bytes")
        lingering = raymq.Queue("bench", cluster=cluster, codec="bytes", linger_ms=5)
        theirs = RayQueue(actor_options={"num_cpus": 0})
        for queue in (ours, lingering, theirs):
            put(queue, 10)
            drain(queue)
        # The window of pre-written blocks grows to the need of bursts.
        for _ in range(3):
            await_prewritten(cluster)
            put(lingering, 40 * scale, 1000)
            drain(lingering)

        for _ in in_turn():
            measure_round(cluster, ours, lingering, theirs, rounds, scale)
        ours.shutdown()
        theirs.shutdown()


RAY = "ray.util.queue"
ROWS = [
    Row("put, one at a time", "put_items_s", "ray_put_items_s", RAY),
    Row("put with linger", "put_linger_items_s", "ray_put_items_s", RAY, at_least(5)),
    Row("get, one at a time", "get_items_s", "ray_get_items_s", RAY, at_least(0.6)),
]
for size in SIZES:
    puts, gets, linger = (
        f"{what}_{size}_items_s" for what in ("put_batch", "get_batch", "put_batch_linger")
    )
    # The largest batches are beyond the limit of this machine's disk.
    twice, most = (at_least(2), at_least(0.7)) if size != SIZES[-1] else (None, None)
    ROWS += [
        Row(f"put_nowait_batch of {size:,}", puts, f"ray_{puts}", RAY),
        Row(f"put_nowait_batch of {size:,} with linger", linger, f"ray_{puts}", RAY, twice),
        Row(f"get_nowait_batch of {size:,}", gets, f"ray_{gets}", RAY, most),
    ]

if __name__ == "__main__":
    run(__doc__, measure, ROWS)
