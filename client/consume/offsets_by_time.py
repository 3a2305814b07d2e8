"""Offsets by time: the shards say at which offset of each queue a store time is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from raymq.client.arguments import check_choice, plain_int
from raymq.client.times import Time, check_time
from raymq.client.transport.routes import Routes

if TYPE_CHECKING:
    from raymq.client.handle import ClusterHandle

#: the first message at a time or later, or the last one at it or earlier
Side: TypeAlias = Literal["first", "last"]
BOUNDARIES = ("first", "last")

#: calls an operation of a shard
CallShard: TypeAlias = Callable[[int, str, Mapping[str, object]], dict[str, Any]]


def offsets_for_times(
    cluster: ClusterHandle, topic: str, times: Time | Mapping[int, Time], boundary: Side
) -> dict[int, int]:
    """See `Cluster.offsets_for_times`."""
    check_choice("boundary", boundary, BOUNDARIES)
    route = Routes.of(cluster).topics.find(topic)
    # The handle may be older than some shards.
    cluster.learn_shards(1 + max(route.shards))
    if isinstance(times, Mapping):
        wanted = {plain_int(each): check_time("times", time) for each, time in times.items()}
    else:
        wanted = dict.fromkeys(range(route.queues), check_time("times", times))
    return ask_offsets(cluster.call, topic, route.shard_of, wanted, boundary)


def ask_offsets(
    call: CallShard,
    topic: str,
    shard_of: Callable[[int], int],
    times: Mapping[int, int],
    boundary: Side = "first",
) -> dict[int, int]:
    """queue_id -> offset, for queue_id -> ms.

    Raises: Rejected for a queue that `shard_of` does not know, before any shard is asked; as `call`.
    """
    shards = {queue_id: shard_of(queue_id) for queue_id in times}
    found: dict[int, int] = {}
    for shard in sorted(set(shards.values())):
        own = {str(each): times[each] for each in times if shards[each] == shard}
        arguments = {"topic": topic, "times": own, "boundary": boundary}
        answer = call(shard, "offsets_by_time", arguments)
        found.update({int(queue_id): int(offset) for queue_id, offset in answer.items()})
    return {queue_id: found[queue_id] for queue_id in times}
