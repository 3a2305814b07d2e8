"""Crashes and failures are tried from the first test on, in idle time. The last tests check the results."""

from __future__ import annotations

import pytest

from tests.support.crash_run import Task, explore, lose_after_kills
from tests.support.failing_workloads import fail_every_call
from tests.support.workers import Workers

_explorers = pytest.StashKey[Workers]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin all that this run has chosen."""
    params = [item.callspec.params for item in session.items if hasattr(item, "callspec")]
    tasks: list[Task] = [each["task"] for each in params if "task" in each]
    workloads: list[str] = [each["workload"] for each in params if "workload" in each]
    kills: list[str] = [each["trace_killed"] for each in params if "trace_killed" in each]
    if (tasks or workloads or kills) and not session.config.option.collectonly:
        session.config.stash[_explorers] = made = Workers(only_idle=True)
        made.start(fail_every_call, workloads)
        made.start(lose_after_kills, kills)
        made.start(explore, tasks)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End them, also when the run was broken off."""
    if _explorers in config.stash:
        config.stash[_explorers].close()


@pytest.fixture(scope="session")
def crash_explorers(pytestconfig: pytest.Config) -> Workers:
    """The tasks that were begun: a test only waits for its own."""
    made = pytestconfig.stash.get(_explorers, None)
    if made is None:
        made = pytestconfig.stash[_explorers] = Workers()
    return made
