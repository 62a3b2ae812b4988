"""An agent as the shipped unit runs it, for tests: a user without root, its own directories, a manager that listens."""

from __future__ import annotations

import contextlib
import ctypes.util
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import support

from pytools import directories

UNITS = support.ROOT / "packaging/systemd"
AGENT = UNITS / "swerve-agent.service"
STEER = UNITS / "swerve-steer.service"
METRICS = UNITS / "swerve-metrics.service"
UID = 61_862  # of nobody: what it can do, the unit gives it
READER = 61_863  # user and group of the metrics
_RUNNER = support.ROOT / "tests/under_unit.py"


CONFIG = """\
host: one
peers: [{name: two, address: 10.77.0.2, clock: shared}]
recording: {fine: 1MiB, coarse: 1MiB}
"""


@pytest.fixture
def room(unique_name: Callable[[], str]) -> Iterator[Path]:
    """A directory whose name is short and that the service's user reaches."""
    with make_room(unique_name()) as place:
        yield place


@contextlib.contextmanager
def make_room(name: str) -> Iterator[Path]:
    """The same, of this name."""
    place = directories.runtime_dir(None).parent.parent / name
    place.mkdir()
    own(place / "x")
    try:
        yield place
    finally:
        shutil.rmtree(place)


def command(
    words: Sequence[str],
    write: Sequence[Path],
    netns: str | None = None,
    formats: Path | None = None,
    unit: Path = AGENT,
    uid: int = UID,
    groups: Path | None = None,
) -> list[str]:
    """A command line that runs `words` as the unit would."""
    require_systemd()
    line = [sys.executable, str(_RUNNER), str(unit), "--uid", str(uid)]
    if groups is not None:
        line += ["--place", f"{groups}:/etc/group"]
    cache = Path(os.environ["SWERVE_CACHE_DIR"]) if "SWERVE_CACHE_DIR" in os.environ else None
    for each in (*write, *([cache] if cache else [])):
        line += ["--write", str(each)]
    if netns is not None:
        line += ["--netns", netns]
    if formats is not None:
        line += ["--place", f"{formats}:/sys/kernel/tracing"]
    return [*line, "--", *words]


def require_systemd() -> None:
    """Skip unless systemd's groups of system calls, and libseccomp, are there."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("missing: the command systemd-analyze (package systemd)")
    if ctypes.util.find_library("seccomp") is None:
        pytest.skip("missing: libseccomp (package libseccomp2)")


def own(place: Path) -> Path:
    """A directory that is the service's, with all in it; those above it let it pass."""
    place.mkdir(parents=True, exist_ok=True)
    for each in (place, *place.rglob("*")):
        os.chown(each, UID, UID, follow_symlinks=False)
    for above in place.parents:
        if above in (Path("/"), Path("/tmp")):
            break
        above.chmod(above.stat().st_mode | 0o711)
    return place


@dataclass
class Manager:
    """What a service manager would hear: datagrams on a socket."""

    address: str
    sock: socket.socket
    heard: list[str] = field(default_factory=list)

    def listen(self) -> list[str]:
        """Everything so far, line by line."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self.heard += self.sock.recv(8192).decode().splitlines()
        return self.heard

    def forget(self) -> None:
        """Hear anew."""
        self.listen()
        self.heard.clear()

    def until(self, word: str, deadline_s: float = 60) -> None:
        """Wait until a line begins so."""
        support.wait_until(
            lambda: any(line.startswith(word) for line in self.listen()), deadline_s, f"the manager hears {word}"
        )


@contextlib.contextmanager
def manager(address: str) -> Iterator[Manager]:
    """One that listens at a path, or at an abstract name that begins with @."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
        sock.bind("\0" + address[1:] if address.startswith("@") else address)
        if not address.startswith("@"):
            Path(address).chmod(0o666)
        yield Manager(address, sock)


@dataclass
class Service:
    """A running agent."""

    process: subprocess.Popen[str]
    manager: Manager
    env: Mapping[str, str]  # with which commands find it
    config: Path
    log: Path
    forgotten: int = 0  # characters of the log

    def swerve(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """A command of root's beside it."""
        return support.run([*support.SWERVE, *words], env=dict(self.env), check=check)

    def said(self) -> str:
        """Its standard error so far."""
        return self.log.read_text()[self.forgotten :]

    def forget(self) -> None:
        """Hear anew what it says."""
        self.forgotten += len(self.said())


@contextlib.contextmanager
def service(
    room: Path,
    netns: str,
    config: str,
    *,
    prepared: bool = True,
    watchdog_s: float = 30,
    abstract: bool = False,
    unit: Path = AGENT,
) -> Iterator[Service]:
    """The agent in a namespace, ended at the end; `room` is its own."""
    run, state = own(room / "run" / "swerve"), own(room / "state" / "swerve")
    file = room / "agent.yaml"
    file.write_text(config)
    file.chmod(0o644)
    env = {"SWERVE_RUNTIME_DIR": str(run), "SWERVE_STATE_DIR": str(state)}
    groups = room / "group"  # as systemd-sysusers leaves it
    groups.write_text(f"{Path('/etc/group').read_text()}swerve-metrics:x:{READER}:\n")
    groups.chmod(0o644)
    formats = None
    if prepared:
        support.run([*support.SWERVE, "agent", "--prepare"], env=env)
        formats = run.with_name("swerve-tracing")
    log = room / "log"
    address = f"@{netns}" if abstract else str(room / "notify")
    with manager(address) as told, log.open("w") as errors:
        line = command(
            [*support.SWERVE, "agent", "--config", str(file)], [run, state], netns, formats, unit, groups=groups
        )
        own_environment = {
            **env,
            "NOTIFY_SOCKET": address,
            "WATCHDOG_USEC": str(int(watchdog_s * 1e6)),
            "TMPDIR": str(run),
            "JOURNAL_STREAM": f"{os.fstat(errors.fileno()).st_dev}:{os.fstat(errors.fileno()).st_ino}",
        }
        process = subprocess.Popen(
            line, env={**os.environ, **own_environment}, stdin=subprocess.DEVNULL, stderr=errors, text=True
        )
        try:
            yield Service(process, told, env, file, log)
        finally:
            process.terminate()
            try:
                process.wait(20 * support.slow_factor())
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def settle(seconds: float) -> None:
    """Let time pass, to see what does not happen."""
    end = time.monotonic() + seconds
    support.wait_until(lambda: time.monotonic() > end, seconds + 10, "the time is over", every_s=0.05)
