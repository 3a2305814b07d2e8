"""The guard above a daemon of Spark: it starts the daemon again, and nothing survives the guard's owner."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from raymq.cluster.spark_on_ray import guard
from raymq.cluster.spark_on_ray.guarded_daemon import (
    daemon_environment,
    memory_bytes,
    write_options,
)
from raymq.cluster.spark_on_ray.standalone_options import Secrets, daemon_options, driver_options
from tests.support.waiting import until

#: a daemon with a child, and an orphan in a session of its own
DAEMON = "setsid sleep 1000 & sleep 1000 & wait"
#: the owner of a guard, which waits for its end
OWNER = """
import os, signal, subprocess, sys
subprocess.run([sys.executable, "-I", sys.argv[1], sys.argv[2], str(os.getpid()), "sh", "-c", sys.argv[3]], check=True)
signal.pause()
"""


class Guarded:
    """An owner, its guard and the daemon's tree, all with the directory's name in their environment."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(mode=0o700)
        self.owner = subprocess.Popen(
            [sys.executable, "-c", OWNER, guard.__file__, directory, DAEMON],
            env={**os.environ, "GUARDED": str(directory)},
            stdout=subprocess.PIPE,
        )
        assert self.owner.stdout is not None
        self.guard_pid = int(self.owner.stdout.readline())
        self.wait_for_sleeps()

    def processes(self, command: bytes = b"") -> list[int]:
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                environment = (entry / "environ").read_bytes().split(b"\0")
                own = f"GUARDED={self.directory}".encode() in environment
                if own and (entry / "cmdline").read_bytes().startswith(command):
                    found.append(int(entry.name))
        return found

    def wait_for_sleeps(self) -> None:
        until(lambda: len(self.processes(b"sleep")) == 2, lambda: time.sleep(0.01))

    def wait_for_nothing(self) -> None:
        until(lambda: self.processes() == [], lambda: time.sleep(0.01))

    def close(self) -> None:
        with self.owner:
            self.owner.kill()
        self.wait_for_nothing()


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    with contextlib.closing(Guarded(tmp_path / "private")) as found:
        yield found


def test_a_killed_owner_leaves_no_process_and_no_directory(guarded: Guarded) -> None:
    guarded.owner.kill()
    guarded.owner.wait()
    guarded.wait_for_nothing()
    assert not guarded.directory.exists()


def test_a_guard_that_is_asked_ends_the_daemon_and_leaves_the_owner(guarded: Guarded) -> None:
    os.kill(guarded.guard_pid, signal.SIGTERM)
    until(
        lambda: guarded.processes() == [guarded.owner.pid],
        lambda: time.sleep(0.01),
    )
    assert not guarded.directory.exists()


def test_a_daemon_that_is_killed_is_started_again_without_the_rest_of_its_tree(
    guarded: Guarded,
) -> None:
    first = set(guarded.processes(b"sleep"))
    (daemon,) = guarded.processes(b"sh\0-c")
    os.kill(daemon, signal.SIGKILL)
    until(lambda: not first & set(guarded.processes()), lambda: time.sleep(0.01))
    guarded.wait_for_sleeps()
    assert "started again" in (guarded.directory / guard.LOG).read_text()


def test_a_daemon_does_not_outlive_a_killed_guard(guarded: Guarded) -> None:
    (daemon,) = guarded.processes(b"sh\0-c")
    os.kill(guarded.guard_pid, signal.SIGKILL)
    until(lambda: daemon not in guarded.processes(), lambda: time.sleep(0.01))
    for pid in guarded.processes(b"sleep"):
        # Of Spark's processes these end by themselves: they notice that their Worker is gone.
        os.kill(pid, signal.SIGKILL)


def test_a_guard_whose_owner_is_not_its_parent_starts_nothing(tmp_path: Path) -> None:
    words = [sys.executable, "-I", guard.__file__, tmp_path, "1", "touch", tmp_path / "began"]
    assert subprocess.run(words, check=False).returncode == 1
    assert list(tmp_path.iterdir()) == []


def test_the_secret_is_in_a_file_that_only_this_user_reads(tmp_path: Path) -> None:
    shared = Secrets.new()
    write_options(tmp_path, daemon_options(shared, tmp_path))
    file = tmp_path / "conf" / "spark-defaults.conf"
    assert f"spark.authenticate.secret {shared.rpc}\n" in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_the_options_of_a_command_line_have_no_secret() -> None:
    options = driver_options("127.0.0.1", "spark://h:1", executors=2, cores=3, memory="512m")
    assert not [name for name in options if "secret" in name]
    assert options["spark.cores.max"] == "6"


def test_settings_for_another_spark_do_not_reach_a_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "raymq.cluster.spark_on_ray.guarded_daemon.spark_home", lambda: Path("/spark")
    )
    before = {"SPARK_MASTER_HOST": "0.0.0.0", "SPARK_DAEMON_JAVA_OPTS": "-X", "PATH": "/bin"}
    after = daemon_environment(before, tmp_path)
    assert {name for name in after if name in before} == {"PATH"}
    assert after["SPARK_LOCAL_IP"] == "127.0.0.1"


@pytest.mark.parametrize(
    ("text", "size"), [("512m", 512 << 20), ("2GB", 2 << 30), ("1 GiB", 1 << 30), ("1t", 1 << 40)]
)
def test_a_size_is_read_as_spark_reads_it(text: str, size: int) -> None:
    assert memory_bytes(text) == size


@pytest.mark.parametrize("text", ["", "lots", "1.5g", "100", "-1g"])
def test_another_text_is_not_a_size(text: str) -> None:
    with pytest.raises(ValueError):
        memory_bytes(text)
