"""Faults in a rail, and their end: rate, queue, silent or random loss, a longer way, marks, small MTUs.

All are made in the rail's namespace, so that a host sees them as it would see a fault in the network.

A silent cut of a cable loses everything in both directions in the rail's port, ARP and the rail's own packets too, so
that a neighbour one hop away (BFD) misses as much as a probe across the fabric. A cut carrier is the port set down,
which takes the carrier of the host's end: the kernel then drops the nexthops there by itself.
"""

from __future__ import annotations

from pytools.errors import UsageError
from pytools.kernel.netlink.routing import MAIN_TABLE, PROTOCOL, Family, Netlink, Route, Rule
from pytools.lab import building, devices, filters, wiring
from pytools.lab import inner_paths as innards
from pytools.lab.topology import Host, Port, Rail, Spec, check_shape, host_of, rail_of


def cut(spec: Spec, rail: int, host: int | None, carrier: bool) -> None:
    """Cut the cable to a host, or all of a rail's; one that is cut that way already stays so."""
    target = rail_of(spec, rail)
    ports = target.ports if host is None else (target.ports[host_of(spec, host).number - 1],)
    if carrier:
        with Netlink(target.netns) as netlink:
            for port in ports:
                for index in devices.ends(spec.over, port):
                    wiring.set_up(netlink, index, up=False)
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
                for index in devices.ends(spec.over, port):
                    wiring.set_up(netlink, index)
                for route in building.ways_to(host_of(spec, port.host), rail):
                    netlink.replace_route(route)


# Two priorities: the kernel takes a rule without a destination for the same as one that only adds a destination.
_ONE_WAY_PRIORITY, _RAIL_PRIORITY = 100, 101
_LONGER_WAY_PRIORITY = 102  # what is lost is not delayed
_LONGER_WAY_TABLES = 20_000  # and a number for each two hosts
MAX_EXTRA_US = 1_000_000
MIN_MTU, MAX_MTU = 1280, 65_535  # IPv6 has no smaller ones
MAX_EVERY = 1_000_000


def congest(
    spec: Spec, rail: int, rate_bit_s: int | None, queue_bytes: int, toward: int | None, inner: int | None = None
) -> None:
    """Shape the ports of a rail, or of a way inside it (or the one towards a host) anew, in place."""
    check_shape(rate_bit_s, queue_bytes)
    if rate_bit_s is None:
        raise UsageError("an unshaped port has no queue to congest", "give a rate, like 10mbit")
    target = rail_of(spec, rail, inner)
    wanted = None if toward is None else host_of(spec, toward).number
    with Netlink(target.netns) as netlink:
        for port in target.ports:
            if wanted in (None, port.host):
                wiring.shape(netlink, port.index, rate_bit_s, queue_bytes, spec.rate_bit_s)


def blackhole(spec: Spec, rail: int, direction: tuple[int, int] | None, inner: int | None = None) -> None:
    """Let a rail, or a way in it, lose packets silently: all that it forwards, or those from one host to another."""
    with Netlink(rail_of(spec, rail, inner).netns) as netlink:
        present = set(netlink.rules(4) + netlink.rules(6))
        for rule in losing_rules(spec, rail, direction):
            if rule not in present:
                netlink.add_rule(rule)


def longer_way(spec: Spec, rail: int, source: int, destination: int, extra_us: float) -> tuple[str, int]:
    """The device that is to hold packets from one host to another, and for how many nanoseconds.

    Raises
    ------
    UsageError
        If there are no such hosts, the time does not fit, or they are delayed already.
    """
    target = rail_of(spec, rail)
    first, second = _two_hosts(spec, (source, destination))
    if not 0 < extra_us <= MAX_EXTRA_US:
        raise UsageError(f"a delay of {extra_us:g} us is out of range", f"give up to {MAX_EXTRA_US}")
    with Netlink(target.netns) as netlink:
        if set(_longer_ways(netlink)) & set(_diverting_rules(first, second, rail)):
            raise UsageError(f"rail {rail} delays packets from {first.name} to {second.name} already", "heal it before")
    return f"hold{source}-{destination}", round(extra_us * 1000)


def divert(spec: Spec, rail: int, source: int, destination: int, device: str) -> None:
    """Send packets from one host to another through a device that holds them."""
    first, second = _two_hosts(spec, (source, destination))
    with Netlink(rail_of(spec, rail).netns) as netlink:
        (index,) = (link.index for link in netlink.links() if link.name == device)
        for rule in _diverting_rules(first, second, rail):
            everywhere = "0.0.0.0/0" if rule.family == 4 else "::/0"
            netlink.replace_route(Route(everywhere, rule.family, rule.table, ifindex=index, protocol=PROTOCOL))
            netlink.add_rule(rule)
        if rail_of(spec, rail).inner:  # what was held goes on through them
            for rule in innards.choosing_rules(first, device, _LONGER_WAY_PRIORITY, PROTOCOL):
                netlink.add_rule(rule)


def mark(spec: Spec, rail: int, every: int, toward: int | None) -> None:
    """Let a rail's ports mark every n-th packet that can be marked as having met congestion."""
    if not 1 <= every <= MAX_EVERY:
        raise UsageError(f"--every {every} is out of range", f"give 1 to {MAX_EVERY}")
    filters.install(rail_of(spec, rail), _ports(spec, rail, toward), filters.MARK, {"SWERVE_LAB_EVERY": every})


def narrow(spec: Spec, rail: int, mtu_bytes: int, silent: bool, toward: int | None) -> None:
    """Let a rail forward no packet longer than this; it says so to the sender (ICMP), or loses them silently."""
    if not MIN_MTU <= mtu_bytes <= MAX_MTU:
        raise UsageError(f"an MTU of {mtu_bytes} bytes is out of range", f"give {MIN_MTU} to {MAX_MTU}")
    target, ports = rail_of(spec, rail), _ports(spec, rail, toward)
    if silent:
        filters.install(target, ports, filters.NARROW, {"SWERVE_LAB_BYTES": mtu_bytes})
        return
    with Netlink(target.netns) as netlink:
        for port in ports:
            host = host_of(spec, port.host)
            for route in building.ways_to(host, target) + _own_ways(host, target):
                wiring.replace_narrow_route(netlink, route, mtu_bytes)


def lose(spec: Spec, rail: int, share: float, toward: int | None) -> None:
    """Let a rail's ports lose this share of all packets at random."""
    if not 0 < share < 1:
        raise UsageError(f"a share of {share:g} is out of range", "give more than 0 and less than 1; `cut` loses all")
    wanted = {"SWERVE_LAB_SHARE": max(1, round(share * (1 << 32)))}
    filters.install(rail_of(spec, rail), _ports(spec, rail, toward), filters.RANDOM, wanted)


def _widen(netlink: Netlink, spec: Spec, rail: Rail) -> None:
    """Take the routes of `narrow` back."""
    narrowed = {
        (route.destination, route.ifindex)
        for family in (4, 6)
        for route in netlink.routes(family)
        if route.protocol == PROTOCOL
    }
    for port in rail.ports:
        host = host_of(spec, port.host)
        own = [each for each in _own_ways(host, rail) if (each.destination, each.ifindex) in narrowed]
        for route in own:
            netlink.del_route(route)
        for route in building.ways_to(host, rail) if own else ():
            netlink.replace_route(route)


def _own_ways(host: Host, rail: Rail) -> list[Route]:
    """Routes to a host's own addresses on a rail, which the connected prefix covers when the rail is whole."""
    end, port = host.interfaces[rail.number - 1], rail.ports[host.number - 1]
    prefixes: list[tuple[Family, str]] = [(4, f"{end.address}/32"), (6, f"{end.address6}/128")]
    return [
        Route(prefix, family, MAIN_TABLE, ifindex=port.index, metric=1, protocol=PROTOCOL)
        for family, prefix in prefixes
    ]


def _ports(spec: Spec, rail: int, toward: int | None) -> tuple[Port, ...]:
    ports = rail_of(spec, rail).ports
    return ports if toward is None else (ports[host_of(spec, toward).number - 1],)


def heal(spec: Spec, rail: Rail) -> None:
    """Give a rail its cables, rate, queues and packets back; devices that hold packets go with their processes."""
    for way in rail.inner:
        _restore(spec, way)
    filters.remove(rail)
    plug_in(spec, rail)
    with Netlink(rail.netns) as netlink:
        _widen(netlink, spec, rail)
    _restore(spec, rail)


def _restore(spec: Spec, rail: Rail) -> None:
    """Let a router lose and divert nothing, and shape its ports as they were."""
    with Netlink(rail.netns) as netlink:
        for rule in losses(netlink) + _longer_ways(netlink):
            netlink.del_rule(rule)
        for port in rail.ports:
            if spec.rate_bit_s is None:
                wiring.unshape(netlink, port.index)
            else:
                wiring.shape(netlink, port.index, spec.rate_bit_s, spec.queue_bytes)


def losses(netlink: Netlink) -> list[Rule]:
    """The rules that make a rail lose packets now."""
    found = netlink.rules(4) + netlink.rules(6)
    return [rule for rule in found if rule.action == "blackhole" and rule.protocol == PROTOCOL]


def losing_rules(spec: Spec, rail: int, direction: tuple[int, int] | None) -> list[Rule]:
    """The rules behind a blackhole. Packets for the rail itself are delivered before any of them is asked."""
    target = rail_of(spec, rail)
    if direction is None:
        return [_rule(family, port.name, None) for family in (4, 6) for port in target.ports]
    source, destination = _two_hosts(spec, direction)
    return [_rule(family, source.name, prefix) for family, prefix in _prefixes(destination, rail)]


def _longer_ways(netlink: Netlink) -> list[Rule]:
    """The rules that send packets through a device that holds them."""
    found = netlink.rules(4) + netlink.rules(6)
    return [rule for rule in found if rule.priority == _LONGER_WAY_PRIORITY and rule.protocol == PROTOCOL]


def _diverting_rules(source: Host, destination: Host, rail: int) -> list[Rule]:
    table = _LONGER_WAY_TABLES + 100 * source.number + destination.number
    return [
        Rule(_LONGER_WAY_PRIORITY, family, "table", table, iif=source.name, destination=prefix, protocol=PROTOCOL)
        for family, prefix in _prefixes(destination, rail)
    ]


def _two_hosts(spec: Spec, direction: tuple[int, int]) -> tuple[Host, Host]:
    source, destination = host_of(spec, direction[0]), host_of(spec, direction[1])
    if source is destination:
        raise UsageError(f"direction {source.name}:{source.name} goes nowhere", "name two hosts, like h1:h2")
    return source, destination


def _prefixes(host: Host, rail: int) -> list[tuple[Family, str]]:
    interface = host.interfaces[rail - 1]
    return [
        (4, f"{host.service}/32"),
        (4, f"{interface.address}/32"),
        (6, f"{host.service6}/128"),
        (6, f"{interface.address6}/128"),
    ]


def _rule(family: Family, iif: str, destination: str | None) -> Rule:
    return Rule(
        priority=_RAIL_PRIORITY if destination is None else _ONE_WAY_PRIORITY,
        family=family,
        action="blackhole",
        iif=iif,
        destination=destination,
        protocol=PROTOCOL,
    )
