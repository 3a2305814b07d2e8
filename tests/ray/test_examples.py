"""Every example runs as its first lines say, and checks its own result."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def place() -> Iterator[Path]:
    # Not tmp_path: a data directory in /tmp would need --ephemeral, which the examples do not say.
    made = Path(tempfile.mkdtemp(prefix=".raymq-test-", dir=Path.home()))
    yield made
    shutil.rmtree(made)


def run(name: str, place: Path) -> dict[str, Any]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("RAY")}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), str(place / "data")],
        capture_output=True,
        text=True,
        check=False,
        env={
            **inherited,
            "RAYMQ_HOME": str(place / "home"),
            "RAY_AUTH_TOKEN_PATH": str(place / "ray-token"),
        },
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    answer: dict[str, Any] = json.loads(
        [line for line in done.stdout.splitlines() if line.startswith("{")][-1]
    )
    return answer


def test_ray_tasks_count_every_click(place: Path) -> None:
    assert run("ray_pipeline.py", place) == {"clicks": 20_000, "counted": 20_000, "pages": 10}


def test_a_training_resumes_from_its_offsets(place: Path) -> None:
    answer = run("resume_training.py", place)
    assert answer == {"samples": 4_096, "seen": 4_096, "sums_equal": True}


@pytest.mark.slow
def test_no_job_of_a_durable_queue_is_lost_with_its_worker(place: Path) -> None:
    answer = run("durable_queue.py", place)
    assert answer == {"jobs": 400, "done": 400, "died": 1, "again": 1}


@pytest.mark.slow
def test_a_killed_serve_replica_comes_back_with_its_state(place: Path) -> None:
    answer = run("serve_scores.py", place)
    assert answer == {"messages": 2_000, "read": 2_000, "same": True}


def test_the_kubernetes_example_keeps_the_data_on_a_volume() -> None:
    claim, cluster = yaml.safe_load_all((EXAMPLES / "kuberay.yaml").read_text())
    assert (claim["kind"], cluster["kind"]) == ("PersistentVolumeClaim", "RayCluster")
    head = cluster["spec"]["headGroupSpec"]["template"]["spec"]
    volumes = {volume["name"]: volume for volume in head["volumes"]}
    assert volumes["data"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    container = head["containers"][0]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert container["lifecycle"]["preStop"]["exec"]["command"][-1].startswith(mounts["data"])
    assert mounts["shm"] == "/dev/shm"
