"""RocketMQ's Go client, in front of a shard: what it sends, reads by tag, and sends back."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from raymq.doors.rocketmq.rocketmq_server import RocketMQServer
from tests.support.served_shard import ServedShard

pytestmark = pytest.mark.thorough

SOURCES = Path(__file__).parent / "go"
COUNT = 40


def go() -> str | None:
    """The program `go`: of GOROOT, of PATH, or where its own installation puts it."""
    places = [os.environ.get("GOROOT", "/usr/local/go"), "/usr/local/go"]
    folders = [str(Path(each) / "bin") for each in places]
    return shutil.which("go") or shutil.which("go", path=os.pathsep.join(folders))


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program of the client. Left out where Go is missing, or cannot fetch the module."""
    found = go()
    if found is None:
        pytest.skip("no go on PATH or in GOROOT")
    target = tmp_path_factory.mktemp("go") / "client"
    # Fetched first: a program that does not compile is a fault.
    fetched, built = (
        subprocess.run(
            [found, *words], cwd=SOURCES, capture_output=True, text=True, timeout=280, check=False
        )
        for words in (("mod", "download"), ("build", "-o", str(target), "."))
    )
    if fetched.returncode != 0:
        pytest.skip(f"go could not fetch the client: {fetched.stderr[-500:]}")
    assert built.returncode == 0, built.stderr
    return target


def test_the_go_client_sends_reads_by_tag_and_sends_back(client: Path, tmp_path: Path) -> None:
    with ServedShard(tmp_path / "store") as shard:
        shard.start_flusher()
        shard.cluster.create_topic("orders", queues=4)
        with RocketMQServer(shard.cluster) as server:
            name_server = f"127.0.0.1:{server.listen(0)}"
            done = subprocess.run(
                [str(client), name_server, "orders", str(COUNT), shard.cluster.token],
                env={**os.environ, "HOME": str(tmp_path)},
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "sent": 2 * COUNT,
        "read": COUNT,
        "retried": True,
        "again": 1,
    }
