"""Delays and bounds: what must not change when clocks or ends are exchanged, and what the bounds must cover."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytools.config import Peer, Probe, Windows
from pytools.estimators import delays as d
from pytools.estimators.windows import MISSING
from pytools.signals import Path, PathDelay
from pytools.sources.measurements import FORWARD, LOST, RECEIVED, REVERSE, ROUND_TRIP, SENT, Measurements
from pytools.sources.paths import PinnedPath

END_NS = 50_000_000_000
NONE_OVERTAKEN = (np.zeros(0, np.intp), np.zeros(0, np.int64))
ONE = np.array([0])


@dataclass(frozen=True)
class Probing:
    """The four stamps of each probe of one path, and what the clocks of both ends are ahead by."""

    there: list[int]
    back: list[int]
    ours_ns: int = 0
    theirs_ns: int = 0
    clock: str = "shared"

    def signal(self) -> PathDelay:
        """What is published of it after a second."""
        measured = Measurements("h1", Windows(), Probe())
        peer = Peer("h2", "10.9.0.2", self.clock)  # type: ignore[arg-type]
        path = Path("h1", "h2", "10.9.0.2", "10.1.1.1", "rail1")
        measured.set_paths([PinnedPath(0, path, peer, 4, 2, "10.9.0.1", None, False)])
        begin = END_NS - 20_000_000 * len(self.there)
        for turn, (there, back) in enumerate(zip(self.there, self.back, strict=True)):
            left = np.array([begin + 20_000_000 * turn + self.ours_ns])
            came = left - self.ours_ns + there + self.theirs_ns
            answered = came + 5_000_000
            returned = answered - self.theirs_ns + back + self.ours_ns
            forward, reverse = d.difference(came, left), d.difference(returned, answered)
            for kind, values in ((FORWARD, forward), (REVERSE, reverse), (ROUND_TRIP, d.total(forward, reverse))):
                measured.add(np.array([kind]), ONE, values, returned)
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
    (bound,) = d.queueing_bound(np.array([200]), np.array([age_ns]), np.array([shared]))
    drift = 0 if shared else age_ns * 2 * d.DRIFT_PPM / 1e6
    assert 400 + drift <= bound <= 401 + drift


def test_a_foreign_reflector_widens_the_bound() -> None:
    ours, foreign = d.stamp_bound(np.array([False, True])).tolist()
    assert (ours, foreign) == (200, 1_000_100)


@given(st.integers(-(2**60), 2**60))
def test_what_is_missing_stays_missing(known: int) -> None:
    values = np.array([known, MISSING, known, MISSING])
    others = np.array([known, known, MISSING, MISSING])
    assert d.difference(values, others).tolist() == [0, MISSING, MISSING, MISSING]
    assert d.total(values, others).tolist() == [2 * known, MISSING, MISSING, MISSING]


def test_a_path_without_samples_has_no_figures_but_its_loss() -> None:
    measured = Measurements("h1", Windows(), Probe())
    path = Path("h1", "h2", "10.9.0.2", "", "rail1")
    pinned = PinnedPath(0, path, Peer("h2", "10.9.0.2", "shared"), 4, 2, "10.9.0.1", None, False)
    measured.set_paths([pinned])
    measured.count(SENT, np.array([0, 0, 0]))
    measured.count(LOST, ONE)
    (signal,) = measured.signals(measured.short, END_NS, 0, True, NONE_OVERTAKEN)
    assert (signal.sent, signal.lost, signal.received, signal.loss) == (3, 1, 0, 1.0)
    assert signal.forward.samples == 0
    assert signal.forward.owd_min_ns is signal.forward.queueing_last_ns is signal.round_trip_min_ns is None
    assert measured.signals(measured.short, END_NS + 1, 0, True, NONE_OVERTAKEN) == [], "no news"
