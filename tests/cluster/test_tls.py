"""TLS between clients and shards, leader and follower: which clients are accepted, and the errors of the others."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from raymq.actors.protocol import tls
from raymq.actors.ray.replica_transport import ReplicaTransport
from raymq.actors.server.flight.flight_server import Server, serve
from raymq.client.produce.producer import Producer
from raymq.client.transport.flight_client import ShardConnection
from raymq.cluster.cluster import Cluster
from raymq.cluster.connect import connect
from raymq.cluster.deploy import ray_host
from raymq.cluster.start import start
from raymq.cluster.stop import stop
from raymq.store.base.errors import Rejected, Unavailable, UntrustedServer
from raymq.store.base.files import Files
from tests.support.certificates import Certificates, make_certificates
from tests.support.fake_backend import CLUSTER_ID, TOKEN, FakeBackend
from tests.support.fake_ray import FakeRay


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Another authority, with a certificate for a host that is not ours."""
    return make_certificates(tmp_path_factory.mktemp("stranger"), "DNS:elsewhere.example")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (tls.USE_TLS, tls.SERVER_CERT, tls.SERVER_KEY, tls.CA_CERT):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def backend() -> FakeBackend:
    backend = FakeBackend(0)
    backend.create("t", 1, (0,))
    return backend


@pytest.fixture
def server(
    backend: FakeBackend, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Server]:
    """A shard with TLS. Its process has Ray's variables, the client's has not."""
    with monkeypatch.context() as node:
        for name, value in certificates.environment().items():
            node.setenv(name, value)
        server = serve(backend, host="127.0.0.1", port=0, token=TOKEN, tls=True)
    backend.routes = {"0": f"tls://127.0.0.1:{server.port}"}
    yield server
    backend.release()
    server.close()


@pytest.fixture
def plain(backend: FakeBackend) -> Iterator[Server]:
    server = serve(backend, host="127.0.0.1", port=0, token=TOKEN)
    yield server
    backend.release()
    server.close()


def ask(endpoint: str, ca: Path | None = None, token: str = TOKEN) -> object:
    pem = None if ca is None else ca.read_bytes()
    with closing(ShardConnection(endpoint, token, CLUSTER_ID, 0, ca=pem)) as connection:
        return connection.call("topics")


# --- who is let in --------------------------------------------------------------------------------


def test_a_client_that_trusts_the_authority_sends_and_reads_through_a_url(
    server: Server, certificates: Certificates
) -> None:
    url = f"raymq+tls://127.0.0.1:{server.port}"
    with connect(url, token=TOKEN, ca=certificates.ca) as cluster:
        assert cluster.endpoints == {0: f"tls://127.0.0.1:{server.port}"}
        with Producer(cluster) as producer:
            assert producer.send("t", b"secret").result(10).offset == 0
        # A copy, as a worker of Spark gets it, needs neither file nor variable.
        copy = pickle.loads(pickle.dumps(cluster))
        with copy, copy.consumer("t", start="earliest") as consumer:
            assert [message.body for message in consumer.poll(timeout=10.0)] == [b"secret"]


def test_the_authority_comes_from_rays_variable_too(
    server: Server, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(tls.CA_CERT, str(certificates.ca))
    monkeypatch.setenv("RAYMQ_TOKEN", TOKEN)
    with connect(f"raymq+tls://127.0.0.1:{server.port}") as cluster:
        assert list(cluster.topics()) == ["t"]


def test_a_leader_reaches_its_follower_with_tls(
    server: Server, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(tls.CA_CERT, str(certificates.ca))
    transport = ReplicaTransport(TOKEN, cluster_id=CLUSTER_ID, shard=0)
    with closing(transport.connect(f"tls://127.0.0.1:{server.port}")) as stream:
        stream.send(b"frame", b"bytes")
        header, body = stream.receive()
        assert (header, bytes(body)) == (b"ack:frame", b"bytes")


def test_the_token_is_asked_for_all_the_same(server: Server, certificates: Certificates) -> None:
    with pytest.raises(Rejected, match="wrong token"):
        ask(f"tls://127.0.0.1:{server.port}", certificates.ca, token="0" * 64)


# --- answers to the other clients -----------------------------------------------------------------


def test_a_missing_or_wrong_authority_names_the_variable_to_set(
    server: Server, stranger: Certificates
) -> None:
    for ca in (stranger.ca, None):
        with pytest.raises(Rejected, match="not signed by an authority.*RAY_TLS_CA_CERT"):
            ask(f"tls://127.0.0.1:{server.port}", ca)


def test_a_certificate_for_another_address_is_refused(
    backend: FakeBackend, stranger: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in stranger.environment().items():
        monkeypatch.setenv(name, value)
    with (
        closing(serve(backend, host="127.0.0.1", port=0, token=TOKEN, tls=True)) as server,
        pytest.raises(Rejected, match="subjectAltName"),
    ):
        ask(f"tls://127.0.0.1:{server.port}", stranger.ca)


def test_a_certificate_out_of_its_time_is_to_be_renewed(
    backend: FakeBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    past = datetime.now(timezone.utc) - timedelta(days=1)
    expired = make_certificates(tmp_path, end=past)
    for name, value in expired.environment().items():
        monkeypatch.setenv(name, value)
    with (
        closing(serve(backend, host="127.0.0.1", port=0, token=TOKEN, tls=True)) as server,
        pytest.raises(
            UntrustedServer, match="expired or not yet valid .*expired.*renew it"
        ) as caught,
    ):
        ask(f"tls://127.0.0.1:{server.port}", expired.ca)
    assert caught.value.field == tls.SERVER_CERT


def test_a_client_without_tls_learns_the_scheme_with_tls(server: Server) -> None:
    with pytest.raises(Unavailable, match=r"use raymq\+tls://"):
        connect(f"raymq://127.0.0.1:{server.port}", token=TOKEN)


def test_a_client_with_tls_learns_that_the_shard_has_none(
    plain: Server, certificates: Certificates
) -> None:
    with pytest.raises(Unavailable, match="serves without TLS: use raymq://"):
        ask(f"tls://127.0.0.1:{plain.port}", certificates.ca)


def test_a_refused_connection_is_not_blamed_on_tls(plain: Server) -> None:
    port = plain.port
    plain.close()
    with pytest.raises(Unavailable) as caught:
        ask(f"127.0.0.1:{port}")
    assert "TLS" not in str(caught.value)


# --- files that cannot be used --------------------------------------------------------------------


def _unset(node: dict[str, str], directory: Path) -> None:
    del node[tls.SERVER_KEY]


def _missing(node: dict[str, str], directory: Path) -> None:
    node[tls.SERVER_CERT] = str(directory / "nothing.pem")


def _directory(node: dict[str, str], directory: Path) -> None:
    node[tls.SERVER_KEY] = str(directory)


def _garbage(node: dict[str, str], directory: Path) -> None:
    (directory / "garbage.pem").write_text("no certificate")
    node[tls.SERVER_CERT] = str(directory / "garbage.pem")


@pytest.mark.parametrize(
    ("spoil", "field", "words"),
    [
        (_unset, tls.SERVER_KEY, "not set on this node"),
        (_missing, tls.SERVER_CERT, "No such file"),
        (_directory, tls.SERVER_KEY, "cannot be read"),
        (_garbage, tls.SERVER_CERT, "the key it was made with"),
    ],
)
def test_a_server_says_which_file_it_cannot_use(
    spoil: Callable[[dict[str, str], Path], None],
    field: str,
    words: str,
    certificates: Certificates,
    tmp_path: Path,
) -> None:
    node = certificates.environment()
    spoil(node, tmp_path)
    with pytest.raises(Rejected, match=words) as caught:
        tls.server_identity(node, Files())
    assert caught.value.field == field


def test_a_key_of_another_certificate_is_refused(
    certificates: Certificates, stranger: Certificates
) -> None:
    node = {**certificates.environment(), tls.SERVER_KEY: str(stranger.key)}
    with pytest.raises(Rejected, match="the key it was made with"):
        tls.server_identity(node, Files())


def test_a_client_says_which_authority_it_cannot_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Rejected, match="ca=.*nothing.pem cannot be read"):
        connect("raymq+tls://127.0.0.1:1", token=TOKEN, ca=tmp_path / "nothing.pem")
    (tmp_path / "garbage.pem").write_text("no certificate")
    monkeypatch.setenv(tls.CA_CERT, str(tmp_path / "garbage.pem"))
    with pytest.raises(Rejected, match="RAY_TLS_CA_CERT=.* holds no PEM certificate"):
        ShardConnection("tls://127.0.0.1:1", TOKEN)


# --- start and connect ----------------------------------------------------------------------------


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeRay:
    fake = FakeRay({ray_host.HOST_LABEL: "here"})
    monkeypatch.setattr(
        ray_host, "session", lambda target, timeout_s=None, **options: contextlib.nullcontext(fake)
    )
    monkeypatch.setattr(ray_host, "_listens", lambda address: True)
    monkeypatch.setenv("RAYMQ_HOME", str(tmp_path / "home"))
    return fake


def test_a_cluster_keeps_its_tls_and_its_authority_for_other_shells(
    ray: FakeRay, tmp_path: Path, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_dir = tmp_path / "data"
    with monkeypatch.context() as shell:
        for name, value in certificates.environment().items():
            shell.setenv(name, value)
        first = start(data_dir, address="auto", ephemeral=True, host="192.0.2.5")

    pem = certificates.ca.read_bytes()
    assert first.ca == pem
    assert connect(data_dir).ca == pem

    # No variable: as before.
    assert start(data_dir, address="auto").ca == pem
    monkeypatch.setenv(tls.USE_TLS, "0")
    with pytest.raises(Rejected, match="192.0.2.5 is reachable"):
        start(data_dir, address="auto")
    with pytest.raises(Rejected, match="runs with TLS and RAY_USE_TLS says otherwise"):
        start(data_dir, address="auto", host="127.0.0.1")

    stop(data_dir)
    assert start(data_dir, address="auto", host="127.0.0.1").ca is None
    assert not (data_dir / "ca.pem").exists()


def test_an_accepted_unencrypted_host_is_warned_about_at_each_start(
    ray: FakeRay, tmp_path: Path
) -> None:
    data_dir, reported = tmp_path / "data", list[str]()
    options: dict[str, Any] = {"address": "auto", "ephemeral": True, "progress": reported.append}
    start(data_dir, host="192.0.2.5", insecure=True, **options)
    start(data_dir, **options)
    warnings = [line for line in reported if line.startswith("WARNING")]
    assert len(warnings) == 2
    assert "192.0.2.5" in warnings[0]


# --- the rules ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "wanted"), [("1", True), ("true", True), ("0", False), ("", False), ("False", False)]
)
def test_rays_variable_turns_tls_on(value: str, wanted: bool) -> None:
    assert tls.wanted({tls.USE_TLS: value}) is wanted
    assert tls.wanted({}) is None


def test_an_unknown_value_of_rays_tls_variable_is_refused() -> None:
    with pytest.raises(Rejected, match="use 1"):
        tls.wanted({tls.USE_TLS: "maybe"})


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.5", "example.org", "::"])
def test_an_address_that_others_reach_needs_tls_or_a_word(host: str) -> None:
    with pytest.raises(Rejected, match="RAY_USE_TLS=1.*--insecure"):
        tls.check_exposed(host, tls=False, insecure=False)
    assert tls.check_exposed(host, tls=False, insecure=True)
    assert not tls.check_exposed(host, tls=True, insecure=False)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_an_address_of_this_machine_only_needs_nothing(host: str) -> None:
    assert not tls.check_exposed(host, tls=False, insecure=False)


@pytest.mark.parametrize("url", ["raymq://h:1", "raymq+tls://h:1"])
def test_a_url_and_an_endpoint_are_two_forms_of_one_thing(url: str) -> None:
    endpoint = tls.parse_url(url)
    assert endpoint is not None
    assert tls.url_of(endpoint) == url


def test_a_url_without_a_port_is_refused_and_a_name_is_not_a_url() -> None:
    with pytest.raises(Rejected, match=r"use raymq\+tls://host:port"):
        tls.parse_url("raymq+tls://host")
    assert tls.parse_url(os.fspath("orders")) is None
    with pytest.raises(Rejected, match=r"raymq\+tls://host:port"):
        Cluster.bootstrap("orders", token=TOKEN)
