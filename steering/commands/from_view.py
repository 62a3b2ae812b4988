"""What `swerve top` may know of steering and ask of it: the lock for who steers, the control socket for orders.

The same requests as those of `swerve steer drain|undrain|pin|unpin`; each call may wait as long as those do.
"""

from __future__ import annotations

from typing import Final

from pytools import directories
from pytools.errors import UsageError
from pytools.signals import TcpFlow
from pytools.units import parse_duration
from pytools.views.actions import Mode
from steering import elapsed
from steering.acting import journal
from steering.acting.lock import holder
from steering.control import client
from steering.control.requests import AnyRequest, Drain, PinFlow, Undrain, UnpinFlow
from steering.control.stop_file import StopFile
from steering.guarding import confirming

_TCP: Final = 6
_PIN_S: Final = 10.0  # until the first pin's kernel program is loaded, and a neighbour has answered
_WHY: Final = "from swerve top"


class Orders:
    """Implements `pytools.views.actions.Steering`."""

    def __init__(self, netns: str | None) -> None:
        self._folder = directories.state_dir(netns)
        self._stop_file = StopFile(self._folder)  # remembers what it read

    def mode(self) -> Mode:
        """Who steers: as the holder of the lock says of itself."""
        held = holder(self._folder / journal.LOCK_FILE)
        if held is None:
            return Mode(frozen=self._stop_file.why())
        deadline = confirming.pending(held)
        left_s = None
        if deadline is not None and confirming.verdict(self._folder / journal.FILE, deadline.run) == "open":
            left_s = max(0.0, (deadline.at_ns - elapsed.now_ns()) / 1e9)
        confirm = f"{Mode.confirm}{directories.option_of(self._folder.name)}"
        return Mode(True, bool(held.get("apply")), left_s, self._stop_file.why(), confirm)

    def drain(self, interface: str, lasting: str) -> list[str]:
        return self._ask(Drain(interface, for_ns=_duration(lasting) if lasting else 0, why=_WHY))

    def undrain(self, interface: str) -> list[str]:
        return self._ask(Undrain(interface))

    def pin(self, flow: TcpFlow, interface: str, lasting: str) -> list[str]:
        """Hold a connection on an interface."""
        ends = (_TCP, flow.local, flow.local_port, flow.remote, flow.remote_port)
        return self._ask(PinFlow(*ends, interface, _duration(lasting), _WHY), _PIN_S)

    def unpin(self, flow: TcpFlow) -> list[str]:
        return self._ask(UnpinFlow(_TCP, flow.local, flow.local_port, flow.remote, flow.remote_port))

    def _ask(self, request: AnyRequest, patience_s: float = 0.0) -> list[str]:
        return client.ask(self._folder, request, patience_s=patience_s).lines


def _duration(text: str) -> int:
    try:
        return parse_duration(text)
    except ValueError:
        raise UsageError(f"{text} is not a duration", "like 90s, 10m, 1h") from None
