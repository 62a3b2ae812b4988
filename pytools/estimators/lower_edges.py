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
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pytools.estimators.corridor import Corridor, Floats

_BLURS: Final = np.array([[2.0], [5.0], [16.0]])  # widths of the first Gaussian of each start, in units of the noise
_COOLING: Final = 0.72
_ROUNDS: Final = 40
_BELOW: Final = 35.0  # how far around the first line probes are looked at, in units of the noise
_ABOVE: Final = 35.0
_SETTLED_NS: Final = 0.05
_NOISE_WEIGHT: Final = 30.0  # the stated noise counts like so many unqueued probes
_WRONG_SHARE: Final = 0.02  # stated: differences of stamps that are wrong,
_WRONG_NS: Final = 1000.0  # anywhere within this width
_TINY: Final = 1e-6
_MIXING: Final = 4.0  # how much of the variance a queued probe beside each unqueued one adds (from simulation)

# log-likelihood ratio that the lowest of queued probes alone would reach
_BEYOND: Final = 1e-3  # probability that a line lies further above the edge than its limit
_ROOT_TWO_PI: Final = 2.5066282746310002


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
    """Probes of both directions near the first lines; reverse times have their sign turned."""

    values_ns: Floats
    signed_s: Floats
    reverse: NDArray[np.intp]
    widths: Floats  # standard deviation in units of the noise: means of two have less
    groups: Floats  # (probes, 4): forward kept, forward others, reverse kept, reverse others
    moments: Floats  # (probes, 5): forward, reverse, signed times of either, squared times


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
    edges = np.tile([first.forward_ns, first.reverse_ns], (len(_BLURS), 1)) + 1.5 * noise_ns
    drift = np.full((len(_BLURS), 1), first.drift)
    blur = _BLURS * noise_ns * cloud.widths
    above = _ABOVE * noise_ns
    unqueued = np.full((len(_BLURS), 4), 4.0)
    queued = unqueued / above
    # A wrong stamp may throw any probe near the edge anywhere near it.
    floor = (_WRONG_SHARE / _WRONG_NS) * np.bincount(cloud.reverse, minlength=2)[cloud.reverse] + _TINY
    guess, precision = drift_guess[0], drift_guess[1] ** -2.0
    for _ in range(_ROUNDS):
        residuals = cloud.values_ns - edges[:, cloud.reverse] - drift * cloud.signed_s
        scaled = residuals / blur
        peak = unqueued @ cloud.groups.T / (blur * _ROOT_TWO_PI) * np.exp(-0.5 * scaled * scaled)
        plateau = queued @ cloud.groups.T / (1 + np.exp(np.clip(-1.702 * scaled, -50, 50)))
        total = peak + plateau + floor
        share = peak / total
        unqueued = share @ cloud.groups + 0.05
        queued = ((plateau / total) @ cloud.groups + 0.1) / above
        step = _step(cloud, share / (blur * blur), residuals, precision, guess - drift)
        edges = edges + step[:, :2]
        drift = drift + step[:, 2:]
        cooling = np.maximum(blur * _COOLING, noise_ns * cloud.widths)
        settled = bool((cooling == blur).all()) and float(np.abs(step[:, :2]).max()) < _SETTLED_NS
        blur = cooling
        if settled:
            break
    likelihood = np.log(total).sum(axis=1) - 0.5 * precision * (drift[:, 0] - guess) ** 2
    likelihood = np.where(_believable(cloud, residuals, noise_ns), likelihood, -np.inf)
    best = int(likelihood.argmax())
    information = share * (1 - (1 - share) * np.minimum(scaled * scaled, 1.0)) / (blur * blur)
    # Queued probes within the noise pass for unqueued ones; how many of them do is not known.
    mixed = 2 * noise_ns * float(queued[best].sum() / unqueued[best].sum())
    covariance = np.linalg.inv(_normal(cloud, information, precision)[best]) * (1 + _MIXING * mixed)
    found = np.column_stack([edges, drift])
    apart = found - found[best]
    chances = np.exp(np.maximum(likelihood - likelihood[best], -50.0))
    chances /= chances.sum()
    covariance += np.einsum("s,si,sj->ij", chances, apart, apart)
    counts = unqueued[best]
    free = _free(cloud, drift_guess[1], noise_ns)
    waits, most, carried = _waits(cloud, peak[best], (plateau + floor)[best], counts, queued[best], free)
    return LowerEdges(
        forward_ns=float(edges[best, 0]),
        reverse_ns=float(edges[best, 1]),
        drift=float(drift[best, 0]),
        covariance=covariance,
        unqueued=float(min(counts[0] + counts[1], counts[2] + counts[3])),
        waits_ns=waits,
        most_ns=most,
        found=carried,
    )


def _free(cloud: _Cloud, drift_sigma: float, noise_ns: float) -> float:
    """Free parameters of the line in one direction: its height, and its slope unless a good guess fixes it."""
    spread = float(np.sqrt(cloud.moments[:, 4].mean()))
    turns = (drift_sigma * spread / (2 * noise_ns)) ** 2
    return 1 + turns / (1 + turns)


def _waits(
    cloud: _Cloud, peak: Floats, others: Floats, unqueued: Floats, queued: Floats, free: float
) -> tuple[tuple[float, float], tuple[float, float], float]:
    """How far each line may lie above the true edge: root mean square and limit; the probability that neither does.

    Without unqueued probes the line follows the lowest queued ones, and lies above the edge by about the distance of
    queued probes from each other: 1 / density. The likelihood ratio against a model without unqueued probes says how
    probable that is; as many probes as the line has free parameters are no evidence.
    """
    gains = np.log1p(peak / others) @ cloud.moments[:, :2]
    waits, most, both = [], [], 1.0
    for direction in range(2):
        classes = slice(2 * direction, 2 * direction + 2)
        found = float(unqueued[classes].sum())
        evidence = float(gains[direction]) * max(1 - free / found, 0.0) - found
        none = 1 / (1 + math.exp(min(max(evidence, -50.0), 50.0)))
        apart = 1 / float(queued[classes].sum())
        waits.append(math.sqrt(2 * none) * apart)
        most.append(max(math.log(none / _BEYOND), 0.0) * apart)
        both *= 1 - none
    return (waits[0], waits[1]), (most[0], most[1]), both


def _believable(cloud: _Cloud, residuals: Floats, noise_ns: float) -> NDArray[np.bool_]:
    """Which starts leave no more probes below their lines than wrong stamps explain; those that leave fewest, if none.

    The likelihood alone would prefer a dense crowd of queued probes to a sparse one of unqueued probes below it.
    """
    directions = cloud.moments[:, :2]
    most = _WRONG_SHARE / 2 * directions.sum(axis=0)
    most = most + 3 * np.sqrt(most) + 2
    too_fast = (residuals < -3 * noise_ns * cloud.widths).astype(np.float64) @ directions
    excess = np.maximum(too_fast - most, 0.0).sum(axis=1)
    return np.asarray(excess == excess.min())


def _near(
    times_s: tuple[Floats, Floats],
    values_ns: tuple[Floats, Floats],
    means: tuple[int, int],
    first: Corridor,
    noise_ns: float,
) -> _Cloud:
    values, signed, groups = [], [], []
    for reverse, (edge, sign) in enumerate(((first.forward_ns, 1.0), (first.reverse_ns, -1.0))):
        times = times_s[reverse] * sign
        residuals = values_ns[reverse] - edge - first.drift * times
        near = np.flatnonzero((residuals < _ABOVE * noise_ns) & (residuals > -_BELOW * noise_ns))
        values.append(values_ns[reverse][near])
        signed.append(times[near])
        groups.append(2 * reverse + (near >= means[reverse]))
    group = np.concatenate(groups)
    reverse_ones = group // 2
    signed_s = np.concatenate(signed)
    moments = np.zeros((len(group), 5))
    places = np.arange(len(group))
    moments[places, reverse_ones] = 1.0
    moments[places, 2 + reverse_ones] = signed_s
    moments[:, 4] = signed_s * signed_s
    one_hot = np.zeros((len(group), 4))
    one_hot[places, group] = 1.0
    widths = np.where(group % 2 == 0, np.sqrt(0.5), 1.0)
    return _Cloud(np.concatenate(values), signed_s, reverse_ones, widths, one_hot, moments)


def _normal(cloud: _Cloud, weights: Floats, precision: float) -> Floats:
    """The matrix of the normal equations of each start."""
    sums = weights @ cloud.moments
    matrix = np.zeros((len(weights), 3, 3))
    matrix[:, 0, 0] = sums[:, 0] + 1e-9
    matrix[:, 1, 1] = sums[:, 1] + 1e-9
    matrix[:, 0, 2] = matrix[:, 2, 0] = sums[:, 2]
    matrix[:, 1, 2] = matrix[:, 2, 1] = sums[:, 3]
    matrix[:, 2, 2] = sums[:, 4] + precision
    return matrix


def _step(cloud: _Cloud, weights: Floats, residuals: Floats, precision: float, to_guess: Floats) -> Floats:
    """How far weighted least squares moves the lines of each start."""
    weighted = weights * residuals
    right = np.column_stack([weighted @ cloud.moments[:, :2], weighted @ cloud.signed_s + precision * to_guess[:, 0]])
    return np.asarray(np.linalg.solve(_normal(cloud, weights, precision), right[:, :, None])[:, :, 0], np.float64)
