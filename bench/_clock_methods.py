"""Other ways to fit one edge, for comparison: each takes a window and gives an EdgeFit with made-up errors.

All see the same measurements as ours (means of kept pairs, the faster probe of every other pair), but for
`coded_pairs`, a linear programme over the kept pairs alone. Parameters were chosen for the smallest error on windows
that the benchmark does not use. scipy does the work; nothing outside bench/ imports it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from _fleet import Floats, Window
from scipy.optimize import linprog, minimize
from scipy.spatial import ConvexHull, QhullError

from pytools.estimators.clocks import EdgeFit
from pytools.estimators.corridor import corridor
from pytools.estimators.pairs import Probes, sift

TOLERANCE_NS = 150
MOST_DRIFT_PPB = 200_000.0
QUANTILE = 0.005
SVM_COST = 0.03  # of a nanosecond on the wrong side of the margin, in units of 1/ns at a margin of 1 us
Method = Callable[[Window], EdgeFit | None]
Line = tuple[float, float, float]  # forward and reverse edge in the middle (ns), drift (ns/s)
Fitter = Callable[[Floats, Floats, Floats, Floats], Line | None]


def method(fitter: Fitter, kept_only: bool = False) -> Method:
    """Wrap the arithmetic around a fitter of floats."""

    def fit(window: Window) -> EdgeFit | None:
        forward = sift(window[0], window[1], TOLERANCE_NS)
        reverse = sift(window[2], window[3], TOLERANCE_NS)
        if kept_only:
            forward, reverse = _means(forward), _means(reverse)
        if not len(forward.at_ns) or not len(reverse.at_ns):
            return None
        ends = min(forward.at_ns.min(), reverse.at_ns.min()), max(forward.at_ns.max(), reverse.at_ns.max())
        origin = int(ends[0] + (ends[1] - ends[0]) // 2)
        offset = int(forward.difference_ns.min() - reverse.difference_ns.min()) // 2
        line = fitter(
            (forward.at_ns - origin).astype(np.float64) * 1e-9,
            (forward.difference_ns - offset).astype(float),
            (reverse.at_ns - origin).astype(np.float64) * 1e-9,
            (reverse.difference_ns + offset).astype(float),
        )
        if line is None:
            return None
        up, down, drift = line
        middle = offset + round((up - down) / 2)
        return EdgeFit(origin, middle, drift, 15.0, 20.0, 1000, middle - 10**6, middle + 10**6, 0, 0, 0, False)

    return fit


def _means(probes: Probes) -> Probes:
    return probes.take(np.arange(len(probes.at_ns)) < probes.means)


def linear_programme(forward_s: Floats, forward: Floats, reverse_s: Floats, reverse: Floats) -> Line:
    """The widest corridor below all probes (what HiGHS finds as well; a unit test compares them)."""
    found = corridor(forward_s, forward, reverse_s, reverse, -MOST_DRIFT_PPB, MOST_DRIFT_PPB, 0.0)
    return found.forward_ns, found.reverse_ns, found.drift


def svm(forward_s: Floats, forward: Floats, reverse_s: Floats, reverse: Floats) -> Line:
    """Soft-margin support vector machine between both clouds, as Huygens does; the hinge rounded off by 1 ns."""
    first = linear_programme(forward_s, forward, reverse_s, reverse)
    up = _lowest(forward - first[0] - first[2] * forward_s, forward_s)
    down = _lowest(reverse - first[1] + first[2] * reverse_s, reverse_s)
    width = first[0] + first[1]

    def cost(p: Floats) -> float:
        centre, slope, half = p[0], p[1], max(p[2] + width / 2, 1.0)
        above = half - (up[0] + width / 2 - centre - slope * up[1])
        below = half - (down[0] + width / 2 + centre + slope * down[1])
        slack = np.logaddexp(0, np.concatenate([above, below])).sum()
        return float(0.5 * (1000.0 / half) ** 2 * 1000.0 + SVM_COST * slack * 1000.0 / half)

    best = minimize(cost, np.zeros(3), method="Nelder-Mead", options={"xatol": 0.1, "fatol": 1e-6, "maxiter": 500})
    centre, slope, half = best.x
    return first[0] + centre + half, first[1] - centre + half, first[2] + slope


def _lowest(residuals: Floats, times_s: Floats) -> tuple[Floats, Floats]:
    near = residuals < 2000.0
    return residuals[near], times_s[near]


def hulls(forward_s: Floats, forward: Floats, reverse_s: Floats, reverse: Floats) -> Line | None:
    """Lower convex hull of each direction alone, taken where it crosses the middle of the window."""
    edges = []
    for times, values in ((forward_s, forward), (reverse_s, reverse)):
        try:
            corners = np.sort(ConvexHull(np.column_stack([times, values])).vertices)
        except (QhullError, ValueError):
            return None
        order = corners[np.argsort(times[corners])]
        best: tuple[float, float] | None = None
        for a in order[times[order] <= 0]:
            for b in order[times[order] > 0]:
                slope = (values[b] - values[a]) / (times[b] - times[a])
                crossing = values[a] - slope * times[a]
                if best is None or crossing < best[0]:
                    best = float(crossing), float(slope)
        if best is None:
            return None
        edges.append(best)
    return edges[0][0], edges[1][0], (edges[0][1] - edges[1][1]) / 2


def quantile(forward_s: Floats, forward: Floats, reverse_s: Floats, reverse: Floats) -> Line | None:
    """Quantile regression with one slope for both directions."""
    first = linear_programme(forward_s, forward, reverse_s, reverse)
    values = np.concatenate([forward - first[0] - first[2] * forward_s, reverse - first[1] + first[2] * reverse_s])
    times = np.concatenate([forward_s, -reverse_s])
    is_reverse = np.repeat([0.0, 1.0], [len(forward), len(reverse)])
    values = np.minimum(values, 1e5)  # far ones pull alike however far they are
    count = len(values)
    design = np.column_stack([1 - is_reverse, is_reverse, times])
    solved = linprog(
        np.concatenate([np.zeros(3), np.full(count, QUANTILE), np.full(count, 1 - QUANTILE)]),
        A_eq=np.hstack([design, np.eye(count), -np.eye(count)]),
        b_eq=values,
        bounds=[(None, None)] * 3 + [(0, None)] * (2 * count),
        method="highs",
    )
    if solved.x is None:
        return None
    up, down, slope = solved.x[:3]
    return first[0] + up, first[1] + down, first[2] + slope


METHODS: dict[str, Method] = {
    "linear_programme": method(linear_programme),
    "coded_pairs": method(linear_programme, kept_only=True),
    "svm": method(svm),
    "hulls": method(hulls),
    "quantile": method(quantile),
}
