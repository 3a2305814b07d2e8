"""Crashes and failures are tried in time that nothing else needs; the last tests look at them."""

from __future__ import annotations

import pytest

from tests.support.background import crash_workers
from tests.support.workers import Workers


@pytest.fixture(scope="session")
def crash_explorers(pytestconfig: pytest.Config) -> Workers:
    """The tasks that were begun with the first test. A test only waits for its own."""
    return crash_workers(pytestconfig)
