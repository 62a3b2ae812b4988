"""Links, tunnels, addresses, neighbours and policy rules: kernel bytes to frozen records and back.

Pure: no socket here.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from pyroute2.netlink.rtnl.fibmsg import fibmsg
from pyroute2.netlink.rtnl.ifaddrmsg import ifaddrmsg
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg
from pyroute2.netlink.rtnl.ndmsg import ndmsg

from pytools.kernel.netlink.nexthops import Family, ip_family, socket_family
from pytools.kernel.netlink.socket import attribute, attributes

RuleAction = Literal["table", "blackhole", "other"]

_IFF_UP, _IFF_RUNNING, _IFF_LOWER_UP = 0x1, 0x40, 0x10000
_RULE_ACTIONS: Mapping[RuleAction, int] = {"table": 1, "blackhole": 6}
_RULE = struct.Struct("=BBBBBBBBI")  # struct fib_rule_hdr: family, lengths, tos, table, 2 reserved, action, flags
_NUMBER = struct.Struct("=I")
_FRA_DST, _FRA_SRC, _FRA_IIF, _FRA_GOTO, _FRA_PRIORITY, _FRA_MARK = 1, 2, 3, 4, 6, 10
_FRA_SUPPRESS_GROUP, _FRA_SUPPRESS_PREFIX, _FRA_TABLE, _FRA_MASK, _FRA_OIF = 13, 14, 15, 16, 17
_FRA_L3MDEV, _FRA_PROTOCOL = 19, 21
_NOT_A_SELECTOR = frozenset(
    {_FRA_GOTO, _FRA_PRIORITY, _FRA_SUPPRESS_GROUP, _FRA_SUPPRESS_PREFIX, _FRA_TABLE, _FRA_L3MDEV, _FRA_PROTOCOL}
)
_INVERT = 2  # FIB_RULE_INVERT: the only flag that is the user's
_NONE = 0xFFFFFFFF
_STATES = {
    0x00: "NONE",
    0x01: "INCOMPLETE",
    0x02: "REACHABLE",
    0x04: "STALE",
    0x08: "DELAY",
    0x10: "PROBE",
    0x20: "FAILED",
    0x40: "NOARP",
    0x80: "PERMANENT",
}
_UDP: Final = socket.IPPROTO_UDP
# Kind of device -> (what its options are called by, protocol of the outer packets).
_KINDS: Final = {
    "vxlan": ("IFLA_VXLAN", _UDP),
    "geneve": ("IFLA_GENEVE", _UDP),
    "wireguard": ("", _UDP),
    "gre": ("IFLA_GRE", socket.IPPROTO_GRE),
    "gretap": ("IFLA_GRE", socket.IPPROTO_GRE),
    "ipip": ("IFLA_IPIP", socket.IPPROTO_IPIP),
    "sit": ("IFLA_SIT", socket.IPPROTO_IPV6),
}
# ARPHRD_* of interfaces whose packets begin with the IP header: TUNNEL, TUNNEL6, SIT, IPGRE, IP6GRE, RAWIP, NONE.
BARE: Final = frozenset({768, 769, 776, 778, 823, 519, 65534})


@dataclass(frozen=True, slots=True)
class Tunnel:
    """The outer packets of a tunnel device, or of its packets to one peer."""

    protocol: int  # IPPROTO_*
    port: int = 0  # the destination's, of UDP; 0: each peer has its own
    remote: str = ""  # empty: each peer has its own, or it is not known
    local: str = ""  # empty: the route chooses it
    link: int = 0  # index of the interface they must leave by; 0: any
    mark: int = 0  # firewall mark that their route is looked up with


@dataclass(frozen=True, slots=True)
class Link:
    index: int
    name: str
    up: bool  # administratively
    carrier: bool
    running: bool  # the kernel has taken notice of the carrier, too
    arphrd: int  # ARPHRD_*: 1 Ethernet, 772 loopback; one of BARE: no header of its own
    kind: str  # veth, vlan, …; empty for hardware
    mtu: int
    address: str  # link-layer
    carrier_downs: int = 0  # how often the carrier went, since the interface was made
    master: int | None = None  # of a bridge's, bond's or VRF's port
    vrf_table: int | None = None  # of a VRF device
    tunnel: Tunnel | None = None  # of a tunnel device of a known kind

    @property
    def bare(self) -> bool:
        """Whether its packets begin with the IP header."""
        return self.arphrd in BARE


@dataclass(frozen=True, slots=True)
class Address:
    address: str
    prefix_length: int
    family: Family
    ifindex: int
    scope: int  # 0 global, 253 link, 254 host
    flags: int  # IFA_F_*

    @property
    def network(self) -> str:
        return str(ipaddress.ip_network(f"{self.address}/{self.prefix_length}", strict=False))


@dataclass(frozen=True, slots=True)
class Neighbour:
    address: str
    family: Family
    ifindex: int
    link_address: str | None
    state: str  # REACHABLE, STALE, DELAY, PROBE, FAILED, INCOMPLETE, NOARP, PERMANENT, NONE


@dataclass(frozen=True, slots=True)
class Rule:
    """One policy rule. What is None does not select."""

    priority: int
    family: Family
    action: RuleAction = "table"
    table: int = 0
    mark: int | None = None
    mask: int = 0xFFFFFFFF
    iif: str | None = None
    source: str | None = None  # prefix
    destination: str | None = None  # prefix
    protocol: int = 0
    oif: str | None = None
    l3mdev: bool = False  # look up the table of the VRF that the packet belongs to
    suppress: int | None = None  # results with a prefix of at most this length do not count
    body: bytes = field(default=b"", compare=False, repr=False)  # as the kernel wrote it


def tunnel_of(kind: str, options: Any) -> Tunnel | None:
    """What a device sends, by its kind and the decoded options; None: it is no tunnel that is known here."""
    if kind not in _KINDS:
        return None
    prefix, protocol = _KINDS[kind]

    def option(*names: str) -> Any:
        found = (options.get_attr(f"{prefix}_{name}") for name in names) if options is not None and prefix else ()
        return next((each for each in found if each and each not in ("0.0.0.0", "::")), None)

    return Tunnel(
        protocol,
        option("PORT") or 0,
        option("REMOTE", "REMOTE6") or "",
        option("LOCAL", "LOCAL6") or "",
        option("LINK") or 0,
        option("FWMARK") or 0,
    )


def link_of(message: ifinfmsg) -> Link:
    info = message.get_attr("IFLA_LINKINFO")
    kind = (info.get_attr("IFLA_INFO_KIND") if info is not None else None) or ""
    options = info.get_attr("IFLA_INFO_DATA") if info is not None else None
    # The outer packets of a device from another namespace leave there.
    here = message.get_attr("IFLA_LINK_NETNSID") is None
    return Link(
        index=message["index"],
        name=message.get_attr("IFLA_IFNAME"),
        up=bool(message["flags"] & _IFF_UP),
        carrier=bool(message["flags"] & _IFF_LOWER_UP),
        running=bool(message["flags"] & _IFF_RUNNING),
        arphrd=message["ifi_type"],
        kind=kind,
        mtu=message.get_attr("IFLA_MTU", 0),
        address=message.get_attr("IFLA_ADDRESS", ""),
        carrier_downs=message.get_attr("IFLA_CARRIER_DOWN_COUNT", 0),
        master=message.get_attr("IFLA_MASTER"),
        vrf_table=options.get_attr("IFLA_VRF_TABLE") if kind == "vrf" and options is not None else None,
        tunnel=tunnel_of(kind, options) if here else None,
    )


def address_of(message: ifaddrmsg) -> Address:
    # IPv4 gives the own address in IFA_LOCAL, and on point-to-point links the peer's in IFA_ADDRESS.
    return Address(
        address=message.get_attr("IFA_LOCAL") or message.get_attr("IFA_ADDRESS"),
        prefix_length=message["prefixlen"],
        family=ip_family(message["family"]),
        ifindex=message["index"],
        scope=message["scope"],
        flags=message.get_attr("IFA_FLAGS", message["flags"]),
    )


def neighbour_of(message: ndmsg) -> Neighbour:
    return Neighbour(
        address=message.get_attr("NDA_DST", ""),
        family=ip_family(message["family"]),
        ifindex=message["ifindex"],
        link_address=message.get_attr("NDA_LLADDR"),
        state=_STATES.get(message["state"], f"0x{message['state']:x}"),
    )


def rule_message(rule: Rule) -> fibmsg:
    message = fibmsg()
    message["family"] = socket_family(rule.family)
    message["action"] = _RULE_ACTIONS[rule.action]
    message["table"] = rule.table if rule.table < 256 else 0
    attributes: list[tuple[str, Any]] = [("FRA_PRIORITY", rule.priority), ("FRA_PROTOCOL", rule.protocol)]
    if rule.table:
        attributes.append(("FRA_TABLE", rule.table))
    if rule.mark is not None:
        attributes += [("FRA_FWMARK", rule.mark), ("FRA_FWMASK", rule.mask)]
    if rule.iif is not None:
        attributes.append(("FRA_IIFNAME", rule.iif))
    for name, length, prefix in (("FRA_SRC", "src_len", rule.source), ("FRA_DST", "dst_len", rule.destination)):
        if prefix is not None:
            network = ipaddress.ip_network(prefix)
            message[length] = network.prefixlen
            attributes.append((name, str(network.network_address)))
    message["attrs"] = attributes
    return message


def rule_of(body: bytes) -> Rule:
    """The rule in a message without its netlink header."""
    af, destination_length, source_length, _, table, _, _, action, _ = _RULE.unpack_from(body)
    found = dict(attributes(body, _RULE.size))
    actions: dict[int, RuleAction] = {number: name for name, number in _RULE_ACTIONS.items()}
    numbers = {name: _NUMBER.unpack(value)[0] for name, value in found.items() if len(value) == _NUMBER.size}
    suppress = numbers.get(_FRA_SUPPRESS_PREFIX, _NONE)

    def prefix(name: int, length: int) -> str | None:
        return f"{socket.inet_ntop(af, found[name])}/{length}" if name in found else None

    def text(name: int) -> str | None:
        return found[name].rstrip(b"\0").decode() if name in found else None

    return Rule(
        priority=numbers.get(_FRA_PRIORITY, 0),
        family=ip_family(af),
        action=actions.get(action, "other"),
        table=numbers.get(_FRA_TABLE, table),
        mark=numbers.get(_FRA_MARK),
        mask=numbers.get(_FRA_MASK, _NONE),
        iif=text(_FRA_IIF),
        source=prefix(_FRA_SRC, source_length),
        destination=prefix(_FRA_DST, destination_length),
        protocol=found[_FRA_PROTOCOL][0] if _FRA_PROTOCOL in found else 0,
        oif=text(_FRA_OIF),
        l3mdev=bool(found.get(_FRA_L3MDEV, b"\0")[0]),
        suppress=None if suppress == _NONE else suppress,
        body=body,
    )


def rule_selects_all(rule: Rule) -> bool:
    """Whether a rule holds for every packet."""
    head = _RULE.unpack_from(rule.body)
    names = {name for name, _ in attributes(rule.body, _RULE.size)}
    return not any(head[1:4]) and not head[8] & _INVERT and not names - _NOT_A_SELECTOR


def rule_suppresses_group(rule: Rule) -> bool:
    """Whether a rule leaves results out by the group of their interface."""
    return dict(attributes(rule.body, _RULE.size)).get(_FRA_SUPPRESS_GROUP, b"\xff" * 4) != b"\xff" * 4


def rule_like(body: bytes, priority: int, table: int, protocol: int, iif: str = "", oif: str = "") -> bytes:
    """A rule that selects what another one does, known here or not, and looks up another table."""
    head = list(_RULE.unpack_from(body))
    head[4], head[7], head[8] = 0, _RULE_ACTIONS["table"], head[8] & _INVERT
    kept = [attribute(n, value) for n, value in attributes(body, _RULE.size) if n not in _NOT_A_SELECTOR]
    kept += [attribute(_FRA_PRIORITY, _NUMBER.pack(priority)), attribute(_FRA_TABLE, _NUMBER.pack(table))]
    kept += [attribute(n, name.encode() + b"\0") for n, name in ((_FRA_IIF, iif), (_FRA_OIF, oif)) if name]
    return _RULE.pack(*head) + b"".join(kept) + attribute(_FRA_PROTOCOL, bytes([protocol]))
