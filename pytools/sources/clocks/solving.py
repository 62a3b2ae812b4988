"""Solves all hosts' clocks from the edges that they report: names to indexes, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pytools.estimators.clock_graph import Clocks, Edges, solve
from pytools.estimators.drift_trends import DriftTrends
from pytools.estimators.offsets import UNBOUNDED_NS, WANDER_PPB_PER_S
from pytools.estimators.windows import MISSING, Times
from pytools.signals import ClockState
from pytools.sources.clocks.messages import MOST_NS, MOST_PAIRS, Edge, HostClock

_FIGURES: Final = ("epoch_ns", "offset_ns", "drift_ppb", "sigma_ns", "drift_sigma_ppb", "bound_ns")


def solved(
    reference: str,
    at_ns: int,
    edges: Sequence[tuple[str, Edge]],
    slews_ppb: Mapping[str, float | None],
    doubtful: Set[str],
    wanders_ppb_per_s: Mapping[str, float] = MappingProxyType({}),
    trends: DriftTrends | None = None,
) -> list[HostClock]:
    """Every host's clock against the reference's, in the order of their names.

    Parameters
    ----------
    reference : str
        The host whose clock is the common one.
    at_ns : int
        What its stamping clock reads at the moment asked for.
    edges : sequence of (str, Edge)
        Each with the host that owns it.
    slews_ppb : mapping
        What each host said its time service adds.
    doubtful : set of str
        Hosts whose clock may have been stepped a moment ago: they are free running, and nobody is compared by way of
        them, for some of their edges are of before the step and some of after it. The reference's own edges stay:
        without them nobody has a clock. But when the reference itself was stepped, everybody is free running.
    wanders_ppb_per_s : mapping
        How fast the drift of a host changes at most; WANDER_PPB_PER_S for those that are not listed.
    trends : DriftTrends, optional
        What was solved before; this result is added to it.
    """
    names = sorted({reference, *(owner for owner, _ in edges), *(edge.peer for _, edge in edges)})
    place = {name: number for number, name in enumerate(names)}
    edges = [(owner, edge) for owner, edge in edges if not {owner, edge.peer} & (doubtful - {reference})]
    told = [edge for _, edge in edges]

    def times(name: str) -> Times:
        return np.array([getattr(edge, name) for edge in told], np.int64)

    def rates(name: str) -> NDArray[np.float64]:
        return np.array([getattr(edge, name) for edge in told], np.float64)

    columns = Edges(
        owner=np.array([place[owner] for owner, _ in edges], np.intp),
        peer=np.array([place[edge.peer] for edge in told], np.intp),
        epoch_ns=times("epoch_ns"),
        offset_ns=times("offset_ns"),
        drift_ppb=rates("drift_ppb"),
        sigma_ns=rates("sigma_ns"),
        drift_sigma_ppb=rates("drift_sigma_ppb"),
        bound_ns=times("bound_ns"),
        hard_low_ns=times("hard_low_ns"),
        hard_high_ns=times("hard_high_ns"),
    )
    wanders = np.array([wanders_ppb_per_s.get(name, WANDER_PPB_PER_S) for name in names], np.float64)
    headed = None if trends is None else trends.of(names)
    try:
        clocks = solve(columns, len(names), place[reference], at_ns, wanders, headed)
    except np.linalg.LinAlgError:  # nothing that was measured is like that: somebody told nonsense, so nobody is known
        clocks = solve(columns.take(np.zeros(0, np.intp)), len(names), place[reference], at_ns)
    known_rows = clocks.known & _tellable(clocks)
    if trends is not None:
        rows = [number for name, number in place.items() if known_rows[number] and name != reference]
        measured = (clocks.measured_drift_ppb, clocks.drift_sigma_ppb, clocks.measured_ago_s)
        trends.push(at_ns, [names[row] for row in rows], *(each[rows] for each in measured))
    kept, rejected = np.zeros((2, len(names)), np.int64)
    for ends in (columns.owner, columns.peer):
        np.add.at(kept, ends, times("pairs_kept"))
        np.add.at(rejected, ends, times("pairs_rejected"))
    bounded = clocks.hard_bound_ns != MISSING
    found = []
    for name, number in place.items():
        known = bool(known_rows[number])
        state: ClockState = "synchronised" if known and not doubtful & {name, reference} else "free_running"
        found.append(
            HostClock(
                host=name,
                **{each: getattr(clocks, each)[number].item() if known else 0 for each in _FIGURES},
                hard_bound_ns=min(int(clocks.hard_bound_ns[number]), UNBOUNDED_NS)
                if known and bounded[number]
                else UNBOUNDED_NS,
                state=state,
                slew_ppb=slews_ppb.get(name),
                neighbours=int(clocks.neighbours[number]),
                pairs_kept=min(int(kept[number]), MOST_PAIRS),
                pairs_rejected=min(int(rejected[number]), MOST_PAIRS),
                outlier_edges=int(clocks.outlier_edges[number]),
            )
        )
    return found


def _tellable(clocks: Clocks) -> NDArray[np.bool_]:
    """Whose figures are within what a message may say; what somebody made up may add up to others."""
    numbers = np.stack([clocks.drift_ppb, clocks.sigma_ns * 1e-5, clocks.drift_sigma_ppb * 1e-5])
    times = np.abs(np.stack([clocks.epoch_ns, clocks.offset_ns, clocks.bound_ns]))
    fits: NDArray[np.bool_] = np.all(np.abs(numbers) <= 1e7, axis=0) & np.all((times >= 0) & (times <= MOST_NS), axis=0)
    fits &= (clocks.bound_ns >= 0) & ((clocks.hard_bound_ns >= 0) | (clocks.hard_bound_ns == MISSING))
    return fits
