"""Commits of transactions whose rows, offsets and acks all lie on this shard: one append group, or nothing.

A transaction has a name that no other one has: a session, of 128 random bits, and its number in the session. The group
begins with a note of the name and the answer. So a repeated request gets the first answer, also from a new leader. A
group of which a crash left a part does not count. The newest number of each session is kept.

The first decision on a name counts. A commit is refused when a claim or a lease that it needs is over. That is noted as
well: a copy of the request that comes late must not make the refusal untrue. So is an abort.
"""

from __future__ import annotations

import itertools
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from raymq.store.base.errors import Rejected, Unavailable
from raymq.store.groups.claims import Claim
from raymq.store.groups.leases.offsets import pack_offsets
from raymq.store.groups.leases.requests import RefusedOffsets, SettleItem
from raymq.store.groups.transaction_requests import (
    ABORTED,
    COMMITTED,
    REFUSED,
    OffsetCommit,
    TransactionCommit,
    TransactionName,
    TransactionOutcome,
)
from raymq.store.put.inner_put import RecordGroup
from raymq.store.put.service_host import ServiceHost
from raymq.store.put.small_unit import CheckedPut
from raymq.store.records.requests import AppendedRows
from raymq.store.state.shard_state import OFFSETS, offsets_body
from raymq.store.state.topics import QueueKey, unknown_topic

from .lease_decisions import AckPlan

#: the name of the notes in `ShardState.progress`
SERVICE = "transactions"
#: sessions of a shard. A producer has one for each transaction that it has under way at the same time
SESSIONS_MAX = 10_000
#: a session is forgotten after so long; if there are too many, after `SESSION_KEPT_MS_MIN`. No request comes so late
SESSION_KEPT_MS = 24 * 3_600_000
SESSION_KEPT_MS_MIN = 3_600_000
#: how often old sessions are looked for, and how many one commit forgets
FORGET_EVERY_MS = 600_000
FORGOTTEN_MAX = 100
#: offsets that the refusal of a transaction names of each lease and queue
NAMED_MAX = 1_000
#: digits of a time: as many for each
_TIME_DIGITS = 16


class AckPlanner(Protocol):
    """What decides on acks: `LeaseService`."""

    def prepare_acks(self, group: str) -> None: ...

    def plan_acks(self, group: str, items: Sequence[SettleItem]) -> AckPlan: ...

    def note_acks(self, acks: AckPlan) -> None: ...


@dataclass
class _Draft:
    """A commit while it is decided."""

    records: list[tuple[str, bytes]] = field(default_factory=list)
    fenced: list[list[object]] = field(default_factory=list)
    lost: list[list[object]] = field(default_factory=list)
    acks: list[AckPlan] = field(default_factory=list)


class TransactionCommits:
    """Decides on transactions of one shard, while it leads. Threads: any may call."""

    def __init__(self, store: ServiceHost, leases: AckPlanner) -> None:
        self._store = store
        self._leases = leases
        self._forget_ms = 0
        #: decision -> how many transactions have met it here; the put lock guards it
        self.counts = dict.fromkeys((COMMITTED, REFUSED, ABORTED), 0)

    def commit(self, wanted: TransactionCommit) -> TransactionOutcome:
        """Append all of a transaction, or refuse it.

        Raises: Rejected for rows that cannot be stored or are too many, for an unknown topic, and for a name that is
        not the next one of its session; Unavailable, StorageFull. Nothing was stored, and nothing is decided.
        """
        for group, _ in wanted.acks:
            self._leases.prepare_acks(group)
        checked: list[CheckedPut] = []
        found: list[TransactionOutcome] = []
        try:
            known = self._known(wanted.name)
            if known is None:
                checked += map(self._store.put_path.check, wanted.puts)
            self._store.inner_put.put_groups(
                SERVICE, lambda: self._decide(wanted, checked, found.append)
            )
        finally:
            is_stored = bool(found) and not found[0].is_repeated
            is_stored = is_stored and found[0].decision == COMMITTED
            for put in checked if not is_stored else ():
                self._store.put_path.note_outcome(put, None)
        return found[0]

    def abort(self, name: TransactionName) -> TransactionOutcome:
        """Decide that a transaction is aborted, unless it is decided. Raises: as `commit`."""
        found: list[TransactionOutcome] = []

        def decide() -> Iterator[RecordGroup]:
            known = self._known(name)
            if known is None:
                yield self._noted(name, {"decision": ABORTED})
                known = TransactionOutcome(ABORTED)
                self.counts[ABORTED] += 1
            found.append(known)

        self._store.inner_put.put_groups(SERVICE, decide)
        return found[0]

    # --- decisions --------------------------------------------------------------------------------

    def _decide(
        self,
        wanted: TransactionCommit,
        checked: Sequence[CheckedPut],
        answer: Callable[[TransactionOutcome], None],
    ) -> Iterator[RecordGroup]:
        """The append group of a commit, or the note of its refusal. Has the put lock."""
        known = self._known(wanted.name)
        if known is not None:
            answer(known)
            return

        draft = _Draft()
        for put in wanted.puts:
            self._check_topic(put.topic)
        for commit in wanted.offsets:
            self._draft_offsets(draft, commit)
        for group, items in wanted.acks:
            self._draft_acks(draft, group, items)
        if draft.fenced or draft.lost:
            refusal = {"decision": REFUSED, "fenced": draft.fenced, "lost": draft.lost}
            yield self._noted(wanted.name, refusal)
            self.counts[REFUSED] += 1
            answer(TransactionOutcome(REFUSED, fenced=draft.fenced, lost=draft.lost))
            return

        firsts = [
            self._store.state.next_offsets.get((put.topic, put.queue_id), 0) for put in wanted.puts
        ]
        noted = self._noted(wanted.name, {"decision": COMMITTED, "firsts": firsts})
        yield noted._replace(records=draft.records, puts=checked)
        store_time_ms = self._store.state.store_time_ms
        self.counts[COMMITTED] += 1
        for acks in draft.acks:
            self._leases.note_acks(acks)
        for each, first in zip(checked, firsts, strict=True):
            self._report(each, first, store_time_ms)
        answer(TransactionOutcome(COMMITTED, firsts, store_time_ms))

    def _draft_offsets(self, draft: _Draft, wanted: OffsetCommit) -> None:
        group, topic, commits = wanted
        self._check_topic(topic)
        committed = self._store.state.offsets.get((group, topic), {})
        new, refused = self._store.claims.plan_commit(group, topic, commits, committed)
        draft.fenced += [_fenced(group, topic, *each) for each in refused.items()]
        if new:
            draft.records.append((OFFSETS, offsets_body(group, topic, new, self._believed_ms())))

    def _draft_acks(self, draft: _Draft, group: str, items: Sequence[SettleItem]) -> None:
        plan = self._leases.plan_acks(group, items)
        draft.acks.append(plan)
        draft.lost += [_lost(group, each) for each in plan.refused]
        if plan.record is not None:
            draft.records.append(plan.record)

    def _check_topic(self, topic: str) -> None:
        """Raises: Rejected for a topic that was deleted meanwhile. A system topic has guards of its own."""
        if topic not in self._store.state.topics and not self._store.put_path.has_guard(topic):
            raise unknown_topic(topic)

    def _report(self, put: CheckedPut, first: int, store_time_ms: int) -> None:
        count, end = put.encoded.count, self._store.log.end
        last = first + count - 1
        rows = AppendedRows(first, count, 0, store_time_ms, -1, end, last)
        self._store.put_path.note_outcome(put, rows)

    # --- names ------------------------------------------------------------------------------------

    @property
    def _sessions(self) -> Mapping[str, dict[str, Any]]:
        return self._store.state.progress.get(SERVICE, {})

    def _known(self, name: TransactionName) -> TransactionOutcome | None:
        """The first decision on a transaction; None: there is none.

        Raises: Rejected for a number that is not the session's newest, or the next one.
        """
        noted = self._sessions.get(name.session.hex())
        newest = 0 if noted is None else int(noted["number"])
        if noted is not None and name.number == newest:
            return TransactionOutcome(
                str(noted["decision"]),
                noted.get("firsts", ()),
                int(noted["at"]),
                noted.get("fenced", ()),
                noted.get("lost", ()),
                is_repeated=True,
            )

        if name.number != newest + 1:
            raise Rejected(
                f"the session has come to transaction {newest} on this shard, and {name.number} is neither that one "
                "nor the next: it is forgotten, or its session was. Begin another one",
                field="number",
                limit=newest + 1,
                found=name.number,
            )
        return None

    def _noted(self, name: TransactionName, facts: Mapping[str, object]) -> RecordGroup:
        """A group with nothing but the note of a decision. Has the put lock. Raises: Unavailable."""
        session = name.session.hex()
        forgotten = dict.fromkeys(self._forgotten(session))

        def note(store_time_ms: int) -> dict[str, object]:
            at = f"{store_time_ms:0{_TIME_DIGITS}d}"
            return {session: {"number": name.number, "at": at, **facts}, **forgotten}

        return RecordGroup((), note=note)

    def _forgotten(self, session: str) -> list[str]:
        """Sessions to forget with the next note. Raises: Unavailable for a new session, if there are too many."""
        sessions, now_ms = self._sessions, self._store.state.store_time_ms
        is_full = session not in sessions and len(sessions) >= SESSIONS_MAX
        # The time of the log may go on by jumps: then this looks sooner than need be.
        if not is_full and now_ms < self._forget_ms:
            return []
        self._forget_ms = now_ms + FORGET_EVERY_MS
        kept_ms = SESSION_KEPT_MS_MIN if is_full else SESSION_KEPT_MS
        old = (each for each, noted in sessions.items() if int(noted["at"]) < now_ms - kept_ms)
        found = [each for each in itertools.islice(old, FORGOTTEN_MAX) if each != session]
        if is_full and not found:
            raise Unavailable(
                f"the shard knows {len(sessions)} transactions of the last hour that may be repeated; ask again",
                field="session",
                limit=SESSIONS_MAX,
            )
        return found

    def _believed_ms(self) -> int:
        look = self._store.log.marks.clock_look
        return max(look.wall_ms - look.jumped_ms, self._store.state.store_time_ms)


def _fenced(group: str, topic: str, queue_id: int, claim: Claim) -> list[object]:
    return [group, topic, queue_id, claim.number, claim.member_id]


def _lost(group: str, refused: RefusedOffsets) -> list[object]:
    key: QueueKey = refused.key
    offsets = b64encode(pack_offsets(refused.offsets[:NAMED_MAX])).decode()
    return [group, refused.number, *key, offsets]
