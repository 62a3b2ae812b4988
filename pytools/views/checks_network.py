"""What `doctor` looks at for TCP, links, the spreading of flows, and RDMA: what each gap costs, and how to mend it.

Run in the network namespace that is examined. Everything is found out by trying, never by a version number.
"""

from __future__ import annotations

import ctypes.util
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from pytools.kernel import features, rdma_class, tracefs
from pytools.kernel.bpf import cgroups, uprobes
from pytools.kernel.features import Family, Finding
from pytools.kernel.native import TAP
from pytools.signals import RdmaSight
from pytools.views.check import Check, by_agent

_TRACEFS: Final = "mount -t tracefs tracefs /sys/kernel/tracing; if it is mounted, another kernel has the event"
_STATES: Final = (("tcp", "tcp_cong_state_set"), ("sock", "inet_sock_set_state"))
_PROVIDER_ROOMS: Final = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/local/lib", "/opt")
_CUSTOM: Final = "3"  # fib_multipath_hash_policy: by the fields that another setting names
_PORTS: Final = 0x30  # of these, both ports


def tcp() -> list[Check]:
    """What causes, timeouts and drops rest on."""
    return [
        Check(
            "TCP congestion states",
            False,
            "retransmitted segments are counted, but fast, RTO, TLP and SYN are not told apart",
            _TRACEFS,
            _congestion_states,
        ),
        Check(
            "control groups v2",
            False,
            "timeouts of connections that send nothing more are missed, and so is the end of a connection",
            "mount -t cgroup2 cgroup2 /sys/fs/cgroup (in a container: let it see the host's)",
            lambda: features.attempt(_control_groups),
        ),
        Check(
            "ports at connect()",
            False,
            "new IPv4 connections cannot avoid hidden ways (ports in a policy)",
            "Linux 5.8 and later with CONFIG_CGROUP_BPF, as root",
            features.connect_programs,
        ),
        Check(
            "IPv6 rehash",
            False,
            "IPv6 connections keep a way on which they time out",
            "sysctl net.ipv6.auto_flowlabels=1 net.core.txrehash=1",
            _rehash,
        ),
        Check(
            "MPTCP path manager",
            False,
            "MPTCP connections over IPv4 stay on hidden ways that are bad (ports.mptcp in a policy)",
            "Linux 5.19 and later; sysctl net.mptcp.pm_type=1, unless another path manager runs",
            _path_manager,
        ),
        Check(
            "drop reasons",
            False,
            "packets that the kernel drops are not counted: `swerve drops` has nothing to show",
            f"Linux 5.17 and later give reasons; {_TRACEFS}",
            _drop_reasons,
        ),
        Check(
            "drops by connection",
            False,
            "received packets that are dropped are counted by reason, but mostly without their connection",
            f"Linux 6.11 and later name the receiving socket; {_TRACEFS}",
            lambda: Finding("rx_sk" in tracefs.fields("skb", "kfree_skb")),
        ),
    ]


def _congestion_states() -> Finding:
    missing = [f"{system}:{event}" for system, event in _STATES if not tracefs.fields(system, event)]
    return Finding(not missing, f"no event {', '.join(missing)}" if missing else "")


def _control_groups() -> str:
    root = cgroups.root()
    own = Path("/proc/self/cgroup").read_text().strip().rpartition(":")[2]
    # In a namespace of control groups the root that is seen is not the machine's.
    return f"{root}, this process in {own}"


def _rehash() -> Finding:
    """By a new flow label: after a timeout, and with PLB at many marks. Both are left to work."""
    labels, rehash = features.setting("net.ipv6.auto_flowlabels"), features.setting("net.core.txrehash")
    plb = "on" if features.setting("net.ipv4.tcp_plb_enabled") == "1" else "off"
    return Finding(labels not in ("", "0") and rehash != "0", f"PLB {plb}")


def _path_manager() -> Finding:
    kind = features.setting("net.mptcp.pm_type")
    if features.setting("net.mptcp.enabled") != "1" or not kind:
        return Finding(False, "this kernel or namespace has no MPTCP with a path manager in user space")
    return Finding(kind == "1", f"net.mptcp.pm_type is {kind}")


def _drop_reasons() -> Finding:
    if "reason" not in tracefs.fields("skb", "kfree_skb"):
        return Finding(False, "no event skb:kfree_skb with a reason")
    return Finding(True, f"{len(tracefs.drop_reasons())} reasons")


def links() -> list[Check]:
    """What the figures of interfaces rest on."""
    return [
        Check(
            "driver statistics",
            False,
            "no pause frames, and none of the driver's own counters of drops: the kernel's counters remain",
            "nothing to mend where interfaces are virtual; else a driver that has them (ethtool -S)",
            _driver_statistics,
        )
    ]


def _driver_statistics() -> Finding:
    from pytools.kernel.ethtool import Ethtool

    names = [name for _, name in socket.if_nameindex() if name != "lo"]
    if not names:
        return Finding(None, "no interface but the loopback one")
    asked = Ethtool()
    try:
        counts = {name: asked.count(name) for name in names}
    finally:
        asked.close()
    said = ", ".join(f"{name} {count}" for name, count in counts.items() if count)
    return Finding(bool(said), said or f"none of {', '.join(names)}")


def hashing(name: str | None) -> list[Check]:
    """What the kernel spreads flows by, where a route has several ways; each family has a setting of its own."""

    def check(family: Family, called: str) -> Check:
        return Check(
            f"ECMP by ports, {called}",
            False,
            f"the kernel picks a way per pair of {called} addresses: all flows between two hosts share one",
            (f"ip netns exec {name} " if name else "") + f"sysctl -w {_hash_policy(family)}=1",
            lambda: _by_ports(family, called),
        )

    return [check("ipv4", "IPv4"), check("ipv6", "IPv6")]


def _hash_policy(family: str) -> str:
    return f"net.{family}.fib_multipath_hash_policy"


def _by_ports(family: Family, called: str) -> Finding:
    """Whether ports count; cannot be said of a family that has no routes."""
    policy = features.setting(_hash_policy(family))
    if not policy:
        return Finding(None, f"this kernel has no {_hash_policy(family)}")
    said = f"{_hash_policy(family)} is {policy}"
    fields = features.setting(f"net.{family}.fib_multipath_hash_fields") if policy == _CUSTOM else ""
    if policy == "1" or (fields and int(fields, 0) & _PORTS == _PORTS):
        return Finding(True, said)
    if not features.routed(family):
        return Finding(None, f"{said}, but there is no {called} route")
    return Finding(False, said + (f", with fields {fields}" if fields else ""))


def rdma(name: str | None) -> list[Check]:
    """What RDMA is seen with, and how."""
    return [
        Check(
            "RDMA devices",
            False,
            "there is no RDMA to watch: `swerve rdma` says so, everything else works",
            "an adapter with its driver; to try it on Ethernet: modprobe rdma_rxe, and "
            "rdma link add rxe0 type rxe netdev INTERFACE, where the kernel has Soft-RoCE",
            _rdma_devices,
        ),
        Check(
            "libibverbs",
            False,
            "no program of this host uses RDMA through verbs, so none is seen",
            "apt-get install libibverbs1 ibverbs-providers",
            _libibverbs,
        ),
        Check(
            "RDMA providers",
            False,
            "no library found in which probes could see work requests",
            "apt-get install ibverbs-providers, or the vendor's",
            _providers,
        ),
        Check(
            "uprobes",
            False,
            "processes that run already are not seen, only those started with `swerve rdma tap -- COMMAND`",
            "another kernel: CONFIG_UPROBE_EVENTS, and run as root",
            lambda: Finding(not uprobes.missing(), uprobes.missing()),
        ),
        Check(
            "RDMA tap",
            False,
            "programs that post a lot can be watched only through probes, which cost them microseconds a request",
            "the first `swerve rdma tap` builds it: apt-get install gcc libc6-dev libibverbs-dev",
            _tap,
        ),
        Check(
            "RDMA as the agent sees it",
            False,
            "no queue pair is counted",
            "what the detail above names",
            lambda: by_agent(name, RdmaSight, _seen),
        ),
    ]


def _rdma_devices() -> Finding:
    missing = rdma_class.absent()
    return Finding(not missing, missing or "; ".join(features.rdma_devices()))


def _libibverbs() -> Finding:
    found = ctypes.util.find_library("ibverbs")
    return Finding(found is not None, found or "not where the linker looks")


def _providers() -> Finding:
    found = sorted({path.name.partition("-rdmav")[0].removeprefix("lib") for path in _provider_files()})
    return Finding(bool(found), ", ".join(found) or "no lib*-rdmav*.so")


def _provider_files() -> Iterable[Path]:
    for room in map(Path, _PROVIDER_ROOMS):
        # Either in a directory of their own, or beside the library, by architecture or not.
        for pattern in ("libibverbs/*-rdmav*.so", "*/libibverbs/*-rdmav*.so", "lib*-rdmav*.so"):
            yield from room.glob(pattern)


def _tap() -> Finding:
    return Finding(TAP.is_built(), str(TAP.target))


def _seen(told: Iterator[RdmaSight]) -> Finding:
    """How the agent that runs sees each process."""
    sight = next(told, None)
    if sight is None:
        return Finding(None, "the agent says nothing of RDMA")
    if not sight.available:
        return Finding(False, sight.reason)
    seen = "; ".join(f"{process}: {how}" for process, how in sorted(sight.seen.items()))
    return Finding(True, seen or "no process uses it now")
