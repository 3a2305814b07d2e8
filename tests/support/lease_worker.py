"""A program that works on messages of a group, in a process of its own, and writes down what it did.

    python -m tests.support.lease_worker URL TOPIC GROUP FILE LEASE_S WORK_S

Each line of FILE is flushed: `got QUEUE OFFSET ATTEMPTS` for a message, `acked QUEUE OFFSET ATTEMPTS` when its
settlement was answered, `fenced QUEUE OFFSET ATTEMPTS` when its lease was lost, and `failed` for other errors. The work
on a message takes WORK_S.
"""

from __future__ import annotations

import sys
import threading

import raymq
from raymq.store.base.errors import Fenced, RayMQError


def main() -> None:
    url, topic, group, path, lease_s, work_s = sys.argv[1:]
    with (
        open(path, "a", buffering=1) as lines,
        raymq.connect(url) as cluster,
        cluster.workers(topic, group=group, lease_s=float(lease_s), backoff=(0,)) as workers,
    ):
        while True:
            try:
                message = workers.get(1.0)
                if message is None:
                    continue
                place = message.queue_id, message.offset, message.attempts
                print("got", *place, file=lines)
                threading.Event().wait(float(work_s))
                try:
                    message.ack()
                    print("acked", *place, file=lines)
                except Fenced:
                    print("fenced", *place, file=lines)
            except RayMQError as error:
                if not error.retriable:
                    raise
                print("failed", error, file=lines)


main()
