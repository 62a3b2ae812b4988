"""From one controller to the next: what is in force, and what is known of the paths, passes to a successor.

CLOCK_MONOTONIC nanoseconds; one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pytools.kernel.leftovers import FAMILIES
from pytools.kernel.netlink.routing import Netlink
from steering.acting.memory import Memory, MemoryFile
from steering.actuators import overlay_memory
from steering.actuators.overlay import Overlay
from steering.actuators.overlay_memory import OverlayMemory
from steering.deciding.engine import Engine
from steering.plan import same
from steering.policy.model import Manage

_SECOND_NS: Final = 1_000_000_000


class Succession:
    """Takes over from the controller before, and keeps what its successor needs.

    Parameters
    ----------
    file : MemoryFile
        Where it is kept.
    apply : bool
        Whether changes are made; a dry run neither takes over nor leaves anything.
    say : callable
        Takes a line for the log.
    """

    def __init__(self, file: MemoryFile, apply: bool, say: Callable[[str], None]) -> None:
        self._file, self._apply, self._say = file, apply, say
        self._former: Memory | None = None  # taken over, and not told to the engine yet
        self._due_ns = 0

    def take_over(self, manage: Manage, netlink: Netlink) -> OverlayMemory | None:
        """What the controller before us has in force, if we can go on with it; to be asked while somebody keeps it."""
        if not self._apply:
            return None
        found = self._file.load()
        if found is None:
            return None
        rules = [rule for family in FAMILIES for rule in netlink.rules(family)]
        if why := overlay_memory.objection(found.overlay, manage, rules):
            self._say(f"what the controller before this one has in force is taken back: {why}")
            return None
        self._former = found
        return found.overlay

    def recall(self, engine: Engine, now: int) -> None:
        """Go on where the controller before us ended, once the engine knows the targets."""
        former, self._former = self._former, None
        if former is None:
            return
        left = engine.recall(former.paths, now)
        targets = sum(not same(group.current, group.original) for group in engine.groups.values())
        self._say(f"took over from the controller before: {targets} targets are steered, {len(left)} paths are left")

    def tick(self, overlay: Overlay, engine: Engine, now: int) -> None:
        """Keep how things stand, once a second."""
        if now >= self._due_ns:
            self.keep(overlay, engine, now)

    def keep(self, overlay: Overlay, engine: Engine, now: int) -> None:
        """Keep how things stand, unless what was taken over is not recalled yet."""
        self._due_ns = now + _SECOND_NS
        if self._apply and self._former is None:
            self._file.write(overlay.memory, engine.remember(now))

    def forget(self) -> None:
        """Nothing of ours is in force any more."""
        self._file.remove()
