"""Results that match their jobs, although a worker is killed between the work and the answer.

    python examples/transactions.py [DATA_DIR]

Each worker is a Ray task. It leases a job, and commits the result and the acknowledgement of the job as one
transaction. One worker is killed after its work, before the commit: no result of it exists, and another worker does
the job. So each job has one result, and no program has to search for a second one.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter

import ray

import raymq

JOBS, WORKERS = 200, 3
#: seconds after which the job of a worker that died comes to another one. As a rule a minute
LEASE_S = 3.0


@ray.remote(num_cpus=0.2, max_retries=0)
def work(cluster: raymq.Cluster, *, dies_in: bytes) -> None:
    """Do jobs until none comes for longer than a lease. Die in the first attempt of one of them."""
    with (
        cluster.producer() as producer,
        cluster.workers("jobs", group="squares", lease_s=LEASE_S) as workers,
    ):
        while (job := workers.get(timeout=3 * LEASE_S)) is not None:
            # The job is given back at an exception.
            with job, producer.transaction() as txn:
                number = int(job.body)
                # Without a key it goes to a queue of the shard that has the job.
                txn.send("results", b"%d %d" % (number, number * number))
                txn.ack(job)
                if job.body == dies_in and job.attempts == 1:
                    os.kill(os.getpid(), signal.SIGKILL)


def take_results(cluster: raymq.Cluster) -> list[tuple[int, int]]:
    """All results, in any order."""
    found: list[tuple[int, int]] = []
    count = sum(queue["max_offset"] for queue in cluster.describe_topic("results")["queues"])
    with cluster.consumer("results", start="earliest") as consumer:
        while len(found) < count:
            for message in consumer.poll(timeout=10):
                number, square = message.body.split()
                found.append((int(number), int(square)))
    return found


def main() -> None:
    """Send the jobs, let workers do them while one is killed, and count the results."""
    with raymq.start(sys.argv[1] if len(sys.argv) > 1 else "raymq-squares", shards=2) as cluster:
        ray.init(cluster.ray_address, ignore_reinit_error=True, log_to_driver=False)
        cluster.create_topic("jobs", queues=4)
        cluster.create_topic("results", queues=4)
        with cluster.producer() as producer:
            for number in range(JOBS):
                producer.send("jobs", b"%d" % number)

        workers = [work.remote(cluster, dies_in=b"%d" % (JOBS // 2)) for _ in range(WORKERS)]
        died = 0
        for worker in workers:
            try:
                ray.get(worker)
            except ray.exceptions.WorkerCrashedError:
                died += 1

        results = take_results(cluster)
        ray.shutdown()

    twice = sum(count > 1 for count in Counter(results).values())
    print(json.dumps({"jobs": JOBS, "results": len(results), "twice": twice, "died": died}))
    if sorted(results) != [(number, number * number) for number in range(JOBS)]:
        sys.exit(1)


if __name__ == "__main__":
    main()
