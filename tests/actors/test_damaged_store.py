"""A replica whose store is damaged: which errors are damage, and how the store is moved aside."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from raymq.actors.ray.damaged_store import begin_again, is_damage
from raymq.actors.replica import open_replica
from raymq.actors.shared.control_block import ControlBlock
from raymq.actors.supervise.replica_host import ReplicaHost
from raymq.replication.quorum import can_spare
from raymq.store.base.errors import Corrupt
from raymq.store.base.files import Files
from raymq.store.config.store_config import StoreConfig
from raymq.store.log.commit_log import CommitLog
from tests.support.clock import ManualClock

LEADS, COMPLETE = (True, True), (False, True)
INCOMPLETE = (False, False)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("recovery row T", True),
        ("poisoned", True),
        ("one valid slot", True),
        ("files are contiguous", True),
        # A copy of another replica mends neither a foreign file nor a note that an operator must correct.
        ("files are named by a 20-digit offset", False),
        ("generation", False),
        (None, False),
    ],
)
def test_damaged_bytes_are_damage_and_mistakes_are_not(rule: str | None, expected: bool) -> None:
    assert is_damage(Corrupt("cannot be opened", rule=rule)) == expected


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
    ControlBlock.open(str(root / "raymq" / "control"), files=Files()).close()
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
        host.log.poison("group_commit could not sync the log")
    # As after kill -9: what the flusher has published stays.
    host.close(0.0)
    with pytest.raises(Corrupt, match="sync") as caught:
        open_follower(root)
    assert is_damage(caught.value)

    assert begin_again(root, files=Files(), clock=ManualClock()) is not None
    host = open_follower(root)
    assert host.log.poisoned is None
    host.close(0.0)
