"""The supervisor with real flush services, each in its own process."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from raymq.actors.satellites.service import (
    EXIT_FENCED,
    EXIT_STOPPED_BY_COMMIT_LOG,
    EXIT_SYNC_FAILED,
)
from raymq.actors.shared.control_block import Leadership
from raymq.actors.shared.wakeup import wakeup_directory
from raymq.actors.supervise.lease import Lease
from raymq.actors.supervise.supervisor import STALE_MS, Supervisor
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Bug, Rejected, Unavailable
from raymq.store.base.files import Files
from raymq.store.config.promise import Ends
from tests.support.waiting import until

ROOT = Path(__file__).resolve().parents[2]
SEGMENT = 64 * 1024

SERVICE = """
import sys
from raymq.actors.satellites.flush_service import FlushService
from raymq.store.config.store_config import StoreConfig
config = StoreConfig(segment_size_bytes=int(sys.argv[3]), flush_interval_ms=20)
FlushService(sys.argv[1], sys.argv[2], config).run()
"""

SERVING = """
import sys
from raymq.actors.satellites.flush_service import FlushService
from raymq.actors.satellites.service import serve_grants
from raymq.store.config.store_config import StoreConfig

config = StoreConfig(segment_size_bytes=int(sys.argv[3]))
serve_grants(lambda: FlushService(sys.argv[1], sys.argv[2], config), linger_ms=0)
"""


class AheadClock(Clock):
    """The real clock, plus an offset that the test sets."""

    ahead_ms = 0

    def monotonic_ms(self) -> int:
        return super().monotonic_ms() + self.ahead_ms


class Replica:
    """CommitLog's side of one replica, with a log of zeros, and its satellites."""

    def __init__(self, root: Path, role: str = "group_commit", **options: bool) -> None:
        self.root = root
        self.role = role
        self.options = options
        self.clock = AheadClock()
        self.appended = 0
        self.witness_syncs = 0
        self.witness_error: OSError | None = None
        self.children: list[subprocess.Popen[bytes]] = []
        self.supervisors: list[Supervisor] = []
        (root / "commitlog").mkdir(exist_ok=True)
        (root / "commitlog" / f"{0:020d}").write_bytes(bytes(SEGMENT))
        self.supervisor = self.new_supervisor()
        self.fenced = self.supervisor.fence_old()
        self.supervisor.begin(appended=0, synced=0, confirmed=0)

    def new_supervisor(self) -> Supervisor:
        new = Supervisor(
            self.root,
            [self.role],
            clock=self.clock,
            files=Files(),
            witness_sync=self.witness,
            **self.options,  # type: ignore[arg-type]
        )
        self.supervisors.append(new)
        return new

    def witness(self) -> int:
        if self.witness_error is not None:
            raise self.witness_error
        self.witness_syncs += 1
        return self.appended

    def spawn(self, program: str = SERVICE, **environment: str) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(
            [sys.executable, "-c", program, str(self.root), self.role, str(SEGMENT)],
            cwd=ROOT,
            env={**os.environ, **environment},
            stderr=subprocess.DEVNULL,
        )
        self.children.append(child)
        return child

    def step(self) -> None:
        self.supervisor.wait(20)
        self.supervisor.tick()

    def facts(self) -> dict[str, object]:
        facts: dict[str, object] = self.supervisor.describe()["roles"][self.role]
        return facts

    def await_grant_of(self, child: subprocess.Popen[bytes]) -> None:
        until(lambda: bool(self.facts()["granted"]) and self.facts()["pid"] == child.pid, self.step)

    def await_vacancy(self) -> None:
        until(lambda: not self.facts()["granted"], self.step)

    def append(self, nbytes: int) -> None:
        self.appended += nbytes
        self.supervisor.appends.publish(self.appended)

    def put(self, nbytes: int) -> None:
        self.append(nbytes)
        self.supervisor.appends.wake_for_append()

    def await_synced(self) -> None:
        until(lambda: self.supervisor.progress().ends.synced == self.appended, self.step)

    def await_counts(self, syncs: int) -> None:
        until(lambda: self.facts()["syncs"] == syncs, self.step)

    def abandon(self) -> None:
        """Close as a killed CommitLog does, without a sign to other processes."""
        for supervisor in self.supervisors:
            if supervisor._wakeup is not None:
                supervisor._wakeup._close_sockets()

    def close(self) -> None:
        for child in self.children:
            child.kill()
            child.wait()
        self.abandon()


MakeReplica = Callable[..., Replica]


@pytest.fixture
def make_replica(tmp_path: Path) -> Iterator[MakeReplica]:
    made: list[Replica] = []

    def make(role: str = "group_commit", **options: bool) -> Replica:
        made.append(Replica(tmp_path, role, **options))
        return made[-1]

    yield make
    for replica in made:
        replica.close()
    shutil.rmtree(wakeup_directory(str(tmp_path)), ignore_errors=True)


def test_a_put_is_synced_by_another_process(make_replica: MakeReplica):
    replica = make_replica()
    replica.await_grant_of(replica.spawn())
    for _ in range(5):
        replica.put(1000)
        replica.await_synced()
    # Without Replication all that is committed counts as replicated.
    assert replica.supervisor.progress() == (Ends(5000, 5000, 5000, 5000), [])
    until(lambda: replica.facts()["syncs"] == 5, replica.step)


def test_a_flusher_whose_sync_covers_the_append_is_not_woken(
    make_replica: MakeReplica, monkeypatch: pytest.MonkeyPatch
):
    replica = make_replica()
    replica.await_grant_of(replica.spawn())
    replica.put(1000)
    replica.await_synced()
    woken: list[str] = []
    monkeypatch.setattr(replica.supervisor.appends, "wake", woken.append)
    replica.supervisor.appends.wake_for_append()
    assert woken == []
    replica.supervisor.revoke("group_commit", 5_000)
    # It was woken to leave its role.
    assert woken == ["group_commit"]
    replica.supervisor.appends.wake_for_append()
    assert woken == ["group_commit", "group_commit"]


def test_a_process_whose_grant_was_revoked_gets_the_next_one_without_a_restart(
    make_replica: MakeReplica,
):
    replica = make_replica()
    child = replica.spawn(program=SERVING)
    replica.await_grant_of(child)
    replica.put(1000)
    replica.await_synced()
    replica.supervisor.revoke("group_commit", 5_000)
    assert child.poll() is None
    end = replica.appended
    replica.supervisor.begin(appended=end, synced=end, confirmed=end)
    replica.await_grant_of(child)
    replica.put(1000)
    replica.await_synced()
    assert child.poll() is None


@pytest.mark.usefixtures("idle_cores")
def test_a_flusher_that_an_announcement_woke_is_not_woken_again(
    make_replica: MakeReplica, monkeypatch: pytest.MonkeyPatch
):
    replica = make_replica()
    woken: list[str] = []
    monkeypatch.setattr(replica.supervisor.appends, "wake", woken.append)
    monkeypatch.setattr(replica.clock, "monotonic", lambda: 100.0)

    replica.supervisor.appends.announce()
    assert woken == ["group_commit"]
    replica.append(1000)
    replica.supervisor.appends.wake_for_append()
    assert woken == ["group_commit"]

    # This append was not announced.
    replica.append(1000)
    replica.supervisor.appends.wake_for_append()
    assert woken == ["group_commit"] * 2

    # It is syncing that append when this one is announced, and sleeps after it.
    replica.supervisor.appends.announce()
    assert woken == ["group_commit"] * 3
    replica.append(1000)
    replica.supervisor.appends.wake_for_append()
    assert woken == ["group_commit"] * 4


@pytest.mark.usefixtures("idle_cores")
def test_a_flusher_that_may_sleep_again_is_woken_again(
    make_replica: MakeReplica, monkeypatch: pytest.MonkeyPatch
):
    replica = make_replica()
    woken: list[str] = []
    monkeypatch.setattr(replica.supervisor.appends, "wake", woken.append)
    monkeypatch.setattr(replica.clock, "monotonic", lambda: 100.0)
    replica.supervisor.appends.announce()
    replica.append(1000)
    monkeypatch.setattr(replica.clock, "monotonic", lambda: 100.001)
    replica.supervisor.appends.wake_for_append()
    assert woken == ["group_commit"] * 2


def test_no_flusher_is_granted_before_a_witness_sync(make_replica: MakeReplica):
    replica = make_replica()
    replica.append(1000)
    replica.await_grant_of(replica.spawn())
    assert replica.witness_syncs == 1
    # Bytes that the witness synced need no second sync.
    assert replica.supervisor.progress().ends.synced == 1000
    assert replica.facts()["syncs"] == 0


def test_bytes_that_the_witness_saw_before_they_were_published_do_not_count_yet(
    make_replica: MakeReplica,
):
    replica = make_replica()
    replica.append(1000)
    # The writer has written 500 more, and is about to publish them.
    replica.appended += 500
    replica.await_grant_of(replica.spawn())
    assert replica.supervisor.progress().ends.synced == 1000
    replica.append(0)
    until(lambda: replica.supervisor.progress().ends.synced == 1500, replica.step)


def test_a_killed_flusher_is_replaced_after_one_more_witness_sync_and_the_counts_go_on(
    make_replica: MakeReplica,
):
    replica = make_replica()
    first = replica.spawn()
    replica.await_grant_of(first)
    replica.put(1000)
    replica.await_synced()
    replica.await_counts(1)
    before = replica.facts()["fencing_token"]

    first.kill()
    replica.await_vacancy()
    assert replica.facts()["last_stop_reason"] == "ended"
    replica.append(1000)
    assert replica.supervisor.progress().ends.synced == 1000

    replica.await_grant_of(replica.spawn())
    assert replica.witness_syncs == 2
    assert replica.facts()["fencing_token"] != before
    assert replica.facts()["syncs"] == 1

    replica.put(1000)
    replica.await_synced()
    replica.await_counts(2)
    assert replica.supervisor.sync_latencies().total == 2


def test_puts_that_came_before_the_flusher_are_synced_by_it(make_replica: MakeReplica):
    replica = make_replica()
    for _ in range(3):
        replica.put(1000)
    replica.await_grant_of(replica.spawn())
    replica.await_synced()


def test_a_stopped_flusher_is_killed_after_the_stale_limit(make_replica: MakeReplica):
    replica = make_replica()
    stopped = replica.spawn()
    replica.await_grant_of(stopped)
    os.kill(stopped.pid, signal.SIGSTOP)
    successor = replica.spawn()
    for _ in range(2 + STALE_MS // 900):
        replica.clock.ahead_ms += 900
        replica.supervisor.tick()
    assert stopped.wait(30) == -signal.SIGKILL
    assert replica.facts()["last_stop_reason"] == "stale"
    replica.await_grant_of(successor)
    assert replica.witness_syncs == 2
    replica.put(1000)
    replica.await_synced()


def test_a_second_flusher_waits_for_the_lock_of_the_first(make_replica: MakeReplica):
    replica = make_replica()
    first = replica.spawn()
    replica.await_grant_of(first)
    second = replica.spawn()
    for _ in range(20):
        replica.put(100)
        replica.await_synced()
    assert replica.facts()["pid"] == first.pid
    assert second.poll() is None
    first.kill()
    replica.await_grant_of(second)


def test_a_replication_that_is_granted_during_a_leadership_begins_where_that_began(tmp_path: Path):
    (tmp_path / "new").mkdir()
    supervisor = Supervisor(
        tmp_path / "new", ["replication"], clock=Clock(), files=Files(), witness_sync=lambda: 0
    )
    supervisor.fence_old()
    supervisor.begin(appended=0, synced=0, confirmed=0)
    # It followed for long.
    supervisor.appends.publish(900)
    supervisor.publish_leadership(Leadership(4, 900, 7, confirmed=700))
    assert supervisor.progress().ends.replicated == 700
    assert supervisor.control.leadership == Leadership(4, 900, 7, confirmed=700)
    supervisor.close()
    shutil.rmtree(wakeup_directory(str(tmp_path / "new")), ignore_errors=True)


def test_a_failing_witness_sync_poisons(make_replica: MakeReplica):
    replica = make_replica()
    first = replica.spawn()
    replica.await_grant_of(first)
    first.kill()
    replica.await_vacancy()

    replica.append(1000)
    replica.witness_error = OSError(errno.EIO, "Input/output error")
    replica.spawn()
    until(lambda: replica.supervisor.poisoned is not None, replica.step)
    assert "witness" in str(replica.supervisor.poisoned)

    # For good, also when the disk reports no error any more.
    replica.witness_error = None
    replica.supervisor.tick()
    assert not replica.facts()["granted"]
    assert replica.supervisor.progress().ends.synced == 0
    assert replica.supervisor.describe()["state"] == "POISONED"


def test_a_failing_sync_of_the_flusher_poisons(make_replica: MakeReplica):
    replica = make_replica()
    child = replica.spawn()
    replica.await_grant_of(child)
    (replica.root / "commitlog" / f"{0:020d}").unlink()
    replica.put(1000)
    until(lambda: replica.supervisor.poisoned is not None, replica.step)
    assert child.wait(30) in (EXIT_SYNC_FAILED, -signal.SIGKILL)
    assert replica.supervisor.progress().ends.synced == 0
    replica.abandon()
    # A CommitLog that died before it could report it leaves that to its successor.
    assert replica.new_supervisor().fence_old().failed_sync_errno == errno.ENOENT


def test_fencing_kills_satellites_that_the_dead_commit_log_had_granted(make_replica: MakeReplica):
    replica = make_replica()
    child = replica.spawn()
    replica.await_grant_of(child)
    replica.put(1000)
    replica.await_counts(1)

    replica.abandon()
    successor = make_replica()
    assert successor.fenced.killed == [f"group_commit {child.pid}"]
    # The counts are those of one CommitLog process.
    assert successor.facts()["syncs"] == 0
    assert successor.supervisor.sync_latencies().total == 0
    assert successor.fenced.unfinished_sync is None

    assert child.wait(30) == -signal.SIGKILL
    successor.await_grant_of(successor.spawn())
    successor.put(1000)
    successor.await_synced()


def test_fencing_spares_a_satellite_that_was_never_granted(make_replica: MakeReplica):
    replica = make_replica()
    child = replica.spawn()
    until(lambda: replica.facts()["pid"] == child.pid, lambda: replica.supervisor.wait(20))
    replica.abandon()
    successor = make_replica()
    assert successor.fenced.killed == []
    successor.await_grant_of(child)


def test_a_sync_that_died_with_both_is_reported(make_replica: MakeReplica):
    replica = make_replica()
    child = replica.spawn(RAYMQ_FAILPOINTS="flush.before_sync=kill")
    replica.await_grant_of(child)
    replica.put(1000)
    assert child.wait(30) == -signal.SIGKILL
    replica.abandon()
    assert make_replica().fenced.unfinished_sync == (0, 1000)


def test_a_sync_that_was_not_published_does_not_count(make_replica: MakeReplica):
    replica = make_replica()
    child = replica.spawn(RAYMQ_FAILPOINTS="flush.after_sync_before_report=kill")
    replica.await_grant_of(child)
    replica.put(1000)
    assert child.wait(30) == -signal.SIGKILL
    replica.await_vacancy()
    assert replica.supervisor.progress().ends.synced == 0
    replica.await_grant_of(replica.spawn())
    assert replica.supervisor.progress().ends.synced == 1000


def test_an_orderly_close_lets_the_flusher_finish(make_replica: MakeReplica):
    replica = make_replica()
    child = replica.spawn()
    replica.await_grant_of(child)
    replica.put(1000)
    replica.supervisor.close()
    assert child.wait(30) == EXIT_STOPPED_BY_COMMIT_LOG
    successor = make_replica()
    assert successor.fenced == ([], 0, None)


def test_revoking_kills_and_suspends_the_lease_until_begin(make_replica: MakeReplica):
    replica = make_replica()
    child = replica.spawn()
    replica.await_grant_of(child)
    replica.put(3000)
    replica.await_synced()

    replica.supervisor.revoke("group_commit")
    assert child.wait(30) in (-signal.SIGKILL, EXIT_FENCED)
    successor = replica.spawn()
    until(lambda: replica.facts()["pid"] == successor.pid, replica.step)
    replica.supervisor.tick()
    assert not replica.facts()["granted"]

    replica.appended = 1000
    replica.supervisor.begin(appended=1000, synced=1000, confirmed=1000)
    replica.await_grant_of(successor)
    assert replica.supervisor.progress().ends.synced == 1000
    replica.put(500)
    replica.await_synced()


def test_a_flusher_that_did_not_leave_in_time_for_a_cut_has_a_successor_without_begin(
    make_replica: MakeReplica, monkeypatch: pytest.MonkeyPatch
):
    replica = make_replica()
    child = replica.spawn()
    replica.await_grant_of(child)
    replica.put(3000)
    replica.await_synced()

    with monkeypatch.context() as patch:
        # As while it is in a call of a disk that hangs.
        patch.setattr(Lease, "wait_vacant", lambda *_: False)
        with pytest.raises(Unavailable, match="did not end"):
            replica.supervisor.revoke_all()
    replica.put(500)
    replica.await_grant_of(replica.spawn())
    assert replica.supervisor.progress().ends.synced == 3500
    replica.put(500)
    replica.await_synced()


def test_flush_real_time_flushes_by_its_period(make_replica: MakeReplica):
    replica = make_replica("flush_real_time")
    replica.await_grant_of(replica.spawn())
    replica.append(5 * 4096)
    # Without the pool it is in the file at once.
    assert replica.supervisor.progress().ends.committed == 5 * 4096
    replica.await_synced()


#: flushes at wakeups alone: no test lasts as long as the interval
UNTIMED = """
import sys
from raymq.actors.satellites.flush_service import FlushService
from raymq.store.config.store_config import StoreConfig
config = StoreConfig(
    segment_size_bytes=int(sys.argv[3]), flush_interval_ms=3_600_000, flush_commit_log_timed=False)
FlushService(sys.argv[1], sys.argv[2], config).run()
"""


#: works by an interval that no test lasts
SLOW = """
import sys
from raymq.actors.satellites.flush_service import FlushService
from raymq.store.config.store_config import StoreConfig
config = StoreConfig(segment_size_bytes=int(sys.argv[3]), flush_interval_ms=3_600_000)
FlushService(sys.argv[1], sys.argv[2], config).run()
"""


def test_a_flusher_follows_an_option_that_changes_while_it_works(make_replica: MakeReplica):
    replica = make_replica("flush_real_time")
    replica.await_grant_of(replica.spawn(SLOW))
    replica.append(5 * 4096)
    replica.supervisor.control.publish_options({"flush_interval_ms": 20})
    replica.await_synced()

    # Two pages wait until so many are enough.
    replica.append(2 * 4096)
    replica.supervisor.control.publish_options({"flush_interval_ms": 20, "flush_least_pages": 2})
    replica.await_synced()


def test_a_put_wakes_a_flush_real_time_that_is_not_timed(make_replica: MakeReplica):
    replica = make_replica("flush_real_time", wakes_flush_real_time=True)
    replica.await_grant_of(replica.spawn(UNTIMED))
    replica.put(3 * 4096)
    replica.put(2 * 4096)
    replica.await_synced()


def test_a_synced_end_beyond_the_log_is_a_bug(make_replica: MakeReplica):
    replica = make_replica()
    replica.await_grant_of(replica.spawn())
    record = replica.supervisor.control.roles["group_commit"]
    record.publish_position(record.grant.tag, 1)
    with pytest.raises(Bug):
        replica.supervisor.progress()


def test_beginning_over_a_granted_flusher_is_a_bug(make_replica: MakeReplica):
    replica = make_replica()
    replica.await_grant_of(replica.spawn())
    with pytest.raises(Bug):
        replica.supervisor.begin(appended=0, synced=0, confirmed=0)


def test_an_unknown_role_is_rejected(tmp_path: Path):
    with pytest.raises(Rejected):
        Supervisor(tmp_path, ["poet"], clock=Clock(), files=Files(), witness_sync=lambda: 0)
