"""States over time: how long each lasted, and what was said of it. Pure; CLOCK_REALTIME nanoseconds.

A bounded number of stretches: the oldest go first, and are counted.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final, NamedTuple

RUNS: Final = 300


class Run(NamedTuple):
    word: str
    began_ns: int
    ended_ns: int
    note: str


@dataclass(frozen=True, slots=True)
class Bands:
    """States in the order of time; between two of them nothing may be known."""

    runs: tuple[Run, ...] = ()
    forgotten: int = 0  # older ones that found no room

    def lasted_ns(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for run in self.runs:
            found[run.word] = found.get(run.word, 0) + run.ended_ns - run.began_ns
        return found


class Runs:
    """Collects states.

    Parameters
    ----------
    silence_ns : int
        A state holds so long after it was last said, unless another comes before.
    limit : int
        How many stretches are kept.
    """

    def __init__(self, silence_ns: int, limit: int = RUNS) -> None:
        self._silence_ns, self._limit = silence_ns, limit
        self._runs: deque[Run] = deque()
        self._said_ns = 0
        self._forgotten = 0

    def add(self, unix_ns: int, word: str, note: str = "") -> None:
        """What is said now; what comes later than something newer is left out."""
        if unix_ns < self._said_ns:
            return
        last = self._runs[-1] if self._runs else None
        if last is not None:
            reaches_ns = min(unix_ns, self._said_ns + self._silence_ns)
            self._runs[-1] = last = last._replace(ended_ns=reaches_ns)
        self._said_ns = unix_ns
        if last is not None and last.word == word and last.ended_ns == unix_ns:
            return
        self._runs.append(Run(word, unix_ns, unix_ns, note))
        if len(self._runs) > self._limit:
            self._runs.popleft()
            self._forgotten += 1

    def bands(self, until_ns: int) -> Bands:
        """All of them, the last one up to then at most."""
        found = list(self._runs)
        if found:
            ended_ns = max(found[-1].began_ns, min(until_ns, self._said_ns + self._silence_ns))
            found[-1] = found[-1]._replace(ended_ns=ended_ns)
        return Bands(tuple(found), self._forgotten)
