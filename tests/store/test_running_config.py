"""Options that change while a store is open: each is a record of its log, and every reader of the option follows it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from raymq.store.base.errors import Rejected, StorageFull, Unavailable
from raymq.store.base.running_flags import DISK_FULL
from raymq.store.config.running_config import RunningConfig
from raymq.store.config.store_config import OPTIONS, WHILE_RUNNING, StoreConfig
from raymq.store.engine.message_store import MessageStore
from raymq.store.put.option_records import option_facts
from raymq.store.state.shard_state import OPTIONS as SERVICE
from tests.store.test_followed_log import confirm_upto, followed, open_follower, open_leader, send
from tests.support.batches import request
from tests.support.clock import ManualClock
from tests.support.confirming import confirm
from tests.support.simulated_disk import SimulatedDisk

CONFIG = StoreConfig(
    segment_size_bytes=64 * 1024,
    consume_queue_file_size_bytes=2000,
    prewrite_window_bytes=4096,
    flush_interval_ms=300,
)
ROOT = Path("/s")


def open_store(disk: SimulatedDisk, config: StoreConfig = CONFIG) -> MessageStore:
    return MessageStore.open(ROOT, config=config, files=disk, clock=ManualClock())


@pytest.fixture
def disk() -> SimulatedDisk:
    return SimulatedDisk()


@pytest.fixture
def store(disk: SimulatedDisk) -> MessageStore:
    store = open_store(disk)
    store.topics.create("t", 1, [0])
    return store


# --- the options of an open store -----------------------------------------------------------------


def test_a_changed_option_is_seen_by_all_that_keep_the_options() -> None:
    config = RunningConfig.of(CONFIG)
    kept: StoreConfig = config
    assert RunningConfig.of(kept) is config
    assert config.follow({"flush_interval_ms": 200, "warm_mapped_file": True})
    assert (kept.flush_interval_ms, kept.warm_mapped_file) == (200, True)
    assert config.version == 1
    assert not config.follow({"flush_interval_ms": 200, "warm_mapped_file": True})
    assert config.version == 1


def test_an_option_that_is_not_changed_any_more_is_as_the_store_was_opened() -> None:
    config = RunningConfig.of(CONFIG)
    config.follow({"flush_interval_ms": 200})
    assert config.follow({})
    assert config.flush_interval_ms == 300
    assert vars(config) == {**vars(RunningConfig.of(CONFIG)), "version": 2}


def test_a_copy_of_the_options_of_an_open_store_is_one_of_its_own() -> None:
    config = RunningConfig.of(CONFIG)
    config.follow({"flush_interval_ms": 200})
    copy = RunningConfig.of(replace(config, flush_least_pages=1))
    assert (copy.flush_interval_ms, copy.flush_least_pages, copy.version) == (200, 1, 0)
    assert copy.follow({"flush_interval_ms": 100})
    assert config.flush_interval_ms == 200


def test_hours_may_have_a_fraction(store: MessageStore) -> None:
    store.options.set({"file_reserved_hours": 0.5, "producer_expiry_hours": 1.5}, by="ann")
    assert (store.config.file_reserved_hours, store.config.producer_expiry_hours) == (0.5, 1.5)


def test_a_full_disk_takes_the_option_that_makes_room(store: MessageStore) -> None:
    store.flags.set(DISK_FULL)
    with pytest.raises(StorageFull):
        store.put(request([b"x"]))
    assert store.options.set({"file_reserved_hours": 24, "clean_file_forcibly": True}, by="ann")
    assert (store.config.file_reserved_hours, store.config.clean_file_forcibly) == (24, True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("an_option_of_a_later_version", 1),
        ("segment_size_bytes", 4096),
        ("message_delay_level", "1s"),
        ("flush_interval_ms", 0),
        ("flush_interval_ms", "soon"),
        ("max_message_bytes", 1 << 30),
        ("delete_when", "25"),
        ("warm_mapped_file", 1),
    ],
)
def test_what_a_store_does_not_take_is_passed_over(name: str, value: object) -> None:
    config = RunningConfig.of(CONFIG)
    assert config.follow({name: value, "flush_least_pages": 9})
    assert config.flush_least_pages == 9
    assert replace(StoreConfig(**as_opened(config)), flush_least_pages=4) == CONFIG


def as_opened(config: StoreConfig) -> dict[str, object]:
    return {name: getattr(config, name) for name in OPTIONS}


def test_no_other_code_changes_an_option() -> None:
    with pytest.raises(AttributeError):
        RunningConfig.of(CONFIG).flush_interval_ms = 1  # type: ignore[misc]


# --- the log --------------------------------------------------------------------------------------


def test_a_change_is_there_after_a_restart_and_wins_over_the_options_of_the_start(
    store: MessageStore, disk: SimulatedDisk
) -> None:
    store.options.set({"flush_interval_ms": 200, "delete_when": "05;17"}, by="ann@here")
    store.options.set({"flush_interval_ms": 250}, by="ben@there")
    confirm(store)
    store.close()
    for config in (CONFIG, replace(CONFIG, flush_interval_ms=900)):
        again = open_store(disk, config)
        assert (again.config.flush_interval_ms, again.config.delete_when) == (250, "05;17")
        facts = option_facts(again, ["flush_interval_ms", "flush_least_pages"])
        at_ms = facts["flush_interval_ms"].pop("at_ms")
        assert at_ms == again.clock.now_ms()
        assert facts == {
            "flush_interval_ms": {"value": 250, "before": 200, "by": "ben@there"},
            "flush_least_pages": {"value": 4},
        }
        again.close()


def test_a_change_is_in_the_snapshots(store: MessageStore, disk: SimulatedDisk) -> None:
    store.options.set({"file_reserved_hours": 48}, by="ann@here")
    for _ in range(2):
        store.begin_next_file()
        store.put(request([b"x"]))
    confirm(store)
    store.log.delete_first()
    store.close()
    assert open_store(disk).config.file_reserved_hours == 48


def test_a_value_that_an_option_has_makes_no_record(store: MessageStore) -> None:
    end = store.log.end
    assert store.options.set({"flush_interval_ms": 300}, by="ann@here") is None
    assert store.log.end == end
    assert (
        store.options.set({"flush_interval_ms": 300, "flush_least_pages": 1}, by="ann") is not None
    )
    assert set(store.state.progress[SERVICE]) == {"flush_least_pages"}


def test_a_change_that_is_not_stored_does_not_hold(store: MessageStore) -> None:
    store.put_path.follows = True
    with pytest.raises(Unavailable):
        store.options.set({"flush_interval_ms": 200}, by="ann@here")
    assert store.config.flush_interval_ms == 300


def test_a_follower_has_a_change_when_it_is_confirmed_and_as_the_next_leader() -> None:
    leader, follower = open_leader(), open_follower(SimulatedDisk())
    leader.options.set({"flush_interval_ms": 200}, by="ann@here")
    end = send(leader, follower)
    assert follower.config.flush_interval_ms == 500
    confirm_upto(follower, end)
    assert follower.config.flush_interval_ms == 200

    leader.options.set({"flush_interval_ms": 250}, by="ann@here")
    send(leader, follower)
    follower.lead(2)
    assert follower.config.flush_interval_ms == 250


def test_a_change_that_another_leader_cuts_off_holds_no_longer() -> None:
    leader, follower = open_leader(), open_follower(SimulatedDisk())
    before = send(leader, follower)
    confirm_upto(follower, before)
    leader.options.set({"flush_interval_ms": 200}, by="ann@here")
    send(leader, follower)
    followed(follower).apply_all()
    assert follower.config.flush_interval_ms == 200
    followed(follower).truncate(before)
    assert follower.config.flush_interval_ms == 500


# --- what follows an option -----------------------------------------------------------------------


def test_the_largest_message_is_the_one_of_now(store: MessageStore) -> None:
    store.options.set({"max_message_bytes": 10}, by="ann@here")
    with pytest.raises(Rejected, match="10"):
        store.put(request([b"x" * 11]))
    store.options.set({"max_message_bytes": 11}, by="ann@here")
    assert store.put(request([b"x" * 11])).count == 1


def test_a_body_above_the_size_of_a_unit_is_taken_if_the_option_says_so(tmp_path: Path) -> None:
    store = MessageStore.open(tmp_path, config=StoreConfig(segment_size_bytes=32 << 20))
    store.topics.create("t", 1, [0])
    store.options.set({"max_message_bytes": 12 << 20}, by="ann@here")
    body = bytes(12 << 20)
    store.put(request([body]))
    confirm(store)
    found = store.fetch("t", 0, 0, max_bytes=1, max_records=1)
    assert found.records is not None
    assert len(found.records[0].as_py()) > len(body)
    store.close()


def test_the_limit_of_a_busy_page_cache_is_the_one_of_now(store: MessageStore) -> None:
    clock = store.clock
    assert isinstance(clock, ManualClock)
    store.put_lock.begin_ms = clock.monotonic_ms()
    clock.advance(500)
    store.put_path.check_serving()
    store.put_lock.begin_ms = 0
    store.options.set({"os_page_cache_busy_timeout_ms": 100}, by="ann@here")
    store.put_lock.begin_ms = clock.monotonic_ms()
    clock.advance(101)
    with pytest.raises(Unavailable, match="the limit is 100"):
        store.put_path.check_serving()


def test_producers_expire_after_the_hours_of_now(store: MessageStore) -> None:
    producers = store.state.producers
    store.options.set({"producer_expiry_hours": 2}, by="ann@here")
    assert producers.expiry_ms == 2 * 3_600_000


def test_whole_files_are_written_ahead_from_the_change_on(store: MessageStore) -> None:
    allocator = store.log.allocator
    prepare(store)
    assert allocator.ready < CONFIG.segment_size_bytes
    store.options.set({"warm_mapped_file": True}, by="ann@here")
    prepare(store)
    assert allocator.ready > CONFIG.segment_size_bytes
    assert allocator._locked

    store.options.set({"warm_mapped_file": False}, by="ann@here")
    prepare(store)
    assert not allocator._locked


def prepare(store: MessageStore) -> None:
    """Let the worker do all that there is to do. Its first look at a log that has grown only notes that."""
    for _ in range(2):
        while store.log.allocator.step():
            pass


def test_files_expire_after_the_hours_of_now(store: MessageStore) -> None:
    clock = store.clock
    assert isinstance(clock, ManualClock)
    for _ in range(3):
        store.put(request([b"x"]))
        store.begin_next_file()
    store.put(request([b"x"]))
    clock.advance(3 * 3_600_000)
    confirm(store)
    store.sync_queues()
    store.clean_service.delete_now()
    assert store.clean_service.run_once() == 0
    store.options.set({"file_reserved_hours": 2}, by="ann@here")
    confirm(store)
    assert sum(store.clean_service.run_once() for _ in range(3)) > 0


def test_every_option_that_may_change_is_one_of_a_cluster() -> None:
    assert all(each.kind in ("int", "float", "bool", "str") for each in WHILE_RUNNING.values())
