"""A process is killed, the next one adopts what is in the page cache and acknowledges it, then the power goes.

The unsynced writes of the killed process are on no disk. Above all that is true of names of files and directories,
which look like any others. Every set of unsettled names of every trace is tried (`crash_run.lose_after_kills`).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from raymq.store.base.errors import RayMQError
from raymq.store.base.files import Files
from raymq.store.compaction.units import DIRECTORY
from raymq.store.config.store_config import StoreConfig
from raymq.store.engine.message_store import MessageStore
from raymq.store.records.requests import PutRequest
from tests.support.batches import batch
from tests.support.clock import ManualClock
from tests.support.confirming import confirm
from tests.support.crash_run import lose_after_kills
from tests.support.crash_states import kill_states, lost_names
from tests.support.crash_traces import ROOT
from tests.support.crash_workloads import TRACES
from tests.support.simulated_disk import SimulatedDisk
from tests.support.workers import Workers

COMPACTING = StoreConfig(
    segment_size_bytes=16 * 1024,
    consume_queue_file_size_bytes=400,
    compaction_file_size_bytes=4096,
    compaction_queue_file_size_bytes=46 * 18,
    message_index=False,
)


@pytest.mark.parametrize("trace_killed", TRACES)
def test_what_a_killed_process_left_and_the_next_one_acknowledged_outlives_the_power(
    trace_killed: str, crash_explorers: Workers
) -> None:
    done = crash_explorers.result(lose_after_kills, trace_killed)
    print(f"\n{done.second_crashes} kills, {done.recoveries} recoveries, {done.seconds:.1f} s")
    # `reopened` begins again a few operations before its end.
    assert done.second_crashes >= (3 if trace_killed == "reopened" else 10)
    assert done.recoveries > done.second_crashes


def open_compacting(disk: SimulatedDisk) -> MessageStore:
    return MessageStore.open(ROOT, config=COMPACTING, files=disk, clock=ManualClock())


def copy_all(store: MessageStore) -> None:
    confirm(store)
    while store.compaction.advance_all():
        pass
    store.compaction.sync()


def test_names_of_compacted_files_that_a_killed_process_left_outlive_the_power() -> None:
    """Once these files count as synced, their messages may be deleted from the commit log."""
    disk = SimulatedDisk()
    store = open_compacting(disk)
    store.topics.create("c", 1, [0], {"cleanup.policy": "COMPACTION"})
    for number in range(40):
        rows = batch([b"%d" % number * 40], properties=b"KEYS\x01k%d\x02" % (number % 7))
        store.put(PutRequest("c", 0, rows, None, 0, 0, "quorum"))
    confirm(store)
    begun = len(disk.snapshot())
    copy_all(store)
    tried: set[object] = set()
    for image in kill_states(disk):
        assert image.killed is not None
        if image.crashed_at < begun or image.killed.open_names in tried:
            continue
        tried.add(image.killed.open_names)
        again = image.recording()
        next_life = open_compacting(again)
        copy_all(next_life)
        noted = dict(next_life.compaction._synced_ends)
        assert next_life.compaction.next_offset("c", 0) == 40
        next_life.abandon()
        for left in lost_names(again):
            directories = [left.exists(ROOT / DIRECTORY / name) for name in ("compactionLog",)]
            assert all(directories), f"killed at {image.crashed_at}"
            last = open_compacting(left)
            assert last.compaction._logs["c", 0].end == noted["c", 0]
            last.abandon()
    assert len(tried) >= 4


class Recorder(Files):
    """The real file system, and which directories were synced."""

    def __init__(self) -> None:
        super().__init__()
        self.synced: list[str] = []

    def sync_dir(self, path: object) -> None:
        self.synced.append(str(path))
        super().sync_dir(path)  # type: ignore[arg-type]


def test_a_start_syncs_the_names_of_all_that_it_adopts(tmp_path: Path) -> None:
    root = tmp_path / "data" / "0"
    MessageStore.open(root, config=COMPACTING).close()
    files = Recorder()
    MessageStore.open(root, config=COMPACTING, files=files).close()
    wanted = [
        *(root / name for name in (".", "raymq", "raymq/chain", "commitlog")),
        root.parent,
        tmp_path,
    ]
    assert {str(path) for path in wanted} <= set(files.synced)
    assert files.synced.index(str(root.parent)) < files.synced.index(str(root / "commitlog"))


def test_a_directory_whose_sync_fails_is_not_adopted(tmp_path: Path) -> None:
    disk = SimulatedDisk()
    open_compacting(disk).abandon()
    opens = disk.calls["sync_dir"]
    open_compacting(disk).abandon()
    count = disk.calls["sync_dir"] - opens
    for at in range(1, 6):
        disk.fail("sync_dir", at=at)
        with pytest.raises((OSError, RayMQError)):
            open_compacting(disk)
        disk.heal()
    assert count >= 5
