"""A fetch that is held until a message comes or its time is up.

Source: PullRequestHoldService, RocketMQ 5.3.3, which keeps the request and reads again when a message arrives.
"""

from __future__ import annotations

from collections.abc import Callable

from raymq.store.base.clock import Clock
from raymq.store.queues import reader
from raymq.store.records.requests import FetchRequest, FetchSlice

from .shard_api import ShardBackend

#: how often to look again for a reader that takes the answer of any replica. A follower that hears its leader no more
#: must refuse soon
LOOK_AGAIN_MS = 500
#: what a fetch with a filter looks at in vain at most: units, and milliseconds without those that it waits. So the
#: reader learns how far it is, and the fetches of others come in between
LOOKED_UNITS_MAX = 65_536
LOOKED_MS_MAX = 50
#: how long one look of such a fetch takes
LOOK_MS = 20
#: how long such a fetch goes on after it has looked at messages in vain. The reader's position follows after that time,
#: and a stream of messages that it does not want costs no answer for each of them
IN_VAIN_MS = 50


class FetchProgress:
    """How far the queues of a fetch were looked at in vain."""

    def __init__(self, asked: FetchRequest) -> None:
        #: the fetch from there on
        self.request = asked
        self._asked = asked
        #: (topic, queue) -> what was found
        self._looked: dict[tuple[str, int], FetchSlice] = {}
        #: of `LOOKED_UNITS_MAX` and `LOOKED_MS_MAX`
        self._units = self._took_ms = 0
        #: when the fetch ends, because it has looked in vain (monotonic ms); None: it has not
        self.ends_ms: int | None = None

    def note(self, found: list[FetchSlice], began_ms: int, now_ms: int) -> bool:
        """Go on after these. Args: `began_ms`, `now_ms`: of this look, by the monotonic clock.

        Returns: whether the fetch ends with them: one has records or an error, or the next look might be too much.
        """
        if not found:
            return self.ends_ms is not None and now_ms >= self.ends_ms
        if self.ends_ms is None:
            self.ends_ms = now_ms + IN_VAIN_MS
        self._units += sum(part.next_offset - part.first_offset for part in found)
        self._took_ms += now_ms - began_ms
        parts = {self._asked.key_of(part): part for part in found}
        self._looked |= parts
        self.request = self.request.move({key: part.next_offset for key, part in parts.items()})
        return any(map(_is_found, found)) or (
            now_ms >= self.ends_ms
            or self._units + reader.FILTERED_UNITS > LOOKED_UNITS_MAX
            or self._took_ms + LOOK_MS > LOOKED_MS_MAX
        )

    def answer(self) -> list[FetchSlice]:
        """All that was noted, from the offsets that were asked for."""
        offsets = self._asked.queues()
        return [part._replace(first_offset=offsets[key]) for key, part in self._looked.items()]


class HeldFetch:
    """A fetch that waits without a thread. `poll` may be called by one thread at a time.

    with HeldFetch(backend, request, clock, notify) as held:
        while (found := held.poll()) is None:
            ...  # until `notify` is called, for `held.left_ms()` at most
    """

    def __init__(
        self,
        backend: ShardBackend,
        request: FetchRequest,
        clock: Clock,
        notify: Callable[[], None],
    ) -> None:
        """Args: `notify`: as of `ShardBackend.hold`. It may be called once more after the end."""
        self._backend = backend
        self._progress = FetchProgress(request)
        self._clock = clock
        self._deadline_ms = clock.monotonic_ms() + request.wait_ms
        self._look_again_ms = self._deadline_ms
        # Before the first look, which finds what came earlier: to look twice would cost more.
        self._release: Callable[[], None] = lambda: None
        if request.wait_ms > 0:
            self._release = backend.hold(request.queues(), notify)

    def __enter__(self) -> HeldFetch:
        return self

    def __exit__(self, *exc: object) -> None:
        self._release()

    def poll(self) -> list[FetchSlice] | None:
        """Look for messages. Returns: the answer; None: look again after `notify` or `left_ms`. Raises: RayMQError."""
        began_ms = self._clock.monotonic_ms()
        found = self._backend.fetch(self._progress.request._replace(wait_ms=0))
        now_ms = self._clock.monotonic_ms()
        if self._progress.note(found, began_ms, now_ms) or now_ms >= self._deadline_ms:
            return self._progress.answer()

        if self._progress.ends_ms is not None:
            self._deadline_ms = min(self._deadline_ms, self._progress.ends_ms)
        self._look_again_ms = self._deadline_ms
        if found:
            # A filter looks at a part of a queue at a time, and has to look at the next one.
            self._look_again_ms = now_ms
        elif self._progress.request.seen_epoch is not None:
            self._look_again_ms = min(self._deadline_ms, now_ms + LOOK_AGAIN_MS)
        return None

    def left_ms(self) -> int:
        """How long `notify` may be awaited."""
        return max(0, self._look_again_ms - self._clock.monotonic_ms())


def _is_found(part: FetchSlice) -> bool:
    return part.error is not None or (part.records is not None and len(part.records) > 0)
