"""Which bytes of another replica may replace damaged ones."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import pytest

from raymq.store.base.checksum import crc32c
from raymq.store.base.files import Files
from raymq.store.log.chain import ChainUnit, unpack_units
from raymq.store.log.mending.chain_window import read_units, read_window
from raymq.store.log.mending.fitting import ChainWindow, SoundBytes, are_linked, covers, misfit
from tests.support.damaged_store import SEGMENT

LOG = b"".join(b"record %02d" % number for number in range(12))


def chain_of(lengths: list[int], *, epoch: int = 3, previous: int = 7) -> list[ChainUnit]:
    """Linked units of LOG, from its beginning on."""
    units: list[ChainUnit] = []
    start = 0
    for end in accumulate(lengths):
        unit = ChainUnit(start, end, epoch, crc32c(LOG[start:end]), previous)
        units.append(unit)
        start, previous = end, unit.value
    return units


UNITS = chain_of([27, 27, 27])


def found(units: list[ChainUnit], start: int = 27, stop: int = 54) -> SoundBytes:
    return SoundBytes(start, LOG[start:stop], units)


def test_the_same_unit_of_another_replica_fits() -> None:
    assert misfit(UNITS[1], found(UNITS[1:2])) is None


def test_units_with_other_edges_fit_if_the_bytes_are_the_same() -> None:
    assert misfit(UNITS[1], found(chain_of([18, 18, 36]))) is None
    assert misfit(UNITS[1], found(chain_of([81]))) is None


def test_bytes_of_another_crc_do_not_fit() -> None:
    other = found(UNITS[1:2])._replace(data=b"x" * 27)
    assert "differ" in str(misfit(UNITS[1], other))


def test_bytes_of_another_epoch_do_not_fit() -> None:
    assert "epoch 4 there, not of 3" in str(
        misfit(UNITS[1], found(chain_of([27, 27], epoch=4)[1:]))
    )


@pytest.mark.parametrize(("start", "stop"), [(26, 54), (27, 53), (27, 55), (0, 27)])
def test_another_range_does_not_fit(start: int, stop: int) -> None:
    assert "arrived" in str(misfit(UNITS[1], found(UNITS, start, stop)))


def test_bytes_that_the_units_of_the_other_replica_do_not_cover_do_not_fit() -> None:
    assert "cover" in str(misfit(UNITS[1], found([])))
    assert "cover" in str(misfit(UNITS[1], found(UNITS[:1])))
    broken = [UNITS[0], UNITS[1]._replace(previous=1)]
    assert "cover" in str(misfit(UNITS[1], found(broken)))


def test_a_unit_is_proved_by_the_chain_values_around_it() -> None:
    assert ChainWindow(UNITS[0], UNITS[1:2], UNITS[2]).is_linked
    assert ChainWindow(None, UNITS[:1], UNITS[1]).is_linked
    assert ChainWindow(UNITS[1], UNITS[2:], None).is_linked
    assert not ChainWindow(None, [], None).is_linked
    for field in ("start", "end", "epoch", "crc", "previous"):
        rotten = UNITS[1]._replace(**{field: getattr(UNITS[1], field) ^ 1})
        assert not ChainWindow(UNITS[0], [rotten], UNITS[2]).is_linked, field


def test_units_cover_a_range_from_end_to_end() -> None:
    assert are_linked(UNITS)
    assert covers(UNITS, 0, 81)
    assert covers(UNITS, 5, 70)
    assert not covers(UNITS, 0, 82)
    assert not covers(UNITS[1:], 26, 81)


def test_a_window_has_the_units_of_a_range_and_their_neighbours_in_any_file(own: Path) -> None:
    chain = own / "raymq" / "chain"
    units = [u for file in sorted(chain.iterdir()) for u in unpack_units(file.read_bytes())]

    def window(start: int, stop: int) -> ChainWindow:
        return read_window(chain, SEGMENT, start, stop, files=Files())

    for at, unit in enumerate(units):
        before = units[at - 1] if at else None
        after = units[at + 1] if at + 1 < len(units) else None
        expected = ChainWindow(before, [unit], after)
        assert window(unit.start, unit.end) == expected
        assert window(unit.start, unit.start + 1) == expected
        assert window(unit.end - 1, unit.end) == expected
        assert expected.is_linked
    first, second = units[3:5]
    assert window(first.end - 1, second.start + 1).units == [first, second]
    assert window(units[-1].end, units[-1].end + 5).units == []
    with pytest.raises(FileNotFoundError):
        window(100 * SEGMENT, 100 * SEGMENT + 1)
    assert read_units(chain / "nothing", files=Files()) == []
