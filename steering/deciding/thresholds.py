"""What a threshold is on one path: a figure of the file, or a multiple of what that path has learnt to be usual. Pure.

The usual value is a quantile over time, followed measurement by measurement: one above it raises it, one below lowers
it, in the proportion that leaves it in balance at the quantile. Each step is limited by the time that it stands for,
so that the value doubles at most once in `DOUBLES_NS`, whatever is measured. Until `ENOUGH` measurements are there it
is not known. Delays are nanoseconds, shares within 0 and 1; times are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import msgspec

from pytools.units import SECOND
from steering.policy.conditions import MeasuredShare, WithThreshold, figures_of
from steering.policy.levels import DELAY, QUANTILES, FigureKind, OfAbove, Usual

ENOUGH: Final = 300  # measurements: a minute of a busy path
SPACING_NS: Final = 150_000_000  # between two that are learnt from: windows of 90 ms do not overlap then
DOUBLES_NS: Final = 600 * SECOND  # the usual value needs at least so long to double
NOTEWORTHY: Final = 0.1  # of `at_least`: what is below is an idle path, which does not show what load does
_LONGEST_STEP_NS: Final = SECOND  # a measurement stands for no more time than this

Said: TypeAlias = str | tuple[Callable[..., str], *tuple[Any, ...]]  # words, or what makes them of what: few are read


def words(said: Said) -> str:
    return said if isinstance(said, str) else said[0](*said[1:])


class Limits(msgspec.Struct, frozen=True):
    """The two figures of a threshold on one path, and the words for the upper one."""

    above: float
    clear_below: float
    said: Said

    @property
    def text(self) -> str:
        return words(self.said)


LeafLimits: TypeAlias = tuple[Limits | None, ...]  # by leaf of one rule; None: a figure of the file


class Learnt(msgspec.Struct, frozen=True):
    """What one path has learnt about one figure."""

    count: int = 0
    at_ns: int = 0  # of the newest measurement that was learnt from
    level: float = 0.0  # the usual value, once `count` is ENOUGH
    early: tuple[float, ...] = ()  # the first measurements, until then

    @property
    def known(self) -> bool:
        """Whether the usual value is known."""
        return self.count >= ENOUGH


NOTHING: Final = Learnt()


def learn(usual: Usual, known: Learnt, value: float, at_ns: int) -> Learnt:
    """What is known after one more measurement; the same when it comes too soon after the last, or is of an idle path.

    Whoever calls has made sure that the path is healthy, and that the value is not beyond the threshold.
    """
    if known.at_ns and at_ns - known.at_ns < SPACING_NS:
        return known
    least, most = usual.at_least * NOTEWORTHY, float(usual.at_most)
    if not least <= value <= most:  # also when it is no number
        return known
    count, quantile = known.count + 1, QUANTILES[usual.quantile]
    if not known.known:
        early = (*known.early, value)
        if count < ENOUGH:
            return Learnt(count, at_ns, early=early)
        return Learnt(count, at_ns, sorted(early)[math.ceil(quantile * count) - 1])
    stands_for = min(at_ns - known.at_ns, _LONGEST_STEP_NS)
    step = stands_for / DOUBLES_NS * (1.0 if value > known.level else (quantile - 1) / quantile)
    towards = max if value > known.level else min
    level = known.level * 2.0**step
    # A value that is nearer than the step would lead is not passed.
    level = value if towards(level, value) == level else level
    return Learnt(count, at_ns, min(max(level, least), most))


def unlearnt(leaf: WithThreshold) -> Limits:
    """The figures of a leaf as long as nothing is learnt: those of the file."""
    return limits_of(leaf, NOTHING)


def limits_of(leaf: WithThreshold, known: Learnt) -> Limits:
    """The figures of a leaf on a path that has learnt so much."""
    level, clear, kind = leaf.above, leaf.clear_below, figures_of(leaf)
    if not isinstance(level, Usual):
        said: Said = (
            (_above_time, level)
            if kind is DELAY
            else (_above_share, level, 0 if isinstance(leaf, MeasuredShare) else 2)
        )
        return Limits(level, _clear(clear, level), said)
    if not known.known:
        above: float = level.until_learned
        said = _until_learned, kind, above, known.count
    else:
        beyond = known.level * level.factor + level.plus
        above = min(max(beyond, level.at_least), level.at_most)
        bound = "at least" if above > beyond else "at most" if above < beyond else ""
        said = _above_usual, kind, level, known.level, above, bound
    return Limits(above, _clear(clear, above), said)


def _clear(clear: float | OfAbove, above: float) -> float:
    return above * clear.factor if isinstance(clear, OfAbove) else clear


def learning(known: Learnt) -> str:
    """How far a path is from knowing what is usual."""
    return f"learning: {min(known.count, ENOUGH)} of {ENOUGH} measurements"


def _above_time(threshold: float) -> str:
    return f"above {DELAY.text(threshold)}"


def _above_share(threshold: float, digits: int) -> str:
    return f"above {threshold:.{digits}%}"


def _until_learned(kind: FigureKind, threshold: float, count: int) -> str:
    return f"above {kind.text(threshold)} ({learning(Learnt(count))})"


def _above_usual(kind: FigureKind, level: Usual, usual: float, above: float, bound: str) -> str:
    known = f"usual {level.quantile} ({kind.text(usual)})"
    if bound:
        return f"above {kind.text(above)} ({bound}; {known})"
    times = f"{level.factor:g} × " if level.factor != 1 else ""
    plus = f" + {kind.text(level.plus)}" if level.plus else ""
    return f"above {times}{known}{plus}"
