"""A topic as a loop over bounded datasets: each is committed when the loop asks for the next one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from ray.data import Dataset, read_datasource

from raymq.client.arguments import check_choice, check_number
from raymq.client.consume.consumer_config import READ_FROM, ReadFrom
from raymq.client.consume.queue_ranges import QueueRange, split_by_lag
from raymq.client.consume.selector import selector_of
from raymq.client.transport.away import while_away
from raymq.store.base.clock import Clock
from raymq.store.base.errors import OffsetOutOfRange, Rejected

from .topic_sink import check_transport
from .topic_source import EARLIEST, LATEST, TopicSource, values_of

if TYPE_CHECKING:
    from raymq.cluster.cluster import Cluster

#: how often the queues are looked at while no message comes
LOOK_S = 0.5
STARTS = (EARLIEST, LATEST)


def micro_batches(
    cluster: Cluster,
    topic: str,
    group: str,
    *,
    max_rows: int,
    start: str | None = None,
    idle_s: float | None = None,
    read_from: ReadFrom = "leader",
    tags: str | None = None,
    sql: str | None = None,
) -> Iterator[Dataset]:
    """Yield a topic as bounded datasets, in a loop, and commit each one after the loop's body has ended.

    A dataset has the columns of `read_topic`. It has up to `max_rows` messages: of each queue the next ones, in
    proportion to what waits there. A group's offsets are stored as those of consumers are. A loop that ends in the
    middle of its body begins with the same messages the next time. Only one loop may work for a group.

    Example:
        With a `cluster`, in a process that is connected to Ray:

        ```python
        from raymq.data import micro_batches

        cluster.create_topic("events", queues=2)
        with cluster.producer() as producer:
            producer.send("events", b"page viewed")
        for batch in micro_batches(cluster, "events", "counting", max_rows=1000, start="earliest", idle_s=1):
            print(batch.count())
        ```

    Args:
        cluster: the cluster to read from.
        topic: an existing topic.
        group: the name under which the offsets are stored.
        max_rows: messages of one dataset at most.
        start: where a queue begins of which the group has no offset: "earliest" or "latest". None (default): such a
            queue is refused. Queues that the topic got later begin at their first message, if the group has offsets.
        idle_s: seconds without a new message after which the loop ends; None (default): it waits on.
        read_from: "leader" (default), or "nearest": a replica on the task's machine, rather a follower.
        tags: as of `read_topic`. A dataset then has the wanted ones of up to `max_rows` messages, perhaps none.
        sql: as of `read_topic`, and in the datasets as `tags`.

    Guarantees:
        Every message is in one dataset at least, and in no other one if each body of the loop has ended. `break`
        leaves the present dataset uncommitted.

    Raises:
        Rejected: an unknown topic or option, or a queue without an offset and without `start`.
        OffsetOutOfRange: messages have expired before they were read.
        Unavailable: the cluster does not answer.
    """
    check_transport(cluster)
    check_choice("read_from", read_from, READ_FROM)
    check_number("max_rows", max_rows, 1)
    if start is not None:
        check_choice("start", start, STARTS)
    selector = selector_of(tags, sql)

    clock = Clock()
    values, first_queues = values_of(cluster, topic), _first_queues(cluster, topic)
    offsets: dict[int, int] = {}
    idle_since_s = clock.monotonic()
    while True:
        held = _queues(cluster, topic)
        _add_offsets(cluster, group, held, offsets, start, first_queues)
        lags = {queue_id: max(0, each.last - offsets[queue_id]) for queue_id, each in held.items()}
        taken = split_by_lag(lags, max_rows, turn=sum(offsets.values()))
        if not taken:
            if idle_s is not None and clock.monotonic() - idle_since_s >= idle_s:
                return
            clock.sleep_ms(LOOK_S * 1000)
            continue

        ranges = [
            held[queue_id]._replace(first=offsets[queue_id], last=offsets[queue_id] + count)
            for queue_id, count in taken.items()
        ]
        source = TopicSource(cluster, ranges, read_from=read_from, values=values, selector=selector)
        yield read_datasource(source, override_num_blocks=source.tasks_at_best())

        _commit(cluster, group, ranges)
        offsets.update({each.queue_id: each.last for each in ranges})
        idle_since_s = clock.monotonic()


def _first_queues(cluster: Cluster, topic: str) -> int:
    """How many queues the topic had at its creation."""
    facts = while_away(cluster.topics).get(topic, {})
    return int((facts.get("former_queues") or [facts.get("queues", 0)])[0])


def _queues(cluster: Cluster, topic: str) -> dict[int, QueueRange]:
    """The queues, and what they hold."""
    return {
        each["queue_id"]: QueueRange(
            topic, each["queue_id"], each["shard"], each["min_offset"], each["max_offset"]
        )
        for each in while_away(lambda: cluster.describe_topic(topic))["queues"]
    }


def _add_offsets(
    cluster: Cluster,
    group: str,
    held: dict[int, QueueRange],
    offsets: dict[int, int],
    start: str | None,
    first_queues: int,
) -> None:
    """Find where the queues begin that the loop does not know yet, and check that they still hold it."""
    new = [each for queue_id, each in held.items() if queue_id not in offsets]
    stored: dict[int, int] = {}
    # All shards are asked: a group that has an offset on any of them has begun.
    for shard in sorted({each.shard for each in held.values()}) if new else []:
        arguments = {"group": group, "topic": new[0].topic}
        table = while_away(partial(cluster.call, shard, "offsets", arguments))
        stored.update({int(queue_id): int(offset) for queue_id, offset in table.items()})

    begun: list[QueueRange] = []
    for each in new:
        found = stored.get(each.queue_id)
        # All messages of a queue that was added later are new to the group. One of the first queues may also have no
        # offset: the program died between the first commits of two shards.
        is_added = bool(stored) and each.queue_id >= first_queues
        if found is None and start is None and not is_added:
            raise Rejected(
                f"group {group} has no offset of queue {each.queue_id} of {each.topic}; give start='earliest' or "
                "'latest'",
                field="start",
                limit="earliest|latest",
            )
        if found is None:
            found = each.last if start == LATEST and not is_added else each.first
            begun.append(each._replace(last=found))
        offsets[each.queue_id] = found
    # Stored at once: "latest" would be a later offset after a restart.
    _commit(cluster, group, begun)

    for queue_id, each in held.items():
        if offsets[queue_id] < each.first:
            raise OffsetOutOfRange(
                f"group {group} is at offset {offsets[queue_id]} of queue {queue_id} of {each.topic}, which holds "
                f"{each.first} to {each.last}: messages have expired; store another offset for the group to go on",
                field="group",
                min=each.first,
                max=each.last,
                offset=offsets[queue_id],
                queue_id=queue_id,
            )


def _commit(cluster: Cluster, group: str, ranges: list[QueueRange]) -> None:
    """Store the ends of ranges as the next offsets of the group."""
    for shard in sorted({each.shard for each in ranges}):
        offsets = {str(each.queue_id): each.last for each in ranges if each.shard == shard}
        arguments = {"group": group, "topic": ranges[0].topic, "offsets": offsets}
        while_away(partial(cluster.call, shard, "commit_offsets", arguments))
