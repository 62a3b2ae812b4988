"""Which addresses of ours have routes of their own, and from which of them a peer's address is probed. Pure.

A host with several interfaces usually has a rule and a table for each address: `from 10.1.0.2 lookup 101`. A look-up
that names no source sees none of these tables.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence

from pytools.kernel.leftovers import is_our_rule
from pytools.kernel.netlink.routing import Address, Family, Rule

_GLOBAL = 0  # RT_SCOPE_UNIVERSE


def with_own_routes(family: Family, rules: Iterable[Rule], addresses: Iterable[Address]) -> list[str]:
    """Our addresses from which packets are routed by a table of their own, in the order of the interfaces.

    Rules that choose by more than the source and the destination, or that are swerve's, do not count.
    """
    chosen = [
        ipaddress.ip_network(rule.source)
        for rule in rules
        if rule.source is not None
        and rule.action == "table"
        and (rule.mark, rule.iif, rule.oif) == (None, None, None)
        and not is_our_rule(rule)
    ]
    ours = [each for each in addresses if each.family == family and each.scope == _GLOBAL]
    ours.sort(key=lambda each: each.ifindex)
    found = [each.address for each in ours if any(ipaddress.ip_address(each.address) in network for network in chosen)]
    return list(dict.fromkeys(found))


def nearest(address: str, of_peer: Sequence[str], ours: Sequence[str]) -> Sequence[str]:
    """Those of our addresses from which an address of a peer is probed.

    All of them when the peer has but this one. If it has several, interfaces belong together: those of ours that have
    the longest prefix in common with it; where that leaves as many as the peer has, the one at the same place.
    """
    if len(of_peer) < 2 or not ours:
        return ours
    common = [_common_bits(address, each) for each in ours]
    closest = [each for each, bits in zip(ours, common, strict=True) if bits == max(common)]
    return [closest[of_peer.index(address)]] if len(closest) == len(of_peer) else closest


def _common_bits(address: str, other: str) -> int:
    """How long the prefix is that two addresses of one family share."""
    first, second = ipaddress.ip_address(address), ipaddress.ip_address(other)
    return first.max_prefixlen - (int(first) ^ int(second)).bit_length()
