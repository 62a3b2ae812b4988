"""What this kernel and this process can do, found out by trying: never by a version number.

Nothing stays behind: objects live in descriptors that are closed, or in a network namespace that ends with a thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from pytools.errors import SwerveError
from pytools.kernel import privileges, rdma_class
from pytools.kernel.bpf import syscall

NVIDIA_DRIVER: Final = Path("/proc/driver/nvidia/version")  # there while it is loaded
NVML_PACKAGE: Final = "nvidia-ml-py"
ARRAY, RING_BUFFER = 2, 27  # enum bpf_map_type
_SCHED_CLS, _SOCK_ADDR = 3, 18  # enum bpf_prog_type
_CLONE_NEWNET, _NEW_NEXTHOP = 0x40000000, 104
_NO_WAY_6: Final = 0xC0000200  # RTF_LOCAL, RTF_ANYCAST, RTF_REJECT
_ON_LINK_6: Final = ("fe8", "ff")  # prefixes that every interface has: link-local and multicast
_libc = ctypes.CDLL(None, use_errno=True)

Family = Literal["ipv4", "ipv6"]  # as settings name them
Instruction = tuple[int, int, int, int, int]  # code, destination, source, offset, immediate
_EXIT: Final[Instruction] = (0x95, 0, 0, 0, 0)
_ZERO: Final[Instruction] = (0xB7, 0, 0, 0, 0)  # r0 = 0
NOTHING: Final[Sequence[Instruction]] = (_ZERO, _EXIT)
# What counting TCP segments at TC rests on: bpf_tcp_sock(bpf_sk_fullsock(skb->sk)).
TCP_SOCKET: Final[Sequence[Instruction]] = (
    _ZERO,
    (0x79, 1, 1, 168, 0),  # r1 = skb->sk
    (0x15, 1, 0, 5, 0),  # none: leave
    (0x85, 0, 0, 0, 95),  # bpf_sk_fullsock
    (0x15, 0, 0, 3, 0),
    (0xBF, 1, 0, 0, 0),  # r1 = r0
    (0x85, 0, 0, 0, 96),  # bpf_tcp_sock
    _ZERO,
    _EXIT,
)
# What choosing local ports at connect() rests on: bpf_bind, and which network namespace it is in.
CONNECT: Final[Sequence[Instruction]] = (
    (0xBF, 6, 1, 0, 0),  # r6 = r1
    (0x85, 0, 0, 0, 122),  # bpf_get_netns_cookie
    (0x7A, 10, 0, -16, 0),  # an address of zeros on the stack
    (0x7A, 10, 0, -8, 0),
    (0xBF, 1, 6, 0, 0),
    (0xBF, 2, 10, 0, 0),
    (0x07, 2, 0, 0, -16),
    (0xB7, 3, 0, 0, 16),
    (0x85, 0, 0, 0, 64),  # bpf_bind
    (0xB7, 0, 0, 0, 1),  # r0 = 1
    _EXIT,
)
# Whose namespace a packet's socket is of: bpf_get_netns_cookie(skb).
TCP_NAMESPACE: Final[Sequence[Instruction]] = ((0x85, 0, 0, 0, 122), _EXIT)


@dataclass(frozen=True)
class Finding:
    """Whether something is there (None: could not be tried), and what was seen."""

    present: bool | None
    detail: str = ""


def attempt(what: Callable[[], str]) -> Finding:
    """Present when the call returns (its words are the detail), missing when it raises (those of the error)."""
    try:
        return Finding(True, what())
    except SwerveError as error:
        return Finding(False, error.what)
    except OSError as error:
        return Finding(False, error.strerror or str(error))


def effective_capabilities() -> frozenset[str]:
    """Which of the capabilities that matter this process has."""
    mask = privileges.effective() or 0
    known = privileges.NEEDED | {each.capability: each.bit for each in privileges.LOST}
    return frozenset(name for name, bit in known.items() if mask >> bit & 1)


def mounted(kind: str, place: str) -> Finding:
    """Whether a file system of this kind is mounted there."""
    rows = (line.split() for line in Path("/proc/self/mounts").read_text().splitlines())
    there = any(row[1] == place and row[2] == kind for row in rows)
    return Finding(there, place if there else f"nothing of the kind on {place}")


def map_of(map_type: int, key_bytes: int, value_bytes: int, entries: int) -> Finding:
    """Whether the kernel makes such a map for us."""

    def make() -> str:
        attributes = struct.pack("<4I", map_type, key_bytes, value_bytes, entries).ljust(48, b"\0")
        os.close(syscall.bpf(syscall.MAP_CREATE, attributes))
        return ""

    return attempt(make)


def program(instructions: Sequence[Instruction], kind: int = _SCHED_CLS, attach: int = 0) -> Finding:
    """Whether the kernel loads such a program for us, at TC unless another kind is named."""

    def make() -> str:
        with loaded(instructions, kind, attach):
            return ""

    return attempt(make)


@contextlib.contextmanager
def loaded(instructions: Sequence[Instruction], kind: int = _SCHED_CLS, attach: int = 0) -> Iterator[int]:
    """Load a program for a while: its descriptor.

    Raises
    ------
    OSError
        If the kernel refuses it.
    """
    code = b"".join(
        struct.pack("<BBhi", op, source << 4 | destination, offset, immediate)
        for op, destination, source, offset, immediate in instructions
    )
    body, licence = ctypes.create_string_buffer(code, len(code)), ctypes.create_string_buffer(b"GPL")
    pointers = (syscall.address(body), syscall.address(licence))
    attributes = struct.pack("<2I2Q", kind, len(instructions), *pointers).ljust(68, b"\0")
    fd = syscall.bpf(syscall.PROG_LOAD, attributes + struct.pack("<I", attach))
    try:
        yield fd
    finally:
        os.close(fd)


def connect_programs() -> Finding:
    """Whether the kernel loads a program that chooses local ports at connect()."""
    return program(CONNECT, _SOCK_ADDR, syscall.CONNECT4)


def run_time_statistics() -> Finding:
    """Whether the kernel times programs for us."""

    def switch() -> str:
        os.close(syscall.enable_stats())
        return ""

    return attempt(switch)


def in_new_namespace(tries: Callable[[], dict[str, Finding]]) -> dict[str, Finding]:
    """Run tries in a network namespace of their own, which is gone when they are done.

    Raises
    ------
    OSError
        If this process may not make one.
    """
    found: dict[str, Finding] = {}
    errors: list[BaseException] = []

    def body() -> None:
        try:
            if _libc.unshare(_CLONE_NEWNET) != 0:
                code = ctypes.get_errno()
                raise OSError(code, f"no new network namespace: {os.strerror(code)}")
            found.update(tries())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body)  # the namespace is a property of the thread
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return found


def network() -> dict[str, Finding]:
    """What traffic control and routing can do here; makes objects, so run it in `in_new_namespace`."""
    from pyroute2 import IPRoute

    found = {}
    with IPRoute() as ip:
        ip.link("set", index=1, state="up")
        found["clsact"] = attempt(lambda: _attach("ingress", force_clsact=True, expected="clsact"))
        found["tcx"] = attempt(lambda: _attach("egress", force_clsact=False, expected="tcx"))
        shapers: tuple[tuple[str, dict[str, Any]], ...] = (
            ("tbf", {"rate": "10mbit", "burst": 10_000, "latency": "50ms"}),
            ("netem", {"delay": 1000}),
            ("fq", {}),
        )
        for kind, arguments in shapers:
            found[kind] = _qdisc(ip, kind, arguments)
    found.update(_nexthops())
    return found


def _attach(direction: Literal["ingress", "egress"], force_clsact: bool, expected: str) -> str:
    from pytools.kernel.bpf.attach import attach_tc

    with loaded(NOTHING) as fd, attach_tc(fd, "lo", direction, force_clsact) as attachment:
        if attachment.mechanism != expected:
            raise SwerveError(f"the kernel offers {attachment.mechanism} only")
    return ""


def _qdisc(ip: Any, kind: str, arguments: dict[str, object]) -> Finding:
    try:
        ip.tc("add", kind, 1, **arguments)
        ip.tc("del", index=1, parent=0xFFFFFFFF)
    except Exception as error:  # pyroute2 has several unrelated ones
        return Finding(False, str(error.args[-1]) if error.args else str(error))
    return Finding(True)


def _nexthops() -> dict[str, Finding]:
    from pytools.kernel.netlink.nexthops import group_message
    from pytools.kernel.netlink.routing import Member, Netlink, Nexthop
    from pytools.kernel.netlink.socket import CREATE, REPLACE

    members = [Member(1, 1), Member(2, 1)]
    with Netlink() as netlink:

        def objects() -> str:
            for each in (1, 2):
                netlink.replace_nexthop(Nexthop(each, 4, None, 1, 0))
            netlink.replace_group(3, members, protocol=0, create=True, kind="mpath")
            return ""

        def counts() -> str:
            group = netlink.group(3, stats=True)
            if group is None or any(member.packets is None for member in group.members):
                raise SwerveError("the kernel does not count packets per member")
            return ""

        def resilient() -> str:
            message = group_message(4, members, "resilient", 0)
            message["attrs"].append(("NHA_RES_GROUP", {"attrs": [("NHA_RES_GROUP_BUCKETS", 8)]}))
            netlink.socket.change(message, _NEW_NEXTHOP, REPLACE | CREATE, "making a resilient group")
            return ""

        names = {"nexthop_groups": objects, "nexthop_counts": counts, "resilient_groups": resilient}
        return {name: attempt(each) for name, each in names.items()}


def rdma_devices() -> list[str]:
    """RDMA devices, each with its link layer and whether packets pass the kernel."""
    devices = []
    for device in sorted(rdma_class.SYSFS.glob("*")):
        layers = {_read(port / "link_layer") for port in device.glob("ports/*")}
        soft = (device / "parent").exists()  # Soft-RoCE names the interface it sits on
        devices.append(f"{device.name} ({', '.join(sorted(layers))}, {'software' if soft else 'hardware'})")
    return devices


def clock_source() -> str:
    """The kernel's clock source by name."""
    return _read(Path("/sys/devices/system/clocksource/clocksource0/current_clocksource"))


def setting(name: str) -> str:
    """A kernel setting (sysctl) of the calling thread's namespace; empty when there is none of this name."""
    return _read(Path("/proc/sys", name.replace(".", "/")))


def routed(family: Family) -> bool:
    """Whether the calling thread's namespace has a route of this family that leads out of the host, and off one link.

    Of IPv4 only the main table is looked at. The lists are read no further than to the first that does.
    """
    leads, name = (_leads_4, "route") if family == "ipv4" else (_leads_6, "ipv6_route")
    try:
        with Path("/proc/thread-self/net", name).open() as lines:
            return any(leads(line.split()) for line in lines)
    except FileNotFoundError:  # a kernel without this family
        return False


def _leads_4(row: list[str]) -> bool:
    return row[0] not in ("Iface", "lo", "*")


def _leads_6(row: list[str]) -> bool:
    destination, flags, interface = row[0], int(row[8], 16), row[9]
    return interface != "lo" and not flags & _NO_WAY_6 and not destination.startswith(_ON_LINK_6)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
