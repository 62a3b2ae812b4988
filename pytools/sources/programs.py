"""Which kernel programs the sources want loaded. Light to import: the compiling child is started first thing."""

from __future__ import annotations

from typing import Final

from pytools.config import AgentConfig
from pytools.kernel.compiling import Program

TCP_FLOWS: Final = 16384
TCP_ENTRY: Final = "tcp_egress"


def probes(config: AgentConfig) -> Program:
    """Stamps of probes."""
    return Program("stamp.c", ("stamp_egress", "stamp_ingress"), {"SWERVE_PROBE_PORT": config.probe.port})


def retransmissions(flows: int = TCP_FLOWS) -> Program:
    """TCP retransmissions, with room for so many flows."""
    return Program("tcp.c", (TCP_ENTRY,), {"SWERVE_TCP_FLOWS": flows})


def all_of(config: AgentConfig) -> list[Program]:
    """All programs of an agent."""
    return [probes(config), retransmissions()]
