"""The oracle for this folder: left out loudly if it cannot run, an error if it must."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raymq.store.config.store_config import StoreConfig
from tests.support.oracle import Missing, Oracle, Program, RocketMQ, prepare

#: CI sets it: there a missing oracle is a failure
REQUIRED = "RAYMQ_INTEROP"
MIB = 1024 * 1024
#: file sizes of every store here, ours and RocketMQ's
CONFIG = StoreConfig(
    segment_size_bytes=MIB,
    consume_queue_file_size_bytes=2000,
    max_hash_slot_num=1000,
    max_index_num=4000,
    flush="async",
)
SIZES = {"segment": MIB, "queue": 2000, "slots": 1000, "entries": 4000, "flush": "ASYNC_FLUSH"}

_why_missing: list[str] = []


@pytest.fixture(scope="session")
def program(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Program:
    cache: Any = getattr(pytestconfig, "cache", None)
    place = Path(cache.mkdir("oracle")) if cache else tmp_path_factory.mktemp("oracle")
    try:
        return prepare(place)
    except Missing as error:
        if os.environ.get(REQUIRED) == "required":
            pytest.fail(f"{REQUIRED}=required, but the oracle cannot run: {error}", pytrace=False)
        _why_missing.append(str(error))
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def rocketmq(program: Program, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RocketMQ]:
    """RocketMQ on stores of the sizes above; one process for the whole session."""
    scratch = tmp_path_factory.mktemp("rocketmq")
    oracle = Oracle(program, scratch / "home")
    yield RocketMQ(program, oracle, scratch, SIZES)
    oracle.close()


@pytest.fixture(scope="session")
def config() -> StoreConfig:
    return CONFIG


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A store that RocketMQ has not read is not proved: say so at the end of the output."""
    if _why_missing:
        terminalreporter.section("RocketMQ did not read our stores", sep="!", red=True, bold=True)
        terminalreporter.line(_why_missing[0])
