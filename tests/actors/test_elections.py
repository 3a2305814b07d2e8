"""Each start of a leader begins an epoch of its own, which is on disk before a put is taken."""

from __future__ import annotations

import errno
import inspect
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from raymq.actors.replica import open_replica
from raymq.actors.supervise import led_epoch
from raymq.actors.supervise.ballot import BALLOT
from raymq.actors.supervise.elections import Elections
from raymq.actors.supervise.replica_host import ReplicaHost
from raymq.replication.election_events import (
    BeginEpoch,
    ElectionEffect,
    ElectionTick,
    EpochBegun,
    LeaderHeard,
    ResumePuts,
    StepDown,
    StopPuts,
)
from raymq.replication.wire import ReplicaProcess
from raymq.store.base.clock import Clock
from raymq.store.base.errors import StorageFull, Unavailable
from raymq.store.base.files import Data, Files
from raymq.store.base.running_flags import RunningFlags
from raymq.store.config.promise import Flush
from raymq.store.config.store_config import StoreConfig
from raymq.store.engine.message_store import MessageStore
from raymq.store.log.commit_log import CommitLog
from raymq.store.log.control_files.meta import read_meta
from raymq.store.log.recovery.log_recovery import recover
from raymq.store.put.put_lock import PutLock
from tests.support.batches import put_one, request
from tests.support.replica_pair import wait_until

CONFIG = StoreConfig(segment_size_bytes=256 * 1024, prewrite_window_bytes=64 * 1024)


class Shard:
    """One replica in this process, without satellites."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.host: ReplicaHost | None = None
        self._incarnation = 0

    def open(self, files: Files | None = None) -> ReplicaHost:
        self._incarnation += 1
        self.host = open_replica(
            self.root,
            CONFIG,
            identity={"cluster_id": "c", "shard": 0, "incarnation": self._incarnation},
            roles=("group_commit",),
            files=files,
        )
        return self.host

    def close(self) -> None:
        if self.host is not None:
            self.host.close(1.0)
            self.host = None

    def ballot(self) -> dict[str, Any]:
        found: dict[str, Any] = read_meta(self.root / "raymq" / "meta", files=Files())[BALLOT]
        return found


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[Shard]:
    made = Shard(tmp_path / "store")
    yield made
    made.close()


def test_each_start_begins_the_next_epoch_in_ballot_log_and_control_block(shard: Shard) -> None:
    confirmed = 0
    for epoch in (1, 2, 3):
        host = shard.open()
        assert host.elections.leads
        assert host.log.last_epoch == host.store.state.log_epoch == epoch
        assert host.supervisor.control.leadership.epoch == host.status()["epoch"] == epoch
        assert shard.ballot() == {"epoch": epoch, "voted_for": [0, epoch], "is_complete": True}
        # Replication begins where the epoch before has ended.
        assert host.roles.led.confirmed == confirmed
        confirmed = host.log.confirmed
        assert host.log.synced == confirmed == host.log.end
        shard.close()


def test_a_kill_between_ballot_and_record_leaves_an_epoch_unused(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def die(store: MessageStore, epoch: int) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(MessageStore, "lead", die)
        with pytest.raises(Killed):
            shard.open()
    assert shard.ballot()["epoch"] == 1
    assert shard.open().log.last_epoch == 2


def test_a_lost_ballot_is_read_from_the_log(shard: Shard) -> None:
    for _ in range(3):
        shard.open()
        shard.close()
    meta = CommitLog(shard.root, CONFIG, files=Files(), clock=Clock())
    meta.meta.update({BALLOT: None})
    meta.abandon()
    assert shard.open().log.last_epoch == 4


def test_a_full_disk_delays_the_epoch_and_until_then_only_reads_are_served(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(led_epoch, "LEAD_RETRY_MS", 200)

    class Full(Files):
        is_full = True

        def pwrite(self, fd: int, data: Data, offset: int) -> None:
            if self.is_full and b"EPOCH" in bytes(data):
                raise StorageFull("no space is left", field="disk")
            super().pwrite(fd, data, offset)

    disk = Full()
    host = shard.open(disk)
    assert host.report.state == "READ_ONLY"
    assert "no space is left" in str(host.report.cause)
    with pytest.raises(Unavailable, match="FENCED"):
        put_one(host, request([b"x"]))

    disk.is_full = False
    wait_until(lambda: host.report.state == "RUNNING", "the epoch begins")
    assert host.report.cause is None
    assert host.supervisor.control.leadership.epoch == host.log.last_epoch == 1


def test_a_ballot_that_was_not_synced_stops_the_start(shard: Shard) -> None:
    class NoMeta(Files):
        def sync_data(self, fd: int) -> None:
            raise OSError(errno.EIO, "the disk does not answer")

    with pytest.raises(OSError, match="does not answer"):
        shard.open(NoMeta())


def test_a_follower_notes_the_epoch_of_its_leader_and_never_an_older_one(tmp_path: Path) -> None:
    log = CommitLog(tmp_path, CONFIG, files=Files(), clock=Clock())
    recover(log, 0)

    def elections() -> Elections:
        me = ReplicaProcess(1, 7)
        return Elections(
            log,
            me,
            members=(0, 1),
            candidates=(0,),
            clock=Clock(),
            put_lock=PutLock(Clock()),
            flags=RunningFlags(),
        )

    leader = ReplicaProcess(0, 3)
    follower = elections()
    follower.step(LeaderHeard(leader, 5))
    assert follower.admits(leader, 5)
    assert elections().epoch == 5
    follower.step(LeaderHeard(ReplicaProcess(0, 1), 4))
    assert not follower.admits(ReplicaProcess(0, 1), 4)
    follower.step(EpochBegun(5, 10))
    assert not follower.leads
    log.abandon()


def elections_of(log: CommitLog) -> Elections:
    """Those of replica 1 of three, each of which may lead."""
    return Elections(
        log,
        ReplicaProcess(1, 7),
        members=(0, 1, 2),
        candidates=(0, 1, 2),
        clock=Clock(),
        put_lock=PutLock(Clock()),
        flags=RunningFlags(),
    )


def test_a_leader_is_followed_without_a_step_once_its_epoch_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = CommitLog(tmp_path, CONFIG, files=Files(), clock=Clock())
    recover(log, 0)
    follower = elections_of(log)
    leader = ReplicaProcess(0, 3)
    update, seen = log.meta.update, []

    def watched(values: dict[str, object]) -> None:
        seen.append((follower.admits(leader, 5), follower.follows(leader, 5)))
        update(values)

    monkeypatch.setattr(log.meta, "update", watched)
    follower.step(LeaderHeard(leader, 5))
    assert seen == [(True, False)]
    assert follower.follows(leader, 5)
    log.abandon()


class OtherBoot(Files):
    """The machine after a power loss: nothing that a boot leaves in memory is there."""

    def boot_id(self) -> str:
        return "00000000-0000-0000-0000-000000000002"


@pytest.mark.parametrize(
    ("flush_before", "flush_after", "is_complete"),
    [
        ("async", "async", False),
        ("async", "sync", False),
        ("sync", "sync", True),
        ("sync", "async", True),
    ],
)
def test_a_power_loss_counts_by_the_flush_mode_of_the_run_before(
    tmp_path: Path, flush_before: Flush, flush_after: Flush, is_complete: bool
) -> None:
    def elections(flush: Flush, files: Files) -> tuple[CommitLog, Elections]:
        log = CommitLog(tmp_path, replace(CONFIG, flush=flush), files=files, clock=Clock())
        recover(log, 0)
        return log, elections_of(log)

    log, before = elections(flush_before, Files())
    before.step(LeaderHeard(ReplicaProcess(0, 3), 5))
    assert before.is_complete
    log.abandon()
    assert elections(flush_after, OtherBoot())[1].is_complete is is_complete


def test_a_role_has_to_lead_an_epoch_from_its_begin_to_the_step_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = CommitLog(tmp_path, CONFIG, files=Files(), clock=Clock())
    recover(log, 0)
    elections, changes = elections_of(log), []
    elections.connect(on_change=lambda: changes.append(elections.elected_epoch))

    def perform(*effects: ElectionEffect) -> None:
        monkeypatch.setattr(elections._machine, "step", lambda *_: list(effects))
        elections.step(ElectionTick(0.0))

    perform()
    perform(BeginEpoch(4))
    perform(StopPuts("another one shall lead"), ResumePuts("it did not"))
    perform(StepDown("a higher epoch"))
    perform(StepDown("a newer generation"), BeginEpoch(6))
    assert changes == [4, None, 6]
    log.abandon()


def test_a_live_replica_performs_every_effect_of_the_election_machine() -> None:
    performed = inspect.getsource(Elections._step)
    missing = [each.__name__ for each in get_args(ElectionEffect) if each.__name__ not in performed]
    # That of a ballot is found by comparing it with the one on disk: a step before may have failed to store it.
    assert missing == ["Persist"]
