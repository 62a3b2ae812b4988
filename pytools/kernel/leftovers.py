"""What steering puts into the kernel, how it is known again, and how it is removed: rules, tables, nexthops, groups;
fq where packets are held.

All of it carries our protocol. Tables and nexthop ids come from ranges of ours. Nothing that belongs to anybody else
refers to it, so removing it is the whole undo: first the rules, which is the moment that counts, then the rest. One
thread.
"""

from __future__ import annotations

import contextlib
from typing import Final

from pytools.kernel.netlink import qdiscs
from pytools.kernel.netlink.routing import PROTOCOL, Family, Netlink, NetlinkError, Nexthop, NexthopGroup, Rule

FIRST_ID: Final = PROTOCOL << 24  # of our own nexthops and groups
LAST_ID: Final = FIRST_ID | 0xFFFFFF
FIRST_TABLE: Final = 20_000
LAST_TABLE: Final = 29_999
FAMILIES: Final[tuple[Family, ...]] = (4, 6)


def is_our_table(number: int) -> bool:
    return FIRST_TABLE <= number <= LAST_TABLE


def is_our_rule(rule: Rule) -> bool:
    """Whether a rule puts routes of ours in force."""
    return rule.protocol == PROTOCOL and rule.action == "table" and is_our_table(rule.table)


def is_our_nexthop(nexthop: Nexthop | NexthopGroup) -> bool:
    return nexthop.protocol == PROTOCOL and FIRST_ID <= nexthop.id <= LAST_ID


def switch_off(netlink: Netlink) -> list[str]:
    """Delete our rules, and with that undo every act on weights; what was deleted, one line each.

    Raises
    ------
    NetlinkError
        If the kernel refuses. A rule that is gone already is none.
    """
    rules = [rule for family in FAMILIES for rule in netlink.rules(family) if is_our_rule(rule)]
    done = netlink.drop_rules([rule.body for rule in rules])
    left = {rule.body for family in FAMILIES for rule in netlink.rules(family)} if any(done) else set()
    for rule, error in zip(rules, done, strict=True):
        if error is not None and rule.body in left:
            raise error
    return [f"IPv{rule.family} rule {rule.priority} to table {rule.table}" for rule in rules]


def sweep(netlink: Netlink) -> list[str]:
    """Remove all that is ours; what was removed, one line each. Repeating it is harmless."""
    removed = switch_off(netlink)
    for family in FAMILIES:
        routes = [route for route in netlink.routes(family, 0, PROTOCOL) if is_our_table(route.table)]
        gone = sum(error is None for error in netlink.drop_routes(routes))
        removed += [f"{gone} IPv{family} routes in tables of ours"] if gone else []
    objects: list[NexthopGroup | Nexthop] = [*netlink.groups(), *netlink.nexthops()]
    ours = [each for each in objects if is_our_nexthop(each)]
    for each in ours:
        with contextlib.suppress(NetlinkError):  # gone with its carrier, or with its last member
            netlink.del_nexthop(each.id)
    removed += [f"{len(ours)} nexthops"] if ours else []
    return removed + [f"fq on interface {index}" for index, why in qdiscs.remove(netlink).items() if not why]
