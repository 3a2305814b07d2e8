"""A mirror with TLS over two nodes that really have a network between them, and the network breaks.

Two network namespaces joined by a pair of virtual cards stand for the machines. A user without root cannot make them
and does not collect this test; `nox -s network` runs it alone, and fails then.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.certificates import make_certificates
from tests.support.namespace_ray import ray_node
from tests.support.network_namespaces import ip

pytestmark = pytest.mark.thorough

#: a network for tests and documentation
HOSTS = {"a": "198.51.100.1", "b": "198.51.100.2"}
PORT = 6379

#: runs in the namespace of node a, and cuts the network itself
DRIVER = """
import json, subprocess, sys
import raymq

data_dir, address, card = sys.argv[1:]
reported = []
cluster = raymq.start(
    data_dir, address=address, nodes=["a", "b"], shards=2, replicas=2, ephemeral=True,
    segment_size_bytes=1 << 20, progress=reported.append,
)
cluster.create_topic("t", queues=2)
with cluster.producer(acks="quorum", delivery_timeout_ms=30_000) as producer:
    for queue in (0, 1):
        producer.send("t", b"before %d" % queue, queue_id=queue).result(30)
subprocess.run(["ip", "link", "set", card, "down"], check=True)
late = False
with cluster.producer(acks="quorum", delivery_timeout_ms=60_000) as producer:
    future = producer.send("t", b"during", queue_id=0)
    try:
        future.result(4)
    except TimeoutError:
        late = True
    subprocess.run(["ip", "link", "set", card, "up"], check=True)
    future.result(60)
    producer.send("t", b"after", queue_id=1).result(60)
bodies = []
with cluster.consumer("t", start="earliest") as consumer:
    while len(bodies) < 4:
        bodies += [message.body.decode() for message in consumer.poll(timeout=5.0)]
print(json.dumps({
    "endpoints": [cluster.endpoints[0], cluster.endpoints[1]], "late": late,
    "bodies": sorted(bodies), "warnings": [line for line in reported if "WARNING" in line],
}))
"""


@pytest.fixture
def namespaces() -> Iterator[dict[str, str]]:
    """Node -> the name of its namespace and of its card in it."""
    mark = secrets.token_hex(3)
    names = {node: f"rq{mark}{node}" for node in HOSTS}
    with contextlib.ExitStack() as undo:
        for name in names.values():
            ip("netns", "add", name)
            undo.callback(ip, "netns", "del", name)
        a, b = names["a"], names["b"]
        ip("-n", a, "link", "add", a, "type", "veth", "peer", "name", b, "netns", b)
        for node, name in names.items():
            ip("-n", name, "address", "add", f"{HOSTS[node]}/24", "dev", name)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", name, "up")
        yield names


@pytest.fixture
def place() -> Iterator[Path]:
    # Short: Ray puts sockets below it.
    place = Path(tempfile.mkdtemp(prefix="rqs", dir="/tmp"))
    yield place
    shutil.rmtree(place, ignore_errors=True)


@pytest.mark.network
@pytest.mark.timeout(180)
def test_a_mirror_over_two_networks_with_tls_survives_a_cut(
    namespaces: dict[str, str], place: Path
) -> None:
    certificates = make_certificates(
        place / "tls", ",".join(f"IP:{host}" for host in ("127.0.0.1", *HOSTS.values()))
    )
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("RAY")},
        **certificates.environment(),
        "RAY_AUTH_MODE": "disabled",
        "RAYMQ_HOME": str(place / "home"),
        "RAY_TMPDIR": str(place),
        "RAY_worker_niceness": "0",
        # Else each node waits half a minute for the actors of the cluster, which is not stopped.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "1",
    }
    address = f"{HOSTS['a']}:{PORT}"
    head = ("--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={place}/ray")
    with (
        ray_node("a", HOSTS["a"], namespaces["a"], place, environment, *head),
        ray_node("b", HOSTS["b"], namespaces["b"], place, environment, f"--address={address}"),
    ):
        done = subprocess.run(
            [
                *("ip", "netns", "exec", namespaces["a"], sys.executable, "-c", DRIVER),
                *(str(place / "data"), address, namespaces["a"]),
            ],
            capture_output=True,
            text=True,
            check=False,
            env=environment,
            timeout=120,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    assert [endpoint.rpartition(":")[0] for endpoint in facts["endpoints"]] == [
        f"tls://{HOSTS['a']}",
        f"tls://{HOSTS['b']}",
    ]
    assert facts["late"]
    assert facts["bodies"] == ["after", "before 0", "before 1", "during"]
    assert facts["warnings"] == []
