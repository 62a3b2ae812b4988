"""All actuators of weights behind one: a target's kind says which. One thread."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pytools.errors import UsageError
from pytools.kernel.leftovers import sweep
from pytools.kernel.netlink import Netlink
from steering.actuators import topology
from steering.actuators.metrics import RouteMetrics
from steering.actuators.multipath import MultipathRoutes
from steering.actuators.nexthops import NexthopGroups
from steering.actuators.regain import regain
from steering.actuators.topology import Topology
from steering.actuators.weighted import Outcome, WeightActuator
from steering.plan import Group, Target, Weights, kind_of


class Actuators:
    """Every kind of target in one namespace; a `WeightActuator` itself.

    Parameters
    ----------
    netlink : Netlink
        A socket in that namespace; stays the caller's.
    """

    def __init__(self, netlink: Netlink) -> None:
        self._netlink = netlink
        self._by_kind: dict[str, WeightActuator] = {
            "nexthop_group": NexthopGroups(netlink),
            "multipath": MultipathRoutes(netlink),
            "metric": RouteMetrics(netlink),
        }

    def find(self, managed: Iterable[str], steered: Iterable[Group] = ()) -> Topology:
        """What may be steered: all that carries a route inside one of these prefixes; see `topology.arrange`."""
        return topology.find(self._netlink, managed, steered)

    def weights(self, group: Group) -> Weights | None:
        """The weights in force now; None when the target is gone."""
        return self._of(group.target).weights(group)

    def apply(self, group: Group, expected: Iterable[Weights], wanted: Weights) -> Outcome:
        """Give a target these weights, provided that it has one of the expected ones."""
        return self._of(group.target).apply(group, expected, wanted)

    def undo(self, group: Group, ours: Iterable[Weights]) -> Outcome:
        """Give a target its original weights, provided that it has weights of ours."""
        return self._of(group.target).undo(group, ours)

    def regain(
        self, folder: Path, scope: str, in_force: Mapping[Target, Sequence[Weights]]
    ) -> tuple[list[Group], list[str]]:
        """Make groups again that only our acts let go with their links; see `regain.regain`."""
        return regain(self._netlink, folder, scope, in_force)

    def sweep(self) -> list[str]:
        """Remove backup routes and what else is ours alone, once nobody steers; what was removed, in words."""
        return sweep(self._netlink)

    def _of(self, target: Target) -> WeightActuator:
        try:
            return self._by_kind[kind_of(target)]
        except KeyError:  # a journal of a later version
            raise UsageError(f"{target}: there is no actuator for it", "use the version that wrote it") from None
