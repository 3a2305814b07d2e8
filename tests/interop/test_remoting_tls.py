"""RocketMQ's own Java client over TLS, and without it at the same port."""

from __future__ import annotations

import json
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest

from raymq.doors.rocketmq.codes import ResponseCode
from raymq.doors.rocketmq.rocketmq_server import RocketMQServer
from tests.support.certificates import make_certificates
from tests.support.oracle import JAVA_OPTIONS, SOURCES, Program
from tests.support.remoting_client import RemotingClient
from tests.support.served_shard import ServedShard

pytestmark = pytest.mark.thorough

COUNT = 40


def test_the_java_client_sends_and_reads_over_tls(program: Program, tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path / "certificates")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.certificate, certificates.key)
    tls = f"tls.client.authServer=true\ntls.client.trustCertPath={certificates.ca}\n"
    (tmp_path / "tls.properties").write_text(tls, encoding="utf-8")
    over_tls = ("-Dtls.enable=true", f"-Dtls.config.file={tmp_path / 'tls.properties'}")

    with ServedShard(tmp_path / "store") as shard:
        shard.start_flusher()
        for topic in ("closed", "open"):
            shard.cluster.create_topic(topic, queues=4)

        def run(server: RocketMQServer, scenario: str, topic: str, *words: str) -> Any:
            name_server = f"127.0.0.1:{server.listen(0)}"
            done = subprocess.run(
                [
                    program.java,
                    *JAVA_OPTIONS,
                    f"-Duser.home={tmp_path}",
                    f"-Drmq.logback.configurationFile={SOURCES / 'logback.xml'}",
                    f"-Draymq.secret={shard.cluster.token}",
                    *(() if topic == "open" else over_tls),
                    *("-cp", program.class_path, "ClientScenarios", scenario),
                    *(name_server, topic, *words),
                ],
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
            return json.loads(done.stdout.strip().splitlines()[-1])

        messages = 4 * COUNT + 1
        with RocketMQServer(shard.cluster, tls=context) as server:
            for topic in ("closed", "open"):
                sent = run(server, "send", topic, str(COUNT))
                assert (sent["sync"], sent["large"]) == ({"SEND_OK": COUNT}, "SEND_OK")
                read = run(server, "push", topic, str(messages), "readers", "*")
                assert (read["received"], read["distinct"]) == (messages, messages)

        with RocketMQServer(shard.cluster, tls=context, takes_plain=False) as server:
            with RemotingClient(server.addresses[0]) as client:
                client.send(9_999, {})
                assert client.is_closed()
            sent = run(server, "send", "closed", str(COUNT))
            assert sent["sync"] == {"SEND_OK": COUNT}


def test_a_client_that_trusts_another_authority_gives_up(tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path / "ours")
    other = make_certificates(tmp_path / "other")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.certificate, certificates.key)
    with (
        ServedShard(tmp_path / "store") as shard,
        RocketMQServer(shard.cluster, access="open", tls=context) as server,
    ):
        for authority in (other.ca, certificates.ca):
            trusting = ssl.create_default_context(cafile=authority)
            with RemotingClient(server.addresses[0]) as client:
                plain, is_ours = client.socket, authority == certificates.ca
                try:
                    client.socket = trusting.wrap_socket(plain, server_hostname="127.0.0.1")
                except ssl.SSLCertVerificationError:
                    assert not is_ours
                    continue
                assert is_ours
                assert client.call(9_999, {}).code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
