"""What acts on packets and sockets, by programs in the kernel: flows, ports, labels, fast reroute and holds.

One thread, in the namespace that is steered.
"""

from __future__ import annotations

import contextlib
import selectors
import time
from collections.abc import Callable

from pytools import directories
from pytools.closing import Closing
from pytools.errors import SwerveError
from pytools.signals import AnySignal
from steering.acting import messages
from steering.acting.agent_maps import AgentMaps
from steering.acting.flows import FlowActing
from steering.acting.holds import HoldActing
from steering.acting.labels import LabelActing
from steering.acting.ports import PortActing
from steering.acting.standbys import StandByActing
from steering.deciding.engine import Engine
from steering.flows.engine import FlowEngine
from steering.policy.model import Policy


class PacketActing(Closing):
    """Carries out what is wanted of the packets and sockets of one namespace, or says what would be done.

    Parameters
    ----------
    name : str or None
        The namespace.
    holds : HoldActing
        Has the turn after the others.
    """

    def __init__(
        self,
        policy: Policy,
        name: str | None,
        apply: bool,
        engine: Engine,
        output: messages.Output,
        holds: HoldActing,
    ) -> None:
        self._apply, self._output = apply, output
        self._engine = FlowEngine(policy, directories.instance(name))
        self._maps = AgentMaps(directories.maps_socket(name), output)
        self._no_reroute = ""  # why the kernel's part is missing
        with contextlib.ExitStack() as stack:
            self.flows = stack.enter_context(FlowActing(self._engine, engine, output))  # has the kernel's part
            self._ports = stack.enter_context(PortActing(policy, apply, output))
            self._labels = stack.enter_context(LabelActing(policy, apply, self.flows, output))
            stack.enter_context(contextlib.closing(self._maps))
            self._stack = stack.pop_all()
        self._standbys = StandByActing(policy, engine, output)
        self._holds = holds

    def close(self) -> None:
        self._stack.close()

    def open(self) -> None:
        """Load the kernel's part if rules about flows need it.

        Raises
        ------
        SwerveError
            If the kernel takes no such program.
        """
        if self._engine.needed:
            self.flows.open()

    def register(self, selector: selectors.BaseSelector) -> None:
        self._maps.register(selector)

    def take(self, signal: AnySignal, now: int) -> None:
        for each in (self._engine, self._ports, self._labels):
            each.take(signal, now)

    def turn(self, frozen: Callable[[], str], guarded: Callable[[], bool]) -> None:
        """Do all that is due; `frozen` says why nothing may be changed, `guarded` whether a guardian lives."""
        if self._engine.needed or self.flows.is_open:
            self.flows.turn(time.monotonic_ns(), frozen)
        self._ports.turn(time.monotonic_ns(), frozen)
        self._labels.turn(time.monotonic_ns(), frozen)
        self._stand_by(time.monotonic_ns(), frozen, guarded)

    def _stand_by(self, now: int, frozen: Callable[[], str], guarded: Callable[[], bool]) -> None:
        """Keep fast reroute and holds armed; their program is loaded beside us, and may be late or missing."""
        if self._no_reroute or not (self._standbys.needed or self._holds.needed):
            return
        why_not = frozen()
        if not self._apply:
            self._holds.turn(now, self.flows, 0, why_not)
            return
        try:
            self.flows.prepare()
        except SwerveError as error:
            self._no_reroute = str(error)
            self._output.say(f"no fast reroute and no hold: {error}")
            return
        why_not = why_not or ("" if guarded() else "there is no live guardian")
        if self.flows.is_open:
            self._maps.turn(now, self.flows.paths)
        self._standbys.turn(now, self.flows.standbys, self._maps, why_not)
        self._holds.turn(now, self.flows, self._maps.changes, why_not)

    def take_back(self, why: str) -> None:
        for each in (self._ports, self._labels, self._holds):
            each.take_back(why)

    def facts(self) -> dict[str, object]:
        """How they stand, for the operator."""
        parts = (self._engine, self._standbys, self._holds, self._ports, self._labels)
        return {name: fact for each in parts for name, fact in each.facts().items()}
