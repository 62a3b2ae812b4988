"""Everything the controller knows, without doing anything: signals in, changes out. No I/O; `now` is an argument.

CLOCK_MONOTONIC nanoseconds; one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from pytools.signals import Path, PathDelay
from steering import health
from steering.decide import decide
from steering.health import PathHealth
from steering.plan import Change, Group, GroupPlan, Weights, diff
from steering.policy import Policy

GroupOf = Callable[[str], int | None]


@dataclass(frozen=True, slots=True)
class Standing:
    """What is thought of one path, for publication."""

    path: Path
    state: str
    since_ns: int
    weight_wanted: int | None
    weight_actual: int | None
    reason: str
    under: str


class Engine:
    """The state of all paths and groups under one policy.

    Parameters
    ----------
    policy : Policy
        The policy.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.paths: dict[Path, PathHealth] = {}
        self.groups: dict[int, Group] = {}
        self.manual: dict[int, str] = {}  # groups that somebody else changed while ours was in force, and how
        self.ignored = 0  # measurements of paths that no managed group has, or over a longer window
        self._places: dict[Path, tuple[int, int] | None] = {}
        self._group_of: GroupOf = lambda _: None
        self._now = 0
        self._windows: dict[Path, int] = {}
        self._plans: dict[int, GroupPlan] = {}
        self._rejected: dict[int, str] = {}  # groups whose change could not be carried out, and why

    def arrange(self, groups: Iterable[Group], group_of: GroupOf, now: int) -> None:
        """Take note of the groups that may be steered.

        `group_of` says by which of them an address is reached. A group's members are all it ever had: one that was
        taken out of it is still measured, and comes back.
        """
        self._group_of, self._now = group_of, now
        self.groups = {group.group_id: group for group in groups}
        self._places = {path: self._place(path) for path in self._places}
        for path in [path for path, where in self._places.items() if where is None]:
            self.paths.pop(path, None)
        self._wire()

    def _place(self, path: Path) -> tuple[int, int] | None:
        """The group and the member that a path runs over; None if none of ours."""
        group = self.groups.get(self._group_of(path.address) or 0)
        member = group.member(path) if group else None
        return None if group is None or member is None else (group.group_id, member)

    def take(self, signal: PathDelay, now: int) -> int | None:
        """Digest a measurement; the group it concerns, None if it concerns none.

        Of a path that is measured over several windows, the shortest counts.
        """
        path = signal.path
        self._now = now
        if path not in self._places:
            self._places[path] = self._place(path)
            self._wire()
        where = self._places[path]
        if where is None or signal.window_ns > self._windows.get(path, signal.window_ns):
            self.ignored += 1
            return None
        self._windows[path] = signal.window_ns
        self.paths[path] = health.observe(self.policy, self.paths[path], signal, now)
        return where[0]

    def forget_windows(self) -> None:
        """Another agent may measure over other windows."""
        self._windows.clear()

    def changes(self, now: int, only: Iterable[int] | None = None) -> list[Change]:
        """The acts that are wanted now, in all groups or only in some."""
        chosen = self.groups if only is None else [group_id for group_id in only if group_id in self.groups]
        groups = [self.groups[group_id] for group_id in chosen if group_id not in self.manual]
        for group in groups:
            for _, path in group.paths:
                self.paths[path] = health.advance(self.policy, self.paths[path], now)
        plan = decide(self.policy, self.paths, groups, now)
        self._plans |= {each.group_id: each for each in plan.groups}
        wanted = diff({group.group_id: group.current for group in groups}, plan)
        for each in plan.groups:
            if each.group_id in {change.group_id for change in wanted}:
                continue
            self._rejected.pop(each.group_id, None)
            self._note(each, now)  # the weights are so already, e.g. on another path's account
        return wanted

    def seen(self, change: Change) -> int:
        """When the measurement behind a change was taken."""
        paths = change.granted or {path for _, path in self.groups[change.group_id].paths}
        return max((self.paths[path].seen_ns for path in paths if path in self.paths), default=0)

    def carried_out(self, change: Change, now: int, weights: Weights | None = None) -> None:
        """Take note that a change was made; None for the weights when it only would have been."""
        self._rejected.pop(change.group_id, None)
        if weights is not None:
            self._put(change.group_id, current=weights)
        self._note(change, now)

    def _note(self, done: Change | GroupPlan, now: int) -> None:
        for path in done.granted:
            if health.due(self.policy, self.paths[path]) is not None:
                self.paths[path] = health.drained(self.policy, self.paths[path], now)
        for path in done.lifted:
            self.paths[path] = health.lifted(self.policy, self.paths[path], now)

    def rejected(self, change: Change, why: str) -> None:
        """Take note that a change could not be made; its paths stay as they were."""
        self._rejected[change.group_id] = why

    def standings(self, now: int) -> list[Standing]:
        """What is thought of every path that runs over a managed group."""
        return [
            self._standing(group, nexthop, path, now) for group in self.groups.values() for nexthop, path in group.paths
        ]

    def _standing(self, group: Group, nexthop: int, path: Path, now: int) -> Standing:
        known = self.paths[path]
        plan = self._plans.get(group.group_id)
        actual = dict(group.current).get(nexthop, 0)
        wanted = dict(plan.wanted).get(nexthop, 0) if plan else None
        under = self.policy.rules[known.rule].name if known.rule is not None else ""
        if group.group_id in self.manual:
            why = self.manual[group.group_id]
            return Standing(path, "manual", known.since_ns, None, actual, why, "")
        why = known.because
        if health.stale(self.policy, known, now) and known.state != "unmeasured":
            why = f"hold: stale; before: {why}"
        elif plan and dict(plan.held).get(path):
            why = f"{why}; {dict(plan.held)[path]}"
        if group.group_id in self._rejected:
            why = f"{why}; {self._rejected[group.group_id]}"
        if known.state in ("healthy", "unmeasured", "suspect"):
            under = ""
        return Standing(path, known.state, known.since_ns, wanted, actual, why, under)

    def _put(self, group_id: int, current: Weights) -> None:
        self.groups[group_id] = replace(self.groups[group_id], current=current)

    def _wire(self) -> None:
        """Write into each group which measured paths run over its members."""
        found: dict[int, list[tuple[int, Path]]] = {group_id: [] for group_id in self.groups}
        for path, where in self._places.items():
            if where is not None and where[0] in found:
                self.paths.setdefault(path, health.unknown(self._now))
                found[where[0]].append((where[1], path))
        self.groups = {
            group_id: replace(self.groups[group_id], paths=tuple(sorted(pairs))) for group_id, pairs in found.items()
        }
