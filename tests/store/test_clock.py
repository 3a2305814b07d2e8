"""The clock that everything in the store reads."""

from __future__ import annotations

from raymq.store.base.clock import Clock


def test_the_clock_is_in_milliseconds_and_sleeps():
    clock = Clock()
    before = clock.monotonic_ms()
    clock.sleep_ms(2)
    assert clock.monotonic_ms() - before >= 1
    assert clock.now_ms() > 1_700_000_000_000
    assert abs(clock.monotonic() * 1000 - clock.monotonic_ms()) < 1000
