"""A cancelled timer is never delivered, and one for which it was too late is, exactly once."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from raymq.store.base.errors import Rejected
from raymq.store.base.format import TIMER_TOPIC
from raymq.store.delay.delay_service import DelayService
from raymq.store.put.inner_message import InnerMessage
from tests.support.confirming import confirm_only, dispatch_all
from tests.support.delays import START_MS, DelayWorld, Sent
from tests.support.tier import rounds

DAY_MS = 86_400_000


@pytest.fixture
def world(tmp_path: Path) -> Iterator[DelayWorld]:
    made = DelayWorld(tmp_path)
    yield made
    made.store.abandon()


def send(world: DelayWorld, body: bytes, delay_ms: int) -> tuple[Sent, int]:
    """A timer. Returns: also its offset in the timer topic, which its receipt has."""
    sent = world.send(body, delay_ms=delay_ms)
    offset = world.store.state.next_offsets[TIMER_TOPIC, 0] - 1
    world.confirm()
    return sent, offset


def cancel(world: DelayWorld, offset: int) -> bool:
    """Cancel a timer; not yet confirmed. Returns: whether it is in time."""
    found = world.delays.timers.cancel(offset, world.clock.now_ms())
    assert found is not None
    return found.appended is not None


def bodies(world: DelayWorld) -> list[bytes]:
    return [each.body for each in world.arrived()]


def test_only_the_cancelled_timer_of_a_second_is_not_delivered(world: DelayWorld) -> None:
    offsets = [send(world, body, 5_000)[1] for body in (b"a", b"b", b"c")]
    assert cancel(world, offsets[1])
    world.confirm()
    # A repeated cancellation changes nothing.
    assert cancel(world, offsets[1])
    world.confirm()
    world.run_out()
    assert bodies(world) == [b"a", b"c"]


def test_once_its_second_is_over_a_timer_is_not_cancelled(world: DelayWorld) -> None:
    sent, offset = send(world, b"a", 5_000)
    world.run()
    end = world.store.log.end
    # Due, and not delivered yet.
    world.clock.jump_wall(sent.due_ms - world.clock.now_ms())
    assert not cancel(world, offset)
    assert world.store.log.end == end
    world.run_out()
    assert not cancel(world, offset)
    assert bodies(world) == [b"a"]


def test_a_second_waits_for_its_cancellation_and_earlier_ones_do_not(world: DelayWorld) -> None:
    send(world, b"early", 2_000)
    sent, offset = send(world, b"late", 5_000)
    other, _ = send(world, b"beside", 5_000)
    assert cancel(world, offset)
    # Not confirmed yet, and everything is due.
    world.clock.jump_wall(10_000)
    now_ms = world.clock.now_ms()
    assert sent.due_ms == other.due_ms < now_ms
    ran = world.delays.run_once(now_ms)
    # What was delivered is put, and readers see it once it is confirmed.
    assert (ran.messages, ran.next_due_ms) == (1, now_ms)
    ran = world.delays.run_once(now_ms)
    assert ran.messages == 0
    assert ran.next_due_ms is not None
    assert ran.next_due_ms > now_ms

    world.confirm()
    world.run_out()
    assert bodies(world) == [b"early", b"beside"]


@pytest.mark.parametrize("days", [2.5, 3.0])
@pytest.mark.parametrize("is_rolled", [False, True])
def test_a_timer_that_was_put_again_on_its_way_is_cancelled_by_its_first_offset(
    world: DelayWorld, days: float, is_rolled: bool
) -> None:
    sent, offset = send(world, b"far", int(days * DAY_MS))
    send(world, b"other", int(days * DAY_MS))
    if is_rolled:
        world.run()
        world.clock.jump_wall(int(2.2 * DAY_MS))
        world.run()
        assert world.store.state.next_offsets[TIMER_TOPIC, 0] > 2
    assert world.clock.now_ms() < sent.due_ms
    assert cancel(world, offset)
    world.confirm()
    world.run_out()
    assert bodies(world) == [b"other"]


def test_a_start_delivers_nothing_before_it_knows_every_cancellation(world: DelayWorld) -> None:
    sent, offset = send(world, b"a", 5_000)
    send(world, b"b", 5_000)
    world.run()
    assert cancel(world, offset)
    world.store.log.sync()
    world.store.abandon()
    world.store = type(world.store).open(world.root, config=world.config, clock=world.clock)
    world.delays = DelayService(world.store)
    world.clock.jump_wall(sent.due_ms + 5_000 - world.clock.now_ms())

    # Confirmed, and not all of it is dispatched: as with a leader that has just begun.
    confirm_only(world.store)
    assert world.delays.timers.run(world.clock.now_ms(), limit=100).messages == 0
    dispatch_all(world.store)
    world.run_out()
    assert bodies(world) == [b"b"]


def test_a_timer_that_was_delivered_before_the_clock_was_set_back_is_not_cancelled(
    world: DelayWorld,
) -> None:
    _, offset = send(world, b"a", 5_000)
    world.run_out()
    assert bodies(world) == [b"a"]
    world.clock.jump_wall(-60_000)
    assert not cancel(world, offset)
    world.run()
    assert not cancel(world, offset)
    _, again = send(world, b"b", 5_000)
    world.run_out()
    assert bodies(world) == [b"a", b"b"]
    assert not cancel(world, again)


def test_only_a_timer_with_a_unique_key_can_be_cancelled(world: DelayWorld) -> None:
    with pytest.raises(Rejected, match="no timer is at offset 0"):
        cancel(world, 0)
    _, offset = send(world, b"a", 5_000)
    assert cancel(world, offset)
    world.confirm()
    world.put(InnerMessage("t", 0, b"x", {"TIMER_DELAY_MS": "5000"}))
    # Not confirmed yet.
    assert world.delays.timers.cancel(offset + 2, world.clock.now_ms()) is None
    world.confirm()
    for other in (offset + 1, offset + 2):
        with pytest.raises(Rejected, match="no unique key"):
            cancel(world, other)
    with pytest.raises(Rejected, match="no timer is at offset"):
        cancel(world, offset + 3)


@pytest.mark.parametrize("seed", range(rounds("RAYMQ_CANCEL_RUNS", thorough=25, quick=10)))
def test_after_random_steps_each_timer_is_cancelled_or_delivered_once(
    tmp_path: Path, seed: int
) -> None:
    choose = random.Random(seed)
    world = DelayWorld(tmp_path)
    offsets: dict[bytes, int] = {}
    cancelled: set[bytes] = set()
    unconfirmed: set[bytes] = set()

    for number in range(60):
        step = choose.randrange(10)
        if step < 4:
            body = b"%d" % number
            delay_ms = choose.choice([1, 900, 2_000, 5_000, 60_000, int(2.4 * DAY_MS)])
            _, offsets[body] = send(world, body, delay_ms)
            cancelled |= unconfirmed
            unconfirmed = set()
        elif step < 7 and offsets:
            body = choose.choice(sorted(offsets))
            if cancel(world, offsets[body]):
                unconfirmed.add(body)
        elif step < 9:
            world.clock.jump_wall(choose.choice([100, 1_000, 5_000, DAY_MS]))
            if choose.random() < 0.5:
                # Confirmed only after the deliveries.
                world.delays.run_once(world.clock.now_ms())
            world.confirm()
            cancelled |= unconfirmed
            unconfirmed = set()
            world.run()
        else:
            if choose.random() < 0.5:
                world.confirm()
                world.kill()
            else:
                world.restart()
            cancelled |= unconfirmed
            unconfirmed = set()

    world.confirm()
    cancelled |= unconfirmed
    world.run_out()
    arrived = bodies(world)
    world.store.abandon()
    assert len(arrived) == len(set(arrived)), f"seed {seed}"
    assert set(arrived) == set(offsets) - cancelled, f"seed {seed}"
    assert world.clock.now_ms() > START_MS
