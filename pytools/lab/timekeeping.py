"""The clocks of a lab's hosts: given, read, stepped, and shown against each other.

A clock lies in its host's runtime directory, so it goes with the lab. Times are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pytools import directories, units
from pytools.errors import UsageError
from pytools.lab import clocks
from pytools.lab.clocks import VirtualClock
from pytools.lab.topology import Host

_AHEAD_NS = 500_000_000  # how long before a step is announced: agents look at the file every 50 ms


def file_of(host: Host) -> Path:
    """Where a host's clock lies."""
    return directories.runtime_dir(host.netns) / clocks.FILE


def wanted(hosts: int, asked: int | Sequence[VirtualClock] | None) -> list[VirtualClock] | None:
    """The clocks of a lab, from a seed, or as given; None for a lab whose hosts share the machine's.

    Raises
    ------
    UsageError
        If the clocks given are not one for each host.
    """
    if asked is None:
        return None
    if isinstance(asked, int):
        return clocks.draw(hosts, asked, time.monotonic_ns())
    if len(asked) != hosts:
        raise UsageError(f"{len(asked)} clocks for {hosts} hosts", "give one for each")
    return list(asked)


def clock_of(host: Host) -> VirtualClock:
    """A host's clock.

    Raises
    ------
    UsageError
        If it has none of its own.
    """
    if not file_of(host).exists():
        raise UsageError(f"{host.netns} has no clock of its own", "`swerve lab up --clocks SEED` gives each host one")
    return clocks.load(file_of(host))


def step(host: Host, step_ns: int) -> int:
    """Step a host's clock half a second from now, or a second after its last step; returns when exactly."""
    clock = clock_of(host)
    at_ns = time.monotonic_ns() + _AHEAD_NS
    if clock.steps:
        at_ns = max(at_ns, clock.steps[-1].at_ns + clocks.STEP_APART_NS)
    clocks.save(clock.stepped(at_ns, step_ns), file_of(host))
    return at_ns


def show(hosts: Sequence[Host]) -> dict[str, Any]:
    """What is true of every clock now, against the first host's, as JSON-ready values."""
    now_ns = time.monotonic_ns()
    first = clock_of(hosts[0])
    shown = []
    for host in hosts:
        clock = clock_of(host)
        shown.append(
            {
                "host": host.name,
                "offset_ns": int(clocks.offset_between(first, clock, now_ns)),
                "drift_ppb": float(clock.drift_at(now_ns) - first.drift_at(now_ns)),
                "shows_ns": int(clock.at(now_ns)),
                "steps": [{"at_ns": each.at_ns, "step_ns": each.step_ns} for each in clock.steps],
            }
        )
    return {"reference": hosts[0].name, "at_ns": now_ns, "clocks": shown}


def parse_shift(text: str) -> int:
    """Nanoseconds by which a clock is set, of `10ms`, `-250us`, `1.5s`, `40ns`.

    Raises
    ------
    UsageError
        If it is not a duration.
    """
    try:
        size_ns = units.parse_duration(text[1:] if text[:1] in "+-" else text)
    except ValueError:
        raise UsageError(f"{text!r} is not a duration", "write it like 10ms, -250us, 1.5s or 40ns") from None
    return -size_ns if text.startswith("-") else size_ns
