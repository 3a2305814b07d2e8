"""A topic as a loop over datasets that any number of programs share: each message is settled by one of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ray.data import Dataset, from_arrow

from raymq.client.arguments import check_number
from raymq.client.workers.leased import LeasedBatch
from raymq.client.workers.workers import Workers
from raymq.client.workers.workers_config import GroupStart
from raymq.store.base.clock import Clock
from raymq.store.base.errors import RayMQError

from .topic_sink import check_transport
from .topic_source import as_table, values_of

if TYPE_CHECKING:
    from raymq.cluster.cluster import Cluster

#: how often a loop without messages looks at the time
LOOK_S = 0.5


def lease_batches(
    cluster: Cluster,
    topic: str,
    group: str,
    *,
    max_rows: int,
    idle_s: float | None = None,
    lease_s: float = 60.0,
    max_attempts: int | None = 16,
    start: GroupStart = "earliest",
    tags: str | None = None,
    sql: str | None = None,
) -> Iterator[Dataset]:
    """Yield leased messages as datasets, in a loop, and acknowledge each one after the loop's body has ended.

    A dataset has the columns of `read_topic`. Unlike with `micro_batches` any number of loops may work for a group, as
    Ray tasks or actors, and come and go: they share the messages. The messages of a loop whose process dies come to
    another loop when their leases are over. While a body runs its leases are renewed.

    Example:
        With a `cluster`, in a process that is connected to Ray:

        ```python
        from raymq.data import lease_batches

        cluster.create_topic("pictures", queues=2)
        with cluster.producer() as producer:
            producer.send("pictures", b"a cat")
        for batch in lease_batches(cluster, "pictures", "labels", max_rows=1000, idle_s=1):
            print(batch.count())
        ```

    Args:
        cluster: the cluster to read from. Its transport must be Flight.
        topic: an existing topic.
        group: the group of workers that settles the messages.
        max_rows: messages of one dataset at most. They pass through this process, which keeps them until the body has
            ended.
        idle_s: seconds without a message after which the loop ends; None (default): it waits on.
        lease_s: seconds after which the messages of a process that died come to another loop (default 60, 1 to 3,600).
        max_attempts: deliveries of a message, before it is a dead letter (default 16); None: no limit.
        start: where the group begins with a queue of which it has settled nothing: "earliest" (default) or "latest".
        tags: as of `read_topic`.
        sql: as of `read_topic`.

    Guarantees:
        Every message is in one dataset at least, and in no other one if the body of its loop has ended. A body that
        raises, or that ends the loop, gives its messages back: they come again, to any loop, and the attempt counts.

    Raises:
        Rejected: an unknown topic or option, or options that other workers of the group do not have.
        Fenced: some messages were not held long enough, because this process hung: their work may be done twice.
        Unavailable: the cluster does not answer.
    """
    check_transport(cluster)
    check_number("max_rows", max_rows, 1)
    if idle_s is not None:
        check_number("idle_s", idle_s, 0, whole=False)

    clock = Clock()
    values = values_of(cluster, topic)
    with cluster.workers(
        topic,
        group=group,
        lease_s=lease_s,
        prefetch=0,
        max_attempts=max_attempts,
        start=start,
        tags=tags,
        sql=sql,
    ) as workers:
        idle_since_s = clock.monotonic()
        while True:
            batches = _next_batches(workers, max_rows)
            if not batches:
                if idle_s is not None and clock.monotonic() - idle_since_s >= idle_s:
                    return
                continue

            try:
                yield from_arrow([as_table(*each.raw(), values) for each in batches])
            except BaseException:
                _give_back(batches)
                raise
            for each in batches:
                each.ack()
            idle_since_s = clock.monotonic()


def _next_batches(workers: Workers, max_rows: int) -> list[LeasedBatch]:
    """Messages of any queues that came together; none if none came for a while."""
    first = workers.get_batch(max_rows, LOOK_S)
    found = [first] if len(first) else []
    rows = len(first)
    # Nothing more is asked for: what comes during the body of this loop goes to others.
    while 0 < rows < max_rows and (batch := workers.take_batch(max_rows - rows)) is not None:
        found.append(batch)
        rows += len(batch)
    return found


def _give_back(batches: list[LeasedBatch]) -> None:
    """Let the messages of a body that did not end come again."""
    for each in batches:
        # They come again when their leases are over, at the latest.
        with contextlib.suppress(RayMQError):
            each.nack()
