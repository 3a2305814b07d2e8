"""Three replicas of a shard in one process: one leads, and when it is gone another one does.

Messages of elections are calls of memory here, whose links a test can cut. No satellite runs: what is elected does not
depend on them.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raymq.actors.api.held_fetch import HeldFetch
from raymq.actors.follower import follower
from raymq.actors.follower.log_port import FollowerLogPort
from raymq.actors.follower.session import FollowerSession
from raymq.actors.leader import leader
from raymq.actors.protocol.log_units import unpack_sound_bytes
from raymq.actors.replica import open_replica
from raymq.actors.shared.control_block import FollowerProgress
from raymq.actors.shared.heartbeat import ITERATION_MAX_MS
from raymq.actors.supervise import dispatcher
from raymq.actors.supervise.replica_host import ReplicaHost
from raymq.replication import wire
from raymq.replication.election_events import FollowerHeard, LeaderLost
from raymq.replication.election_limits import ElectionLimits
from raymq.replication.incarnation import make_incarnation
from raymq.store.base.checksum import crc32c
from raymq.store.base.clock import Clock
from raymq.store.base.errors import (
    Corrupt,
    DeliveryUnknown,
    NotLeading,
    OffsetOutOfRange,
    RayMQError,
    Rejected,
    StorageFull,
    Unavailable,
    from_wire,
    to_wire,
)
from raymq.store.base.running_flags import DISK_FULL, FENCED
from raymq.store.config.store_config import StoreConfig
from raymq.store.log.chain import ChainUnit
from raymq.store.log.mending.fitting import SoundBytes
from raymq.store.records.requests import AppendedRows, FetchRequest
from raymq.store.state.shard_state import COMPLETE_REPLICAS
from tests.support.batches import put_one, request
from tests.support.clock import ManualClock
from tests.support.confirming import confirm_only
from tests.support.known_addresses import KnownAddresses
from tests.support.replica_pair import TIMEOUT_S, wait_until

CONFIG = StoreConfig(segment_size_bytes=256 * 1024, prewrite_window_bytes=64 * 1024)
LIMITS = ElectionLimits(
    election_ms=200,
    heartbeat_ms=60,
    majority_silence_ms=600,
    hand_over_ms=400,
    disk_stall_ms=300,
)


class Link:
    """Calls of one replica by another one."""

    def __init__(self, shard: Shard, caller: int, called: int) -> None:
        self._shard = shard
        self._caller = caller
        self._called = called

    def elect(self, frame: bytes, timeout_s: float) -> list[bytes]:
        if self._shard.faults:
            raise self._shard.faults.pop()
        self._check(self._caller, self._called)
        answers = self._shard.hosts[self._called].election_loop.elect(frame)
        self._check(self._called, self._caller)
        return answers

    def replica_id(self, timeout_s: float) -> int:
        self._check(self._caller, self._called)
        self._check(self._called, self._caller)
        return self._called

    def log_match(self, candidates: Sequence[tuple[int, int]], timeout_s: float) -> tuple[int, int]:
        answer = self._call("log_match", candidates=[list(each) for each in candidates])
        return answer["candidate"], answer["last_end"]

    def log_units(self, start: int, stop: int, timeout_s: float) -> SoundBytes:
        self._shard.copied.append((self._called, start))
        self._shard.copies_most -= 1
        if self._shard.copies_most < 0:
            raise Unavailable("no answer any more")
        return unpack_sound_bytes(self._call("log_units", start=start, stop=stop))

    def _call(self, op: str, **args: Any) -> dict[str, Any]:
        self._check(self._caller, self._called)
        answer = self._shard.hosts[self._called].call(op, json.loads(json.dumps(args)))
        return json.loads(json.dumps(answer))

    def _check(self, source: int, target: int) -> None:
        if (source, target) in self._shard.cut or self._called not in self._shard.hosts:
            raise Unavailable("no answer")

    def close(self) -> None:
        return


class Shard:
    def __init__(self, root: Path, members: int = 3) -> None:
        self.root = root
        self.members = members
        self.hosts: dict[int, ReplicaHost] = {}
        #: (from, to) of messages that are lost
        self.cut: set[tuple[int, int]] = set()
        #: how often others may still ask for bytes
        self.copies_most = 1 << 30
        #: (replica, physical offset) of bytes that others asked for
        self.copied: list[tuple[int, int]] = []
        #: errors that the next calls of other replicas raise
        self.faults: list[Exception] = []
        self._incarnation = 0
        #: of its replicas
        self.addresses = KnownAddresses()
        self.roles: tuple[str, ...] = ("group_commit", "replication")
        #: epoch -> replicas that led it
        self.led: dict[int, set[int]] = {}

    def start(
        self,
        replica: int,
        generations: tuple[int, ...] = (),
        *,
        is_new_complete: bool = True,
        limits: ElectionLimits = LIMITS,
    ) -> ReplicaHost:
        self._incarnation += 1
        self.hosts[replica] = open_replica(
            self.root / "-".join(map(str, (replica, *generations))),
            CONFIG,
            identity={
                "cluster_id": "c",
                "shard": 0,
                "replica": replica,
                "incarnation": make_incarnation(
                    generations[replica] if generations else 0, self._incarnation
                ),
            },
            generations=generations,
            is_new_complete=is_new_complete,
            roles=self.roles,
            members=range(self.members),
            candidates=range(self.members),
            connect_peer=lambda other: Link(self, replica, other),
            addresses=self.addresses,
            limits=limits,
            note_leadership=lambda epoch: self.led.setdefault(epoch, set()).add(replica),
        )
        # No satellite runs. What is elected shall not depend on it.
        self.hosts[replica].elections.connect(can_stream=lambda: True)
        return self.hosts[replica]

    def start_all(self) -> None:
        for replica in range(self.members):
            self.start(replica)

    def kill(self, replica: int) -> None:
        """End it without a word to the others. Its answers under way get lost."""
        host = self.hosts.pop(replica)
        host.close(0.0)

    def isolate(self, replica: int) -> None:
        """Lose all messages to and from a replica."""
        for other in range(self.members):
            self.cut |= {(replica, other), (other, replica)}

    def leaders(self) -> list[int]:
        return [
            replica
            for replica, host in self.hosts.items()
            if host.elections.leads and host.roles.mode == "leader" and host.store.flags.writable
        ]

    def wait_leader(self, *, other_than: int | None = None) -> int:
        """Wait until a replica leads, other than a certain one, and takes puts."""

        def found() -> list[int]:
            return [each for each in self.leaders() if each != other_than]

        wait_until(found, "a replica leads")
        return found()[-1]

    def start_led_by_0(self) -> None:
        """Start replicas 0 and 1 so that replica 0 leads: the other one would ask for votes in an hour only."""
        self.start(1, limits=replace(LIMITS, election_ms=3_600_000))
        self.start(0)
        wait_until(lambda: self.leaders() == [0], "replica 0 leads")

    def close(self) -> None:
        for replica in list(self.hosts):
            self.kill(replica)
        assert all(len(replicas) == 1 for replicas in self.led.values()), "an epoch had two leaders"


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[Shard]:
    made = Shard(tmp_path)
    yield made
    made.close()


def test_the_ack_loop_of_a_follower_acknowledges_on_the_stream_of_its_leader(shard: Shard) -> None:
    host = shard.start(1)
    assert isinstance(host.role, follower.Follower)
    assert isinstance(host.streams, FollowerSession)
    assert host.role._port.acknowledge_synced == host.streams.acknowledge_synced


def test_three_replicas_elect_one_leader_and_the_others_name_it(shard: Shard) -> None:
    shard.start_all()

    def hints() -> set[tuple[int | None, int]]:
        known = [host.election_loop.leader_hint() for host in shard.hosts.values()]
        return {(hint["replica"], hint["epoch"]) for hint in known}

    wait_until(lambda: len(hints()) == 1 and shard.leaders(), "all name the same leader")
    ((leader, epoch),) = hints()
    assert leader is not None
    assert shard.hosts[leader].log.last_epoch == epoch
    for replica, other in shard.hosts.items():
        if replica != leader:
            assert other.roles.mode == "follower"
            with pytest.raises(Unavailable, match="does not lead") as refused:
                put_one(other, request([b"x"]))
            found = from_wire(to_wire(refused.value))
            assert type(found) is NotLeading
            endpoint = shard.hosts[leader].election_loop.leader_hint()["endpoint"]
            assert (found.endpoint, found.epoch) == (endpoint, epoch)
            assert (found.field, found.limit) == ("leader", endpoint)


def test_a_replica_names_the_others_as_its_elections_know_them(shard: Shard) -> None:
    shard.start_all()
    host = shard.hosts[1]
    assert host.call("replicas", {}) == {}
    # Of an earlier start, as the controller or `start` have told it. Replica 2 has another address since.
    host.addresses.set_routes({}, {"0": {"0": "a:1", "2": "a:3"}, "1": {"0": "b:1"}})
    shard.addresses.known.update({1: "a:2", 2: "c:3"})
    assert host.call("replicas", {}) == {
        "0": {"0": "a:1", "1": "a:2", "2": "c:3"},
        "1": {"0": "b:1"},
    }


def test_a_leader_that_is_gone_is_replaced_in_a_later_epoch_and_follows_when_it_returns(
    shard: Shard,
) -> None:
    shard.start_all()
    first = shard.wait_leader()
    epoch = shard.hosts[first].elections.epoch
    shard.kill(first)
    second = shard.wait_leader(other_than=first)
    assert shard.hosts[second].elections.epoch > epoch
    returned = shard.start(first)
    wait_until(
        lambda: returned.election_loop.leader_hint()["replica"] is not None, "it hears the leader"
    )
    assert returned.roles.mode == "follower"


def test_a_single_replica_of_three_leads_nothing(shard: Shard) -> None:
    host = shard.start(0)
    wait_until(lambda: host.elections._machine._question >= 3, "it has asked three times")
    assert host.elections.epoch == 0
    assert host.roles.mode == "follower"
    with pytest.raises(Unavailable, match="does not lead"):
        put_one(host, request([b"x"]))


def test_a_leader_that_hears_no_majority_takes_no_puts_and_its_waiting_puts_are_unknown(
    shard: Shard,
) -> None:
    shard.start_all()
    first = shard.wait_leader()
    host = shard.hosts[first]
    assert host.store.topics.create("t", 1, [0]) is not None
    # No satellite syncs it, so that it waits.
    ticket = put_one(host, request([b"waits"]))
    shard.isolate(first)
    second = shard.wait_leader(other_than=first)
    wait_until(lambda: host.role.mode == "follower", "the old leader steps down")
    # A follower keeps no records for delayed messages: compaction is the only one that does.
    assert len(host.store.retention_floors) == 1
    with pytest.raises(DeliveryUnknown):
        ticket.wait(5)
    with pytest.raises(Unavailable):
        put_one(host, request([b"late"]))

    shard.cut.clear()
    wait_until(
        lambda: host.election_loop.leader_hint()["replica"] == second, "it hears the new leader"
    )
    assert host.roles.mode == "follower"
    assert host.elections.epoch == shard.hosts[second].elections.epoch


def test_the_third_replica_leads_after_the_syncs_of_two_have_failed_one_after_the_other(
    shard: Shard,
) -> None:
    shard.start_all()
    failed: list[int] = []
    for _ in range(2):
        leading = shard.wait_leader()
        failed.append(leading)
        shard.hosts[leading].supervisor.poison("fdatasync: errno 5")
        wait_until(lambda: shard.hosts[failed[-1]].serving.stop_error is not None, "it has stopped")
        shard.wait_leader(other_than=leading)
    assert shard.wait_leader() not in failed


def fill(host: ReplicaHost, rows: int = 3) -> int:
    """A leader stores messages in a topic, synced. Returns: the end of its log."""
    host.store.topics.create("t", 1, [0])
    for row in range(rows):
        put_one(host, request([b"%d" % row * 50_000]))
    host.log.sync()
    return host.log.end


def fail_sync(host: ReplicaHost) -> None:
    host.supervisor.poison("fdatasync: errno 5")
    wait_until(lambda: host.serving.stop_error is not None, "it has stopped")


def bytes_of(host: ReplicaHost, end: int) -> list[bytes]:
    size = CONFIG.segment_size_bytes
    return [
        bytes(host.log.reads.raw(start, min(end, start + size))) for start in range(0, end, size)
    ]


def test_a_replica_copies_what_it_lacks_from_one_whose_sync_failed_and_leads(shard: Shard) -> None:
    shard.start_all()
    first = shard.wait_leader()
    end = fill(shard.hosts[first], rows=12)
    assert end > 2 * CONFIG.segment_size_bytes
    away, lagging = [each for each in range(3) if each != first]
    shard.kill(away)
    # What was written after the sync that failed is not copied.
    put_one(shard.hosts[first], request([b"not synced"]))
    fail_sync(shard.hosts[first])

    assert shard.wait_leader(other_than=first) == lagging
    host = shard.hosts[lagging]
    assert bytes_of(host, end) == bytes_of(shard.hosts[first], end)
    assert host.roles.led is not None
    assert {replica for replica, _ in shard.copied} == {first}
    with pytest.raises(Unavailable, match="up to"):
        shard.hosts[first].call("log_units", {"start": end, "stop": end + 1})


def test_records_of_an_earlier_leader_that_no_other_replica_has_give_way_to_copied_ones(
    shard: Shard,
) -> None:
    shard.start_all()
    first = shard.wait_leader()
    fill(shard.hosts[first], rows=2)
    private = bytes_of(shard.hosts[first], shard.hosts[first].log.end)
    shard.isolate(first)
    second = shard.wait_leader(other_than=first)
    end = fill(shard.hosts[second], rows=1)
    shard.kill(3 - first - second)
    shard.cut.clear()
    host = shard.hosts[first]
    wait_until(
        lambda: host.election_loop.leader_hint()["replica"] == second, "it hears the new leader"
    )
    fail_sync(shard.hosts[second])

    assert shard.wait_leader(other_than=second) == first
    assert bytes_of(host, end) == bytes_of(shard.hosts[second], end)
    assert bytes_of(host, end)[0] != private[0][:end]


def test_a_source_whose_synced_end_is_inside_of_a_unit_gives_the_whole_unit(shard: Shard) -> None:
    shard.start_all()
    first = shard.wait_leader()
    host = shard.hosts[first]
    end = fill(host)
    away, lagging = [each for each in range(3) if each != first]
    shard.kill(away)
    unit = host.log.chain.last
    assert unit is not None
    # As when a leader's larger unit was adopted over synced bytes, and the next sync fails.
    host.log.marks.lower(unit.start + 1)
    fail_sync(host)
    assert shard.wait_leader(other_than=first) == lagging
    assert bytes_of(shard.hosts[lagging], end) == bytes_of(host, end)


def test_a_log_whose_last_epoch_is_not_known_is_not_offered(shard: Shard) -> None:
    shard.start_all()
    host = shard.hosts[shard.wait_leader()]
    end = fill(host)
    with host.store.put_lock:
        host.log.chain.truncate_to(end - 1)
    fail_sync(host)
    facts = host.elections._facts()
    assert facts.recency == (host.elections.epoch, end)
    assert facts.offered == (0, 0)


def test_a_copy_that_breaks_off_inside_of_the_log_leaves_it_as_recent_as_it_was(
    shard: Shard,
) -> None:
    shard.start(0)
    shard.start(1)
    first = shard.wait_leader()
    host, lagging = shard.hosts[first], shard.hosts[1 - first]
    end = fill(host, rows=12)
    # The lagging replica has the same bytes in one unit of each file, as after a crash. It lacks the last unit.
    units = host.log.chain.units(0, end)
    kept = units[-1].start
    pieces = [piece for piece in bytes_of(host, kept) if piece]
    wait_until(
        lambda: lagging.election_loop.leader_hint()["replica"] == first, "it hears the leader"
    )
    at = value = 0
    for piece in pieces:
        unit = ChainUnit(at, at + len(piece), units[0].epoch, crc32c(piece), value)
        with lagging.log_guard.lock:
            assert lagging.store.followed is not None
            epoch = lagging.elections.epoch
            lagging.store.followed.append_units([unit], memoryview(piece), epoch=epoch)
        at, value = unit.end, unit.value
    before = lagging.log.last_epoch, lagging.log.end
    shard.copies_most = 1
    fail_sync(host)
    wait_until(lambda: shard.copies_most < 0, "a copy has broken off")
    assert (lagging.log.last_epoch, lagging.log.end) == before
    assert lagging.log.chain.end == lagging.log.end

    shard.copies_most = 1 << 30
    assert shard.wait_leader(other_than=first) == lagging.elections.me.id
    assert bytes_of(lagging, end) == bytes_of(host, end)


def test_a_log_is_matched_by_places_that_it_has_and_that_do_not_change_any_more(
    shard: Shard,
) -> None:
    shard.start_all()
    host = shard.hosts[shard.wait_leader()]
    end = fill(host)
    units = host.log.chain.units(0, end)
    places = [[unit.end, unit.value] for unit in units]
    # Nothing is confirmed, and no sync has failed.
    assert host.call("log_match", {"candidates": places}) == {"candidate": -1, "last_end": end}
    fail_sync(host)
    assert host.call("log_match", {"candidates": places})["candidate"] == len(units) - 1
    wrong = [places[0], [places[1][0], 7]]
    assert host.call("log_match", {"candidates": wrong})["candidate"] == 0
    with pytest.raises(Rejected, match="candidates"):
        host.call("log_match", {"candidates": []})


@pytest.fixture
def async_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shard]:
    monkeypatch.setitem(globals(), "CONFIG", replace(CONFIG, flush="async"))
    made = Shard(tmp_path)
    made.roles = ("flush_real_time", "replication")
    yield made
    made.close()


def ask_vote(host: ReplicaHost, recency: tuple[int, int]) -> wire.VoteReply:
    """A candidate with a log that ends so asks for a vote. Raises: Unavailable."""
    candidate = wire.ReplicaProcess((host.elections.me.id + 1) % 3, make_incarnation(0, 999))
    header = wire.FrameHeader(
        wire.cluster_key("c"),
        0,
        candidate,
        wire.ReplicaProcess(host.elections.me.id, 0),
        host.elections.epoch + 1,
        0,
    )
    (answer,) = host.election_loop.elect(wire.encode(header, wire.RequestVote(*recency)))
    _, reply = wire.decode(answer)
    assert isinstance(reply, wire.VoteReply)
    return reply


def test_no_vote_of_a_replica_whose_sync_failed_counts_as_complete_before_that_is_noted(
    async_shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    async_shard.start_all()
    host = async_shard.hosts[async_shard.wait_leader()]
    host.store.topics.create("t", 1, [0])
    log = host.log
    assert log.synced < log.end
    # The disk is slow: the note of the failed sync takes a while.
    entered, go = threading.Event(), threading.Event()
    update = log.meta.update

    def update_slowly(values: dict[str, Any]) -> None:
        if "poisoned" in values:
            entered.set()
            go.wait(TIMEOUT_S)
        update(values)

    monkeypatch.setattr(log.meta, "update", update_slowly)
    host.supervisor.poison("fdatasync: errno 5")
    assert entered.wait(TIMEOUT_S)
    reply = ask_vote(host, (log.last_epoch, log.synced))
    go.set()
    assert not (reply.granted and reply.is_complete)
    wait_until(lambda: host.serving.stop_error is not None, "it has stopped")
    assert not host.elections.is_complete


def test_a_replica_that_stopped_for_damage_gives_no_vote_after_a_failed_sync(
    async_shard: Shard,
) -> None:
    async_shard.start_all()
    host = async_shard.hosts[async_shard.wait_leader()]
    host.serving.fail(Corrupt("a bad sector", rule="crc"))
    host.log.health.poison("fdatasync: errno 5")
    with pytest.raises(Unavailable, match="a bad sector"):
        ask_vote(host, (host.log.last_epoch, host.log.end))


def test_a_replica_whose_chain_ends_below_what_is_synced_votes_for_no_older_log(
    shard: Shard,
) -> None:
    shard.start_all()
    host = shard.hosts[shard.wait_leader()]
    host.log.sync()
    host.supervisor.poison("fdatasync: errno 5")
    wait_until(lambda: host.serving.stop_error is not None, "it has stopped")
    # As after a cut of which the sync has failed: the chain is cut to the unit before.
    host.log.chain.truncate_to(0)
    assert not ask_vote(host, (0, host.log.end + 1)).granted


def test_a_leader_that_stops_writing_serves_no_reads_that_a_new_leader_may_contradict(
    shard: Shard,
) -> None:
    shard.start_all()
    first = shard.wait_leader()
    host = shard.hosts[first]
    host.serving.fail(Unavailable("the disk failed", field="store"))
    assert host.roles.mode == "follower"
    with pytest.raises(Unavailable, match="does not lead"):
        host.fetch(FetchRequest("t", {0: 0}, 1000, 10, 0))
    with pytest.raises(Unavailable, match="does not lead"):
        host.call("topic", {"name": "t"})
    shard.wait_leader(other_than=first)


def test_a_fetch_that_waits_is_refused_although_it_was_woken_before_the_epoch_ended(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard.start_all()
    host = shard.hosts[shard.wait_leader()]
    assert host.store.topics.create("t", 1, [0]) is not None
    woken, leave = threading.Event(), host.election_loop.leave
    request = FetchRequest("t", {0: 0}, 1000, 10, 60_000)
    with HeldFetch(host, request, Clock(), woken.set) as held:
        assert held.poll() is None

        def leave_late() -> None:
            assert woken.wait(30)
            woken.clear()
            assert held.poll() is None
            leave()

        monkeypatch.setattr(host.election_loop, "leave", leave_late)
        host.serving.fail(Unavailable("the disk failed", field="store"))
        assert woken.wait(30)
        with pytest.raises(Unavailable, match="does not lead"):
            held.poll()


def test_a_follower_whose_turn_has_come_asks_for_votes_although_its_loop_was_asleep(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "IDLE_WAIT_MS", 60_000)
    # Only the preferred replica asks before a minute is over.
    limits = replace(LIMITS, election_ms=60_000, majority_silence_ms=60_000)
    for replica in reversed(range(shard.members)):
        shard.start(replica, limits=limits)
    first = shard.wait_leader()
    host = shard.hosts[max(set(shard.hosts) - {first})]
    wait_until(lambda: host.elections.leader is not None, "it hears the leader")
    shard.kill(first)
    host.elections.step(LeaderLost(first, host.elections.epoch))
    wait_until(lambda: host.elections.leader is None, "it asks for votes")


class HeldLock:
    """A lock that the ack loop does not get before `released`, as while a write to a slow disk holds it."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self.is_awaited = threading.Event()
        self.released = threading.Event()

    def acquire(self, blocking: bool = True) -> bool:
        if threading.current_thread().name == "raymq-acks":
            if not blocking:
                return False
            self.is_awaited.set()
            assert self.released.wait(TIMEOUT_S)
        return self._lock.acquire(blocking)

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *exc: object) -> None:
        self.release()


@pytest.mark.parametrize("name", ["put_lock", "log_lock"])
def test_the_heartbeat_goes_on_while_the_ack_loop_waits_for_a_lock_that_a_slow_disk_holds(
    shard: Shard, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    shard.start_all()
    leader = shard.wait_leader()
    host = next(host for replica, host in shard.hosts.items() if replica != leader)
    wait_until(lambda: host.role.mode == "follower", "it follows")
    clock = ManualClock(monotonic_ms=Clock().monotonic_ms())
    monkeypatch.setattr(host.heartbeat, "_clock", clock)
    if name == "put_lock":
        lock = HeldLock(host.store.put_lock.thread_lock)
        monkeypatch.setattr(host.elections, "_put_lock", lock)
    else:
        lock = HeldLock(host.log_guard.lock)
        monkeypatch.setattr(host.log_guard, "lock", lock)

    try:
        assert lock.is_awaited.wait(TIMEOUT_S)
        clock.advance(10 * ITERATION_MAX_MS)
        host.supervisor.control.heartbeat_ms = 0
        host.heartbeat.beat_if_alive()
        assert host.supervisor.control.heartbeat_ms
    finally:
        lock.released.set()


def test_a_leader_tells_no_offsets_before_those_of_its_predecessor_are_confirmed(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "CONFIRMED_WAIT_MS", 50)
    shard.start_all()
    host = shard.hosts[shard.wait_leader()]
    store, asked = host.store, ("offsets", {"group": "g", "topic": "t"})
    assert store.topics.create("t", 1, [0]) is not None
    store.commit_offsets("g", "t", {0: 1})
    with pytest.raises(Unavailable, match="lack .* acknowledged bytes"):
        host.call(*asked)

    confirm_only(store)
    store.commit_offsets("g", "t", {0: 2})
    assert host.call(*asked) == {"0": 1}
    # Another leader may come whose log lacks the last commit.
    shard.isolate(host.options.identity["replica"])
    wait_until(lambda: host.role.mode == "follower", "it steps down")
    with pytest.raises(Unavailable, match="does not lead"):
        host.call(*asked)


QUESTIONS = {
    "offsets": {"group": "g", "topic": "t"},
    "queue_ranges": {"topic": "t"},
    "offsets_by_time": {"topic": "t", "times": {"0": 1}, "boundary": "first"},
    "find_messages": {
        "topic": "t",
        "key": "k",
        "is_unique": False,
        "begin_ms": 0,
        "end_ms": 1,
        "max_records": 1,
    },
    "place_of_message": {"message_id": "0" * 32},
    "place_of_record": {"physical_offset": 0},
    "known_producers": {"producer_ids": [7]},
    "lock_queues": {"group": "g", "topic": "t", "client": "c", "queues": [0]},
    "unlock_queues": {"group": "g", "topic": "t", "client": "c", "queues": [0]},
    "note_foreign_members": {"protocol": "p", "server": "s", "groups": {}},
    "notify_reset": {"group": "g", "number": 1, "offsets": {}},
    "queue_locks": {"group": "g", "topic": "t"},
}


@pytest.mark.parametrize("question", [*QUESTIONS, "commit", "fetch"])
def test_a_leader_that_is_cut_off_says_nothing_that_a_newer_one_may_contradict(
    shard: Shard, question: str
) -> None:
    shard.start_all()
    first = shard.wait_leader()
    host = shard.hosts[first]
    assert host.store.topics.create("t", 1, [0]) is not None
    host.store.commit_offsets("g", "t", {0: 0})
    confirm_only(host.store)

    def ask() -> None:
        if question == "commit":
            host.call("commit_offsets", {"group": "g", "topic": "t", "offsets": {"0": 5}})
        elif question == "fetch":
            (found,) = host.fetch(FetchRequest("t", {0: 5}, 1000, 10, 0))
            assert found.error is not None
            raise found.error
        else:
            host.call(question, QUESTIONS[question])

    if question in QUESTIONS:
        ask()
    else:
        with pytest.raises(OffsetOutOfRange):
            ask()

    shard.isolate(first)
    assert host.elections.leads
    with pytest.raises(Unavailable, match="does not lead"):
        ask()


@pytest.mark.parametrize("decision", ["commit", "rollback", "unknown"])
def test_a_leader_that_is_cut_off_does_not_say_what_has_become_of_a_half_message(
    shard: Shard, decision: str
) -> None:
    shard.start_all()
    first = shard.wait_leader()
    host = shard.hosts[first]
    assert host.store.topics.create("t", 1, [0]) is not None
    confirm_only(host.store)
    shard.isolate(first)
    assert host.elections.leads
    # The half message may be in the log of a newer leader.
    with pytest.raises(Unavailable, match="does not lead"):
        host.call("end_half", {"offset": 0, "group": "g", "decision": decision})


def test_too_few_answers_within_the_limit_refuse_a_question(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader, "CHECK_WAIT_MS", 1)
    shard.start_all()
    first = shard.wait_leader()
    host = shard.hosts[first]
    assert host.store.topics.create("t", 1, [0]) is not None
    confirm_only(host.store)
    monkeypatch.setattr(host.elections._machine, "led_at", lambda check: False)
    with pytest.raises(Unavailable, match="too few replicas have said") as refused:
        host.call("offsets", QUESTIONS["offsets"])
    assert refused.value.retriable


def test_a_vote_ends_the_leaders_epoch_before_any_byte_more_is_written(shard: Shard) -> None:
    shard.start_all()
    first = shard.wait_leader()
    host = shard.hosts[first]
    assert host.store.topics.create("t", 1, [0]) is not None
    end = host.log.end
    epoch = host.elections.epoch
    host.log.epoch_floor = epoch + 1
    ticket = put_one(host, request([b"of an epoch that is over"]))
    with pytest.raises(Unavailable, match="is over"):
        ticket.wait(5)
    assert host.log.end == end


def test_a_replica_that_a_leader_names_takes_over(shard: Shard) -> None:
    shard.start_all()
    first = shard.wait_leader()
    host = shard.hosts[first]
    with pytest.raises(Rejected, match="cannot lead"):
        host.call("move_leader", {"replica": 7})
    with pytest.raises(Rejected, match="cannot lead"):
        host.call("move_leader", {"replica": first})


def test_puts_of_many_threads_meet_a_change_of_the_leader_and_each_is_answered(
    shard: Shard,
) -> None:
    shard.start_all()
    first = shard.wait_leader()
    host = shard.hosts[first]
    assert host.store.topics.create("t", 1, [0]) is not None
    answers: list[str] = []
    began = threading.Event()

    def send() -> None:
        while host.roles.mode == "leader" or not answers:
            try:
                ticket = put_one(host, request([b"x"]))
                began.set()
                ticket.wait(10)
                answers.append("stored")
            except RayMQError as error:
                answers.append(to_wire(error)["kind"])

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    began.wait(10)
    shard.isolate(first)
    shard.wait_leader(other_than=first)
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert set(answers) <= {"DeliveryUnknown", "Unavailable"}


def test_a_replica_whose_disk_takes_no_epoch_record_lets_another_one_lead(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    #: the first replica that is elected from now on
    full: list[int] = []

    def fill_disk(replica: int) -> None:
        store = shard.hosts[replica].store
        lead = store.lead

        def refuse_first(epoch: int) -> AppendedRows:
            if full in ([], [replica]):
                full[:] = [replica]
                raise StorageFull("the disk is full")
            return lead(epoch)

        monkeypatch.setattr(store, "lead", refuse_first)

    # The last one waits for a leader for longer than the other two: it leads because it is asked to.
    shard.start(0)
    shard.start(1)
    shard.start(2, limits=replace(LIMITS, election_ms=1_500))
    first = shard.wait_leader()
    # Before the others elect.
    for each in set(shard.hosts) - {first}:
        fill_disk(each)
    shard.kill(first)
    third = shard.wait_leader()
    assert full not in ([], [third])
    host = shard.hosts[full[0]]
    wait_until(lambda: "lead" not in host.failures, "it gave up")

    # The next epoch that it is elected for may begin at once.
    full[:] = [first]
    assert host.led_epoch.may_try
    shard.start(first)
    shard.isolate(third)
    shard.wait_leader(other_than=third)


def test_a_leader_whose_appends_fail_for_long_stops_puts_for_its_successor(
    shard: Shard, caplog: pytest.LogCaptureFixture
) -> None:
    shard.start_all()
    first = shard.wait_leader()
    other = (first + 1) % 3
    host = shard.hosts[first]
    host.elections.step(FollowerHeard(other, host.elections.epoch, host.log.end, is_complete=True))
    assert host.store.topics.create("t", 1, [0]) is not None
    host.store.flags.set(DISK_FULL)
    with pytest.raises(Unavailable, match="another replica takes over"):
        put_one(host, request([b"x"])).wait(5)

    def hear() -> bool:
        epoch, end = host.elections.epoch, host.log.end
        host.elections.step(FollowerHeard(other, epoch, end, is_complete=True))
        return bool(host.store.flags.bits & FENCED)

    wait_until(hear, "it takes no puts, so that its successor can get all of its log")
    # The log names the reason after the ballot is synced.
    reason = f"replica {other} shall lead: the disk stored nothing for"
    wait_until(lambda: reason in caplog.text, "it says why")


def test_elections_go_on_after_errors_of_any_kind_in_the_calls_of_other_replicas(
    shard: Shard, caplog: pytest.LogCaptureFixture
) -> None:
    shard.faults = [ValueError("no library raises this"), OSError("broken"), Unavailable("late")]
    shard.start_all()
    shard.wait_leader()
    assert not shard.faults
    assert "no library raises this" in caplog.text


def test_clients_are_answered_before_the_threads_of_an_ended_leadership_are_awaited(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard.start_all()
    first = shard.wait_leader()
    host = shard.hosts[first]
    assert host.store.topics.create("t", 1, [0]) is not None
    ticket = put_one(host, request([b"waits"]))
    done = []
    end_threads = host.roles.end_threads

    def end() -> None:
        done.append(ticket.done)
        end_threads()

    monkeypatch.setattr(host.roles, "end_threads", end)
    shard.isolate(first)
    wait_until(lambda: host.role.mode == "follower", "the old leader steps down")
    assert done[0]


def test_the_flush_service_works_again_after_a_cut_of_the_log_that_failed(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(offset: int, *, epoch: int) -> None:
        raise OSError(5, "the disk does not answer")

    shard.start_all()
    leader = shard.wait_leader()
    host = next(host for replica, host in shard.hosts.items() if replica != leader)
    wait_until(lambda: host.role.mode == "follower", "it follows")
    begun = []
    monkeypatch.setattr(host.store.followed, "truncate", fail)
    monkeypatch.setattr(host.log_guard, "begin_satellites", lambda: begun.append(host.log.end))
    with pytest.raises(OSError, match="does not answer"):
        FollowerLogPort(host.parts).truncate(0)
    assert begun == [host.log.end]
    assert "append" in host.failures


@pytest.mark.parametrize("operation", ["cut", "take-over"])
def test_roles_are_granted_again_after_a_cut_that_a_satellite_did_not_make_way_for(
    shard: Shard, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    shard.start_all()
    leader = shard.wait_leader()
    host = next(host for replica, host in shard.hosts.items() if replica != leader)
    wait_until(lambda: host.role.mode == "follower", "it follows")
    revoke = host.supervisor.revoke

    def refuse(role: str) -> None:
        revoke(role)
        if role == "replication":
            raise Unavailable("replication did not end; is the disk hanging?")

    monkeypatch.setattr(host.supervisor, "revoke", refuse)
    monkeypatch.setattr(host.store.followed, "truncate", lambda *_, **__: pytest.fail("a cut"))
    monkeypatch.setattr(host.store.followed, "apply_all", lambda: True)
    operations = {
        "cut": lambda: FollowerLogPort(host.parts).truncate(0),
        "take-over": lambda: host.log_guard.satellites_paused_for_cut().__enter__(),
    }
    with pytest.raises(Unavailable, match="is the disk hanging"):
        operations[operation]()
    assert not any(lease.suspended for lease in host.supervisor._leases.values())


def test_a_replaced_replica_that_returns_is_refused_by_all_that_know_its_successor(
    shard: Shard,
) -> None:
    shard.start_all()
    leader = shard.wait_leader()
    lost = next(each for each in (2, 1) if each != leader)
    old = shard.hosts.pop(lost)
    new = shard.start(lost, tuple(int(each == lost) for each in range(3)))

    def known() -> list[bool]:
        others = [host for host in shard.hosts.values() if host is not new]
        return [host.elections._machine.is_replaced(old.elections.me) for host in others]

    wait_until(lambda: all(known()), "both others know the successor")
    frames: list[bytes] = []
    old.elections.connect(send_frame=lambda replica, frame: frames.append(frame))
    wait_until(lambda: frames, "the old one asks for votes")
    for host in shard.hosts.values():
        if host is not new:
            with pytest.raises(Rejected, match=f"replica {lost} was replaced") as refused:
                host.election_loop.elect(frames[0])
            assert refused.value.field == "generation"
    old.close(0.0)


def note_complete_replicas(shard: Shard, replicas: range) -> None:
    """Let the leader hear that these replicas are complete, as Replication reports, and write it down."""
    host = shard.hosts[shard.wait_leader()]
    assert host.roles.led is not None
    for replica in replicas:
        progress = FollowerProgress(host.roles.led.epoch, host.log.end, 1, is_complete=True)
        host.supervisor.control.followers[replica].write(progress)
    host.role.upkeep()
    noted = host.store.state.progress[COMPLETE_REPLICAS]
    assert noted == {str(replica): 0 for replica in replicas}


def lose_disks(shard: Shard, lost: list[int]) -> ReplicaHost:
    """Restart all, with empty disks in these replicas. Returns: the leader."""
    for replica in list(shard.hosts):
        shard.kill(replica)
    for replica in lost:
        shutil.rmtree(shard.root / str(replica))
    if len(lost) == shard.members:
        # No replica knows which epochs there were.
        shard.led.clear()
    for replica in range(shard.members):
        shard.start(replica, is_new_complete=False)
    host = shard.hosts[shard.wait_leader()]
    host.role.upkeep()
    return host


@pytest.mark.parametrize(
    ("lost", "is_noted"), [([0, 1, 2], True), ([1, 2], True), ([2], False), ([], False)]
)
def test_a_majority_that_has_lost_its_disks_is_written_down(
    shard: Shard, lost: list[int], is_noted: bool
) -> None:
    shard.start_led_by_0()
    shard.start(2)
    note_complete_replicas(shard, range(3))
    host = lose_disks(shard, lost)
    noted = host.election_loop.unclean_recoveries()
    assert [sorted(each["lost"]) for each in noted] == ([lost] if is_noted else [])
    assert host.election_loop.leader_hint()["unclean_recoveries"] == len(noted)
    # An election before these replicas are complete again is not another loss.
    again = lose_disks(shard, [])
    assert len(again.election_loop.unclean_recoveries()) == len(noted)


def test_new_replicas_have_lost_nothing(shard: Shard) -> None:
    shard.start_led_by_0()
    shard.start(2)
    # As for a shard of one replica that gets two more.
    note_complete_replicas(shard, range(1))
    assert lose_disks(shard, [1, 2]).election_loop.unclean_recoveries() == []
