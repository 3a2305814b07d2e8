"""Three replicas on three nodes that really have a network between them, and the network breaks again and again.

A network namespace stands for each machine, another one for the switch between them and for the clients. Producers and
consumers go on all the time, and the whole history goes through the checker. What breaks in each round, in turns:

    machine     the leader's machine, in both directions
    outbound    what the leader sends to the other replicas; it hears them
    inbound     what the other replicas send to the leader; they hear it
    link        both directions between the leader and one follower
    follower    one follower's machine, in both directions
    flapping    the leader's machine loses and regains the network again and again

A user without root cannot make namespaces and does not collect this module; `nox -s network` runs it alone, and fails
then.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.lean_ray import LEAN
from tests.support.namespace_ray import ray_node
from tests.support.network_namespaces import Network, joined_machines
from tests.support.partition_rounds import ISOLATING, KINDS
from tests.support.replicated_shard import QUEUES, TOPIC

#: a network for tests and documentation
HOSTS = {"a": "198.51.100.1", "b": "198.51.100.2", "c": "198.51.100.3"}
SWITCH = "198.51.100.10"
PORT = 6379
PARTITIONS = int(os.environ.get("RAYMQ_PARTITIONS", "8"))
RUN_S = 120 + 25 * PARTITIONS
ROOT = Path(__file__).parent.parent.parent

pytestmark = [
    pytest.mark.faults,
    pytest.mark.network,
    pytest.mark.thorough,
    pytest.mark.timeout(RUN_S + 100),
]

#: runs on node a
START = """
import json, sys
import raymq

data_dir, address, topic, queues = sys.argv[1:]
cluster = raymq.start(
    data_dir, address=address, nodes=["a", "b", "c"], replicas=3, ephemeral=True, insecure=True,
    segment_size_bytes=1 << 20,
)
cluster.create_topic(topic, queues=int(queues))
print(json.dumps({"endpoint": cluster.endpoints[0], "token": cluster.token}))
cluster.close()
"""


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with joined_machines(HOSTS, SWITCH) as made:
        yield made


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    # Short: Ray puts sockets below it.
    place = Path(tempfile.mkdtemp(prefix="rqp", dir="/tmp"))
    yield place
    shutil.rmtree(place, ignore_errors=True)


@pytest.fixture(scope="module")
def facts(network: Network, place: Path) -> dict[str, Any]:
    """What `tests.support.partition_rounds` prints."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("RAY")},
        **LEAN,
        "RAY_AUTH_MODE": "disabled",
        "RAYMQ_HOME": str(place / "home"),
        "RAY_TMPDIR": str(place),
        "RAY_worker_niceness": "0",
        # Else each node waits half a minute for the actors of the cluster, which is not stopped.
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "1",
    }

    def run(name: str, *words: str) -> dict[str, Any]:
        done = subprocess.run(
            ["ip", "netns", "exec", name, sys.executable, *words],
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
            env=environment,
            timeout=RUN_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        printed: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return printed

    address = f"{HOSTS['a']}:{PORT}"
    head = ("--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={place}/ray")

    with ThreadPoolExecutor(len(HOSTS)) as threads, contextlib.ExitStack() as undo:
        nodes: list[contextlib.ExitStack] = []
        # All at the same time. Not so their start: two of them would choose the same names for their sockets.
        undo.callback(lambda: list(threads.map(contextlib.ExitStack.close, nodes)))
        for node, name in network.names.items():
            words = head if node == "a" else (f"--address={address}",)
            started_node = contextlib.ExitStack()
            started_node.enter_context(
                ray_node(node, HOSTS[node], name, place, environment, *words)
            )
            nodes.append(started_node)

        data_dir = str(place / "data")
        started = run(network.names["a"], "-c", START, data_dir, address, TOPIC, str(QUEUES))
        given = {
            **started,
            "place": str(place),
            "rounds": PARTITIONS,
            "network": network._asdict(),
        }
        return run(network.switch, "-m", "tests.support.partition_rounds", json.dumps(given))


def rounds(facts: dict[str, Any], *kinds: str) -> list[dict[str, Any]]:
    """What happened in the rounds of these kinds."""
    return [each for each in facts["rounds"] if each["kind"] in kinds]


def test_a_machine_hears_another_one_that_hears_nothing_of_it(network: Network) -> None:
    """Else the partitions in one direction would be in both."""
    with network.socket_at("a") as first, network.socket_at("b") as second:
        for each in (first, second):
            each.settimeout(30.0)
        network.lose("a", "b")
        first.sendto(b"lost", second.getsockname())
        second.sendto(b"arrives", first.getsockname())
        assert first.recv(100) == b"arrives"
        network.deliver("a", "b")
        first.sendto(b"arrives again", second.getsockname())
        assert second.recv(100) == b"arrives again"


def test_the_network_breaks_in_every_way(facts: dict[str, Any]) -> None:
    assert len(facts["rounds"]) == PARTITIONS
    assert {each["kind"] for each in facts["rounds"]} == set(KINDS[:PARTITIONS])
    print(json.dumps(facts["rounds"]))


def test_writes_go_on_with_a_leader_of_a_later_epoch_while_a_leader_is_cut_off(
    facts: dict[str, Any],
) -> None:
    for each in rounds(facts, *ISOLATING):
        assert each["before"] < each["during"] <= each["after"], each


def test_a_follower_without_its_leader_or_without_anyone_disturbs_no_leader(
    facts: dict[str, Any],
) -> None:
    for each in rounds(facts, "link", "follower"):
        assert each["before"] == each["during"] == each["after"], each


def test_a_put_at_a_leader_that_is_cut_off_gets_no_receipt(facts: dict[str, Any]) -> None:
    for each in rounds(facts, *ISOLATING):
        outcome = each["isolated"]
        acked = set(map(int, outcome["acked"]))
        assert 0 in acked
        late = set(range(outcome["late"], outcome["sent"]))
        assert late, outcome
        assert not late & acked, outcome
        assert late <= {*outcome["unknown"], *outcome["refused"]}, outcome
        assert outcome["unknown"], "no put reached the leader while it led as far as it knew"


def test_a_member_beside_a_leader_that_is_cut_off_believes_no_more_when_another_has_its_queues(
    facts: dict[str, Any],
) -> None:
    for each in rounds(facts, *ISOLATING):
        taken = each["taken"]
        member = taken["member"]
        assert 0 < member["believes_until_ms"] <= taken["taken_ms"], taken
        assert 0 < member["read_ms"] <= member["believes_until_ms"] + 1_000, taken
        assert 0 < member["committed_ms"] <= taken["taken_ms"], taken
        # What was acknowledged to it is where the next one goes on, or before.
        for queue, offset in member["committed"].items():
            assert offset <= taken["committed"][queue], taken


def test_every_history_keeps_every_promise(facts: dict[str, Any]) -> None:
    assert facts["faults"] == []
    assert facts["messages"] >= facts["receipts"] > 0
    assert facts["seen"] == [facts["messages"]] * 2
    assert facts["commits"] > 0


def test_all_logs_are_the_same_bytes_up_to_the_confirmed_end(facts: dict[str, Any]) -> None:
    lengths = {length for length, _ in facts["logs"]}
    assert lengths == {facts["confirmed"]}
    assert len(facts["logs"]) == 3
    assert len({digest for _, digest in facts["logs"]}) == 1
