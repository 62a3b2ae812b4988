"""Weights of nexthop groups: apply a change in place, read it back, undo it.

One netlink replace re-weights every route that uses the group; a member of weight 0 is left out. Never makes a group
empty, never touches one that somebody else changed in between. Times are CLOCK_MONOTONIC nanoseconds; one thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from pytools.errors import SwerveError
from pytools.kernel.netlink import Member, Netlink, NexthopGroup
from steering.plan import Weights, weights_of


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an attempt.

    applied: the kernel has the wanted weights. manual: somebody else changed the group, nothing was done. gone: there
    is no such group any more. failed: the kernel refused, and has what it had before. uncertain: it could not be
    read back.
    """

    kind: Literal["applied", "manual", "gone", "failed", "uncertain"]
    weights: Weights  # as the kernel has them
    acknowledged_ns: int | None
    why: str = ""


class NexthopGroups:
    """The nexthop groups of one namespace.

    Parameters
    ----------
    netlink : Netlink
        A socket in that namespace; stays the caller's.
    """

    def __init__(self, netlink: Netlink) -> None:
        self._netlink = netlink

    def weights(self, group_id: int) -> Weights | None:
        """A group's weights now; None when there is no such group."""
        group = self._netlink.group(group_id)
        return None if group is None else weights_of(group.weights)

    def apply(self, group_id: int, expected: Iterable[Weights], wanted: Weights) -> Outcome:
        """Give a group these weights, provided that it has one of the expected ones.

        Parameters
        ----------
        group_id : int
            The group.
        expected : iterable of Weights
            What it may have now: anything else was made by somebody else, and stays.
        wanted : Weights
            What it shall have.

        Raises
        ------
        ValueError
            If the group would be left empty.
        """
        if not wanted:
            raise ValueError(f"nexthop group {group_id} would be left without a nexthop")
        group = self._netlink.group(group_id)
        if group is None:
            return Outcome("gone", (), None, "the group is gone")
        now = weights_of(group.weights)
        if now == wanted:
            return Outcome("applied", now, time.monotonic_ns(), "it had these weights already")
        if now not in set(expected):
            return Outcome("manual", now, None, f"somebody changed the group to {_text(now)}")
        return self._replace(group, wanted)

    def _replace(self, group: NexthopGroup, wanted: Weights) -> Outcome:
        why = ""
        try:
            # Type and owner are given as they are: a resilient group keeps its table and its timers.
            members = [Member(nexthop, weight) for nexthop, weight in wanted]
            self._netlink.replace_group(group.id, members, protocol=group.protocol, kind=group.kind)
        except SwerveError as error:
            why = str(error)
        try:
            found = self.weights(group.id)
        except SwerveError as error:
            return Outcome("uncertain", weights_of(group.weights), None, f"{why or 'no read-back'}: {error}")
        if found is None:
            return Outcome("gone", (), None, why or "the group is gone")
        if found == wanted:
            return Outcome("applied", found, time.monotonic_ns())
        if found == weights_of(group.weights):
            return Outcome("failed", found, None, why or "the kernel took it and kept the old weights")
        return Outcome("manual", found, None, f"read back {_text(found)}")

    def undo(self, group_id: int, ours: Iterable[Weights], original: Weights) -> Outcome:
        """Give a group its original weights, provided that it has weights of ours.

        The kernel drops a nexthop from its groups with its carrier: those that are gone are left out, and weights
        of ours that only miss such nexthops are still ours.
        """
        present = {nexthop.id for nexthop in self._netlink.nexthops()}
        wanted = tuple(pair for pair in original if pair[0] in present)
        if not wanted:
            return Outcome("gone", (), None, "none of its nexthops is left")
        expected = {weights for weights in (*ours, original)}
        expected |= {tuple(pair for pair in weights if pair[0] in present) for weights in expected}
        outcome = self.apply(group_id, expected, wanted)
        if outcome.kind != "applied" or wanted == original:
            return outcome
        gone = ", ".join(str(nexthop) for nexthop, _ in original if nexthop not in present)
        return Outcome("applied", outcome.weights, outcome.acknowledged_ns, f"without nexthop {gone}: it is gone")


def _text(weights: Weights) -> str:
    """Weights as `ip nexthop` writes them."""
    return "/".join(f"{nexthop},{weight}" for nexthop, weight in weights) or "nothing"
