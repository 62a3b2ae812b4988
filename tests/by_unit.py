"""Has the agents of labs run as the shipped unit runs one, in tests that were written for agents of root's.

What a test asks of an agent stays the same: its socket, state and configuration are where they would be, but belong to
the unit's user, who has its capabilities, system calls and file system and no others. An agent that the test starts in
another way than by its lab is not touched.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import service_kit as kit
import support

from pytools import directories
from pytools.lab import processes, state

_start = processes.start
started: list[str] = []


def start(
    lab: str,
    netns: str,
    argv: Sequence[str],
    env: Mapping[str, str] | None = None,
    *streams: int | IO[Any] | None,
    **named: int | IO[Any] | None,
) -> subprocess.Popen[str]:
    """In the place of `pytools.lab.processes.start`."""
    if list(argv) != [*support.SWERVE, "agent", "-n", netns]:
        return _start(lab, netns, argv, env, *streams, **named)
    started.append(netns)
    # As in /etc: the configuration is root's, and not in a directory of the service's, where root would refuse it.
    written, kept = (
        directories.runtime_dir(netns) / "agent.yaml",
        directories.runtime_dir(None).parent.parent / f"{netns}.yaml",
    )
    if written.exists():
        kept.write_text(written.read_text())
        kept.chmod(0o644)
        written.unlink()
    words = ["agent", "--config", str(kept)]
    return under_the_unit(kit.AGENT, lab, netns, words, env, *streams, **named)


def under_the_unit(
    unit: Path,
    lab: str,
    netns: str,
    words: Sequence[str],
    env: Mapping[str, str] | None = None,
    *streams: int | IO[Any] | None,
    **named: int | IO[Any] | None,
) -> subprocess.Popen[str]:
    """A `swerve` command as the unit runs it: it takes itself for the host's instance, and is the namespace's."""
    room = directories.runtime_dir(None).parent.parent / "units" / netns
    run, kept = kit.own(room / "run"), kit.own(room / "state")
    shared = [kit.own(directories.runtime_dir(netns)), kit.own(directories.state_dir(netns))]
    for link, target in zip((run / "host", kept / "host"), shared, strict=True):
        if not link.is_symlink():
            link.symlink_to(target)
    key = state.key_file(lab)
    if key.exists():
        os.chown(key, kit.UID, kit.UID)
        key.parent.chmod(0o711)
    here = {"SWERVE_RUNTIME_DIR": str(run), "SWERVE_STATE_DIR": str(kept)}
    support.run([*support.SWERVE, "agent", "--prepare"], env=here)
    line = kit.command([*support.SWERVE, *words], [run, kept, *shared], netns, Path(f"{run}-tracing"), unit)
    return _start(lab, netns, line, {**(env or {}), **here, "TMPDIR": str(run)}, *streams, **named)


@contextlib.contextmanager
def agents_by_the_unit() -> Iterator[None]:
    """Have every lab start its agents so meanwhile.

    Raises
    ------
    AssertionError
        If fewer than two were: what was tried shows nothing of the unit.
    """
    support.require("tracefs")
    kit.require_systemd()
    before = len(started)
    processes.start = start
    try:
        yield
    finally:
        processes.start = _start
    assert len(started) - before >= 2, "agents are started in another way"
