"""The simulated disk forgets exactly what a real one may forget: the crash tests rest on it."""

from __future__ import annotations

import errno

import pytest

from raymq.store.base.errors import StorageFull, Unavailable
from tests.support.simulated_disk import SimulatedDisk

BLOCK = 512


@pytest.fixture
def disk():
    made = SimulatedDisk(block_bytes=BLOCK)
    made.make_dirs("/d")
    return made


def new_file(disk, name="f", size=0):
    """A file whose name and length are on disk."""
    fd = disk.open_file(f"/d/{name}", create=True)
    if size:
        disk.truncate(fd, size)
    disk.sync(fd)
    disk.sync_dir("/d")
    return fd


def contents(states, path="/d/f"):
    return {state.tree().get(path) for state in states}


def test_synced_bytes_and_names_are_in_every_later_state(disk):
    fd = new_file(disk)
    disk.pwrite(fd, b"kept", 0)
    disk.sync_data(fd)
    disk.note("synced")
    disk.pwrite(fd, b"more", BLOCK)
    after = [s for s in disk.crash_states() if s.notes]
    assert len(after) == 3
    assert all(state.tree()["/d/f"][:4] == b"kept" for state in after)


def test_each_unsynced_block_is_there_or_not_on_its_own(disk):
    fd = new_file(disk, size=3 * BLOCK)
    disk.pwrite(fd, b"x" * 3 * BLOCK, 0)
    want = {
        b"".join(b"x" * BLOCK if bits >> i & 1 else bytes(BLOCK) for i in range(3))
        for bits in range(8)
    }
    assert contents(disk.crash_states()) >= want
    assert contents(disk.crash_states()) - want == {None, b""}


def test_a_block_may_have_any_version_since_its_last_sync(disk):
    fd = new_file(disk, size=4)
    for value in (b"aaaa", b"bbbb", b"cccc"):
        disk.pwrite(fd, value, 0)
    assert contents(disk.crash_states()) >= {bytes(4), b"aaaa", b"bbbb", b"cccc"}
    disk.sync_data(fd)
    disk.note("synced")
    assert contents(s for s in disk.crash_states() if s.notes) == {b"cccc"}


def test_a_length_without_its_bytes_shows_zeros_and_bytes_without_their_length_are_lost(disk):
    fd = new_file(disk)
    disk.pwrite(fd, b"abc", 0)
    disk.note("written")
    found = contents(s for s in disk.crash_states() if s.notes)
    assert found == {b"", bytes(3), b"abc"}


def test_an_unsynced_name_is_there_or_not_even_when_the_file_is_synced(disk):
    fd = disk.open_file("/d/f", create=True)
    disk.pwrite(fd, b"abc", 0)
    disk.sync(fd)
    disk.note("file synced")
    assert contents(s for s in disk.crash_states() if s.notes[-1:] == ("file synced",)) == {
        None,
        b"abc",
    }
    disk.sync_dir("/d")
    disk.note("name synced")
    assert contents(s for s in disk.crash_states() if s.notes[-1:] == ("name synced",)) == {b"abc"}


def test_an_unsynced_unlink_and_rename_are_there_or_not(disk):
    for name in ("f", "g"):
        fd = new_file(disk, name)
        disk.pwrite(fd, name.encode(), 0)
        disk.sync(fd)
    disk.note("start")
    disk.rename("/d/f", "/d/h")
    disk.unlink("/d/g")
    names = {tuple(sorted(s.tree())) for s in disk.crash_states() if s.notes}
    assert names == {
        ("/d/f", "/d/g"),
        ("/d/f",),
        ("/d/g", "/d/h"),
        ("/d/h",),
    }


def test_an_atomic_replacement_leaves_the_old_or_the_new_content_at_every_crash(disk):
    disk.write_file_atomic("/d/f", b"old" * 400)
    disk.note("old")
    disk.write_file_atomic("/d/f", b"new" * 500)
    disk.note("new")
    for state in disk.crash_states():
        content = state.tree().get("/d/f")
        allowed = {0: {None, b"old" * 400}, 1: {b"old" * 400, b"new" * 500}, 2: {b"new" * 500}}
        assert content in allowed[len(state.notes)]


def test_a_replacement_without_the_sync_of_the_file_is_caught(disk):
    disk.write_file_atomic("/d/f", b"old")
    disk.note("old")
    fd = disk.open_file("/d/f.tmp", create=True)
    disk.pwrite(fd, b"new", 0)
    disk.rename("/d/f.tmp", "/d/f")
    disk.sync_dir("/d")
    assert contents(s for s in disk.crash_states() if s.notes) > {b"old", b"new"}


def test_a_file_that_shrank_and_grew_again_never_shows_its_old_end(disk):
    fd = new_file(disk)
    disk.pwrite(fd, b"S" * 2 * BLOCK, 0)
    disk.sync(fd)
    disk.truncate(fd, 10)
    disk.truncate(fd, 2 * BLOCK)
    disk.note("grown")
    found = contents(s for s in disk.crash_states() if s.notes)
    assert found == {b"S" * 2 * BLOCK, b"S" * 10, b"S" * 10 + bytes(2 * BLOCK - 10)}
    disk.pwrite(fd, b"N", BLOCK)
    disk.sync(fd)
    disk.note("rewritten")
    end = b"S" * 10 + bytes(BLOCK - 10) + b"N" + bytes(BLOCK - 1)
    assert contents(s for s in disk.crash_states() if len(s.notes) == 2) == {end}


def test_a_failed_sync_loses_bytes_that_a_later_sync_claims_to_have_written(disk):
    fd = new_file(disk, size=2 * BLOCK)
    disk.pwrite(fd, b"a" * BLOCK, 0)
    disk.fail("sync_data")
    with pytest.raises(OSError) as caught:
        disk.sync_data(fd)
    assert caught.value.errno == errno.EIO
    disk.pwrite(fd, b"b" * BLOCK, BLOCK)
    disk.sync_data(fd)
    disk.note("synced again")
    assert contents(s for s in disk.crash_states() if s.notes) == {
        b"a" * BLOCK + b"b" * BLOCK,
        bytes(BLOCK) + b"b" * BLOCK,
    }


def test_stores_through_a_shared_map_are_versions_of_their_page(disk):
    fd = new_file(disk, size=BLOCK)
    view = disk.map_words(fd, BLOCK)
    words = view.cast("q")
    for value in (1, 2):
        words[0] = value
        disk.note(value)
    found = {(len(s.notes), s.tree()["/d/f"][0]) for s in disk.crash_states() if s.notes}
    assert found == {(1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)}
    disk.sync(fd)
    disk.note("synced")
    assert {s.tree()["/d/f"][0] for s in disk.crash_states() if "synced" in s.notes} == {2}


def test_a_kill_keeps_all_that_was_written_and_may_stop_inside_a_write(disk):
    fd = new_file(disk)
    disk.pwrite(fd, b"1" * BLOCK + b"2" * BLOCK + b"3" * BLOCK, 0)
    disk.pwrite(fd, b"4", 0)
    states = list(disk.kill_states())
    full = b"1" * BLOCK + b"2" * BLOCK + b"3" * BLOCK
    assert contents(states) == {None, b"", full[:BLOCK], full[: 2 * BLOCK], full, b"4" + full[1:]}
    assert {s.boot_id() for s in states} == {disk.boot_id()}
    assert {s.boot_id() for s in disk.crash_states()} == {"boot-1"}


def test_no_state_comes_twice_and_a_seed_decides_the_sample(disk):
    fd = new_file(disk, size=64 * BLOCK)
    disk.pwrite(fd, b"y" * 64 * BLOCK, 0)
    disk.note("written")

    def sample(seed):
        states = disk.crash_states(limit_per_point=40, seed=seed)
        return [state.tree().get("/d/f") for state in states if state.notes]

    first = sample(7)
    assert len(first) == len(set(first)) == 40
    assert bytes(64 * BLOCK) in first
    assert b"y" * 64 * BLOCK in first
    assert first == sample(7)
    assert first != sample(8)


def test_states_are_independent_of_each_other_and_can_crash_again(disk):
    fd = new_file(disk)
    disk.pwrite(fd, b"abc", 0)
    disk.sync(fd)
    disk.note("abc")
    [state] = [s for s in disk.crash_states() if s.notes]
    one, two = state.recording(), state.recording()
    fd = one.open_file("/d/f")
    one.pwrite(fd, b"X", 0)
    assert one.read_file("/d/f") == b"Xbc"
    assert two.read_file("/d/f") == state.read_file("/d/f") == b"abc"
    assert contents(one.crash_states()) == {b"abc", b"Xbc"}
    assert {s.notes for s in one.crash_states()} == {("abc",)}
    with pytest.raises(ValueError, match="recording"):
        list(state.crash_states())


def test_the_kth_call_fails_once_or_for_ever(disk):
    fd = new_file(disk)
    disk.fail("pwrite", at=2, error=errno.ENOSPC)
    disk.pwrite(fd, b"1", 0)
    with pytest.raises(StorageFull):
        disk.pwrite(fd, b"2345", 1)
    assert disk.read_file("/d/f") == b"123"
    disk.pwrite(fd, b"4", 3)
    disk.fail("allocate", error=errno.ENOSPC, forever=True)
    for _ in range(3):
        with pytest.raises(StorageFull):
            disk.allocate(fd, 100)
    disk.heal()
    disk.allocate(fd, 100)


def test_a_lock_is_given_once_and_ends_with_its_descriptor(disk):
    one, two = new_file(disk), disk.open_file("/d/f")
    disk.lock(one)
    with pytest.raises(Unavailable):
        disk.lock(two)
    disk.close(one)
    disk.lock(two)
