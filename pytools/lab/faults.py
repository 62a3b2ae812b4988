"""Faults in a rail, and their end: fewer bits per second, shorter queues, silent loss.

All are made in the rail's namespace, so that a host sees them as it would see a fault in the network.
"""

from __future__ import annotations

from pytools.errors import UsageError
from pytools.kernel.netlink import PROTOCOL, Family, Netlink, Rule
from pytools.lab import wiring
from pytools.lab.topology import Rail, Spec, check_shape, host_of, rail_of

# Two priorities: the kernel takes a rule without a destination for the same as one that only adds a destination.
_ONE_WAY_PRIORITY, _RAIL_PRIORITY = 100, 101


def congest(spec: Spec, rail: int, rate_bit_s: int | None, queue_bytes: int, toward: int | None) -> None:
    """Shape a rail's ports (or the one towards a host) anew, in place."""
    check_shape(rate_bit_s, queue_bytes)
    if rate_bit_s is None:
        raise UsageError("an unshaped port has no queue to congest", "give a rate, like 10mbit")
    target = rail_of(spec, rail)
    wanted = None if toward is None else host_of(spec, toward).number
    with Netlink(target.netns) as netlink:
        for port in target.ports:
            if wanted in (None, port.host):
                wiring.shape(netlink, port.index, rate_bit_s, queue_bytes)


def blackhole(spec: Spec, rail: int, direction: tuple[int, int] | None) -> None:
    """Let a rail lose packets silently: all that it forwards, or those from one host to another."""
    with Netlink(rail_of(spec, rail).netns) as netlink:
        present = set(netlink.rules(4) + netlink.rules(6))
        for rule in losing_rules(spec, rail, direction):
            if rule not in present:
                netlink.add_rule(rule)


def heal(spec: Spec, rail: Rail) -> None:
    """Give a rail its rate, its queues and its packets back."""
    with Netlink(rail.netns) as netlink:
        for rule in losses(netlink):
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
    source, destination = host_of(spec, direction[0]), host_of(spec, direction[1])
    if source is destination:
        raise UsageError(f"direction {source.name}:{source.name} goes nowhere", "name two hosts, like h1:h2")
    interface = destination.interfaces[rail - 1]
    return [
        _rule(4, source.name, f"{destination.service}/32"),
        _rule(4, source.name, f"{interface.address}/32"),
        _rule(6, source.name, f"{destination.service6}/128"),
        _rule(6, source.name, f"{interface.address6}/128"),
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
