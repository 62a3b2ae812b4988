"""A Debian 12 of the smallest kind in a directory, our package in it, and proofs that consist of parts.

Everything happens in a mount and a PID namespace of its own: its mounts are never seen by whoever removes the
directory, and nothing that runs there outlives it, however this ends. Run as root, from the checkout. One thread.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SUITE, MIRROR = "bookworm", "http://deb.debian.org/debian"
ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LC_ALL": "C.UTF-8", "TERM": "xterm"}
QUIETLY = {"DEBIAN_FRONTEND": "noninteractive"}
WARNED = ("dpkg: warning", "Traceback", "error:")
MOUNTED = ("proc", "sys", "dev", "run")  # in the root
COMPILER = ("python3-bpfcc", "linux-libc-dev")  # recommended, for a host may have its programs from another
COMMANDS = ("debootstrap", "unshare", "chroot")


def run(command: Sequence[str | Path], **rest: Any) -> subprocess.CompletedProcess[str]:
    """A command to its end, on this side of the root."""
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False, **rest)


def there(root: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """A command to its end, in the clean root, without anything of our environment."""
    return run(["chroot", root, *command], env=ENVIRONMENT | QUIETLY, timeout=1200)


def apt(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return there(root, "apt-get", "-q", "-y", "--no-install-recommends", *words)


def tail(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stdout + done.stderr)[-600:]


class Proof:
    """Carries out one part after the other and prints what each found, as JSON Lines."""

    def __init__(self, name: str) -> None:
        self._name, self._good = name, True

    def say(self, **line: object) -> None:
        print(json.dumps({"proof": self._name, **line}), flush=True)

    def part(self, part: Callable[..., dict[str, object]], *arguments: object) -> bool:
        """What it finds is printed; its `ok` says whether that is as it should be, and is returned."""
        started = time.monotonic()
        try:
            found = part(*arguments)
        except (OSError, LookupError, ValueError, StopIteration, subprocess.SubprocessError) as error:
            found = {"ok": False, "said": f"{type(error).__name__}: {error}"}
        self.say(part=part.__name__, seconds=round(time.monotonic() - started, 1), **found)
        self._good &= bool(found["ok"])
        return bool(found["ok"])

    def end(self) -> int:
        """The verdict; returns the exit code."""
        self.say(part="all", ok=self._good)
        return 0 if self._good else 1


def bootstrap(root: Path) -> dict[str, object]:
    """The part that makes the root."""
    done = run(["debootstrap", "--variant=minbase", SUITE, root, MIRROR])
    if done.returncode != 0:
        return {"ok": False, "said": tail(done)}
    for name in MOUNTED:
        (root / name).mkdir(exist_ok=True)
    mounts = (
        ("-t", "proc", "proc", root / "proc"),
        ("--rbind", "/sys", root / "sys"),
        ("--rbind", "/dev", root / "dev"),
        ("-t", "tmpfs", "tmpfs", root / "run"),
    )
    failed = [tail(done) for words in mounts if (done := run(["mount", *words])).returncode != 0]
    return {"ok": not failed, "said": failed}


def install(root: Path) -> dict[str, object]:
    """The part that installs the package, with what it depends on and a compiler."""
    (package,) = root.glob("swerve_*.deb")
    apt(root, "update")
    done = apt(root, "install", f"./{package.name}", *COMPILER)
    after = there(root, "dpkg-query", "-W", "-f", "${db:Status-Status} ${Installed-Size}", "swerve").stdout
    noise = [line for line in done.stderr.splitlines() if any(word in line for word in WARNED)]
    if done.returncode != 0 or noise or not after.startswith("installed"):
        return {"ok": False, "said": noise or tail(done)}
    return {"ok": True, "package_bytes": package.stat().st_size, "installed_kib": int(after.split()[1])}


def main(
    file: str,
    about: str,
    inside: Callable[[Proof, Path, Sequence[str]], int],
    commands: Sequence[str] = (),
    afterwards: Callable[[Path], None] = lambda _: None,
) -> int:
    """Run a proof's parts in namespaces of their own, on an empty directory that holds the package; the exit code.

    Parameters
    ----------
    file : str
        The proof, which is started again inside.
    about : str
        Its docstring.
    inside : callable
        The parts: the proof, the root, and the names of parts to be left out.
    commands : Sequence[str]
        That are needed beside those for a root.
    afterwards : callable
        Removes what may be left outside of the root, however the parts ended.
    """
    proof = Proof(Path(file).stem)
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--deb", type=Path, help="This package, instead of building one.")
    parser.add_argument("--without", action="append", default=[], metavar="PART", help="Leave out this part.")
    parser.add_argument("--keep", action="store_true", help="Leave the root where it is.")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        return inside(proof, options.inside, options.without)
    if missing := _missing([*COMMANDS, *commands]):
        proof.say(part="all", ok=False, said=f"missing: {missing}")
        return 1
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # so that `finally` runs
    directory = Path(tempfile.mkdtemp(prefix="swerve-root-"))
    try:
        directory.chmod(0o755)  # apt reads the package as a user of its own
        if not proof.part(build, directory, options.deb):
            return 1
        alone = ("unshare", "--mount-proc", "--propagation=private", "--pid", "--fork", "--kill-child")
        again = [sys.executable, file, "--inside", directory, *(f"--without={each}" for each in options.without)]
        return subprocess.run([*alone, *again], cwd="/", check=False).returncode
    finally:
        afterwards(directory)
        if not options.keep:
            _remove(directory)


def build(directory: Path, package: Path | None) -> dict[str, object]:
    """The part that puts the package into the directory, made there unless one is named."""
    if package is not None:
        shutil.copy(package, directory)
        return {"ok": True, "said": str(package)}
    built = run([sys.executable, ROOT / "scripts/build_deb.py", "--out", directory])
    return {"ok": built.returncode == 0, "said": tail(built)}


def _missing(commands: Sequence[str]) -> str:
    """What is missing here, in words; empty when all is there."""
    if os.geteuid() != 0:
        return "root privileges"
    absent = [name for name in commands if shutil.which(name) is None]
    return f"{', '.join(absent)}; make setup-check installs them" if absent else ""


def _remove(directory: Path) -> None:
    """Remove the root, unless something is mounted there after all: what is mounted is not ours to remove."""
    mounted = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    if inner := [each for each in mounted if each.startswith(f"{directory}/")]:
        raise SystemExit(f"{directory} is left: there are mounts in it: {' '.join(inner)}")
    shutil.rmtree(directory)
