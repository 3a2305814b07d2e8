"""The example of Spark 4 runs as its first lines say, and checks its own result."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.support.programs import example
from tests.support.quick_java import QUICK_JAVA

_spec = importlib.util.find_spec("pyspark")
PYSPARK = "" if _spec is None or _spec.origin is None else str(Path(_spec.origin).parents[1])


@pytest.mark.timeout(400)
@pytest.mark.program(
    example("spark4_orders.py", ("PYTHONPATH", PYSPARK), *QUICK_JAVA.items(), runs=2),
)
def test_orders_are_copied_once_by_a_stream_that_goes_on_from_its_checkpoint(
    printed: list[str],
) -> None:
    for text in printed:
        answer = json.loads([line for line in text.splitlines() if line.startswith("{")][-1])
        assert answer == {"orders": [20_000, 199_990_000], "paid": [10_000, 99_990_000]}
