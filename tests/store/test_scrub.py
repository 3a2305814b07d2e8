"""Scrub reads everything that is synced, at its pace, continues after a restart, and reports each damaged unit once."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raymq.store.base.errors import Corrupt
from raymq.store.base.files import NOT_TRIED, Files, PathLike
from raymq.store.base.rules import CRC_RULE, READABLE_RULE
from raymq.store.config.store_config import StoreConfig
from raymq.store.log.chain import ChainUnit, unpack_units
from raymq.store.log.scrub import Scrub, scrub_of_log
from tests.support.bad_sectors import SECTOR, BadSectors
from tests.support.clock import ManualClock
from tests.support.damaged_store import FIRST_LOG, SEGMENT, copy, flip

CHAIN = "raymq/chain"
PACE = 1 << 20
PAUSE_MS = 60_000


def units_of(root: Path) -> list[ChainUnit]:
    return [u for file in sorted((root / CHAIN).iterdir()) for u in unpack_units(file.read_bytes())]


def scrub_of(root: Path, clock: ManualClock, *, limit: int | None = None, **more: Any) -> Scrub:
    end = units_of(root)[-1].end if limit is None else limit
    options = {"bytes_per_s": PACE, "pause_ms": PAUSE_MS, **more}
    return Scrub(root, SEGMENT, start=lambda: 0, limit=lambda: end, clock=clock, **options)


def test_a_pass_reads_every_synced_byte_at_its_pace(own: Path, tmp_path: Path) -> None:
    root, clock = copy(own, tmp_path / "s"), ManualClock()
    end = units_of(root)[-1].end
    # So slow that the last wait, which may be too short to be taken, is less than 1 % of the pass.
    bytes_per_s = PACE // 100
    scrub = scrub_of(root, clock, bytes_per_s=bytes_per_s)
    assert scrub.one_pass() == []
    assert (scrub.counters.bytes, scrub.counters.units) == (end, len(units_of(root)))
    assert sum(clock.slept) == pytest.approx(1000 * end / bytes_per_s, rel=0.01)
    assert scrub.position == 0
    # The next pass comes after the pause.
    assert scrub.step() == pytest.approx(PAUSE_MS / 1000)
    clock.advance(PAUSE_MS)
    scrub.step()
    assert scrub.position == units_of(root)[0].end


def test_what_is_not_synced_is_not_read(own: Path, tmp_path: Path) -> None:
    root, clock = copy(own, tmp_path / "s"), ManualClock()
    unit = units_of(root)[10]
    flip(root / FIRST_LOG, unit.start + 5)
    scrub = scrub_of(root, clock, limit=unit.end - 1)
    assert scrub.one_pass() == []
    assert scrub.counters.bytes == unit.start
    assert scrub_of(root, clock, limit=0, progress_file="other").one_pass() == []


def test_each_rotten_unit_is_reported_once_with_file_offset_and_rule(
    own: Path, tmp_path: Path
) -> None:
    root, clock = copy(own, tmp_path / "s"), ManualClock()
    rotten = [units_of(root)[3], units_of(root)[30]]
    for unit in rotten:
        flip(root / f"commitlog/{unit.start // SEGMENT * SEGMENT:020d}", unit.start % SEGMENT + 50)
    reported: list[Corrupt] = []
    scrub = scrub_of(root, clock, on_fault=reported.append)
    faults = scrub.one_pass()
    assert [(f.fields["offset"], f.fields["rule"]) for f in faults] == [
        (unit.start, CRC_RULE) for unit in rotten
    ]
    assert faults[0].fields["path"] == str(root / FIRST_LOG)
    clock.advance(PAUSE_MS)
    scrub.one_pass()
    assert reported == faults
    assert scrub.counters.faults == 4
    # A place that reads well again is not a fault any more.
    scrub.close()
    flip(root / FIRST_LOG, rotten[0].start + 50)
    clock.advance(PAUSE_MS)
    again = scrub_of(root, clock, from_disk=True)
    assert [f.fields["offset"] for f in again.faults] == [unit.start for unit in rotten]
    assert [f.fields["offset"] for f in again.one_pass()] == [rotten[1].start]
    assert again.status()["found"][0]["offset"] == rotten[1].start


def test_a_pass_goes_on_where_it_was_interrupted(own: Path, tmp_path: Path) -> None:
    root, clock = copy(own, tmp_path / "s"), ManualClock()
    scrub = scrub_of(root, clock)
    for _ in range(20):
        scrub.step()
    scrub.close()
    again = scrub_of(root, clock)
    assert again.position == units_of(root)[20].start
    again.one_pass()
    assert again.counters.units == len(units_of(root)) - 20
    (root / "raymq" / "scrub").write_text("{torn")
    assert scrub_of(root, clock).position == 0


@pytest.mark.parametrize("restarts", [False, True])
def test_the_scrub_goes_on_after_a_pass_that_ended_while_the_clock_was_ahead(
    own: Path, tmp_path: Path, restarts: bool
) -> None:
    root, clock = copy(own, tmp_path / "s"), ManualClock()
    clock.jump_wall(365 * 86_400_000)
    scrub = scrub_of(root, clock)
    scrub.one_pass()
    clock.jump_wall(-365 * 86_400_000)
    if restarts:
        scrub.close()
        scrub = scrub_of(root, clock)
    scrub.step()
    assert scrub.position == units_of(root)[0].end
    scrub.one_pass()
    # This pass ended by the clock of now: the next one comes after the pause.
    assert scrub.step() == pytest.approx(PAUSE_MS / 1000)


def test_a_position_between_units_goes_back_to_its_file(own: Path, tmp_path: Path) -> None:
    root, clock = copy(own, tmp_path / "s"), ManualClock()
    unit = next(u for u in units_of(root) if u.start > SEGMENT + 100)
    (root / "raymq" / "scrub").write_text(
        f'{{"position": {unit.start + 1}, "passed_ms": 0, "faults": []}}'
    )
    scrub = scrub_of(root, clock)
    assert scrub.one_pass() == []
    assert scrub.counters.bytes == units_of(root)[-1].end - SEGMENT


def test_deleted_files_are_passed_over_and_a_file_without_units_is_reported(
    own: Path, tmp_path: Path
) -> None:
    root, clock = copy(own, tmp_path / "s"), ManualClock()
    end = units_of(root)[-1].end
    (root / FIRST_LOG).unlink()
    assert scrub_of(root, clock).one_pass() == []
    (root / CHAIN / f"{SEGMENT:020d}").unlink()
    clock.advance(PAUSE_MS)
    faults = scrub_of(root, clock, limit=end).one_pass()
    assert [f.fields["offset"] for f in faults] == [SEGMENT]


def test_a_unit_that_was_replaced_between_two_reads_is_not_rot(own: Path, tmp_path: Path) -> None:
    """A cut, then other bytes and another unit at the same place."""
    root, clock = copy(own, tmp_path / "s"), ManualClock()
    unit = units_of(root)[5]
    scrub = scrub_of(root, clock)
    while scrub.position < unit.start:
        scrub.step()
    flip(root / FIRST_LOG, unit.start + 50)
    chain = root / CHAIN / f"{0:020d}"
    data = bytearray(chain.read_bytes())
    data[5 * 40 + 24 : 5 * 40 + 28] = b"\1\2\3\4"
    real = scrub._read
    reads = []

    def read(which: ChainUnit) -> bytes | None:
        reads.append(which)
        found = real(which)
        chain.write_bytes(data)
        return found

    scrub._read = read  # type: ignore[method-assign]
    scrub.step()
    assert scrub.faults == []
    assert len(reads) == 2


class Waits:
    """An event that is never set. Its waits only move the clock."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock

    def wait(self, seconds: float) -> None:
        self.clock.sleep_ms(math.ceil(seconds * 1000))

    def clear(self) -> None:
        pass


def test_a_run_waits_seldom_for_small_units_and_keeps_its_pace_all_the_same(
    own: Path, tmp_path: Path
) -> None:
    root, clock = copy(own, tmp_path / "s"), ManualClock()
    scrub = scrub_of(root, clock)
    scrub._wake = Waits(clock)  # type: ignore[assignment]
    scrub.run(lambda: scrub.counters.passes == 1)
    end = units_of(root)[-1].end
    assert sum(clock.slept) == pytest.approx(1000 * end / PACE, abs=60)
    assert min(clock.slept) >= 50
    # The pass is over: it waits for the next one, in long pieces.
    clock.slept.clear()
    scrub.run(lambda: sum(clock.slept) >= PAUSE_MS)
    assert clock.slept == [5_000.0] * (PAUSE_MS // 5_000)


def test_a_hole_in_the_chain_is_reported_once_and_the_pass_goes_on_after_it(
    own: Path, tmp_path: Path
) -> None:
    root, clock = copy(own, tmp_path / "s"), ManualClock()
    end = units_of(root)[-1].end
    first = root / CHAIN / f"{0:020d}"
    kept = first.read_bytes()[: 5 * 40]
    first.write_bytes(kept)
    scrub = scrub_of(root, clock, limit=end, bytes_per_s=0)
    for _ in range(2 * len(units_of(root))):
        scrub.step()
    assert scrub.counters.passes == 1
    assert [f.fields["offset"] for f in scrub.faults] == [unpack_units(kept)[-1].end]


@pytest.mark.parametrize("how", ["recycled", "unlinked"])
def test_a_file_that_is_deleted_while_it_is_read_is_not_damage(
    own: Path, tmp_path: Path, how: str
) -> None:
    root, clock = copy(own, tmp_path / "s"), ManualClock()
    end, start = units_of(root)[-1].end, 0
    scrub = scrub_of(root, clock, limit=end)
    scrub.start = lambda: start
    real = scrub._read

    def read(unit: ChainUnit) -> bytes | None:
        """The deletion overtakes the read."""
        nonlocal start
        if not start:
            first = root / FIRST_LOG
            if how == "unlinked":
                scrub._close_log()
                first.unlink(missing_ok=True)
            else:
                with first.open("r+b") as file:
                    file.write(bytes(SEGMENT))
                start = SEGMENT
        return real(unit)

    scrub.step()
    scrub._read = read  # type: ignore[method-assign]
    if how == "unlinked":
        # Seen, and gone before it is opened.
        scrub.files.exists = lambda path: True  # type: ignore[method-assign]
    assert scrub.one_pass() == []
    assert scrub.counters.faults == 0


HOUR_MS = 3_600_000
GIB = 1 << 30


def scrub_of_size(root: Path, clock: ManualClock, log_bytes: int, **options: Any) -> Scrub:
    """As a host makes it, for a log that is said to be so large."""
    config = StoreConfig(segment_size_bytes=SEGMENT, **options)
    log = SimpleNamespace(root=root, config=config, files=Files(), clock=clock)
    log.start, log.synced, log.confirmed = 0, log_bytes, log_bytes
    return scrub_of_log(log, on_fault=lambda fault: None)  # type: ignore[arg-type]


def test_the_first_pass_of_a_new_shard_does_not_wait_for_the_second(
    own: Path, tmp_path: Path
) -> None:
    root, clock = copy(own, tmp_path / "s"), ManualClock()
    end = 0
    scrub = scrub_of(root, clock)
    scrub.limit = lambda: end
    # Nothing is stored yet: that is no pass.
    assert scrub.step() <= 60
    assert scrub.counters.passes == 0
    end = units_of(root)[-1].end
    scrub.step()
    assert scrub.position == units_of(root)[0].end


@pytest.mark.parametrize("log_gib", [0.001, 1, 300, 2600])
@pytest.mark.parametrize("reserved_hours", [72, 10])
def test_by_default_all_is_read_twice_within_the_retention(
    tmp_path: Path, log_gib: float, reserved_hours: int
) -> None:
    clock, size = ManualClock(), int(log_gib * GIB)
    scrub = scrub_of_size(tmp_path, clock, size, file_reserved_hours=reserved_hours)
    cycle_ms = size * 1000 / scrub.pace() + scrub.pause_ms
    fits = size <= 64 * (1 << 20) * min(24, reserved_hours / 2) * 3600
    assert (scrub.slowness_advice() is None) == fits
    assert scrub.pace() <= 64 << 20
    if fits:
        assert cycle_ms <= min(24, reserved_hours / 2) * HOUR_MS * 1.5
        assert cycle_ms <= reserved_hours * HOUR_MS
    if size / (8 << 20) <= scrub.pass_ms / 1000:
        # A small log: no quicker than need be, and then it waits.
        assert scrub.pace() == 8 << 20


def test_a_log_that_is_too_large_for_a_pass_is_reported(tmp_path: Path) -> None:
    scrub = scrub_of_size(tmp_path, ManualClock(), 20_000 * GIB)
    assert scrub.pace() == 64 << 20
    reported = scrub.status()["advice"]
    assert "takes 88 h at scrub_bytes_per_s (67108864); it should take 24 h" in reported


def test_a_bad_sector_is_a_fault_and_the_pass_goes_on_after_it(own: Path, tmp_path: Path) -> None:
    root, clock, files = copy(own, tmp_path / "s"), ManualClock(), BadSectors()
    sector = files.lose(root / FIRST_LOG, units_of(root)[9].start)
    hit = [u for u in units_of(root) if u.start < sector + SECTOR and u.end > sector]
    scrub = scrub_of(root, clock, files=files)
    faults = scrub.one_pass()
    assert [(f.fields["offset"], f.fields["rule"]) for f in faults] == [
        (max(unit.start, sector), READABLE_RULE) for unit in hit
    ]
    assert scrub.counters.passes == 1
    files.bad.clear()
    clock.advance(PAUSE_MS)
    assert scrub.one_pass() == []


def test_a_run_ends_when_it_is_stopped(own: Path, tmp_path: Path) -> None:
    root, clock = copy(own, tmp_path / "s"), ManualClock()
    scrub = scrub_of(root, clock, bytes_per_s=0)
    scrub.run(lambda: scrub.counters.units >= 7)
    assert scrub.counters.units == 7
    assert scrub_of(root, clock).position == units_of(root)[7].start


class Lacking(Files):
    """The real files; opening one fails for as many times as are listed, each with its error."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[int] = []

    def open_file(self, path: PathLike, *, create: bool = False, writable: bool = True) -> int:
        """As the real one, after the errors."""
        if self.errors and not writable:
            code = self.errors.pop(0)
            raise OSError(code, os.strerror(code))
        return super().open_file(path, create=create, writable=writable)


def run_one_pass(scrub: Scrub, clock: ManualClock) -> None:
    """`run`, as the scrub's thread calls it, until the first pass has ended."""
    scrub._wake = Waits(clock)  # type: ignore[assignment]
    scrub.run(lambda: scrub.counters.passes > 0)


@pytest.mark.parametrize("code", NOT_TRIED)
@pytest.mark.parametrize("at_unit", [0, 7])
def test_a_lack_of_descriptors_or_memory_is_not_damage_and_the_pass_goes_on(
    own: Path, tmp_path: Path, code: int, at_unit: int
) -> None:
    root, clock, files = copy(own, tmp_path / "s"), ManualClock(), Lacking()
    reported: list[Corrupt] = []
    first = scrub_of(root, clock)
    for _ in range(at_unit):
        first.step()
    first.close()
    scrub = scrub_of(root, clock, files=files, on_fault=reported.append)
    # Of the chain's file three times, then of the log's.
    files.errors = [code] * 4
    run_one_pass(scrub, clock)
    assert files.errors == []
    assert (reported, scrub.faults, scrub.counters.faults) == ([], [], 0)
    assert scrub.counters.bytes == units_of(root)[-1].end - units_of(root)[at_unit].start


def test_a_report_that_fails_does_not_end_the_walk(own: Path, tmp_path: Path) -> None:
    root, clock, files = copy(own, tmp_path / "s"), ManualClock(), Lacking()
    reported: list[Corrupt] = []

    def note(fault: Corrupt) -> None:
        reported.append(fault)
        if len(reported) == 1:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    scrub = scrub_of(root, clock, files=files, on_fault=note)
    files.errors = [errno.EIO]
    run_one_pass(scrub, clock)
    assert [(f.fields["offset"], f.fields["rule"]) for f in reported] == [(0, READABLE_RULE)]
    assert scrub.counters.bytes == units_of(root)[-1].end
