"""Flow labels of live connections: which way each takes is learnt, what is wanted carried out, every outcome told.

Leases that the kernel lets end: there is nothing to journal. One thread, in the namespace that is steered. Times are
CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from typing import Final

from pytools.closing import Closing
from pytools.errors import RefusedError, SwerveError
from pytools.signals import Signal
from steering.acting import messages
from steering.acting.flows import FlowActing
from steering.actuators.segments import Segments, drawn_label
from steering.flows.labels import Ask, LabelAct, LabelEngine
from steering.plan import FlowKey, LabelChange
from steering.policy.model import Policy

_ATTACH_NS: Final = 1_000_000_000
_NAME: Final = "hidden ways"


class LabelActing(Closing):
    """Carries out what the policy's `labels` want of live connections; without `apply` only says what it would do."""

    def __init__(self, policy: Policy, apply: bool, flows: FlowActing, output: messages.Output) -> None:
        self._wanted, self._apply, self._kernel, self._output = policy.labels, apply, flows, output
        self._stack = contextlib.ExitStack()
        self._engine: LabelEngine | None = None
        if policy.labels is not None:
            self._engine = LabelEngine(policy.labels, policy.manage.destinations, drawn_label, learns=apply)
        self._asking: Segments | None = None
        self._why_not = ""
        self._ask_ns = self._renew_ns = self._attach_ns = 0
        self._watched: tuple[FlowKey, ...] = ()
        self._leased: frozenset[FlowKey] = frozenset()
        self._unhooked: dict[int, str] = {}  # interfaces, and why

    def close(self) -> None:
        """Learn no more; labels end with their leases, or with the kernel's part."""
        self._stack.close()
        self._engine = self._asking = None

    def take(self, signal: Signal, now: int) -> None:
        if self._engine is not None:
            self._engine.take(signal, now)

    def turn(self, now: int, frozen: Callable[[], str] = str) -> None:
        """Learn, decide and act; while frozen what is in force is renewed, and nothing else is done."""
        engine = self._engine
        if engine is None or self._why_not:
            return
        try:
            if self._apply and not self._prepared():
                return
            if self._asking is not None:
                self._look(engine, self._asking, now)
            if frozen():
                return
            if self._asking is not None:
                self._learn(engine, self._asking, now)
            for act in engine.decide(now):
                self._carry_out(engine, act, now)
        except SwerveError as error:
            self._why_not = str(error)
            self._output.say(f"no flow labels are chosen: {error}")

    def _prepared(self) -> bool:
        if not self._kernel.prepare():
            return False
        if self._asking is None:
            self._asking = self._stack.enter_context(Segments(6))
        return True

    def _look(self, engine: LabelEngine, asking: Segments, now: int) -> None:
        """Keep leases, and see which labels connections have and what routers say."""
        assert self._wanted is not None and self._kernel.table is not None
        table = self._kernel.table
        asking.receive(now)
        watched, until_ns = engine.watched(now), now + self._wanted.lease
        if now >= self._attach_ns:
            self._attach_ns = now + _ATTACH_NS
            self._hook(engine, now)
        if gone := self._leased.difference(engine.held):
            self._kernel.labels.remove(gone)
        if watched != self._watched or now >= self._renew_ns:
            self._renew_ns = now + self._wanted.lease // 3
            table.end("watch_until_ns", set(self._watched).difference(watched))
            self._watched = watched
            try:
                table.grant("watch_until_ns", watched, [until_ns] * len(watched))
            except RefusedError as error:  # pins have taken all the room
                self._output.say(f"flow labels are not known: {error}")
            engine.lost(self._kernel.labels.renew(engine.held, until_ns))
        self._leased = frozenset(engine.held)
        engine.seen(table.seen(watched), now)

    def _hook(self, engine: LabelEngine, now: int) -> None:
        assert self._kernel.table is not None
        indexes = []
        for name in engine.interfaces(now):
            with contextlib.suppress(OSError):  # it is gone
                indexes.append(socket.if_nametoindex(name))
        unhooked = self._kernel.table.attach(indexes, by=_NAME)
        for index, why in unhooked.items():
            if self._unhooked.get(index) != why:
                self._output.say(f"flow labels at interface {index} are not known: {why}")
        self._unhooked = unhooked

    def _learn(self, engine: LabelEngine, asking: Segments, now: int) -> None:
        assert self._wanted is not None
        if now < self._ask_ns or (wanted := engine.ask(now)) is None:
            return
        self._ask_ns = now + self._wanted.every

        def answered(router: str | None, asked: Ask = wanted) -> None:
            engine.answered(asked, router, time.monotonic_ns())

        asking.ask(wanted.flow, wanted.label, wanted.distance, wanted.interface, now, answered)

    def _carry_out(self, engine: LabelEngine, act: LabelAct, now: int) -> None:
        if self._asking is None or self._wanted is None:
            self._output.send(messages.label_act(self._output.host, act, "dry_run", now))
            return
        self._kernel.labels.remove(act.end)
        until_ns = time.monotonic_ns() + self._wanted.lease
        refused = self._kernel.labels.install([LabelChange(*each, until_ns) for each in act.give.items()])
        engine.carried_out(act, refused)
        outcome: messages.Outcome = "undone" if act.way.over else "applied"
        if act.give and len(refused) == len(act.give):
            outcome = "failed"
        why = next(iter(refused.values()), "")
        self._output.send(messages.label_act(self._output.host, act, outcome, now, time.monotonic_ns(), why))

    def take_back(self, why: str) -> None:
        """Let connections have their own labels again, and say so."""
        if self._engine is not None and self._asking is not None:
            now = time.monotonic_ns()
            for act in self._engine.all_back(why, now):
                self._carry_out(self._engine, act, now)
        self.close()

    def facts(self) -> dict[str, object]:
        if self._engine is None:
            return {}
        return {
            "label_ways": self._engine.facts(),
            "label_counts": self._engine.counts,
            "labels_missing": self._why_not,
        }
