"""Which versions are at work here: kernel, swerve, bcc, iproute2. What is not there is empty."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from typing import Final

from pytools.errors import SwerveError

_ASK_S: Final = 10.0
# Where bcc says its version; found without importing it, which would load LLVM.
_BCC: Final = """
from importlib.util import find_spec
print(open(find_spec("bcc").submodule_search_locations[0] + "/version.py").read())
"""


def found() -> dict[str, str]:
    """Name -> version."""
    return {
        "kernel": os.uname().release,
        "swerve": _swerve(),
        "bcc": _bcc(),
        "iproute2": _of(["ip", "-V"], r"iproute2-([^\s,]+)"),
        "python": platform.python_version(),
    }


def text(versions: dict[str, str]) -> str:
    """In a line, the kernel first, without its name."""
    others = [f"{name} {version}" for name, version in versions.items() if name != "kernel" and version]
    return ", ".join([versions["kernel"], *others])


def _swerve() -> str:
    try:
        return importlib.metadata.version("swerve")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _bcc() -> str:
    from pytools.kernel.bpf.loader import interpreter

    try:
        return _of([interpreter(), "-c", _BCC], r"['\"]([^'\"]+)['\"]")
    except SwerveError:
        return ""


def _of(command: list[str], pattern: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    match = re.search(pattern, done.stdout)
    return match[1] if match and done.returncode == 0 else ""
