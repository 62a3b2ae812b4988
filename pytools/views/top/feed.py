"""Where the live view's lines come from: a running agent, or one of its own for as long as it is open.

Which types are asked for depends on the panel: connections, interfaces and jobs are told only while they are looked at.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

from pytools import directories
from pytools.errors import SwerveError
from pytools.ipc.socket_files import connect
from pytools.views.registry import VIEWS

_ALWAYS: Final = VIEWS["top"].types - {"app_delay"} | {"path_ecn"}
_OF_PANEL: Final = {
    "paths": {"app_delay"},
    "flows": {"tcp_flow"},
    "links": {"link"},
    "rdma": {"rdma_sight"},
    "jobs": {"job"},
}
_START_S: Final = 60.0
_END_S: Final = 20.0
_LOOK_S: Final = 0.05
# The kernel ends it (SIGTERM, PR_SET_PDEATHSIG) when the view is gone, however that went.
_AGENT: Final = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.getppid() == int(sys.argv.pop(1)) or sys.exit(1);"
    "from pytools import cli; sys.exit(cli.run(cli.agent))"
)


def types_of(panel: str) -> frozenset[str]:
    return _ALWAYS | _OF_PANEL.get(panel, frozenset())


@contextlib.contextmanager
def attached(netns: str | None, config: Path | None) -> Iterator[tuple[Path, bool]]:
    """The socket of the running agent; without one, of a child that runs meanwhile: then the second is True.

    Raises
    ------
    SwerveError
        If no agent runs, and none can be started: not root, no configuration, or it failed.
    """
    path = directories.agent_socket(netns)
    try:
        connect(path).close()
    except SwerveError:
        if path.exists() or os.geteuid() != 0:
            raise
        file = config or directories.default_config(netns)
        if not file.exists():
            raise
    else:
        yield path, False
        return
    with _own_agent(netns, file, path):
        yield path, True


@contextlib.contextmanager
def _own_agent(netns: str | None, config: Path, path: Path) -> Iterator[None]:
    """An agent for the time being; it is ended, and waited for, on any way out, and by the kernel if we are killed."""
    where = ["-n", netns] if netns else []
    with tempfile.TemporaryFile() as notes:
        # Not in our session: what a terminal sends to us is not for it.
        agent = subprocess.Popen(
            [sys.executable, "-P", "-c", _AGENT, str(os.getpid()), *where, "--config", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=notes,
            stderr=notes,
            start_new_session=True,
        )
        try:
            print(f"swerve: no agent runs: measuring by itself (process {agent.pid})", file=sys.stderr, flush=True)
            _wait_for(agent, path, notes)
            yield
        finally:
            _end(agent)


def _wait_for(agent: subprocess.Popen[bytes], path: Path, notes: IO[bytes]) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        with contextlib.suppress(SwerveError):
            connect(path).close()
            return
        if agent.poll() is not None:
            notes.seek(0)
            said = notes.read().decode(errors="replace").strip().splitlines()
            why = said[-1].removeprefix("swerve: ") if said else f"exit code {agent.returncode}"
            raise SwerveError(f"the agent that was to measure ended: {why}", "start it by hand: swerve agent")
        if time.monotonic() > deadline:
            raise SwerveError(f"the agent that was to measure does not serve {path} after {_START_S:g} s")
        time.sleep(_LOOK_S)


def _end(agent: subprocess.Popen[bytes]) -> None:
    agent.terminate()
    try:
        agent.wait(_END_S)
    except subprocess.TimeoutExpired:
        agent.kill()
        agent.wait()
