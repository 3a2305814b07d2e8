"""Points in time as callers give them: a datetime with a time zone, or milliseconds since 1970."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from numbers import Integral
from typing import TypeAlias

from raymq.store.base.errors import Rejected

#: 2001-01-01: an earlier time is one in seconds that was taken for milliseconds
EARLIEST_MS = 978_307_200_000

#: a datetime with a time zone, or ms since 1970
Time: TypeAlias = datetime | int

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MS = timedelta(milliseconds=1)
_HELP = "a datetime with a time zone, or milliseconds since 1970"


def at_ms(time_ms: int) -> datetime:
    """A point in time, of milliseconds since 1970.

    `start=` of a consumer takes offsets as numbers, so that a time must be of another kind: a datetime, which says
    itself what it is. This makes one of the milliseconds that receipts and messages have.

    Example:
        ```python
        import raymq

        print(raymq.at_ms(1_790_000_000_000).isoformat())
        ```

    Args:
        time_ms: milliseconds since 1970, 2001 or later.

    Returns: the same time as a datetime in UTC, exact to the millisecond.

    Raises:
        Rejected: no whole number, or a time before 2001, as a time in seconds is when it is read as milliseconds.
    """
    return _EPOCH + check_time("time_ms", time_ms) * _MS


def check_time(field: str, time: object) -> int:
    """A point in time as milliseconds since 1970. A part of a millisecond counts as none.

    Raises: Rejected for a datetime without a time zone, for a time before 2001, and for another type.
    """
    if isinstance(time, datetime):
        if time.utcoffset() is None:
            raise Rejected(
                f"{field} is {time!r}, without a time zone: add one, such as tzinfo=timezone.utc",
                field=field,
                limit=_HELP,
            )
        time_ms = (time - _EPOCH) // _MS
    elif isinstance(time, Integral) and not isinstance(time, bool):
        time_ms = int(time)
    else:
        raise Rejected(f"{field} is {time!r}; give {_HELP}", field=field, limit=_HELP)

    if not EARLIEST_MS <= time_ms < 2**63:
        raise Rejected(
            f"{field} is {time!r}, a time before 2001 or too late for any: give milliseconds since 1970, which is "
            "1,000 times the seconds",
            field=field,
            limit=EARLIEST_MS,
        )
    return time_ms
