"""The operator's desk, the part about pins: flows that are held on an interface by hand.

One thread, the controller's; CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, Final, Literal

from pytools.errors import RefusedError, UsageError
from pytools.signals import Path
from steering.acting import messages
from steering.control import orders
from steering.control.host import Site
from steering.control.requests import AGAIN, PinFlow, Reply, UnpinFlow
from steering.control.server import Peer
from steering.deciding import health
from steering.deciding.health import PathHealth
from steering.deciding.overrides import Overrides
from steering.elapsed import Slept
from steering.flows.plan import FlowAct
from steering.plan import FlowKey, Group, Member, Pin, canonical, title
from steering.policy.model import Policy


def objection(policy: Policy, paths: Mapping[Path, PathHealth], group: Group, overrides: Overrides, now: int) -> str:
    """Why a target must not be left with what these orders leave it; empty when it may."""
    ordered = overrides.drained(group)
    left = [member for member in group.members if member.nexthop_id not in ordered]
    if not left:
        return f"{title(group.target)} would be left without a nexthop"
    usable = [member for member in left if all(health.share(paths[path]) > 0 for path in _over(group, member, paths))]
    if not usable:
        bad = "; ".join(f"{path}: {paths[path].because}" for member in left for path in _over(group, member, paths))
        return f"all others of {title(group.target)} are drained ({bad})"
    measured = {path.address for m in usable for path in _over(group, m, paths) if _fresh(policy, paths[path], now)}
    wanted = {path.address for _, path in group.paths if path in paths and paths[path].state != "unmeasured"}
    if not measured:
        names = ", ".join(member.name for member in usable)
        return f"what is left of {title(group.target)} is not measured ({names}), or no longer"
    unheard = sorted(wanted - measured)
    return f"no other path to {unheard[0]} is measured" if unheard else ""


def pin_objection(
    policy: Policy, paths: Mapping[Path, PathHealth], group: Group, member: Member, remote: str, now: int
) -> str:
    """Why a flow must not be pinned to a member; empty when it may."""
    over = [path for path in _over(group, member, paths) if path.address == remote] or _over(group, member, paths)
    if not any(_fresh(policy, paths[path], now) for path in over):
        return f"{member.name} is not measured, or no longer"
    failed = next((path for path in over if paths[path].failed), None)
    return f"{failed}: {paths[failed].because}" if failed else ""


def _over(group: Group, member: Member, paths: Mapping[Path, PathHealth]) -> list[Path]:
    return [path for nexthop, path in group.paths if nexthop == member.nexthop_id and path in paths]


def _fresh(policy: Policy, path: PathHealth, now: int) -> bool:
    return path.measured and path.state != "unmeasured" and not health.stale(policy, path, now)


MOST: Final = 200
_SHOWN: Final = 100  # in a reply


class PinDesk:
    """Pins by hand."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def facts(self) -> dict[str, Any]:
        """All pins, those of rules too, and labels."""
        pins = self._site.flows.pinned()
        by_hand = {pin.flow for pin in self._site.flows.by_hand(time.monotonic_ns())}
        shown = [asdict(pin) | {"via": self._via(pin), "by_hand": pin.flow in by_hand} for pin in pins[:_SHOWN]]
        labels = self._site.flows.labelled()
        return {
            "pins": shown,
            "pin_count": len(pins),
            "labels": [asdict(change) for change in labels[:_SHOWN]],
            "label_count": len(labels),
        }

    def answer(self, request: PinFlow | UnpinFlow, asker: Peer, frozen: str) -> Reply:
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
        why = pin_objection(engine.policy, engine.paths, group, member, flow.remote, now)
        if sum(each.flow != flow for each in self._site.flows.by_hand(now)) >= MOST:
            why = f"{MOST} flows are pinned by hand already"
        if why:
            raise RefusedError(f"refused: {why}", "see `swerve steer status`")
        if why := self._site.flows.pin(pin):  # what it needs may be on its way
            return Reply(4, [f"refused: {why}"], "see `swerve steer status`", {AGAIN: True})
        self._tell("pin", pin, f"ordered by {asker}" + (f" ({request.why})" if request.why else ""))
        return Reply(lines=[f"pinned to {member.name}"])

    def slept(self, slept: Slept) -> None:
        """End pins so much earlier: the kernel ends them by CLOCK_MONOTONIC, which stood still in a suspend."""
        for pin in self._site.flows.by_hand(slept.before_ns):
            sooner = replace(pin, expires_ns=pin.expires_ns - slept.lasted_ns)
            if sooner.expires_ns > slept.before_ns:
                self._site.flows.pin(sooner)
            elif self._site.flows.unpin(pin.flow):
                self._tell("unpin", pin, "its time ran out while the host was suspended")

    def _unpin(self, flow: FlowKey, asker: Peer) -> Reply:
        pin = next((pin for pin in self._site.flows.pinned() if pin.flow == flow), None)
        if pin is None or not self._site.flows.unpin(flow):
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
        self._site.output.send(messages.flow_act(self._site.output.host, act, outcome, now, time.monotonic_ns()))
