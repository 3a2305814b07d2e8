"""GroupCommit and FlushRealTime sync what they promise, in time, and stop at a failure."""

from __future__ import annotations

import errno
import pickle

import pytest

from raymq.store.base.status import PutStatus
from raymq.store.config.store_config import StoreConfig
from raymq.store.log.flush import FlushFailed, FlushRealTime, GroupCommit, SegmentSyncer
from tests.support.clock import ManualClock
from tests.support.simulated_disk import SimulatedDisk

SEGMENT = 64 * 1024
PAGE = 4096
OK, TIMEOUT = PutStatus.PUT_OK, PutStatus.FLUSH_DISK_TIMEOUT


class Disk(SimulatedDisk):
    """Remembers which file each sync was for, and lets time pass during it."""

    def __init__(self, clock):
        super().__init__()
        self.synced = []
        self.paths = {}
        self.clock = clock
        self.sync_takes_ms = 0
        self.make_dirs("/s/commitlog")
        for start in range(0, 5 * SEGMENT, SEGMENT):
            fd = self.open_file(f"/s/commitlog/{start:020d}", create=True)
            self.allocate(fd, SEGMENT)
            self.close(fd)

    def open_file(self, path, **options):
        fd = super().open_file(path, **options)
        self.paths[fd] = int(str(path)[-20:])
        return fd

    def close(self, fd):
        self.paths.pop(fd)
        super().close(fd)

    def sync_data(self, fd):
        self.clock.advance(self.sync_takes_ms)
        super().sync_data(fd)
        self.synced.append(self.paths[fd] // SEGMENT)


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def disk(clock):
    return Disk(clock)


@pytest.fixture
def syncer(disk):
    return SegmentSyncer("/s/commitlog", SEGMENT, disk)


# --- the syncer -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "stop", "want"),
    [
        (0, 1, [0]),
        (0, SEGMENT, [0]),
        (0, SEGMENT + 1, [0, 1]),
        (SEGMENT - 1, SEGMENT + 1, [0, 1]),
        (SEGMENT, SEGMENT + 1, [1]),
        (10, 4 * SEGMENT, [0, 1, 2, 3]),
        (5, 5, []),
        (SEGMENT, SEGMENT, []),
    ],
)
def test_every_file_of_the_range_is_synced_oldest_first(disk, syncer, start, stop, want):
    syncer.sync(start, stop)
    assert disk.synced == want
    assert syncer.syncs == len(want)


def test_older_files_are_closed(disk, syncer):
    syncer.sync(0, 3 * SEGMENT)
    assert sorted(disk.paths.values()) == [0, SEGMENT, 2 * SEGMENT]
    syncer.sync(2 * SEGMENT, 2 * SEGMENT + 1)
    assert sorted(disk.paths.values()) == [2 * SEGMENT]
    syncer.close()
    assert disk.paths == {}


def test_a_failed_sync_is_raised_with_its_place_and_never_tried_again(disk, syncer):
    disk.fail("sync_data", at=2, error=errno.EIO)
    with pytest.raises(FlushFailed) as caught:
        syncer.sync(0, 3 * SEGMENT)
    assert (caught.value.offset, caught.value.errno) == (SEGMENT, errno.EIO)
    assert not caught.value.retriable
    assert disk.synced == [0]
    calls = disk.calls["sync_data"]
    with pytest.raises(FlushFailed):
        syncer.sync(0, 1)
    assert disk.calls["sync_data"] == calls


def test_a_missing_file_is_a_failed_sync(syncer):
    with pytest.raises(FlushFailed) as caught:
        syncer.sync(9 * SEGMENT, 9 * SEGMENT + 1)
    assert caught.value.errno == errno.ENOENT


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_a_file_that_cannot_be_opened_for_a_while_is_not_a_failed_sync(
    disk, syncer, monkeypatch, code
):
    with monkeypatch.context() as patch:

        def refuse(path, **options):
            raise OSError(code, "for a while")

        patch.setattr(disk, "open_file", refuse)
        with pytest.raises(OSError, match="for a while"):
            syncer.sync(0, 1)
    syncer.sync(0, 1)
    assert disk.synced == [0]


def test_the_failure_travels_with_its_kind_and_fields():
    failure = FlushFailed("broken", offset=7, errno=errno.EIO)
    again = pickle.loads(pickle.dumps(failure))
    assert type(again) is FlushFailed
    assert (again.message, again.offset, again.errno) == ("broken", 7, errno.EIO)


# --- group commit ---------------------------------------------------------------------------------


@pytest.fixture
def events():
    return []


@pytest.fixture
def commit(syncer, events):
    return GroupCommit(
        syncer,
        on_sync_started=lambda offset: events.append(("started", offset)),
        on_synced=lambda offset: events.append(("synced", offset)),
    )


def test_one_sync_serves_every_put_that_waits(disk, commit):
    assert commit.flush(300) == 300
    assert disk.synced == [0]
    assert commit.flush(300) == 300
    assert disk.synced == [0]


def test_a_roll_needs_both_files(disk, commit):
    assert commit.flush(SEGMENT + 10) == SEGMENT + 10
    assert disk.synced == [0, 1]


def test_the_start_is_published_before_the_sync_and_the_end_after_it(disk, commit, events):
    commit.flush(100)
    commit.flush(100)
    commit.flush(150)
    assert events == [("started", 100), ("synced", 100), ("started", 150), ("synced", 150)]


def test_a_failed_sync_publishes_no_position(disk, commit, events):
    commit.flush(100)
    disk.fail("sync_data")
    for _ in range(2):
        with pytest.raises(FlushFailed):
            commit.flush(200)
    assert commit.synced == 100
    assert [event for event in events if event[0] == "synced"] == [("synced", 100)]


def test_after_every_power_loss_what_was_flushed_is_there(clock):
    disk = Disk(clock)
    commit = GroupCommit(SegmentSyncer("/s/commitlog", SEGMENT, disk))
    for start in range(0, 5 * SEGMENT, SEGMENT):
        fd = disk.open_file(f"/s/commitlog/{start:020d}")
        disk.sync(fd)
    disk.sync_dir("/s/commitlog")
    end = 0
    for length in (3000, 5000, SEGMENT - 8000, 2 * SEGMENT - 100):
        for at in range(end - end % PAGE, end + length, PAGE):
            fd = disk.open_file(f"/s/commitlog/{at // SEGMENT * SEGMENT:020d}")
            low, high = max(at, end), min(at + PAGE, end + length)
            disk.pwrite(fd, b"d" * (high - low), low % SEGMENT)
        end += length
        synced = commit.flush(end)
        disk.note(synced)
    for state in disk.crash_states(limit_per_point=8):
        if state.notes:
            log = b"".join(content for _, content in sorted(state.tree().items()))
            assert log[: state.notes[-1]].count(b"d") == state.notes[-1]


# --- flush real time ------------------------------------------------------------------------------


def make_flusher(syncer, clock, synced=0):
    return FlushRealTime(syncer, clock, StoreConfig(), synced=synced)


@pytest.fixture
def flusher(syncer, clock):
    return make_flusher(syncer, clock)


def test_the_defaults_are_rocketmqs(flusher):
    config = StoreConfig()
    assert (config.flush_interval_ms, config.flush_least_pages) == (500, 4)
    assert config.flush_thorough_interval_ms == 10_000
    assert flusher.wait_ms() == 500


def test_nothing_is_flushed_before_the_interval_is_over(disk, flusher, clock):
    clock.advance(499)
    assert flusher.flush_if_due(10 * PAGE) == 0
    assert flusher.wait_ms() == 1
    clock.advance(1)
    assert flusher.wait_ms() == 0
    assert flusher.flush_if_due(10 * PAGE) == 10 * PAGE
    assert flusher.wait_ms() == 500
    assert disk.synced == [0]


@pytest.mark.parametrize(
    ("synced", "end", "due"),
    [
        (0, 4 * PAGE - 1, False),
        (0, 4 * PAGE, True),
        (1, 4 * PAGE, True),
        (PAGE - 1, 4 * PAGE + 1, True),
        (PAGE, 5 * PAGE - 1, False),
        (PAGE, 5 * PAGE, True),
        (0, 0, False),
    ],
)
def test_four_dirty_pages_are_flushed_and_fewer_are_not(syncer, clock, synced, end, due):
    flusher = make_flusher(syncer, clock, synced=synced)
    clock.advance(500)
    assert flusher.flush_if_due(end) == (end if due else synced)


@pytest.mark.parametrize("end", [SEGMENT, SEGMENT + 10])
def test_a_full_file_is_flushed_whatever_the_page_rule_says(syncer, clock, end):
    flusher = make_flusher(syncer, clock, synced=SEGMENT - 10)
    clock.advance(500)
    assert flusher.flush_if_due(end) == end


def test_every_ten_seconds_even_a_single_byte_is_flushed(flusher, clock):
    flushed_at = []
    for tick in range(1, 50):
        clock.advance(500)
        before = flusher.synced
        if flusher.flush_if_due(tick) > before:
            flushed_at.append(tick)
    assert flushed_at == [20, 40]


def test_a_stop_flushes_what_is_left(disk, flusher):
    assert flusher.flush(7) == 7
    assert flusher.flush(7) == 7
    assert disk.synced == [0]


def test_a_failed_background_flush_is_raised_and_latched(disk, flusher, clock):
    disk.fail("sync_data")
    clock.advance(500)
    with pytest.raises(FlushFailed):
        flusher.flush_if_due(8 * PAGE)
    with pytest.raises(FlushFailed):
        flusher.flush(8 * PAGE)
    assert flusher.synced == 0


# --- flush real time without flush_commit_log_timed -----------------------------------------------


@pytest.fixture
def untimed(syncer, clock):
    return FlushRealTime(syncer, clock, StoreConfig(flush_commit_log_timed=False))


def test_a_put_that_fills_enough_pages_is_flushed_without_waiting_for_the_interval(untimed, clock):
    assert untimed.flush_if_due(4 * PAGE - 1, woken=True) == 0
    clock.advance(1)
    assert untimed.flush_if_due(4 * PAGE, woken=True) == 4 * PAGE


def test_a_wakeup_begins_the_interval_again(untimed, clock):
    clock.advance(400)
    untimed.flush_if_due(PAGE, woken=True)
    assert untimed.wait_ms() == 500


def test_without_a_wakeup_an_untimed_flusher_waits_for_the_interval(untimed, clock):
    clock.advance(499)
    assert untimed.flush_if_due(8 * PAGE) == 0
    clock.advance(1)
    assert untimed.flush_if_due(8 * PAGE) == 8 * PAGE


def test_a_wakeup_does_not_shorten_the_interval_of_a_timed_flusher(flusher, clock):
    clock.advance(499)
    assert flusher.flush_if_due(8 * PAGE, woken=True) == 0
