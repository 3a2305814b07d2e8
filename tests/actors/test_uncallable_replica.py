"""Three replicas, each with a server of its own, of which the others cannot call the first one: another one leads.

Elections travel over Arrow Flight with TLS, between replicas in one process. No satellite runs: the test replicates.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from raymq.actors.ray.replica_transport import ReplicaCalls, ReplicaTransport
from raymq.actors.replica import open_replica
from raymq.actors.server.flight.flight_server import serve
from raymq.actors.supervise import callable_peers
from raymq.actors.supervise.callable_peers import CallablePeers
from raymq.actors.supervise.replica_host import ReplicaHost
from raymq.client.transport.flight_client import ShardConnection
from raymq.replication.election_events import FollowerHeard
from raymq.replication.election_limits import ElectionLimits
from raymq.replication.wire import ReplicaProcess
from raymq.store.base.errors import (
    DeliveryUnknown,
    RayMQError,
    Rejected,
    Unavailable,
    UntrustedServer,
)
from raymq.store.config.store_config import StoreConfig
from tests.support.certificates import Certificates, make_certificates
from tests.support.clock import ManualClock
from tests.support.replica_pair import wait_until
from tests.support.roles import log_of

CONFIG = StoreConfig(segment_size_bytes=256 * 1024, prewrite_window_bytes=64 * 1024)
#: as a live shard's, with shorter waits of a leader that none can call
LIMITS = ElectionLimits(uncalled_ms=500)
TOKEN = "t" * 64


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Certificates]:
    """Kind of fault -> a certificate that others refuse for it. Each has an authority of its own."""
    root = tmp_path_factory.mktemp("certificates")
    sound = make_certificates(root / "sound")
    past = datetime.now(timezone.utc) - timedelta(days=1)
    return {
        "sound": sound,
        "another authority": make_certificates(root / "stranger"),
        "expired": make_certificates(root / "expired", end=past),
        "another address": make_certificates(root / "elsewhere", "DNS:elsewhere.example"),
    }


class Shard:
    """Three replicas. The others know the address of each, or for one a port at which nothing listens."""

    def __init__(self, root: Path, undo: contextlib.ExitStack) -> None:
        self.root = root
        self.hosts: dict[int, ReplicaHost] = {}
        self.endpoints: dict[int, str] = {}
        self._undo = undo
        self._transport = ReplicaTransport(TOKEN, cluster_id="c", shard=0)

    def start(self, replica: int, certificates: Certificates, patch: pytest.MonkeyPatch) -> None:
        """Args: `certificates`: of its server. All trust the authorities of RAY_TLS_CA_CERT."""
        host = self.hosts[replica] = open_replica(
            self.root / str(replica),
            CONFIG,
            identity={
                "cluster_id": "c",
                "shard": 0,
                "replica": replica,
                "incarnation": replica + 1,
            },
            roles=("group_commit", "replication"),
            members=range(3),
            candidates=range(3),
            connect_peer=self._connect,
            limits=LIMITS,
        )
        self._undo.callback(host.close, 0.0)
        host.elections.connect(can_stream=lambda: True)
        port = self.serve(replica, certificates, patch)
        self.endpoints.setdefault(replica, f"tls://127.0.0.1:{port}")

    def serve(self, replica: int, certificates: Certificates, patch: pytest.MonkeyPatch) -> int:
        """Serve a replica at another port, too. Returns: the port."""
        with patch.context() as node:
            for name, value in certificates.environment().items():
                if not name.endswith("CA_CERT"):
                    node.setenv(name, value)
            server = serve(self.hosts[replica], host="127.0.0.1", port=0, token=TOKEN, tls=True)
        self._undo.callback(server.close)
        return server.port

    def _connect(self, replica: int) -> ReplicaCalls:
        if replica not in self.endpoints:
            raise Unavailable("not known yet", field="endpoint")
        return self._transport.replica_calls(self.endpoints[replica], lambda: SENDER)

    def replicate(self) -> None:
        """Bring the followers to the end of the leader that there is."""
        for leader in list(self.hosts.values()):
            if not leader.elections.leads or leader.roles.mode != "leader":
                continue
            leader.log.sync()
            for replica, host in self.hosts.items():
                if host is not leader and host.roles.mode == "follower":
                    self._replicate_to(replica, leader)

    def _replicate_to(self, replica: int, leader: ReplicaHost) -> None:
        host, epoch, end = self.hosts[replica], leader.elections.epoch, leader.log.end
        # Either may have changed its role meanwhile.
        with contextlib.suppress(RayMQError, AttributeError):
            port = log_of(host)
            port.frame_epoch = lambda: epoch
            for unit in leader.log.chain.units(host.log.end, end):
                data = leader.log.reads.raw(unit.start, unit.end)
                port.append_units([unit], memoryview(data))
            host.log.sync()
            leader.elections.step(FollowerHeard(replica, epoch, end, True))

    def leads(self, *replicas: int) -> bool:
        self.replicate()
        return any(
            self.hosts[each].elections.leads and self.hosts[each].roles.mode == "leader"
            for each in replicas
        )


SENDER = {"replica": 9, "endpoints": {}}


@pytest.fixture
def shard(
    tmp_path: Path, certificates: dict[str, Certificates], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Shard]:
    trusted = tmp_path / "trusted.pem"
    known = [made.ca for fault, made in certificates.items() if fault != "another authority"]
    trusted.write_text("".join(path.read_text() for path in known))
    monkeypatch.setenv("RAY_TLS_CA_CERT", str(trusted))
    # A tenth of what it is live.
    monkeypatch.setattr(callable_peers, "UNANSWERED_MS", 500)
    monkeypatch.setattr(callable_peers, "QUESTION_S", 0.3)
    monkeypatch.setattr(callable_peers, "QUESTION_AGAIN_S", 0.1)
    with contextlib.ExitStack() as undo:
        yield Shard(tmp_path, undo)


FAULTS = {
    "another authority": "not signed by an authority",
    "expired": "expired",
    "another address": "for another address",
    "a closed port": "",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_replica_that_the_others_cannot_call_hands_over_and_they_name_its_certificate(
    shard: Shard, certificates: dict[str, Certificates], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        closed = free.getsockname()[1]
    if fault == "a closed port":
        # As with a firewall: its server serves what comes, and no call of another replica comes.
        shard.endpoints[0] = f"tls://127.0.0.1:{closed}"
    for replica in (1, 2):
        shard.start(replica, certificates["sound"], monkeypatch)
    # It asks for votes as soon as it starts.
    shard.start(0, certificates.get(fault, certificates["sound"]), monkeypatch)

    wait_until(lambda: shard.leads(1, 2), "a replica leads that clients can call")
    for replica in (1, 2):
        host = shard.hosts[replica]
        wait_until(lambda host=host: host.status()["uncallable"] == [0], "it knows")
        error = host.status()["error"] or ""
        assert FAULTS[fault] in error
        assert ("certificates: replica 0 cannot be called" in error) == bool(FAULTS[fault])
    wait_until(lambda: not shard.leads(0), "it follows")
    assert shard.hosts[0].status()["uncallable"] == []


def test_three_replicas_with_sound_certificates_call_each_other(
    shard: Shard, certificates: dict[str, Certificates], monkeypatch: pytest.MonkeyPatch
) -> None:
    for replica in range(3):
        shard.start(replica, certificates["sound"], monkeypatch)
    wait_until(lambda: shard.leads(0, 1, 2), "a replica leads")
    endpoint = shard.endpoints[1]
    with closing(ShardConnection(endpoint, TOKEN, "c", 0)) as connection:
        assert connection.call("replica_id") == {"replica": 1}
    for host in shard.hosts.values():
        wait_until(lambda host=host: host.status()["uncallable"] == [], "it calls all")


def test_a_leader_whose_certificate_expires_hands_over_although_open_connections_work(
    shard: Shard, certificates: dict[str, Certificates], monkeypatch: pytest.MonkeyPatch
) -> None:
    for replica in range(3):
        shard.start(replica, certificates["sound"], monkeypatch)
    wait_until(lambda: shard.leads(0, 1, 2), "a replica leads")
    (former,) = [each for each in range(3) if shard.leads(each)]
    port = shard.serve(former, certificates["expired"], monkeypatch)
    # The connections of elections stay, and new ones go there.
    shard.endpoints[former] = f"tls://127.0.0.1:{port}"
    others = [each for each in range(3) if each != former]
    wait_until(lambda: shard.leads(*others), "a replica leads that clients can call")
    assert shard.hosts[former].status()["uncallable"] == []


# --- the outcomes of calls ------------------------------------------------------------------------


class Calls:
    """Calls of replica 1, each of which has the outcome that is set at that time."""

    def __init__(self) -> None:
        self.outcome: Exception | int = 1
        self.count = 0

    def replica_id(self, timeout_s: float) -> int:
        self.count += 1
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    def close(self) -> None:
        return


class Peers:
    """Those of replica 0, one of which the test lets call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(callable_peers, "QUESTION_S", 0.01)
        monkeypatch.setattr(callable_peers, "QUESTION_AGAIN_S", 0.01)
        self.calls = Calls()
        self.peers = CallablePeers([1], lambda replica: self.calls)
        self.clock = ManualClock()
        self.peers._peers[1]._clock = self.clock

    def call(self, outcome: Exception | int, *, after_ms: int = 0) -> frozenset[int]:
        """Wait for some calls with an outcome. Returns: the replicas that cannot be called then."""
        self.calls.outcome = outcome
        self.clock.advance(after_ms)
        count = self.calls.count
        wait_until(lambda: self.calls.count > count + 3, "it calls")
        return self.peers.uncallable


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Peers]:
    made = Peers(monkeypatch)
    made.peers.start()
    yield made
    made.peers.close()


@pytest.mark.parametrize(
    "error", [Unavailable("refused"), DeliveryUnknown("late"), OSError("unreachable")]
)
def test_a_replica_that_answers_no_call_for_seconds_cannot_be_called(
    peers: Peers, error: Exception
) -> None:
    assert peers.call(error) == frozenset()
    assert peers.call(error, after_ms=callable_peers.UNANSWERED_MS - 1) == frozenset()
    assert peers.call(error, after_ms=1) == {1}
    assert peers.peers.refused_certificates() == {}
    assert peers.call(1) == frozenset()
    assert peers.call(error, after_ms=callable_peers.UNANSWERED_MS - 1) == frozenset()


def test_a_refused_certificate_counts_at_once_until_one_is_accepted(peers: Peers) -> None:
    refused = UntrustedServer("it is expired")
    assert peers.call(refused) == {1}
    assert peers.peers.refused_certificates() == {1: "it is expired"}
    peers.peers.hear(ReplicaProcess(1, 7))
    assert peers.peers.uncallable == {1}
    assert peers.call(1) == frozenset()
    assert peers.peers.refused_certificates() == {}


def test_a_replica_that_refuses_a_call_itself_can_be_called(peers: Peers) -> None:
    assert peers.call(Unavailable("refused"), after_ms=0) == frozenset()
    assert peers.call(Unavailable("refused"), after_ms=callable_peers.UNANSWERED_MS) == {1}
    assert peers.call(Rejected("wrong token", field="token")) == frozenset()


def test_another_replica_at_its_address_is_no_answer(peers: Peers) -> None:
    peers.call(2)
    assert peers.call(2, after_ms=callable_peers.UNANSWERED_MS) == {1}


def test_what_failed_before_a_new_process_called_says_nothing_about_it(peers: Peers) -> None:
    error = Unavailable("refused")
    peers.call(error)
    assert peers.call(error, after_ms=callable_peers.UNANSWERED_MS) == {1}
    peers.peers.hear(ReplicaProcess(1, 7))
    assert peers.call(error) == frozenset()
    assert peers.call(error, after_ms=callable_peers.UNANSWERED_MS) == {1}
    peers.peers.hear(ReplicaProcess(1, 7))
    assert peers.call(error) == {1}
