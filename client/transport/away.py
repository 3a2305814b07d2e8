"""Repeats calls while a shard is away: look-ups of Spark and Ray Data, and others that may be performed twice."""

from __future__ import annotations

import logging
from collections.abc import Callable

from raymq.store.base.clock import Clock
from raymq.store.base.errors import RayMQError

from .ask import Answer, may_lead_no_more, search_pauses

logger = logging.getLogger("raymq")

#: how long a call is repeated while its shard is away: as long as a producer repeats a batch by default
AWAY_S = 120.0


def while_away(call: Callable[[], Answer], *, timeout_s: float | None = None) -> Answer:
    """The answer of a call, which is repeated while a shard restarts or another replica takes over.

    The first failure is logged: an address may be wrong.
    Args: `timeout_s`: None: `AWAY_S`.
    Raises: the last Unavailable or DeliveryUnknown after `timeout_s`; any other error at once.
    """
    clock, pauses = Clock(), search_pauses()
    timeout_s = AWAY_S if timeout_s is None else timeout_s
    until_s, is_logged = clock.monotonic() + timeout_s, False
    while True:
        try:
            return call()
        except RayMQError as error:
            if not may_lead_no_more(error) or clock.monotonic() >= until_s:
                raise
            if not is_logged:
                logger.warning("no answer yet, trying for up to %g s: %s", timeout_s, error)
                is_logged = True
        clock.sleep_ms(next(pauses))
