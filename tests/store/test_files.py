"""The seam to the disk: what each operation promises, and the failpoints at the durable steps."""

from __future__ import annotations

import ast
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from raymq.store.base import failpoints
from raymq.store.base.errors import Corrupt, StorageFull, Unavailable
from raymq.store.base.failpoints import FailPointReached, activate, fail_point, failpoint
from raymq.store.base.file_maps import GATHER_BYTES
from raymq.store.base.files import ZERO_CHUNK_BYTES, Files, only_zeros
from raymq.store.config.store_config import StoreConfig
from raymq.store.engine.message_store import MessageStore
from tests.support.simulated_disk import SimulatedDisk

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def real():
    return Files()


@pytest.fixture(params=["real", "simulated"])
def files(request, tmp_path):
    """Both implementations must pass the same tests."""
    made = Files() if request.param == "real" else SimulatedDisk()
    made.make_dirs(tmp_path)
    return made


def test_what_was_written_is_read_back_at_its_position(files, tmp_path):
    fd = files.open_file(tmp_path / "f", create=True)
    files.pwrite(fd, b"hello", 3)
    files.pwrite(fd, memoryview(b"HE"), 3)
    assert files.pread(fd, 100, 0) == b"\0\0\0HEllo"
    assert files.pread(fd, 2, 4) == b"El"
    assert files.pread(fd, 5, 8) == b""
    assert files.size(fd) == 8
    files.close(fd)
    assert files.read_file(tmp_path / "f") == b"\0\0\0HEllo"


def test_a_missing_file_is_not_found_unless_it_shall_be_created(files, tmp_path):
    with pytest.raises(FileNotFoundError):
        files.open_file(tmp_path / "f")
    with pytest.raises(FileNotFoundError):
        files.read_file(tmp_path / "f")
    files.close(files.open_file(tmp_path / "f", create=True))
    assert files.exists(tmp_path / "f")
    files.unlink(tmp_path / "f")
    files.unlink(tmp_path / "f")
    assert not files.exists(tmp_path / "f")


def test_allocating_and_truncating_set_the_length_and_leave_zeros(files, tmp_path):
    fd = files.open_file(tmp_path / "f", create=True)
    files.allocate(fd, 9000)
    assert files.size(fd) == 9000
    files.pwrite(fd, b"x" * 9000, 0)
    files.zero(fd, 10, 8999)
    assert files.pread(fd, 9000, 0) == b"x" * 10 + bytes(8989) + b"x"
    files.truncate(fd, 5)
    files.truncate(fd, 7)
    assert files.pread(fd, 100, 0) == b"xxxxx\0\0"
    files.allocate(fd, 3)
    assert files.size(fd) == 7
    files.close(fd)


def test_zeros_are_written_over_several_chunks(files, tmp_path):
    fd = files.open_file(tmp_path / "f", create=True)
    files.pwrite(fd, b"\1" * (ZERO_CHUNK_BYTES + 20), 0)
    files.zero(fd, 5, ZERO_CHUNK_BYTES + 15)
    data = files.pread(fd, 2 * ZERO_CHUNK_BYTES, 0)
    assert data == b"\1" * 5 + bytes(ZERO_CHUNK_BYTES + 10) + b"\1" * 5
    files.close(fd)


def test_a_chunk_has_only_zeros_or_it_has_not():
    for size in (0, 7, ZERO_CHUNK_BYTES):
        assert only_zeros(bytes(size))
    for at in (0, 1, ZERO_CHUNK_BYTES // 2, ZERO_CHUNK_BYTES - 1):
        chunk = bytearray(ZERO_CHUNK_BYTES)
        chunk[at] = 1
        assert not only_zeros(bytes(chunk))


def test_reading_ahead_goes_no_further_than_the_file(files, tmp_path):
    fd = files.open_file(tmp_path / "f", create=True)
    files.pwrite(fd, b"abcdef", 0)
    for offset, length in ((0, 6), (0, 1 << 20), (4, 65537), (6, 10), (4096, 1)):
        files.read_ahead(fd, offset, length)
    assert files.pread(fd, 10, 0) == b"abcdef"
    files.close(fd)


def test_a_read_map_shows_later_writes_and_cannot_be_written(files, tmp_path):
    fd = files.open_file(tmp_path / "f", create=True)
    files.allocate(fd, 8192)
    view = files.map_read(fd, 8192)
    files.pwrite(fd, b"later", 5000)
    assert view[5000:5005] == b"later"
    with pytest.raises(TypeError):
        view[0] = 1
    files.unmap(view)
    files.close(fd)


def test_a_slice_of_a_map_outlives_the_map(files, tmp_path):
    fd = files.open_file(tmp_path / "f", create=True)
    files.pwrite(fd, b"abcdef", 0)
    view = files.map_read(fd, 6)
    piece = view[2:4]
    files.unmap(view)
    files.close(fd)
    files.unlink(tmp_path / "f")
    assert piece == b"cd"


def test_places_gathered_by_one_call_have_the_bytes_of_the_file(files, tmp_path):
    fd = files.open_file(tmp_path / "f", create=True)
    content = bytes(range(256)) * 64
    files.pwrite(fd, content, 0)
    view = files.map_read(fd, len(content), gathered=True)
    for starts in ([], [0], [9000, 3, 9001, len(content) - 100]):
        want = b"".join(content[start : start + 100] for start in starts)
        assert files.gather(view, starts, 100) == want
        assert files.read_each(fd, view, starts, 100, path=tmp_path / "f") == want
    assert files.gather(view, [len(content) - 10, 5], 100) is None
    # The end of the file, more than one call can gather, and more than its buffer holds.
    for starts, nbytes in (([len(content) - 10, 5], 100), ([7] * 1025, 1), ([0, 1], GATHER_BYTES)):
        want = b"".join(content[start:].ljust(nbytes, b"\0")[:nbytes] for start in starts)
        assert files.read_each(fd, view, starts, nbytes, path=tmp_path / "f") == want
    files.unmap(view)
    files.close(fd)


def test_a_place_that_cannot_be_read_through_its_map_is_an_error_and_no_signal(real, tmp_path):
    # Pages after the end of a shortened file are to a map what a bad sector is: SIGBUS at a touch.
    fd = real.open_file(tmp_path / "f", create=True)
    real.truncate(fd, 65_536)
    view = real.map_read(fd, 65_536, gathered=True)
    real.truncate(fd, 8192)
    assert real.gather(view, [0, 100], 2048) == bytes(4096)
    assert real.gather(view, [40_000, 0], 2048) is None
    assert real.gather(view, [0, 40_000], 2048) is None
    with pytest.raises(Corrupt) as caught:
        real.read_each(fd, view, [0, 40_000], 2048, path=tmp_path / "f", base=1 << 20)
    assert caught.value.offset == (1 << 20) + 40_000
    real.unmap(view)
    real.close(fd)


def test_a_reader_of_many_places_does_not_wait_for_another_that_waits_for_the_disk(real, tmp_path):
    fd = real.open_file(tmp_path / "f", create=True)
    real.pwrite(fd, b"abcdefgh", 0)
    view = real.map_read(fd, 8, gathered=True)
    with real._gather_lock:
        assert real.gather(view, [0, 4], 2) is None
        assert real.read_each(fd, view, [0, 4], 2, path=tmp_path / "f") == b"abef"
    assert real.gather(view, [0, 4], 2) == b"abef"
    real.unmap(view)
    real.close(fd)


def test_words_stored_through_a_shared_map_are_in_the_file(files, tmp_path):
    fd = files.open_file(tmp_path / "f", create=True)
    files.allocate(fd, 4096)
    view = files.map_words(fd, 4096)
    words = view.cast("q")
    words[3] = 0x0102030405060708
    assert files.pread(fd, 8, 24) == (0x0102030405060708).to_bytes(8, sys.byteorder)
    words.release()
    files.unmap(view)
    files.close(fd)


def test_a_map_beyond_the_end_is_refused_instead_of_a_later_sigbus(files, tmp_path):
    fd = files.open_file(tmp_path / "f", create=True)
    files.pwrite(fd, b"short", 0)
    for make in (files.map_read, files.map_words):
        with pytest.raises(Corrupt) as caught:
            make(fd, 4096)
        assert (caught.value.expected, caught.value.found) == (4096, 5)
    files.close(fd)


def test_names_are_listed_sorted_and_a_missing_directory_is_empty(files, tmp_path):
    for name in ("b", "a", "c"):
        files.close(files.open_file(tmp_path / name, create=True))
    assert files.list(tmp_path) == ["a", "b", "c"]
    assert files.list(tmp_path / "nowhere") == []


def test_a_rename_replaces_its_target(files, tmp_path):
    for name in ("old", "new"):
        fd = files.open_file(tmp_path / name, create=True)
        files.pwrite(fd, name.encode(), 0)
        files.close(fd)
    files.rename(tmp_path / "old", tmp_path / "new")
    assert files.list(tmp_path) == ["new"]
    assert files.read_file(tmp_path / "new") == b"old"


def test_a_tree_is_made_and_removed_whole(files, tmp_path):
    files.make_dirs(tmp_path / "a" / "b" / "c")
    files.make_dirs(tmp_path / "a" / "b" / "c")
    files.close(files.open_file(tmp_path / "a" / "b" / "f", create=True))
    assert files.list(tmp_path / "a" / "b") == ["c", "f"]
    files.remove_tree(tmp_path / "a")
    files.remove_tree(tmp_path / "a")
    assert not files.exists(tmp_path / "a")


def test_a_small_file_is_replaced_whole_and_leaves_no_temporary(files, tmp_path):
    files.write_file_atomic(tmp_path / "f", b"a long first content")
    files.write_file_atomic(tmp_path / "f", b"second")
    assert files.read_file(tmp_path / "f") == b"second"
    assert files.list(tmp_path) == ["f"]


def test_the_simulated_disk_has_every_method_of_the_real_one():
    public = {name for name, value in vars(Files).items() if callable(value) and name[0] != "_"}
    reads = {"read_range", "read_into", "read_each", "map_checked"}
    made_of_others = {"created", "opened", "boot_id_hash"} | reads
    assert public - made_of_others <= set(vars(SimulatedDisk)), public - set(vars(SimulatedDisk))


# --- the real one only ----------------------------------------------------------------------------


def test_new_files_and_directories_are_for_their_owner_only(real, tmp_path):
    real.make_dirs(tmp_path / "d" / "e")
    real.close(real.open_file(tmp_path / "d" / "f", create=True))
    assert (tmp_path / "d").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "d" / "f").stat().st_mode & 0o777 == 0o600


def test_every_new_directory_is_synced_into_its_parent(tmp_path):
    synced = []

    class Recorder(Files):
        def sync_dir(self, path):
            synced.append(Path(path))
            super().sync_dir(path)

    Recorder().make_dirs(tmp_path / "a" / "b")
    assert synced == [tmp_path, tmp_path / "a"]


def test_a_symbolic_link_is_not_followed(real, tmp_path):
    (tmp_path / "target").write_bytes(b"secret")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(OSError) as caught:
        real.open_file(tmp_path / "link")
    assert caught.value.errno == errno.ELOOP


def test_a_short_write_is_continued(real, tmp_path, monkeypatch):
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:3], at))
    fd = real.open_file(tmp_path / "f", create=True)
    real.pwrite(fd, b"0123456789", 0)
    assert real.pread(fd, 20, 0) == b"0123456789"
    real.close(fd)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_storage_full(real, tmp_path, monkeypatch, code):
    def full(*_):
        raise OSError(code, os.strerror(code))

    fd = real.open_file(tmp_path / "f", create=True)
    monkeypatch.setattr(os, "pwrite", full)
    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(os, "ftruncate", full)
    for call in (
        lambda: real.pwrite(fd, b"x", 0),
        lambda: real.allocate(fd, 10),
        lambda: real.truncate(fd, 10),
    ):
        with pytest.raises(StorageFull, match="Free some room"):
            call()
    real.close(fd)


def test_an_io_error_stays_an_os_error(real, tmp_path, monkeypatch):
    def broken(*_):
        raise OSError(errno.EIO, "broken")

    fd = real.open_file(tmp_path / "f", create=True)
    monkeypatch.setattr(os, "fdatasync", broken)
    monkeypatch.setattr(os, "pwrite", broken)
    for call in (lambda: real.sync_data(fd), lambda: real.pwrite(fd, b"x", 0)):
        with pytest.raises(OSError) as caught:
            call()
        assert caught.value.errno == errno.EIO
    real.close(fd)


def test_a_path_that_may_not_be_written_says_what_to_check(real, tmp_path, monkeypatch):
    def denied(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(Unavailable, match="owner, mode and mount") as caught:
        real.open_file(tmp_path / "f", create=True)
    assert caught.value.path == str(tmp_path / "f")


def test_a_lock_held_by_another_process_names_it(real, tmp_path):
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from raymq.store.base.files import Files; f = Files()\n"
            "f.lock(f.open_file(sys.argv[1], create=True)); print('held', flush=True)\n"
            "sys.stdin.read()",
            str(tmp_path / "lock"),
        ],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        fd = real.open_file(tmp_path / "lock", create=True)
        with pytest.raises(Unavailable, match=f"by process {holder.pid}") as caught:
            real.lock(fd)
        assert caught.value.pid == holder.pid
        holder.communicate()
    real.lock(fd)
    real.close(fd)


def test_the_boot_has_an_id_and_the_disk_has_room(real, tmp_path):
    assert len(real.boot_id()) == 36
    assert real.free_bytes(tmp_path) > 0


def test_a_boot_has_one_hash_that_fits_a_field(real):
    assert real.boot_id_hash() == real.boot_id_hash()
    assert 0 < real.boot_id_hash() < 2**63


def test_the_id_of_a_boot_is_read_once_and_known_without_a_free_descriptor(monkeypatch, tmp_path):
    files = Files()
    known = files.boot_id_hash()
    monkeypatch.setattr("raymq.store.base.files.BOOT_ID_PATH", str(tmp_path / "missing"))
    assert files.boot_id_hash() == known
    assert len(files.boot_id()) == 36


@pytest.mark.parametrize("content", [None, b"\n"])
def test_a_boot_without_an_id_is_not_guessed(monkeypatch, tmp_path, content):
    missing = tmp_path / "boot_id"
    if content is not None:
        missing.write_bytes(content)
    monkeypatch.setattr("raymq.store.base.files.BOOT_ID_PATH", str(missing))
    with pytest.raises(Unavailable, match="mount") as caught:
        Files().boot_id_hash()
    assert caught.value.path == str(missing)
    with pytest.raises(Unavailable, match="mount"):
        MessageStore.open(tmp_path / "store", config=StoreConfig())
    monkeypatch.undo()
    # The refusal let go of the lock.
    MessageStore.open(tmp_path / "store", config=StoreConfig()).close()


# --- failpoints -----------------------------------------------------------------------------------


def used_failpoints():
    names = []
    for part in ("store", "replication", "actors", "client", "cluster", "spark"):
        for path in sorted((ROOT / part).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Name)
                    and node.func.id == "fail_point"
                    and isinstance(node.args[0], ast.Constant)
                ):
                    names.append(node.args[0].value)
    return names


def test_every_failpoint_in_the_code_is_in_the_list_and_every_listed_one_is_in_the_code():
    assert set(used_failpoints()) == set(failpoints.NAMES)


def test_a_failpoint_acts_only_while_it_is_set():
    fail_point("log.roll")
    with failpoint("log.roll", "raise"), pytest.raises(FailPointReached, match=r"log\.roll"):
        fail_point("log.roll")
    fail_point("log.roll")
    reached = []
    with failpoint("log.roll", lambda: reached.append(1)):
        fail_point("log.roll")
        fail_point("log.after_store")
    assert reached == [1]


def test_an_unknown_failpoint_or_action_is_refused():
    with pytest.raises(KeyError, match="known: clean"):
        activate("log.rol", "raise")
    with pytest.raises(ValueError, match="unknown failpoint action"):
        activate("log.roll", "explode")


def test_a_failpoint_of_the_environment_kills_the_process():
    code = "from raymq.store.base.failpoints import fail_point; fail_point('log.roll')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "RAYMQ_FAILPOINTS": "log.after_store=raise;log.roll=kill"},
        timeout=60,
    )
    assert done.returncode == -signal.SIGKILL
