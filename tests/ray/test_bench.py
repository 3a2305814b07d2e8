"""A load test on a real cluster: Ray tasks send and read, everything is verified, the report is written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from raymq.cluster.deploy import owned_ray
from raymq.cluster.record.paths import ClusterPaths
from raymq.store.base.clock import Clock
from raymq.store.base.files import Files
from tests.support.lean_ray import LEAN

pytestmark = pytest.mark.thorough


@pytest.mark.timeout(120)
def test_an_end_to_end_run_of_two_workers_as_ray_tasks_is_sound(tmp_path: Path) -> None:
    paths = ClusterPaths(tmp_path / "data")
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("RAY")},
        **LEAN,
        "RAYMQ_HOME": str(tmp_path / "home"),
        "RAY_AUTH_TOKEN_PATH": str(tmp_path / "ray-token"),
    }

    def raymq(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "raymq", *words],
            capture_output=True,
            text=True,
            check=False,
            env=environment,
            timeout=90,
        )
        assert done.returncode == 0, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    try:
        size = str(16 * 1024 * 1024)
        raymq(
            *("start", paths.data_dir, "--ephemeral", "--shards", "2"),
            *("--segment-size-bytes", size),
        )
        reported = raymq(
            *("bench", "e2e", "--workers", "2", "--rate", "2000", "--keys", "zipf:100"),
            *("--size", "lognormal:300", "--duration-s", "2", "--warmup-s", "1"),
            *("--json", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html")),
        )
        report = json.loads((tmp_path / "r.json").read_text())
        assert report["runner"] == "ray"
        assert report["verification"]["sound"]
        assert report["unsent"] == 0
        for part in ("log", "consumed"):
            verdict = report["verification"][part]
            assert verdict["read"] == verdict["acknowledged"] == 6000
        for channel in ("send", "receive"):
            assert report["channels"][channel]["latency"]["count"] >= 4000
        assert "6,000 acknowledged, 0 lost, 0 repeated, 0 out of order" in reported
        assert (tmp_path / "r.html").read_text().count("<polyline") == 20
        raymq("stop")
    finally:
        owned_ray.stop_owned(paths, files=Files(), clock=Clock())
