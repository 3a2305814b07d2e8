"""Jobs through a durable queue: a worker is killed during a job, and the queue's coordinator too, but no job is lost.

    python examples/durable_queue.py [DATA_DIR]

`ray.util.queue.Queue` holds its items in the memory of one actor: they are gone when that actor, its node or its
creator ends. `raymq.Queue` has the same methods, and its items are messages of a topic. Here the coordinator is killed
while all jobs are in the queue, and Ray starts a successor that continues. In both queues an item that a worker has
taken is gone from the queue when the worker dies. But the topic still has it, so lost jobs are found and put again.
"""

from __future__ import annotations

import json
import os
import signal
import sys

import ray
from ray.util.queue import Empty

import raymq

JOBS, MAKERS, WORKERS = 400, 2, 3


@ray.remote(num_cpus=0.2, max_retries=0)
def make_jobs(jobs: raymq.Queue, maker: int) -> None:
    """Put a share of the jobs. Each batch is on disk when its put returns."""
    numbers = list(range(maker, JOBS, MAKERS))
    for start in range(0, len(numbers), 50):
        jobs.put_nowait_batch(numbers[start : start + 50])


@ray.remote(num_cpus=0.2, max_retries=0)
def work(jobs: raymq.Queue, done: raymq.Queue, *, dies_in: int = -1) -> None:
    """Do jobs until none arrives for 3 s, or die in job `dies_in`."""
    while True:
        try:
            job = jobs.get(timeout=3)
        except Empty:
            return
        if job == dies_in:
            os.kill(os.getpid(), signal.SIGKILL)
        done.put([job, job * job])


def take_results(done: raymq.Queue) -> dict[int, int]:
    """Take everything out of a queue to which no process puts."""
    return dict(done.get_nowait_batch(done.qsize()))


def ever_put(cluster: raymq.Cluster, topic: str) -> set[int]:
    """Every item that was ever put, whether taken or not."""
    found: set[int] = set()
    with cluster.consumer(topic, start="earliest") as consumer:
        end = cluster.describe_topic(topic)["queues"][0]["max_offset"]
        while consumer.position(0) < end:
            found |= {message.value for message in consumer.poll(timeout=10)}
    return found


def main() -> None:
    """Put the jobs, kill the coordinator and a worker, find the missing jobs, do them."""
    with raymq.start(sys.argv[1] if len(sys.argv) > 1 else "raymq-jobs") as cluster:
        ray.init(cluster.ray_address, ignore_reinit_error=True, log_to_driver=False)
        jobs, done = (raymq.Queue(name, cluster=cluster) for name in ("jobs", "done"))
        ray.get([make_jobs.remote(jobs, maker) for maker in range(MAKERS)])

        # All jobs are in the queue, and the process that assigns them dies.
        os.kill(ray.get(jobs.actor.describe.remote())["pid"], signal.SIGKILL)
        # The one worker that takes this job dies.
        workers = [work.remote(jobs, done, dies_in=JOBS // 2) for _ in range(WORKERS)]

        died = 0
        for worker in workers:
            try:
                ray.get(worker)
            except ray.exceptions.WorkerCrashedError:
                died += 1

        results = take_results(done)
        again = sorted(ever_put(cluster, "jobs") - set(results))
        jobs.put_nowait_batch(again)
        ray.get(work.remote(jobs, done))
        results |= take_results(done)
        good = results == {job: job * job for job in range(JOBS)} and jobs.empty()
        ray.shutdown()

    print(json.dumps({"jobs": JOBS, "done": len(results), "died": died, "again": len(again)}))
    if not good:
        sys.exit(1)


if __name__ == "__main__":
    main()
