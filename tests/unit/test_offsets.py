"""A peer's clock as a line that ages: what it says later, and how its bounds and its state grow old."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytools.estimators.offsets import FREE_BOUND_NS, FREE_PPM, HOLDOVER_AGE_NS, SIGMAS, WANDER_PPB_PER_S, Offset

SECOND_NS = 10**9
EPOCH_NS = 10**15
ORDER = ("synchronised", "holdover", "free_running")
LINE = Offset(EPOCH_NS, 300_000_000, 25_000.0, 8.0, 5.0, 250, 1_900)

ages = st.integers(0, 600 * SECOND_NS)
lines = st.builds(
    Offset,
    epoch_ns=st.integers(-(10**15), 10**15),
    offset_ns=st.integers(-(10**15), 10**15),
    drift_ppb=st.floats(-120_000, 120_000),
    sigma_ns=st.floats(0, 1_000),
    drift_sigma_ppb=st.floats(0, 1_000),
    bound_ns=st.integers(0, 10_000),
    hard_bound_ns=st.integers(0, 100_000),
)


@given(lines, st.integers(-(10**12), 10**12))
def test_the_line_is_exact_to_a_nanosecond_however_far_the_clocks_are_apart(line: Offset, since_ns: int) -> None:
    (told,) = line.at(np.array([line.epoch_ns + since_ns]))
    exact = line.offset_ns + since_ns * Fraction(line.drift_ppb) / SECOND_NS
    assert abs(int(told) - exact) <= 1


@given(lines, st.integers(-(10**15), 10**15), ages)
def test_shifting_our_clock_shifts_the_line_and_nothing_else(line: Offset, by_ns: int, age_ns: int) -> None:
    now = np.array([line.epoch_ns + age_ns])
    moved = replace(line, epoch_ns=line.epoch_ns + by_ns)
    assert moved.at(now + by_ns).tolist() == line.at(now).tolist()
    older = line.aged(line.epoch_ns + age_ns)
    assert moved.aged(moved.epoch_ns + age_ns) == replace(older, epoch_ns=moved.epoch_ns)


@given(lines, ages, ages)
def test_no_bound_ever_shrinks_and_no_state_gets_better_with_age(line: Offset, one_ns: int, other_ns: int) -> None:
    young, old = (line.aged(line.epoch_ns + age) for age in sorted((one_ns, other_ns)))
    assert line.bound_ns <= young.bound_ns <= old.bound_ns
    assert line.hard_bound_ns <= young.hard_bound_ns <= old.hard_bound_ns
    assert line.sigma_ns <= young.sigma_ns <= old.sigma_ns
    assert ORDER.index(young.state) <= ORDER.index(old.state)
    for each in (young, old):
        assert (each.epoch_ns, each.offset_ns, each.drift_ppb) == (line.epoch_ns, line.offset_ns, line.drift_ppb)


@given(lines, ages, st.floats(-1, 1), st.floats(-1, 1), st.floats(-1, 1))
def test_the_bound_covers_a_clock_that_does_what_is_allowed_to_it(
    line: Offset, age_ns: int, error: float, drift_error: float, wander: float
) -> None:
    age_s = age_ns / SECOND_NS
    true = line.offset_ns + Fraction(error * line.bound_ns) + age_ns * Fraction(line.drift_ppb) / SECOND_NS
    true += Fraction(drift_error * SIGMAS * line.drift_sigma_ppb * age_s)
    true += Fraction(wander * WANDER_PPB_PER_S * age_s * age_s / 2)
    now = line.epoch_ns + age_ns
    (told,) = line.at(np.array([now]))
    assert abs(int(told) - true) <= line.aged(now).bound_ns + 1


def test_a_bound_is_no_wider_than_it_must_be() -> None:
    aged = LINE.aged(EPOCH_NS + 2 * SECOND_NS)
    assert aged.bound_ns == 250 + SIGMAS * 5.0 * 2 + WANDER_PPB_PER_S * 2 * 2 / 2
    assert aged.hard_bound_ns == np.ceil(1_900 + (FREE_PPM * 1_000 + abs(LINE.drift_ppb)) * 2)
    assert aged.sigma_ns == pytest.approx(np.hypot(8.0, 10.0))


@given(lines, st.integers(0, 10**15))
def test_before_its_epoch_a_line_is_as_good_as_at_it(line: Offset, before_ns: int) -> None:
    """The reference solves for a moment that has not come to every host yet."""
    assert line.aged(line.epoch_ns - before_ns) == line.aged(line.epoch_ns)
    assert line.aged(line.epoch_ns).bound_ns == line.bound_ns


def test_a_line_is_synchronised_then_held_over_then_nothing() -> None:
    seen = [LINE.aged(EPOCH_NS + age_s * SECOND_NS).state for age_s in range(1_000)]
    assert seen == sorted(seen, key=ORDER.index), "each state once, in this order"
    assert set(seen) == set(ORDER)
    assert LINE.aged(EPOCH_NS + HOLDOVER_AGE_NS).state == "synchronised"
    assert LINE.aged(EPOCH_NS + HOLDOVER_AGE_NS + 1_000).state == "holdover"
    last = max(age_s for age_s, state in enumerate(seen) if state == "holdover")
    assert LINE.aged(EPOCH_NS + last * SECOND_NS).bound_ns <= FREE_BOUND_NS
    assert LINE.aged(EPOCH_NS + (last + 1) * SECOND_NS).bound_ns > FREE_BOUND_NS


def test_a_fresh_line_that_says_nothing_is_free_running() -> None:
    assert replace(LINE, bound_ns=FREE_BOUND_NS).aged(EPOCH_NS).state == "synchronised"
    assert replace(LINE, bound_ns=FREE_BOUND_NS + 1).aged(EPOCH_NS).state == "free_running"
