"""One side of `benchmarks.turns`: a cluster of the tree in PYTHONPATH, which does the bursts that standard input names.

It runs with an older tree, too, so it uses only what users of the first versions had. Its arguments are the directory
in which the cluster's data directory is made, and the number of replicas. Each line of input is a burst's name and its
seconds. Each line of output is a number, messages or batches per second.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa

import raymq

BODY = os.urandom(1024)
QUEUES = 4
#: longest wait for the zeros that a shard writes ahead: a full disk would never have them
PREWRITTEN_S = 30


def burst(
    cluster: Any, producers: int, callers: int, rows: int, in_flight: int, seconds: float
) -> float:
    """Messages or batches per second of threads that each have so many without a receipt, and share the producers."""
    table = pa.table({"body": pa.array([BODY] * rows, pa.binary())})
    done = [0] * callers
    with contextlib.ExitStack() as stack:
        ours = [stack.enter_context(cluster.producer()) for _ in range(producers)]

        def work(number: int) -> None:
            producer = ours[number % producers]
            under_way: deque[Any] = deque()
            turn = number
            while True:
                if len(under_way) < in_flight and time.perf_counter() < stop:
                    if rows == 1:
                        sent = producer.send("t", BODY)
                    else:
                        sent = producer.send_batch("t", table, queue_id=turn % QUEUES)
                    under_way.append(sent if isinstance(sent, list) else [sent])
                    turn += 1
                elif under_way:
                    for future in under_way.popleft():
                        future.result(60)
                    done[number] += 1
                else:
                    return

        begin = time.perf_counter()
        stop = begin + seconds
        with ThreadPoolExecutor(callers) as pool:
            list(pool.map(work, range(callers)))
        return sum(done) / (time.perf_counter() - begin)


def polled(cluster: Any, seconds: float) -> float:
    """Messages per second of a thread that sends one and polls until it has it."""
    with cluster.producer() as producer, cluster.consumer("polled", start="earliest") as consumer:
        producer.send("polled", BODY).result(60)
        while consumer.poll_batch(timeout=0.2).num_rows:
            pass  # what the bursts before have sent
        count, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < seconds:
            producer.send("polled", BODY)
            count += consumer.poll_batch(timeout=60).num_rows
        return count / (time.perf_counter() - begin)


def read(cluster: Any, seconds: float) -> float:
    """Messages per second of a consumer that reads what the bursts have sent, from the first on."""
    count, begin = 0, time.perf_counter()
    stop = begin + seconds
    while time.perf_counter() < stop:
        with cluster.consumer("t", start="earliest") as consumer:
            while time.perf_counter() < stop and (rows := consumer.poll_batch().num_rows):
                count += rows
    return count / (time.perf_counter() - begin)


#: producers, callers, rows of each send, sends without a receipt
BURSTS = {
    "one_thread": (1, 1, 1, 1),
    "64_threads": (1, 64, 1, 1),
    "16_producers": (16, 16, 1, 1),
    "batches_of_20": (1, 1, 20, 16),
    "batches_of_900": (1, 1, 900, 16),
}


def await_prewritten(cluster: Any) -> None:
    """Wait until the shard writes no zeros ahead any more, so that the next burst, of either side, has the disk."""
    last, ready, stop = -1, 0, time.monotonic() + PREWRITTEN_S
    while ready != last and time.monotonic() < stop:
        time.sleep(0.5)
        last, ready = ready, cluster.status()["shards"][0]["prewritten_bytes"]


def main() -> None:
    """Serve the bursts."""
    with (
        tempfile.TemporaryDirectory(dir=sys.argv[1]) as directory,
        raymq.start(
            f"{directory}/data", shards=1, replicas=int(sys.argv[2]), ephemeral=True
        ) as cluster,
    ):
        cluster.create_topic("t", queues=QUEUES)
        cluster.create_topic("polled", queues=1)
        print(raymq.__file__, flush=True)
        for line in sys.stdin:
            name, seconds = line.split()
            if name in BURSTS:
                rate = burst(cluster, *BURSTS[name], float(seconds))
            else:
                rate = {"polled": polled, "read": read}[name](cluster, float(seconds))
            await_prewritten(cluster)
            print(rate, flush=True)


if __name__ == "__main__":
    main()
