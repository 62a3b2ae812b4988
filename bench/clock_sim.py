"""Clocks of a simulated fleet: how far the estimates are from the truth, and whether their bounds hold.

40 hosts, each with K random neighbours, 2 s windows, 200 coded pairs per second and direction over every edge, links
at 90 % load with heavy-tailed work (the model is stated in _fleet.py), drifts within 30 ppm, offsets within 1 s, 20 ns
of noise on every stamp; `k10_wild`: 1 % of the stamps wrong by up to 500 ns besides. An error is a host's estimated
offset against the reference less the true one when the window ends, for every host but the reference; no common part
is taken out. `_middle` is the same in the middle of the window, where offsets do not hang on drifts. Every window has
new clocks, a new graph, and no prior.

`default`, `load97` and `wander100` are running agents: a result every second from a window of 2 s, with what was known
before. 20 hosts, both ends of an edge measure it; errors count once 8 s have passed. `default` probes as shipped.
`load97` sends 200 trains per second through links at 97 % load. `wander100` sends 100, and each rate changes by
up to 0.1 ppm/s, a sinusoid of 10 s. Their `coverage` is that of 4.5 standard deviations, without any allowance.

`pairwise` is the error of single edges at the window's end, before the loop step. The other methods stand for the edge
step only (_clock_methods.py) and are given the same loop step, but `plain`: a linear programme per edge and
unweighted least squares over the graph. Seeded; `--quick` runs fewer windows, `--plot FILE` draws the error over K.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import _plot
import numpy as np
from _clock_methods import METHODS, Method
from _common import emit, note
from _fleet import Clocks, Floats, Network, Window, draw_clocks, edge_stream, edge_window, regular_graph

from pytools.config import Clocks as ShippedClocks
from pytools.config import Probe
from pytools.estimators.clock_graph import Clocks as Solved
from pytools.estimators.clock_graph import Edges, solve
from pytools.estimators.clocks import EdgeFit, fit_edge, headed
from pytools.estimators.congested import Floor, doubted, noise_ns, tells_round_trip, tempered
from pytools.estimators.drift_trends import DriftTrend, DriftTrends
from pytools.estimators.offsets import MEMORY_S, WANDER_PPB_PER_S, wander, wander_between

HOSTS = 40
SPAN_NS = 2 * 10**9
BEGIN_NS = 10**12
END = BEGIN_NS + SPAN_NS
TOLERANCE_NS = 150
ASYMMETRY_SHARE = 0.1
QUIET = Network()
WILD = Network(wild_share=0.01)
FINE = Network(service_ns=120.0, wild_share=0.01)  # 1,500 bytes at 100 Gbit/s: queues hardly longer than the noise


@dataclass(frozen=True)
class Fleet:
    """One window of all edges."""

    clocks: Clocks
    edges: list[tuple[int, int]]
    windows: list[Window]


@dataclass
class Tally:
    """Errors over many windows, in nanoseconds."""

    end: list[float] = field(default_factory=list)
    middle: list[float] = field(default_factory=list)
    bounds: list[int] = field(default_factory=list)
    within: list[bool] = field(default_factory=list)
    within_statistics: list[bool] = field(default_factory=list)
    within_hard: list[bool] = field(default_factory=list)


def fleet(seed: int, neighbours: int, network: Network) -> Fleet:
    rng = np.random.default_rng(seed)
    clocks = draw_clocks(rng, HOSTS)
    edges = [(int(a), int(b)) for a, b in regular_graph(rng, HOSTS, neighbours)]
    windows = [
        edge_window(rng, BEGIN_NS, SPAN_NS, network, clocks, owner, peer, rng.uniform(*network.propagation_ns))
        for owner, peer in edges
    ]
    return Fleet(clocks, edges, windows)


def ours(window: Window) -> EdgeFit | None:
    return fit_edge(*window, tolerance_ns=TOLERANCE_NS, asymmetry_share=ASYMMETRY_SHARE)


def solved(made: Fleet, method: Method, tally: Tally) -> None:
    """Fit every edge, solve the graph, and add what it is off by."""
    fits = [method(window) for window in made.windows]
    wanders = np.full(HOSTS, WANDER_PPB_PER_S)
    add(made.clocks, made.edges, fits, END, wanders, tally)


def add(
    clocks: Clocks,
    pairs: list[tuple[int, int]],
    lines: list[EdgeFit | None],
    end_ns: int,
    wanders: Floats,
    tally: Tally,
    trends: DriftTrends | None = None,
) -> Solved:
    """Solve the graph, and add what it is off by in the middle and at the end of a window."""
    fits = [(edge, fit) for edge, fit in zip(pairs, lines, strict=True) if fit]
    hosts = len(clocks.offset_ns)

    def column(name: str, kind: type) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.array([getattr(fit, name) for _, fit in fits], kind)

    edges = Edges(
        owner=np.array([owner for (owner, _), _ in fits]),
        peer=np.array([peer for (_, peer), _ in fits]),
        epoch_ns=column("epoch_ns", np.int64),
        offset_ns=column("offset_ns", np.int64),
        drift_ppb=column("drift_ppb", float).astype(np.float64),
        sigma_ns=column("sigma_ns", float).astype(np.float64),
        drift_sigma_ppb=column("drift_sigma_ppb", float).astype(np.float64),
        bound_ns=column("bound_ns", np.int64),
        hard_low_ns=column("hard_low_ns", np.int64),
        hard_high_ns=column("hard_high_ns", np.int64),
    )
    for true_ns, errors in ((end_ns - SPAN_NS // 2, tally.middle), (end_ns, tally.end)):
        readings = clocks.readings(true_ns)
        headed = None if trends is None else trends.of(NAMES)
        result = solve(edges, hosts, 0, int(readings[0]), wanders, headed)
        off = result.offset_ns[1:] - (readings[1:] - readings[0])
        errors.extend(off.tolist())
        if true_ns == end_ns:
            tally.bounds += result.bound_ns[1:].tolist()
            tally.within += (np.abs(off) <= result.bound_ns[1:]).tolist()
            tally.within_statistics += (np.abs(off) <= 4.5 * result.sigma_ns[1:]).tolist()
            tally.within_hard += (np.abs(off) <= result.hard_bound_ns[1:]).tolist()
    return result


def pairwise(made: Fleet) -> list[float]:
    """What single edges are off by when the window ends."""
    readings = made.clocks.readings(END)
    errors = []
    for (owner, peer), window in zip(made.edges, made.windows, strict=True):
        if (fit := ours(window)) is not None:
            errors.append(float(fit.at(int(readings[owner])) - (readings[peer] - readings[owner])))
    return errors


def plain(made: Fleet, method: Method) -> list[float]:
    """Unweighted least squares over the graph, of edges carried to the window's end by their own drifts."""
    readings = made.clocks.readings(END)
    matrix = np.zeros((len(made.edges), HOSTS))
    right = np.zeros(len(made.edges))
    for row, ((owner, peer), window) in enumerate(zip(made.edges, made.windows, strict=True)):
        if (fit := method(window)) is not None:
            matrix[row, peer], matrix[row, owner] = 1.0, -1.0
            right[row] = fit.at(int(readings[owner])) - (readings[peer] - readings[owner])
    errors, *_ = np.linalg.lstsq(matrix[:, 1:], right, rcond=None)
    found: list[float] = errors.tolist()
    return found


def p99(errors: Iterable[float]) -> float:
    return float(np.percentile(np.abs(np.array(list(errors))), 99))


def k10(case: str, network: Network, count: int, alternatives: int) -> None:
    """Our estimate, its parts, and the other methods, on the same windows."""
    tally, others = Tally(), {name: Tally() for name in METHODS} if alternatives else {}
    edges: list[float] = []
    simple: list[float] = []
    for seed in range(count):
        note(f"{case}: window {seed + 1} of {count}")
        made = fleet(seed, 10, network)
        solved(made, ours, tally)
        edges += pairwise(made)
        simple += plain(made, METHODS["linear_programme"])
        if seed < alternatives:
            for name, method in METHODS.items():
                solved(made, method, others[name])
    n = len(tally.end)
    emit(
        "clock_sim",
        "offset_error_p99",
        p99(tally.end),
        "ns",
        "lower",
        case=case,
        peer="plain",
        peer_value=p99(simple),
        n=n,
    )
    emit("clock_sim", "offset_error_p99", p99(tally.middle), "ns", "lower", case=f"{case}_middle", n=n)
    emit("clock_sim", "offset_error_p99", p99(edges), "ns", "lower", case=_variant("pairwise", case), n=len(edges))
    for name, other in others.items():
        emit(
            "clock_sim", "offset_error_p99", p99(other.end), "ns", "lower", case=_variant(name, case), n=len(other.end)
        )
    emit("clock_sim", "bound_p50", float(np.median(tally.bounds)), "ns", "lower", case=case, n=n)
    emit("clock_sim", "coverage", float(np.mean(tally.within)), "share", "higher", case=case, n=n)
    emit(
        "clock_sim",
        "coverage",
        float(np.mean(tally.within_statistics)),
        "share",
        "higher",
        case=f"{case}_statistics",
        n=n,
    )
    emit("clock_sim", "coverage", float(np.mean(tally.within_hard)), "share", "higher", case=f"{case}_hard", n=n)


@dataclass(frozen=True)
class Running:
    """How agents that have been running for a while probe."""

    interval_ms: float
    pair_every: int
    network: Network = QUIET
    wander_ppb_per_s: float = 0.0


SHIPPED = Running(Probe().interval_ms, ShippedClocks().pair_every(Probe()))
RUNNING_HOSTS, WARM_ROUNDS, JUDGED_ROUNDS = 20, 16, 4
NAMES = [str(host) for host in range(RUNNING_HOSTS)]
ROUND_NS = int(ShippedClocks().round_ms * 1e6)


def running(seed: int, how: Running, tally: Tally) -> None:
    """Let agents run, and add what the last of their results are off by."""
    rng = np.random.default_rng(seed)
    clocks = draw_clocks(rng, RUNNING_HOSTS)
    if how.wander_ppb_per_s:
        phase = rng.uniform(0, 2 * np.pi, RUNNING_HOSTS)
        clocks = replace(clocks, wander_ppb_per_s=how.wander_ppb_per_s, phase=phase)
    edges = [(int(a), int(b)) for a, b in regular_graph(rng, RUNNING_HOSTS, 10)]
    edges += [(b, a) for a, b in edges]
    delays = {frozenset(edge): rng.uniform(*how.network.propagation_ns) for edge in edges}
    rounds = WARM_ROUNDS + JUDGED_ROUNDS
    span_ns = (BEGIN_NS, BEGIN_NS + SPAN_NS + rounds * ROUND_NS)
    interval_ns = int(how.interval_ms * 1e6)
    streams = [
        edge_stream(rng, span_ns, how.network, clocks, edge, delays[frozenset(edge)], interval_ns, how.pair_every)
        for edge in edges
    ]
    floors = [Floor() for _ in edges]
    known: list[EdgeFit | None] = [None] * len(edges)
    drifts: list[tuple[Floats, Floats]] = []
    wanders = np.full(RUNNING_HOSTS, WANDER_PPB_PER_S)
    heading = [DriftTrend(SPAN_NS * 1e-9) for _ in edges]
    trends = DriftTrends(SPAN_NS * 1e-9, 0.0)
    for turn in range(rounds):
        begin_ns = BEGIN_NS + turn * ROUND_NS
        end_ns = begin_ns + SPAN_NS
        fits: list[EdgeFit | None] = []
        for place, stream in enumerate(streams):
            pairs, singles = stream.window(begin_ns, end_ns)
            fit = fit_edge(
                *pairs,
                tolerance_ns=TOLERANCE_NS,
                asymmetry_share=ASYMMETRY_SHARE,
                prior=known[place],
                singles=singles,
                wander_ppb_per_s=wander_between(*wanders[list(edges[place])]),
            )
            if fit := told(fit, known[place], floors[place], end_ns):
                known[place] = fit = headed(fit, heading[place])
            fits.append(fit)
        result = add(clocks, edges, fits, end_ns, wanders, tally if turn >= WARM_ROUNDS else Tally(), trends)
        measured = (result.measured_drift_ppb, result.drift_sigma_ppb, result.measured_ago_s)
        trends.push(end_ns, NAMES[1:], *(each[1:] for each in measured))
        drifts.append((result.drift_ppb, result.drift_sigma_ppb))
        wanders = estimated(drifts)


def estimated(results: list[tuple[Floats, Floats]]) -> Floats:
    """How fast each host's drift changes, from the results so far."""
    times_s = np.arange(len(results)) * (ROUND_NS * 1e-9)
    recent = times_s > times_s[-1] - MEMORY_S
    drifts, sigmas = (np.array(each)[recent] for each in zip(*results, strict=True))
    return np.array([wander(times_s[recent], *rows) for rows in zip(drifts.T, sigmas.T, strict=True)])


def told(fit: EdgeFit | None, before: EdgeFit | None, floor: Floor, end_ns: int) -> EdgeFit | None:
    """What an agent makes of a window."""
    if fit is None or not tells_round_trip(fit):
        return None
    floor_ns = floor.add(end_ns, fit.round_trip_min_ns, noise_ns(fit), ASYMMETRY_SHARE)
    return tempered(fit, before, floor_ns, ASYMMETRY_SHARE) if floor.settled else doubted(fit)


def agents(case: str, how: Running, count: int) -> None:
    """Errors of agents that have been running for a while."""
    tally = Tally()
    for seed in range(count):
        note(f"{case}: fleet {seed + 1} of {count}")
        running(2000 + seed, how, tally)
    n = len(tally.end)
    emit("clock_sim", "offset_error_p99", p99(tally.end), "ns", "lower", case=case, n=n)
    emit("clock_sim", "bound_p50", float(np.median(tally.bounds)), "ns", "lower", case=case, n=n)
    emit("clock_sim", "coverage", float(np.mean(tally.within_statistics)), "share", "higher", case=case, n=n)


def _variant(name: str, case: str) -> str:
    return name + case.removeprefix("k10")


def by_neighbours(neighbours: int, count: int) -> Tally:
    tally = Tally()
    for seed in range(count):
        solved(fleet(1000 + seed, neighbours, QUIET), ours, tally)
    n = len(tally.end)
    if neighbours != 10:
        emit("clock_sim", "offset_error_p99", p99(tally.end), "ns", "lower", case=f"k{neighbours}", n=n)
        emit("clock_sim", "offset_error_p99", p99(tally.middle), "ns", "lower", case=f"k{neighbours}_middle", n=n)
    return tally


def main() -> None:
    quick = "--quick" in sys.argv[1:]
    k10("k10", QUIET, 3 if quick else 12, 1 if quick else 2)
    k10("k10_wild", WILD, 3 if quick else 12, 1 if quick else 2)
    k10("k10_fine_wild", FINE, 2 if quick else 6, 0)
    agents("default", SHIPPED, 1 if quick else 4)
    agents("load97", Running(5.0, 1, Network(load=0.97)), 1 if quick else 3)
    agents("wander100", Running(5.0, 2, wander_ppb_per_s=100.0), 1 if quick else 3)
    curves: dict[str, list[tuple[float, float]]] = {"when the window ends": [], "in its middle": []}
    for neighbours in (2, 4, 6, 10, 14, 20):
        note(f"k{neighbours}")
        tally = by_neighbours(neighbours, 2 if quick else 6)
        for errors, curve in zip((tally.end, tally.middle), curves.values(), strict=True):
            curve.append((neighbours, p99(errors)))
    if "--plot" in sys.argv[1:]:
        path = Path(sys.argv[sys.argv.index("--plot") + 1])
        path.write_text(_plot.lines(curves, "neighbours of each host", "99th percentile of the error (ns)"))


if __name__ == "__main__":
    main()
