"""Three replicas under load while whole replicas stand still, die, lose power or disks, and rot: no promise is broken.

Also clients that hold other things than a producer's stream, a topic that grows, a clock that is wrong, and Ray itself.
How a leader is lost and replaced is in test_failover.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import raymq
from raymq.client.consume.consumer_config import ReadFrom
from raymq.client.consume.range_reader import read_range
from raymq.client.messages.columns import message_batch
from raymq.client.produce.batch_sender import BatchSender
from raymq.client.transport.routes import Routes
from raymq.cluster.deploy import process_tree, ray_host
from raymq.store.base.clock import Clock
from raymq.store.base.errors import RayMQError
from raymq.store.base.files import Files
from raymq.store.base.format import TIMER_TOPIC
from tests.support.batches import batch
from tests.support.history import History, Load, Read, Reader, faults
from tests.support.lean_ray import LEAN_WITH_CLIENT
from tests.support.power_loss import TAILS, lose_power, read_ends
from tests.support.ray_environment import client_port
from tests.support.reference_decoder import decode_log
from tests.support.replicated_shard import (
    ASIDE,
    FILE_BYTES,
    ROLES,
    TOPIC,
    LongestGap,
    ReplicatedShard,
    Target,
    check,
    check_logs,
    check_to_the_end,
    follower_of,
    is_complete,
    kill,
    kill_leader,
    pause,
    pids_of,
    standing_still,
    started_load,
    started_readers,
    started_shard,
    wait_for_leader,
    wait_for_lease,
    wait_for_writes,
    wait_until_complete,
)
from tests.support.skewed_clock import SkewedClock
from tests.support.waiting import until

pytestmark = pytest.mark.faults


NAME = "three"
#: longer than the longest timeout of replication, `ElectionLimits.stream_silence_ms`
STOPPED_S = 11.0
#: without a follower no receipt waits for a timeout; the rest is a busy machine
GAP_MS_MAX = 5_000
#: messages at the begin of a queue; one of them rots; readers that choose a follower by chance
FIRST, ROTTEN, READERS = 30, 5, 6
#: so many files of the log, and its first one is none of those that a start reads
OLD_FILES = 8
#: of each of two threads that put into a Queue
ITEMS = 60
HOUR_MS = 3_600_000
#: of all machines at once
POWER_LOSSES = int(os.environ.get("RAYMQ_POWER_LOSSES", "1"))
#: small messages, and how many go together
MILLION, BATCH_ROWS = 1_000_000, 5_000


@pytest.fixture(scope="module")
def clocks() -> Iterator[SkewedClock]:
    with tempfile.TemporaryDirectory() as place:
        yield SkewedClock(Path(place) / "clocks")


@pytest.fixture(scope="module")
def shard(clocks: SkewedClock) -> Iterator[ReplicatedShard]:
    with started_shard(3, NAME, {**clocks.variables(), **LEAN_WITH_CLIENT}) as world:
        yield world


@pytest.fixture(scope="module")
def load(shard: ReplicatedShard) -> Iterator[Load]:
    with started_load(shard.cluster) as running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def readers(shard: ReplicatedShard, load: Load) -> Iterator[list[Reader]]:
    with started_readers(shard.cluster) as running:
        yield running


@pytest.fixture
def driver(shard: ReplicatedShard) -> Iterator[Any]:
    """`ray`, with this process as a driver."""
    owned = shard.owned()
    with ray_host.session(ray_host.RayTarget(address=owned.address, owned=owned)) as ray:
        yield ray


@pytest.mark.thorough
def test_a_leader_whose_processes_all_stood_still_for_longer_than_every_timeout_follows(
    shard: ReplicatedShard, load: Load
) -> None:
    leader = wait_for_leader(shard)
    before = pids_of(shard, load, leader)
    with standing_still(shard, load, leader):
        successor = wait_for_leader(shard, but=leader)
        wait_for_writes(load)
        # Ends early only when a producer fails.
        load.ended.wait(STOPPED_S)
        epoch = shard.status(successor)["epoch"]
        wait_for_writes(load)
    wait_until_complete(shard, leader)
    wait_for_writes(load)
    # It asked for no vote that deposed its successor, and its CommitLog is the one that stood still.
    assert shard.leader() == successor
    assert shard.status(successor)["epoch"] == epoch
    assert shard.status(leader)["pid"] == before["commit_log"]


def test_writes_come_back_after_kill_9_of_all_commit_logs_at_once(
    shard: ReplicatedShard, load: Load
) -> None:
    old = {each: wait_for_lease(shard, load, each, "commit_log") for each in shard.replicas}
    kill([*old.values()])
    wait_for_writes(load)
    for replica, pid in old.items():
        wait_for_lease(shard, load, replica, "commit_log", but=pid)


@pytest.mark.thorough
def test_writes_come_back_after_kill_9_of_all_nine_processes_at_once(
    shard: ReplicatedShard, load: Load
) -> None:
    old = {each: pids_of(shard, load, each) for each in shard.replicas}
    kill([pid for pids in old.values() for pid in pids.values()])
    wait_for_writes(load)
    for replica, pids in old.items():
        for role, pid in pids.items():
            wait_for_lease(shard, load, replica, role, but=pid)


@pytest.mark.parametrize("seed", range(POWER_LOSSES))
def test_every_acknowledged_message_is_there_after_a_power_loss_of_all_three_machines(
    shard: ReplicatedShard, load: Load, seed: int
) -> None:
    chance = random.Random(seed)
    tails = TAILS[seed % 3 :] + TAILS[: seed % 3]
    old = {each: pids_of(shard, load, each) for each in shard.replicas}
    roots = {each: shard.paths.replica(0, each) for each in shard.replicas}
    with contextlib.ExitStack() as stack:
        targets = {
            (replica, role): stack.enter_context(Target(pid))
            for replica, pids in old.items()
            for role, pid in pids.items()
        }
        # The flushers first: each log grows, and no disk has what comes now.
        for replica in shard.replicas:
            targets[replica, "group_commit"].send(signal.SIGSTOP)
        until(lambda: all(read_ends(root).unsynced > 0 for root in roots.values()), load.pause)
        for role in ("replication", "commit_log"):
            for replica in shard.replicas:
                targets[replica, role].send(signal.SIGSTOP)
        until(lambda: all(each.stands_still() for each in targets.values()), pause)
        lost = [lose_power(roots[each], chance, tails[each]) for each in shard.replicas]
        for target in targets.values():
            target.send(signal.SIGKILL)

    print(f"{tails} of {[ends.unsynced for ends in lost]} bytes that were not synced")
    assert all(ends.unsynced > 0 for ends in lost)
    for replica, pids in old.items():
        wait_for_lease(shard, load, replica, "commit_log", but=pids["commit_log"])
    wait_for_writes(load)
    until(lambda: all(shard.says(each, is_complete) for each in shard.replicas), pause)
    check_logs(shard)
    assert check(shard, load.history) > 0


def test_writes_go_on_while_each_process_of_a_follower_is_killed(
    shard: ReplicatedShard, load: Load
) -> None:
    leader, follower = wait_for_leader(shard), follower_of(shard)
    epoch = shard.status(leader)["epoch"]
    longest = LongestGap(load.history)
    for role in ROLES:
        old = wait_for_lease(shard, load, follower, role)
        kill([old])
        wait_for_writes(load)
        wait_for_lease(shard, load, follower, role, but=old)
        wait_until_complete(shard, follower)
    gap_ms = longest.stop()
    print(f"without a receipt for {gap_ms} ms at most")
    assert (shard.leader(), shard.status(leader)["epoch"]) == (leader, epoch)
    assert gap_ms < GAP_MS_MAX


def test_a_follower_whose_directory_is_gone_gets_everything_again_by_itself(
    shard: ReplicatedShard, load: Load
) -> None:
    leader, follower = wait_for_leader(shard), follower_of(shard)
    root = shard.paths.replica(0, follower)
    gone = root.with_name("gone")
    pids = pids_of(shard, load, follower)
    kill([*pids.values()])
    # In one step, as a disk goes: Ray has begun the next processes.
    root.rename(gone)
    shutil.rmtree(gone)
    wait_for_writes(load)
    for role, pid in pids.items():
        wait_for_lease(shard, load, follower, role, but=pid)
    wait_until_complete(shard, follower)
    assert shard.leader() == leader
    check_logs(shard)
    # It counts: with it alone a leader confirms.
    other = next(each for each in shard.replicas if each not in (leader, follower))
    with standing_still(shard, load, other):
        wait_for_writes(load)


def flip(path: Path, place: int) -> None:
    """Change a byte in a file."""
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 0x55]))


def first_bodies(shard: ReplicatedShard, read_from: ReadFrom) -> list[bytes]:
    """The first messages of a queue, as a new reader gets them."""
    found: list[bytes] = []
    for records in read_range(shard.cluster, TOPIC, 0, 0, 0, FIRST, read_from=read_from):
        found += message_batch(0, records).column("body").to_pylist()
    return found[:FIRST]


@pytest.mark.thorough
def test_bytes_that_rotted_on_a_follower_reach_no_reader_and_are_mended_by_reads_and_its_scrub(
    shard: ReplicatedShard, load: Load
) -> None:
    # A start reads the newest files, and refuses damage there: the first file must be older.
    with shard.cluster.producer() as producer:
        while shard.status(wait_for_leader(shard))["confirmed"] < OLD_FILES * FILE_BYTES:
            producer.send(ASIDE, bytes(100_000)).result(60)
    follower = follower_of(shard)
    wait_until_complete(shard, follower)
    name = f"commitlog/{0:020d}"
    path, twin = (shard.paths.replica(0, each) / name for each in (follower, shard.leader()))
    bodies = first_bodies(shard, "leader")
    flip(path, path.read_bytes().index(bodies[ROTTEN]) + 100)
    assert path.read_bytes() != twin.read_bytes()
    for _ in range(READERS):
        assert first_bodies(shard, "nearest") == bodies
    # The readers have asked the follower to check these records.
    until(lambda: path.read_bytes() == twin.read_bytes(), pause)

    flip(path, path.read_bytes().index(bodies[ROTTEN + 1]) + 100)
    # The next pass of its scrub is due in hours. Without the note of the last one it begins with the process.
    old = wait_for_lease(shard, load, follower, "commit_log")
    (shard.paths.replica(0, follower) / "raymq" / "scrub").unlink(missing_ok=True)
    kill([old])
    wait_for_lease(shard, load, follower, "commit_log", but=old)
    until(lambda: path.read_bytes() == twin.read_bytes(), pause)
    wait_until_complete(shard, follower)
    until(lambda: shard.says(follower, lambda facts: "repair" not in facts["failures"]), pause)
    assert shard.status(follower)["repair"]["files"] == 1
    assert first_bodies(shard, "nearest") == bodies
    check_logs(shard)
    wait_for_writes(load)


@pytest.mark.thorough
def test_a_queue_gives_each_item_once_although_leaders_are_killed(
    shard: ReplicatedShard, load: Load, driver: Any
) -> None:
    items = raymq.Queue("items", cluster=shard.cluster)
    got: list[list[int]] = []
    failures: list[BaseException] = []
    killed = threading.Event()

    def run(work: Any) -> threading.Thread:
        def guarded() -> None:
            try:
                work()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=guarded, daemon=True)
        thread.start()
        return thread

    def put(worker: int) -> None:
        for number in range(ITEMS):
            if number == ITEMS - 10:
                # So some puts and gets are after the last kill.
                killed.wait(60)
            items.put([worker, number])

    def get() -> None:
        while len(got) < 2 * ITEMS:
            got.append(items.get(timeout=60))

    threads = [run(lambda worker=worker: put(worker)) for worker in range(2)] + [run(get)]
    for count in (20, 50):
        until(lambda: len(got) >= count or bool(failures), pause)  # noqa: B023
        kill_leader(shard)
        wait_for_writes(load)
    killed.set()
    for thread in threads:
        thread.join(90)
    assert failures == []
    # One getter: the items of each putter come in its order, each once.
    for worker in range(2):
        assert [number for each, number in got if each == worker] == list(range(ITEMS))
    assert items.empty()
    assert shard.cluster.describe_topic("items")["messages"] == 2 * ITEMS
    items.shutdown()


@pytest.mark.thorough
def test_clients_that_call_actors_lose_and_double_nothing_although_leaders_are_killed(
    shard: ReplicatedShard, load: Load, driver: Any
) -> None:
    history, queues = History(), 2
    with raymq.connect(NAME, transport="ray") as cluster:
        assert cluster.transport == "ray"
        cluster.create_topic("calls", queues=queues)
        with (
            Load(cluster, "calls", history, producers=2, queues=queues) as calling,
            Reader(cluster, "calls") as reader,
        ):
            until(lambda: len(history.acked()) == 2 * queues, calling.pause)
            for _ in range(2):
                kill_leader(shard)
                wait_for_writes(calling)
            calling.stop()
            count = check(shard, history, topic="calls")
            until(lambda: len(reader.got) >= count or reader.failed, pause)
            reader.stop()
        assert check(shard, history, seen=[reader.got], topic="calls") == count > 0
    wait_for_writes(load)


@pytest.mark.thorough
def test_a_client_that_reaches_only_the_port_of_ray_client_loses_and_doubles_nothing(
    shard: ReplicatedShard, load: Load
) -> None:
    queues = 2
    shard.cluster.create_topic("outside", queues=queues)
    url = f"ray://127.0.0.1:{client_port(shard.owned())}/{NAME}"
    command = [sys.executable, "-m", "tests.support.ray_client_load", url, "outside", str(queues)]
    owned = shard.owned()
    environment = {
        **shard.environment,
        # Nothing of the cluster but Ray's token.
        "RAYMQ_HOME": str(shard.paths.root / "none"),
        "RAY_AUTH_MODE": owned.auth_mode,
    }
    outside = subprocess.Popen(
        command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with outside:
        assert outside.stdin is not None
        assert outside.stdout is not None
        try:
            assert outside.stdout.readline() == "writes\n"
            for _ in range(2):
                kill_leader(shard)
                print(file=outside.stdin, flush=True)
                assert outside.stdout.readline() == "writes again\n"
            outside.stdin.close()
            found = json.loads(outside.stdout.readline())
        finally:
            outside.kill()

    assert found["transport"] == "ray"
    acked: dict[tuple[int, int], dict[int, int]] = {}
    for producer, queue, number, offset in found["acked"]:
        acked.setdefault((producer, queue), {})[number] = offset
    sent = {(producer, queue): count for producer, queue, count in found["sent"]}
    got = [Read(queue, offset, body.encode()) for queue, offset, body in found["got"]]
    stored = list(shard.read("outside"))
    assert faults(acked, stored, sent, seen=[got]) == []
    assert len(got) == len(stored) == sum(map(len, acked.values())) > 0
    wait_for_writes(load)


@pytest.mark.thorough
def test_queues_that_were_added_are_there_although_the_leader_is_killed_directly_after_it(
    shard: ReplicatedShard, load: Load
) -> None:
    cluster, history = shard.cluster, History()
    cluster.create_topic("grown", queues=2)
    with Load(cluster, "grown", history, producers=1, queues=2) as before:
        until(lambda: len(history.acked()) == 2, before.pause)
        assert cluster.add_queues("grown", 4, break_key_order=True)
        kill_leader(shard)
        assert len(cluster.describe_topic("grown")["queues"]) == 4
        # Once more, with the kill at the same time: whether the answer arrives or not, the queues are there.
        killer = threading.Thread(target=kill_leader, args=(shard,))
        killer.start()
        cluster.add_queues("grown", 6, break_key_order=True)
        killer.join()
        assert not cluster.add_queues("grown", 6, break_key_order=True)
        wait_for_writes(before)
        before.stop()
    with Load(cluster, "grown", history, producers=1, queues=6) as after:
        until(lambda: len(history.acked()) == 6, after.pause)
        wait_for_writes(after)
        after.stop()
    assert check(shard, history, topic="grown") > 0
    wait_for_writes(load)


@pytest.mark.thorough
def test_cancelled_timers_stay_cancelled_although_the_leader_is_killed_directly_after_it(
    shard: ReplicatedShard,
) -> None:
    shard.cluster.create_topic("timers", queues=1)
    with shard.cluster.producer() as producer:
        at_ms = Clock().now_ms() + 4_000
        sent = [producer.send("timers", b"%d" % n, deliver_at_ms=at_ms) for n in range(6)]
        receipts = [each.result(30) for each in sent]
        in_time = [producer.cancel(each) for each in receipts[::2]]
        kill_leader(shard)
        # As after an answer that was lost: the new leader says the same.
        assert [producer.cancel(each) for each in receipts[::2]] == in_time
        last = producer.send("timers", b"last", deliver_at_ms=Clock().now_ms() + 8_000)
        assert last.result(30).topic == TIMER_TOPIC

    wanted = {b"%d" % n for n in range(6) if n % 2 or not in_time[n // 2]} | {b"last"}
    found: list[bytes] = []
    with shard.cluster.consumer("timers", start="earliest") as consumer:
        while b"last" not in found:
            found += [message.body for message in consumer.poll(timeout=60)]
    assert sorted(found) == sorted(wanted)
    assert any(in_time)
    assert [
        message.body for message in shard.cluster.query("timers", between=(None, None))
    ] == found


def test_store_times_never_go_back_although_a_leaders_clock_was_an_hour_ahead(
    shard: ReplicatedShard, load: Load, clocks: SkewedClock
) -> None:
    leader = wait_for_leader(shard)
    clocks.set(pids_of(shard, load, leader).values(), HOUR_MS)
    wait_for_writes(load)
    successor = follower_of(shard)
    until(lambda: shard.says(successor, is_complete), pause)
    # A hand-over, because the next process of one that is killed would have another pid and a true clock.
    shard.call(leader, "move_leader", {"replica": successor})
    wait_for_leader(shard, but=leader)
    wait_for_writes(load)
    until(lambda: shard.says(leader, is_complete), pause)
    shard.call(wait_for_leader(shard), "move_leader", {"replica": leader})
    until(lambda: shard.leader() == leader, pause)
    wait_for_writes(load)
    clocks.set([], 0)
    wait_for_writes(load)

    confirmed = check_logs(shard)
    records = decode_log(shard.commit_log(leader, confirmed), FILE_BYTES)
    times = [record["store_time_ms"] for record in records]
    assert times == sorted(times)
    ahead_ms = times[-1] - Clock().now_ms()
    assert HOUR_MS - 600_000 < ahead_ms <= HOUR_MS


@pytest.mark.thorough
def test_a_follower_a_million_messages_behind_is_complete_again_while_writes_go_on(
    shard: ReplicatedShard, load: Load
) -> None:
    queues, count = 4, MILLION // BATCH_ROWS
    shard.cluster.create_topic("million", queues=queues)
    follower, clock = follower_of(shard), Clock()
    old = pids_of(shard, load, follower)
    rows = batch([b"%099d " % number for number in range(BATCH_ROWS)])
    with (
        standing_still(shard, load, follower),
        contextlib.closing(BatchSender(Routes.of(shard.cluster), producer_id=1)) as sender,
    ):
        sent = [sender.send("million", number % queues, rows) for number in range(count)]
        for future in sent:
            future.result(60)
        kill(old.values())
    began_ms = clock.monotonic_ms()
    wait_until_complete(shard, follower)
    print(f"complete again after {clock.monotonic_ms() - began_ms} ms")
    wait_for_writes(load)
    assert shard.cluster.describe_topic("million")["messages"] == MILLION
    check_logs(shard)


def test_every_acknowledged_message_survived_and_all_logs_are_the_same_bytes(
    shard: ReplicatedShard, load: Load
) -> None:
    check_logs(shard)
    assert check(shard, load.history) > 0


def server(shard: ReplicatedShard, name: str) -> int:
    """The pid of a server of the shard's Ray."""
    (found,) = [
        pid
        for pid in process_tree.members(shard.owned().family, Files())
        if Path(f"/proc/{pid}/comm").read_text().strip() == name
    ]
    return found


@pytest.mark.thorough
def test_a_leader_is_elected_without_rays_gcs_and_all_is_there_in_the_next_ray(
    shard: ReplicatedShard, load: Load, readers: list[Reader]
) -> None:
    """The last test: it ends the Ray.

    The raylet is left alone. Ray's workers end themselves when that of their node has ended, so on one node all
    replicas would end with it. `ray start` stands still for the same reason: it would end the raylet when the GCS has
    ended. As on a node that has lost the machine with the GCS, the processes go on for about a minute, which is Ray's
    own limit.
    """
    leader = wait_for_leader(shard)
    pid = wait_for_lease(shard, load, leader, "commit_log")
    with Target(shard.owned().pid) as head, Target(server(shard, "gcs_server")) as gcs:
        head.send(signal.SIGSTOP)
        gcs.send(signal.SIGKILL)
        until(gcs.ended, pause)
        kill([pid])
        assert wait_for_leader(shard, but=leader) != leader
        wait_for_writes(load)
        # Ray starts no process again without its GCS.
        with pytest.raises(RayMQError):
            shard.status(leader)
    shard.start()
    wait_for_writes(load)
    check_to_the_end(shard, load, readers)
