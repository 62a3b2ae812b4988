"""Bonds and their ports as routing netlink tells of them, and what ports a device hashes flows over. Pure."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pytools.kernel.netlink.socket import attribute

MODES: Final = ("balance-rr", "active-backup", "balance-xor", "broadcast", "802.3ad", "balance-tlb", "balance-alb")
POLICIES: Final = ("layer2", "layer3+4", "layer2+3", "encap2+3", "encap3+4", "vlan+srcmac")
LACP: Final = "802.3ad"
ACTIVE_BACKUP: Final = "active-backup"
ALWAYS: Final = "always"
_RESELECT: Final = (ALWAYS, "better", "failure")  # when a primary that works is selected again
_HASHING: Final = frozenset({"balance-xor", LACP})
_MII: Final = ("up", "going_down", "down", "going_up")  # BOND_LINK_*
# The state of a port as LACP has it (IEEE 802.1AX), from the lowest bit.
FLAGS: Final = (
    "activity", "timeout", "aggregation", "synchronization", "collecting", "distributing", "defaulted", "expired",
)  # fmt: skip
_LACP_BAD: Final = ("defaulted", "expired")  # nothing was heard from the partner, or not of late
_LACP_GOOD: Final = ("synchronization", "collecting", "distributing")
_MODE, _ACTIVE, _PRIMARY, _PRIMARY_RESELECT, _POLICY = 1, 2, 11, 12, 14  # IFLA_BOND_*
_STATE, _STATUS, _FAILURES, _QUEUE, _AGGREGATOR, _ACTOR, _PARTNER = 1, 2, 3, 5, 6, 7, 8  # IFLA_BOND_SLAVE_*
_U16, _U32 = struct.Struct("=H"), struct.Struct("=I")
_LINK_HEADER = struct.Struct("=BxHiII")  # family, hardware type, index, flags, changed flags
_LINKINFO, _INFO_KIND, _INFO_DATA = 18, 1, 2  # IFLA_LINKINFO, IFLA_INFO_*


@dataclass(frozen=True, slots=True)
class BondRow:
    mode: str
    policy: str  # by which it hashes; `layer2` and `vlan+srcmac` send all flows to a gateway by one port
    active: int  # index of the port in use; 0: none, or the mode has none
    primary: int = 0  # index of the port that is preferred; 0: none
    reselect: str = ALWAYS  # when that one is selected again: always, better, failure

    @property
    def hashes(self) -> bool:
        """Whether each flow has a port."""
        return self.mode in _HASHING


@dataclass(frozen=True, slots=True)
class PortRow:
    active: bool  # sends and receives; else it is a backup, or its LACP partner has not agreed
    status: str  # as the bond watches its link: up, going_down, down, going_up
    failures: int
    queue_id: int
    aggregator: int | None  # of 802.3ad
    actor: int | None  # flags of LACP: of this end
    partner: int | None  # of the other


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bond or team that hashes flows over its ports, and all that decides which flow takes which."""

    device: str
    policy: str
    ports: tuple[str, ...]
    states: tuple[object, ...]


def bond_of(options: Mapping[int, bytes]) -> BondRow:
    mode, policy = options.get(_MODE, b"\0")[0], options.get(_POLICY, b"\0")[0]
    active, primary = (_U32.unpack(options[each])[0] if each in options else 0 for each in (_ACTIVE, _PRIMARY))
    reselect = _named(_RESELECT, options.get(_PRIMARY_RESELECT, b"\0")[0])
    return BondRow(_named(MODES, mode), _named(POLICIES, policy), active, primary, reselect)


def selecting(bond: int, port: int) -> bytes:
    """The body of a link message that makes a port the active one of a bond; both by index."""
    info = attribute(_INFO_KIND, b"bond\0") + attribute(_INFO_DATA, attribute(_ACTIVE, _U32.pack(port)))
    return _LINK_HEADER.pack(0, 0, bond, 0, 0) + attribute(_LINKINFO, info)


def port_of(options: Mapping[int, bytes]) -> PortRow:
    aggregator = _U16.unpack(options[_AGGREGATOR])[0] if _AGGREGATOR in options else None
    return PortRow(
        active=options.get(_STATE, b"\0")[0] == 0,
        status=_named(_MII, options.get(_STATUS, b"\0")[0]),
        failures=_U32.unpack(options[_FAILURES])[0] if _FAILURES in options else 0,
        queue_id=_U16.unpack(options[_QUEUE])[0] if _QUEUE in options else 0,
        aggregator=aggregator,
        actor=options[_ACTOR][0] if _ACTOR in options else None,
        partner=_U16.unpack(options[_PARTNER])[0] if _PARTNER in options else None,
    )


def trouble(port: PortRow) -> str:
    """Why the bond cannot use a port, or not with LACP; empty: it can."""
    if port.status in ("down", "going_up"):
        return f"the bond takes its link for {port.status.replace('_', ' ')}"
    if port.aggregator is None:
        return ""
    ours, theirs = flags(port.actor), flags(port.partner)
    bad = [f"this end is {flag}" for flag in _LACP_BAD if flag in ours]
    bad += [f"this end is not {flag}" for flag in _LACP_GOOD if flag not in ours]
    bad += [f"the partner is not {flag}" for flag in _LACP_GOOD if flag not in theirs]
    return f"LACP: {', '.join(bad)}" if bad else ""


def flags(state: int | None) -> list[str]:
    """The names of a state's bits."""
    return [name for bit, name in enumerate(FLAGS) if (state or 0) & 1 << bit]


def _named(names: tuple[str, ...], number: int) -> str:
    return names[number] if number < len(names) else str(number)
