"""A start whose Ray has just died, is dying or hangs: that Ray is replaced, or the error names it in time."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from raymq.cluster.deploy import owned_ray, process_tree, ray_host
from raymq.cluster.deploy.ray_host import OwnedRay
from raymq.cluster.record.paths import ClusterPaths
from raymq.cluster.stop import stop
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Unavailable
from raymq.store.base.files import Files
from tests.support.ray_environment import ray_environment

SEGMENT_BYTES = 4 * 1024 * 1024
#: `start` in a process of its own, which nothing but its own end bounds
START = """
import sys, raymq
raymq.start(sys.argv[1], timeout_s=float(sys.argv[2]), address=sys.argv[3] or None, ephemeral=True,
            segment_size_bytes=int(sys.argv[4]), progress=print)
"""


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("died")
    with ray_environment(place):
        try:
            done = start(place / "data")
            assert done.returncode == 0, done.stdout
            yield place / "data"
        finally:
            owned_ray.stop_owned(ClusterPaths(place / "data"), files=Files(), clock=Clock())


def start(
    data_dir: Path, *, timeout_s: float = 180.0, address: str = ""
) -> subprocess.CompletedProcess[str]:
    words = [str(data_dir), str(timeout_s), address, str(SEGMENT_BYTES)]
    return subprocess.run(
        [sys.executable, "-c", START, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=timeout_s + 60,
    )


def owned_of(data_dir: Path) -> OwnedRay:
    owned = ray_host.load_owned(ClusterPaths(data_dir), Files())
    assert owned is not None
    return owned


def server(owned: OwnedRay, name: str) -> int:
    """The pid of the Ray's GCS or raylet."""
    (found,) = [
        pid
        for pid in process_tree.members(owned.family, Files())
        if Path(f"/proc/{pid}/comm").read_text().strip() == name
    ]
    return found


@pytest.mark.parametrize(
    ("name", "number"),
    [
        pytest.param("gcs_server", signal.SIGKILL, id="gcs_server-killed"),
        pytest.param(
            "gcs_server", signal.SIGSTOP, id="gcs_server-stopped", marks=pytest.mark.thorough
        ),
        pytest.param("raylet", signal.SIGKILL, id="raylet-killed", marks=pytest.mark.thorough),
        pytest.param("raylet", signal.SIGSTOP, id="raylet-stopped", marks=pytest.mark.thorough),
    ],
)
def test_a_start_replaces_a_ray_whose_server_was_lost(
    name: str, number: signal.Signals, data_dir: Path
) -> None:
    before = owned_of(data_dir)
    os.kill(server(before, name), number)
    done = start(data_dir)
    assert done.returncode == 0, done.stdout
    # Of a server that was killed Ray itself may have heard already.
    lost = f"{name} is stopped" if number == signal.SIGSTOP else "has ended"
    assert f"is lost and is replaced: its {'' if number == signal.SIGKILL else lost}" in done.stdout
    assert owned_of(data_dir).mark != before.mark
    assert process_tree.members(before.family, Files()) == []
    assert not Path(before.temp_dir).exists()


def test_a_stop_ends_a_ray_that_hangs(data_dir: Path) -> None:
    owned = owned_of(data_dir)
    os.kill(server(owned, "gcs_server"), signal.SIGSTOP)
    report = stop(data_dir, timeout_s=20)
    assert (report.clean, report.ray) == (False, "stopped")
    assert "gcs_server" in report.actors["ray"]
    assert process_tree.members(owned.family, Files()) == []
    assert start(data_dir).returncode == 0


def test_a_start_in_a_ray_of_others_that_hangs_ends_in_time_and_says_what_it_waited_for(
    data_dir: Path, tmp_path: Path
) -> None:
    owned = owned_of(data_dir)
    gcs = server(owned, "gcs_server")
    os.kill(gcs, signal.SIGSTOP)
    try:
        begin = time.monotonic()
        done = start(tmp_path / "other", timeout_s=4, address=owned.address)
        seconds = time.monotonic() - begin
    finally:
        os.kill(gcs, signal.SIGCONT)
    # Not a measurement: `ray.init` alone would wait for minutes, or for ever.
    assert seconds < 60, done.stdout
    assert Unavailable.__name__ in done.stdout
    # Of the 4 s some went by before it asked that Ray.
    waited = rf"Ray at {re.escape(owned.address)} does not answer within (4|[23]\.\d) s"
    assert re.search(waited, done.stdout), done.stdout
    assert not (tmp_path / "other" / "cluster.json").exists()
