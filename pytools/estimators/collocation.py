"""Which hosts share an oscillator, from the history of their frequencies: groups with a confidence, alone, unknown.

Virtual machines of one physical host read one oscillator, so their frequencies differ by nothing; others differ by
micro-seconds a second and wander differently as temperatures change. docs/clocks.md has the model and the tests.
Pure functions of arrays; frequencies in parts per billion.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pytools.estimators.drift_history import DriftHistory, Floats
from pytools.estimators.frequency_shapes import Shapes, Wander, describe, learn_wander, log_stillness
from pytools.signals import Collocated

RANGE_PPB: Final = 60_000.0  # oscillators lie anywhere within +-30 ppm of their nominal frequency
EQUAL_BY_CHANCE: Final = 1e-4  # stated share of pairs of different oscillators whose mean frequencies are equal
ACCEPT: Final = 0.995  # a host joins a group when this probable
ALONE: Final = 0.99  # a host is alone when it is this probable that it shares with no other
CONTRADICTED: Final = 1e-6  # two hosts differ when one oscillator would show such a difference this rarely
LEAST_SPAN_NS: Final = 45_000_000_000
LEAST_ROWS: Final = 20
_NEIGHBOUR_SIGMAS: Final = 6.0


@dataclass(frozen=True)
class Collocations:
    """The verdict on every host of a history."""

    groups: list[Collocated]  # largest first
    alone: list[str]
    unknown: list[str]
    span_ns: int


@dataclass
class Cluster:
    """Hosts taken to share an oscillator, and their pooled shape."""

    members: list[int]
    shape: Floats
    variance: Floats
    confidence: float = 1.0


def groups(history: DriftHistory) -> Collocations:
    """Which hosts share an oscillator, as far as the history says.

    Returns
    -------
    Collocations
        Every host of the history is in exactly one group, or alone, or unknown.
    """
    found = history.frequencies()
    span_ns = int(found.at_ns[-1] - found.at_ns[0]) if len(found.at_ns) else 0
    if span_ns < LEAST_SPAN_NS or len(found.at_ns) < LEAST_ROWS:
        return Collocations([], [], sorted(found.hosts), span_ns)
    shapes, usable = describe(found)
    judged = np.flatnonzero(usable)
    clusters, doubtful = Clustering(shapes.take(judged)).run()
    names = [found.hosts[row] for row in judged]
    together = [
        Collocated(sorted(names[row] for row in each.members), each.confidence)
        for each in clusters
        if len(each.members) > 1
    ]
    single = sorted(
        names[each.members[0]]
        for place, each in enumerate(clusters)
        if len(each.members) == 1 and place not in doubtful
    )
    settled = {*single, *(host for each in together for host in each.hosts)}
    return Collocations(
        groups=sorted(together, key=lambda each: (-len(each.hosts), each.hosts)),
        alone=single,
        unknown=sorted(set(found.hosts) - settled),
        span_ns=span_ns,
    )


class Clustering:
    """Hosts one by one, the best known first: each joins a cluster, begins one, or is left in doubt.

    A host joins when that is probable against all else (another cluster, none), and when it agrees with each member
    by itself. What was left in doubt is asked once more when the clusters are complete.
    """

    def __init__(self, shapes: Shapes) -> None:
        self._shapes = shapes
        self._wander: Wander = learn_wander(shapes)
        self._clusters: list[Cluster] = []
        self._best_known_first = np.lexsort((shapes.value[:, 0], shapes.variance[:, 0])).tolist()
        self._of = np.full(len(shapes), -1)  # host -> cluster
        self._in_doubt = np.zeros(len(shapes), np.bool_)
        self._order = np.argsort(shapes.value[:, 0], kind="stable")
        self._means = shapes.value[self._order, 0]
        self._prior = 1 / max(1, len(shapes) - 1)  # a host is expected to share with one other

    def run(self) -> tuple[list[Cluster], set[int]]:
        """All clusters, single hosts included, and which of them a host in doubt may belong to."""
        for host in self._best_known_first:
            near = self._near(host)
            places, odds = self._odds(host, near)
            if self._join(host, places, odds):
                continue
            others = near[self._in_doubt[near]]
            total = odds.sum() + self._odds_of(host, self._shapes.take(others), np.ones(len(others))).sum()
            if 1 / (1 + total) < ALONE:
                self._in_doubt[host] = True
                continue
            self._of[host] = len(self._clusters)
            self._clusters.append(Cluster([host], self._shapes.value[host], self._shapes.variance[host]))
        return self._clusters, self._ask_again()

    def _ask_again(self) -> set[int]:
        """Let hosts in doubt join after all; returns the clusters that those may belong to who still do not."""
        doubtful: set[int] = set()
        for host in (each for each in self._best_known_first if self._in_doubt[each]):
            places, odds = self._odds(host, self._near(host))
            if not self._join(host, places, odds):
                doubtful.update(places[odds / (1 + odds.sum()) > 1 - ALONE].tolist())
        return doubtful

    def _near(self, host: int) -> NDArray[np.intp]:
        """Hosts whose mean frequency might be this one's, those known as well or better."""
        reach = _NEIGHBOUR_SIGMAS * math.sqrt(2 * self._shapes.variance[host, 0])
        mean = self._shapes.value[host, 0]
        low, high = np.searchsorted(self._means, (mean - reach, mean + reach))
        near = self._order[low:high]
        others: NDArray[np.intp] = near[near != host]
        return others

    def _odds(self, host: int, near: NDArray[np.intp]) -> tuple[NDArray[np.intp], Floats]:
        """Clusters nearby, and the odds of the host belonging to each against its being of none."""
        places = np.unique(self._of[near])
        places = places[places >= 0]
        if not len(places):
            return places, np.empty(0)
        clusters = [self._clusters[place] for place in places]
        pooled = Shapes(np.array([each.shape for each in clusters]), np.array([each.variance for each in clusters]))
        return places, self._odds_of(host, pooled, np.array([len(each.members) for each in clusters], np.float64))

    def _odds_of(self, host: int, others: Shapes, sizes: Floats) -> Floats:
        """Odds that the host shares the oscillator of each of some others, by all that is known of both."""
        if not len(others):
            return np.empty(0)
        square = (others.value - self._shapes.value[host]) ** 2
        noise = others.variance + self._shapes.variance[host]
        equal = np.exp(-0.5 * square[:, 0] / noise[:, 0]) / np.sqrt(2 * np.pi * noise[:, 0])
        mean = equal / ((1 - EQUAL_BY_CHANCE) / RANGE_PPB + EQUAL_BY_CHANCE * equal)
        still = np.exp(log_stillness(square[:, 1:], noise[:, 1:], self._wander))
        odds: Floats = sizes * self._prior * mean * still
        return np.where(chance((square / noise).sum(axis=1), square.shape[1]) < CONTRADICTED, 0.0, odds)

    def _join(self, host: int, places: NDArray[np.intp], odds: Floats) -> bool:
        """Put the host into the most probable cluster if that is probable enough and no member contradicts it."""
        if not len(places):
            return False
        best = int(np.argmax(odds))
        probable = float(odds[best] / (1 + odds.sum()))
        chosen = self._clusters[places[best]]
        value, variance = self._shapes.value[host], self._shapes.variance[host]
        members = self._shapes.take(np.array(chosen.members))
        square = (members.value - value) ** 2 / (members.variance + variance)
        if probable < ACCEPT or (chance(square.sum(axis=1), len(value)) < CONTRADICTED).any():
            return False
        total = chosen.variance + variance
        chosen.shape = (chosen.shape * variance + value * chosen.variance) / total
        chosen.variance = chosen.variance * variance / total
        chosen.members.append(host)
        chosen.confidence *= probable
        self._of[host] = places[best]
        return True


def chance(square: Floats, freedom: int) -> Floats:
    """How often noise alone gives a sum of so many normalised squares, an even number, at least as large."""
    half = np.asarray(square) / 2
    term, total = np.ones_like(half), np.ones_like(half)
    for step in range(1, freedom // 2):
        term = term * half / step
        total = total + term
    result: Floats = np.exp(-half) * total
    return result
