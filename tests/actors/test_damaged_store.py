"""A replica whose store is damaged: which errors are damage, and how the store is moved aside."""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from raymq.actors.ray import actor_classes, damaged_store
from raymq.actors.ray.damaged_store import begin_again, finish_move
from raymq.actors.ray.replica_files import read_last_end
from raymq.actors.replica import open_replica
from raymq.actors.shared.control_block import ControlBlock
from raymq.actors.supervise.replica_host import ReplicaHost
from raymq.replication.quorum import can_spare
from raymq.store.base.errors import Corrupt, StorageFull, StoreDamaged
from raymq.store.base.files import Files
from raymq.store.config.store_config import StoreConfig
from raymq.store.log.commit_log import CommitLog
from tests.support.clock import ManualClock
from tests.support.loop_disk import LoopDisk

LEADS, COMPLETE = (True, True), (False, True)
INCOMPLETE = (False, False)


@pytest.mark.parametrize(
    ("members", "others", "expected"),
    [
        (3, [LEADS, COMPLETE], True),
        (3, [LEADS], False),
        (3, [LEADS, INCOMPLETE], False),
        (3, [COMPLETE, COMPLETE], False),
        (5, [LEADS, COMPLETE, COMPLETE], True),
        (5, [LEADS, COMPLETE, INCOMPLETE, INCOMPLETE], False),
    ],
)
def test_a_store_is_spared_only_while_a_complete_majority_is_led_without_it(
    members: int, others: list[tuple[bool, bool]], expected: bool
) -> None:
    assert can_spare(members, others) == expected


def open_follower(root: Path) -> ReplicaHost:
    return open_replica(
        root,
        StoreConfig(segment_size_bytes=1 << 20, scrub_bytes_per_s=0),
        identity={
            "cluster_id": "f0" * 16,
            "shard": 0,
            "shards": 1,
            "name": "damaged",
            "replica": 1,
            "replicas": 3,
            "incarnation": 1,
        },
        roles=(),
        members=range(3),
        candidates=(0,),
    )


def store(root: Path) -> Path:
    log = CommitLog(root, StoreConfig(), files=Files(), clock=ManualClock())
    log.abandon()
    control = ControlBlock.open(str(root / "raymq" / "control"), files=Files())
    record = control.roles["group_commit"]
    record.publish_failure(record.give_grant(7, base=0), errno.EIO)
    control.close()
    (root / "raymq" / "group_commit.lock").touch()
    (root / "raymq" / "generation").write_text('{"generation": 3}')
    return root


def test_a_damaged_store_is_moved_aside_and_what_satellites_have_open_stays(tmp_path: Path) -> None:
    root = store(tmp_path / "replica-1")
    control = root / "raymq" / "control"
    inode = control.stat().st_ino
    aside = begin_again(root, files=Files(), clock=ManualClock())
    assert aside is not None
    assert aside.parent == tmp_path
    assert (aside / "raymq" / "meta").exists()
    assert (aside / "commitlog").is_dir()
    assert sorted(os.listdir(root)) == ["raymq"]
    assert sorted(os.listdir(root / "raymq")) == ["control", "generation", "group_commit.lock"]
    assert control.stat().st_ino == inode
    assert not failed_sync(root)
    assert sorted(os.listdir(tmp_path)) == sorted([aside.name, "replica-1"])


def test_a_second_damaged_store_is_left_to_an_operator(tmp_path: Path) -> None:
    root = store(tmp_path / "replica-1")
    # That of another replica of the same data directory does not count.
    (tmp_path / "damaged-20260101T000000Z-replica-11").mkdir()
    assert begin_again(root, files=Files(), clock=ManualClock()) is not None
    store(root)
    assert begin_again(root, files=Files(), clock=ManualClock()) is None
    assert (root / "raymq" / "meta").exists()


@pytest.mark.parametrize("is_noted", [True, False])
def test_a_store_whose_sync_failed_begins_again_with_one_that_opens(
    tmp_path: Path, is_noted: bool
) -> None:
    root = tmp_path / "replica-1"
    host = open_follower(root)
    record = host.supervisor.control.roles["group_commit"]
    token = record.give_grant(7, base=0)
    record.publish_sync_started(token, 5)
    record.publish_failure(token, errno.EIO)
    if is_noted:
        host.log.health.poison("group_commit could not sync the log")
    # As after kill -9: what the flusher has published stays.
    host.close(0.0)
    with pytest.raises(StoreDamaged, match="sync"):
        open_follower(root)

    assert begin_again(root, files=Files(), clock=ManualClock()) is not None
    host = open_follower(root)
    assert host.log.health.poisoned is None
    host.close(0.0)


ERRORS = (OSError(errno.EIO, "Input/output error"), StorageFull("the disk is full"))


class Power(BaseException):
    """The process ends at this point."""


class Mounted(Files):
    """The files of a disk that is mounted at `root`, of which one rename may fail or never come back."""

    def __init__(
        self, root: Path, *, fails_at: int = 0, error: BaseException | None = None
    ) -> None:
        super().__init__()
        self.root = root
        self.fails_at = fails_at
        self.error = error
        self.renames = 0

    def rename(self, source: Any, target: Any) -> None:
        if Path(source) == self.root:
            raise OSError(errno.EBUSY, "Device or resource busy")
        self.renames += 1
        if self.renames == self.fails_at and self.error is not None:
            raise self.error
        super().rename(source, target)


def tree(root: Path) -> dict[str, bytes | None]:
    """Every file with its contents, and every directory."""
    return {
        str(each.relative_to(root)): each.read_bytes() if each.is_file() else None
        for each in root.rglob("*")
    }


def mounted_store(root: Path) -> Path:
    store(root)
    (root / "lost+found").mkdir()
    (root / "consumequeue" / "t").mkdir(parents=True)
    return root


def failed_sync(root: Path) -> int:
    """The error of a sync that the replica's control block tells of."""
    control = ControlBlock.open(str(root / "raymq" / "control"), files=Files())
    found = control.roles["group_commit"].failure.value
    control.close()
    return found


def check_began_again(root: Path) -> None:
    # That sync was of the damaged store.
    assert not failed_sync(root)
    (aside,) = [each for each in root.iterdir() if each.name.startswith("damaged-")]
    assert sorted(os.listdir(root)) == sorted([aside.name, "lock", "lost+found", "raymq"])
    left = set(os.listdir(root / "raymq")) - {"last-end"}
    assert left == {"control", "generation", "group_commit.lock"}
    assert (aside / "raymq" / "meta").exists()
    assert (aside / "commitlog").is_dir()
    assert (aside / "consumequeue" / "t").is_dir()


def test_a_store_at_a_mount_point_is_moved_inside_of_it(tmp_path: Path) -> None:
    root = mounted_store(tmp_path / "replica-1")
    inode = (root / "raymq" / "control").stat().st_ino
    aside = begin_again(root, files=Mounted(root), clock=ManualClock())
    assert aside is not None
    assert aside.parent == root
    check_began_again(root)
    assert (root / "raymq" / "control").stat().st_ino == inode
    assert os.listdir(tmp_path) == ["replica-1"]
    # The empty place is a store that can be opened, and a second damaged one stays.
    store(root)
    assert begin_again(root, files=Mounted(root), clock=ManualClock()) is None


def renames(tmp_path: Path) -> int:
    """How many renames such a move has."""
    root = mounted_store(tmp_path / "counted")
    files = Mounted(root)
    begin_again(root, files=files, clock=ManualClock())
    return files.renames


def test_a_move_inside_that_fails_is_taken_back_wherever_it_fails(tmp_path: Path) -> None:
    total = renames(tmp_path)
    assert total > 6
    for number in range(1, total + 1):
        root = mounted_store(tmp_path / f"replica-{number}")
        before = tree(root)
        files = Mounted(root, fails_at=number, error=ERRORS[number % 2])
        with pytest.raises((OSError, StorageFull), match="Input/output|full"):
            begin_again(root, files=files, clock=ManualClock())
        if number < total:
            assert tree(root) == before
        # The next try does it.
        finish_move(root, files=Mounted(root))
        if number < total:
            assert begin_again(root, files=Mounted(root), clock=ManualClock()) is not None
        check_began_again(root)


def test_a_move_inside_that_a_crash_has_ended_is_finished_by_the_next_start(tmp_path: Path) -> None:
    # Before the first one nothing has moved.
    for number in range(2, renames(tmp_path) + 1):
        root = mounted_store(tmp_path / f"replica-{number}")
        with pytest.raises(Power):
            begin_again(
                root, files=Mounted(root, fails_at=number, error=Power()), clock=ManualClock()
            )
        finish_move(root, files=Mounted(root))
        check_began_again(root)
        assert "a crash ended its move" in read_last_end(root)["reason"]
        finish_move(root, files=Mounted(root))
        check_began_again(root)


def test_a_symbolic_link_to_a_store_stays_and_its_target_is_moved(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    real = store(disk / "data")
    (tmp_path / "replica-1").symlink_to(real)
    aside = begin_again(tmp_path / "replica-1", files=Files(), clock=ManualClock())
    assert aside is not None
    assert aside.parent == disk
    assert (tmp_path / "replica-1").is_symlink()
    assert sorted(os.listdir(real / "raymq")) == ["control", "generation", "group_commit.lock"]


def test_a_move_beside_that_fails_is_taken_back(tmp_path: Path) -> None:
    for number in range(1, 6):
        root = store(tmp_path / f"replica-{number}")
        before = tree(root)
        files = Mounted(tmp_path, fails_at=number, error=ERRORS[number % 2])
        with pytest.raises((OSError, StorageFull), match="Input/output|full"):
            begin_again(root, files=files, clock=ManualClock())
        assert tree(root) == before


@pytest.mark.parametrize("is_mount", [False, True])
def test_a_move_that_finds_no_room_for_its_directory_is_taken_back(
    tmp_path: Path, is_mount: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = store(tmp_path / "replica-1")
    before = tree(root)
    files = Mounted(root if is_mount else tmp_path)
    make_dirs = files.make_dirs

    def refuse(path: Any, mode: int = 0o700) -> None:
        if "new-" in str(path):
            raise StorageFull("the disk is full")
        make_dirs(path, mode)

    monkeypatch.setattr(files, "make_dirs", refuse)
    with pytest.raises(StorageFull):
        begin_again(root, files=files, clock=ManualClock())
    assert tree(root) == before


def test_a_move_inside_that_had_moved_nothing_before_a_crash_is_forgotten(tmp_path: Path) -> None:
    root = mounted_store(tmp_path / "replica-1")
    before = tree(root)
    (root / "moving-damaged-20260101T000000Z-replica-1").mkdir()
    finish_move(root, files=Mounted(root))
    assert tree(root) == before


def test_a_crash_before_the_syncs_of_the_moved_store_are_forgotten_is_made_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = store(tmp_path / "replica-1")

    def crash(*_: Any, **__: Any) -> None:
        raise Power

    with monkeypatch.context() as patch:
        patch.setattr(damaged_store, "_forget_syncs", crash)
        with pytest.raises(Power):
            begin_again(root, files=Files(), clock=ManualClock())
    assert failed_sync(root)
    finish_move(root, files=Files())
    assert not failed_sync(root)


@pytest.mark.loop_disk
def test_a_store_on_a_disk_of_its_own_begins_again(tmp_path: Path) -> None:
    root = store(tmp_path / "replica-1")
    with LoopDisk(tmp_path / "image", root, mib=16):
        aside = begin_again(root, files=Files(), clock=ManualClock())
        assert aside is not None
        assert aside.parent == root
        assert sorted(os.listdir(root / "raymq")) == ["control", "generation", "group_commit.lock"]
        assert (aside / "raymq" / "meta").exists()


@pytest.fixture
def starting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> actor_classes.CommitLogActor:
    """Replica 1 of three, whose start a test lets fail."""
    monkeypatch.setattr(actor_classes, "start_thread", lambda *_: None)
    monkeypatch.setattr(actor_classes, "keep_freed_memory", lambda: None)
    monkeypatch.setattr(sys, "setswitchinterval", lambda _: None)
    root = tmp_path / "replica-1"
    (root / "raymq").mkdir(parents=True)
    peers = {each: (str(tmp_path / str(each)), f"actor-{each}") for each in (0, 2)}
    spec: Any = {"data_dir": str(root), "replica": 1, "voters": (0, 1, 2), "generation": 0}
    return actor_classes.CommitLogActor(spec | {"node": None, "peers": peers})


def fail_to_open(
    actor: actor_classes.CommitLogActor, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> dict[str, Any]:
    """Let one start fail. Returns: what the replica says of itself then."""
    found: list[dict[str, Any]] = []

    def fail() -> None:
        raise error

    def pause(_: float) -> None:
        found.append(actor.ready())
        # Without another try.
        raise InterruptedError

    with monkeypatch.context() as patch:
        patch.setattr(actor, "_open", fail)
        patch.setattr(time, "sleep", pause)
        with pytest.raises(InterruptedError):
            actor._start()
    return found[0]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (StoreDamaged("cannot be opened", rule="recovery row A"), True),
        # A copy of another replica mends neither a foreign file nor a note that an operator must correct.
        (Corrupt("a foreign file", rule="files are named by a 20-digit offset"), False),
        (Corrupt("of another replica", rule="generation"), False),
        (Corrupt("the words of damage alone", rule="poisoned"), False),
        (OSError(errno.EMFILE, "too many"), False),
    ],
)
def test_a_replica_says_whether_it_may_begin_again(
    starting: actor_classes.CommitLogActor,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    expected: bool,
) -> None:
    found = fail_to_open(starting, monkeypatch, error)
    assert found["may_begin_again"] is expected
    assert found["is_damaged"] is isinstance(error, Corrupt)


def test_a_replica_that_an_older_damaged_store_keeps_from_beginning_again_says_so(
    starting: actor_classes.CommitLogActor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "damaged-20260101T000000Z-replica-1").mkdir()
    monkeypatch.setattr(starting, "_ask_others", lambda: [LEADS, COMPLETE])
    error = StoreDamaged("cannot be opened", rule="recovery row A")
    assert fail_to_open(starting, monkeypatch, error)["may_begin_again"] is False
