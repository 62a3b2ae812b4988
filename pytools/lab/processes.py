"""Processes of a lab: started inside a host's namespace, found and ended by a mark in their environment.

The mark is inherited, so what a started process starts in turn is found as well, also by a later `lab down` and
after a crash. A process is only ever signalled through a descriptor that was checked after it was opened, so a
number that was given to another process meanwhile does no harm.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from pytools.errors import CapabilityError, SwerveError
from pytools.kernel.netns import inside
from pytools.lab.namespaces import NAMED

MARK = "SWERVE_LAB"
LOAD_MARK = "SWERVE_LAB_LOAD"  # beside the lab's: which rail a process loads

_SHOWN_S = 1.0
_GRACE_S = 3.0
_READY_S = 20.0
_ROUNDS = 20  # two processes that respawn each other may need more than one


def start(
    lab: str,
    netns: str,
    argv: Sequence[str],
    env: Mapping[str, str] | None = None,
    stdout: int | IO[Any] | None = subprocess.DEVNULL,
    stderr: int | IO[Any] | None = subprocess.DEVNULL,
) -> subprocess.Popen[str]:
    """Start a process inside a namespace; it carries the lab's mark, and is found by it from now on."""
    environment = {**os.environ, **(env or {}), MARK: lab}
    try:
        with inside(netns):
            process = subprocess.Popen(
                list(argv),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                text=True,
                start_new_session=True,  # an interrupt at the terminal is for us, who then take the lab down
            )
    except OSError as error:
        raise CapabilityError(f"{argv[0]}: {error.strerror}", "install it") from None
    # The kernel says that a program is executed a moment before it shows its environment.
    place, end = Path(f"/proc/{process.pid}"), time.monotonic() + _SHOWN_S
    while not _carries(place, _marks(lab, None)) and process.poll() is None and time.monotonic() < end:
        time.sleep(0.0005)
    return process


def wait_until_ready(process: subprocess.Popen[str]) -> None:
    """Wait for a helper's first line on standard output; its pipes are closed then.

    Raises
    ------
    SwerveError
        If it ends before, with what it wrote to standard error.
    """
    with contextlib.ExitStack() as pipes:
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipes.enter_context(pipe)
        waiting = select.poll()
        waiting.register(_required(process.stdout), select.POLLIN)
        came = waiting.poll(_READY_S * 1000)
        if came and _required(process.stdout).readline():
            return
        process.kill()
        process.wait()
        said = _required(process.stderr).read().strip().rpartition("\n")[2] if came else "no word from it"
        raise SwerveError(f"{' '.join(map(str, process.args))}: {said}")  # type: ignore[arg-type]


def _required(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None, "start the process with pipes"
    return pipe


def marked(lab: str, load: int | None = None) -> dict[int, str]:
    """Living processes of a lab: command line by process id. Never this process.

    Parameters
    ----------
    load : int, optional
        Only those that load this rail.
    """
    marks = _marks(lab, load)
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        pid = int(place.name)
        if pid != os.getpid() and _carries(place, marks):
            found[pid] = _command_line(place)
    return found


def within(namespaces: Sequence[str]) -> dict[int, str]:
    """Living processes inside these namespaces, by the namespace of their main thread. Never this process."""
    identities = {_identity(NAMED / name) for name in namespaces} - {None}
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        if int(place.name) != os.getpid() and _identity(place / "ns" / "net") in identities:
            found[int(place.name)] = _command_line(place)
    return found


def end(lab: str, load: int | None = None) -> list[str]:
    """End processes as `marked` finds them: asked first, killed when they do not go. Returns what they were."""
    ended: dict[int, str] = {}
    for attempt in range(_ROUNDS):
        living = marked(lab, load)
        if not living:
            return [f"{pid} {line}" for pid, line in sorted(ended.items())]
        ended |= living
        _signal(_marks(lab, load), living, signal.SIGTERM if attempt == 0 else signal.SIGKILL)
    words = ", ".join(f"{pid} ({line})" for pid, line in sorted(living.items()))
    raise SwerveError(f"lab {lab}: processes do not end: {words}", "end them, then take the lab down again")


def kill_inside(lab: str, netns: str) -> list[str]:
    """Kill a lab's processes inside a namespace, with no chance to clean up. Returns what they were."""
    killed: dict[int, str] = {}
    for _ in range(_ROUNDS):
        inside_now = within([netns])
        living = {pid: line for pid, line in marked(lab).items() if pid in inside_now}
        if not living:
            break
        killed |= living
        _signal(_marks(lab, None), living, signal.SIGKILL)
    return [f"{pid} {line}" for pid, line in sorted(killed.items())]


def _signal(marks: set[bytes], pids: Mapping[int, str], number: signal.Signals) -> None:
    """Signal these processes at once, and wait for them to end, but not for ever."""
    opened: list[int] = []
    try:
        for pid in pids:
            try:
                fd = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            opened.append(fd)
            if not _carries(Path(f"/proc/{pid}"), marks):
                continue
            try:
                signal.pidfd_send_signal(fd, number)
            except ProcessLookupError:
                continue
        _wait(opened, time.monotonic() + _GRACE_S)
    finally:
        for fd in opened:
            os.close(fd)


def _wait(pidfds: Sequence[int], deadline: float) -> None:
    waiting = select.poll()
    for fd in pidfds:
        waiting.register(fd, select.POLLIN)
    left = len(pidfds)
    while left and time.monotonic() < deadline:
        for fd, _ in waiting.poll(max(0, (deadline - time.monotonic()) * 1000)):
            waiting.unregister(fd)
            left -= 1


def _marks(lab: str, load: int | None) -> set[bytes]:
    """What must be in the environment of such a process."""
    return {f"{MARK}={lab}".encode()} | (set() if load is None else {f"{LOAD_MARK}={load}".encode()})


def _carries(place: Path, marks: set[bytes]) -> bool:
    try:
        return marks <= set((place / "environ").read_bytes().split(b"\0"))
    except OSError:
        return False


def _command_line(place: Path) -> str:
    try:
        return (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "(gone)"


def _identity(place: Path) -> tuple[int, int] | None:
    try:
        status = place.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
