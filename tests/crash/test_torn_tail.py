"""A torn last append at every byte of it, and every single I/O error of a small workload."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from raymq.store.config import StoreConfig
from raymq.store.errors import Corrupt, RayMQError, StorageFull
from raymq.store.files import Files
from raymq.store.message_store import MessageStore
from tests.support.batches import request
from tests.support.clock import ManualClock
from tests.support.crash_states import kill_states, power_loss_states
from tests.support.simulated_disk import SimulatedDisk

CONFIG = StoreConfig(
    segment_size_bytes=16 * 1024,
    consume_queue_file_size_bytes=400,
    max_message_bytes=2000,
    prewrite_window_bytes=8 * 1024,
)
SEGMENT = "00000000000000000000"


class Rebooted(Files):
    """The files of a machine that was started again."""

    def boot_id(self) -> str:
        return "another boot"


def open_store(root: Path, files: Files) -> MessageStore:
    return MessageStore.open(root, config=CONFIG, files=files, clock=ManualClock())


def dispatch_all(store: MessageStore) -> None:
    while store.dispatched < store.log.confirmed:
        before = store.dispatched
        assert store.dispatch(store.log.confirmed) > before


def confirm(store: MessageStore) -> None:
    store.log.sync()
    store.log.note_confirmed(store.log.synced)
    dispatch_all(store)


def raw_records(store: MessageStore) -> list[bytes]:
    """The raw records of queue 0, one fetch at a time: a fetch ends with its segment."""
    found: list[bytes] = []
    while True:
        part = store.fetch("t", 0, len(found), max_bytes=1 << 20, max_records=100)
        if part.records is None or not len(part.records):
            return found
        found += part.records.to_pylist()


@pytest.mark.parametrize("marks", ["kept", "lost"])
def test_a_last_unit_torn_at_any_byte_costs_only_itself(tmp_path: Path, marks: str) -> None:
    origin = tmp_path / "origin"
    store = open_store(origin, Files())
    store.create_topic("t", 1, [0])
    for number in range(5):
        store.put(request([b"%d" % number * 40] * 2))
    confirm(store)
    before = raw_records(store)
    torn = store.put(request([b"torn" * 10]))
    start, end = torn.physical_offset, torn.end_offset
    shutil.copytree(origin, tmp_path / "copy")
    store.close()
    assert len(before) == 10
    original = (tmp_path / "copy" / "commitlog" / SEGMENT).read_bytes()
    for cut in range(start, end + 1):
        root = tmp_path / f"cut-{cut}"
        shutil.copytree(tmp_path / "copy", root)
        (root / "commitlog" / SEGMENT).write_bytes(original[:cut].ljust(len(original), b"\0"))
        if marks == "lost":
            # Synced by nobody since the store was new: a power loss may give the first version.
            (root / "raymq" / "marks").write_bytes(bytes(4096))
        opened = open_store(root, Rebooted())
        # The record may end in zeros: it is whole when the bytes are the same.
        whole = original[cut:end].count(0) == end - cut
        confirm(opened)
        assert opened.log.end == (end if whole else start), f"torn at {cut - start}"
        assert raw_records(opened)[:10] == before
        made = opened.put(request([b"next"]))
        assert made.first_offset == 10 + whole
        confirm(opened)
        assert len(raw_records(opened)) == 11 + whole
        opened.close()
        shutil.rmtree(root)


class Outcome:
    """What a workload with one injected error was told."""

    def __init__(self) -> None:
        self.acked: list[bytes] = []
        self.errors: list[Exception] = []


def run_workload(disk: SimulatedDisk, store: MessageStore) -> Outcome:
    """30 puts, each synced and confirmed; consume queues synced after every tenth.

    Like the host it ends at the first failed sync, and goes on after a refused put.
    """
    told = Outcome()
    for number in range(30):
        body = b"%02d" % number * 300
        try:
            made = store.put(request([body]))
        except (OSError, RayMQError) as error:
            told.errors.append(error)
            continue
        try:
            confirm(store)
            assert made.first_offset == len(told.acked)
            told.acked.append(body)
            if number % 10 == 9:
                store.sync_queues()
        except StorageFull as error:
            # The log was synced; only its consume queue found no room, and is tried again.
            told.errors.append(error)
            told.acked.append(body)
        except (OSError, RayMQError) as error:
            told.errors.append(error)
            return told
    return told


def ready_disk() -> tuple[SimulatedDisk, MessageStore]:
    disk = SimulatedDisk()
    store = open_store(Path("/s"), disk)
    store.create_topic("t", 1, [0])
    confirm(store)
    return disk, store


def calls_of(kind: str) -> int:
    disk, store = ready_disk()
    before = disk.calls[kind]
    assert len(run_workload(disk, store).acked) == 30
    return disk.calls[kind] - before


def bodies_on(disk: SimulatedDisk, wanted: list[bytes]) -> bool:
    """Whether all of `wanted` are in the commit log, in order."""
    log = b"".join(data for path, data in disk.tree().items() if path.startswith("/s/commitlog/"))
    position = 0
    for body in wanted:
        position = log.find(body, position)
        if position < 0:
            return False
        position += len(body)
    return True


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
@pytest.mark.parametrize("kind", ["sync_data", "sync", "pwrite", "allocate"])
def test_any_single_error_loses_no_acknowledged_put(kind: str, error: int) -> None:
    count = calls_of(kind)
    poisoned = refused = 0
    for at in range(1, count + 1):
        disk, store = ready_disk()
        disk.fail(kind, at=at, error=error)
        told = run_workload(disk, store)
        context = f"{kind} {at} of {count}, {os.strerror(error)}, told {told.errors}"
        assert_no_second_sync(disk, context)
        if store.log.poisoned is not None:
            poisoned += 1
            with pytest.raises(RayMQError):
                store.put(request([b"after a failed sync"]))
        elif told.errors:
            refused += 1
            if kind in ("pwrite", "allocate") and isinstance(told.errors[0], StorageFull):
                assert len(told.acked) >= 28, context
        dispatch_all(store)
        kept = list(raw_records(store))
        assert len(kept) >= len(told.acked), context
        for record, body in zip(kept, told.acked, strict=False):
            assert body in record, context
        assert_survives_a_crash(disk, told.acked, context)
    print(
        f"\n{kind} {errno.errorcode[error]}: {count} places, {poisoned} poisoned, {refused} refused"
    )
    assert count > 0


def assert_no_second_sync(disk: SimulatedDisk, context: str) -> None:
    failed: set[int] = set()
    for op in disk.snapshot():
        if op.kind == "sync_failed":
            failed.add(op.node)
        elif op.kind == "sync":
            assert op.node not in failed, f"a second sync of a file after a failed one: {context}"


def assert_survives_a_crash(disk: SimulatedDisk, acked: list[bytes], context: str) -> None:
    """The last disk that a kill leaves, and those that a power loss at the end leaves."""
    *_, killed = kill_states(disk)
    last = len(disk.snapshot())
    lost = [s for s in power_loss_states(disk, 3, 0) if s.crashed_at == last]
    for image in (killed, *lost):
        assert bodies_on(image, acked), context
        try:
            opened = open_store(Path("/s"), image)
        except Corrupt as refusal:
            if refusal.rule != "poisoned":
                raise
            continue
        confirm(opened)
        for record, body in zip(raw_records(opened), acked, strict=False):
            assert body in record, context
        assert opened.queue_range("t", 0)[1] >= len(acked), context
        opened.close()
