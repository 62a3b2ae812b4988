"""What the agent runs. Light to import."""

from __future__ import annotations

import selectors
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from pytools.ipc.bus import Bus

RELAXED_NS: Final = 200_000_000  # how late a source may be called for which it does not matter: with the mesh


def pace_ns(bus: Bus, type_tag: str, every_ns: int, calm_ns: int) -> int:
    """How often to look: this often while somebody waits for signals of this type, else more seldom."""
    return every_ns if bus.wanted(type_tag, details=True) else max(every_ns, calm_ns)


def next_beat(due_ns: int, every_ns: int, now_ns: int) -> int:
    """The next time on a steady beat; periods missed in a pause are left out."""
    return due_ns + ((now_ns - due_ns) // every_ns + 1) * every_ns


class Source(Protocol):
    """Does what is due when it is called; one that says nothing else waits for no file, loses nothing, holds nothing.

    Runs in the agent's thread and in the network namespace that it measures.
    """

    def register(self, selector: selectors.BaseSelector) -> None:
        """Register files; `key.data` is called with the event mask."""
        return

    def tick(self, now_ns: int) -> int:
        """Do what is due at this CLOCK_MONOTONIC; returns when to be called next."""

    def drops(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        return
