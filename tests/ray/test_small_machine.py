"""A cluster on a machine as a container is one: a read-only root, a small /dev/shm, 1,024 files; and its own disks.

The mounts are those of a mount namespace. A user without root cannot make one and does not collect these tests.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from raymq.cluster.deploy.owned_ray import stop_owned
from raymq.cluster.record.paths import ClusterPaths
from raymq.store.base.clock import Clock
from raymq.store.base.files import Files
from tests.support.lean_ray import LEAN
from tests.support.leftovers import VAR_TMP, claim
from tests.support.loop_disk import LoopDisk
from tests.support.workers import end_with_parent

pytestmark = [pytest.mark.loop_disk, pytest.mark.thorough]

#: a container's file systems: only its volume, /tmp and a small /dev/shm can be written. The tree may be below /tmp
CONTAINER = """
mount --make-rprivate /
mount --bind {volume} {volume}
mount -t tmpfs -o size=16m tmpfs /dev/shm
mount --bind /tmp /tmp
mount -o remount,bind,ro /
ulimit -n 1024
cd /
"""
#: what a user does on his first day
FIRST_DAY = """
{raymq} doctor {data}
{raymq} start {data} --segment-size-bytes 4194304 {options}
{raymq} topic create t --cluster {data}
echo an order | {raymq} produce t --cluster {data}
{raymq} consume t --cluster {data}
{raymq} stop {data}
"""


@pytest.fixture
def volume() -> Iterator[Path]:
    """A directory on a disk that a cluster may use."""
    directory = Path(tempfile.mkdtemp(prefix=".raymq-test-", dir=VAR_TMP))
    claim(directory)
    yield directory
    stop_owned(ClusterPaths(directory / "data"), files=Files(), clock=Clock())
    shutil.rmtree(directory, ignore_errors=True)


def first_day(volume: Path, *, before: str = "", options: str = "") -> list[str]:
    """The lines that the commands print. Args: `before`: what is run before them. Each must end with 0."""
    script = "set -e\n" + before + FIRST_DAY
    words = {
        "volume": shlex.quote(str(volume)),
        "data": shlex.quote(str(volume / "data")),
        "raymq": f"{shlex.quote(sys.executable)} -m raymq",
        "options": options,
    }
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY")}
    done = subprocess.run(
        ["unshare", "--mount", "bash", "-c", script.format(**words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        env={**clean, **LEAN, "RAYMQ_HOME": str(volume / "home")},
        timeout=240,
        preexec_fn=end_with_parent,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout.splitlines()


@pytest.mark.timeout(300)
def test_a_container_with_a_read_only_root_a_small_dev_shm_and_1024_files_runs_a_cluster(
    volume: Path,
) -> None:
    lines = first_day(volume, before=CONTAINER)
    assert "an order" in lines
    judged = {line.split()[1].rstrip(":"): line.split()[0] for line in lines if ": " in line}
    assert (judged["/dev/shm"], judged["open"]) == ("warn", "warn")
    assert "fail" not in judged.values()


@pytest.mark.timeout(300)
def test_each_replica_may_have_a_disk_of_its_own_from_the_first_start_on(volume: Path) -> None:
    paths = ClusterPaths(volume / "data")
    with ExitStack() as disks:
        for replica in (0, 1):
            place = paths.replica(0, replica)
            place.parent.mkdir(parents=True, exist_ok=True)
            disks.enter_context(LoopDisk(volume / f"image-{replica}", place, mib=2048))
        lines = first_day(volume, options="--replicas 2")
        assert "an order" in lines
        logs = [sorted(paths.replica(0, replica).glob("commitlog/*")) for replica in (0, 1)]
        assert [log[0].stat().st_dev != volume.stat().st_dev for log in logs] == [True, True]
