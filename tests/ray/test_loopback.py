"""The Ray that `start` owns listens on 127.0.0.1, with all its processes, unless `host` asks for more."""

from __future__ import annotations

import ipaddress
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import raymq
from raymq.cluster.deploy import owned_ray, process_tree, ray_host
from raymq.cluster.record.paths import ClusterPaths
from raymq.store.base.clock import Clock
from raymq.store.base.files import Files
from tests.support.listening import Listening, listening
from tests.support.ray_environment import ray_environment

#: a driver without the starter's environment, as a second shell is: it runs a task
DRIVER = """
import ray, sys
ray.init(sys.argv[1], log_to_driver=False)
print(ray.get(ray.remote(lambda: "a task ran").remote(), timeout=60))
"""

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("loopback")
    with ray_environment(place, lean=False):
        try:
            yield place
        finally:
            for record in place.glob("*/ray.json"):
                owned_ray.stop_owned(ClusterPaths(record.parent), files=Files(), clock=Clock())


def start(data_dir: Path, **options: object) -> raymq.Cluster:
    return raymq.start(
        data_dir,
        ephemeral=True,
        timeout_s=200,
        segment_size_bytes=4 * 1024 * 1024,
        **options,  # type: ignore[arg-type]
    )


def sockets(data_dir: Path) -> list[Listening]:
    owned = ray_host.load_owned(ClusterPaths(data_dir), Files())
    assert owned is not None
    return listening([*process_tree.members(owned.family, Files()), os.getpid()])


def is_local(address: str) -> bool:
    found = ipaddress.ip_address(address)
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback


@pytest.mark.timeout(400)
def test_nothing_of_a_cluster_listens_beyond_this_machine_and_every_driver_still_reaches_it(
    place: Path,
) -> None:
    with start(place / "data", replicas=2) as cluster:
        assert cluster.ray_address is not None
        token = os.environ["RAY_AUTH_TOKEN_PATH"]
        foreign = {name: value for name, value in os.environ.items() if name[:4] != "RAY_"}
        done = subprocess.run(
            [sys.executable, "-c", DRIVER, cluster.ray_address],
            env={**foreign, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": token},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.stdout.strip() == "a task ran", done.stderr
        found = sockets(place / "data")
    programs = {each.program for each in found}
    assert {"gcs_server", "raylet"} <= programs
    assert len(found) > 8
    assert [each for each in found if not is_local(each.address)] == []


def test_a_host_for_other_machines_takes_ray_along(place: Path) -> None:
    with start(place / "exposed", host="0.0.0.0", insecure=True) as cluster:
        found = sockets(place / "exposed")
        assert cluster.ray_address is not None
    assert [each.program for each in found if not is_local(each.address)]
    assert "::ffff" not in cluster.ray_address
