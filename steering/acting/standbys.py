"""Fast reroute: stand-bys armed in the kernel, their lease renewed, and what the kernel moved told as acts.

The kernel acts by itself and at once; we only hear of it. One thread, in the namespace that is steered. Times are
CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pytools.errors import SwerveError
from pytools.signals import Act, Path
from steering.acting import messages
from steering.acting.agent_maps import AgentMaps
from steering.actuators.standbys import Moved, StandBys
from steering.deciding.engine import Engine
from steering.deciding.standbys import needed, standbys
from steering.plan import Target
from steering.policy.model import Policy

_PLAN_EVERY_NS: Final = 200_000_000
_OVER_NS: Final = 500_000_000  # without a packet for so long beyond the hold time: the move is over


@dataclass
class _Move:
    """A move that has been told of, and is not over."""

    act: Act
    before: int  # packets and bytes that the stand-by had taken earlier
    bytes_before: int
    first_ns: int
    latest: Moved


class StandByActing:
    """Keeps the stand-bys of one namespace."""

    def __init__(self, policy: Policy, engine: Engine, output: messages.Output) -> None:
        self._policy, self._engine, self._output = policy, engine, output
        self._plan_ns = self._changes = 0
        self._refused: Mapping[Path, str] = {}
        self._armed = 0
        self._why_not = ""  # why none may be used; empty while they may
        self._seen: dict[tuple[Path, Target], tuple[int, int]] = {}  # packets and bytes, after the last move was over
        self._moves: dict[tuple[Path, Target], _Move] = {}

    @property
    def needed(self) -> bool:
        """Whether the policy wants any."""
        return needed(self._policy)

    def facts(self) -> dict[str, object]:
        """How many paths have a stand-by that the kernel may use, for the operator."""
        if not self.needed:
            return {}
        return {"standbys": 0 if self._why_not else self._armed, "standbys_missing": self._why_not}

    def turn(self, now: int, kernel: StandBys | None, maps: AgentMaps, why_not: str) -> None:
        """Arm what is wanted, tell what was moved, and renew the lease unless there is a reason not to."""
        if kernel is None or not self.needed:
            return
        safety = self._policy.safety
        self._tell(kernel.moved(), now)  # first: who is armed anew counts from zero
        if now >= self._plan_ns or self._changes != maps.changes:
            self._plan_ns, self._changes = now + _PLAN_EVERY_NS, maps.changes
            self._plan(kernel)
        kernel.renew(0 if why_not else now + safety.lease, safety.reroute_hold)  # last: without any armed there is none
        self._why_not = why_not

    # ---- what is wanted ----

    def _plan(self, kernel: StandBys) -> None:
        engine = self._engine
        wanted = standbys(self._policy, engine.paths, engine.groups.values(), engine.overrides)
        try:
            refused = kernel.arm(wanted)
        except SwerveError as error:
            refused = {each.path: str(error) for each in wanted}
        self._armed = sum(each.path not in refused and kernel.alive(each) for each in wanted)
        if kernel.paths.lent:
            for path, why in refused.items():
                if self._refused.get(path) != why:
                    self._output.say(f"no fast reroute past {path}: {why}")
            self._refused = refused

    # ---- what the kernel did ----

    def _tell(self, moved: list[Moved], now: int) -> None:
        for each in moved:
            name = each.standby.path, each.standby.target
            known = self._moves.get(name)
            before = self._seen.get(name, (0, 0))
            if known is None and each.packets > before[0]:
                act = messages.rerouted(self._output.host, each, now)
                self._moves[name] = _Move(act, *before, each.first_ns, each)
                self._output.send(act)
            elif known is not None:
                known.latest = each
                if now - each.last_ns > self._policy.safety.reroute_hold + _OVER_NS:
                    self._end(name, now)
        present = {(each.standby.path, each.standby.target) for each in moved}
        for name in self._moves.keys() - present:
            self._end(name, now)
        self._seen = {name: seen for name, seen in self._seen.items() if name in present}

    def _end(self, name: tuple[Path, Target], now: int) -> None:
        known = self._moves.pop(name)
        moved = known.latest
        self._seen[name] = moved.packets, moved.bytes
        packets, size = moved.packets - known.before, moved.bytes - known.bytes_before
        lasted_ns = moved.last_ns - known.first_ns
        self._output.send(messages.reroute_over(known.act, moved, packets, size, lasted_ns, now))
