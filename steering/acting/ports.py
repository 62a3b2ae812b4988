"""Local ports of new connections: which way each takes is learnt, what is wanted carried out, every outcome told.

A lease that the kernel lets end, and a link that ends with the process: there is nothing to journal. One thread, in the
namespace that is steered. Times are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping

from pytools.closing import Closing
from pytools.errors import SwerveError
from pytools.kernel.bpf import loader
from pytools.signals import Signal
from steering.acting import messages
from steering.acting.background import Background
from steering.acting.subflows import SubflowActing
from steering.actuators import ports
from steering.actuators.ports import Answer, Asking
from steering.flows.hidden_ways import WayAct
from steering.flows.ports import Ask, PortEngine
from steering.plan import Peer
from steering.policy.model import Policy


class PortActing(Closing):
    """Carries out what the policy's `ports` want of new connections; without `apply` only says what it would do."""

    def __init__(self, policy: Policy, apply: bool, output: messages.Output) -> None:
        self._wanted, self._apply, self._output = policy.ports, apply, output
        self._stack = contextlib.ExitStack()
        self._engine: PortEngine | None = None
        if policy.ports is not None:
            self._engine = PortEngine(policy.ports, policy.manage.destinations, ports.drawn_port, learns=apply)
        self._subflows: SubflowActing | None = None
        if policy.ports is not None and policy.ports.mptcp and apply and self._engine is not None:
            acting = SubflowActing(self._engine, policy.ports.every, output)
            self._subflows = self._stack.enter_context(acting)
        self._asking = self._stack.enter_context(Asking())
        self._loading: Background[loader.Loaded] | None = None
        self._chooser: ports.Ports | None = None
        self._why_not = ""
        self._ask_ns = self._renew_ns = 0
        self._offers: Mapping[Peer, tuple[int, ...]] = {}  # what the kernel has

    def close(self) -> None:
        self._stack.close()
        self._engine = self._chooser = self._subflows = None

    def take(self, signal: Signal, now: int) -> None:
        if self._engine is not None:
            self._engine.take(signal, now)

    def turn(self, now: int, frozen: Callable[[], str] = str) -> None:
        """Learn, decide and act; while frozen what is in force is renewed, and nothing else is done."""
        if self._engine is None or self._wanted is None or self._why_not:
            return
        if self._apply and not self._prepared():
            return
        if self._chooser is not None:
            self._asking.receive(now)
            if now >= self._renew_ns:
                self._renew_ns = now + self._wanted.lease // 3
                self._chooser.renew(now + self._wanted.lease)
        if frozen():
            return
        if self._chooser is not None:
            self._learn(self._engine, now)
        if self._subflows is not None:
            self._subflows.turn(now)
        plan = self._engine.decide(now)
        if self._chooser is not None and plan.offers is not self._offers:
            self._chooser.offer(plan.offers)
            self._offers = plan.offers
        for act in plan.acts:
            self._tell(act, now)

    def _prepared(self) -> bool:
        """Whether the kernel's part is there; it is loaded beside us, for that may take longer than a lease."""
        if self._chooser is None and self._loading is None:
            self._loading = Background(lambda: loader.load([ports.PROGRAM]))
        elif self._chooser is None and self._loading is not None and self._loading.done:
            loading, self._loading = self._loading, None
            try:
                self._chooser = self._stack.enter_context(ports.Ports(loading.result()))
            except SwerveError as error:
                self._why_not = str(error)
                self._output.say(f"no ports are chosen: {error}")
        return self._chooser is not None

    def _learn(self, engine: PortEngine, now: int) -> None:
        assert self._wanted is not None
        if now < self._ask_ns:
            return
        self._ask_ns = now + self._wanted.every
        if (wanted := engine.ask(now)) is None:
            return

        def answered(answer: Answer, asked: Ask = wanted) -> None:
            if answer.arrived:
                engine.arrived(asked)
            else:
                engine.answered(asked, answer.router, now)

        if not self._asking.ask(wanted.peer, wanted.port, wanted.distance, now, answered):
            engine.busy()

    def _tell(self, act: WayAct, now: int) -> None:
        if self._chooser is None:
            self._output.send(messages.port_act(self._output.host, act, "dry_run", now))
        else:
            outcome: messages.Outcome = "undone" if act.over else "applied"
            self._output.send(messages.port_act(self._output.host, act, outcome, now, time.monotonic_ns()))

    def take_back(self, why: str) -> None:
        """Let the kernel choose all ports again, and say so."""
        for act in self._engine.all_back(why) if self._engine is not None else ():
            self._tell(act, time.monotonic_ns())
        self.close()

    def facts(self) -> dict[str, object]:
        if self._engine is None:
            return {}
        counts = self._engine.counts | (self._chooser.counters() if self._chooser is not None else {})
        subflows = self._subflows.facts() if self._subflows is not None else {}
        return {"ports": self._engine.facts(), "port_counts": counts, "ports_missing": self._why_not, **subflows}
