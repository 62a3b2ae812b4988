"""How large a packet a path takes: which sizes to try next, and what follows from those that came back.

That a size came back is proof. That it did not is none: congestion loses packets too, and a queue that is full to the
last byte loses the larger ones more often. But a limit is a cliff, and congestion is a slope: so nothing is called a
limit before, of two sizes one byte apart that were sent in pairs, one has come back (nearly) every time and the other
never. By chance that happens in (1/4)^pairs of all cases at most. Sizes are bytes of IP packets. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

MOST_AT_ONCE: Final = 12  # sizes of one round
_AGAIN: Final = 2
_PAIRS: Final = 5  # in a round that confirms
_SHORT: Final = 2  # in such a round: large there, small back
_CONFIRMATIONS: Final = 2
_MAY_BE_LOST: Final = 1  # of the sizes that should come back, in all confirmations together
_MOST_ROUNDS: Final = 10  # of one search; four halve, and more, 9000 bytes to one
_MOST_REST: Final = 32
_SILENT: Final = 2  # rounds of which nothing came back, until nothing is known any more

Verdict = Literal["agrees", "mismatch", "unknown"]
Direction = Literal["forward", "reverse", "unknown"]


@dataclass(frozen=True, slots=True)
class Shot:
    """One packet of a round: its size, and whether the reply shall be small, so that only the way there counts."""

    size: int
    short_reply: bool = False


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is known of one path, and how far a search has come."""

    full: int  # what the path should take, and what every round sends as well, last, to see that the path is alive
    smallest: int
    verdict: Verdict = "unknown"
    works: int | None = None  # the largest size that came back, and the smallest that does not
    fails: int | None = None
    narrow: Direction = "unknown"  # which way does not take `fails`
    told: int | None = None  # what somebody on the way says the path takes: looked at first, never believed
    phase: Literal["watch", "search", "confirm"] = "watch"
    low: int = 0  # of a search: came back
    high: int = 0  # of a search: did not
    rounds: int = 0  # of this search
    confirmed: int = 0
    lost: int = 0  # in the confirmations, of what should have come back
    short_passed: bool = False
    silent: int = 0  # rounds in a row of which nothing came back
    turn: int = 0
    rest: int = 0  # rounds before the next search
    last_rest: int = 0

    @property
    def urgent(self) -> bool:
        """Whether the next round should follow at once."""
        return self.phase != "watch"

    @property
    def settled(self) -> bool:
        """Whether a round in which everything comes back changes nothing."""
        return self.verdict == "agrees" and self.phase == "watch" and not (self.silent or self.rest or self.last_rest)


def shots(state: Sizes) -> tuple[Shot, ...]:
    """The next round. The caller sends the smallest size behind it."""
    if state.phase == "confirm":
        low, high = Shot(state.low), Shot(state.high)
        pairs = [each for turn in range(_PAIRS) for each in ((low, high) if turn % 2 else (high, low))]
        return (*pairs, *[Shot(state.high, short_reply=True)] * _SHORT)
    if state.phase == "search":
        # First once more what did not come back: most often that was a single loss.
        first = state.rounds == 0
        sizes = [state.high] * _AGAIN + sorted(_told(state)) if first else sorted(_between(state), reverse=True)
        return tuple(Shot(size) for size in sizes)
    if state.works is not None and state.fails is not None:
        other = state.fails if state.turn % 2 else state.works
        return (Shot(state.full), Shot(other)) if other != state.full else (Shot(state.full),)
    return (Shot(state.full),)


def _between(state: Sizes) -> set[int]:
    """Sizes that divide what lies between the bounds of a search, and those that were told."""
    gap, count = state.high - state.low, MOST_AT_ONCE - len(_told(state))
    even = {state.low + gap * step // (count + 1) for step in range(1, count + 1)}
    return {size for size in even if state.low < size < state.high} | _told(state)


def _told(state: Sizes) -> set[int]:
    """The two sizes that decide whether what was told is true."""
    hints = set() if state.told is None else {state.told, state.told + 1}
    return {size for size in hints if state.low < size < state.high}


def learn(state: Sizes, sent: Sequence[Shot], passed: Sequence[bool], understood: bool = True) -> Sizes:
    """What is known once a round is over, of a path that is alive.

    Parameters
    ----------
    passed : sequence of bool
        Which of them came back.
    understood : bool
        Whether the other end is known to answer every size; if not, what does not come back says nothing.
    """
    if all(passed) and state.settled:
        return state
    state = replace(state, silent=0, turn=state.turn + 1)
    if any(shot.size >= state.full and came and not shot.short_reply for shot, came in zip(sent, passed, strict=True)):
        # Where a search has led to nothing, full size comes back now and then: calm returns by halves.
        calm = replace(state, last_rest=state.last_rest // 2)
        return _watching(calm, verdict="agrees", works=state.full, fails=None)
    if not understood:
        return _watching(state, verdict="unknown", works=None, fails=None)
    if state.phase == "confirm":
        return _confirm(state, sent, passed)
    back = {shot.size for shot, came in zip(sent, passed, strict=True) if came}
    gone = {shot.size for shot in sent} - back
    return _narrow(state, back, gone) if state.phase == "search" else _doubt(state, back, gone)


def _doubt(state: Sizes, back: set[int], gone: set[int]) -> Sizes:
    """Full size did not come back: whether that is news."""
    if state.rest:
        return replace(state, rest=state.rest - 1)
    if state.verdict != "mismatch" or state.works is None or state.fails is None:
        return _search(state, state.smallest, state.full)
    if state.works in gone:
        return _search(state, state.smallest, state.works)
    if state.fails in back:
        return _search(state, state.fails, state.full)
    return state


def silence(state: Sizes) -> Sizes:
    """What is known when nothing of a round came back, not even the smallest: the path, or its other end, is dead."""
    state = replace(state, phase="watch", silent=state.silent + 1)
    return replace(state, verdict="unknown") if state.silent >= _SILENT else state


def resized(state: Sizes, full: int) -> Sizes:
    """The same path when it should take another size from now on."""
    return state if full == state.full else Sizes(full, min(state.smallest, full))


def _watching(state: Sizes, verdict: Verdict, works: int | None, fails: int | None) -> Sizes:
    """A path of which no search is needed."""
    rest = state.last_rest
    return Sizes(state.full, state.smallest, verdict, works, fails, turn=state.turn, rest=rest, last_rest=rest)


def _search(state: Sizes, low: int, high: int) -> Sizes:
    return replace(state, phase="search", low=low, high=high, rounds=0, confirmed=0, lost=0, short_passed=False, rest=0)


def _narrow(state: Sizes, back: set[int], gone: set[int]) -> Sizes:
    """One round of a search: what came back is proof, what did not is a guess that the confirmation will test."""
    low = max(back | {state.low})
    high = min((size for size in gone | {state.high} if size > low), default=state.full)
    return _go_on(replace(state, low=low, high=high, rounds=state.rounds + 1))


def _go_on(state: Sizes) -> Sizes:
    if state.rounds >= _MOST_ROUNDS:
        return _give_up(state)
    return replace(state, phase="confirm" if state.high - state.low == 1 else "search")


def _confirm(state: Sizes, sent: Sequence[Shot], passed: Sequence[bool]) -> Sizes:
    lows = [came for shot, came in zip(sent, passed, strict=True) if shot.size == state.low]
    highs = [came for shot, came in zip(sent, passed, strict=True) if shot.size == state.high and not shot.short_reply]
    short = [came for shot, came in zip(sent, passed, strict=True) if shot.short_reply]
    if any(highs):
        raised = replace(state, low=state.high, high=state.full, confirmed=0, lost=0, short_passed=False)
        return _go_on(replace(raised, rounds=state.rounds + 1))
    state = replace(
        state,
        lost=state.lost + lows.count(False),
        confirmed=state.confirmed + 1,
        short_passed=state.short_passed or any(short),
    )
    if state.lost > _MAY_BE_LOST:
        return _give_up(state)
    if state.confirmed < _CONFIRMATIONS:
        return state
    found = _watching(replace(state, last_rest=0), "mismatch", state.low, state.high)
    return replace(found, narrow="reverse" if state.short_passed else "forward", told=state.told)


def _give_up(state: Sizes) -> Sizes:
    """No limit, and no full size either: a lossy path. It is left alone for a while, longer each time."""
    rest = min(max(1, 2 * state.last_rest), _MOST_REST)
    known = state.verdict if state.verdict == "mismatch" else "unknown"
    return replace(state, phase="watch", verdict=known, rest=rest, last_rest=rest)
