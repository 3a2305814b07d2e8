"""Ray Data writes and reads three replicas with TLS, whose leader is killed in the middle of each part of the job."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from raymq.actors.protocol.tls import url_of
from tests.support.certificates import make_node_certificates
from tests.support.leader_kills import leader_killed
from tests.support.programs import ROOT
from tests.support.ray_data_job import READS, ROWS, TOPIC
from tests.support.replicated_shard import started_shard

pytestmark = [pytest.mark.timeout(180), pytest.mark.thorough]


def test_rows_are_written_and_read_once_although_leaders_are_killed_with_tls(
    tmp_path: Path,
) -> None:
    certificates = make_node_certificates(tmp_path / "authority")
    with started_shard(3, "ray-data-tls", certificates.environment()) as shard:
        shard.cluster.create_topic(TOPIC, queues=2)
        url = url_of(shard.cluster.endpoints[0])
        assert url.startswith("raymq+tls://")
        words = (url, str(certificates.ca), shard.owned().address, str(tmp_path))
        variables = {"RAYMQ_TOKEN": shard.cluster.token, "RAY_AUTH_MODE": "token"}
        variables["PYTHONPATH"] = str(ROOT)
        with contextlib.ExitStack() as kills:
            for part in ("write", *READS):
                kills.enter_context(leader_killed(shard, tmp_path / part))
            done = subprocess.run(
                [sys.executable, "-m", "tests.support.ray_data_job", *words],
                env={**shard.environment, **variables},
                capture_output=True,
                text=True,
                check=False,
                timeout=120,
            )
            assert done.returncode == 0, done.stdout + done.stderr

    found = json.loads(done.stdout.splitlines()[-1])
    everything = [ROWS, ROWS, ROWS * (ROWS - 1) // 2]
    assert found == {"written": ROWS, **dict.fromkeys(READS, everything)}
