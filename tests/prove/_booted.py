"""A root booted with its own systemd as process 1, by systemd-nspawn, and what is asked of it.

It has a network, processes, control groups and mounts of its own; the kernel, with its BPF programs, is this machine's.
Only BPF's and perf's system calls are let through beside what a container has, and all capabilities: as on a host, what
a service may do is said by its unit. Needs a mount namespace of our own. One thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from _clean_root import ENVIRONMENT, MOUNTED, ROOT, run

sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import bpf_objects  # noqa: E402

COMMANDS: Final = ("systemd-nspawn", "nsenter")
_CGROUPS: Final = Path("/sys/fs/cgroup")
T = TypeVar("T")
_CLONE_NEWNET: Final = 0x40000000
_NAMESPACES: Final = ("mount", "pid", "net", "uts", "ipc", "cgroup")


def until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """Wait; what the condition returned at last.

    Raises
    ------
    ValueError
        If it does not come true.
    """
    end = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > end:
            raise ValueError(f"not within {seconds:g} s: {what}")
        time.sleep(0.1)
    return found


class Machine:
    """The booted root."""

    def __init__(self, root: Path, group: Path, leader: int) -> None:
        self.root, self.leader, self._group = root, leader, group
        self._enter = ["nsenter", f"--target={leader}", *(f"--{each}" for each in _NAMESPACES), "--"]

    def run(self, *words: str, check: bool = True) -> str:
        """What a command says that root gives there.

        Raises
        ------
        ValueError
            If it fails.
        """
        done = run([*self._enter, *words], env=ENVIRONMENT, timeout=120)
        if check and done.returncode != 0:
            raise ValueError(f"{' '.join(words)}: exit code {done.returncode}: {(done.stdout + done.stderr)[-400:]}")
        return done.stdout.strip()

    def json(self, *words: str) -> Any:
        """The same, where it says JSON."""
        return json.loads(self.run(*words))

    def lines(self, *words: str) -> list[dict[str, Any]]:
        """The same, where it says an object a line."""
        return [json.loads(line) for line in self.run(*words).splitlines()]

    @contextlib.contextmanager
    def collecting(self, *words: str) -> Iterator[list[dict[str, Any]]]:
        """A command that goes on meanwhile; what it said, an object a line, is there once it is left."""
        told: list[dict[str, Any]] = []
        with tempfile.TemporaryFile("w+") as file:  # a pipe would be full before it is read
            process = subprocess.Popen([*self._enter, *words], env=ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=file)
            try:
                yield told
            finally:
                # The command, not nsenter, which waits for it: nobody else would, and systemd waits for all at its end.
                for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
                    os.kill(int(child), signal.SIGTERM)
                process.wait(60)
            file.seek(0)
            told += [json.loads(line) for line in file.read().splitlines()]

    def show(self, unit: str, *names: str) -> dict[str, str]:
        """What systemd knows of a unit."""
        lines = self.run("systemctl", "show", unit, *(f"--property={name}" for name in names)).splitlines()
        return dict(line.split("=", 1) for line in lines)

    def processes(self, unit: str) -> list[int]:
        """Of a unit, by the numbers that they have out here."""
        try:
            return [
                int(each) for each in (self._group / f"payload/system.slice/{unit}/cgroup.procs").read_text().split()
            ]
        except FileNotFoundError:
            return []

    def main_process(self, unit: str) -> int:
        """The process that systemd started for a unit, by its number out here: the unit may have helpers beside it."""
        inner = self.show(unit, "MainPID")["MainPID"]
        numbers = {each: Path(f"/proc/{each}/status").read_text() for each in self.processes(unit)}
        (found,) = (each for each, status in numbers.items() if f"\t{inner}\n" in _line(status, "NSpid"))
        return found

    def command(self, words: Sequence[str], netns: str = "") -> list[str]:
        """A command of this side's file system, as it is run in the network of the root, or of a namespace in it."""
        place = f"/proc/{self.leader}/" + (f"root/run/netns/{netns}" if netns else "ns/net")
        return ["nsenter", f"--net={place}", "--", *words]

    def inside(self, netns: str, make: Callable[[], T]) -> T:
        """What is made in a network namespace of the root; the calling thread is there meanwhile."""
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        there = os.open(f"/proc/{self.leader}/root/run/netns/{netns}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            enter(there)
            try:
                return make()
            finally:
                enter(before)
        finally:
            os.close(before)
            os.close(there)

    def hooks(self, unit: str) -> set[tuple[str, int]]:
        """BPF programs, maps and links that a unit's processes hold."""
        return set().union(*(bpf_objects.held_by(Path(f"/proc/{each}")) for each in self.processes(unit)))


def enter(namespace: int) -> None:
    """Have the calling thread in a network namespace.

    Raises
    ------
    OSError
        If it may not be there.
    """
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def _line(status: str, name: str) -> str:
    """A line of a process's status, with its end."""
    return next(line for line in status.splitlines(keepends=True) if line.startswith(f"{name}:"))


def loaded() -> set[tuple[str, int]]:
    """All BPF programs, maps and links that the kernel has, whoever loaded them."""
    return bpf_objects.numbered()


@contextlib.contextmanager
def booted(root: Path) -> Iterator[Machine]:
    """Boot a root, and shut it down at the end.

    Raises
    ------
    ValueError
        If it does not come up, or does not shut down.
    """
    for name in MOUNTED:
        run(["umount", "--recursive", "--lazy", root / name])
    with _control_group(root) as group, (root / "root/console").open("w") as console:
        process = subprocess.Popen(
            _nspawn(root), stdin=subprocess.DEVNULL, stdout=console, stderr=console, env=os.environ | _NSPAWN
        )
        try:
            first = group / "payload/init.scope/cgroup.procs"
            leader = until(lambda: first.exists() and first.read_text().split(), 30, "systemd is there")
            machine = Machine(root, group, int(leader[0]))
            state = ("systemctl", "is-system-running", "--wait")
            until(lambda: machine.run(*state, check=False) in ("running", "degraded"), 60, "systemd has started")
            yield machine
        finally:
            process.terminate()  # which shuts it down in order
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                last = commands(group / "payload")
                process.kill()
                process.wait()
                raise ValueError(f"it does not shut down: {last}") from None


def commands(group: Path) -> list[str]:
    """What runs in a control group and those below it."""
    found = []
    for pid in itertools.chain.from_iterable(each.read_text().split() for each in group.rglob("cgroup.procs")):
        with contextlib.suppress(OSError):  # it ended just now
            found.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip())
    return found


# All of the network's settings may be written there, none of the rest of the kernel's.
_NSPAWN: Final = {"SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1", "SYSTEMD_NSPAWN_API_VFS_WRITABLE": "network"}


def _nspawn(root: Path) -> Sequence[str]:
    return (
        *("systemd-nspawn", "--quiet", f"--directory={root}", "--machine=swerve-units", "--boot"),
        *("--keep-unit", "--register=no"),  # whether or not systemd runs this machine
        *("--private-network", "--resolv-conf=off", "--timezone=off", "--link-journal=no", "--console=pipe"),
        *("--capability=all", "--system-call-filter=bpf perf_event_open"),
    )


def _name(root: Path) -> str:
    return f"swerve-units-{root.name}"


@contextlib.contextmanager
def _control_group(root: Path) -> Iterator[Path]:
    """A control group of version 2 that we are in; and a /run and a hierarchy where nspawn looks for them."""
    for words in (
        ("-t", "tmpfs", "tmpfs", "/run"),  # nspawn's own: nothing of it is left
        ("-t", "tmpfs", "tmpfs", str(_CGROUPS)),
        ("-t", "cgroup2", "cgroup2", str(_CGROUPS)),
    ):
        if (done := run(["mount", *words])).returncode != 0:
            raise ValueError(f"mount {' '.join(words)}: {done.stderr.strip()}")
    group = _CGROUPS / _name(root)
    before = _CGROUPS / Path("/proc/self/cgroup").read_text().rpartition("0::/")[2].strip()
    group.mkdir()
    (group / "cgroup.procs").write_text("0")
    try:
        yield group
    finally:
        (before / "cgroup.procs").write_text("0")


def remove_group(root: Path) -> None:
    """Remove the control group of a root, and end what is in it.

    Raises
    ------
    ValueError
        If something does not end.
    """
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    for group in {Path(words[1], _name(root)) for words in mounts if words[2] == "cgroup2"}:
        if group.exists():
            (group / "cgroup.kill").write_text("1")
            until(lambda: not commands(group), 10, "everything in the control group is gone")  # noqa: B023
            for each in sorted((path for path in group.rglob("*") if path.is_dir()), reverse=True):
                each.rmdir()
            group.rmdir()
