"""Members of a group whose requests and answers are lost, come twice, or 30 seconds late."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from raymq.client.consume.consumer import Consumer
from raymq.store.records.requests import PutRequest
from tests.support.bad_network import FATES, AheadClock, BadNetwork
from tests.support.batches import batch, put_one
from tests.support.fake_backend import FakeCluster
from tests.support.group_members import Entry, check_histories, read_as_member
from tests.support.waiting import until

QUEUES, MESSAGES, MEMBERS = 4, 60, 3


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    cluster = FakeCluster(2)
    cluster.create_topic("t", queues=QUEUES)
    yield cluster
    cluster.close()


def offsets(cluster: FakeCluster) -> dict[int, int]:
    """Of the group, in all shards."""
    found = dict.fromkeys(range(QUEUES), 0)
    for backend in cluster.backends:
        found |= backend.state.offsets.get(("g", "t"), {})
    return found


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("is_stalled", [False, True])
def test_no_message_is_passed_over_and_no_offset_goes_back(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, seed: int, is_stalled: bool
) -> None:
    """`is_stalled`: time passes for everything while an answer is late, so that sessions end, too."""
    network = BadNetwork(seed)
    network.install(monkeypatch)
    clocks = [AheadClock() for _ in range(MEMBERS)]
    shared = AheadClock()
    if is_stalled:
        for backend in cluster.backends:
            backend.groups._clock = shared
    is_over = threading.Event()
    histories: list[list[Entry]] = [[] for _ in range(MEMBERS)]
    failures: list[BaseException] = []

    def run(index: int) -> None:
        clock = clocks[index]
        try:
            with Consumer(
                cluster, "t", group="g", start="earliest", session_timeout_s=3, clock=clock
            ) as consumer:
                late = [shared, *clocks] if is_stalled else [clock]
                network.late_for(consumer._routes, *late)
                read_as_member(consumer, histories[index], is_over)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(MEMBERS)]
    for thread in threads:
        thread.start()
    try:
        for number in range(MESSAGES):
            for queue in range(QUEUES):
                rows = batch([b"%d" % number])
                put_one(
                    cluster.backends[queue % 2], PutRequest("t", queue, rows, None, 0, 0, "quorum")
                )
            is_over.wait(0.02)
        wanted = dict.fromkeys(range(QUEUES), MESSAGES)
        until(lambda: offsets(cluster) == wanted or bool(failures), lambda: is_over.wait(0.05))
        network.mend()
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert not failures
    assert network.fates.keys() == set(FATES), "not all faults happened"
    check_histories(histories, wanted, offsets(cluster))
