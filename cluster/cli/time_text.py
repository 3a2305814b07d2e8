"""Points in time on the command line."""

from __future__ import annotations

import argparse
import re
from datetime import datetime, timedelta

from raymq.client.times import at_ms, check_time
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Rejected

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
#: more digits than an amount has, and as many as milliseconds since 2001
_MS_DIGITS = 12


def time_of(text: str, *, clock: Clock | None = None) -> datetime:
    """A time: 2026-11-29T14:30, milliseconds since 1970, or so long ago, such as 15m.

    A time without a zone is of this machine's zone. Raises: argparse.ArgumentTypeError.
    """
    fault = f"{text!r} is not a time: give 2026-11-29T14:30, milliseconds since 1970, or 90s, 15m, 2h, 1d ago"
    ago = re.fullmatch(r"(\d{1,9})([smhd])", text)
    try:
        if ago is not None:
            amount = timedelta(**{_UNITS[ago[2]]: int(ago[1])})
            found = at_ms((clock or Clock()).now_ms()) - amount
        elif text.isdecimal() and len(text) >= _MS_DIGITS:
            found = at_ms(int(text))
        else:
            # Python 3.10 does not know Z.
            found = datetime.fromisoformat(re.sub("[zZ]$", "+00:00", text))
            if found.utcoffset() is None:
                found = found.astimezone()
        check_time("time", found)
    except (ValueError, OverflowError, Rejected):
        raise argparse.ArgumentTypeError(fault) from None
    return found


def shown_time(time_ms: int) -> str:
    """A time in this machine's zone, to the millisecond."""
    return at_ms(time_ms).astimezone().isoformat(timespec="milliseconds")
