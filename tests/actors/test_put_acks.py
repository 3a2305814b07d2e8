"""A mirrored leader whose follower is away: each put is answered when its own promise is kept, or is late by itself."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raymq.actors import put_acks, ring
from raymq.actors.commit_log_host import LeaderHost
from raymq.actors.shard_api import PutTicket
from raymq.store.config import StoreConfig
from raymq.store.errors import DeliveryUnknown
from raymq.store.promise import Acks, Flush
from tests.support.batches import request
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[2]
SEGMENT = 256 * 1024
SLAVE_TIMEOUT_MS = 400
#: longer than a test: CommitLog never speaks for Replication
NEVER_MS = 600_000

SATELLITE = """
import sys
from raymq.actors import ring
from raymq.actors.flush_service import FlushService
from raymq.actors.replicator import Replicator
from raymq.store.config import StoreConfig
from raymq.store.errors import Unavailable

class Away:
    def connect(self, endpoint):
        raise Unavailable("no follower listens")

root, role, flush, segment, timeout, ring.CAPACITY = sys.argv[1:4] + list(map(int, sys.argv[4:]))
config = StoreConfig(segment_size_bytes=segment, slave_timeout_ms=timeout, flush=flush)
if role == "replication":
    Replicator(root, config, cluster_id="c", shard=0, replica=0, follower=1, transport=Away(),
               peer_endpoint=lambda: "away").run()
else:
    FlushService(root, role, config).run()
"""


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
        self.host = LeaderHost(
            root,
            config,
            identity={"cluster_id": "c", "shard": 0},
            roles=(self.flusher, "replication"),
        )
        assert self.host.store.create_topic("t", 1, [0]) is not None

    def start(self, role: str) -> None:
        """Start a satellite and wait until it works."""
        arguments = [self.root, role, self.flush, SEGMENT, SLAVE_TIMEOUT_MS, ring.CAPACITY]
        self.children[role] = subprocess.Popen(
            [sys.executable, "-c", SATELLITE, *map(str, arguments)],
            cwd=ROOT,
            env=dict(os.environ),
            stderr=subprocess.DEVNULL,
        )
        until(lambda: bool(self.facts(role)["granted"]), lambda: threading.Event().wait(0.005))

    def facts(self, role: str) -> dict[str, Any]:
        facts: dict[str, Any] = self.host.supervisor.describe()["roles"][role]
        return facts

    def put(self, acks: Acks, producer: int = 1, *, again: bool = False) -> PutTicket:
        """Args: again: the producer's last message once more."""
        sequence = self.sequences.get(producer, 0) - again
        self.sequences[producer] = sequence + 1
        put = request([b"x"], producer=producer, sequence=sequence)
        return self.host.put(put._replace(acks=acks))

    def close(self) -> None:
        self.host.close(0.0)
        for child in self.children.values():
            child.kill()
            child.wait()


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
    """Whatever is answered as late, Replication has said so."""
    monkeypatch.setattr(put_acks, "SILENT_MS", NEVER_MS)


def status_of(ticket: PutTicket) -> str:
    with pytest.raises(DeliveryUnknown) as unknown:
        ticket.wait(30)
    return unknown.value.status


@pytest.mark.usefixtures("commit_log_is_silent")
@pytest.mark.parametrize("flush", ["sync", "async"])
def test_a_leaders_put_does_not_wait_for_another_producers_quorum_put(leader: Leader) -> None:
    quorum = leader.put("quorum", producer=1)
    for _ in range(3):
        assert leader.put("leader", producer=2).wait(30).count == 1
    # Without Replication nothing speaks for the quorum's put.
    assert not quorum.done
    assert leader.host.waiting_puts == 1
    leader.start("replication")
    assert status_of(quorum) == "FLUSH_SLAVE_TIMEOUT"
    assert leader.host.waiting_puts == 0


@pytest.mark.usefixtures("commit_log_is_silent")
def test_replication_says_of_each_put_that_it_is_late_also_when_it_is_sent_again(
    leader: Leader,
) -> None:
    leader.start("replication")
    first = leader.put("quorum")
    assert status_of(first) == "FLUSH_SLAVE_TIMEOUT"
    again = leader.put("quorum", again=True)
    assert not again.done
    assert status_of(again) == "FLUSH_SLAVE_TIMEOUT"
    # Stored once, and not shown before the follower has it.
    assert leader.host.counters.duplicates == 1
    assert leader.host.store.log.confirmed < leader.host.store.log.synced


def test_commit_log_answers_for_a_replication_that_is_dead(leader: Leader) -> None:
    assert status_of(leader.put("quorum")) == "FLUSH_SLAVE_TIMEOUT"


@pytest.mark.usefixtures("commit_log_is_silent")
def test_a_full_ring_costs_no_put_its_answer(
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
    leader.host.acks.end()
    assert status_of(quorum) == "FLUSH_SLAVE_TIMEOUT"
    assert status_of(leader.put("quorum")) == "FLUSH_SLAVE_TIMEOUT"
    assert leader.host.waiting_puts == 0
