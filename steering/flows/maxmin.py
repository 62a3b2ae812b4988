"""Max-min fair rates of flows that each cross one rail: what TCP's sharing comes close to, worked out. Pure.

An allocation is max-min fair when no flow can get more without one that has no more than it getting less. For a given
assignment of unsplittable flows to rails it is found by progressive filling: all rates rise together, a flow that has
what it asks for stops, and the others stop when the rail is full (Bertsekas and Gallager, Data Networks, 2nd edition,
section 6.5.2). Flows cross one rail each, so every rail is filled for itself, and one number tells all: its *level*,
the rate of those that get less than they ask for.

Two allocations are compared by their rates in rising order: the better one is that whose first differing rate is
higher (leximin). Rates, demands and capacities are in one unit, bits per second elsewhere; a demand may be infinite.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import truediv

INFINITE = math.inf


def worst_ratio(rates: Sequence[float], best: Sequence[float]) -> float:
    """How near one allocation is to another, both in rising order: the smallest ratio of rates with the same rank.

    It is no more than the ratio of the smallest rates, and no more than the ratio of the totals.
    """
    none = bisect_right(best, 0.0)
    return min(map(truediv, rates[none:], best[none:]), default=1.0)


class Load:
    """The flows of one rail, kept in order, so that the level after one flow more or less is found by bisection."""

    __slots__ = ("_sums", "demands", "unbounded")

    def __init__(self, demands: Iterable[float] = ()) -> None:
        every = sorted(demands)
        finite = bisect_left(every, INFINITE)
        self.demands, self.unbounded = every[:finite], len(every) - finite
        self._sums = [0.0, *accumulate(self.demands)]

    def __len__(self) -> int:
        return len(self.demands) + self.unbounded

    @property
    def every(self) -> tuple[float, ...]:
        return (*self.demands, *(INFINITE,) * self.unbounded)

    def add(self, demand: float) -> None:
        if demand == INFINITE:
            self.unbounded += 1
            return
        insort(self.demands, demand)
        self._sums = [0.0, *accumulate(self.demands)]

    def remove(self, demand: float) -> None:
        if demand == INFINITE:
            self.unbounded -= 1
            return
        del self.demands[bisect_left(self.demands, demand)]
        self._sums = [0.0, *accumulate(self.demands)]

    def rates(self, capacity: float) -> list[float]:
        """What the flows get, in rising order."""
        level = self.level(capacity)
        met = bisect_left(self.demands, level)
        return self.demands[:met] + [level] * (len(self) - met)

    def level(self, capacity: float, more: int = 0) -> float:
        """The rate of those that get less than they ask for; infinite when all get what they ask for.

        `more` flows without a bound are reckoned with besides.
        """
        demands, sums = self.demands, self._sums
        flows = len(demands) + self.unbounded + more
        if flows <= 0 or (self.unbounded + more <= 0 and sums[-1] <= capacity):
            return INFINITE
        met, level = 0, max(0.0, capacity) / flows
        while True:  # all rise to what is left for each; those that have enough by then leave more for the others
            enough = bisect_right(demands, level)
            if enough <= met:
                return level
            if enough >= flows:
                return INFINITE
            met, level = enough, max(0.0, capacity - sums[enough]) / (flows - enough)

    def fits(self, capacity: float, level: float, demand: float) -> bool:
        """Whether a level is kept if there is one flow more."""
        met = bisect_right(self.demands, level)
        throttled = len(self.demands) - met + self.unbounded
        return self._sums[met] + throttled * level + min(demand, level) <= capacity

    def level_with(self, capacity: float, demand: float) -> float:
        """The level if there were one flow more."""
        if demand <= capacity:
            level = self.level(capacity - demand)
            if level >= demand:  # it gets what it asks for
                return level
        return self.level(capacity, 1)

    def level_without(self, capacity: float, demand: float) -> float:
        """The level if one of the flows were not there."""
        if demand < INFINITE:
            level = self.level(capacity + demand)
            if level >= demand:
                return level
        return self.level(capacity, -1)
