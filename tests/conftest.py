"""Shared by all tests: a guard against bare imports, and a mark by folder for Ray, Spark, RocketMQ and servers."""

from __future__ import annotations

import functools
import os
import resource
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import settings

from raymq.actors.shared.idle_cores import IdleCores
from tests.support import durations
from tests.support.leftovers import VAR_TMP, claim, disk_root, sweep
from tests.support.loop_disk import can_mount
from tests.support.network_namespaces import can_make_namespaces
from tests.support.programs import run

PARTS = {"store", "actors", "replication", "client", "cluster", "spark", "doors"}
TESTS = Path(__file__).parent
#: in these folders tests call servers of their own process
SERVED = {"actors", "client", "cluster", "doors"}
#: their cases run in idle time
EXPLORED = ("test_every_call_fails.py", "test_crash_points.py")
#: of a test whose program or function takes long
PROGRAM_TIMEOUT_S = 600

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


def pytest_configure(config: pytest.Config) -> None:
    """Let every interpreter of this run keep what it compiles, also if the environment forbids it.

    Ray starts hundreds of them, and to compile all modules takes longer than to run most of these processes.
    """
    cache: Any = getattr(config, "cache", None)
    if sys.dont_write_bytecode and cache is not None:
        # Out of the tree, which the environment asks for.
        sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(cache.mkdir("bytecode"))
        sys.dont_write_bytecode = False
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark by folder, so that no test can forget it; what needs Ray or Spark runs last.

    Tests of network namespaces and of disks of their own are left out if none can be made.
    """
    for item in items:
        if item.path.is_relative_to(TESTS / "ray"):
            item.add_marker(pytest.mark.ray)
        elif item.path.is_relative_to(TESTS / "spark"):
            item.add_marker(pytest.mark.spark)
        elif item.path.is_relative_to(TESTS / "interop"):
            item.add_marker(pytest.mark.interop)
        elif item.path.relative_to(TESTS).parts[0] in SERVED:
            item.add_marker(pytest.mark.served)
        if item.get_closest_marker("program") or item.get_closest_marker("beside"):
            item.add_marker(pytest.mark.timeout(PROGRAM_TIMEOUT_S))
    items.sort(key=weight)
    for marker, is_possible in (("network", can_make_namespaces), ("loop_disk", can_mount)):
        marked = [item for item in items if item.get_closest_marker(marker)]
        if marked and not is_possible():
            config.hook.pytest_deselected(items=marked)
            items[:] = [item for item in items if item not in marked]


def weight(item: pytest.Item) -> int:
    """0 for a test without Ray, 1 with Ray, 2 with Spark: a plain fault shows first. 3 for what uses idle time."""
    if item.path.name in EXPLORED:
        return 3
    if item.get_closest_marker("spark"):
        return 2
    return 1 if item.get_closest_marker("ray") else 0


def pytest_sessionstart(session: pytest.Session) -> None:
    """A run that was stopped leaves up to 12 GB: the next one removes that."""
    factory = session.config._tmp_path_factory  # type: ignore[attr-defined]
    if not session.config.option.collectonly:
        own = factory.getbasetemp()
        sweep([own.parent, disk_root(), VAR_TMP])
        claim(own)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note how long it took."""
    durations.note(report)


@pytest.fixture
def idle_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else this machine computes, a CommitLog in this process takes its cores for idle."""
    monkeypatch.setattr(IdleCores, "are_idle", lambda self: True)


@pytest.fixture
def printed(request: pytest.FixtureRequest) -> list[str]:
    """The output of the program of the test's mark, for each of its runs. Raises: what `programs.run` raises."""
    found: list[str] = _result(run, request.node.get_closest_marker("program").args[0])
    return found


@pytest.fixture
def beside(request: pytest.FixtureRequest) -> Any:
    """The result of the function of the test's mark `beside`. Raises: what it raised."""
    return _result(*request.node.get_closest_marker("beside").args)


@functools.cache
def _result(work: Callable[[Any], Any], argument: Any) -> Any:
    """Of several tests with the same program or function the first one runs it."""
    return work(argument)
