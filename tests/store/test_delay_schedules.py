"""Random schedules of delayed messages, stops, kills and clocks that jump, against a plain model."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.delays import DelayWorld, burst, random_send


@pytest.mark.parametrize("seed", range(8))
def test_each_message_is_delivered_once_and_none_early_whatever_comes_between(
    tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    world = DelayWorld(tmp_path)
    #: what was confirmed, and what a kill may have lost
    sure: set[bytes] = set()
    cancelled: set[bytes] = set()
    for turn in range(120):
        kind = chance.randrange(20)
        if kind < 8:
            for number in range(chance.randrange(1, 4)):
                sent = random_send(world, chance, 10 * turn + number)
                sure.add(sent.body)
                if (
                    not sent.level
                    and chance.randrange(6) == 0
                    and sent.due_ms > world.clock.now_ms() + 1000
                ):
                    world.cancel(sent)
                    cancelled.add(sent.body)
            if turn % 5 == 0:
                sure |= {*burst(world, chance, turn)}
            world.confirm()
        elif kind < 12:
            # Not to the end: half a second may be delivered when the next thing happens.
            world.delays.run_once(world.clock.now_ms(), limit=1)
            world.confirm()
        elif kind < 14:
            world.run(limit=chance.choice((1, 3, 8192)))
        elif kind < 18:
            world.clock.advance(chance.choice((10, 700, 1000, 5000, 600_000, 90_000_000)))
        elif kind == 18:
            world.kill()
        else:
            world.restart()
    world.run_out()
    world.check(sure - cancelled)
    # And nothing comes again from the files of before.
    world.restart()
    world.run_out()
    world.check(sure - cancelled)
    world.close()


@pytest.mark.parametrize("seed", range(2))
def test_a_wall_clock_that_jumps_to_and_fro_delivers_each_timer_once_and_at_the_time_it_shows(
    tmp_path: Path, seed: int
) -> None:
    chance = random.Random(100 + seed)
    world = DelayWorld(tmp_path)
    seen: set[bytes] = set()
    # Beyond the wheel's fourteen days, and beyond the range of four bytes.
    far = [days * 86_400_000 for days in ((-12, 13) if seed % 2 else (-30, -9, 20, 35))]

    def run() -> None:
        whole = chance.randrange(3) == 0
        if whole:
            # It ends: whatever waits, for the next call it names a later time.
            world.run()
        else:
            world.delays.run_once(world.clock.now_ms(), limit=chance.choice((2, 8192)))
            world.confirm()
        for each in world.arrived():
            if each.body not in seen:
                seen.add(each.body)
                assert world.clock.now_ms() >= world.sent[each.body].due_ms
        floor = world.clock.now_ms() - world.clock.now_ms() % 1000
        due = {each.body for each in world.sent.values() if each.due_ms <= floor}
        assert not whole or due <= seen, "late"

    for turn in range(100):
        kind = chance.randrange(10)
        if kind < 4:
            body = b"%d" % turn
            world.send(
                body, queue=turn % 3, delay_ms=chance.choice((500, 3_000, 70_000, 8_000_000))
            )
            if turn % 6 == 0:
                burst(world, chance, turn)
            world.confirm()
        elif kind < 7:
            run()
        elif kind == 7:
            world.clock.jump_wall(
                chance.choice((-7_200_000, -60_000, -1500, -1, 30_000, 3_600_000, *far))
            )
        elif kind == 8:
            world.clock.advance(chance.choice((400, 2_000, 100_000)))
        else:
            world.kill()
    run()
    world.clock.jump_wall(max(each.due_ms for each in world.sent.values()) - world.clock.now_ms())
    world.run_out()
    world.check(set(world.sent), never_early=False)
    world.close()
