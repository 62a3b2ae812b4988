"""Thresholds from a recording: what was usual while all was well, and what a policy with these would have done.

What was well is what the present policy took for it: the same that a controller would have learnt from. Every path is
counted by itself, in classes of 2 %; the busiest decides. Delays are nanoseconds, shares within 0 and 1.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from pytools.errors import SwerveError
from pytools.figures import RULED
from pytools.signals import AnySignal, Path
from pytools.units import UNITS, duration_text
from pytools.yaml_reader import Location, Reader
from steering.deciding.health import PathHealth
from steering.deciding.thresholds import ENOUGH, NOTEWORTHY, SPACING_NS
from steering.deciding.usual import teaches
from steering.policy.conditions import WithThreshold, figures_of, leaves, subject, with_threshold
from steering.policy.file import parse
from steering.policy.levels import DELAY, Figure, FigureKind, Usual, written
from steering.policy.model import Policy
from steering.replay.player import Player, Tally

TEMPLATE: Final = """\
version: 1
manage: {destinations: [DESTINATIONS]}
rules:
  - name: leave-dead-path
    when: {signal: silence, missed: 10}
    then: {shift: {share: 0}}
    return: {dwell: 60s}
  - name: leave-congested-rail
    when: {signal: queueing_delay, quantile: p50, above: 10ms, samples: 3, clear_below: 1ms}
    then: {shift: {share: 0}}
    return: {dwell: 30s, steps: [0.1, 0.5, 1.0], step: 3s}
"""
_TREES: Final = ("all", "any", "not")
_CLASSES: Final = 32  # of an octave
_ZERO: Final = -(1 << 14)  # the class of 0
_FACTOR: Final = 3.0  # of what is usual
_FLOOR: Final = 1.5  # of what is usual on the busiest path: an idle one may become as busy
_CLEAR: Final = 0.2  # of the threshold
_LEAST_NS: Final = float(UNITS["ms"])  # of delays; of shares:
_LEAST_SHARE: Final = {**{each.name: each.least for each in RULED}, "retransmits": 0.01, "ce_share": 0.05}
_HIGHEST_SHARE: Final = 0.3  # of `at least`
_ILL: Final = 0.2  # share of the time that was not well, beyond which it is said


@dataclass
class Counts:
    """The measurements of one figure on one path, in classes of their logarithm."""

    number: int = 0
    at_ns: int = 0
    classes: Counter[int] = field(default_factory=Counter)

    def add(self, value: float, at_ns: int) -> None:
        """Count one, unless it comes too soon after the last or is negative."""
        if (self.at_ns and 0 <= at_ns - self.at_ns < SPACING_NS) or not value >= 0:
            return
        self.at_ns, self.number = at_ns, self.number + 1
        self.classes[math.ceil(_CLASSES * math.log2(value)) if value > 0 else _ZERO] += 1

    def usual(self, idle: float) -> float:
        """The p99 of what was above `idle`, if that was often enough, for an idle path does not show what load does."""
        busy = Counter({each: n for each, n in self.classes.items() if 2.0 ** (each / _CLASSES) >= idle})
        return _p99(busy if busy.total() >= ENOUGH else self.classes)


def _p99(classes: Counter[int]) -> float:
    """The upper end of the class of the 99th percentile, by nearest rank; 0 if nothing was measured."""
    rank, seen = math.ceil(0.99 * classes.total()), 0
    for each in sorted(classes):
        seen += classes[each]
        if seen >= rank:
            return 0.0 if each == _ZERO else 2.0 ** (each / _CLASSES)
    return 0.0


class Survey:
    """What was measured on healthy paths while a policy was played.

    Parameters
    ----------
    policy : Policy
        Its thresholds are surveyed.
    """

    def __init__(self, policy: Policy) -> None:
        self.counts: dict[tuple[str, Path], Counts] = {}
        self.calm = self.all = 0  # measurements, of healthy paths and of all
        self._leaves = [
            tuple(leaf if isinstance(leaf, WithThreshold) else None for leaf in leaves(rule.when))
            for rule in policy.rules
        ]
        self._seen: dict[Path, int] = {}

    def look(self, path: Path, health: PathHealth) -> None:
        """Count the latest measurements of a path, once each."""
        if self._seen.get(path, 0) == health.seen_ns or health.state == "unmeasured":
            return
        self._seen[path] = health.seen_ns
        self.all += 1
        if not teaches(health):
            return
        self.calm += 1
        for rule, memory in zip(self._leaves, health.memories, strict=False):
            for leaf, known in zip(rule, memory, strict=False):
                if leaf is None or known is None or known.measurement.value is None:
                    continue
                key = subject(leaf), path
                self.counts.setdefault(key, Counts()).add(known.measurement.value, known.measurement.at_ns)


@dataclass(frozen=True, slots=True)
class Proposal:
    subject: str
    kind: FigureKind
    usual: float  # p99 on the busiest path
    path: Path
    measurements: int
    level: Usual

    @property
    def text(self) -> str:
        return written(self.level, self.kind)


def play(policy: Policy, signals: Iterable[AnySignal], survey: Survey | None = None) -> Tally:
    """Play a recording under a policy, and count."""
    player = Player(policy, survey.look if survey else None)
    for _ in player.play(signals):
        pass
    return player.tally


def _did(played: Tally) -> str:
    """What a policy would have done, in words."""
    listed = ", ".join(f"{number} by {name}" for name, number in sorted(played.by_rule.items()))
    return f"{played.acts.total()} acts{f' ({listed})' if listed else ''}, {played.reversals} reversals"


def proposals(policy: Policy, survey: Survey) -> dict[str, Proposal]:
    """A threshold for each figure that the policy looks at and that was measured often enough, by figure.

    Raises
    ------
    SwerveError
        If nothing can be said, and why.
    """
    leaves_of = {subject(leaf): leaf for rule in policy.rules for leaf in with_threshold(rule.when)}
    if not leaves_of:
        raise SwerveError("no rule of this policy has a threshold (above)", "leave --policy out for a policy that has")
    if not survey.all:
        raise SwerveError(
            "no path that the policy manages was measured in this time", "record for longer, or name another: --since"
        )
    if not survey.calm and survey.all >= ENOUGH:
        raise SwerveError(
            "no path was healthy at any time, by the present policy: what is usual cannot be told",
            "take a time when all was well: --since, --until; or a policy with higher thresholds: --policy",
        )
    found = {}
    for name, leaf in leaves_of.items():
        counts = {path: each for (of, path), each in survey.counts.items() if of == name and each.number >= ENOUGH}
        if counts:
            idle = _LEAST_NS * NOTEWORTHY if figures_of(leaf) is DELAY else 0.0
            usual, busiest = max((each.usual(idle), path) for path, each in counts.items())
            level = _level(leaf, figures_of(leaf), usual)
            found[name] = Proposal(name, figures_of(leaf), usual, busiest, counts[busiest].number, level)
    if not found:
        most = max((each.number for each in survey.counts.values()), default=0)
        raise SwerveError(
            f"too little was recorded while all was well: at most {most} measurements of one path, {ENOUGH} needed",
            "the agent records by itself: wait some minutes, under load, or take a longer time: --since",
        )
    return found


def _level(leaf: WithThreshold, kind: FigureKind, usual: float) -> Usual:
    """The threshold: thrice what is usual; never within reach of what the busiest healthy path shows."""
    if kind is DELAY:
        least: Figure = _round(max(_FLOOR * usual, _LEAST_NS))
        most, until = 10 * least, max(_round(_FACTOR * usual), 2 * least)
        return _usual(round(least), round(most), round(until))
    least = min(max(_round(_FLOOR * usual), _LEAST_SHARE[leaf.signal]), _HIGHEST_SHARE)
    most = min(10 * least, 0.9)
    return _usual(least, most, min(2 * least, most))


def _usual(least: Figure, most: Figure, until: Figure) -> Usual:
    return Usual(quantile="p99", factor=_FACTOR, plus=0, at_least=least, at_most=most, until_learned=until)


def _round(value: float) -> float:
    """Up to two digits that a person would write."""
    if value <= 0:
        return 0.0
    size = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(value / size - 1e-9) * size:.6g}")


def policy_text(text: str, policy: Policy, found: Mapping[str, Proposal]) -> str:
    """The text of a policy with these thresholds in it."""
    places = thresholds(text)
    values: dict[Location, str] = {}
    for rule in policy.rules:
        for leaf, at in zip(leaves(rule.when), places[rule.name], strict=True):
            if isinstance(leaf, WithThreshold) and subject(leaf) in found:
                values[(*at, "above")] = found[subject(leaf)].text
                values[(*at, "clear_below")] = f"above × {_CLEAR:g}"
    return replaced(text, values)


def for_everything() -> Policy:
    """The policy of the template, about whatever is in a recording."""
    return parse(TEMPLATE.replace("DESTINATIONS", '0.0.0.0/0, "::/0"'))


def for_addresses(addresses: Iterable[str]) -> str:
    """The text of the template for the destinations of a recording."""
    return TEMPLATE.replace("DESTINATIONS", ", ".join(f'"{address}"' for address in sorted(addresses)))


def comments(
    source: str, survey: Survey, found: Mapping[str, Proposal], present: str, played: tuple[Tally, Tally]
) -> list[str]:
    """What stands above the policy: the figures behind it, and what both would have done."""
    before, after = played
    lines = [f"Suggested by `swerve policy suggest` from {source}: {duration_text(before.played_ns)}."]
    for each in found.values():
        lines.append(
            f"{each.subject}: usual p99 {each.kind.text(each.usual)} on the busiest path, {each.path} "
            f"({each.measurements} measurements while healthy)."
        )
    lines += [f"Over this time {present}: {_did(before)}.", f"Over this time the policy below: {_did(after)}."]
    ill = 1 - survey.calm / survey.all
    if ill > _ILL:
        lines.append(
            f"For {ill:.0%} of it the paths were not healthy by {present}, and were not learnt from. "
            "If that was health under load, try again with a policy that has higher thresholds."
        )
    lines.append("No traffic moved in these replays: what comes after a first act is less sure.")
    return lines


# ---- other values in the text of a policy; comments, order and style stay ----


def thresholds(text: str) -> dict[str, list[Location]]:
    """Where the leaves of each rule are, by its name, in the order of the tree (`leaves`)."""
    found: dict[str, list[Location]] = {}
    raw = Reader().read(text)
    for i, rule in enumerate(raw["rules"]):
        found[rule["name"]] = _leaves(rule["when"], ("rules", i, "when")) if "when" in rule else []
    return found


def _leaves(node: object, at: Location) -> list[Location]:
    if isinstance(node, list):
        return [each for i, part in enumerate(node) for each in _leaves(part, (*at, i))]
    if isinstance(node, dict) and "signal" not in node:
        return [each for key in _TREES if key in node for each in _leaves(node[key], (*at, key))]
    return [at]


def replaced(text: str, values: Mapping[Location, str]) -> str:
    """The text with these scalars in the places of those that are there, each in quotes."""
    reader = Reader()
    reader.read(text)
    for (begin, end), value in sorted(((reader.spans[at], value) for at, value in values.items()), reverse=True):
        text = f'{text[:begin]}"{value}"{text[end:]}'
    return text
