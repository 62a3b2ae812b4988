"""Delays and bounds: what must not change when clocks or ends are exchanged, and what the bounds must cover."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytools.config import Peer, Probe, Windows
from pytools.estimators import delays as d
from pytools.estimators import overtaken
from pytools.estimators.offsets import SIGMAS, UNBOUNDED_NS, Offset
from pytools.estimators.windows import MISSING
from pytools.signals import DELAY_BOUNDS_NS, Path, PathDelay
from pytools.sources.probing.measurements import LOST, RECEIVED, SENT, SLOW_NS, Measurements
from pytools.sources.probing.paths import PinnedPath

END_NS = 50_000_000_000
NONE_OVERTAKEN = overtaken.NONE
ONE = np.array([0])


def pinned(clock: str = "shared") -> PinnedPath:
    """The path that is measured."""
    path = Path("h1", "h2", "10.9.0.2", "10.1.1.1", "rail1")
    return PinnedPath(0, path, Peer("h2", "10.9.0.2", clock), 4, 2, "10.9.0.1", None, False)  # type: ignore[arg-type]


def add_forward(measured: Measurements, stamps_ns: list[int], at_ns: int) -> None:
    """Answers that came at once, to probes of which the way back is not known."""
    forward, at = np.array(stamps_ns, np.int64), np.full(len(stamps_ns), at_ns)
    stamps = np.array([forward, np.full(len(stamps_ns), MISSING)])
    measured.add(np.zeros(len(stamps_ns), np.intp), stamps, np.array([at, at]), at)


@dataclass(frozen=True)
class Probing:
    """The four stamps of each probe of one path, and what the clocks of both ends are ahead by."""

    there: list[int]
    back: list[int]
    ours_ns: int = 0
    theirs_ns: int = 0
    clock: str = "shared"
    known: Offset | None = None  # what is said of the clocks before the first probe

    def signal(self) -> PathDelay:
        """What is published of it after a second."""
        measured = Measurements("h1", Windows(), Probe())
        measured.set_paths([pinned(self.clock)], 0)
        if self.known is not None:
            measured.set_offset(0, self.known, 0)
        begin = END_NS - 20_000_000 * len(self.there)
        for turn, (there, back) in enumerate(zip(self.there, self.back, strict=True)):
            left = np.array([begin + 20_000_000 * turn + self.ours_ns])
            came = left - self.ours_ns + there + self.theirs_ns
            answered = came + 5_000_000
            returned = answered - self.theirs_ns + back + self.ours_ns
            measured.add(ONE, np.array([came - left, returned - answered]), np.array([left, returned]), returned)
            measured.count(SENT, ONE)
            measured.count(RECEIVED, ONE)
        now = END_NS + 10_000_000 + self.ours_ns
        (signal,) = measured.signals(measured.long, now, 0, False, NONE_OVERTAKEN)
        return signal


some_delays = st.lists(st.integers(1_000, 900_000), min_size=1, max_size=40)
both_ways = some_delays.flatmap(
    lambda there: st.tuples(
        st.just(there), st.lists(st.integers(1_000, 900_000), min_size=len(there), max_size=len(there))
    )
)
shift = st.integers(-(10**10), 10**12)


@given(both_ways, shift)
def test_setting_both_clocks_alike_changes_nothing(both: tuple[list[int], list[int]], by_ns: int) -> None:
    plain = Probing(*both).signal()
    moved = Probing(*both, ours_ns=by_ns, theirs_ns=by_ns).signal()
    assert (moved.forward, moved.reverse) == (plain.forward, plain.reverse)
    assert moved.round_trip_min_ns == plain.round_trip_min_ns


@given(both_ways, shift)
def test_setting_one_clock_changes_no_queueing_delay_and_no_round_trip(
    both: tuple[list[int], list[int]], by_ns: int
) -> None:
    plain = Probing(*both, clock="free_running").signal()
    moved = Probing(*both, theirs_ns=by_ns, clock="free_running").signal()
    assert (moved.forward, moved.reverse) == (plain.forward, plain.reverse)
    assert moved.round_trip_min_ns == plain.round_trip_min_ns == min(map(sum, zip(*both, strict=True)))


@given(both_ways)
def test_the_other_end_sees_the_directions_exchanged(both: tuple[list[int], list[int]]) -> None:
    there, back = both
    here, other = Probing(there, back).signal(), Probing(back, there).signal()
    for one, two in ((here.forward, other.reverse), (here.reverse, other.forward)):
        assert (one.owd_min_ns, one.owd_p50_ns, one.owd_p99_ns) == (two.owd_min_ns, two.owd_p50_ns, two.owd_p99_ns)
        assert (one.queueing_p50_ns, one.queueing_p99_ns) == (two.queueing_p50_ns, two.queueing_p99_ns)


@given(both_ways)
def test_on_a_shared_clock_the_delays_are_those_of_the_packets(both: tuple[list[int], list[int]]) -> None:
    signal = Probing(*both).signal()
    assert signal.clock == "synchronised"
    for figures, true in ((signal.forward, both[0]), (signal.reverse, both[1])):
        assert figures.samples == len(true)
        assert figures.owd_min_ns == min(true)
        assert figures.queueing_last_ns == true[-1] - min(true)
        assert figures.owd_p99_ns == np.percentile(true, 99, method="inverted_cdf")
    assert signal.forward.hard_bound_ns == signal.round_trip_min_ns // 2


@given(both_ways, shift)
def test_half_the_round_trip_bounds_the_asymmetry_whatever_the_clocks(
    both: tuple[list[int], list[int]], by_ns: int
) -> None:
    """The true delay lies within half the smallest round trip of what symmetric clocks would have shown."""
    signal = Probing(*both, theirs_ns=by_ns).signal()
    there, back = min(zip(*both, strict=True), key=sum)
    assert abs(there - (there + back) / 2) <= signal.forward.hard_bound_ns + 1


@given(both_ways)
def test_a_histogram_has_each_probe_by_its_queueing(both: tuple[list[int], list[int]]) -> None:
    signal = Probing(*both).signal()
    for figures, true in ((signal.forward, both[0]), (signal.reverse, both[1])):
        waited, told = [each - min(true) for each in true], figures.queueing_histogram
        assert told is not None and told.counts[-1] > 0
        counts = [*told.counts, *[0] * (len(DELAY_BOUNDS_NS) + 1 - len(told.counts))]
        assert [*accumulate(counts)][:-1] == [sum(each <= bound for each in waited) for bound in DELAY_BOUNDS_NS]
        assert (sum(counts), told.sum_ns) == (len(true), sum(waited))


@given(st.lists(st.lists(st.integers(0, 10**9), max_size=30), max_size=8), st.integers(0, 8))
def test_each_probe_is_counted_once_however_windows_fall(lots: list[list[int]], unheard: int) -> None:
    """Windows are told at uneven times, and nobody listens at one of them."""
    measured = Measurements("h1", Windows(), Probe())
    measured.set_paths([pinned()], 0)
    told, now_ns = 0, END_NS
    for turn, lot in enumerate(lots):
        add_forward(measured, lot, now_ns)
        now_ns += 10_000_000 * (1 + len(lot))
        if turn == unheard:
            measured.skip(measured.long, now_ns)
            continue
        measured.signals(measured.short, now_ns, 0, True, NONE_OVERTAKEN)
        (signal,) = measured.signals(measured.long, now_ns, 0, False, NONE_OVERTAKEN)
        counted = signal.forward.queueing_histogram
        told += 0 if counted is None else sum(counted.counts)
        assert signal.reverse.queueing_histogram is None
    assert told == sum(len(lot) for turn, lot in enumerate(lots) if turn != unheard)


def test_short_windows_have_no_histogram() -> None:
    measured = Measurements("h1", Windows(), Probe())
    measured.set_paths([pinned()], 0)
    add_forward(measured, [5], END_NS)
    (signal,) = measured.signals(measured.short, END_NS + 1, 0, True, NONE_OVERTAKEN)
    assert signal.forward.samples == 1 and signal.forward.queueing_histogram is None


@pytest.mark.parametrize("apart_ns", [None, 0, -(10**15), 10**15])
def test_a_probe_is_slow_when_it_waits_whatever_the_clocks_show(apart_ns: int | None) -> None:
    measured = Measurements("h1", Windows(), Probe())
    measured.set_paths([pinned("shared" if apart_ns is None else "free_running")], 0)
    if apart_ns:
        measured.set_offset(0, Offset(END_NS, apart_ns, 0.0, 8.0, 5.0, KNOWN_BOUND_NS, 2_000), 0)
    assert measured.slow_from(END_NS, END_NS).tolist() == [MISSING]
    add_forward(measured, [9_000 + (apart_ns or 0), 7_000 + (apart_ns or 0)], END_NS)
    assert measured.slow_from(END_NS, END_NS).tolist() == [7_000 + (apart_ns or 0) + SLOW_NS]


def test_free_clocks_give_no_one_way_delay_but_a_queueing_delay_with_the_drift_in_its_bound() -> None:
    signal = Probing([2_000, 9_000], [3_000, 3_000], theirs_ns=10**15, clock="free_running").signal()
    figures = signal.forward
    assert signal.clock == "free_running"
    assert figures.owd_min_ns is figures.owd_p50_ns is figures.owd_p99_ns is None
    assert figures.bound_ns is figures.hard_bound_ns is None
    assert figures.queueing_last_ns == 7_000
    assert figures.queueing_bound_ns is not None
    age_ns = 45_000_000  # of the minimum, when it is told; about
    assert figures.queueing_bound_ns == pytest.approx(4 * d.STAMP_BOUND_NS + age_ns * 1e-4, rel=0.05)


@given(st.integers(0, 10**11), st.booleans())
def test_drift_is_allowed_for_in_free_clocks_only(age_ns: int, shared: bool) -> None:
    none, free = np.zeros(1, np.int64), np.array([not shared])
    clocks = d.Clocks(absolute=~free, bound_ns=none, hard_bound_ns=none, free=free, jitter_ns=none)
    (bound,) = d.queueing_bound(np.array([200]), np.array([age_ns]), clocks)
    drift = 0 if shared else age_ns * 2 * d.DRIFT_PPM / 1e6
    assert 400 + drift <= bound <= 401 + drift


def test_a_foreign_reflector_widens_the_bound() -> None:
    ours, foreign = d.stamp_bound(np.array([False, True])).tolist()
    assert (ours, foreign) == (200, 1_000_100)


def test_a_path_without_samples_has_no_figures_but_its_loss() -> None:
    measured = Measurements("h1", Windows(), Probe())
    measured.set_paths([pinned()], 0)
    measured.count(SENT, np.array([0, 0, 0]))
    measured.count(LOST, ONE)
    (signal,) = measured.signals(measured.short, END_NS, 0, True, NONE_OVERTAKEN)
    assert (signal.sent, signal.lost, signal.received, signal.loss) == (3, 1, 0, 1.0)
    assert signal.forward.samples == 0
    assert signal.forward.owd_min_ns is signal.forward.queueing_last_ns is signal.round_trip_min_ns is None
    assert measured.signals(measured.short, END_NS + 1, 0, True, NONE_OVERTAKEN) == [], "no news"


# ---- two clocks whose offset is known ----

KNOWN_BOUND_NS = 300
errors = st.integers(-KNOWN_BOUND_NS, KNOWN_BOUND_NS)


def synchronised(
    both: tuple[list[int], list[int]], ours_ns: int = 0, theirs_ns: int = 0, error_ns: int = 0, **changes: object
) -> PathDelay:
    """What is told when the offset is known but for an error."""
    offset = Offset(END_NS + ours_ns, theirs_ns - ours_ns + error_ns, 0.0, 8.0, 5.0, KNOWN_BOUND_NS, 2_000)
    known = replace(offset, **changes)  # type: ignore[arg-type]
    return Probing(*both, ours_ns=ours_ns, theirs_ns=theirs_ns, clock="free_running", known=known).signal()


@given(both_ways, shift, st.integers(-(10**9), 10**9), errors, st.sampled_from([0, 10**15]))
def test_with_a_known_offset_delays_are_within_their_bounds_wherever_the_clocks_are(
    both: tuple[list[int], list[int]], ours_ns: int, apart_ns: int, error_ns: int, days_ns: int
) -> None:
    """Shifting both clocks changes nothing at all; shifting one of them no more than what is known of it."""
    signal = synchronised(both, ours_ns + days_ns, ours_ns + days_ns + apart_ns, error_ns)
    plain = synchronised(both, 0, 0, error_ns)
    assert (signal.forward, signal.reverse) == (plain.forward, plain.reverse)
    assert (signal.asymmetry_ns, signal.clock) == (plain.asymmetry_ns, "synchronised")
    for figures, true in ((signal.forward, both[0]), (signal.reverse, both[1])):
        assert figures.bound_ns == KNOWN_BOUND_NS + 2 * d.STAMP_BOUND_NS
        assert figures.hard_bound_ns == 2_000 + 2 * d.STAMP_BOUND_NS
        assert abs(figures.owd_min_ns - min(true)) <= KNOWN_BOUND_NS
        assert abs(figures.owd_p99_ns - np.percentile(true, 99, method="inverted_cdf")) <= KNOWN_BOUND_NS
        assert figures.queueing_last_ns == true[-1] - min(true), "an error of the offset is in both, and in neither"


@given(both_ways, shift, st.integers(-(10**9), 10**9), errors)
def test_the_other_end_of_two_clocks_sees_the_directions_and_the_asymmetry_exchanged(
    both: tuple[list[int], list[int]], ours_ns: int, theirs_ns: int, error_ns: int
) -> None:
    here = synchronised(both, ours_ns, theirs_ns, error_ns)
    there = synchronised(both[::-1], theirs_ns, ours_ns, -error_ns)
    for one, two in ((here.forward, there.reverse), (here.reverse, there.forward)):
        assert (one.owd_min_ns, one.owd_p50_ns, one.owd_p99_ns) == (two.owd_min_ns, two.owd_p50_ns, two.owd_p99_ns)
        assert (one.bound_ns, one.hard_bound_ns) == (two.bound_ns, two.hard_bound_ns)
    assert here.asymmetry_ns is not None
    assert there.asymmetry_ns == -here.asymmetry_ns
    assert here.asymmetry_bound_ns == there.asymmetry_bound_ns


@given(both_ways, errors)
def test_the_asymmetry_is_that_of_the_smallest_delays_within_its_bound(
    both: tuple[list[int], list[int]], error_ns: int
) -> None:
    """An error of the offset counts twice."""
    signal = synchronised(both, 0, 10**9, error_ns)
    true = min(both[0]) - min(both[1])
    assert signal.asymmetry_ns == true - 2 * error_ns
    assert signal.asymmetry_bound_ns == 2 * (KNOWN_BOUND_NS + 2 * d.STAMP_BOUND_NS)
    assert abs(signal.asymmetry_ns - true) <= signal.asymmetry_bound_ns


def test_no_asymmetry_without_a_known_offset_or_without_both_directions() -> None:
    signal = Probing([2_000], [3_000], theirs_ns=10**9, clock="free_running").signal()
    assert signal.asymmetry_ns is signal.asymmetry_bound_ns is None
    assert Probing([2_000], [3_000]).signal().asymmetry_ns == -1_000


@given(st.integers(0, 500), st.integers(0, 500))
def test_a_delay_below_zero_but_within_its_bound_is_told_as_zero(there: int, back: int) -> None:
    """The interval around it is still true; the difference of the two directions keeps its sign."""
    signal = synchronised(([there], [back]), 0, 10**9, KNOWN_BOUND_NS)
    told = signal.forward
    assert told.owd_min_ns == told.owd_p50_ns == told.owd_p99_ns == max(0, there - KNOWN_BOUND_NS)
    assert abs(told.owd_min_ns - there) <= told.bound_ns
    assert signal.asymmetry_ns == there - back - 2 * KNOWN_BOUND_NS


def test_corrections_of_different_times_differ_by_a_little_which_queueing_allows_for() -> None:
    signal = synchronised(([2_000, 9_000], [3_000, 3_000]), 0, 10**9, sigma_ns=50.0)
    assert signal.forward.queueing_bound_ns == 4 * d.STAMP_BOUND_NS + 2 * SIGMAS * 50


def test_a_clock_that_is_held_over_gives_delays_with_the_bound_it_was_told_with() -> None:
    signal = synchronised(([2_000], [3_000]), 0, 10**9, state="holdover", bound_ns=40_000, hard_bound_ns=700_000)
    assert signal.clock == "holdover"
    assert (signal.forward.owd_min_ns, signal.forward.bound_ns) == (2_000, 40_000 + 2 * d.STAMP_BOUND_NS)
    assert signal.forward.hard_bound_ns == 700_000 + 2 * d.STAMP_BOUND_NS


def test_a_hard_bound_that_is_none_is_not_told() -> None:
    told = synchronised(([2_000], [3_000]), 0, 10**9, hard_bound_ns=2 * UNBOUNDED_NS).forward
    assert told.hard_bound_ns is None
    assert (told.owd_min_ns, told.bound_ns) == (2_000, KNOWN_BOUND_NS + 2 * d.STAMP_BOUND_NS)


@given(st.integers(-(10**15), 10**15), st.integers(-60_000, 60_000), st.integers(1_000, 50_000_000), st.booleans())
def test_correcting_takes_the_offset_away_and_counts_in_our_seconds(
    offset_ns: int, drift_ppb: int, delay_ns: int, reverse: bool
) -> None:
    """The peer's clock counts the delay that our clock is asked for: faster, or slower."""
    counted = delay_ns + round(delay_ns * drift_ppb * 1e-9)
    signed = -offset_ns if reverse else offset_ns
    (told,) = d.corrected(np.array([counted + signed]), np.array([signed]), np.array([float(drift_ppb)]))
    assert abs(int(told) - delay_ns) <= 2


@given(st.integers(10**10 + 8, 2**60), st.sampled_from([-1, 1]))
def test_what_is_no_delay_is_not_taken_for_one(value_ns: int, sign: int) -> None:
    """It would not fit a float."""
    told = d.corrected(np.array([sign * value_ns]), np.array([7]), np.array([60_000.0]))
    assert told.tolist() == [sign * value_ns - 7]
