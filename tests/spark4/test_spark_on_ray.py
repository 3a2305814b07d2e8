"""Spark 4 on Ray: a Worker, the Master, an actor and the driver are killed. Rows stay exact, and no process is left."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import Program
from tests.support.quick_java import QUICK_JAVA

_spec = importlib.util.find_spec("pyspark")
PYSPARK = "" if _spec is None or _spec.origin is None else str(Path(_spec.origin).parents[1])
SESSIONS = Program(
    ("-m", "tests.support.spark_on_ray", "data"),
    variables=(("RAYMQ_TEST_PYSPARK", PYSPARK), *QUICK_JAVA.items()),
)
pytestmark = [pytest.mark.program(SESSIONS), pytest.mark.timeout(240)]


@pytest.fixture
def facts(printed: list[str]) -> dict[str, Any]:
    """What the program found."""
    (text,) = printed
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return {name: value for line in lines for name, value in line.items()}


def test_rows_are_stored_once_although_a_worker_is_killed_while_they_are_written(
    facts: dict[str, Any],
) -> None:
    assert facts["worker_was_killed"]
    assert facts["came_back"]


def test_only_this_machine_and_this_user_reach_a_session(facts: dict[str, Any]) -> None:
    assert facts["addresses"] == ["127.0.0.1", "::ffff:127.0.0.1"]
    assert facts["pages"] == [403]
    assert not facts["secret_is_in_a_command"]
    assert facts["directories"] == ["0o700"]
    assert facts["files"] == ["0o600"]


def test_a_job_goes_on_after_the_master_and_the_actor_were_killed(facts: dict[str, Any]) -> None:
    assert facts["counted_after_the_master"] == 100
    assert facts["counted_after_the_actor"] == 100


def test_no_process_is_left_of_a_session_that_was_stopped_or_whose_driver_was_killed(
    facts: dict[str, Any],
) -> None:
    assert facts["left_by_stop"] == []
    assert facts["nothing_is_left_by_a_killed_driver"]
