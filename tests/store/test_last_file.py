"""The last file of the log has its length on the disk before it has bytes, also if a killed process was making it."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from raymq.store.base.errors import Corrupt
from raymq.store.base.files import SyncFailed
from raymq.store.config.store_config import StoreConfig
from raymq.store.engine.message_store import MessageStore
from raymq.store.log.segments.mapped_file import MappedFile
from raymq.store.log.segments.segment_paths import file_name
from tests.support.clock import ManualClock
from tests.support.crash_states import last_states
from tests.support.simulated_disk import SimulatedDisk

ROOT = Path("/s")
CONFIG = StoreConfig(segment_size_bytes=8192)


def opened(disk: SimulatedDisk) -> MessageStore:
    return MessageStore.open(ROOT, config=CONFIG, files=disk, clock=ManualClock())


def test_a_file_that_a_killed_process_was_making_is_no_damage_after_a_power_loss() -> None:
    disk = SimulatedDisk()
    store = opened(disk)
    store.begin_epoch(1)
    store.log.sync()
    store.abandon()
    with disk.created(ROOT / "commitlog" / file_name(CONFIG.segment_size_bytes)) as fd:
        disk.allocate(fd, CONFIG.segment_size_bytes // 2)
        disk.allocate(fd, CONFIG.segment_size_bytes)

    # The process was killed there. The next one finds the whole length in the page cache.
    store = opened(disk)
    store.log.segments.files[-1].pwrite(b"bytes", 0)
    _, lost = last_states(disk, 64, 0)
    count = 0
    for image in lost:
        opened(image).abandon()
        count += 1
    assert count
    store.abandon()


def test_after_a_failed_sync_of_the_last_file_no_start_opens_the_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = SimulatedDisk()
    store = opened(disk)
    store.begin_epoch(1)
    store.abandon()

    def fail(file: MappedFile) -> None:
        raise SyncFailed(errno.EIO, "fdatasync: no disk")

    with monkeypatch.context() as patched:
        patched.setattr(MappedFile, "sync", fail)
        with pytest.raises(SyncFailed):
            opened(disk)
    with pytest.raises(Corrupt, match="poisoned"):
        opened(disk)
