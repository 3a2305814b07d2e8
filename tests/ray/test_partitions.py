"""Three replicas on three nodes that really have a network between them, and the network breaks again and again.

A network namespace stands for each machine, another one for the switch between them and for the client. A user without
root cannot make them and does not collect this test; `nox -s network` runs it alone, and fails then.
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

from tests.support.namespace_ray import ray_node
from tests.support.network_namespaces import ip

pytestmark = pytest.mark.background

#: a network for tests and documentation
HOSTS = {"a": "198.51.100.1", "b": "198.51.100.2", "c": "198.51.100.3"}
SWITCH = "198.51.100.10"
PORT = 6379
PARTITIONS = int(os.environ.get("RAYMQ_PARTITIONS", "8"))

#: runs on node a
START = """
import json, sys
import raymq

data_dir, address = sys.argv[1:]
cluster = raymq.start(
    data_dir, address=address, nodes=["a", "b", "c"], replicas=3, ephemeral=True, insecure=True,
    segment_size_bytes=1 << 20,
)
cluster.create_topic("t", queues=1)
print(json.dumps({"endpoint": cluster.endpoints[0], "token": cluster.token}))
cluster.close()
"""

#: runs at the switch: cuts the leader off, both ways or only what it sends, and goes on sending
CLIENT = """
import json, subprocess, sys, threading
import raymq
from raymq.cluster.transport.flight_client import ShardConnection
from raymq.store.base.errors import RayMQError
from tests.support.waiting import until

endpoint, token, rounds, cards, names, hosts = json.loads(sys.argv[1])
cluster = raymq.connect("raymq://" + endpoint, token=token)

def ask(address, op):
    connection = ShardConnection(address, token, shard=0)
    try:
        return connection.call(op, {}, timeout=1.0)
    finally:
        connection.close()

addresses = ask(endpoint, "replicas")["0"]
node_of = {host: node for node, host in hosts.items()}
pause = threading.Event()

def statuses():
    found = {}
    for replica, address in addresses.items():
        try:
            found[replica] = ask(address, "status")
        except RayMQError:
            pass
    return found

def leader():
    leading = {r: s["epoch"] for r, s in statuses().items() if s["mode"] == "leader" and s["writable"]}
    return max(leading, key=leading.get, default=None)

def wait_leader(but=None):
    found = []
    try:
        until(lambda: bool(found), lambda: (pause.wait(0.05), found.extend(
            each for each in [leader()] if each is not None and each != but)))
    except TimeoutError:
        raise SystemExit(f"no leader but {but} in round {len(epochs)}: {facts()}")
    return found[0]

def facts():
    shown = ("mode", "epoch", "leader", "is_complete", "appended", "synced", "confirmed", "error")
    return {r: {name: s[name] for name in shown} for r, s in statuses().items()}

def ip(*words):
    subprocess.run(["ip", *words], check=True)

sent, offsets, epochs = 0, [], []
with cluster.producer(acks="quorum", delivery_timeout_ms=60_000) as producer:
    def send(count):
        global sent
        for _ in range(count):
            try:
                offsets.append(producer.send("t", b"%d" % sent, queue_id=0).result(90).offset)
            except RayMQError as error:
                raise SystemExit(f"{error} in round {len(epochs)} of {node_of}: {facts()}")
            sent += 1

    send(10)
    for turn in range(rounds):
        old = wait_leader()
        node = node_of[addresses[old].rpartition(":")[0]]
        if turn % 2:
            # One way: what the leader sends to the others is lost.
            others = [host for each, host in hosts.items() if each != node]
            for host in others:
                ip("-n", names[node], "route", "add", "blackhole", host)
        else:
            ip("link", "set", cards[node], "down")
        new = wait_leader(but=old)
        send(10)
        if turn % 2:
            for host in others:
                ip("-n", names[node], "route", "del", "blackhole", host)
        else:
            ip("link", "set", cards[node], "up")
        send(10)
        epochs.append(statuses()[new]["epoch"])

    def whole():
        found = statuses()
        ends = {s["confirmed"] for s in found.values()}
        return len(found) == 3 and len(ends) == 1

    until(whole, lambda: pause.wait(0.1))

bodies = []
with cluster.consumer("t", start="earliest") as consumer:
    while len(bodies) < sent:
        bodies += [int(message.body) for message in consumer.poll(timeout=5.0)]
print(json.dumps({"sent": sent, "offsets": offsets, "bodies": bodies, "epochs": epochs}))
"""


@pytest.fixture
def machines() -> Iterator[tuple[str, dict[str, str], dict[str, str]]]:
    """The namespace of the switch; node -> its namespace; node -> its port at the switch."""
    mark = secrets.token_hex(2)
    switch = f"rq{mark}s"
    names = {node: f"rq{mark}{node}" for node in HOSTS}
    cards = {node: f"rq{mark}{node}s" for node in HOSTS}
    with contextlib.ExitStack() as undo:
        for name in (switch, *names.values()):
            ip("netns", "add", name)
            undo.callback(ip, "netns", "del", name)
        ip("-n", switch, "link", "add", "hub", "type", "bridge")
        ip("-n", switch, "address", "add", f"{SWITCH}/24", "dev", "hub")
        ip("-n", switch, "link", "set", "lo", "up")
        ip("-n", switch, "link", "set", "hub", "up")
        for node, name in names.items():
            card = cards[node]
            ip(
                *("-n", switch, "link", "add", card, "type", "veth"),
                *("peer", "name", name, "netns", name),
            )
            ip("-n", switch, "link", "set", card, "master", "hub", "up")
            ip("-n", name, "address", "add", f"{HOSTS[node]}/24", "dev", name)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", name, "up")
        yield switch, names, cards


@pytest.fixture
def place() -> Iterator[Path]:
    # Short: Ray puts sockets below it.
    place = Path(tempfile.mkdtemp(prefix="rqp", dir="/tmp"))
    yield place
    shutil.rmtree(place, ignore_errors=True)


@pytest.mark.network
@pytest.mark.slow
@pytest.mark.timeout(200 + 25 * PARTITIONS)
def test_writes_go_on_while_leader_after_leader_is_cut_off(
    machines: tuple[str, dict[str, str], dict[str, str]], place: Path
) -> None:
    switch, names, cards = machines
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("RAY")},
        "RAY_AUTH_MODE": "disabled",
        "RAYMQ_HOME": str(place / "home"),
        "RAY_TMPDIR": str(place),
        "RAY_worker_niceness": "0",
        # Else each node waits half a minute for the actors of the cluster, which is not stopped.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "1",
    }

    def run(name: str, program: str, *words: str) -> dict[str, object]:
        done = subprocess.run(
            ["ip", "netns", "exec", name, sys.executable, "-c", program, *words],
            capture_output=True,
            text=True,
            check=False,
            env=environment,
            timeout=100 + 25 * PARTITIONS,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        facts: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
        return facts

    address = f"{HOSTS['a']}:{PORT}"
    head = ("--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={place}/ray")
    with contextlib.ExitStack() as nodes:
        for node, name in names.items():
            words = head if node == "a" else (f"--address={address}",)
            nodes.enter_context(ray_node(node, HOSTS[node], name, place, environment, *words))
        started = run(names["a"], START, str(place / "data"), address)
        given = [started["endpoint"], started["token"], PARTITIONS, cards, names, HOSTS]
        facts = run(switch, CLIENT, json.dumps(given))

    sent = facts["sent"]
    assert sent == 10 + 20 * PARTITIONS
    assert facts["bodies"] == list(range(sent))
    assert facts["offsets"] == list(range(sent))
    epochs = facts["epochs"]
    assert isinstance(epochs, list)
    assert epochs == sorted(set(epochs)), "each partition has a leader of a later epoch"
