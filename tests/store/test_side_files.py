"""The small files beside the log: marks, meta, checkpoint, abort and lock."""

from __future__ import annotations

import errno
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from raymq.store.base.errors import Bug, Rejected, StoreDamaged, Unavailable
from raymq.store.base.files import Files
from raymq.store.log.control_files.abort_lock import AbortFile, StoreLock, refuse_foreign_directory
from raymq.store.log.control_files.checkpoint import Checkpoint
from raymq.store.log.control_files.marks import ClockLook, Marks
from raymq.store.log.control_files.meta import SLOT_BYTES, Meta
from tests.support.simulated_disk import SimulatedDisk

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def files():
    return Files()


@pytest.fixture
def disk():
    made = SimulatedDisk(block_bytes=512)
    made.make_dirs("/s")
    return made


# --- marks ----------------------------------------------------------------------------------------


def test_marks_are_zero_at_first_and_kept(files, tmp_path):
    marks = Marks.open(tmp_path / "marks", files=files)
    words = (marks.appended_end, marks.synced_end, marks.confirmed_end, marks.queues_synced_end)
    assert words == (0, 0, 0, 0)
    marks.appended_end, marks.synced_end = 40, 30
    marks.confirmed_end, marks.queues_synced_end = 20, 10
    marks.close()
    again = Marks.open(tmp_path / "marks", files=files)
    assert (again.appended_end, again.synced_end) == (40, 30)
    assert (again.confirmed_end, again.queues_synced_end) == (20, 10)
    again.close()
    assert (tmp_path / "marks").stat().st_size == 4096


def test_the_last_look_at_the_clocks_is_kept_and_no_cut_lowers_it(files, tmp_path):
    marks = Marks.open(tmp_path / "marks", files=files)
    assert marks.clock_look == ClockLook(0, 0, 0, 0, 0)
    marks.appended_end, marks.clock_look = 40, ClockLook(50, 60, 70, 80, files.boot_id_hash())
    marks.lower(10)
    marks.close()
    again = Marks.open(tmp_path / "marks", files=files)
    assert again.appended_end == 10
    assert again.clock_look == ClockLook(50, 60, 70, 80, files.boot_id_hash())
    again.close()


@pytest.mark.parametrize("name", ["appended_end", "synced_end", "confirmed_end"])
def test_a_mark_moves_only_up(files, tmp_path, name):
    marks = Marks.open(tmp_path / "marks", files=files)
    setattr(marks, name, 100)
    setattr(marks, name, 100)
    with pytest.raises(Bug, match="a mark moves up"):
        setattr(marks, name, 99)
    assert getattr(marks, name) == 100
    marks.close()


def test_lowering_brings_down_what_is_above_and_is_durable_at_return(disk):
    marks = Marks.open(Path("/s/marks"), files=disk)
    marks.appended_end, marks.synced_end, marks.confirmed_end = 100, 60, 40
    marks.lower(50)
    disk.note("lowered")
    found = set()
    for state in disk.crash_states():
        if state.notes:
            after = Marks.open(Path("/s/marks"), files=state)
            found.add((after.appended_end, after.synced_end, after.confirmed_end))
    assert found == {(50, 50, 40)}


def test_marks_need_no_room_once_the_page_exists(disk):
    disk.fail("allocate", error=errno.ENOSPC)
    with pytest.raises(Exception, match="disk is full"):
        Marks.open(Path("/s/marks"), files=disk)
    marks = Marks.open(Path("/s/marks"), files=disk)
    assert disk.calls["allocate"] == 2
    marks.close()
    Marks.open(Path("/s/marks"), files=disk)
    assert disk.calls["allocate"] == 2


# --- meta -----------------------------------------------------------------------------------------


def test_meta_keeps_every_value_that_was_ever_set(files, tmp_path):
    meta = Meta.open(tmp_path / "meta", files=files)
    assert meta.get("store_id") is None
    meta.update({"store_id": "a", "promised": 3})
    meta.update({"promised": 4, "clean": True})
    meta.close()
    again = Meta.open(tmp_path / "meta", files=files)
    assert [again.get(name) for name in ("store_id", "promised", "clean")] == ["a", 4, True]
    again.close()
    assert (tmp_path / "meta").stat().st_size == 2 * SLOT_BYTES


@pytest.mark.parametrize("place", [0, 4, 11, 12, 16, 20, 25])
def test_a_damaged_newer_slot_gives_the_older_one(files, tmp_path, place):
    meta = Meta.open(tmp_path / "meta", files=files)
    for value in (1, 2, 3):
        meta.update({"promised": value})
    meta.close()
    data = bytearray((tmp_path / "meta").read_bytes())
    data[SLOT_BYTES * (3 % 2) + place] ^= 1
    (tmp_path / "meta").write_bytes(data)
    meta = Meta.open(tmp_path / "meta", files=files)
    assert meta.get("promised") == 2
    meta.update({"promised": 5})
    meta.close()
    meta = Meta.open(tmp_path / "meta", files=files)
    assert meta.get("promised") == 5
    meta.close()


def test_two_damaged_slots_are_never_taken_for_a_fresh_replica(files, tmp_path):
    meta = Meta.open(tmp_path / "meta", files=files)
    meta.update({"promised": 1})
    meta.update({"promised": 2})
    meta.close()
    data = bytearray((tmp_path / "meta").read_bytes())
    data[20] ^= 1
    data[SLOT_BYTES + 20] ^= 1
    (tmp_path / "meta").write_bytes(data)
    with pytest.raises(StoreDamaged, match="neither slot is valid") as caught:
        Meta.open(tmp_path / "meta", files=files)
    assert caught.value.path == str(tmp_path / "meta")


def test_after_every_crash_meta_holds_the_last_promise_or_the_one_under_way(disk):
    meta = Meta.open(Path("/s/meta"), files=disk)
    for value in range(1, 5):
        meta.update({"promised": value, "filler": "x" * 900})
        disk.note(value)
    count = 0
    for state in (*disk.crash_states(), *disk.kill_states()):
        count += 1
        state.make_dirs("/s")
        promised = Meta.open(Path("/s/meta"), files=state).get("promised") or 0
        kept = state.notes[-1] if state.notes else 0
        assert promised in (kept, kept + 1)
    assert count > 20


def test_meta_that_does_not_fit_a_slot_is_refused_and_the_old_one_stays(files, tmp_path):
    meta = Meta.open(tmp_path / "meta", files=files)
    meta.update({"promised": 1})
    with pytest.raises(Rejected) as caught:
        meta.update({"note": "x" * SLOT_BYTES})
    assert caught.value.limit == SLOT_BYTES - 20
    assert meta.get("note") is None
    meta.close()


def test_a_failed_sync_of_meta_promises_nothing(disk):
    meta = Meta.open(Path("/s/meta"), files=disk)
    disk.fail("sync_data")
    with pytest.raises(OSError):
        meta.update({"promised": 1})
    assert meta.get("promised") is None


# --- checkpoint -----------------------------------------------------------------------------------


def test_the_checkpoint_is_five_big_endian_longs_in_a_page(files, tmp_path):
    checkpoint = Checkpoint.open(tmp_path / "checkpoint", files=files)
    assert (tmp_path / "checkpoint").read_bytes() == bytes(4096)
    checkpoint.physic_ms, checkpoint.logics_ms, checkpoint.index_ms = 1, 2, 3
    checkpoint.master_flushed_offset, checkpoint.confirm_offset = 4, 5
    checkpoint.sync()
    checkpoint.close()
    data = (tmp_path / "checkpoint").read_bytes()
    assert data == struct.pack(">5q", 1, 2, 3, 4, 5) + bytes(4096 - 40)
    again = Checkpoint.open(tmp_path / "checkpoint", files=files)
    assert (again.physic_ms, again.logics_ms, again.index_ms) == (1, 2, 3)
    assert (again.master_flushed_offset, again.confirm_offset) == (4, 5)
    again.close()


# --- abort and lock -------------------------------------------------------------------------------


def test_abort_holds_our_pid_while_the_store_is_open(files, tmp_path):
    abort = AbortFile(tmp_path, files=files)
    assert not abort.exists()
    (tmp_path / "abort").write_bytes(b"12345678901")
    assert abort.exists()
    abort.create()
    assert (tmp_path / "abort").read_bytes() == str(os.getpid()).encode()
    abort.remove()
    abort.remove()
    assert not abort.exists()


def test_abort_is_on_disk_when_it_was_created_and_gone_when_it_was_removed(disk):
    abort = AbortFile(Path("/s"), files=disk)
    abort.create()
    disk.note("open")
    abort.remove()
    disk.note("closed")
    found = {
        (state.notes, AbortFile(Path("/s"), files=state).exists())
        for state in disk.crash_states()
        if state.notes
    }
    assert found == {(("open",), True), (("open",), False), (("open", "closed"), False)}


def test_one_process_opens_a_store_once(files, tmp_path):
    lock = StoreLock(tmp_path, files=files)
    lock.acquire()
    assert (tmp_path / "lock").read_bytes() == b"lock"
    (tmp_path / "link").symlink_to(tmp_path)
    for path in (tmp_path, tmp_path / "link"):
        with pytest.raises(Unavailable, match="already open in this process"):
            StoreLock(path, files=Files()).acquire()
    lock.release()
    lock.release()
    again = StoreLock(tmp_path, files=files)
    again.acquire()
    again.release()


def test_another_process_is_kept_out_until_the_holder_is_gone(files, tmp_path):
    code = (
        "import sys; from pathlib import Path\n"
        "from raymq.store.log.control_files.abort_lock import StoreLock; from raymq.store.base.files import Files\n"
        "StoreLock(Path(sys.argv[1]), files=Files()).acquire()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    lock = StoreLock(tmp_path, files=files)
    lock.acquire()
    refused = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert refused.returncode != 0
    assert f"already open by process {os.getpid()}" in refused.stderr
    lock.release()
    assert subprocess.run(command, cwd=ROOT, timeout=60).returncode == 0


def test_two_disks_share_no_lock(disk):
    other = SimulatedDisk()
    other.make_dirs("/s")
    one, two = StoreLock(Path("/s"), files=disk), StoreLock(Path("/s"), files=other)
    one.acquire()
    two.acquire()
    with pytest.raises(Unavailable):
        StoreLock(Path("/s"), files=disk).acquire()
    one.release()
    two.release()


# --- directories ----------------------------------------------------------------------------------


def test_a_store_with_queues_of_inner_batches_is_refused(files, tmp_path):
    for name in ("commitlog", "batchconsumequeue"):
        (tmp_path / name).mkdir()
    refuse_foreign_directory(tmp_path, files=files)
    (tmp_path / "batchconsumequeue" / "topic").mkdir()
    with pytest.raises(Rejected, match="BatchCQ"):
        refuse_foreign_directory(tmp_path, files=files)


def test_a_directory_of_other_things_is_refused(files, tmp_path):
    refuse_foreign_directory(tmp_path, files=files)
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(Rejected, match="thesis"):
        refuse_foreign_directory(tmp_path, files=files)
