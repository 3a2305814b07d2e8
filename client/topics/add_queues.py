"""Gives a topic more queues, on all shards, in two steps.

First every shard makes the queues, and shows none of them. Then every shard shows them. So no client is sent to a queue
that its shard does not know, wherever the operation is interrupted.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from raymq.store.base.errors import Rejected

from .new_topic import repeat_call

if TYPE_CHECKING:
    from raymq.client.handle import ClusterHandle

#: of the topic in which a `raymq.Queue` writes down which items are taken
TAKEN_PREFIX = "%TAKEN%"


def add_queues(cluster: ClusterHandle, topic: str, queues: int, *, break_key_order: bool) -> bool:
    """See `Cluster.add_queues`."""
    known = [cluster.call(shard, "topics", {}) for shard in range(cluster.shards)]
    facts = [each[topic] for each in known if topic in each]
    if not facts:
        raise Rejected(
            f"topic {topic!r} does not exist: raymq topic create {shlex.quote(topic)} --queues {queues}",
            field="topic",
            limit="an existing topic",
        )
    if topic.startswith(TAKEN_PREFIX) or TAKEN_PREFIX + topic in known[0]:
        raise Rejected(
            f"topic {topic!r} belongs to a raymq.Queue, which has one queue",
            field="topic",
            limit="a topic without a Queue",
        )

    # An earlier call may have ended between the steps. Its queues stay where it has made them.
    furthest = max(facts, key=_all_queues)
    if queues > _all_queues(furthest) and not break_key_order:
        _check_no_messages(cluster, topic)
    spread = spread_over(cluster.shards, furthest["shards"], _all_queues(furthest), queues)
    arguments = {"name": topic, "queues": queues, "shards": spread}
    added = False
    for are_hidden in (True, False):
        shard = 0
        while shard < cluster.shards:
            step = {**arguments, "are_hidden": are_hidden}
            answer, unknown = repeat_call(cluster, shard, "add_queues", step)
            added |= bool(answer["added"]) or unknown
            # Shards that are being added have the topic by the time at which an answer counts them.
            cluster.learn_shards(int(answer.get("shards", 0)))
            shard += 1
    return added


def _all_queues(facts: dict[str, Any]) -> int:
    """The number of queues that a shard has made for a topic."""
    return int(facts.get("all_queues", facts["queues"]))


def spread_over(shards: int, present: Sequence[int], count: int, queues: int) -> list[int]:
    """The shard of each queue, for more queues: each added one goes to a shard with the fewest of the topic.

    Args: `shards`: of the cluster. `present`: as in TopicInfo, for the first `count` queues.
    Returns: as in TopicInfo, as short as possible.
    """
    spread = [present[queue_id % len(present)] for queue_id in range(count)]
    have = Counter(dict.fromkeys(range(shards), 0))
    have.update(spread)
    while len(spread) < queues:
        # The shard after the last one, of those with the fewest: two queues in a row are apart.
        turn = (spread[-1] + 1) % shards
        shard = min(have, key=lambda each: (have[each], (each - turn) % shards))
        spread.append(shard)
        have[shard] += 1
    return _period(spread)


def _period(spread: list[int]) -> list[int]:
    """The shortest part of a list that gives the list when it is repeated and cut."""
    for size in range(1, len(spread)):
        if all(shard == spread[place % size] for place, shard in enumerate(spread)):
            return spread[:size]
    return spread


def _check_no_messages(cluster: ClusterHandle, topic: str) -> None:
    """Raises: Rejected for a topic that has had messages."""
    used = [row for row in cluster.describe_topic(topic)["queues"] if row["max_offset"]]
    if used:
        raise Rejected(
            f"topic {topic!r} has had messages (queue {used[0]['queue_id']} up to offset {used[0]['max_offset']}), and "
            "with another number of queues most keys go to another queue: say break_key_order=True "
            "(--break-key-order) if the order of a key's messages may break once, or if no message has a key",
            field="break_key_order",
            limit="a topic without messages",
        )
