"""Which other path stands by for each destination, should the path that its packets are routed along fall silent. Pure.

The kernel acts on it by itself (steer.c), within a few probes; the rules about silence then decide about the weights,
without haste. So a stand-by is armed wherever such a rule covers a path.
"""

from __future__ import annotations

import functools
import ipaddress
import zlib
from collections.abc import Iterable, Iterator, Mapping

from pytools.signals import Path
from steering.deciding.health import PathHealth
from steering.deciding.overrides import NONE, Overrides
from steering.plan import Group, Member, StandBy
from steering.policy.actions import WEIGHT_KINDS
from steering.policy.conditions import Silence, leaves
from steering.policy.model import Policy, Rule


def standbys(
    policy: Policy, paths: Mapping[Path, PathHealth], groups: Iterable[Group], overrides: Overrides = NONE
) -> tuple[StandBy, ...]:
    """The stand-by of every path that may be left when it falls silent, sorted.

    Parameters
    ----------
    paths : mapping of Path to PathHealth
        As last observed.
    groups : iterable of Group
        Those that may be touched.
    overrides : Overrides
        The operator's orders: a target that he holds has no stand-by, a nexthop that he drained is none.
    """
    found: list[StandBy] = []
    for group in groups:
        if not overrides.held(group):
            found += _of_group(policy, paths, group, overrides)
    return tuple(sorted(found, key=lambda each: (each.path, each.target)))


def _of_group(
    policy: Policy, paths: Mapping[Path, PathHealth], group: Group, overrides: Overrides
) -> Iterator[StandBy]:
    destinations = _destinations(group.destinations, frozenset(path.address for _, path in group.paths))
    usable = _usable(paths, group, overrides)
    for nexthop, path in group.paths:
        under = _rule_about(policy, path)
        others = [(member, other) for member, other in usable.get(path.address, ()) if member.nexthop_id != nexthop]
        prefixes = destinations.get(path.address, ())
        if not under or not others or not prefixes:
            continue
        # What one path carried is dealt to the others by destination.
        member, other = others[zlib.crc32(path.address.encode()) % len(others)]
        yield StandBy(path, prefixes, other, group.target, member.nexthop_id, under)


def _usable(
    paths: Mapping[Path, PathHealth], group: Group, overrides: Overrides
) -> dict[str, list[tuple[Member, Path]]]:
    """By address, the members in use whose paths are in order."""
    members = {member.nexthop_id: member for member in group.members}
    weights, drained = dict(group.current), overrides.drained(group)
    found: dict[str, list[tuple[Member, Path]]] = {}
    for nexthop, path in group.paths:
        known = paths.get(path)
        if known is None or known.state not in ("healthy", "suspect") or known.failed:
            continue
        in_use = not members[nexthop].weight or weights.get(nexthop, 0) > 0
        if in_use and nexthop not in drained:  # also while nothing is heard of it: the kernel looks for itself
            found.setdefault(path.address, []).append((members[nexthop], path))
    return found


def needed(policy: Policy) -> bool:
    return bool(policy.safety.reroute_hold) and any(_about_silence(rule) for rule in policy.rules)


def _rule_about(policy: Policy, path: Path) -> str:
    """The name of the first rule that takes weight from this path when it falls silent; empty if there is none."""
    return next((rule.name for rule in policy.rules if _about_silence(rule) and rule.scope.covers(path)), "")


def _about_silence(rule: Rule) -> bool:
    return rule.then.kind in WEIGHT_KINDS and any(isinstance(leaf, Silence) for leaf in leaves(rule.when))


@functools.lru_cache(maxsize=1024)
def _destinations(prefixes: tuple[str, ...], addresses: frozenset[str]) -> Mapping[str, tuple[str, ...]]:
    """Which prefixes the path to each address speaks for: those behind no other measured address."""
    found: dict[str, list[str]] = {address: [] for address in addresses}
    parsed = {address: ipaddress.ip_address(address) for address in addresses}
    for prefix in prefixes:
        network = ipaddress.ip_network(prefix, strict=False)
        inside = [address for address, each in parsed.items() if each in network]
        if len(addresses) == 1:
            inside = list(addresses)
        if len(inside) == 1:
            found[inside[0]].append(prefix)
            continue
        for address in inside:
            found[address].append(f"{address}/{parsed[address].max_prefixlen}")
    return {address: tuple(dict.fromkeys(each)) for address, each in found.items()}
