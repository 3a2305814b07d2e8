"""Creates a topic on every shard: any shard can answer for all.

The first shard decides. A creation that another caller has begun, or that began before shards were added, keeps its
shards, and the others get the same. Shards may be added at the same time: each answer says how many shards there are.
So the topic is created on the new ones, too, by this caller or by `add_shards`, which reads the topics of every shard
after that shard has begun to say the new number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from raymq.client.arguments import plain_int
from raymq.store.base.clock import Clock
from raymq.store.base.errors import DeliveryUnknown, TopicDeleted, TopicOnOtherShards
from raymq.store.state.shard_state import CLEANUP_POLICY, COMPACTION
from raymq.store.state.topic_schema import ALLOWED, NULL_VALUES, SCHEMA

if TYPE_CHECKING:
    import pyarrow as pa

    from raymq.client.handle import ClusterHandle

#: how long a creation waits until a topic is durable
CREATE_TIMEOUT_S = 15.0
#: pause before a creation with an unknown outcome is repeated
CREATE_PAUSE_MS = 100


def create_topic(
    cluster: ClusterHandle,
    name: str,
    *,
    queues: int,
    compacted: bool = False,
    schema: pa.Schema | None = None,
    allow_null_values: bool = False,
) -> bool:
    """See `Cluster.create_topic`."""
    spread = list(range(cluster.shards))
    arguments: dict[str, Any] = {"name": name, "queues": plain_int(queues), "shards": spread}
    attributes = {CLEANUP_POLICY: COMPACTION} if compacted else {}
    if schema is not None:
        from raymq.client.messages.topic_schema import to_json

        attributes[SCHEMA] = to_json(schema)
    if allow_null_values:
        attributes[NULL_VALUES] = ALLOWED
    if attributes:
        arguments["attributes"] = attributes
    return create_everywhere(cluster, arguments, on_all=True)


def create_everywhere(
    cluster: ClusterHandle, arguments: Mapping[str, object], *, on_all: bool = False
) -> bool:
    """Create a topic, which all shards then know.

    Args: `arguments`: of the operation `create_topic`. `on_all`: a new topic has queues on all shards, also on
    those that were added since the handle was made.
    Returns: False if it existed everywhere. Raises: as `Cluster.create_topic`.
    """
    made, shard = False, 0
    while shard < cluster.shards:
        try:
            decides = {"on_all": True} if on_all and shard == 0 else {}
            answer, was_unknown = repeat_call(
                cluster, shard, "create_topic", {**arguments, **decides}
            )
        except TopicOnOtherShards as error:
            if shard:
                raise
            # It exists, with everything the same but its shards: it is older than some. Or this handle is.
            arguments = {**arguments, "shards": error.shards}
            continue
        except TopicDeleted:
            # Another program deletes it at the same time.
            arguments = {key: arguments[key] for key in arguments if key != "generation"}
            made, shard = False, 0
            continue

        made |= bool(answer["created"]) or was_unknown
        # The others may have missed a deletion.
        arguments = {**arguments, "generation": int(answer.get("generation", 0))}
        cluster.learn_shards(int(answer.get("shards", 0)))
        shard += 1
    return made


def repeat_call(
    cluster: ClusterHandle, shard: int, op: str, arguments: Mapping[str, object]
) -> tuple[dict[str, Any], bool]:
    """`repeat_unknown` of an operation of one shard."""
    return repeat_unknown(lambda: cluster.call(shard, op, arguments), Clock())


def repeat_unknown(
    call: Callable[[], dict[str, object]], clock: Clock
) -> tuple[dict[str, object], bool]:
    """Repeat a call with an unknown outcome: after a start a flush service or follower may not run yet.

    Returns: the answer, and whether the outcome was unknown once. Raises: DeliveryUnknown after CREATE_TIMEOUT_S.
    """
    unknown, until_s = False, clock.monotonic() + CREATE_TIMEOUT_S
    while True:
        try:
            return call(), unknown
        except DeliveryUnknown:
            if clock.monotonic() >= until_s:
                raise
            unknown = True
        clock.sleep_ms(CREATE_PAUSE_MS)
