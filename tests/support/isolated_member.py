"""A member of a group beside a leader that is about to be cut off: it reads and commits all the time.

Its arguments: the endpoint of the leader, the token, the topic, the group. It prints a line when it owns queues. A line
on its standard input ends it, and it prints as JSON, on the monotonic clock that all processes of this machine share:

    believes_until_ms: until then it believed to own its queues, as of its newest answered heartbeat
    read_ms: when `poll` returned messages last
    committed_ms: when a commit was acknowledged last
    committed: queue -> offset that was acknowledged last
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading

import raymq
from raymq.client.consume.consumer import Consumer
from raymq.store.base.clock import Clock
from raymq.store.base.errors import DeliveryUnknown, Fenced, Unavailable

SESSION_S = 3


class Said:
    """What happened so far."""

    def __init__(self, consumer: Consumer) -> None:
        assert consumer._member is not None
        self._membership = consumer._member.membership
        self._believes_until_ms = 0
        self.read_ms = self.committed_ms = 0
        self.committed: dict[int, int] = {}

    def note_belief(self) -> None:
        """Keep until when it believes. A member that was removed believes nothing any more."""
        until_ms = self._membership._member.believes_until_ms or 0
        self._believes_until_ms = max(self._believes_until_ms, until_ms)

    def print_and_end(self) -> None:
        """Wait for the line, and end at once: a call at a leader that is cut off takes long."""
        sys.stdin.readline()
        self.note_belief()
        found = {"believes_until_ms": self._believes_until_ms, "read_ms": self.read_ms}
        found |= {"committed_ms": self.committed_ms}
        print(json.dumps({**found, "committed": self.committed}), flush=True)
        os._exit(0)


def main() -> None:
    """Read, until the line comes."""
    endpoint, token, topic, group = sys.argv[1:]
    clock = Clock()
    cluster = raymq.connect(f"raymq://{endpoint}", token=token)
    consumer = cluster.consumer(topic, group=group, start="earliest", session_timeout_s=SESSION_S)
    said = Said(consumer)
    threading.Thread(target=said.print_and_end, daemon=True).start()
    while True:
        with contextlib.suppress(Fenced, Unavailable, DeliveryUnknown):
            said.note_belief()
            if consumer.poll(100, 0.05):
                said.read_ms = clock.monotonic_ms()
            offsets = consumer.positions()
            if any(offsets.values()):
                consumer.commit(offsets)
                is_first = not said.committed
                said.committed_ms, said.committed = clock.monotonic_ms(), offsets
                if is_first:
                    print("owns queues", flush=True)


if __name__ == "__main__":
    main()
