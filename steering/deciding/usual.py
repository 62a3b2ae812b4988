"""What every path has learnt to be usual, and the thresholds that follow from it. Pure but for its own memory.

A path learns while it is healthy, has been so for a second, and is bad under no rule; never while it is suspect,
drained or on its way back, and never from a measurement beyond its threshold. CLOCK_MONOTONIC nanoseconds; one thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from pytools.signals import Path
from pytools.units import SECOND
from steering.deciding.condition_eval import Verdict
from steering.deciding.health import PathHealth
from steering.deciding.thresholds import NOTEWORTHY, NOTHING, LeafLimits, Learnt, Limits, learn, learning, limits_of
from steering.policy.conditions import WithThreshold, leaves, relative, subject
from steering.policy.model import Policy

MOST: Final = 16_384  # paths and figures; beyond it the one that was not learnt for longest is forgotten
_SETTLED_NS: Final = SECOND


class Key(msgspec.Struct, frozen=True):
    """One figure of one path. Rules about the same figure, with the same `at_least`, share what is learnt."""

    path: Path
    subject: str
    quantile: str
    at_least: float


class Entry(msgspec.Struct, frozen=True):
    """What is learnt about a figure, as it is kept beyond a restart."""

    key: Key
    learnt: Learnt


class Row(msgspec.Struct, frozen=True):
    """One relative threshold on one path, for people."""

    path: Path
    rule: str
    subject: str
    learnt: Learnt
    limits: Limits


class Usuals:
    """What is usual on every path, under one policy.

    Parameters
    ----------
    policy : Policy
        Its relative thresholds say what is learnt.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        each = [tuple(leaves(rule.when)) for rule in policy.rules]
        self._leaves = [tuple(leaf if isinstance(leaf, WithThreshold) else None for leaf in rule) for rule in each]
        self._relative = [
            (number, i, usual, subject(leaf))
            for number, rule in enumerate(self._leaves)
            for i, leaf in enumerate(rule)
            if leaf is not None and (usual := relative(leaf)) is not None
        ]
        self.needed = bool(self._relative)
        self._learnt: dict[Key, Learnt] = {}
        self._limits: dict[Path, tuple[LeafLimits, ...]] = {}
        self.version = 0  # rises with whatever is learnt

    def limits(self, path: Path) -> tuple[LeafLimits, ...]:
        """What the relative thresholds of each rule are on a path; empty if the policy has none."""
        if not self.needed:
            return ()
        found = self._limits.get(path)
        if found is None:
            found = tuple(tuple(self._limit(path, leaf) for leaf in rule) for rule in self._leaves)
            if len(self._limits) >= MOST:
                self._limits.clear()
            self._limits[path] = found
        return found

    def _limit(self, path: Path, leaf: WithThreshold | None) -> Limits | None:
        if leaf is None or relative(leaf) is None:
            return None
        return limits_of(leaf, self._learnt.get(_key(path, leaf), NOTHING))

    def take(self, path: Path, health: PathHealth) -> None:
        """Learn from the latest measurement of a path, if it may teach."""
        if not self.needed or not teaches(health):
            return
        for number, i, usual, name in self._relative:
            memory = health.memories[number]
            known = memory[i] if i < len(memory) else None  # empty where the rule has no say
            if known is None or (value := known.measurement.value) is None:
                continue
            made = known.measurement
            if made.verdict in (Verdict.CLEAR, Verdict.BETWEEN) and value >= usual.at_least * NOTEWORTHY:
                key = Key(path, name, usual.quantile, float(usual.at_least))
                before = self._learnt.get(key, NOTHING)
                after = learn(usual, before, value, made.at_ns)
                if after is not before:
                    self._put(key, after)

    def _put(self, key: Key, learnt: Learnt) -> None:
        if key not in self._learnt and len(self._learnt) >= MOST:
            del self._learnt[min(self._learnt, key=lambda each: self._learnt[each].at_ns)]
        self._learnt[key] = learnt
        self._limits.pop(key.path, None)
        self.version += 1

    def said(self, path: Path) -> str:
        """How far a path is that learns; empty when it has learnt, or is idle."""
        for rule, each in zip(self._policy.rules, self._leaves, strict=True):
            for leaf in each:
                if leaf is not None and relative(leaf) is not None:
                    known = self._learnt.get(_key(path, leaf), NOTHING)
                    if known.count and not known.known:
                        return f"{rule.name} is {learning(known)}"
        return ""

    def rows(self, paths: Iterable[Path]) -> Iterator[Row]:
        """Every relative threshold on these paths that is in the scope of its rule."""
        for path in paths:
            for rule, each in zip(self._policy.rules, self._leaves, strict=True):
                for leaf in each if rule.scope.covers(path) else ():
                    limit = self._limit(path, leaf)
                    if leaf is not None and limit is not None:
                        yield Row(path, rule.name, subject(leaf), self._learnt.get(_key(path, leaf), NOTHING), limit)

    def entries(self) -> list[Entry]:
        return [Entry(key, learnt) for key, learnt in self._learnt.items()]

    def restore(self, entries: Iterable[Entry], now: int) -> None:
        """Begin with what another controller has learnt; what is from the future is left out."""
        for entry in entries:
            if 0 <= entry.learnt.at_ns <= now and entry.learnt.count > 0:
                self._put(entry.key, entry.learnt)


def teaches(health: PathHealth) -> bool:
    """Whether what is measured of a path now is what is usual."""
    calm = health.state == "healthy" and not health.bad and health.measured
    return calm and health.seen_ns - health.since_ns >= _SETTLED_NS


def _key(path: Path, leaf: WithThreshold) -> Key:
    usual = relative(leaf)
    assert usual is not None
    return Key(path, subject(leaf), usual.quantile, float(usual.at_least))
