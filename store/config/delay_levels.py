"""Delay levels: the delays that the level string names.

Source: ScheduleMessageService#parseDelayLevel, MessageStoreConfig.messageDelayLevel, RocketMQ 5.3.3.
"""

from __future__ import annotations

import re
from functools import lru_cache

from raymq.store.base.errors import Rejected

#: names under which the two kinds of delivery keep their progress (`ShardState.progress`)
LEVELS_SERVICE, TIMERS_SERVICE = "delay", "timer"
DEFAULT_LEVELS = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"

_UNIT_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_LEVEL = re.compile(r"(\d{1,9})([smhd])")


@lru_cache(maxsize=16)
def parse_levels(text: str) -> tuple[int, ...]:
    """The delays of levels 1, 2, ... in ms. Raises: Rejected for a string that is not a list of delays."""
    found = [_LEVEL.fullmatch(part) for part in text.split()]
    levels = tuple(int(part[1]) * _UNIT_MS[part[2]] for part in found if part)
    if not levels or len(levels) < len(found):
        raise Rejected(
            f"message_delay_level is {text!r}; give numbers with s, m, h or d, for example '1s 10s 1m'",
            field="message_delay_level",
            limit="numbers with s, m, h or d",
        )
    return levels


DEFAULT_LEVELS_MS = parse_levels(DEFAULT_LEVELS)
#: how many there are, unless an option says others
DEFAULT_LEVEL_COUNT = len(DEFAULT_LEVELS_MS)
