"""The cables between a rail and its hosts: cut silently or with their carrier, and joined again.

A silent cut loses everything in both directions in the rail's port, ARP and the rail's own packets too, so that a
neighbour one hop away (BFD) misses as much as a probe across the fabric. A cut carrier is the port set down, which
takes the carrier of the host's end: the kernel then drops the nexthops there by itself.
"""

from __future__ import annotations

from pytools.kernel.netlink.routing import Netlink
from pytools.lab import building, filters, wiring
from pytools.lab.topology import Rail, Spec, host_of, rail_of


def cut(spec: Spec, rail: int, host: int | None, carrier: bool) -> None:
    """Cut the cable to a host, or all of a rail's; one that is cut that way already stays so."""
    target = rail_of(spec, rail)
    ports = target.ports if host is None else (target.ports[host_of(spec, host).number - 1],)
    if carrier:
        with Netlink(target.netns) as netlink:
            for port in ports:
                wiring.set_up(netlink, port.index, up=False)
        return
    whole = [port for port in ports if not filters.has(target, port, filters.LOSE)]
    if whole:
        filters.install(target, whole, filters.LOSE, {}, ("ingress", "egress"))


def plug_in(spec: Spec, rail: Rail) -> None:
    """Give ports that are down their carrier back, and the rail the routes it lost with them."""
    with Netlink(rail.netns) as netlink:
        up = {link.index for link in netlink.links() if link.up}
        for port in rail.ports:
            if port.index not in up:
                wiring.set_up(netlink, port.index)
                for route in building.ways_to(host_of(spec, port.host), rail):
                    netlink.replace_route(route)
