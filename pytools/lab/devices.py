"""Rails that are no plain cables: a VLAN or a tunnel over one, a bond or a team of two, a VRF around.

The device has the name, the number and the addresses that the plain cable's end would have, so that everything else of
a lab works the same. The cable itself has addresses of its own, for the outer headers.
"""

from __future__ import annotations

import base64
import errno
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pyroute2 import WireGuard
from pyroute2.netlink import nla, nlmsg

from pytools.errors import CapabilityError
from pytools.kernel.netlink import teams
from pytools.kernel.netlink.routing import Netlink
from pytools.kernel.netlink.socket import CREATE, EXCLUSIVE, NetlinkError, attribute
from pytools.kernel.netns import inside
from pytools.lab import wiring
from pytools.lab.topology import Host, Interface, Port, Rail

VRF, VRF_INDEX, VRF_TABLE = "fabric", 10, 77  # of each host, with all its rails and its service addresses
_NEW_LINK = 16
_OPTION: Final = {  # what a kernel is configured with that has them
    "vlan": "CONFIG_VLAN_8021Q",
    "bond": "CONFIG_BONDING",
    "team": "CONFIG_NET_TEAM",
    "vrf": "CONFIG_NET_VRF",
    "vxlan": "CONFIG_VXLAN",
    "geneve": "CONFIG_GENEVE",
    "gre": "CONFIG_NET_IPGRE",
    "sit": "CONFIG_IPV6_SIT",
    "wireguard": "CONFIG_WIREGUARD",
}
_BOND_MODES: Final = {"bond": 1, "bond-xor": 2}  # active-backup, balance-xor
_OF_TWO: Final = {*_BOND_MODES, "team"}
_PORTS_HASH: Final = (  # the ports of IPv6 behind its header, else what IPv4 without options has there
    (0x28, 0, 0, 12),  # ldh [12]
    (0x15, 0, 2, 0x86DD),  # jeq #0x86dd
    (0x20, 0, 0, 54),  # ld [54]
    (0x16, 0, 0, 0),  # ret a
    (0x20, 0, 0, 34),  # ld [34]
    (0x16, 0, 0, 0),  # ret a
)
_PORT: Final = 51820  # of WireGuard, and the number of the cable


@dataclass(frozen=True, slots=True)
class _Outer:
    """What the device is made on: a cable's end, the cable's number in the lab, and the outer addresses."""

    index: int
    number: int
    here: str
    there: str


class _LinkMessage(nlmsg):  # type: ignore[misc]
    """`struct ifinfomsg` with options of any kind of device as they go on the wire."""

    prefix = "IFLA_"
    fields = (("family", "B"), ("__pad", "B"), ("type", "H"), ("index", "i"), ("flags", "I"), ("change", "I"))
    nla_map = (
        (1, "IFLA_ADDRESS", "l2addr"),
        (3, "IFLA_IFNAME", "asciiz"),
        (5, "IFLA_LINK", "uint32"),
        (10, "IFLA_MASTER", "uint32"),
        (18, "IFLA_LINKINFO", "info"),
    )

    class info(nla):  # type: ignore[misc]  # noqa: N801 (pyroute2 looks the name up)
        nla_map = ((1, "IFLA_INFO_KIND", "asciiz"), (2, "IFLA_INFO_DATA", "cdata"))


def cable(netlink: Netlink, kind: str | None, host: Host, interface: Interface, rail: Rail) -> None:
    """Make an interface of a host and the port of a rail at its other end.

    Raises
    ------
    CapabilityError
        If this kernel has no such devices.
    """
    port = rail.ports[host.number - 1]
    pair = wiring.End(interface.name, interface.index), wiring.End(port.name, port.index)
    if kind in (None, "vrf"):
        wiring.add_veth(netlink, *pair, rail.netns)
        if kind:
            _enslave(netlink, interface.index, VRF_INDEX)
        return
    assert kind is not None
    cables = [
        [wiring.End(f"cable{cable + 1}-{end.name}", _below(end.index, cable)) for end in pair]
        for cable in range(_cables(kind))
    ]
    number = 100 * rail.number + host.number
    outer = [f"10.{100 + rail.number}.{host.number}.{end}" for end in (2, 1)]
    for near, far in cables:
        wiring.add_veth(netlink, near, far, rail.netns)
    with Netlink(rail.netns) as beyond:
        sides = zip((netlink, beyond), pair, zip(*cables, strict=True), (outer, outer[::-1]), strict=True)
        for netns, (each, end, lowers, (here, there)) in zip((host.netns, rail.netns), sides, strict=True):
            if kind not in _OF_TWO:
                wiring.set_up(each, lowers[0].index)
                wiring.add_address(each, lowers[0].index, here, 24)
            _add(each, kind, end, _Outer(lowers[0].index, number, here, there))
            if kind == "team":
                with inside(netns):
                    _balance(end.index)
                _same_address(each, end.index, [lower.index for lower in lowers])
            for lower in lowers if kind in _OF_TWO else ():
                _enslave(each, lower.index, end.index)
    if kind == "wireguard":
        _exchange_keys((host.netns, rail.netns), (interface.name, port.name), outer, _PORT + number)


def ends(kind: str | None, port: Port) -> tuple[int, ...]:
    """What a port of a rail consists of: the ends of its cables, and the device on them."""
    return (*(_below(port.index, cable) for cable in range(_cables(kind))), port.index)


def _cables(kind: str | None) -> int:
    return 0 if kind in (None, "vrf") else 2 if kind in _OF_TWO else 1


def _below(index: int, cable: int) -> int:
    return index + 200 * (cable + 1)


def add_vrf(netlink: Netlink) -> None:
    _add(netlink, "vrf", wiring.End(VRF, VRF_INDEX), _Outer(0, 0, "", ""))
    wiring.set_up(netlink, VRF_INDEX)


def _enslave(netlink: Netlink, index: int, master: int) -> None:
    """Put an interface into a VRF, before it has an IPv6 address, or into a bond or team, before it is up."""
    message = _LinkMessage()
    message["index"], message["attrs"] = index, [("IFLA_MASTER", master)]
    netlink.socket.change(message, _NEW_LINK, 0, f"putting interface {index} into interface {master}")


def _same_address(netlink: Netlink, team: int, ports: list[int]) -> None:
    """Give the ports of a team its address: they receive packets for no other."""
    [address] = [link.address for link in netlink.links() if link.index == team]
    for index in ports:
        message = _LinkMessage()
        message["index"], message["attrs"] = index, [("IFLA_ADDRESS", address)]
        netlink.socket.change(message, _NEW_LINK, 0, f"setting the address of interface {index}")


def _add(netlink: Netlink, kind: str, end: wiring.End, outer: _Outer) -> None:
    message = _LinkMessage()
    message["index"] = end.index
    options = _bond(_BOND_MODES[kind]) if kind in _BOND_MODES else _OPTIONS[kind](outer)
    kind = kind.partition("-")[0]
    info = [("IFLA_INFO_KIND", kind), ("IFLA_INFO_DATA", options)]
    message["attrs"] = [("IFLA_IFNAME", end.name), ("IFLA_LINKINFO", {"attrs": info})]
    if kind == "vlan":
        message["attrs"].append(("IFLA_LINK", outer.index))
    try:
        netlink.socket.change(message, _NEW_LINK, CREATE | EXCLUSIVE, f"making {kind} device {end.name}")
    except NetlinkError as refusal:
        if refusal.code not in (errno.EOPNOTSUPP, errno.ENOENT):
            raise
        raise CapabilityError(
            f"this kernel has no {kind} devices", f"boot one with {_OPTION[kind]}, or use another --over"
        ) from None


def _number(kind: int, value: int) -> bytes:
    return attribute(kind, struct.pack("=I", value))


def _address(kind: int, address: str) -> bytes:
    return attribute(kind, socket.inet_aton(address))


def _vxlan(outer: _Outer) -> bytes:
    """IFLA_VXLAN_ID, GROUP, LINK, LOCAL and PORT."""
    ends = _address(2, outer.there) + _number(3, outer.index) + _address(4, outer.here)
    return _number(1, outer.number) + ends + attribute(15, struct.pack(">H", 4789))


def _sit(outer: _Outer) -> bytes:
    """IFLA_IPTUN_LOCAL, REMOTE and PROTO: IPv4 (IP-in-IP) as well as IPv6."""
    return _address(2, outer.here) + _address(3, outer.there) + attribute(9, b"\0")


def _bond(mode: int) -> bytes:
    """IFLA_BOND_MODE, MIIMON and XMIT_HASH_POLICY: layer3+4, so that flows between two hosts take both cables."""
    return attribute(1, bytes([mode])) + _number(3, 10) + attribute(14, b"\1")


_OPTIONS: Final[dict[str, Callable[[_Outer], bytes]]] = {
    "vlan": lambda outer: attribute(1, struct.pack("=H", outer.number)),
    "vrf": lambda outer: _number(1, VRF_TABLE),
    "vxlan": _vxlan,
    "geneve": lambda outer: _number(1, outer.number) + _address(2, outer.there),
    "gre": lambda outer: _address(6, outer.here) + _address(7, outer.there),
    "sit": _sit,
    "team": lambda outer: b"",
    "wireguard": lambda outer: b"",
}


def _balance(index: int) -> None:
    """Have a team that has no port yet hash flows by their ports, by a classic BPF program."""
    teams.set_option(index, "mode", "loadbalance")
    teams.set_option(index, "bpf_hash_func", b"".join(struct.pack("=HBBI", *each) for each in _PORTS_HASH))


def _exchange_keys(places: tuple[str, str], names: tuple[str, str], outer: list[str], port: int) -> None:
    """Let the two ends of a WireGuard cable know each other; the kernel works the public keys out."""
    public: list[str] = []
    for netns, name in zip(places, names, strict=True):
        with inside(netns), WireGuard() as guard:
            guard.set(name, listen_port=port, private_key=base64.b64encode(os.urandom(32)).decode())
            public.append(next(iter(guard.info(name))).get_attr("WGDEVICE_A_PUBLIC_KEY"))
    for netns, name, key, there in zip(places, names, public[::-1], outer[::-1], strict=True):
        peer = {"public_key": key, "endpoint_addr": there, "endpoint_port": port}
        with inside(netns), WireGuard() as guard:
            guard.set(name, peer={**peer, "allowed_ips": ["0.0.0.0/0", "::/0"]})
