"""Delivery times: the properties that name one, how far it may be away, and the second in which it is due."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from raymq.store.base.arrays import Int64s
from raymq.store.base.errors import Rejected
from raymq.store.base.status import PutStatus
from raymq.store.config.store_config import StoreConfig
from raymq.store.records.properties import DELAY

from .timer_rule import OUT_MS, PRECISION_MS

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


def named_ms(properties: Mapping[str, str], now_ms: int) -> int | None:
    """The delivery time that a message names; None without one."""
    if OUT_MS in properties:
        # Delivered by a timer before.
        return None
    if DELAY_S in properties:
        return now_ms + 1000 * _number(properties, DELAY_S)
    if DELAY_MS in properties:
        return now_ms + _number(properties, DELAY_MS)
    if DELIVER_MS in properties:
        return _number(properties, DELIVER_MS)
    return None


def delay_level(properties: Mapping[str, str]) -> int:
    """The delay level; 0 without one, or if it is not a number."""
    try:
        return int(properties.get(DELAY, "0"))
    except ValueError:
        return 0


def _number(properties: Mapping[str, str], name: str) -> int:
    """The value of a property. Raises: Rejected if it is not a whole number of 64 bits."""
    text = properties[name]
    try:
        value = int(text) if text.isascii() and "_" not in text else None
    except ValueError:
        value = None
    if value is None or not -(1 << 63) <= value < 1 << 63:
        raise Rejected(
            f"property {name} is {text!r}; it must be a whole number",
            field=name,
            limit="a whole number",
            status=PutStatus.WHEEL_TIMER_MSG_ILLEGAL.value,
        )
    return value
