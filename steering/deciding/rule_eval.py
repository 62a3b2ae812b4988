"""Whether a rule's condition holds: leaf by leaf with memory, then up the tree. Pure.

A measurement counts once. What is remembered of a leaf (since when, how many in a row) is lost when measurements pause;
a window without samples is none.
Of the tree, `since_ns` and `run` are those of the leaves that made the verdict. Times are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import msgspec

from pytools.units import SECOND, duration_text
from steering.deciding.condition_eval import Measurement, Verdict, measure
from steering.deciding.evidence import Facts
from steering.deciding.thresholds import Limits, Said, words
from steering.policy.conditions import All, AnyLeaf, AnyOf, Condition, Not, Silence, leaves, samples_of

STALE_AFTER: Final = SECOND // 2


class Reading(msgspec.Struct, frozen=True):
    """A verdict with the numbers behind it, for people."""

    verdict: Verdict
    said: Said
    at_ns: int = 0  # the newest measurement behind it; 0: none
    since_ns: int = 0  # since when it stands
    run: int = 0  # for how many measurements in a row it stands
    idle: bool = False  # NONE only because no traffic shows what the condition asks about
    failure: bool = False  # made by what shows a failure, not a load
    signals: tuple[str, ...] = ()  # of the leaves that made it
    few: bool = False  # CLEAR, but by less evidence than it takes to be BAD

    @property
    def text(self) -> str:
        return words(self.said)

    @property
    def over(self) -> bool:
        """Whether it holds no more; of what only traffic shows, an idle path has nothing more to say."""
        return self.verdict is Verdict.CLEAR or (self.verdict is Verdict.NONE and self.idle)

    @property
    def proven(self) -> bool:
        """Whether it holds no more, by as much evidence as it takes to hold."""
        return self.over and not self.few

    @property
    def lasted_ns(self) -> int:
        """For how long it stands, as measured."""
        return max(self.at_ns - self.since_ns, 0)


class LeafMemory(msgspec.Struct, frozen=True):
    """What is remembered of a leaf: its last measurement, and the run of equal verdicts that it ends."""

    measurement: Measurement
    since_ns: int
    run: int
    earlier: int = 0  # samples behind the verdict, from before the window that was counted last
    counted: Measurement | None = None  # that window
    empty: bool = False  # whether windows without samples came since

    @property
    def samples(self) -> int:
        """At least so many probes in a row bear the verdict out; each counts once."""
        return self.earlier + (self.counted.samples if self.counted else 0)


Memory = tuple[LeafMemory | None, ...]  # by leaf, in the order of the tree; empty at first


def judge(
    condition: Condition,
    facts: Facts,
    memory: Memory,
    now: int,
    stale_after: int = STALE_AFTER,
    limits: Sequence[Limits | None] = (),
) -> tuple[Reading, Memory]:
    """What the newest facts say about a condition.

    Parameters
    ----------
    memory : Memory
        What the last call returned; empty before the first.
    stale_after : int
        `safety.stale_after`: a fact of a short window is of no use after so many nanoseconds.
    limits : sequence of Limits
        By leaf, in the order of the tree: what relative thresholds are on this path; empty when nothing is learnt.
    """
    if not isinstance(condition, All | AnyOf | Not):  # most are one leaf
        made = measure(condition, facts, now, stale_after, limits[0] if limits else None)
        leaf = _remember(made, memory[0] if len(memory) == 1 else None)
        return _read(condition, leaf, now), (leaf,)
    each = list(leaves(condition))
    before: Memory = memory if len(memory) == len(each) else (None,) * len(each)
    after = tuple(
        _remember(measure(leaf, facts, now, stale_after, limit), known)
        for leaf, known, limit in zip(each, before, limits or (None,) * len(each), strict=True)
    )
    readings = iter([_read(leaf, known, now) for leaf, known in zip(each, after, strict=True)])
    return _combine(condition, readings), after


def _remember(new: Measurement, known: LeafMemory | None) -> LeafMemory:
    """The memory of a leaf after a measurement, which may be the one that it knows already."""
    since_ns, run, earlier, counted = new.at_ns, 1, 0, new
    if known is not None:
        old = known.measurement
        if new.at_ns < old.at_ns and new.at_ns + new.lives_ns > old.at_ns:
            return known  # told later, but older
        if new.empty and old.verdict is not Verdict.NONE:
            return msgspec.structs.replace(known, empty=True)
        same = new.verdict is old.verdict and 0 <= new.at_ns - old.at_ns <= new.lives_ns
        if same:
            since_ns, run = known.since_ns, known.run + (new.at_ns > old.at_ns)
            earlier, counted = _count(new, known)
    return LeafMemory(
        new,
        since_ns if new.since_ns is None else min(new.since_ns, new.at_ns),
        run if new.run is None else new.run,
        earlier,
        counted,
    )


def _count(new: Measurement, known: LeafMemory) -> tuple[int, Measurement]:
    """The samples so far and the window that was counted last, after one more that says the same.

    Of windows that overlap, the one with more samples counts: the same probes may be in both. A last sample that has
    the same value is the same one.
    """
    last = known.counted
    if last is None or (new.last_ns is not None and new.last_ns == last.last_ns):
        return known.earlier, last or new
    if new.at_ns - new.window_ns >= last.at_ns and new.at_ns > last.at_ns:
        return known.samples, new
    return known.earlier, new if new.samples > last.samples else last


def _read(leaf: AnyLeaf, known: LeafMemory, now: int) -> Reading:
    """What a leaf says now: its threshold for so long, so often, and not too long ago."""
    made = known.measurement
    if made.verdict is not Verdict.NONE and now - made.at_ns > made.lives_ns:
        return Reading(Verdict.NONE, (_ago, made, now - made.at_ns), made.at_ns, made.at_ns)
    lasted = max(made.at_ns - known.since_ns, 0)
    verdict, said = made.verdict, made.said
    if known.empty and verdict is not Verdict.BAD:
        return Reading(Verdict.NONE, said, made.at_ns, known.since_ns, known.run)
    if verdict is Verdict.BAD:
        few = known.samples < samples_of(leaf)
        if lasted < leaf.for_ or known.run < leaf.fall or few or known.empty:  # no act without a sample
            verdict = Verdict.PENDING
        said = _with_time, leaf, made, lasted, known.run, known.samples, verdict is Verdict.PENDING
    few = verdict is Verdict.CLEAR and not _as_much(leaf, known, lasted)
    return Reading(verdict, said, made.at_ns, known.since_ns, known.run, made.idle, leaf.failure, (leaf.signal,), few)


def _as_much(leaf: AnyLeaf, known: LeafMemory, lasted: int) -> bool:
    """Whether a leaf is clear for as long, and by as many measurements and probes, as it must be bad to be so."""
    missed = leaf.missed if isinstance(leaf, Silence) else 0
    enough = lasted >= leaf.for_ and known.run >= max(leaf.fall, missed)
    return enough and known.samples >= samples_of(leaf)


def _ago(made: Measurement, ago: int) -> str:
    return f"{made.text}, but {duration_text(ago)} ago"


def _with_time(leaf: AnyLeaf, made: Measurement, lasted: int, run: int, samples: int, pending: bool) -> str:
    """A bad measurement in words: what, beyond which threshold, for how long and how often, of what is asked."""
    text = f"{made.text}, {words(made.beyond)}" if made.beyond else made.text
    if lasted:
        text += f" for {duration_text(lasted)}"
    asked = samples_of(leaf)
    if asked > 1:
        text += f" in {samples} sample{'s' if samples > 1 else ''}"
    if leaf.fall > 1:
        text += f", {run} in a row"
    if pending:
        wanted = [f"for {duration_text(leaf.for_)}"] if lasted < leaf.for_ else []
        wanted += [f"in {asked} samples"] if samples < asked else []
        wanted += [f"{leaf.fall} in a row"] if run < leaf.fall else []
        text += f", not yet {' and '.join(wanted)}" if wanted else ", no sample since"
    return text


_ALL: Final = (Verdict.CLEAR, Verdict.NONE, Verdict.BETWEEN, Verdict.PENDING, Verdict.BAD)
_ANY: Final = (Verdict.BAD, Verdict.PENDING, Verdict.BETWEEN, Verdict.CLEAR, Verdict.NONE)
_NOT: Final = {
    Verdict.BAD: Verdict.CLEAR,
    Verdict.CLEAR: Verdict.BAD,
    Verdict.PENDING: Verdict.BETWEEN,
    Verdict.BETWEEN: Verdict.BETWEEN,
    Verdict.NONE: Verdict.NONE,
}


def _combine(node: Condition, readings: Iterator[Reading]) -> Reading:
    """The reading of a tree from those of its leaves, which come in its order."""
    match node:
        case All():
            # One clear part makes it clear: since the first of them was; for the rest all parts are needed.
            return _first(_ALL, Verdict.CLEAR, [_combine(part, readings) for part in node.all])
        case AnyOf():
            return _first(_ANY, Verdict.BAD, [_combine(part, readings) for part in node.any])
        case Not():
            inner = _combine(node.not_, readings)
            verdict = _NOT[inner.verdict]
            few = verdict is Verdict.CLEAR and inner.few
            return msgspec.structs.replace(inner, verdict=verdict, failure=False, few=few)
        case _:
            return next(readings)


def _all_of(*parts: Reading) -> str:
    return "; ".join(dict.fromkeys(part.text for part in parts))


def _first(order: Iterable[Verdict], alone: Verdict, parts: list[Reading]) -> Reading:
    """The first verdict in this order that any part has, by all that have it; `alone`: one part is enough for it."""
    verdict = next(verdict for verdict in order if any(part.verdict is verdict for part in parts))
    made = [part for part in parts if part.verdict is verdict]
    earliest: Callable[[Iterable[int]], int] = min if verdict is alone else max
    longest: Callable[[Iterable[int]], int] = max if verdict is alone else min
    return Reading(
        verdict,
        (_all_of, *made),
        max(part.at_ns for part in made),
        earliest(part.since_ns for part in made),
        longest(part.run for part in made),
        all(part.idle for part in made),
        any(part.failure for part in made),
        tuple(dict.fromkeys(name for part in made for name in part.signals)),
        (all if verdict is alone else any)(part.few for part in made),
    )
