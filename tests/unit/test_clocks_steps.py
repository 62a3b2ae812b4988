"""A clock that is stepped: noticed from few samples, and then fitted behind the step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from clock_cases import BEGIN_NS, SPAN_NS, Case, fitted
from hypothesis import given, settings
from hypothesis import strategies as st

from pytools.estimators.congested import tempered
from pytools.estimators.windows import MISSING

MS = 1_000_000


@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1), st.sampled_from([-1, 1]), st.floats(0.05, 0.97), st.booleans(), st.booleans())
def test_a_step_of_10_ms_is_noticed_and_left_behind(
    seed: int, sign: int, step_at: float, busy: bool, with_prior: bool
) -> None:
    before = Case(empty_share=0.05 if busy else 1.0)
    prior = fitted(before.window(seed + 1)) if with_prior else None
    case = replace(before, step_ns=sign * 10 * MS, step_at=step_at)
    fit = fitted(case.window(seed), prior)
    assert fit.stepped
    assert abs(fit.offset_ns - (before.truth(fit.epoch_ns) + case.step_ns)) < (20_000 if busy else 50)
    assert fit.kept + fit.rejected == 2 * case.pairs  # pairs of the old time were counted as well


def test_two_pairs_behind_the_step_are_enough() -> None:
    case = Case(empty_share=0.3, step_ns=10 * MS, step_at=0.5)
    forward_at, forward, reverse_at, reverse = case.window(2)
    moment = BEGIN_NS + SPAN_NS // 2
    first = np.flatnonzero(forward_at[:, 0] < moment), np.flatnonzero(reverse_at[:, 0] < moment)
    few = [np.arange(len(rows) + 2) for rows in first]
    fit = fitted((forward_at[few[0]], forward[few[0]], reverse_at[few[1]], reverse[few[1]]))
    assert fit.stepped
    assert fit.offset_ns == pytest.approx(case.truth(moment), abs=20_000)


@pytest.mark.parametrize("pairs_survive", [True, False])
def test_a_single_odd_probe_is_no_step(pairs_survive: bool) -> None:
    case = Case(empty_share=0.3)
    forward_at, forward, reverse_at, reverse = case.window(2)
    forward[200, 0] -= 10 * MS
    if not pairs_survive:
        forward[:, 1] = reverse[:, 1] = MISSING
    fit = fitted((forward_at, forward, reverse_at, reverse))
    assert not fit.stepped
    assert abs(fit.offset_ns - case.truth(fit.epoch_ns)) < 30
    assert fit.hard_low_ns <= case.truth(fit.epoch_ns) <= fit.hard_high_ns


@pytest.mark.parametrize("step_ns", [-3_000, 3_000])
def test_a_step_smaller_than_the_delays_is_noticed_against_a_prior(step_ns: int) -> None:
    before = Case(empty_share=0.3)
    prior = fitted(before.window(1))
    fit = fitted(replace(before, step_ns=step_ns).window(2), prior)
    assert fit.stepped
    assert fit.offset_ns == pytest.approx(before.truth(fit.epoch_ns) + step_ns, abs=60)


@pytest.mark.parametrize("step_ns", [-10 * MS, 10 * MS, 2_500, -40_000_000_000])
def test_a_step_between_two_windows_is_noticed(step_ns: int) -> None:
    case = Case(empty_share=0.3)
    prior = fitted(case.window(1))
    moved = replace(case, offset_ns=case.offset_ns + step_ns)
    fit = fitted(moved.window(2), prior)
    assert fit.stepped
    assert abs(fit.offset_ns - moved.truth(fit.epoch_ns)) < 40


@pytest.mark.parametrize("waits_ns", [-20_000, -6_000, 6_000, 20_000])
def test_a_queue_that_stands_for_two_windows_is_no_step(waits_ns: int) -> None:
    """Its round trip does not grow from the first of them to the second, and the line is that of before the queue."""
    case = Case(empty_share=0.3)
    line = prior = fitted(case.window(1))
    for seed in (2, 3, 4):
        window = case.window(seed)
        window[1 if waits_ns > 0 else 3][:] += abs(waits_ns)
        fit = fitted(window, line)
        assert not fit.stepped
        line = tempered(fit, line, prior.round_trip_min_ns, 0.1)
        assert abs(line.offset_ns - case.truth(line.epoch_ns)) < 60


@pytest.mark.parametrize("step_ns", [-10 * MS, 10 * MS])
def test_a_step_behind_a_standing_queue_is_noticed(step_ns: int) -> None:
    case = Case(empty_share=0.3)
    prior = fitted(case.window(1))
    window = case.window(2)
    window[1][:] += 6_000
    line = tempered(fitted(window, prior), prior, prior.round_trip_min_ns, 0.1)
    moved = replace(case, offset_ns=case.offset_ns + step_ns)
    for queue_ns in (0, 6_000):
        window = moved.window(3)
        window[1][:] += queue_ns
        assert fitted(window, line).stepped


@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1), st.floats(0, 3_000))
def test_load_that_comes_and_goes_is_no_step(seed: int, standing_ns: float) -> None:
    case = Case(empty_share=0.3)
    prior = fitted(case.window(seed))
    forward_at, forward, reverse_at, reverse = case.window(seed + 1)
    forward = forward + (forward_at > BEGIN_NS + SPAN_NS // 2) * int(standing_ns)
    assert not fitted((forward_at, forward, reverse_at, reverse), prior).stepped


def test_a_direction_that_became_longer_for_good_is_no_step() -> None:
    case = Case(empty_share=0.3)
    prior = fitted(case.window(1))
    assert not fitted(replace(case, forward_delay_ns=case.forward_delay_ns + 3_000).window(2), prior).stepped
