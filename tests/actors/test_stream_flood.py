"""Thousands of streams without a token, opened and reset at once, neither end the leader nor fill its memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from raymq.cluster.cluster import Cluster
from tests.support.served_shard import CLUSTER_ID, ROOT, TOKEN
from tests.support.stream_flood import flood

STREAMS, TIMES = 20_000, 3
MIB = 1024 * 1024
#: of a leader: 20,000 threads that wait for the interpreter, of 100 KiB each
MEMORY_BYTES_MAX = 2048 * MIB

SHARD = """
import sys
from pathlib import Path
from tests.support.served_shard import ServedShard

sys.setswitchinterval(0.0005)
with ServedShard(Path(sys.argv[1])) as shard:
    shard.start_flusher()
    shard.cluster.create_topic("t", queues=1)
    print(shard.endpoints[0].rpartition(":")[2], flush=True)
    sys.stdin.read()
"""


def peak_bytes(pid: int) -> int:
    """The most memory that a process had."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


@pytest.mark.thorough
def test_streams_that_are_reset_at_once_end_no_leader(tmp_path: Path) -> None:
    leader = subprocess.Popen(
        [sys.executable, "-c", SHARD, str(tmp_path)],
        cwd=ROOT,
        env=dict(os.environ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # Its flusher is in the same group.
        start_new_session=True,
    )
    assert leader.stdin is not None
    assert leader.stdout is not None
    try:
        port = int(leader.stdout.readline())
        cluster = Cluster(
            name="flooded",
            cluster_id=CLUSTER_ID,
            shards=1,
            token=TOKEN,
            endpoints={0: f"127.0.0.1:{port}"},
            resolver=lambda: {0: f"127.0.0.1:{port}"},
        )
        with cluster, cluster.producer() as producer:
            for number in range(TIMES):
                with flood(port, STREAMS):
                    receipt = producer.send("t", b"%d" % number).result(120)
                    assert receipt.offset == number
        # Its satellite would have killed it.
        assert leader.poll() is None
        assert peak_bytes(leader.pid) < MEMORY_BYTES_MAX
    finally:
        os.killpg(leader.pid, signal.SIGKILL)
        leader.wait()
        leader.stdin.close()
        leader.stdout.close()
