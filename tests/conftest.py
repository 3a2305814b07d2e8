"""Shared by all tests: a guard against bare imports, and a mark by folder for Ray, Spark and RocketMQ."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import settings

from tests.support import background
from tests.support.leftovers import claim, sweep
from tests.support.network_namespaces import can_make_namespaces
from tests.support.workers import end_with_parent

PARTS = {"store", "actors", "replication", "cluster", "spark"}
TESTS = Path(__file__).parent
#: the group of tests that one process runs, in turn, where several run the tests
ONE_PROCESS = "one process"

# The same cases at every run, and no verdict from a busy machine's clock.
settings.register_profile("raymq", derandomize=True, deadline=None, database=None)
settings.load_profile("raymq")
if "RAYMQ_FUZZ_EXAMPLES" in os.environ:
    # New cases at every run, of which a failed one prints how to make it again (`nox -s fuzz`).
    settings.register_profile(
        "fuzz",
        parent=settings.get_profile("raymq"),
        derandomize=False,
        print_blob=True,
        max_examples=int(os.environ["RAYMQ_FUZZ_EXAMPLES"]),
    )
    settings.load_profile("fuzz")


class BareImportGuard(MetaPathFinder):
    """Refuses `import store` and its like.

    The folders are importable by their bare names while the repository's root is on sys.path, which
    would give a second copy of every class.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] in PARTS:
            raise ImportError(f"import raymq.{name}, not {name}")
        return None


sys.meta_path.insert(0, BareImportGuard())

# A store that a test lets crash keeps its descriptors. The usual soft limit, 1,024, is too low for all of them.
DESCRIPTORS = 65_536
_soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
if _soft not in (resource.RLIM_INFINITY, DESCRIPTORS):
    _wanted = DESCRIPTORS if _hard == resource.RLIM_INFINITY else min(_hard, DESCRIPTORS)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(_soft, _wanted), _hard))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark by folder, so that no test can forget it; what needs Ray or Spark runs last.

    What needs network namespaces is left out where none can be made.
    """
    for item in items:
        if item.path.is_relative_to(TESTS / "ray"):
            item.add_marker(pytest.mark.ray)
        elif item.path.is_relative_to(TESTS / "spark"):
            item.add_marker(pytest.mark.spark)
        elif item.path.is_relative_to(TESTS / "interop"):
            item.add_marker(pytest.mark.interop)
    items.sort(key=weight)
    if is_worker(config):
        # This group takes longest, so it begins first; the other processes take the other files.
        items.sort(key=lambda item: not in_one_process(item.path))
    network = [item for item in items if item.get_closest_marker("network")]
    if network and not can_make_namespaces():
        config.hook.pytest_deselected(items=network)
        items[:] = [item for item in items if item not in network]


def weight(item: pytest.Item) -> int:
    """0 for a test without Ray, 1 with Ray, 2 with Spark: a plain fault shows first; 3 for what runs beside them."""
    if item.path.name in background.EXPLORED:
        return 3
    if item.get_closest_marker("spark"):
        return 2
    return 1 if item.get_closest_marker("ray") else 0


def in_one_process(path: Path) -> bool:
    """Whether tests of a file start Ray, or wait for background work: two such at a time would overload a machine."""
    folder = path.parent.name
    return folder in ("ray", "spark") or path.name in (*background.EXPLORED, *background.WATCHED)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Each process takes file after file; all files that one process must run count as one."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return ONE_PROCESS if in_one_process(Path(file)) else file

    return Scheduling(config, log)


def is_worker(config: pytest.Config) -> bool:
    """Whether this is one of several processes that run the tests."""
    return hasattr(config, "workerinput")


def pytest_sessionstart(session: pytest.Session) -> None:
    """A run that was stopped leaves up to 12 GB: the next one removes that."""
    if is_worker(session.config):
        end_with_parent()
        return
    factory = session.config._tmp_path_factory  # type: ignore[attr-defined]
    if not session.config.option.collectonly:
        own = factory.getbasetemp()
        sweep([own.parent, Path.home()])
        claim(own)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin the background work of all the tests that this run has chosen."""
    if not session.config.option.collectonly and not is_worker(session.config):
        background.begin(session.config, session.items)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Of several processes, the one that has the group begins the background work."""
    if is_worker(item.config) and in_one_process(item.path):
        background.begin(item.config, item.session.items)


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the background work, also when the run was broken off."""
    background.end(config)


@pytest.fixture
def printed(request: pytest.FixtureRequest) -> list[str]:
    """What the program of the test's mark printed, each time it was run. Raises: what `programs.run` raises."""
    found: list[str] = background.result_beside(request.node)
    return found


@pytest.fixture
def beside(request: pytest.FixtureRequest) -> Any:
    """What the function of the test's mark `beside` returned. Raises: what it raised."""
    return background.result_beside(request.node)
