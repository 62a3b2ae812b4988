"""How fast rates change: from drifts alone, and what it does to the errors of all clocks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytools.estimators.clock_graph import Edges, solve
from pytools.estimators.offsets import SIGMAS, WANDER_PPB_PER_S, wander

TIMES = np.arange(24) * 0.5


@given(st.floats(-1e5, 1e5), st.floats(0.0, 1e6))
def test_a_steady_rate_has_the_stated_wander(drift: float, since_s: float) -> None:
    drifts = np.full(24, drift)
    assert wander(TIMES + since_s, drifts, np.full(24, 5.0)) == WANDER_PPB_PER_S


@pytest.mark.parametrize("rate", [50.0, 100.0, -400.0])
def test_a_rate_that_changes_steadily_has_at_least_that_wander(rate: float) -> None:
    found = wander(TIMES, 7_000 + rate * TIMES, np.full(24, 5.0))
    assert abs(rate) <= found <= 1.5 * abs(rate)


def test_the_wander_of_a_sinusoid_is_its_amplitude() -> None:
    for phase in np.linspace(0, 6, 7):
        drifts = 100 * 10 / (2 * np.pi) * np.sin(2 * np.pi * TIMES / 10 + phase)
        assert 75 <= wander(TIMES, drifts, np.full(24, 5.0)) <= 115


@pytest.mark.parametrize("sigma", [5.0, 20.0, 40.0, 80.0])
def test_what_errors_of_the_drifts_explain_is_no_wander(sigma: float) -> None:
    rng = np.random.default_rng(1)
    of_windows = rng.normal(0, sigma, (600, 27))  # windows of 2 s every 0.5 s share three quarters of their errors
    drifts = np.lib.stride_tricks.sliding_window_view(of_windows, 4, axis=1).sum(axis=2) / 2
    found = [wander(TIMES, row, np.full(24, sigma)) for row in drifts]
    assert np.mean(np.array(found) > WANDER_PPB_PER_S) <= 0.04


def test_a_bad_start_does_not_outweigh_what_was_seen_since() -> None:
    rng = np.random.default_rng(1)
    early = TIMES < 1.5
    sigmas = np.where(early, 150.0, 20.0)
    drifts = np.where(early, rng.normal(0, 450, (200, 24)), 0.0)  # the first windows were worse than they knew
    assert {wander(TIMES, row, sigmas) for row in drifts} == {WANDER_PPB_PER_S}
    moving = drifts + 100 * TIMES
    assert min(wander(TIMES, row, sigmas) for row in moving) > 90, "a rate that changes is still seen"


@given(st.integers(0, 4))
def test_windows_that_overlap_tell_nothing(count: int) -> None:
    assert wander(TIMES[:count], 1_000 * TIMES[:count], np.full(count, 5.0)) == WANDER_PPB_PER_S


def test_all_edges_of_a_host_bend_together_so_its_error_does_not_average_out() -> None:
    count, age_ns = 9, 10**9
    zeros, ones = np.zeros(count), np.ones(count)
    edges = Edges(
        owner=np.zeros(count, np.intp),
        peer=np.ones(count, np.intp),
        epoch_ns=np.zeros(count, np.int64),
        offset_ns=np.zeros(count, np.int64),
        drift_ppb=zeros,
        sigma_ns=3 * ones,
        drift_sigma_ppb=ones,
        bound_ns=np.full(count, 20),
        hard_low_ns=np.full(count, -5_000),
        hard_high_ns=np.full(count, 5_000),
    )
    sigmas = {
        each: solve(edges, 2, 0, age_ns, np.array([WANDER_PPB_PER_S, each])).sigma_ns[1] for each in (20.0, 200.0)
    }
    assert SIGMAS * sigmas[200.0] > 200.0 / 2, "a parabola that rises by half of it in a second"
    assert SIGMAS * sigmas[20.0] < 30
    at_epoch = solve(edges, 2, 0, 0, np.array([WANDER_PPB_PER_S, 200.0]))
    assert at_epoch.sigma_ns[1] == pytest.approx(1.0, abs=0.05)
