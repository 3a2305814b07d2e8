"""The records LEASE and SETTLE as bytes: round trips, and bytes that no leader writes."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymq.store.base.errors import Rejected
from raymq.store.groups.leases.entries import (
    EndEntry,
    ForgetEntry,
    HeldEntry,
    LeasedPart,
    LeaseEntry,
    LengthEntry,
    NumberEntry,
    PauseEntry,
    QueueEntry,
    ResetEntry,
    SessionEntry,
    Settled,
    SettleEntry,
    SettleOutcome,
    TimeEntry,
    TrimEntry,
)
from raymq.store.groups.leases.lease_table import LeaseTable
from raymq.store.groups.leases.offsets import (
    NO_OFFSETS,
    PACKED_MAX,
    pack_column,
    pack_offsets,
    read_column,
    read_offsets,
)
from raymq.store.groups.leases.packing import pack, pack_checked, unpack
from raymq.store.groups.leases.pauses import PAUSES
from raymq.store.groups.leases.reader import PackedReader

numbers = st.integers(min_value=0, max_value=1 << 40)
small = st.integers(min_value=0, max_value=(1 << 32) - 1)
keys = st.tuples(st.sampled_from(["t", "orders", "%RETRY%g", "テスト"]), st.integers(0, 1 << 20))
sessions = st.binary(max_size=20)


@st.composite
def columns(draw, max_size=60):
    first = draw(st.integers(0, 1 << 40))
    gaps = draw(st.lists(st.integers(1, 300), max_size=max_size))
    return first + np.cumsum(np.array(gaps, dtype=np.int64))


@st.composite
def parts(draw):
    taken, filtered, passed, before = (draw(columns()) for _ in range(4))
    return LeasedPart(draw(keys), taken, filtered, passed, before)


settled = st.builds(Settled, st.sampled_from(SettleOutcome), numbers, keys, small, columns())


@st.composite
def queues(draw):
    low = draw(numbers)
    stop = low + draw(st.integers(0, 50))
    count = stop - low
    is_settled = np.array(draw(st.lists(st.booleans(), min_size=count, max_size=count)), dtype=bool)
    offsets = np.arange(low, stop)
    left = count - int(is_settled.sum())
    made = [
        np.array(draw(st.lists(numbers, min_size=left, max_size=left)), dtype=np.int64)
        for _ in range(3)
    ]
    return QueueEntry(draw(keys), low, low, stop, offsets[is_settled], *made)


entries = st.one_of(
    st.builds(LeaseEntry, numbers, sessions, numbers, small, st.lists(parts(), max_size=3)),
    st.builds(SettleEntry, sessions, numbers, st.lists(settled, max_size=4)),
    st.builds(ResetEntry, keys, st.integers(-1, 1 << 40)),
    st.builds(TrimEntry, keys, numbers),
    st.builds(LengthEntry, numbers, small),
    st.builds(ForgetEntry, st.lists(sessions, max_size=4)),
    st.just(EndEntry()),
    st.builds(TimeEntry, numbers),
    st.builds(PauseEntry, st.sampled_from(PAUSES)),
    st.builds(NumberEntry, numbers),
    st.builds(HeldEntry, numbers, sessions, small),
    st.builds(SessionEntry, sessions, numbers, numbers, numbers, st.lists(settled, max_size=3)),
    queues(),
)


def same(one: object, other: object) -> bool:
    """Whether two entries are equal, with their columns."""
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, (list, tuple)):
        assert isinstance(other, (list, tuple))
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(same(*each) for each in pairs)
    return one == other


@given(st.text(max_size=20), st.lists(entries, max_size=5))
def test_a_record_is_read_as_it_was_written(group, made):
    name, found = unpack(pack(group, made))
    assert name == group
    assert [type(each) for each in found] == [type(each) for each in made]
    assert all(map(same, found, made))


@given(st.lists(st.integers(0, 5_000), max_size=300), st.sampled_from([1, 2, 7, 900]))
def test_offsets_are_ranges_or_a_bitmap(values, step):
    offsets = np.unique(np.array(values, dtype=np.int64) // step * step)
    packed = pack_offsets(offsets)
    reader = PackedReader(packed)
    assert np.array_equal(read_offsets(reader), offsets)
    assert reader.is_done


@pytest.mark.parametrize(
    "values", [[0, 0, 2], [3000, 0, 0], [2, 1], [-1, 0], [0, 1 << 62], range(PACKED_MAX + 1)]
)
def test_offsets_that_could_not_be_read_are_not_packed(values):
    with pytest.raises(ValueError, match="ascend|column"):
        pack_offsets(np.array(values, dtype=np.int64))
    if len(values) > PACKED_MAX:
        with pytest.raises(ValueError, match="column"):
            pack_column(np.array(values))


@pytest.mark.parametrize(
    "entry",
    [
        TrimEntry(("t", 0), -1),
        TrimEntry(("t", -1), 1),
        LengthEntry(1, 1 << 32),
        ForgetEntry([b"x" * 256]),
        HeldEntry(-1, b"", 5),
        SettleEntry(b"", 1 << 63, []),
        ResetEntry(("x" * 70_000, 0), 1),
    ],
)
def test_an_entry_that_could_not_be_read_is_refused_before_it_is_appended(entry):
    with pytest.raises(Rejected, match="no record can say"):
        pack_checked("g", [entry])


def test_the_shorter_form_is_taken():
    assert len(pack_offsets(np.arange(1_000_000))) == 13
    assert len(pack_offsets(np.arange(0, 1_000, 2))) <= 13 + 125
    assert len(pack_offsets(np.array([5, 1 << 40]))) < 60


@pytest.mark.parametrize("values", [[], [7], [-3, 5], [0, 1 << 62], [-(1 << 62), 1 << 61], [9] * 5])
def test_a_column_is_as_narrow_as_its_numbers(values):
    column = np.array(values, dtype=np.int64)
    assert np.array_equal(read_column(PackedReader(pack_column(column)), len(values)), column)


@settings(max_examples=300)
@given(st.lists(entries, min_size=1, max_size=3), st.data())
def test_damaged_bytes_are_a_record_or_an_error(made, data):
    body = bytearray(pack("g", made))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(body) - 1))
        body[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(body)))
    for each in (bytes(body), bytes(body[:cut])):
        with contextlib.suppress(ValueError, LookupError):
            LeaseTable().apply_packed(each)


@given(st.binary(max_size=200))
def test_random_bytes_are_a_record_or_an_error(body):
    with contextlib.suppress(ValueError, LookupError):
        LeaseTable().apply_packed(body)


def test_a_record_of_a_newer_form_is_refused():
    body = bytearray(pack("g", [NumberEntry(3)]))
    body[0] = 9
    with pytest.raises(ValueError, match="form 9"):
        unpack(bytes(body))


def apply(*made: object) -> LeaseTable:
    table = LeaseTable()
    for entry in made:
        table.apply_packed(pack("g", [entry]))
    return table


def lease(number: int, offsets: list[int]) -> LeaseEntry:
    part = LeasedPart(("t", 0), np.array(offsets), NO_OFFSETS, NO_OFFSETS, NO_OFFSETS)
    return LeaseEntry(number, b"s", number, 1_000, [part])


def settle(outcome: SettleOutcome, number: int, offsets: list[int]) -> SettleEntry:
    return SettleEntry(b"s", 1, [Settled(outcome, number, ("t", 0), 0, np.array(offsets))])


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ([lease(1, [0])], "t"),
        ([ResetEntry(("t", 0), 0), lease(1, [1])], "leaves offsets out"),
        ([ResetEntry(("t", 0), 3), lease(1, [2])], "settled offsets"),
        ([ResetEntry(("t", 0), 0), settle(SettleOutcome.ACKED, 1, [0])], "does not hold"),
        (
            [ResetEntry(("t", 0), 0), lease(1, [0]), settle(SettleOutcome.ACKED, 2, [0])],
            "does not hold",
        ),
        (
            [ResetEntry(("t", 0), 0), lease(1, [0]), settle(SettleOutcome.REJECTED, 1, [0])],
            "outcome",
        ),
        ([TrimEntry(("t", 1), 5)], "t"),
    ],
)
def test_an_entry_that_no_leader_writes_is_an_error(made, message):
    with pytest.raises((ValueError, LookupError), match=message):
        apply(*made)
