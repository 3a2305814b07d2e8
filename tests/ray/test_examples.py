"""Every example runs as its first lines say, and checks its own result."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from raymq.cluster.cli.tls_check import validity
from raymq.cluster.deploy.node_labels import NODE_LABEL
from tests.support.certificates import make_certificates
from tests.support.programs import ROOT, example

EXAMPLES = ROOT / "examples"


def answers(printed: list[str]) -> list[dict[str, Any]]:
    """The last line of JSON of each run."""
    lines = [[x for x in text.splitlines() if x.startswith("{")][-1] for text in printed]
    return [json.loads(line) for line in lines]


@pytest.mark.thorough
@pytest.mark.program(example("ray_pipeline.py"))
def test_ray_tasks_count_every_click(printed: list[str]) -> None:
    assert answers(printed) == [{"clicks": 20_000, "counted": 20_000, "pages": 10}]


@pytest.mark.thorough
@pytest.mark.program(example("resume_training.py", arguments=("--without-torch",), runs=2))
def test_a_killed_training_resumes_with_what_it_has_not_seen(printed: list[str]) -> None:
    expected = {"samples": 4_096, "seen": 4_096, "sums_equal": True, "killed": True}
    assert answers(printed) == [expected] * 2


@pytest.mark.thorough
@pytest.mark.program(example("durable_queue.py"))
def test_no_job_of_a_durable_queue_is_lost_with_its_worker(printed: list[str]) -> None:
    assert answers(printed) == [{"jobs": 400, "done": 400, "died": 1, "again": 1}]


@pytest.mark.thorough
@pytest.mark.program(example("workers.py"))
def test_the_job_of_a_killed_worker_is_done_by_another_one(printed: list[str]) -> None:
    assert answers(printed) == [{"jobs": 200, "done": 200, "died": 1, "attempts": 2}]


@pytest.mark.thorough
@pytest.mark.program(example("transactions.py"))
def test_each_job_has_one_result_although_a_worker_is_killed_before_its_commit(
    printed: list[str],
) -> None:
    assert answers(printed) == [{"jobs": 200, "results": 200, "twice": 0, "died": 1}]


@pytest.mark.thorough
@pytest.mark.program(example("serve_scores.py", runs=2))
def test_a_killed_serve_replica_comes_back_with_its_state(printed: list[str]) -> None:
    assert answers(printed) == [
        {"messages": 2_000, "read": 2_000, "same": True},
        {"messages": 4_000, "read": 4_000, "same": True},
    ]


@pytest.mark.thorough
@pytest.mark.program(example("serve_tasks.py"))
def test_the_task_of_a_killed_serve_replica_is_done_by_another_one(printed: list[str]) -> None:
    assert answers(printed) == [{"tasks": 60, "done": 60, "killed": True, "grew": True}]


def test_the_kubernetes_example_keeps_the_data_on_volumes_of_labelled_pods() -> None:
    *claims, cluster = yaml.safe_load_all((EXAMPLES / "kuberay.yaml").read_text())
    assert {claim["kind"] for claim in claims} == {"PersistentVolumeClaim"}
    assert cluster["kind"] == "RayCluster"
    assert cluster["spec"]["authOptions"] == {"mode": "token"}
    workers = cluster["spec"]["workerGroupSpecs"]
    stores = [cluster["spec"]["headGroupSpec"], *(w for w in workers if "labels" in w)]
    used = []
    for group in stores:
        pod = group["template"]["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        used.append(volumes["data"]["persistentVolumeClaim"]["claimName"])
        mounts = {m["name"]: m["mountPath"] for m in pod["containers"][0]["volumeMounts"]}
        assert mounts == {"data": "/data", "shm": "/dev/shm"}
    assert used == [claim["metadata"]["name"] for claim in claims]
    assert [group["labels"][NODE_LABEL] for group in stores] == ["a", "b"]
    # One volume has one user.
    assert all(group["maxReplicas"] == 1 for group in stores[1:])
    command = stores[0]["template"]["spec"]["containers"][0]["lifecycle"]["preStop"]
    assert command["exec"]["command"] == ["raymq", "stop", "/data/raymq"]


#: what KubeRay documents of a RayCluster, and Kubernetes of a pod, as far as the example uses it: field -> type
CLUSTER = {
    "rayVersion": str,
    "authOptions": dict,
    "headGroupSpec": dict,
    "workerGroupSpecs": list,
}
GROUP = {"labels": dict, "rayStartParams": dict, "template": dict}
WORKERS = {**GROUP, "groupName": str, "replicas": int, "minReplicas": int, "maxReplicas": int}
POD = {
    "terminationGracePeriodSeconds": int,
    "securityContext": dict,
    "containers": list,
    "volumes": list,
}
CONTAINER = {
    "name": str,
    "image": str,
    "lifecycle": dict,
    "env": list,
    "resources": dict,
    "volumeMounts": list,
}


def check_fields(place: str, found: dict[str, Any], known: dict[str, type]) -> None:
    """The operator refuses fields that it does not know, and values of another type."""
    for name, value in found.items():
        assert name in known, f"{place}.{name}"
        assert isinstance(value, known[name]), f"{place}.{name}: {value!r}"


def test_the_kubernetes_example_has_only_fields_that_the_operator_knows() -> None:
    *_, cluster = yaml.safe_load_all((EXAMPLES / "kuberay.yaml").read_text())
    assert (cluster["apiVersion"], cluster["kind"]) == ("ray.io/v1", "RayCluster")
    spec = cluster["spec"]
    check_fields("spec", spec, CLUSTER)
    check_fields("headGroupSpec", spec["headGroupSpec"], GROUP)
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        if group is not spec["headGroupSpec"]:
            check_fields("workerGroupSpecs", group, WORKERS)
            assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        # Parameters of `ray start` are text for the operator, numbers included.
        for values in (group["rayStartParams"], group.get("labels", {})):
            assert all(isinstance(value, str) for value in values.values())
        pod = group["template"]["spec"]
        check_fields("template.spec", pod, POD)
        volumes = {volume["name"] for volume in pod.get("volumes", ())}
        for container in pod["containers"]:
            check_fields("containers", container, CONTAINER)
            assert all(isinstance(entry["value"], str) for entry in container.get("env", ()))
            assert {mount["name"] for mount in container.get("volumeMounts", ())} == volumes


def test_the_certificate_that_a_pod_makes_for_itself_is_one_that_clients_take(
    tmp_path: Path,
) -> None:
    text = (EXAMPLES.parent / "docs" / "operating" / "security.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"```\n(openssl req .*?)```", text, re.DOTALL)
    made, pod = make_certificates(tmp_path / "ca"), tmp_path / "tls"
    pod.mkdir()
    made.ca.rename(made.ca.with_name("tls.crt"))
    made.ca.with_name("ca.key").rename(made.ca.with_name("tls.key"))
    for path in ("ca", "tls"):
        script = script.replace(f" /{path}/", f" {tmp_path / path}/")
    subprocess.run(
        ["sh", "-ec", script],
        check=True,
        capture_output=True,
        env={**os.environ, "POD_IP": "10.1.2.3"},
    )
    found = validity(str(pod / "tls.crt"), str(pod / "tls.key"), (pod / "ca.crt").read_bytes())
    assert found.names == ("IP Address:10.1.2.3", "IP Address:127.0.0.1", "DNS:raymq-head-svc")
