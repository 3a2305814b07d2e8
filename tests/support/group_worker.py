"""A program that reads as a member of a group, in a process of its own, and writes down what it saw.

    python -m tests.support.group_worker URL TOPIC GROUP FILE SESSION_TIMEOUT_S

Each line of FILE is flushed: `read QUEUE OFFSET NUMBER` for a message and the number under which its queue was owned,
`committed QUEUE OFFSET NUMBER` for an offset whose commit was acknowledged, `owns QUEUES` when its queues have changed,
and `fenced` and `failed` for errors.
"""

from __future__ import annotations

import sys
from typing import Any

import raymq
from raymq.store.base.errors import Fenced, RayMQError


def main() -> None:
    url, topic, group, path, session_s = sys.argv[1:]
    options: dict[str, Any] = {"start": "earliest", "session_timeout_s": float(session_s)}
    with (
        open(path, "a", buffering=1) as lines,
        raymq.connect(url) as cluster,
        cluster.consumer(topic, group=group, **options) as consumer,
    ):
        shown = None
        while True:
            try:
                messages = consumer.poll(200, 0.5)
                owned = {
                    queue_id: number for (_, queue_id), number in consumer.assignment().items()
                }
                if sorted(owned) != shown:
                    shown = sorted(owned)
                    print("owns", *shown, file=lines)
                for message in messages:
                    number = owned.get(message.queue_id, 0)
                    print("read", message.queue_id, message.offset, number, file=lines)
                if messages:
                    positions = consumer.positions()
                    consumer.commit(positions)
                    for queue_id, offset in positions.items():
                        print("committed", queue_id, offset, owned.get(queue_id, 0), file=lines)
            except Fenced as error:
                print("fenced", error, file=lines)
            except RayMQError as error:
                if not error.retriable:
                    raise
                print("failed", error, file=lines)


main()
