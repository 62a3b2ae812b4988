"""What `doctor` looks at: each thing that may be missing, what its lack costs, and how to mend it.

Everything is found out by trying (pytools/kernel/features.py), never by a version number.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pytools import config as configuration
from pytools import directories
from pytools.errors import SwerveError
from pytools.ipc.client import Client
from pytools.kernel import features
from pytools.kernel.features import Finding
from pytools.kernel.native import PACER
from pytools.views import checks_agent, checks_gpu, checks_network
from pytools.views.check import Check

if TYPE_CHECKING:
    from pytools.kernel.bpf.loader import Cache, Program

_GOOD_CLOCKS: Final = {"tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page"}
_ROOT: Final = "run as root"
_IMPORT: Final = "`swerve cache export` on a host with a compiler, and `swerve cache import` here"
_OTHER_KERNEL: Final = "no setting mends it: another kernel does"


def checks(name: str | None, config: Path | None, programs: Sequence[Program]) -> list[Check]:
    """Everything that is looked at, in the order in which a missing one explains the next."""
    return [
        *_privileges(),
        *_tools(),
        *_kernel(programs),
        *_network(),
        *checks_network.tcp(),
        *checks_network.links(),
        *checks_network.rdma(name),
        *checks_gpu.checks(),
        *checks_agent.checks(name, config),
        *_surroundings(name, config),
    ]


def _privileges() -> list[Check]:
    held = features.effective_capabilities()

    def capability(name: str, essential: bool, costs: str) -> Check:
        return Check(name, essential, costs, _ROOT, lambda: Finding(name in held))

    return [
        capability("CAP_BPF", True, "no program can be loaded: nothing is measured"),
        capability("CAP_PERFMON", True, "programs that read packets are refused: nothing is measured"),
        capability("CAP_NET_ADMIN", True, "no program can be attached, no route changed"),
        capability("CAP_NET_RAW", True, "no probe can be sent"),
        capability("CAP_SYS_ADMIN", False, "no namespaces (lab, -n), no run-time statistics, no tracepoint formats"),
    ]


def _tools() -> list[Check]:
    return [
        Check(
            "compiler",
            False,
            "no program can be compiled: only those in the program cache are loaded",
            "apt-get install python3-bpfcc linux-libc-dev, and make the virtual environment with "
            f"--system-site-packages (PyPI's bcc is another package); or {_IMPORT}",
            lambda: features.attempt(_compiler),
        ),
        Check(
            "zenoh",
            False,
            "agents cannot talk to each other: no clock is compared with another host's, no application delays",
            "pip install eclipse-zenoh",
            lambda: Finding(importlib.util.find_spec("zenoh") is not None),
        ),
        Check(
            "pacer",
            True,
            "no probe is sent: the agent does not start",
            f"the first agent builds it: {PACER.packages}",
            lambda: Finding(PACER.is_built(), str(PACER.target)),
        ),
        Check(
            "tracefs",
            False,
            "causes of TCP retransmissions are not told apart, and dropped packets not counted",
            "mount -t tracefs tracefs /sys/kernel/tracing",
            lambda: features.mounted("tracefs", "/sys/kernel/tracing"),
        ),
        Check(
            "bpffs",
            False,
            "nothing yet: no program of this version is pinned",
            "mount -t bpf bpf /sys/fs/bpf",
            lambda: features.mounted("bpf", "/sys/fs/bpf"),
        ),
    ]


def _compiler() -> str:
    """What compiles programs here.

    Raises
    ------
    SwerveError
        If nothing does.
    """
    from pytools.kernel.bpf import cache_key, compiler_client

    asked = compiler_client.Program("probe.c", ()).request
    found = cache_key.inputs(asked, str(compiler_client.bpf_dir()), compiler_client.bcc_package())
    if not found.compiler:
        raise SwerveError(found.lacking)
    return f"{compiler_client.interpreter()}, {', '.join(found.compiler['libraries'])}"


def _kernel(programs: Sequence[Program]) -> list[Check]:
    return [
        Check(
            "bpf system call",
            True,
            "nothing is measured",
            "run as root; a container needs CAP_BPF and a seccomp profile that allows bpf",
            lambda: features.map_of(features.ARRAY, 4, 8, 1),
        ),
        Check(
            "ring buffer",
            True,
            "no probe's record reaches user space: nothing is measured",
            _OTHER_KERNEL,
            lambda: features.map_of(features.RING_BUFFER, 0, 0, os.sysconf("SC_PAGE_SIZE")),
        ),
        Check(
            "TC programs",
            True,
            "no probe can be sent, answered or stamped",
            _OTHER_KERNEL,
            lambda: features.program(features.NOTHING),
        ),
        Check(
            "TCP sockets at TC",
            False,
            "nothing of TCP is counted",
            _OTHER_KERNEL,
            lambda: features.program(features.TCP_SOCKET),
        ),
        Check(
            "run-time statistics",
            False,
            "`swerve self` cannot say what a program costs per packet",
            _ROOT,
            features.run_time_statistics,
        ),
        Check(
            "our programs",
            True,
            "what the failed program measures stays unknown",
            "report it with the detail above",
            lambda: features.attempt(lambda: _loaded(programs, _can_compile())),
        ),
        Check(
            "program cache",
            False,
            "the next start compiles what is missing (a core for a second, 230 MB), or goes without it",
            f"the next start keeps what it compiles; or {_IMPORT}",
            lambda: features.attempt(lambda: _loaded(programs, "only")),
        ),
    ]


def _can_compile() -> Cache:
    """Without a compiler there are the programs in the cache."""
    return "avoid" if features.attempt(_compiler).present else "only"


def _loaded(programs: Sequence[Program], cache: Cache) -> str:
    """Compile and load what the agent loads, or only load it from the cache; attach nothing.

    Raises
    ------
    SwerveError
        If one of them cannot be loaded; says which, and why.
    """
    from pytools.kernel.bpf.loader import load

    with load(programs, cache) as loaded:
        if loaded.failed:
            raise SwerveError("; ".join(f"{name}: {why}" for name, why in sorted(loaded.failed.items())))
        return ", ".join(sorted(loaded.programs))


def _network() -> list[Check]:
    @functools.cache
    def tried() -> Mapping[str, Finding]:
        try:
            return features.in_new_namespace(features.network)
        except OSError as error:
            why = Finding(None, f"cannot be tried: {error.strerror}")
            return dict.fromkeys(_NETWORK, why)

    def find(key: str) -> Callable[[], Finding]:
        return lambda: tried()[key]

    return [Check(*described, find(key)) for key, described in _NETWORK.items()]


# Key of features.network() -> name, essential, costs, mend.
_NETWORK: Final[Mapping[str, tuple[str, bool, str, str]]] = {
    "clsact": ("clsact", True, "no program can be attached where there is no TCX", "modprobe sch_ingress cls_bpf"),
    "tcx": (
        "TCX",
        False,
        "clsact is used: a killed agent leaves its filters behind until the next start or `doctor --clean`",
        "Linux 6.6 and later have it",
    ),
    "nexthop_groups": ("nexthop groups", True, "traffic cannot be steered by weights", _OTHER_KERNEL),
    "nexthop_counts": (
        "packet counts per nexthop",
        False,
        "that an act had its effect cannot be read from the kernel's own counts",
        "Linux 6.9 and later have them",
    ),
    "resilient_groups": (
        "resilient groups",
        False,
        "changing weights also moves some flows that could have stayed",
        "Linux 5.13 and later have them",
    ),
    "tbf": ("TBF", False, "the lab cannot shape its rails (nothing else needs it)", "modprobe sch_tbf"),
    "netem": ("netem", False, "tests that want loss or delay made to order are skipped", "modprobe sch_netem"),
    "fq": ("fq", False, "senders cannot be paused (no version of swerve does so yet)", "modprobe sch_fq"),
}


def _surroundings(name: str | None, config: Path | None) -> list[Check]:
    return [
        Check(
            "clock source",
            False,
            "reading the clock is slow: stamps cost more, and scatter more",
            "echo tsc > /sys/devices/system/clocksource/clocksource0/current_clocksource, if the host offers it",
            lambda: Finding(features.clock_source() in _GOOD_CLOCKS, features.clock_source() or "unknown"),
        ),
        *checks_network.hashing(name),
        Check(
            "RDMA through TC",
            False,
            "RDMA on hardware bypasses TC: it is neither timed nor moved here",
            "nothing mends it; its Ethernet traffic is still seen",
            _rdma,
        ),
        Check(
            "configuration",
            False,
            "`swerve agent` does not start",
            f"write it ({directories.page('config.md')}), or name one with --config",
            lambda: features.attempt(lambda: _configured(name, config)),
        ),
        Check(
            "agent",
            False,
            "nothing is being measured now",
            "swerve agent" + (f" -n {name}" if name else ""),
            lambda: features.attempt(lambda: served(name)),
        ),
    ]


def _rdma() -> Finding:
    devices = features.rdma_devices()
    return Finding(not any("hardware" in each for each in devices), "; ".join(devices) or "no RDMA devices")


def _configured(name: str | None, config: Path | None) -> str:
    place = config or directories.default_config(name)
    loaded, hints = configuration.read(place)
    return "; ".join([f"{place}: host {loaded.host}, {len(loaded.peers)} peers", *hints])


def served(name: str | None) -> str:
    """The socket on which an agent answers.

    Raises
    ------
    SwerveError
        If none does.
    """
    with Client(directories.agent_socket(name), frozenset()):
        return str(directories.agent_socket(name))
