"""`swerve rdma tap -- CMD`: starts a command with the tap loaded into it, and builds the tap where it is missing.

The tap is a small library (bpf/tap.c) that the dynamic linker loads ahead of the application (LD_AUDIT). Children of
the command inherit it. Run as a module, this builds the library and does nothing else.
"""

from __future__ import annotations

import os
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final, NoReturn

from pytools import places
from pytools.errors import CapabilityError, SwerveError, UsageError
from pytools.kernel import netns as namespaces
from pytools.kernel.compiling import bpf_dir

LIBRARY: Final = "swerve-tap.so"
SOCKET_VARIABLE: Final = "SWERVE_TAP_SOCKET"
_FLAGS: Final = (
    *("-O2", "-g", "-std=gnu11", "-Wall", "-Wextra", "-Wno-unused-parameter"),
    *("-shared", "-fPIC", "-fvisibility=hidden"),
    *("-ffreestanding", "-fno-stack-protector", "-nostdlib"),  # it brings no C library into the application
)
_PACKAGES: Final = "apt-get install gcc libc6-dev libibverbs-dev"
_PT_INTERP: Final = 3
_LIBC: Final = (2, 35)  # earlier dynamic linkers slow all calls down where an auditor is, or do not ask it


def sources() -> list[Path]:
    """What the library is made of."""
    return [bpf_dir() / "tap.c", bpf_dir() / "swerve.h", *sorted((bpf_dir() / "tap").glob("*.h"))]


def is_built() -> bool:
    """Whether the library is there and newer than its sources."""
    library = bpf_dir() / LIBRARY
    return library.exists() and all(each.stat().st_mtime <= library.stat().st_mtime for each in sources())


def build(target: Path | None = None) -> Path:
    """Compile the library beside its sources, or elsewhere.

    Raises
    ------
    CapabilityError
        If there is no compiler, or no right to write there.
    SwerveError
        If the compiler fails.
    """
    target = target or bpf_dir() / LIBRARY
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise CapabilityError("the RDMA tap has to be built, and there is no C compiler", _PACKAGES)
    try:
        made, name = tempfile.mkstemp(dir=target.parent, prefix=".swerve-tap-")
    except OSError as error:
        raise CapabilityError(
            f"the RDMA tap has to be built in {target.parent}: {error.strerror}",
            f"run `{sys.executable} -m pytools.rdma_tap` as its owner",
        ) from None
    os.close(made)
    try:
        where = [f"-I{bpf_dir()}", f"-Wl,-soname,{LIBRARY}", "-o", name]
        command = [compiler, *_FLAGS, *where, str(bpf_dir() / "tap.c")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[-200:])
            raise SwerveError(f"the RDMA tap cannot be built: {first}", _PACKAGES)
        os.chmod(name, 0o755)
        os.replace(name, target)  # at once: applications may have the old one mapped
    finally:
        Path(name).unlink(missing_ok=True)
    return target


def library() -> Path:
    """Where the library is; built first when it is missing or older than its sources.

    Raises
    ------
    CapabilityError, SwerveError
        If it has to be built and cannot be.
    """
    return bpf_dir() / LIBRARY if is_built() else build()


def environment(netns: str | None = None) -> dict[str, str]:
    """This process's environment with the tap in it; auditors and a socket that are named already stay."""
    auditors = [str(library()), *filter(None, os.environ.get("LD_AUDIT", "").split(":"))]
    chosen = {SOCKET_VARIABLE: str(places.tap_socket(netns)), **os.environ}
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


if __name__ == "__main__":
    try:
        print(library())
    except SwerveError as failure:
        sys.exit(f"swerve: {failure}")
