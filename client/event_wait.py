"""Waits for an asyncio event with a timeout, so that a cancellation always gets through. No Ray."""

from __future__ import annotations

import asyncio


async def set_within(event: asyncio.Event, timeout_s: float) -> None:
    """Wait until an event is set. This call sets it after `timeout_s`.

    `asyncio.wait_for` before Python 3.12 swallows a cancellation that arrives after the event was set.
    """
    timer = asyncio.get_running_loop().call_later(timeout_s, event.set)
    try:
        await event.wait()
    finally:
        timer.cancel()
