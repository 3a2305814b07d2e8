"""Two faults in a row: a crash during the recovery from a crash, a power loss after a failed sync."""

from __future__ import annotations

import pytest

from raymq.store.errors import Unavailable
from tests.support.batches import request
from tests.support.confirming import confirm, dispatch_all
from tests.support.crash_states import disk_of, kill_states, last_states
from tests.support.crash_traces import SEED, open_store
from tests.support.simulated_disk import SimulatedDisk


def test_a_kill_during_recovery_from_a_power_loss_leaves_no_hole_in_a_consume_queue() -> None:
    disk = SimulatedDisk(record=False)
    store = open_store(disk)
    store.create_topic("t", 2, [0])
    for queue in (0, 1, 0):
        store.put(request([b"body"], queue=queue))
    confirm(store)
    tree = disk.tree()
    store.abandon()
    # Of the unsynced consume queues only the units of queue 0 reached the disk.
    lost = {path: bytes(len(data)) for path, data in tree.items() if "/t/1/" in path}
    assert len(lost) == 1
    recovering = disk_of({**tree, **lost}, boot=1).recording()
    open_store(recovering)
    killed = list(kill_states(recovering))
    assert len(killed) >= 5
    for image in killed:
        again = open_store(image)
        again.log.note_confirmed(again.log.end)
        dispatch_all(again)
        assert again.queue_range("t", 0) == (0, 2)
        assert again.queue_range("t", 1) == (0, 1), f"killed at {image.crashed_at} of recovery"


def test_consume_queues_whose_sync_failed_are_written_again_at_the_next_start() -> None:
    """The kernel calls their pages clean: no later sync would bring them to the disk."""
    disk = SimulatedDisk()
    store = open_store(disk)
    store.create_topic("t", 2, [0])
    for queue in (0, 0, 1):
        store.put(request([b"body"], queue=queue))
    confirm(store)
    disk.fail("sync_data", at=2)
    with pytest.raises(OSError, match="error"):
        store.sync_queues()
    with pytest.raises(Unavailable):
        store.sync_queues()
    disk.heal()
    # The process ends; the machine goes on, so what is in the page cache stays.
    store.abandon()
    store = open_store(disk)
    dispatch_all(store)
    store.sync_queues()
    _, lost = last_states(disk, 64, SEED)
    assert len(lost) > 1
    for image in lost:
        again = open_store(image)
        again.log.note_confirmed(again.log.end)
        dispatch_all(again)
        assert again.queue_range("t", 0) == (0, 2)
        assert again.queue_range("t", 1) == (0, 1)
