"""Recovery reads as much of a long log as of a short one, and notices when what it relies on is not there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from raymq.store.base.files import Files
from raymq.store.config.store_config import StoreConfig
from raymq.store.engine.message_store import MessageStore
from raymq.store.log.chain import CHAIN_UNIT_BYTES
from raymq.store.state.shard_state import OFFSETS
from raymq.store.tools.inspect import verify
from tests.support.batches import request
from tests.support.clock import ManualClock
from tests.support.confirming import confirm

INTERVAL = 64 * 1024
CONFIG = StoreConfig(
    segment_size_bytes=1 << 20,
    consume_queue_file_size_bytes=2000,
    snapshot_interval_bytes=INTERVAL,
)


class OtherBoot(Files):
    """The machine was started again."""

    def boot_id(self) -> str:
        return "another"


def open_store(root: Path, files: Files | None = None) -> MessageStore:
    return MessageStore.open(root, config=CONFIG, files=files, clock=ManualClock())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store that died with 300 KiB of messages in its only file."""
    store = open_store(tmp_path)
    store.topics.create("t", 2, [0])
    store.inner_put.put_state_record(OFFSETS, b'{"group":"g","topic":"t","offsets":{"0":7}}')
    for number in range(150):
        store.put(request([b"x" * 1000, b"y" * 1000], producer_id=5, sequence=2 * number))
    confirm(store)
    store.sync_queues()
    store.abandon()
    return tmp_path


def check(store: MessageStore) -> None:
    assert store.queue_range("t", 0) == (0, 300)
    assert store.state.offsets["g", "t"] == {0: 7}
    assert store.state.producers.get((5, "t", 0)).next_sequence == 300
    confirm(store)
    store.close()
    assert verify(store.log.root) == []


@pytest.mark.parametrize("files", [Files, OtherBoot])
def test_recovery_begins_at_the_newest_snapshot_within_a_file(
    root: Path, files: type[Files]
) -> None:
    again = open_store(root, files())
    assert again.log.recovered is not None
    begin = again.log.recovered.begin
    assert 0 < again.log.end - begin < 2 * INTERVAL
    assert begin in again.log.marks.snapshots
    check(again)


def test_a_snapshot_that_is_not_dispatched_is_passed_over_for_the_one_before(root: Path) -> None:
    store = open_store(root)
    newest = store.log.marks.snapshots[0]
    number = 150
    while store.log.marks.snapshots[0] == newest:
        store.put(request([b"z" * 1000] * 2, producer_id=5, sequence=2 * number))
        number += 1
    store.log.sync()
    store.abandon()
    again = open_store(root)
    assert again.log.recovered is not None
    assert again.log.recovered.begin == newest
    assert again.state.producers.get((5, "t", 0)).next_sequence == 2 * number
    again.abandon()


@pytest.mark.parametrize("mark", [1, 12345, 1 << 50, -1])
def test_a_wrong_mark_only_costs_time(root: Path, mark: int) -> None:
    store = open_store(root)
    store.log.marks.note_snapshot(mark)
    store.log.marks.note_snapshot(mark)
    store.abandon()
    again = open_store(root)
    assert again.log.recovered is not None
    assert again.log.recovered.begin == 0
    check(again)


def test_a_cut_removes_the_snapshots_above_it(root: Path) -> None:
    store = open_store(root)
    store.log.marks.lower(100)
    assert max(store.log.marks.snapshots) <= 100
    store.abandon()


def test_of_the_chain_only_the_units_from_there_on_are_looked_at(root: Path) -> None:
    chain = root / "raymq" / "chain" / ("0" * 20)
    data = bytearray(chain.read_bytes())
    data[3 * CHAIN_UNIT_BYTES + 5] ^= 1
    chain.write_bytes(data)
    again = open_store(root)
    assert again.log.chain.last is not None
    assert again.log.chain.last.end == again.log.end
    assert chain.stat().st_size >= len(data)
    again.abandon()


def test_after_a_power_loss_a_page_of_the_chain_that_never_reached_the_disk_is_made_again(
    root: Path,
) -> None:
    chain = root / "raymq" / "chain" / ("0" * 20)
    data = bytearray(chain.read_bytes())
    data[3 * CHAIN_UNIT_BYTES : 6 * CHAIN_UNIT_BYTES] = bytes(3 * CHAIN_UNIT_BYTES)
    chain.write_bytes(data)
    again = open_store(root, OtherBoot())
    units = again.log.chain.units(0, again.log.end)
    assert [u.start for u in units] == [0, *(u.end for u in units[:-1])]
    assert units[-1].end == again.log.end
    assert [u.previous for u in units] == [0, *(u.value for u in units[:-1])]
    check(again)


def test_a_chain_that_is_lost_is_made_again(root: Path) -> None:
    (root / "raymq" / "chain" / ("0" * 20)).unlink()
    again = open_store(root)
    assert again.log.chain.start == 0
    check(again)


def test_a_torn_tail_is_cut_though_the_walk_began_in_the_middle(root: Path) -> None:
    store = open_store(root)
    end = store.log.end
    store.log.sync()
    store.abandon()
    with (root / "commitlog" / ("0" * 20)).open("r+b") as file:
        file.seek(end)
        file.write(b"\x00\x00\x01\x00garbage")
    again = open_store(root)
    assert again.log.recovered is not None
    assert (again.log.end, again.log.recovered.row.name) == (end, "D")
    check(again)


def test_holes_of_a_file_are_distinguished_from_written_bytes(tmp_path: Path) -> None:
    files = Files()
    fd = files.open_file(tmp_path / "x", create=True)
    files.allocate(fd, 1 << 20)
    assert files.data_ranges(fd, 0, 1 << 20) in ([], [(0, 1 << 20)])
    os.pwrite(fd, b"x", 5000)
    found = files.data_ranges(fd, 0, 1 << 20)
    assert any(begin <= 5000 < end for begin, end in found)
    assert files.data_ranges(fd, 1 << 20, 1 << 20) == []
    files.close(fd)
