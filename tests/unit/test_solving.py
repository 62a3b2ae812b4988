"""All hosts' clocks from what they told of their edges: the truth, whatever clocks, ends and hosts are exchanged."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from oscillators import SECOND_NS, Crystal, edge, edges_of

from pytools.estimators.offsets import UNBOUNDED_NS
from pytools.sources.clocks.messages import Edge, HostClock
from pytools.sources.clocks.solving import solved

AT_NS = 5_000 * SECOND_NS  # true time
NAMES = ("h1", "h2", "h3", "h4", "h5")

crystal = st.builds(Crystal, st.integers(-SECOND_NS, SECOND_NS), st.integers(-60_000, 60_000))
fleets = st.lists(crystal, min_size=len(NAMES), max_size=len(NAMES)).map(
    lambda each: dict(zip(NAMES, each, strict=True))
)


def told_by(crystals: Mapping[str, Crystal], true_ns: int = AT_NS, errors: int | None = None) -> list[tuple[str, Edge]]:
    """Every host's edges to all the others, each a little wrong where a seed for errors is given."""
    chance = random.Random(errors)

    def wrong() -> int:
        return 0 if errors is None else round(chance.gauss(0, 10))

    told = []
    for host in crystals:
        for each in edges_of(host, crystals, true_ns).edges:
            offset = each.offset_ns + wrong()
            told.append((host, edge(crystals[host], each.peer, crystals[each.peer], true_ns, offset_ns=offset)))
    return told


def solve(
    crystals: Mapping[str, Crystal], told: list[tuple[str, Edge]], reference: str = "h1", later_ns: int = 0
) -> dict[str, HostClock]:
    """By name, as of `later_ns` after the edges."""
    found = solved(reference, crystals[reference].at(AT_NS + later_ns), told, {}, set())
    assert [each.host for each in found] == sorted(each.host for each in found)
    return {each.host: each for each in found}


@given(fleets, st.integers(0, 2 * SECOND_NS), st.sampled_from([0, 10**15]))
def test_faultless_edges_give_the_truth(crystals: dict[str, Crystal], later_ns: int, by_ns: int) -> None:
    """At the moment asked for, which is later than the edges' own; all clocks may be days ahead."""
    crystals = {name: each.moved(by_ns) for name, each in crystals.items()}
    found = solve(crystals, told_by(crystals), later_ns=later_ns)
    assert set(found) == set(NAMES)
    for name, clock in found.items():
        ours, reference = crystals[name], crystals["h1"]
        assert abs(clock.epoch_ns - ours.at(AT_NS + later_ns)) <= 4
        assert abs(clock.offset_ns - (ours.at(AT_NS + later_ns) - reference.at(AT_NS + later_ns))) <= 4
        # Per second of its own clock.
        assert clock.drift_ppb == pytest.approx(-reference.against(ours), abs=0.01)
        assert clock.state == "synchronised"
        assert (clock.neighbours, clock.outlier_edges) == (4, 0)
        assert (clock.pairs_kept, clock.pairs_rejected) == (8 * 80, 8 * 20)
        assert clock.bound_ns <= clock.hard_bound_ns < UNBOUNDED_NS


@given(fleets, st.integers(0, 2**32), st.sampled_from([10**15, -(10**15), 1]))
def test_shifting_all_clocks_moves_no_offset(crystals: dict[str, Crystal], errors: int, by_ns: int) -> None:
    moved = {name: each.moved(by_ns) for name, each in crystals.items()}
    plain, shifted = (solve(each, told_by(each, errors=errors)) for each in (crystals, moved))
    for name in NAMES:
        assert abs(shifted[name].offset_ns - plain[name].offset_ns) <= 1
        assert abs(shifted[name].epoch_ns - plain[name].epoch_ns - by_ns) <= 1
        assert shifted[name].drift_ppb == pytest.approx(plain[name].drift_ppb, abs=1e-3)
        assert shifted[name].bound_ns == pytest.approx(plain[name].bound_ns, abs=1)


@given(fleets, st.integers(0, 2**32), st.permutations(NAMES))
def test_renaming_hosts_renames_the_result(crystals: dict[str, Crystal], errors: int, names: list[str]) -> None:
    """In another order, and with another one first."""
    new = dict(zip(NAMES, names, strict=True))
    told = told_by(crystals, errors=errors)
    plain = solve(crystals, told)
    renamed = [(new[host], edge_to(each, new[each.peer])) for host, each in told]
    found = solve({new[name]: each for name, each in crystals.items()}, renamed, reference=new["h1"])
    for name in NAMES:
        one, other = plain[name], found[new[name]]
        assert abs(other.offset_ns - one.offset_ns) <= 1
        assert abs(other.epoch_ns - one.epoch_ns) <= 1
        assert other.drift_ppb == pytest.approx(one.drift_ppb, abs=1e-3)
        assert other.bound_ns == pytest.approx(one.bound_ns, abs=1)
        assert (other.state, other.neighbours, other.outlier_edges) == (one.state, one.neighbours, one.outlier_edges)


def edge_to(told: Edge, peer: str) -> Edge:
    return replace(told, peer=peer)


@given(crystal, crystal, st.integers(0, 2**32))
def test_swapping_the_ends_flips_the_sign(one: Crystal, other: Crystal, errors: int) -> None:
    """The same edges, with the one host or the other as the reference, asked for the same moment."""
    crystals = {"a": one, "b": other}
    told = told_by(crystals, errors=errors)
    forward = {each.host: each for each in solved("a", one.at(AT_NS), told, {}, set())}["b"]
    back = {each.host: each for each in solved("b", forward.epoch_ns, told, {}, set())}["a"]
    assert abs(forward.offset_ns + back.offset_ns) <= 1
    rate = back.drift_ppb * 1e-9
    assert forward.drift_ppb == pytest.approx(-rate / (1 - rate) * 1e9, abs=1e-3)
    assert forward.bound_ns == pytest.approx(back.bound_ns, abs=1)


@given(fleets, st.integers(0, 2**32))
def test_the_order_in_which_hosts_told_does_not_matter(crystals: dict[str, Crystal], seed: int) -> None:
    told = told_by(crystals, errors=seed)
    mixed = list(told)
    random.Random(seed).shuffle(mixed)
    for name, clock in solve(crystals, mixed).items():
        assert abs(clock.offset_ns - solve(crystals, told)[name].offset_ns) <= 1


def test_a_host_that_nobody_reaches_is_free_running_and_the_others_are_not() -> None:
    crystals = {name: Crystal(10**8 * place, 1_000 * place) for place, name in enumerate(NAMES)}
    told = [(host, each) for host, each in told_by(crystals) if "h5" not in (host, each.peer)]
    alone = [("h5", edge(crystals["h5"], "h6", Crystal(), AT_NS))]
    found = solve(crystals, told + alone)
    assert {name: clock.state for name, clock in found.items()} == {
        **dict.fromkeys(("h1", "h2", "h3", "h4"), "synchronised"),
        **dict.fromkeys(("h5", "h6"), "free_running"),
    }
    assert (found["h5"].offset_ns, found["h5"].bound_ns, found["h5"].hard_bound_ns) == (0, 0, UNBOUNDED_NS)
    assert found["h5"].neighbours == 0


def test_a_host_that_others_only_told_of_is_known_all_the_same() -> None:
    """Its agent is dead, or not heard of; it still answers probes."""
    crystals = {name: Crystal(10**8 * place, 1_000 * place) for place, name in enumerate(NAMES)}
    told = [(host, each) for host, each in told_by(crystals) if host != "h5"]
    clock = solve(crystals, told)["h5"]
    assert clock.state == "synchronised"
    assert clock.offset_ns == crystals["h5"].at(AT_NS) - crystals["h1"].at(AT_NS)
    assert clock.slew_ppb is None


def test_hosts_in_doubt_are_free_running_though_their_edges_are_there() -> None:
    crystals = {name: Crystal(10**8 * place) for place, name in enumerate(NAMES)}
    slews = {"h1": 5.0, "h3": None}
    found = solved("h1", crystals["h1"].at(AT_NS), told_by(crystals), slews, {"h3"})
    assert [each.state for each in found] == ["synchronised", "synchronised", "free_running", *["synchronised"] * 2]
    assert [each.slew_ppb for each in found] == [5.0, None, None, None, None]


@pytest.mark.parametrize("step_ns", [3_000, 10_000, 100_000])
def test_nobody_is_compared_by_way_of_a_host_in_doubt(step_ns: int) -> None:
    """Whichever of its edges are of after the step."""
    crystals = {name: Crystal(10**8 * place, 1_000 * place) for place, name in enumerate(NAMES[:4])}
    others = {name: crystals[name] for name in ("h1", "h2", "h4")}
    at_ns, told = crystals["h1"].at(AT_NS), told_by(crystals, errors=1)
    apart = {
        each.host: each for each in solved("h1", at_ns, [t for t in told if "h3" not in (t[0], t[1].peer)], {}, set())
    }
    assert set(apart) == set(others)
    for after in itertools.product([0, 1], repeat=6):
        turn = iter(after)
        mixed = []
        for host, each in told:
            sign = {"h3": -1}.get(host, 1) * next(turn) if "h3" in (host, each.peer) else 0
            offset_ns = each.offset_ns + sign * step_ns
            mixed.append((host, edge(crystals[host], each.peer, crystals[each.peer], AT_NS, offset_ns=offset_ns)))
        found = {each.host: each for each in solved("h1", at_ns, mixed, {}, {"h3"})}
        assert found.pop("h3").state == "free_running"
        assert found == apart


def test_nobody_is_synchronised_with_a_reference_that_was_stepped() -> None:
    crystals = {name: Crystal(10**8 * place, 1_000 * place) for place, name in enumerate(NAMES)}
    found = solved("h1", crystals["h1"].at(AT_NS), told_by(crystals), {}, {"h1"})
    assert {each.state for each in found} == {"free_running"}
    assert [each.offset_ns for each in found] == [
        each.offset_ns for each in solve(crystals, told_by(crystals)).values()
    ]


def test_a_longer_way_on_one_edge_of_many_moves_nothing_and_is_counted() -> None:
    crystals = {name: Crystal(10**8 * place, 1_000 * place) for place, name in enumerate(NAMES)}
    told = []
    for host, each in told_by(crystals):
        longer = 100_000 * {("h2", "h3"): 1, ("h3", "h2"): -1}.get((host, each.peer), 0)
        told.append(
            (host, edge(crystals[host], each.peer, crystals[each.peer], AT_NS, offset_ns=each.offset_ns + longer))
        )
    for name, clock in solve(crystals, told).items():
        assert abs(clock.offset_ns - (crystals[name].at(AT_NS) - crystals["h1"].at(AT_NS))) <= 100
        assert clock.outlier_edges == (2 if name in ("h2", "h3") else 0)


def test_without_edges_the_reference_knows_itself() -> None:
    (only,) = solved("h1", AT_NS, [], {}, set())
    assert (only.host, only.state, only.offset_ns, only.bound_ns) == ("h1", "synchronised", 0, 0)
