"""Jobs that outlive their worker: one is killed in the middle of a job, and another one does it.

    python examples/workers.py [DATA_DIR]

Each worker is a Ray task. It leases a job, does it, sends the result and acknowledges the job. The job that a worker
has when it dies comes to another one when its lease is over, and says that this is the second attempt. No program has
to search for it.
"""

from __future__ import annotations

import json
import os
import signal
import sys

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
            # Acknowledged at the end of the block, and given back at an exception.
            with job:
                if job.body == dies_in and job.attempts == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                number = int(job.body)
                result = {"job": number, "square": number * number, "attempts": job.attempts}
                producer.send("results", json.dumps(result).encode()).result(timeout=30)


def take_results(cluster: raymq.Cluster) -> dict[int, dict[str, int]]:
    """The result of each job. One that was done twice has two equal ones."""
    found: dict[int, dict[str, int]] = {}
    (queue,) = cluster.describe_topic("results")["queues"]
    with cluster.consumer("results", start="earliest") as consumer:
        while consumer.position(0) < queue["max_offset"]:
            for message in consumer.poll(timeout=10):
                result = json.loads(message.body)
                found[result["job"]] = result
    return found


def main() -> None:
    """Send the jobs, let workers do them while one is killed, and compare the results."""
    with raymq.start(sys.argv[1] if len(sys.argv) > 1 else "raymq-jobs") as cluster:
        ray.init(cluster.ray_address, ignore_reinit_error=True, log_to_driver=False)
        cluster.create_topic("jobs", queues=4)
        cluster.create_topic("results", queues=1)
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

    good = {number: found["square"] for number, found in results.items()}
    again = results[JOBS // 2]["attempts"]
    print(json.dumps({"jobs": JOBS, "done": len(good), "died": died, "attempts": again}))
    if good != {number: number * number for number in range(JOBS)}:
        sys.exit(1)


if __name__ == "__main__":
    main()
