"""Stores that are made once and only read. A test that changes one copies it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.damaged_store import make_golden, make_own


@pytest.fixture(scope="session")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of ours, closed in order."""
    return make_own(tmp_path_factory.mktemp("own") / "store")


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store that RocketMQ wrote."""
    return make_golden(tmp_path_factory.mktemp("golden") / "store")
