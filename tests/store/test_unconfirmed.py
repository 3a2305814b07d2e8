"""Readers see a value once the record that gives it is confirmed."""

from __future__ import annotations

from raymq.store.state.unconfirmed import REPLACED_MAX, ReplacedValues


def test_a_value_is_seen_from_the_end_of_its_record_on() -> None:
    replaced: ReplacedValues[str, int] = ReplacedValues()
    replaced.note("k", None, 100, 0)
    replaced.note("k", 1, 200, 0)
    seen = [replaced.confirmed_value("k", 2, confirmed) for confirmed in (0, 99, 100, 199, 200)]
    assert seen == [None, None, 1, 1, 2]
    assert replaced.confirmed_value("other", 7, 0) == 7


def test_of_many_unconfirmed_values_the_last_are_seen_late_and_none_is_seen_early() -> None:
    replaced: ReplacedValues[str, int] = ReplacedValues()
    ends = range(1, 3 * REPLACED_MAX)
    for end in ends:
        replaced.note("k", end - 1, end, 0)
    for confirmed in ends:
        seen = replaced.confirmed_value("k", ends[-1], confirmed)
        assert seen is not None
        assert seen <= confirmed
    assert replaced.confirmed_value("k", ends[-1], ends[-1]) == ends[-1]
    assert replaced.confirmed_value("k", ends[-1], REPLACED_MAX - 2) == REPLACED_MAX - 2


def test_values_that_are_confirmed_are_not_kept() -> None:
    replaced: ReplacedValues[str, int] = ReplacedValues()
    for end in range(1, 10 * REPLACED_MAX):
        replaced.note("k", end - 1, end, end - 1)
    assert len(replaced._replaced["k"]) == 1
