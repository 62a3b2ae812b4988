"""The ways inside a rail: routers between its ports, of which it chooses one for each flow, as a leaf does spines.

The rail stands for all its leaves: what comes in by a host's port is hashed on to the ways, each a namespace with a
port towards every host, and comes back by the way's port of the host it is for. So a packet passes its rail twice, and
a way's queue towards a host holds only what goes there. IPv6 flows are told apart by their labels (hash policy 0),
IPv4 flows by addresses and ports.
"""

from __future__ import annotations

from typing import Final

from pytools.kernel.netlink.nexthops import Family, family_of
from pytools.kernel.netlink.routing import MAIN_TABLE, Member, Netlink, Nexthop, Route, Rule
from pytools.lab import wiring
from pytools.lab.topology import Host, Port, Rail, Spec

# Policy 3 is layer 4 of one's own choice: without the protocol. Hosts hash it, too; a rail that hashed just the same
# would send all that a host gave it one way.
HASHING: Final = {
    "ipv4/fib_multipath_hash_policy": 3,
    "ipv4/fib_multipath_hash_fields": 0x33,  # both addresses, both ports
    "ipv6/fib_multipath_hash_policy": 0,
}
_STATIC = 4  # RTPROT_STATIC
_CHOOSING_PRIORITY = 200  # behind the faults, before the main table
_TABLES = 10_000  # and a host's number
_LOOPBACK = 1


def build(netlink: Netlink, rail: Rail, hosts: tuple[Host, ...], spec: Spec) -> None:
    """Make the ways of a rail, if it is to have any, and let its ports choose among them.

    Parameters
    ----------
    netlink : Netlink
        Of the rail's namespace.
    rail : Rail
        Its ports are there already.
    spec : Spec
        The ways' ports are shaped as the rail's.
    """
    for way in rail.inner:
        with Netlink(way.netns) as beyond:
            wiring.set_up(beyond, _LOOPBACK)
            for port, host in zip(way.ports, hosts, strict=True):
                _cable(netlink, beyond, way, port)
                if spec.rate_bit_s is not None:
                    wiring.shape(beyond, port.index, spec.rate_bit_s, spec.queue_bytes)
                for route in _ways_to(host, rail.number, port):
                    beyond.replace_route(route)
    for host in hosts if rail.inner else ():
        _choose(netlink, rail, host)


def choosing_rules(
    host: Host, interface: str, priority: int = _CHOOSING_PRIORITY, protocol: int = _STATIC
) -> list[Rule]:
    """What comes in by this interface of a rail is hashed on to the ways, as what the host sends is."""
    families: tuple[Family, ...] = (4, 6)
    return [
        Rule(priority, family, "table", _TABLES + host.number, iif=interface, destination=None, protocol=protocol)
        for family in families
    ]


def _cable(netlink: Netlink, beyond: Netlink, way: Rail, port: Port) -> None:
    """A veth pair between the rail and a port of a way; the rail's end has the port's address and one."""
    end = wiring.End(f"w{way.number}h{port.host}", 1000 + 100 * way.number + port.host)
    wiring.add_veth(netlink, end, wiring.End(port.name, port.index), way.netns)
    for socket, index, addresses in (
        (netlink, end.index, _rails_end(port)),
        (beyond, port.index, (port.address, port.address6)),
    ):
        wiring.set_up(socket, index)
        wiring.add_address(socket, index, addresses[0], 24)
        wiring.add_address(socket, index, addresses[1], 64)


def _rails_end(port: Port) -> tuple[str, str]:
    return port.address.removesuffix("1") + "2", port.address6.removesuffix("1") + "2"


def _ways_to(host: Host, rail: int, port: Port) -> list[Route]:
    """How a way reaches all addresses that a host has on this rail."""
    end = host.interfaces[rail - 1]
    gateway, gateway6 = _rails_end(port)
    return [
        Route(f"{address}/{length}", family_of(address), MAIN_TABLE, gateway=via, ifindex=port.index, protocol=_STATIC)
        for address, length, via in (
            (host.service, 32, gateway),
            (end.address, 32, gateway),
            (host.service6, 128, gateway6),
            (end.address6, 128, gateway6),
        )
    ]


def _choose(netlink: Netlink, rail: Rail, host: Host) -> None:
    """Hash what comes in by a host's port on to the ways."""
    for rule in choosing_rules(host, rail.ports[host.number - 1].name):
        first = (0 if rule.family == 4 else 100_000) + 100 * host.number
        for way in rail.inner:
            port = way.ports[host.number - 1]
            gateway = port.address if rule.family == 4 else port.address6
            leaving = 1000 + 100 * way.number + host.number
            netlink.replace_nexthop(Nexthop(first + way.number, rule.family, gateway, leaving, _STATIC))
        members = [Member(first + way.number, 1) for way in rail.inner]
        netlink.replace_group(first, members, _STATIC, create=True, kind="mpath")
        everywhere = "0.0.0.0/0" if rule.family == 4 else "::/0"
        netlink.replace_route(Route(everywhere, rule.family, rule.table, nexthop_id=first, protocol=_STATIC))
        netlink.add_rule(rule)
