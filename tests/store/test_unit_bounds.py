"""Units that are made again cut no record and no bundle, so that no follower acknowledges half of one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from raymq.store.base import format as fmt
from raymq.store.config.store_config import StoreConfig
from raymq.store.engine.message_store import MessageStore
from raymq.store.log import unit_bounds
from raymq.store.log.chain import ChainUnit
from raymq.store.log.unit_bounds import unit_bytes, whole_range
from raymq.store.put.inner_message import InnerMessage, ServiceProgress
from raymq.store.records import record
from raymq.store.tools.inspect import verify
from raymq.store.tools.repair import Repair
from tests.support.batches import request
from tests.support.clock import ManualClock
from tests.support.confirming import confirm
from tests.support.simulated_disk import SimulatedDisk

#: append units of 8 KiB
CONFIG = StoreConfig(segment_size_bytes=32 * 1024, consume_queue_file_size_bytes=2000)
ROOT = Path("/s")


def open_store(
    root: Path = ROOT, *, follows: bool = False, disk: SimulatedDisk | None = None
) -> MessageStore:
    return MessageStore.open(root, config=CONFIG, files=disk, clock=ManualClock(), follows=follows)


def fill(store: MessageStore) -> set[int]:
    """Put records of many sizes, bundles, and a record and a bundle larger than a unit.

    Returns: the offsets inside of bundles at which records end.
    """
    inside: set[int] = set()
    store.topics.create("t", 1, [0])
    for turn in range(40):
        store.put(request([b"x" * (37 * turn)] * 3))
        if turn % 3 == 0:
            count = 25 if turn == 21 else 1 + turn % 5
            bundle = [InnerMessage("t", 0, b"y" * (400 + turn))] * count
            appended = store.put_inner(bundle, progress=ServiceProgress("s", {"k": turn}))
            inside |= {rows.physical_offset for rows in appended}
        if turn == 11:
            store.put(request([b"z" * 12_000]))
    confirm(store)
    return inside


def ends_of_records(store: MessageStore) -> set[int]:
    """All offsets at which records end. Those inside of a blank count too: it has nothing but zeros."""
    found: set[int] = set()
    at = store.log.start
    while at < store.log.end:
        walk = store.log.reads.walk(at, store.log.end).walk
        found |= set((walk.positions + walk.sizes).tolist())
        at = store.log.reads.next_walk_start(at, walk)
        if walk.reason is record.WalkStop.BLANK:
            found |= set(range(walk.end + fmt.BLANK_BYTES, at + 1))
    return found


def units(store: MessageStore) -> list[ChainUnit]:
    found = store.log.chain.units(store.log.start, store.log.end)
    assert found[-1].end == store.log.end
    return found


def check_units(store: MessageStore, inside: set[int]) -> None:
    made = units(store)
    # Fewer than the appends were: these are not the leader's own.
    assert len(made) < len(store.log.segments.files) * 8
    whole = ends_of_records(store) - inside
    assert {unit.end for unit in made} <= whole
    larger = [unit for unit in made if unit.end - unit.start > CONFIG.append_unit_bytes]
    assert len(larger) == 2


def test_a_start_that_lost_the_chain_makes_units_of_whole_records_and_groups(
    tmp_path: Path,
) -> None:
    store = open_store(tmp_path)
    inside = fill(store)
    store.abandon()
    shutil.rmtree(tmp_path / "raymq" / "chain")
    store = open_store(tmp_path)
    check_units(store, inside)
    store.close()
    assert verify(tmp_path) == []


def test_a_repair_makes_units_of_whole_records_and_groups(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    inside = fill(store)
    store.close()
    Repair(tmp_path, rebuild=["chain"]).run()
    store = open_store(tmp_path)
    check_units(store, inside)
    store.close()
    assert verify(tmp_path) == []


def test_a_follower_that_is_killed_after_any_of_them_opens_with_all_it_acknowledged(
    tmp_path: Path,
) -> None:
    leader = open_store(tmp_path)
    fill(leader)
    leader.abandon()
    shutil.rmtree(tmp_path / "raymq" / "chain")
    leader = open_store(tmp_path)

    disk = SimulatedDisk()
    for unit in units(leader):
        follower = open_store(follows=True, disk=disk)
        # A start passes over the rest of a blank.
        assert follower.log.end in (unit.start, unit.end)
        if follower.log.end == unit.start:
            assert follower.followed is not None
            data = memoryview(leader.log.reads.raw(unit.start, unit.end))
            follower.followed.append_units([unit], data)
            follower.log.sync()
        follower.abandon()
    again = open_store(follows=True, disk=disk)
    assert again.state.snapshot(1 << 20) == leader.state.snapshot(1 << 20)


def bundle_bytes(count: int) -> bytes:
    """The bytes of a log with a record before and a record after a bundle of `count` messages."""
    store = open_store(disk=SimulatedDisk())
    start = store.log.end
    store.put_inner([InnerMessage("t", 0, b"before")])
    bundle = [InnerMessage("t", 0, b"y" * 100)] * count
    store.put_inner(bundle, progress=ServiceProgress("s", {"k": 1}))
    store.put_inner([InnerMessage("t", 0, b"after")])
    return store.log.reads.raw(start, store.log.end)


def test_every_prefix_of_a_log_has_whole_records_and_groups() -> None:
    data = bundle_bytes(3)
    walk = record.walk(data, 0, check_position=False)
    ends = (walk.positions + walk.sizes).tolist()
    # The bundle's record names physical offsets of its own log.
    base = int.from_bytes(data[fmt.PHYSICAL_OFFSET_AT : fmt.PHYSICAL_OFFSET_AT + 8], "big")
    whole = [0, ends[0], ends[4], ends[5]]
    for stop in range(len(data) + 1):
        found = whole_range(data[:stop], base)
        assert found.end - base == max(end for end in whole if end <= stop)


@pytest.mark.parametrize("bytes_max", [8, 100, 300, 5000])
def test_a_unit_takes_what_fits_and_at_least_one_record_or_group(bytes_max: int) -> None:
    data = bundle_bytes(3)
    base = int.from_bytes(data[fmt.PHYSICAL_OFFSET_AT : fmt.PHYSICAL_OFFSET_AT + 8], "big")
    walk = record.walk(data, base)
    ends = (walk.positions + walk.sizes).tolist()
    whole = [ends[0], ends[4], ends[5]]

    def read(start: int, stop: int) -> bytes:
        return data[start - base : stop - base]

    at = base
    while at < ends[-1]:
        following = [end for end in whole if end > at]
        fitting = [end for end in following if end <= at + bytes_max]
        at += len(unit_bytes(read, at, ends[-1], bytes_max))
        assert at == (fitting or following[:1])[-1]


def test_a_unit_is_the_same_however_many_record_starts_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unit_bounds, "STEP_BYTES", 700)
    store = open_store(tmp_path)
    fill(store)
    starts = unit_bounds.RecordStarts()
    at, files = 0, store.log.segments.files
    for file in files:
        walk = store.log.reads.walk(file.start, min(store.log.end, file.start + file.size)).walk
        starts.note(walk.positions)
    while at < store.log.end:
        stop = min(store.log.end, at - at % CONFIG.segment_size_bytes + CONFIG.segment_size_bytes)
        alone = unit_bytes(store.log.reads.raw, at, stop, 3000)
        assert unit_bytes(store.log.reads.raw, at, stop, 3000, starts) == alone
        at += len(alone)


def test_a_body_that_looks_like_the_record_of_a_bundle_begins_none() -> None:
    data = bundle_bytes(3)
    store = open_store(disk=SimulatedDisk())
    start = store.log.end
    store.put_inner([InnerMessage("t", 0, data)])
    raw = store.log.reads.raw(start, store.log.end)
    assert unit_bounds.whole_range(raw, start).end == store.log.end


def test_a_damaged_record_of_a_bundle_begins_none() -> None:
    data = bytearray(bundle_bytes(3))
    base = int.from_bytes(data[fmt.PHYSICAL_OFFSET_AT : fmt.PHYSICAL_OFFSET_AT + 8], "big")
    walk = record.walk(bytes(data), base)
    (first, *_), (size, *_) = walk.positions[1:] - base, walk.sizes[1:]
    assert whole_range(bytes(data[: first + size]), base).end - base == first
    data[data.index(b'"end"') + 1] ^= 1
    assert whole_range(bytes(data[: first + size]), base).end - base == first + size
