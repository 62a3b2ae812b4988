"""Makes again what went with a link, request by request. One thread."""

from __future__ import annotations

import errno
from collections.abc import Set as AbstractSet

from pytools.kernel.netlink import Netlink, NetlinkError
from steering.actuators import restore
from steering.actuators.objects import Objects
from steering.actuators.restore import Memory
from steering.plan import title


def make_again(
    netlink: Netlink, memory: Memory, objects: Objects, without: AbstractSet[int]
) -> tuple[list[str], list[str]]:
    """Make again what can be made, without some nexthops; what was done and what could not be, in words."""
    want = restore.restoration(memory, objects, without)
    told, failed, refused = [], [], set(without)
    for number, body in want.nexthops.items():
        kept = memory.nexthops[number]
        name = f"nexthop {number} ({kept.nexthop.gateway or 'on-link'} dev {kept.interface})"
        why = _made(netlink, body)
        if why:
            refused.add(number)
            failed.append(f"{name} cannot be made again: {why}")
        else:
            told.append(f"{name} is made again: its link is back")
    if refused > without:
        want = restore.restoration(memory, objects, refused)
    for target, body in want.groups.items():
        why = _made(netlink, body)
        if why:
            failed.append(f"{title(target)} cannot be made again: {why}")
        else:
            told.append(f"{title(target)} is made again")
    for target, bodies in want.routes.items():
        errors = netlink.make_routes(bodies)
        if None in errors:
            told.append(f"{title(target)}: {errors.count(None)} routes are made again")
        failed += [str(error) for error in errors if error is not None and error.code != errno.EEXIST][:1]
    return told, failed


def _made(netlink: Netlink, body: bytes) -> str:
    """Make a nexthop or a group; why not, or empty. That somebody else made it meanwhile is as good."""
    try:
        netlink.make_nexthop(body)
    except NetlinkError as refusal:
        return "" if refusal.code == errno.EEXIST else refusal.sentence or str(refusal)
    return ""
