"""Delayed messages and retention when the wall clock is set back, or was far ahead for a while."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from raymq.store.config.store_config import StoreConfig
from raymq.store.delay.delay_service import DelayService
from raymq.store.embedded.put_message import MessagePut
from raymq.store.engine.message_store import MessageStore
from raymq.store.log.clean import CleanService
from raymq.store.put.inner_message import InnerMessage
from raymq.store.services.retry import send_back
from tests.support.batches import request
from tests.support.clock import ManualClock
from tests.support.confirming import confirm
from tests.support.reference_decoder import decode_log
from tests.support.simulated_disk import SimulatedDisk

ROOT = Path("/s")
SIZE = 32 * 1024
MINUTE_MS, HOUR_MS, DAY_MS = 60_000, 3_600_000, 86_400_000
HALF_HOUR_LEVEL = 16
CONFIG = StoreConfig(
    segment_size_bytes=SIZE,
    consume_queue_file_size_bytes=2000,
    prewrite_window_bytes=4096,
    delete_when=";".join(f"{hour:02d}" for hour in range(24)),
    delete_files_interval_ms=0,
    message_index=False,
)


class Shop:
    """A store whose clock a test sets."""

    def __init__(self, config: StoreConfig = CONFIG) -> None:
        self.config = config
        self.disk = SimulatedDisk(record=False)
        self.clock = ManualClock()
        self.open()
        self.store.topics.create("t", 1, [0])

    def open(self) -> None:
        self.store = MessageStore.open(ROOT, config=self.config, files=self.disk, clock=self.clock)
        self.delays = DelayService(self.store)
        self.puts = MessagePut(self.store, lambda appended: appended)
        confirm(self.store)

    def restart(self) -> None:
        self.store.abandon()
        self.open()

    def reboot(self, *, off_ms: int = MINUTE_MS) -> None:
        """Switch the machine off, and on again: its monotonic clock begins anew."""
        self.store.close()
        self.disk.boot += 1
        self.clock = ManualClock(self.clock.now_ms() + off_ms, monotonic_ms=5_000)
        self.open()

    def send_later(self, level: int = HALF_HOUR_LEVEL) -> None:
        born = self.clock.now_ms()
        message = InnerMessage("t", 0, b"later", {"DELAY": str(level)}, born_time_ms=born)
        result = self.puts.put((message,), is_batch=False)
        assert result.append is not None, result

    def delivered(self, topic: str = "t") -> int:
        """How many readers see now."""
        confirm(self.store)
        self.delays.run_once(self.clock.now_ms())
        confirm(self.store)
        return self.store.queue_range(topic, 0)[1]

    def waits_ms(self, topic: str = "t", *, step_ms: int = 10_000, before: int = 0) -> int:
        """How long the next message takes to arrive, in steps."""
        waited = 0
        while self.delivered(topic) == before:
            self.clock.advance(step_ms)
            waited += step_ms
            assert waited < DAY_MS
        return waited

    def put(self, count: int = 1) -> None:
        for _ in range(count):
            self.store.put(request([b"x" * 1000]))

    def fill(self, files: int) -> None:
        """Put until so many more files are begun."""
        until = self.store.log.end // SIZE + files
        while self.store.log.end // SIZE < until:
            self.put()
            self.clock.advance(1)
        confirm(self.store)

    @property
    def first(self) -> int:
        """Number of the oldest commit log file."""
        return self.store.log.start // SIZE

    def clean(self) -> int:
        while self.store.clean_service.run_once():
            pass
        return self.first


@pytest.fixture
def shop() -> Iterator[Shop]:
    made = Shop()
    yield made
    made.store.abandon()


def about(waited_ms: int, wanted_ms: int) -> bool:
    """Never early, and at most a tenth late."""
    return wanted_ms <= waited_ms <= wanted_ms * 1.1 + 10_000


# --- delays ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("back_ms", [1_000, MINUTE_MS, HOUR_MS, 30 * DAY_MS])
def test_a_delay_that_is_put_after_the_clock_was_set_back_takes_its_time(
    shop: Shop, back_ms: int
) -> None:
    shop.put()
    shop.clock.jump_wall(-back_ms)
    shop.send_later()
    assert about(shop.waits_ms(before=1), 30 * MINUTE_MS)


@pytest.mark.parametrize("back_ms", [MINUTE_MS, HOUR_MS, 30 * DAY_MS])
def test_a_delay_that_waits_while_the_clock_is_set_back_takes_its_time(
    shop: Shop, back_ms: int
) -> None:
    shop.send_later()
    for _ in range(60):
        shop.clock.advance(10_000)
        assert shop.delivered() == 0
    shop.clock.jump_wall(-back_ms)
    assert about(10 * MINUTE_MS + shop.waits_ms(), 30 * MINUTE_MS)


def test_a_delay_after_a_clock_that_was_ahead_and_a_restart_takes_its_time(shop: Shop) -> None:
    shop.clock.jump_wall(30 * DAY_MS)
    shop.put()
    shop.clock.jump_wall(-30 * DAY_MS)
    shop.restart()
    shop.send_later()
    shop.clock.advance(5 * MINUTE_MS)
    shop.put()
    assert about(5 * MINUTE_MS + shop.waits_ms(before=2), 30 * MINUTE_MS)


def test_a_message_sent_back_after_the_clock_was_set_back_comes_after_its_delay(shop: Shop) -> None:
    shop.put()
    confirm(shop.store)
    shop.clock.jump_wall(-MINUTE_MS)
    send_back(shop.store, "g", "t", 0, 0)
    assert about(shop.waits_ms("%RETRY%g", step_ms=500), 10_000)
    again = shop.store.queue_range("%RETRY%g", 0)[1]
    send_back(shop.store, "g", "%RETRY%g", 0, again - 1)
    assert about(shop.waits_ms("%RETRY%g", step_ms=500, before=again), 30_000)


def test_when_to_look_again_is_never_later_than_the_next_delivery(shop: Shop) -> None:
    shop.put()
    shop.clock.jump_wall(-HOUR_MS)
    shop.send_later()
    confirm(shop.store)
    looks = 0
    while shop.store.queue_range("t", 0)[1] == 1:
        due = shop.delays.run_once(shop.clock.now_ms()).next_due_ms
        confirm(shop.store)
        assert due is not None or shop.store.queue_range("t", 0)[1] == 2
        shop.clock.advance(max(1, (due or 0) - shop.clock.now_ms()))
        looks += 1
    assert looks < 40


def test_stamps_never_go_back_and_come_back_to_the_wall_clock(shop: Shop) -> None:
    stamps = []
    shop.put()
    shop.clock.jump_wall(-MINUTE_MS)
    for _ in range(40):
        shop.put()
        stamps.append(shop.store.state.store_time_ms)
        shop.clock.advance(MINUTE_MS)
    assert stamps == sorted(stamps)
    assert len(set(stamps)) == len(stamps), "time stands still"
    assert stamps[-1] == shop.clock.now_ms() - MINUTE_MS


def test_stamps_do_not_go_back_in_a_batch_that_goes_on_in_the_next_file(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = shop.store.log
    seal = log.seal

    def slow_seal(epoch: int) -> None:
        seal(epoch)
        shop.clock.advance(5)

    monkeypatch.setattr(log, "seal", slow_seal)
    # The next file begins with a snapshot, which has a stamp of its own.
    shop.store.put(request([b"x" * 1000] * 50))
    assert log.end > SIZE
    files = sorted(shop.disk.list(ROOT / "commitlog"))
    data = b"".join(shop.disk.read_file(ROOT / "commitlog" / name) for name in files)
    stamps = [row["store_time_ms"] for row in decode_log(data[: log.end], SIZE)]
    assert stamps == sorted(stamps)
    assert stamps[-1] == shop.clock.now_ms()


# --- retention ------------------------------------------------------------------------------------


def test_retention_goes_on_after_one_put_while_the_clock_was_far_ahead(shop: Shop) -> None:
    shop.fill(2)
    shop.clock.jump_wall(30 * DAY_MS)
    shop.put()
    shop.clock.jump_wall(-30 * DAY_MS)
    shop.fill(3)
    assert shop.clean() == 0
    last = 0
    for _ in range(8):
        shop.clock.advance(DAY_MS)
        shop.fill(1)
        last = shop.clean()
    # The files from before the jump are gone, and the newest files stay.
    newest = shop.store.log.end // SIZE
    assert last >= 6
    assert 3 <= newest - last <= 5


def test_no_message_is_delivered_early_while_the_clock_is_ahead_for_some_hours(shop: Shop) -> None:
    shop.fill(3)
    assert shop.clean() == 0
    shop.clock.jump_wall(30 * DAY_MS)
    for _ in range(6):
        shop.clock.advance(HOUR_MS)
        shop.put()
        confirm(shop.store)
        assert shop.clean() == 0
    shop.clock.jump_wall(-30 * DAY_MS)
    shop.fill(2)
    assert shop.clean() == 0
    shop.clock.advance(4 * DAY_MS)
    shop.fill(1)
    assert shop.clean() >= 3


def test_a_clock_that_stays_ahead_for_days_is_believed(shop: Shop) -> None:
    shop.fill(3)
    assert shop.clean() == 0
    shop.clock.jump_wall(30 * DAY_MS)
    assert shop.clean() == 0
    shop.clock.advance(4 * DAY_MS)
    assert shop.clean() == 3


def test_a_pass_after_a_long_sleep_of_the_machine_still_deletes(shop: Shop) -> None:
    """The monotonic clock stands while a machine sleeps: the age of a message is delayed, and not lost."""
    shop.fill(3)
    assert shop.clean() == 0
    shop.clock.jump_wall(10 * DAY_MS)
    for _ in range(5):
        shop.clock.advance(DAY_MS)
        shop.clean()
    assert shop.first == 3


# --- a jump that is not seen by two passes that delete --------------------------------------------


def test_a_jump_before_the_first_pass_of_the_delete_hour_is_not_believed() -> None:
    noon_ms = int(datetime(2023, 11, 15, 12).timestamp() * 1000)
    shop = Shop(replace(CONFIG, delete_when="04"))
    shop.clock.jump_wall(noon_ms - shop.clock.now_ms())
    shop.fill(3)
    shop.store.clean_service.run_once()
    shop.clock.jump_wall(30 * DAY_MS)
    # To ten in the morning, so over the delete hour.
    for _ in range(22):
        shop.clock.advance(HOUR_MS)
        shop.store.clean_service.run_once()
    assert shop.first == 0

    # The next delete hour is more than a day after the jump.
    for _ in range(22):
        shop.clock.advance(HOUR_MS)
        shop.store.clean_service.run_once()
    assert shop.first == 3
    shop.store.abandon()


@pytest.mark.parametrize("looks", [False, True])
def test_a_restart_does_not_make_a_jump_believed(shop: Shop, looks: bool) -> None:
    shop.fill(3)
    shop.clock.jump_wall(30 * DAY_MS)
    if looks:
        assert shop.clean() == 0
    # The newest store time in the log is the wrong clock's, too.
    shop.put()
    shop.restart()
    shop.clock.advance(HOUR_MS)
    assert shop.clean() == 0
    shop.clock.advance(DAY_MS + MINUTE_MS)
    assert shop.clean() == 3


def test_a_change_of_role_does_not_make_a_jump_believed(shop: Shop) -> None:
    shop.fill(3)
    shop.clock.jump_wall(30 * DAY_MS)
    for _ in range(3):
        assert (
            CleanService(shop.store.log, shop.store.retention, flags=shop.store.flags).run_once()
            == 0
        )
        shop.clock.advance(HOUR_MS)
    shop.clock.advance(DAY_MS)
    assert (
        CleanService(shop.store.log, shop.store.retention, flags=shop.store.flags).run_once() == 3
    )


def test_a_process_that_was_stopped_for_a_week_deletes_at_once(shop: Shop) -> None:
    shop.fill(3)
    shop.store.close()
    shop.clock.advance(7 * DAY_MS)
    shop.open()
    assert shop.clean() == 3


@pytest.mark.parametrize("cause", ["it was off", "its clock is wrong"])
def test_after_a_long_pause_a_machine_that_was_started_again_waits_for_a_day(
    shop: Shop, cause: str
) -> None:
    shop.fill(3)
    shop.reboot(off_ms=7 * DAY_MS)
    shop.put()
    confirm(shop.store)
    assert shop.clean() == 0
    shop.restart()
    shop.clock.advance(DAY_MS - MINUTE_MS)
    assert shop.clean() == 0
    if cause == "it was off":
        shop.clock.advance(2 * MINUTE_MS)
        assert shop.clean() == 3
    else:
        shop.clock.jump_wall(-7 * DAY_MS)
        shop.clock.advance(DAY_MS)
        assert shop.clean() == 0


def test_a_machine_that_is_started_again_at_once_need_not_wait(shop: Shop) -> None:
    shop.fill(3)
    shop.clock.advance(4 * DAY_MS)
    shop.put()
    confirm(shop.store)
    shop.reboot()
    assert shop.clean() == 3
