"""What Replication sees of the process of its CommitLog, and what ends its waits."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from raymq.actors.satellites.satellite import Satellite
from raymq.actors.shared import control_block
from raymq.actors.shared.control_block import ControlBlock, Leadership
from raymq.actors.shared.processes import identify
from raymq.actors.shared.wakeup import wakeup_directory
from raymq.store.base.clock import Clock
from raymq.store.base.files import Files

LED = Leadership(epoch=3, begun_end=100, incarnation=9)


class CommitLog:
    """A process that stands for CommitLog's, and the control block that names it."""

    def __init__(self, root: Path) -> None:
        files = Files()
        (root / "raymq").mkdir()
        self._process = subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True
        )
        identity = identify(self._process.pid, files=files)
        assert identity is not None
        self._control = ControlBlock.open(
            control_block.shared_file(str(root), "control"), files=files
        )
        self._control.format(files.boot_id_hash())
        self._control.begin(77, identity, 0, Clock().monotonic_ms(), pooled=False)

    def lead(self, led: Leadership | None) -> None:
        self._control.publish_leadership(led)

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.communicate("\n")

    def close(self) -> None:
        self.end()
        self._control.close()


@pytest.fixture
def commit_log(tmp_path: Path) -> Iterator[CommitLog]:
    made = CommitLog(tmp_path)
    yield made
    made.close()


@pytest.fixture
def replication(tmp_path: Path, commit_log: CommitLog) -> Iterator[Satellite]:
    satellite = Satellite(tmp_path, "replication", clock=Clock(), files=Files())
    satellite.attach()
    yield satellite
    satellite.close()
    shutil.rmtree(wakeup_directory(str(tmp_path)), ignore_errors=True)


def test_the_end_of_the_leaders_process_ends_the_wait_of_its_replication(
    commit_log: CommitLog, replication: Satellite
) -> None:
    commit_log.lead(LED)
    assert replication.leadership == LED
    assert not replication.wait(0)
    commit_log.end()
    assert replication.wait(60_000)
    assert replication.leadership is None


@pytest.mark.parametrize("has_followed", [False, True])
def test_after_the_end_of_its_commit_log_replication_waits_as_before(
    commit_log: CommitLog, replication: Satellite, has_followed: bool
) -> None:
    commit_log.lead(LED)
    assert replication.leadership == LED
    if has_followed:
        commit_log.lead(None)
        assert replication.leadership is None
    commit_log.end()
    assert replication.leadership is None
    assert not replication.wait(0)
