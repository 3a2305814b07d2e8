"""A real Ray that `start` owns: it outlives its starter, is found by others, and leaves no files or processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from raymq.cluster.deploy import owned_ray, process_tree, ray_host
from raymq.cluster.record.paths import ClusterPaths, prepare_data_dir
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Unavailable
from raymq.store.base.files import Files

#: `ray start` in one process that then ends
START = """
import sys
from raymq.cluster.deploy import owned_ray
from raymq.cluster.record.paths import ClusterPaths
from raymq.store.base.clock import Clock
from raymq.store.base.files import Files
owned_ray.start_owned(
    ClusterPaths(sys.argv[1]), files=Files(), clock=Clock(), progress=lambda line: None
)
sys.exit("ray" in sys.modules)
"""

#: another process, without the starter's environment, uses it; {early} imports Ray before we set
#: anything
USE = """
import json, os, sys
if {early}:
    import ray
from raymq.cluster.deploy import ray_host
from raymq.cluster.record.paths import ClusterPaths
from raymq.store.base.files import Files

target = ray_host.find_ray(ClusterPaths(sys.argv[1]), None, Files())
with ray_host.session(target) as ray:
    @ray.remote(num_cpus=0)
    class Probe:
        def look(self):
            import raymq
            return [os.getpid(), raymq.__file__]

    probe = Probe.options(name="probe", lifetime="detached", get_if_exists=True).remote()
    pid, home = ray.get(probe.look.remote(), timeout=30)
    labels = ray.nodes()[0]["Labels"]
print(json.dumps({{"pid": pid, "home": home, "labels": labels, "left": ray.is_initialized()}}))
"""


def run(code: str, data_dir: Path, **environment: str) -> str:
    base = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", code, str(data_dir)],
        capture_output=True,
        text=True,
        check=False,
        env={**base, **environment},
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def use(data_dir: Path, *, early: bool) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(run(USE.format(early=early), data_dir).splitlines()[-1])
    return facts


def ray_processes() -> set[int]:
    """Every Ray server of this machine, ours or not."""
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if entry.name.isdigit() and (b"gcs_server" in command or b"/raylet" in command):
            found.add(int(entry.name))
    return found


@pytest.mark.alone
@pytest.mark.timeout(120)
def test_an_owned_ray_outlives_its_starter_and_leaves_nothing(tmp_path: Path) -> None:
    files, clock = Files(), Clock()
    place = tmp_path / ("d" * 90)
    paths: ClusterPaths = prepare_data_dir(str(place), ephemeral=True, files=files)
    strangers = ray_processes()
    shared = Path("/tmp/ray/ray_current_cluster")
    shared_before = shared.read_bytes() if shared.exists() else None
    run(START, place, RAY_AUTH_TOKEN_PATH=str(tmp_path / "ray-token"))
    owned = ray_host.load_owned(paths, files)
    assert owned is not None
    try:
        assert ray_host.running_target(paths, files) is not None
        assert owned.auth_mode == "token"
        assert (tmp_path / "ray-token").stat().st_mode & 0o777 == 0o600
        first = use(place, early=False)
        second = use(place, early=True)
        assert first["pid"] == second["pid"]
        assert first["home"] == second["home"]
        assert first["labels"][ray_host.HOST_LABEL] == owned_ray.host_label()
        assert not first["left"]
        assert first["pid"] in process_tree.members(owned.family, files)
    finally:
        killed = owned_ray.stop_owned(paths, files=files, clock=clock)
    # A detached actor was left running: Ray ends it, we need not.
    assert killed == []
    assert process_tree.members(owned.family, files) == []
    assert not Path(owned.temp_dir).exists()
    assert ray_host.load_target(paths, files) is None
    assert ray_host.find_ray(paths, None, files) is None
    # Any other Ray of this machine still runs, and "auto" still means that one.
    assert strangers <= ray_processes()
    assert (shared.read_bytes() if shared.exists() else None) == shared_before
    # Stopping again is nothing.
    assert owned_ray.stop_owned(paths, files=files, clock=clock) == []


def test_a_ray_that_loses_a_server_while_it_is_asked_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        target = ray_host.RayTarget(address=f"127.0.0.1:{silent.getsockname()[1]}")
        answers = iter([None, None, "its gcs_server is stopped (SIGSTOP)"])
        with pytest.raises(Unavailable, match="gcs_server is stopped"):
            ray_host.attach(target, 60, why_unhealthy=lambda: next(answers))
