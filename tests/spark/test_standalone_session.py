"""Arguments of a session of Spark 4 on Ray, and an older PySpark, are refused before anything is started."""

from __future__ import annotations

from typing import Any

import pytest

from raymq.errors import Rejected
from raymq.spark import standalone_session


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"executors": 0}, "executors"),
        ({"cores": 0}, "cores"),
        ({"memory": "lots"}, "memory"),
        ({}, "pyspark"),
    ],
)
def test_what_cannot_work_is_refused(given: dict[str, Any], field: str) -> None:
    with pytest.raises(Rejected) as refused:
        standalone_session("refused", **given)
    assert refused.value.field == field
    assert field != "pyspark" or "raydp_session" in str(refused.value)
