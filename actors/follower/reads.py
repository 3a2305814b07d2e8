"""The reads that a follower serves: below its own confirmed end, to readers that take the answer of any replica.

A reader must never go back. So it says what it has seen: an epoch, and the next offset of each queue. A follower that
is not that far refuses the whole fetch, and never answers with an end of its own. It also refuses whatever only the
leader can know for certain, such as an offset that was deleted here. A refusal sends the reader to another replica.
"""

from __future__ import annotations

from raymq.actors.supervise.replica_parts import ReplicaParts
from raymq.store.base.errors import RayMQError, ReplicaBehind, Unavailable
from raymq.store.base.status import PutStatus
from raymq.store.records.requests import FetchRequest, FetchSlice

from .heard_ends import LAG_MS_MAX, HeardEnds

#: longest wait of one fetch. A waiting reader must notice soon that this replica hears its leader no more
WAIT_MS_MAX = 500

#: how long a reader may wait for the dispatch of what is confirmed
DISPATCH_WAIT_MS = 200
_STATUS = PutStatus.SERVICE_NOT_AVAILABLE.value


class FollowerReads:
    """The reads of one follower. Callers: any thread."""

    def __init__(self, parts: ReplicaParts, heard: HeardEnds) -> None:
        self._store = parts.store
        self._log = parts.log
        self._dispatcher = parts.dispatcher
        self._serving = parts.serving
        self._elections = parts.elections
        self._scrub = parts.scrub
        self._clock = parts.clock
        self._heard = heard

    def fetch(self, request: FetchRequest) -> list[FetchSlice]:
        """See `Dispatcher.fetch`: waits for WAIT_MS_MAX at most, and the answers have no errors.

        Raises: ReplicaBehind while this replica is behind what the reader has seen; Unavailable when it cannot answer
        for another reason.
        """
        self._check_sound()
        try:
            epoch = self._check_position(request)
        except Unavailable:
            confirmed = self._log.confirmed
            if self._store.dispatched >= confirmed:
                raise
            # Without a reader, dispatch lingers.
            self._dispatcher.await_dispatched(confirmed, DISPATCH_WAIT_MS)
            epoch = self._check_position(request)

        wait_ms = min(request.wait_ms, WAIT_MS_MAX)
        found = self._dispatcher.fetch(request._replace(wait_ms=wait_ms))
        for part in found:
            if part.error is not None:
                raise _refusal(str(part.error))
        if not found:
            # The wait may have been long: an answer without messages must be true at its end.
            self._epoch()
        return [part._replace(epoch=epoch) for part in found]

    def _check_position(self, request: FetchRequest) -> int:
        """Check that this replica is as far as the reader. Returns: the epoch of its answers. Raises: Unavailable."""
        epoch = self._epoch()
        if epoch < (request.seen_epoch or 0):
            raise _behind(f"it has heard of epoch {epoch} only", request.seen_epoch, epoch)
        for topic, offsets in request.by_topic():
            if self._store.state.generation(topic) != request.generation(topic):
                raise _refusal(f"it knows another deletion of topic {topic!r} than the reader")
            for queue_id, offset in offsets.items():
                self._check_offset(topic, queue_id, offset)
        return epoch

    def _check_sound(self) -> None:
        """Check that this replica's copy is whole, as far as it knows. Raises: Unavailable."""
        log = self._log
        self._serving.check()
        if not self._elections.is_complete:
            raise _refusal("it is not complete: it may have lost confirmed messages")
        if log.health.poisoned is not None:
            raise _refusal(log.health.poisoned)
        if self._scrub.faults or self._store.damage:
            raise _refusal("its copy is damaged; see its status")

    def _epoch(self) -> int:
        """The epoch of the leader whose confirmed messages are in the queues here. Raises: Unavailable if they lag."""
        epoch = self._heard.epoch_of(self._store.dispatched, self._clock.monotonic_ms())
        if epoch is None:
            raise _refusal(f"it lacks what its leader confirmed {LAG_MS_MAX} ms ago, or hears none")
        return epoch

    def _check_offset(self, topic: str, queue_id: int, offset: int) -> None:
        """Check that a queue holds the messages before an offset. Raises: Unavailable."""
        store = self._store
        info = store.state.topics.get(topic)
        if info is None or not 0 <= queue_id < info.queues:
            raise _refusal(f"it does not know queue {queue_id} of topic {topic!r}")
        try:
            low, high = store.queue_range(topic, queue_id)
        except (OSError, RayMQError) as error:
            raise _refusal(str(error)) from error
        # A replica that was replaced has no file for a queue whose messages were all deleted.
        is_empty = low == high and offset == store.state.next_offsets.get((topic, queue_id))
        if is_empty:
            return
        if offset > high:
            raise _behind(f"queue {queue_id} ends at {high} here", offset, high)
        if offset < low:
            raise _refusal(f"queue {queue_id} begins at {low} here", offset, low)


def _refusal(why: str, limit: int | None = None, found: int | None = None) -> Unavailable:
    return Unavailable(_text(why), field="replica", limit=limit, found=found, status=_STATUS)


def _behind(why: str, limit: int | None, found: int) -> ReplicaBehind:
    return ReplicaBehind(_text(why), field="confirmed", limit=limit, found=found, status=_STATUS)


def _text(why: str) -> str:
    return f"this follower does not serve the read: {why}; another replica may"
