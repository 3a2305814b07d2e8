"""Pulls that wait for a queue are woken when messages have arrived there."""

from __future__ import annotations

import asyncio

from raymq.doors.rocketmq.arrivals import Arrivals


def test_an_arrival_wakes_all_that_wait_for_its_queue_and_no_others() -> None:
    async def run() -> list[bool]:
        arrivals = Arrivals()
        waits = [
            asyncio.ensure_future(arrivals.next("t", queue_id).within(timeout_s))
            for queue_id, timeout_s in ((0, 30.0), (0, 30.0), (1, 0.05))
        ]
        await asyncio.sleep(0)
        arrivals.note("t", 0)
        return await asyncio.gather(*waits)

    assert asyncio.run(run()) == [True, True, False]


def test_an_arrival_before_the_wait_is_not_missed() -> None:
    async def run() -> bool:
        arrivals = Arrivals()
        arrival = arrivals.next("t", 0)
        arrivals.note("t", 0)
        return await arrival.within(0.0)

    assert asyncio.run(run())


def test_an_arrival_counts_in_the_turn_in_which_the_time_is_up() -> None:
    async def run() -> bool:
        arrivals = Arrivals()
        arrival = arrivals.next("t", 0)
        asyncio.get_running_loop().call_later(0.0, arrivals.note, "t", 0)
        return await arrival.within(0.0)

    assert asyncio.run(run())
