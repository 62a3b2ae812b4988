"""What the live view may ask of steering: a place that steering fills, for views import nothing of it.

Who mounts the commands (`steering.cli`) registers how to make a `Steering`; without one the view only observes. The
requests themselves go over the controller's control socket, like those of `swerve steer`. Calls may wait for seconds:
make them beside the view's loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # every command imports this
    from pytools.signals import TcpFlow


@dataclass(frozen=True)
class Mode:
    """Who steers just now."""

    running: bool = False  # a controller runs
    applies: bool = False  # and changes something: no dry run
    confirm_left_s: float | None = None  # everything is taken back then, unless somebody confirms
    frozen: str = ""  # why nothing is changed; empty: it may be
    confirm: str = "swerve steer confirm"  # the command that does


class Steering(Protocol):
    """The controller of one instance, as the view sees it."""

    def mode(self) -> Mode:
        """Who steers; cheap enough for once a second.

        Raises
        ------
        SwerveError
            If that cannot be read.
        """

    def drain(self, interface: str, lasting: str) -> list[str]:
        """Take an interface out of use, for so long (`10m`; empty: until it is taken back); what was done.

        Raises
        ------
        SwerveError
            If it was not: no controller, refused, or the words make no sense.
        """

    def undrain(self, interface: str) -> list[str]:
        """Take that back. Raises as `drain` does."""

    def pin(self, flow: TcpFlow, interface: str, lasting: str) -> list[str]:
        """Hold a live connection on an interface for so long. Raises as `drain` does."""

    def unpin(self, flow: TcpFlow) -> list[str]:
        """Remove the pin. Raises as `drain` does."""


Maker = Callable[[str | None], Steering]
_makers: list[Maker] = []


def register(maker: Maker) -> Maker:
    """Say how the steering of an instance (by its namespace) is reached; the last one counts."""
    _makers.append(maker)
    return maker


def steering(netns: str | None) -> Steering | None:
    """The steering of an instance; None where nobody registered any."""
    return _makers[-1](netns) if _makers else None
