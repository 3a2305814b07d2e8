"""The maintenance loop of a replica, and the files that leaders and followers delete."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raymq.actors.replica import open_replica
from raymq.actors.shared.maintenance import FIRST_PASS_MS, Maintenance
from raymq.actors.supervise.replica_host import ReplicaHost
from raymq.store.base.errors import OffsetOutOfRange, Unavailable
from raymq.store.base.status import PutStatus
from raymq.store.config.store_config import StoreConfig
from raymq.store.engine.message_store import MessageStore
from raymq.store.put.put_errors import status_of
from raymq.store.records.requests import FetchRequest
from raymq.store.services import checkpoint_service
from tests.support.batches import put_one, request
from tests.support.clock import ManualClock
from tests.support.confirming import confirm
from tests.support.replica_pair import wait_until
from tests.support.roles import log_of
from tests.support.simulated_disk import SimulatedDisk
from tests.support.waiting import until

SIZE = 64 * 1024
CONFIG = StoreConfig(
    segment_size_bytes=SIZE,
    consume_queue_file_size_bytes=2000,
    prewrite_window_bytes=4096,
    delete_when=";".join(f"{hour:02d}" for hour in range(24)),
    delete_files_interval_ms=0,
    sync_flush_timeout_ms=100,
)


def pause() -> None:
    """Let other threads run."""
    threading.Event().wait(0.001)


def fill(store: MessageStore, files: int) -> None:
    until_end = store.log.end + files * SIZE
    while store.log.end < until_end:
        store.put(request([b"x" * 4000]))


# --- the loop -------------------------------------------------------------------------------------


def test_passes_come_a_minute_after_the_start_and_then_in_their_interval() -> None:
    disk, clock = SimulatedDisk(record=False), ManualClock()
    store = MessageStore.open(Path("/s"), config=CONFIG, files=disk, clock=clock)
    store.topics.create("t", 1, [0])
    samples: list[int] = []
    maintenance = Maintenance(
        store.clean_service, clock=clock, interval_ms=10_000, sample=samples.append
    )

    passes = []
    for _ in range(90):
        disk.used["/s/commitlog"] = disk.used.get("/s/commitlog", 0) + 0.5
        seen = store.clean_service.log_ratio
        maintenance.step()
        if store.clean_service.log_ratio != seen:
            passes.append(len(samples))
        clock.advance(1000)

    assert passes == [FIRST_PASS_MS // 1000 + 1, 71, 81]
    assert len(samples) == 90


def test_a_pass_that_fails_is_reported_and_tried_again() -> None:
    disk, clock = SimulatedDisk(record=False), ManualClock()
    store = MessageStore.open(Path("/s"), config=CONFIG, files=disk, clock=clock)
    store.topics.create("t", 1, [0])
    fill(store, 2)
    confirm(store)
    clock.advance(4 * 24 * 3_600_000)
    maintenance = Maintenance(store.clean_service, clock=clock, interval_ms=10_000)

    maintenance.delete_now()
    disk.fail("unlink")
    maintenance.step()
    assert maintenance.last_error is not None
    assert "Input/output error" in maintenance.last_error

    maintenance.step()
    assert store.log.start == 0
    clock.advance(10_000)
    maintenance.step()
    assert maintenance.last_error is None
    assert store.log.start == 2 * SIZE


def test_an_unexpected_error_ends_a_pass_and_not_the_loop(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk, clock = SimulatedDisk(record=False), ManualClock()
    store = MessageStore.open(Path("/s"), config=CONFIG, files=disk, clock=clock)
    maintenance = Maintenance(store.clean_service, clock=clock, interval_ms=10_000)
    reported: list[str | None] = []

    def broken() -> int:
        raise ValueError("of no known kind")

    def stopping() -> bool:
        """Between two iterations: the first one fails."""
        if maintenance._next_pass_ms > clock.monotonic_ms():
            reported.append(maintenance.last_error)
            clock.advance(10_000)
            monkeypatch.undo()
        maintenance.wake()
        return len(reported) == 2

    monkeypatch.setattr(store.clean_service, "run_once", broken)
    maintenance.delete_now()
    maintenance.run(stopping)
    assert reported == ["of no known kind", None]
    assert "old files could not be deleted: of no known kind" in caplog.text
    store.abandon()


# --- a leader -------------------------------------------------------------------------------------


@pytest.fixture
def leader(tmp_path: Path) -> Iterator[ReplicaHost]:
    """A leader without a flusher: nothing is synced unless the test does it."""
    host = open_replica(
        tmp_path / "leader",
        replace(CONFIG, file_reserved_hours=0),
        identity={"cluster_id": "c", "shard": 0},
        roles=("group_commit",),
    )
    yield host
    host.close(0.1)


def test_a_leader_deletes_on_demand_and_its_status_says_so(leader: ReplicaHost) -> None:
    leader.store.topics.create("t", 1, [0])
    fill(leader.store, 3)
    leader.store.log.sync()
    leader.store.log.note_confirmed(leader.store.log.end)
    leader.dispatcher.wake()
    until(lambda: leader.store.dispatched == leader.store.log.end, pause)

    assert leader.call("status", {})["min_offset"] == 0
    leader.call("delete_expired_files", {})
    until(lambda: leader.store.clean_service.deleted == 3, pause)

    status = leader.call("status", {})
    assert status["min_offset"] == 3 * SIZE
    assert status["clean"]["deleted_files"] == 3
    assert status["clean"]["error"] is None
    assert status["flags"] == []
    assert status["store_stats"]["topics"]["t"]["messages"] > 40

    (part,) = leader.fetch(FetchRequest("t", {0: 0}, 1000, 1, 0))
    assert isinstance(part.error, OffsetOutOfRange)
    assert part.min_offset > 0


def test_a_leader_writes_the_checkpoint_and_the_configuration_while_it_runs(
    leader: ReplicaHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = leader.store
    monkeypatch.setattr(checkpoint_service, "PAUSE_MIN_MS", 0)
    store.checkpoint_service._next_sync_ms = store.checkpoint_service._next_config_ms = 0
    store.topics.create("t", 1, [0])
    store.commit_offsets("g", "t", {0: 0})
    store.log.sync()
    store.log.note_confirmed(store.log.end)
    leader.dispatcher.wake()

    def look() -> None:
        leader.maintenance.wake()
        pause()

    until(lambda: (store.log.root / "config" / "consumerOffset.json").exists(), look)
    until(lambda: store.log.checkpoint.logics_ms == store.state.store_time_ms, look)
    assert store.log.checkpoint.physic_ms == store.state.store_time_ms
    times = (store.log.root / "checkpoint").read_bytes()[:16]
    assert times == 2 * store.state.store_time_ms.to_bytes(8, "big")
    assert leader.call("status", {})["upkeep"] == {"error": None}


def test_an_error_of_the_upkeep_ends_the_loop(leader: ReplicaHost) -> None:
    def broken() -> None:
        raise OSError(errno.EIO, "the disk does not answer")

    maintenance = Maintenance(
        leader.store.clean_service, clock=ManualClock(), interval_ms=10_000, upkeep=broken
    )
    with pytest.raises(OSError, match="does not answer"):
        maintenance.run(lambda: False)


def test_a_columnar_put_that_says_wait_false_is_answered_before_any_sync(
    leader: ReplicaHost,
) -> None:
    leader.store.topics.create("t", 1, [0])
    put = request([b"x"])
    columns = {**put.batch.to_pydict(), "properties": [b"WAIT\x01false\x02"]}
    batch = type(put.batch).from_pydict(columns, schema=put.batch.schema)
    synced = leader.store.log.synced
    assert put_one(leader, put._replace(batch=batch)).wait(5).first_offset == 0
    assert leader.store.log.synced == synced


# --- a follower -----------------------------------------------------------------------------------


def test_a_follower_deletes_below_the_confirmed_end_that_it_knows(tmp_path: Path) -> None:
    source = MessageStore.open(tmp_path / "leader", config=CONFIG)
    source.topics.create("t", 1, [0])
    fill(source, 4)

    follower = open_replica(
        tmp_path / "follower",
        replace(CONFIG, file_reserved_hours=0),
        identity={"cluster_id": "c", "shard": 0, "replica": 1, "incarnation": 1},
        roles=("group_commit",),
    )

    try:
        for unit in source.log.chain.units(0, source.log.end):
            log_of(follower).append_units(
                [unit], memoryview(source.log.reads.raw(unit.start, unit.end))
            )
        follower.log.sync()
        log_of(follower).advance_confirmed(2 * SIZE + 30_000)
        wait_until(lambda: follower.store.dispatched > 2 * SIZE, "confirmed records are dispatched")

        clean: Any = follower.maintenance.cleaner
        # It delivers no delayed messages: it keeps 72 hours, whatever the configuration says.
        assert clean.run_once() == 0
        clean._reserved_hours_min = 0
        assert clean.run_once() == 2
        assert follower.log.start == 2 * SIZE
        names = sorted(path.name for path in (tmp_path / "follower/raymq/chain").iterdir())
        assert int(names[0]) == 2 * SIZE

        # It can still answer the requests of a leader's new connection.
        (first,) = source.log.chain.units(2 * SIZE, 2 * SIZE + 1)
        assert log_of(follower).chain_value_at(2 * SIZE) == first.previous
        assert log_of(follower).chain_value_at(SIZE) is None
        tail = log_of(follower).tail()

        with pytest.raises(Unavailable) as refused:
            put_one(follower, request([b"x"]))
        assert status_of(refused.value) is PutStatus.SERVICE_NOT_AVAILABLE
    finally:
        follower.close()

    again = open_replica(
        tmp_path / "follower",
        CONFIG,
        identity={"cluster_id": "c", "shard": 0, "replica": 1, "incarnation": 2},
        roles=("group_commit",),
    )
    assert log_of(again).tail() == tail
    again.close()
    source.abandon()
