"""What is known of the clocks of paths, applied to differences of stamps: corrections, contradictions, states."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oscillators import SECOND_NS, Crystal

from pytools.config import Peer, Probe, Windows
from pytools.estimators import overtaken
from pytools.estimators.delays import STAMP_BOUND_NS, corrected
from pytools.estimators.offsets import SIGMAS, Offset
from pytools.signals import Path, PathDelay
from pytools.sources.probing.measurements import Measurements
from pytools.sources.probing.path_clocks import PathClocks
from pytools.sources.probing.paths import PinnedPath

EPOCH_NS = 10**13
NOW_NS = EPOCH_NS + SECOND_NS
AHEAD = Offset(EPOCH_NS, 400_000_000, 0.0, 8.0, 5.0, 250, 1_900)
ONE, TWO = np.array([0]), np.array([0, 0])
BOTH = np.array([False, True])


def clocks(*known: Offset | None) -> PathClocks:
    """A row for each, and a last one of which nothing was said."""
    made = PathClocks()
    made.grow(len(known) + 1)
    for path, offset in enumerate(known):
        made.set(path, None, 0)
        made.set(path, offset, NOW_NS)
    made.set(len(known), None, 0)
    return made


def correct(made: PathClocks, *delays_ns: int, path: int = 0, now_ns: int = NOW_NS) -> list[int]:
    """Both delays of a probe of so much each way, as if the offset were the one of `AHEAD`."""
    there, back = delays_ns if len(delays_ns) == 2 else delays_ns * 2
    values = np.array([there + AHEAD.offset_ns, back - AHEAD.offset_ns])
    at = np.array([NOW_NS, NOW_NS])
    return made.correct(np.array([path, path]), BOTH, values, at, now_ns).tolist()


@given(
    st.integers(-SECOND_NS, SECOND_NS),
    st.integers(-SECOND_NS, SECOND_NS),
    st.integers(-60_000, 60_000),
    st.integers(-60_000, 60_000),
    st.integers(1_000, 50_000_000),
    st.integers(0, 10 * SECOND_NS),
    st.sampled_from([0, 10**15]),
)
def test_a_corrected_delay_is_what_our_clock_counts_between_both_ends(
    ours_ns: int, theirs_ns: int, our_drift: int, their_drift: int, delay_ns: int, age_ns: int, by_ns: int
) -> None:
    """Both directions of a path, with the offset from a line that was found out some time before."""
    ours, theirs = Crystal(ours_ns + by_ns, our_drift), Crystal(theirs_ns + by_ns, their_drift)
    begin = 3_600 * SECOND_NS
    offset = Offset(ours.at(begin), theirs.at(begin) - ours.at(begin), theirs.against(ours), 5.0, 1.0, 250, 1_900)
    left, came = begin + age_ns, begin + age_ns + delay_ns
    elapsed = ours.at(came) - ours.at(left)
    forward, at_forward = theirs.at(came) - ours.at(left), ours.at(left)
    reverse, at_reverse = ours.at(came) - theirs.at(left), ours.at(came)
    made = clocks(offset)
    values, at = np.array([forward, reverse]), np.array([at_forward, at_reverse])
    told = made.correct(TWO, BOTH, values, at, NOW_NS)
    assert np.abs(told - elapsed).max() <= 2
    signed = np.array([1, -1]) * offset.at(at)
    assert np.abs(corrected(values, signed, np.full(2, offset.drift_ppb)) - elapsed).max() <= 2


def test_each_path_is_corrected_by_its_own_clocks_and_unknown_ones_are_left_alone() -> None:
    behind = replace(AHEAD, offset_ns=-7_000_000)
    made = clocks(AHEAD, behind)
    paths = np.array([1, 2, 0, 1, 2, 0])
    reverse = np.array([False, False, False, True, True, True])
    raw = np.array([5_000 - 7_000_000, 123, 5_000 + 400_000_000, 5_000 + 7_000_000, -456, 5_000 - 400_000_000])
    told = made.correct(paths, reverse, raw, np.full(6, NOW_NS), NOW_NS)
    assert told.tolist() == [5_000, 123, 5_000, 5_000, -456, 5_000]
    assert made.contradictions == 0


def test_what_is_left_alone_has_no_offset_in_its_way() -> None:
    """Differences of clocks that are days apart must not overflow, whatever was known before."""
    made = clocks(AHEAD)
    made.set(0, None, NOW_NS)
    raw = np.array([2**61, -(2**61)])
    assert made.correct(TWO, BOTH, raw, np.array([NOW_NS, -(2**61)]), NOW_NS).tolist() == raw.tolist()
    assert made.contradictions == 0


# ---- earlier samples and later ones ----


def test_samples_from_before_a_clock_was_known_do_not_compare_with_later_ones() -> None:
    made = clocks()
    assert made.set(0, AHEAD, NOW_NS)
    assert not made.set(0, AHEAD, NOW_NS + 1)
    assert made.set(0, None, NOW_NS + 2), "nor those from after it was lost"
    assert not made.set(0, None, NOW_NS + 3)
    assert made.set(0, AHEAD, NOW_NS + 4)
    assert clocks().set(0, replace(AHEAD, offset_ns=0), NOW_NS), "though the two clocks happen to agree"


@given(st.integers(-2 * AHEAD.bound_ns, 2 * AHEAD.bound_ns), st.integers(0, 2 * SECOND_NS), st.floats(-9e4, 9e4))
def test_a_small_move_of_the_line_keeps_the_samples(move_ns: int, later_ns: int, drift_ppb: float) -> None:
    """Of the line: the offset itself moves by tens of microseconds a second, all the time."""
    line = replace(AHEAD, drift_ppb=drift_ppb)
    made = clocks(line)
    grown = round(later_ns * drift_ppb * 1e-9)
    moved = replace(line, epoch_ns=line.epoch_ns + later_ns, offset_ns=line.offset_ns + grown + move_ns)
    assert not made.set(0, moved, NOW_NS + later_ns)


@given(st.integers(2 * AHEAD.bound_ns + 2, 10**9), st.sampled_from([-1, 1]))
def test_a_large_move_does_not(move_ns: int, way: int) -> None:
    made = clocks(AHEAD)
    assert made.set(0, replace(AHEAD, offset_ns=AHEAD.offset_ns + way * move_ns), NOW_NS + 1)


def test_a_line_that_says_nothing_is_no_line() -> None:
    made = clocks(AHEAD)
    assert made.set(0, replace(AHEAD, state="free_running"), NOW_NS + 1)
    assert made.states(ONE) == ["free_running"]
    assert not made.clocks(ONE).absolute.any()


# ---- contradictions ----

LIMIT_NS = AHEAD.bound_ns + 2 * STAMP_BOUND_NS


@pytest.mark.parametrize("way", [0, 1], ids=["forward", "reverse"])
def test_a_sample_that_is_too_early_suspends_its_path_and_no_other(way: int) -> None:
    made = clocks(AHEAD, AHEAD)
    delays = [3_000, 3_000]
    delays[way] = -LIMIT_NS
    correct(made, *delays)
    assert not made.suspended(np.array([0, 1])).any(), "within the bound"
    delays[way] = -LIMIT_NS - 1
    correct(made, *delays)
    assert made.suspended(np.array([0, 1])).tolist() == [True, False]
    assert made.contradictions == 1
    assert made.states(np.array([0, 1])) == ["free_running", "synchronised"]
    judged = made.clocks(np.array([0, 1]))
    assert judged.absolute.tolist() == [False, True]
    assert judged.free.tolist() == [True, False]


def test_only_what_was_found_out_later_lifts_a_suspension() -> None:
    made = clocks(AHEAD)
    correct(made, -10_000_000, 10_000_000, now_ns=NOW_NS + 100)
    right = replace(AHEAD, offset_ns=AHEAD.offset_ns - 10_000_000)
    for known_ns in (NOW_NS, NOW_NS + 99, NOW_NS + 100):
        assert not made.set(0, right, known_ns)
        assert made.suspended(ONE).all()
        assert made.states(ONE) == ["free_running"]
    assert made.set(0, right, NOW_NS + 101), "what was told before the step does not compare"
    assert not made.suspended(ONE).any()
    assert made.states(ONE) == ["synchronised"]
    assert correct(made, -10_000_000 + 3_000, 10_000_000 + 3_000) == [3_000, 3_000]


def test_a_wrong_line_that_is_told_again_is_contradicted_again() -> None:
    made = clocks(AHEAD)
    for turn in range(3):
        correct(made, -10_000_000, 10_000_000, now_ns=NOW_NS + turn)
        made.set(0, AHEAD, NOW_NS + turn + 1)
    assert made.contradictions == 3
    correct(made, -10_000_000, 10_000_000, now_ns=NOW_NS + 9)
    assert made.suspended(ONE).all()


def test_a_shared_clock_is_never_corrected_nor_contradicted() -> None:
    made = clocks(AHEAD)
    made.share(0)
    assert correct(made, -10_000_000, 10_000_000) == [390_000_000, -390_000_000]
    assert made.contradictions == 0
    assert made.states(ONE) == ["synchronised"]
    judged = made.clocks(ONE)
    assert (judged.bound_ns.tolist(), judged.hard_bound_ns.tolist(), judged.absolute.all()) == ([0], [0], True)


# ---- states and bounds as they were told ----


def test_bounds_and_states_are_those_that_were_told() -> None:
    held = replace(AHEAD, bound_ns=9_000, hard_bound_ns=70_000, sigma_ns=1_000.0, state="holdover")
    made = clocks(AHEAD, held)
    rows = np.array([2, 1, 0])
    assert made.states(rows) == ["free_running", "holdover", "synchronised"]
    judged = made.clocks(rows)
    assert judged.absolute.tolist() == [False, True, True]
    assert judged.free.tolist() == [True, False, False]
    assert judged.bound_ns.tolist() == [0, 9_000, 250]
    assert judged.hard_bound_ns.tolist() == [0, 70_000, 1_900]
    assert judged.jitter_ns.tolist() == [0, int(2 * SIGMAS * 1_000), int(2 * SIGMAS * 8)]


def test_rows_that_come_later_know_nothing_and_keep_the_others() -> None:
    made = clocks(AHEAD)
    made.grow(40)
    made.set(39, None, 0)
    assert made.states(np.array([0, 39])) == ["synchronised", "free_running"]
    assert correct(made, 4_000) == [4_000, 4_000]


# ---- through the measurements of a path ----


class Measured:
    """One path to a peer with a clock of its own, and the probes on it."""

    def __init__(self) -> None:
        self.all = Measurements("h1", Windows(), Probe())
        path = Path("h1", "h2", "10.9.0.2", "10.1.1.1", "rail1")
        self.all.set_paths([PinnedPath(0, path, Peer("h2", "10.9.0.2"), 4, 2, "10.9.0.1", None, False)], 0)
        self.now_ns = NOW_NS

    def probe(self, there: int, back: int, offset: Offset = AHEAD) -> None:
        """One probe 20 ms later, with these true delays and clocks that differ by this offset."""
        self.now_ns += 20_000_000
        ahead = int(offset.at(np.int64(self.now_ns)))
        stamps, at = np.array([[there + ahead], [back - ahead]]), np.full((2, 1), self.now_ns)
        self.all.add(np.zeros(1, np.intp), stamps, at, at[0])

    def told(self) -> PathDelay:
        """What the long window says."""
        (signal,) = self.all.signals(self.all.long, self.now_ns, 0, False, overtaken.NONE)
        return signal


def facts(signal: PathDelay) -> list[int]:
    """Every one-way delay told."""
    both = (signal.forward, signal.reverse)
    told = (delay for each in both for delay in (each.owd_min_ns, each.owd_p50_ns, each.owd_p99_ns))
    return [delay for delay in told if delay is not None]


@pytest.mark.parametrize("ahead_ns", [400_000_000, -400_000_000, 5_000, -5_000])
def test_a_round_trip_is_never_corrected_nor_taken_for_a_contradiction(ahead_ns: int) -> None:
    """A peer that is ahead would make every round trip look earlier than it can be."""
    offset = replace(AHEAD, offset_ns=ahead_ns, drift_ppb=30_000.0)
    path = Measured()
    path.all.set_offset(0, offset, path.now_ns)
    for turn in range(20):
        path.probe(2_000 + turn, 3_000 - turn, offset)
    told = path.told()
    assert path.all.clocks.contradictions == 0
    assert told.clock == "synchronised"
    assert told.round_trip_min_ns == 5_000
    assert (told.forward.owd_min_ns, told.reverse.owd_min_ns) == (
        pytest.approx(2_000, abs=1),
        pytest.approx(2_981, abs=1),
    )


@pytest.mark.parametrize("ahead_ns", [400_000_000, -400_000_000])
def test_nothing_of_a_path_is_a_fact_before_its_clocks_are_known(ahead_ns: int) -> None:
    path, offset = Measured(), replace(AHEAD, offset_ns=ahead_ns)
    for _ in range(5):
        path.probe(2_000, 3_000, offset)
    assert path.told().clock == "free_running"
    assert facts(path.told()) == []
    path.all.set_offset(0, offset, path.now_ns)
    assert facts(path.told()) == [], "what was measured before is no delay"
    path.probe(2_000, 3_000, offset)
    assert facts(path.told()) == [2_000] * 3 + [3_000] * 3
    assert path.told().forward.queueing_last_ns == 0, "it is not compared with a minimum of 400 ms either"


@pytest.mark.parametrize("step_ns", [10_000_000, -10_000_000])
def test_nothing_that_a_stepped_clock_measured_is_ever_a_fact(step_ns: int) -> None:
    path = Measured()
    path.all.set_offset(0, AHEAD, path.now_ns)
    for _ in range(10):
        path.probe(2_000, 3_000)
    stepped = replace(AHEAD, offset_ns=AHEAD.offset_ns + step_ns)
    for _ in range(10):
        path.probe(2_000, 3_000, stepped)
        told = path.told()
        assert told.clock == "free_running"
        assert facts(told) == []
        assert told.forward.bound_ns is told.forward.hard_bound_ns is told.asymmetry_ns is None
        assert told.round_trip_min_ns == 5_000
    path.all.set_offset(0, stepped, path.now_ns + 1)
    path.probe(2_000, 3_000, stepped)
    assert facts(path.told()) == [2_000] * 3 + [3_000] * 3
    assert path.told().clock == "synchronised"


@given(st.integers(-1_000, 50_000_000), st.integers(-1_000, 50_000_000), st.integers(-2_000, 2_000))
def test_no_one_way_delay_is_ever_below_zero(there: int, back: int, error_ns: int) -> None:
    """Within the bound it is given as zero; beyond, the path is suspended."""
    path = Measured()
    path.all.set_offset(0, replace(AHEAD, offset_ns=AHEAD.offset_ns + error_ns), path.now_ns)
    path.probe(there, back)
    told = path.told()
    assert all(delay >= 0 for delay in facts(told))
    early = min(there - error_ns, back + error_ns) < -LIMIT_NS
    assert (told.clock == "free_running") == early
    if not early:
        assert facts(told) == [max(0, there - error_ns)] * 3 + [max(0, back + error_ns)] * 3


def test_a_round_trip_below_zero_is_never_told() -> None:
    """A clock stepped between a probe's arrival and its reply's departure makes one."""
    path = Measured()
    path.all.set_offset(0, AHEAD, path.now_ns)
    path.probe(2_000, 3_000)
    path.probe(2_000, -10_000_000)
    assert path.told().round_trip_min_ns == 5_000
