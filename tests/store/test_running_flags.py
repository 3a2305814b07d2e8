"""Running flags: what each of them stops, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from raymq.store.base import running_flags as flags
from raymq.store.base.errors import Unavailable
from raymq.store.base.running_flags import NAMES, RunningFlags
from raymq.store.config.store_config import StoreConfig
from raymq.store.engine.message_store import MessageStore
from tests.support.batches import request
from tests.support.clock import ManualClock
from tests.support.simulated_disk import SimulatedDisk

CONFIG = StoreConfig(segment_size_bytes=64 * 1024, consume_queue_file_size_bytes=2000)


def open_store(disk: SimulatedDisk) -> MessageStore:
    store = MessageStore.open(Path("/s"), config=CONFIG, files=disk, clock=ManualClock())
    store.topics.create("t", 1, [0])
    store.put(request([b"x"] * 3))
    store.log.sync()
    store.log.note_confirmed(store.log.end)
    return store


@pytest.mark.parametrize(
    ("bit", "readable", "writable", "queue_writable"),
    [
        (0, True, True, True),
        (flags.NOT_READABLE, False, True, True),
        (flags.NOT_WRITEABLE, True, False, False),
        (flags.WRITE_LOGICS_QUEUE_ERROR, True, False, False),
        (flags.WRITE_INDEX_FILE_ERROR, True, False, False),
        (flags.DISK_FULL, True, False, True),
        (flags.FENCED, True, False, True),
        (flags.LOGIC_DISK_FULL, True, False, False),
    ],
)
def test_each_bit_stops_what_rocketmqs_stops(
    bit: int, readable: bool, writable: bool, queue_writable: bool
) -> None:
    made = RunningFlags()
    made.set(bit)
    assert (made.readable, made.writable) == (readable, writable)
    assert bool(made.bits & flags.BLOCKS_DISPATCH) is not queue_writable
    assert made.names() == ([NAMES[bit]] if bit else [])


def test_setting_and_clearing_return_whether_that_changed_anything() -> None:
    made = RunningFlags()
    assert made.set(flags.FENCED)
    assert not made.set(flags.FENCED)
    made.set(flags.DISK_FULL)
    assert made.clear(flags.FENCED)
    assert not made.clear(flags.FENCED)
    assert made.names() == ["DISK_FULL"]


def test_a_store_that_is_not_readable_refuses_reads_and_takes_puts() -> None:
    store = open_store(SimulatedDisk(record=False))
    store.dispatch(store.log.confirmed)
    store.flags.set(flags.NOT_READABLE)
    with pytest.raises(Unavailable, match="NOT_READABLE"):
        store.fetch("t", 0, 0, max_bytes=1000, max_records=10)
    assert store.put(request([b"y"])).first_offset == 3
    store.flags.clear(flags.NOT_READABLE)
    assert store.fetch("t", 0, 0, max_bytes=1000, max_records=10).next_offset == 3


def test_queues_are_built_over_a_full_log_disk_but_not_over_a_full_queue_disk() -> None:
    store = open_store(SimulatedDisk(record=False))
    store.flags.set(flags.LOGIC_DISK_FULL)
    assert store.dispatch(store.log.confirmed) < store.log.confirmed
    store.flags.clear(flags.LOGIC_DISK_FULL)
    store.flags.set(flags.DISK_FULL)
    while store.dispatch(store.log.confirmed) < store.log.confirmed:
        pass
    assert store.queue_range("t", 0) == (0, 3)


def test_a_queue_that_cannot_be_written_stops_puts_until_it_can() -> None:
    disk = SimulatedDisk(record=False)
    store = open_store(disk)
    disk.fail("pwrite", forever=True)
    with pytest.raises(OSError, match="Input/output error"):
        store.dispatch(store.log.confirmed)
    disk.heal()
    assert store.flags.names() == ["WRITE_LOGICS_QUEUE_ERROR"]
    with pytest.raises(Unavailable, match="WRITE_LOGICS_QUEUE_ERROR"):
        store.put(request([b"y"]))
    store.dispatch(store.log.confirmed)
    assert store.queue_range("t", 0) == (0, 3)
    assert store.put(request([b"y"])).first_offset == 3
