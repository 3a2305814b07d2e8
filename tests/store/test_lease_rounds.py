"""Calls of many workers that wait at the same time: they are decided together, and each gets its own answer."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from raymq.store import InnerMessage
from raymq.store.base.errors import Rejected
from raymq.store.groups.leases.entries import SettleOutcome
from raymq.store.groups.leases.lease_table import LEASE, SETTLE
from raymq.store.groups.leases.options import LeaseOptions
from raymq.store.groups.leases.requests import (
    LeaseAnswer,
    LeaseRequest,
    SettleAnswer,
    SettleItem,
    SettleRequest,
    offsets_of,
)
from raymq.store.services.lease_decisions import LeaseDecision
from raymq.store.services.leases import LeaseService
from tests.support.engine import Engine
from tests.support.waiting import until

from .test_leases import KEY, folded, log_records, put

QUEUES = [("t", 0), ("t", 1)]
WAIT_S = 20


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = Engine(tmp_path)
    put(made, 40)
    put(made, 40, queue_id=1)
    yield made
    made.store.close()


class Together:
    """Lets calls wait at the same time: a first one waits for the put lock, and those after it for that one."""

    def __init__(self, engine: Engine, service: LeaseService) -> None:
        self._lock = engine.store.inner_put._lock.thread_lock
        self._decisions = service._decisions

    def run(self, calls: Sequence[Callable[[], LeaseDecision]]) -> list[LeaseDecision | Exception]:
        """The answer or the error of each. All but the first one are decided in one round."""
        found: list[LeaseDecision | Exception | None] = [None] * len(calls)

        def call(index: int) -> None:
            try:
                found[index] = calls[index]()
            except Exception as error:
                found[index] = error

        threads = [threading.Thread(target=call, args=(index,)) for index in range(len(calls))]
        with self._lock:
            threads[0].start()
            self._await_gathered(0)
            for number, thread in enumerate(threads[1:], 1):
                thread.start()
                self._await_gathered(number)
        for thread in threads:
            thread.join(WAIT_S)
        return [each for each in found if each is not None]

    def _await_gathered(self, count: int) -> None:
        decisions = self._decisions
        until(
            lambda: decisions._is_deciding and len(decisions._gathered) == count,
            lambda: time.sleep(0.0005),
        )


def service_of(engine: Engine, **options: Any) -> LeaseService:
    service = LeaseService(engine.store)
    service.configure("g", LeaseOptions(**options))
    # What a group needs before its first lease, and the sessions.
    for number in range(20):
        service.lease("g", LeaseRequest(session(number), 1, 0), QUEUES)
        item = SettleItem(1, KEY, offsets_of([]), SettleOutcome.ACKED)
        service.settle("g", SettleRequest(session(number), 1, [item]))
    return service


def session(number: int) -> bytes:
    return b"session %d" % number


def lease(service: LeaseService, number: int, request: int, count: int = 1) -> LeaseDecision:
    return service.lease("g", LeaseRequest(session(number), request, count), QUEUES)


def settle(service: LeaseService, number: int, settle: int, *items: SettleItem) -> LeaseDecision:
    return service.settle("g", SettleRequest(session(number), settle, items))


def acked(number: int, offsets: list[int], key: tuple[str, int] = KEY) -> SettleItem:
    return SettleItem(number, key, offsets_of(offsets), SettleOutcome.ACKED)


def leased(decision: LeaseDecision | Exception) -> tuple[int, list[tuple[int, int]]]:
    """The number of a lease, and queue and offset of its messages."""
    assert isinstance(decision, LeaseDecision), decision
    answer = decision.plan.answer
    assert isinstance(answer, LeaseAnswer)
    parts = answer.parts
    return answer.number, [(part.key[1], each) for part in parts for each in part.offsets.tolist()]


def refused(decision: LeaseDecision | Exception) -> list[int]:
    assert isinstance(decision, LeaseDecision), decision
    answer = decision.plan.answer
    assert isinstance(answer, SettleAnswer)
    return [each for part in answer.refused for each in part.offsets.tolist()]


def kinds(engine: Engine, start: int) -> Counter[str]:
    records = log_records(engine.store, engine.store.log.start)
    return Counter(kind for at, _, kind, _ in records if at >= start)


def check_fold(engine: Engine) -> None:
    """The log says the same as the state."""
    records = log_records(engine.store, engine.store.log.start)
    wanted = folded(records, engine.store.log.end)
    assert list(engine.store.leases.packed_records()) == list(wanted.packed_records())


def test_requests_that_wait_together_share_a_record_and_get_other_messages(engine: Engine) -> None:
    service = service_of(engine)
    start = engine.store.log.end
    calls = [lambda each=each: lease(service, each, 2) for each in range(12)]
    found = [leased(each) for each in Together(engine, service).run(calls)]
    assert kinds(engine, start) == {LEASE: 2}
    assert len({number for number, _ in found}) == 12
    assert sorted(each for _, offsets in found for each in offsets) == [(0, at) for at in range(12)]
    check_fold(engine)
    assert engine.store.leases.groups["g"].in_flight == 12


def test_settlements_that_wait_together_share_a_record_and_are_refused_alone(
    engine: Engine,
) -> None:
    service = service_of(engine)
    numbers = [leased(lease(service, each, 2))[0] for each in range(12)]
    start = engine.store.log.end

    calls = [
        lambda each=each: settle(service, each, 2, acked(numbers[each], [each]))
        for each in range(10)
    ]
    # One names another's message, and one is none.
    calls.append(lambda: settle(service, 10, 2, acked(numbers[10], [3, 10])))
    calls.append(lambda: settle(service, 11, 2, acked(-1, [11])))
    *found, wrong = Together(engine, service).run(calls)
    assert [refused(each) for each in found] == [*[[]] * 10, [3]]
    assert isinstance(wrong, Rejected)
    assert kinds(engine, start) == {SETTLE: 2}
    assert engine.store.state.offsets["g", "t"][0] == 11
    check_fold(engine)


def test_repeated_calls_get_the_first_answer_also_when_they_wait_together(engine: Engine) -> None:
    service = service_of(engine)
    together = Together(engine, service)
    first, second, third = together.run(
        [lambda: lease(service, 0, 2), *[lambda: lease(service, 1, 2)] * 2]
    )
    assert leased(second) == leased(third) != leased(first)
    number, _ = leased(second)

    other, *found = together.run(
        [
            lambda: settle(service, 0, 2, acked(leased(first)[0], [0])),
            *[lambda: settle(service, 1, 2, acked(number, [1]), acked(99, [5]))] * 2,
            # Another session names the same lease.
            lambda: settle(service, 2, 2, acked(number, [1])),
        ]
    )
    assert [refused(each) for each in (other, *found)] == [[], [5], [5], [1]]
    check_fold(engine)


def test_leases_of_what_was_leased_before_are_decided_alone(engine: Engine) -> None:
    service = service_of(engine, backoff_ms=(0,))
    number, _ = leased(lease(service, 0, 2, 4))
    engine.clock.advance(60_000)
    # The settlement comes first, although it came last: it makes room.
    found = Together(engine, service).run(
        [
            lambda: lease(service, 5, 2, 0),
            lambda: lease(service, 1, 2, 2),
            lambda: lease(service, 2, 2, 2),
            lambda: lease(service, 3, 2, 2),
            lambda: settle(service, 0, 2, acked(number, [0, 1])),
        ]
    )
    assert refused(found[4]) == []
    assert [leased(each)[1] for each in found[1:4]] == [
        [(0, 2), (0, 3)],
        [(0, 4), (0, 5)],
        [(0, 6), (0, 7)],
    ]
    check_fold(engine)


def test_no_more_messages_are_leased_together_than_may_be_in_flight(engine: Engine) -> None:
    service = service_of(engine, max_in_flight=5)
    calls = [lambda each=each: lease(service, each, 2, 2) for each in range(6)]
    found = [leased(each)[1] for each in Together(engine, service).run(calls)]
    assert [len(each) for each in found] == [2, 2, 1, 0, 0, 0]
    check_fold(engine)


def test_a_failed_append_takes_nothing_of_a_round(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = service_of(engine)
    append = engine.store.log.append
    failing = [False]

    def fail(*args: Any, **options: Any) -> Any:
        if failing[0]:
            raise OSError("the disk is gone")
        return append(*args, **options)

    monkeypatch.setattr(engine.store.log, "append", fail)
    failing[0] = True
    calls = [lambda each=each: lease(service, each, 2) for each in range(4)]
    found = Together(engine, service).run(calls)
    assert [type(each) for each in found] == [OSError] * 4
    failing[0] = False
    found = Together(engine, service).run(calls)
    assert sorted(leased(each)[1] for each in found) == [[(0, at)] for at in range(4)]
    check_fold(engine)


def test_groups_that_wait_together_have_records_of_their_own(engine: Engine) -> None:
    service = service_of(engine)
    for number in range(2):
        service.lease("h", LeaseRequest(session(number), 1, 0), QUEUES)
        service.settle("h", SettleRequest(session(number), 1, []))
    start = engine.store.log.end

    def other(number: int) -> LeaseDecision:
        return service.lease("h", LeaseRequest(session(number), 2, 1), QUEUES)

    found = Together(engine, service).run(
        [
            lambda: lease(service, 0, 2),
            lambda: other(0),
            lambda: lease(service, 1, 2),
            lambda: other(1),
            lambda: lease(service, 2, 2),
        ]
    )
    assert [leased(each)[1] for each in found] == [[(0, at)] for at in (0, 0, 1, 1, 2)]
    assert len({leased(each)[0] for each in found}) == 5
    assert kinds(engine, start) == {LEASE: 3}
    check_fold(engine)


@pytest.mark.parametrize("seed", range(6))
def test_walks_of_many_workers_settle_each_message_once(engine: Engine, seed: int) -> None:
    chance = random.Random(seed)
    order = "key" if seed % 3 == 2 else ""
    service = service_of(engine, max_attempts=3, backoff_ms=(0, 10), order=order)
    engine.store.put_inner([InnerMessage("t", 0, b"later")])
    engine.confirm()
    together = Together(engine, service)
    requests, settles = [1] * 20, [1] * 20
    held: list[list[tuple[int, tuple[str, int], int]]] = [[] for _ in range(20)]
    acks: Counter[tuple[int, int]] = Counter()

    for _ in range(25):
        calls: list[Callable[[], LeaseDecision]] = []
        made: list[tuple[int, list[tuple[int, tuple[str, int], int]], SettleOutcome | None]] = []
        for each in chance.sample(range(20), 7):
            if held[each] and chance.random() < 0.6:
                verdict = chance.choice([*[SettleOutcome.ACKED] * 4, *list(SettleOutcome)[1:4]])
                taken, held[each] = held[each], []
                settles[each] += 1
                items = [
                    SettleItem(number, key, offsets_of([at]), verdict) for number, key, at in taken
                ]
                number = settles[each]
                calls.append(
                    lambda each=each, number=number, items=items: settle(
                        service, each, number, *items
                    )
                )
                made.append((each, taken, verdict))
            else:
                requests[each] += 1
                most = chance.randint(1, 3)
                calls.append(
                    lambda each=each, number=requests[each], most=most: lease(
                        service, each, number, most
                    )
                )
                made.append((each, [], None))

        for (each, taken, verdict), found in zip(made, together.run(calls), strict=True):
            if verdict is None:
                number, offsets = leased(found)
                held[each] += [(number, ("t", queue_id), at) for queue_id, at in offsets]
            elif verdict == SettleOutcome.ACKED:
                lost = refused(found)
                acks.update((key[1], at) for _, key, at in taken if at not in lost)
        engine.clock.advance(chance.choice([0, 5, 70_000]))
        check_fold(engine)
    assert max(acks.values()) == 1
