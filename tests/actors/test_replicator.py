"""Replicator and FollowerSession over real files, connected in memory."""

from __future__ import annotations

import errno
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from raymq.actors.follower import session
from raymq.actors.satellites import follower_stream
from raymq.actors.satellites.log_reader import LogReader
from raymq.actors.satellites.replicator import Replicator
from raymq.actors.satellites.service import EXIT_FENCED, EXIT_STOPPED
from raymq.actors.shared import control_block
from raymq.actors.shared.control_block import Leadership
from raymq.actors.shared.failures import FailureFile
from raymq.replication import quorum
from raymq.replication.election_events import LeaderLost
from raymq.replication.log_sender import SenderLimits
from raymq.replication.wire import Hello
from raymq.store.base.checksum import crc32c
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Corrupt, StorageFull
from raymq.store.base.files import Files
from raymq.store.base.status import PutStatus
from raymq.store.log.chain import ChainUnit
from tests.support.replica_pair import TIMEOUT_S, Pair, wait_until

LIMITS = SenderLimits(
    frame_bytes=20_000, heartbeat_ms=20, retry_ms=20, halt_retry_ms=50, window_bytes=100_000
)


@pytest.fixture(autouse=True)
def acknowledged_appends(monkeypatch):
    """Small appends are acknowledged as large ones are: at once."""
    monkeypatch.setattr(session, "UNACKNOWLEDGED_BYTES_MAX", 0)


@pytest.fixture
def pair(tmp_path):
    pair = Pair(tmp_path, limits=LIMITS)
    yield pair
    pair.close()


@pytest.fixture
def impatient_pair(tmp_path):
    """A pair that reports a put as late after 0.3 s without its replica."""
    pair = Pair(tmp_path, limits=LIMITS, slave_timeout_ms=300)
    yield pair
    pair.close()


def test_bytes_arrive_and_are_confirmed_when_both_have_synced(pair):
    end = pair.leader.write(1000, 2000, 3000)
    pair.wait_matched(end)
    assert pair.follower.bytes(end) == pair.leader.bytes(end)
    assert pair.leader.confirmed == 0
    pair.leader.sync()
    pair.follower.sync()
    pair.wait_confirmed(end)
    wait_until(
        lambda: pair.follower.confirmed() == end,
        "the heartbeat reports the confirmed end to the follower",
    )


def test_a_log_of_many_segments_arrives_in_whole_units(pair):
    for fill in range(40):
        end = pair.leader.write(*[300] * 50, fill=fill + 1)
    pair.leader.sync()
    pair.wait_matched(end)
    pair.follower.sync()
    pair.wait_confirmed(end)
    assert end > 5 * pair.size
    assert pair.follower.bytes(end) == pair.leader.bytes(end)
    assert pair.follower.log.chain.value == pair.leader.chain.value


def test_a_put_without_a_follower_times_out_stored_and_not_visible(impatient_pair):
    pair = impatient_pair
    end = pair.leader.write(100)
    pair.leader.sync()
    pair.wait_matched(end)
    pair.follower.sync()
    pair.wait_confirmed(end)
    pair.stop_follower()
    later = pair.leader.write(100)
    number = pair.leader.submit()
    pair.leader.sync()
    late = []

    def answered():
        late.extend(pair.leader.rings.late.take_all())
        return late

    wait_until(answered, "the replica's timeout")
    assert late == [(number, later, PutStatus.FLUSH_SLAVE_TIMEOUT.code)]
    assert pair.leader.confirmed == end
    pair.start_follower()
    pair.wait_matched(later)
    pair.follower.sync()
    pair.wait_confirmed(later)


def test_replication_follows_options_that_change_while_it_works(pair):
    end = pair.leader.write(100)
    pair.leader.sync()
    pair.wait_matched(end)
    pair.follower.sync()
    pair.wait_confirmed(end)
    pair.stop_follower()
    pair.leader.write(100)
    number = pair.leader.submit()
    pair.leader.sync()
    # The put would wait for half a minute.
    pair.leader.control.publish_options({"slave_timeout_ms": 300, "catch_up_bytes_per_s": 1000})
    late = []
    wait_until(
        lambda: late.extend(pair.leader.rings.late.take_all()) or late, "the replica's new timeout"
    )
    assert [each[0] for each in late] == [number]
    assert pair.replicator._limits.catch_up_bytes_per_s == 1000
    assert pair.replicator._limits.frame_bytes == LIMITS.frame_bytes


def test_a_put_that_is_kept_is_not_late(pair):
    end = pair.leader.write(100)
    pair.leader.submit()
    pair.leader.sync()
    pair.wait_matched(end)
    pair.follower.sync()
    pair.wait_confirmed(end)
    assert pair.leader.rings.late.take_all() == []


def test_a_new_replication_finds_the_match_and_keeps_the_confirmed_end(pair):
    end = pair.leader.write(100, 200)
    pair.leader.sync()
    pair.wait_matched(end)
    pair.follower.sync()
    pair.wait_confirmed(end)
    assert pair.stop_replication() == EXIT_STOPPED
    later = pair.leader.write(300)
    pair.leader.sync()
    pair.start_replication(confirmed=end)
    pair.wait_matched(later)
    pair.follower.sync()
    pair.wait_confirmed(later)
    assert pair.follower.bytes(later) == pair.leader.bytes(later)


def test_a_new_leader_names_what_its_log_knew_as_confirmed_from_its_first_frame_on(pair):
    end = pair.leader.write(100, 200)
    pair.wait_matched(end)
    pair.follower.heard.clear()
    # Its Replication was granted long before, while it followed.
    later = pair.leader.write(50)
    pair.leader.control.publish_leadership(Leadership(2, later, 7, confirmed=end))
    pair.wait_matched(later)
    wait_until(lambda: pair.follower.confirmed() == end, "the follower hears of it")
    assert {confirmed for confirmed, epoch in pair.follower.heard if epoch == 2} == {end}


def test_a_revoked_replication_ends_and_publishes_nothing_more(pair):
    end = pair.leader.write(100)
    pair.wait_matched(end)
    pair.leader.record.revoke_grant()
    pair.leader.sync()
    pair.thread.join(20)
    assert pair.exit_codes == [EXIT_FENCED]
    pair.follower.sync()
    assert pair.leader.confirmed == 0


def test_followers_learn_at_once_that_the_leaders_process_has_ended(pair, monkeypatch):
    end = pair.leader.write(100)
    pair.wait_matched(end)
    elections = pair.transport.sessions["replica-1"]._elections
    heard = []
    monkeypatch.setattr(elections, "step", heard.append)

    # No process has this pid and this start time any more.
    own = pair.leader.control.process
    pair.leader.control._words[control_block._START_TIME] = own.start_time - 1
    wait_until(lambda: LeaderLost(0, 1) in heard, "the follower hears of it")
    assert pair.replicator.status()["epoch"] == 0


def test_a_full_follower_refuses_and_is_tried_again(pair):
    pair.follower.full = StorageFull("the disk is full", field="disk")
    end = pair.leader.write(100)
    wait_until(lambda: "disk is full" in (pair.stream().get("error") or ""), "a refusal")
    assert pair.stream().get("matched_end") == 0
    # CommitLog's status shows it, too.
    note = FailureFile(pair.leader.root, files=Files(), clock=Clock())
    wait_until(lambda: "disk is full" in (note.read() or ""), "a note")
    pair.follower.full = None
    pair.wait_matched(end)
    assert pair.stream().get("error") is None


def trouble(pair) -> str:
    return pair.stream().get("error") or ""


def test_damaged_bytes_of_the_leader_are_not_sent_and_the_error_names_file_and_offset(pair):
    first = pair.leader.write(100)
    pair.wait_matched(first)
    pair.stop_follower()

    end = pair.leader.write(100)
    file = pair.leader.segments.files[-1]
    file.pwrite(b"\xff", first + 50)
    pair.start_follower()

    wait_until(
        lambda: f"{file.path} at {first}: the bytes are not" in trouble(pair), "it is reported"
    )
    assert pair.follower.log.end == first
    assert not pair.exit_codes
    # CommitLog repairs what is damaged there.
    note = FailureFile(pair.leader.root, files=Files(), clock=Clock())
    wait_until(lambda: note.damaged_at() == first, "a note")

    file.pwrite(b"\x01", first + 50)
    pair.wait_matched(end)
    assert pair.follower.bytes(end) == pair.leader.bytes(end)
    wait_until(lambda: note.damaged_at() is None, "the note is over")


def test_a_bad_sector_of_the_leader_does_not_end_replication(pair):
    first = pair.leader.write(5000)
    pair.wait_matched(first)
    pair.stop_follower()
    end = pair.leader.write(5000)
    file, files = pair.leader.segments.files[-1], pair.replicator._log._files
    pread, pread_into = files.pread, files.pread_into

    def lost(fd, nbytes, offset):
        if offset < 2 * 4096 < offset + nbytes:
            return pread(fd, 2 * 4096 - offset, offset)
        if offset == 2 * 4096:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(fd, nbytes, offset)

    def lost_into(fd, target, offset):
        found = lost(fd, len(target), offset)
        target[: len(found)] = found
        return len(found)

    files.pread, files.pread_into = lost, lost_into
    pair.start_follower()
    wait_until(lambda: f"{file.path} cannot be read at 8192" in trouble(pair), "it is reported")
    assert pair.follower.log.end == first
    assert not pair.exit_codes
    files.pread, files.pread_into = pread, pread_into
    pair.wait_matched(end)


class SlowReads:
    """Reads of the log from `start` on hang until the test lets them go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._read = LogReader.read
        self.start = -1
        self.begun: list[int] = []
        self.go, self.noted = threading.Event(), threading.Event()
        #: what the first read meets
        self.fault: Exception | None = None
        monkeypatch.setattr(follower_stream, "CACHED_MS", 0)
        monkeypatch.setattr(LogReader, "read", lambda *args: self.read(*args))

    def begin(self, pair: Pair, start: int) -> None:
        """Let reads hang, when the follower's stream does not take these bytes for new ones any more."""
        stream = pair.replicator._streams[0]
        wait_until(lambda: (stream._cached_from or 0) > start, "the bytes are old")
        self.start = start

    def read(self, reader: LogReader, start: int, stop: int, message):
        if start == self.start:
            self.begun.append(start)
            is_first = len(self.begun) == 1
            assert self.go.wait(TIMEOUT_S)
            if is_first and self.fault is not None:
                raise self.fault
            # A good read takes the fault's note back.
            assert self.fault is None or self.noted.wait(TIMEOUT_S)
        return self._read(reader, start, stop, message)


def test_a_slow_read_for_one_follower_delays_no_heartbeat_and_no_ack_of_another_one(
    trio: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowReads(monkeypatch)
    first = trio.leader.write(1000)
    for replica in (1, 2):
        trio.wait_matched(first, replica)
    trio.stop_follower(1)
    end = trio.leader.write(1000)
    trio.leader.sync()
    trio.wait_matched(end, 2)
    trio.followers[2].sync()
    trio.wait_confirmed(end)

    slow.begin(trio, first)
    trio.start_follower(1)
    try:
        wait_until(lambda: slow.begun, "the read for the follower that lags")
        end = trio.leader.write(1000)
        trio.leader.sync()
        trio.wait_matched(end, 2)
        trio.followers[2].sync()
        trio.wait_confirmed(end)
        beat_ms = trio.leader.record.heartbeat_ms
        wait_until(lambda: trio.leader.record.heartbeat_ms > beat_ms, "a heartbeat")
        assert trio.followers[1].log.end == first
    finally:
        slow.go.set()
    trio.wait_matched(end, 1)
    assert trio.followers[1].bytes(end) == trio.leader.bytes(end)


def test_damage_that_a_long_read_meets_is_noted_although_its_connection_was_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(tmp_path, limits=replace(LIMITS, silence_ms=300))
    first = pair.leader.write(1000)
    pair.wait_matched(first)
    pair.stop_follower()
    slow = SlowReads(monkeypatch)
    slow.fault = Corrupt("cannot be read", offset=first)
    end = pair.leader.write(1000)
    slow.begin(pair, first)
    pair.start_follower()
    try:
        wait_until(lambda: len(slow.begun) > 1, "the next connection reads the same bytes")
        slow.go.set()
        note = FailureFile(pair.leader.root, files=Files(), clock=Clock())
        wait_until(lambda: note.damaged_at() == first, "a note")
        slow.noted.set()
        pair.wait_matched(end)
    finally:
        slow.go.set()
        slow.noted.set()
        pair.close()


def test_the_heartbeat_goes_on_while_the_service_itself_reads(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.wait_matched(pair.leader.write(1000))
    read = LogReader.read
    were_blocking = []

    def note(reader: LogReader, *args):
        if threading.current_thread().name != "raymq-replica-send":
            were_blocking.append(pair.replicator._satellite.blocking_call.active)
        return read(reader, *args)

    monkeypatch.setattr(follower_stream, "CACHED_MS", 0)
    monkeypatch.setattr(LogReader, "read", note)

    def has_read_itself() -> bool:
        pair.wait_matched(pair.leader.write(1000))
        return bool(were_blocking)

    wait_until(has_read_itself, "bytes that have just come are read at once")
    assert all(were_blocking)


def test_a_read_under_way_closes_its_file_when_the_reader_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Files()
    (tmp_path / f"{0:020d}").write_bytes(b"bytes of the log")
    reader = LogReader(tmp_path, 4096, files=files)
    opened, closed = [], []
    open_file, close, read_range = files.open_file, files.close, files.read_range

    def note_open(*args, **options):
        opened.append(open_file(*args, **options))
        return opened[-1]

    def note_close(fd: int) -> None:
        close(fd)
        closed.append(fd)

    def read_while_it_is_closed(*args, **options):
        reader.close()
        assert not closed
        return read_range(*args, **options)

    monkeypatch.setattr(files, "open_file", note_open)
    monkeypatch.setattr(files, "close", note_close)
    monkeypatch.setattr(files, "read_range", read_while_it_is_closed)
    assert reader.read(0, 5, Hello(0, 0)) == b"bytes"
    assert opened == closed


def test_bytes_that_change_on_the_way_are_refused_and_never_stored(pair):
    first = pair.leader.write(100)
    pair.wait_matched(first)
    pair.stop_follower()

    end = pair.leader.write(100)
    reader = pair.replicator._log
    read = reader.read
    reader.read = lambda start, stop, message: (
        (data := read(start, stop, message))
        and bytes(byte ^ (index == 50) for index, byte in enumerate(data))
    )

    pair.start_follower()
    wait_until(lambda: "damaged" in trouble(pair), "a refusal")
    assert pair.follower.log.end == first

    reader.read = read
    pair.wait_matched(end)


def test_a_broken_connection_is_opened_again(pair):
    end = pair.leader.write(100)
    pair.wait_matched(end)
    for stream in pair.transport.streams["replica-1"]:
        stream.close()
    end = pair.leader.write(100)
    pair.wait_matched(end)
    assert pair.follower.bytes(end) == pair.leader.bytes(end)


def test_a_tail_that_the_leader_does_not_have_is_cut_when_its_bytes_differ(pair):
    end = pair.leader.write(100)
    pair.leader.sync()
    pair.wait_matched(end)
    pair.follower.sync()
    pair.wait_confirmed(end)

    pair.stop_follower()
    tail = b"~" * 500
    previous = pair.follower.log.chain.value
    unit = ChainUnit(end, end + len(tail), 0, crc32c(tail), previous)
    pair.follower.append_units([unit], memoryview(tail))
    pair.follower.sync()
    pair.start_follower()

    later = pair.leader.write(200)
    pair.leader.sync()
    pair.wait_matched(later)
    assert pair.leader.confirmed == end

    pair.follower.sync()
    pair.wait_confirmed(later)
    assert pair.follower.log.end == later
    assert pair.follower.bytes(later) == pair.leader.bytes(later)


def test_a_follower_whose_chain_was_rebuilt_takes_over_the_leaders_units(pair):
    end = pair.leader.write(100, 200, 300)
    pair.wait_matched(end)
    pair.stop_follower()
    pair.follower.log.chain.truncate_to(0)
    pair.follower.log.complete_chain()
    assert pair.follower.log.chain.value != pair.leader.chain.value
    pair.start_follower()
    end = pair.leader.write(100)
    pair.wait_matched(end)
    assert pair.follower.log.chain.value == pair.leader.chain.value
    assert pair.follower.bytes(end) == pair.leader.bytes(end)


@pytest.fixture
def trio(tmp_path):
    """A leader with two followers."""
    trio = Pair(tmp_path, limits=LIMITS, followers=2)
    yield trio
    trio.close()


def test_of_three_replicas_two_confirm_and_the_third_follows(trio):
    end = trio.leader.write(1000, 2000)
    trio.leader.sync()
    for replica in (1, 2):
        trio.wait_matched(end, replica)
    assert trio.leader.confirmed == 0
    records = trio.leader.control.followers
    wait_until(lambda: records[1].read().matched_end == end, "CommitLog knows of the match")
    assert records[1].read().durable_end == 0
    trio.followers[2].sync()
    trio.wait_confirmed(end)
    wait_until(lambda: records[2].read().durable_end == end, "CommitLog knows of the sync")
    assert trio.followers[1].log.synced == 0
    assert trio.followers[1].bytes(end) == trio.followers[2].bytes(end) == trio.leader.bytes(end)


def test_a_put_waits_for_one_of_two_followers_and_the_other_gets_many_puts_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The test syncs late, at any time: none is so fast that it becomes the one that is waited for.
    monkeypatch.setattr(quorum, "CHANGE_MS", 1e9)
    trio = Pair(tmp_path, limits=replace(LIMITS, linger_ms=60_000, linger_bytes=5000), followers=2)
    try:
        for replica in (1, 2):
            trio.wait_complete(replica)
        end = trio.leader.write(1000)
        wait_until(
            lambda: end in [trio.stream(each)["matched_end"] for each in (1, 2)],
            "one of them gets the put",
        )
        prompt, other = (1, 2) if trio.stream(1)["matched_end"] else (2, 1)
        for _ in range(3):
            trio.leader.sync()
            trio.followers[prompt].sync()
            trio.wait_confirmed(end)
            end = trio.leader.write(1000)
            trio.wait_matched(end, prompt)
        assert trio.stream(other)["matched_end"] == 0
        trio.wait_matched(trio.leader.write(1000), other)
    finally:
        trio.close()


def test_a_follower_that_does_not_sync_any_more_is_not_waited_for(tmp_path: Path) -> None:
    trio = Pair(tmp_path, limits=replace(LIMITS, linger_ms=30), followers=2)
    try:
        end = trio.leader.write(100)
        trio.leader.sync()
        for replica in (1, 2):
            trio.wait_matched(end, replica)
        # One of them is prompt. Only the other one syncs from now on: it must get the next bytes nevertheless.
        for slow in (1, 2):
            end = trio.leader.write(100)
            trio.leader.sync()
            trio.wait_matched(end, 3 - slow)
            trio.followers[3 - slow].sync()
            trio.wait_confirmed(end)
    finally:
        trio.close()


def test_without_one_of_two_followers_puts_are_confirmed_and_it_catches_up(trio):
    trio.stop_follower(1)
    end = trio.leader.write(*[3000] * 60)
    trio.leader.sync()
    trio.wait_matched(end, 2)
    trio.followers[2].sync()
    trio.wait_confirmed(end)
    wait_until(lambda: trio.stream(1).get("error"), "the lost follower is reported")
    assert trio.stream(2)["error"] is None

    trio.start_follower(1)
    trio.wait_matched(end, 1)
    assert trio.followers[1].bytes(end) == trio.leader.bytes(end)


def test_without_both_followers_nothing_is_confirmed(trio):
    for replica in (1, 2):
        trio.stop_follower(replica)
    end = trio.leader.write(500)
    trio.leader.sync()
    for replica in (1, 2):
        wait_until(lambda each=replica: trio.stream(each).get("error"), "the loss is reported")
    assert trio.leader.confirmed == 0
    trio.start_follower(2)
    trio.wait_matched(end, 2)
    trio.followers[2].sync()
    trio.wait_confirmed(end)


def test_few_bytes_match_when_they_are_synced(pair, monkeypatch):
    monkeypatch.setattr(session, "UNACKNOWLEDGED_BYTES_MAX", 64 << 10)
    end = pair.leader.write(1000)
    wait_until(lambda: pair.follower.log.end == end, "the follower has appended it")
    pair.leader.sync()
    pair.follower.sync()
    pair.wait_confirmed(end)
    assert pair.stream()["matched_end"] == end


def test_an_error_that_an_answer_meets_ends_the_service(pair, monkeypatch):
    take_requests = Replicator._take_requests

    def fail_in_other_threads(replicator: Replicator) -> None:
        if threading.current_thread() is not pair.thread:
            raise OSError(errno.EIO, "refused")
        take_requests(replicator)

    raised = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    monkeypatch.setattr(Replicator, "_take_requests", fail_in_other_threads)
    pair.leader.write(1000)
    pair.thread.join(TIMEOUT_S)
    assert not pair.thread.is_alive()
    assert [str(each.exc_value) for each in raised] == ["[Errno 5] refused"]


def test_a_follower_that_does_not_count_gets_the_log_and_confirms_nothing(tmp_path):
    pair = Pair(tmp_path, limits=LIMITS, voters=(0,))
    end = pair.leader.write(1000, 2000)
    pair.wait_matched(end)
    pair.follower.sync()
    assert pair.leader.confirmed == 0
    # Its own sync is enough.
    pair.leader.sync()
    pair.wait_confirmed(end)

    pair.stop_follower()
    end = pair.leader.write(3000)
    pair.leader.sync()
    pair.wait_confirmed(end)
    pair.close()


def test_of_five_replicas_three_confirm(tmp_path):
    group = Pair(tmp_path, limits=LIMITS, followers=4)
    try:
        group.stop_follower(4)
        end = group.leader.write(1000)
        group.leader.sync()
        for replica in (1, 2, 3):
            group.wait_matched(end, replica)
        group.followers[1].sync()
        wait_until(lambda: group.stream(1)["replicated_end"] == end, "one follower is durable")
        assert group.leader.confirmed == 0
        group.followers[3].sync()
        group.wait_confirmed(end)
    finally:
        group.close()
