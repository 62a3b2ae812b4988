"""Recorded signals through the real engine: states, acts and alerts as they would have been, and when.

The clock is the recording's: the newest `at_ns` so far. A recording whose clock goes back is another run: all is
forgotten. One thread; no I/O.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import msgspec

from pytools.signals import Act, AnySignal, NexthopGroup, Path, PathState
from pytools.units import duration_text
from steering.acting import messages
from steering.acting.hook_settings import settings_of
from steering.deciding.engine import Engine
from steering.deciding.health import PathHealth
from steering.deciding.notices import Notices
from steering.flows.engine import FlowEngine
from steering.plan import Change, Target
from steering.policy.actions import WEIGHT_KINDS
from steering.policy.model import Policy
from steering.replay.besides import Besides
from steering.replay.virtual_kernel import VirtualKernel

TICK_NS: Final = 50_000_000  # as the controller's
_TOGETHER_NS: Final = 5_000_000  # records so close are decided on together, as one read of the agent's socket is
_BACK_NS: Final = 10_000_000_000  # a clock that goes back so far is another one
_REVERSAL_NS: Final = 60_000_000_000


@dataclass(frozen=True, slots=True)
class Note:
    """Something to know about the recording, at its place."""

    unix_ns: int
    text: str


Event: TypeAlias = PathState | Act | Note


@dataclass(slots=True)
class Tally:
    began_unix_ns: int = 0
    ended_unix_ns: int = 0
    played_ns: int = 0
    acts: Counter[Target] = field(default_factory=Counter)
    by_rule: Counter[str] = field(default_factory=Counter)  # the same acts
    alerts: int = 0
    notified: int = 0  # calls of hooks, without repetitions
    reversals: int = 0
    undigested: int = 0
    restarts: int = 0
    in_state_ns: dict[Path, dict[str, int]] = field(default_factory=dict)
    lived_acts: int = 0  # acts that were applied while it was recorded

    def count(self, target: Target, under: str) -> None:
        self.acts[target] += 1
        self.by_rule[under or "no rule"] += 1


class Player:
    """Plays a recording.

    Parameters
    ----------
    watch : callable, optional
        Takes each path that a record is about, and what is thought of it then.
    """

    def __init__(self, policy: Policy, watch: Callable[[Path, PathHealth], None] | None = None) -> None:
        self._policy, self._watch = policy, watch
        self.tally = Tally()
        self._restart()

    def _restart(self) -> None:
        self.engine = Engine(self._policy)
        self.kernel = VirtualKernel(self._policy.manage.destinations)
        self.flows = FlowEngine(self._policy)
        self.besides = Besides(self._policy, self.engine)
        rules, lasts_ns = self._policy.rules, self.besides.lasts_ns
        self._says_more = bool(lasts_ns) or any(
            rule.then.kind not in WEIGHT_KINDS or rule.then.notify for rule in rules
        )
        safety = self._policy.safety
        self._lasts_ns = max(safety.baseline_after + 2 * safety.stale_after, lasts_ns)  # of silence
        self._host = ""
        self.notices = Notices(self._policy)
        self._now = self._began = self._offset = self._heard = self._tick = self._together = 0
        self._touched: set[Target] = set()
        self._told: dict[Path, tuple[str, int]] = {}  # state, and since when
        self._returned: dict[Path, int] = {}
        self._count = 0
        self._grown = False  # whether the groups are others than the engine knows

    def play(self, signals: Iterable[AnySignal]) -> Iterator[Event]:
        """What happens, in order; `tally` is complete when this ends."""
        for signal in signals:
            self.tally.began_unix_ns = self.tally.began_unix_ns or signal.unix_ns
            if self._heard and signal.at_ns < self._now - _BACK_NS:
                yield from self._again(signal)
            yield from self._advance(signal.at_ns)
            if signal.at_ns >= self._now:
                self._offset = signal.unix_ns - signal.at_ns
            self._take(signal)
        yield from self._decide(None)
        self._close_books()

    def _again(self, signal: AnySignal) -> Iterator[Event]:
        yield from self._decide(None)
        self._close_books()
        back = duration_text(self._now - signal.at_ns)
        self._restart()
        self.tally.restarts += 1
        yield Note(signal.unix_ns, f"the clock goes back by {back}: another run begins, and all is forgotten")

    # ---- time ----

    def _advance(self, at_ns: int) -> Iterator[Event]:
        """Let the clock run up to a record: decide what has come, and what silence asks for."""
        if not self._heard:
            self._now = self._began = self._tick = self._together = self._heard = at_ns
            return
        if self._touched and at_ns - self._together >= _TOGETHER_NS:
            yield from self._decide(self._touched)
        quiet = self._heard + self._lasts_ns
        while self._tick + TICK_NS <= min(at_ns, quiet):
            self._tick += TICK_NS
            self._now = max(self._now, self._tick)
            yield from self._decide(None)
        if at_ns > quiet:  # nothing more comes of silence
            self._tick = at_ns
        self._now = max(self._now, at_ns)
        self._heard = max(self._heard, at_ns)

    @property
    def _unix_ns(self) -> int:
        return self._now + self._offset

    # ---- records ----

    def _take(self, signal: AnySignal) -> None:
        if isinstance(signal, Act):
            self.tally.lived_acts += signal.outcome == "applied"
            return
        if isinstance(signal, NexthopGroup):
            self._grown |= self.kernel.see_group(signal)
        path = getattr(signal, "path", None)
        if isinstance(path, Path) and path.source == signal.host:
            self._grown |= self.kernel.see_path(path)
        self._host = signal.host
        if not self._touched:
            self._together = self._now
        try:
            self._touched |= self.engine.take(signal, self._now)
            self.flows.take(signal, self._now)
            self.besides.take(signal, self._now)
            if self._watch is not None and path in self.engine.paths:
                self._watch(path, self.engine.paths[path])
        except (ArithmeticError, ValueError):  # numbers that no measurement can have
            self.tally.undigested += 1

    # ---- what comes of it ----

    def _decide(self, only: set[Target] | None) -> Iterator[Event]:
        if self.kernel.set_apart(self.engine.apart(self._now)) or self._grown:
            self.engine.arrange(self.kernel.groups.values(), self.kernel.targets_of, self._now)
            self._grown, only = False, None
        asked = self.engine.groups if only is None else sorted(only)
        targets = [target for target in asked if not self._quiet(target)]
        self._touched = set()
        if not targets and not self._says_more:
            return
        try:
            changes = self.engine.changes(self._now, targets)
            alerts = self.engine.alerts()
            plan = self.flows.decide(self.engine.paths, self.engine.groups.values(), self._now)
            besides = list(self.besides.decide(self._host, self._now))
        except (ArithmeticError, ValueError):
            self.tally.undigested += 1
            return
        for change in changes:
            yield self._act(change)
        yield from self._states(targets)
        for alert in alerts:
            self.tally.alerts += alert.holds
            yield self._at(messages.alert(alert.path.source, alert))
        yield from self._hooks()
        for renewal in plan.renewals:
            self.flows.renewed(renewal, ())
        for flow_act in plan.acts:
            self.tally.count(flow_act.target, flow_act.under)
            yield self._at(messages.flow_act(self._host, flow_act, "dry_run", self._now))
            self.flows.pretended(flow_act, self._now)
        for act in besides:
            self.tally.count(act.target, act.under)
            yield self._at(act)

    def _hooks(self) -> Iterator[Event]:
        began, ended = self.notices.look(self.engine.paths, self._now, self._unix_ns)
        for name, notice, over in self.notices.would_call(began, ended, self.engine.paths):
            to = settings_of(name, self._policy.hooks[name]).to
            self.tally.notified += 1
            yield self._at(messages.notified(self._host, name, to, notice, bool(over), "dry_run", over))

    def _quiet(self, target: Target) -> bool:
        """Whether there is nothing to decide and nothing to tell: most of a recording is like that."""
        paths = (path for _, path in self.engine.groups[target].paths)
        return self.engine.calm(target, self._now) and all(
            self._told.get(path, ("",))[0] == "healthy" for path in paths
        )

    def _act(self, change: Change) -> Act:
        group = self.engine.groups[change.target]
        self.tally.count(change.target, change.under)
        act = messages.act(self._host, group, change, "dry_run", self.engine.seen(change), self._now)
        self.engine.carried_out(change, self._now, change.after)
        self.kernel.apply(change.target, change.after)
        return self._at(act)

    def _at(self, act: Act) -> Act:
        self._count += 1
        times = {"at_ns": self._now, "unix_ns": self._unix_ns, "decided_ns": self._now}
        return msgspec.structs.replace(act, **times, act_id=f"replay-{self._count}-{act.target}")

    def _states(self, targets: Iterable[Target]) -> Iterator[PathState]:
        """The paths of these targets whose state has changed."""
        paths = [path for target in targets for _, path in self.engine.groups[target].paths]
        changed = {path for path in paths if self._told.get(path, ("",))[0] != self.engine.paths[path].state}
        if not changed:
            return
        for state in self.engine.states("", self._now, self._unix_ns):
            if state.path in changed:
                self._enter(state.path, state.state)
                yield msgspec.structs.replace(state, host=state.path.source)

    def _enter(self, path: Path, state: str) -> None:
        self._leave(path)
        self._told[path] = state, self._now
        if state == "returning":
            self._returned[path] = self._now
        elif state == "drained" and path in self._returned:
            self.tally.reversals += self._now - self._returned.pop(path) <= _REVERSAL_NS

    def _leave(self, path: Path) -> None:
        if path in self._told:
            state, since = self._told[path]
            times = self.tally.in_state_ns.setdefault(path, {})
            times[state] = times.get(state, 0) + self._now - since

    def _close_books(self) -> None:
        for path in self._told:
            self._leave(path)
        self.tally.played_ns += self._now - self._began
        self.tally.ended_unix_ns = max(self.tally.ended_unix_ns, self._unix_ns)
