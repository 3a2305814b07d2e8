"""A program that leases messages and settles none, in a process of its own, and says when it has enough.

python -m tests.support.hoarding_worker URL TOPIC GROUP COUNT LEASE_S
"""

from __future__ import annotations

import sys
import threading

import raymq


def main() -> None:
    url, topic, group, count, lease_s = sys.argv[1:]
    options = {"lease_s": float(lease_s), "max_in_flight": 1_000_000, "prefetch": 0}
    with (
        raymq.connect(url) as cluster,
        cluster.workers(topic, group=group, backoff=(0,), **options) as workers,
    ):
        held = []
        while sum(map(len, held)) < int(count):
            held.append(workers.get_batch(5_000, 1.0))
        print(sum(map(len, held)), flush=True)
        # Its leases are renewed until it is killed.
        threading.Event().wait()


main()
