"""Slow calls: all are counted, and one line stands for those of some seconds."""

from __future__ import annotations

import logging

import pytest

from raymq.store.base.slow_calls import LOG_PERIOD_S, SLOW_S, SlowCalls
from raymq.store.put import put_lock
from raymq.store.put.put_lock import PutLock
from tests.support.clock import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def calls(clock: ManualClock) -> SlowCalls:
    return SlowCalls("a put", logging.getLogger("raymq.test"), clock)


def test_the_first_slow_call_has_a_line_with_its_time_and_its_facts(
    calls: SlowCalls, caplog: pytest.LogCaptureFixture
) -> None:
    calls.note(0.75, "3 messages")
    assert caplog.messages == ["a put took 750 ms: 3 messages"]


def test_one_line_stands_for_the_slow_calls_of_its_period(
    calls: SlowCalls, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    for took_s in (0.6, 2.5, 0.7):
        calls.note(took_s, "1 message")
    clock.advance(LOG_PERIOD_S * 1000)
    calls.note(0.8, "1 message")
    assert calls.count == 4
    assert caplog.messages == [
        "a put took 600 ms: 1 message",
        "a put took 800 ms: 1 message; since the last such line 2 more, of up to 2500 ms",
    ]


@pytest.mark.parametrize(("waited_ms", "count"), [(SLOW_S * 1000, 0), (SLOW_S * 1000 + 1, 1)])
def test_a_long_wait_for_the_put_lock_is_counted_after_it(
    clock: ManualClock, caplog: pytest.LogCaptureFixture, waited_ms: float, count: int
) -> None:
    lock = PutLock(clock)
    with lock:
        began_s = lock.begin_wait()
    clock.advance(waited_ms)
    with lock:
        waited_s = lock.waited_s(began_s)
    lock.note_wait(waited_s, 3)
    assert lock.slow_waits.count == count
    lines = [record for record in caplog.records if record.name == put_lock.logger.name]
    assert [record.getMessage() for record in lines] == [
        "a wait for the put lock took 501 ms: 3 message(s)"
    ] * count


def test_a_free_put_lock_has_no_wait(clock: ManualClock) -> None:
    lock = PutLock(clock)
    began_s = lock.begin_wait()
    clock.advance(1000)
    assert lock.waited_s(began_s) == 0.0
