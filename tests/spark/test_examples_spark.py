"""The Spark example runs as its first lines say, and checks its own result."""

from __future__ import annotations

import json

import pytest

from tests.support.programs import example
from tests.support.quick_java import QUICK_JAVA


@pytest.mark.thorough
@pytest.mark.program(example("spark_ingest.py", *QUICK_JAVA.items()))
def test_a_frame_goes_to_a_topic_and_comes_back(printed: list[str]) -> None:
    (text,) = printed
    answer = json.loads([line for line in text.splitlines() if line.startswith("{")][-1])
    assert answer == {"rows": 50_000, "repeated": 50_000, "read": 50_000, "sum": 1_249_975_000}
