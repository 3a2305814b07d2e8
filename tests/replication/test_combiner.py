"""The combiner against the rule for one put at a time, in every state that a few puts can be in."""

from __future__ import annotations

import random

import pytest

from raymq.replication.combiner import DEADLINE_STEP_MS, PutCombiner
from raymq.store.base.status import PutStatus
from raymq.store.config.promise import ACKS, FLUSHES, PROMISES, Acks, Ends, Flush, Promise

FLUSH_MS, REPLICA_MS = 500, 300
SEEDS = 150
STEPS = 60


class OnePut:
    """The rule, as thenCombine says it, for one put."""

    def __init__(self, end: int, since_ms: int) -> None:
        self.end, self.since_ms = end, since_ms
        self.outcome: PutStatus | None = None

    def settle(self, promise: Promise, ends: Ends, now_ms: int) -> None:
        if self.outcome is not None:
            return
        flush_done = promise.flush_end(ends) >= self.end
        replica_done = promise.replica_end(ends) >= self.end
        waited_ms = now_ms - self.since_ms
        if flush_done and replica_done:
            self.outcome = PutStatus.PUT_OK
        elif (flush_done or waited_ms >= FLUSH_MS) and (replica_done or waited_ms >= REPLICA_MS):
            self.outcome = (
                PutStatus.FLUSH_DISK_TIMEOUT if replica_done else PutStatus.FLUSH_SLAVE_TIMEOUT
            )


def test_a_put_that_waits_is_late_after_the_timeouts_of_now() -> None:
    promise = PROMISES["sync", True, "quorum"]
    combiner = PutCombiner(promise, flush_timeout_ms=FLUSH_MS, replica_timeout_ms=REPLICA_MS)
    combiner.add(1, 100, 0)
    ends = Ends(appended=100, committed=100, synced=100, replicated=0)
    assert combiner.combine(ends, 200) == []
    combiner.set_timeouts(FLUSH_MS, 100)
    assert [each.status for each in combiner.combine(ends, 200)] == [PutStatus.FLUSH_SLAVE_TIMEOUT]


class Answers:
    """CommitLog's side: puts in their order, answered by watermark and by entry."""

    def __init__(self, combiner: PutCombiner) -> None:
        self.combiner = combiner
        self.outcomes: list[PutStatus | None] = []
        self.ends: list[int] = []

    def put(self, end: int, since_ms: int) -> None:
        self.ends.append(end)
        self.outcomes.append(None)
        self.combiner.add(len(self.ends), end, since_ms)

    def combine(self, ends: Ends, now_ms: int) -> None:
        late = self.combiner.combine(ends, now_ms)
        for at, end in enumerate(self.ends):
            if self.outcomes[at] is None and end <= self.combiner.acknowledged:
                self.outcomes[at] = PutStatus.PUT_OK
            for entry in late:
                if self.outcomes[at] is None and at < entry.number and end <= entry.end:
                    self.outcomes[at] = entry.status


@pytest.mark.parametrize("flush", FLUSHES)
@pytest.mark.parametrize("has_followers", [False, True])
@pytest.mark.parametrize("acks", ACKS)
def test_every_put_gets_the_outcome_that_it_would_get_alone(
    flush: Flush, has_followers: bool, acks: Acks
) -> None:
    promise = PROMISES[flush, has_followers, acks]
    for seed in range(SEEDS):
        rng = random.Random(seed)
        answers = Answers(
            PutCombiner(promise, flush_timeout_ms=FLUSH_MS, replica_timeout_ms=REPLICA_MS)
        )

        alone: list[OnePut] = []
        ends, now_ms = Ends(0, 0, 0, 0), 0
        for _ in range(STEPS):
            # Steps of DEADLINE_STEP_MS: puts of one step share a deadline, those of two do not.
            now_ms += rng.choice([0, 1, 1, 5, 20]) * DEADLINE_STEP_MS
            appended = ends.appended + rng.choice([0, 0, 10, 30])
            committed = rng.randint(ends.committed, appended)
            synced = rng.choice([ends.synced, rng.randint(ends.synced, committed)])
            replicated = rng.choice([ends.replicated, rng.randint(ends.replicated, committed)])
            ends = Ends(appended, committed, synced, replicated)

            for _ in range(rng.choice([0, 0, 1, 3])):
                # The last put, or one sent again.
                end = appended - rng.choice([0, 0, 0, 7])
                if end > answers.combiner.acknowledged:
                    answers.put(end, now_ms)
                    alone.append(OnePut(end, now_ms))

            answers.combine(ends, now_ms)
            for put in alone:
                put.settle(promise, ends, now_ms)
            assert answers.outcomes == [put.outcome for put in alone], f"seed {seed}"


def combiner(flush: Flush = "sync", acks: Acks = "quorum") -> PutCombiner:
    return PutCombiner(
        PROMISES[flush, True, acks], flush_timeout_ms=FLUSH_MS, replica_timeout_ms=REPLICA_MS
    )


def test_a_put_that_is_sent_again_waits_as_long_as_the_first_time() -> None:
    combined, away = combiner(), Ends(100, 100, 100, 0)
    combined.add(1, 100, 0)
    assert combined.combine(away, REPLICA_MS) == [(1, 100, PutStatus.FLUSH_SLAVE_TIMEOUT)]
    combined.add(2, 100, REPLICA_MS)
    assert combined.combine(away, 2 * REPLICA_MS - 1) == []
    assert combined.combine(away, 2 * REPLICA_MS) == [(2, 100, PutStatus.FLUSH_SLAVE_TIMEOUT)]


def test_late_puts_are_reported_once() -> None:
    combined, stuck = combiner(), Ends(200, 200, 100, 0)
    combined.add(1, 100, 0)
    combined.add(2, 200, 0)
    first = combined.combine(stuck, REPLICA_MS)
    assert first == [(2, 100, PutStatus.FLUSH_SLAVE_TIMEOUT)]
    assert combined.combine(stuck, REPLICA_MS + 1) == []
    assert combined.waiting
    assert combined.combine(stuck, FLUSH_MS)[-1] == (2, 200, PutStatus.FLUSH_SLAVE_TIMEOUT)
    assert not combined.waiting


def test_an_end_that_falls_does_not_revoke_an_acknowledgement() -> None:
    combined = combiner()
    combined.combine(Ends(100, 100, 100, 100), 0)
    # A new session of replication finds out again what the follower has.
    combined.combine(Ends(200, 200, 200, 0), 1)
    assert combined.acknowledged == 100


def test_many_puts_keep_few_deadlines() -> None:
    combined = combiner()
    for number in range(10_000):
        combined.add(number, 10 * number + 10, number // 10)
    assert len(combined._groups) <= 1_000 / DEADLINE_STEP_MS + 1
