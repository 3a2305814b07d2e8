"""A forked child leaves what its parent opened alone, and threads that are none are refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from raymq.client.transport.ray_connection import RayShardConnection
from raymq.cluster import stop as stop_module
from raymq.cluster.cluster import Cluster
from raymq.store.base.errors import Rejected
from tests.support.cluster_program import run_program
from tests.support.fake_backend import FakeCluster

#: what the parent opens, and what its child does then. Each child must come to its own end
CHILDREN = {
    "leaves the block of a cluster": (
        "cluster.__enter__().describe_topic('t')",
        "cluster.__exit__(None, None, None)",
    ),
    "drops a cluster": ("cluster.describe_topic('t')", "del cluster"),
    "ends with a cluster": ("cluster.describe_topic('t')", "pass"),
    "closes a reader": (
        """
from raymq.client.consume.range_reader import RangeReader
from raymq.client.transport.routes import Routes
with cluster.producer() as producer:
    producer.send("t", b"x", queue_id=0)
reader = RangeReader(Routes.of(cluster), "t", 0, 0)
reader.fetch(0, 1, max_bytes=1, max_records=1, timeout_s=30)
""",
        "reader.close()",
    ),
    "leaves the block of a producer": (
        "producer = cluster.producer(); producer.send('t', b'x', queue_id=0).result(30)",
        "producer.__exit__(None, None, None); del producer",
    ),
    "leaves the block of a producer of half messages": (
        """
producer = cluster.producer()
producer.check(lambda half: None, group="g")
half = producer.send_half("t", b"x", group="g").result(30)
""",
        "producer.__exit__(None, None, None); del half, producer",
    ),
    "leaves the block of a consumer": (
        "consumer = cluster.consumer('t', start='earliest')",
        "consumer.__exit__(None, None, None); del consumer",
    ),
}

FORK = """
child = os.fork()
if child:
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    cluster = FakeCluster()
    cluster.create_topic("t", queues=4)
    yield cluster
    cluster.close()


@pytest.mark.parametrize("child", CHILDREN)
def test_a_forked_child_comes_to_its_end(cluster: FakeCluster, child: str) -> None:
    before, then = CHILDREN[child]
    # Its last line: a child that hangs, or that a signal ends, has another exit code.
    program = f"{before}{FORK}\n{then}\nsys.exit(7)"
    assert run_program(cluster, program) == (7, "")


def test_a_call_on_a_connection_of_the_parent_is_refused(cluster: FakeCluster) -> None:
    program = f"""
from raymq.store.base.errors import Rejected
cluster.call(0, "describe", {{}})
{FORK}
try:
    cluster.call(0, "describe", {{}})
except Rejected as error:
    sys.exit(7 if error.field == "fork" else 8)
"""
    assert run_program(cluster, program) == (7, "")


def test_a_forked_child_does_not_stop_the_cluster_of_its_parent(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[object] = []
    monkeypatch.setattr(stop_module, "stop", lambda *_, **__: stopped.append(1))

    def handle() -> Cluster:
        return Cluster(
            name="fake",
            cluster_id=cluster.cluster_id,
            shards=1,
            token=cluster.token,
            endpoints=dict(cluster.endpoints),
            data_dir="data",  # type: ignore[arg-type]
            stop_on_exit=True,
        )

    with handle() as made:
        # As in a child.
        made._forks -= 1
    assert not stopped
    with handle():
        pass
    assert stopped


PATCHES = [
    ("gevent.monkey", "is_module_patched", "threading", "patch_all(thread=False)"),
    ("eventlet.patcher", "is_monkey_patched", "thread", "monkey_patch(thread=False)"),
]


@pytest.mark.parametrize(("module", "function", "name", "remedy"), PATCHES)
def test_a_process_whose_threads_were_replaced_is_refused_with_what_to_do(
    cluster: FakeCluster,
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    function: str,
    name: str,
    remedy: str,
) -> None:
    patched = {name}
    fake = SimpleNamespace(**{function: patched.__contains__})
    monkeypatch.setitem(sys.modules, module, fake)  # type: ignore[arg-type]
    for connect in (
        lambda: cluster.routes().connect(0),
        lambda: RayShardConnection("actor", cluster.cluster_id),
    ):
        with pytest.raises(Rejected) as refused:
            connect()
        assert refused.value.field == "threads"
        assert remedy in str(refused.value)

    patched.clear()
    cluster.routes().connect(0).close()
