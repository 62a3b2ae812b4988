"""What is wanted, and what it takes to get there: frozen records and one pure difference.

Weights are nexthop object ids with integer weights above 0, sorted; a nexthop that is not named is not in the group.
Times are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from pytools.signals import Path

Weights = tuple[tuple[int, int], ...]

MAX_WEIGHT = 256  # what every kernel takes


def weights_of(pairs: Mapping[int, int] | Iterable[tuple[int, int]]) -> Weights:
    """Weights in their one form: sorted, members of weight 0 left out."""
    items = pairs.items() if isinstance(pairs, Mapping) else pairs
    return tuple(sorted((nexthop, weight) for nexthop, weight in items if weight > 0))


def canonical(address: str) -> str:
    """An address in its one spelling; what is none stays as it is."""
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        return address


@dataclass(frozen=True, slots=True)
class Member:
    """One nexthop of a group as it was found before we touched it."""

    nexthop_id: int
    gateway: str  # empty when on-link
    interface: str
    weight: int  # the original one

    @property
    def name(self) -> str:
        """What a person calls it."""
        return f"{self.gateway} dev {self.interface}" if self.gateway else f"dev {self.interface}"


@dataclass(frozen=True, slots=True)
class Group:
    """A nexthop group that may be steered."""

    group_id: int
    destinations: tuple[str, ...]  # managed prefixes whose routes use it
    members: tuple[Member, ...]
    current: Weights  # what is in force now
    paths: tuple[tuple[int, Path], ...] = ()  # which measured path runs over which member

    @property
    def original(self) -> Weights:
        """The weights before we touched it."""
        return weights_of((member.nexthop_id, member.weight) for member in self.members)

    def member(self, path: Path) -> int | None:
        """The nexthop that a path leaves by; None if it is not in this group."""
        leaves = (canonical(path.gateway), path.interface)
        return next((m.nexthop_id for m in self.members if (m.gateway, m.interface) == leaves), None)

    def named(self, weights: Weights) -> dict[str, int]:
        """Weight by member name, 0 for those left out; for people."""
        found = dict(weights)
        return {member.name: found.get(member.nexthop_id, 0) for member in self.members}


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """The weights one group shall have, and why."""

    group_id: int
    wanted: Weights
    because: str
    under: str  # names of the rules behind it
    granted: frozenset[Path] = frozenset()  # paths that are taken down with it, if it is carried out
    held: tuple[tuple[Path, str], ...] = ()  # paths that ought to be taken down but are not, and why
    lifted: frozenset[Path] = frozenset()  # paths that are down, and get their weight back without having recovered


@dataclass(frozen=True, slots=True)
class Plan:
    """What is wanted of every group that was looked at."""

    groups: tuple[GroupPlan, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """One act on one group."""

    group_id: int
    before: Weights
    after: Weights
    because: str
    under: str
    granted: frozenset[Path] = frozenset()
    lifted: frozenset[Path] = frozenset()


def diff(current: Mapping[int, Weights], plan: Plan) -> list[Change]:
    """The acts that lead from the current weights to the plan; none for a group that is unknown or already there."""
    return [
        Change(
            each.group_id,
            current[each.group_id],
            each.wanted,
            each.because,
            each.under,
            each.granted,
            each.lifted,
        )
        for each in plan.groups
        if each.group_id in current and current[each.group_id] != each.wanted
    ]


def scaled(original: Weights, share: Mapping[int, float]) -> Weights:
    """Integer weights in the proportion original weight times share.

    The original weights exactly where every share is 1; else the smallest round scale (1, 10, 100) that keeps the
    proportions exact, or as fine as the kernel's weights allow. A share above 0 never becomes a weight of 0.
    """
    exact = {n: Fraction(weight) * Fraction(str(share.get(n, 1.0))) for n, weight in original}
    highest = max(exact.values(), default=Fraction(0))
    for scale in (1, 10, 100):
        if highest * scale <= MAX_WEIGHT and all((value * scale).denominator == 1 for value in exact.values()):
            return weights_of((n, int(value * scale)) for n, value in exact.items())
    fine = MAX_WEIGHT / highest if highest else Fraction(0)
    return weights_of((n, max(1, round(value * fine)) if value else 0) for n, value in exact.items())
