"""Potentials of vertices from measured differences along edges, robustly: the same for offsets and for drifts. Pure.

Weighted least squares on the graph; besides the stated error of each edge, an excess error common to all is estimated
from the median disagreement (paths that are a little asymmetric, whatever the reason), and edges that disagree by
much more than both lose their weight. In that median no edge counts for more than it can be off by for such a reason:
one clock that was just stepped may have half of the edges of a small graph. A tree has no disagreement, and a single
loop cannot tell which of its edges is to blame: then nothing is down-weighted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pytools.estimators.laplacian import Floats, Graph

_DOUBTED: Final = 3.0  # standard deviations of disagreement at which an edge begins to lose weight
_OUTLIER: Final = 4.5
_ROUNDS: Final = 30
_MILD: Final = 8
_SETTLED: Final = 0.01  # change of a weight's factor below which it stands
_PRECISE: Final = 1e-9
_ROUGH: Final = 1e-5
_DENSE: Final = 300  # vertices up to which the variances are the inverse's own diagonal
_TRIALS: Final = 12
_MEDIAN_SQUARE: Final = 0.4549  # median of the square of a standard Gaussian


@dataclass(frozen=True)
class Potentials:
    """Potentials against the ground, and what is behind them."""

    values: Floats  # per vertex
    weights: Floats  # per edge
    outlier: NDArray[np.bool_]  # per edge


def fit(graph: Graph, measured: Floats, sigma: Floats, ground: int, most: Floats | float = np.inf) -> Potentials:
    """Fit potentials to differences (head less tail) with their standard deviations.

    Parameters
    ----------
    most : ndarray or float
        How far each edge can be off for a reason that is common to all; one that is off by more is wrong in itself.
    """
    # The share of the edges beyond a tree: by so much are disagreements smaller than errors, on average.
    spare = max(1.0 - (graph.vertices - 1) / len(measured), 1e-3)
    variance = sigma * sigma
    most_squares = np.maximum(most, sigma) ** 2 / spare
    factor = np.ones(len(measured))
    excess = 0.0
    values = np.zeros(graph.vertices)
    mild = _MILD  # rounds left
    for _ in range(_ROUNDS):
        weights = factor / (variance + excess)
        values = graph.solve(weights, graph.divergence(weights * measured), _PRECISE, values)
        squares = (measured - graph.along(values)) ** 2 / spare
        excess = _excess(np.minimum(squares, most_squares), variance)
        disagreement = np.sqrt(squares / (variance + excess))
        # First least absolute deviations, which have a single minimum; then what is far off is left out altogether.
        new = 1 / np.maximum(disagreement, 1.0) if mild > 0 else _DOUBTED**4 / np.maximum(disagreement, _DOUBTED) ** 4
        settled = float(np.abs(new - factor).max()) < _SETTLED
        factor = new
        if settled and mild < 0:
            break
        # Where no edge is in doubt, the second kind of weights has nothing to choose from.
        mild = 0 if settled and mild > 0 and float(disagreement.max()) < _DOUBTED else mild - 1
    weights = factor / (variance + excess)
    values = graph.solve(weights, graph.divergence(weights * measured), _PRECISE, values)
    disagreement = np.abs(measured - graph.along(values)) / np.sqrt((variance + excess) * spare)
    return Potentials(values - values[ground], weights, disagreement > _OUTLIER)


def _excess(squares: Floats, variance: Floats) -> float:
    """The common variance beside the stated ones under which the median disagreement is what it should be.

    Of each edge it is known under how much more variance its disagreement would be just that; half of the edges need
    more than the median of these.
    """
    lacks = np.sort(squares / _MEDIAN_SQUARE - variance)
    return max(float(lacks[(len(lacks) - 1) // 2] + lacks[len(lacks) // 2]) / 2, 0.0)


def variances(graph: Graph, weights: Floats, ground: int) -> Floats:
    """Variance of each potential against the ground, by statistics alone.

    Small graphs: the diagonal of the inverse. Large ones: solutions for a few random right sides have the covariance
    sought. A vertex's own variance is what its edges give (that alone is too little, as the neighbours err as well),
    times what the trials make of it, averaged over the neighbourhood; covariances with the ground are solved for.
    """
    others = np.arange(graph.vertices) != ground
    result = np.zeros(graph.vertices)
    if graph.vertices <= _DENSE:
        result[others] = np.diagonal(np.linalg.inv(graph.dense(weights)[np.ix_(others, others)]))
        return result
    covariance = graph.solve(weights, np.where(others, 0.0, 1.0) - 1 / graph.vertices, _ROUGH)
    rng = np.random.default_rng(graph.vertices)
    squares, straight = np.zeros((2, graph.vertices))
    for _ in range(_TRIALS):
        signs = rng.choice([-1.0, 1.0], len(weights))
        tried = graph.solve(weights, graph.divergence(np.sqrt(weights) * signs), _ROUGH)
        squares += tried**2 / _TRIALS
        straight += (tried - tried[ground]) ** 2 / _TRIALS
    degrees = graph.degrees(weights)
    correction = squares * degrees
    own = graph.neighbourhood_mean(graph.neighbourhood_mean(correction)) / degrees
    apart = own + covariance[ground] - 2 * covariance
    # Where a vertex shares much of the ground's error that is a small difference of large figures: take the trials'.
    shared = np.minimum(4 * np.abs(covariance) / covariance[ground], 1.0)
    result[others] = ((1 - shared) * apart + shared * straight)[others]
    return result
