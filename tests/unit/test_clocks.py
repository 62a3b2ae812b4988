"""Clocks of one edge: against a known truth, against other solvers, and what must not matter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from clock_cases import BEGIN_NS, SPAN_NS, Case, Window, fitted, swapped
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import linprog

from pytools.estimators.clocks import MOST_DRIFT_PPB, EdgeFit, fit_edge
from pytools.estimators.corridor import ceiling, corridor
from pytools.estimators.offsets import SIGMAS
from pytools.estimators.pairs import sift, with_singles
from pytools.estimators.windows import MISSING

DAY_NS = 86_400 * 10**9
seeds = st.integers(0, 2**32 - 1)
few = settings(max_examples=25)


def error(fit: EdgeFit, case: Case) -> float:
    return fit.offset_ns - case.truth(fit.epoch_ns)


# ---- against the truth ----


@few
@given(
    seeds,
    st.integers(-3 * DAY_NS, 3 * DAY_NS),
    st.floats(-100_000, 100_000),
    st.floats(1_000, 5_000_000),
    st.sampled_from([0.02, 0.1, 1.0]),
)
def test_the_truth_lies_within_every_bound(
    seed: int, offset_ns: int, drift_ppb: float, delay_ns: float, empty: float
) -> None:
    case = Case(offset_ns, drift_ppb, delay_ns, delay_ns, empty)
    fit = fitted(case.window(seed))
    assert abs(error(fit, case)) < 60
    assert abs(error(fit, case)) <= fit.bound_ns
    assert fit.bound_ns == pytest.approx(SIGMAS * fit.sigma_ns + 0.05 * fit.round_trip_min_ns, abs=2)
    assert fit.hard_low_ns <= case.truth(fit.epoch_ns) <= fit.hard_high_ns
    assert abs(fit.drift_ppb - drift_ppb) <= 8 * fit.drift_sigma_ppb
    assert abs(fit.round_trip_min_ns - 2 * delay_ns) < 150
    assert not fit.stepped


def test_errors_are_as_large_as_they_say() -> None:
    case = Case(empty_share=0.05)
    fits = [fitted(case.window(seed)) for seed in range(60)]
    scaled = np.array([error(fit, case) / fit.sigma_ns for fit in fits])
    assert 0.5 < scaled.std() < 1.7
    drifts = np.array([(fit.drift_ppb - case.drift_ppb) / fit.drift_sigma_ppb for fit in fits])
    assert 0.5 < drifts.std() < 1.8


def test_statistics_alone_bound_the_error_of_symmetric_paths() -> None:
    case = Case(empty_share=0.1)
    for seed in range(100):
        fit = fit_edge(*case.window(seed), tolerance_ns=150, asymmetry_share=0.0)
        assert fit is not None
        assert abs(error(fit, case)) <= fit.bound_ns < 60


def test_wrong_stamps_do_not_draw_the_line() -> None:
    case = Case(empty_share=0.3)
    for seed in range(10):
        window = case.window(seed)
        rng = np.random.default_rng(seed + 1000)
        wild = [
            window[place] + (rng.random(window[place].shape) < 0.02) * rng.integers(-500, 500, window[place].shape)
            for place in (1, 3)
        ]
        fit = fitted((window[0], wild[0], window[2], wild[1]))
        assert abs(error(fit, case)) < 25
        assert abs(fit.round_trip_min_ns - 10_000) < 60


def test_a_crowd_of_queued_probes_does_not_hide_the_unqueued_ones_below() -> None:
    rng = np.random.default_rng(7)
    case = Case(empty_share=1.0)
    forward_at, forward, reverse_at, reverse = case.window(1)
    crowd = np.repeat(rng.random(len(forward)) < 0.93, 2).reshape(-1, 2) * 320  # most wait for one packet, all alike
    fit = fitted((forward_at, forward + crowd, reverse_at, reverse))
    assert abs(error(fit, case)) < 20


def test_load_on_one_direction_moves_the_offset_little() -> None:
    busy, idle = Case(empty_share=0.02), Case(empty_share=1.0)
    for seed in range(5):
        forward_at, forward, _, _ = busy.window(seed)
        _, _, reverse_at, reverse = idle.window(seed)
        assert abs(error(fitted((forward_at, forward, reverse_at, reverse)), busy)) < 60


def test_unequal_delays_stay_within_the_hard_bound_only() -> None:
    case = Case(forward_delay_ns=205_000)
    fit = fitted(case.window(3))
    assert error(fit, case) == pytest.approx(100_000, abs=100)
    assert fit.hard_low_ns <= case.truth(fit.epoch_ns) <= fit.hard_high_ns
    assert error(fit, case) > fit.bound_ns  # the allowance is stated, not a fact


def test_the_line_goes_on_outside_its_window() -> None:
    case = Case()
    fit = fitted(case.window(5))
    later = BEGIN_NS + 3 * SPAN_NS
    assert abs(fit.at(later) - case.truth(later)) <= 5 * fit.sigma_at(later)
    assert fit.sigma_at(later) > fit.sigma_ns
    assert fit.at(fit.epoch_ns) == fit.offset_ns
    assert fit.sigma_at(fit.epoch_ns) == fit.sigma_ns


# ---- a prior ----


def test_a_prior_drift_helps_a_poor_window_and_leaves_the_offset_free() -> None:
    good = fitted(Case().window(1))
    errors = {True: [], False: []}
    for seed in range(15):
        poor = replace(Case(pairs=6, empty_share=0.6), offset_ns=Case().offset_ns + 400)  # moved by less than a step
        for known, prior in ((True, good), (False, None)):
            fit = fitted(poor.window(seed), prior)
            errors[known].append(abs(fit.drift_ppb - poor.drift_ppb))
            if known:
                assert abs(error(fit, poor)) < 150
    assert np.median(errors[True]) < np.median(errors[False]) / 3


def test_a_wrong_prior_drift_is_given_up() -> None:
    case = Case()
    prior = replace(fitted(case.window(1)), drift_ppb=case.drift_ppb + 400, drift_sigma_ppb=200.0)
    fit = fitted(case.window(2), prior)
    assert abs(fit.drift_ppb - case.drift_ppb) < 30


# ---- what must not matter ----


@few
@given(seeds, st.integers(-DAY_NS, DAY_NS), st.integers(-DAY_NS, DAY_NS))
def test_shifting_clocks_shifts_the_offset_by_as_much(seed: int, ours: int, theirs: int) -> None:
    forward_at, forward, reverse_at, reverse = Case(pairs=60).window(seed)
    fit = fitted((forward_at, forward, reverse_at, reverse))
    moved = fitted((forward_at + ours, forward + theirs - ours, reverse_at + ours, reverse - theirs + ours))
    assert moved.epoch_ns - fit.epoch_ns == ours
    assert abs(moved.offset_ns - fit.offset_ns - (theirs - ours)) <= 1
    assert moved.round_trip_min_ns == pytest.approx(fit.round_trip_min_ns, abs=1)
    assert (moved.kept, moved.rejected) == (fit.kept, fit.rejected)


@few
@given(seeds, st.sampled_from([0.05, 0.5]))
def test_swapping_the_ends_flips_the_sign(seed: int, empty: float) -> None:
    window = Case(empty_share=empty).window(seed)
    fit, back = fitted(window), fitted(swapped(window))
    ours = fit.epoch_ns
    theirs = ours + fit.offset_ns
    assert abs(back.at(theirs) + fit.at(ours)) <= 3
    rate = fit.drift_ppb * 1e-9
    assert back.drift_ppb == pytest.approx(-rate / (1 + rate) * 1e9, abs=2)


@few
@given(seeds)
def test_the_order_of_pairs_does_not_matter(seed: int) -> None:
    window = Case(pairs=80).window(seed)
    order = np.random.default_rng(seed).permutation(80)
    again = fitted((window[0][order], window[1][order], window[2][order[::-1]], window[3][order[::-1]]))
    fit = fitted(window)
    assert abs(again.offset_ns - fit.offset_ns) <= 1
    assert abs(again.epoch_ns - fit.epoch_ns) < 1_000


# ---- little or odd input ----


def lost(window: Window, mask: NDArray[np.bool_]) -> Window:
    forward_at, forward, reverse_at, reverse = window
    return forward_at, np.where(mask, MISSING, forward), np.where(mask, MISSING, reverse_at), reverse


def test_nothing_in_a_direction_gives_nothing() -> None:
    none = np.empty((0, 2), np.int64)
    forward_at, forward, reverse_at, reverse = Case().window(0)
    gone = np.full_like(forward, MISSING)
    assert fit_edge(none, none, none, none, tolerance_ns=150, asymmetry_share=0.1) is None
    assert fit_edge(forward_at, forward, none, none, tolerance_ns=150, asymmetry_share=0.1) is None
    assert fit_edge(forward_at, gone, reverse_at, reverse, tolerance_ns=150, asymmetry_share=0.1) is None


def test_lost_probes_are_left_out_and_halves_of_pairs_still_count() -> None:
    case = Case(empty_share=0.5)
    window = case.window(1)
    mask = np.zeros((case.pairs, 2), bool)
    mask[::2, 1] = True  # the second probe of every other pair
    fit = fitted(lost(window, mask))
    assert abs(error(fit, case)) < 30
    assert fit.kept + fit.rejected == case.pairs


@pytest.mark.parametrize("pairs", [1, 2, 3])
def test_very_few_pairs_give_a_wide_honest_answer(pairs: int) -> None:
    for seed in range(20):
        case = Case(pairs=pairs, empty_share=1.0, drift_ppb=0)
        fit = fitted(case.window(seed))
        assert fit.hard_low_ns <= case.truth(fit.epoch_ns) <= fit.hard_high_ns
        assert abs(error(fit, case)) <= fit.bound_ns + 1_500  # a third of the pairs were torn apart
        assert fit.drift_sigma_ppb > 5


def test_identical_probes_are_no_trouble() -> None:
    at = np.full((5, 2), 10**12)
    fit = fitted((at, np.full((5, 2), 1_000), at, np.full((5, 2), 1_000)))
    assert (fit.offset_ns, fit.round_trip_min_ns, fit.epoch_ns) == (0, 2_000, 10**12)


# ---- pairs ----


def test_pairs_are_kept_by_their_spacing() -> None:
    at = np.array([[0, 10], [100, 110], [200, 210], [300, MISSING], [MISSING, MISSING]])
    values = np.array([[1_000, 1_150], [1_000, 1_151], [2_000, 1_500], [900, MISSING], [MISSING, MISSING]])
    probes = sift(at, values, 150)
    assert (probes.kept, probes.rejected, probes.means) == (1, 2, 1)
    assert probes.difference_ns.tolist() == [1_075, 1_000, 1_500, 900]
    assert probes.at_ns.tolist() == [5, 100, 210, 300]


def test_a_pair_with_days_between_its_differences_does_not_overflow() -> None:
    at = np.array([[0, 10]])
    assert sift(at, np.array([[-(2**62), 2**62]]), 150).rejected == 1


# ---- the linear programme, against a general solver ----

times = st.lists(st.floats(-1, 1), min_size=2, max_size=30)


@settings(max_examples=60)
@given(times, times, seeds)
def test_the_corridor_is_the_linear_programmes(first: list[float], second: list[float], seed: int) -> None:
    rng = np.random.default_rng(seed)
    forward_s, reverse_s = np.array(first), np.array(second)
    forward = 5_000 + 30_000 * forward_s + rng.pareto(1.5, len(first)) * 300
    reverse = 4_000 - 30_000 * reverse_s + rng.pareto(1.5, len(second)) * 300
    found = corridor(forward_s, forward, reverse_s, reverse, -MOST_DRIFT_PPB, MOST_DRIFT_PPB, 0.0)
    rows = np.concatenate(
        [
            np.column_stack([np.ones(len(first)), np.zeros(len(first)), forward_s]),
            np.column_stack([np.zeros(len(second)), np.ones(len(second)), -reverse_s]),
        ]
    )
    solved = linprog(
        [-1, -1, 0],
        A_ub=rows,
        b_ub=np.concatenate([forward, reverse]),
        bounds=[(None, None), (None, None), (-MOST_DRIFT_PPB, MOST_DRIFT_PPB)],
        method="highs",
    )
    assert found.width_ns == pytest.approx(-solved.fun, abs=0.05)
    assert (forward - found.drift * forward_s >= found.forward_ns - 1e-6).all()
    assert (reverse + found.drift * reverse_s >= found.reverse_ns - 1e-6).all()


@settings(max_examples=60)
@given(times, seeds)
def test_the_ceiling_is_the_linear_programmes(given_times: list[float], seed: int) -> None:
    rng = np.random.default_rng(seed)
    times_s = np.array(given_times)
    values = rng.normal(0, 1_000, len(times_s))
    solved = linprog(
        [-1, 0],
        A_ub=np.column_stack([np.ones(len(times_s)), times_s]),
        b_ub=values,
        bounds=[(None, None), (-2_000, 2_000)],
        method="highs",
    )
    assert ceiling(times_s, values, -2_000, 2_000, 0.0) == pytest.approx(-solved.fun, abs=0.05)


# ---- few unqueued probes ----


def alone(window: Window) -> tuple[NDArray[np.int64], ...]:
    """The first probes of all pairs, as single probes."""
    return tuple(times[:, 0] for times in window)


def busy(case: Case, seed: int, empty_share: float) -> Window:
    """A window in which all but a few pairs wait, for some 20 us."""
    rng = np.random.default_rng(seed + 5_000)
    forward_at, forward, reverse_at, reverse = case.window(seed)
    shape = (2, case.pairs, 1)
    waits = (rng.pareto(1.5, shape) * 20_000 * (rng.random(shape) > empty_share)).astype(np.int64)
    return forward_at, forward + waits[0], reverse_at, reverse + waits[1]


def test_few_unqueued_probes_widen_sigma_and_bound() -> None:
    case, widths = Case(empty_share=1.0, pairs=60), []
    for share in (0.3, 0.03, 0.0):
        fits = [fit_edge(*busy(case, seed, share), tolerance_ns=150, asymmetry_share=0.0) for seed in range(60)]
        within = [abs(error(fit, case)) <= fit.bound_ns for fit in fits if fit]
        assert all(within), "the truth stays within the bound"
        widths.append(float(np.median([fit.bound_ns for fit in fits if fit])))
    assert widths[0] < 60
    assert 500 < widths[1] < widths[2]


def test_all_probes_are_fitted_where_no_pair_met_an_empty_queue() -> None:
    case, lucky = Case(empty_share=1.0, pairs=40), Case(empty_share=0.3, pairs=60)
    alone_ns, together_ns = [], []
    for seed in range(15):
        window, singles = busy(case, seed, 0.0), alone(lucky.window(1000 + seed))
        for known, errors in ((None, alone_ns), (singles, together_ns)):
            fit = fit_edge(*window, tolerance_ns=150, asymmetry_share=0.0, singles=known)
            assert fit is not None
            assert abs(error(fit, case)) <= fit.bound_ns
            errors.append(abs(error(fit, case)))
    assert max(together_ns) < 40
    assert np.median(together_ns) < np.median(alone_ns) / 5


def test_single_probes_change_nothing_where_pairs_tell_enough() -> None:
    window = Case(empty_share=0.3).window(1)
    late = tuple(times + 5_000 * place for times, place in zip(alone(window), (0, 1, 0, 1), strict=True))
    assert fit_edge(*window, tolerance_ns=150, asymmetry_share=0.1, singles=late) == fitted(window)


@few
@given(seeds, st.integers(-DAY_NS, DAY_NS), st.integers(-DAY_NS, DAY_NS))
def test_shifting_clocks_shifts_the_offset_from_single_probes_too(seed: int, ours: int, theirs: int) -> None:
    found = []
    for ahead, behind in ((0, 0), (ours, theirs)):
        moves = (ahead, behind - ahead, ahead, ahead - behind)
        poor, lucky = busy(Case(pairs=20), seed, 0.0), alone(Case(pairs=60).window(seed + 1))
        shifted = [tuple(times + move for times, move in zip(window, moves, strict=True)) for window in (poor, lucky)]
        fit = fit_edge(*shifted[0], tolerance_ns=150, asymmetry_share=0.1, singles=shifted[1])
        assert fit is not None
        found.append(fit)
    assert found[1].epoch_ns - found[0].epoch_ns == pytest.approx(ours, abs=1)
    assert abs(found[1].offset_ns - found[0].offset_ns - (theirs - ours)) <= 1


def in_a_row(
    case: Case, seed: int, windows: int, ours: int = 0, theirs: int = 0, wander: float = 20.0, step_ns: int = 0
) -> list[EdgeFit]:
    """Fits of consecutive windows, each the prior of the next.

    The clocks are `ours` and `theirs` ahead; the peer's is stepped before the last window.
    """
    fits: list[EdgeFit] = []
    moves = (ours, theirs - ours, ours, ours - theirs)
    for number in range(windows):
        passed_ns = number * SPAN_NS
        drifted_ns = round(case.drift_ppb * passed_ns * 1e-9)
        drifted_ns += step_ns * (number == windows - 1)
        since = (passed_ns, drifted_ns, passed_ns, -drifted_ns)
        window = busy(case, 100 * seed + number, 0.005)
        shown = [times + move + later for times, move, later in zip(window, moves, since, strict=True)]
        singles = [times[:, 0] for times in shown]
        prior = fits[-1] if fits else None
        fit = fit_edge(
            *shown,
            tolerance_ns=150,
            asymmetry_share=0.0,
            prior=prior,
            singles=(singles[0], singles[1], singles[2], singles[3]),
            wander_ppb_per_s=wander,
        )
        assert fit is not None
        fits.append(fit)
    return fits


def test_unqueued_probes_of_earlier_windows_count_where_a_window_has_few() -> None:
    case = Case(empty_share=1.0, pairs=200)
    fits = [in_a_row(case, seed, 4) for seed in range(20)]
    first, last = (np.array([abs(error(row[place], case)) for row in fits]) for place in (0, -1))
    assert np.median(last) < np.median(first) / 2
    assert all(abs(error(fit, case)) <= fit.bound_ns for row in fits for fit in row)
    assert np.median([row[-1].span_ns for row in fits]) > 1.5 * SPAN_NS


def test_a_fast_wander_leaves_earlier_probes_out() -> None:
    case = Case(empty_share=1.0, pairs=200)
    for wander, beyond in ((20.0, True), (1_000.0, False)):
        assert (in_a_row(case, 2, 3, wander=wander)[-1].span_ns > 1.5 * SPAN_NS) == beyond


def test_a_step_leaves_earlier_probes_out() -> None:
    case = Case(empty_share=1.0, pairs=200)
    before, after = in_a_row(case, 2, 3), in_a_row(case, 2, 3, step_ns=10_000_000)
    assert before[-1].span_ns > 1.5 * SPAN_NS
    assert after[-1].stepped
    assert after[-1].span_ns <= SPAN_NS
    assert after[-1].probes is not None
    assert min(int(probes.at_ns.min()) for probes in after[-1].probes) >= BEGIN_NS + 2 * SPAN_NS
    assert abs(error(after[-1], case) - 10_000_000) <= after[-1].bound_ns


@few
@given(seeds.map(lambda seed: seed % 1_000), st.integers(-DAY_NS, DAY_NS), st.integers(-DAY_NS, DAY_NS))
def test_shifting_clocks_shifts_the_offset_from_earlier_probes_too(seed: int, ours: int, theirs: int) -> None:
    case = Case(empty_share=1.0, pairs=60)
    fit, other = in_a_row(case, seed, 3)[-1], in_a_row(case, seed, 3, ours, theirs)[-1]
    assert other.epoch_ns - fit.epoch_ns == pytest.approx(ours, abs=2)
    assert abs(other.offset_ns - fit.offset_ns - (theirs - ours)) <= 2
    assert other.bound_ns == pytest.approx(fit.bound_ns, abs=2)


def test_probes_of_pairs_are_not_counted_twice() -> None:
    at, values = np.array([[0, 10], [100, 110]]), np.array([[1_000, 1_010], [1_000, 5_000]])
    probes = with_singles(sift(at, values, 150), np.array([0, 10, 50, 60]), np.array([1_000, 1_010, 7, MISSING]), at)
    assert probes.at_ns.tolist() == [5, 100, 50]
    assert probes.difference_ns.tolist() == [1_005, 1_000, 7]
    assert probes.means == 1
