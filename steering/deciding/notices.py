"""Which rules with hooks hold on which paths: an occurrence each, from when its rule holds until the path is well.

It has the dwell of other acts: the path must be good for as long, twice as long after each relapse, and be back. Pure;
`now` and times of signals are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import msgspec

from pytools.signals import Path
from pytools.units import duration_text
from steering.deciding import health, hold_down
from steering.deciding.condition_eval import Verdict
from steering.deciding.health import PathHealth
from steering.policy.conditions import MeasuredDelay, leaves
from steering.policy.hooks import STATE_KINDS
from steering.policy.model import Policy, Rule

MOST: Final = 1_000  # that are open at once


class Figure(msgspec.Struct, frozen=True):
    """What one part of a condition measured when it was bad."""

    signal: str
    text: str  # with its units
    value: float | None = None  # None: the signal has no single figure
    unit: str = ""  # ns or share


class Notice(msgspec.Struct, frozen=True):
    id: str  # the same for as long as it lasts, and of no other
    rule: str
    act: str  # what the rule does besides
    path: Path
    hooks: tuple[str, ...]
    because: str
    figures: tuple[Figure, ...]
    since_ns: int
    since_unix_ns: int
    seen_ns: int  # the measurement behind it


class Ended(NamedTuple):
    notice: Notice
    why: str


class WouldCall(NamedTuple):
    """A call that would be made; `over` is why the occurrence is over, empty when it began."""

    hook: str
    notice: Notice
    over: str


Key = tuple[Path, str]  # and the name of the rule


class Notices:
    """The occurrences under one policy.

    Parameters
    ----------
    policy : Policy
        Its rules with `notify` count.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._rules = {rule.name: (number, rule) for number, rule in enumerate(policy.rules) if rule.then.notify}
        self.needed = bool(self._rules)
        self.open: dict[Key, Notice] = {}  # those that are not over
        self.dropped = 0  # those for which there was no room
        self._good_since: dict[Key, int] = {}
        self._heard_ns: dict[Key, int] = {}  # when a path was last measured, or its occurrence began with us
        self._states: set[str] = set()  # hooks of states that would have been called
        self._strikes: dict[Key, tuple[int, int]] = {}  # occurrences that are remembered, and when the last was over

    def look(self, paths: Mapping[Path, PathHealth], now: int, unix_ns: int) -> tuple[list[Notice], list[Ended]]:
        """Those that began, and those that are over, by what is thought of the paths now."""
        if not self.needed and not self.open:
            return [], []
        began = [
            self._begin(path, known, rule, number, now, unix_ns)
            for number, rule in self._rules.values()
            for path, known in paths.items()
            if self._holds(path, known, rule, number, now)
        ]
        ended = [
            Ended(notice, why)
            for key, notice in self.open.items()
            if (why := self._why_over(key, paths.get(notice.path), now))
        ]
        for each in ended:
            key = each.notice.path, each.notice.rule
            del self.open[key]
            self._good_since.pop(key, None)
            self._heard_ns.pop(key, None)
            self._strikes[key] = self._strikes.pop(key, (1, 0))[0], now
        while len(self._strikes) > 2 * MOST:
            self._strikes.pop(next(each for each in self._strikes if each not in self.open))
        return began, ended

    def _holds(self, path: Path, known: PathHealth, rule: Rule, number: int, now: int) -> bool:
        if not known.readings or known.readings[number].verdict is not Verdict.BAD or (path, rule.name) in self.open:
            return False
        if health.stale(self._policy, known, now):
            return False
        if len(self.open) >= MOST:
            self.dropped += 1
            return False
        return True

    def _begin(self, path: Path, known: PathHealth, rule: Rule, number: int, now: int, unix_ns: int) -> Notice:
        key = path, rule.name
        strikes = self._remembered(key, rule, now)
        self._strikes.pop(key, None)
        self._strikes[key] = strikes + 1, now
        self._heard_ns[key] = now
        reading = known.readings[number]
        self.open[key] = Notice(
            id=f"{unix_ns:x}-{zlib.crc32(f'{path} {path.address} {rule.name}'.encode()):08x}",
            rule=rule.name,
            act=rule.then.kind,
            path=path,
            hooks=tuple(dict.fromkeys(rule.then.notify or ())),
            because=reading.text,
            figures=_figures(rule, known, number),
            since_ns=now,
            since_unix_ns=unix_ns,
            seen_ns=reading.at_ns or known.seen_ns,
        )
        return self.open[key]

    def _remembered(self, key: Key, rule: Rule, now: int) -> int:
        """How many earlier occurrences count: one is forgotten in each dwell without another."""
        strikes, since = self._strikes.get(key, (0, 0))
        while strikes and now - since >= hold_down.dwell(rule, strikes):
            since += hold_down.dwell(rule, strikes)
            strikes -= 1
        return strikes

    def _why_over(self, key: Key, known: PathHealth | None, now: int) -> str:
        """Why an occurrence is over; empty while it is not."""
        if key[1] not in self._rules:
            return "the policy tells nobody of it any more"
        number, rule = self._rules[key[1]]
        if known is None or not known.readings or health.stale(self._policy, known, now):
            self._good_since.pop(key, None)
            silent, limit = now - self._heard_ns[key], self._policy.safety.dead_baseline_after
            return f"not measured for {duration_text(limit)}" if silent > limit else ""
        self._heard_ns[key] = now
        reading = known.readings[number]
        if reading.verdict in (Verdict.BAD, Verdict.PENDING):
            self._good_since.pop(key, None)
        elif reading.over:
            self._good_since.setdefault(key, known.seen_ns)
        since = self._good_since.get(key)
        if since is None or not reading.over or known.down:
            return ""
        good = known.seen_ns - since
        enough = good >= hold_down.dwell(rule, self._strikes.get(key, (1, 0))[0])
        return f"{reading.text}, good for {duration_text(good)}" if enough else ""

    def would_call(self, began: Iterable[Notice], ended: Iterable[Ended], paths: Iterable[Path]) -> list[WouldCall]:
        """The calls that these changes would lead to, repetitions and failures left out: for dry runs and replays."""
        changes = [*(Ended(notice, "") for notice in began), *ended]
        calls = []
        for name, hook in self._policy.hooks.items() if changes else ():
            mine = [each for each in changes if name in each.notice.hooks]
            if hook.kind not in STATE_KINDS:
                calls += [WouldCall(name, *each) for each in mine]
                continue
            still = [notice for notice in self.open.values() if name in notice.hooks]
            if name in self._states and not still:
                self._states.remove(name)
                calls.append(WouldCall(name, *mine[-1]))
            elif name not in self._states and own_fault(still, paths):
                self._states.add(name)
                calls.append(WouldCall(name, still[0], ""))
        return calls

    def adopt(self, notices: Iterable[Notice], now: int) -> None:
        """Go on with what a controller before us left open; its dwell begins again."""
        for notice in notices:
            key = notice.path, notice.rule
            rule = self._rules.get(notice.rule)
            names = notice.hooks if rule is None else tuple(dict.fromkeys(rule[1].then.notify or ()))
            self.open[key] = msgspec.structs.replace(notice, hooks=names)
            self._strikes[key] = 1, now
            self._heard_ns[key] = now


def own_fault(notices: Iterable[Notice], paths: Iterable[Path]) -> bool:
    """Whether this host is the likely cause: its link says so, or most of the peers behind one interface are bad.

    What one peer, or one rack, has brought about must not have every other host taken out.
    """
    bad: dict[str, set[str]] = {}
    for notice in notices:
        if any(figure.signal == "link" for figure in notice.figures):
            return True
        bad.setdefault(notice.path.interface, set()).add(notice.path.destination)
    known: dict[str, set[str]] = {interface: set() for interface in bad}
    for path in paths if bad else ():
        if path.interface in known:
            known[path.interface].add(path.destination)
    return any(2 * len(peers) > len(known[interface] | peers) for interface, peers in bad.items())


def _figures(rule: Rule, known: PathHealth, number: int) -> tuple[Figure, ...]:
    """What the parts of a condition say that are bad."""
    return tuple(
        Figure(
            leaf.signal,
            memory.measurement.text,
            memory.measurement.value,
            "" if memory.measurement.value is None else "ns" if isinstance(leaf, MeasuredDelay) else "share",
        )
        for leaf, memory in zip(leaves(rule.when), known.memories[number], strict=False)
        if memory is not None and memory.measurement.verdict is Verdict.BAD
    )
