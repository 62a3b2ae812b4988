"""Clocks of all hosts at once, from the edges between them. Pure numpy; docs/clocks.md derives it.

Every edge says how its peer's clock runs against its owner's; round a loop these must cancel, and what does not
cancel is error. It is spread by weighted least squares, drifts first, then offsets carried to one instant by these
drifts. Edges that contradict the others (their directions differ: no end-to-end measurement can see that by itself)
lose their weight. Integers hold what may be days; floats only what is left after a spanning tree.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pytools.estimators.drift_trends import Trends
from pytools.estimators.laplacian import Floats, Graph, Places, spanning_levels
from pytools.estimators.offsets import SIGMAS, WANDER_PPB_PER_S, WANDER_SIGMAS
from pytools.estimators.potentials import fit, variances
from pytools.estimators.windows import MISSING, Times

_PASSES: Final = 3
_NEAR_NS: Final = 1000  # times any drift, less than a nanosecond
_MOST_AGE_S: Final = 100.0  # a trend lasts no longer
_LEAST: Final = 0.1  # no edge is better than so many nanoseconds, or so many of them a second


@dataclass(frozen=True)
class Edges:
    """Fits of all edges, one row each; what they mean is said at `pytools.estimators.clocks.EdgeFit`."""

    owner: Places
    peer: Places
    epoch_ns: Times  # of the owner's clock
    offset_ns: Times
    drift_ppb: Floats
    sigma_ns: Floats
    drift_sigma_ppb: Floats
    bound_ns: Times
    hard_low_ns: Times
    hard_high_ns: Times

    def take(self, rows: NDArray[np.intp]) -> Edges:
        return Edges(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})


@dataclass(frozen=True)
class Clocks:
    """One row per host: its clock minus the reference's when the reference reads the time asked for."""

    known: NDArray[np.bool_]  # connected to the reference; the rest of a row means nothing where not
    epoch_ns: Times  # what the host's own clock reads then
    offset_ns: Times
    drift_ppb: Floats  # of the offset, per second of the host's own clock
    measured_drift_ppb: Floats  # without its trend: what it was when the edges were measured,
    measured_ago_s: Floats  # so long before, on average
    sigma_ns: Floats
    drift_sigma_ppb: Floats
    bound_ns: Times  # statistics, and the allowances of the edges on the shortest way to the reference
    hard_bound_ns: Times  # the same by hard intervals alone: no assumption on asymmetry
    neighbours: NDArray[np.intp]  # hosts with an edge to it that was used
    outlier_edges: NDArray[np.intp]  # edges of it that contradict the others
    is_outlier: NDArray[np.bool_]  # per edge


def solve(
    edges: Edges,
    hosts: int,
    reference: int,
    at_ns: int,
    wander_ppb_per_s: Floats | None = None,
    trends: Trends | None = None,
) -> Clocks:
    """Offsets and drifts of all hosts against one.

    Parameters
    ----------
    edges : Edges
        Any number; several between the same hosts, and in both directions, are welcome.
    hosts : int
        Owners and peers are below this.
    reference : int
        The host whose clock is the common one.
    at_ns : int
        What its clock reads at the instant that is asked for.
    wander_ppb_per_s : ndarray, shape (hosts,), optional
        How fast each host's drift changes at most; WANDER_PPB_PER_S where nothing is known.
    trends : Trends, optional
        How fast each host's drift changes now: offsets and drifts are carried along parabolas, not along lines.
    """
    readings, known = _coarse(edges, hosts, reference, at_ns)
    used = np.flatnonzero(known[edges.owner] & (edges.owner != edges.peer))
    blank = _blank(hosts, len(edges.owner), readings, known, at_ns)
    if not len(used):
        return blank
    places = np.cumsum(known) - 1
    part = edges.take(used)
    graph = Graph(places[part.owner], places[part.peer], int(known.sum()))
    wanders = np.full(hosts, WANDER_PPB_PER_S) if wander_ppb_per_s is None else wander_ppb_per_s
    trends = Trends(np.zeros(hosts)) if trends is None else trends
    trends = replace(trends, ppb_per_s=trends.ppb_per_s[known])
    return _filled(blank, part, used, graph, int(places[reference]), at_ns, wanders[known], trends)


def _coarse(edges: Edges, hosts: int, reference: int, at_ns: int) -> tuple[Times, NDArray[np.bool_]]:
    """What every clock reads when the reference reads `at_ns`, along a spanning tree; exact but for its edges."""
    readings = np.zeros(hosts, np.int64)
    known = np.zeros(hosts, np.bool_)
    readings[reference], known[reference] = at_ns, True
    for taken, against in spanning_levels(edges.owner, edges.peer, hosts, reference):
        owner, peer = edges.owner[taken], edges.peer[taken]
        epoch, offset, drift = edges.epoch_ns[taken], edges.offset_ns[taken], edges.drift_ppb[taken] * 1e-9
        since = readings[owner] - epoch
        forward = readings[owner] + offset + np.rint(since * drift).astype(np.int64)
        since = readings[peer] - epoch - offset
        backward = epoch + since - np.rint(since * (drift / (1 + drift))).astype(np.int64)
        reached = np.where(against == 0, peer, owner)
        readings[reached] = np.where(against == 0, forward, backward)
        known[reached] = True
    return readings, known


def _blank(hosts: int, edges: int, readings: Times, known: NDArray[np.bool_], at_ns: int) -> Clocks:
    """A result in which only the reference is known."""
    return Clocks(
        known=known,
        epoch_ns=np.where(known, readings, MISSING),
        offset_ns=np.where(known, readings - at_ns, MISSING),
        drift_ppb=np.zeros(hosts),
        measured_drift_ppb=np.zeros(hosts),
        measured_ago_s=np.zeros(hosts),
        sigma_ns=np.where(known, 0.0, np.inf),
        drift_sigma_ppb=np.where(known, 0.0, np.inf),
        bound_ns=np.where(known, 0, MISSING),
        hard_bound_ns=np.where(known, 0, MISSING),
        neighbours=np.zeros(hosts, np.intp),
        outlier_edges=np.zeros(hosts, np.intp),
        is_outlier=np.zeros(edges, np.bool_),
    )


def _filled(
    blank: Clocks, edges: Edges, used: Places, graph: Graph, ground: int, at_ns: int, wanders: Floats, trends: Trends
) -> Clocks:
    """The result for the hosts connected to the reference, numbered as in `graph`."""
    known = blank.known
    readings = blank.epoch_ns[known]
    # What is told of another time is nonsense, and no more.
    bent_s = np.clip((readings[graph.tails] - edges.epoch_ns).astype(np.float64) * 1e-9, -_MOST_AGE_S, _MOST_AGE_S)
    bends = graph.along(trends.ppb_per_s)
    measured = np.log1p((edges.drift_ppb + bends * bent_s) * 1e-9)
    drifts = fit(graph, measured, np.maximum(edges.drift_sigma_ppb, _LEAST) * 1e-9, ground)
    rates = np.expm1(graph.along(drifts.values))  # ns of offset per ns of the owner's clock
    # A line lies above the vertex of a parabola by half of the mean square of its times, which are spread evenly.
    edges = _lowered(edges, np.rint(bends * (bent_s**2 + trends.window_s**2 / 12) / 2).astype(np.int64))
    most = np.maximum(edges.hard_high_ns - edges.offset_ns, edges.offset_ns - edges.hard_low_ns)
    for _ in range(_PASSES):  # clocks that are moved far read their edges' lines elsewhere
        surplus = _surplus(edges, graph, readings, rates)
        offsets = fit(graph, surplus, np.maximum(edges.sigma_ns, _LEAST), ground, most)
        shifts = np.rint(offsets.values).astype(np.int64)
        readings = readings + shifts
        if np.abs(shifts).max() < _NEAR_NS:
            break

    since_s = (readings[graph.tails] - edges.epoch_ns) * 1e-9
    drift_variance = variances(graph, drifts.weights, ground)
    age = graph.degrees(np.square(since_s).astype(np.float64)) / graph.counts
    sigma = np.sqrt(variances(graph, offsets.weights, ground) + age * drift_variance * 1e18)
    drift_sigma = np.sqrt(drift_variance) * 1e9
    # All edges of a host bend with its clock, so this does not average out. A line through a window lies as far off
    # the parabola at its middle as at its end, a third of what the parabola has risen by there.
    bend = np.where(np.arange(graph.vertices) == ground, 0.0, wanders / WANDER_SIGMAS)
    sigma = np.hypot(sigma, bend * age * (2 / 3))
    drift_sigma = np.hypot(drift_sigma, bend * np.sqrt(age))

    surplus = _surplus(edges, graph, readings, rates)
    # What an edge is off by from the result belongs to the way over it: edges that share a port share one error.
    allowance = np.maximum(edges.bound_ns - SIGMAS * edges.sigma_ns, 0.0) + np.abs(surplus)
    carried = SIGMAS * np.hypot(drift_sigma[graph.tails], drift_sigma[graph.heads]) * np.abs(since_s)
    carried += np.maximum(wanders[graph.tails], wanders[graph.heads]) * since_s**2 / 2
    above = surplus + (edges.hard_high_ns - edges.offset_ns) + carried
    below = -surplus + (edges.offset_ns - edges.hard_low_ns) + carried
    contradicts = (above < 0) | (below < 0)  # the clock was stepped since, or the edge's line is wrong
    above, below = np.where(contradicts, np.inf, above), np.where(contradicts, np.inf, below)
    hard = np.maximum(graph.distances(above, below, ground), graph.distances(below, above, ground))

    bad = drifts.outlier | offsets.outlier
    result = blank
    result.epoch_ns[known] = readings
    result.offset_ns[known] = readings - at_ns
    drift_ppb, ago_s = -np.expm1(-drifts.values) * 1e9, graph.degrees(bent_s) / graph.counts
    result.drift_ppb[known] = drift_ppb + trends.ppb_per_s * trends.ahead_s
    result.measured_drift_ppb[known] = drift_ppb - trends.ppb_per_s * ago_s
    result.measured_ago_s[known] = ago_s
    result.sigma_ns[known] = sigma
    result.drift_sigma_ppb[known] = drift_sigma
    stated = SIGMAS * sigma + graph.distances(allowance, allowance, ground)
    result.bound_ns[known] = np.ceil(np.minimum(stated, hard)).astype(np.int64)  # what holds anyway needs no allowance
    result.hard_bound_ns[known] = np.where(np.isinf(hard), MISSING, np.ceil(np.where(np.isinf(hard), 0, hard)))
    result.neighbours[known] = _neighbours(graph, ~offsets.outlier)
    result.outlier_edges[known] = np.rint(graph.degrees(bad.astype(np.float64)))
    result.is_outlier[used] = bad
    return result


def _surplus(edges: Edges, graph: Graph, readings: Times, rates: Floats) -> Floats:
    """What each edge says beyond the present readings of its two clocks."""
    since = readings[graph.tails] - edges.epoch_ns
    steps = readings[graph.heads] - readings[graph.tails]
    surplus: Floats = (edges.offset_ns - steps) + rates * since
    return surplus


def _lowered(edges: Edges, by_ns: Times) -> Edges:
    return replace(
        edges,
        offset_ns=edges.offset_ns - by_ns,
        hard_low_ns=edges.hard_low_ns - by_ns,
        hard_high_ns=edges.hard_high_ns - by_ns,
    )


def _neighbours(graph: Graph, used: NDArray[np.bool_]) -> NDArray[np.intp]:
    low, high = np.minimum(graph.tails, graph.heads)[used], np.maximum(graph.tails, graph.heads)[used]
    pairs = np.unique(low * graph.vertices + high)
    ends = np.concatenate([pairs // graph.vertices, pairs % graph.vertices])
    return np.bincount(ends, minlength=graph.vertices)
