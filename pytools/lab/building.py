"""Builds the namespaces of a lab: settings, links, addresses, shapers, nexthops, routes, agents' configurations.

One netlink socket per namespace. The lab plays the administrator: what it puts into hosts is static routing, not
marked as swerve's own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import yaml

from pytools import config, directories
from pytools.errors import CapabilityError, SwerveError
from pytools.kernel.netlink.nexthops import family_of
from pytools.kernel.netlink.routing import MAIN_TABLE, Member, Netlink, Nexthop, Route
from pytools.lab import clocks, devices, inner_paths, namespaces, timekeeping, wiring
from pytools.lab.topology import Host, Rail, Spec, group_id

_STATIC = 4  # RTPROT_STATIC
_READY_NS = 10 * 10**9
_LOOPBACK = 1  # index of lo in every namespace
_KEY_BYTES = 32
_COMMON = {
    # IPv4 settings are inherited from the machine's: say what the lab relies on.
    "ipv4/conf/all/rp_filter": 0,
    "ipv4/conf/default/rp_filter": 0,
    "ipv4/fib_multipath_hash_policy": 1,
    "ipv6/fib_multipath_hash_policy": 1,
    "ipv6/conf/all/disable_ipv6": 0,
    "ipv6/conf/default/disable_ipv6": 0,
    "ipv6/conf/default/accept_dad": 0,
    "ipv6/conf/default/accept_ra": 0,
    "ipv6/conf/default/router_solicitations": 0,
}
_HOST = {
    **_COMMON,
    "ipv4/ip_forward": 0,
    "ipv4/tcp_no_metrics_save": 1,  # what one measurement taught TCP must not colour the next
}
_RAIL = {
    **_COMMON,
    "ipv4/ip_forward": 1,
    "ipv4/conf/all/send_redirects": 0,
    "ipv4/conf/default/send_redirects": 0,
    "ipv6/conf/all/forwarding": 1,
    "ipv6/conf/default/forwarding": 1,
    "ipv6/conf/default/keep_addr_on_down": 1,  # IPv4 keeps them anyway
}


def require_privileges() -> None:
    """Refuse early, before anything is made.

    Raises
    ------
    CapabilityError
        Unless run as root.
    """
    if os.geteuid() != 0:
        raise CapabilityError("a lab needs network namespaces of its own", "run as root")


def build(spec: Spec, given: Sequence[clocks.VirtualClock] | None = None, key_file: Path | None = None) -> None:
    """Make all of it. What was made when something fails is the caller's to remove.

    Parameters
    ----------
    given : sequence of VirtualClock, optional
        A clock for each host; they share the machine's unless given.
    key_file : Path, optional
        Where to put the key that lets the agents talk to each other; they do not unless given.
    """
    hosts, rails = spec.topology
    if key_file is not None:
        _write_key(key_file)
    ways = [way for rail in rails for way in rail.inner]
    choosing = _RAIL | (inner_paths.HASHING if ways else {})
    places_made = [(host.netns, _HOST) for host in hosts] + [(rail.netns, choosing) for rail in rails]
    for netns, settings in places_made + [(way.netns, _RAIL) for way in ways]:
        namespaces.create(netns)
        namespaces.set_sysctls(netns, settings)
    for host in hosts:
        with Netlink(host.netns) as netlink:
            _cable(netlink, host, rails, spec.over)
    for rail in rails:
        with Netlink(rail.netns) as netlink:
            _build_rail(netlink, rail, hosts, spec)
            inner_paths.build(netlink, rail, hosts, spec)
    for host in hosts:
        with Netlink(host.netns) as netlink:
            route_host(netlink, host, hosts, spec.over)
        _write_config(host, hosts, spec.ipv6, None if given is None else given[host.number - 1], key_file)
    for netns in [host.netns for host in hosts] + [each.netns for each in (*rails, *ways)]:
        _wait_until_running(netns)


def _wait_until_running(netns: str) -> None:
    """The kernel notices a carrier a moment late; IPv6 is not ready before."""
    deadline_ns = time.monotonic_ns() + _READY_NS
    with Netlink(netns) as netlink:
        while not all(link.running for link in netlink.links() if link.kind == "veth"):
            if time.monotonic_ns() > deadline_ns:
                raise SwerveError(f"{netns}: an interface does not come up", "see `ip link` there")
            time.sleep(0.001)


def _cable(netlink: Netlink, host: Host, rails: tuple[Rail, ...], over: str | None) -> None:
    """Interfaces of a host, their other ends in the rails."""
    wiring.set_up(netlink, _LOOPBACK)
    if over == "vrf":
        devices.add_vrf(netlink)
    for interface, rail in zip(host.interfaces, rails, strict=True):
        devices.cable(netlink, over, host, interface, rail)
    serving = devices.VRF_INDEX if over == "vrf" else _LOOPBACK
    wiring.add_address(netlink, serving, host.service, 32)
    wiring.add_address(netlink, serving, host.service6, 128)
    for interface in host.interfaces:
        wiring.set_up(netlink, interface.index)
        wiring.add_address(netlink, interface.index, interface.address, 24)
        wiring.add_address(netlink, interface.index, interface.address6, 64)


def _build_rail(netlink: Netlink, rail: Rail, hosts: tuple[Host, ...], spec: Spec) -> None:
    """Ports, their shapers, and the way to every host's service address."""
    wiring.set_up(netlink, _LOOPBACK)
    for port, host in zip(rail.ports, hosts, strict=True):
        wiring.set_up(netlink, port.index)
        wiring.add_address(netlink, port.index, port.address, 24)
        wiring.add_address(netlink, port.index, port.address6, 64)
        if spec.rate_bit_s is not None:
            wiring.shape(netlink, port.index, spec.rate_bit_s, spec.queue_bytes)
        for route in ways_to(host, rail):
            netlink.replace_route(route)


def ways_to(host: Host, rail: Rail) -> list[Route]:
    """How a rail reaches a host's service addresses."""
    end, port = host.interfaces[rail.number - 1], rail.ports[host.number - 1]
    return [
        Route(prefix, family_of(prefix), MAIN_TABLE, gateway=gateway, ifindex=port.index, protocol=_STATIC)
        for prefix, gateway in ((f"{host.service}/32", end.address), (f"{host.service6}/128", end.address6))
    ]


def route_host(netlink: Netlink, host: Host, hosts: tuple[Host, ...], over: str | None) -> None:
    """Nexthops, one group per destination and family, and the routes that use them; as new where they are there."""
    table = devices.VRF_TABLE if over == "vrf" else MAIN_TABLE
    for interface in host.interfaces:
        for nexthop_id, gateway in (
            (interface.nexthop_id, interface.gateway),
            (interface.nexthop6_id, interface.gateway6),
        ):
            netlink.replace_nexthop(Nexthop(nexthop_id, family_of(gateway), gateway, interface.index, _STATIC))
        # Each rail's own addresses are reached over that rail.
        for prefix, nexthop_id in (
            (f"10.{interface.rail}.0.0/16", interface.nexthop_id),
            (f"fd00:{interface.rail}::/32", interface.nexthop6_id),
        ):
            netlink.replace_route(Route(prefix, family_of(prefix), table, nexthop_id=nexthop_id, protocol=_STATIC))
    members4 = [Member(interface.nexthop_id, 1) for interface in host.interfaces]
    members6 = [Member(interface.nexthop6_id, 1) for interface in host.interfaces]
    for other in hosts:
        if other is host:
            continue
        for members, prefix, source in (
            (members4, f"{other.service}/32", host.service),
            (members6, f"{other.service6}/128", host.service6),
        ):
            family = family_of(prefix)
            group = group_id(other.number, family)
            netlink.replace_group(group, members, _STATIC, create=True, kind="mpath")
            netlink.replace_route(Route(prefix, family, table, nexthop_id=group, protocol=_STATIC, prefsrc=source))


def agent_config(
    host: Host, hosts: tuple[Host, ...], ipv6: bool, own_clock: bool = False, key_file: Path | None = None
) -> config.AgentConfig:
    """What the agent of one host is told. Without clocks of their own all namespaces of a lab read the same one."""
    clock: Literal["shared", "free_running"] = "free_running" if own_clock else "shared"
    others = [other for other in hosts if other is not host]
    peers = [config.Peer(other.name, other.service, clock) for other in others]
    if ipv6:
        peers += [config.Peer(other.name, other.service6, clock) for other in others]
    return config.AgentConfig(
        host=host.name,
        peers=peers,
        bus=config.HostBus(key_file="" if key_file is None else str(key_file)),
        virtual_clock=str(timekeeping.file_of(host)) if own_clock else "",
    )


def _write_config(
    host: Host, hosts: tuple[Host, ...], ipv6: bool, clock: clocks.VirtualClock | None, key_file: Path | None
) -> None:
    directory = directories.runtime_dir(host.netns)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if clock is not None:
        clocks.save(clock, timekeeping.file_of(host))
    told = agent_config(host, hosts, ipv6, clock is not None, key_file)
    text = yaml.safe_dump(config.as_file(told), sort_keys=False)
    (directory / "agent.yaml").write_text(text)


def _write_key(path: Path) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(os.urandom(_KEY_BYTES))
