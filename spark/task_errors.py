"""The error of RayMQ that ended a task, raised on the driver. Spark hands only its text over, amid two stack traces."""

from __future__ import annotations

import re
from typing import Any

from raymq.store.base import errors

_LINE = re.compile(r"^raymq\.store\.base\.errors\.(\w+): (.+)$", re.MULTILINE)


def collect(frame: Any) -> list[Any]:
    """The rows of a frame, one after the other, whose tasks speak to shards.

    Raises: the error of RayMQ that ended a task, from Spark's. It has the text, and no fields. Other errors of Spark.
    """
    try:
        rows: list[Any] = frame.collect()
    except Exception as error:
        found = error_in(str(error))
        if found is None:
            raise
        raise found from error
    return rows


def error_in(text: str) -> errors.RayMQError | None:
    """The last error of RayMQ in the text of Spark's error; None without one."""
    for name, message in reversed(_LINE.findall(text)):
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, errors.RayMQError):
            found: errors.RayMQError = kind(message)
            return found
    return None
