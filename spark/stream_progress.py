"""The offsets of a stream: where it begins, how far a batch goes, and which ranges that are.

Spark keeps the offsets in the query's checkpoint, and repeats a batch that was not committed with the offsets of its
first run. The end of a batch is its start or a later offset, for each queue.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Protocol

from raymq.client.consume.queue_ranges import QueueRange, split_by_lag, split_ranges
from raymq.store.base.clock import Clock
from raymq.store.base.errors import OffsetOutOfRange, Unavailable

from .offsets import (
    LATEST,
    HeldOffsets,
    Offsets,
    TopicQueue,
    check_ends,
    report_loss,
    resolve,
)
from .source_options import SourceOptions

logger = logging.getLogger("raymq")

#: a new leader knows all confirmed messages after less time
LOWER_END_S = 60.0
#: between two looks at such a queue, at the end of a run
LOOK_MS = 1000


class QueuesNow(Protocol):
    """What a stream asks the cluster; `QueueLookup` is one."""

    def queues(self) -> dict[TopicQueue, HeldOffsets]:
        """The queues of the stream and their ends."""
        ...

    def offset_at(self, queue: TopicQueue, ends: HeldOffsets, time_ms: int) -> int | None:
        """The first message stored at a time or later."""
        ...


class StreamProgress:
    """The offsets of one run of a query. One thread."""

    def __init__(
        self,
        lookup: QueuesNow,
        options: SourceOptions,
        *,
        clock: Clock | None = None,
        starts_are_known: bool = True,
    ) -> None:
        """Args: `starts_are_known`: `latest` is given where each batch begins, which Spark does from 4.2 on."""
        self._clock = clock or Clock()
        self._starts_are_known = starts_are_known
        #: queue -> when it was first seen to end before what the stream has read
        self._lower_since: dict[TopicQueue, float] = {}
        self._lookup = lookup
        self._options = options
        #: the ends that the last `latest` saw
        self.newest: Offsets | None = None
        #: the last offsets of this run; None: no limit
        self._target: Offsets | None = None
        #: what `initial` returned in this run
        self._initial: Offsets | None = None
        #: what the first `latest` returns, so that the first batch is empty
        self._anchor: Offsets | None = None

    def initial(self) -> Offsets:
        """Where a query without a checkpoint begins.

        Spark writes this offset nowhere: it asks again if the first batch was interrupted. "Latest" would be a later
        offset then, and the messages between would be lost. So the first batch of such a query is empty, and its end
        keeps the beginning in the checkpoint. Later calls of one run return the same.
        """
        if self._initial is not None:
            return self._initial
        position = self._options.stream_position()
        queues = self._lookup.queues()
        found = resolve(
            position,
            queues,
            lambda queue, time_ms: self._lookup.offset_at(queue, queues[queue], time_ms),
            without_match=self._options.without_match,
        )
        found = check_ends(
            found,
            queues,
            option=position.option,
            fail_on_data_loss=self._options.fail_on_data_loss,
        )

        may_move = position.holds(LATEST) or (
            position.kind == "time" and self._options.without_match == "latest"
        )
        if may_move and self.newest is not None:
            # Before Spark 4.2 the end of the first batch is asked for first.
            found = {queue: self.newest.get(queue, offset) for queue, offset in found.items()}
        elif may_move:
            self._anchor = found
        self._initial = found
        return found

    def stop_at_present_ends(self) -> None:
        """Let the later batches of this run end at the present ends (`Trigger.AvailableNow`)."""
        self._target = self._ends(self._lookup.queues())

    def latest(self, start: Offsets | None, max_messages: int | None) -> Offsets:
        """The end of the batch that begins at `start`: `start` itself if there is nothing to read.

        Args: `start`: None: not known, as before Spark 4.2. `max_messages`: the largest batch; None: no limit.
        Raises: OffsetOutOfRange for a queue that ends before `start` for long, with `failOnDataLoss`.
        """
        found = self._latest(start, max_messages)
        while self._target is not None and self._lower_since:
            # The last batch of a run is not the place to forget such a queue.
            self._clock.sleep_ms(LOOK_MS)
            found = self._latest(start, max_messages)
        return found

    def _latest(self, start: Offsets | None, max_messages: int | None) -> Offsets:
        queues = self._lookup.queues()
        self.newest = self._ends(queues)
        anchor, self._anchor = self._anchor, None
        if start is None:
            return dict(self.newest)
        if start == anchor:
            return anchor

        lags: Offsets = {}
        bases = dict(start)
        for queue, ends in queues.items():
            if self._target is not None and queue not in self._target:
                continue
            end = ends.end if self._target is None else min(ends.end, self._target[queue])
            # A queue that was added begins at its first message. One whose messages have expired goes on after them.
            bases[queue] = max(start.get(queue, ends.first), min(ends.first, end))
            lags[queue] = max(0, end - bases[queue])
            if ends.end >= start.get(queue, 0):
                self._lower_since.pop(queue, None)
            elif self._is_behind_for_long(queue, ends, start[queue]):
                # The messages between are lost. Those that will get these offsets are new ones.
                bases[queue] = ends.end

        if max_messages is None:
            taken = lags
        else:
            taken = split_by_lag(lags, max_messages, turn=sum(start.values()))
        return {queue: base + taken.get(queue, 0) for queue, base in bases.items()}

    def ranges(self, start: Offsets, end: Offsets) -> list[QueueRange]:
        """The ranges of the batch between two offsets.

        Raises: OffsetOutOfRange for messages that have expired, if `failOnDataLoss`; Unavailable for an end before
        the start.
        """
        queues = self._lookup.queues()
        found: list[QueueRange] = []
        for queue, last in sorted(end.items()):
            first = start.get(queue, 0)
            if first > last:
                self._check_start(start, queue, first, last)
            if first >= last:
                continue

            ends = queues.get(queue)
            # A queue that is gone holds nothing. The messages before the first one of another have expired.
            held_from = last if ends is None else min(max(first, ends.first), last)
            shard = 0 if ends is None else ends.shard
            if held_from > first:
                lost = QueueRange(*queue, shard, first, held_from)
                report_loss(lost, fail=self._options.fail_on_data_loss)
            if last > held_from:
                found.append(QueueRange(*queue, shard, held_from, last))
        return split_ranges(found, self._options.min_partitions)

    def _check_start(self, start: Offsets, queue: TopicQueue, first: int, last: int) -> None:
        """Raises: Unavailable for an end before the start, unless the start was just looked up (see `initial`)."""
        may_be_lower = self._starts_are_known and not self._options.fail_on_data_loss
        if start == self._initial or may_be_lower:
            return
        raise Unavailable(
            f"topic {queue.topic} queue {queue.queue_id} ends at offset {last}, before {first}, which the stream has "
            "read: its leader may be new and not know all messages yet; start the query again",
            topic=queue.topic,
            queue_id=queue.queue_id,
        )

    def _is_behind_for_long(self, queue: TopicQueue, ends: HeldOffsets, start: int) -> bool:
        """Whether a queue has ended before what the stream has read for longer than a new leader needs.

        Raises: OffsetOutOfRange then, with `failOnDataLoss`.
        """
        words = (
            f"topic {queue.topic} queue {queue.queue_id} ends at offset {ends.end}, before {start}, which the stream "
            "has read"
        )
        now = self._clock.monotonic()
        if queue not in self._lower_since:
            self._lower_since[queue] = now
            logger.warning(
                "%s: its leader may be new; the stream waits for %d s", words, LOWER_END_S
            )
        if now - self._lower_since[queue] < LOWER_END_S:
            return False

        why = "messages were lost by an unclean recovery, or the checkpoint is of another cluster"
        if self._options.fail_on_data_loss:
            raise OffsetOutOfRange(
                f"{words}: {why}. Begin with a new checkpoint, or go on at the end with failOnDataLoss=false",
                min=ends.first,
                max=ends.end,
                offset=start,
                queue_id=queue.queue_id,
            )
        del self._lower_since[queue]
        logger.warning("%s: %s; the stream goes on there (failOnDataLoss is false)", words, why)
        return True

    @staticmethod
    def _ends(queues: Mapping[TopicQueue, HeldOffsets]) -> Offsets:
        return {queue: ends.end for queue, ends in queues.items()}
