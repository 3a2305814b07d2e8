"""The confirmed ends that the leader named to a follower, and when: how far the follower's readers lag."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

#: a follower serves reads if it has all that its leader had confirmed at some time within this
LAG_MS_MAX = 1_000
#: of the ends that come within this time, only the first is kept
STEP_MS = 50


class HeardEnd(NamedTuple):
    """A confirmed end, as the leader of an epoch named it."""

    heard_ms: int
    confirmed: int
    epoch: int


class HeardEnds:
    """What was heard within LAG_MS_MAX. Callers: one thread notes, any thread asks.

    What a leader named stays true after its epoch: confirmed bytes are the same in all replicas for ever.
    An end from before its epoch is not noted. Before its EPOCH record is confirmed, a leader may know less than what
    the leaders before it acknowledged.
    """

    def __init__(self, begins_below: Callable[[int, int], bool]) -> None:
        """Args: `begins_below`: whether an epoch, the second argument, begins below an end, the first one."""
        self._begins_below = begins_below
        #: oldest first. Replaced as a whole, because other threads read it meanwhile
        self._heard: tuple[HeardEnd, ...] = ()

    def note(self, confirmed: int, epoch: int, now_ms: int) -> None:
        """Note the confirmed end that the leader of an epoch names now."""
        heard = self._heard
        if heard and heard[-1].epoch == epoch and now_ms - heard[-1].heard_ms < STEP_MS:
            return
        if not self._begins_below(confirmed, epoch):
            return
        recent = [each for each in heard if now_ms - each.heard_ms <= LAG_MS_MAX]
        self._heard = (*recent, HeardEnd(now_ms, confirmed, epoch))

    def epoch_of(self, end: int, now_ms: int) -> int | None:
        """The epoch of the leader that named an end at or below `end` last.

        None: within LAG_MS_MAX it named only higher ones, or none.
        """
        for each in reversed(self._heard):
            if each.confirmed <= end and now_ms - each.heard_ms <= LAG_MS_MAX:
                return each.epoch
        return None
