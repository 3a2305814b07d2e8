"""The CommitLog role over a real store, with or without a flusher process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from raymq.actors.api.shard_api import PutTicket
from raymq.actors.leader import appender, put_acks
from raymq.actors.leader.leader import ANNOUNCED_ROWS_MAX
from raymq.actors.replica import open_replica
from raymq.actors.shared import append_wakeups
from raymq.actors.shared.wakeup import wakeup_directory
from raymq.actors.supervise.replica_host import ReplicaHost
from raymq.store.base.errors import (
    Bug,
    Corrupt,
    DeliveryUnknown,
    Fenced,
    NotServing,
    Rejected,
    SequenceGap,
    StorageFull,
    StoreDamaged,
    Unavailable,
)
from raymq.store.base.files import Files
from raymq.store.base.rules import CRC_RULE
from raymq.store.base.status import PutStatus
from raymq.store.config.store_config import IN_CLUSTER, StoreConfig
from raymq.store.delay.delay_hook import transform
from raymq.store.delay.timer_cache import read_checkpoint
from raymq.store.embedded.embedded_store import EmbeddedStore
from raymq.store.put.inner_message import InnerMessage
from raymq.store.put.small_unit import CheckedPut
from raymq.store.records import record
from raymq.store.records.requests import FetchRequest, PutRequest
from raymq.store.state.unconfirmed import REPLACED_MAX
from tests.support.batches import batch, put_one, request
from tests.support.clock import ManualClock
from tests.support.confirming import confirm_only
from tests.support.damaged_store import flip
from tests.support.roles import leader_of
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[2]
CONFIG = StoreConfig(
    segment_size_bytes=256 * 1024, prewrite_window_bytes=64 * 1024, sync_flush_timeout_ms=10_000
)
HASTY = StoreConfig(
    segment_size_bytes=256 * 1024, prewrite_window_bytes=64 * 1024, sync_flush_timeout_ms=100
)

FLUSHER = """
import errno, sys
from raymq.actors.satellites.flush_service import FlushService
from raymq.store.config.store_config import StoreConfig
from raymq.store.base.files import Files
from raymq.store.base.rules import CRC_RULE

class Disk(Files):
    def sync_data(self, fd):
        if sys.argv[2] == "broken":
            raise OSError(errno.EIO, "the disk does not answer")
        super().sync_data(fd)

FlushService(sys.argv[1], "group_commit", StoreConfig(segment_size_bytes=262144), files=Disk()).run()
"""


class Shard:
    """One replica: its host in this process, its flusher in another."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.host: ReplicaHost
        self.flushers: list[subprocess.Popen[bytes]] = []

    def open(
        self, config: StoreConfig = CONFIG, roles: tuple[str, ...] = ("group_commit",)
    ) -> ReplicaHost:
        self.host = open_replica(
            self.root, config, identity={"cluster_id": "c", "shard": 0}, roles=roles
        )
        return self.host

    def close(self) -> None:
        """Close the host, if one is open."""
        if "host" in vars(self):
            self.host.close(1.0)
            del self.host

    def start_flusher(self, disk: str = "whole") -> None:
        self.flushers.append(
            subprocess.Popen(
                [sys.executable, "-c", FLUSHER, str(self.root), disk],
                cwd=ROOT,
                env=dict(os.environ),
                stderr=subprocess.DEVNULL,
            )
        )

    def records(self, queue: int, count: int) -> list[bytes]:
        """The first records of a queue, once a reader sees so many."""
        found: list[bytes] = []

        def read() -> None:
            parts = self.host.fetch(FetchRequest("t", {queue: len(found)}, 1 << 20, 1000, 1000))
            for part in parts:
                found.extend(part.records.to_pylist())

        until(lambda: len(found) >= count, read)
        return found


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[Shard]:
    made = Shard(tmp_path / "store")
    yield made
    made.close()
    for flusher in made.flushers:
        flusher.kill()
        flusher.wait()


@pytest.fixture
def serving(shard: Shard) -> Shard:
    shard.open()
    shard.start_flusher()
    shard.host.call("create_topic", {"name": "t", "queues": 4, "shards": [0]})
    return shard


def test_puts_of_many_threads_are_answered_each_with_its_own_offsets(serving: Shard) -> None:
    rounds, reported = 40, threading.Event()
    tickets: dict[int, list[PutTicket]] = {thread: [] for thread in range(8)}

    def work(thread: int) -> None:
        for turn in range(rounds):
            put = request(
                [b"%d/%d" % (thread, turn)], queue=thread % 4, producer_id=thread, sequence=turn
            )
            tickets[thread].append(put_one(serving.host, put, reported.set))

    threads = [threading.Thread(target=work, args=(thread,)) for thread in tickets]
    for worker in threads:
        worker.start()
    for worker in threads:
        worker.join()
    offsets: dict[int, list[int]] = {queue: [] for queue in range(4)}
    for thread, mine in tickets.items():
        got = [ticket.wait(30).first_offset for ticket in mine]
        assert got == sorted(got)
        offsets[thread % 4] += got
    assert all(sorted(found) == list(range(2 * rounds)) for found in offsets.values())
    assert reported.is_set()
    records = serving.records(1, 2 * rounds)
    for thread in (1, 5):
        for turn, ticket in enumerate(tickets[thread]):
            assert b"%d/%d" % (thread, turn) in records[ticket.wait().first_offset]


def test_a_put_that_is_refused_after_others_fails_alone(serving: Shard) -> None:
    host = serving.host
    good = put_one(host, request([b"a"], producer_id=7, sequence=0))
    gap = put_one(host, request([b"c"], producer_id=7, sequence=2))
    newer = put_one(host, request([b"b"], producer_id=7, epoch=1, sequence=1))
    old = put_one(host, request([b"b"], producer_id=7, epoch=0, sequence=2))

    assert good.wait(30).first_offset == 0
    with pytest.raises(SequenceGap, match="the rows between are missing") as refusal:
        gap.wait(30)
    assert refusal.value.fields["field"] == "sequence"
    assert newer.wait(30).first_offset == 1
    with pytest.raises(Fenced):
        old.wait(30)

    with pytest.raises(Rejected):
        put_one(host, request([b"x"], queue=4))
    assert (
        put_one(host, request([b"d"], producer_id=7, epoch=1, sequence=2)).wait(30).first_offset
        == 2
    )


def test_without_a_flusher_a_put_is_unknown_and_its_repeat_finds_it(shard: Shard) -> None:
    host = shard.open(HASTY)
    assert host.store.topics.create("t", 1, [0]) is not None
    first = request([b"a", b"b"], producer_id=9, sequence=0)
    with pytest.raises(DeliveryUnknown) as unknown:
        put_one(host, first).wait(30)
    assert unknown.value.status == "FLUSH_DISK_TIMEOUT"
    assert unknown.value.retriable
    assert host.status()["confirmed"] < host.status()["appended"]
    assert host.fetch(FetchRequest("t", {0: 0}, 1 << 20, 10, 0)) == []
    shard.start_flusher()
    host.config = CONFIG
    again: list[Any] = []

    def repeat() -> None:
        try:
            again.append(put_one(host, first).wait(30))
        except DeliveryUnknown:
            return

    until(lambda: bool(again), repeat)
    assert (again[0].first_offset, again[0].duplicates) == (0, 2)
    assert len(shard.records(0, 2)) == 2


def test_after_a_failed_sync_nothing_is_acknowledged_and_the_store_does_not_open_again(
    shard: Shard,
) -> None:
    host = shard.open()
    assert host.store.topics.create("t", 1, [0]) is not None
    shard.start_flusher("broken")
    granted = threading.Event()

    # The host itself syncs the bytes that were appended before the grant.
    until(
        lambda: bool(host.status()["supervisor"]["roles"]["group_commit"]["granted"]),
        lambda: granted.wait(0.01),
    )

    with pytest.raises(DeliveryUnknown):
        put_one(host, request([b"a"], producer_id=9)).wait(30)
    with pytest.raises(Unavailable):
        put_one(host, request([b"b"], producer_id=9, sequence=1))
    assert host.status()["state"] == "READ_ONLY"

    shard.close()
    with pytest.raises(StoreDamaged) as refusal:
        shard.open()
    assert refusal.value.rule == "poisoned"


def test_a_host_that_cannot_open_releases_everything(shard: Shard) -> None:
    host = shard.open()
    assert host.store.topics.create("t", 1, [0]) is not None
    shard.close()

    log = shard.root / "commitlog" / f"{0:020d}"
    with log.open("r+b") as file:
        file.seek(40)
        file.write(b"\xff" * 40)
    (shard.root / "abort").touch()
    wakeup = Path(wakeup_directory(str(shard.root))) / "commit_log"

    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(Corrupt):
            shard.open()
        assert not wakeup.exists()
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_a_stop_whose_last_sync_fails_closes_every_file(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(EmbeddedStore(shard.root, config=CONFIG)) as store:
        store.create_topic("t", 1)
        later = InnerMessage("t", 0, b"later", {"TIMER_DELAY_SEC": "60"})
        assert store.put_message(later).status is PutStatus.PUT_OK
    host = shard.open()

    def held() -> list[str]:
        found = []
        for name in os.listdir("/proc/self/fd"):
            # Other threads close their files meanwhile.
            with suppress(FileNotFoundError):
                found.append(os.readlink(f"/proc/self/fd/{name}"))
        return [path for path in found if path.startswith(f"{shard.root}/")]

    until(
        lambda: any(path.endswith("timerwheel") for path in held()),
        lambda: threading.Event().wait(0.01),
    )

    def full() -> None:
        raise StorageFull("the disk is full", field="disk")

    monkeypatch.setattr(host.store.log, "sync", full)
    with pytest.raises(Unavailable, match="last writes before its stop failed"):
        shard.close()
    del shard.host
    assert held() == []


def test_a_stop_does_not_wait_for_the_next_look_at_the_satellites(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(put_acks, "IDLE_WAIT_MS", 60_000)
    shard.open()
    shard.close()
    # `close` gives up the thread that stays, which would look once a minute.
    assert "raymq-acks" not in [thread.name for thread in threading.enumerate()]


def test_a_stream_is_notified_once_of_puts_that_finish_together(shard: Shard) -> None:
    host = shard.open()
    assert host.store.topics.create("t", 1, [0]) is not None
    calls: list[int] = []

    def notify() -> None:
        calls.append(len(calls))

    tickets = [put_one(host, request([b"x"], producer_id=3, sequence=n), notify) for n in range(50)]
    # The host syncs all of them itself before it lets the first flusher in.
    shard.start_flusher()
    for ticket in tickets:
        ticket.wait(30)
    put_one(host, request([b"y"], producer_id=4)).wait(30)
    assert calls == [0]


def test_the_flusher_is_woken_once_for_a_put_that_is_alone(serving: Shard) -> None:
    calls: list[int] = []
    for number in range(30):
        put = request([b"%d" % number], producer_id=7, sequence=number)
        put_one(serving.host, put, lambda: calls.append(0), producer_waits=True).wait(30)
    assert serving.host.status()["synced"] == serving.host.status()["appended"]
    # A ticket is finished before its stream is notified.
    until(lambda: len(calls) == 30, lambda: threading.Event().wait(0.005))


@pytest.mark.usefixtures("idle_cores")
def test_a_put_that_is_alone_is_answered_by_the_thread_that_brought_it(
    serving: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(append_wakeups, "WATCH_US", 5_000_000)
    answering: list[int] = []

    def put() -> None:
        number = len(answering)
        ticket = put_one(
            serving.host,
            request([b"%d" % number], producer_id=3, sequence=number),
            lambda: answering.append(threading.get_ident()),
            producer_waits=True,
        )
        assert ticket.wait(10).first_offset == number

    # The flusher may be done before the polling begins. Then the ack loop answers.
    until(lambda: threading.get_ident() in answering, put)


def test_puts_of_one_message_are_refused_each_for_itself(serving: Shard) -> None:
    host = serving.host
    puts = [
        request([b"a"], queue=0, producer_id=7),
        request([b"b"], queue=99, producer_id=7),
        request([b"c"], queue=1, producer_id=7, sequence=5),
        request([b"d", b"e"], queue=2, producer_id=7),
        request([b"f"], queue=0, producer_id=7, sequence=1),
    ]
    stored, unknown_queue, gap, two, following = host.put(puts)
    assert isinstance(unknown_queue, Rejected)
    assert isinstance(stored, PutTicket)
    assert isinstance(gap, PutTicket)
    assert isinstance(two, PutTicket)
    assert isinstance(following, PutTicket)
    assert stored.wait(30).first_offset == 0
    with pytest.raises(Rejected, match="sequence"):
        gap.wait(30)
    assert (two.wait(30).first_offset, two.wait(30).count) == (0, 2)
    assert following.wait(30).first_offset == 1


def test_an_unexpected_error_in_the_check_of_one_put_leaves_the_others_of_its_message(
    serving: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = serving.host
    check = host.store.put_path.check

    def faulty(put: PutRequest) -> CheckedPut:
        if put.queue_id == 1:
            raise ValueError("a bug")
        return check(put)

    monkeypatch.setattr(host.store.put_path, "check", faulty)
    first, second, third = host.put([request([b"a"], queue=queue) for queue in range(3)])
    assert isinstance(second, Bug)
    for ticket in (first, third):
        assert isinstance(ticket, PutTicket)
        assert ticket.wait(30).count == 1


def test_puts_of_one_message_wake_the_flusher_early_while_they_have_few_rows(
    serving: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, announced = serving.host, []
    monkeypatch.setattr(host.supervisor.appends, "announce", lambda: announced.append(True))
    half = [b"x"] * (ANNOUNCED_ROWS_MAX // 2)
    for bodies, expected in ((half, 1), ([*half, b"one more"], 1)):
        until(lambda: not leader_of(host).acks.waiting, lambda: threading.Event().wait(0.001))
        for ticket in host.put([request(bodies), request(bodies, queue=1)]):
            assert isinstance(ticket, PutTicket)
            ticket.wait(30)
        assert len(announced) == expected


@pytest.mark.usefixtures("idle_cores")
def test_puts_of_one_message_that_is_alone_are_answered_by_the_thread_that_brought_them(
    serving: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(append_wakeups, "WATCH_US", 5_000_000)
    answering: list[int] = []
    sent: list[int] = []

    def put() -> None:
        number = len(sent)
        sent.append(number)
        puts = [request([b"x"], queue=queue, producer_id=3, sequence=number) for queue in range(3)]
        for ticket in serving.host.put(
            puts, lambda: answering.append(threading.get_ident()), producer_waits=True
        ):
            assert isinstance(ticket, PutTicket)
            assert ticket.wait(10).first_offset == number

    # The flusher may be done before the polling begins. Then the ack loop answers.
    until(lambda: threading.get_ident() in answering, put)


def test_a_small_put_is_published_before_it_is_accounted_for(
    serving: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, heard = serving.host, []
    apply_rows = host.store.state.apply_rows

    def spy(*args: Any, **kwargs: Any) -> None:
        heard.append(host.supervisor.describe()["appended"] == host.store.log.end)
        apply_rows(*args, **kwargs)

    monkeypatch.setattr(host.store.state, "apply_rows", spy)
    put_one(host, request([b"small"])).wait(30)
    put_one(host, request([b"large"] * (ANNOUNCED_ROWS_MAX + 1))).wait(30)
    assert heard == [True, False]


def test_large_batches_wait_for_space_before_they_are_appended(
    serving: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(appender, "LARGE_BYTES", 1000)
    monkeypatch.setattr(appender, "QUEUED_BYTES_MAX", 5000)
    queued: list[int] = []
    append = leader_of(serving.host).appender._append

    def slow(checked: Any) -> Any:
        queued.append(leader_of(serving.host).appender._bytes)
        return append(checked)

    monkeypatch.setattr(leader_of(serving.host).appender, "_append", slow)
    threads = [
        threading.Thread(
            target=lambda k=k: [
                put_one(
                    serving.host, request([b"x" * 2000], queue=k, producer_id=k, sequence=n)
                ).wait(10)
                for n in range(20)
            ]
        )
        for k in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(queued) == 80
    assert max(queued) <= 5000
    assert leader_of(serving.host).appender._bytes == 0


def test_an_error_after_an_append_is_answered_as_unknown_and_ends_the_shard(
    serving: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def publish(end_offset: int) -> None:
        raise ValueError("the shared page is gone")

    monkeypatch.setattr(serving.host.supervisor.appends, "publish", publish)
    ticket = put_one(serving.host, request([b"stored"], producer_id=11))
    with pytest.raises(DeliveryUnknown):
        ticket.wait(30)
    with pytest.raises(Unavailable):
        put_one(serving.host, request([b"late"], producer_id=11, sequence=1))
    assert serving.host.status()["state"] == "READ_ONLY"


@pytest.mark.parametrize("rows", [1, 2])
def test_a_put_after_the_shard_has_closed_is_refused_as_one_that_may_be_sent_again(
    serving: Shard, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    host = serving.host
    monkeypatch.setattr(type(host.supervisor.appends._cores), "are_idle", lambda _: True)
    serving.close()
    refusals = host.put([request([b"late"]) for _ in range(rows)])
    assert [type(each) for each in refusals] == [NotServing] * rows


def test_large_and_small_batches_of_a_producer_keep_their_order(serving: Shard) -> None:
    batches = [[b"x" * 1000] * 140 if number % 3 else [b"small"] for number in range(12)]
    sequences = list(accumulate(map(len, batches), initial=0))
    tickets = [
        put_one(serving.host, request(rows, producer_id=12, sequence=sequence))
        for rows, sequence in zip(batches, sequences[:-1], strict=True)
    ]
    assert [ticket.wait(30).first_offset for ticket in tickets] == sequences[:-1]


def test_what_is_acknowledged_is_seen_by_the_next_read(serving: Shard) -> None:
    for number in range(20):
        put_one(serving.host, request([b"%d" % number], producer_id=13, sequence=number)).wait(30)
        parts = serving.host.fetch(FetchRequest("t", {0: number}, 1 << 20, 1, 0))
        assert [len(part.records) for part in parts if part.records is not None] == [1]


def test_a_compaction_topic_is_served_compacted_and_scrub_reads_the_log(serving: Shard) -> None:
    host = serving.host
    attributes = {"cleanup.policy": "COMPACTION"}
    host.call("create_topic", {"name": "c", "queues": 1, "shards": [0], "attributes": attributes})
    assert host.call("topics", {})["c"] == {"queues": 1, "shards": [0], "compacted": True}

    with pytest.raises(Rejected, match="KEYS"):
        put_one(host, request([b"no key"], topic="c"))
    for body in (b"1", b"2"):
        rows = batch([body, body], properties=b"KEYS\x01k\x02")
        put_one(host, PutRequest("c", 0, rows, None, 0, 0, "quorum")).wait(30)

    leader_of(host).await_dispatch()
    assert host.store.compaction.compact("c", 0, roll=True) is not None
    (part,) = host.fetch(FetchRequest("c", {0: 0}, 1 << 20, 100, 1000))
    assert part.records is not None
    assert (len(part.records), part.next_offset) == (1, 4)

    reported = host.call("status", {})
    assert reported["compaction"] == {"error": None}
    until(
        lambda: host.scrub.counters.passes + host.scrub.counters.units > 0,
        lambda: threading.Event().wait(0.01),
    )
    assert host.call("status", {})["scrub"]["found"] == []


def test_damage_of_a_compacted_queue_reaches_reader_status_and_metric(serving: Shard) -> None:
    host = serving.host
    attributes = {"cleanup.policy": "COMPACTION"}
    host.call("create_topic", {"name": "c", "queues": 1, "shards": [0], "attributes": attributes})
    rows = batch([bytes(100)], properties=b"KEYS\x01k\x02")
    put_one(host, PutRequest("c", 0, rows, None, 0, 0, "quorum")).wait(30)
    asked = FetchRequest("c", {0: 0}, 1 << 20, 100, 1000)
    assert host.fetch(asked)[0].next_offset == 1

    compacted = serving.root / "compaction/compactionLog/c/0/00000000000000000000"
    flip(compacted, 150)
    (part,) = host.fetch(asked)
    assert isinstance(part.error, Corrupt)
    assert [each["path"] for each in host.call("status", {})["damage"]] == [str(compacted)]
    assert host.metrics()["raymq_scrub_faults"] == 1


def test_what_the_scrub_of_a_leader_finds_reaches_status_and_metric(serving: Shard) -> None:
    for number in range(20):
        put_one(serving.host, request([bytes(50_000)], producer_id=13, sequence=number)).wait(30)
    serving.close()
    # Below the files that a start reads.
    damaged = serving.root / "commitlog/00000000000000000000"
    flip(damaged, 100_000)
    # Without it the next scrub begins a pass at once.
    (serving.root / "raymq/scrub").unlink(missing_ok=True)

    host = serving.open()
    until(lambda: host.scrub.counters.passes > 0, lambda: threading.Event().wait(0.01))
    facts = host.call("status", {})
    (found,) = facts["scrub"]["found"]
    assert (found["path"], found["rule"]) == (str(damaged), CRC_RULE)
    assert found["offset"] <= 100_000 < found["end"]
    assert str(damaged) in found["message"]
    assert facts["damage"] == [], "no reader met it"
    assert host.metrics()["raymq_scrub_faults"] == 1
    assert facts["state"] == "RUNNING"


def test_delayed_messages_are_delivered_and_survive_the_host(
    serving: Shard,
) -> None:
    def put(body: bytes, properties: dict[str, str]) -> None:
        host = serving.host
        message = InnerMessage("t", 0, body, properties, born_time_ms=host.clock.now_ms())
        (appended,) = host.store.put_inner([transform(message, host.clock.now_ms(), host.config)])
        leader_of(host).await_promise(appended)

    put(b"level", {"DELAY": "1"})
    put(b"soon", {"TIMER_DELAY_MS": "1"})
    put(b"later", {"TIMER_DELAY_SEC": "60"})
    assert sorted(body_of(raw) for raw in serving.records(0, 2)) == [b"level", b"soon"]
    serving.close()
    checkpoint = read_checkpoint(serving.root / "config" / "timercheck", files=Files())
    assert checkpoint is not None
    assert checkpoint.queue_offset == 2
    clock = ManualClock(checkpoint.read_time_ms + 70_000)
    with closing(EmbeddedStore(serving.root, config=CONFIG, clock=clock)) as store:
        assert store.deliver_due() is None
        found = store.fetch("t", 0, 2).records
        assert found is not None
        assert [body_of(raw) for raw in found.to_pylist()] == [b"later"]


def body_of(raw: bytes) -> bytes:
    row = record.decode(raw, [0], [len(raw)])
    body: bytes = row.column("body")[0].as_py()
    return body


def test_offsets_are_listed_during_an_offset_commit_for_another_queue(shard: Shard) -> None:
    store = shard.open().store
    store.topics.create("t", 4, [0])
    confirm_only(store)

    class Queue(int):
        """A number during whose conversion another thread commits offsets."""

        def __str__(self) -> str:
            store.commit_offsets("g", "t", {3: 7})
            confirm_only(store)
            return int.__str__(self)

    store.state.offsets["g", "t"] = {Queue(0): 5, 1: 6}
    assert shard.host.call("offsets", {"group": "g", "topic": "t"}) == {"0": 5, "1": 6}
    assert shard.host.call("offsets", {"group": "g", "topic": "t"}) == {"0": 5, "1": 6, "3": 7}


def test_offsets_are_seen_once_they_are_confirmed(shard: Shard) -> None:
    host = shard.open()
    store = host.store
    asked = "offsets", {"group": "g", "topic": "t"}
    store.topics.create("t", 4, [0])
    store.commit_offsets("g", "t", {0: 1})
    assert host.call(*asked) == {}
    confirm_only(store)
    assert host.call(*asked) == {"0": 1}

    store.commit_offsets("g", "t", {0: 2, 1: 1})
    store.commit_offsets("g", "t", {0: 3})
    assert host.call(*asked) == {"0": 1}
    confirm_only(store)
    assert host.call(*asked) == {"0": 3, "1": 1}


def test_the_last_of_many_offsets_that_the_leader_has_synced_is_seen(shard: Shard) -> None:
    # As of a mirror whose follower is away: nothing is confirmed for a long time.
    host = shard.open()
    store = host.store
    store.topics.create("t", 4, [0])
    for offset in range(2 * REPLACED_MAX):
        store.commit_offsets("g", "t", {0: offset})
        store.log.sync()
    store.commit_offsets("g", "t", {0: 1000})
    store.commit_offsets("g", "t", {0: 1001})
    assert host.call("offsets", {"group": "g", "topic": "t"}) == {"0": 2 * REPLACED_MAX - 1}


def test_topics_are_listed_once_they_are_confirmed(shard: Shard) -> None:
    host = shard.open()
    store = host.store
    store.topics.create("t", 1, [0])
    assert host.call("topics", {}) == {}
    confirm_only(store)
    store.topics.add_queues("t", 2, [0], are_hidden=False)
    assert host.call("topics", {})["t"]["queues"] == 1
    confirm_only(store)
    assert host.call("topics", {})["t"]["queues"] == 2


def test_a_shard_that_answers_before_its_commit_shows_what_it_acknowledged(shard: Shard) -> None:
    host = shard.open(
        StoreConfig(
            segment_size_bytes=256 * 1024,
            prewrite_window_bytes=64 * 1024,
            flush="async",
            transient_pool=True,
            transient_pool_slices=2,
            transient_pool_slice_bytes=64 * 1024,
        ),
        roles=("flush_real_time", "commit_real_time"),
    )
    host.call("create_topic", {"name": "t", "queues": 1, "shards": [0]})
    assert list(host.call("topics", {})) == ["t"]
    host.call("commit_offsets", {"group": "g", "topic": "t", "offsets": {"0": 0}})
    assert host.call("offsets", {"group": "g", "topic": "t"}) == {"0": 0}


# --- options that change while the shard runs -----------------------------------------------------


def test_an_option_that_is_set_holds_after_a_restart_and_says_who_set_it(serving: Shard) -> None:
    arguments = {"values": {"slave_timeout_ms": 100, "delete_when": "05"}, "by": "ann@here"}
    answer = serving.host.call("set_config", arguments)
    facts = answer["options"]["slave_timeout_ms"]
    assert facts.pop("at_ms") > 0
    assert facts == {"value": 100, "before": 3000, "by": "ann@here"}
    # A call whose answer is lost is repeated.
    again = serving.host.call("set_config", {**arguments, "by": "ben@there"})
    assert again["options"]["delete_when"] == answer["options"]["delete_when"]

    serving.close()
    host = serving.open()
    found = host.call("config", {})["options"]
    assert set(found) == set(IN_CLUSTER)
    assert found["delete_when"] == answer["options"]["delete_when"]
    assert found["flush_interval_ms"] == {"value": 500}
    assert leader_of(host).store.config.slave_timeout_ms == 100


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({}, "values"),
        ({"flush_intervall_ms": 1}, "values"),
        ({"segment_size_bytes": 1 << 20}, "values"),
        ({"flush_interval_ms": 0}, "flush_interval_ms"),
        ({"flush_interval_ms": True}, "flush_interval_ms"),
        ({"max_message_bytes": 1 << 30}, "max_message_bytes"),
        ({"delete_when": "24"}, "delete_when"),
    ],
)
def test_a_change_that_no_store_takes_is_refused(
    shard: Shard, values: dict[str, Any], field: str
) -> None:
    shard.open()
    end = shard.host.log.end
    with pytest.raises(Rejected) as refused:
        shard.host.call("set_config", {"values": values, "by": "ann@here"})
    assert refused.value.field == field
    assert shard.host.log.end == end


def test_puts_that_wait_are_late_after_the_timeout_that_is_set(shard: Shard) -> None:
    # No flusher runs: each put would wait for ten seconds.
    host = shard.open()
    assert host.store.topics.create("t", 1, [0]) is not None
    ticket = put_one(host, request([b"x"]))
    host.store.options.set({"sync_flush_timeout_ms": 50}, by="ann@here")
    with pytest.raises(DeliveryUnknown):
        ticket.wait(8)


def test_satellites_are_given_the_options_that_the_log_has(shard: Shard) -> None:
    host = shard.open()
    host.store.options.set({"flush_interval_ms": 200}, by="ann@here")
    assert host.supervisor.control.changed_options() == {"flush_interval_ms": 200}
    shard.close()
    host = shard.open()
    assert host.supervisor.control.changed_options() == {"flush_interval_ms": 200}


def test_the_scrub_follows_a_shorter_retention(shard: Shard) -> None:
    host = shard.open()
    before = host.scrub.pass_ms
    host.store.options.set({"file_reserved_hours": 24}, by="ann@here")
    assert host.scrub.pass_ms == host.scrub.pause_ms == 24 * 3_600_000 // 4 < before
