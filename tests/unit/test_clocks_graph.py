"""Clocks of all hosts at once: against a dense solver, against the truth, and what must not matter."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pytools.estimators.clock_graph import Clocks, Edges, solve
from pytools.estimators.laplacian import Graph
from pytools.estimators.potentials import variances
from pytools.estimators.windows import MISSING

S = 10**9
DAY_NS = 86_400 * S
NOW = 1_000 * S  # true time that is asked for
seeds = st.integers(0, 2**32 - 1)
few = settings(max_examples=20)
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Fleet:
    """Hosts with known clocks (lines over true time) and the edges between them."""

    offset_ns: Ints
    drift: NDArray[np.float64]
    edges: Edges

    def reading(self, host: int) -> int:
        return NOW + int(self.offset_ns[host]) + round(float(self.drift[host]) * NOW)

    def solve(self, reference: int = 0) -> Clocks:
        return solve(self.edges, len(self.offset_ns), reference, self.reading(reference))

    def errors(self, clocks: Clocks, reference: int = 0) -> Ints:
        readings = np.array([self.reading(host) for host in range(len(self.offset_ns))])
        return clocks.offset_ns - (readings - self.reading(reference))

    def with_edges(self, **columns: object) -> Fleet:
        return replace(self, edges=replace(self.edges, **columns))

    def shifted(self, by_ns: Ints) -> Fleet:
        """With other offsets of the edges, and hard intervals around these."""
        edges = self.edges
        return self.with_edges(
            offset_ns=edges.offset_ns + by_ns,
            hard_low_ns=edges.hard_low_ns + by_ns,
            hard_high_ns=edges.hard_high_ns + by_ns,
        )


def fleet(seed: int, pairs: list[tuple[int, int]], hosts: int, noise_ns: float = 0.0, drift_ppm: float = 50.0) -> Fleet:
    rng = np.random.default_rng(seed)
    offset = rng.integers(-3 * DAY_NS, 3 * DAY_NS, hosts)
    drift = rng.uniform(-drift_ppm, drift_ppm, hosts) * 1e-6
    owner, peer = np.array(pairs, np.intp).reshape(-1, 2).T
    count = len(owner)
    when = NOW - rng.integers(0, 2 * S, count)  # of each edge's epoch
    epoch = when + offset[owner] + np.rint(drift[owner] * when).astype(np.int64)
    sigma = rng.uniform(5, 20, count)
    error = rng.normal(0, 1, count) * sigma * bool(noise_ns) * noise_ns
    between = np.rint((drift[peer] - drift[owner]) * when + error).astype(np.int64) + offset[peer] - offset[owner]
    relative = ((1 + drift[peer]) / (1 + drift[owner]) - 1) * 1e9 + rng.normal(0, 1, count) * noise_ns * 10
    return Fleet(
        offset,
        drift,
        Edges(
            owner,
            peer,
            epoch,
            between,
            relative,
            sigma,
            np.full(count, 10.0),
            np.full(count, 500),
            between - 3_000,
            between + 4_000,
        ),
    )


def rings(seed: int, hosts: int, count: int) -> list[tuple[int, int]]:
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        ring = rng.permutation(hosts).tolist()
        found += list(zip(ring, ring[1:] + ring[:1], strict=True))
    return found


SHAPES = {
    "ring": [(host, (host + 1) % 50) for host in range(50)],
    "chain": [(host + 1, host) for host in range(49)],
    "star": [(0, host) for host in range(1, 50)],
    "expander": rings(5, 50, 4),
    "two crowds and a bridge": [
        *((a, b) for a in range(25) for b in range(a)),
        *((a, b) for a in range(25, 50) for b in range(25, a)),
        (3, 40),
    ],
}


@pytest.mark.parametrize("shape", SHAPES)
def test_exact_edges_give_exact_clocks(shape: str) -> None:
    made = fleet(1, SHAPES[shape], 50)
    clocks = made.solve()
    assert clocks.known.all()
    assert np.abs(made.errors(clocks)).max() <= 10  # each edge is rounded to a nanosecond, and chains add up
    truth = (1 - (1 + made.drift[0]) / (1 + made.drift)) * 1e9
    assert np.abs(clocks.drift_ppb - truth).max() < 1e-3
    assert clocks.epoch_ns.tolist() == [
        made.reading(host) + error for host, error in enumerate(made.errors(clocks).tolist())
    ]
    assert not clocks.is_outlier.any()
    assert clocks.offset_ns[0] == clocks.bound_ns[0] == clocks.hard_bound_ns[0] == 0


@few
@given(seeds, st.sampled_from(sorted(set(SHAPES) - {"ring"})))  # what a single loop says is not taken at its word
def test_offsets_are_those_of_dense_least_squares(seed: int, shape: str) -> None:
    made = fleet(seed, SHAPES[shape], 50, noise_ns=0.5)  # quieter than stated, so that nothing is down-weighted
    made = made.with_edges(drift_ppb=fleet(seed, SHAPES[shape], 50).edges.drift_ppb)  # drifts exact
    clocks = made.solve()
    edges = made.edges
    matrix = np.zeros((len(edges.owner), 50))
    rows = np.arange(len(edges.owner))
    matrix[rows, edges.peer] += 1
    matrix[rows, edges.owner] -= 1
    readings = np.array([made.reading(host) for host in range(50)])
    since_s = (readings[edges.owner] - edges.epoch_ns) * 1e-9
    steps = readings[edges.peer] - readings[edges.owner]
    right = (edges.offset_ns - steps) + edges.drift_ppb * since_s
    weights = 1 / edges.sigma_ns
    dense, *_ = np.linalg.lstsq(matrix[:, 1:] * weights[:, None], right * weights, rcond=None)
    assert np.abs(made.errors(clocks)[1:] - dense).max() <= 1.6  # nanoseconds are rounded twice
    inverse = np.linalg.inv((matrix[:, 1:] * weights[:, None] ** 2).T @ matrix[:, 1:])
    statistics = np.sqrt(np.diagonal(inverse))
    assert (clocks.sigma_ns[1:] > 0.99 * statistics).all()


@few
@given(seeds)
def test_errors_are_as_large_as_they_say(seed: int) -> None:
    made = fleet(seed, rings(seed, 400, 5), 400, noise_ns=1.0)  # large enough for the variances to be sampled
    clocks = made.solve()
    errors = made.errors(clocks)[1:]
    scaled = errors / clocks.sigma_ns[1:]
    spread = (errors - errors.mean()).std()  # the reference's own error is common to all
    assert np.abs(scaled).max() < 6
    assert 0.5 * spread < np.median(clocks.sigma_ns[1:]) < 3 * spread
    assert (np.abs(made.errors(clocks)) <= clocks.bound_ns).all()
    assert (np.abs(made.errors(clocks)) <= clocks.hard_bound_ns).all()


@pytest.mark.parametrize(("pairs", "within"), [(rings(3, 400, 5), 0.75), (SHAPES["ring"], 0.001)])
def test_variances_are_those_of_the_inverse(pairs: list[tuple[int, int]], within: float) -> None:
    hosts = 1 + max(max(pair) for pair in pairs)
    edges = fleet(4, pairs, hosts).edges
    graph = Graph(edges.owner, edges.peer, hosts)
    exact = np.diagonal(np.linalg.pinv(graph.dense(edges.sigma_ns**-2)[1:, 1:]))
    ratio = variances(graph, edges.sigma_ns**-2, 0)[1:] / exact
    assert ratio == pytest.approx(np.ones(hosts - 1), abs=within)


def test_variances_of_a_large_poor_graph_are_of_the_right_size() -> None:
    edges = fleet(4, [(host, (host + 1) % 400) for host in range(400)], 400).edges
    graph = Graph(edges.owner, edges.peer, 400)
    exact = np.diagonal(np.linalg.inv(graph.dense(edges.sigma_ns**-2)[1:, 1:]))
    ratio = variances(graph, edges.sigma_ns**-2, 0)[1:] / exact
    assert ratio.min() > 0.25
    assert ratio.max() < 3


# ---- what must not matter ----


@few
@given(seeds)
def test_permuting_hosts_permutes_the_result(seed: int) -> None:
    made = fleet(seed, rings(seed, 30, 3), 30, noise_ns=1.0)
    order = np.random.default_rng(seed).permutation(30)  # host h is called order[h]
    rows = np.random.default_rng(seed + 1).permutation(len(made.edges.owner))
    renamed = replace(made.edges, owner=order[made.edges.owner], peer=order[made.edges.peer]).take(rows)
    clocks = made.solve()
    again = solve(renamed, 30, int(order[0]), made.reading(0))
    assert np.abs(again.offset_ns[order] - clocks.offset_ns).max() <= 2
    assert again.drift_ppb[order] == pytest.approx(clocks.drift_ppb, abs=0.01)
    assert again.sigma_ns[order] == pytest.approx(clocks.sigma_ns, rel=0.02)
    assert np.abs(again.hard_bound_ns[order] - clocks.hard_bound_ns).max() <= 4


@few
@given(seeds, st.integers(-DAY_NS, DAY_NS))
def test_shifting_all_clocks_changes_no_offset(seed: int, shift: int) -> None:
    made = fleet(seed, rings(seed, 30, 3), 30, noise_ns=1.0)
    moved = solve(replace(made.edges, epoch_ns=made.edges.epoch_ns + shift), 30, 0, made.reading(0) + shift)
    clocks = made.solve()
    assert np.abs(moved.offset_ns - clocks.offset_ns).max() <= 1
    assert np.abs(moved.epoch_ns - clocks.epoch_ns - shift).max() <= 1


@few
@given(seeds)
def test_shifting_one_clock_shifts_its_offset_alone(seed: int) -> None:
    made = fleet(seed, rings(seed, 30, 3), 30, noise_ns=1.0)
    edges, host, shift = made.edges, 7, 3 * DAY_NS + 12_345
    moved = replace(
        edges,
        epoch_ns=edges.epoch_ns + shift * (edges.owner == host),
        offset_ns=edges.offset_ns + shift * (edges.peer == host) - shift * (edges.owner == host),
        hard_low_ns=edges.hard_low_ns + shift * (edges.peer == host) - shift * (edges.owner == host),
        hard_high_ns=edges.hard_high_ns + shift * (edges.peer == host) - shift * (edges.owner == host),
    )
    change = solve(moved, 30, 0, made.reading(0)).offset_ns - made.solve().offset_ns
    assert np.abs(change - shift * (np.arange(30) == host)).max() <= 2


def test_the_same_edges_told_by_the_other_end_give_the_same() -> None:
    made = fleet(2, rings(2, 30, 3), 30)
    edges = made.edges
    rate = edges.drift_ppb * 1e-9
    other = replace(
        edges,
        owner=edges.peer,
        peer=edges.owner,
        epoch_ns=edges.epoch_ns + edges.offset_ns,
        offset_ns=-edges.offset_ns,
        drift_ppb=-rate / (1 + rate) * 1e9,
        hard_low_ns=-edges.hard_high_ns,
        hard_high_ns=-edges.hard_low_ns,
    )
    assert np.abs(solve(other, 30, 0, made.reading(0)).offset_ns - made.solve().offset_ns).max() <= 2


# ---- edges that are wrong ----


@pytest.mark.parametrize("wrong_ns", [100_000, -100_000, 10_000_000, 40 * S])
def test_an_asymmetric_edge_moves_nobody_and_is_named(wrong_ns: int) -> None:
    for seed in range(10):
        made = fleet(seed, rings(seed, 8, 3), 8, noise_ns=1.0)
        clean = made.solve()
        bad = seed % len(made.edges.owner)
        offset = made.edges.offset_ns.copy()
        offset[bad] += wrong_ns
        clocks = made.with_edges(offset_ns=offset).solve()
        assert np.abs(clocks.offset_ns - clean.offset_ns).max() < 60
        assert np.flatnonzero(clocks.is_outlier & ~clean.is_outlier).tolist() == [bad]
        ends = made.edges.owner[bad], made.edges.peer[bad]
        assert (clocks.outlier_edges - clean.outlier_edges).tolist() == [int(host in ends) for host in range(8)]


def test_an_outlier_is_found_where_edges_are_few() -> None:
    for seed in range(8):
        made = fleet(seed, rings(seed, 6, 2), 6, noise_ns=1.0)
        clean = made.solve()
        for bad in range(12):
            offset = made.edges.offset_ns + 100_000 * (np.arange(12) == bad)
            assert np.abs(made.with_edges(offset_ns=offset).solve().offset_ns - clean.offset_ns).max() < 100


def test_many_wrong_edges_among_many_are_outvoted() -> None:
    made = fleet(3, rings(3, 500, 5), 500, noise_ns=1.0)
    rng = np.random.default_rng(3)
    wrong = rng.random(len(made.edges.owner)) < 0.1
    offset = made.edges.offset_ns + wrong * rng.choice([-1, 1], len(wrong)) * rng.integers(50_000, 200_000, len(wrong))
    clocks = made.with_edges(offset_ns=offset).solve()
    assert np.abs(made.errors(clocks)).max() < 60
    assert (clocks.is_outlier[wrong]).mean() > 0.99
    assert (clocks.is_outlier[~wrong]).mean() < 0.02


@pytest.mark.parametrize("step_ns", [10_000_000, -10_000_000, 300_000, -50_000])
@pytest.mark.parametrize("hosts", [3, 4, 5])
def test_a_clock_just_stepped_moves_no_other(hosts: int, step_ns: int) -> None:
    """Its edges are told one after the other: whichever of them are of after the step, the rest of before it."""
    everybody = [(a, b) for a in range(hosts) for b in range(hosts) if a != b]
    its = [number for number, pair in enumerate(everybody) if hosts - 1 in pair]
    for seed, after in enumerate(itertools.product([False, True], repeat=len(its))):
        made = fleet(seed, everybody, hosts, noise_ns=1.0)
        edges, moved = made.edges, np.zeros(len(everybody), np.int64)
        moved[its] = np.where(edges.peer[its] == hosts - 1, step_ns, -step_ns) * np.array(after)
        made = made.shifted(moved)
        clocks = made.solve()
        errors, bounds = np.abs(made.errors(clocks))[:-1], clocks.bound_ns[:-1]
        assert (errors <= bounds).all()
        assert bounds.max() <= 5_000, "no more than what their own round trips leave open"


def test_edges_that_are_all_a_little_off_widen_the_error() -> None:
    made = fleet(3, rings(3, 100, 5), 100, noise_ns=1.0)
    offset = made.edges.offset_ns + np.random.default_rng(1).normal(0, 200, len(made.edges.owner)).astype(np.int64)
    clocks = made.with_edges(offset_ns=offset).solve()
    assert np.abs(made.errors(clocks)[1:] / clocks.sigma_ns[1:]).max() < 5
    assert clocks.sigma_ns[1:].min() > 40


def test_hard_bounds_hold_with_every_path_asymmetric() -> None:
    rng = np.random.default_rng(9)
    made = fleet(9, rings(9, 60, 3), 60)
    edges = made.edges
    skew = rng.integers(-2_900, 3_900, len(edges.owner))  # anywhere within the hard intervals
    moved = made.with_edges(offset_ns=edges.offset_ns + skew)
    clocks = moved.solve()
    errors = np.abs(moved.errors(clocks))
    assert (errors <= clocks.hard_bound_ns).all()
    assert errors.max() > 500


@pytest.mark.parametrize("shift_ns", [400_000, -400_000])
def test_a_bound_holds_when_all_edges_of_a_port_err_alike(shift_ns: int) -> None:
    """A full queue at one host shifts its edges the same way; a single one among them is right, and says so."""
    everybody = [(a, b) for a in range(8) for b in range(8) if a != b]
    made = fleet(4, everybody, 8, noise_ns=1.0)
    owner, peer = made.edges.owner, made.edges.peer
    touched = (owner == 7) | (peer == 7)
    right = (owner == 7) & (peer == 3)
    sigma = np.where(right, 18_000.0, np.where(touched, 100_000.0, made.edges.sigma_ns))
    moved = np.where(touched & ~right, np.where(peer == 7, shift_ns, -shift_ns), 0)
    clocks = made.with_edges(
        offset_ns=made.edges.offset_ns + moved,
        sigma_ns=sigma,
        bound_ns=np.where(right, 81_000, np.where(touched, 850_000, made.edges.bound_ns)),
    ).solve()
    errors = np.abs(made.errors(clocks))
    assert errors[7] > 50_000, "the shift is felt, or this tests nothing"
    assert (errors <= clocks.bound_ns).all()
    assert errors[:7].max() < 60


def test_a_stale_hard_interval_is_not_believed() -> None:
    made = fleet(2, rings(2, 8, 3), 8)
    stale = np.arange(len(made.edges.owner)) == 0
    clocks = made.shifted(stale * 10_000_000).solve()
    assert (np.abs(made.errors(clocks)) <= clocks.hard_bound_ns).all()
    assert clocks.hard_bound_ns.max() < 20_000


# ---- little or odd input ----


def test_no_edges_leave_the_reference_alone() -> None:
    made = fleet(0, [], 3)
    clocks = solve(made.edges, 3, 1, 12_345)
    assert clocks.known.tolist() == [False, True, False]
    assert clocks.epoch_ns.tolist() == [MISSING, 12_345, MISSING]
    assert clocks.offset_ns.tolist() == [MISSING, 0, MISSING]


def test_hosts_without_a_way_to_the_reference_are_unknown() -> None:
    made = fleet(0, [(0, 1), (1, 2), (3, 4), (4, 5), (5, 3)], 7)
    clocks = made.solve()
    assert clocks.known.tolist() == [True, True, True, False, False, False, False]
    assert np.abs(made.errors(clocks)[:3]).max() <= 2
    assert (clocks.bound_ns[3:] == MISSING).all()
    assert clocks.neighbours.tolist() == [1, 2, 1, 0, 0, 0, 0]
    other_side = made.solve(reference=4)
    assert other_side.known.tolist() == [False, False, False, True, True, True, False]


def test_a_host_compared_with_itself_is_no_edge() -> None:
    made = fleet(0, [(0, 1), (1, 1), (0, 0)], 2)
    clocks = made.solve()
    assert np.abs(made.errors(clocks)).max() <= 1
    assert clocks.neighbours.tolist() == [1, 1]


def test_repeated_edges_count_as_one_neighbour_and_sharpen() -> None:
    once, thrice = fleet(1, [(0, 1)], 2, noise_ns=1.0), fleet(1, [(0, 1)] * 3 + [(1, 0)] * 6, 2, noise_ns=1.0)
    assert thrice.solve().neighbours.tolist() == [1, 1]
    assert thrice.solve().sigma_ns[1] < once.solve().sigma_ns[1]
