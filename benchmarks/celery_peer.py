"""Celery on Redis as a peer of workers: tasks that do nothing, acknowledged when they are done.

Redis syncs each write before it answers, as a shard of RayMQ does. The worker has a pool of threads, as the program of
RayMQ has, and takes one task ahead for each.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
from pathlib import Path

from benchmarks import redis_peer

#: for all tasks
TIMEOUT_S = 120.0
#: arguments: port, tasks, threads. It prints the tasks a second from the first one to the last one, once all are done
WORKER = """
import os, sys, threading, time
from celery import Celery

port, count, threads = map(int, sys.argv[1:])
app = Celery("peer", broker=f"redis://127.0.0.1:{port}/0")
app.conf.update(
    task_acks_late=True,
    task_ignore_result=True,
    worker_prefetch_multiplier=1,
    worker_redirect_stdouts=False,
    broker_connection_retry_on_startup=True,
)
lock, done, began_s = threading.Lock(), 0, 0.0


@app.task(name="do")
def do(body):
    global done, began_s
    with lock:
        began_s = began_s or time.perf_counter()
        done += 1
        if done == count:
            print(count / (time.perf_counter() - began_s), flush=True)


if threads:
    app.worker_main(["worker", "-P", "threads", "-c", str(threads), "--loglevel", "error",
                     "--without-gossip", "--without-mingle", "--without-heartbeat"])
else:
    body = "x" * 100
    with app.producer_pool.acquire(block=True) as producer:
        for _ in range(count):
            do.apply_async((body,), producer=producer)
"""


def is_installed() -> bool:
    """Whether Redis and Celery are there."""
    return redis_peer.has_python_client() and importlib.util.find_spec("celery") is not None


def rate(directory: Path, count: int, threads: int) -> float:
    """Tasks a second that a worker with so many threads does."""
    with redis_peer.server(directory):
        words = [sys.executable, "-c", WORKER, str(redis_peer.PORT), str(count)]
        subprocess.run([*words, "0"], check=True)
        worker = subprocess.Popen(
            [*words, str(threads)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        # A worker that hangs would keep the benchmark for ever.
        alarm = threading.Timer(TIMEOUT_S, worker.kill)
        alarm.start()
        try:
            output = worker.stdout
            lines = iter(output.readline, "") if output is not None else iter(())
            for line in lines:
                # Before it the worker prints its banner.
                if line.strip().replace(".", "", 1).isdigit():
                    return float(line)
        finally:
            alarm.cancel()
            worker.kill()
            worker.wait()
    raise ValueError("Celery's worker ended before its tasks")
