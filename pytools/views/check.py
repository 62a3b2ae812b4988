"""One thing that `doctor` looks at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeVar

from pytools import directories
from pytools.errors import SwerveError
from pytools.ipc.client import Client
from pytools.ipc.wire import TAGS
from pytools.kernel.features import Finding
from pytools.signals import AnySignal

_ASKED_S: Final = 2.5  # an agent says once a second what it counts and sees
_Told = TypeVar("_Told", bound=AnySignal)


@dataclass(frozen=True)
class Check:
    """One thing that may be missing."""

    name: str
    essential: bool
    costs: str  # what is lost without it
    mend: str
    find: Callable[[], Finding]


def by_agent(name: str | None, kind: type[_Told], judge: Callable[[Iterator[_Told]], Finding]) -> Finding:
    """What is found in what the agent that runs says of this kind within a few seconds."""
    try:
        with Client(directories.agent_socket(name), frozenset({TAGS[kind]})) as client:
            return judge(signal for signal in client.within(_ASKED_S) if isinstance(signal, kind))
    except (SwerveError, OSError):
        return Finding(None, "no agent runs that could say")
