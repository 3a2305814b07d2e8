"""All operations of a leader."""

from __future__ import annotations

from raymq.actors.api.operations import merge

from . import groups, offsets, producers, shard, topics, writes

OPERATIONS = merge(
    shard.OPERATIONS,
    topics.OPERATIONS,
    offsets.OPERATIONS,
    groups.OPERATIONS,
    producers.OPERATIONS,
    writes.OPERATIONS,
)
