"""What `doctor` finds of this kernel: whether programs load, and what of TCP, routes and the clock there is.

Run in the network namespace that is examined.
"""

from __future__ import annotations

import ctypes
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pytools.errors import SwerveError
from pytools.kernel import features, tracefs
from pytools.kernel.bpf import cgroups
from pytools.kernel.features import Family, Finding

if TYPE_CHECKING:
    from pytools.kernel.bpf.loader import Cache, Program

_STATES: Final = (("tcp", "tcp_cong_state_set"), ("sock", "inet_sock_set_state"))
FAMILIES: Final[dict[Family, str]] = {"ipv4": "IPv4", "ipv6": "IPv6"}
_CUSTOM: Final = "3"  # fib_multipath_hash_policy: by the fields that another setting names
_PORTS: Final = 0x30  # of these, both ports
_TIMEX_BYTES, _TIME_ERROR = 208, 5


def compiler() -> str:
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


def can_compile() -> Cache:
    """Without a compiler there are the programs in the cache."""
    return "avoid" if features.attempt(compiler).present else "only"


def loaded(programs: Sequence[Program], cache: Cache) -> str:
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


def network() -> Mapping[str, Finding]:
    """What a network namespace made for this can do."""
    try:
        return features.in_new_namespace(features.network)
    except OSError as error:
        why = Finding(None, f"cannot be tried: {error.strerror}")
        return defaultdict(lambda: why)


def congestion_states() -> Finding:
    missing = [f"{system}:{event}" for system, event in _STATES if not tracefs.fields(system, event)]
    return Finding(not missing, f"no event {', '.join(missing)}" if missing else "")


def control_groups() -> str:
    root = cgroups.root()
    own = Path("/proc/self/cgroup").read_text().strip().rpartition(":")[2]
    # In a namespace of control groups the root that is seen is not the machine's.
    return f"{root}, this process in {own}"


def rehash() -> Finding:
    """By a new flow label: after a timeout, and with PLB at many marks. Both are left to work."""
    labels, rehash = features.setting("net.ipv6.auto_flowlabels"), features.setting("net.core.txrehash")
    plb = "on" if features.setting("net.ipv4.tcp_plb_enabled") == "1" else "off"
    return Finding(labels not in ("", "0") and rehash != "0", f"PLB {plb}")


def path_manager() -> Finding:
    kind = features.setting("net.mptcp.pm_type")
    if features.setting("net.mptcp.enabled") != "1" or not kind:
        return Finding(False, "this kernel or namespace has no MPTCP with a path manager in user space")
    return Finding(kind == "1", f"net.mptcp.pm_type is {kind}")


def drop_reasons() -> Finding:
    if "reason" not in tracefs.fields("skb", "kfree_skb"):
        return Finding(False, "no event skb:kfree_skb with a reason")
    return Finding(True, f"{len(tracefs.drop_reasons())} reasons")


def hash_policy(family: str) -> str:
    return f"net.{family}.fib_multipath_hash_policy"


def by_ports(family: Family) -> Finding:
    """Whether ports count; cannot be said of a family that has no routes."""
    policy = features.setting(hash_policy(family))
    if not policy:
        return Finding(None, f"this kernel has no {hash_policy(family)}")
    said = f"{hash_policy(family)} is {policy}"
    fields = features.setting(f"net.{family}.fib_multipath_hash_fields") if policy == _CUSTOM else ""
    if policy == "1" or (fields and int(fields, 0) & _PORTS == _PORTS):
        return Finding(True, said)
    if not features.routed(family):
        return Finding(None, f"{said}, but there is no {FAMILIES[family]} route")
    return Finding(False, said + (f", with fields {fields}" if fields else ""))


def system_clock() -> Finding:
    """The kernel's own word on whether somebody sets the clock; read only."""
    state = int(ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES)))
    if state < 0:
        return Finding(None, os.strerror(ctypes.get_errno()))
    return Finding(state != _TIME_ERROR, "nobody sets it" if state == _TIME_ERROR else "synchronised, says the kernel")
