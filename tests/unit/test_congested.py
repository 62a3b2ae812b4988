"""Windows in which every probe waited: how far the earlier line is believed, and when a longer way is the new way."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytools.estimators.clocks import EdgeFit
from pytools.estimators.congested import FLOOR_S, Floor, doubted, noise_ns, tells_round_trip, tempered
from pytools.estimators.offsets import SIGMAS

SECOND_NS = 10**9
HALF_NS = SECOND_NS // 2
EPOCH_NS = 10**13
FLOOR_NS = 4_000
SHARE = 0.1
TRUTH_NS = 123_456_789


def fitted(error_ns: int = 0, excess_ns: int = 0, **changes: object) -> EdgeFit:
    """A window's line that is off by so much, with a smallest round trip that is so much longer than usual."""
    fit = EdgeFit(
        epoch_ns=EPOCH_NS,
        offset_ns=TRUTH_NS + error_ns,
        drift_ppb=700.0,
        sigma_ns=5.0,
        drift_sigma_ppb=4.0,
        bound_ns=math.ceil(SIGMAS * 5.0 + SHARE * (FLOOR_NS + excess_ns) / 2),
        hard_low_ns=TRUTH_NS - FLOOR_NS,
        hard_high_ns=TRUTH_NS + FLOOR_NS,
        round_trip_min_ns=FLOOR_NS + excess_ns,
        kept=80,
        rejected=20,
        stepped=False,
    )
    return replace(fit, **changes)  # type: ignore[arg-type]


def earlier(error_ns: int = 0, **changes: object) -> EdgeFit:
    """The line of the window half a second before, off by so much."""
    before = replace(fitted(), epoch_ns=EPOCH_NS - HALF_NS)
    return replace(before, offset_ns=TRUTH_NS + error_ns - 350, **changes)  # type: ignore[arg-type]


excesses = st.integers(1_000, 50_000_000)


@given(st.integers(-(10**6), 10**6), st.integers(-(10**4), int(noise_ns(fitted()) + SHARE * FLOOR_NS)))
def test_without_excess_the_past_has_no_say(prior_error: int, excess: int) -> None:
    fit = replace(fitted(40), round_trip_min_ns=FLOOR_NS + excess)
    assert tempered(fit, earlier(prior_error), FLOOR_NS, SHARE) is fit


@given(excesses, st.sampled_from([-1, 1]), st.integers(-20, 20))
def test_waiting_one_way_does_not_move_the_clock(excess: int, way: int, prior_error: int) -> None:
    """Half of a wait on the way there looks like a clock ahead; a wait on the way back like one behind."""
    fit = fitted(way * excess // 2, excess, drift_ppb=5_000.0)
    result = tempered(fit, earlier(prior_error), FLOOR_NS, SHARE)
    assert abs(result.offset_ns - TRUTH_NS) <= abs(prior_error) + 1
    assert abs(result.offset_ns - TRUTH_NS) <= result.bound_ns < fit.bound_ns + excess / 2
    assert result.drift_ppb == earlier().drift_ppb, "a queue that fills or drains looks like a drift"


@given(excesses, st.floats(-1, 1), st.integers(-(10**8), 10**8))
def test_the_result_never_leaves_what_the_window_allows(excess: int, share: float, prior_error: int) -> None:
    fit = fitted(round(share * excess / 2), excess)
    result = tempered(fit, earlier(prior_error), FLOOR_NS, SHARE)
    assert abs(result.offset_ns - fit.offset_ns) <= excess / 2 + 1
    wanted = min(max(TRUTH_NS + prior_error, fit.offset_ns - excess / 2), fit.offset_ns + excess / 2)
    assert abs(result.offset_ns - wanted) <= 1


@given(excesses)
def test_a_line_without_its_queue_knows_the_round_trip_without_it(excess: int) -> None:
    result = tempered(fitted(excess // 2, excess), earlier(), FLOOR_NS, SHARE)
    assert (result.round_trip_min_ns, result.unqueued_ns) == (FLOOR_NS + excess, FLOOR_NS)
    assert fitted(excess_ns=excess).unqueued_ns == FLOOR_NS + excess


@given(excesses, st.floats(-1, 1))
def test_without_a_prior_the_bound_takes_the_wait_in(excess: int, share: float) -> None:
    fit = fitted(round(share * excess / 2), excess)
    result = tempered(fit, None, FLOOR_NS, SHARE)
    assert result.offset_ns == fit.offset_ns
    assert abs(fit.offset_ns - TRUTH_NS) <= result.bound_ns
    assert result.sigma_ns >= excess / 2 / SIGMAS


@given(excesses, st.floats(-1, 1), st.integers(-(10**7), 10**7))
def test_after_a_step_the_prior_is_not_asked(excess: int, share: float, step: int) -> None:
    fit = fitted(round(share * excess / 2), excess, stepped=True)
    result = tempered(fit, earlier(step), FLOOR_NS, SHARE)
    assert result == tempered(fit, None, FLOOR_NS, SHARE)
    assert result.offset_ns == fit.offset_ns
    assert abs(result.offset_ns - TRUTH_NS) <= result.bound_ns


def test_a_chain_of_congested_windows_grows_less_sure() -> None:
    line, bounds = earlier(), []
    for turn in range(20):
        window = replace(fitted(5_000 + 350 * turn, 10_000), epoch_ns=EPOCH_NS + turn * HALF_NS)
        line = tempered(window, line, FLOOR_NS, SHARE)
        bounds.append(line.bound_ns)
        assert abs(line.offset_ns - (TRUTH_NS + 350 * turn)) <= line.bound_ns
    assert bounds == sorted(bounds)
    assert bounds[-1] > 1.5 * bounds[0]
    half_ns, allowance_ns = 10_000 / 2, SHARE * FLOOR_NS / 2
    assert bounds[-1] <= math.ceil(SIGMAS * math.hypot(5.0, half_ns) + allowance_ns), (
        "the window bounds it all the same"
    )


@pytest.mark.parametrize(("trend", "off_ns"), [(15.0, 0), (0.0, 120)])
def test_the_earlier_line_is_carried_along_a_parabola(trend: float, off_ns: int) -> None:
    """Four windows that say nothing, and a drift that changes by 15 ppb a second meanwhile."""
    begin = known = fitted(trend_ppb_per_s=trend)
    for second in range(1, 5):
        epoch_ns = EPOCH_NS + second * SECOND_NS
        truth_ns = TRUTH_NS + round(begin.drift_ppb * second + 15.0 * second**2 / 2)
        queued = fitted(0, 2_000, epoch_ns=epoch_ns, offset_ns=truth_ns + 500, drift_ppb=770.0)
        known = replace(tempered(queued, known, FLOOR_NS, SHARE), trend_ppb_per_s=trend)
        assert known.carried, "what a queue makes of the drift is not learnt"
    assert abs(known.offset_ns - truth_ns) == pytest.approx(off_ns, abs=5)
    assert abs(known.offset_ns - truth_ns) <= known.bound_ns


@given(st.integers(0, 50_000_000), st.floats(-1, 1))
def test_before_the_usual_round_trip_is_known_half_of_it_is_open(round_trip: int, share: float) -> None:
    """All of it may be waiting of one direction."""
    fit = fitted(round(share * round_trip / 2), 0, round_trip_min_ns=round_trip)
    result = doubted(fit)
    assert abs(result.offset_ns - TRUTH_NS) <= result.bound_ns
    assert result.bound_ns == pytest.approx(round_trip / 2 + SIGMAS * result.sigma_ns, abs=1)
    assert result.sigma_ns >= fit.sigma_ns
    assert (result.offset_ns, result.drift_ppb) == (fit.offset_ns, fit.drift_ppb)


def floor_after(trips: list[int], tolerance: float = 100.0) -> list[int]:
    """What the floor is after each of these round trips, half a second apart."""
    floor = Floor()
    return [floor.add(EPOCH_NS + turn * HALF_NS, trip, tolerance, 0.0) for turn, trip in enumerate(trips)]


def test_a_floor_settles_after_eight_windows() -> None:
    floor, settled = Floor(), []
    for turn in range(10):
        floor.add(turn * HALF_NS, FLOOR_NS + 500 * turn, 100.0, 0.0)
        settled.append(floor.settled)
    assert settled == [False] * 7 + [True] * 3


def test_the_floor_is_the_smallest_round_trip_and_a_queue_does_not_raise_it() -> None:
    queue = [FLOOR_NS + 3_000 + 900 * (turn % 7) for turn in range(40)]
    assert floor_after([FLOOR_NS, *queue]) == [FLOOR_NS] * 41


def test_a_shorter_round_trip_counts_at_once() -> None:
    assert floor_after([9_000, 8_000, FLOOR_NS, 8_500]) == [9_000, 8_000, FLOOR_NS, FLOOR_NS]


def test_a_round_trip_that_stays_a_little_longer_is_soon_believed() -> None:
    longer = FLOOR_NS + 3_000
    floors = floor_after([FLOOR_NS] * 10 + [longer + 10 * (turn % 3) for turn in range(12)])
    assert floors[:17] == [FLOOR_NS] * 17, "seven windows are no proof"
    assert floors[17:] == [longer] * 5


def test_a_round_trip_that_stays_much_longer_is_believed_late() -> None:
    """A full queue may look steady for some windows; half of what it adds would be the error."""
    longer = FLOOR_NS + 400_000
    floors = floor_after([FLOOR_NS] * 10 + [longer + 1_000 * (turn % 3) for turn in range(30)])
    assert floors[:33] == [FLOOR_NS] * 33, "23 windows are no proof"
    assert floors[33:] == [longer] * 7


def test_a_full_queue_that_wavers_by_a_tenth_is_no_longer_path() -> None:
    queue = [1_000_000 + 100_000 * (turn % 4 == 0) for turn in range(60)]
    assert set(floor_after([FLOOR_NS, *queue])) == {FLOOR_NS}


def test_a_round_trip_that_keeps_changing_is_a_queue_until_the_past_is_over() -> None:
    span = int(FLOOR_S * SECOND_NS) // HALF_NS
    queue = [FLOOR_NS + 5_000 + 1_000 * (turn % 2) for turn in range(span + 5)]
    floors = floor_after([FLOOR_NS, *queue])
    assert set(floors[: span + 1]) == {FLOOR_NS}
    assert set(floors[span + 1 :]) == {FLOOR_NS + 5_000}


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=60), st.floats(0, 1e6))
def test_a_floor_is_always_one_of_the_round_trips_and_never_above_the_newest(
    trips: list[int], tolerance: float
) -> None:
    for turn, floor in enumerate(floor_after(trips, tolerance)):
        assert floor in trips[: turn + 1]
        assert floor <= trips[turn]


@pytest.mark.parametrize(
    ("round_trip", "sigma", "tells"), [(4_000, 300.0, True), (4_000, 400.0, False), (0, 5.0, False)]
)
def test_a_window_noisier_than_its_round_trip_tells_nothing_about_waiting(
    round_trip: int, sigma: float, tells: bool
) -> None:
    assert tells_round_trip(fitted(round_trip_min_ns=round_trip, sigma_ns=sigma)) is tells


@given(st.integers(10_000, 10**7), st.floats(1, 1e5))
def test_what_a_queue_may_hide_is_allowed_for_on_top_of_the_statistics(excess: int, past_sigma: float) -> None:
    """Edges of one port err alike: whoever averages them must not average this away."""
    fit, prior = fitted(0, excess), fitted(sigma_ns=past_sigma)
    result = tempered(fit, prior, FLOOR_NS, SHARE)
    hidden = min(SIGMAS * prior.sigma_at(fit.epoch_ns), excess / 2)
    assert result.bound_ns - SIGMAS * result.sigma_ns >= hidden


@given(st.floats(50, 400), st.integers(0, 300), st.integers(-100, 100))
def test_a_line_through_queued_probes_is_weighed_against_the_earlier_one(
    wait: float, excess: int, prior_error: int
) -> None:
    fit = fitted(excess // 2, excess, wait_ns=wait, found=0.3)
    result = tempered(fit, earlier(prior_error), FLOOR_NS, SHARE)
    low, high = sorted((fit.offset_ns, TRUTH_NS + prior_error))
    assert low - 1 <= result.offset_ns <= high + 1
    assert abs(result.offset_ns - fit.offset_ns) <= excess / 2 + 2 * fit.sigma_ns + 1, "no more waited than is seen"
    assert result.wait_ns <= max(excess / 2 + fit.sigma_ns, earlier().sigma_at(EPOCH_NS))
    assert abs(result.offset_ns - TRUTH_NS) <= result.bound_ns + abs(prior_error)


def test_a_line_through_queued_probes_keeps_its_offset_after_a_step() -> None:
    fit = fitted(100, 200, wait_ns=200.0, found=0.3, stepped=True)
    assert tempered(fit, earlier(5_000), FLOOR_NS, SHARE).offset_ns == fit.offset_ns
