"""The histogram of latencies: as exact as it says, beside numpy's own percentiles."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from raymq.cluster.bench.histogram import PERCENTILES, SLOTS, VALUE_MAX, Histogram


def sample(seed: int, count: int = 100_000) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(8, 2, count).astype(np.int64)


@pytest.mark.parametrize("count", [1, 2, 9, 997, 100_003])
def test_percentiles_are_numpys_to_three_digits(count: int) -> None:
    values, histogram = sample(1, count), Histogram()
    histogram.record(values)
    for percent, found in zip(PERCENTILES, histogram.percentiles(), strict=True):
        exact = np.percentile(values, percent, method="inverted_cdf")
        assert exact <= found <= exact * 1.001 + 1


def test_a_percentage_of_a_round_number_is_not_rounded_up() -> None:
    histogram = Histogram()
    histogram.record(np.arange(1, 1001))
    assert histogram.percentiles((99.9, 99.0, 50.0)) == [999, 990, 500]


def test_small_values_max_mean_and_count_are_exact() -> None:
    histogram = Histogram()
    histogram.record(np.arange(2048))
    assert [histogram.percentile(p) for p in (25, 50, 100)] == [511, 1023, 2047]
    histogram.record([1_234_567])
    assert (histogram.max, histogram.count) == (1_234_567, 2049)
    assert histogram.mean == (2047 * 1024 + 1_234_567) / 2049


def test_merging_is_recording_everything_in_one() -> None:
    whole, both = Histogram(), Histogram()
    for seed in range(4):
        part = Histogram()
        part.record(sample(seed))
        whole.record(sample(seed))
        both.merge(part)
    assert both.percentiles() == whole.percentiles()
    assert (both.count, both.sum, both.max) == (whole.count, whole.sum, whole.max)


def test_a_value_recorded_many_times_is_that_many_values() -> None:
    once, often = Histogram(), Histogram()
    once.record_repeated(70_000, 500)
    often.record([70_000] * 500)
    assert once.percentiles() == often.percentiles()
    assert (once.count, once.sum, once.max) == (often.count, often.sum, often.max)


def test_values_beyond_the_range_count_as_its_ends() -> None:
    histogram = Histogram()
    histogram.record([-5, VALUE_MAX + 10])
    histogram.record_repeated(VALUE_MAX + 10, 1)
    assert histogram.count == 3
    assert (histogram.percentile(1), histogram.max) == (0, VALUE_MAX)


def test_it_travels_small_and_whole() -> None:
    histogram = Histogram()
    histogram.record(sample(5, 1000))
    packed = pickle.dumps(histogram)
    assert len(packed) < SLOTS
    copy = pickle.loads(packed)
    copy.record([1])
    assert copy.count == histogram.count + 1
    assert copy.percentiles((50.0,)) == histogram.percentiles((50.0,))


def test_the_curve_rises_to_the_largest_value() -> None:
    values, histogram = sample(6), Histogram()
    histogram.record(values)
    curve = histogram.curve()
    assert curve == sorted(curve)
    assert curve[-1] == (100.0, values.max())
    assert Histogram().curve() == []
