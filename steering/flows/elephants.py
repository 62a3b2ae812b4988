"""Which live flows to move to which rail, so that their rates come close to the max-min fair optimum. Pure.

To place unsplittable flows so is NP-hard (Kleinberg, Rabani and Tardos, "Fairness in routing and load balancing", FOCS
1999), so this is a local search: as long as some flow of the rail with the lowest level can go where it does better
and the rail it joins does not fall as low, the move that helps most is made; where no single move helps, two flows
change places. Then the plan is cut down to the fewest of these moves that suffice. Measuring rates, estimating what
flows ask for, and moving few large ones is Hedera's way (Al-Fares et al., NSDI 2010), there for a whole fabric and by
its switches; here one host moves its own.

What suffices: no flow of the plan has less than `1 - threshold` of the rate with the same rank in the best allocation
found (`worst_ratio`). A present allocation that has it is left alone. Rates and capacities in bits per second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Generic

from steering.flows.elephants_search import Flow, Key, Rail, Search, Step
from steering.flows.maxmin import worst_ratio

_PRUNED: Final = 32  # moves that are each tried to be left out
_STRIDES: Final = 16  # so often is a plan looked at while it is made
_ROUNDING: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Move(Generic[Key]):
    """One flow that is to change its rail."""

    key: Key
    origin: str
    rail: str


@dataclass(frozen=True, slots=True)
class Balance(Generic[Key]):
    """What to do, and what it is good for; the ratios are `worst_ratio` to the best allocation that was found."""

    moves: tuple[Move[Key], ...]
    ratio_before: float
    ratio_after: float
    lowest_before_bps: float
    lowest_after_bps: float


def balance(flows: Sequence[Flow[Key]], rails: Sequence[Rail], threshold: float = 0.1) -> Balance[Key]:
    """The fewest moves (as far as they are found) that come close to the max-min fair optimum.

    A flow is moved only if the worst off of the two rails gains even when the rail it leaves has its error more, and
    the one it joins its error less.

    Parameters
    ----------
    flows : sequence of Flow
        Each on one of the rails.
    rails : sequence of Rail
        Names are unique.
    threshold : float
        Nothing is done while no flow lacks more than this share of what it had in the best allocation.
    """
    search = Search(flows, rails)
    before = search.rates()
    steps = list(search.steps())
    best, wanted, after = search.rates(), {}, before
    if worst_ratio(before, best) < 1 - threshold:
        search = Search(flows, rails)
        wanted = _fewest(search, steps, best, 1 - threshold)
        after = search.rates()
    moves = tuple(Move(flows[flow].key, flows[flow].rail, rails[rail].name) for flow, rail in sorted(wanted.items()))
    return Balance(
        moves,
        *(worst_ratio(before, best), worst_ratio(after, best)),
        *(min(before, default=0.0), min(after, default=0.0)),
    )


def _fewest(search: Search, steps: Sequence[Step], best: Sequence[float], wanted: float) -> dict[int, int]:
    """The shortest beginning of these steps that suffices, less what it can do without; makes it so."""
    enough = wanted - _ROUNDING
    done, stride = 0, max(1, len(steps) // _STRIDES)
    while done < len(steps) and worst_ratio(search.rates(), best) < enough:
        for flow, _, rail in steps[done : done + stride]:
            search.move(flow, rail)
        done = min(done + stride, len(steps))
    while done > 0:
        flow, origin, rail = steps[done - 1]
        search.move(flow, origin)
        if worst_ratio(search.rates(), best) < enough:
            search.move(flow, rail)
            break
        done -= 1
    moved = {flow: search.now[flow] for flow, _, _ in steps[:done] if search.now[flow] != search.start[flow]}
    _shorten(search, moved)
    for flow, rail in list(moved.items())[:_PRUNED]:
        search.move(flow, search.start[flow])
        if worst_ratio(search.rates(), best) >= enough:
            del moved[flow]
        else:
            search.move(flow, rail)
    return moved


def _shorten(search: Search, moved: dict[int, int]) -> None:
    """Where one flow goes and another that asks for the same comes, let the other go all the way instead."""
    gone: dict[tuple[int, float], list[int]] = {}
    for flow in moved:
        gone.setdefault((search.start[flow], search.demands[flow]), []).append(flow)
    for flow in list(moved):
        while flow in moved and (stays := gone.get((moved[flow], search.demands[flow]))):
            other = stays.pop()
            if other not in moved:
                continue
            here, there = moved[flow], moved.pop(other)
            search.move(other, here)
            search.move(flow, there)
            moved[flow] = there
            if there == search.start[flow]:
                del moved[flow]
