"""How routes and their hops are called: targets by table, prefix and metric; hops by gateway and interface. Pure."""

from __future__ import annotations

import ipaddress
import zlib
from typing import Literal

from pytools.kernel.netlink import MAIN_TABLE, Family, Route
from pytools.kernel.netlink_messages import family_of
from steering.plan import Member, Target

_USUAL_METRIC: dict[Family, int] = {4: 0, 6: 1024}
_OUR_RANGE = 1 << 31  # no nexthop object that somebody numbered by hand


def hop_id(gateway: str, interface: str) -> int:
    """The number of a hop that is no nexthop object: the same in every record, on every reading, in every process."""
    return _OUR_RANGE | zlib.crc32(f"{gateway} {interface}".encode())


def group_number(target: Target) -> int:
    """The id of the nexthop group that a target is."""
    return int(target.partition(":")[2])


def hop_member(gateway: str, interface: str, weight: int) -> Member:
    """A hop as a member of a target."""
    return Member(hop_id(gateway, interface), gateway, interface, weight)


def route_target(kind: Literal["multipath", "metric"], route: Route) -> Target:
    """The target that a route is; for `metric` all routes to its prefix together are one."""
    table = "main" if route.table == MAIN_TABLE else str(route.table)
    usual = kind == "metric" or route.metric == _USUAL_METRIC[route.family]
    return f"{kind}:{table}:{route.destination}" + ("" if usual else f"@{route.metric}")


def route_of(target: Target) -> tuple[int, str, int]:
    """Table, prefix and metric of a target.

    Raises
    ------
    ValueError
        If it is not the name of a route.
    """
    _, table, place = target.split(":", 2)
    prefix, _, metric = place.partition("@")
    ipaddress.ip_network(prefix)
    number = MAIN_TABLE if table == "main" else int(table)
    return number, prefix, int(metric) if metric else _USUAL_METRIC[family_of(prefix)]
