"""Clients of a shard whose leader changes while they run: three replicas in memory, over real Flight."""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from raymq.actors.ray.replica_files import write_endpoint, write_json
from raymq.actors.server.flight.flight_server import serve
from raymq.client.consume.consumer import Consumer
from raymq.client.consume.range_reader import read_range
from raymq.client.messages.received import ReceivedMessage
from raymq.client.produce import batch_sender as batch_sender_module
from raymq.client.produce import send_window
from raymq.client.produce.batch_sender import BatchSender
from raymq.client.topics.add_queues import TAKEN_PREFIX
from raymq.client.transport import connection as connection_module
from raymq.client.transport import routes as routes_module
from raymq.client.transport.leader_route import LeaderRoute
from raymq.client.transport.routes import Routes
from raymq.cluster import cluster as cluster_module
from raymq.cluster.cluster import Cluster
from raymq.cluster.deploy.resolve import FileResolver
from raymq.cluster.queue.assignment_log import Assignment, AssignmentLog
from raymq.cluster.record.paths import ClusterPaths
from raymq.store.base.clock import Clock
from raymq.store.base.errors import (
    DeliveryUnknown,
    NotLeading,
    NotServing,
    OffsetOutOfRange,
    RayMQError,
    Rejected,
    Unavailable,
)
from raymq.store.records.requests import FetchRequest, FetchSlice, PutRequest
from tests.support.batches import batch, put_one
from tests.support.certificates import Certificates, make_certificates
from tests.support.fake_backend import CLUSTER_ID, TOKEN, FakeBackend, FakeCluster
from tests.support.moving_shard import MovingShard, Replica
from tests.support.waiting import until

#: a replica that runs answers in this time also on a busy machine
LEADER_TIMEOUT_S = 0.5
SILENT_MS = 100
CHECK_S = 0.02


def set_patience(monkeypatch: pytest.MonkeyPatch, leader_s: float, silent_ms: int) -> None:
    monkeypatch.setattr(routes_module, "LEADER_TIMEOUT_S", leader_s)
    monkeypatch.setattr(cluster_module, "STATUS_TIMEOUT_S", leader_s)
    for module in (send_window, connection_module, routes_module):
        monkeypatch.setattr(module, "SILENT_MS", silent_ms)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent replicas are noticed soon."""
    set_patience(monkeypatch, LEADER_TIMEOUT_S, SILENT_MS)
    for module in (batch_sender_module, connection_module):
        monkeypatch.setattr(module, "CHECK_S", CHECK_S)
    monkeypatch.setattr(connection_module, "FOLLOWED_WAIT_MS", 50)


@pytest.fixture
def patient(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No replica hangs, and none seems to, however busy the machine is."""
    set_patience(monkeypatch, 30.0, 60_000)


@pytest.fixture
def shard() -> Iterator[MovingShard]:
    """Topic t of two queues."""
    shard = MovingShard()
    shard.create("t", queues=2)
    yield shard
    shard.close()


@pytest.fixture
def sender(shard: MovingShard) -> Iterator[BatchSender]:
    with closing(BatchSender(shard.routes(), producer_id=7, epoch=3)) as sender:
        yield sender


@pytest.fixture
def make(shard: MovingShard) -> Iterator[Callable[..., Consumer]]:
    made: list[Consumer] = []

    def consumer(**options: Any) -> Consumer:
        handle = options.pop("cluster", None) or shard.cluster()
        made.append(Consumer(handle, "t", **{"start": "earliest", **options}))
        return made[-1]

    yield consumer
    for each in made:
        each.close()


def bodies(start: int, count: int) -> list[bytes | None]:
    return [b"%d" % number for number in range(start, start + count)]


def put(replica: Replica, *rows: bytes) -> None:
    put_one(replica, PutRequest("t", 0, batch(list(rows)), None, 0, 0, "quorum"))


def poll_all(consumer: Consumer, count: int) -> list[ReceivedMessage]:
    found: list[ReceivedMessage] = []
    until(lambda: len(found) >= count, lambda: found.extend(consumer.poll(100, 5)))
    return found


def wait_until_refused(replica: Replica, times: int = 1) -> None:
    replica.wait_for(lambda: replica.refused >= times)


# --- hints ----------------------------------------------------------------------------------------


def test_a_hint_of_a_higher_epoch_wins_and_an_older_one_never_replaces_a_newer() -> None:
    routes = Routes({0: "a"}, TOKEN, replicas=3)
    assert routes.route(0) == ("a", 0)
    for hint, known in (
        (LeaderRoute("b", 5), ("b", 5)),
        (LeaderRoute("c", 4), ("b", 5)),
        (LeaderRoute("c", 5), ("b", 5)),
        (LeaderRoute("c", 0), ("b", 5)),
        (LeaderRoute("c", 6), ("c", 6)),
    ):
        routes.note(0, hint)
        assert routes.route(0) == known


def test_a_handle_from_before_the_shard_had_three_replicas_follows_its_leaders(
    shard: MovingShard, patient: None
) -> None:
    handle = shard.cluster(replicas=1, replica_endpoints={})
    with handle, handle.producer() as producer:
        assert producer.send("t", b"0", queue_id=0).result(30).offset == 0
        shard.replicas[0].step_down()
        shard.elect(1, 2, of=shard.replicas[0].kept())
        assert producer.send("t", b"1", queue_id=0).result(30).offset == 1
        assert handle.describe_topic("t")["messages"] == 2
        assert handle.replicas == 3


def test_a_leader_that_does_not_answer_is_looked_for_where_another_replica_knows_it() -> None:
    routes = Routes({0: "a"}, TOKEN, replicas=3)
    routes.note(0, LeaderRoute("b", 5))
    routes.heed(0, LeaderRoute("b", 5), Unavailable("nothing listens there"))
    routes.note(0, LeaderRoute("c", 5))
    assert routes.route(0) == ("c", 5)
    # The endpoint that is known now was not tried.
    routes.note(0, LeaderRoute("b", 5))
    assert routes.route(0) == ("c", 5)


def test_a_refusal_is_a_hint_only_if_it_names_a_leader() -> None:
    routes = Routes({0: "a"}, TOKEN, replicas=3)
    tried = routes.route(0)
    for error in (
        NotLeading("no", endpoint=None, epoch=9),
        NotLeading("no", endpoint="z", epoch="9"),
        NotServing("no", endpoint="z", epoch=9),
        Unavailable("no", field="leader", limit="z", endpoint="z", epoch=9),
    ):
        routes.heed(0, tried, error)
        assert not routes.knows_next(0)
    routes.heed(0, tried, NotLeading("other words", endpoint="b", epoch=9))
    assert routes.knows_next(0)
    assert routes.route(0) == ("b", 9)


@pytest.mark.usefixtures("patient")
def test_a_shard_of_two_replicas_is_reached_as_before() -> None:
    fakes = FakeCluster()
    fakes.create_topic("t")
    routes = Routes(fakes.endpoints, TOKEN, cluster_id=CLUSTER_ID, replicas=2)
    asked: list[str] = []
    call = fakes.backends[0].call

    def note(op: str, args: dict[str, Any]) -> dict[str, Any]:
        asked.append(op)
        return call(op, args)

    fakes.backends[0].call = note  # type: ignore[method-assign]
    with closing(BatchSender(routes)) as sender:
        sender.send("t", 0, batch([b"x"])).result(10)
    with closing(fakes.routes().fetch_stream(0)):
        pass
    assert asked == ["topics"]
    fakes.close()


# --- producers ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("patient")
def test_a_producer_goes_on_at_the_new_leader_exactly_once_and_in_order(
    shard: MovingShard, sender: BatchSender
) -> None:
    old = shard.replicas[0]
    futures = [sender.send("t", n % 2, batch(bodies(n * 10, 10))) for n in range(6)]
    sender.flush(10)

    old.hold_answers()
    futures += [sender.send("t", n % 2, batch(bodies(n * 10, 10))) for n in range(6, 10)]
    old.wait_for(lambda: len(old.puts) >= 10)
    kept = old.kept()
    # The new leader lacks these.
    futures += [sender.send("t", n % 2, batch(bodies(n * 10, 10))) for n in range(10, 20)]
    old.wait_for(lambda: len(old.puts) >= 20)
    old.step_down()
    new = shard.elect(1, 2, of=kept)
    futures += [sender.send("t", n % 2, batch(bodies(n * 10, 10))) for n in range(20, 30)]

    receipts = [future.result(20) for future in futures]
    for queue in (0, 1):
        assert new.bodies("t", queue) == [
            body for n in range(queue, 30, 2) for body in bodies(n * 10, 10)
        ]
        mine = [receipt for receipt in receipts if receipt.queue_id == queue]
        assert [receipt.first_offset for receipt in mine] == list(range(0, 150, 10))
    # Those that the new leader had are recognised, and have their first offsets.
    assert sum(receipt.duplicates for receipt in receipts) == 40
    assert {(each.producer_id, each.epoch) for each in [*old.puts, *new.puts]} == {(7, 3)}


@pytest.mark.usefixtures("patient")
def test_a_refusal_leads_straight_to_the_leader_that_it_names(
    shard: MovingShard, sender: BatchSender
) -> None:
    sender.send("t", 0, batch(bodies(0, 1))).result(10)
    old = shard.replicas[0]
    old.leads = False
    new = shard.elect(2, 2, of=old)
    old.hear(2, 2)
    asked = old.asked.count("leader")
    sender.send("t", 0, batch(bodies(1, 1))).result(10)
    assert new.bodies("t") == bodies(0, 2)
    # No replica was asked to find it.
    assert "leader" not in shard.replicas[1].asked
    assert old.asked.count("leader") == asked


def test_a_stale_hint_leads_nowhere(shard: MovingShard, sender: BatchSender) -> None:
    sender.send("t", 0, batch(bodies(0, 1))).result(10)
    old, other = shard.replicas[:2]
    old.step_down()
    new = shard.elect(2, 5, of=old.kept())
    # The old leader knows of an election that is over, and so does a replica that was away.
    old.hear(1, 3)
    other.hear(0, 2)
    sender.send("t", 0, batch(bodies(1, 1))).result(20)
    assert new.bodies("t") == bodies(0, 2)
    old.hear(1, 4)
    assert sender._routes.route(0) == (shard.endpoints[2], 5)


def test_a_dead_leader_is_left(shard: MovingShard, sender: BatchSender) -> None:
    old = shard.replicas[0]
    sender.send("t", 0, batch(bodies(0, 1))).result(10)
    old.hold_answers()
    lost = sender.send("t", 0, batch(bodies(1, 1)))
    old.wait_for(lambda: len(old.puts) == 2)
    shard.kill(0)
    shard.elect(1, 2, of=old.kept())
    assert (lost.result(20).first_offset, lost.result().duplicates) == (1, 1)
    assert sender.send("t", 0, batch(bodies(2, 1))).result(20).first_offset == 2


def test_a_leader_that_hangs_with_puts_under_way_is_left_when_another_one_leads(
    shard: MovingShard, sender: BatchSender
) -> None:
    old = shard.replicas[0]
    sender.send("t", 0, batch(bodies(0, 1))).result(10)
    shard.stop(0)
    futures = [sender.send("t", 0, batch(bodies(n, 1))) for n in range(1, 5)]
    asked = shard.replicas[1]
    # No other replica leads yet: the stream stays.
    asked.wait_for(lambda: asked.asked.count("leader") >= 3)
    new = shard.elect(1, 2, of=old.kept())
    assert [future.result(20).first_offset for future in futures] == [1, 2, 3, 4]
    assert new.bodies("t") == bodies(0, 5)


def test_a_write_that_waits_for_a_leader_that_hangs_ends(
    shard: MovingShard, sender: BatchSender
) -> None:
    old = shard.replicas[0]
    sender.send("t", 0, batch(bodies(0, 1))).result(10)
    shard.stop(0)
    shard.elect(1, 2, of=old.kept())
    # More than the buffers of the connection take: without an end of the write `send` would never return.
    futures = [sender.send("t", 0, batch([bytes(1 << 20)])) for _ in range(20)]
    assert [future.result(30).first_offset for future in futures] == list(range(1, 21))


def test_a_silent_leader_is_not_left_while_no_other_one_leads(
    shard: MovingShard, sender: BatchSender
) -> None:
    leader, other = shard.replicas[:2]
    sender.send("t", 0, batch(bodies(0, 1))).result(10)
    leader.hold_answers()
    future = sender.send("t", 0, batch(bodies(1, 1)))
    other.wait_for(lambda: other.asked.count("leader") >= 3)
    leader.release()
    assert future.result(10).duplicates == 0
    assert len(leader.puts) == 2


def test_a_producer_that_begins_while_the_known_leader_hangs_finds_the_new_one(
    shard: MovingShard,
) -> None:
    routes = shard.routes()
    routes.topics.find("t")
    shard.stop(0)
    new = shard.elect(2, 2, of=shard.replicas[0].kept())
    with closing(BatchSender(routes)) as sender:
        assert sender.send("t", 0, batch(bodies(0, 1))).result(20).first_offset == 0
    assert new.bodies("t") == bodies(0, 1)


def test_batches_wait_while_no_replica_leads(shard: MovingShard, sender: BatchSender) -> None:
    old, other = shard.replicas[:2]
    sender.send("t", 0, batch(bodies(0, 1))).result(10)
    for replica in shard.replicas:
        replica.step_down()
    futures = [sender.send("t", 0, batch(bodies(n, 1))) for n in range(1, 5)]
    asked = other.asked.count("leader")
    other.wait_for(lambda: other.asked.count("leader") >= asked + 3)
    assert not any(future.done() for future in futures)
    shard.elect(1, 2, of=old.kept())
    assert [future.result(20).first_offset for future in futures] == [1, 2, 3, 4]


def test_a_batch_that_no_leader_takes_in_time_was_certainly_not_stored(
    shard: MovingShard,
) -> None:
    with closing(BatchSender(shard.routes(), delivery_timeout_ms=300)) as sender:
        sender.topic("t")
        for replica in shard.replicas:
            replica.step_down()
        with pytest.raises(Unavailable, match="nothing of the batch was stored"):
            sender.send("t", 0, batch(bodies(0, 1))).result(20)
        # With the same sequences after that, however often a slow machine needs to be in time.
        shard.elect(1, 2)
        offsets: list[int | None] = []

        def send_again() -> None:
            with contextlib.suppress(Unavailable):
                offsets.append(sender.send("t", 0, batch(bodies(1, 1))).result(20).first_offset)

        until(lambda: bool(offsets), send_again)
        assert offsets == [0]


def test_the_leader_may_come_back_to_a_replica_that_led_before(
    shard: MovingShard, sender: BatchSender
) -> None:
    leader = shard.replicas[0]
    for epoch in range(2, 9):
        sender.send("t", 0, batch(bodies(epoch, 1))).result(20)
        leader.step_down()
        leader = shard.elect(epoch % 3, epoch, of=leader.kept())
    sender.send("t", 0, batch(bodies(9, 1))).result(20)
    assert leader.bodies("t") == bodies(2, 8)


def test_a_wrong_token_still_fails_at_once(shard: MovingShard) -> None:
    routes = shard.routes()
    with closing(BatchSender(routes)) as sender:
        sender.topic("t")
        routes.token = "wrong"
        with pytest.raises(Rejected) as refused:
            sender.send("t", 0, batch(bodies(0, 1))).result(20)
    assert refused.value.field == "token"


# --- finding replicas -----------------------------------------------------------------------------


def test_a_client_that_knows_one_replica_learns_the_others_before_it_needs_them(
    shard: MovingShard,
) -> None:
    cluster = shard.cluster(replica_endpoints={})
    with closing(BatchSender(Routes.of(cluster))) as sender:
        sender.send("t", 0, batch(bodies(0, 1))).result(10)
        shard.kill(0)
        shard.elect(1, 2, of=shard.replicas[0].kept())
        assert sender.send("t", 0, batch(bodies(1, 1))).result(20).first_offset == 1


@pytest.mark.parametrize("of", [None, 0], ids=["any shard", "a shard"])
def test_a_handle_learns_the_replicas_with_its_first_call(
    shard: MovingShard, of: int | None
) -> None:
    with shard.cluster(replica_endpoints={}) as cluster:
        assert list(cluster.call(of, "topics", {})) == ["t"]
        shard.kill(0)
        shard.elect(1, 2)
        assert cluster.call(0, "init_producer", {"producer_id": 1}) == {"epoch": 0}


def test_when_no_known_replica_answers_the_resolver_says_where_the_leader_is(
    shard: MovingShard,
) -> None:
    known = {1: shard.endpoints[1]}
    shard.kill(0)
    shard.elect(1, 2)
    handle = shard.cluster(replica_endpoints={}, resolver=lambda: {0: known[1]})
    with handle as cluster, closing(BatchSender(Routes.of(cluster))) as sender:
        assert sender.send("t", 0, batch(bodies(0, 1))).result(20).first_offset == 0


def test_the_files_of_the_replicas_say_which_one_led_last(tmp_path: Path) -> None:
    paths = ClusterPaths(tmp_path)
    resolver = FileResolver(str(tmp_path))
    assert resolver() == {}
    for shard in range(2):
        for replica in range(3):
            root = paths.replica(shard, replica)
            (root / "raymq").mkdir(parents=True)
            write_endpoint(root, "127.0.0.1", 7000 + 10 * shard + replica, tls=False)
    assert resolver() == {0: "127.0.0.1:7000", 1: "127.0.0.1:7010"}
    for replica, epoch in ((0, 4), (1, 11), (2, 7)):
        write_json(paths.replica(1, replica), "leadership", {"epoch": epoch})
    assert resolver() == {0: "127.0.0.1:7000", 1: "127.0.0.1:7011"}
    # A damaged file counts as none.
    (paths.replica(1, 1) / "raymq" / "leadership").write_bytes(b"{")
    assert resolver()[1] == "127.0.0.1:7012"


def test_a_handle_made_from_any_replica_knows_the_leader_and_all_replicas(
    shard: MovingShard,
) -> None:
    shard.elect(0, 1)
    shard.replicas[0].step_down()
    shard.elect(2, 2)
    for number in range(3):
        with Cluster.bootstrap(f"raymq://{shard.endpoints[number]}", token=TOKEN) as cluster:
            assert cluster.replicas == 3
            assert cluster.endpoints == {0: shard.endpoints[2]}
            copy = pickle.loads(pickle.dumps(cluster))
            assert copy.replica_endpoints == {0: shard.endpoints}


def test_a_worker_with_a_copy_of_a_handle_finds_the_leader_without_the_one_that_it_knows(
    shard: MovingShard,
) -> None:
    with Cluster.bootstrap(f"raymq://{shard.endpoints[0]}", token=TOKEN) as cluster:
        copy = pickle.loads(pickle.dumps(cluster))
    shard.kill(0)
    put(shard.elect(1, 2), b"0")
    with closing(BatchSender(Routes.of(copy))) as sender:
        assert sender.send("t", 0, batch(bodies(1, 1))).result(20).first_offset == 1
    assert sum(len(piece) for piece in read_range(copy, "t", 0, 0, 0, 2)) == 2


def test_the_log_of_a_queues_assignments_follows_the_leader(shard: MovingShard) -> None:
    old = shard.replicas[0]
    for topic in ("jobs", TAKEN_PREFIX + "jobs"):
        shard.create(topic)
    with shard.cluster() as cluster, closing(AssignmentLog(cluster, "jobs", 0, Clock())) as log:
        log.open()
        log.write(3, [Assignment(1, 0, 3)]).result(20)
        old.step_down()
        shard.elect(1, 2, of=old.kept())
        log.write(5, [Assignment(2, 3, 2)]).result(20)
        with closing(AssignmentLog(cluster, "jobs", 0, Clock())) as successor:
            successor.open()
            assert successor.given == [Assignment(1, 0, 3), Assignment(2, 3, 2)]


# --- consumers ------------------------------------------------------------------------------------


def test_a_consumer_goes_on_at_its_offsets_at_the_new_leader(
    shard: MovingShard, make: Callable[..., Consumer]
) -> None:
    old = shard.replicas[0]
    put(old, b"0", b"1")
    consumer = make()
    found = poll_all(consumer, 2)
    old.step_down()
    new = shard.elect(1, 2, of=old.kept())
    put(new, b"2", b"3")
    found += poll_all(consumer, 2)
    assert [(each.offset, each.body) for each in found] == [(n, b"%d" % n) for n in range(4)]


def test_a_consumer_leaves_a_leader_that_hangs(
    shard: MovingShard, make: Callable[..., Consumer]
) -> None:
    old = shard.replicas[0]
    put(old, b"0")
    consumer = make()
    poll_all(consumer, 1)
    shard.stop(0)
    new = shard.elect(2, 2, of=old.kept())
    put(new, b"1")
    assert [each.offset for each in poll_all(consumer, 1)] == [1]


def test_a_consumer_leaves_a_dead_leader_and_waits_while_none_leads(
    shard: MovingShard, make: Callable[..., Consumer]
) -> None:
    old, other = shard.replicas[:2]
    put(old, b"0")
    consumer = make()
    poll_all(consumer, 1)
    other.hear(None, 1)
    shard.replicas[2].hear(None, 1)
    shard.kill(0)
    other.wait_for(lambda: other.asked.count("leader") >= 2)
    assert consumer.poll(10, 0) == []
    put(shard.elect(1, 2, of=old.kept()), b"1")
    assert [each.offset for each in poll_all(consumer, 1)] == [1]


def end_early(
    replica: Replica, end: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[threading.Event, Callable[[], int]]:
    """Let a new leader not know yet that its queues go beyond `end`. Returns: what ends that, and the reads so far."""
    read, known, reads = replica._read, threading.Event(), [0]

    def read_early(request: FetchRequest) -> list[FetchSlice]:
        reads[0] += 1
        replica._changed.notify_all()
        if known.is_set():
            return read(request)
        found = []
        for queue_id, offset in request.offsets.items():
            if offset > end:
                error = OffsetOutOfRange("not yet", min=0, max=end, queue_id=queue_id)
                found.append(FetchSlice(queue_id, offset, offset, 0, end, None, error))
        return found

    monkeypatch.setattr(replica, "_read", read_early)
    return known, lambda: reads[0]


def test_a_consumer_waits_for_a_new_leader_that_does_not_know_the_end_yet(
    shard: MovingShard, make: Callable[..., Consumer], monkeypatch: pytest.MonkeyPatch
) -> None:
    old = shard.replicas[0]
    put(old, b"0", b"1", b"2")
    consumer = make(queues=[0])
    poll_all(consumer, 3)
    known, reads = end_early(shard.replicas[1], 1, monkeypatch)
    old.step_down()
    new = shard.elect(1, 2, of=old.kept())
    new.wait_for(lambda: reads() >= 3)
    assert consumer.poll(10, 0) == []
    assert consumer.position(0) == 3
    known.set()
    put(new, b"3")
    assert [each.offset for each in poll_all(consumer, 1)] == [3]


def test_a_new_leader_that_never_knows_the_end_is_reported(
    shard: MovingShard, make: Callable[..., Consumer], monkeypatch: pytest.MonkeyPatch
) -> None:
    old = shard.replicas[0]
    put(old, b"0", b"1", b"2")
    consumer = make(queues=[0], unavailable_timeout_ms=200)
    poll_all(consumer, 3)
    end_early(shard.replicas[1], 1, monkeypatch)
    old.step_down()
    shard.elect(1, 2, of=old.kept())
    state = consumer._assigned.state
    with state.changed:
        assert state.changed.wait_for(lambda: state.queue_errors, 20)
    with pytest.raises(OffsetOutOfRange):
        consumer.poll(10, 0)
    assert consumer.position(0) == 3


@pytest.mark.parametrize("chosen", ["start", "seek"])
def test_an_offset_that_the_caller_chose_and_no_queue_has_is_refused_at_once(
    shard: MovingShard, make: Callable[..., Consumer], chosen: str
) -> None:
    put(shard.replicas[0], b"0")
    consumer = make(queues=[0], start={0: 9} if chosen == "start" else "earliest")
    if chosen == "seek":
        poll_all(consumer, 1)
        consumer.seek(0, 9)
    with pytest.raises(OffsetOutOfRange):
        consumer.poll(10, 10)


def test_a_range_is_read_across_a_change_of_the_leader(
    shard: MovingShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = shard.replicas[0]
    put(old, *(b"%d" % n for n in range(10)))
    cluster = shard.cluster()
    pieces = read_range(cluster, "t", 0, 0, 0, 20, timeout_s=30)
    count = len(next(pieces))
    known, reads = end_early(shard.replicas[1], 5, monkeypatch)
    old.step_down()
    new = shard.elect(1, 2, of=old.kept())
    put(new, *(b"%d" % n for n in range(10, 20)))

    def learn_the_end() -> None:
        new.wait_for(lambda: reads() >= 2)
        known.set()

    learning = threading.Thread(target=learn_the_end)
    learning.start()
    count += sum(len(piece) for piece in pieces)
    learning.join()
    assert count == 20


def test_a_range_is_read_when_the_leader_hangs(shard: MovingShard) -> None:
    old = shard.replicas[0]
    put(old, *(b"%d" % n for n in range(10)))
    pieces = read_range(shard.cluster(), "t", 0, 0, 0, 20, timeout_s=30)
    count = len(next(pieces))
    shard.stop(0)
    put(shard.elect(1, 2, of=old.kept()), *(b"%d" % n for n in range(10, 20)))
    assert count + sum(len(piece) for piece in pieces) == 20


# --- calls ----------------------------------------------------------------------------------------


def test_offsets_are_committed_at_the_new_leader(
    shard: MovingShard, make: Callable[..., Consumer]
) -> None:
    old = shard.replicas[0]
    put(old, b"0")
    consumer = make(group="g")
    poll_all(consumer, 1)
    old.step_down()
    new = shard.elect(1, 2, of=old.kept())
    consumer.commit()
    assert new.state.offsets["g", "t"][0] == 1
    assert consumer.committed()[0] == 1


@pytest.mark.parametrize("fate", ["dead", "hangs", "refuses"])
def test_a_call_follows_the_leader(shard: MovingShard, fate: str) -> None:
    old = shard.replicas[0]
    with shard.cluster() as cluster:
        assert cluster.call(0, "init_producer", {"producer_id": 1}) == {"epoch": 0}
        kept = old.kept()
        if fate == "refuses":
            old.step_down()
        else:
            {"dead": shard.kill, "hangs": shard.stop}[fate](0)
        shard.elect(2, 2, of=kept)
        answer = cluster.call(0, "init_producer", {"producer_id": 1}, timeout_s=10)
        assert answer == {"epoch": 1}
        # The handle, and the clients that it makes, know the new leader.
        assert cluster.endpoints == {0: shard.endpoints[2]}


def test_a_call_waits_for_a_leader_for_as_long_as_it_may_take(shard: MovingShard) -> None:
    for replica in shard.replicas:
        replica.step_down()
    with shard.cluster() as cluster:
        refused: RayMQError | None = None
        while not isinstance(refused, Unavailable):
            # The last try has a tenth of a second: on a machine that stands still it gets no answer.
            with pytest.raises((Unavailable, DeliveryUnknown)) as caught:
                cluster.call(0, "init_producer", {"producer_id": 1}, timeout_s=0.3)
            refused = caught.value
        assert refused.field == "leader"

        def lead() -> None:
            wait_until_refused(shard.replicas[0], shard.replicas[0].refused + 2)
            shard.elect(1, 2)

        electing = threading.Thread(target=lead)
        electing.start()
        assert cluster.call(0, "init_producer", {"producer_id": 1}) == {"epoch": 0}
        electing.join()


@pytest.mark.usefixtures("patient")
def test_what_the_leader_itself_refuses_is_raised_soon(shard: MovingShard) -> None:
    with shard.cluster() as cluster:
        with pytest.raises(Unavailable, match="down"):
            cluster.call(0, "down", {})
        with pytest.raises(Rejected, match="unknown operation"):
            cluster.call(0, "nothing", {})
    assert shard.replicas[0].asked.count("down") <= 3


@pytest.mark.usefixtures("patient")
def test_a_topic_that_a_follower_does_not_know_yet_is_found(shard: MovingShard) -> None:
    shard.replicas[0].step_down()
    leader = shard.elect(1, 2)
    leader.create("new")
    # The handle takes replica 0 for the leader.
    assert shard.routes().topics.find("new").queues == 1
    with pytest.raises(Rejected, match="create it first"):
        shard.routes().topics.find("nowhere")


@pytest.mark.usefixtures("patient")
def test_a_handle_shows_topics_that_the_replica_that_led_before_has_lost(
    shard: MovingShard,
) -> None:
    with shard.cluster() as cluster:
        assert list(cluster.topics()) == ["t"]
        log = shard.replicas[0].kept()
        shard.replicas[0].step_down()
        # Its disk was lost: it is there again, at the same endpoint and empty.
        shard.replicas[0].copy(FakeBackend())
        shard.elect(1, 2, of=log)
        assert list(cluster.topics()) == ["t"]
        assert cluster.describe_topic("t")["messages"] == 0


def test_topics_are_found_when_the_known_leader_hangs(shard: MovingShard) -> None:
    shard.stop(0)
    shard.elect(1, 2)
    assert shard.routes().topics.find("t").queues == 2


@pytest.mark.usefixtures("patient")
def test_status_is_that_of_the_leader(shard: MovingShard) -> None:
    def mode(cluster: Cluster) -> Any:
        return cluster.status()["shards"][0]["mode"]

    with shard.cluster() as cluster:
        assert mode(cluster) == "leader"
        shard.replicas[0].step_down()
        shard.elect(1, 2)
        assert (mode(cluster), cluster.endpoints[0]) == ("leader", shard.endpoints[1])
        shard.kill(1)
        shard.elect(2, 3)
        assert (mode(cluster), cluster.endpoints[0]) == ("leader", shard.endpoints[2])


def test_a_lookup_never_raises_when_all_replicas_are_dead(shard: MovingShard) -> None:
    for number in range(3):
        shard.kill(number)
    with shard.cluster() as cluster:
        assert cluster.refresh() == {0: shard.endpoints[0]}
        with pytest.raises(RayMQError):
            cluster.call(0, "init_producer", {"producer_id": 1}, timeout_s=0.2)


# --- a replica whose certificate is refused -------------------------------------------------------


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """A certificate of an authority that no client trusts."""
    return make_certificates(tmp_path_factory.mktemp("stranger"))


@pytest.fixture
def refused(
    shard: MovingShard, stranger: Certificates, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MovingShard]:
    """The shard, of which replica 0 leads and serves with that certificate."""
    with monkeypatch.context() as node:
        for name, value in stranger.environment().items():
            node.setenv(name, value)
        server = serve(shard.replicas[0], host="127.0.0.1", port=0, token=TOKEN, tls=True)
    shard.endpoints[0] = f"tls://127.0.0.1:{server.port}"
    with closing(server):
        yield shard


@pytest.mark.usefixtures("patient")
def test_clients_leave_a_leader_whose_certificate_they_refuse(
    refused: MovingShard, make: Callable[..., Consumer]
) -> None:
    def lead() -> None:
        # The clients have found that the others answer, and no other one leads yet.
        for replica in refused.replicas[1:]:
            replica.wait_for(lambda replica=replica: replica.asked.count("leader") >= 3)
        refused.elect(2, 2)

    electing = threading.Thread(target=lead)
    electing.start()
    with closing(BatchSender(refused.routes())) as sender:
        receipt = sender.send("t", 0, batch(bodies(0, 1)))
        receipt.result(20)
    electing.join()
    assert [message.body for message in poll_all(make(), 1)] == bodies(0, 1)
    with refused.cluster() as cluster:
        assert cluster.call(0, "init_producer", {"producer_id": 1}) == {"epoch": 0}
    with refused.cluster() as cluster:
        status = cluster.status()
        assert (status["state"], cluster.endpoints[0]) == ("RUNNING", refused.endpoints[2])
        assert list(cluster.topics()) == ["t"]


@pytest.mark.usefixtures("patient")
def test_a_call_of_a_leader_whose_certificate_is_refused_says_why_when_its_time_is_up(
    refused: MovingShard,
) -> None:
    with refused.cluster() as cluster:
        with pytest.raises(Unavailable, match="not signed by an authority"):
            cluster.call(0, "init_producer", {"producer_id": 1}, timeout_s=0.5)
        (facts,) = cluster.status()["shards"]
        assert facts["state"] == "DOWN"
        assert "not signed by an authority" in facts["error"]


@pytest.mark.usefixtures("patient")
def test_a_client_that_refuses_all_certificates_fails_at_once(refused: MovingShard) -> None:
    for number in (1, 2):
        refused.endpoints[number] = refused.endpoints[0]
    with (
        refused.cluster() as cluster,
        closing(BatchSender(refused.routes())) as sender,
    ):
        for ask in (
            lambda: cluster.call(0, "init_producer", {"producer_id": 1}),
            lambda: sender.send("t", 0, batch(bodies(0, 1))).result(20),
            cluster.topics,
        ):
            with pytest.raises(Rejected, match="not signed by an authority"):
                ask()
