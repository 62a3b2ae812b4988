"""Faults of a rail that a kernel program makes at its ports (bpf/lab_faults.c): attached, counted, removed.

They are classic TC filters, not TCX links: a filter stays when the process that made it ends, and goes with its
interface, so nothing has to run while a fault lasts, and `down` takes it away with the namespaces.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from pyroute2.netlink import nla, nlmsg

from pytools.errors import SwerveError, UsageError
from pytools.kernel.bpf import attach, loader, syscall
from pytools.kernel.bpf.maps import Map
from pytools.kernel.netlink.routing import Netlink
from pytools.kernel.netns import inside
from pytools.lab.topology import Port, Rail


class TrafficControl:
    """`struct tcmsg`, to be inherited beside `nlmsg` by a message that adds its attributes.

    Not a message itself: what inherits from one is given the attribute table that was compiled for it.
    """

    prefix = "TCA_"
    fields = (
        ("family", "B"),
        ("pad1", "B"),
        ("pad2", "H"),
        ("index", "i"),
        ("handle", "I"),
        ("parent", "I"),
        ("info", "I"),
    )


MARK: Final = "lab_mark"
NARROW: Final = "lab_narrow"
LOSE: Final = "lab_lose"
RANDOM: Final = "lab_random"
COUNTERS: Final = {  # by enum swerve_lab_counter
    MARK: {"able": 0, "marked": 1},
    NARROW: {"too_long": 2},
    LOSE: {"lost": 3},
    RANDOM: {"lost_at_random": 4},
}

_GET_FILTER = 46
_EGRESS = 0xFFFFFFF3
_PROGRAM_BY_ID, _MAP_BY_ID, _INFO = 13, 14, 15  # commands of bpf(2)
_PROGRAM_INFO = struct.Struct("=II8sIIQQQII Q16s")  # the beginning of struct bpf_prog_info


class FilterMessage(TrafficControl, nlmsg):  # type: ignore[misc]
    """`struct tcmsg` with what a BPF filter says of its program."""

    nla_map = (("TCA_UNSPEC", "none"), ("TCA_KIND", "asciiz"), ("TCA_OPTIONS", "options"))

    class options(nla):  # type: ignore[misc]  # noqa: N801 (pyroute2 looks the name up)
        nla_map = (
            ("TCA_BPF_UNSPEC", "none"),
            ("TCA_BPF_ACT", "cdata"),
            ("TCA_BPF_POLICE", "cdata"),
            ("TCA_BPF_CLASSID", "uint32"),
            ("TCA_BPF_OPS_LEN", "uint16"),
            ("TCA_BPF_OPS", "cdata"),
            ("TCA_BPF_FD", "uint32"),
            ("TCA_BPF_NAME", "asciiz"),
            ("TCA_BPF_FLAGS", "uint32"),
            ("TCA_BPF_FLAGS_GEN", "uint32"),
            ("TCA_BPF_TAG", "cdata"),
            ("TCA_BPF_ID", "uint32"),
        )


def install(
    rail: Rail,
    ports: Sequence[Port],
    program: str,
    defines: Mapping[str, int],
    directions: Sequence[attach.Direction] = ("egress",),
) -> None:
    """Attach a program, compiled with these constants, where ports send (and receive).

    Raises
    ------
    UsageError
        If one of the ports has this fault already.
    SwerveError
        If the program cannot be loaded or attached.
    """
    if any(found == program for found, _ in programs(rail, ports)):
        raise UsageError(f"rail {rail.number} has this fault already", f"`swerve lab heal --rail {rail.number}` first")
    with loader.load([loader.Program("lab_faults.c", (program,), dict(defines))]) as loaded, inside(rail.netns):
        if loaded.failed:
            raise SwerveError(f"the fault cannot be loaded: {loaded.failed}", "`swerve doctor` says what is missing")
        for port in ports:
            for direction in directions:
                attach.attach_tc(loaded.programs[program], port.name, direction, force_clsact=True)


def remove(rail: Rail) -> None:
    """Take all programs from a rail's ports."""
    if programs(rail, rail.ports):
        with inside(rail.netns):
            attach.clean()


def counts(rail: Rail) -> dict[str, int]:
    """What the faults of a rail have done so far, by counter; empty when it has none."""
    found: dict[str, int] = {}
    for program, map_id in programs(rail, rail.ports):
        fd = _open(_MAP_BY_ID, map_id)
        try:
            values = Map("lab_counts", fd, np.dtype("<u4"), np.dtype("<u8")).read_percpu_sum().tolist()
        finally:
            os.close(fd)
        for name, index in COUNTERS[program].items():
            found[name] = found.get(name, 0) + values[index]
    return found


def has(rail: Rail, port: Port, program: str) -> bool:
    return any(name == program for name, _ in programs(rail, [port]))


def programs(rail: Rail, ports: Sequence[Port]) -> set[tuple[str, int]]:
    """Name and counters' map of every program of ours at these ports; all are at egress, whether or not at ingress."""
    found = set()
    with Netlink(rail.netns) as netlink:
        for port in ports:
            message = FilterMessage()
            message["index"], message["parent"] = port.index, _EGRESS
            for each in netlink.socket.dump(message, _GET_FILTER, f"reading the filters of {port.name}"):
                options = each.get_attr("TCA_OPTIONS")
                number = options.get_attr("TCA_BPF_ID") if options is not None else None
                if number is not None:
                    found.add(_described(number))
    return {(name, map_id) for name, map_id in found if name in COUNTERS}


def _described(program_id: int) -> tuple[str, int]:
    fd = _open(_PROGRAM_BY_ID, program_id)
    try:
        maps = ctypes.create_string_buffer(4)
        asked = _PROGRAM_INFO.pack(0, 0, b"", 0, 0, 0, 0, 0, 0, 1, syscall.address(maps), b"")
        info = ctypes.create_string_buffer(asked, len(asked))
        syscall.bpf(_INFO, struct.pack("<IIQ", fd, len(asked), syscall.address(info)))
        name = _PROGRAM_INFO.unpack(info.raw)[-1].rstrip(b"\0").decode()
        return name, int.from_bytes(maps.raw, "little")
    finally:
        os.close(fd)


def _open(command: int, number: int) -> int:
    return syscall.bpf(command, struct.pack("<III", number, 0, 0))
