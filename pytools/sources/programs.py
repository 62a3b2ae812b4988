"""Which kernel programs the sources want loaded. Light to import: the compiling child is started first thing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Final

from pytools.config import AgentConfig, Tcp
from pytools.kernel import features, tracefs
from pytools.kernel.bpf.compiler_client import Kind, Program

OBSERVE_EGRESS: Final = "observe_egress"
OBSERVE_INGRESS: Final = "observe_ingress"
PROBE_EGRESS: Final = "probe_egress"
PROBE_INGRESS: Final = "probe_ingress"
TCP_EGRESS: Final = "tcp_egress"
TCP_INGRESS: Final = "tcp_ingress"
TCP_CALLBACKS: Final = "tcp_callbacks"
TCP_CREATED: Final = "tcp_created"
SAMPLE_EGRESS: Final = "sample_egress"
SAMPLE_INGRESS: Final = "sample_ingress"


@dataclass(frozen=True)
class Kernel:
    """What a kernel has, or not, that decides which programs are loaded, and with which constants."""

    congestion_states: bool  # events that tell them
    packet_namespaces: bool  # a program at TC may ask whose a packet is
    drop_reasons: bool
    drop_sockets: bool

    def lesser(self) -> Iterator[Kernel]:
        has = [(False, True) if getattr(self, each.name) else (False,) for each in fields(self)]
        return itertools.starmap(Kernel, itertools.product(*has))


def running() -> Kernel:
    dropped = tracefs.fields("skb", "kfree_skb")
    return Kernel(
        bool(tracefs.fields("tcp", "tcp_cong_state_set") and tracefs.fields("sock", "inet_sock_set_state")),
        features.program(features.TCP_NAMESPACE).present is True,
        "reason" in dropped,
        "rx_sk" in dropped,
    )


def probes(config: AgentConfig) -> Program:
    """Probes: pinned, stamped, reflected and matched."""
    defines = {"SWERVE_PROBE_PORT": config.probe.port, **virtual_clock(config)}
    return Program("probe.c", (PROBE_EGRESS, PROBE_INGRESS), defines)


def samples(config: AgentConfig) -> Program:
    defines = {"SWERVE_PROBE_PORT": config.probe.port, **virtual_clock(config)}
    return Program("sample.c", (SAMPLE_EGRESS, SAMPLE_INGRESS), defines)


def virtual_clock(config: AgentConfig) -> dict[str, int]:
    """What a program that stamps is compiled with, so that a lab can give the host a clock of its own."""
    return {"SWERVE_VIRTUAL_CLOCK": 1} if config.virtual_clock else {}


def tcp_connections(wanted: Tcp, kernel: Kernel | None = None) -> Program:
    """What TCP connections go through; without the events that tell a congestion state, causes are not told apart."""
    kernel = kernel or running()
    defines = {"SWERVE_TCP_FLOWS": wanted.flows}
    if kernel.congestion_states:
        defines["SWERVE_TCP_CONGESTION"] = 1
    if kernel.packet_namespaces:
        defines["SWERVE_TCP_NETNS_COOKIE"] = 1
    of_sockets: dict[str, Kind] = {TCP_CALLBACKS: "sock_ops"}
    if wanted.namespaces != "own":
        of_sockets[TCP_CREATED] = "sock"
    return Program("tcp.c", (TCP_EGRESS, TCP_INGRESS, *of_sockets), defines, of_sockets)


def packet_drops(kernel: Kernel | None = None) -> list[Program]:
    """Packets that the kernel drops, by reason; none where it gives no reasons."""
    kernel = kernel or running()
    defines = {"SWERVE_DROPS_RX_SK": 1} if kernel.drop_sockets else {}
    return [Program("drops.c", (), defines)] if kernel.drop_reasons else []


def observers(probing: Program, *others: Program) -> list[Program]:
    """Those that look at every packet, in the order of bpf/observe/chain.h, as one program per hook."""
    functions = [name for part in others for name in part.functions]
    defines = {name: value for part in (probing, *others) for name, value in part.defines.items()}
    kinds = {name: kind for part in others for name, kind in part.kinds.items()}
    if SAMPLE_EGRESS in functions:
        defines["SWERVE_OBSERVE_SAMPLED"] = 1
    chained = replace(probing, defines={**probing.defines, "SWERVE_CHAINED": 1})
    return [chained, Program("observe.c", (OBSERVE_EGRESS, OBSERVE_INGRESS, *functions), defines, kinds)]


def all_of(config: AgentConfig, kernel: Kernel | None = None) -> list[Program]:
    """All programs of an agent, on the running kernel unless another is described."""
    kernel = kernel or running()
    # Samples are joined over the bus between hosts: without it they would serve nobody.
    sampled = [samples(config)] if config.samples.enabled and config.bus.key_file else []
    return [*observers(probes(config), tcp_connections(config.tcp, kernel), *sampled), *packet_drops(kernel)]
