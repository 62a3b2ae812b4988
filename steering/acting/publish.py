"""Publish acts where no controller does: a guardian's and a command's, through the agent, to its watchers and recorder.

Each does so once, at its end; where no agent runs, the journal alone has them. `decided_ns` is CLOCK_MONOTONIC.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import msgspec

from pytools import directories
from pytools.errors import SwerveError
from pytools.ipc.client import Client
from pytools.signals import Act
from steering.acting import messages
from steering.acting.rollback import Undone


def taken_back(done: Iterable[Undone], why: str, decided_ns: int) -> list[Act]:
    """What was taken back, as acts."""
    return [messages.undone("", each, why, decided_ns) for each in done]


def tell(netns: str | None, acts: Iterable[Act]) -> None:
    """Hand acts over, if an agent runs that takes them within a second. In its network namespace or outside."""
    named = [act if act.host else msgspec.structs.replace(act, host=directories.instance(netns)) for act in acts]
    if not named:
        return
    with contextlib.suppress(SwerveError), Client(directories.agent_socket(netns), frozenset()) as agent:
        for act in named:
            agent.publish(act)
