"""The error of RayMQ that ended a task, raised on the driver. Spark hands only its text over, amid two stack traces."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from raymq.store.base import errors

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_LINE = re.compile(r"^raymq\.store\.base\.errors\.(\w+): (.+)$", re.MULTILINE)


def collect(frame: DataFrame) -> list[Any]:
    """The rows of a frame, one after the other, whose tasks speak to shards.

    Raises: the error of RayMQ that ended a task, from Spark's. It has the text, and no fields. Other errors of Spark.
    """
    rows: list[Any] = _asked(frame.collect)
    return rows


def partitions_of(frame: DataFrame) -> int:
    """How many partitions a frame has when it is collected afterwards. Spark runs all stages but the last for it.

    Spark may choose another number each time it plans, and plans a frame once. Raises: as `collect`.
    """
    return int(_asked(lambda: frame._jdf.queryExecution().toRdd().getNumPartitions()))


def _asked(call: Callable[[], object]) -> Any:
    try:
        return call()
    except Exception as error:
        found = error_in(str(error))
        if found is None:
            raise
        raise found from error


def error_in(text: str) -> errors.RayMQError | None:
    """The last error of RayMQ in the text of Spark's error; None without one."""
    for name, message in reversed(_LINE.findall(text)):
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, errors.RayMQError):
            found: errors.RayMQError = kind(message)
            return found
    return None
