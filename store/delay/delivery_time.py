"""Delivery times: the properties that name one, how far it may be away, and the second in which it is due."""

from __future__ import annotations

from typing import TypeVar

from raymq.store.base.arrays import Int64s
from raymq.store.base.errors import Rejected
from raymq.store.base.status import PutStatus
from raymq.store.config.store_config import StoreConfig

from .timer_rule import PRECISION_MS

DELAY_S, DELAY_MS, DELIVER_MS = "TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS"

_Ms = TypeVar("_Ms", int, Int64s)


def out_time_ms(deliver_ms: _Ms) -> _Ms:
    """The second whose end is the first full second at or after `deliver_ms`: its messages are due at its end."""
    return (deliver_ms - 1) // PRECISION_MS * PRECISION_MS


def check_deliver_at(deliver_ms: int, now_ms: int, config: StoreConfig) -> None:
    """Raises: Rejected for a time further away than timers reach."""
    limit = config.timer_max_delay_s * 1000
    if deliver_ms - now_ms > limit:
        raise Rejected(
            f"the message is to be delivered in {deliver_ms - now_ms} ms; timers reach {limit} ms (timer_max_delay_s)",
            field="deliver_at_ms",
            limit=now_ms + limit,
            status=PutStatus.WHEEL_TIMER_MSG_ILLEGAL.value,
        )
