"""A torn last append at every byte and in every sector, and errors of the disk in an append and in a cut."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from raymq.store.base.checksum import crc32c
from raymq.store.base.errors import Corrupt, RayMQError, StorageFull, Unavailable
from raymq.store.base.files import Files
from raymq.store.config.store_config import StoreConfig
from raymq.store.engine.message_store import MessageStore
from raymq.store.log.chain import CHAIN_UNIT_BYTES, ChainUnit, unpack_units
from raymq.store.log.commit_log import CommitLog
from raymq.store.log.recovery.log_recovery import recover
from raymq.store.records import record
from raymq.store.records.requests import AppendedRows, PutRequest
from raymq.store.tools.inspect import check
from tests.support.batches import batch, request
from tests.support.clock import ManualClock
from tests.support.confirming import confirm, file_bytes
from tests.support.crash_states import disk_of, kill_states, power_loss_states
from tests.support.golden import unpack_golden
from tests.support.simulated_disk import SimulatedDisk

CONFIG = StoreConfig(
    segment_size_bytes=16 * 1024,
    consume_queue_file_size_bytes=400,
    max_message_bytes=2000,
    prewrite_window_bytes=8 * 1024,
)
ROOT = Path("/s")
SEGMENT = "00000000000000000000"
LOG = f"/s/commitlog/{SEGMENT}"
CHAIN = f"/s/raymq/chain/{SEGMENT}"
MARKS = "/s/raymq/marks"
META = "/s/raymq/meta"
SECTOR = 512


class Rebooted(Files):
    """The files of a machine that was started again."""

    def boot_id(self) -> str:
        return "another boot"


def open_store(root: Path, files: Files) -> MessageStore:
    return MessageStore.open(root, config=CONFIG, files=files, clock=ManualClock())


def raw_records(store: MessageStore, topic: str = "t") -> list[bytes]:
    """The raw records of queue 0, one fetch at a time: a fetch ends with its segment."""
    found: list[bytes] = []
    while True:
        part = store.fetch(topic, 0, len(found), max_bytes=1 << 20, max_records=100)
        if part.records is None or not len(part.records):
            return found
        found += part.records.to_pylist()


class Tail(NamedTuple):
    """A store's files with a last append that was never confirmed."""

    tree: dict[str, bytes]
    topic: str
    #: of the last append: its start, and the end of each of its records
    start: int
    ends: tuple[int, ...]
    #: raw records before it, and all of them
    before: list[bytes]
    every: list[bytes]


def store_with_tail(bodies: list[bytes], properties: bytes | None, topic: str = "orders") -> Tail:
    """Three confirmed appends of two records, then `bodies` as one unsynced append."""
    disk = SimulatedDisk(block_bytes=SECTOR, record=False)
    store = open_store(ROOT, disk)
    store.topics.create(topic, 1, [0])

    def put(bodies: list[bytes], properties: bytes | None) -> AppendedRows:
        values = batch([*bodies], tag="red", properties=properties)
        return store.put(PutRequest(topic, 0, values, None, 0, 0, "quorum"))

    for number in range(3):
        put([b"%d" % number * 40] * 2, b"colour\x01blue\x02")
    confirm(store)
    before = raw_records(store, topic)
    made = put(bodies, properties)
    tree = disk.tree()
    walk = record.walk(tree[LOG][made.physical_offset :], made.physical_offset)
    starts = [int(at) for at in walk.positions]
    ends = tuple(int(at) for at in walk.positions + walk.sizes)
    last = [tree[LOG][at:end] for at, end in zip(starts, ends, strict=True)]
    store.close()
    assert len(before) == 6
    assert ends[-1] == made.end_offset
    return Tail(tree, topic, made.physical_offset, ends, before, before + last)


def marks_page(*, appended: int, synced: int) -> bytes:
    return struct.pack("<4q", appended, synced, synced, 0).ljust(4096, b"\0")


#: the rest of the chain, whose last unit is that of the torn append
CHAINS = {
    "the chain is complete": lambda data: data,
    "its last unit is missing": lambda data: data[:-CHAIN_UNIT_BYTES],
    "its last unit is torn": lambda data: (
        data[: -CHAIN_UNIT_BYTES // 2] + bytes(CHAIN_UNIT_BYTES // 2)
    ),
    "the chain is gone": lambda data: None,
}
#: the (appended, synced) marks for an append [start, end)
MARK_PAGES = {
    "appended, not synced": lambda start, end: marks_page(appended=end, synced=start),
    "not yet appended": lambda start, end: marks_page(appended=start, synced=start),
    "marks as they were long ago": lambda start, end: marks_page(appended=0, synced=0),
    "synced": lambda start, end: marks_page(appended=end, synced=end),
}
BOOTS = {"the processes died": 0, "the machine lost power": 1}


def expected_of_a_tear(boot: str, marks: str) -> str:
    """As docs/recovery.md says: a tail is torn only if no mark says that it must be there."""
    if marks == "synced":
        return "corrupt, row A"
    if boot == "the processes died" and marks == "appended, not synced":
        return "corrupt, row B"
    return "cut"


def torn_logs(tail: Tail) -> Iterator[tuple[int, bytes]]:
    """(byte, log) for a tear of the last append at any byte. Tears on both sides of a zero leave the same log, once."""
    log = tail.tree[LOG]
    for cut in range(tail.start, tail.ends[-1]):
        if cut == tail.start or log[cut - 1]:
            yield cut, log[:cut].ljust(len(log), b"\0")


def damaged(tail: Tail, log: bytes, chain: str, marks: str) -> dict[str, bytes]:
    """The tail's files with another log, chain and marks."""
    tree = {**tail.tree, LOG: log, MARKS: MARK_PAGES[marks](tail.start, tail.ends[-1])}
    units = CHAINS[chain](tree.pop(CHAIN))
    return tree if units is None else {**tree, CHAIN: units}


def recovered(tail: Tail, disk: SimulatedDisk) -> tuple[str, MessageStore | None]:
    """The decision of recovery about a tail: kept, cut at its start or after a record, or corrupt."""
    untouched = disk.tree()[LOG]
    try:
        store = open_store(ROOT, disk)
    except Corrupt as refusal:
        assert disk.tree()[LOG] == untouched
        return f"corrupt, {str(refusal.fields['rule']).removeprefix('recovery ')}", None
    end = store.log.end
    if end == tail.ends[-1]:
        return "kept", store
    return ("cut" if end == tail.start else f"cut after record {tail.ends.index(end)}"), store


def assert_serves(tail: Tail, store: MessageStore) -> None:
    """Every record that is left is one that was put, and the store goes on."""
    confirm(store)
    left = raw_records(store, tail.topic)
    assert left == tail.every[: len(left)]
    assert left[: len(tail.before)] == tail.before
    assert not any(file_bytes(store.log, 0)[store.log.end :])
    made = store.put(request([b"next"], topic=tail.topic))
    assert made.first_offset == len(left)
    confirm(store)
    assert raw_records(store, tail.topic)[:-1] == left


class Served:
    """Looks at recovered stores: one look at all that have the same files and ends."""

    def __init__(self, tail: Tail) -> None:
        self._tail = tail
        self._seen: set[tuple[int, int, frozenset[tuple[str, bytes]]]] = set()

    def look(self, store: MessageStore, disk: SimulatedDisk) -> None:
        found = (store.log.end, store.log.synced, frozenset(disk.tree().items()))
        if found not in self._seen:
            self._seen.add(found)
            assert_serves(self._tail, store)


TAIL = store_with_tail([b"torn" * 6], b"colour\x01green\x02")


@pytest.mark.parametrize("boot", BOOTS)
@pytest.mark.parametrize("marks", MARK_PAGES)
@pytest.mark.parametrize("chain", CHAINS)
def test_an_append_torn_at_any_byte_is_cut_or_reported_and_never_served(
    chain: str, marks: str, boot: str
) -> None:
    served = Served(TAIL)
    for cut, torn in torn_logs(TAIL):
        disk = disk_of(damaged(TAIL, torn, chain, marks), boot=BOOTS[boot])
        reported, store = recovered(TAIL, disk)
        assert reported == expected_of_a_tear(boot, marks), f"torn at byte {cut - TAIL.start}"
        if store is not None:
            served.look(store, disk)


@pytest.mark.parametrize("boot", BOOTS)
@pytest.mark.parametrize("marks", MARK_PAGES)
@pytest.mark.parametrize("chain", CHAINS)
def test_an_append_that_is_whole_is_kept_whatever_is_left_of_chain_and_marks(
    chain: str, marks: str, boot: str
) -> None:
    """It may be acknowledged: no ack syncs the chain or the marks, so a power loss may take both."""
    disk = disk_of(damaged(TAIL, TAIL.tree[LOG], chain, marks), boot=BOOTS[boot])
    reported, store = recovered(TAIL, disk)
    assert reported == "kept"
    assert store is not None
    assert_serves(TAIL, store)


@pytest.mark.parametrize("boot", BOOTS)
@pytest.mark.parametrize("marks", MARK_PAGES)
@pytest.mark.parametrize("chain", CHAINS)
def test_verify_foretells_what_a_start_does_with_a_torn_append(
    chain: str, marks: str, boot: str
) -> None:
    log, end = TAIL.tree[LOG], TAIL.ends[-1]
    for cut in (*range(TAIL.start, end, 23), end):
        torn = log[:cut].ljust(len(log), b"\0")
        disk = disk_of(damaged(TAIL, torn, chain, marks), boot=BOOTS[boot])
        before = disk.tree()
        report = check(ROOT, disk)
        faults, verdict = report.faults, report.verdict
        assert verdict is not None
        assert disk.tree() == before
        reported, store = recovered(TAIL, disk)
        if reported.startswith("corrupt"):
            (fault,) = faults
            assert fault.rule == reported.replace("corrupt, ", "recovery ")
            assert (fault.file, fault.offset) == (f"commitlog/{SEGMENT}", TAIL.start)
            assert verdict.decision == "corrupt"
        else:
            assert store is not None
            assert faults == []
            assert verdict.end == store.log.end
            dirty = any(log[TAIL.start : cut]) and cut < end
            assert verdict.decision == ("truncate" if dirty else "keep")


#: records whose topic and properties reach over sectors, one whose properties begin with a sector
WIDE = store_with_tail(
    [b"torn" * 100, b"", b"torn" * 30],
    b"colour\x01" + b"green " * 150 + b"\x02",
    topic="orders-" + "o" * 100,
)


@pytest.mark.parametrize("marks", ["appended, not synced", "marks as they were long ago"])
@pytest.mark.thorough
@pytest.mark.parametrize("chain", CHAINS)
def test_an_append_that_lost_any_of_its_sectors_leaves_only_whole_records(
    chain: str, marks: str
) -> None:
    log, end = WIDE.tree[LOG], WIDE.ends[-1]
    sectors = range(WIDE.start // SECTOR, -(-end // SECTOR))
    assert len(sectors) >= 7
    for count in range(1, len(sectors) + 1):
        for lost in itertools.combinations(sectors, count):
            left = bytearray(log)
            for sector in lost:
                low = max(sector * SECTOR, WIDE.start)
                left[low : (sector + 1) * SECTOR] = bytes((sector + 1) * SECTOR - low)
            first = max(lost[0] * SECTOR, WIDE.start)
            whole = [end for end in WIDE.ends if end <= first]
            want = "cut"
            if whole and chain != "the chain is complete":
                want = f"cut after record {len(whole) - 1}"
            reported, store = recovered(
                WIDE, disk_of(damaged(WIDE, bytes(left), chain, marks), boot=1)
            )
            assert reported == want, f"lost sectors {lost}"
            if store is not None and count == 1:
                assert_serves(WIDE, store)


@pytest.mark.parametrize("body_bytes", [5, 133, 261, 389])
def test_zero_bytes_in_a_property_are_no_tear(body_bytes: int) -> None:
    # One more zero byte is refused by the check of puts.
    properties = b"zeros\x01" + bytes(SECTOR - 1) + b"\x02"
    tail = store_with_tail([b"b" * body_bytes], properties)
    log = tail.tree[LOG]
    for marks in MARK_PAGES:
        tree = damaged(tail, log, "the chain is gone", marks)
        assert recovered(tail, disk_of(tree, boot=1))[0] == "kept"


def test_a_store_of_rocketmq_opens_again_after_a_power_loss_that_took_the_chain(
    tmp_path: Path,
) -> None:
    unpack_golden(tmp_path)
    config = dataclasses.replace(CONFIG, segment_size_bytes=65_536)
    ends = []
    for boot in range(3):
        files = Files() if not boot else Rebooted()
        log = CommitLog(tmp_path / "golden", config, files=files, clock=ManualClock())
        ends.append(recover(log, 0).end)
        assert log.is_own_store == (boot > 0)
        log.close(clean=False)
        for unit_file in (tmp_path / "golden" / "raymq" / "chain").iterdir():
            unit_file.unlink()
        if boot:
            (tmp_path / "golden" / "raymq" / "marks").unlink()
    assert ends[0] > 0
    assert len(set(ends)) == 1


def test_a_unit_over_the_synced_mark_costs_only_the_records_above_it() -> None:
    """A follower's leader may have made one unit of what the follower had synced up to its middle."""
    synced = store_with_tail([b"torn" * 6], b"colour\x01green\x02")
    units = unpack_units(synced.tree[CHAIN])
    first, end = units[-2].start, units[-1].end
    log = synced.tree[LOG]
    spanning = ChainUnit(first, end, 0, crc32c(log[first:end]), units[-2].previous)
    chain = b"".join(unit.pack() for unit in (*units[:-2], spanning))
    page = marks_page(appended=end, synced=synced.start)
    for cut, torn in torn_logs(synced):
        tree = {**synced.tree, LOG: torn, CHAIN: chain, MARKS: page}
        reported, store = recovered(synced, disk_of(tree, boot=1))
        assert reported == "cut", f"torn at byte {cut - synced.start}"
        assert store is not None
        assert store.log.end == synced.start


def test_after_a_power_loss_what_was_found_is_proven_through_the_next_one() -> None:
    tree = damaged(TAIL, TAIL.tree[LOG], "the chain is gone", "marks as they were long ago")
    disk = disk_of(tree, boot=1).recording()
    open_store(ROOT, disk)
    disk.note("open")
    last = len(disk.snapshot())
    states = [s for s in power_loss_states(disk, 20, 0) if s.crashed_at == last]
    assert states
    for image in states:
        files = image.tree()
        assert struct.unpack_from("<4q", files[MARKS])[1] == TAIL.ends[-1]
        units = unpack_units(files[CHAIN])
        assert units[-1].end == TAIL.ends[-1]
        assert units[-1].crc == crc32c(files[LOG][units[-1].start : units[-1].end])


def rolled_store() -> tuple[dict[str, bytes], int]:
    """Files with appends over two segments, and their end. Only the first two appends are synced."""
    disk = SimulatedDisk(block_bytes=SECTOR, record=False)
    store = open_store(ROOT, disk)
    store.topics.create("t", 1, [0])
    for number in range(2):
        store.put(request([b"%d" % number * 900]))
    confirm(store)
    synced = store.log.end
    for number in range(20):
        store.put(request([b"%02d" % number * 450]))
    tree = disk.tree()
    store.close()
    tree[MARKS] = marks_page(appended=0, synced=synced)
    return tree, synced


@pytest.mark.parametrize("headless", [False, True], ids=["whole", "without its first sector"])
def test_nothing_stays_in_a_later_file_after_a_log_that_lost_its_tail(headless: bool) -> None:
    """Otherwise appends that reach that file later would end at the start of its old records."""
    tree, synced = rolled_store()
    logs = sorted(path for path in tree if path.startswith("/s/commitlog/"))
    assert len(logs) == 2
    tree[logs[0]] = tree[logs[0]][:synced].ljust(len(tree[logs[0]]), b"\0")
    if headless:
        for path in logs[1:]:
            tree[path] = bytes(SECTOR) + tree[path][SECTOR:]
    disk = disk_of(tree, boot=1)
    store = open_store(ROOT, disk)
    assert store.log.end == synced
    for path, data in disk.tree().items():
        if path.startswith("/s/commitlog/") and path != logs[0]:
            assert not any(data), path
    # Old records and new ones have the same sizes: had they stayed, a kill would bring them back.
    for number in range(16):
        store.put(request([b"new %03d" % number * 128]))
        confirm(store)
    end = store.log.end
    again = open_store(ROOT, disk_of(disk.tree(), boot=1))
    assert again.log.end == end
    assert len(raw_records(again)) == 18


@pytest.mark.parametrize("failed", [1, 2], ids=["its bytes", "its chain unit"])
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_refused_batch_does_not_come_back_after_a_shorter_one(rows: int, failed: int) -> None:
    disk = SimulatedDisk(block_bytes=SECTOR)
    store = open_store(ROOT, disk)
    store.topics.create("t", 1, [0])
    confirm(store)
    disk.fail("pwrite", at=failed, error=errno.ENOSPC)
    with pytest.raises(StorageFull):
        store.put(request([b"refused"] * 8))
    store.put(request([b"granted"] * rows))
    end = store.log.end
    *_, killed = kill_states(disk)
    lost = [s for s in power_loss_states(disk, 12, 0) if s.crashed_at == len(disk.snapshot())]
    for image in (killed, *lost):
        assert not any(b"refused" in data for data in image.tree().values())
        again = open_store(ROOT, image)
        assert again.log.end <= end
        assert again.log.end == end or image is not killed


def test_a_refused_batch_that_cannot_be_erased_ends_writing_until_it_is_or_the_next_start() -> None:
    disk = SimulatedDisk(block_bytes=SECTOR)
    store = open_store(ROOT, disk)
    store.topics.create("t", 1, [0])
    confirm(store)
    end = store.log.end
    disk.fail("pwrite", at=1, error=errno.ENOSPC)
    disk.fail("pwrite", at=2, error=errno.ENOSPC)
    with pytest.raises(StorageFull):
        store.put(request([b"refused"] * 8))
    disk.fail("pwrite", at=1, error=errno.ENOSPC)
    with pytest.raises(Unavailable):
        store.put(request([b"granted"]))
    *_, killed = kill_states(disk)
    store.put(request([b"granted"]))
    again = open_store(ROOT, killed)
    assert again.log.end == end
    assert not any(b"refused" in data for data in killed.tree().values())
    again.put(request([b"granted"]))


@pytest.mark.parametrize("kind", ["pwrite", "sync", "sync_data"])
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
def test_a_log_whose_cut_failed_appends_nothing_until_the_cut_is_done(
    kind: str, error: int
) -> None:
    tree = {**TAIL.tree, MARKS: marks_page(appended=TAIL.ends[-1], synced=TAIL.start)}
    at = 0
    while True:
        at += 1
        disk = disk_of(tree, boot=0).recording()
        log = CommitLog(ROOT, CONFIG, files=disk, clock=ManualClock())
        recover(log, 0)
        disk.fail(kind, at=at, error=error)
        try:
            log.truncate(TAIL.start)
            break
        except (OSError, RayMQError):
            with pytest.raises(Unavailable):
                log.append(b"acknowledged and lost", 0)
        *_, killed = kill_states(disk)
        try:
            again = CommitLog(ROOT, CONFIG, files=killed, clock=ManualClock())
        except Corrupt as refusal:
            if refusal.fields["rule"] != "poisoned":
                raise
            continue
        recover(again, 0)
        assert again.end in (TAIL.start, TAIL.ends[-1])
    assert at > 1
