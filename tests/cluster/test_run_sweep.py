"""Leftovers of dead processes in /tmp/raymq-<uid> are removed, and nothing else."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from raymq.actors.shared.wakeup import Wakeup
from raymq.cluster.deploy import run_sweep
from raymq.cluster.deploy.process_tree import MARK
from raymq.store.base.clock import Clock
from raymq.store.base.files import Files


@pytest.fixture
def run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(run_sweep, "run_dir", lambda files: tmp_path)
    return tmp_path


@pytest.fixture
def wakeups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Wakeup]]:
    def directory(replica: str) -> str:
        return str(tmp_path / f"{int(replica):012x}")

    monkeypatch.setattr("raymq.actors.shared.wakeup.wakeup_directory", directory)
    monkeypatch.setattr(run_sweep, "wakeup_directory", directory)
    found = [Wakeup(str(number), "commit_log", files=Files()) for number in range(3)]
    yield found
    for wakeup in found:
        wakeup.close()


def age(run_directory: Path) -> None:
    """All of it was there yesterday."""
    for path in run_directory.iterdir():
        os.utime(path, (0, 0))


def test_the_wakeup_sockets_of_dead_processes_go_and_those_of_living_ones_stay(
    run_directory: Path, wakeups: list[Wakeup]
) -> None:
    wakeups[0].close()
    # As after a SIGKILL: the name stays.
    wakeups[1]._close_sockets()
    age(run_directory)
    removed = run_sweep.sweep(Files(), Clock())
    assert removed == ["000000000000", "000000000001"]
    assert [path.name for path in run_directory.iterdir()] == ["000000000002"]
    wakeups[2].wake("commit_log")
    assert wakeups[2].wait(1000)


def test_what_is_young_stays_unless_it_was_just_closed(
    run_directory: Path, wakeups: list[Wakeup]
) -> None:
    wakeups[0].close()
    wakeups[1].close()
    assert run_sweep.sweep(Files(), Clock(), [Path("1"), Path("2")]) == ["000000000001"]


def test_the_socket_of_a_queue_without_a_coordinator_goes(run_directory: Path) -> None:
    with socket.socket(socket.AF_UNIX) as kept, socket.socket(socket.AF_UNIX) as left:
        kept.bind(str(run_directory / "queue-aa"))
        kept.listen()
        left.bind(str(run_directory / "queue-bb"))
        left.close()
        (run_directory / "notes").write_text("of another process")
        age(run_directory)
        assert run_sweep.sweep(Files(), Clock()) == ["queue-bb"]


def test_the_session_of_a_ray_stays_while_one_of_its_processes_lives(run_directory: Path) -> None:
    for name in ("ray-0123abcd", "ray-4567abcd"):
        (run_directory / name / "session" / "logs").mkdir(parents=True)
    age(run_directory)
    living = subprocess.Popen(
        [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"],
        env={**os.environ, MARK: "0123abcd89abcdef"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with living:
        assert living.stdout is not None
        living.stdout.readline()
        assert run_sweep.sweep(Files(), Clock()) == ["ray-4567abcd"]
    assert run_sweep.sweep(Files(), Clock()) == ["ray-0123abcd"]
