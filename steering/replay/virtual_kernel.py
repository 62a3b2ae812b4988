"""A kernel that is made up from what was recorded: groups, their members, the weights that a replay gives them. Pure.

Nexthop groups are as they were first recorded. Where none was, all paths to one address make a group, each with
weight 1. Members that appear later join with their original weight.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from pytools.signals import NexthopGroup, Path
from steering.plan import (
    MAX_WEIGHT,
    Group,
    Member,
    Target,
    Weights,
    canonical,
    nexthop_group,
    overlay_target,
    weights_of,
)
from steering.prefixes import LongestPrefix, key_of

MOST_MEMBERS: Final = 4096  # of all groups together
_MADE_UP: Final = "recorded:"
_OURS: Final = range(201 << 24, 202 << 24)  # ids of groups that steering makes (pytools.kernel.leftovers)
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class VirtualKernel:
    """Groups and weights.

    Parameters
    ----------
    managed : iterable of str
        The prefixes that the policy manages.
    """

    def __init__(self, managed: Iterable[str]) -> None:
        self._managed = [ipaddress.ip_network(prefix) for prefix in managed]
        self.groups: dict[Target, Group] = {}  # what may be steered, without paths
        self.unmanaged: set[str] = set()  # addresses outside of what the policy manages, the first of them
        # how often a recorded group had other weights than at first, or was one of steering's own: somebody
        # steered while it was recorded
        self.reweighted = 0
        self.left_out = 0  # paths and members beyond MOST_MEMBERS
        self._routes: LongestPrefix[Target] = LongestPrefix({})  # to recorded groups
        self._recorded: dict[Target, tuple[tuple[int, int, str, str], ...]] = {}  # as last recorded
        self._seen: set[Path] = set()
        self._members = 0

    def target_of(self, address: str) -> Target | None:
        """The group that an address is reached through: of recorded groups the one with the longest prefix."""
        recorded, made_up = self._routes.get(address), f"{_MADE_UP}{canonical(address)}"
        return recorded or (made_up if made_up in self.groups else None)

    def targets_of(self, address: str) -> tuple[Target, ...]:
        target = self.target_of(address)
        return () if target is None else (target,)

    def see_path(self, path: Path) -> bool:
        """Take note of a path; whether a group has changed."""
        if path in self._seen:
            return False
        if len(self._seen) >= MOST_MEMBERS:
            self.left_out += 1
            return False
        self._seen.add(path)
        if not self._manages(path.address):
            if len(self.unmanaged) < 100:
                self.unmanaged.add(path.address)
            return False
        target = self.target_of(path.address)
        if target is not None and not target.startswith(_MADE_UP):
            return False  # its members are recorded
        address = canonical(path.address)
        member = Member(0, canonical(path.gateway), path.interface, 1)
        return self._join(f"{_MADE_UP}{address}", (address,), [member])

    def see_group(self, signal: NexthopGroup) -> bool:
        """Take note of a recorded group; whether a group has changed."""
        target = nexthop_group(signal.group_id)
        ours = signal.group_id in _OURS  # its weights are no owner's, and its members may be some of all
        self.reweighted += ours
        destinations = tuple(sorted(filter(self._manages, signal.destinations)))
        if ours or not destinations:
            return False
        seen = tuple((m.nexthop_id, m.weight, m.gateway, m.interface) for m in signal.members)
        if self._recorded.get(target) == seen:
            return False
        self.reweighted += target in self._recorded
        members = [
            Member(m.nexthop_id, canonical(m.gateway), m.interface, m.weight)
            for m in signal.members
            if 0 < m.weight <= MAX_WEIGHT
        ]
        if not members:
            return False
        changed = self._join(target, destinations, members)
        self._recorded[target] = seen
        for name in [name for name, each in self.groups.items() if each.beside == target]:
            self._join(name, self.groups[name].destinations, members)
        made_up = [name for name in self.groups if name.startswith(_MADE_UP)]
        replaced = [name for name in made_up if self.target_of(name.removeprefix(_MADE_UP)) == target]
        for name in replaced:
            del self.groups[name]
        return changed or bool(replaced)

    def set_apart(self, addresses: frozenset[str]) -> bool:
        """Have a group for each of these addresses alone, beside the recorded one; whether a group has changed."""
        there = {name: each for name, each in self.groups.items() if each.beside}
        wanted = {overlay_target("main", address): address for address in addresses}
        for name in there.keys() - wanted.keys():
            del self.groups[name]
            self._index()
        fresh = False
        for name, address in sorted(wanted.items()):
            target = self.target_of(address)
            if name in there or target is None or target.startswith(_MADE_UP):
                continue
            host = str(ipaddress.ip_network(address))
            self.groups[name] = replace(self.groups[target], target=name, destinations=(host,), beside=target)
            self._index()
            fresh = True
        return fresh or there.keys() - wanted.keys() != set()

    def apply(self, target: Target, weights: Weights) -> None:
        self.groups[target] = replace(self.groups[target], current=weights)

    def _manages(self, destination: str) -> bool:
        try:
            network = ipaddress.ip_network(destination)
        except ValueError:
            return False
        return any(network.version == each.version and _inside(network, each) for each in self._managed)

    def _join(self, target: Target, destinations: tuple[str, ...], members: Iterable[Member]) -> bool:
        group = self.groups.get(target) or Group(target, destinations, (), ())
        known = {(m.gateway, m.interface) for m in group.members}
        fresh: list[Member] = []
        for member in members:
            if (member.gateway, member.interface) in known:
                continue
            if self._members >= MOST_MEMBERS:
                self.left_out += 1
                continue
            self._members += 1
            known.add((member.gateway, member.interface))
            fresh.append(replace(member, nexthop_id=member.nexthop_id or len(group.members) + len(fresh) + 1))
        if not fresh and group.destinations == destinations and target in self.groups:
            return False
        everyone = {member.nexthop_id: member for member in (*group.members, *fresh)}  # ids are unique
        grown = replace(group, destinations=destinations, members=tuple(everyone[n] for n in sorted(everyone)))
        whole = group.current == group.original
        self.groups[target] = replace(grown, current=grown.original if whole else _joined(group, fresh))
        self._index()
        return True

    def _index(self) -> None:
        recorded = sorted(name for name in self.groups if not name.startswith(_MADE_UP))
        self._routes = LongestPrefix(
            {key_of(str(ipaddress.ip_network(d))): name for name in recorded for d in self.groups[name].destinations}
        )


def _inside(network: _Network, within: _Network) -> bool:
    return network.subnet_of(within)  # type: ignore[arg-type]  # of one version


def _joined(group: Group, fresh: Iterable[Member]) -> Weights:
    """The weights of a group that is not as it was, with new members at their whole weight beside them."""
    original = dict(group.original)
    scale = max((weight / original[n] for n, weight in group.current if n in original), default=1.0)
    added = [(m.nexthop_id, min(MAX_WEIGHT, max(1, round(m.weight * scale)))) for m in fresh]
    return weights_of(dict((*group.current, *added)))
