"""A flood of calls changes how often waiting threads wake up, and only as long as it lasts."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest

from raymq.actors.server.flight import call_flood
from raymq.actors.server.flight.call_flood import STEP_BEGIN_S, STEP_CALLS, CallFlood
from tests.support.clock import ManualClock
from tests.support.waiting import until


@pytest.fixture
def usual_s() -> Iterator[float]:
    """The interval outside of a flood."""
    before_s = sys.getswitchinterval()
    yield before_s
    sys.setswitchinterval(before_s)


class Pausing(ManualClock):
    """A pause ends when the test says so, late or in time."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses = threading.Semaphore(0)
        self.paused = 0
        self.delay_ms = 0.0

    def sleep_ms(self, ms: float) -> None:
        self.pauses.acquire()
        self.advance(ms + self.delay_ms)
        self.paused += 1

    def pause(self, count: int, *, delay_ms: float = 0.0) -> None:
        """Let `count` pauses pass."""
        self.delay_ms, before = delay_ms, self.paused
        self.pauses.release(count)
        until(lambda: self.paused == before + count, lambda: threading.Event().wait(0.001))


def calls(flood: CallFlood, clock: ManualClock, count: int, *, seconds: float) -> None:
    for _ in range(count):
        flood.note_call()
        clock.advance(seconds * 1000 / count)


def test_calls_at_a_usual_rate_change_nothing(
    usual_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Pausing()
    flood = CallFlood(clock=clock)
    # With few threads a flood would leave the interval as it is, too.
    monkeypatch.setattr(flood, "_threads", lambda: 10 * call_flood.USUAL_THREADS)
    # The clock counts whole milliseconds: two for each call.
    calls(flood, clock, 5 * STEP_CALLS, seconds=10 * STEP_BEGIN_S)
    assert sys.getswitchinterval() == usual_s


def test_a_flood_makes_threads_wake_up_less_often_until_they_have_their_turn_again(
    usual_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Pausing()
    flood = CallFlood(clock=clock)
    monkeypatch.setattr(flood, "_threads", lambda: 10 * call_flood.USUAL_THREADS)
    calls(flood, clock, 3 * STEP_CALLS, seconds=STEP_BEGIN_S)
    assert sys.getswitchinterval() == pytest.approx(10 * usual_s)
    # The flood goes on slowly: its threads keep each other, and this one, from running.
    clock.pause(20, delay_ms=100)
    assert sys.getswitchinterval() == pytest.approx(10 * usual_s)
    clock.pause(call_flood.CALM_PAUSES)
    until(
        lambda: sys.getswitchinterval() == pytest.approx(usual_s),
        lambda: threading.Event().wait(0.001),
    )


def test_a_flood_that_ends_while_threads_are_counted_leaves_the_usual_interval(
    usual_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Pausing()
    flood = CallFlood(clock=clock)
    calls(flood, clock, 3 * STEP_CALLS, seconds=STEP_BEGIN_S)

    def count() -> int:
        flood._end()
        return 1000

    monkeypatch.setattr(flood, "_threads", count)
    calls(flood, clock, STEP_CALLS, seconds=STEP_BEGIN_S)
    assert sys.getswitchinterval() == pytest.approx(usual_s)
    clock.pause(call_flood.CALM_PAUSES)


def test_a_call_is_served_although_no_descriptor_is_free(
    usual_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Pausing()
    flood = CallFlood(clock=clock)

    def refuse() -> int:
        raise OSError("Too many open files")

    monkeypatch.setattr(flood, "_threads", refuse)
    calls(flood, clock, 5 * STEP_CALLS, seconds=STEP_BEGIN_S)
    clock.pause(call_flood.CALM_PAUSES)


def test_the_interval_has_a_limit(usual_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Pausing()
    flood = CallFlood(clock=clock)
    monkeypatch.setattr(flood, "_threads", lambda: 1_000_000)
    calls(flood, clock, 3 * STEP_CALLS, seconds=STEP_BEGIN_S)
    assert sys.getswitchinterval() == pytest.approx(call_flood.INTERVAL_MAX_S)
    clock.pause(call_flood.CALM_PAUSES)
    until(
        lambda: sys.getswitchinterval() == pytest.approx(usual_s),
        lambda: threading.Event().wait(0.001),
    )


def test_all_threads_of_the_process_are_counted() -> None:
    flood, release = CallFlood(), threading.Event()
    before = flood._threads()
    waiting = [threading.Thread(target=release.wait) for _ in range(8)]
    for each in waiting:
        each.start()
    assert flood._threads() >= before + 8
    release.set()
    for each in waiting:
        each.join()
