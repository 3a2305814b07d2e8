"""Paths of a cluster, and the conditions that a data directory must meet."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from raymq.client.transport import actor_names
from raymq.cluster.record import cluster_record, paths
from raymq.cluster.record.cluster_record import (
    ClusterRecord,
    StartOptions,
    load_record,
    new_record,
    resume_record,
)
from raymq.cluster.start import plan_start
from raymq.store.base.errors import Corrupt, Rejected, Unavailable
from raymq.store.base.files import Files


class DiskFiles(Files):
    """Real files, on a machine whose mounts are these."""

    mounts = "/dev/sda / ext4 rw 0 0\n"

    def read_file(self, path: Path) -> bytes:
        if str(path) == "/proc/self/mounts":
            return self.mounts.encode()
        return super().read_file(path)


@pytest.fixture
def on_disk(monkeypatch: pytest.MonkeyPatch) -> DiskFiles:
    """A machine that has pytest's directories on a disk, not under /tmp."""
    monkeypatch.setattr(paths, "_VOLATILE_ROOT", "/nowhere")
    return DiskFiles()


def record(**changes: object) -> ClusterRecord:
    return new_record(StartOptions(**changes))  # type: ignore[arg-type]


def resume(stored: ClusterRecord, **changes: object) -> ClusterRecord:
    return resume_record(stored, StartOptions(**changes))  # type: ignore[arg-type]


# --- the data directory ---------------------------------------------------------------------------


def test_a_directory_under_tmp_is_refused_and_the_error_says_what_to_do(tmp_path: Path) -> None:
    directory = Path("/tmp/raymq-test-never-made")
    with pytest.raises(Rejected) as caught:
        paths.prepare_data_dir(str(directory), ephemeral=False, files=DiskFiles())
    assert caught.value.field == "data_dir"
    assert "/tmp" in str(caught.value)
    assert "ephemeral=True" in str(caught.value)
    assert "--ephemeral" in str(caught.value)
    assert not directory.exists()


def test_a_directory_on_tmpfs_is_refused(tmp_path: Path, on_disk: DiskFiles) -> None:
    on_disk.mounts += f"tmpfs {tmp_path} tmpfs rw 0 0\n"
    with pytest.raises(Rejected, match="tmpfs"):
        paths.prepare_data_dir(str(tmp_path / "data"), ephemeral=False, files=on_disk)


def test_a_link_on_a_disk_that_leads_to_tmp_is_refused(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("/tmp")
    assert "under /tmp" in str(paths.volatile_reason(link / "data", DiskFiles()))


def test_ephemeral_accepts_what_a_reboot_empties(tmp_path: Path, on_disk: DiskFiles) -> None:
    on_disk.mounts += f"tmpfs {tmp_path} tmpfs rw 0 0\n"
    made = paths.prepare_data_dir(str(tmp_path / "data"), ephemeral=True, files=on_disk)
    assert made.root.is_dir()


def test_a_new_data_directory_is_for_its_owner_only(tmp_path: Path, on_disk: DiskFiles) -> None:
    made = paths.prepare_data_dir(str(tmp_path / "a" / "b"), ephemeral=False, files=on_disk)
    assert made.root.stat().st_mode & 0o777 == 0o700


def test_an_existing_empty_directory_is_closed_to_others(
    tmp_path: Path, on_disk: DiskFiles
) -> None:
    directory = tmp_path / "data"
    directory.mkdir(mode=0o755)
    paths.prepare_data_dir(str(directory), ephemeral=False, files=on_disk)
    assert directory.stat().st_mode & 0o777 == 0o700


def test_a_directory_with_other_things_in_it_is_refused_and_left_alone(
    tmp_path: Path, on_disk: DiskFiles
) -> None:
    directory = tmp_path / "home"
    directory.mkdir(mode=0o755)
    (directory / "thesis.tex").touch()
    with pytest.raises(Rejected, match="not empty"):
        paths.prepare_data_dir(str(directory), ephemeral=False, files=on_disk)
    assert directory.stat().st_mode & 0o777 == 0o755


def test_disks_may_be_mounted_where_replicas_will_be_before_the_first_start(
    tmp_path: Path, on_disk: DiskFiles
) -> None:
    data = tmp_path / "data"
    for replica in ("replica-0", "replica-1"):
        (data / "shard-0" / replica / "lost+found").mkdir(parents=True)
    paths.check_data_dir(str(data), ephemeral=True, files=on_disk)
    (data / "shard-0" / "replica-1" / "commitlog").mkdir()
    with pytest.raises(Rejected, match="is not empty and not a RayMQ data directory"):
        paths.check_data_dir(str(data), ephemeral=True, files=on_disk)


def test_a_first_start_that_was_interrupted_can_be_repeated(
    tmp_path: Path, on_disk: DiskFiles
) -> None:
    made = paths.prepare_data_dir(str(tmp_path / "data"), ephemeral=False, files=on_disk)
    paths.load_or_make_token(made, on_disk)
    with paths.directory_lock(made, on_disk):
        pass
    paths.prepare_data_dir(str(made.root), ephemeral=False, files=on_disk)


def test_a_file_is_not_a_data_directory(tmp_path: Path, on_disk: DiskFiles) -> None:
    (tmp_path / "data").touch()
    with pytest.raises(Rejected, match="not a directory"):
        paths.prepare_data_dir(str(tmp_path / "data"), ephemeral=False, files=on_disk)


def test_a_data_directory_of_ninety_characters_works(tmp_path: Path, on_disk: DiskFiles) -> None:
    directory = tmp_path / ("d" * 90)
    made = paths.prepare_data_dir(str(directory), ephemeral=False, files=on_disk)
    assert paths.load_or_make_token(made, on_disk)
    assert made.replica(0, 1) == directory / "shard-0" / "replica-1"


def test_the_nearest_mount_decides_the_file_system(on_disk: DiskFiles) -> None:
    on_disk.mounts += "tmpfs /mem tmpfs rw 0 0\n/dev/sdb /mem/with\\040blank xfs rw 0 0\n"
    assert paths.mount_of("/memory", on_disk).kind == "ext4"
    assert paths.mount_of("/mem/x/y", on_disk).kind == "tmpfs"
    assert paths.mount_of("/mem/with blank/z", on_disk).kind == "xfs"


# --- the token ------------------------------------------------------------------------------------


def test_the_token_is_made_once_and_readable_by_its_owner_only(tmp_path: Path) -> None:
    cluster_paths, files = paths.ClusterPaths(tmp_path), Files()
    token = paths.load_or_make_token(cluster_paths, files)
    assert len(bytes.fromhex(token)) == 32
    assert cluster_paths.token.stat().st_mode & 0o777 == 0o600
    assert paths.load_or_make_token(cluster_paths, files) == token


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda token: token.unlink(), "missing"),
        (lambda token: token.chmod(0o644), "chmod 600"),
        (lambda token: token.write_text("secret"), "64 hexadecimal"),
    ],
)
def test_an_unusable_token_is_refused_with_what_to_do(
    tmp_path: Path, change: object, words: str
) -> None:
    cluster_paths, files = paths.ClusterPaths(tmp_path), Files()
    paths.load_or_make_token(cluster_paths, files)
    change(cluster_paths.token)  # type: ignore[operator]
    with pytest.raises(Rejected, match=words):
        paths.load_token(cluster_paths, files)


# --- names ----------------------------------------------------------------------------------------


def test_actor_names_are_what_every_part_of_raymq_expects() -> None:
    assert (
        actor_names.actor_name("orders", 3, 1, "commit_log")
        == "raymq:orders:shard-3:replica-1:commit_log"
    )


@pytest.mark.parametrize("name", ["", "a b", "a/b", "a:b", ".hidden", "-x", "x" * 64])
def test_a_name_that_cannot_be_part_of_a_path_is_refused(name: str) -> None:
    with pytest.raises(Rejected, match="cluster name"):
        paths.check_name(name)


HOLDER = """
import sys
from raymq.cluster.record import paths
from raymq.store.base.files import Files
with paths.directory_lock(paths.ClusterPaths(sys.argv[1]), Files()):
    print("held", flush=True)
    sys.stdin.read()
"""


# --- the lock -------------------------------------------------------------------------------------


def test_a_second_start_on_the_directory_fails_soon_and_says_why(tmp_path: Path) -> None:
    cluster_paths, files = paths.ClusterPaths(tmp_path), Files()

    # fcntl locks are a process's own: the other holder must be another process.
    other = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )

    with other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with (
            pytest.raises(Unavailable, match="another command"),
            paths.directory_lock(cluster_paths, files, wait_ms=60),
        ):
            pass
        assert other.stdin is not None
        # The next command waits for a moment, in which the controller may have the directory.
        threading.Timer(0.1, other.stdin.close).start()
        with paths.directory_lock(cluster_paths, files, wait_ms=60_000):
            pass

    with paths.directory_lock(cluster_paths, files):
        pass


# --- cluster.json ---------------------------------------------------------------------------------


def test_a_cluster_is_remembered_as_it_was_made(tmp_path: Path) -> None:
    cluster_paths, files = paths.ClusterPaths(tmp_path), Files()
    made = record(name="orders", shards=3, replicas=2, flush="async")
    cluster_record.save_record(cluster_paths, made, files)
    assert load_record(cluster_paths, files) == made
    assert len(bytes.fromhex(made.cluster_id)) == 16


def test_a_directory_without_a_record_has_no_cluster(tmp_path: Path) -> None:
    assert load_record(paths.ClusterPaths(tmp_path), Files()) is None


def test_a_directory_of_another_user_does_not_look_like_one_without_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(Rejected, match=r"belongs to user \d+, and this process.* run as the owner"):
        load_record(paths.ClusterPaths(tmp_path), Files())
    assert load_record(paths.ClusterPaths(tmp_path / "not-made"), Files()) is None


@pytest.mark.parametrize("body", ["", "{", "[]", '{"format": 1}', '{"format": 2, "name": "x"}'])
def test_a_damaged_or_newer_record_is_reported_and_not_replaced(tmp_path: Path, body: str) -> None:
    cluster_paths = paths.ClusterPaths(tmp_path)
    cluster_paths.cluster.write_text(body)
    with pytest.raises(Corrupt) as caught:
        load_record(cluster_paths, Files())
    assert str(cluster_paths.cluster) in str(caught.value)
    assert pickle.loads(pickle.dumps(caught.value)).path == str(cluster_paths.cluster)
    assert cluster_paths.cluster.read_text() == body


def test_a_later_start_may_leave_everything_out() -> None:
    made = record(name="orders", shards=3, replicas=2)
    assert resume(made) == made


def test_a_later_start_may_change_the_flush_mode_only() -> None:
    made = record(shards=3)
    assert resume(made, shards=3, flush="async").flush == "async"
    for change in ({"shards": 4}, {"name": "x"}, {"replicas": 2}):
        with pytest.raises(Rejected, match="a start cannot change") as caught:
            resume(made, **change)
        assert caught.value.field == next(iter(change))


@pytest.mark.parametrize(("field", "value"), [("shards", 0), ("flush", "never"), ("replicas", 4)])
def test_a_wrong_option_is_named(field: str, value: object) -> None:
    with pytest.raises(Rejected) as caught:
        record(**{field: value})
    assert caught.value.field == field


def test_only_the_roles_that_the_flush_mode_needs_are_started() -> None:
    assert record().roles(0) == ("commit_log", "group_commit")
    assert record(flush="async").roles(0) == ("commit_log", "flush_real_time")
    mirrored = record(replicas=2)
    assert mirrored.replicas == 2
    assert mirrored.roles(0) == ("commit_log", "group_commit", "replication")
    assert mirrored.roles(1) == ("commit_log", "group_commit")


def test_known_clusters_are_those_whose_directory_still_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYMQ_HOME", str(tmp_path / "home"))
    files = Files()
    assert cluster_record.known_clusters(files) == {}
    for name in ("kept", "gone"):
        cluster_paths = paths.ClusterPaths(tmp_path / name)
        cluster_paths.root.mkdir()
        made = record(name=name)
        cluster_record.save_record(cluster_paths, made, files)
        cluster_record.remember(made, cluster_paths, files)
    (tmp_path / "gone" / "cluster.json").unlink()
    (tmp_path / "home" / "clusters" / "damaged.json").write_text("{")
    assert cluster_record.known_clusters(files) == {"kept": str(tmp_path / "kept")}


def test_a_user_without_a_home_finds_his_clusters_in_the_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAYMQ_HOME", raising=False)
    monkeypatch.setenv("HOME", "/proc/nonexistent")
    monkeypatch.setattr(paths, "run_dir_path", lambda: tmp_path / "run")
    data, files = tmp_path / "data", Files()
    data.mkdir()
    cluster_record.save_record(paths.ClusterPaths(data), record(name="orders"), files)
    cluster_record.remember(record(name="orders"), paths.ClusterPaths(data), files)
    assert (tmp_path / "run" / "home" / "clusters" / "orders.json").exists()
    assert cluster_record.known_clusters(files) == {"orders": str(data)}
    # Another user may have made that directory, or may write into it.
    (tmp_path / "run").chmod(0o770)
    assert cluster_record.known_clusters(files) == {}
    (tmp_path / "run").chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    assert cluster_record.known_clusters(files) == {}


def test_a_list_that_raymq_home_names_is_kept_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYMQ_HOME", str(tmp_path / "named"))
    assert paths.home_dirs() == [tmp_path / "named"]


@pytest.mark.parametrize("home", ["", "relative"])
def test_a_home_that_is_no_absolute_path_is_none(
    home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda name: home or name)
    assert paths.in_home(".raymq") == []


def test_a_run_directory_that_cannot_be_made_says_what_to_mount(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(paths, "run_dir_path", lambda: Path("/proc/raymq-1"))
    monkeypatch.setattr(os, "access", lambda path, mode: path != Path("/proc"))
    with pytest.raises(Rejected, match=r"cannot make /proc/raymq-1 .* Mount a tmpfs on /proc$"):
        paths.run_dir(Files())


@pytest.mark.parametrize(
    ("option", "default", "wrong"),
    [
        ("file_reserved_hours", 72, -1),
        ("producer_expiry_hours", 168, 0.5),
        ("catch_up_bytes_per_s", 0, -1),
    ],
)
def test_an_option_that_may_change_at_each_start_reaches_the_store(
    tmp_path: Path, option: str, default: float, wrong: float
) -> None:
    cluster_paths, files = paths.ClusterPaths(tmp_path), Files()

    def store_options(value: float) -> dict[str, Any]:
        wanted = StartOptions(**{option: value})  # type: ignore[arg-type]
        plan = plan_start(cluster_paths, wanted, ephemeral=False, files=files)
        return asdict(cluster_record.store_config(plan.record))

    made = record()
    assert getattr(made, option) == default
    other = resume(made, **{option: 100})
    assert getattr(other, option) == 100
    assert getattr(resume(other), option) == 100
    assert getattr(record(**{option: 1}), option) == 1
    assert store_options(100)[option] == 100
    with pytest.raises(Rejected) as caught:
        plan_start(
            cluster_paths,
            StartOptions(**{option: wrong}),  # type: ignore[arg-type]
            ephemeral=False,
            files=files,
        )
    assert caught.value.field == option


def test_a_size_that_no_store_takes_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    wanted = StartOptions(segment_size_bytes=5000)
    with pytest.raises(Rejected) as refused:
        plan_start(paths.ClusterPaths(tmp_path), wanted, ephemeral=False, files=Files())
    assert refused.value.field == "segment_size_bytes"
    assert list(tmp_path.iterdir()) == []
