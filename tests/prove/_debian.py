"""Packages of Debian's that a proof needs and the machine shall not have: fetched with apt, unpacked, not installed."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

_KEYRING: Final = "/usr/share/keyrings/debian-archive-keyring.gpg"


def unpacked(folder: Path, suite: str, choose: Callable[[str], Sequence[str]]) -> Path:
    """Fetch packages into a directory and unpack them there; where.

    Parameters
    ----------
    folder : Path
        The directory; what was unpacked in it before is used again.
    suite : str
        Of the Debian archive.
    choose : callable
        Names the packages, from the names and titles of all kernels that there are.
    """
    root = folder / "root"
    if root.is_dir():
        return root
    for part in ("state/lists/partial", "cache/archives/partial"):
        (folder / part).mkdir(parents=True)
    (folder / "sources.list").write_text(f"deb [signed-by={_KEYRING}] http://deb.debian.org/debian {suite} main\n")
    settings = {
        "Dir::Etc::sourcelist": folder / "sources.list",
        "Dir::Etc::sourceparts": "-",
        "Dir::State": folder / "state",
        "Dir::State::status": "/var/lib/dpkg/status",
        "Dir::Cache": folder / "cache",
        "APT::Sandbox::User": "root",
    }
    options = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
    run("apt-get", "-q", *options, "update", cwd=folder)
    kernels = run("apt-cache", *options, "search", "--names-only", "^linux-image-.*-amd64$", cwd=folder)
    run("apt-get", "-q", *options, "download", *choose(kernels), cwd=folder)
    for package in folder.glob("*.deb"):
        run("dpkg-deb", "-x", str(package), str(root), cwd=folder)
    return root


def run(*words: str, cwd: Path) -> str:
    """What a command that succeeds writes."""
    return subprocess.run(words, cwd=cwd, check=True, stdout=subprocess.PIPE, text=True).stdout
