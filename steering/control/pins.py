"""The operator's desk, the part about pins: flows that are held on an interface by hand.

One thread, the controller's; CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import Any, Final, Literal

from pytools.errors import RefusedError, UsageError
from steering.acting import messages
from steering.control import manual_pins, objections, orders
from steering.control.host import Site
from steering.control.manual_pins import ManualPins
from steering.control.requests import AGAIN, PinFlow, Reply, UnpinFlow
from steering.control.server import Peer
from steering.elapsed import Slept
from steering.flows.plan import FlowAct
from steering.plan import FlowKey, Pin, canonical

_SHOWN: Final = 100  # in a reply


class PinDesk:
    """Pins by hand.

    Parameters
    ----------
    site : Site
        The controller.
    """

    def __init__(self, site: Site) -> None:
        self._site = site
        self._pins = ManualPins()

    def facts(self) -> dict[str, Any]:
        """All pins, those of rules too, and labels."""
        pins = self._site.pinned()
        by_hand = {pin.flow for pin in self._pins.wanted(time.monotonic_ns())}
        shown = [asdict(pin) | {"via": self._via(pin), "by_hand": pin.flow in by_hand} for pin in pins[:_SHOWN]]
        labels = self._site.labelled()
        return {
            "pins": shown,
            "pin_count": len(pins),
            "labels": [asdict(change) for change in labels[:_SHOWN]],
            "label_count": len(labels),
        } | self._site.flow_facts()

    def answer(self, request: PinFlow | UnpinFlow, asker: Peer, frozen: str) -> Reply:
        """Pin a flow, or let it go."""
        flow = FlowKey(
            request.protocol,
            canonical(request.local),
            request.local_port,
            canonical(request.remote),
            request.remote_port,
        )
        if isinstance(request, UnpinFlow):
            return self._unpin(flow, asker)
        if not self._site.apply:
            raise RefusedError("refused: a dry run changes nothing", "start the controller with --apply")
        if frozen:
            raise RefusedError(f"refused: frozen: {frozen}", "`swerve steer thaw`")
        engine, now = self._site.engine, time.monotonic_ns()
        group, member = orders.member_for(engine.groups.values(), flow.remote, request.via)
        pin = Pin(flow, group.target, member.nexthop_id, now + request.for_ns)
        why = objections.pin_objection(engine.policy, engine.paths, group, member, flow.remote, now)
        if self._pins.full(flow, now):
            why = f"{manual_pins.MOST} flows are pinned by hand already"
        if why:
            raise RefusedError(f"refused: {why}", "see `swerve steer status`")
        if why := self._site.pin(pin):  # what it needs may be on its way
            return Reply(4, [f"refused: {why}"], "see `swerve steer status`", {AGAIN: True})
        self._pins.put(pin)
        self._tell("pin", pin, f"ordered by {asker}" + (f" ({request.why})" if request.why else ""))
        return Reply(lines=[f"pinned to {member.name}"])

    def slept(self, slept: Slept) -> None:
        """End pins so much earlier: the kernel ends them by CLOCK_MONOTONIC, which stood still in a suspend."""
        for pin in self._pins.wanted(slept.before_ns):
            sooner = replace(pin, expires_ns=pin.expires_ns - slept.lasted_ns)
            if sooner.expires_ns > slept.before_ns:
                if not self._site.pin(sooner):
                    self._pins.put(sooner)
                continue
            self._pins.drop(pin.flow)
            if self._site.unpin(pin.flow):
                self._tell("unpin", pin, "its time ran out while the host was suspended")

    def _unpin(self, flow: FlowKey, asker: Peer) -> Reply:
        pin = next((pin for pin in self._site.pinned() if pin.flow == flow), None)
        self._pins.drop(flow)
        if pin is None or not self._site.unpin(flow):
            raise UsageError(
                f"no flow to {flow.remote} port {flow.remote_port} is pinned so", "see `swerve steer status`"
            )
        self._tell("unpin", pin, f"taken back by {asker}")
        return Reply(lines=["the pin is removed; the flow follows the routing table"])

    def _via(self, pin: Pin) -> str:
        """The hop that a flow is pinned to; empty when its target does not have it any more."""
        group = self._site.engine.groups.get(pin.target)
        return next((m.name for m in group.members if m.nexthop_id == pin.nexthop_id), "") if group else ""

    def _tell(self, kind: Literal["pin", "unpin"], pin: Pin, because: str) -> None:
        now, names = time.monotonic_ns(), [name for name in (self._via(pin),) if name]
        after = tuple((name, int(kind == "pin")) for name in names)
        act = FlowAct(kind, pin.target, (pin.flow,), because, "operator", now, (pin,), after=after)
        outcome: messages.Outcome = "applied" if kind == "pin" else "undone"
        self._site.send(messages.flow_act(self._site.host(), act, outcome, now, time.monotonic_ns()))
