"""Faults of a lab's rails that come and go, and what the rails did with the proof's datagrams. A thread makes them.

A rail is silent (it forwards nothing, its gateways answer) or slow (so low a rate toward the receiver that the traffic
itself makes a queue). What comes into a rail and does not leave it was lost by a fault.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator, Mapping
from typing import Final

from _taps import Tap

from pytools.kernel.netns import inside
from pytools.lab import Lab

SILENT: Final = "silent"
_SLOW: Final = "slow"
_RATE: Final = "160kbit"
_QUEUE_BYTES: Final = 20_000
_LEAST_S, _MOST_S = 0.3, 1.5
_SENDER, _RECEIVER = 1, 2  # hosts


class Faults:
    """They come and go on either rail until told to stay as they are."""

    def __init__(self, lab: Lab, seed: int) -> None:
        self._lab, self._chance = lab, random.Random(seed)
        self.now: dict[int, str] = {}
        self.made = 0
        self._lock, self._end = threading.RLock(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """From now on they come."""
        self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(self._chance.uniform(_LEAST_S, _MOST_S)):
            with self._lock:
                self._make({rail.number: self._chance.choice(("", "", SILENT, _SLOW)) for rail in self._lab.rails})

    def _make(self, wanted: Mapping[int, str]) -> None:
        for rail, fault in wanted.items():
            if self.now.get(rail, "") == fault:
                continue
            if self.now.get(rail):
                self._lab.heal(rail)
            if fault == SILENT:
                self._lab.blackhole(rail)
            elif fault == _SLOW:
                self._lab.congest(rail, _RATE, _QUEUE_BYTES, toward=_RECEIVER)
            self.made += bool(fault)
            self.now[rail] = fault

    @contextlib.contextmanager
    def held(self, wanted: Mapping[int, str] | None = None) -> Iterator[None]:
        """Keep them as they are, or as wanted."""
        with self._lock:
            if wanted is not None:
                self._make(wanted)
            yield

    def close(self) -> None:
        """End them all."""
        self._end.set()
        self._thread.join()
        self._make({rail.number: "" for rail in self._lab.rails})


class RailCounts:
    """Datagrams from the first host to the second that came into each rail, and that left it."""

    def __init__(self, lab: Lab) -> None:
        self._stack = contextlib.ExitStack()
        self._taps: dict[int, tuple[Tap, Tap]] = {}
        for rail in lab.rails:
            with inside(rail.netns):
                came, left = (
                    self._stack.enter_context(contextlib.closing(Tap(rail.ports[host - 1].name)))
                    for host in (_SENDER, _RECEIVER)
                )
            self._taps[rail.number] = came, left

    def came(self) -> dict[int, int]:
        """By rail."""
        return {rail: came.passed() for rail, (came, _) in self._taps.items()}

    def left(self) -> dict[int, int]:
        """By rail."""
        return {rail: left.passed() for rail, (_, left) in self._taps.items()}

    def close(self) -> None:
        """Count no more."""
        self._stack.close()
