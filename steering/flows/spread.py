"""Which of the flows that move together to place elsewhere, so that each rail has as many as its weight says. Pure.

Flows of a job that go in lock step send the same, and a step lasts as long as the rail with most of them needs. How
fast each is tells nothing of what it sends: all of a rail are slow when the rail is, and between two steps all rest. So
flows are counted, not rates: one counts that sent at least a share of what the largest of its job sent over some
seconds, many steps; less is control traffic.

Flows leave a rail only if it has more than the busiest rail of the best placing would have, and only the flows that
are too many. So the plan has the fewest moves, and what it leads to is left alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final, Generic

from steering.flows.elephants import Move
from steering.flows.elephants_search import Key
from steering.flows.rates import FlowRate

LEAST_SHARE: Final = 0.05  # of what the largest flow of its job sends; one that sends less does not count
UNKNOWN_SHARE: Final = 1 / 8  # of the flows of a job: while more of them are too new to be known, it is waited


@dataclass(frozen=True, slots=True)
class Unit(Generic[Key]):
    key: Key
    rail: str
    movable: bool = True


def jobs(flows: Iterable[FlowRate], min_rate: int = 0) -> list[list[FlowRate]]:
    """The flows that count, by the job that has them: a control group is one. The largest first; without unclear ones.

    A job is left out as a whole if its fastest flow is slower than `min_rate`: those of one rail may all be slow.
    A job is unclear while too many of its connections are so new that it is not known yet what they send. Control
    connections are new as well: what they have sent so far tells them from others.
    """
    found: dict[str, list[FlowRate]] = {}
    for flow in flows:
        found.setdefault(flow.owner.cgroup, []).append(flow)
    clear = []
    for each in found.values():
        least = LEAST_SHARE * max(flow.mean_bps or 0.0 for flow in each)
        counted = [flow for flow in each if flow.mean_bps is not None and flow.mean_bps >= least > 0]
        least_sent = LEAST_SHARE * max(flow.sent_bytes for flow in each)
        unknown = sum(flow.mean_bps is None and flow.sent_bytes >= least_sent for flow in each)
        fast = max(flow.peak_bps for flow in each) >= min_rate
        if counted and fast and unknown <= UNKNOWN_SHARE * len(counted):
            clear.append(counted)
    return sorted(clear, key=len, reverse=True)


def even(
    units: Sequence[Unit[Key]], weights: Mapping[str, int], gain: float = 0.0, besides: Mapping[str, int] | None = None
) -> tuple[Move[Key], ...]:
    """The fewest moves that leave the busiest rail with as little as can be.

    Parameters
    ----------
    units : sequence of Unit
        Each on a rail that has a weight. Of those on one rail the last go first.
    weights : mapping of str to int
        Rails that take flows, with what each is to have in proportion; above 0.
    gain : float
        Nothing is moved if that relieves no rail of such a share of its flows.
    besides : mapping of str to int, optional
        Flows of other jobs: of two rails that are as good the one with fewer is chosen.
    """
    others = besides or {}
    free: dict[str, list[Key]] = {rail: [] for rail in weights}
    fixed = dict.fromkeys(weights, 0)
    for unit in units:
        if unit.movable:
            free[unit.rail].append(unit.key)
        else:
            fixed[unit.rail] += 1
    most = _most(fixed, sum(map(len, free.values())), weights)
    count = {rail: fixed[rail] + len(keys) for rail, keys in free.items()}
    excess = {rail: min(len(free[rail]), max(0, count[rail] - most[rail])) for rail in weights}
    if not any(excess[rail] >= gain * count[rail] and excess[rail] for rail in weights):
        return ()
    moves = []
    for origin in weights:
        for _ in range(excess[origin]):
            open_ = (rail for rail in weights if count[rail] < most[rail])
            rail = min(open_, key=lambda rail: (Fraction(count[rail] + 1, weights[rail]), others.get(rail, 0)))
            count[origin], count[rail] = count[origin] - 1, count[rail] + 1
            moves.append(Move(free[origin].pop(), origin, rail))
    return tuple(moves)


def _most(fixed: Mapping[str, int], free: int, weights: Mapping[str, int]) -> dict[str, int]:
    """How many flows each rail may have without being busier than the busiest that takes any in the best placing."""
    count, level = dict(fixed), Fraction(0)
    for _ in range(free):  # each where it does best: of equal flows that is the best placing
        rail = min(weights, key=lambda rail: Fraction(count[rail] + 1, weights[rail]))
        count[rail] += 1
        level = max(level, Fraction(count[rail], weights[rail]))
    return {rail: max(fixed[rail], int(level * weight)) for rail, weight in weights.items()}
