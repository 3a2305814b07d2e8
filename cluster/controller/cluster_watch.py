"""Judges a cluster by what its replicas say of themselves over time. Pure: the caller gives rows and times.

Home      The home of a leadership is the replica that was given it last: by an operator, by `restart-all`, by a leader
          that handed over. At first it is the replica that leads when the watch begins. A leader whose process ends or
          is silent gives nothing: its home stays, and the watch suggests to give the leadership back, once every
          replica has been complete for QUIET_S without a change. So an operator's move is never taken back.
Lag       A replica lags if it lacks what its leader had confirmed LAG_S before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

#: a replica may lack what its leader confirmed within so many seconds
LAG_S = 10.0
#: how long every replica must have been complete, without any change, before a suggestion, and after one
QUIET_S = 30.0
#: a home that is lost again so soon after it got its leadership back is a home no more
STEADY_S = 600.0


class ReplicaFacts(NamedTuple):
    """What one replica says of itself, or what Ray says of it."""

    shard: int
    replica: int
    #: of `CommitLogActor.ready`, or "MISSING"
    state: str
    leads: bool = False
    epoch: int = 0
    is_complete: bool = False
    #: everything below it is confirmed, as far as this replica knows
    confirmed: int = 0
    #: of its CommitLog; None: no answer
    pid: int | None = None

    @property
    def is_running(self) -> bool:
        """Whether it does what its role asks of it."""
        return self.state == "RUNNING"


class Move(NamedTuple):
    """A suggestion: let this replica lead."""

    shard: int
    replica: int
    #: that leads now
    leader: int


class ShardWatch:
    """One shard."""

    def __init__(self) -> None:
        #: that leads now; None: none does
        self.leader: int | None = None
        #: since when none leads; None: one does
        self.without_since_s: float | None = None
        #: another replica has taken over so often
        self.changes = 0
        #: the replica that was given the leadership last
        self.home: int | None = None
        #: replicas that are down, not complete or lag
        self.lacking: list[int] = []
        #: the highest epoch of a leader so far: one of an older epoch leads no more
        self._epoch = 0
        #: the last leader, as it was
        self._last: ReplicaFacts | None = None
        #: when the home got its leadership back last
        self._returned_s: float | None = None
        #: (time, what this leader had confirmed then), oldest first
        self._confirmed: deque[tuple[float, int]] = deque()

    def observe(self, now_s: float, rows: Sequence[ReplicaFacts]) -> None:
        """Take the rows of all replicas of this shard."""
        leading = [row for row in rows if row.leads and row.is_running and row.epoch >= self._epoch]
        newest = max(leading, key=lambda row: row.epoch, default=None)
        if newest is None:
            self.leader = None
            if self.without_since_s is None:
                self.without_since_s = now_s
            self._confirmed.clear()
        else:
            self._note_leader(now_s, newest, rows)
        self.lacking = [row.replica for row in rows if self._lacks(row)]

    def without_leader_s(self, now_s: float) -> float:
        """For how long none has led."""
        return 0.0 if self.without_since_s is None else now_s - self.without_since_s

    def _note_leader(
        self, now_s: float, newest: ReplicaFacts, rows: Sequence[ReplicaFacts]
    ) -> None:
        if self._last is None:
            self.home = newest.replica
        elif newest.replica != self._last.replica:
            self.changes += 1
            self._update_home(now_s, newest.replica, self._last, rows)
        if newest.epoch != self._epoch:
            self._confirmed.clear()

        self.leader, self.without_since_s = newest.replica, None
        self._epoch, self._last = newest.epoch, newest
        self._confirmed.append((now_s, newest.confirmed))
        while len(self._confirmed) > 1 and self._confirmed[1][0] <= now_s - LAG_S:
            self._confirmed.popleft()

    def _update_home(
        self, now_s: float, leader: int, before: ReplicaFacts, rows: Sequence[ReplicaFacts]
    ) -> None:
        handed_over = any(
            row.replica == before.replica
            and row.is_running
            and row.pid == before.pid
            and not row.leads
            for row in rows
        )
        just_returned = self._returned_s is not None and now_s - self._returned_s < STEADY_S
        if leader == self.home:
            self._returned_s = now_s
        elif handed_over or (before.replica == self.home and just_returned):
            self.home = leader

    def _lacks(self, row: ReplicaFacts) -> bool:
        if not row.is_running or not row.is_complete:
            return True
        if not self._confirmed or row.replica == self.leader:
            return False
        at_s, confirmed = self._confirmed[0]
        is_old = at_s <= self._confirmed[-1][0] - LAG_S
        return is_old and row.confirmed < confirmed


class ClusterWatch:
    """All shards of a cluster. Callers: one thread."""

    def __init__(self) -> None:
        self._shards: dict[int, ShardWatch] = {}
        self._rows: list[ReplicaFacts] = []
        self._now_s = 0.0
        #: what must stay as it is for QUIET_S, and since when it does
        self._seen: list[tuple[Any, ...]] = []
        self._quiet_since_s = 0.0

    def observe(self, now_s: float, rows: Iterable[ReplicaFacts]) -> None:
        """Take a row for each replica of each shard. Args: `now_s`: a monotonic time."""
        self._now_s, self._rows = now_s, list(rows)
        by_shard: dict[int, list[ReplicaFacts]] = {}
        for row in self._rows:
            by_shard.setdefault(row.shard, []).append(row)
        for shard, mine in by_shard.items():
            self._shards.setdefault(shard, ShardWatch()).observe(now_s, mine)

        seen: list[tuple[Any, ...]] = [row._replace(confirmed=0) for row in self._rows]
        if seen != self._seen or not self._is_whole():
            self._seen, self._quiet_since_s = seen, now_s

    def _is_whole(self) -> bool:
        return all(each.leader is not None and not each.lacking for each in self._shards.values())

    def leaders(self) -> dict[int, int]:
        """Shard -> the replica that leads it, of the shards that have a leader."""
        return {
            shard: each.leader for shard, each in self._shards.items() if each.leader is not None
        }

    def suggest(self, may_lead: Callable[[int, int], bool]) -> Move | None:
        """A leadership to give back to its home now; None: none. After a suggestion the next one waits for QUIET_S.

        Args: `may_lead`: whether the leadership of a shard may go back to a replica.
        """
        if not self._is_whole() or self._now_s - self._quiet_since_s < QUIET_S:
            return None
        for shard, each in sorted(self._shards.items()):
            home, leader = each.home, each.leader
            if home is None or leader is None or home == leader or not may_lead(shard, home):
                continue
            self._quiet_since_s = self._now_s
            return Move(shard, home, leader)
        return None

    def metrics(self) -> dict[str, int | dict[tuple[str, ...], int]]:
        """The values of CONTROLLER_METRICS that follow from what was observed."""
        shards = sorted(self._shards.items())
        return {
            "raymq_shards_without_leader": sum(each.leader is None for _, each in shards),
            "raymq_shard_without_leader_seconds": {
                (str(shard),): round(each.without_leader_s(self._now_s)) for shard, each in shards
            },
            "raymq_under_replicated_shards": sum(bool(each.lacking) for _, each in shards),
            "raymq_down_replicas": sum(not row.is_running for row in self._rows),
            "raymq_incomplete_replicas": sum(
                row.is_running and not row.is_complete for row in self._rows
            ),
            "raymq_leader_changes_total": {(str(shard),): each.changes for shard, each in shards},
        }
