"""Active ports of bonds: the kernel is read, what is wanted carried out, every outcome told.

Each selection is remembered in a file before it is made, for whoever puts the former port back. One thread, in the
namespace that is steered. Times are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from pytools.errors import SwerveError
from pytools.kernel import netns
from pytools.kernel.netlink.routing import Netlink
from steering.acting import bond_ports, messages
from steering.acting.bond_ports import Selected
from steering.actuators import bonds
from steering.deciding.engine import Engine
from steering.flows.bonds import BondEngine
from steering.plan import BondAct
from steering.policy.model import Policy

_LOOK_NS: Final = 50_000_000
_READ_NS: Final = 1_000_000_000


class BondActing:
    """Carries out what is wanted of bonds, or says what would be done.

    Parameters
    ----------
    policy : Policy
        The policy; without `bonds` in it nothing is done.
    """

    def __init__(
        self, policy: Policy, apply: bool, engine: Engine, netlink: Netlink, file: Path, output: messages.Output
    ) -> None:
        self._apply, self._netlink, self._file, self._output = apply, netlink, file, output
        self._scope = netns.scope()
        self._engine = None if policy.bonds is None else BondEngine(policy, policy.bonds, engine)
        self._selected: dict[str, Selected] = {}
        self._look_ns = self._read_ns = 0
        self._trouble = ""

    def begin(self, taken_over: bool) -> None:
        """Go on with what a controller before us selected, or put the former ports back."""
        if self._engine is None or not taken_over:
            self.take_back("it was left by a controller before this one")
            return
        self._read(time.monotonic_ns())
        for known in bond_ports.load(self._file, self._scope):
            if self._engine.adopt(known.bond, known.former, known.chosen):
                self._selected[known.bond] = known
        self._remember()

    def turn(self, now: int, refusal: Callable[[], str]) -> None:
        """Judge, decide and act, unless there is a reason to change nothing."""
        if self._engine is None or now < self._look_ns:
            return
        self._look_ns = now + _LOOK_NS
        try:
            if now >= self._read_ns:
                self._read(now)
            self._engine.look(now)
            if not self._engine.decide(now) or refusal():
                return
            self._read(now)  # its monitor may have acted meanwhile
            for act in self._engine.decide(now):
                self._carry_out(self._engine, act, now)
        except SwerveError as error:
            if self._trouble != str(error):
                self._output.say(f"bonds cannot be read: {error}")
            self._trouble, self._read_ns = str(error), now + _READ_NS

    def _read(self, now: int) -> None:
        assert self._engine is not None
        self._read_ns = now + _READ_NS
        for act in self._engine.arrange(*bonds.read(self._netlink), now):
            self._selected.pop(act.bond.name, None)
            self._remember()
            self._tell(act, "undone", now, now)

    def _remember(self) -> str:
        """Write down what is selected; why that is impossible."""
        try:
            bond_ports.save(self._file, self._scope, self._selected.values())
        except OSError as error:
            return f"it cannot be remembered: {error.strerror}"
        return ""

    def _carry_out(self, engine: BondEngine, act: BondAct, now: int) -> None:
        if not self._apply:
            engine.pretended(act, now)
            self._tell(act, "dry_run", now)
            return
        name, before = act.bond.name, self._selected.get(act.bond.name)
        former, chosen = (before.former, (act.bond.active, act.port)) if before else (act.bond.active, (act.port,))
        self._selected[name] = Selected(name, act.bond.index, former, chosen)
        failure = self._remember()
        try:
            if not failure:
                bonds.select(self._netlink, act.bond.index, act.port)
        except SwerveError as error:
            failure = str(error)
        acknowledged = time.monotonic_ns()
        if failure and before is not None:
            self._selected[name] = before
        elif failure or act.over:
            del self._selected[name]
        if failure:
            engine.rejected(act, now)
        else:
            engine.carried_out(act, acknowledged)
        self._remember()
        outcome: messages.Outcome = "failed" if failure else "undone" if act.over else "applied"
        self._tell(act, outcome, now, None if failure else acknowledged, failure)

    def _tell(
        self, act: BondAct, outcome: messages.Outcome, decided: int, acknowledged: int | None = None, failure: str = ""
    ) -> None:
        self._output.send(messages.bond_act(self._output.host, act, outcome, decided, acknowledged, failure))

    def take_back(self, why: str) -> str:
        """Put the former ports back, and say so; what could not be."""
        try:
            done = bond_ports.restore(self._netlink, self._file, self._scope, why)
        except SwerveError as error:
            return f"bonds: {error}"
        for each in done:
            self._output.send(messages.bond_restored(self._output.host, each))
        self._selected = {}
        return "; ".join(each.text for each in done if each.failure)

    def facts(self) -> dict[str, object]:
        if self._engine is None:
            return {}
        return {"bonds": self._engine.facts(), "bond_count": len(self._selected)}
