"""What `doctor` looks at: each thing that may be missing, what its lack costs, how to mend it, and how it is found."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pytools import directories
from pytools.doctor import agent, devices, kernel
from pytools.kernel import features, privileges, tracefs
from pytools.kernel.bpf import uprobes
from pytools.kernel.features import NVML_PACKAGE, Finding
from pytools.kernel.native import PACER, TAP
from pytools.signals import PathLiveness, RdmaSight, Self

if TYPE_CHECKING:
    from pytools.kernel.bpf.loader import Program

_GOOD_CLOCKS: Final = {"tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page"}
_ROOT: Final = "run as root"
_IMPORT: Final = "`swerve cache export` on a host with a compiler, and `swerve cache import` here"
_OTHER_KERNEL: Final = "no setting mends it: another kernel does"
_TRACEFS: Final = "mount -t tracefs tracefs /sys/kernel/tracing; if it is mounted, another kernel has the event"


@dataclass(frozen=True)
class Check:
    """One thing that may be missing."""

    name: str
    costs: str  # what is lost without it
    mend: str
    find: Callable[[], Finding]
    essential: bool = False


def checks(name: str | None, config: Path | None, programs: Sequence[Program]) -> list[Check]:
    """Everything that is looked at, in the order in which a missing one explains the next."""
    held = features.effective_capabilities()
    privileged, lost = agent.privileges_of(name)
    tried = functools.cache(kernel.network)

    def holds(capability: str) -> Callable[[], Finding]:
        return lambda: Finding(capability in held)

    def can(what: str) -> Callable[[], Finding]:
        return lambda: tried()[what]

    def attempt(what: Callable[[], str]) -> Callable[[], Finding]:
        return lambda: features.attempt(what)

    return [
        Check("CAP_BPF", "no program can be loaded: nothing is measured", _ROOT, holds("CAP_BPF"), essential=True),
        Check(
            "CAP_PERFMON",
            "programs that read packets are refused: nothing is measured",
            _ROOT,
            holds("CAP_PERFMON"),
            essential=True,
        ),
        Check(
            "CAP_NET_ADMIN",
            "no program can be attached, no route changed",
            _ROOT,
            holds("CAP_NET_ADMIN"),
            essential=True,
        ),
        Check("CAP_NET_RAW", "no probe can be sent", _ROOT, holds("CAP_NET_RAW"), essential=True),
        Check(
            "CAP_SYS_ADMIN",
            "no namespaces (lab, -n), no run-time statistics, no tracepoint formats",
            _ROOT,
            holds("CAP_SYS_ADMIN"),
        ),
        Check(
            "compiler",
            "no program can be compiled: only those in the program cache are loaded",
            "apt-get install python3-bpfcc linux-libc-dev, and make the virtual environment with "
            f"--system-site-packages (PyPI's bcc is another package); or {_IMPORT}",
            attempt(kernel.compiler),
        ),
        Check(
            "zenoh",
            "agents cannot talk to each other: no clock is compared with another host's, no application delays",
            "pip install eclipse-zenoh",
            lambda: Finding(importlib.util.find_spec("zenoh") is not None),
        ),
        Check(
            "pacer",
            "no probe is sent: the agent does not start",
            f"the first agent builds it: {PACER.packages}",
            lambda: Finding(PACER.is_built(), str(PACER.target)),
            essential=True,
        ),
        Check(
            "tracefs",
            "causes of TCP retransmissions are not told apart, and dropped packets not counted",
            "mount -t tracefs tracefs /sys/kernel/tracing",
            lambda: features.mounted("tracefs", "/sys/kernel/tracing"),
        ),
        Check(
            "bpffs",
            "nothing yet: no program of this version is pinned",
            "mount -t bpf bpf /sys/fs/bpf",
            lambda: features.mounted("bpf", "/sys/fs/bpf"),
        ),
        Check(
            "bpf system call",
            "nothing is measured",
            "run as root; a container needs CAP_BPF and a seccomp profile that allows bpf",
            lambda: features.map_of(features.ARRAY, 4, 8, 1),
            essential=True,
        ),
        Check(
            "ring buffer",
            "no probe's record reaches user space: nothing is measured",
            _OTHER_KERNEL,
            lambda: features.map_of(features.RING_BUFFER, 0, 0, os.sysconf("SC_PAGE_SIZE")),
            essential=True,
        ),
        Check(
            "TC programs",
            "no probe can be sent, answered or stamped",
            _OTHER_KERNEL,
            lambda: features.program(features.NOTHING),
            essential=True,
        ),
        Check(
            "TCP sockets at TC",
            "nothing of TCP is counted",
            _OTHER_KERNEL,
            lambda: features.program(features.TCP_SOCKET),
        ),
        Check(
            "run-time statistics",
            "`swerve self` cannot say what a program costs per packet",
            _ROOT,
            features.run_time_statistics,
        ),
        Check(
            "our programs",
            "what the failed program measures stays unknown",
            "report it with the detail above",
            attempt(lambda: kernel.loaded(programs, kernel.can_compile())),
            essential=True,
        ),
        Check(
            "program cache",
            "the next start compiles what is missing (a core for a second, 230 MB), or goes without it",
            f"the next start keeps what it compiles; or {_IMPORT}",
            attempt(lambda: kernel.loaded(programs, "only")),
        ),
        Check(
            "clsact",
            "no program can be attached where there is no TCX",
            "modprobe sch_ingress cls_bpf",
            can("clsact"),
            essential=True,
        ),
        Check(
            "TCX",
            "clsact is used: a killed agent leaves its filters behind until the next start or `doctor --clean`",
            "Linux 6.6 and later have it",
            can("tcx"),
        ),
        Check(
            "nexthop groups",
            "traffic cannot be steered by weights",
            _OTHER_KERNEL,
            can("nexthop_groups"),
            essential=True,
        ),
        Check(
            "packet counts per nexthop",
            "that an act had its effect cannot be read from the kernel's own counts",
            "Linux 6.9 and later have them",
            can("nexthop_counts"),
        ),
        Check(
            "resilient groups",
            "changing weights also moves some flows that could have stayed",
            "Linux 5.13 and later have them",
            can("resilient_groups"),
        ),
        Check("TBF", "the lab cannot shape its rails (nothing else needs it)", "modprobe sch_tbf", can("tbf")),
        Check("netem", "tests that want loss or delay made to order are skipped", "modprobe sch_netem", can("netem")),
        Check("fq", "senders cannot be paused (no version of swerve does so yet)", "modprobe sch_fq", can("fq")),
        Check(
            "TCP congestion states",
            "retransmitted segments are counted, but fast, RTO, TLP and SYN are not told apart",
            _TRACEFS,
            kernel.congestion_states,
        ),
        Check(
            "control groups v2",
            "timeouts of connections that send nothing more are missed, and so is the end of a connection",
            "mount -t cgroup2 cgroup2 /sys/fs/cgroup (in a container: let it see the host's)",
            attempt(kernel.control_groups),
        ),
        Check(
            "ports at connect()",
            "new IPv4 connections cannot avoid hidden ways (ports in a policy)",
            "Linux 5.8 and later with CONFIG_CGROUP_BPF, as root",
            features.connect_programs,
        ),
        Check(
            "IPv6 rehash",
            "IPv6 connections keep a way on which they time out",
            "sysctl net.ipv6.auto_flowlabels=1 net.core.txrehash=1",
            kernel.rehash,
        ),
        Check(
            "MPTCP path manager",
            "MPTCP connections over IPv4 stay on hidden ways that are bad (ports.mptcp in a policy)",
            "Linux 5.19 and later; sysctl net.mptcp.pm_type=1, unless another path manager runs",
            kernel.path_manager,
        ),
        Check(
            "drop reasons",
            "packets that the kernel drops are not counted: `swerve drops` has nothing to show",
            f"Linux 5.17 and later give reasons; {_TRACEFS}",
            kernel.drop_reasons,
        ),
        Check(
            "drops by connection",
            "received packets that are dropped are counted by reason, but mostly without their connection",
            f"Linux 6.11 and later name the receiving socket; {_TRACEFS}",
            lambda: Finding("rx_sk" in tracefs.fields("skb", "kfree_skb")),
        ),
        Check(
            "driver statistics",
            "no pause frames, and none of the driver's own counters of drops: the kernel's counters remain",
            "nothing to mend where interfaces are virtual; else a driver that has them (ethtool -S)",
            devices.driver_statistics,
        ),
        Check(
            "RDMA devices",
            "there is no RDMA to watch: `swerve rdma` says so, everything else works",
            "an adapter with its driver; to try it on Ethernet: modprobe rdma_rxe, and "
            "rdma link add rxe0 type rxe netdev INTERFACE, where the kernel has Soft-RoCE",
            devices.rdma_devices,
        ),
        Check(
            "libibverbs",
            "no program of this host uses RDMA through verbs, so none is seen",
            "apt-get install libibverbs1 ibverbs-providers",
            devices.libibverbs,
        ),
        Check(
            "RDMA providers",
            "no library found in which probes could see work requests",
            "apt-get install ibverbs-providers, or the vendor's",
            devices.providers,
        ),
        Check(
            "uprobes",
            "processes that run already are not seen, only those started with `swerve rdma tap -- COMMAND`",
            "another kernel: CONFIG_UPROBE_EVENTS, and run as root",
            lambda: Finding(not uprobes.missing(), uprobes.missing()),
        ),
        Check(
            "RDMA tap",
            "programs that post a lot can be watched only through probes, which cost them microseconds a request",
            "the first `swerve rdma tap` builds it: apt-get install gcc libc6-dev libibverbs-dev",
            lambda: Finding(TAP.is_built(), str(TAP.target)),
        ),
        Check(
            "RDMA as the agent sees it",
            "no queue pair is counted",
            "what the detail above names",
            lambda: agent.by_agent(name, RdmaSight, agent.rdma_seen),
        ),
        Check(
            "GPUs",
            "`swerve gpu` shows nothing, and no verdict on a job names a slow GPU",
            f"what the detail names: NVIDIA's driver, or pip install {NVML_PACKAGE}",
            devices.gpus,
        ),
        Check(
            "privileges of the agent",
            "; ".join(each.what for each in lost),
            "nothing to mend if that can be spared; else add AmbientCapabilities= and CapabilityBoundingSet= with "
            f"{', '.join(each.capability for each in lost)} to its unit ({directories.page('service.md')})",
            lambda: privileged,
        ),
        Check(
            "priority of the agent",
            "where applications take all processors its probes are read late, and failover takes longer",
            f"start it as root, or with Nice={privileges.NICE} in its unit ({directories.page('service.md')})",
            lambda: agent.priority(name),
        ),
        Check(
            "agents of the peers",
            "a peer's kernel answers probes while its agent hangs: that host then measures and steers nothing",
            "look at its service: `systemctl status swerve-agent`, or `swerve doctor` there",
            lambda: agent.by_agent(name, PathLiveness, agent.peers),
        ),
        Check(
            "one key for probes",
            "between hosts that do not share the key no probe is answered or believed: their paths are silent",
            "let bus.key_file hold the same key on all hosts, and restart their agents "
            f"({directories.page('probes.md')}, with a cluster key)",
            lambda: agent.by_agent(name, Self, agent.keys),
        ),
        Check(
            "no others at TC",
            "a program that decides about a packet before ours hides it from ours, and one that changes it changes "
            "what is measured",
            "`bpftool net show` has their order: let them return TCX_NEXT (TC_ACT_UNSPEC), or attach after swerve",
            lambda: agent.others_at_tc(name, config),
        ),
        Check(
            "system clock",
            "the time of day in the records of several hosts cannot be laid side by side (delays do not rest on it)",
            "apt-get install chrony, or another time service",
            kernel.system_clock,
        ),
        Check(
            "clock source",
            "reading the clock is slow: stamps cost more, and scatter more",
            "echo tsc > /sys/devices/system/clocksource/clocksource0/current_clocksource, if the host offers it",
            lambda: Finding(features.clock_source() in _GOOD_CLOCKS, features.clock_source() or "unknown"),
        ),
        *(_by_ports(name, family, called) for family, called in kernel.FAMILIES.items()),
        Check(
            "RDMA through TC",
            "RDMA on hardware bypasses TC: it is neither timed nor moved here",
            "nothing mends it; its Ethernet traffic is still seen",
            devices.rdma_through_tc,
        ),
        Check(
            "configuration",
            "`swerve agent` does not start",
            f"write it ({directories.page('config.md')}), or name one with --config",
            attempt(lambda: agent.configured(name, config)),
        ),
        Check(
            "agent",
            "nothing is being measured now",
            "swerve agent" + (f" -n {name}" if name else ""),
            attempt(lambda: agent.served(name)),
        ),
    ]


def _by_ports(name: str | None, family: features.Family, called: str) -> Check:
    """What the kernel spreads flows by, where a route has several ways; each family has a setting of its own."""
    return Check(
        f"ECMP by ports, {called}",
        f"the kernel picks a way per pair of {called} addresses: all flows between two hosts share one",
        (f"ip netns exec {name} " if name else "") + f"sysctl -w {kernel.hash_policy(family)}=1",
        lambda: kernel.by_ports(family),
    )
