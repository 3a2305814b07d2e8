"""What the calls and threads of one `Workers` share: how much is leased ahead, and who is woken."""

from __future__ import annotations

import threading
import time
from typing import Any, cast

import numpy as np
import pyarrow as pa

from raymq.client.transport.chained_future import BlockedCallers, ChainedFuture, wake_callers
from raymq.client.workers.held import HeldLease, HeldPart, LeaseOwner
from raymq.client.workers.worker_state import CALLS_FOLLOWED, WorkerState
from raymq.store.groups.leases.entries import SettleOutcome
from raymq.store.groups.leases.requests import SettleItem
from tests.support.waiting import until

WAIT_S = 20.0


def state_of(prefetch: int) -> WorkerState:
    return WorkerState(prefetch, 10_000)


def part_of(count: int) -> HeldPart:
    lease = HeldLease(1, cast(LeaseOwner, None), 1 << 40, count)
    offsets = np.arange(count)
    return HeldPart(lease, ("t", 0), pa.array([b""] * count), offsets, np.ones(count, np.int64))


def step() -> None:
    time.sleep(0.001)


def test_each_call_that_waits_has_messages_leased_ahead() -> None:
    state = state_of(2)
    with state.lock:
        state.want(1)
        assert state.missing == 1 + 2
        state.want(1)
        state.want(1)
        assert state.missing == 3 + 6
        # Those of threads that have ended become fewer.
        for _ in range(3):
            state.want_no_more(1)
        for _ in range(3 * CALLS_FOLLOWED):
            state.want(1)
            state.want_no_more(1)
        assert state.ahead == 2


def test_each_thread_that_calls_has_messages_leased_ahead_until_it_ends() -> None:
    state = state_of(2)

    def call() -> None:
        with state.lock:
            state.want(3)
            state.want_no_more(3)

    call()
    assert state.ahead == 6
    # One after the other, all of them alive.
    is_over = threading.Event()
    threads = [threading.Thread(target=lambda: (call(), is_over.wait(WAIT_S))) for _ in range(4)]
    for number, thread in enumerate(threads, 2):
        thread.start()
        until(lambda number=number: state.calls == number, step)  # type: ignore[misc]
    assert state.ahead == 5 * 6
    is_over.set()
    for thread in threads:
        thread.join(WAIT_S)
    for _ in range(CALLS_FOLLOWED * 12):
        call()
    assert state.ahead == 6


def test_messages_ahead_are_leased_when_half_of_them_are_gone() -> None:
    state = state_of(4)
    with state.lock:
        state.want(2)
        assert state.missing == 2 + 8
        state.add(part_of(10))
        assert state.missing == 0
        state.want_no_more(2)
        for _ in range(5):
            state.take_one(state.ready[0])
        assert (state.ready_count, state.missing) == (5, 0)
        state.take_one(state.ready[0])
        assert (state.ready_count, state.missing) == (4, 4)
        # What a call waits for is leased at once.
        state.want(5)
        assert state.missing == 5 + 20 - 4


def test_callers_are_woken_one_after_the_other() -> None:
    blocked = BlockedCallers()
    woken: list[int] = []

    def wait(number: int) -> None:
        if blocked.sleep(blocked.block(), WAIT_S):
            woken.append(number)
            blocked.wake_next()

    threads = [threading.Thread(target=wait, args=(number,)) for number in range(8)]
    for number, thread in enumerate(threads, 1):
        thread.start()
        until(lambda number=number: len(blocked) == number, step)  # type: ignore[misc]
    blocked.wake_next()
    for thread in threads:
        thread.join(WAIT_S)
    assert woken == list(range(8))
    assert not blocked.wake_next()


def test_a_caller_whose_time_is_up_passes_a_late_call_on() -> None:
    blocked = BlockedCallers()
    first, second = blocked.block(), blocked.block()
    # Both are woken by others in the moment in which the first one gives up.
    woken: list[bool] = []
    thread = threading.Thread(target=lambda: woken.append(blocked.sleep(second, WAIT_S)))
    thread.start()
    blocked._blocked.remove(first)
    assert not blocked.sleep(first, 0.01)
    thread.join(WAIT_S)
    assert woken == [True]


def test_all_callers_of_futures_that_end_together_are_woken() -> None:
    futures: list[ChainedFuture[int]] = [ChainedFuture() for _ in range(6)]
    found: list[int] = []

    def wait(future: ChainedFuture[int]) -> None:
        future.await_end(WAIT_S)
        found.append(future.result(0))

    threads = [threading.Thread(target=wait, args=(each,)) for each in futures for _ in range(2)]
    for thread in threads:
        thread.start()
    until(lambda: sum(len(each._blocked) for each in futures) == len(threads), step)
    for number, each in enumerate(futures):
        each.set_result(number)
    wake_callers(futures)
    for thread in threads:
        thread.join(WAIT_S)
    assert sorted(found) == sorted([*range(6), *range(6)])


def test_a_future_that_does_not_end_is_waited_for_as_long_as_asked() -> None:
    future: ChainedFuture[Any] = ChainedFuture()
    future.await_end(0.01)
    assert not future.done()
    assert not future.has_blocked
    assert not future.cancel()


def test_messages_ahead_whose_time_is_over_are_given_back() -> None:
    given: list[tuple[int, list[int]]] = []

    class Owner:
        def settle(self, items: list[SettleItem], lease: HeldLease) -> None:
            (item,) = items
            assert item.verdict == SettleOutcome.RETURNED
            given.append((lease.number, item.offsets.tolist()))

    state, part, lost = state_of(2), part_of(3), part_of(2)
    for each in (part, lost):
        each.lease.owner = cast(LeaseOwner, Owner())
    lost.lease.is_lost = True
    with state.lock:
        state.add(part)
        state.add(lost)
        state.take_one(part)
        assert state.first_held(part.lease.until_ms) is None
    # The shard has said of the other one that it is over.
    assert given == [(1, [1, 2])]
    assert state.ready_count == 0
