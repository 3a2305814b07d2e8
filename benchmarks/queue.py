"""How fast is the durable Queue, compared with `ray.util.queue.Queue`?

`python -m benchmarks.queue [--quick] [--check] [--json FILE]`

Both run in the same Ray, one after the other in each of three rounds. A ratio is the median of the rounds' ratios.
Items are bytes of 1 KiB. Ours are synced to disk: each before its `put` returns, or with `linger_ms=5` by the end of
the measured time, which includes the flush. As in benchmarks.put, a burst finds pre-written blocks.

The floor of lingering batches is twice the original's rate. It is for batches that fit the original's actor calls
badly. The original moves a batch of 5,000 through memory in about 10 ms, at half a GB/s and 2 us of CPU an item. Twice
that, on disk, is more than two cores can do. "as Arrow, by a Producer" shows that limit: the same batches without
Python objects.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
from ray.util.queue import Queue as RayQueue

import raymq
from benchmarks import floors
from benchmarks.floors import Floor, Line, at_least
from benchmarks.put import ROUNDS, Rounds, await_prewritten

ITEM = b"x" * 1024
#: different objects: of equal ones pickle would send one
ITEMS = [os.urandom(1024) for _ in range(5000)]
SIZES = (100, 1_000, len(ITEMS))
#: of each size; larger batches are beyond the limit of this machine's disk
LINGER_FLOOR = {100: at_least(2), 1_000: at_least(2)}
TASKS = 4
THREADS = 16

#: (name, figure, of which figure, floor)
ROWS: list[tuple[str, str, str, Floor | None]] = [
    ("put, one at a time", "put", "ray_put", None),
    ("put with linger", "put_linger", "ray_put", at_least(5)),
    (f"put, {THREADS} threads", "put_threads", "ray_put_threads", None),
    (f"put, {TASKS} tasks", "put_tasks", "ray_put_tasks", None),
    ("get, one at a time", "get", "ray_get", at_least(0.6)),
    # The limit of a get: that the item was given to a worker is one synced record.
    ("get beside a put", "get", "put", None),
    *(
        (f"{what} of {size:,}", f"{name}_{size}", f"ray_{of}_{size}", floor)
        for size in SIZES
        for what, name, of, floor in (
            ("put_nowait_batch", "put_batch", "put_batch", None),
            (
                "put_nowait_batch with linger",
                "put_batch_linger",
                "put_batch",
                LINGER_FLOOR.get(size),
            ),
            ("as Arrow, by a Producer", "arrow", "put_batch", None),
            (
                "get_nowait_batch",
                "get_batch",
                "get_batch",
                at_least(0.7) if size < len(ITEMS) else None,
            ),
            ("each put, then got", "both", "both", None),
            ("all put with linger, then got", "both_linger", "both", None),
        )
    ),
]


def rate(items: int, work: Callable[[], object]) -> float:
    """Items a second."""
    begin = time.perf_counter()
    work()
    return items / (time.perf_counter() - begin)


def put_many(queue: Any, count: int) -> None:
    """One after the other."""
    for _ in range(count):
        queue.put(ITEM)
    if isinstance(queue, raymq.Queue):
        queue.flush()


def put_batches(queue: Any, count: int, size: int) -> None:
    """One after the other."""
    batch = ITEMS[:size]
    for _ in range(count):
        queue.put_nowait_batch(batch)
    if isinstance(queue, raymq.Queue):
        queue.flush()


def get_many(queue: Any, count: int) -> None:
    """One after the other."""
    for _ in range(count):
        queue.get()


def get_batches(queue: Any, count: int, size: int) -> None:
    """One after the other."""
    for _ in range(count):
        queue.get_nowait_batch(size)


def put_and_get(queue: Any, count: int, size: int) -> None:
    """Each batch is got before the next is put."""
    batch = ITEMS[:size]
    for _ in range(count):
        queue.put_nowait_batch(batch)
        queue.get_nowait_batch(size)


def put_all_and_get(queue: Any, count: int, size: int) -> None:
    """A process that puts, then a process that gets."""
    put_batches(queue, count, size)
    get_batches(queue, count, size)


def put_by_threads(queue: Any, count: int) -> None:
    """`count` each."""
    threads = [threading.Thread(target=put_many, args=(queue, count)) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def put_by_tasks(queue: Any, count: int) -> None:
    """`count` each."""
    task = ray.remote(num_cpus=0)(put_many)
    ray.get([task.remote(queue, count) for _ in range(TASKS)])


def drain(queue: Any) -> None:
    """Take all there is."""
    queue.get_nowait_batch(queue.qsize())


def send_arrow(producer: raymq.Producer, count: int, size: int) -> None:
    """The rate at which the log takes these batches from a Producer that has them as columns."""
    batch = pa.record_batch({"body": pa.array(ITEMS[:size], pa.binary())})
    for _ in range(count):
        producer.send_batch("arrow", batch, queue_id=0)
    producer.flush()


def measure(
    cluster: raymq.Cluster,
    producer: raymq.Producer,
    ours: Any,
    lingering: Any,
    theirs: Any,
    rounds: Rounds,
    quick: bool,
) -> None:
    """One round: each figure of ours right after the original's."""
    scale = 1 if quick else 4
    one = 250 * scale

    def note(name: str, queue: Any, items: int, work: Callable[[], object]) -> None:
        name = name if isinstance(queue, raymq.Queue) else f"ray_{name}"
        rounds.note(name, rate(items, work))

    for queue in (theirs, ours):
        note("put", queue, one, partial(put_many, queue, one))
        note("get", queue, one, partial(get_many, queue, one))

    many = 20_000 * scale
    note("put_linger", lingering, many, partial(put_many, lingering, many))
    drain(lingering)

    for name, workers, work in (
        ("put_threads", THREADS, put_by_threads),
        ("put_tasks", TASKS, put_by_tasks),
    ):
        for queue in (theirs, ours):
            note(name, queue, workers * one, partial(work, queue, one))
            drain(queue)

    for size, count in zip(SIZES, (one // 5, one // 10, 4 * scale), strict=True):
        items = count * size
        for queue in (theirs, ours):
            # Zeros that are written after one burst would slow the other one down.
            await_prewritten(cluster)
            note(f"put_batch_{size}", queue, items, partial(put_batches, queue, count, size))
            note(f"get_batch_{size}", queue, items, partial(get_batches, queue, count, size))
            note(f"both_{size}", queue, items, partial(put_and_get, queue, count, size))
        work = partial(put_all_and_get, lingering, count, size)
        note(f"both_linger_{size}", lingering, items, work)

        # Enough that the last flush does not decide.
        many = max(count, 80_000 * scale // size)
        for name, work in (
            ("put_batch_linger", partial(put_batches, lingering, many, size)),
            ("arrow", partial(send_arrow, producer, many, size)),
        ):
            await_prewritten(cluster)
            note(f"{name}_{size}", lingering, many * size, work)
        drain(lingering)


def run(directory: Path, quick: bool) -> Rounds:
    """All rounds."""
    rounds = Rounds()
    shutil.rmtree(directory, ignore_errors=True)
    with raymq.start(directory, name="bench-queue") as cluster, ExitStack() as cleanup:
        # Ray must not end before this process has left it.
        cleanup.callback(ray.shutdown)
        ours = raymq.Queue("bench", cluster=cluster, codec="bytes")
        lingering = raymq.Queue("bench", cluster=cluster, codec="bytes", linger_ms=5)
        theirs = RayQueue(actor_options={"num_cpus": 0})

        for queue in (ours, lingering, theirs):
            put_by_tasks(queue, 10)
            drain(queue)

        cluster.create_topic("arrow", queues=1)
        producer = cleanup.enter_context(cluster.producer())
        # The window of pre-written blocks grows to the need of bursts.
        for _ in range(3):
            await_prewritten(cluster)
            put_batches(lingering, 40 if quick else 160, 1000)
            drain(lingering)

        for number in range(ROUNDS):
            print(f"  round {number + 1} of {ROUNDS}", file=sys.stderr, flush=True)
            measure(cluster, producer, ours, lingering, theirs, rounds, quick)
        ours.shutdown()
        theirs.shutdown()
    shutil.rmtree(directory, ignore_errors=True)
    return rounds


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="shorter rounds")
    parser.add_argument("--directory", type=Path, default=Path.home() / ".raymq" / "bench")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    floors.options(parser)
    options = parser.parse_args()

    options.directory.mkdir(parents=True, exist_ok=True)
    rounds = run(options.directory / "queue", options.quick)
    if options.json:
        figures = {"cores": os.cpu_count(), "rounds": rounds.all()}
        options.json.write_text(json.dumps(figures, indent=1))

    lines = []
    for what, name, of, floor in ROWS:
        whose = "ray.util.queue" if of.startswith("ray_") else f"our {of}"
        ratio = rounds.ratio(name, of)
        share = f"{ratio:.2f} of {rounds.median(of):,.0f} of {whose}"
        lines.append(Line(what, f"{rounds.median(name):,.0f} items/s", share, floor, ratio))
    sys.exit(floors.report(lines, check=options.check))


if __name__ == "__main__":
    main()
