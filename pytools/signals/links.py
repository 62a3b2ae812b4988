"""Interfaces with their queues and pause frames, and what they do to paths: events, packet sizes, ECN marks."""

from __future__ import annotations

from typing import Literal

import msgspec

from pytools.signals.base import Path, Signal


class Qdisc(msgspec.Struct, frozen=True):
    """One queue discipline of an interface."""

    kind: str  # as tbf or fq
    handle: str  # as in `tc qdisc`
    parent: str  # as in `tc qdisc`
    backlog_bytes: int  # queued now
    backlog_packets: int  # queued now
    drops: int  # since its creation, as the next two (`tc -s qdisc`)
    overlimits: int  # held back because of the rate
    requeues: int  # returned by the driver


class Pause(msgspec.Struct, frozen=True):
    """Pause frames of one priority (None: of the whole link) since the driver was loaded."""

    priority: int | None  # 0 to 7; null: the whole link
    received: int | None = None  # frames
    sent: int | None = None  # frames
    received_duration_us: int | None = None  # how long the peer paused us
    sent_duration_us: int | None = None  # how long we paused the peer


class BondPort(msgspec.Struct, frozen=True):
    """What an interface is as a port of a bond."""

    mode: str  # of the bond, as balance-xor or 802.3ad
    policy: str  # by which the bond hashes flows
    active: bool  # sends and receives; else it is a backup, or of another aggregator
    status: str  # of the link as the bond watches it: up, going_down, down, going_up
    trouble: str  # why the bond cannot use it, or LACP has not agreed; empty: nothing is wrong
    failures: int  # how often the bond has lost it
    queue_id: int  # queue of the bond that is mapped to this port; 0: none
    aggregator: int | None = None  # of 802.3ad, as the next two
    # what LACP (IEEE 802.1AX) says of this end: activity, timeout, aggregation, synchronization, collecting,
    # distributing, defaulted, expired
    actor: list[str] = msgspec.field(default_factory=list)
    partner: list[str] = msgspec.field(default_factory=list)  # the same of the other end
    preferred: bool = False  # the bond selects it again whenever it can: its primary, with primary_reselect always


class LinkCounters(msgspec.Struct, frozen=True):
    """The kernel's counters of an interface."""

    received_bytes: int  # as in `ip -s link`
    received_packets: int  # as in `ip -s link`
    received_errors: int  # as in `ip -s link`
    received_drops: int  # as in `ip -s link`
    sent_bytes: int  # as in `ip -s link`
    sent_packets: int  # as in `ip -s link`
    sent_errors: int  # as in `ip -s link`
    sent_drops: int  # without drops of its queue


class Link(Signal, frozen=True, kw_only=True, tag="link"):
    """One interface that carries paths, or the packets of one that does.

    Once per long window with a subscriber, and at once after an event.
    """

    interface: str  # name
    # of a port of a bond or team, or of what a VLAN is made on: the interface above it that has paths; else empty
    upper: str = ""
    bond: str = ""  # the bond or team that it is, is a port of, or whose ports its packets leave by; empty: none
    port: BondPort | None = None  # of a bond; null: it is none, or of a team, of which the kernel reports nothing
    paths: list[Path]  # that it carries
    window_ns: int
    up: bool  # administratively up
    carrier: bool  # has a carrier
    carrier_changes: int  # since the interface was created; if it grows, a cable, an optic or a port is failing
    mtu_bytes: int  # largest IP packet
    speed_mbps: int | None  # by the driver; null if it reports none
    counters: LinkCounters  # since the interface was created
    window: LinkCounters  # within the window
    qdiscs: list[Qdisc]  # its queue disciplines
    pauses: list[Pause]  # pause frames
    failed_neighbours: list[str]  # gateways and on-link peers that do not answer ARP or neighbour discovery
    driver: dict[str, int]  # `ethtool` statistics of errors that are not zero, by the driver's names


LinkEventKind = Literal[
    "carrier_lost",
    "carrier_found",
    "flap",
    "queue_full",
    "neighbour_failed",
    "neighbour_reachable",
    "mtu_changed",
    "mtu_mismatch",
    "mtu_agrees",
    "ce_marked",
    "pause_storm",
    "gid_changed",
    "port_down",
    "port_up",
    "bond_port_lost",
    "bond_port_found",
    "removed",
]


class LinkEvent(Signal, frozen=True, kw_only=True, tag="link_event"):
    """An event of an interface, or of a path over it.

    Once.
    """

    interface: str  # affected
    paths: list[Path]  # affected
    # the event
    what: LinkEventKind
    happened_ns: int  # CLOCK_MONOTONIC
    detail: str  # a sentence for people
    values: dict[str, int]  # its numbers by name


class PathMtu(Signal, frozen=True, kw_only=True, tag="path_mtu"):
    """The largest packet that passes a path, there and back.

    Once per long window and path.
    """

    path: Path
    interface_mtu_bytes: int  # of its interface
    works_bytes: int | None  # largest IP packet that came back; null before one has
    fails_bytes: int | None  # smallest that did not, while smaller ones did; null if none failed
    told_bytes: int | None  # path MTU reported by a router or this kernel
    told_by: str  # its address
    state: Literal["agrees", "mismatch", "unknown"]  # whether full-size packets pass


class PathEcn(Signal, frozen=True, kw_only=True, tag="path_ecn"):
    """Marks on packets from the peer of `path`, as they arrived by one interface.

    Once per long window and path.
    """

    path: Path
    window_ns: int
    packets: int  # ECN-capable (ECT or CE) within the window
    ce_packets: int  # of these, marked: the share that met a queue above its threshold
    total_packets: int  # since the agent started
    total_ce_packets: int  # since the agent started
