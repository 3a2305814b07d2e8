"""Damaged bytes of one replica are replaced by those of another one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from raymq.actors.satellites.log_reader import LogReader
from raymq.actors.shared.failures import FailureFile
from raymq.actors.supervise.log_repair import LogRepair
from raymq.replication.wire import AppendEntries
from raymq.store.base.clock import Clock
from raymq.store.base.errors import Corrupt, OffsetOutOfRange, Rejected, Unavailable
from raymq.store.base.failpoints import failpoint
from raymq.store.base.files import Files
from raymq.store.log.mending import log_mender
from raymq.store.log.mending.mended_copy import copy_directory
from raymq.store.log.mending.sound_bytes import ANSWER_BYTES_MAX
from raymq.store.queues import reput_service
from raymq.store.queues.raw_records import decode_records
from raymq.store.records.requests import PutRequest
from raymq.store.tools.inspect import verify
from tests.support.bad_sectors import BadSectors
from tests.support.batches import batch, request
from tests.support.mended_shard import BODIES, SEGMENT, MendedShard
from tests.support.replica_pair import wait_until
from tests.support.roles import log_of

#: a message in a file that is full, another one in the same file, and one in the file that is written
SEALED, NEIGHBOUR, LAST = 20, 40, len(BODIES) - 1


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[MendedShard]:
    made = MendedShard(tmp_path)
    yield made
    made.close()


def repair_of(shard: MendedShard, replica: int = 0) -> LogRepair:
    repair = shard.hosts[replica].repair
    assert repair is not None
    return repair


def wait_equal(shard: MendedShard, offset: int, replicas: tuple[int, int] = (0, 1)) -> None:
    """Wait until the file with `offset` has the same bytes on two replicas."""
    paths = [shard.segment(replica, offset) for replica in replicas]
    wait_until(lambda: len({path.read_bytes() for path in paths}) == 1, "the files are equal")


def failure(shard: MendedShard, replica: int = 0) -> str:
    return shard.hosts[replica].status()["failures"].get("repair", "")


# --- reads ----------------------------------------------------------------------------------------


def test_a_rotten_message_of_the_leader_is_read_with_the_bytes_of_the_follower(
    shard: MendedShard,
) -> None:
    unit = shard.rot(0, SEALED)
    old = shard.segment(0, unit.start).stat().st_ino
    assert shard.read_whole() == BODIES
    wait_equal(shard, unit.start)
    assert shard.segment(0, unit.start).stat().st_ino != old
    assert shard.read_whole() == BODIES
    done = {"units": 1, "files": 1, "bytes_in_memory": 0, "error": None}
    wait_until(lambda: repair_of(shard).status() == done, "all is counted")
    assert shard.leader.store.damage == []
    wait_until(lambda: not failure(shard), "nothing is left to repair")


def test_bytes_that_a_disk_cannot_read_are_repaired(tmp_path: Path) -> None:
    shard = MendedShard(tmp_path, files=BadSectors)
    try:
        disk = shard.disks[0]
        assert isinstance(disk, BadSectors)
        unit = shard.unit_of(SEALED)
        disk.lose(shard.segment(0, unit.start), unit.start % SEGMENT + 5000)
        assert shard.read_whole() == BODIES
        wait_until(lambda: not disk.bad, "the file is replaced")
        wait_equal(shard, unit.start)
        assert shard.leader.store.damage == []
    finally:
        shard.close()


def test_all_damage_of_a_file_is_repaired_together(shard: MendedShard) -> None:
    unit = shard.rot(0, SEALED)
    shard.rot(0, NEIGHBOUR)
    part = shard.leader.store.fetch_whole("t", 0, SEALED, max_bytes=1, max_records=1)
    assert part.first_offset == SEALED
    wait_equal(shard, unit.start)
    mender = repair_of(shard).mender
    wait_until(lambda: mender.files == 1, "the file was replaced")
    assert mender.units == 2


def test_damage_of_the_file_that_a_follower_writes_is_read_from_memory_until_the_file_is_full(
    shard: MendedShard,
) -> None:
    unit = shard.rot(1, LAST)
    rotten = shard.segment(1, unit.start).read_bytes()
    assert shard.hosts[1].log.reads.raw(unit.start, unit.end)
    follower = shard.hosts[1].log
    assert repair_of(shard, 1).mender.mend(unit.start)
    assert follower.reads.raw(unit.start, unit.end) == shard.leader.log.reads.raw(
        unit.start, unit.end
    )
    wait_until(lambda: "from memory" in failure(shard, 1), "status says so")
    assert shard.segment(1, unit.start).read_bytes() == rotten
    shard.put([b"more" * 1000] * 80)
    repair_of(shard, 1).wake()
    wait_equal(shard, unit.start)


def test_a_leader_ends_the_file_that_it_writes_so_that_its_damage_is_repaired(
    shard: MendedShard,
) -> None:
    unit = shard.rot(0, LAST)
    end = shard.leader.log.end
    assert shard.read_whole() == BODIES
    # Replication reads the file, and would wait until puts have filled it.
    wait_until(lambda: shard.leader.log.end > end, "the next file is begun")
    shard.replicate()
    repair_of(shard).wake()
    wait_equal(shard, unit.start)
    done = {"units": 1, "files": 1, "bytes_in_memory": 0, "error": None}
    wait_until(lambda: repair_of(shard).status() == done, "all is counted")
    shard.put([b"more"])
    assert shard.read_whole() == BODIES
    assert shard.leader.store.queue_range("t", 0) == (0, len(BODIES) + 1)


def test_reads_go_on_while_a_file_is_replaced(shard: MendedShard) -> None:
    ended = threading.Event()
    faults: list[str] = []

    def read() -> None:
        while not ended.is_set():
            try:
                if shard.read_whole() != BODIES:
                    faults.append("other bytes")
            except Exception as error:
                faults.append(repr(error))

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for row in (SEALED, NEIGHBOUR, 0, 130):
        files = repair_of(shard).mender.files
        shard.rot(0, row)
        wait_until(lambda f=files: repair_of(shard).mender.files > f, "the file is replaced")
    ended.set()
    for thread in threads:
        thread.join()
    assert not faults


def test_a_view_of_the_old_file_stays_readable(shard: MendedShard) -> None:
    unit = shard.unit_of(SEALED)
    file = shard.leader.log.segments.find(unit.start)
    assert file is not None
    view = file.read_view()[: unit.end - file.start]
    before = bytes(view)
    shard.rot(0, NEIGHBOUR)
    assert shard.read_whole() == BODIES
    wait_equal(shard, unit.start)
    assert bytes(view) == before
    assert bytes(file.read_view()[: len(before)]) == before


# --- the scrub ------------------------------------------------------------------------------------


@pytest.mark.parametrize("replica", [0, 1])
def test_damage_that_the_scrub_finds_is_repaired(shard: MendedShard, replica: int) -> None:
    unit = shard.rot(replica, SEALED)
    host = shard.hosts[replica]
    host.scrub.one_pass()
    wait_equal(shard, unit.start)
    wait_until(lambda: not host.scrub.faults, "the fault is over")
    host.scrub.restart()
    assert host.scrub.one_pass() == []
    # It is over for the next process, too.
    shard.close(replica)
    assert shard.open(replica).scrub.faults == []


def test_a_start_repairs_what_an_earlier_process_found(shard: MendedShard) -> None:
    unit = shard.rot(1, SEALED)
    leader = shard.hosts.pop(0)
    shard.hosts[1].scrub.one_pass()
    wait_until(lambda: "no answer" in failure(shard, 1), "the leader was asked")
    shard.close(1)
    shard.hosts[0] = leader
    shard.open(1)
    wait_equal(shard, unit.start)


# --- without sound bytes --------------------------------------------------------------------------


def test_damage_of_both_replicas_at_one_place_stays_corrupt_and_nothing_is_written(
    shard: MendedShard,
) -> None:
    unit = shard.rot(0, SEALED)
    shard.rot(1, SEALED)
    rotten = [shard.segment(replica, unit.start).read_bytes() for replica in (0, 1)]
    with pytest.raises(Corrupt, match="is damaged"):
        shard.read_whole()
    repair_of(shard).wake()
    wait_until(lambda: "damaged on this replica, too" in failure(shard), "status says so")
    assert [shard.segment(replica, unit.start).read_bytes() for replica in (0, 1)] == rotten
    assert repair_of(shard).mender.units == 0
    assert len(shard.leader.store.damage) == 1


def test_a_reader_asks_only_once_in_a_while_for_bytes_that_no_replica_has(
    shard: MendedShard,
) -> None:
    shard.rot(0, SEALED)
    shard.rot(1, SEALED)
    for _ in range(5):
        with pytest.raises(Corrupt):
            shard.leader.store.check_record("t", 0, SEALED)
    # The repair itself asks at any time.
    assert shard.asked.count(1) <= 2


def test_another_replica_is_asked_if_the_first_one_is_damaged_too(tmp_path: Path) -> None:
    shard = MendedShard(tmp_path, replicas=3)
    try:
        unit = shard.rot(2, SEALED)
        shard.rot(0, SEALED)
        shard.hosts[2].scrub.one_pass()
        wait_equal(shard, unit.start, (1, 2))
        assert shard.asked[:2] == [0, 1]
    finally:
        shard.close()


def test_without_another_replica_damage_is_as_ever(tmp_path: Path) -> None:
    shard = MendedShard(tmp_path, replicas=1)
    try:
        shard.rot(0, SEALED)
        assert shard.leader.repair is None
        with pytest.raises(Corrupt, match="is damaged"):
            shard.read_whole()
        assert shard.leader.status()["failures"] == {}
    finally:
        shard.close()


def test_a_damaged_chain_proves_no_bytes_and_status_says_so(shard: MendedShard) -> None:
    unit = shard.units()[3]
    path = shard.root / "0" / "raymq" / "chain" / f"{0:020d}"
    rotten = path.read_bytes().replace(unit.pack(), unit._replace(crc=unit.crc ^ 1).pack())
    path.write_bytes(rotten)
    shard.leader.scrub.one_pass()
    wait_until(
        lambda: f"chain of this replica is damaged at {unit.start}" in failure(shard), "said"
    )
    assert not shard.asked
    assert path.read_bytes() == rotten
    assert shard.read_whole() == BODIES


def test_a_disk_without_room_for_the_copy_leaves_the_old_file(
    shard: MendedShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    unit = shard.rot(0, SEALED)
    rotten = shard.segment(0, unit.start).read_bytes()
    monkeypatch.setattr(log_mender, "FILE_RETRY_MS", 0)
    allocate = shard.disks[0].allocate
    monkeypatch.setattr(shard.disks[0], "allocate", full)
    assert shard.read_whole() == BODIES
    wait_until(lambda: "is not replaced" in failure(shard), "status says so")
    assert shard.segment(0, unit.start).read_bytes() == rotten
    monkeypatch.setattr(shard.disks[0], "allocate", allocate)
    repair_of(shard).wake()
    wait_equal(shard, unit.start)


# --- crashes --------------------------------------------------------------------------------------


def test_a_crash_before_the_rename_leaves_the_old_file_and_the_next_start_repairs(
    shard: MendedShard,
) -> None:
    unit = shard.rot(0, SEALED)
    path = shard.segment(0, unit.start)
    rotten = path.read_bytes()
    copies = copy_directory(shard.root / "0", path)
    with failpoint("mend.copied", "raise"):
        assert shard.read_whole() == BODIES
        wait_until(lambda: (copies / path.name).exists(), "the copy is there")
        shard.close(0)
    assert path.read_bytes() == rotten
    shard.open(0)
    assert not list(copies.iterdir())
    assert shard.read_whole() == BODIES
    wait_equal(shard, unit.start)


# --- the answer of a replica ----------------------------------------------------------------------


def test_a_replica_that_is_damaged_there_gives_no_bytes(shard: MendedShard) -> None:
    unit = shard.rot(1, SEALED)
    with pytest.raises(Corrupt, match="on this replica, too"):
        shard.hosts[1].call("log_units", {"start": unit.start, "stop": unit.end})
    # A part of a damaged unit is not given either.
    with pytest.raises(Corrupt):
        shard.hosts[1].call("log_units", {"start": unit.start, "stop": unit.start + 1})
    # It asks no replica for them.
    assert not shard.asked


def test_a_replica_with_a_broken_chain_gives_no_bytes(shard: MendedShard) -> None:
    units = shard.units(1)
    unit = units[3]
    path = shard.root / "1" / "raymq" / "chain" / f"{0:020d}"
    data = path.read_bytes()
    other = unit._replace(crc=unit.crc ^ 1)
    path.write_bytes(data.replace(unit.pack(), other.pack()))
    with pytest.raises(Corrupt, match="does not cover"):
        shard.hosts[1].call("log_units", {"start": unit.start, "stop": unit.end})


def test_a_replica_gives_no_byte_above_its_confirmed_end(shard: MendedShard) -> None:
    end = shard.leader.log.confirmed
    log = shard.leader.log
    log.append(b"\0" * 100, log.epoch)
    log.sync()
    assert log.end > end
    with pytest.raises(Unavailable, match="confirmed bytes up to"):
        shard.leader.call("log_units", {"start": end - 10, "stop": end + 10})


def test_a_follower_that_confirms_a_little_later_is_asked_again(shard: MendedShard) -> None:
    store, log = shard.leader.store, shard.leader.log
    start = log.end
    store.put(request([b"new"]))
    shard.replicate(is_told=False)
    unit = shard.units()[-1]
    with shard.segment(0, start).open("r+b") as file:
        file.seek(unit.end % SEGMENT - 5)
        file.write(b"rot")
    threading.Timer(0.2, lambda: log_of(shard.hosts[1]).advance_confirmed(log.end)).start()
    assert repair_of(shard).mender.mend(start)
    assert shard.asked.count(1) > 1


@pytest.mark.parametrize(
    ("start", "stop"),
    [(5, 5), (5, 4), (0, ANSWER_BYTES_MAX + 1), (SEGMENT - 10, SEGMENT + 10), (-1, 5), ("0", 5)],
)
def test_a_range_that_is_none_is_refused(shard: MendedShard, start: int, stop: int) -> None:
    with pytest.raises(Rejected):
        shard.leader.call("log_units", {"start": start, "stop": stop})


def test_deleted_bytes_are_out_of_range(shard: MendedShard) -> None:
    shard.leader.log.delete_first()
    with pytest.raises(OffsetOutOfRange):
        shard.leader.call("log_units", {"start": 0, "stop": 10})


# --- the other users of the log -------------------------------------------------------------------


def test_replication_reads_the_file_that_replaced_the_damaged_one(shard: MendedShard) -> None:
    unit = shard.rot(0, SEALED)
    reader = LogReader(shard.root / "0" / "commitlog", SEGMENT, files=Files())
    frame = AppendEntries(unit.start, unit.previous, 0, (unit,))
    with pytest.raises(Corrupt):
        reader.read(unit.start, unit.end, frame)
    assert shard.read_whole() == BODIES
    wait_equal(shard, unit.start)
    found = reader.read(unit.start, unit.end, frame)
    assert found is not None
    assert len(found) == unit.end - unit.start
    reader.close()


def test_damage_that_replication_meets_is_repaired(shard: MendedShard) -> None:
    unit = shard.rot(0, SEALED)
    note = FailureFile(shard.root / "0", files=Files(), clock=Clock())
    note.write("replica 1: damaged", damaged_at=unit.start)
    repair_of(shard).wake()
    wait_equal(shard, unit.start)


@pytest.mark.parametrize("is_away", [False, True])
def test_dispatch_waits_for_the_repair_of_a_record_that_it_cannot_read(
    shard: MendedShard, is_away: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_mender, "ASK_AGAIN_MS", 0)
    follower, leader = shard.hosts[1], shard.hosts[0]
    with follower.dispatcher.paused():
        start = leader.log.end
        for number in range(5):
            leader.store.put(request([b"new %d" % number]))
        shard.replicate()
        # The magic of a record.
        with shard.segment(1, start).open("r+b") as file:
            file.seek(start % SEGMENT + 4)
            file.write(b"rot!")
        if is_away:
            del shard.hosts[0]
    if is_away:
        follower.dispatcher.wake()
        wait_until(lambda: "no answer" in str(repair_of(shard, 1)._refusals), "it was asked")
        assert follower.store.dispatched == start
        shard.hosts[0] = leader
    shard.await_dispatch()
    assert follower.store.damage == []
    assert follower.store.queue_range("t", 0) == leader.store.queue_range("t", 0)
    for host in (leader, follower):
        units = host.store.consume_queues.get("t", 0).read(len(BODIES), 10)
        assert len(units) == 5
        assert units["position"][0] == start


def test_units_and_keys_of_damage_that_dispatch_passed_over_are_right_after_its_repair(
    shard: MendedShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_mender, "ASK_AGAIN_MS", 0)
    monkeypatch.setattr(reput_service, "MEND_WAIT_MS", -1)
    follower, leader = shard.hosts[1], shard.hosts[0]
    places: list[int] = []
    with follower.dispatcher.paused():
        for number in range(7):
            places.append(leader.log.end)
            keyed = batch([b"new %d" % number], properties=b"KEYS\x01new%d\x02" % number)
            leader.store.put(PutRequest("t", 0, keyed, None, 0, 0, "quorum"))
        shard.replicate()
        for at in (places[1], places[6]):
            # The magic of a record: the last one has no message after it.
            with shard.segment(1, at).open("r+b") as file:
                file.seek(at % SEGMENT + 4)
                file.write(b"rot!")
        del shard.hosts[0]
    follower.dispatcher.wake()
    wait_until(lambda: follower.store.dispatched >= leader.log.end, "it was passed over")
    wait_until(lambda: not follower.store.reput.index_behind, "the rest is indexed")
    first = len(BODIES)
    assert follower.store.queue_range("t", 0) == (0, first + 6)
    with pytest.raises(Corrupt):
        follower.store.fetch_whole("t", 0, first + 1, max_bytes=1, max_records=1)

    shard.hosts[0] = leader
    repair_of(shard, 1).wake()
    wait_until(lambda: follower.store.queue_range("t", 0)[1] == first + 7, "the last one is there")
    for number in range(7):
        part = follower.store.fetch_whole("t", 0, first + number, max_bytes=1, max_records=1)
        assert decode_records(part.records)["body"].to_pylist() == [b"new %d" % number]
    units = [
        host.store.consume_queues.get("t", 0).read(first, 7).tobytes()
        for host in (leader, follower)
    ]
    assert units[0] == units[1]
    wait_until(lambda: not follower.store.reput.index_behind, "all is indexed again")
    for number, place in enumerate(places):
        found = follower.store.query.by_key("t", f"new{number}").records
        assert found.column("physical_offset").to_pylist() == [place]


def test_a_repaired_store_is_whole(shard: MendedShard) -> None:
    for replica, row in ((0, SEALED), (1, NEIGHBOUR)):
        unit = shard.rot(replica, row)
        shard.hosts[replica].scrub.one_pass()
        wait_equal(shard, unit.start)
    shard.close()
    for replica in (0, 1):
        assert verify(shard.root / str(replica)) == []
