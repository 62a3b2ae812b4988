"""Windows over arrays, judged by slow and obvious code over lists."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pytools.estimators.windows import (
    MISSING,
    CountHistory,
    Samples,
    SlidingMinimum,
    nearest_rank,
    occurrence,
    power_of_two,
)

ROWS = 3


@given(st.lists(st.integers(0, 4), max_size=40))
def test_occurrence_counts_equal_ones_before(rows: list[int]) -> None:
    seen: Counter[int] = Counter()
    expected = []
    for row in rows:
        expected.append(seen[row])
        seen[row] += 1
    assert occurrence(np.array(rows, np.intp)).tolist() == expected


@given(st.floats(0.5, 1e6))
def test_power_of_two_is_the_next_one(least: float) -> None:
    power = power_of_two(least)
    assert power.bit_count() == 1
    assert power >= least
    assert power == 1 or power / 2 < least


@given(st.lists(st.integers(-(10**12), 10**15), min_size=1, max_size=60), st.sampled_from([1, 50, 90, 99, 100]))
def test_percentiles_are_numpys_inverted_distribution(values: list[int], percent: int) -> None:
    ordered = np.sort(np.array([values]))
    (picked,) = nearest_rank(ordered, np.array([len(values)]), percent)
    assert picked == np.percentile(np.array(values), percent, method="inverted_cdf")
    assert picked in values


def test_a_row_without_samples_has_no_percentile() -> None:
    assert nearest_rank(np.zeros((1, 4), np.int64), np.array([0]), 50)[0] == MISSING


batches = st.lists(st.lists(st.tuples(st.integers(0, ROWS - 1), st.integers(-1000, 1000)), max_size=6), max_size=30)


@given(batches, st.integers(0, 30), st.integers(1, 20))
def test_samples_since_are_the_newest_ones_in_the_window(
    given_batches: list[list[tuple[int, int]]], begin: int, at_most: int
) -> None:
    samples, plain = Samples(16), [[] for _ in range(ROWS)]
    samples.grow(ROWS)
    for now, batch in enumerate(given_batches):
        rows = np.array([row for row, _ in batch], np.intp)
        values = np.array([value for _, value in batch], np.int64)
        samples.add(rows, values, np.full(len(batch), now))
        for row, value in batch:
            plain[row].append((now, value))
    width = min(16, power_of_two(at_most))
    ordered, counts, last, _ = samples.since(np.arange(ROWS), begin, at_most)
    for row in range(ROWS):
        inside = [value for now, value in plain[row][-width:] if now >= begin]
        assert counts[row] == len(inside)
        assert ordered[row, : len(inside)].tolist() == sorted(inside)
        assert last[row] == (inside[-1] if inside else MISSING)


def test_samples_survive_growth() -> None:
    samples = Samples(4)
    samples.grow(1)
    samples.add(np.array([0]), np.array([5]), np.array([1]))
    samples.grow(3)
    samples.add(np.array([2, 0]), np.array([7, 6]), np.array([2, 2]))
    ordered, counts, *_ = samples.since(np.arange(3), 0, 4)
    assert counts.tolist() == [2, 0, 1]
    assert ordered[0, :2].tolist() == [5, 6]


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, ROWS - 1), st.integers(-100, 100)), min_size=1, max_size=60),
    st.integers(0, 400),
)
def test_a_sliding_minimum_reaches_back_one_window_and_at_most_one_bucket_more(
    steps: list[tuple[int, int, int]], idle: int
) -> None:
    window, bucket = 320, 10
    minimum, now, plain = SlidingMinimum(window), 1000, []
    minimum.grow(ROWS)
    for step, row, value in steps:
        now += step
        plain.append((now, row, value))
        minimum.add(np.array([row]), np.array([value]), np.array([now]))
    now += idle
    minima, times = minimum.at(np.arange(ROWS), now)
    for row in range(ROWS):
        must = [value for when, of, value in plain if of == row and when >= now - window]
        may = [value for when, of, value in plain if of == row and when >= now - window - bucket]
        if minima[row] == MISSING:
            assert not must
            continue
        assert min(may) <= minima[row]
        if must:
            assert minima[row] <= min(must)
        assert (int(times[row]), row, int(minima[row])) in plain


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-100, 100), st.integers(0, 300)), min_size=1, max_size=20))
def test_a_batch_of_samples_counts_as_much_as_one_by_one(batch: list[tuple[int, int, int]]) -> None:
    batch.sort(key=lambda sample: sample[2])  # within a row, times do not go back by more than a window
    together, alone = SlidingMinimum(320), SlidingMinimum(320)
    together.grow(4)
    alone.grow(4)
    rows, values, times = (np.array(column, np.int64) for column in zip(*batch, strict=True))
    together.add(rows, values, times)
    for row, value, when in batch:
        alone.add(np.array([row]), np.array([value]), np.array([when]))
    minima, _ = together.at(np.arange(4), 300)
    expected, _ = alone.at(np.arange(4), 300)
    assert minima.tolist() == expected.tolist()


def test_counters_are_told_by_how_much_they_grew_in_the_window() -> None:
    history = CountHistory(100)
    assert history.growth(0, np.array([[1], [2]])).tolist() == [[1], [2]]
    assert history.growth(60, np.array([[4], [2]])).tolist() == [[3], [0]]
    assert history.growth(100, np.array([[9], [2]])).tolist() == [[8], [0]], "since 0"
    assert history.growth(160, np.array([[9], [3]])).tolist() == [[5], [1]], "since 60"
    assert history.growth(210, np.array([[9], [3], [8]])).tolist() == [[0], [1], [8]], "since 100, one row more"
