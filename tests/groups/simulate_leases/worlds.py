"""The worlds of the random runs and of the searches."""

from __future__ import annotations

from dataclasses import replace

from .world import FAULTS, Bounds

#: as a short run has
SHORT = Bounds()
#: half as many faults again
LONG = Bounds(
    messages=8, ticks=24, faults=tuple((kind, most + (most + 1) // 2) for kind, most in FAULTS)
)
#: the retention deletes nothing, so that order and attempts are seen to the end
KEPT = tuple((kind, most) for kind, most in LONG.faults if kind != "trim")

WORLDS = {
    "two workers, five messages": LONG,
    "three workers, twelve messages": replace(
        LONG, workers=3, messages=12, batch=4, backoff_ms=1_000
    ),
    "a narrow window": replace(LONG, window=4, max_in_flight=3),
    "two queues": replace(LONG, queues=2, messages=4, max_in_flight=5),
    "a filter": replace(LONG, messages=9, filtered=3, max_attempts=None),
    # A run lasts less than a minute.
    "few may die": replace(
        LONG,
        dead_rate=1,
        max_attempts=1,
        faults=(*(each for each in LONG.faults if each[0] != "reject"), ("reject", 6)),
    ),
    "clocks that differ": replace(LONG, rates=(0.95, 1.05)),
    "leases that end": replace(LONG, max_lease_ms=3_000),
    "one copy a step": replace(LONG, copies=1, batch=4),
    "one copy a step, in the order of keys": replace(
        LONG, copies=1, batch=4, order="key", messages=6, faults=KEPT
    ),
    "in the order of keys": replace(LONG, order="key", messages=6, faults=KEPT),
    "in the order of the queue": replace(
        LONG, order="queue", messages=4, backoff_ms=1_000, faults=KEPT
    ),
    "in order, with a filter": replace(
        LONG, order="key", messages=9, window=6, filtered=3, faults=KEPT
    ),
}

#: whole exchanges of two workers and two messages
SMALL = Bounds(messages=2, batch=2, network=3, ticks=4, held=1, faults=())
KINDS = tuple(kind for kind, _ in FAULTS)
