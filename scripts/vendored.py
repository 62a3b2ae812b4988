#!/usr/bin/env python3
"""The Python packages inside the Debian package: which, and how they get there.

    python scripts/vendored.py

writes packaging/vendored.ARCHITECTURE.txt anew: what swerve depends on, at the versions of this environment, which are
those that the tests ran with, each wheel with its hash. Wheels are unpacked as published; nothing is installed.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from email.message import Message
from importlib import metadata
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT: Final = Path(__file__).resolve().parent.parent
# What the tests, too, take from Debian (the environment sees the system's packages): name -> Debian package.
FROM_DEBIAN: Final[Mapping[str, str]] = {"pyyaml": "python3-yaml"}
_PIP: Final = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")
_HEAD: Final = "# Made by scripts/vendored.py: what the tests ran with. Each wheel is unpacked as published.\n"


def architecture() -> str:
    """Debian's name of this machine's."""
    return subprocess.run(
        ["dpkg", "--print-architecture"], stdout=subprocess.PIPE, text=True, check=True
    ).stdout.strip()


def lock_file(arch: str) -> Path:
    """Where the versions and hashes for an architecture are."""
    return ROOT / "packaging" / f"vendored.{arch}.txt"


def locked(text: str) -> dict[str, str]:
    """Name -> version, of the text of a lock file."""
    return {canonicalize_name(name): version for name, version in re.findall(r"^(\S+)==(\S+)", text, re.MULTILINE)}


def needed(distribution: metadata.Distribution, extras: Iterable[str] = ()) -> Iterator[Requirement]:
    """What a distribution requires here, with these extras of it."""
    active = ("", *extras)
    for text in distribution.requires or ():
        found = Requirement(text)
        if found.marker is None or any(found.marker.evaluate({"extra": extra}) for extra in active):
            yield found


def wanted() -> list[Requirement]:
    """What pyproject.toml asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [Requirement(each) for each in project["dependencies"]]


def closure(requirements: Iterable[Requirement]) -> dict[str, metadata.Distribution]:
    """What of this environment satisfies these, and all that it needs in turn, by name."""
    found: dict[str, metadata.Distribution] = {}
    waiting = list(requirements)
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        each = waiting.pop()
        key = canonicalize_name(each.name), frozenset(each.extras)
        if key in seen:
            continue
        seen.add(key)
        found[key[0]] = metadata.distribution(each.name)
        waiting += needed(found[key[0]], each.extras)
    return found


def missing(site: Path) -> list[str]:
    """What the packages in a directory need and is neither there nor Debian's, in the wanted version."""
    there = {canonicalize_name(each.name): each for each in metadata.distributions(path=[str(site)])}
    wrong = []
    for name, distribution in sorted(there.items()):
        for requirement in needed(distribution):
            other = canonicalize_name(requirement.name)
            if other in FROM_DEBIAN:
                continue
            if other not in there or not requirement.specifier.contains(there[other].version, prereleases=True):
                has = there[other].version if other in there else "none"
                wrong.append(f"{name} needs {requirement}, here is {has}")
    return wrong


def fetch(arch: str, target: Path) -> list[Path]:
    """The locked wheels, from the package index, each checked against its hash.

    Raises
    ------
    SystemExit
        If there is no lock for this architecture, or a wheel cannot be had or is another one.
    """
    lock = lock_file(arch)
    if not lock.exists():
        raise SystemExit(f"{lock.relative_to(ROOT)} is missing; make it with: scripts/vendored.py")
    _pip("download", "--no-deps", "--require-hashes", "--only-binary=:all:", f"--dest={target}", f"-r{lock}")
    return sorted(target.glob("*.whl"))


def unpack(wheel: Path, site: Path) -> None:
    """Put a wheel's files where Python finds them.

    Raises
    ------
    SystemExit
        If it has files that belong elsewhere, or would write outside.
    """
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if re.match(r"[^/]+\.data/", name) or name.startswith("/") or ".." in name.split("/"):
                raise SystemExit(f"{wheel.name}: {name} does not go below site-packages, and nothing is known for it")
        archive.extractall(site)


def described(site: Path) -> str:
    """Name, version, licence and its text's place of every package there but ours."""
    lines = []
    for each in sorted(metadata.distributions(path=[str(site)]), key=lambda each: canonicalize_name(each.name)):
        if each.name != "swerve":
            lines += [f"{each.name} {each.version}", f"  License: {licence(each.metadata)}", f"  {_place(each)}", ""]
    return "\n".join(lines)


def licence(facts: Message) -> str:
    """The licence as the metadata tell it, in whichever of the ways that there are."""
    classified = [each.rpartition(" :: ")[2] for each in facts.get_all("Classifier") or () if "License ::" in each]
    text = facts.get("License-Expression") or ", ".join(classified) or facts.get("License") or "see its text"
    return text.splitlines()[0]


def _place(distribution: metadata.Distribution) -> str:
    info = next(each for each in distribution.files or () if each.name == "METADATA")
    return f"/usr/lib/swerve/lib/python3.{sys.version_info.minor}/site-packages/{info.parent}"


def _pip(*arguments: str) -> None:
    done = subprocess.run([*_PIP, *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.stderr.write(done.stderr)
        raise SystemExit("the wheels cannot be had: is the package index reachable?")


def main() -> int:
    """Write the lock anew."""
    lines = []
    for name, each in sorted(closure(wanted()).items()):
        if name in FROM_DEBIAN:
            continue
        with tempfile.TemporaryDirectory() as directory:
            _pip("download", "--no-deps", "--only-binary=:all:", f"--dest={directory}", f"{name}=={each.version}")
            (wheel,) = Path(directory).iterdir()
            lines.append(f"{name}=={each.version} --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n")
    lock_file(architecture()).write_text(_HEAD + "".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
