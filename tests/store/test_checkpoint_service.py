"""Files that a running store writes for the start after a crash: times in `checkpoint`, RocketMQ's configuration."""

from __future__ import annotations

import errno
import struct
from pathlib import Path

import pytest

from raymq.store.config.store_config import StoreConfig
from raymq.store.config_files import fastjson
from raymq.store.engine.message_store import MessageStore
from raymq.store.put.inner_message import InnerMessage, ServiceProgress
from raymq.store.services.checkpoint_service import PAUSE_MIN_MS
from tests.support.batches import request
from tests.support.clock import ManualClock
from tests.support.confirming import confirm, dispatch_all
from tests.support.simulated_disk import SimulatedDisk

ROOT = Path("/s")
CONFIG = StoreConfig(
    segment_size_bytes=64 * 1024, consume_queue_file_size_bytes=400, message_index=False
)


class Shop:
    """A store on a disk in memory, whose owner runs its checkpoint service."""

    def __init__(self) -> None:
        self.disk = SimulatedDisk(record=False)
        self.clock = ManualClock()
        self.open()

    def open(self) -> None:
        self.store = MessageStore.open(ROOT, config=CONFIG, files=self.disk, clock=self.clock)

    def put(self, count: int = 1) -> int:
        """Returns: the store time of the newest message."""
        self.clock.advance(10)
        self.store.put(request([b"x" * 100] * count))
        return self.store.state.store_time_ms

    def run_twice(self) -> None:
        """A second later, and as long after that as a pause may be."""
        self.store.checkpoint_service.run_once()
        self.clock.advance(PAUSE_MIN_MS)
        self.store.checkpoint_service.run_once()

    @property
    def checkpoint(self) -> tuple[int, int]:
        """Times of commit log and consume queues in the file."""
        log_ms, queues_ms = struct.unpack_from(">2q", self.disk.read_file(ROOT / "checkpoint"))
        return log_ms, queues_ms

    def config(self, name: str) -> dict[str, object]:
        path = ROOT / "config" / name
        found = self.disk.read_file(path) if self.disk.exists(path) else b"{}"
        table: dict[str, object] = fastjson.loads(found.decode())
        return table


@pytest.fixture
def shop() -> Shop:
    made = Shop()
    made.store.topics.create("t", 2, [0])
    return made


def test_the_checkpoint_has_the_times_of_what_is_synced(shop: Shop) -> None:
    newest = shop.put()
    confirm(shop.store)
    shop.run_twice()
    assert shop.checkpoint == (newest, newest)
    shop.store.abandon()
    shop.open()
    assert shop.store.log.checkpoint.logics_ms == newest


def test_the_checkpoint_never_has_the_time_of_a_message_that_is_not_synced(shop: Shop) -> None:
    synced = shop.put()
    confirm(shop.store)
    shop.run_twice()
    shop.put()
    shop.run_twice()
    assert shop.checkpoint == (synced, synced)
    # In the log and on disk, but in no consume queue.
    shop.store.log.sync()
    newest = shop.store.state.store_time_ms
    shop.run_twice()
    assert shop.checkpoint == (newest, synced)
    shop.store.log.note_confirmed(shop.store.log.end)
    dispatch_all(shop.store)
    # In the consume queues, but not on disk: their next sync is not due.
    shop.store.checkpoint_service.run_once()
    assert shop.checkpoint == (newest, synced)
    shop.run_twice()
    assert shop.checkpoint == (newest, newest)


def test_a_message_that_is_appended_beside_the_look_at_the_clock_does_not_count(shop: Shop) -> None:
    for _ in range(600):
        shop.put()
        shop.store.checkpoint_service.run_once()
    before = shop.checkpoint
    confirm(shop.store)
    shop.run_twice()
    assert before[0] < shop.checkpoint[0] == shop.store.state.store_time_ms


def test_a_rebuild_of_the_consume_queues_takes_their_time_back(shop: Shop) -> None:
    confirm(shop.store)
    newest = shop.put(30)
    confirm(shop.store)
    shop.run_twice()
    assert shop.checkpoint == (newest, newest)
    shop.store.abandon()
    shop.disk.remove_tree(ROOT / "consumequeue" / "t")
    shop.open()
    assert shop.checkpoint == (newest, 0)


def test_the_configuration_is_written_while_the_store_runs(shop: Shop) -> None:
    store = shop.store
    store.commit_offsets("g", "t", {0: 3, 1: 4})
    store.put_inner([], progress=ServiceProgress("delay", {"2": 9}))
    # A queue of a topic that was never created.
    store.put_inner([InnerMessage("%RETRY%g", 0, b"x")])
    confirm(store)
    shop.run_twice()
    topics = shop.config("topics.json")["topicConfigTable"]
    assert {"t", "%RETRY%g", "rmq_sys_raymq"} <= set(topics)  # type: ignore[call-overload]
    assert shop.config("consumerOffset.json")["offsetTable"] == {"t@g": {0: 3, 1: 4}}
    assert "g" in shop.config("subscriptionGroup.json")["subscriptionGroupTable"]  # type: ignore[operator]
    assert shop.config("delayOffset.json")["offsetTable"] == {2: 9}
    # The next start of ours takes none of it for news.
    store.abandon()
    shop.open()
    assert shop.store.log.end == store.log.end
    assert shop.store.state.offsets == {("g", "t"): {0: 3, 1: 4}}


def test_the_configuration_says_only_what_is_on_disk(shop: Shop) -> None:
    confirm(shop.store)
    shop.run_twice()
    shop.store.commit_offsets("g", "t", {0: 3})
    shop.run_twice()
    shop.store.commit_offsets("g", "t", {0: 4})
    assert "offsetTable" not in shop.config("consumerOffset.json")
    confirm(shop.store)
    # First the state when the files were due, then the later one.
    shop.store.checkpoint_service.run_once()
    assert shop.config("consumerOffset.json")["offsetTable"] == {"t@g": {0: 3}}
    shop.run_twice()
    assert shop.config("consumerOffset.json")["offsetTable"] == {"t@g": {0: 4}}


def test_what_did_not_change_is_not_written_again_and_not_more_often_than_every_few_seconds(
    shop: Shop,
) -> None:
    confirm(shop.store)
    shop.run_twice()
    written = shop.disk.calls["rename"]
    for _ in range(20):
        shop.put()
        confirm(shop.store)
        shop.run_twice()
    assert shop.disk.calls["rename"] == written
    shop.clock.advance(PAUSE_MIN_MS)
    for offset in range(20):
        shop.store.commit_offsets("g", "t", {0: offset})
        confirm(shop.store)
        shop.store.checkpoint_service.run_once()
    assert shop.config("consumerOffset.json")["offsetTable"] == {"t@g": {0: 0}}


def test_a_full_disk_is_reported_and_the_files_are_written_when_there_is_room(shop: Shop) -> None:
    confirm(shop.store)
    shop.disk.fail("truncate", error=errno.ENOSPC, forever=True)
    shop.run_twice()
    assert "full" in str(shop.store.checkpoint_service.last_error)
    assert shop.config("topics.json") == {}
    shop.disk.heal()
    shop.run_twice()
    assert shop.store.checkpoint_service.last_error is None
    assert "t" in shop.config("topics.json")["topicConfigTable"]  # type: ignore[operator]


def test_a_sync_that_failed_ends_the_service_and_one_without_a_descriptor_does_not(
    shop: Shop,
) -> None:
    shop.put()
    confirm(shop.store)
    shop.store.checkpoint_service.run_once()
    opened = shop.store.consume_queues.opened
    for file in list(opened._open):
        file.release_fd()
        opened.note_closed(file)
    shop.clock.advance(PAUSE_MIN_MS)
    shop.disk.fail("open_file", error=errno.EMFILE)
    shop.store.checkpoint_service.run_once()
    assert "Too many open files" in str(shop.store.checkpoint_service.last_error)
    assert shop.store.log.marks.queues_synced_end == 0
    shop.run_twice()
    assert shop.store.log.marks.queues_synced_end == shop.store.dispatched
    shop.put()
    confirm(shop.store)
    shop.disk.fail("sync_data")
    with pytest.raises(OSError, match="Input/output"):
        shop.run_twice()
