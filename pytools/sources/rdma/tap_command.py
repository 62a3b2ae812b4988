"""`swerve rdma tap -- CMD`: starts a command with the tap loaded into it, and builds the tap where it is missing.

The tap is a small library (tap/) that the dynamic linker loads ahead of the application (LD_AUDIT). Children of
the command inherit it.
"""

from __future__ import annotations

import os
import shutil
import stat
import struct
import sys
from pathlib import Path
from typing import Final, NoReturn

from pytools import directories
from pytools.errors import CapabilityError, UsageError
from pytools.kernel import netns as namespaces
from pytools.kernel.native import TAP

SOCKET_VARIABLE: Final = "SWERVE_TAP_SOCKET"
_PT_INTERP: Final = 3
_LIBC: Final = (2, 35)  # earlier dynamic linkers slow all calls down where an auditor is, or do not ask it


def environment(netns: str | None = None) -> dict[str, str]:
    """This process's environment with the tap in it; auditors and a socket that are named already stay."""
    auditors = [str(TAP.ready()), *filter(None, os.environ.get("LD_AUDIT", "").split(":"))]
    chosen = {SOCKET_VARIABLE: str(directories.tap_socket(netns)), **os.environ}
    return {**chosen, "LD_AUDIT": ":".join(dict.fromkeys(auditors))}


def run(arguments: list[str], netns: str | None = None) -> NoReturn:
    """Become the command, with the tap loaded into it, in the network namespace if one is named.

    Raises
    ------
    UsageError
        If there is no such command, or the dynamic linker would not load the tap into it.
    """
    if not arguments:
        raise UsageError("no command is given", "write it after --: swerve rdma tap -- ib_write_bw -d mlx5_0")
    command = shutil.which(arguments[0])
    if command is None:
        raise UsageError(f"there is no command {arguments[0]}")
    _check(command)
    chosen = environment(netns)
    if not Path(chosen[SOCKET_VARIABLE]).exists():
        name = f" -n {netns}" if netns else ""
        print(
            f"swerve: no agent serves {chosen[SOCKET_VARIABLE]}; {Path(command).name} runs all the same, and is counted"
            f" once `swerve agent{name}` runs and it opens another device or queue pair",
            file=sys.stderr,
        )
    if netns is not None:
        namespaces.enter(netns)
    os.execve(command, arguments, chosen)


def _check(command: str) -> None:
    """Refuse what would run without the tap and not say so."""
    name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "another C library").partition(" ")
    if name != "glibc" or tuple(map(int, version.split(".")[:2])) < _LIBC:
        raise CapabilityError(f"the tap needs glibc 2.35 or newer; here is {name} {version}", "let uprobes see it")
    if os.stat(command).st_mode & (stat.S_ISUID | stat.S_ISGID) and os.geteuid() != 0:
        raise UsageError(f"{command} changes its user: the dynamic linker loads no tap into it", "run it as that user")
    if _is_static(Path(command)):
        raise UsageError(f"{command} is linked statically: no tap can be loaded into it", "let uprobes see it")


def _is_static(path: Path) -> bool:
    """Whether a file is a 64-bit program that names no dynamic linker."""
    with path.open("rb") as file:
        header = file.read(64)
        if len(header) < 64 or header[:5] != b"\x7fELF\x02":
            return False  # a script: its interpreter is what counts
        at, size, count = struct.unpack_from("<Q", header, 32)[0], *struct.unpack_from("<2H", header, 54)
        file.seek(at)
        table = file.read(size * count)
    kinds = [struct.unpack_from("<I", table, index * size)[0] for index in range(count)]
    return _PT_INTERP not in kinds
