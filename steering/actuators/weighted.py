"""What every actuator of weights has in common: what it does, and what became of an attempt.

Times are CLOCK_MONOTONIC nanoseconds; one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal, Protocol

from pytools.errors import SwerveError
from steering.plan import Group, Weights, same


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an attempt.

    applied: the kernel has the wanted weights. manual: somebody else changed the target, nothing was done. gone: it
    is there no more. failed: the kernel refused, and has what it had before. uncertain: it could not be read back.
    """

    kind: Literal["applied", "manual", "gone", "failed", "uncertain"]
    weights: Weights  # as the kernel has them
    acknowledged_ns: int | None
    why: str = ""


class WeightActuator(Protocol):
    """Gives the members of one kind of target their weights.

    A `Group` is the target before we touched it; its members are all that it may get.
    """

    def weights(self, group: Group) -> Weights | None:
        """The weights in force now; None when the target is gone."""

    def apply(self, group: Group, expected: Iterable[Weights], wanted: Weights) -> Outcome:
        """Give a target these weights, provided that it has one of the expected ones.

        Parameters
        ----------
        group : Group
            The target.
        expected : iterable of Weights
            What it may have now: anything else was made by somebody else, and stays.
        wanted : Weights
            What it shall have.

        Raises
        ------
        ValueError
            If the target would be left empty.
        """

    def undo(self, group: Group, ours: Iterable[Weights]) -> Outcome:
        """Give a target its original weights, provided that it has weights of ours."""


def among(weights: Weights, expected: Iterable[Weights]) -> bool:
    """Whether these weights do the same as one of the expected ones."""
    return any(same(weights, each) for each in expected)


def present(weights: Weights, usable: AbstractSet[int]) -> Weights:
    """These weights without the members that cannot be used now."""
    return tuple(pair for pair in weights if pair[0] in usable)


def without(group: Group, usable: AbstractSet[int]) -> str:
    """Which members are left out because they cannot be used now, for people; empty if none is."""
    lost = [m for m in group.members if m.weight and m.nexthop_id not in usable]
    return f"without {', '.join(m.name if m.interface else str(m.nexthop_id) for m in lost)}: gone" if lost else ""


def judged(before: Weights, read: Callable[[], Weights | None], wanted: Weights, refusal: str) -> Outcome:
    """What became of an attempt, by reading back.

    Parameters
    ----------
    before : Weights
        What the kernel had.
    read : callable
        Reads what it has now; None when the target is gone.
    wanted : Weights
        What it was asked for.
    refusal : str
        What it answered; empty when it accepted.
    """
    try:
        found = read()
    except SwerveError as error:
        return Outcome("uncertain", before, None, f"{refusal or 'no read-back'}: {error}")
    if found is None:
        return Outcome("gone", (), None, refusal or "it is gone")
    if same(found, wanted):
        return Outcome("applied", wanted, time.monotonic_ns())
    if found == before:
        return Outcome("failed", found, None, refusal or "the kernel took it and kept the old weights")
    return Outcome("manual", found, None, f"read back {text_of(found)}")


def text_of(weights: Weights) -> str:
    """Weights as `ip nexthop` writes them."""
    return "/".join(f"{nexthop},{weight}" for nexthop, weight in weights) or "nothing"
