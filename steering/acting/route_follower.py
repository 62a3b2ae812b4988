"""What others route: read, followed by what is ours, and told to the engine.

CLOCK_MONOTONIC nanoseconds; one thread, in the namespace that is steered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pytools.errors import SwerveError
from steering.acting.weights import Acting
from steering.actuators.overlay import Found, Overlay
from steering.deciding.engine import Engine
from steering.plan import title


class RouteFollower:
    """Has the overlay follow the routes of others.

    Parameters
    ----------
    overlay : Overlay
        Reads the routes, and changes ours.
    engine : Engine
        Learns which targets there are.
    acting : Acting
        Notes what others made of weights that are in force.
    managed : callable
        Takes what was found; lines about it for the log.
    say : callable
        Takes a line for the log.
    """

    def __init__(
        self,
        overlay: Overlay,
        engine: Engine,
        acting: Acting,
        managed: Callable[[Found], Iterable[str]],
        say: Callable[[str], None],
    ) -> None:
        self._overlay, self._engine, self._acting = overlay, engine, acting
        self._managed, self._say = managed, say
        self._unreadable = ""  # why the routes could not be read the last time

    def refresh(self, now: int) -> bool:
        """Read the routes and follow them; False when they cannot be read: everything stays as it is known."""
        try:
            found = self._overlay.refresh()
        except SwerveError as error:
            if self._unreadable != str(error):
                self._say(f"cannot read or follow the routes: {error}")
            self._unreadable = str(error)
            return False
        self._unreadable = ""
        for text in (*found.events, *self._managed(found)):
            self._say(text)
        for target, known in self._engine.groups.items():
            if target not in found.groups and not known.beside:
                self._say(
                    f"{title(target)}: " + ("gone for now, with links or hops" if target in found.lost else "gone")
                )
        self._acting.follow(found.groups)
        self._engine.arrange(found.groups.values(), found.targets_of, now, found.lost, found.unlinked)
        return True
