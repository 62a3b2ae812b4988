"""Pins and labels: what is wanted of flows, carried out in the kernel's table; every outcome told.

Leases that the kernel lets end: there is nothing to journal. One thread, in the namespace that is steered. Times are
CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from pytools.closing import Closing
from pytools.errors import SwerveError
from pytools.kernel.bpf import loader
from steering.acting import messages
from steering.acting.background import Background
from steering.actuators import flow_table
from steering.actuators.agent_paths import AgentPaths
from steering.actuators.flow_table import FlowTable
from steering.actuators.pins import Labels, Pins, PinTarget
from steering.actuators.standbys import StandBys
from steering.deciding.engine import Engine
from steering.flows.engine import FlowEngine
from steering.flows.plan import FlowAct, Renewal
from steering.plan import FlowKey, LabelChange, Member, Pin, Target, title

_CLEAR_EVERY_NS: Final = 1_000_000_000

_Wanted = tuple[Target, Member, bool]  # of which target, and whether anything passes


class FlowActing(Closing):
    """Carries out what is wanted of flows, or says what would be done.

    Parameters
    ----------
    flows : FlowEngine
        Decides, and is told what became of it.

    Attributes
    ----------
    table : FlowTable | None
        The kernel's part; None until it is loaded.
    pins, labels : Pins, Labels
        What there is of flows in that table; only once it is loaded.
    paths : AgentPaths
        The agent's paths, as that table sees them; only once it is loaded.
    standbys : StandBys | None
        The stand-bys in it; None until it is loaded.
    """

    def __init__(self, flows: FlowEngine, engine: Engine, output: messages.Output) -> None:
        self._flows, self._engine, self._output = flows, engine, output
        self._stack = contextlib.ExitStack()
        self.table: FlowTable | None = None
        self.standbys: StandBys | None = None
        self._loading: Background[loader.Loaded] | None = None
        self._members: tuple[_Wanted, ...] = ()
        self._refused: Mapping[tuple[Target, int], str] = {}
        self._error = ""
        self._unread = ""  # why the kernel's tables of neighbours could not be read
        self._clear_ns = 0
        self._skipped: dict[Target, str] = {}  # of which it was said that their flows cannot be told apart

    def open(self) -> None:
        """Load the kernel's part.

        Raises
        ------
        SwerveError
            If the kernel takes no such program.
        """
        self._use(self._load())

    def prepare(self) -> bool:
        """Load the kernel's part beside us, for it may take longer than a lease; whether it is there: else ask again.

        Raises
        ------
        SwerveError
            If the kernel takes no such program.
        """
        if self.table is None and self._loading is None:
            self._loading = Background(self._load)
        elif self.table is None and self._loading is not None and self._loading.done:
            loading, self._loading = self._loading, None
            self._use(loading.result())
        return self.is_open

    def _load(self) -> loader.Loaded:
        return loader.load([flow_table.PROGRAM])

    def _use(self, loaded: loader.Loaded) -> None:
        table = FlowTable(loaded)
        self.table = table
        self._stack.callback(table.close)
        self.pins = self._stack.enter_context(Pins(table))
        self.labels = self._stack.enter_context(Labels(table))
        self.paths = AgentPaths(table)
        self._stack.callback(self.paths.take_back)
        self.standbys = StandBys(table, self.pins, self.paths)
        self._stack.callback(self.standbys.close)

    @property
    def is_open(self) -> bool:
        """Whether anything can be changed."""
        return self.table is not None

    def close(self) -> None:
        """Let all flows go as they are routed."""
        self._stack.close()
        self.table = self.standbys = None

    # ---- what the policy wants ----

    def turn(self, now: int, frozen: Callable[[], str] = str) -> None:
        """Decide and act; while frozen, which is asked before each act, leases are renewed and nothing else is done."""
        if self.table is not None:
            self._forget_expired(self.table, now)
            self._follow_targets()
        engine = self._engine
        plan = self._flows.decide(engine.paths, engine.groups.values(), now, engine.overrides)
        self.say_skipped()
        for renewal in plan.renewals:
            self._renew(renewal)
        for act in plan.acts:
            if frozen():
                break
            if self.table is None:
                self._tell(act, "dry_run", now)
                self._flows.pretended(act, now)
            else:
                self._carry_out(act, now)

    def say_skipped(self) -> None:
        """Say of which targets the flows stay, and why, once."""
        skipped = dict(self._flows.skipped)
        for target, why in skipped.items():
            if self._skipped.get(target) != why:
                self._output.say(f"flows of {title(target)} stay as they are: {why}")
        self._skipped = skipped

    def _forget_expired(self, table: FlowTable, now: int) -> None:
        """Clear away leases that nobody renews: pins by hand, above all."""
        if now >= self._clear_ns:
            self._clear_ns = now + _CLEAR_EVERY_NS
            table.sweep(now)
            table.mend()

    def _carry_out(self, act: FlowAct, now: int) -> None:
        try:
            refused = self._apply(act)
        except SwerveError as error:
            refused = dict.fromkeys(act.flows, str(error))
        done = time.monotonic_ns()
        self._flows.carried_out(act, done, refused)
        for flow, why in refused.items():
            self._output.say(f"{flow.local}:{flow.local_port} to {flow.remote}:{flow.remote_port}: {why}")
        if len(refused) < len(act.flows):
            self._tell(act, "undone" if act.kind in ("unpin", "unlabel") else "applied", now, done)
        else:
            self._tell(act, "failed", now, None, next(iter(refused.values())))

    def _apply(self, act: FlowAct) -> dict[FlowKey, str]:
        match act.kind:
            case "pin":
                return self.pins.install(act.pins)
            case "relabel":
                return self.labels.install(act.labels)
            case "unpin":
                self.pins.remove(act.flows)
            case "unlabel":
                self.labels.remove(act.flows)
        return {}

    def _renew(self, renewal: Renewal) -> None:
        if self.table is None:
            self._flows.renewed(renewal, renewal.flows)
            return
        holder: Pins | Labels = self.pins if renewal.kind == "pin" else self.labels
        self._flows.renewed(renewal, holder.renew(list(renewal.flows), renewal.expires_ns))

    def _tell(
        self, act: FlowAct, outcome: messages.Outcome, decided: int, acknowledged: int | None = None, failure: str = ""
    ) -> None:
        self._output.send(messages.flow_act(self._output.host, act, outcome, decided, acknowledged, failure))

    # ---- where flows may be pinned to ----

    def _follow_targets(self) -> None:
        """Tell the kernel which members there are, and which of them lead nowhere."""
        wanted = tuple(self._wanted_members())
        unchanged = wanted == self._members and not self._refused and self._error == self.pins.error
        if unchanged and not self.pins.outdated:
            return
        try:
            refused = self.pins.targets(_targets(wanted))
        except SwerveError as error:
            if self._unread != str(error):
                self._output.say(f"flows cannot be pinned now: {error}")
            self._unread, self._members = str(error), ()  # news of interfaces was taken: try again in any case
            return
        self._unread, self._members = "", wanted
        for (target, nexthop), why in refused.items():
            if self._refused.get((target, nexthop)) != why:
                self._output.say(f"nothing can be pinned to nexthop {nexthop} of {target}: {why}")
        if self.pins.error and self.pins.error != self._error:
            self._output.say(f"no pin acts: {self.pins.error}")
        self._refused, self._error = refused, self.pins.error

    def _wanted_members(self) -> Iterator[_Wanted]:
        for group in self._engine.groups.values():
            # One peer may be dead behind a good rail: a rail is only when all are; pins to that peer are let go.
            named = {nexthop for nexthop, _ in group.paths}
            passes = {nexthop for nexthop, path in group.paths if not self._engine.paths[path].failed}
            for member in group.members:
                yield group.target, member, member.nexthop_id not in named - passes

    # ---- what the operator wants ----

    def pin(self, pin: Pin) -> str:
        """Pin one flow by hand; why it was refused, empty when it was not.

        Raises
        ------
        SwerveError
            If the kernel takes no such program, or no such pin.
        """
        if not self.prepare():
            return "the kernel's part of it is still being loaded"
        self._follow_targets()
        why = self.pins.install([pin]).get(pin.flow, "")
        if not why:
            self._flows.held.pinned_by_hand(pin)
        return why

    def unpin(self, flow: FlowKey) -> bool:
        """Remove the pin of one flow; return whether it had one."""
        self._flows.held.unpinned_by_hand(flow)
        return self.table is not None and bool(self.pins.remove([flow]))

    def by_hand(self, now: int) -> tuple[Pin, ...]:
        """The pins that the operator set and that have not run out."""
        return self._flows.held.pins_by_hand(now)

    def pinned(self) -> list[Pin]:
        """Every pin in the kernel's table whose lease lasts."""
        pins = [] if self.table is None else [state.pin for state in self.pins.read().values()]
        now = time.monotonic_ns()
        return [pin for pin in pins if pin.expires_ns > now]

    def labelled(self) -> list[LabelChange]:
        """Every label in the kernel's table whose lease lasts."""
        changes = [] if self.table is None else [state.change for state in self.labels.read().values()]
        now = time.monotonic_ns()
        return [change for change in changes if change.expires_ns > now]


def _targets(wanted: Iterable[_Wanted]) -> Iterator[PinTarget]:
    for target, member, alive in wanted:
        with contextlib.suppress(OSError):  # its interface is gone
            index = socket.if_nametoindex(member.interface)
            yield PinTarget(member.nexthop_id, index, member.gateway, alive, target)
