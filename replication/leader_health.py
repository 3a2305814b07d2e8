"""Whether a leader should let another replica lead (R16 of docs/design.md).

Its log streams are silent or do not run, no majority can call it, or its disk is late or stalled.

No promise depends on this. `ElectionMachine` asks with each tick, and acts on the advice. Each reason that comes again
in the next leadership of the same replica counts later, because no other replica may be able to do better.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .election_events import LogFacts
from .election_limits import MOST_DOUBLINGS, ElectionLimits
from .leader_knowledge import LeaderKnowledge
from .quorum import majority


class Advice(NamedTuple):
    """What a leader should do."""

    reason: str
    #: the replica that should lead; None: whichever is elected
    successor: int | None
    #: the successor gets all of the log first. Otherwise the leader steps down now, and puts under way are unknown
    hands_over: bool = False


class LeaderView(NamedTuple):
    """A leader, and what it knows, at one time."""

    now_ms: int
    log: LogFacts
    known: LeaderKnowledge
    #: its EPOCH record is in the log
    leads: bool
    #: see `Patience`
    slowest_ms: int
    silence_ms: int

    def heard_lately(self, replica: int) -> bool:
        """Whether a replica has answered within `silence_ms`."""
        return self.now_ms - self.known.heard_ms[replica] <= self.silence_ms


class LeaderHealth:
    """The advice of one process, and how often it was given in a row. Callers: one at a time, unless they only ask."""

    def __init__(
        self, me: int, members: Sequence[int], electable: Sequence[int], limits: ElectionLimits
    ) -> None:
        """Args: `me`: this replica. `members`: all, this one included. `electable`: those that may lead."""
        self._me = me
        self._members = tuple(members)
        self._electable = tuple(electable)
        self._is_sole = self._electable == (me,)
        self._limits = limits
        #: leaderships in a row that ended because the log streams were silent
        self.silent_leaderships = 0
        #: ... because the own process for log streams did not run
        self.mute_leaderships = 0
        #: ... that were handed over because no majority could call this replica
        self.uncalled_leaderships = 0
        #: ... because the own disk stalled
        self.stalled_leaderships = 0

    # --- what is seen -----------------------------------------------------------------------------

    def note_streams(self, known: LeaderKnowledge) -> None:
        """Note that a follower has acknowledged over its log stream."""
        if 1 + len(known.streamed_ms) >= majority(len(self._members)):
            self.silent_leaderships = 0

    def note_stored(self) -> None:
        """Note that the own disk, which takes appends, has stored more, while another replica leads."""
        self.stalled_leaderships = 0

    # --- advice -----------------------------------------------------------------------------------

    def misses_majority(self, last_ms: dict[int, int], silence_ms: int, now_ms: int) -> bool:
        """Whether no majority was heard for so long. A sole candidate stays, because no other can lead.

        Args: `last_ms`: replica -> when it was heard last.
        """
        heard = [member for member, at_ms in last_ms.items() if now_ms - at_ms <= silence_ms]
        return len({self._me, *heard}) < majority(len(self._members)) and not self._is_sole

    def watch_silence(self, view: LeaderView) -> Advice | None:
        """Let another replica lead when the log streams reach no majority, although a majority answers."""
        known = view.known
        silence_ms = self._limits.stream_silence_ms << min(self.silent_leaderships, MOST_DOUBLINGS)
        silence_ms += 3 * view.slowest_ms
        is_old = view.now_ms - known.since_ms > silence_ms
        is_silent = self.misses_majority(known.streamed_ms, silence_ms, view.now_ms)
        if not (is_old and is_silent and self._streaming_replicas(view)):
            return None

        self.silent_leaderships += 1
        # Its own times may be longer than those of this replica, which would lead again before.
        return Advice(
            f"the log streams reached no majority for {silence_ms} ms, although a majority "
            "answers: is the Replication process of the leader running?",
            self._streaming_successor(view),
        )

    def watch_streams(self, view: LeaderView) -> Advice | None:
        """Let another replica lead when the own process for log streams has ended, and that of another one runs.

        What the successor's log lacks cannot reach it. So this is no hand-over: puts under way are unknown.
        """
        known, limits = view.known, self._limits
        if view.log.can_stream:
            known.could_stream_ms, known.has_streamed = view.now_ms, True
            self.mute_leaderships = 0
            return None
        limit_ms = limits.streams_lost_ms if known.has_streamed else limits.streams_missing_ms
        limit_ms <<= min(self.mute_leaderships, MOST_DOUBLINGS)
        if self._is_sole or view.now_ms - known.could_stream_ms <= limit_ms:
            return None
        successor = self._streaming_successor(view)
        if successor is None:
            return None

        self.mute_leaderships += 1
        return Advice(
            f"its Replication process does not run for {limit_ms} ms, and that of replica {successor} does",
            successor,
        )

    def watch_calls(self, view: LeaderView) -> Advice | None:
        """Let another replica lead when no majority can call this one, and one can call that other.

        This leader calls the others, so that they answer it and store its log. Its clients have to call it.
        """
        known, limits = view.known, self._limits
        if self._may_be_called(self._me, view):
            known.called_ms, known.has_tried_uncalled = view.now_ms, False
            if len(self._callers(self._me, view)) >= majority(len(self._members)):
                self.uncalled_leaderships = 0
            return None
        limit_ms = limits.uncalled_ms << min(self.uncalled_leaderships, MOST_DOUBLINGS)
        is_due = view.now_ms - known.called_ms > limit_ms
        if self._is_sole or not is_due or not view.leads or known.hand_over_to is not None:
            return None
        successor = self.best_successor(view, is_called=True)
        if known.has_tried_uncalled and successor is not None:
            # What its log lacks did not reach it in time, and may never do.
            successor = self._streaming_successor(view, is_called=True)
        if successor is None:
            return None

        self.uncalled_leaderships += 1
        known.called_ms = view.now_ms
        hands_over, known.has_tried_uncalled = not known.has_tried_uncalled, True
        return Advice(
            f"no majority could call this replica for {limit_ms} ms, and one can call replica {successor}: does the "
            "server here listen, and is its certificate in order?",
            successor,
            hands_over,
        )

    def watch_lateness(self, view: LeaderView, *, has_advanced: bool) -> Advice | None:
        """Let another replica lead when the own disk is slower than others.

        Args: `has_advanced`: more of the log is durable than before.
        """
        self._measure_lateness(view, has_advanced=has_advanced)
        if view.known.late_ms <= self._limits.disk_late_ms:
            return None
        view.known.late_ms = 0
        return self._hand_over_to_best(
            view,
            f"a majority stores what this disk stores more than {self._disk_lag_ms(view)} ms later",
        )

    def watch_stall(self, view: LeaderView, *, has_advanced: bool) -> Advice | None:
        """Let another replica lead when the own disk has stored nothing for long.

        A leader without its EPOCH record has no follower yet: it steps down, and asks another replica to try at once.
        That one may wait longer for a leader than this one does, which would lead again before. Another leader hands
        over: nothing is cut. Args: as of `watch_lateness`.
        """
        known, log = view.known, view.log
        stall_ms = self._limits.disk_stall_ms << min(self.stalled_leaderships, MOST_DOUBLINGS)
        if log.is_writable and (has_advanced or log.durable >= log.end):
            known.stored_ms = view.now_ms
            if view.now_ms - known.since_ms > stall_ms:
                self.stalled_leaderships = 0
            return None
        if self._is_sole or view.now_ms - known.stored_ms <= stall_ms:
            return None

        known.stored_ms = view.now_ms
        if known.begun_end is None:
            self.stalled_leaderships += 1
            return Advice(
                f"the disk took no EPOCH record for {stall_ms} ms", self._next_candidate(view)
            )
        advice = self._hand_over_to_best(view, f"the disk stored nothing for {stall_ms} ms")
        self.stalled_leaderships += advice is not None
        return advice

    def _hand_over_to_best(self, view: LeaderView, reason: str) -> Advice | None:
        """The advice to hand over to the best successor; None: there is none."""
        successor = self.best_successor(view)
        return None if successor is None else Advice(reason, successor, hands_over=True)

    # --- successors -------------------------------------------------------------------------------

    def best_successor(self, view: LeaderView, *, is_called: bool = False) -> int | None:
        """The candidate with the most of this leader's log among those whose log streams are alive; None: none.

        Of several, the next one by number: if the disk of one that took over is no better, all get their turn.
        Args: `is_called`: only one that a majority can call, as their answers say. Callers: any thread.
        """
        known, count = view.known, max(self._members) + 1
        can_be_called = self._could_be_called if is_called else self._may_be_called
        ends = [
            (end, -((replica - self._me) % count), replica)
            for replica, end in list(known.durable_ends.items())
            if replica in self._electable
            and replica not in known.not_streaming
            and view.now_ms - known.streamed_ms[replica] <= view.silence_ms
            and can_be_called(replica, view)
        ]
        return max(ends)[2] if ends else None

    def _streaming_replicas(self, view: LeaderView) -> dict[int, int]:
        """The replicas that answer and could lead, and stream their logs -> the durable end of each."""
        known = view.known
        return {
            replica: known.durable_ends.get(replica, 0)
            for replica, (_, is_complete) in known.answers.items()
            if is_complete
            and replica in self._electable
            and replica not in known.not_streaming
            and view.heard_lately(replica)
        }

    def _streaming_successor(self, view: LeaderView, *, is_called: bool = False) -> int | None:
        """The replica with the most of this log that could stream, if enough would vote for it.

        Args: `is_called`: as of `best_successor`.
        """
        known = view.known
        can_be_called = self._could_be_called if is_called else self._may_be_called
        able = [
            (end, -replica)
            for replica, end in self._streaming_replicas(view).items()
            if can_be_called(replica, view)
        ]
        if not able:
            return None
        most, number = max(able)
        voters = [
            known.durable_ends.get(replica, 0) <= most
            for replica, (_, is_complete) in known.answers.items()
            if is_complete and view.heard_lately(replica)
        ]
        enough = majority(len(self._members))
        return -number if sum(voters) + (most >= view.log.end) >= enough else None

    def _next_candidate(self, view: LeaderView) -> int | None:
        """The next replica by number that answers and could lead, whichever log it has; None: there is none."""
        count = max(self._members) + 1
        able = [each for each in self._streaming_replicas(view) if self._may_be_called(each, view)]
        return min(able, key=lambda replica: (replica - self._me) % count, default=None)

    # --- calls ------------------------------------------------------------------------------------

    def _may_be_called(self, replica: int, view: LeaderView) -> bool:
        """Whether a majority may be able to call a replica: not so many others say that they cannot."""
        uncallable = self._known_uncallable(view)
        deniers = [each for each, found in uncallable.items() if replica in found]
        return len(self._members) - len(deniers) >= majority(len(self._members))

    def _could_be_called(self, replica: int, view: LeaderView) -> bool:
        """Whether a majority says that it can call a replica, and that one can call a majority, which may elect it."""
        known = self._known_uncallable(view)
        voters = {replica} | (known.keys() - known.get(replica, frozenset()))
        callers = self._callers(replica, view)
        return min(len(callers), len(voters)) >= majority(len(self._members))

    def _callers(self, replica: int, view: LeaderView) -> set[int]:
        """The replicas that do not say that they cannot call a replica, that one included."""
        known = self._known_uncallable(view)
        return {replica, *(each for each, found in known.items() if replica not in found)}

    def _known_uncallable(self, view: LeaderView) -> dict[int, frozenset[int]]:
        """For this leader, and each replica that answered it lately: those that it cannot call. Callers: any thread."""
        found = {
            replica: uncallable
            for replica, uncallable in list(view.known.uncallable.items())
            if view.heard_lately(replica)
        }
        found[self._me] = view.log.uncallable
        return found

    # --- disks ------------------------------------------------------------------------------------

    def _disk_lag_ms(self, view: LeaderView) -> int:
        """How late a disk may be in comparison. Where processes run late, their syncs do."""
        return self._limits.disk_lag_ms + view.slowest_ms

    def _measure_lateness(self, view: LeaderView, *, has_advanced: bool) -> None:
        """Compare the own disk with those of a majority without it. Where all share one slow disk, none is late."""
        known, log, limits = view.known, view.log, self._limits
        # After a pause of this process not all of the time counts.
        passed_ms = min(view.now_ms - known.watched_ms, limits.heartbeat_ms)
        known.watched_ms = view.now_ms

        if log.durable >= known.majority_end:
            ends = sorted(known.durable_ends.values(), reverse=True)
            enough = majority(len(self._members))
            known.majority_end = ends[enough - 1] if len(ends) >= enough else 0
            known.majority_end_ms = view.now_ms

        is_behind = log.durable < known.majority_end
        if is_behind and view.now_ms - known.majority_end_ms > self._disk_lag_ms(view):
            known.late_ms += passed_ms
        elif has_advanced or log.durable < log.end:
            known.late_ms = max(0, known.late_ms - passed_ms)
