"""The chain has no hole, ends where it is damaged, and can be followed as it grows."""

from __future__ import annotations

import errno
from pathlib import Path

import crcmod
import pytest

from raymq.store.base.errors import Rejected
from raymq.store.base.files import Files
from raymq.store.log.chain import CHAIN_UNIT_BYTES, Chain, ChainReader, ChainUnit, unpack_units
from tests.support.simulated_disk import SimulatedDisk

SEGMENT = 4096
castagnoli = crcmod.mkCrcFun(0x11EDC6F41, initCrc=0, rev=True, xorOut=0xFFFFFFFF)


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "chain").mkdir()
    return tmp_path / "chain"


def opened(directory, files=None):
    chain = Chain(directory, SEGMENT, files=files or Files())
    chain.load()
    return chain


def grow(chain, lengths, epoch=1):
    """Append units of these lengths. As in a log, no unit spans two segments."""
    for length in lengths:
        start = chain.last.end if chain.last else 0
        chain.append([ChainUnit(start, start + length, epoch, length * 7, chain.value)])
    return chain


def grow_at_once(chain, lengths, epoch=1):
    """Append units of these lengths with one write, as a follower does."""
    units, value = [], chain.value
    start = chain.last.end if chain.last else 0
    for length in lengths:
        units.append(ChainUnit(start, start + length, epoch, length * 7, value))
        start, value = units[-1].end, units[-1].value
    chain.append(units)
    return chain


def test_a_unit_is_forty_bytes_big_endian_and_comes_back(directory):
    unit = ChainUnit(0x0102030405060708, 0x1112131415161718, 3, 0xFFFFFFFF, 0x80000001)
    data = unit.pack()
    assert len(data) == CHAIN_UNIT_BYTES == 40
    assert data.hex() == (
        "010203040506070811121314151617180000000000000003ffffffff80000001" + "00" * 8
    )
    assert unpack_units(data * 2) == [unit, unit]


def test_the_value_is_the_crc32c_continued_from_the_value_before():
    one = ChainUnit(0, 10, 1, 77, 0)
    two = ChainUnit(10, 30, 1, 78, one.value)
    assert one.value == castagnoli(one.pack()[:28])
    assert two.value == castagnoli(two.pack()[:28], one.value)
    assert two.value == castagnoli(one.pack()[:28] + two.pack()[:28])


def test_units_that_do_not_follow_each_other_are_refused_and_none_is_appended(directory):
    chain = opened(directory)
    first = ChainUnit(0, 10, 1, 7, chain.value)
    second = ChainUnit(10, 20, 1, 8, first.value)
    for other in (second._replace(start=11), second._replace(previous=0)):
        with pytest.raises(Rejected, match="does not follow"):
            chain.append([first, other])
        assert chain.last is None
    chain.append([first, second])
    assert list(chain.iter_units(0, 20)) == [first, second]
    chain.close()
    again = opened(directory)
    assert (again.last, again.value) == (second, second.value)
    again.close()


def test_appended_units_survive_a_reload_in_one_file_per_segment(directory):
    chain = grow(opened(directory), [1000, 3096, 4096, 500])
    assert [path.name for path in sorted(directory.iterdir())] == [
        f"{start:020d}" for start in (0, 4096, 8192)
    ]
    again = opened(directory)
    assert (again.last, again.value) == (chain.last, chain.value)
    assert [u.start for u in again.units(0, 1 << 40)] == [0, 1000, 4096, 8192]
    assert [u.start for u in again.units(1, 8192)] == [1000, 4096]
    chain.close()
    again.close()


def test_a_unit_that_does_not_follow_is_refused_and_nothing_is_written(directory):
    chain = grow(opened(directory), [100])
    for unit in (
        ChainUnit(100, 200, 1, 0, chain.value ^ 1),
        ChainUnit(101, 200, 1, 0, chain.value),
        ChainUnit(0, 100, 1, 0, chain.value),
    ):
        with pytest.raises(Rejected, match="does not follow"):
            chain.append([unit])
    assert len(opened(directory).units(0, 1 << 40)) == 1


# Not seen: damage in a unit's last 8 bytes, which carry nothing, and in the CRC of the last unit,
# which no later unit confirms; comparing it with the log's bytes finds that.
@pytest.mark.parametrize(
    ("place", "left"),
    [(0, 0), (28, 1), (39, 4), (40, 1), (68, 1), (88, 2), (120, 3), (144, 4), (155, 4)],
)
def test_a_damaged_byte_ends_the_chain_at_the_unit_that_does_not_link(directory, place, left):
    grow(opened(directory), [100] * 4).close()
    path = directory / ("0" * 20)
    data = bytearray(path.read_bytes())
    data[place] ^= 0x40
    path.write_bytes(data)
    again = opened(directory)
    assert len(again.units(0, 1 << 40)) == left
    assert path.stat().st_size == left * CHAIN_UNIT_BYTES
    again.close()


@pytest.mark.parametrize("cut", [1, 39, 40, 41, 79, 160])
def test_a_torn_tail_is_dropped_and_the_chain_goes_on_from_there(directory, cut):
    grow(opened(directory), [100] * 4).close()
    path = directory / ("0" * 20)
    path.write_bytes(path.read_bytes()[:-cut])
    again = opened(directory)
    whole = (160 - cut) // 40
    assert len(again.units(0, 1 << 40)) == whole
    grow(again, [50])
    assert [u.end for u in opened(directory).units(0, 1 << 40)][-1] == whole * 100 + 50


def test_units_after_a_break_are_gone_from_later_files_too(directory):
    grow(opened(directory), [4096] * 4).close()
    (directory / f"{4096:020d}").write_bytes(b"")
    again = opened(directory)
    assert again.last.end == 4096
    assert [p.stat().st_size for p in sorted(directory.iterdir())] == [40, 0, 0, 0]
    grow(again, [4096])
    assert opened(directory).last.end == 8192


def test_a_chain_may_begin_where_older_segments_were_deleted(directory):
    chain = grow(opened(directory), [4096] * 3)
    chain.close()
    (directory / ("0" * 20)).unlink()
    again = opened(directory)
    assert [u.start for u in again.units(0, 1 << 40)] == [4096, 8192]
    assert again.value == chain.value


@pytest.mark.parametrize(
    ("offset", "left"),
    [(0, 0), (99, 0), (100, 1), (4095, 1), (4096, 2), (8191, 2), (8192, 3), (9000, 4)],
)
def test_a_cut_drops_every_unit_that_ends_above_it(directory, offset, left):
    chain = grow(opened(directory), [100, 3996, 4096, 500])
    whole = chain.units(0, 1 << 40)
    chain.truncate_to(offset)
    assert chain.units(0, 1 << 40) == whole[:left]
    assert chain.value == (whole[left - 1].value if left else 0)
    again = opened(directory)
    assert again.units(0, 1 << 40) == whole[:left]
    assert again.last == chain.last


def test_the_value_at_an_offset_is_known_where_a_unit_ends(directory):
    chain = grow(opened(directory), [100, 3996, 500], epoch=5)
    units = chain.units(0, 1 << 40)
    assert chain.value_at(0) == 0
    for unit in units:
        assert chain.value_at(unit.end) == unit.value
    assert chain.value_at(99) is None
    assert chain.value_at(4097) is None
    assert chain.value_at(1 << 30) is None


def test_a_missing_directory_is_an_empty_chain(tmp_path):
    chain = Chain(tmp_path / "none", SEGMENT, files=Files(), writable=False)
    chain.load()
    assert (chain.last, chain.value, chain.units(0, 100)) == (None, 0, [])


def test_a_reader_only_chain_changes_nothing(directory):
    grow(opened(directory), [100] * 3).close()
    path = directory / ("0" * 20)
    path.write_bytes(path.read_bytes()[:-1])
    chain = Chain(directory, SEGMENT, files=Files(), writable=False)
    chain.load()
    assert len(chain.units(0, 1 << 40)) == 2
    assert path.stat().st_size == 119
    chain.close()


# --- following ------------------------------------------------------------------------------------


def test_a_reader_follows_unit_by_unit_and_never_over_the_end_of_a_file(directory):
    chain = opened(directory)
    reader = ChainReader(directory, SEGMENT, files=Files())
    assert reader.read_from(0, 1 << 20) == []
    grow(chain, [100, 200])
    assert [u.end for u in reader.read_from(0, 1 << 20)] == [100, 300]
    assert reader.read_from(300, 1 << 20) == []
    grow(chain, [3796, 4096, 10])
    assert [u.end for u in reader.read_from(300, 1 << 20)] == [4096]
    assert [u.end for u in reader.read_from(4096, 1 << 20)] == [8192]
    assert [u.end for u in reader.read_from(8192, 1 << 20)] == [8202]
    reader.close()


def test_a_reader_gives_at_least_one_unit_and_else_no_more_than_asked(directory):
    chain = grow(opened(directory), [100, 100, 100, 1000])
    reader = ChainReader(directory, SEGMENT, files=Files())
    assert [u.end for u in reader.read_from(0, 1)] == [100]
    assert [u.end for u in reader.read_from(100, 200)] == [200, 300]
    assert [u.end for u in reader.read_from(300, 500)] == [1300]
    assert [u.end for u in reader.read_from(100, 299)] == [200, 300]
    assert chain.last.end == 1300


def test_a_reader_finds_its_place_again_wherever_it_is_asked(directory):
    grow(opened(directory), [64] * 200)
    reader = ChainReader(directory, SEGMENT, files=Files())
    for offset in (64 * 150, 0, 64 * 63, 64 * 64, 64 * 199):
        assert reader.read_from(offset, 64)[0].start == offset
    assert reader.read_from(64 * 150 + 1, 64) == []
    assert reader.read_from(1 << 30, 64) == []


def test_a_reader_sees_what_replaced_a_cut_tail(directory):
    chain = grow(opened(directory), [100] * 5, epoch=1)
    reader = ChainReader(directory, SEGMENT, files=Files())
    assert len(reader.read_from(0, 1 << 20)) == 5
    chain.truncate_to(200)
    grow(chain, [150], epoch=2)
    assert [(u.end, u.epoch) for u in reader.read_from(200, 1 << 20)] == [(350, 2)]
    assert reader.read_from(350, 1 << 20) == []


class FailsOnce(Files):
    """The real files, but one call of a reader fails."""

    def __init__(self):
        super().__init__()
        #: so many calls go well before it
        self.calls_left = 1 << 30

    def _count(self):
        self.calls_left -= 1
        if self.calls_left == -1:
            raise OSError(errno.EMFILE, "Too many open files")

    def open_file(self, path, **options):
        self._count()
        return super().open_file(path, **options)

    def size(self, fd):
        self._count()
        return super().size(fd)

    def pread(self, fd, nbytes, offset):
        self._count()
        return super().pread(fd, nbytes, offset)


@pytest.mark.parametrize("offset", [0, 4 * 100, 4 * 400])
def test_a_reader_keeps_its_place_when_a_call_fails(directory, offset):
    grow(opened(directory), [4] * 1000)
    calls = 0
    while True:
        files = FailsOnce()
        files.calls_left = calls
        reader = ChainReader(directory, SEGMENT, files=files)
        try:
            reader.read_from(offset, 1 << 20)
        except OSError:
            units = reader.read_from(offset, 1 << 20)
            assert [u.end for u in units] == list(range(offset + 4, 4001, 4))
            calls += 1
        else:
            break
        finally:
            reader.close()
    assert calls > 3


# --- crashes --------------------------------------------------------------------------------------


def test_after_every_crash_a_prefix_is_left_and_synced_segments_are_whole():
    disk = SimulatedDisk(block_bytes=512)
    disk.make_dirs("/s/chain")
    directory = Path("/s/chain")
    chain = grow(opened(directory, disk), [64] * 100)
    chain.sync()
    disk.note(100)
    grow(chain, [64] * 28)
    chain.truncate_to(64 * 110)
    grow(chain, [32] * 4, epoch=2)
    grow_at_once(chain, [16] * 6, epoch=2)
    count = 0
    for state in (*disk.crash_states(limit_per_point=16), *disk.kill_states()):
        count += 1
        state.make_dirs(directory)
        again = opened(directory, state)
        units = again.units(0, 1 << 40)
        assert [u.start for u in units[1:]] == [u.end for u in units[:-1]]
        assert all(u.previous == before.value for before, u in zip(units, units[1:], strict=False))
        assert len(units) >= sum(state.notes)
        grow(again, [16])
        assert opened(directory, state).last == again.last
    assert count > 200


def test_a_full_disk_refuses_the_unit_and_the_chain_stays_usable():
    disk = SimulatedDisk()
    disk.make_dirs("/s/chain")
    chain = grow(opened(Path("/s/chain"), disk), [100])
    disk.fail("pwrite", error=errno.EIO)
    with pytest.raises(OSError):
        grow(chain, [100])
    assert chain.last.end == 100
    grow(chain, [50])
    assert opened(Path("/s/chain"), disk).last.end == 150


class HalfWriting(Files):
    """The next write stores so many of its bytes, and fails."""

    def __init__(self, written: int) -> None:
        super().__init__()
        self.written: int | None = written

    def pwrite(self, fd, data, offset):
        if self.written is None:
            return super().pwrite(fd, data, offset)
        written, self.written = self.written, None
        super().pwrite(fd, bytes(data)[:written], offset)
        raise OSError(errno.EIO, "the rest was not written")


@pytest.mark.parametrize("written", [0, 1, 40, 41, 80, 119])
def test_of_units_whose_write_fails_none_is_found(directory, written):
    grow(opened(directory), [100]).close()
    chain = opened(directory, HalfWriting(written))
    with pytest.raises(OSError, match="the rest"):
        grow_at_once(chain, [100] * 3)
    assert chain.last.end == 100
    # The unit is the first one of the failed write, whose second one would follow it in the file.
    grow(chain, [100])
    chain.close()
    assert [unit.end for unit in opened(directory).units(0, 1 << 40)] == [100, 200]
