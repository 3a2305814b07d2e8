"""The level of what a cluster's processes log."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from raymq.actors.ray.process_setup import check_log_level, set_log_level
from raymq.store.base.errors import Rejected


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """RayMQ's logger, as it was at the end."""
    logger = logging.getLogger("raymq")
    before = logger.level, logger.propagate, list(logger.handlers)
    logger.handlers = []
    yield logger
    logger.propagate, logger.handlers = before[1:]
    logger.setLevel(before[0])


def test_the_variable_makes_every_logger_of_a_process_write_with_its_time(
    root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    set_log_level({"RAYMQ_LOG_LEVEL": "debug"})
    logging.getLogger("raymq.satellite").debug("synced up to %d", 5)
    assert capsys.readouterr().err.endswith(" DEBUG raymq.satellite: synced up to 5\n")


@pytest.mark.parametrize("value", [None, ""])
def test_without_the_variable_nothing_changes(root: logging.Logger, value: str | None) -> None:
    before = root.level, list(root.handlers)
    set_log_level({} if value is None else {"RAYMQ_LOG_LEVEL": value})
    assert (root.level, list(root.handlers)) == before


def test_another_word_than_a_level_is_refused_by_start_and_ignored_by_a_process(
    root: logging.Logger,
) -> None:
    environment = {"RAYMQ_LOG_LEVEL": "loud"}
    with pytest.raises(Rejected, match="RAYMQ_LOG_LEVEL=loud: use one of DEBUG, INFO"):
        check_log_level(environment)
    before = root.level
    set_log_level(environment)
    assert root.level == before
