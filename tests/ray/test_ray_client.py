"""The Ray client API on a real cluster: from a driver, tasks, actors, and from outside through ray://."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import raymq
from raymq.client.consume.range_reader import read_range
from raymq.client.messages.columns import message_batch
from raymq.client.messages.received import ReceivedMessage
from raymq.client.produce.batch_sender import BatchSender
from raymq.client.produce.producer_config import IN_FLIGHT_BYTES
from raymq.client.transport.routes import Routes
from raymq.cluster.deploy import owned_ray, ray_host
from raymq.cluster.record.paths import ClusterPaths
from raymq.store.base.clock import Clock
from raymq.store.base.errors import RayMQError, Rejected, from_wire
from raymq.store.base.files import Files
from tests.support.batches import batch
from tests.support.history import History, Load, Read, faults
from tests.support.leftovers import disk_root
from tests.support.ray_environment import client_port, ray_environment
from tests.support.waiting import until

NAME = "through-ray"
LONG_POLLS = 16

#: a program that can reach only the port of Ray Client; it kills the CommitLog between its sends
OUTSIDE = """
import contextlib, json, os, signal, sys
import ray, raymq
from raymq.client.produce.batch_sender import BatchSender
from raymq.client.transport.routes import Routes
from raymq.store.base.errors import RayMQError, from_wire
from tests.support.batches import batch

url = sys.argv[1]
cluster = raymq.connect(url)
by_name = raymq.connect(cluster.name)
found = {"transports": [cluster.transport, by_name.transport]}
cluster.create_topic("outside", queues=1)
sent = []
with cluster.producer(linger_ms=1) as producer:
    for half in range(2):
        for number in range(100):
            sent.append(b"%d" % number if half else b"first %d" % number)
            future = producer.send("outside", sent[-1])
        if not half:
            os.kill(cluster.status()["shards"][0]["pid"], signal.SIGKILL)
    found["last"] = future.result(60).offset
with by_name.consumer("outside", group="g", start="earliest") as consumer:
    read = []
    while len(read) < len(sent):
        read += [message.body for message in consumer.poll(timeout=10)]
    consumer.commit()
    found["read as sent"] = read == sent and not consumer.poll(timeout=0.2)
    found["committed"] = consumer.committed()
with cluster.consumer("outside", start="earliest", sql="TAGS IS NOT NULL") as consumer:
    wanted = []
    while consumer.position(0) < len(sent):
        wanted += consumer.poll(timeout=0.1)
    found["wanted"] = len(wanted)
large = batch([b"x" * 4096] * 1024)
with contextlib.closing(BatchSender(Routes.of(cluster), producer_id=5)) as sender:
    receipts = [sender.send("outside", 0, large).result(60) for _ in range(4)]
with contextlib.closing(BatchSender(Routes.of(cluster), producer_id=5)) as sender:
    again = [sender.send("outside", 0, large).result(60) for _ in range(4)]
found["large"] = receipts[-1].last_offset
found["duplicates"] = [r.duplicates for r in again] == [1024] * 4
try:
    cluster.describe_topic("nowhere")
except RayMQError as error:
    found["error"] = [type(error).__name__, error.field]

@ray.remote(num_cpus=0)
def inside(handle):
    with handle.producer() as producer:
        return handle.transport, producer.send("outside", b"task").result(30).offset

found["task"] = ray.get(inside.remote(cluster), timeout=60)
ray.shutdown()
print(json.dumps(found))
"""


#: a program that sends large batches until it is killed
ENDLESS = """
import contextlib
import sys
import ray, raymq
from raymq.client.produce.batch_sender import BatchSender
from raymq.client.transport.routes import Routes
from tests.ray.test_ray_client import large

ray.init(sys.argv[1], log_to_driver=False, logging_level="ERROR")
cluster = raymq.connect(sys.argv[2], transport="ray")
with contextlib.closing(BatchSender(Routes.of(cluster), producer_id=21)) as sender:
    for number in range(100_000):
        sender.send("killed", 0, large(number))
"""


def large(number: int) -> pa.RecordBatch:
    """1 MiB in 64 rows, which goes through the object store."""
    return batch([b"%d %d " % (number, row) + bytes(16 << 10) for row in range(64)])


class World:
    """A cluster in a Ray of its own, and this process as a driver of it."""

    def __init__(self, flight: raymq.Cluster, paths: ClusterPaths) -> None:
        self.flight = flight
        self.paths = paths
        self.cluster = raymq.connect(NAME, transport="ray")

    def client_port(self) -> int:
        """The port of Ray Client, as Ray's head was started with."""
        owned = ray_host.load_owned(self.paths, Files())
        assert owned is not None
        return client_port(owned)

    def bodies(self, topic: str) -> list[bytes]:
        """All of a topic with one queue, over Flight."""
        (facts,) = self.flight.describe_topic(topic)["queues"]
        found: list[bytes] = []
        for records in read_range(self.flight, topic, 0, 0, 0, facts["max_offset"]):
            found += message_batch(0, records).column("body").to_pylist()
        return found


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    import ray

    # Not pytest's directory: it is under /tmp, which a cluster that is meant to last refuses.
    place = Path(tempfile.mkdtemp(prefix=".raymq-test-", dir=disk_root()))
    paths = ClusterPaths(place / "data")
    try:
        with ray_environment(place, lean=False):
            try:
                flight = raymq.start(place / "data", name=NAME, segment_size_bytes=16 << 20)
                ray.init(flight.ray_address, log_to_driver=False, logging_level="ERROR")
                world = World(flight, paths)
                with world.cluster:
                    yield world
                flight.close()
            finally:
                ray.shutdown()
                owned_ray.stop_owned(paths, files=Files(), clock=Clock())
    finally:
        shutil.rmtree(place)


def test_a_driver_does_everything_through_actor_calls(world: World) -> None:
    cluster = world.cluster
    assert cluster.transport == "ray"
    assert cluster.create_topic("driver", queues=3)
    assert not world.flight.create_topic("driver", queues=3)
    with cluster.producer() as producer:
        sent = [producer.send("driver", b"%d" % n, queue_id=n % 3) for n in range(30)]
        assert [future.result(20).offset for future in sent] == [n // 3 for n in range(30)]
    assert cluster.describe_topic("driver") == world.flight.describe_topic("driver")
    with cluster.consumer("driver", group="g", start="earliest") as consumer:
        read: list[bytes] = []
        while len(read) < 30:
            read += [message.body for message in consumer.poll(timeout=10)]
        consumer.commit()
    assert sorted(read) == sorted(b"%d" % n for n in range(30))
    with world.flight.consumer("driver", group="g") as consumer:
        assert consumer.committed() == {0: 10, 1: 10, 2: 10}
    assert cluster.status()["state"] == "RUNNING"


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [({"tags": "b || c"}, range(1, 30)), ({"sql": "n > 27 OR TAGS = 'a'"}, (0, 28, 29))],
)
def test_a_filter_works_through_actor_calls(
    world: World, wanted: dict[str, str], expected: Sequence[int]
) -> None:
    topic = f"filtered-by-{next(iter(wanted))}"
    world.cluster.create_topic(topic, queues=1)
    with world.cluster.producer() as producer:
        for number in range(30):
            tag = "a" if not number else "bc"[number % 2]
            producer.send(topic, b"%d" % number, tag=tag, properties={"n": str(number)})
    with world.cluster.consumer(topic, start="earliest", **wanted) as consumer:
        read: list[int] = []
        while consumer.position(0) < 30:
            read += [int(message.body) for message in consumer.poll(timeout=0.1)]
    assert read == list(expected)
    with pytest.raises(Rejected, match="character 4"):
        world.cluster.consumer(topic, start="earliest", sql="n >")


def test_a_body_of_6_mib_passes_by_either_transport_when_the_cluster_takes_it(
    world: World,
) -> None:
    world.flight.create_topic("large", queues=1)
    bodies = [os.urandom(6 << 20) for _ in range(2)]
    with contextlib.ExitStack() as stack:
        producers = [
            stack.enter_context(cluster.producer(max_message_bytes=8 << 20))
            for cluster in (world.flight, world.cluster)
        ]
        for producer, body in zip(producers, bodies, strict=True):
            with pytest.raises(Rejected, match="raise max_message_bytes of the store"):
                producer.send("large", body).result(60)
        world.flight.set_config({"max_message_bytes": 8 << 20})
        for offset, (producer, body) in enumerate(zip(producers, bodies, strict=True)):
            assert producer.send("large", body).result(60).offset == offset
    for cluster in (world.flight, world.cluster):
        with cluster.consumer("large", start="earliest") as consumer:
            read: list[bytes] = []
            while len(read) < 2:
                read += [message.body for message in consumer.poll(timeout=10)]
        assert read == bodies


def test_what_a_group_sends_back_comes_again_or_ends_in_its_dead_letter_queue(
    world: World,
) -> None:
    world.flight.create_topic("work", queues=2)
    with world.flight.producer() as producer:
        for number in range(2):
            producer.send("work", b"%d" % number, queue_id=number).result(20)
    for cluster in (world.cluster, world.flight):
        with cluster.consumer("work", group="back", start="earliest") as consumer:
            got: list[ReceivedMessage] = []
            while len(got) < 2:
                got += consumer.poll(timeout=10)
            by_body = {message.body: message for message in got}
            assert consumer.send_back(by_body[b"0"], delay_level=1) == "%RETRY%back"
            assert consumer.send_back(by_body[b"1"], delay_level=-1) == "%DLQ%back"
    for topic, body in (("%DLQ%back", b"1"), ("%RETRY%back", b"0")):
        with world.cluster.consumer(topic, start="earliest") as consumer:
            found: list[bytes] = []
            while len(found) < 2:
                found += [message.body for message in consumer.poll(timeout=10)]
        assert found == [body, body]


def test_a_message_for_later_is_read_after_its_time_and_not_before(world: World) -> None:
    world.cluster.create_topic("later", queues=2)
    at = Clock().now_ms() + 1_500
    with world.cluster.producer() as producer:
        later = producer.send("later", b"later", queue_id=1, deliver_at_ms=at)
        assert later.result(20).topic == "rmq_sys_wheel_timer"
        assert producer.send("later", b"now", queue_id=1).result(20).offset == 0
    read: list[ReceivedMessage] = []
    with world.flight.consumer("later", start="earliest") as consumer:
        while len(read) < 2:
            read += consumer.poll(timeout=10)
    assert [(message.body, message.offset) for message in read] == [(b"now", 0), (b"later", 1)]
    assert at <= read[1].store_time_ms <= at + 10_000
    assert not read[1].properties


def test_messages_are_found_and_timers_cancelled_by_either_transport(world: World) -> None:
    world.flight.create_topic("found", queues=2)
    with world.cluster.producer() as producer:
        for number in range(6):
            sent = producer.send(
                "found", b"%d" % number, queue_id=number % 2, index_keys=(f"k{number % 3}",)
            )
            receipt = sent.result(20)
        in_an_hour = Clock().now_ms() + 3_600_000
        timers = [
            producer.send("found", b"later", deliver_at_ms=in_an_hour).result(20) for _ in range(2)
        ]
        assert producer.cancel(timers[0])
    with world.flight.producer() as producer:
        assert producer.cancel(timers[1])

    at = raymq.at_ms(receipt.store_time_ms)
    for cluster in (world.cluster, world.flight):
        assert [each.body for each in cluster.query("found", key="k1")] == [b"1", b"4"]
        found = cluster.query("found", between=(None, None))
        assert [each.body for each in found] == [b"%d" % number for number in range(6)]
        assert cluster.message("found", 1, 2) == found[5]
        assert cluster.message_by_id(found[3].message_id) == found[3]
        assert cluster.offsets_for_times("found", at, "last")[1] == 2
        with cluster.consumer("found", start=at) as consumer:
            assert consumer.seek_time(at)[1] == 2


def test_tasks_and_actors_use_the_handle_that_they_are_given(world: World) -> None:
    import ray

    @ray.remote(num_cpus=0)
    def produce(cluster: raymq.Cluster) -> tuple[str, int]:
        with cluster.producer() as producer:
            return cluster.transport, producer.send("inside", b"task").result(30).offset

    class Reader:
        def __init__(self, cluster: raymq.Cluster) -> None:
            self.consumer = cluster.consumer("inside", start="earliest")

        def read(self) -> list[bytes]:
            return [message.body for message in self.consumer.poll(timeout=10)]

    world.cluster.create_topic("inside", queues=1)
    assert ray.get(produce.remote(world.cluster), timeout=60) == ("ray", 0)
    reader: Any = ray.remote(num_cpus=0)(Reader)
    actor = reader.remote(world.cluster)
    assert ray.get(actor.read.remote(), timeout=60) == [b"task"]
    ray.kill(actor)


@pytest.mark.thorough
def test_a_serve_deployment_sends_and_reads(world: World) -> None:
    from ray import serve

    @serve.deployment(num_replicas=1, ray_actor_options={"num_cpus": 0})
    class Orders:
        def __init__(self, name: str) -> None:
            self.cluster = raymq.connect(name, transport="ray")
            self.producer = self.cluster.producer(linger_ms=1)

        def put(self, body: bytes) -> tuple[str, int]:
            receipt = self.producer.send("served", body).result(30)
            return self.cluster.transport, receipt.offset

        def all(self, count: int) -> list[bytes]:
            found: list[bytes] = []
            with self.cluster.consumer("served", start="earliest") as consumer:
                while len(found) < count:
                    found += [message.body for message in consumer.poll(timeout=10)]
            return found

    world.cluster.create_topic("served", queues=1)
    serve.start(proxy_location="Disabled")
    try:
        application = Orders.bind(NAME)  # type: ignore[attr-defined]
        handle: Any = serve.run(application, name="orders", route_prefix=None)
        answers = [handle.put.remote(b"%d" % number) for number in range(20)]
        found = [answer.result(timeout_s=60) for answer in answers]
        assert sorted(found) == [("ray", offset) for offset in range(20)]
        read = handle.all.remote(20).result(timeout_s=60)
        assert sorted(read) == sorted(b"%d" % number for number in range(20))
        assert read == world.bodies("served")
    finally:
        serve.shutdown()


def test_the_same_rows_of_the_same_producer_are_stored_once(world: World) -> None:
    world.cluster.create_topic("once", queues=1)
    rows = [batch([b"%d" % (10 * part + row) for row in range(10)]) for part in range(20)]
    found = []
    for cluster in (world.cluster, world.flight, world.cluster):
        with contextlib.closing(BatchSender(Routes.of(cluster), producer_id=11)) as sender:
            futures = [sender.send("once", 0, part) for part in rows]
            found.append([future.result(30) for future in futures])
    assert [receipt.duplicates for receipt in found[0]] == [0] * 20
    for again in found[1:]:
        assert [receipt.duplicates for receipt in again] == [10] * 20
        assert [r.first_offset for r in again] == [r.first_offset for r in found[0]]
    assert world.bodies("once") == [b"%d" % n for n in range(200)]


def send_large(cluster: raymq.Cluster) -> None:
    with cluster.producer(max_message_bytes=64 << 20) as producer:
        producer.send("errors", b"x" * (8 << 20)).result(30)


def send_gap(cluster: raymq.Cluster) -> None:
    connection = Routes.of(cluster).connect(0)
    with contextlib.closing(connection.put_stream()) as stream:
        head = {"id": 1, "topic": "errors", "queue": 0, "pid": 3, "epoch": 0, "seq": 0}
        stream.send({**head, "acks": "quorum"}, batch([b"a"]))
        stream.send({**head, "id": 2, "seq": 9, "acks": "quorum"}, batch([b"b"]))
        acks: list[dict[str, Any]] = []
        while len(acks) < 2:
            acks += stream.receive()
    raise from_wire(acks[1]["error"])


def read_beyond(cluster: raymq.Cluster) -> None:
    with cluster.consumer("errors", start=10_000) as consumer:
        consumer.poll(timeout=20)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda cluster: cluster.describe_topic("nowhere"),
        lambda cluster: cluster.create_topic("errors", queues=7),
        lambda cluster: cluster.create_topic("bad name", queues=1),
        lambda cluster: cluster.call(0, "nothing", {}),
        lambda cluster: cluster.call(0, "queue_ranges", {"what": 1}),
        send_large,
        send_gap,
        read_beyond,
    ],
)
def test_errors_are_the_same_as_over_flight(
    world: World, wrong: Callable[[raymq.Cluster], object]
) -> None:
    world.flight.create_topic("errors", queues=1)
    seen = []
    for cluster in (world.flight, world.cluster):
        with pytest.raises(RayMQError) as caught:
            wrong(cluster)
        seen.append((type(caught.value), caught.value.message, caught.value.fields))
    assert seen[0] == seen[1]


def test_long_polls_do_not_delay_a_send(world: World) -> None:
    world.cluster.create_topic("busy", queues=1)
    world.cluster.create_topic("idle", queues=1)
    with contextlib.ExitStack() as stack:
        for _ in range(LONG_POLLS):
            stack.enter_context(world.cluster.consumer("idle", start="latest"))
        producer = stack.enter_context(world.cluster.producer(linger_ms=0))
        times = []
        for _ in range(50):
            began = time.monotonic()
            producer.send("busy", b"now").result(20)
            times.append(time.monotonic() - began)
    # A send queued after a long poll would wait for its ten seconds.
    assert max(times) < 5.0


def test_kill_9_of_the_commit_log_loses_and_doubles_nothing(world: World) -> None:
    queues, history = 2, History()
    world.cluster.create_topic("load", queues=queues)
    with Load(world.cluster, "load", history, producers=2, queues=queues) as load:
        until(lambda: len(history.acked()) == 2 * queues, load.pause)
        os.kill(world.flight.status()["shards"][0]["pid"], signal.SIGKILL)
        sent = history.sent()
        until(lambda: history.acked_beyond(sent), load.pause)
        load.stop()
    reads: list[Read] = []
    for facts in world.cluster.describe_topic("load")["queues"]:
        queue, high = facts["queue_id"], facts["max_offset"]
        for records in read_range(world.cluster, "load", queue, 0, 0, high):
            rows = message_batch(0, records)
            pairs = zip(rows["offset"].to_pylist(), rows["body"].to_pylist(), strict=True)
            reads += [Read(queue, offset, text) for offset, text in pairs]
    assert faults(history.acked(), reads, history.sent()) == []
    assert sum(map(len, history.acked().values())) == len(reads)


def test_a_client_killed_with_large_batches_under_way_leaves_a_prefix_and_no_objects(
    world: World,
) -> None:
    root = Path(__file__).resolve().parents[2]
    world.cluster.create_topic("killed", queues=1)
    killed = subprocess.Popen(
        [sys.executable, "-c", ENDLESS, world.flight.ray_address or "", NAME],
        env={**os.environ, "PYTHONPATH": str(root)},
        cwd=root,
    )

    def stored() -> int:
        (facts,) = world.cluster.describe_topic("killed")["queues"]
        return int(facts["max_offset"])

    try:
        until(lambda: stored() >= 10 * 64, lambda: threading.Event().wait(0.05))
    finally:
        killed.kill()
        killed.wait()
    # A sender with the same id and rows finds the prefix and continues after it.
    with contextlib.closing(BatchSender(Routes.of(world.cluster), producer_id=21)) as sender:
        # What was on its way when the client was killed may still be stored.
        count = stored() // 64 + 2 * IN_FLIGHT_BYTES // large(0).nbytes
        futures = [sender.send("killed", 0, large(number)) for number in range(count)]
        receipts = [future.result(60) for future in futures]
    assert [receipt.first_offset for receipt in receipts] == list(range(0, count * 64, 64))
    assert stored() == count * 64
    assert receipts[0].duplicates == 64
    assert receipts[-1].duplicates == 0
    until(lambda: objects() == 0, lambda: threading.Event().wait(0.1))


def objects() -> int:
    """Objects in the object store of this process's Ray."""
    import ray
    from ray._private import internal_api

    # Other tests' Rays may run beside it.
    address = ray.get_runtime_context().gcs_address
    summary = internal_api.memory_summary(address=address, stats_only=True)
    found = re.search(r"(\d+) objects", summary)
    assert found is not None
    return int(found[1])


def test_a_consumer_that_waits_is_closed_at_once(world: World) -> None:
    world.cluster.create_topic("idle", queues=1)
    consumer = world.cluster.consumer("idle", start="latest")
    assert consumer.poll(timeout=0.2) == []
    closed = threading.Thread(target=consumer.close)
    began = time.monotonic()
    closed.start()
    closed.join(20)
    # Not by the end of the ten seconds that the shard holds the poll.
    assert time.monotonic() - began < 5.0


@pytest.mark.thorough
def test_from_outside_everything_goes_through_the_port_of_ray_client(world: World) -> None:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", OUTSIDE, f"ray://127.0.0.1:{world.client_port()}"],
        env={**os.environ, "PYTHONPATH": str(root), "RAYMQ_HOME": str(root / "none")},
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["transports"] == ["ray", "ray"]
    assert found["last"] == 199
    assert found["read as sent"]
    assert found["committed"] == {"0": 200}
    assert found["wanted"] == 0
    assert found["duplicates"]
    assert found["large"] == 200 + 4 * 1024 - 1
    assert found["error"] == ["Rejected", "topic"]
    assert found["task"] == ["ray", 200 + 4 * 1024]
