"""A lab as the kernel has it now, as JSON-ready values. Nothing is cached."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pytools.kernel.netlink.routing import Netlink
from pytools.lab import faults, filters, processes, wiring
from pytools.lab.topology import Host, Rail, Spec


def lab(spec: Spec) -> dict[str, Any]:
    """All of it."""
    hosts, rails = spec.topology
    running = sorted(processes.marked(spec.name).items())
    return {
        "name": spec.name,
        "rate_bit_s": spec.rate_bit_s,
        "queue_bytes": spec.queue_bytes,
        "over": spec.over,
        "hosts": [_host(host) for host in hosts],
        "rails": [_rail(rail) for rail in rails],
        "processes": [{"pid": pid, "command": line} for pid, line in running],
    }


def sent_bytes(rails: Sequence[Rail]) -> dict[tuple[int, int], int]:
    """What each shaped port has sent so far, by numbers of rail and host."""
    sent: dict[tuple[int, int], int] = {}
    for rail in rails:
        with Netlink(rail.netns) as netlink:
            shaped = wiring.shapes(netlink)
        for port in rail.ports:
            if port.index in shaped:
                sent[rail.number, port.host] = shaped[port.index].sent_bytes
    return sent


def _host(host: Host) -> dict[str, Any]:
    return {
        "name": host.name,
        "netns": host.netns,
        "service": host.service,
        "service6": host.service6,
        "interfaces": [
            {"name": each.name, "rail": each.rail, "address": each.address, "gateway": each.gateway}
            for each in host.interfaces
        ],
    }


def _rail(rail: Rail) -> dict[str, Any]:
    with Netlink(rail.netns) as netlink:
        carriers = {link.index: link.carrier for link in netlink.links()}
        shaped = wiring.shapes(netlink)
        losing = faults.losses(netlink)
    ports = []
    for port in rail.ports:
        shape = shaped.get(port.index)
        lost = {rule.destination or "everywhere" for rule in losing if rule.iif == port.name}
        ports.append(
            {
                "interface": port.name,
                "carrier": carriers[port.index],
                "rate_bit_s": shape.rate_bit_s if shape else None,
                "queue_bytes": shape.queue_bytes if shape else None,
                "sent_bytes": shape.sent_bytes if shape else 0,
                "waiting_bytes": shape.waiting_bytes if shape else 0,
                "dropped_packets": shape.dropped_packets if shape else 0,
                "loses_packets_to": sorted(lost),
            }
        )
    shown = {"name": rail.name, "netns": rail.netns, "ports": ports, "faults": filters.counts(rail)}
    return shown | ({"inner": [_rail(way) for way in rail.inner]} if rail.inner else {})
