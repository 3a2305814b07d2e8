"""Transactions of one shard: their rows, offsets and acks come together, or not at all, and each is decided once."""

from __future__ import annotations

import json
from base64 import b64decode
from pathlib import Path

import pytest

from raymq.store.base.errors import Rejected, StorageFull, Unavailable
from raymq.store.base.running_flags import DISK_FULL
from raymq.store.groups.claims import Claim, Commit, claim_value
from raymq.store.groups.leases.entries import SettleOutcome
from raymq.store.groups.leases.offsets import read_offsets
from raymq.store.groups.leases.reader import PackedReader
from raymq.store.groups.leases.requests import LeaseAnswer, LeaseRequest, SettleItem, offsets_of
from raymq.store.groups.transaction_requests import (
    ABORTED,
    COMMITTED,
    REFUSED,
    GroupAcks,
    OffsetCommit,
    TransactionCommit,
    TransactionName,
    TransactionOutcome,
)
from raymq.store.put.inner_message import InnerMessage
from raymq.store.put.put_hooks import PutHook
from raymq.store.records.requests import AppendedRows, PutRequest
from raymq.store.services import transaction_commits
from raymq.store.services.leases import LeaseService
from raymq.store.services.transaction_commits import SERVICE, TransactionCommits
from tests.support.batches import batch
from tests.support.confirming import confirm
from tests.support.engine import Engine

GROUP, WORKERS = "stream", "workers"
KEY = ("t", 0)
SESSION = b"s" * 16


class Shard(Engine):
    """A store with six messages in queue 0 of t, of which a group's worker has the first four."""

    def open(self) -> None:
        super().open()
        self.leases = LeaseService(self.store)
        self.commits = TransactionCommits(self.store, self.leases)
        self.number = getattr(self, "number", 0)

    def begin(self) -> None:
        for number in range(6):
            self.store.put_inner([InnerMessage("t", 0, b"input %d" % number)])
        self.confirm()
        self.claim(3)
        self.lease(1, 4)

    def claim(self, number: int) -> None:
        value = claim_value(GROUP, "t", {0: Claim(number, "member")})
        self.store.inner_put.put_state_record("CLAIM", json.dumps(value).encode())

    def lease(self, request: int, count: int, session: bytes = b"w") -> int:
        asked = LeaseRequest(session, request, count, 1_000)
        answer = self.leases.lease(WORKERS, asked, [KEY]).plan.answer
        assert isinstance(answer, LeaseAnswer)
        return answer.number

    def wanted(
        self, *bodies: bytes, number: int | None = None, **parts: object
    ) -> TransactionCommit:
        if number is None:
            self.number += 1
        name = TransactionName(SESSION, number or self.number)
        rows = [PutRequest("t", 1, batch([*bodies], tag="x"), None, 0, 0, "quorum")]
        return TransactionCommit(name, rows if bodies else (), **parts)  # type: ignore[arg-type]

    def committed(self) -> int | None:
        return self.store.state.offsets.get((GROUP, "t"), {}).get(0)

    def open_offsets(self) -> list[int]:
        """Leased offsets that are not settled."""
        columns = self.store.leases.group(WORKERS).queues[KEY]
        return [int(each) for each in columns.unsettled()]


def offset_of(offset: int, number: int = 3) -> OffsetCommit:
    return OffsetCommit(GROUP, "t", {0: Commit(number, offset)})


def acks_of(*offsets: int, lease: int = 1) -> GroupAcks:
    item = SettleItem(lease, KEY, offsets_of(list(offsets)), SettleOutcome.ACKED)
    return GroupAcks(WORKERS, [item])


@pytest.fixture
def shard(tmp_path: Path) -> Shard:
    made = Shard(tmp_path)
    made.begin()
    return made


def test_rows_offsets_and_acks_come_together(shard: Shard) -> None:
    wanted = shard.wanted(b"a", b"b", offsets=[offset_of(4)], acks=[acks_of(0, 2)])
    found = shard.commits.commit(wanted)
    assert (found.decision, found.first_offsets, found.is_repeated) == (COMMITTED, [0], False)
    assert shard.bodies() == [b"a", b"b"]
    assert shard.committed() == 4
    assert shard.open_offsets() == [1, 3]
    assert {each.store_time_ms for each in shard.read()} == {found.store_time_ms}


def test_nothing_of_a_commit_is_seen_before_it_is_confirmed(shard: Shard) -> None:
    first = shard.store.log.end
    shard.commits.commit(shard.wanted(b"a", offsets=[offset_of(4)]))
    assert shard.store.queue_range("t", 1) == (0, 0)
    # The visible end of a store without a leader is the confirmed one.
    assert shard.store.state.confirmed_offsets(GROUP, "t", first) == {}
    shard.confirm()
    assert shard.store.queue_range("t", 1) == (0, 1)


@pytest.mark.parametrize("is_crashed", [False, True])
def test_a_repeated_commit_gets_the_first_answer(shard: Shard, is_crashed: bool) -> None:
    wanted = shard.wanted(b"a", b"b", offsets=[offset_of(4)], acks=[acks_of(0, 1)])
    shard.commits.commit(shard.wanted(b"before", number=1))
    wanted = TransactionCommit(
        TransactionName(SESSION, 2), wanted.puts, wanted.offsets, wanted.acks
    )
    first = shard.commits.commit(wanted)
    if is_crashed:
        shard.crash()
    again = shard.commits.commit(wanted)
    assert again == TransactionOutcome(
        COMMITTED, first.first_offsets, first.store_time_ms, is_repeated=True
    )
    assert shard.bodies() == [b"before", b"a", b"b"]


def test_a_snapshot_has_the_first_answer(shard: Shard) -> None:
    wanted = shard.wanted(b"a")
    first = shard.commits.commit(wanted)
    shard.store.inner_put.begin_next_file()
    shard.crash()
    assert shard.commits.commit(wanted).first_offsets == first.first_offsets


@pytest.mark.parametrize("is_crashed", [False, True])
def test_a_commit_under_an_old_claim_is_refused_whole_and_for_ever(
    shard: Shard, is_crashed: bool
) -> None:
    shard.claim(5)
    wanted = shard.wanted(b"a", offsets=[offset_of(4)], acks=[acks_of(0)])
    refused = shard.commits.commit(wanted)
    assert refused.decision == REFUSED
    assert refused.fenced == [[GROUP, "t", 0, 5, "member"]]
    # A copy of the request that comes when nothing stands against it any more.
    shard.claim(3)
    if is_crashed:
        shard.crash()
    again = shard.commits.commit(wanted)
    assert (again.decision, again.fenced, again.is_repeated) == (REFUSED, refused.fenced, True)
    assert shard.bodies() == []
    assert shard.committed() is None
    assert shard.open_offsets() == [0, 1, 2, 3]


def test_a_commit_of_a_lost_lease_is_refused_and_names_its_offsets(shard: Shard) -> None:
    shard.clock.advance(2_000)
    assert shard.lease(1, 2, b"another") == 2
    refused = shard.commits.commit(shard.wanted(b"a", acks=[acks_of(0, 1, 2)]))
    assert refused.decision == REFUSED
    ((group, lease, topic, queue, packed),) = refused.lost
    assert (group, lease, topic, queue) == (WORKERS, 1, *KEY)
    assert read_offsets(PackedReader(b64decode(packed))).tolist() == [0, 1]
    assert shard.bodies() == []
    assert shard.open_offsets() == [0, 1, 2, 3]
    # What is still held may be acknowledged by another transaction.
    assert shard.commits.commit(shard.wanted(b"b", acks=[acks_of(2)])).decision == COMMITTED


def test_the_first_decision_counts(shard: Shard) -> None:
    late = shard.wanted(b"late")
    assert shard.commits.abort(late.name).decision == ABORTED
    assert shard.commits.commit(late).decision == ABORTED
    done = shard.wanted(b"done")
    shard.commits.commit(done)
    assert shard.commits.abort(done.name).decision == COMMITTED
    assert shard.commits.counts == {COMMITTED: 1, REFUSED: 0, ABORTED: 1}
    shard.crash()
    assert shard.commits.abort(done.name).is_repeated
    assert shard.bodies() == [b"done"]


def test_a_number_that_is_not_the_next_one_is_rejected(shard: Shard) -> None:
    shard.commits.commit(shard.wanted(b"1"))
    shard.commits.commit(shard.wanted(b"2"))
    for number in (1, 4):
        with pytest.raises(Rejected) as caught:
            shard.commits.commit(shard.wanted(b"x", number=number))
        assert caught.value.limit == 3
    assert shard.bodies() == [b"1", b"2"]


def test_what_is_wrong_is_not_decided(shard: Shard) -> None:
    wanted = shard.wanted(b"a", offsets=[OffsetCommit(GROUP, "gone", {0: Commit(3, 1)})])
    with pytest.raises(Rejected, match="gone"):
        shard.commits.commit(wanted)
    large = [b"x" * 10_000] * 20
    with pytest.raises(Rejected, match="appended together"):
        shard.commits.commit(shard.wanted(*large, number=1))
    assert shard.commits.commit(shard.wanted(b"b", number=1)).decision == COMMITTED


def test_a_full_disk_refuses_rows_and_takes_a_refusal(shard: Shard) -> None:
    shard.store.flags.set(DISK_FULL)
    with pytest.raises(StorageFull):
        shard.commits.commit(shard.wanted(b"a"))
    assert shard.commits.abort(TransactionName(SESSION, 1)).decision == ABORTED


def test_hooks_see_the_rows_and_what_became_of_them(shard: Shard) -> None:
    found: list[tuple[int, int | None]] = []

    class Noting(PutHook):
        def after_batch(self, request: PutRequest, appended: AppendedRows | None) -> None:
            found.append((request.batch.num_rows, appended and appended.first_offset))

    shard.store.hooks.append(Noting())
    shard.commits.commit(shard.wanted(b"a", b"b"))
    shard.commits.commit(shard.wanted(b"c", offsets=[offset_of(4, number=2)]))
    assert found == [(2, 0), (1, None)]


def test_old_sessions_are_forgotten(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transaction_commits, "SESSIONS_MAX", 3)

    def commit(number: int) -> None:
        name = TransactionName(bytes([number]) * 16, 1)
        shard.commits.commit(TransactionCommit(name, shard.wanted(b"x").puts))

    for number in range(3):
        commit(number)
    with pytest.raises(Unavailable, match="transactions of the last hour"):
        commit(3)
    shard.clock.advance(2 * transaction_commits.SESSION_KEPT_MS_MIN)
    shard.store.put_inner([InnerMessage("t", 0, b"later")])
    commit(3)
    assert list(shard.store.state.progress[SERVICE]) == ["03" * 16]
    confirm(shard.store)
