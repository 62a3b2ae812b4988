"""Everything the controller knows, without doing anything: signals in, changes out. No I/O; `now` is an argument.

CLOCK_MONOTONIC nanoseconds; one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from pytools.signals import Link, Path, PathState, Signal, SteeringState
from steering.deciding import capacity, health, hold_down, memory, transitions
from steering.deciding.apart import Apart
from steering.deciding.capacity import Estimate
from steering.deciding.condition_eval import Verdict
from steering.deciding.decide import decide, shares_of
from steering.deciding.evidence import Evidence
from steering.deciding.health import PathHealth
from steering.deciding.memory import PathMemory
from steering.deciding.overrides import NONE, Overrides
from steering.deciding.usual import Usuals
from steering.plan import Change, Group, Target, Weights
from steering.policy.model import Policy

_SAME_SHARE = 0.01  # weights are whole numbers

TargetsOf = Callable[[str], tuple[Target, ...]]


@dataclass(frozen=True, slots=True)
class Alert:
    """A rule that only says something began to hold, or is over."""

    path: Path
    rule: str
    holds: bool
    text: str
    seen_ns: int


class Engine:
    """The state of all paths and groups under one policy."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.paths: dict[Path, PathHealth] = {}
        self.groups: dict[Target, Group] = {}
        self.overrides: Overrides = NONE
        self.frozen = ""  # why the operator lets nothing be changed; empty when anything may
        self.evidence = Evidence()
        self.usual = Usuals(policy)
        self.ignored = 0  # signals about paths that no managed group has
        self._places: dict[Path, dict[Target, int]] = {}  # the targets that a path runs over, by which member
        self._unprobed: tuple[tuple[Path, int], ...] = ()  # ways that nobody measures, and since when they are known
        self._lost: set[Path] = set()  # paths whose member is gone for now
        self._unlinked: AbstractSet[str] = frozenset()  # interfaces
        self._remembered: dict[Path, PathHealth] = {}  # by a controller before us, of paths with their whole weight
        self._recalled: set[Path] = set()  # left by a controller before us
        self._targets_of: TargetsOf = lambda _: ()
        self._now = 0
        self._capacities: dict[str, Estimate] = {}  # by interface
        self._alerts: dict[tuple[Path, str], bool] = {}
        self._plans: dict[Target, Change] = {}
        self._calm: dict[Target, Group] = {}  # had their original weights, and were to have, when last decided
        self._rejected: dict[Target, str] = {}  # groups whose change could not be carried out, and why
        self._apart = Apart()

    def arrange(
        self,
        groups: Iterable[Group],
        targets_of: TargetsOf,
        now: int,
        lost: AbstractSet[Target] = frozenset(),
        unlinked: AbstractSet[str] = frozenset(),
    ) -> None:
        """Take note of the targets that may be steered.

        `targets_of` says by which of them an address is reached. The path of a member that is gone, alone or with its
        whole target (`lost`), is remembered with its state; if its interface is without a link (`unlinked`), it comes
        back as one that was drained.
        """
        self._targets_of, self._now, self._unlinked = targets_of, now, unlinked
        self.groups = {group.target: group for group in groups}
        before, self._places = self._places, {path: self._place(path) for path in self._places}
        for path, where in self._places.items():
            if where or path not in self.paths:
                continue
            if before[path].keys() & (self.groups.keys() | lost):
                if path.interface in unlinked:
                    self.paths[path] = transitions.taken_away(self.policy, path, self.paths[path], now)
            elif path not in self._lost:
                self.paths.pop(path)
        self._lost = {path for path, where in self._places.items() if not where and path in self.paths}
        self._forget()
        self._wire()

    def _forget(self) -> None:
        """Paths that nothing was heard of for long, such as those of a peer that has another name now, are no more."""
        recalled = {path for path in self._recalled if path in self.paths and self.paths[path].down}
        dead = {path for path, known in self.paths.items() if health.left_dead(known)}
        known = self._lost.union(self.evidence.paths, dead, recalled)
        self._places = {path: where for path, where in self._places.items() if path in known}
        for path in self.paths.keys() - known:
            del self.paths[path]
        self._alerts = {(path, rule): holds for (path, rule), holds in self._alerts.items() if path in known}

    def probed(self, now: int) -> dict[Path, PathHealth]:
        """The paths from this host, those outside of managed groups included: of these only the last word counts."""
        found = dict(self.paths)
        for path in self.evidence.paths:
            delay = None if path in found else self.evidence.delay(path)
            if delay is not None and delay.host == path.source:
                believed = now - delay.at_ns <= self.policy.safety.baseline_after
                state: SteeringState = "healthy" if believed else "unmeasured"
                found[path] = PathHealth(state, delay.at_ns, seen_ns=delay.at_ns)
        return found

    def remember(self, now: int) -> tuple[PathMemory, ...]:
        """What a successor has to know of the paths of managed groups."""
        return memory.remembered(self.policy, {path: self.paths[path] for path, at in self._places.items() if at}, now)

    def recall(self, memories: Iterable[PathMemory], now: int) -> list[Path]:
        """Go on where a controller before us ended, after the targets are arranged; the paths that it had left.

        Of the weights the kernel is right: where it gives a member less than what is remembered of every path over it,
        those that were left have so little, or all were left; where it gives one its whole weight, none was.
        """
        shares = {target: shares_of(group, group.current) for target, group in self.groups.items()}
        over: dict[tuple[Target, int], list[Path]] = {}
        for each in memories:
            where = self._place(each.path)
            if not where:
                continue
            in_kernel = min(shares[target][member] for target, member in where.items())
            known = memory.recalled(self.policy, each, in_kernel, now)
            if known.down:
                self._leave(each.path, known, where)
            else:
                self._remembered[each.path] = known
            for pair in where.items():
                over.setdefault(pair, []).append(each.path)
        for (target, member), paths in over.items():
            share, ordered = shares[target][member], self.overrides.drained(self.groups[target])
            left = [path for path in paths if path in self._recalled]
            if member in ordered or share > min((self.paths[path].share for path in left), default=1.0) - _SAME_SHARE:
                continue
            for path in left:
                self.paths[path] = msgspec.structs.replace(self.paths[path], share=share, held_share=0.0)
            for path in paths if not left else ():
                known = memory.left_before(self.policy, path, share, now)
                if known.down:
                    self._leave(path, known, self._place(path))
        self._wire()
        return sorted(self._recalled)

    def _leave(self, path: Path, known: PathHealth, where: dict[Target, int]) -> None:
        self.paths[path], self._places[path] = known, where
        self._remembered.pop(path, None)
        self._recalled.add(path)

    def _place(self, path: Path) -> dict[Target, int]:
        """The members that a path runs over, by target."""
        found = {}
        for target in self._targets_of(path.address):
            member = self.groups[target].member(path) if target in self.groups else None
            if member is not None:
                found[target] = member
        return found

    def take(self, signal: Signal, now: int) -> set[Target]:
        """Digest a signal; the targets whose paths it says something about."""
        self._now = now
        touched: set[Target] = set()
        told = self.evidence.take(signal, now)
        for path in told:
            if path not in self._places:
                self._places[path] = self._place(path)
                self._wire()
            where = self._places[path]
            touched.update(where)
            if not where and path not in self.paths:
                self.ignored += 1
                continue
            limits, facts = self.usual.limits(path), self.evidence.facts(path)
            self.paths[path] = transitions.observe(self.policy, self.paths[path], facts, now, limits)
            self.usual.take(path, self.paths[path])
        if isinstance(signal, Link) and told:
            self._carry(signal, told)
        return touched

    def _carry(self, link: Link, over: Iterable[Path]) -> None:
        """Note what an interface carries; that a queue stands is known from the paths over it."""
        queued = any(path in self.paths and self.paths[path].bad for path in over)
        estimate = capacity.updated(self._capacities.get(link.interface), link, queued)
        if estimate is not None:
            self._capacities[link.interface] = estimate

    def alerts(self) -> list[Alert]:
        """What rules that move nothing have to say that was not said yet."""
        said = []
        for number, rule in enumerate(self.policy.rules):
            if rule.then.kind != "alert":
                continue
            for path, known in self.paths.items():
                reading = known.readings[number] if known.readings else None
                before = self._alerts.get((path, rule.name), False)
                if reading is None or not (reading.verdict is Verdict.BAD or reading.over):
                    continue
                holds = reading.verdict is Verdict.BAD
                if holds != before:
                    self._alerts[path, rule.name] = holds
                    said.append(Alert(path, rule.name, holds, reading.text, reading.at_ns or known.seen_ns))
        return said

    def suspended(self, lasted_ns: int, after_ns: int, before_ns: int) -> None:
        """Take note that the host slept for so long, between these two times: what was measured before is stale."""
        self.evidence.suspended(after_ns, before_ns)
        stale_ns = before_ns - self.policy.safety.stale_after - 1
        for path, known in self.paths.items():
            if known.seen_ns:
                seen_ns = max(known.seen_ns - lasted_ns, min(known.seen_ns, stale_ns))
                self.paths[path] = msgspec.structs.replace(known, seen_ns=max(1, seen_ns))

    def changes(self, now: int, only: Iterable[Target] | None = None) -> list[Change]:
        """The acts that are wanted now, in all groups or only in some."""
        chosen = self.groups if only is None else [target for target in only if target in self.groups]
        groups = [self.groups[target] for target in chosen if not self.calm(target, now)]
        for group in groups:
            for _, path in group.paths:
                self.paths[path] = transitions.advance(self.policy, self.paths[path], now)
        plans = decide(self.policy, self.paths, groups, now, self._capacities, self.overrides)
        for group, each in zip(groups, plans, strict=True):
            self._plans[group.target] = each
            self._calm.pop(group.target, None)
            if _as_it_was(group, each):
                self._calm[group.target] = group
            self._apart.take({path.address for _, path in group.paths}, each.alone, now)
        for each in plans:
            if not each.moves:
                self._rejected.pop(each.target, None)
                self._note(each, now)  # the weights are so already, e.g. on another path's account
        return [each for each in plans if each.moves]

    def apart(self, now: int) -> frozenset[str]:
        """The addresses that are to have targets of their own: what they say moves the traffic of no other."""
        ill = (
            path.address
            for group in self.groups.values()
            if group.beside
            for _, path in group.paths
            if group.current != group.original or self.paths[path].state != "healthy"
        )
        return self._apart.chosen(ill, now)

    def calm(self, target: Target, now: int) -> bool:
        """Whether all is well and as it was, so that there is nothing to decide: mostly it is like that."""
        group, since = self.groups[target], now - self.policy.safety.stale_after
        if self._calm.get(target) is not group or self.overrides.orders:
            return False
        known = [self.paths[path] for _, path in group.paths]
        return all(each.state == "healthy" and each.seen_ns >= since for each in known)

    def seen(self, change: Change) -> int:
        """When the measurement behind a change was taken."""
        paths = dict(change.granted) or {path for _, path in self.groups[change.target].paths}
        return max((self.paths[path].seen_ns for path in paths if path in self.paths), default=0)

    def carried_out(self, change: Change, now: int, weights: Weights | None = None) -> None:
        """Take note that a change was made; None for the weights when it only would have been."""
        self._rejected.pop(change.target, None)
        if weights is not None:
            self.groups[change.target] = replace(self.groups[change.target], current=weights)
        self._note(change, now)

    def _note(self, done: Change, now: int) -> None:
        for path, share in done.granted:
            if health.due(self.policy, self.paths[path]) is not None:
                self.paths[path] = transitions.lowered(self.policy, path, self.paths[path], share, now)
        for path in done.lifted:
            self.paths[path] = transitions.lifted(self.policy, self.paths[path], now)
        plan = self._plans.get(done.target)
        if plan is None or plan.undecided:
            return
        for _, path in self.groups[done.target].paths:
            self.paths[path] = transitions.in_force(self.paths[path], now)

    def rejected(self, change: Change, why: str) -> None:
        """Take note that a change could not be made; its paths stay as they were."""
        self._rejected[change.target] = why

    def why_rejected(self, target: Target) -> str:
        """Why the last change of a target could not be made; empty when it could."""
        return self._rejected.get(target, "")

    def wanted(self) -> dict[Target, Weights]:
        """The weights that were decided last."""
        return {target: plan.after for target, plan in self._plans.items() if target in self.groups}

    @property
    def known_paths(self) -> set[Path]:
        """The paths that run over a managed group, ran over one that is gone for now, or could."""
        over = (path for group in self.groups.values() for _, path in group.paths)
        return {*over, *self._lost, *(path for path, _ in self._unprobed)}

    def states(self, host: str, now: int, unix_ns: int) -> list[PathState]:
        """What is thought of each of them, as the signals of this host."""
        signal = partial(PathState, host=host, at_ns=now, unix_ns=unix_ns)
        aside = partial(signal, weight_wanted=None, under="")
        lost = [(path, self.paths[path], self._why_lost(path)) for path in sorted(self._lost)]
        return [
            *(self._state(signal, group, *each, now) for group in self.groups.values() for each in group.paths),
            *(
                aside(path=path, state=known.state, since_ns=known.since_ns, weight_actual=None, reason=why)
                for path, known, why in lost
            ),
            *(
                aside(path=path, state="unmeasured", since_ns=since_ns, weight_actual=0, reason="nobody measures it")
                for path, since_ns in self._unprobed
            ),
        ]

    def _why_lost(self, path: Path) -> str:
        """Why a path has no weight; the kernel takes a nexthop with its carrier out of a group, and not back in."""
        lacking = (
            "its interface has no link" if path.interface in self._unlinked else "no managed route has this nexthop"
        )
        return f"{lacking}; before: {self.paths[path].because}"

    def _never_probed(self) -> Iterator[Path]:
        """Ways to peers that were never measured, as over a route that stands by: from us the agent learns of them."""
        for group in self.groups.values():
            known = {(member, path.address) for member, path in group.paths}
            for path in {path.address: path for _, path in group.paths}.values():
                for member in group.members:
                    if (member.nexthop_id, path.address) not in known:
                        yield msgspec.structs.replace(path, gateway=member.gateway, interface=member.interface)

    def _state(self, signal: Callable[..., PathState], group: Group, nexthop: int, path: Path, now: int) -> PathState:
        known = self.paths[path]
        plan = self._plans.get(group.target)
        frozen = f"frozen: {self.frozen}; " if self.frozen else ""
        why = hold_down.reason(self.policy, known, now)
        if health.stale(self.policy, known, now) and known.state != "unmeasured":
            why = f"hold: stale; before: {known.because}"
        elif plan and dict(plan.held).get(path):
            why = f"{why}; {dict(plan.held)[path]}"
        elif known.state == "healthy" and (learning := self.usual.said(path)):
            why = f"{why}; {learning}"
        if group.target in self._rejected:
            why = f"{why}; {self._rejected[group.target]}"
        return signal(
            path=path,
            state=known.state,
            since_ns=known.since_ns,
            weight_wanted=dict(plan.after).get(nexthop, 0) if plan else None,
            weight_actual=dict(group.current).get(nexthop, 0),
            reason=f"{frozen}{why}",
            under="" if known.rule is None or not known.down else self.policy.rules[known.rule].name,
        )

    def _wire(self) -> None:
        """Write into each group which measured paths run over its members."""
        self._calm.clear()
        found: dict[Target, list[tuple[int, Path]]] = {target: [] for target in self.groups}
        for path, where in self._places.items():
            for target, member in where.items():
                if path not in self.paths:
                    self.paths[path] = self._remembered.pop(path, health.unknown(self._now))
                found[target].append((member, path))
        witnesses: dict[Target, list[tuple[int, Path]]] = {}
        for group in self.groups.values():
            witnesses.setdefault(group.beside, []).extend(found[group.target] if group.beside else ())
        self.groups = {
            target: replace(
                self.groups[target], paths=tuple(sorted(pairs)), witnesses=tuple(sorted(witnesses.get(target, ())))
            )
            for target, pairs in found.items()
        }
        before = dict(self._unprobed)
        self._unprobed = tuple((way, before.get(way, self._now)) for way in self._never_probed())


def _as_it_was(group: Group, plan: Change) -> bool:
    """Whether a plan leaves a group as it was before us, and has nothing more to say."""
    return plan.after == group.current == group.original and not (plan.held or plan.lifted or plan.undecided)
