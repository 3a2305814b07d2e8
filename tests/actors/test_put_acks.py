"""A mirrored leader whose follower is away: each put is answered when its own promise is kept, or is late."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

from raymq.actors.api.shard_api import PutTicket
from raymq.actors.leader import put_acks
from raymq.actors.leader.appender import AppendedPut
from raymq.actors.replica import open_replica
from raymq.actors.shared import append_wakeups, ring
from raymq.actors.shared.idle_cores import IdleCores
from raymq.store.base.clock import Clock
from raymq.store.base.errors import DeliveryUnknown
from raymq.store.config.promise import Acks, Ends, Flush, promises
from raymq.store.config.running_config import RunningConfig
from raymq.store.config.store_config import StoreConfig
from raymq.store.records.requests import AppendedRows, PutRequest
from tests.support.batches import put_one, request
from tests.support.roles import leader_of
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[2]
SEGMENT = 256 * 1024
SLAVE_TIMEOUT_MS = 400
#: longer than a test: CommitLog never answers for Replication
NEVER_MS = 600_000

SATELLITE = """
import sys
from raymq.actors.shared import ring
from raymq.actors.satellites.flush_service import FlushService
from raymq.actors.satellites.replicator import Replicator
from raymq.store.config.store_config import StoreConfig
from raymq.store.base.errors import Unavailable

class Away:
    def connect(self, endpoint):
        raise Unavailable("no follower listens")

root, role, flush, segment, timeout, ring.CAPACITY = sys.argv[1:4] + list(map(int, sys.argv[4:]))
config = StoreConfig(segment_size_bytes=segment, slave_timeout_ms=timeout, flush=flush)
if role == "replication":
    Replicator(root, config, cluster_id="c", shard=0, replica=0, followers=(1,), voters=(0, 1), transport=Away(),
               peer_endpoint=lambda replica: "away").run()
else:
    FlushService(root, role, config).run()
"""

#: a Replication that publishes the ends that it reads
PUBLISHER = """
import sys
from raymq.actors.satellites.satellite import Satellite
from raymq.store.base.clock import Clock
from raymq.store.base.files import Files

satellite = Satellite(sys.argv[1], "replication", clock=Clock(), files=Files())
satellite.await_grant()
for line in sys.stdin:
    satellite.publish_position(int(line))
"""


def pause() -> None:
    threading.Event().wait(0.005)


class Leader:
    """The leader of a mirrored shard in this process, its satellites in processes of their own."""

    def __init__(self, root: Path, flush: Flush) -> None:
        self.root, self.flush = root, flush
        self.flusher = "group_commit" if flush == "sync" else "flush_real_time"
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self.sequences: dict[int, int] = {}

        config = StoreConfig(
            segment_size_bytes=SEGMENT,
            prewrite_window_bytes=64 * 1024,
            slave_timeout_ms=SLAVE_TIMEOUT_MS,
            flush=flush,
        )
        self.host = open_replica(
            root,
            config,
            identity={"cluster_id": "c", "shard": 0},
            roles=(self.flusher, "replication"),
        )

        assert self.host.store.topics.create("t", 1, [0]) is not None

    def start(self, role: str) -> None:
        """Start a satellite and wait until it works."""
        arguments = [self.root, role, self.flush, SEGMENT, SLAVE_TIMEOUT_MS, ring.CAPACITY]
        self.children[role] = subprocess.Popen(
            [sys.executable, "-c", SATELLITE, *map(str, arguments)],
            cwd=ROOT,
            env=dict(os.environ),
            stderr=subprocess.DEVNULL,
        )
        until(lambda: bool(self.facts(role)["granted"]), pause)

    def start_publisher(self) -> IO[bytes]:
        """A Replication whose fields the test writes."""
        child = subprocess.Popen(
            [sys.executable, "-c", PUBLISHER, str(self.root)], cwd=ROOT, stdin=subprocess.PIPE
        )
        self.children["replication"] = child
        until(lambda: bool(self.facts("replication")["granted"]), pause)
        assert child.stdin is not None
        return child.stdin

    def facts(self, role: str) -> dict[str, Any]:
        facts: dict[str, Any] = self.host.supervisor.describe()["roles"][role]
        return facts

    def request(self, acks: Acks, producer_id: int = 1, *, again: bool = False) -> PutRequest:
        """Args: `again`: the producer's last message once more."""
        sequence = self.sequences.get(producer_id, 0) - again
        self.sequences[producer_id] = sequence + 1
        return request([b"x"], producer_id=producer_id, sequence=sequence)._replace(acks=acks)

    def put(self, acks: Acks, producer_id: int = 1, *, again: bool = False) -> PutTicket:
        """See `request`."""
        return put_one(self.host, self.request(acks, producer_id, again=again))

    def close(self) -> None:
        self.host.close(0.0)
        for child in self.children.values():
            child.kill()
            child.communicate()


@pytest.fixture
def flush() -> Flush:
    return "sync"


@pytest.fixture
def leader(tmp_path: Path, flush: Flush) -> Iterator[Leader]:
    made = Leader(tmp_path / "store", flush)
    made.start(made.flusher)
    yield made
    made.close()


@pytest.fixture
def commit_log_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every put that is answered as late was reported by Replication."""
    monkeypatch.setattr(put_acks, "REPLICATION_SILENCE_MS", NEVER_MS)


def status_of(ticket: PutTicket) -> str:
    with pytest.raises(DeliveryUnknown) as unknown:
        ticket.wait(30)
    return unknown.value.status


@pytest.mark.usefixtures("commit_log_is_silent")
@pytest.mark.parametrize("flush", ["sync", "async"])
def test_a_leaders_put_does_not_wait_for_another_producers_quorum_put(leader: Leader) -> None:
    quorum = leader.put("quorum", producer_id=1)
    for _ in range(3):
        assert leader.put("leader", producer_id=2).wait(30).count == 1
    # Without Replication no process answers the quorum's put.
    assert not quorum.done
    assert leader_of(leader.host).report.waiting_puts == 1
    leader.start("replication")
    assert status_of(quorum) == "FLUSH_SLAVE_TIMEOUT"
    assert leader_of(leader.host).report.waiting_puts == 0


@pytest.mark.usefixtures("commit_log_is_silent")
def test_replication_reports_each_late_put_also_when_it_is_sent_again(
    leader: Leader,
) -> None:
    leader.start("replication")
    first = leader.put("quorum")
    assert status_of(first) == "FLUSH_SLAVE_TIMEOUT"
    again = leader.put("quorum", again=True)
    assert not again.done
    assert status_of(again) == "FLUSH_SLAVE_TIMEOUT"
    # Stored once, and not shown before the follower has it.
    assert leader_of(leader.host).counters.duplicates == 1
    assert leader.host.store.log.confirmed < leader.host.store.log.synced


@pytest.mark.usefixtures("commit_log_is_silent")
def test_a_quorum_put_is_acknowledged_and_readable_up_to_replications_position(
    leader: Leader,
) -> None:
    publisher = leader.start_publisher()
    log, puts, ends = leader.host.store.log, [], []
    for _ in range(3):
        puts.append(leader.put("quorum"))
        ends.append(log.end)

    # A put with acks=leader: from here on everything is synced.
    leader.put("leader", producer_id=2).wait(30)
    assert not any(put.done for put in puts)
    assert log.synced >= ends[-1]

    for at, end in enumerate(ends):
        publisher.write(b"%d\n" % end)
        publisher.flush()
        assert puts[at].wait(30).first_offset == at
        assert log.confirmed == end
        assert not any(put.done for put in puts[at + 1 :])


def test_commit_log_answers_puts_of_a_dead_replication(leader: Leader) -> None:
    assert status_of(leader.put("quorum")) == "FLUSH_SLAVE_TIMEOUT"


@pytest.mark.usefixtures("commit_log_is_silent")
def test_every_put_is_answered_despite_a_full_ring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring, "CAPACITY", 4)
    leader = Leader(tmp_path / "store", "sync")
    try:
        leader.start("group_commit")
        puts = [leader.put("quorum") for _ in range(20)]
        assert not leader.host.supervisor.submit(1, 1, 1)
        leader.start("replication")
        assert {status_of(put) for put in puts} == {"FLUSH_SLAVE_TIMEOUT"}
    finally:
        leader.close()


def test_puts_that_wait_are_answered_as_unknown_when_the_shard_ends(leader: Leader) -> None:
    quorum = leader.put("quorum")
    leader_of(leader.host).acks.end()
    assert status_of(quorum) == "FLUSH_SLAVE_TIMEOUT"
    assert status_of(leader.put("quorum")) == "FLUSH_SLAVE_TIMEOUT"
    assert leader_of(leader.host).report.waiting_puts == 0


def only_line(caplog: pytest.LogCaptureFixture, words: str) -> str:
    """The line with these words, which is written after the answer. Raises: ValueError for several."""

    def lines() -> list[str]:
        return [text for text in caplog.messages if words in text]

    until(lambda: bool(lines()), pause)
    (line,) = lines()
    return line


def test_a_slow_put_is_counted_and_a_line_names_its_ends(
    leader: Leader, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(put_acks, "SLOW_S", -1.0)
    for _ in range(3):
        leader.put("leader").wait(30)
    assert leader_of(leader.host).report.metrics()["raymq_slow_puts_total"] == 3
    line = only_line(caplog, "a put took ")
    assert "acks leader, 1 message(s) up to " in line
    assert "synced=" in line


def test_puts_that_replicas_miss_are_counted_and_logged_once(
    leader: Leader, caplog: pytest.LogCaptureFixture
) -> None:
    puts = [leader.put("quorum") for _ in range(3)]
    assert {status_of(put) for put in puts} == {"FLUSH_SLAVE_TIMEOUT"}
    metrics = leader_of(leader.host).report.metrics()
    assert metrics["raymq_replica_timeouts_total"] == metrics["raymq_unknown_total"] == 3
    line = only_line(caplog, "too few replicas")
    assert "acks quorum, 1 message(s) up to " in line


@pytest.mark.parametrize("are_idle", [True, False])
def test_a_put_that_is_alone_awaits_its_sync_while_cores_have_time_to_spare(
    leader: Leader, monkeypatch: pytest.MonkeyPatch, are_idle: bool
) -> None:
    monkeypatch.setattr(IdleCores, "are_idle", lambda self: are_idle)
    appends, awaited = leader.host.supervisor.appends, []
    await_synced = appends.await_synced

    def watched(end: int, wanted: Callable[[], bool]) -> bool:
        awaited.append(end)
        return await_synced(end, wanted)

    monkeypatch.setattr(appends, "await_synced", watched)

    def put() -> None:
        put_one(leader.host, leader.request("leader", producer_id=3), producer_waits=True).wait(30)

    if are_idle:
        # The flusher may be done before the polling begins.
        until(lambda: awaited, put)
    else:
        for _ in range(5):
            put()
        assert not awaited


@pytest.mark.usefixtures("idle_cores")
def test_a_leaders_put_that_is_alone_is_answered_by_the_thread_that_brought_it(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like a put without a mirror, it waits for the sync alone."""
    monkeypatch.setattr(append_wakeups, "WATCH_US", 5_000_000)
    answering: list[int] = []

    def put() -> None:
        request = leader.request("leader", producer_id=3)
        put_one(
            leader.host,
            request,
            lambda: answering.append(threading.get_ident()),
            producer_waits=True,
        ).wait(30)

    # The flusher may be done before the polling begins. Then the ack loop answers.
    until(lambda: threading.get_ident() in answering, put)


@pytest.mark.usefixtures("commit_log_is_silent")
def test_nothing_is_acknowledged_or_shown_after_a_sync_has_failed(leader: Leader) -> None:
    log, acks = leader.host.store.log, leader_of(leader.host).acks
    before = log.confirmed
    # The prewriting thread got the kernel's error. The ack loop has not checked yet.
    log.health.sync_failed = True
    put = leader.put("leader")
    until(lambda: leader.host.supervisor.progress()[0].synced >= log.end, pause)
    acks._advance()
    assert not put.done
    assert log.confirmed == before
    acks.end()
    assert status_of(put) == "FLUSH_DISK_TIMEOUT"
    # For an orderly end.
    log.health.sync_failed = False


def test_an_ended_leadership_acknowledges_nothing_by_the_ends_of_another_leaders_log() -> None:
    # A thread of the last leadership is late: its record was cut, and the log has grown beyond that offset since.
    ends = Ends(appended=2000, committed=2000, synced=2000, replicated=2000)
    published: list[int] = []
    parts = SimpleNamespace(
        log=SimpleNamespace(
            ends=ends, end=2000, sync_failed=False, note_confirmed=published.append
        ),
        supervisor=SimpleNamespace(
            appends=SimpleNamespace(publish=published.append, wake_for_append=lambda: None)
        ),
        clock=Clock(),
        config=RunningConfig.of(StoreConfig()),
        serving=SimpleNamespace(fail=published.append),
        election_loop=SimpleNamespace(idle_wait_ms=int),
    )
    for flush in ("sync", "async"):
        kept = promises(flush, has_followers=True)
        acks = put_acks.PutAcks(parts, kept, put_acks.PutCounters(), lambda: None)
        acks.end()
        for mode in kept:
            ticket = PutTicket()
            acks.publish_early()
            acks.report_appended([AppendedPut(ticket, AppendedRows.up_to(1100), mode)])
            with pytest.raises(DeliveryUnknown):
                ticket.wait(0)
    assert published == []
