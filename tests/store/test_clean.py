"""Deletion of old files: which ones, when, in which order, and the view of readers meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

from raymq.store.base.errors import OffsetOutOfRange, Rejected, StorageFull, Unavailable
from raymq.store.base.failpoints import FailPointReached, failpoint
from raymq.store.base.files import Files
from raymq.store.config.store_config import StoreConfig
from raymq.store.delay.delay_service import DelayService
from raymq.store.engine.message_store import MessageStore
from raymq.store.log.clean import MANUAL_PASSES
from raymq.store.log.recovery.snapshot_head import read_head
from raymq.store.put.inner_message import InnerMessage
from raymq.store.queues import reader as reader_module
from raymq.store.records import record
from raymq.store.tools.inspect import verify
from tests.support.batches import request
from tests.support.clock import ManualClock
from tests.support.confirming import confirm
from tests.support.simulated_disk import SimulatedDisk

ROOT = Path("/s")
SIZE = 16 * 1024
DAY_MS = 24 * 3_600_000
CONFIG = StoreConfig(
    segment_size_bytes=SIZE,
    consume_queue_file_size_bytes=400,
    max_message_bytes=2000,
    clean_file_forcibly=True,
    # Any hour, unless a test says otherwise.
    delete_when=";".join(f"{hour:02d}" for hour in range(24)),
)
#: a message that waits for its delivery
WAITS = pytest.mark.parametrize("properties", [{"TIMER_DELAY_SEC": "100"}, {"DELAY": "5"}])


class Derived:
    """A store made from the log."""

    def __init__(self) -> None:
        self.reported: list[int] = []

    def delete_expired(self, min_physical_offset: int) -> None:
        self.reported.append(min_physical_offset)


class Shop:
    """A store with one topic of two queues, on a disk of memory."""

    def __init__(self, config: StoreConfig = CONFIG, disk: SimulatedDisk | None = None) -> None:
        self.config = config
        self.disk = disk or SimulatedDisk(record=False)
        self.clock = ManualClock()
        self.derived = Derived()
        #: bodies by offset of queue 0
        self.bodies: list[bytes] = []
        self.open()
        self.store.topics.create("t", 2, [0])

    def open(self) -> None:
        self.store = MessageStore.open(ROOT, config=self.config, files=self.disk, clock=self.clock)
        self.store.derived.append(self.derived)

    def fill(self, segments: int) -> None:
        """Put until so many more files are begun."""
        until = self.store.log.end // SIZE + segments
        while self.store.log.end // SIZE < until:
            body = b"%d " % len(self.bodies) + b"x" * 900
            self.store.put(request([body]))
            self.bodies.append(body)
            self.clock.advance(1)

    def settle(self) -> None:
        """Everything is synced, confirmed and dispatched."""
        confirm(self.store)

    def clean(self) -> int:
        return self.store.clean_service.run_once()

    @property
    def starts(self) -> list[int]:
        """Which commit log files there are, by number."""
        return [int(name) // SIZE for name in self.disk.list(ROOT / "commitlog")]

    def read(self) -> list[bytes]:
        """Every body of queue 0 that can be read."""
        low, high = self.store.queue_range("t", 0)
        found: list[bytes] = []
        while low < high:
            part = self.store.fetch("t", 0, low, max_bytes=1 << 20, max_records=1000)
            for raw in part.records.to_pylist():
                found.append(body_of(raw))
            low = part.next_offset
        return found

    def check(self) -> None:
        """Everything from the log's start on is there, and nothing else."""
        low, high = self.store.queue_range("t", 0)
        assert high == len(self.bodies)
        assert self.read() == self.bodies[low:]
        if low:
            with pytest.raises(OffsetOutOfRange) as refused:
                self.store.fetch("t", 0, low - 1, max_bytes=1, max_records=1)
            assert (refused.value.min, refused.value.max) == (low, high)
        assert not verify(ROOT, files=self.disk)


def body_of(raw: bytes) -> bytes:
    found = record.decode(raw, np.array([0]), np.array([len(raw)])).column("body")[0].as_py()
    return bytes(found)


@pytest.fixture
def shop() -> Iterator[Shop]:
    made = Shop()
    yield made
    made.store.abandon()


# --- what goes ------------------------------------------------------------------------------------


def test_files_go_when_their_last_message_is_older_than_the_limit(shop: Shop) -> None:
    shop.fill(3)
    shop.clock.advance(DAY_MS)
    shop.fill(3)
    shop.settle()
    assert shop.starts == [0, 1, 2, 3, 4, 5, 6]
    shop.clock.advance(2 * DAY_MS - 60_000)
    assert shop.clean() == 0
    shop.clock.advance(60_000)
    assert shop.clean() == 3
    assert shop.starts == [3, 4, 5, 6]
    assert shop.store.log.start == 3 * SIZE
    shop.check()
    assert shop.clean() == 0


@pytest.mark.parametrize(
    ("properties", "wait_ms"),
    [({"TIMER_DELAY_SEC": "200000"}, 200_000_000), ({"DELAY": "18"}, 7_200_000)],
)
def test_messages_that_wait_for_delivery_are_not_deleted(
    shop: Shop, properties: dict[str, str], wait_ms: int
) -> None:
    config = replace(CONFIG, file_reserved_hours=1)
    shop.store.clean_service._config = config
    delays = DelayService(shop.store)
    message = InnerMessage("t", 1, b"later", properties, born_time_ms=shop.clock.now_ms())
    shop.store.put_inner([shop.store.delay_hook.before_put(message)])
    shop.fill(3)
    shop.settle()
    for _ in range(4):
        # Rolls put it again on its way.
        shop.clock.advance(wait_ms // 4 + 1000)
        shop.settle()
        shop.clean()
        shop.fill(2)
        shop.settle()
        delays.run_once(shop.clock.now_ms())
        shop.settle()
    low, high = shop.store.queue_range("t", 1)
    assert high - low == 1
    shop.clock.advance(5 * DAY_MS)
    shop.fill(1)
    shop.settle()
    delays.run_once(shop.clock.now_ms())
    assert shop.clean() > 0


@WAITS
def test_a_waiting_message_is_deleted_only_after_its_delivery_is_synced(
    shop: Shop, properties: dict[str, str]
) -> None:
    delays = DelayService(shop.store)
    message = InnerMessage("t", 1, b"later", properties, born_time_ms=shop.clock.now_ms())
    shop.store.put_inner([shop.store.delay_hook.before_put(message)])
    shop.fill(3)
    shop.settle()
    shop.clock.advance(4 * DAY_MS)
    # The delivery stands in the page cache only: a power loss must find the origin.
    delays.run_once(shop.clock.now_ms())
    assert [shop.clean() for _ in range(3)] == [0, 0, 0]
    shop.settle()
    assert shop.clean() == 3
    assert shop.store.queue_range("t", 1) == (0, 1)
    # Later puts do not keep files that an earlier look found deletable.
    shop.fill(2)
    shop.settle()
    shop.clock.advance(4 * DAY_MS)
    unsynced = shop.store.put(request([b"unsynced"]))
    shop.clean()
    shop.store.log.sync()
    shop.store.log.note_confirmed(unsynced.end_offset)
    assert shop.clean() > 0


def deliver_unconfirmed(shop: Shop, properties: dict[str, str]) -> DelayService:
    """Let a message wait, and its delivery be synced here only, when the files of the original are expired."""
    delays = DelayService(shop.store)
    message = InnerMessage("t", 1, b"later", properties, born_time_ms=shop.clock.now_ms())
    shop.store.put_inner([shop.store.delay_hook.before_put(message)])
    shop.fill(3)
    shop.settle()
    shop.clock.advance(4 * DAY_MS)
    delays.run_once(shop.clock.now_ms())
    shop.store.log.sync()
    return delays


@WAITS
def test_a_waiting_message_is_deleted_only_after_its_delivery_is_confirmed(
    shop: Shop, properties: dict[str, str]
) -> None:
    delays = deliver_unconfirmed(shop, properties)
    assert [shop.clean() for _ in range(3)] == [0, 0, 0]

    # No follower has the delivery, and another leader cuts it off.
    delays.leave()
    shop.store.log.truncate(shop.store.log.confirmed)
    shop.store.abandon()
    shop.open()
    delays = DelayService(shop.store)
    for _ in range(3):
        shop.settle()
        delays.run_once(shop.clock.now_ms())
    shop.settle()
    assert shop.store.queue_range("t", 1) == (0, 1)
    assert shop.clean() == 3


@WAITS
def test_a_leader_keeps_a_waiting_message_whose_delivery_was_cut_off_before_it_led_again(
    shop: Shop, properties: dict[str, str]
) -> None:
    delays = deliver_unconfirmed(shop, properties)
    store, cut_end = shop.store, shop.store.log.end
    assert shop.clean() == 0

    delays.leave()
    delays.timers.abandon()
    store.follow()
    assert store.followed is not None
    store.followed.truncate(store.log.confirmed)
    store.lead(1)
    DelayService(store)
    while store.log.end <= cut_end:
        shop.fill(1)
    shop.settle()
    # The log is confirmed above the end of the delivery that was cut off. But other records are there.
    store.put(request([b"unconfirmed"]))
    assert [shop.clean() for _ in range(2)] == [0, 0]
    shop.settle()
    assert shop.clean() == 0
    assert shop.starts[0] == 0


def test_files_are_deleted_while_followers_are_slow(shop: Shop) -> None:
    deliver_unconfirmed(shop, {"DELAY": "5"})
    assert shop.clean() == 0
    delivered_end = shop.store.log.end
    for _ in range(20):
        shop.store.put(request([b"unconfirmed"]))
        shop.store.log.sync()
        assert shop.clean() == 0
    shop.store.log.note_confirmed(delivered_end)
    shop.store.dispatch(delivered_end)
    assert shop.clean() == 3


def test_the_file_that_is_written_is_never_deleted(shop: Shop) -> None:
    shop.fill(2)
    shop.settle()
    shop.clock.advance(100 * DAY_MS)
    shop.clean()
    assert shop.starts == [2]
    shop.check()
    shop.fill(1)
    shop.settle()
    shop.check()


def test_one_pass_deletes_at_most_a_batch_with_pauses_between(shop: Shop) -> None:
    shop.fill(13)
    shop.settle()
    shop.clock.advance(4 * DAY_MS)
    assert shop.clean() == 10
    assert shop.clock.slept == [100.0] * 9
    assert shop.clean() == 3
    shop.check()


@pytest.mark.parametrize("what", ["confirmed", "synced", "dispatched"])
def test_only_confirmed_synced_and_dispatched_records_are_deleted(shop: Shop, what: str) -> None:
    shop.fill(2)
    shop.settle()
    shop.fill(3)
    log = shop.store.log
    if what != "synced":
        log.sync()
    if what == "dispatched":
        log.note_confirmed(log.end)
    shop.clock.advance(4 * DAY_MS)
    # The third file's snapshot is below all of them, the fourth's is not.
    assert shop.clean() == 2
    shop.settle()
    assert shop.clean() == 3
    shop.check()


def test_files_from_the_newest_snapshot_on_are_not_deleted(shop: Shop) -> None:
    shop.fill(1)
    # Half a snapshot: the next part of the state does not fit what a snapshot may have.
    shop.store.state.progress["s"] = {"k": "x" * shop.config.snapshot_bytes_max}
    shop.fill(2)
    del shop.store.state.progress["s"]
    shop.fill(1)
    shop.settle()
    heads = [read_head(file)[0] is not None for file in shop.store.log.segments.files[:5]]
    assert heads == [True, True, False, False, True]
    shop.clock.advance(2 * DAY_MS)
    shop.store.clean_service._config = replace(CONFIG, delete_file_batch_max=3)
    shop.clock.advance(2 * DAY_MS)
    # The log begins with such a file meanwhile: the snapshot after it makes the state.
    assert shop.clean() == 3
    topics, offsets = shop.store.state.topics, dict(shop.store.state.next_offsets)
    shop.store.abandon()
    shop.open()
    assert (shop.store.state.topics, shop.store.state.next_offsets) == (topics, offsets)
    shop.settle()
    shop.check()
    assert shop.clean() == 1
    shop.clock.advance(DAY_MS)
    shop.store.state.progress["s"] = {"k": "x" * shop.config.snapshot_bytes_max}
    shop.fill(3)
    shop.settle()
    shop.clock.advance(4 * DAY_MS)
    assert shop.clean() == 0
    shop.check()


def test_a_snapshot_that_is_left_out_is_logged_once_a_file(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    shop.store.state.progress["s"] = {"k": "x" * shop.config.snapshot_bytes_max}
    with caplog.at_level(logging.WARNING, "raymq.store"):
        shop.fill(2)
    assert len(caplog.records) == 2
    message = caplog.records[0].getMessage()
    assert "segment_size_bytes" in message
    assert f"the limit is {shop.config.snapshot_bytes_max}" in message


# --- when -----------------------------------------------------------------------------------------


def test_expired_files_go_only_in_the_hours_of_delete_when() -> None:
    shop = Shop()
    shop.fill(2)
    shop.settle()
    shop.clock.advance(4 * DAY_MS)
    hour = datetime.fromtimestamp(shop.clock.now_ms() / 1000).hour
    config = replace(CONFIG, delete_when=f"{(hour + 1) % 24:02d};{(hour + 3) % 24:02d}")
    shop.store.clean_service._config = config
    assert shop.clean() == 0
    shop.clock.advance(3_600_000)
    assert shop.clean() == 2


def test_on_demand_expired_files_go_at_any_hour_and_young_ones_never(shop: Shop) -> None:
    shop.fill(2)
    shop.settle()
    hour = datetime.fromtimestamp(shop.clock.now_ms() / 1000).hour
    shop.store.clean_service._config = replace(CONFIG, delete_when=f"{(hour + 12) % 24:02d}")
    shop.store.clean_service.delete_now()
    assert shop.clean() == 0
    shop.clock.advance(4 * DAY_MS)
    for _ in range(MANUAL_PASSES - 2):
        shop.store.clean_service._manual_passes -= 1
    assert shop.clean() == 2
    shop.fill(2)
    shop.settle()
    shop.clock.advance(4 * DAY_MS)
    assert shop.clean() == 0


@pytest.mark.parametrize(
    ("used", "expired", "young"), [(75, 0, 0), (76, 2, 0), (85, 2, 0), (86, 2, 2), (91, 2, 2)]
)
@pytest.mark.parametrize("place", ["commitlog", "consumequeue"])
def test_a_fuller_disk_deletes_more(used: float, expired: int, young: int, place: str) -> None:
    for days, count in ((4, expired), (0, young)):
        shop = Shop()
        shop.fill(2)
        shop.settle()
        shop.clock.advance(days * DAY_MS)
        hour = datetime.fromtimestamp(shop.clock.now_ms() / 1000).hour
        shop.store.clean_service._config = replace(CONFIG, delete_when=f"{(hour + 12) % 24:02d}")
        shop.disk.used[f"/s/{place}"] = used
        assert shop.clean() == count


def test_young_files_stay_when_they_may_not_be_forced_out(shop: Shop) -> None:
    shop.store.clean_service._config = replace(CONFIG, clean_file_forcibly=False)
    shop.fill(2)
    shop.settle()
    shop.disk.used["/s/commitlog"] = 95
    assert shop.clean() == 0


@pytest.mark.parametrize(
    ("place", "flag"), [("commitlog", "DISK_FULL"), ("consumequeue", "LOGIC_DISK_FULL")]
)
def test_above_the_warning_level_puts_are_refused_until_there_is_room(
    shop: Shop, place: str, flag: str
) -> None:
    shop.disk.used[f"/s/{place}"] = 90
    shop.clean()
    assert shop.store.flags.names() == []
    shop.disk.used[f"/s/{place}"] = 90.5
    shop.clean()
    assert shop.store.flags.names() == [flag]
    with pytest.raises(StorageFull, match=flag):
        shop.store.put(request([b"x"]))
    shop.disk.used[f"/s/{place}"] = 89
    shop.clean()
    shop.store.put(request([b"x"]))


def test_a_large_disk_with_room_for_more_files_is_not_full(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.disk.used["/s/commitlog"] = 95
    monkeypatch.setattr(shop.disk, "free_bytes", lambda path: 8 * SIZE)
    shop.clean()
    assert shop.store.flags.names() == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("delete_when", "24"),
        ("delete_when", ""),
        ("delete_when", "4,5"),
        ("disk_max_used_space_ratio", 9),
        ("disk_space_clean_forcibly_ratio", 96),
        ("disk_space_warning_level_ratio", 100),
        ("delete_file_batch_max", 0),
        ("file_reserved_hours", -1),
    ],
)
def test_an_option_out_of_range_is_refused(field: str, value: object) -> None:
    with pytest.raises(Rejected) as refused:
        replace(CONFIG, **{field: value})
    assert refused.value.field == field


# --- what goes with them --------------------------------------------------------------------------


def test_chain_queue_files_and_derived_stores_follow_the_log(shop: Shop) -> None:
    shop.fill(6)
    shop.store.put(request([b"one"], queue=1))
    shop.settle()
    assert len(shop.disk.list(ROOT / "consumequeue" / "t" / "0")) > 3
    shop.clock.advance(4 * DAY_MS)
    assert shop.clean() == 6
    start = shop.store.log.start
    assert shop.derived.reported == [start]
    assert [int(name) for name in shop.disk.list(ROOT / "raymq" / "chain")] == [start]
    low, _ = shop.store.queue_range("t", 0)
    first = shop.disk.list(ROOT / "consumequeue" / "t" / "0")[0]
    assert int(first) // 20 <= low < int(first) // 20 + 20
    shop.check()
    assert shop.store.queue_range("t", 1) == (0, 1)


def test_a_queue_without_messages_keeps_its_next_offset(shop: Shop) -> None:
    shop.store.put(request([b"a"] * 30, queue=1))
    shop.fill(2)
    shop.settle()
    shop.clock.advance(4 * DAY_MS)
    shop.clean()
    assert shop.store.queue_range("t", 1) == (30, 30)
    shop.store.abandon()
    shop.open()
    assert shop.store.queue_range("t", 1) == (30, 30)
    assert shop.store.put(request([b"b"], queue=1)).first_offset == 30
    shop.settle()
    assert shop.store.queue_range("t", 1) == (30, 31)


def test_a_store_that_lost_its_queues_rebuilds_them_from_the_logs_start(shop: Shop) -> None:
    shop.fill(4)
    shop.settle()
    shop.clock.advance(4 * DAY_MS)
    shop.clean()
    shop.fill(2)
    shop.settle()
    shop.store.abandon()
    shop.disk.remove_tree(ROOT / "consumequeue" / "t")
    shop.open()
    shop.settle()
    shop.check()


def test_producers_are_known_after_the_file_of_their_rows_is_gone(shop: Shop) -> None:
    put = request([b"x"] * 3, producer_id=7, queue=1)
    first = shop.store.put(put)
    shop.fill(3)
    shop.settle()
    shop.clock.advance(4 * DAY_MS)
    assert shop.clean() == 3
    for _ in range(2):
        again = shop.store.put(put)
        assert (again.duplicates, again.first_offset) == (3, first.first_offset)
        shop.store.abandon()
        shop.open()


# --- who reads meanwhile --------------------------------------------------------------------------


def test_what_was_read_before_the_deletion_stays_as_it_was(shop: Shop) -> None:
    shop.fill(3)
    shop.settle()
    part = shop.store.fetch("t", 0, 0, max_bytes=1 << 20, max_records=5)
    file = shop.store.log.segments.files[0]
    shop.clock.advance(4 * DAY_MS)
    shop.clean()
    shop.fill(3)
    assert part.records is not None
    assert [body_of(raw) for raw in part.records.to_pylist()] == shop.bodies[:5]
    # A reader that found the file before its deletion gets an error, and searches again.
    with pytest.raises(Unavailable, match="deleted meanwhile"):
        file.read(0, 8)


@pytest.mark.parametrize("few", [True, False])
def test_a_reader_between_range_and_bytes_hears_that_they_are_gone(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, few: bool
) -> None:
    shop.fill(3)
    shop.settle()
    queue = shop.store.consume_queues.get("t", 0)
    shop.clock.advance(4 * DAY_MS)
    method = "read_packed" if few else "read"
    read = getattr(queue, method)
    for late in (False, True):

        def overtaken(offset: int, count: int, late: bool = late) -> object:
            units = read(offset, count) if late else None
            shop.clean()
            return units if late else read(offset, count)

        offset = queue.min_offset
        monkeypatch.setattr(queue, method, overtaken)
        if not few:
            monkeypatch.setattr(reader_module, "FEW_RECORDS", 0)
        with pytest.raises(OffsetOutOfRange) as refused:
            shop.store.fetch("t", 0, offset, max_bytes=1000, max_records=2)
        monkeypatch.undo()
        assert refused.value.min > offset
        shop.fill(3)
        shop.settle()
        shop.clock.advance(4 * DAY_MS)


# --- crashes and failures -------------------------------------------------------------------------

POINTS = ("files.unlinked", "clean.after_segments", "clean.after_chain", "clean.after_queues")


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_between_two_steps_leaves_a_store_that_the_next_pass_finishes(
    shop: Shop, point: str
) -> None:
    shop.fill(4)
    shop.settle()
    shop.clock.advance(4 * DAY_MS)
    with failpoint(point, "raise"), pytest.raises(FailPointReached):
        shop.clean()
    shop.store.abandon()
    shop.open()
    shop.settle()
    shop.check()
    shop.clean()
    assert shop.starts[0] == shop.store.log.start // SIZE == 4
    assert shop.derived.reported[-1] == shop.store.log.start
    assert [int(name) for name in shop.disk.list(ROOT / "raymq" / "chain")][0] == 4 * SIZE
    shop.check()


def test_every_power_loss_of_a_deletion_leaves_a_store_that_opens_and_goes_on() -> None:
    shop = Shop(disk=SimulatedDisk(record=True))
    shop.fill(4)
    shop.settle()
    shop.clock.advance(4 * DAY_MS)
    shop.disk.note("begin")
    shop.clean()
    shop.disk.note("end")
    shop.store.put(request([b"last"]))
    shop.bodies.append(b"last")
    shop.settle()
    tried = set()
    for disk in shop.disk.crash_states(limit_per_point=6):
        if "begin" not in disk.notes:
            continue
        names = tuple(disk.list(ROOT / "commitlog"))
        again = Shop.__new__(Shop)
        again.config, again.disk, again.clock = shop.config, disk, ManualClock()
        again.clock.advance(5 * DAY_MS)
        again.derived, again.bodies = Derived(), list(shop.bodies)
        again.open()
        again.settle()
        assert again.store.queue_range("t", 0)[1] >= len(shop.bodies) - 1
        again.bodies = again.bodies[: again.store.queue_range("t", 0)[1]]
        again.check()
        again.clean()
        again.check()
        again.store.abandon()
        tried.add(names)
    assert len(tried) >= 5


def test_a_failed_deletion_is_taken_up_by_the_next_pass(shop: Shop) -> None:
    shop.fill(4)
    shop.settle()
    shop.clock.advance(4 * DAY_MS)
    for kind in ("unlink", "sync_dir"):
        shop.disk.fail(kind, at=2)
        with pytest.raises(OSError, match="Input/output error"):
            shop.clean()
        shop.check()
    shop.disk.heal()
    shop.clean()
    assert shop.starts[0] == 4
    assert shop.derived.reported == [4 * SIZE]
    shop.check()


class Watching(Files):
    """Keeps the functions that say whether the readers of a deleted file are gone."""

    def __init__(self) -> None:
        super().__init__()
        self.forgotten: list[Callable[[], bool]] = []

    def release_when_unread(self, view: memoryview) -> Callable[[], bool]:
        self.forgotten.append(super().release_when_unread(view))
        return self.forgotten[-1]


def test_on_a_real_disk_the_map_of_a_deleted_file_lives_as_long_as_its_last_reader(
    tmp_path: Path,
) -> None:
    clock, files = ManualClock(), Watching()
    store = MessageStore.open(tmp_path, config=CONFIG, clock=clock, files=files)
    store.topics.create("t", 1, [0])
    for number in range(60):
        store.put(request([b"%d " % number + b"x" * 900]))
    confirm(store)
    records = store.fetch("t", 0, 0, max_bytes=1 << 20, max_records=5).records
    file = store.log.segments.files[0]
    piece = file.read_view()[100:200]
    kept = bytes(piece)
    clock.advance(4 * DAY_MS)
    assert store.clean_service.run_once() == 3
    assert not file.path.exists()
    gone = files.forgotten[0]
    del file
    assert not gone()
    assert records is not None
    assert [body_of(raw)[:2] for raw in records.to_pylist()] == [b"%d " % i for i in range(5)]
    assert bytes(piece) == kept
    del records
    assert not gone()
    del piece
    assert gone()
    store.abandon()
