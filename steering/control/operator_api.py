"""The operator's desk in a running controller: requests in, orders kept on disk, and what stops everything.

One thread, the controller's. Times are CLOCK_MONOTONIC nanoseconds; what a person asked for ends by CLOCK_BOOTTIME.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final, Self

from pytools import directories
from pytools.errors import RefusedError, SwerveError, UsageError
from pytools.kernel import netns
from pytools.units import SECOND, duration_text
from steering import elapsed
from steering.acting import journal, messages, undo
from steering.acting.undo import TakenBack
from steering.control import kept_orders, orders, pins
from steering.control.host import Site
from steering.control.pins import PinDesk
from steering.control.requests import (
    SOCKET,
    AnyRequest,
    Drain,
    Hold,
    PinFlow,
    Reply,
    Status,
    Undo,
    Undrain,
    Unhold,
    UnpinFlow,
)
from steering.control.server import ControlServer, Peer
from steering.control.stop_file import StopFile
from steering.deciding.overrides import Override, Overrides
from steering.guarding import confirming
from steering.guarding.confirming import Deadline
from steering.plan import Group, Target, same, title

_DISK_S: Final = 1.0  # an order waits for the disk; shorter than the shortest lease
_GRACE_NS: Final = 500_000_000  # after the deadline, before the controller itself does what the guardian ought to


class Desk:
    """What an operator can do with a running controller.

    Parameters
    ----------
    deadline : Deadline | None
        Until when this run has to be confirmed.

    Raises
    ------
    SwerveError
        If the orders on disk cannot be read, or must not be trusted.
    """

    def __init__(self, site: Site, deadline: Deadline | None) -> None:
        self._site, self._deadline = site, deadline
        self._stop_file = StopFile(site.folder)
        self._scope = netns.scope()
        self.sleeps = elapsed.Sleeps()  # when the host was suspended
        self.frozen = ""  # why no act may be started; empty when one may
        self._pins = PinDesk(site)
        site.engine.overrides = kept_orders.load(site.folder, elapsed.moment())
        for order in site.engine.overrides.orders:
            site.output.say(f"an order is in force: {orders.text_of(order)}")
        if deadline is not None:
            left = duration_text(max(0, deadline.at_ns - elapsed.now_ns()))
            confirm = f"swerve steer confirm{directories.option_of(site.folder.name)}"
            site.output.say(f"everything is undone after {left}, unless you run: {confirm}")
        self._server = ControlServer(site.folder / SOCKET, self.answer)
        self.register = self._server.register  # have a selector wait for the operator's requests

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()

    def tick(self, now: int) -> None:
        """Look at the stop file, at orders that run out, and at the deadline. Costs microseconds."""
        self.look_for_sleep()
        self.look()
        self._server.tick(now)
        engine = self._site.engine
        left = engine.overrides.at(elapsed.moment())
        if left != engine.overrides:
            ended = [order for order in engine.overrides.orders if order not in left.orders]
            self._keep_quietly(left)
            self._end(ended, "has run out")
        if self._deadline is not None and elapsed.now_ns() >= self._deadline.at_ns + _GRACE_NS:
            self._overdue(self._deadline)

    def look_for_sleep(self) -> None:
        """After a suspend nothing counts that was measured before it; to be called before anything is decided."""
        slept = self.sleeps.look()
        if slept is None:
            return
        lasted = duration_text(slept.lasted_ns // SECOND * SECOND) if slept.lasted_ns > SECOND else "a moment"
        self._site.output.say(f"the host was suspended for {lasted}: what was measured before counts no more")
        self._site.engine.suspended(slept.lasted_ns, slept.after_ns, slept.before_ns)
        self._pins.slept(slept)

    @property
    def confirmed(self) -> bool:
        """Whether this run may leave something behind."""
        return self._deadline is None or self._verdict() == "confirmed"

    # ---- what stops everything ----

    def look(self) -> str:
        """Look at the stop file now; why no act may be started."""
        why = self._stop_file.why()
        if bool(why) != bool(self.frozen):
            self._site.output.say(f"frozen: {why}; nothing is changed until the stop file is gone" if why else "thawed")
            self._site.output.send(messages.order(self._site.output.host, "freeze", why or self.frozen, bool(why)))
        self.frozen = self._site.engine.frozen = why
        return why

    def _verdict(self) -> confirming.Verdict:
        assert self._deadline is not None
        return confirming.verdict(self._site.folder / journal.FILE, self._deadline.run)

    def _overdue(self, deadline: Deadline) -> None:
        """End, if nobody confirmed us: the guardian should have done it, so there is none just now."""
        verdict = self._verdict()
        if verdict == "confirmed":
            self._deadline = None
            return
        self._deadline = replace(deadline, at_ns=deadline.at_ns + _GRACE_NS)
        self._site.output.say("nobody confirmed this run in time: everything is undone")
        self._site.stop(signal.SIGTERM)

    # ---- requests ----

    def answer(self, request: AnyRequest, asker: Peer) -> Reply:
        match request:
            case Status():
                return Reply(facts=self._facts())
            case Drain():
                return self._drain(request, asker)
            case Undrain():
                return self._undrain(request, asker)
            case Hold() | Unhold():
                return self._hold(request, asker)
            case PinFlow() | UnpinFlow():
                return self._pins.answer(request, asker, self.frozen)
            case Undo():
                return self._undo(request, asker)

    def _drain(self, request: Drain, asker: Peer) -> Reply:
        engine, now = self._site.engine, time.monotonic_ns()
        groups = list(engine.groups.values())
        asked = (request.leaves_by, request.to, request.for_ns)
        fresh = orders.to_drain(groups, *asked, elapsed.moment(), str(asker), request.why)
        wanted = orders.with_orders(engine.overrides, fresh)
        touched = [group for group in groups if Overrides(fresh).drained(group)]
        for group in touched:
            why = pins.objection(engine.policy, engine.paths, group, wanted, now)
            if why:
                raise RefusedError(f"refused: {why}", "see `swerve steer status`")
        self._keep(wanted)
        self._tell(fresh, f"ordered by {asker}")
        self._site.act(engine.changes(time.monotonic_ns(), [group.target for group in touched]))
        lines = [self._outcome(group.target) for group in touched]
        if any(_in_use(engine.groups.get(group.target), Overrides(fresh)) for group in touched):
            return Reply(1, lines, "the order stands: see `swerve steer status`")
        return Reply(lines=lines)

    def _undrain(self, request: Undrain, asker: Peer) -> Reply:
        engine = self._site.engine
        left, ended = orders.without_drain(engine.overrides, engine.groups.values(), request.leaves_by, request.to)
        if not ended:
            there = ", ".join(orders.text_of(o) for o in engine.overrides.orders if o.kind == "drain")
            raise UsageError(f"{request.leaves_by} is not drained by an order", f"drained are: {there or 'none'}")
        self._keep(left)
        touched = self._end(ended, f"was taken back by {asker}")
        return Reply(lines=[self._outcome(target) for target in touched])

    def _end(self, ended: Iterable[Override], how: str) -> list[Target]:
        """Go on without these orders; the targets that they were about."""
        gone, engine = Overrides(tuple(ended)), self._site.engine
        self._tell(gone.orders, how, over=True)
        touched = [g.target for g in engine.groups.values() if gone.drained(g) or gone.held(g)]
        because = "; ".join(f"{orders.text_of(order)}: {how}" for order in gone.orders if order.kind == "drain")
        changes = engine.changes(time.monotonic_ns(), touched)
        self._site.act(
            [c if c.under or not because else replace(c, because=because, under="operator") for c in changes]
        )
        return touched

    def _hold(self, request: Hold | Unhold, asker: Peer) -> Reply:
        engine = self._site.engine
        target = orders.hold_named(engine.overrides, request.target) if isinstance(request, Unhold) else None
        if target is None:
            target = orders.target_named(engine.groups.values(), request.target)
        if isinstance(request, Unhold):
            left, ended = orders.without_hold(engine.overrides, target)
            if not ended:
                raise UsageError(f"{target or 'everything'} is not held", "see `swerve steer status`")
            self._keep(left)
            self._end(ended, f"was taken back by {asker}")
            return Reply(lines=[f"{target or 'everything'} is held no more"])
        order = Override("hold", target=target, by=str(asker), why=request.why)
        order = order.lasting(request.for_ns, elapsed.moment())
        self._keep(orders.with_orders(engine.overrides, [order]))
        self._tell([order], f"ordered by {asker}")
        return Reply(lines=[f"{target or 'everything'} stays as it is"])

    def _tell(self, told: Iterable[Override], because: str, over: bool = False) -> None:
        """Say that orders began or ended, to the log and to whoever reads the history."""
        for order in told:
            self._site.output.say(f"{orders.text_of(order)}: {because}")
            self._site.output.send(messages.order(self._site.output.host, orders.text_of(order), because, not over))

    def _outcome(self, target: Target) -> str:
        group = self._site.engine.groups.get(target)
        if group is None:
            return f"{title(target)} is gone"
        weights = ", ".join(f"{name} weight {weight}" for name, weight in group.named(group.current).items())
        said = f"{title(target)}: {weights}"
        if self.frozen:
            return f"{said}; frozen: the order is carried out when the stop file is gone"
        if not self._site.apply:
            return f"{said}; a dry run: nothing is changed"
        why = self._site.engine.why_rejected(target)
        held = self._site.engine.overrides.held(group)
        return f"{said}; {why or held}" if why or held else said

    def _undo(self, request: Undo, asker: Peer) -> Reply:
        if not self._site.apply:
            raise RefusedError("refused: a dry run has changed nothing", "see `swerve steer history`")
        if self.frozen:
            raise RefusedError(f"refused: frozen: {self.frozen}", "`swerve steer thaw`")
        found = journal.read(self._site.folder / journal.FILE).entries
        done = undo.take_back(undo.last_acts(found, self._scope), request.count, self._take_back)
        if not done:
            return Reply(lines=["nothing to undo"])
        changed = dict.fromkeys(each.act.target for each in done if not each.why)
        unheld = self._hold_for(changed, request.hold_ns, asker)
        lines = [*(each.text for each in done), *map(self._outcome, changed), *filter(None, [unheld])]
        return Reply(undo.exit_code(done) or int(bool(unheld)), lines)

    def _take_back(self, act: journal.Entry) -> TakenBack:
        engine = self._site.engine
        group = engine.groups.get(act.target)
        if group is None:
            return TakenBack(act, "left alone: it is not managed any more", tried=False)
        change = undo.change_back(act, group, engine.paths, engine.overrides.drained(group))
        if isinstance(change, str):
            return TakenBack(act, change, tried=False)
        return TakenBack(act, self._site.take_back(change, undo.undo_name(act.act_id)))

    def _hold_for(self, targets: Iterable[Target], hold_ns: int, asker: Peer) -> str:
        """Hold these for so long, but for those that are held longer already; why they could not be."""
        before, now = self._site.engine.overrides, elapsed.moment()
        fresh = [
            Override("hold", target=target, by=str(asker), why="an act was taken back").lasting(hold_ns, now)
            for target in targets
            if hold_ns and not orders.held_as_long(before, target, hold_ns, now)
        ]
        if not fresh:
            return ""
        try:
            self._keep(orders.with_orders(before, fresh))
        except SwerveError as error:
            return f"not held, so the policy may do it again: {error}"
        self._tell(fresh, f"ordered by {asker}")
        return ""

    # ---- orders on disk ----

    def _keep(self, wanted: Overrides) -> None:
        if len(wanted.orders) > kept_orders.MOST:
            raise RefusedError(f"refused: more than {kept_orders.MOST} orders", "take some back")
        folder, before, later = self._site.folder, self._site.engine.overrides, self._site.later
        try:
            later.do(lambda: kept_orders.save(folder, wanted), _DISK_S)
        except OSError as error:
            later.put(lambda: kept_orders.save(folder, before))  # it may have been replaced all the same
            raise SwerveError(f"the order cannot be kept: {error.strerror}", "it is not in force") from None
        self._site.engine.overrides = wanted

    def _keep_quietly(self, wanted: Overrides) -> None:
        """The same for orders that have run out, which they do on disk as well."""
        try:
            self._keep(wanted)
        except SwerveError as error:
            self._site.output.say(str(error))
            self._site.engine.overrides = wanted

    # ---- what only we know ----

    def _facts(self) -> dict[str, Any]:
        engine = self._site.engine
        now = elapsed.moment()
        return (
            self._pins.facts()
            | self._site.facts()
            | {
                "frozen": self.frozen,
                "orders": [kept_orders.as_json(order, now) for order in engine.overrides.orders],
                "path_count": len({str(path) for path in engine.known_paths}),
                "wanted": {
                    target: engine.groups[target].named(weights)
                    for target, weights in engine.wanted().items()
                    if not same(weights, engine.groups[target].current)
                },
                "signals_refused": engine.evidence.refused,
                "control": self._server.counts | {"accept_paused": self._server.paused},
            }
        )


def _in_use(group: Group | None, ordered: Overrides) -> bool:
    """Whether anything that these orders take out of use still has a weight."""
    return group is not None and any(dict(group.current).get(nexthop) for nexthop in ordered.drained(group))
