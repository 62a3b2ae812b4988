"""Which kernel programs the sources want loaded. Light to import: the compiling child is started first thing."""

from __future__ import annotations

from typing import Final

from pytools.config import AgentConfig
from pytools.kernel.compiling import Program

TCP_FLOWS: Final = 16384
TCP_ENTRY: Final = "tcp_egress"
SAMPLE_EGRESS: Final = "sample_egress"
SAMPLE_INGRESS: Final = "sample_ingress"


def probes(config: AgentConfig) -> Program:
    """Stamps of probes."""
    defines = {"SWERVE_PROBE_PORT": config.probe.port, **virtual_clock(config)}
    return Program("stamp.c", ("stamp_egress", "stamp_ingress"), defines)


def samples(config: AgentConfig) -> Program:
    """Samples of application packets."""
    defines = {"SWERVE_PROBE_PORT": config.probe.port, **virtual_clock(config)}
    return Program("sample.c", (SAMPLE_EGRESS, SAMPLE_INGRESS), defines)


def virtual_clock(config: AgentConfig) -> dict[str, int]:
    """What a program that stamps is compiled with, so that a lab can give the host a clock of its own."""
    return {"SWERVE_VIRTUAL_CLOCK": 1} if config.virtual_clock else {}


def retransmissions(flows: int = TCP_FLOWS) -> Program:
    """TCP retransmissions, with room for so many flows."""
    return Program("tcp.c", (TCP_ENTRY,), {"SWERVE_TCP_FLOWS": flows})


def all_of(config: AgentConfig) -> list[Program]:
    """All programs of an agent."""
    # Samples are joined over the bus between hosts: without it they would serve nobody.
    sampled = [samples(config)] if config.samples.enabled and config.bus.key_file else []
    return [probes(config), retransmissions(), *sampled]
