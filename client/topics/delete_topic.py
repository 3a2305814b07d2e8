"""Deletes a topic on every shard.

The first shard decides: its answer says how often topics of this name were deleted. The others do the same, also if the
call is repeated after it ended early. A topic of the same name that is made before that says the number, too, so that
no shard takes the old topic for the new one.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from raymq.store.base.errors import Rejected
from raymq.store.base.format import check_topic_name
from raymq.store.state.topics import refuse_system_topic

from .new_topic import repeat_call

if TYPE_CHECKING:
    from raymq.client.handle import ClusterHandle


def delete_topic(cluster: ClusterHandle, name: str) -> bool:
    """See `Cluster.delete_topic`."""
    check_topic_name(name)
    refuse_system_topic(name)
    deleted, shard, generation = False, 0, 0
    while shard < cluster.shards:
        arguments = {"name": name, **({"generation": generation} if generation else {})}
        answer, was_unknown = repeat_call(cluster, shard, "delete_topic", arguments)
        generation = int(answer["generation"])
        deleted |= bool(answer["deleted"]) or was_unknown
        cluster.learn_shards(int(answer.get("shards", 0)))
        shard += 1
    if not deleted:
        raise Rejected(
            f"topic {name!r} does not exist; `raymq topic list` shows those that do",
            field="topic",
            limit="an existing topic",
            found=shlex.quote(name),
        )
    return deleted
