"""The search behind `elephants`: an assignment of flows to rails, changed by one improving move after the other. Pure.

In a search flows and rails are numbers: their places in the sequences given.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, product
from typing import Any, Final, Generic, TypeVar

from steering.flows.maxmin import INFINITE, Load

_EPSILON: Final = 1e-3  # a gain smaller than this share is none
_ROUNDED: Final = 1 - 1e-9
_EVERY: Final = 12  # flows of a rail that are all tried; of more, only some
_SMALL: Final = 12  # flows of a problem in which pairs of moves are tried as well

Key = TypeVar("Key", bound=Hashable)

Step = tuple[int, int, int]  # flow, from, to


@dataclass(frozen=True, slots=True)
class Rail:
    """What may carry flows."""

    name: str
    capacity_bps: float  # what the flows of the problem can have together
    error_bps: float = 0.0
    open: bool = True  # flows may be moved here


@dataclass(frozen=True, slots=True)
class Flow(Generic[Key]):
    key: Key
    rail: str
    demand_bps: float = INFINITE  # what it would take if it could
    movable: bool = True


class Search:
    """The assignment while it is changed."""

    def __init__(self, flows: Sequence[Flow[Any]], rails: Sequence[Rail]) -> None:
        number = {rail.name: index for index, rail in enumerate(rails)}
        self.start = [number[flow.rail] for flow in flows]  # each flow's rail before and now
        self.now = list(self.start)
        self.demands = [flow.demand_bps for flow in flows]  # of each flow
        self._capacity = [rail.capacity_bps for rail in rails]
        self._high = [rail.capacity_bps + rail.error_bps for rail in rails]
        self._low = [max(0.0, rail.capacity_bps - rail.error_bps) for rail in rails]
        self._small = len(flows) <= _SMALL
        self._open = [index for index, rail in enumerate(rails) if rail.open]
        on: list[list[float]] = [[] for _ in rails]
        # Those that may go, by demand; of equals, those that are elsewhere than they began come first: going on costs
        # no further move.
        self._movable: list[list[tuple[float, bool, int]]] = [[] for _ in rails]
        for index, (flow, rail) in enumerate(zip(flows, self.start, strict=True)):
            on[rail].append(flow.demand_bps)
            if flow.movable:
                self._movable[rail].append((flow.demand_bps, True, index))
        for movable in self._movable:
            movable.sort()
        self._loads = [Load(demands) for demands in on]
        self._levels = [load.level(high) for load, high in zip(self._loads, self._high, strict=True)]

    def rates(self) -> list[float]:
        """What all flows get, in rising order."""
        found: list[float] = []
        for load, capacity in zip(self._loads, self._capacity, strict=True):
            found += load.rates(capacity)
        found.sort()
        return found

    def move(self, flow: int, rail: int) -> None:
        origin, demand = self.now[flow], self.demands[flow]
        self._loads[origin].remove(demand)
        movable = self._movable[origin]
        del movable[bisect_left(movable, (demand, origin == self.start[flow], flow))]
        self._loads[rail].add(demand)
        insort(self._movable[rail], (demand, rail == self.start[flow], flow))
        self.now[flow] = rail
        for each in (origin, rail):
            self._levels[each] = self._loads[each].level(self._high[each])

    def steps(self) -> Iterator[Step]:
        """Make and tell one improving move after the other, until there is none."""
        stuck: set[int] = set()
        while True:
            level, _, rail = min(
                (
                    (level, -len(self._loads[rail]), rail)
                    for rail, level in enumerate(self._levels)
                    if rail not in stuck
                ),
                default=(INFINITE, 0, 0),
            )
            if level == INFINITE:
                return
            found = self._better_move(rail, level) or (self._two_moves(rail) if self._small else [])
            if not found:
                stuck.add(rail)
                continue
            stuck.clear()
            for flow, to in found:
                step = (flow, self.now[flow], to)
                self.move(flow, to)
                yield step

    def _better_move(self, rail: int, level: float) -> list[tuple[int, int]]:
        """The move from a rail after which the lower of the two rails is highest, and then the one that is joined."""
        best = (level * (1 + _EPSILON), 0.0)
        found: list[tuple[int, int]] = []
        load, high = self._loads[rail], self._high[rail]
        highest_first = sorted(self._open, key=self._levels.__getitem__, reverse=True)
        for demand, flow in self._candidates(rail, level):
            without = load.level_without(high, demand)
            if without < level:
                continue
            for to in highest_first:
                other, low, least = self._loads[to], self._low[to], (best[0] if found else level) * _ROUNDED
                if self._levels[to] < least:
                    break  # a flow more does not raise it
                if to == rail or not other.fits(low, least, demand):
                    continue
                joined = other.level_with(low, demand)
                lower = min(without, joined)
                if lower > best[0] or (found and lower >= best[0] * _ROUNDED and joined > best[1]):
                    best, found = (lower, joined), [(flow, to)]
                elif not found and lower >= level * _ROUNDED and self._fewer_lack(rail, to, demand):
                    best, found = (max(best[0], lower), joined), [(flow, to)]
        return found

    def _fewer_lack(self, rail: int, to: int, demand: float) -> bool:
        """Whether a move that leaves the lowest rate as it is lets fewer flows have no more."""
        high, low = self._high[rail], self._low[to]
        before = [*self._loads[rail].rates(high), *self._loads[to].rates(low)]
        after = [*_swapped(self._loads[rail], demand).rates(high), *_swapped(self._loads[to], come=demand).rates(low)]
        return _better(before, after)

    def _candidates(self, rail: int, level: float) -> Iterator[tuple[float, int]]:
        """Flows of a rail that are worth a try, one of each demand."""
        movable = self._movable[rail]
        if len(movable) <= _EVERY:
            previous = -1.0
            for demand, _, flow in movable:
                if demand != previous:
                    yield demand, flow
                previous = demand
            return
        # Of those that get less than they ask for, the one that asks for least is easiest for the other rail, and of
        # those without a bound, any. Of those that get what they ask for, the largest frees most.
        throttled = bisect_left(movable, (level, False, 0))
        unbounded = bisect_left(movable, (INFINITE, False, 0))
        for place in sorted({throttled - 1, throttled, unbounded}):
            if 0 <= place < len(movable):
                yield movable[place][0], movable[place][2]

    def _two_moves(self, rail: int) -> list[tuple[int, int]]:
        """The best pair of moves that begins at a rail: two flows change places, or one makes room for the other."""
        before = self._nominal()
        best = sorted(chain.from_iterable(before))
        found: list[tuple[int, int]] = []
        for flow, to in product(self._on(rail), self._open):
            if to == rail:
                continue
            for other, then in product([*self._on(rail), *self._on(to)], self._open):
                if other == flow or then == self.now[other]:
                    continue
                pair = [(flow, to), (other, then)]
                after = self._after(pair, before, self._capacity)
                if _better(best, after) and self._robust(pair):
                    best, found = after, pair
        return found

    def _on(self, rail: int) -> list[int]:
        return [flow for _, _, flow in self._movable[rail]]

    def _nominal(self) -> list[tuple[float, ...]]:
        return [rail_rates(capacity, load.every) for load, capacity in zip(self._loads, self._capacity, strict=True)]

    def _robust(self, pair: list[tuple[int, int]]) -> bool:
        """Whether two moves are good also when the estimates err against them."""
        joined = {rail for _, rail in pair}
        if self._low == self._high:
            return True
        capacity = [self._low[rail] if rail in joined else self._high[rail] for rail in range(len(self._low))]
        before = [rail_rates(each, load.every) for each, load in zip(capacity, self._loads, strict=True)]
        return _better(sorted(chain.from_iterable(before)), self._after(pair, before, capacity))

    def _after(
        self, pair: list[tuple[int, int]], before: list[tuple[float, ...]], capacity: list[float]
    ) -> list[float]:
        demands: dict[int, list[float]] = {}
        for flow, to in pair:
            for rail in (self.now[flow], to):
                demands.setdefault(rail, list(self._loads[rail].every))
            demands[self.now[flow]].remove(self.demands[flow])
            insort(demands[to], self.demands[flow])
        rates = list(before)
        for rail, every in demands.items():
            rates[rail] = rail_rates(capacity[rail], tuple(every))
        return sorted(chain.from_iterable(rates))


@lru_cache(maxsize=65_536)
def rail_rates(capacity: float, demands: tuple[float, ...]) -> tuple[float, ...]:
    """What the flows of one rail get; the same few are asked for again and again."""
    return tuple(Load(demands).rates(capacity))


def _swapped(load: Load, gone: float | None = None, come: float | None = None) -> Load:
    demands = [*load.demands, *[INFINITE] * load.unbounded]
    if gone is not None:
        demands.remove(gone)
    return Load(demands if come is None else [*demands, come])


def _better(before: list[float], after: list[float]) -> bool:
    """Whether the first rate that differs, in rising order, is higher afterwards."""
    for have, get in zip(sorted(before), sorted(after), strict=True):
        if abs(get - have) > _EPSILON * have:
            return get > have
    return False
