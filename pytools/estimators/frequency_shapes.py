"""Frequencies over a span as a few numbers a host, with variances, and how those of different oscillators differ.

Pure functions of arrays; frequencies in parts per billion. docs/clocks.md has the model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pytools.estimators.drift_history import Floats, Frequencies

Bools = NDArray[np.bool_]

LEAST_KNOWN: Final = 0.75  # share of a host's rows
MOST_SIGMA_PPB: Final = 100.0  # of a mean frequency: beyond, it distinguishes nothing
_EDGE: Final = 8  # a host must have a figure in the first and the last eighth of the span
_OUTLIER_ROUNDS, _OUTLIER_SPREADS, _OUTLIER_SIGMAS = 2, 6.0, 8.0
_LEAST_WEIGHT: Final = 1e-12  # of a shape, in 1/ppb^2: a million ppb
_LEAST_VARIANCE: Final = 1e-4  # nobody knows a frequency to better than 0.01 ppb
_CERTAIN_SIGMAS: Final = 10.0
_SCALES: Final = np.array([0.0, 0.25, 0.5, 1.0, 2.0, 4.0])  # of the fleet's wander
_ROUNDS: Final = 20  # of expectation and maximisation
_MAD: Final = 1.4826  # median absolute deviation to standard deviation
_CHI_MEDIAN: Final = 0.4549  # of the square of a standard normal variable


@dataclass(frozen=True)
class Shapes:
    """Each host's frequency over the span as mean, slope and slower bends: cosines of 0, 1/2, 1 ... periods."""

    value: Floats  # (hosts, shapes)
    variance: Floats  # (hosts, shapes)

    def __len__(self) -> int:
        return len(self.value)

    def take(self, rows: NDArray[np.intp]) -> Shapes:
        return Shapes(self.value[rows], self.variance[rows])


@dataclass(frozen=True)
class Wander:
    """How different oscillators of this fleet wander against each other: a mixture of scales of one spectrum."""

    variance: Floats  # (shapes - 1,), of the differences at scale 1
    weight: Floats  # (scales,)


def describe(found: Frequencies) -> tuple[Shapes, Bools]:
    """The shapes of every host's frequency, and of which hosts there are figures enough and good enough.

    Returns
    -------
    shapes : Shapes
    usable : ndarray of bool, shape (hosts,)
        Shapes of the others are arbitrary.
    """
    known = ~np.isnan(found.ppb)
    ppb = np.where(known, found.ppb, 0.0)
    ppb = np.where(known, ppb - _common(ppb, known), 0.0)
    span = found.at_ns - found.at_ns[0]
    overlap = max(1.0, found.window_ns * (len(span) - 1) / float(span[-1]))  # how many windows share each instant
    variance = _noise(ppb, found.sigma_ppb, known, math.ceil(overlap)) * overlap + _LEAST_VARIANCE
    basis = _basis(span, 2 + 2 * int(len(span) / overlap >= 20) + 2 * int(len(span) / overlap >= 45))
    for _ in range(_OUTLIER_ROUNDS):
        miss = np.abs(ppb - _fit(ppb, known / variance, basis).value @ basis.T)
        spread = _MAD * _median(miss, known)[:, None]
        known = known & (miss <= _OUTLIER_SPREADS * spread + _OUTLIER_SIGMAS * found.sigma_ppb)
    shapes = _fit(ppb, known / variance, basis)
    early, late = span <= span[-1] / _EDGE, span >= span[-1] * (1 - 1 / _EDGE)
    usable = (known.mean(axis=1) >= LEAST_KNOWN) & known[:, early].any(axis=1) & known[:, late].any(axis=1)
    return shapes, usable & (shapes.variance[:, 0] <= MOST_SIGMA_PPB**2)


def _fit(ppb: Floats, weight: Floats, basis: Floats) -> Shapes:
    """Weighted least squares, each host by itself; what its figures do not determine is uncertain without end."""
    count = basis.shape[1]
    normal = (weight @ (basis[:, :, None] * basis[:, None, :]).reshape(len(basis), -1)).reshape(-1, count, count)
    inverse = np.linalg.inv(normal + _LEAST_WEIGHT * np.eye(count))
    first = ppb[np.arange(len(ppb)), (weight > 0).argmax(axis=1)][:, None]  # smaller numbers, less rounding
    value = np.einsum("hij,hj->hi", inverse, (weight * (ppb - first)) @ basis)
    value[:, :1] += first
    return Shapes(value, np.diagonal(inverse, axis1=1, axis2=2).copy())


def _common(ppb: Floats, known: Bools) -> Floats:
    """What all hosts do together, row by row: the reference's own changes. Cancels in every difference.

    Summed from the median step of those that are known before and after it: wander makes small steps, and who is
    missing does not matter.
    """
    both = known[:, 1:] & known[:, :-1]
    steps = _median((ppb[:, 1:] - ppb[:, :-1]).T, both.T)
    return np.concatenate([[0.0], np.cumsum(steps)])


def _median(values: Floats, known: Bools) -> Floats:
    """The median of each row's known values; zero where there is none."""
    ordered = np.sort(np.where(known, values, np.inf), axis=1)
    count = known.sum(axis=1)
    rows = np.arange(len(values))
    low, high = ordered[rows, np.maximum(count - 1, 0) // 2], ordered[rows, np.minimum(count // 2, values.shape[1] - 1)]
    middle: Floats = np.where(count > 0, np.where(count % 2, high, (low + high) / 2), 0.0)
    return middle


def _noise(ppb: Floats, sigma: Floats, known: Bools, lag: int) -> Floats:
    """Variance of each figure: as stated, or as the scatter of figures a window apart shows if that is more."""
    both = known[:, lag:] & known[:, :-lag]
    scatter = (_MAD * _median(np.abs(ppb[:, lag:] - ppb[:, :-lag]), both)) ** 2 / 2
    variance: Floats = np.maximum(sigma**2, scatter[:, None])
    return variance


def _basis(span: NDArray[np.int64], count: int) -> Floats:
    """Cosines over the span, of unit mean square but for the first, which is one."""
    step = span[-1] / (len(span) - 1)
    phase = (span + step / 2) / (span[-1] + step)
    basis: Floats = math.sqrt(2) * np.cos(np.pi * phase[:, None] * np.arange(count))
    basis[:, 0] = 1.0
    return basis


def learn_wander(shapes: Shapes) -> Wander:
    """How different oscillators wander, learnt from pairs whose mean frequencies are certainly different."""
    order = np.argsort(shapes.value[:, 0], kind="stable")
    half = len(order) // 2
    first, second = order[:half], order[half : 2 * half]
    difference = shapes.value[second] - shapes.value[first]
    noise = shapes.variance[second] + shapes.variance[first]
    certain = np.abs(difference[:, 0]) > _CERTAIN_SIGMAS * np.sqrt(noise[:, 0])
    square, noise = difference[certain, 1:] ** 2, noise[certain, 1:]
    still = np.zeros(len(_SCALES))
    still[0] = 1.0
    if not len(square):
        return Wander(np.zeros(shapes.value.shape[1] - 1), still)
    variance = np.maximum(np.median(square, axis=0) / _CHI_MEDIAN - np.median(noise, axis=0), 0.0)
    log = _log_scales(square, noise, variance)
    density = np.exp(log - log.max(axis=1, keepdims=True))
    weight = np.full(len(_SCALES), 1 / len(_SCALES))
    for _ in range(_ROUNDS):  # one more pair, which does not wander, is always imagined
        share = weight * density
        share /= share.sum(axis=1, keepdims=True)
        weight = (share.sum(axis=0) + still) / (len(share) + 1)
    return Wander(variance, weight)


def log_stillness(square: Floats, noise: Floats, wander: Wander) -> Floats:
    """How much likelier pairs' squared differences of shape are without wander than with the fleet's: log, (pairs,)."""
    log = _log_scales(square, noise, wander.variance)
    log -= log[:, :1]  # scale 0: noise alone
    top = log.max(axis=1)
    total: Floats = top + np.log(np.exp(log - top[:, None]) @ wander.weight)
    return -total


def _log_scales(square: Floats, noise: Floats, variance: Floats) -> Floats:
    """Log density of squared differences at each scale of wander: (pairs, scales), up to a common constant."""
    total = noise[:, None, :] + _SCALES[:, None] ** 2 * variance
    log: Floats = -0.5 * (square[:, None, :] / total + np.log(total)).sum(axis=2)
    return log
