"""Binding one port below 1024 without CAP_NET_BIND_SERVICE, by a program on this process's own control group.

What CAP_BPF and CAP_NET_ADMIN allow anyway: a program that the kernel asks about every bind() in a control group may
waive the check. Ours waives it for one port, and only while the context lasts; others of the same group keep the
kernel's own rule for every other port. Any thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pytools import directories
from pytools.errors import CapabilityError
from pytools.kernel.bpf import cgroups, syscall

_PROG_LOAD, _CGROUP_SOCK_ADDR = 5, 18
_BIND: Final = (8, 9)  # BPF_CGROUP_INET4_BIND, BPF_CGROUP_INET6_BIND
_NET_BIND_SERVICE: Final = 10
_USER_PORT: Final = 24  # in struct bpf_sock_addr; network byte order
_PLAIN, _WAIVED = 1, 3  # go on; and without the check of the capability
_FIRST_FREE: Final = Path("/proc/sys/net/ipv4/ip_unprivileged_port_start")


@contextlib.contextmanager
def allowed(port: int) -> Iterator[None]:
    """Let this process bind to a port in here, if only the capability is missing.

    Raises
    ------
    CapabilityError
        If it is needed and cannot be had.
    """
    if not needed(port):
        yield
        return
    with contextlib.ExitStack() as kept:
        try:
            group = os.open(own_group(), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            kept.callback(os.close, group)
            for kind in _BIND:
                program = _load(port, kind)
                kept.callback(os.close, program)
                attributes = struct.pack("<4I", program, group, kind, 0).ljust(48, b"\0")
                kept.callback(os.close, syscall.bpf(syscall.LINK_CREATE, attributes))
        except OSError as error:
            raise CapabilityError(
                f"port {port} may not be used: {error.strerror}",
                "grant CAP_NET_BIND_SERVICE, or set probe.port to 1024 or more on every host "
                f"({directories.page('service.md')})",
            ) from None
        yield


def needed(port: int) -> bool:
    """Whether the kernel would refuse this process the port."""
    try:
        first_free = int(_FIRST_FREE.read_text())
    except (OSError, ValueError):
        first_free = 1024
    if not 0 < port < first_free:
        return False
    held = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapEff:"))
    return not int(held.split()[1], 16) >> _NET_BIND_SERVICE & 1


def own_group() -> Path:
    """This process's control group, as far as it can be seen from here.

    Raises
    ------
    CapabilityError
        If no version 2 hierarchy is mounted.
    """
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    path = next((line[3:] for line in lines if line.startswith("0::")), "/")
    root = cgroups.root()
    own = root / path.lstrip("/")
    return own if own.is_dir() else root


def _load(port: int, kind: int) -> int:
    rows = (
        (0x61, 1, 1, _USER_PORT, 0),  # r1 = ctx->user_port
        (0xB7, 0, 0, 0, _PLAIN),
        (0x55, 1, 0, 1, socket.htons(port)),  # r1 is another port: leave
        (0xB7, 0, 0, 0, _WAIVED),
        (0x95, 0, 0, 0, 0),
    )
    code = b"".join(struct.pack("<BBhi", op, src << 4 | dst, offset, value) for op, dst, src, offset, value in rows)
    body, licence = ctypes.create_string_buffer(code, len(code)), ctypes.create_string_buffer(b"GPL")
    attributes = struct.pack("<2I2Q", _CGROUP_SOCK_ADDR, len(rows), syscall.address(body), syscall.address(licence))
    # expected_attach_type stands behind log, version, flags, name and interface
    return syscall.bpf(_PROG_LOAD, attributes.ljust(68, b"\0") + struct.pack("<I", kind))
