"""Links, addresses, neighbours and policy rules: kernel bytes to frozen records and back.

Pure: no socket here.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pyroute2.netlink import nlmsg
from pyroute2.netlink.rtnl.fibmsg import fibmsg
from pyroute2.netlink.rtnl.ifaddrmsg import ifaddrmsg
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg
from pyroute2.netlink.rtnl.ndmsg import ndmsg

from pytools.kernel.netlink_messages import Family, ip_family, socket_family

RuleAction = Literal["table", "blackhole", "other"]

_IFF_UP, _IFF_RUNNING, _IFF_LOWER_UP = 0x1, 0x40, 0x10000
_RULE_ACTIONS: Mapping[RuleAction, int] = {"table": 1, "blackhole": 6}
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


@dataclass(frozen=True, slots=True)
class Link:
    """One interface."""

    index: int
    name: str
    up: bool  # administratively
    carrier: bool
    running: bool  # the kernel has taken notice of the carrier, too
    arphrd: int  # ARPHRD_*: 1 Ethernet, 772 loopback
    kind: str  # veth, vlan, …; empty for hardware
    mtu: int
    address: str  # link-layer
    carrier_downs: int = 0  # how often the carrier went, since the interface was made


@dataclass(frozen=True, slots=True)
class Address:
    """One address of an interface."""

    address: str
    prefix_length: int
    family: Family
    ifindex: int
    scope: int  # 0 global, 253 link, 254 host
    flags: int  # IFA_F_*

    @property
    def network(self) -> str:
        """The prefix the address is in."""
        return str(ipaddress.ip_network(f"{self.address}/{self.prefix_length}", strict=False))


@dataclass(frozen=True, slots=True)
class Neighbour:
    """One entry of the neighbour table."""

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


def link_of(message: ifinfmsg) -> Link:
    """The interface in a decoded message."""
    info = message.get_attr("IFLA_LINKINFO")
    return Link(
        index=message["index"],
        name=message.get_attr("IFLA_IFNAME"),
        up=bool(message["flags"] & _IFF_UP),
        carrier=bool(message["flags"] & _IFF_LOWER_UP),
        running=bool(message["flags"] & _IFF_RUNNING),
        arphrd=message["ifi_type"],
        kind=(info.get_attr("IFLA_INFO_KIND") if info is not None else None) or "",
        mtu=message.get_attr("IFLA_MTU", 0),
        address=message.get_attr("IFLA_ADDRESS", ""),
        carrier_downs=message.get_attr("IFLA_CARRIER_DOWN_COUNT", 0),
    )


def address_of(message: ifaddrmsg) -> Address:
    """The address in a decoded message."""
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
    """The entry in a decoded message."""
    return Neighbour(
        address=message.get_attr("NDA_DST", ""),
        family=ip_family(message["family"]),
        ifindex=message["ifindex"],
        link_address=message.get_attr("NDA_LLADDR"),
        state=_STATES.get(message["state"], f"0x{message['state']:x}"),
    )


def rule_message(rule: Rule) -> fibmsg:
    """The message that describes one rule."""
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
    for name, length, prefix in (
        ("FRA_SRC", "src_len", rule.source),
        ("FRA_DST", "dst_len", rule.destination),
    ):
        if prefix is not None:
            network = ipaddress.ip_network(prefix)
            message[length] = network.prefixlen
            attributes.append((name, str(network.network_address)))
    message["attrs"] = attributes
    return message


def rule_of(message: fibmsg) -> Rule:
    """The rule in a decoded message."""
    actions: dict[int, RuleAction] = {number: name for name, number in _RULE_ACTIONS.items()}
    return Rule(
        priority=message.get_attr("FRA_PRIORITY", 0),
        family=ip_family(message["family"]),
        action=actions.get(message["action"], "other"),
        table=message.get_attr("FRA_TABLE", message["table"]),
        mark=message.get_attr("FRA_FWMARK"),
        mask=message.get_attr("FRA_FWMASK", 0xFFFFFFFF),
        iif=message.get_attr("FRA_IIFNAME"),
        source=_prefix(message, "FRA_SRC", "src_len"),
        destination=_prefix(message, "FRA_DST", "dst_len"),
        protocol=message.get_attr("FRA_PROTOCOL", 0),
    )


def _prefix(message: nlmsg, name: str, length: str) -> str | None:
    address = message.get_attr(name)
    return None if address is None else f"{address}/{message[length]}"
