"""Where the unqueued probes of both directions lie: two lines of opposite slope under two clouds of differences.

Pure functions of float64: seconds and nanoseconds from a common origin. The probes near the lower edge are a Poisson
process whose intensity over the residual e (nanoseconds above the line) has three parts in each class of probes:
unqueued ones, a Gaussian at zero as wide as the stamps are noisy; queued ones, a plateau that begins at zero, blurred
by the same noise; and wrong stamps, a floor everywhere, also below the line. Expectation maximisation finds the
shares of each, and the line that the unqueued ones lie on: one offset for each direction, one drift for both. A probe
that is too fast is thus no more believed than one that is too slow, and neither edge is drawn by the extreme sample.
Several starts, from a wide blur to a narrow one, run side by side; the likeliest wins, and what the others found
widens its error as far as they are likely.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pytools.estimators.corridor import Corridor, Floats

_BLURS: Final = (2.0, 5.0, 16.0)  # widths of the first Gaussian of each start, in units of the noise
_COOLING: Final = 0.6
_ROUNDS: Final = 40
_BELOW: Final = 35.0  # how far around the first line probes are looked at, in units of the noise
_ABOVE: Final = 35.0
_SETTLED: Final = 0.01  # lines that move by less in a round, in units of the noise, stand
_WRONG_SHARE: Final = 0.02  # stated: differences of stamps that are wrong,
_WRONG_NS: Final = 1000.0  # anywhere within this width
_TINY: Final = 1e-6
_LEAST_WEIGHT: Final = 1e-9  # of a direction: so that one without unqueued probes stays where it is
_MIXING: Final = 4.0  # how much of the variance a queued probe beside each unqueued one adds (from simulation)
_BEYOND: Final = 1e-3  # probability that a line lies further above the edge than its limit
_ROOT_TWO_PI: Final = 2.5066282746310002
_STEEPNESS: Final = 1.702 / 2  # 1 + tanh(this times x), halved, is the distribution function of a Gaussian, nearly
_LEAST_COUNTS: Final = np.array([[[0.05]], [[0.1]]])  # of unqueued and queued probes: no class is ever ruled out
_WIDTHS: Final = np.array([math.sqrt(0.5), 1.0] * 2)  # of the noise: means of two have less


def _cooled() -> list[list[float]]:
    """How wide the Gaussian of each start is, round by round."""
    return [[max(blur * _COOLING**turn, 1.0) for blur in _BLURS] for turn in range(_ROUNDS + 1)]


_BLUR_OF_ROUND: Final = _cooled()
_COLD: Final = _BLUR_OF_ROUND.index([1.0] * len(_BLURS))  # from this round on all are as wide as the noise


@dataclass(frozen=True)
class LowerEdges:
    """Both lines at time zero, and how well they are known."""

    forward_ns: float
    reverse_ns: float
    drift: float  # ns/s
    covariance: NDArray[np.float64]  # of the three above, in this order
    unqueued: float  # probes that carry the fit, of the direction that has fewer
    waits_ns: tuple[float, float]  # how far each line may lie above the true edge (root mean square)
    most_ns: tuple[float, float]  # it lies no further above it, but with probability _BEYOND
    found: float  # probability that unqueued probes carry both lines


@dataclass(frozen=True)
class _Cloud:
    """Probes of both directions near the first lines, and all about them that stays the same from round to round."""

    values_ns: Floats
    design: Floats  # (3, probes): whether forward, whether reverse, time with its sign turned for reverse ones
    classes: Floats  # (4, probes): whether forward kept, forward other, reverse kept, reverse other
    inverse: Floats  # of each probe's own noise
    densities: Floats  # (2, 4, probes): of a Gaussian at its middle and of half a plateau, by class
    floor: Floats  # intensity of wrong stamps
    products: Floats  # (5, probes): of the rows of the design, over the noise: what the normal equations sum up

    @property
    def directions(self) -> Floats:
        """Which probe is of which direction, (2, probes)."""
        return self.design[:2]


@dataclass(frozen=True)
class _Optimum:
    """Where each start has arrived: a row for each, of the last round."""

    lines: list[list[float]]  # forward, reverse, drift
    residuals: Floats
    squares: Floats  # of the residuals over the noise
    peak: Floats  # intensity of unqueued probes at each probe
    total: Floats
    share: Floats  # how likely each probe is unqueued
    unqueued: Floats  # (starts, 4): probes of each class
    queued: Floats  # and queued ones a nanosecond


def lower_edges(
    times_s: tuple[Floats, Floats],
    values_ns: tuple[Floats, Floats],
    means: tuple[int, int],
    first: Corridor,
    noise_ns: float,
    drift_guess: tuple[float, float],
) -> LowerEdges:
    """Fit both lines.

    Parameters
    ----------
    times_s, values_ns : pairs of ndarray
        Forward and reverse measurements, means of two probes first.
    means : pair of int
        How many measurements of each direction are means.
    first : Corridor
        Where to start.
    noise_ns : float
        Standard deviation of a difference of two stamps; means have less.
    drift_guess : pair of float
        A drift known from elsewhere and its standard deviation.
    """
    cloud = _near(times_s, values_ns, means, first, noise_ns)
    guess, precision = drift_guess[0], drift_guess[1] ** -2.0
    end = _climb(cloud, first, noise_ns, guess, precision)
    lines = np.array(end.lines)
    likelihood = np.log(end.total).sum(axis=1) - 0.5 * precision * (lines[:, 2] - guess) ** 2
    likelihood[~_believable(cloud, end.residuals, noise_ns)] = -np.inf
    best = int(likelihood.argmax())
    share, total, peak = end.share[best], end.total[best], end.peak[best]
    information = share * (1 - (1 - share) * np.minimum(end.squares[best], 1.0))
    unqueued, queued = end.unqueued[best].tolist(), end.queued[best].tolist()
    # Queued probes within the noise pass for unqueued ones; how many of them do is not known.
    mixed = 2 * noise_ns * sum(queued) / sum(unqueued)
    covariance = _inverse((cloud.products @ information).tolist(), precision) * (1 + _MIXING * mixed)
    apart = lines - lines[best]
    chances = np.exp(np.maximum(likelihood - likelihood[best], -50.0))
    covariance += (apart.T * (chances / chances.sum())) @ apart
    free = _free(float(cloud.design[2] @ cloud.design[2]) / len(share), drift_guess[1], noise_ns)
    evidence = cloud.directions @ np.log1p(peak / (total - peak))
    waits, most, carried = _waits(evidence.tolist(), unqueued, queued, free)
    return LowerEdges(
        forward_ns=end.lines[best][0],
        reverse_ns=end.lines[best][1],
        drift=end.lines[best][2],
        covariance=covariance,
        unqueued=min(unqueued[0] + unqueued[1], unqueued[2] + unqueued[3]),
        waits_ns=waits,
        most_ns=most,
        found=carried,
    )


def _climb(cloud: _Cloud, first: Corridor, noise_ns: float, guess: float, precision: float) -> _Optimum:
    """Expectation maximisation, from all starts side by side."""
    above = _ABOVE * noise_ns
    lines = [[first.forward_ns + 1.5 * noise_ns, first.reverse_ns + 1.5 * noise_ns, first.drift]] * len(_BLURS)
    # What is expected in each class, (2, starts, 4): unqueued probes over the blur, queued ones a nanosecond.
    expected = np.empty((2, len(_BLURS), 4))
    expected[0] = 4.0 / np.array(_BLUR_OF_ROUND[0])[:, None]
    expected[1] = 4.0 / above
    right_sides = (cloud.design * (cloud.inverse * cloud.inverse)).T
    classes, products = cloud.classes.T, cloud.products.T
    for turn in range(_ROUNDS):
        blurs = _BLUR_OF_ROUND[turn]
        residuals = cloud.values_ns - np.array(lines) @ cloud.design
        scaled = residuals * cloud.inverse
        if turn < _COLD:
            scaled /= np.array(blurs)[:, None]
        squares = scaled * scaled
        parts = expected @ cloud.densities
        parts[0] *= np.exp(squares * -0.5)
        risen = np.tanh(scaled * _STEEPNESS)
        risen += 1.0
        parts[1] *= risen
        total = parts[0] + parts[1]
        total += cloud.floor
        shares = parts / total
        counts = shares @ classes
        counts += _LEAST_COUNTS
        share = shares[0]
        moved, lines = _step(
            lines,
            (share @ products).tolist(),
            ((share * residuals) @ right_sides).tolist(),
            [precision * blur * blur for blur in blurs],
            guess,
        )
        expected[0] = counts[0]
        np.multiply(counts[1], 1 / above, out=expected[1])
        if turn < _COLD:
            expected[0] /= np.array(_BLUR_OF_ROUND[turn + 1])[:, None]
        elif moved < _SETTLED * noise_ns:
            break
    return _Optimum(lines, residuals, squares, parts[0], total, share, counts[0], expected[1])


def _free(spread: float, drift_sigma: float, noise_ns: float) -> float:
    """Free parameters of the line in one direction: its height, and its slope unless a good guess fixes it.

    Parameters
    ----------
    spread : float
        Mean square of the times.
    """
    turns = (drift_sigma / (2 * noise_ns)) ** 2 * spread
    return 1 + turns / (1 + turns)


def _waits(
    gains: list[float], unqueued: list[float], queued: list[float], free: float
) -> tuple[tuple[float, float], tuple[float, float], float]:
    """How far each line may lie above the true edge: root mean square and limit; the probability that neither does.

    Without unqueued probes the line follows the lowest queued ones, and lies above the edge by about the distance of
    queued probes from each other: 1 / density. The likelihood ratio against a model without unqueued probes says how
    probable that is; as many probes as the line has free parameters are no evidence.

    Parameters
    ----------
    gains : list of float
        The logarithm of that ratio for each direction, but for the number of unqueued probes.
    """
    waits, most, both = [], [], 1.0
    for direction in range(2):
        classes = slice(2 * direction, 2 * direction + 2)
        found = sum(unqueued[classes])
        evidence = gains[direction] * max(1 - free / found, 0.0) - found
        none = 1 / (1 + math.exp(min(max(evidence, -50.0), 50.0)))
        apart = 1 / sum(queued[classes])
        waits.append(math.sqrt(2 * none) * apart)
        most.append(max(math.log(none / _BEYOND), 0.0) * apart)
        both *= 1 - none
    return (waits[0], waits[1]), (most[0], most[1]), both


def _believable(cloud: _Cloud, residuals: Floats, noise_ns: float) -> NDArray[np.bool_]:
    """Which starts leave no more probes below their lines than wrong stamps explain; those that leave fewest, if none.

    The likelihood alone would prefer a dense crowd of queued probes to a sparse one of unqueued probes below it.
    """
    directions = cloud.directions
    most = _WRONG_SHARE / 2 * directions.sum(axis=1)
    most = most + 3 * np.sqrt(most) + 2
    too_fast = (residuals * cloud.inverse < -3.0).astype(np.float64) @ directions.T
    excess = np.maximum(too_fast - most, 0.0).sum(axis=1)
    return np.asarray(excess == excess.min())


def _near(
    times_s: tuple[Floats, Floats],
    values_ns: tuple[Floats, Floats],
    means: tuple[int, int],
    first: Corridor,
    noise_ns: float,
) -> _Cloud:
    values, signed, classes = [], [], []
    for reverse, (edge, sign) in enumerate(((first.forward_ns, 1.0), (first.reverse_ns, -1.0))):
        times = times_s[reverse] * sign
        middle = edge + 0.5 * (_ABOVE - _BELOW) * noise_ns
        apart = values_ns[reverse] - first.drift * times
        apart -= middle
        near = np.flatnonzero(np.abs(apart) < 0.5 * (_ABOVE + _BELOW) * noise_ns)
        values.append(values_ns[reverse][near])
        signed.append(times[near])
        of_means = int(np.searchsorted(near, means[reverse]))
        classes += [of_means, len(near) - of_means]
    ends = list(accumulate(classes))
    one_hot = np.zeros((4, ends[3]))
    for row, (count, end) in enumerate(zip(classes, ends, strict=True)):
        one_hot[row, end - count : end] = 1.0
    design = np.empty((3, ends[3]))
    design[0], design[1] = one_hot[0] + one_hot[1], one_hot[2] + one_hot[3]
    np.concatenate(signed, out=design[2])
    inverse = (1 / (_WIDTHS * noise_ns)) @ one_hot
    densities = np.empty((2, 4, ends[3]))
    np.multiply(one_hot, inverse / _ROOT_TWO_PI, out=densities[0])
    np.multiply(one_hot, 0.5, out=densities[1])
    # A wrong stamp may throw any probe near the edge anywhere near it.
    wrong = _WRONG_SHARE / _WRONG_NS
    floor = design[0] * (wrong * ends[1]) + design[1] * (wrong * (ends[3] - ends[1]))
    floor += _TINY
    products = np.empty((5, ends[3]))
    np.multiply(design, inverse * inverse, out=products[:3])
    np.multiply(products[2], design[2], out=products[4])
    np.multiply(products[2], design[1], out=products[3])
    products[2] -= products[3]
    return _Cloud(np.concatenate(values), design, one_hot, inverse, densities, floor, products)


def _step(
    lines: list[list[float]],
    normals: list[list[float]],
    rights: list[list[float]],
    precisions: list[float],
    guess: float,
) -> tuple[float, list[list[float]]]:
    """How far weighted least squares moves the lines of each start at most, and where to.

    The normal equations of one start form an arrow: both heights are coupled through the drift alone.
    """
    most, moved = 0.0, []
    for (forward, reverse, drift), (a, b, c, d, e), (f, g, h), precision in zip(
        lines, normals, rights, precisions, strict=True
    ):
        p, q = c / (a + _LEAST_WEIGHT), d / (b + _LEAST_WEIGHT)
        turned = (h + precision * (guess - drift) - p * f - q * g) / (e + precision - p * c - q * d)
        first, second = f / (a + _LEAST_WEIGHT) - p * turned, g / (b + _LEAST_WEIGHT) - q * turned
        most = max(most, abs(first), abs(second))
        moved.append([forward + first, reverse + second, drift + turned])
    return most, moved


def _inverse(normal: list[float], precision: float) -> Floats:
    a, b = normal[0] + _LEAST_WEIGHT, normal[1] + _LEAST_WEIGHT
    c, d, e = normal[2:]
    p, q = -c / a, -d / b
    turned = 1 / (e + precision + p * c + q * d)
    p_turned, q_turned = p * turned, q * turned
    return np.array(
        [
            [1 / a + p * p_turned, p * q_turned, p_turned],
            [p * q_turned, 1 / b + q * q_turned, q_turned],
            [p_turned, q_turned, turned],
        ]
    )
