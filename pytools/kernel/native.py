"""C of ours that runs in user space: compiled beside its source, when it is missing or older than that.

Run as a module, this builds what has to be and does nothing else. Reads no clock. Any thread.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pytools.errors import CapabilityError, SwerveError
from pytools.kernel.bpf.compiler_client import bpf_dir

_FLAGS: Final = ("-O2", "-g", "-std=gnu11", "-Wall", "-Wextra")


@dataclass(frozen=True)
class Native:
    """A program or library of ours."""

    what: str  # how an error names it
    source: Path  # what is compiled
    target: Path  # what it becomes
    parts: Sequence[Path] = ()  # what the source includes
    flags: Sequence[str] = ()  # for the compiler, besides those for all
    packages: str = "apt-get install gcc libc6-dev"  # what a host lacks on which it cannot be built

    def is_built(self) -> bool:
        """Whether it is there and newer than its sources."""
        try:
            built_s = self.target.stat().st_mtime
        except FileNotFoundError:
            return False
        return all(each.stat().st_mtime <= built_s for each in (self.source, *self.parts))

    def ready(self) -> Path:
        """Where it is; built first when it is missing or older than its sources.

        Raises
        ------
        CapabilityError, SwerveError
            If it has to be built and cannot be.
        """
        return self.target if self.is_built() else self.build()

    def build(self, target: Path | None = None) -> Path:
        """Compile it beside its source, or elsewhere.

        Raises
        ------
        CapabilityError
            If there is no compiler, or no right to write there.
        SwerveError
            If the compiler fails.
        """
        target = target or self.target
        compiler = shutil.which(os.environ.get("CC", "cc"))
        if compiler is None:
            raise CapabilityError(f"{self.what} has to be built, and there is no C compiler", self.packages)
        try:
            made, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}-")
        except OSError as error:
            raise CapabilityError(
                f"{self.what} has to be built in {target.parent}: {error.strerror}",
                f"run `{sys.executable} -m pytools.kernel.native` as its owner",
            ) from None
        os.close(made)
        try:
            command = [compiler, *_FLAGS, *self.flags, "-o", name, str(self.source)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                lines = done.stderr.splitlines()
                first = next((line for line in lines if "error" in line), done.stderr.strip()[-200:])
                raise SwerveError(f"{self.what} cannot be built: {first}", self.packages)
            os.chmod(name, 0o755)
            os.replace(name, target)  # at once: a process may have the old one mapped
        finally:
            Path(name).unlink(missing_ok=True)
        return target


_SOURCES: Final = Path(__file__).parents[1] / "sources"
_TAP: Final = _SOURCES / "rdma/tap"
_PROBING: Final = _SOURCES / "probing"
_NCCL: Final = _SOURCES / "jobs/nccl"

TAP: Final = Native(
    what="the RDMA tap",
    source=_TAP / "tap.c",
    target=_TAP / "swerve-tap.so",
    parts=(bpf_dir() / "swerve.h", *sorted(_TAP.glob("*.h"))),
    flags=(
        *("-Wno-unused-parameter", f"-I{bpf_dir()}", "-shared", "-fPIC", "-fvisibility=hidden"),
        "-Wl,-soname,swerve-tap.so",
        *("-ffreestanding", "-fno-stack-protector", "-nostdlib"),  # it brings no C library into the application
    ),
    packages="apt-get install gcc libc6-dev libibverbs-dev",
)
PACER: Final = Native(
    what="the process that sends probes",
    source=_PROBING / "pacer.c",
    target=_PROBING / "swerve-pacer",
    parts=(bpf_dir() / "swerve.h",),
    flags=(f"-I{bpf_dir()}",),
)
NCCL: Final = Native(
    what="the profiler plugin for NCCL",
    source=_NCCL / "plugin.c",
    target=_NCCL / "libnccl-profiler-swerve.so",
    parts=tuple(sorted(_NCCL.glob("*.h"))),
    flags=(
        *("-Wno-unused-parameter", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread"),
        *("-Wl,-soname,libnccl-profiler-swerve.so", "-Wl,-z,nodelete"),  # its thread outlives the last communicator
    ),
)
ALL: Final = (TAP, PACER, NCCL)


if __name__ == "__main__":
    try:
        for each in ALL:
            print(each.ready())
    except SwerveError as failure:
        sys.exit(f"swerve: {failure}")
