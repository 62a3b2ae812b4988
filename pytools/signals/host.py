"""The machine: packets that its kernel dropped, and what the agent costs and loses."""

from __future__ import annotations

import msgspec

from pytools.signals.base import Signal


class DropReason(msgspec.Struct, frozen=True):
    """Packets dropped for one reason."""

    reason: str  # the running kernel's name; `other` for numbers beyond the table
    window_packets: int  # within the window
    total_packets: int  # since the agent started


class PacketDrops(Signal, frozen=True, kw_only=True, tag="packet_drops"):
    """Packets that this machine's kernel dropped, in all network namespaces, by reason.

    Once per long window. `NO_SOCKET` and `NOT_SPECIFIED` are normal. `QDISC_DROP` is a full queue of this host,
    `SOCKET_RCVBUFF` an application that does not read, `NETFILTER_DROP` a firewall. Drops in switches are not among
    them.
    """

    window_ns: int
    reasons: list[DropReason]  # those that have occurred


class ProgramCost(msgspec.Struct, frozen=True):
    """Run-time statistics of one BPF program."""

    name: str  # of the BPF program
    runs: int  # while statistics were on
    run_time_ns: int | None  # of these runs; null if the kernel refuses statistics


class Self(Signal, frozen=True, kw_only=True, tag="self"):
    """Cost and losses of the agent.

    Once a second with a subscriber.
    """

    cpu_share: float  # CPU time of the agent and its pacer, of one core
    window_ns: int
    resident_bytes: int  # memory of both
    probe_bytes_per_s: float  # probes and answers on the wire, both directions, with headers
    programs: list[ProgramCost]  # run times of the BPF programs
    drops: dict[str, int]  # every counter of something lost, refused or not understood, zero or not
    failed: dict[str, str]  # kernel hooks that are not attached, each with the reason
