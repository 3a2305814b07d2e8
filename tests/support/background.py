"""Modules of tests that a second pytest runs beside the other tests of a run (mark `background`).

A worker (`workers.py`) runs them, module by module. In the first pytest a BackgroundItem stands for each of their
tests: it waits for the second one and reports the same outcome. The second pytest is
`python -m tests.support.background REPORTS [OPTION...] NODE_ID...`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from .durations import WAITS
from .programs import raise_exit
from .workers import Workers, end_with_parent

#: a module that was interrupted stops its Ray in this time
END_TIMEOUT_S = 60


class Phase(NamedTuple):
    """A report of the second pytest: of the setup, the call or the teardown of a test."""

    outcome: str
    #: why it failed or was skipped, and the output of a failed one
    text: str


class Module(NamedTuple):
    """The tests of one module that a run has chosen."""

    #: node ids are relative to it
    root: str
    #: `--timeout` of this run
    options: tuple[str, ...]
    node_ids: tuple[str, ...]


class FailedInBackground(Exception):
    """A test failed in the second pytest: its words are in the text."""


def run_module(module: Module) -> dict[str, list[Phase]]:
    """The reports of its tests, by node id. Raises: RuntimeError if the second pytest was killed.

    Callers: the main thread of a worker, which a SIGTERM ends; the second pytest ends in order before.
    """
    signal.signal(signal.SIGTERM, raise_exit)
    with tempfile.TemporaryDirectory(prefix="raymq-background-") as place:
        reports = Path(place) / "reports"
        # A session of its own: Ctrl-C on a terminal interrupts the worker, which interrupts it once.
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(reports), *module.options, *module.node_ids],
            cwd=module.root,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        try:
            said, _ = process.communicate()
        except SystemExit:
            _interrupt(process)
            # The pool would take it for a result, and give this worker the next module.
            os._exit(1)
        except KeyboardInterrupt:
            _interrupt(process)
            raise
        if not reports.exists():
            text = said.decode(errors="replace")
            raise RuntimeError(f"the second pytest ended with {process.returncode}:\n{text}")
        found: dict[str, list[list[str]]] = json.loads(reports.read_text(encoding="utf-8"))
    return {node_id: [Phase(*phase) for phase in phases] for node_id, phases in found.items()}


def _interrupt(process: subprocess.Popen[bytes]) -> None:
    """The fixtures of the second pytest end what they began."""
    process.send_signal(signal.SIGINT)
    try:
        process.communicate(timeout=END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class BackgroundItem(pytest.Item):
    """Reports the outcome that a test has in the second pytest."""

    def __init__(self, *, test: pytest.Item, module: Module, workers: Workers, **rest: Any) -> None:
        super().__init__(**rest)
        self._test = test
        self._module = module
        self._workers = workers
        # It may wait for all modules before; the second pytest bounds each test.
        self.add_marker(pytest.mark.timeout(0))
        self.user_properties.append(WAITS)

    def runtest(self) -> None:
        reports = self._workers.result(run_module, self._module)
        phases = reports.get(self.nodeid, [Phase("failed", "the second pytest did not run it")])
        failed = [phase.text for phase in phases if phase.outcome == "failed"]
        if failed:
            raise FailedInBackground("\n".join(failed))
        for phase in phases:
            if phase.outcome == "skipped":
                pytest.skip(phase.text)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, FailedInBackground):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[os.PathLike[str] | str, int | None, str]:
        return self._test.reportinfo()


def replace_items(items: list[pytest.Item], workers: Workers) -> list[pytest.Item]:
    """Begin the modules whose tests have the mark; a BackgroundItem takes the place of each of these tests."""
    chosen: dict[Path, list[str]] = {}
    for item in items:
        if is_background(item):
            chosen.setdefault(item.path, []).append(item.nodeid)
    config = items[0].config
    root, timeout_s = str(config.rootpath), config.getoption("timeout", None)
    options = () if timeout_s is None else ("--timeout", str(timeout_s))
    modules = {path: Module(root, options, tuple(node_ids)) for path, node_ids in chosen.items()}
    workers.start(run_module, modules.values())

    def replaced(item: pytest.Item) -> pytest.Item:
        if not is_background(item):
            return item
        module = modules[item.path]
        return BackgroundItem.from_parent(
            item.parent, name=item.name, test=item, module=module, workers=workers
        )

    return [replaced(item) for item in items]


def is_background(item: pytest.Item) -> bool:
    """Whether a second pytest may run this test."""
    return item.get_closest_marker("background") is not None


class _Reporter:
    """A plugin of the second pytest: collects its reports."""

    def __init__(self) -> None:
        self.phases: dict[str, list[Phase]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        text = ""
        if report.failed:
            sections = [f"--- {title} ---\n{output}" for title, output in report.sections]
            text = "\n".join([f"{report.when}:", report.longreprtext, *sections])
        elif report.skipped:
            text = (
                report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            )
        self.phases.setdefault(report.nodeid, []).append(Phase(report.outcome, text))


def main(reports: str, *words: str) -> int:
    """Run pytest with these words and write its reports."""
    # A shell has its background jobs ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    reporter = _Reporter()
    status = pytest.main(["-q", *words], plugins=[reporter])
    complete = Path(f"{reports}.part")
    complete.write_text(json.dumps(reporter.phases), encoding="utf-8")
    complete.replace(reports)
    return int(status)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
