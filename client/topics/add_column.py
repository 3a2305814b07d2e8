"""Gives the schema of a topic one more column, on all shards."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from raymq.client.messages.topic_schema import more_columns
from raymq.store.base.errors import Rejected

from .new_topic import repeat_call

if TYPE_CHECKING:
    from raymq.client.handle import ClusterHandle


def add_column(cluster: ClusterHandle, topic: str, column: pa.Field) -> bool:
    """See `Cluster.add_column`."""
    # The first shard decides, as it does for a new topic.
    facts = cluster.call(0, "topics", {}).get(topic)
    if facts is None:
        message = f"topic {topic!r} does not exist; create it with its schema"
        raise Rejected(message, field="topic", limit="an existing topic")
    if "schema" not in facts:
        message = f"topic {topic!r} has no schema, and gets none: its messages may be anything. Create another topic"
        raise Rejected(message, field="topic", limit="a topic with a schema")

    wanted = more_columns(facts["schema"], column)

    added, shard = False, 0
    while shard < cluster.shards:
        arguments = {"name": topic, "schema": wanted}
        answer, was_unknown = repeat_call(cluster, shard, "set_schema", arguments)
        added |= bool(answer["changed"]) or was_unknown
        # Shards that are being added have the topic by the time at which an answer counts them.
        cluster.learn_shards(int(answer.get("shards", 0)))
        shard += 1
    return added
