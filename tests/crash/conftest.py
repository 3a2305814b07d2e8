"""Crash points are explored from the first test on, in the time that nobody else needs, and looked at by the last."""

from __future__ import annotations

import pytest

from tests.support.crash_run import Task, explore
from tests.support.workers import Workers

_explorers = pytest.StashKey[Workers]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin all that this run has chosen."""
    chosen = [
        item.callspec.params.get("task") for item in session.items if hasattr(item, "callspec")
    ]
    tasks = [task for task in chosen if isinstance(task, Task)]
    if tasks and not session.config.option.collectonly:
        session.config.stash[_explorers] = made = Workers(only_idle=True)
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
