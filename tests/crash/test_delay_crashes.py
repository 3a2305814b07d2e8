"""Delayed messages across crashes: each delivered once, none early, none lost. Deterministic: all follows from SEED."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.clock import ManualClock
from tests.support.delays import START_MS, DelayWorld, Sent, burst, random_send
from tests.support.simulated_disk import SimulatedDisk

SEED = 4
ROOT = Path("/s")
HOUR_MS = 3_600_000


class Promise(NamedTuple):
    """The state at the crash: the wall clock, the confirmed messages, the messages that may be cancelled."""

    now_ms: int
    confirmed: frozenset[bytes]
    cancelled: frozenset[bytes]


NOTHING = Promise(START_MS, frozenset(), frozenset())


def trace(width: int) -> tuple[SimulatedDisk, dict[bytes, Sent]]:
    """Levels, timers, rolls and cancellations, put, confirmed and delivered in turns, over several segments."""
    disk = SimulatedDisk(block_bytes=width)
    chance = random.Random(SEED)
    world = DelayWorld(ROOT, disk)
    confirmed: frozenset[bytes] = frozenset()
    cancelled: set[bytes] = set()

    def note() -> None:
        now = world.clock.now_ms()
        disk.note(Promise(now, confirmed, frozenset(cancelled)))

    for turn in range(14):
        for number in range(4):
            note()
            sent = random_send(world, chance, 10 * turn + number)
            if not sent.level and sent.due_ms > world.clock.now_ms() + 2_000 and number == 1:
                # The crash may lose either before the other, so it is known as of now.
                cancelled.add(sent.body)
                note()
                world.cancel(sent)
        if turn % 6 == 1:
            burst(world, chance, turn)
        note()
        world.confirm()
        confirmed = frozenset(world.sent)
        note()
        if turn % 3:
            world.run(limit=5)
        else:
            world.delays.run_once(world.clock.now_ms(), limit=1)
        world.clock.advance(chance.choice((300, 1_000, 2_700, 30_000, HOUR_MS)))
        note()
        if turn % 5 == 4:
            world.restart()
            note()
    world.close()
    return disk, world.sent


@pytest.mark.parametrize(
    ("width", "power", "stride"),
    [
        (4096, False, 61),
        pytest.param(512, False, 121, marks=pytest.mark.thorough),
        pytest.param(4096, True, 201, marks=pytest.mark.thorough),
        (512, True, 601),
    ],
)
def test_after_a_crash_anywhere_each_message_is_delivered_once(width, power, stride) -> None:
    disk, sent = trace(width)
    every = disk.crash_states(limit_per_point=6, seed=SEED) if power else disk.kill_states()
    tried = 0
    for image in itertools.islice(every, 0, None, stride):
        promise = image.notes[-1] if image.notes else NOTHING
        world = DelayWorld(ROOT, image, clock=ManualClock(promise.now_ms))
        world.sent = sent
        if tried % 3 == 0:
            # It crashes again a little later.
            world.delays.run_once(promise.now_ms, limit=3)
            world.kill()
        due = world.run()
        while due is not None:
            # In long steps: that none comes early the random schedules see to.
            world.clock.advance(max(due - world.clock.now_ms(), 40 * HOUR_MS))
            due = world.run()
        arrived = {each.body for each in world.arrived()}
        assert promise.confirmed - promise.cancelled <= arrived, image.crashed_at
        world.check(arrived)
        tried += 1
        world.close()
    assert tried >= 8
