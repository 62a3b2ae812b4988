"""What steering puts into the main table and beside it, how it is known again, and how it is swept after a crash.

Backup routes and copies of routes carry our protocol; so do the backup's own nexthops and groups, which have ids from a
range of ours besides. Rules and tables of probes are not touched here. One thread.
"""

from __future__ import annotations

from typing import Final

from pytools.kernel.netlink import (
    MAIN_TABLE,
    PROTOCOL,
    UNICAST,
    Family,
    Netlink,
    NetlinkError,
    Nexthop,
    NexthopGroup,
    Route,
)

FIRST_ID: Final = PROTOCOL << 24  # of our own nexthops and groups
LAST_ID: Final = FIRST_ID | 0xFFFFFF
# Worse than any other. FRR takes the highest byte of a foreign route's metric for its distance, and does not use one of
# distance 255.
BACKUP_METRIC: Final = 255 << 24 | PROTOCOL
_FAMILIES: tuple[Family, ...] = (4, 6)


def is_backup(route: Route) -> bool:
    """Whether a route is a backup of ours."""
    return route.protocol == PROTOCOL and route.metric == BACKUP_METRIC


def is_copy(route: Route) -> bool:
    """Whether a route is a copy that we made in order to have it preferred. It never has a metric of 0."""
    several = route.nexthop_id is not None or route.gateway is not None
    return route.protocol == PROTOCOL and 0 < route.metric < BACKUP_METRIC and route.kind == UNICAST and several


def is_our_nexthop(nexthop: Nexthop | NexthopGroup) -> bool:
    """Whether a nexthop or a group was made for backup routes."""
    return nexthop.protocol == PROTOCOL and FIRST_ID <= nexthop.id <= LAST_ID


def sweep(netlink: Netlink) -> list[str]:
    """Remove backup routes, copies of routes, and the nexthops made for them; what was removed, one line each.

    Routes first, then groups, then nexthops: nothing is ever used that is half gone. Repeating it is harmless.
    """
    removed = []
    routes = [
        route
        for family in _FAMILIES
        for route in netlink.routes(family, MAIN_TABLE, PROTOCOL)
        if is_backup(route) or is_copy(route)
    ]
    done = netlink.drop_routes(routes)
    backups = sum(is_backup(route) and error is None for route, error in zip(routes, done, strict=True))
    if backups:
        removed.append(f"{backups} backup routes")
    for route, error in zip(routes, done, strict=True):
        if error is None and is_copy(route):
            removed.append(f"route {route.destination} metric {route.metric}")
    objects: list[NexthopGroup | Nexthop] = [*netlink.groups(), *netlink.nexthops()]
    for each in objects:
        if not is_our_nexthop(each):
            continue
        try:
            netlink.del_nexthop(each.id)
        except NetlinkError:  # gone with its carrier meanwhile
            continue
        removed.append(f"nexthop {each.id}")
    return removed
