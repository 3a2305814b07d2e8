"""All operations of a leader."""

from __future__ import annotations

from raymq.actors.api.operations import merge

from . import (
    commits,
    dead_letters,
    groups,
    leases,
    offsets,
    producers,
    queries,
    retries,
    shard,
    timers,
    topics,
    transactions,
    writes,
)

OPERATIONS = merge(
    shard.OPERATIONS,
    topics.OPERATIONS,
    offsets.OPERATIONS,
    retries.OPERATIONS,
    groups.OPERATIONS,
    leases.OPERATIONS,
    dead_letters.OPERATIONS,
    queries.OPERATIONS,
    timers.OPERATIONS,
    transactions.OPERATIONS,
    commits.OPERATIONS,
    producers.OPERATIONS,
    writes.OPERATIONS,
)
