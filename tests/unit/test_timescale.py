"""The common timescale: whose clock it is, what hosts make of the reference's word, and how two of them compare."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from oscillators import SECOND_NS, Crystal, edge, edges_of

from pytools.estimators.offsets import Offset
from pytools.sources.clocks.messages import VERSION, Clocks, Edge, Edges
from pytools.sources.clocks.timescale import FRESH_ROUNDS, Timescale, as_offset, stepped

ROUND_NS = SECOND_NS // 2
BEGIN_NS = 1_000 * SECOND_NS
NOTHING = Edges(VERSION, None, [])
CRYSTALS = {
    "h1": Crystal(0, 0),
    "h2": Crystal(900_000_000, 30_000),
    "h3": Crystal(-700_000_000, -25_000),
    "h4": Crystal(123_456_789, 4_321),
}

crystal = st.builds(Crystal, st.integers(-SECOND_NS, SECOND_NS), st.integers(-60_000, 60_000))
few = settings(max_examples=40)  # each is a fleet that talks for several rounds
fleets = st.lists(crystal, min_size=3, max_size=3).map(lambda each: dict(zip(("h1", "h2", "h3"), each, strict=True)))


# ---- who is the reference ----


@dataclass
class Election:
    """What one host thinks, round by round: one tick is one interval."""

    host: str
    wanted: str = ""
    scale: Timescale = field(init=False)
    now_ns: int = BEGIN_NS

    def __post_init__(self) -> None:
        self.scale = Timescale(self.host, ROUND_NS, self.wanted)

    def hears(self, *hosts: str, rounds: int = 1) -> str:
        """The host elected after so many rounds in which these were heard."""
        for _ in range(rounds):
            self.now_ns += ROUND_NS
            for host in (*hosts, self.host):
                self.scale.hear(host, NOTHING, self.now_ns)
            elected = self.scale.elected(self.now_ns)
            self.scale.adopt(elected, Clocks(VERSION, 0, []), self.now_ns)
        return elected


@pytest.mark.parametrize("host", ["a", "b", "c"])
def test_the_first_by_name_is_elected_by_everybody(host: str) -> None:
    assert Election(host).hears(*{"a", "b", "c"} - {host}, rounds=10) == "a"


def test_alone_everybody_is_their_own_reference() -> None:
    assert Election("b").hears() == "b"


def test_the_configured_host_is_the_reference_as_long_as_it_is_heard() -> None:
    election = Election("b", wanted="c")
    assert election.hears("a") == "b", "nobody has proven to stay yet"
    assert election.hears("a", rounds=10) == "a"
    assert election.hears("a", "c") == "c", "it needs no probation"
    assert election.hears("a", rounds=FRESH_ROUNDS) == "c"
    assert election.hears("a") == "a"
    assert Election("c", wanted="c").hears("a", "b", rounds=9) == "c"


def test_a_reference_that_vanishes_is_replaced_after_three_rounds() -> None:
    election = Election("c")
    assert election.hears("a", "b", rounds=10) == "a"
    for _ in range(FRESH_ROUNDS):
        assert election.hears("b") == "a"
    assert election.hears("b") == "b", "the next by name, who has long been heard"


def test_a_reference_that_returns_waits_until_it_has_proven_to_stay() -> None:
    election = Election("c")
    election.hears("a", "b", rounds=10)
    election.hears("b", rounds=10)
    for _ in range(4):
        assert election.hears("a", "b") == "b"
    assert election.hears("a", "b") == "a"


def test_a_host_that_comes_and_goes_never_becomes_the_reference() -> None:
    election = Election("b")
    election.hears("c", rounds=10)
    for _ in range(10):
        assert election.hears("a", "c", rounds=3) == "b"
        assert election.hears("c", rounds=FRESH_ROUNDS + 1) == "b"


def test_a_host_that_misses_a_round_or_two_stays_the_reference() -> None:
    election = Election("b")
    election.hears("a", rounds=10)
    for _ in range(5):
        assert election.hears(rounds=2) == "a"
        assert election.hears("a") == "a"


# ---- all hosts: one solves, everybody adopts ----


@dataclass
class Fleet:
    """Hosts with true clocks who all hear each other; true time is the only time."""

    crystals: dict[str, Crystal]
    true_ns: int = BEGIN_NS
    down: frozenset[str] = frozenset()
    scales: dict[str, Timescale] = field(init=False)

    def __post_init__(self) -> None:
        self.scales = {name: Timescale(name, ROUND_NS, "") for name in self.crystals}

    def round(self, rounds: int = 1, stepped: str = "") -> None:
        """Everybody tells their edges, the reference solves; `stepped` shows in every edge that touches this host."""
        for _ in range(rounds):
            self.true_ns += ROUND_NS
            up = {name: each for name, each in self.crystals.items() if name not in self.down}
            told = {name: edges_of(name, up, self.true_ns) for name in up}
            for name, edges in told.items():
                marked = [replace(each, stepped=stepped in (name, each.peer)) for each in edges.edges]
                told[name] = replace(edges, edges=marked)
            for name in up:
                for other, edges in told.items():
                    self.scales[name].hear(other, edges, self.true_ns)
            for name in up:
                if self.scales[name].elected(self.true_ns) == name:
                    self.solve(name, up)

    def solve(self, reference: str, hosts: dict[str, Crystal]) -> None:
        clock_ns = self.crystals[reference].at(self.true_ns)
        word = self.scales[reference].solve(clock_ns, self.true_ns, 0)
        for name in hosts:
            if self.scales[name].elected(self.true_ns) == reference:
                self.scales[name].adopt(reference, word, self.true_ns)

    def own(self, ours: str, peer: str, **changes: object) -> Edge:
        return edge(self.crystals[ours], peer, self.crystals[peer], self.true_ns, **changes)

    def between(self, ours: str, peer: str, own: Edge | None = None, after_ns: int = 0) -> Offset | None:
        return self.scales[ours].between(peer, self.crystals[ours].at(self.true_ns + after_ns), own)

    def error(self, ours: str, peer: str, known: Offset | None, after_ns: int = 0) -> int:
        """How wrong it is so long from now."""
        assert known is not None
        true_ns = self.true_ns + after_ns
        reading = self.crystals[ours].at(true_ns)
        return int(known.at(np.int64(reading))) - (self.crystals[peer].at(true_ns) - reading)

    def states(self) -> dict[str, str]:
        """As the first host that is up has been told."""
        scale = next(scale for name, scale in self.scales.items() if name not in self.down)
        return {name: clock.state for name, clock in scale.clocks.items()}


@few
@given(fleets, st.sampled_from([0, 10**15]), st.integers(0, 2 * SECOND_NS))
def test_any_two_hosts_compare_as_their_clocks_do(crystals: dict[str, Crystal], by_ns: int, after_ns: int) -> None:
    """Also hosts of which neither is the reference, later, and when all clocks are days ahead."""
    fleet = Fleet({name: each.moved(by_ns) for name, each in crystals.items()})
    fleet.round(6)
    for ours, peer in itertools.permutations(crystals, 2):
        known = fleet.between(ours, peer, after_ns=after_ns)
        assert abs(fleet.error(ours, peer, known, after_ns)) <= 4
        assert known is not None
        assert known.state == "synchronised"
        assert known.drift_ppb == pytest.approx(crystals[peer].against(crystals[ours]), abs=0.01)


@few
@given(fleets, st.integers(-(10**15), 10**15))
def test_shifting_all_clocks_changes_no_offset_between_them(crystals: dict[str, Crystal], by_ns: int) -> None:
    plain, moved = Fleet(crystals), Fleet({name: each.moved(by_ns) for name, each in crystals.items()})
    for fleet in (plain, moved):
        fleet.round(5)
    one, other = plain.between("h2", "h3"), moved.between("h2", "h3")
    assert one is not None
    assert other is not None
    assert abs(other.offset_ns - one.offset_ns) <= 1
    assert abs(other.epoch_ns - one.epoch_ns - by_ns) <= 1
    assert (other.bound_ns, other.state) == (pytest.approx(one.bound_ns, abs=1), one.state)


@few
@given(fleets, st.integers(0, 3 * SECOND_NS), st.booleans())
def test_swapping_the_ends_flips_the_sign(crystals: dict[str, Crystal], after_ns: int, own: bool) -> None:
    fleet = Fleet(crystals)
    fleet.round(6)
    there = fleet.between("h2", "h3", fleet.own("h2", "h3") if own else None, after_ns)
    back = fleet.between("h3", "h2", fleet.own("h3", "h2") if own else None, after_ns)
    assert there is not None
    assert back is not None
    true_ns = fleet.true_ns + after_ns
    forward = int(there.at(np.int64(crystals["h2"].at(true_ns))))
    backward = int(back.at(np.int64(crystals["h3"].at(true_ns))))
    assert abs(forward + backward) <= 2
    assert there.bound_ns == pytest.approx(back.bound_ns, abs=2)
    assert there.hard_bound_ns == pytest.approx(back.hard_bound_ns, rel=1e-3, abs=20)


def test_a_change_of_the_reference_changes_no_offset() -> None:
    fleet = Fleet(CRYSTALS)
    fleet.round(10)
    assert fleet.scales["h3"].reference == "h1"
    fleet.down = frozenset({"h1"})
    for _ in range(FRESH_ROUNDS + 2):
        fleet.round()
        known = fleet.between("h3", "h4", fleet.own("h3", "h4"))
        assert abs(fleet.error("h3", "h4", known)) <= 20
    assert fleet.scales["h3"].reference == "h2"
    fleet.down = frozenset()
    for _ in range(8):
        fleet.round()
        assert abs(fleet.error("h3", "h4", fleet.between("h3", "h4"))) <= 20
    assert {scale.reference for scale in fleet.scales.values()} == {"h1"}
    assert set(fleet.states().values()) == {"synchronised"}


# ---- the common result, or our own edge ----


@pytest.fixture
def fleet() -> Fleet:
    made = Fleet(CRYSTALS)
    made.round(6)
    return made


def test_nothing_is_known_of_a_stranger(fleet: Fleet) -> None:
    assert fleet.between("h2", "h9") is None


def test_without_a_word_of_the_reference_our_own_edge_is_what_is_known() -> None:
    fleet = Fleet(CRYSTALS)
    own = fleet.own("h2", "h3")
    clock_ns = CRYSTALS["h2"].at(fleet.true_ns)
    assert fleet.between("h2", "h3", own) == as_offset(own).aged(clock_ns)
    assert fleet.between("h2", "h3") is None


def test_errors_of_both_hosts_against_the_reference_add_up(fleet: Fleet) -> None:
    known, clocks = fleet.between("h2", "h3"), fleet.scales["h2"].clocks
    assert known is not None
    assert known.bound_ns == clocks["h2"].bound_ns + clocks["h3"].bound_ns
    assert known.hard_bound_ns == clocks["h2"].hard_bound_ns + clocks["h3"].hard_bound_ns
    for value in (known.sigma_ns, known.drift_sigma_ppb):
        assert value > 0
    assert known.sigma_ns == pytest.approx(np.hypot(clocks["h2"].sigma_ns, clocks["h3"].sigma_ns))


def test_our_own_edge_does_not_replace_the_common_result_it_tightens_its_bound(fleet: Fleet) -> None:
    common = fleet.between("h2", "h3")
    assert common is not None
    off = fleet.own("h2", "h3", offset_ns=fleet.own("h2", "h3").offset_ns + 30, bound_ns=100)
    known = fleet.between("h2", "h3", off)
    assert known is not None
    assert (known.offset_ns, known.drift_ppb) == (common.offset_ns, common.drift_ppb)
    assert 130 <= known.bound_ns <= 135 < common.bound_ns
    assert known.hard_bound_ns <= common.hard_bound_ns


@functools.cache
def settled() -> Fleet:
    """One for all examples that only ask it."""
    made = Fleet(CRYSTALS)
    made.round(6)
    return made


@given(st.integers(-1_900, 1_900))
def test_an_asymmetric_edge_of_ours_does_not_override_the_others(asymmetry_ns: int) -> None:
    """It is within what half a round trip allows, and only the others can tell that it is wrong."""
    fleet = settled()
    right = fleet.own("h2", "h3")
    wrong = replace(right, offset_ns=right.offset_ns + asymmetry_ns)
    known = fleet.between("h2", "h3", wrong)
    assert abs(fleet.error("h2", "h3", known)) <= 4
    assert known is not None
    assert known.bound_ns >= abs(fleet.error("h2", "h3", known))


@pytest.mark.parametrize("way", [-1, 1])
def test_a_common_result_that_is_physically_impossible_gives_way_to_our_edge(fleet: Fleet, way: int) -> None:
    """A clock was stepped since: no packet on our path can have left after it arrived."""
    common = fleet.between("h2", "h3")
    assert common is not None
    stepped = fleet.own("h2", "h3").offset_ns + way * 10_000_000
    own = fleet.own("h2", "h3", offset_ns=stepped, hard_low_ns=stepped - 2_000, hard_high_ns=stepped + 2_000)
    known = fleet.between("h2", "h3", own)
    assert known is not None
    assert known.offset_ns == stepped


def test_an_edge_that_shows_a_step_counts_more_than_the_common_result(fleet: Fleet) -> None:
    """However small: the common result is of before."""
    own = fleet.own("h2", "h3", offset_ns=fleet.own("h2", "h3").offset_ns + 700, stepped=True)
    known = fleet.between("h2", "h3", own)
    assert known is not None
    assert known.offset_ns == own.offset_ns


def test_an_old_common_result_gives_way_to_our_edge(fleet: Fleet) -> None:
    fresh_ns = FRESH_ROUNDS * ROUND_NS - 10**6  # clocks differ by 30 ppm
    for after_ns, is_common in ((fresh_ns, True), (fresh_ns + 2 * 10**6, False)):
        later = Fleet(CRYSTALS, fleet.true_ns + after_ns).own("h2", "h3", bound_ns=7_000)
        known = fleet.between("h2", "h3", later, after_ns)
        assert known is not None
        assert (known.epoch_ns != later.epoch_ns) == is_common
        assert known.state == "synchronised"


def test_when_both_are_gone_the_common_result_is_held_over_with_a_bound_that_grows(fleet: Fleet) -> None:
    seen = [fleet.between("h2", "h3", None, age * SECOND_NS) for age in range(0, 400, 4)]
    known = [each for each in seen if each is not None]
    assert len(known) == len(seen)
    states = [each.state for each in known]
    assert states[0] == "synchronised"
    assert states[1] == "holdover"
    assert states[-1] == "free_running"
    bounds = [each.bound_ns for each in known]
    assert bounds == sorted(bounds)
    assert bounds[-1] > 100 * bounds[0]
    for age, each in enumerate(known):
        assert abs(fleet.error("h2", "h3", each, 4 * age * SECOND_NS)) <= each.bound_ns


def test_a_host_that_is_cut_off_holds_over_what_it_knew_and_comes_back_at_once(fleet: Fleet) -> None:
    """It hears nobody, so it is its own reference, and has nobody to compare with."""
    fleet.down = frozenset({"h2"})
    bounds = []
    for _ in range(10):
        fleet.round()
        lonely, clock_ns = fleet.scales["h2"], CRYSTALS["h2"].at(fleet.true_ns)
        lonely.hear("h2", NOTHING, fleet.true_ns)
        if lonely.elected(fleet.true_ns) == "h2":
            lonely.adopt("h2", lonely.solve(clock_ns, fleet.true_ns, 0), fleet.true_ns)
        known = fleet.between("h2", "h3")
        assert known is not None
        bounds.append(known.bound_ns)
        assert abs(fleet.error("h2", "h3", known)) <= known.bound_ns
    assert lonely.elected(fleet.true_ns) == "h2"
    assert known.state == "holdover"
    assert bounds == sorted(bounds)
    fleet.down = frozenset()
    fleet.round(2)
    back = fleet.between("h2", "h3")
    assert back is not None
    assert (back.state, lonely.reference) == ("synchronised", "h1")


@pytest.mark.parametrize("low, high", [(-5_000, 1_000), (-1_000, 5_000), (1_000, 5_000)])
def test_the_hard_bound_of_an_edge_reaches_to_the_farther_end_of_its_interval(low: int, high: int) -> None:
    own = edge(CRYSTALS["h2"], "h3", CRYSTALS["h3"], BEGIN_NS)
    offset = as_offset(replace(own, hard_low_ns=own.offset_ns + low, hard_high_ns=own.offset_ns + high))
    assert offset.hard_bound_ns == 5_000
    assert (offset.offset_ns, offset.epoch_ns, offset.drift_ppb) == (own.offset_ns, own.epoch_ns, own.drift_ppb)
    assert (offset.bound_ns, offset.sigma_ns, offset.drift_sigma_ppb) == (own.bound_ns, own.sigma_ns, 10.0)


# ---- a clock that was stepped ----


def test_a_host_whose_edges_show_a_step_is_free_running_for_a_while_and_the_others_are_not(fleet: Fleet) -> None:
    fleet.crystals = {**CRYSTALS, "h3": CRYSTALS["h3"].moved(10_000_000)}
    fleet.round(stepped="h3")
    others = {"h1": "synchronised", "h2": "synchronised", "h4": "synchronised"}
    assert fleet.states() == {**others, "h3": "free_running"}
    for ours, peer in (("h2", "h3"), ("h3", "h2")):
        assert fleet.between(ours, peer) is None
    assert abs(fleet.error("h2", "h4", fleet.between("h2", "h4"))) <= 4
    rounds = 0
    while fleet.states()["h3"] == "free_running":
        fleet.round()
        rounds += 1
        assert fleet.states().items() >= others.items()
    assert rounds == 4, "1.5 s"
    assert abs(fleet.error("h2", "h3", fleet.between("h2", "h3"))) <= 4


def test_our_own_edge_to_a_stepped_host_is_what_is_known_of_it_at_once(fleet: Fleet) -> None:
    fleet.crystals = {**CRYSTALS, "h3": CRYSTALS["h3"].moved(10_000_000)}
    fleet.round(stepped="h3")
    own = fleet.own("h2", "h3", stepped=True)
    known = fleet.between("h2", "h3", own)
    assert known is not None
    assert known.offset_ns == own.offset_ns
    assert known.state == "synchronised"


EVERYBODY = [(one, other) for one in "abcd" for other in "abcd" if one != other]


@pytest.mark.parametrize(
    ("pairs", "hosts"),
    [
        ([], set()),
        (["ab"], set()),  # one edge may be mistaken
        (["ab", "ac", "ad"], {"a"}),
        (["ab", "ac"], {"a"}),  # more than half of three
        (["ab", "ac", "ad", "bc", "bd"], {"a", "b", "c", "d"}),  # two of four: better all than the wrong ones
    ],
)
def test_a_clock_was_stepped_when_most_neighbours_see_it_so(pairs: list[str], hosts: set[str]) -> None:
    assert stepped(EVERYBODY, {frozenset(pair) for pair in pairs}) == hosts


def test_of_two_hosts_alone_nobody_knows_which_one_was_stepped() -> None:
    assert stepped([("a", "b")], {frozenset("ab")}) == {"a", "b"}


def test_what_a_host_said_before_a_step_is_not_used_when_the_step_is_over() -> None:
    """h2 falls silent right before h3 is stepped: its word is fresh for longer than h3 is free running."""
    scale = Timescale("h1", SECOND_NS, "h1")
    before = {name: CRYSTALS[name] for name in ("h1", "h2", "h3")}
    after = before | {"h3": before["h3"].moved(50_000)}
    at_ns = BEGIN_NS + SECOND_NS // 4
    for name in before:
        scale.hear(name, edges_of(name, before, BEGIN_NS), BEGIN_NS)
    for name in ("h1", "h3"):
        scale.hear(name, edges_of(name, after, at_ns, but=["h2"] if name == "h1" else [], stepped=True), at_ns)

    def solved() -> Clocks:
        return scale.solve(before["h1"].at(at_ns), at_ns, 0)

    assert {clock.host: clock.state for clock in solved().hosts}["h3"] == "free_running"
    at_ns += 2 * SECOND_NS
    for name in ("h1", "h3"):
        scale.hear(name, edges_of(name, after, at_ns), at_ns)
    clocks = {clock.host: clock for clock in solved().hosts}
    for name, clock in clocks.items():
        assert clock.state == "synchronised"
        assert clock.outlier_edges == 0
        assert clock.offset_ns == pytest.approx(after[name].at(at_ns) - after["h1"].at(at_ns), abs=2)
