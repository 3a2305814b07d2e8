"""The worlds of the random runs and of the searches."""

from __future__ import annotations

from dataclasses import replace

from .world import FAULTS, Bounds

#: twice as many faults as a short run has
LONG = Bounds(ticks=30, faults=tuple((kind, 2 * most) for kind, most in FAULTS))
WORLDS = {
    "two members, two queues": LONG,
    "three members, four queues": replace(LONG, processes=3, queues=4),
    "two processes of one instance": replace(LONG, static=True),
    "clocks that differ": replace(LONG, rates=(0.95, 1.05)),
    "a long network": replace(LONG, network=30, messages=5),
    "heartbeats that come together": replace(LONG, processes=4, queues=6, network=16, gathers=True),
    "places that are kept": replace(
        LONG, processes=4, queues=6, network=12, static=True, instances=2, keeps_places=True
    ),
}

#: whole exchanges of two members and a queue
SMALL = Bounds(queues=1, messages=1, network=3, ticks=2, faults=())
KINDS = tuple(kind for kind, _ in FAULTS)
