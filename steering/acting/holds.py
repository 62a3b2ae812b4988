"""Holds armed in the kernel, their lease renewed, and how they stand told.

The kernel decides about each packet; we say where, and how long a queue may be. One thread, in the namespace that is
steered. Times are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from pytools.errors import SwerveError
from pytools.kernel.netlink.routing import Netlink
from pytools.signals import AnySignal, HoldState, Path, header
from steering.acting import messages
from steering.acting.flows import FlowActing
from steering.actuators.holds import Holding, Holds
from steering.deciding.engine import Engine
from steering.deciding.holds import Conditions, conditions, holds, lasts, needed
from steering.plan import Hold
from steering.policy.model import Policy

_PLAN_EVERY_NS: Final = 200_000_000
_TELL_EVERY_NS: Final = 500_000_000
_LEASE_NS: Final = 1_000_000_000  # renewed with each turn


class HoldActing:
    """Keeps the holds of one namespace.

    Parameters
    ----------
    publish : callable
        Takes the states.
    """

    def __init__(
        self,
        policy: Policy,
        apply: bool,
        engine: Engine,
        netlink: Netlink,
        output: messages.Output,
        publish: Callable[[AnySignal], None],
    ) -> None:
        self._policy, self._engine = policy, engine
        self._apply, self._netlink, self._output, self._publish = apply, netlink, output, publish
        self._kernel: Holds | None = None
        self._wanted: dict[Path, Hold] = {}
        self._refused: dict[Path, str] = {}
        self._told: dict[Path, tuple[messages.Outcome, Hold, str]] = {}
        self._conditions: Conditions = {}
        self._plan_ns = self._tell_ns = self._changes = 0
        self._armed = True  # as was last wanted; else nothing is to be held

    @property
    def needed(self) -> bool:
        """Whether the policy wants any."""
        return needed(self._policy)

    def turn(self, now: int, flows: FlowActing, changes: int, frozen: str) -> None:
        """Arm what is wanted, renew the lease unless frozen, and tell how it stands.

        Parameters
        ----------
        flows : FlowActing
            Has the kernel's part, once that is loaded.
        changes : int
            How often the agent's maps came or went.
        frozen : str
            Why nothing may be changed now; empty when it may.
        """
        if not self.needed:
            return
        if self._kernel is None and flows.table is not None and self._apply:
            self._kernel = Holds(flows.table, flows.paths, self._netlink)
        if self._kernel is not None:
            self._renew(now, frozen)
        if (now >= self._plan_ns or changes != self._changes) and not frozen:
            self._plan_ns, self._changes = now + _PLAN_EVERY_NS, changes
            engine, paths = self._engine, self._engine.probed(now)
            known = engine.evidence.facts, engine.usual.limits
            self._conditions = conditions(self._policy, paths, *known, self._conditions, now)
            groups = engine.groups.values()
            self._plan(holds(self._policy, paths, groups, engine.overrides, self._conditions, now), flows, now)
        if now >= self._tell_ns:
            self._tell_ns = now + _TELL_EVERY_NS
            self._tell(now, frozen)

    def _plan(self, wanted: Iterable[Hold], flows: FlowActing, now: int) -> None:
        self._wanted = {each.path: each for each in wanted}
        if self._kernel is not None:
            try:
                self._refused = self._kernel.arm(self._wanted.values())
                self._armed = True
            except SwerveError as error:
                self._refused = dict.fromkeys(self._wanted, str(error))
                self._armed = False
            self._renew(now)
        for path in self._told.keys() - self._wanted.keys():
            self._over(path, self._why_over(path, now), now)
        if not self._apply or (self._kernel is not None and flows.paths.lent):  # an agent that restarts is no failure
            self._say(now)

    def _renew(self, now: int, frozen: str = "") -> None:
        assert self._kernel is not None
        self._kernel.renew(now + _LEASE_NS if self._armed and not frozen else 0)

    def _why_over(self, path: Path, now: int) -> str:
        known = self._engine.probed(now).get(path)
        if known is None or known.state == "unmeasured":
            return "the path is not measured any more"
        if known.failed:
            return "nothing passes along the path"
        under = next((rule for rule in self._policy.rules if rule.name == self._told[path][1].under), None)
        if under is not None and not lasts(under, path, self._conditions, now):
            return "its condition is over"
        return "its target is held by an order"

    def _say(self, now: int) -> None:
        """Tell what has changed, as acts."""
        for path, hold in self._wanted.items():
            why = self._refused.get(path, "")
            outcome: messages.Outcome = "failed" if why else "applied" if self._apply else "dry_run"
            before = self._told.get(path)
            self._told[path] = outcome, hold, why
            # what was measured changes all the time, and is told once
            if before is None or before != (outcome, replace(hold, because=before[1].because), why):
                self._output.send(messages.hold_act(self._output.host, hold, outcome, hold.because, now, why))

    def _over(self, path: Path, why: str, now: int) -> None:
        outcome, hold, _ = self._told.pop(path)
        if outcome == "applied":
            self._output.send(messages.hold_act(self._output.host, hold, "undone", why, now))
        self._publish(self._state(hold, None, why, now))

    def _tell(self, now: int, frozen: str) -> None:
        refused = self._refused if self._apply else dict.fromkeys(self._wanted, "it is a dry run")
        if self._kernel is not None:
            for holding in self._kernel.read(now):
                if holding.hold.path in refused:
                    continue
                why = frozen or self._kernel.blind(holding, now)
                self._publish(self._state(holding.hold, holding, why, now))
        for path, why in refused.items():
            self._publish(self._state(self._wanted[path], None, why, now))

    def _state(self, hold: Hold, holding: Holding | None, why_not: str, now: int) -> HoldState:
        return HoldState(
            **header(self._output.host, now),
            path=hold.path,
            threshold_ns=hold.limits.threshold_ns,
            longest_ns=hold.limits.longest_ns,
            armed=holding is not None,
            why_not=why_not,
            queueing_ns=holding.queue_ns if holding else None,
            rate_bytes_per_s=(holding.rate or None) if holding else None,
            held_packets=holding.packets if holding else 0,
            held_bytes=holding.bytes if holding else 0,
            waited_ns=holding.waited_ns if holding else 0,
            samples=holding.samples if holding else 0,
            samples_above=holding.above if holding else 0,
            under=hold.under,
        )

    def take_back(self, why: str) -> None:
        """Hold nothing any more; fq goes with all that is ours (pytools.kernel.leftovers), or stays for a successor."""
        if self._kernel is not None:
            self._kernel.end()
            self._kernel.close()
        for path in list(self._told):
            self._over(path, why, time.monotonic_ns())

    def facts(self) -> dict[str, object]:
        """How many paths are held, and where that is impossible, for the operator."""
        if not self.needed:
            return {}
        armed = len(self._wanted) - len(self._refused) if self._kernel is not None else 0
        refused = {str(path): why for path, why in self._refused.items()}
        return {"holds": armed, "holds_wanted": len(self._wanted), "holds_refused": refused}
