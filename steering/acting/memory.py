"""The memory of a controller in /run: what its successor has to know to go on with what is in force.

Written after every act and when anything in it has changed; not synced, for it is of use in the same boot alone. A
file that is torn, of another boot, namespace or version, or that others could have written, is none.

What paths have learnt to be usual is kept beside the sockets of the instance, in a file system in memory, so that no
disk holds the controller up. Times are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from pytools import directories, owned_files
from pytools.errors import SwerveError
from pytools.kernel.leftovers import FAMILIES
from pytools.units import SECOND
from steering.actuators.overlay_memory import OverlayMemory, objection
from steering.deciding.memory import PathMemory
from steering.deciding.usual import Entry, Usuals
from steering.plan import same

if TYPE_CHECKING:
    from pytools.kernel.netlink.routing import Netlink
    from steering.actuators.overlay import Overlay
    from steering.deciding.engine import Engine
    from steering.policy.model import Manage

_VERSION: Final = 1
_MOST_BYTES: Final = 64 << 20


class Memory(msgspec.Struct, frozen=True):
    version: int
    scope: str  # boot and network namespace
    overlay: OverlayMemory
    paths: tuple[PathMemory, ...]


class Succession:
    """Takes over from the controller before, and keeps in a file what its successor needs.

    Parameters
    ----------
    path : Path
        The file; its directory is made with mode 0700 when missing.
    scope : str
        This boot and network namespace.
    apply : bool
        Whether changes are made; a dry run neither takes over nor leaves anything.
    """

    def __init__(self, path: Path, scope: str, apply: bool, say: Callable[[str], None]) -> None:
        self._path, self._scope, self._apply, self._say = path, scope, apply, say
        self._file = owned_files.ReplacedFile(
            path, lambda error: say(f"a successor could not take over: {error}"), makes_directory=True
        )
        self._written = b""
        self._former: Memory | None = None  # taken over, and not told to the engine yet
        self._due_ns = 0

    def load(self) -> Memory | None:
        """What the controller before us left here; None when that is of no use."""
        try:
            found = msgspec.json.decode(directories.read_obeyed(self._path, _MOST_BYTES), type=Memory)
        except (OSError, SwerveError, ValueError) as error:
            self._say(f"{self._path}: nothing is taken over: {error}")
            return None
        return found if (found.version, found.scope) == (_VERSION, self._scope) else None

    def write(self, overlay: OverlayMemory, paths: tuple[PathMemory, ...]) -> None:
        """Replace it, if anything has changed. What cannot be written costs a successor its knowledge, and no act."""
        data = msgspec.json.encode(Memory(_VERSION, self._scope, overlay, paths))
        if data != self._written and self._file.write(data):
            self._written = data

    def take_over(self, manage: Manage, netlink: Netlink) -> OverlayMemory | None:
        """What the controller before us has in force, if we can go on with it; to be asked while somebody keeps it."""
        if not self._apply:
            return None
        found = self.load()
        if found is None:
            return None
        rules = [rule for family in FAMILIES for rule in netlink.rules(family)]
        if why := objection(found.overlay, manage, rules):
            self._say(f"what the previous controller has in force is undone: {why}")
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
        self._due_ns = now + SECOND
        if self._apply and self._former is None:
            self.write(overlay.memory, engine.remember(now))

    def forget(self) -> None:
        """Nothing of ours is in force any more."""
        owned_files.remove(self._path)
        self._written = b""


USUAL_FILE: Final = "usual.json"
USUAL_EVERY_NS: Final = 10_000_000_000
_LARGEST: Final = 1 << 27


class _Contents(msgspec.Struct, frozen=True):
    at_ns: int  # when it was written
    entries: list[Entry]


class UsualFile:
    """Keeps what an engine learns.

    Parameters
    ----------
    folder : Path
        The instance's runtime directory.
    """

    def __init__(self, folder: Path, usuals: Usuals, say: Callable[[str], None]) -> None:
        self._path, self._usuals = folder / USUAL_FILE, usuals
        self._due_ns = self._version = 0
        self._file = owned_files.ReplacedFile(
            self._path, lambda error: say(f"what is usual is not kept for the next controller: {error}")
        )

    def __enter__(self) -> UsualFile:
        """Go on with what the controller before us has learnt."""
        if self._usuals.needed:
            self._usuals.restore(read_usual(self._path.parent)[1], time.monotonic_ns())
            self._version = self._usuals.version
        return self

    def __exit__(self, *_: object) -> None:
        self.write(time.monotonic_ns())

    def tick(self, now: int) -> None:
        """Write, if it is time and there is something new."""
        if now >= self._due_ns and self._version != self._usuals.version:
            self._due_ns = now + USUAL_EVERY_NS
            self.write(now)

    def write(self, now: int) -> None:
        """Write, if there is something new; what fails is said once, and costs no more than learning again."""
        if self._version == self._usuals.version:
            return
        version = self._usuals.version
        if self._file.write(msgspec.json.encode(_Contents(now, self._usuals.entries()))):
            self._version = version


def read_usual(folder: Path, *, guarded: bool = True) -> tuple[int, Iterable[Entry]]:
    """When a controller last wrote what it had learnt, and that; 0 and nothing without a file that makes sense.

    `guarded` refuses a file that somebody else could have written; only for showing is this not needed.
    """
    with contextlib.suppress(OSError, SwerveError, msgspec.MsgspecError, ValueError):
        found = msgspec.json.decode(
            directories.read_obeyed(folder / USUAL_FILE, _LARGEST, guarded=guarded), type=_Contents
        )
        return found.at_ns, found.entries
    return 0, ()
