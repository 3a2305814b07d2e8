"""A program that works on messages of which some are poison, in a process of its own.

    python -m tests.support.poison_worker URL TOPIC GROUP FILE

It holds one message at a time. The body says what becomes of it: `raise` and the handler raises, `die` and the process
dies, `hang` and the handler never returns; any other is acknowledged. FILE gets `hangs` before the handler hangs.
"""

from __future__ import annotations

import os
import sys
import threading

import raymq
from raymq.store.base.errors import RayMQError

#: a handler that hangs loses its message after `MAX_LEASE_S`
LEASE_S, MAX_LEASE_S = 1.0, 2.0
MAX_ATTEMPTS = 3


def handle(body: bytes, path: str) -> None:
    if body == b"raise":
        raise ValueError("poison")
    if body == b"die":
        os._exit(1)
    if body == b"hang":
        with open(path, "a") as lines:
            print("hangs", file=lines)
        threading.Event().wait()


def main() -> None:
    url, topic, group, path = sys.argv[1:]
    options = {"lease_s": LEASE_S, "max_lease_s": MAX_LEASE_S, "max_attempts": MAX_ATTEMPTS}
    with (
        raymq.connect(url) as cluster,
        cluster.workers(topic, group=group, prefetch=0, backoff=(0,), **options) as workers,
    ):
        while True:
            try:
                message = workers.get(1.0)
                if message is None:
                    continue
                with message:
                    handle(message.body, path)
            except ValueError:
                continue
            except RayMQError as error:
                if not error.retriable:
                    raise


main()
