"""The member of a consumer group, as a state machine without I/O: what it owns, what it must release, until when.

Its caller carries heartbeats to the coordinator and claims to the shards of the queues. Times are those of its own
monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from raymq.store.groups.heartbeat import Beat, BeatAnswer, JoinRequest
from raymq.store.state.topics import QueueKey

#: a member believes to own its queues for this part of its session, counted from the sending of its newest answered
#: heartbeat. The coordinator counts the whole from the receipt. So clocks may run at rates that differ by a tenth
BELIEF_PERCENT = 90


class GroupMember:
    """One membership. A member that was removed joins again as another one. Not thread-safe."""

    def __init__(self, member_id: str, join: JoinRequest) -> None:
        """Args: `member_id`: 32 random hexadecimal digits, which no other membership has or had."""
        self.member_id = member_id
        self._join: JoinRequest | None = join
        #: the newest assignment that was applied; 0: none yet
        self.version = 0
        #: queue -> number of its grant: the newest assignment
        self.assigned: dict[QueueKey, int] = {}
        #: a queue of that assignment was lost
        self._has_lost = False
        #: the same of queues that it has to release, and that its program has not given up yet
        self.releasing: dict[QueueKey, int] = {}
        #: the assigned queues whose claim was answered, each with the number that was claimed
        self.claimed: dict[QueueKey, int] = {}
        #: until then it believes to own its queues; None: no heartbeat was answered yet
        self.believes_until_ms: int | None = None
        #: a newer process of its instance has joined
        self.is_replaced = False
        #: an operator has paused the group
        self.is_paused = False
        self._is_fenced = False

    # --- heartbeats -------------------------------------------------------------------------------

    def beat(self) -> Beat:
        """The next heartbeat: the whole state."""
        return Beat(self.member_id, self.version, self._owned(), self._join)

    def leave(self, *, keeps_place: bool = False) -> Beat:
        """Drop everything. Returns: the heartbeat that says so, to be sent after reading has ended."""
        self.fence()
        if keeps_place:
            return Beat(self.member_id, self.version, {}, None, keeps_place=True)
        return Beat(self.member_id, is_leaving=True)

    def _owned(self) -> dict[QueueKey, int] | None:
        """The queues that it has; None: those of the assignment that it has applied, as at most times."""
        if self.version and not self.releasing and not self._has_lost:
            return None
        return {**self.assigned, **self.releasing}

    def subscribe(self, join: JoinRequest) -> None:
        """Say another subscription with the next heartbeats."""
        self._join = join

    def answered(self, beat: Beat, answer: BeatAnswer, sent_ms: int) -> None:
        """Take the answer to a heartbeat that was sent at `sent_ms`. Old ones do no harm."""
        if self._is_fenced:
            return
        if beat.join is self._join:
            self._join = None
        believes_until_ms = sent_ms + answer.session_timeout_ms * BELIEF_PERCENT // 100
        if self.believes_until_ms is None or believes_until_ms > self.believes_until_ms:
            self.believes_until_ms = believes_until_ms
        self.is_replaced = self.is_replaced or answer.is_replaced
        self.is_paused = answer.is_paused
        if answer.assignment is None or not self._is_newer(answer.version):
            return

        for key, number in self.assigned.items():
            if answer.assignment.get(key) != number:
                self.releasing[key] = number
                self.claimed.pop(key, None)
        self.version = answer.version
        self.assigned = dict(answer.assignment)
        self._has_lost = False

    def _is_newer(self, version: int) -> bool:
        return version > self.version

    def released(self, keys: Iterable[QueueKey]) -> None:
        """The program has given up these queues, after its last commit."""
        for key in keys:
            self.releasing.pop(key, None)

    def fence(self) -> None:
        """The membership is over: another member may have the queues already."""
        self._is_fenced = True
        self.assigned, self.releasing, self.claimed = {}, {}, {}
        self.believes_until_ms = None

    # --- claims -----------------------------------------------------------------------------------

    def to_claim(self) -> dict[QueueKey, int]:
        """The assigned queues that are not claimed yet, with their numbers. Those to release first are left out."""
        return {
            key: number
            for key, number in self.assigned.items()
            if key not in self.claimed and key not in self.releasing
        }

    def takes_claim(self, key: QueueKey, number: int, version: int, now_ms: int) -> bool:
        """Whether the answer to a claim counts. Args: `version`: the one for which the queue was claimed.

        The offset of an older answer may be below what was committed since.
        """
        return (
            version == self.version
            and self.believes(now_ms)
            and key not in self.claimed
            and key not in self.releasing
            and self.assigned.get(key) == number
        )

    def took_claim(self, key: QueueKey, number: int) -> None:
        """The shard of a queue has confirmed its claim."""
        self.claimed[key] = number

    def lost(self, key: QueueKey, number: int) -> bool:
        """The shard of a queue has refused this number: another member has the queue, or an operator took it.

        Returns: whether it was the number under which this member has the queue.
        """
        is_assigned = self.assigned.get(key) == number
        if is_assigned:
            del self.assigned[key]
            self.claimed.pop(key, None)
            self._has_lost = True
        is_releasing = self.releasing.get(key) == number
        if is_releasing:
            del self.releasing[key]
        return is_assigned or is_releasing

    # --- reading ----------------------------------------------------------------------------------

    def believes(self, now_ms: int) -> bool:
        """Whether its queues are still its own."""
        return self.believes_until_ms is not None and now_ms < self.believes_until_ms

    def may_read(self, key: QueueKey, now_ms: int) -> bool:
        """Whether messages of a queue may be returned to the program."""
        return key in self.claimed and not self.is_paused and self.believes(now_ms)

    def commit_numbers(self, keys: Iterable[QueueKey]) -> Mapping[QueueKey, int]:
        """The numbers under which offsets are committed: of queues that it reads, and of those to release."""
        owned = {**self.claimed, **self.releasing}
        return {key: owned[key] for key in keys if key in owned}
