"""Slow host or slow link: what several queue pairs agree on. Pure.

Each queue pair lies on a few things that could be to blame: its own host, the link it leaves by, the host at the other
end. One slow receiver spoils every pair that leads to it and none that leads elsewhere; a slow link spoils what leaves
by it, wherever it goes. So for each thing the pairs that lie on it are counted: how many complain, and how many do not.

The rule: a thing is a suspect when its pairs' complaints are at least ODDS times as likely with it slow (then nine in
ten of its pairs complain) as with it well (then one in twenty does, by chance). The likeliest is named first, and what
it explains speaks against nothing else. Things that lie on exactly the same pairs cannot be told apart; both are named
and the reason says so. Two pairs at least must agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from pytools.signals import Suspect

ODDS: Final = 100.0
COMPLAIN_IF_SLOW: Final = 0.9
COMPLAIN_BY_CHANCE: Final = 0.05
_FOR: Final = math.log(COMPLAIN_IF_SLOW / COMPLAIN_BY_CHANCE)
_AGAINST: Final = math.log((1 - COMPLAIN_IF_SLOW) / (1 - COMPLAIN_BY_CHANCE))
_AGREE: Final = 2

Kind = Literal["host", "link"]
Thing = tuple[Kind, str]


@dataclass(frozen=True)
class Witness:
    """One queue pair that wants to send."""

    things: tuple[Thing, ...]  # what it lies on
    complains_of: tuple[Thing, ...]  # of these, what its verdict may be due to; empty when all is well
    usual_bps: float  # its mean bandwidth before
    now_bps: float
    verdict: str

    @property
    def missing_bps(self) -> float:
        return max(0.0, self.usual_bps - self.now_bps)


def evidence(complaining: int, others: int) -> float:
    """Logarithm of how much likelier the complaints are with the thing slow than with it well."""
    return complaining * _FOR + others * _AGAINST


def suspects(witnesses: Sequence[Witness]) -> list[Suspect]:
    """Hosts and links by slowness, worst first.

    Parameters
    ----------
    witnesses : sequence of Witness
        All queue pairs with demand. Those without say nothing about anybody.
    """
    on: dict[Thing, set[int]] = {}
    blamed: dict[Thing, set[int]] = {}
    for index, witness in enumerate(witnesses):
        for thing in witness.things:
            on.setdefault(thing, set()).add(index)
        for thing in witness.complains_of:
            blamed.setdefault(thing, set()).add(index)
    found: list[Suspect] = []
    explained: set[int] = set()
    while True:
        scores = {
            thing: evidence(len(pairs - explained), len(on[thing] - pairs))
            for thing, pairs in blamed.items()
            if len(pairs - explained) >= _AGREE
        }
        best = max(scores.values(), default=0.0)
        if best < math.log(ODDS):
            return sorted(found, key=lambda each: (-each.slowness, -each.agreeing, each.name))
        chosen = [thing for thing, score in scores.items() if score == best]
        first = min(chosen, key=lambda thing: (-len(blamed[thing]), thing))
        alike = sorted(thing for thing in chosen if blamed[thing] - explained == blamed[first] - explained)
        found += [_suspect(thing, alike, on[thing], blamed[thing], witnesses) for thing in alike]
        explained |= blamed[first]


def _suspect(
    thing: Thing, alike: Sequence[Thing], on: Iterable[int], blamed: Iterable[int], witnesses: Sequence[Witness]
) -> Suspect:
    pairs, complaining = [witnesses[index] for index in on], [witnesses[index] for index in blamed]
    usual = sum(pair.usual_bps for pair in pairs)
    counts: dict[str, int] = {}
    for pair in complaining:
        counts[pair.verdict] = counts.get(pair.verdict, 0) + 1
    words = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items(), key=lambda each: -each[1]))
    others = [f"{kind} {name}" for kind, name in alike if (kind, name) != thing]
    doubt = f"; not told apart from {', '.join(others)}: the same queue pairs lie on both" if others else ""
    kind, name = thing
    return Suspect(
        kind=kind,
        name=name,
        slowness=sum(pair.missing_bps for pair in pairs) / usual if usual > 0 else 1.0,
        agreeing=len(complaining),
        queue_pairs=len(pairs),
        reason=f"of {len(pairs)} queue pairs {words}{doubt}",
    )
