"""One side of `benchmarks.turns`: a cluster of the tree in PYTHONPATH, which does the bursts that standard input names.

It runs with an older tree, too, so it uses only what users of the first versions had. Each line of input is a burst's
name and its seconds. Each line of output is a number, messages or batches per second.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import pyarrow as pa

import raymq

BODY = os.urandom(1024)
QUEUES = 4
#: batches without a receipt
UNDER_WAY = 16
#: longest wait for the zeros that a shard writes ahead: a full disk would never have them
PREWRITTEN_S = 30


def waiting_threads(cluster: Any, count: int, seconds: float) -> float:
    """Messages per second of threads that wait for each receipt."""
    stop = time.perf_counter() + seconds
    sent = [0] * count
    with cluster.producer() as producer:

        def work(number: int) -> None:
            while time.perf_counter() < stop:
                producer.send("t", BODY).result(60)
                sent[number] += 1

        threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(sent) / (time.perf_counter() - begin)


def batches(cluster: Any, rows: int, seconds: float) -> float:
    """Batches per second, of which UNDER_WAY wait for their receipts."""
    table = pa.table({"body": pa.array([BODY] * rows, pa.binary())})
    under_way: deque[Any] = deque()
    count = 0
    with cluster.producer() as producer:
        begin = time.perf_counter()
        while time.perf_counter() < begin + seconds or under_way:
            if time.perf_counter() < begin + seconds and len(under_way) < UNDER_WAY:
                under_way.append(producer.send_batch("t", table, queue_id=count % QUEUES))
                count += 1
            else:
                futures = under_way.popleft()
                for future in futures if isinstance(futures, list) else [futures]:
                    future.result(60)
        return count / (time.perf_counter() - begin)


BURSTS: dict[str, Callable[[Any, float], float]] = {
    "one_thread": lambda cluster, seconds: waiting_threads(cluster, 1, seconds),
    "64_threads": lambda cluster, seconds: waiting_threads(cluster, 64, seconds),
    "batches_of_20": lambda cluster, seconds: batches(cluster, 20, seconds),
    "batches_of_900": lambda cluster, seconds: batches(cluster, 900, seconds),
}


def await_prewritten(cluster: Any) -> None:
    """Wait until the shard writes no zeros ahead any more, so that the next burst, of either side, has the disk."""
    last, ready, stop = -1, 0, time.monotonic() + PREWRITTEN_S
    while ready != last and time.monotonic() < stop:
        time.sleep(1)
        last, ready = ready, cluster.status()["shards"][0]["prewritten_bytes"]


def main() -> None:
    """Serve the bursts. Argument: the directory in which the cluster's data directory is made."""
    with tempfile.TemporaryDirectory(dir=sys.argv[1]) as directory:
        cluster = raymq.start(f"{directory}/data", shards=1, ephemeral=True)
        try:
            cluster.create_topic("t", queues=QUEUES)
            print(raymq.__file__, flush=True)
            for line in sys.stdin:
                name, seconds = line.split()
                rate = BURSTS[name](cluster, float(seconds))
                await_prewritten(cluster)
                print(rate, flush=True)
        finally:
            cluster.stop()


if __name__ == "__main__":
    main()
