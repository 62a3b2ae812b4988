"""The scheduler of the sources: runs each when it is due, or when its descriptor is ready.

CLOCK_MONOTONIC nanoseconds; one thread.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable

from pytools.sources.source import Source


class Scheduler:
    """Calls the sources of an agent, in the order in which they were added.

    Parameters
    ----------
    selector : BaseSelector
        Where sources wait for descriptors; `key.data` is a callable that takes the event mask.
    before_waiting : callable
        Called after the sources, before anything is waited for.
    """

    def __init__(self, selector: selectors.BaseSelector, before_waiting: Callable[[], None]) -> None:
        self._selector, self._before_waiting = selector, before_waiting
        self.sources: list[Source] = []  # all that were added
        self._due_ns: list[int] = []
        self._late_ns: list[Callable[[], int]] = []  # how late each source may be called
        self._woken: list[int] = []  # sources, by number

    def add(self, source: Source, late_ns: int | Callable[[], int] = 0, at_events: bool = False) -> None:
        """Call this source, too; at once first.

        Parameters
        ----------
        late_ns : int or callable
            How late it may be called, so that it shares the turn of others; a callable says so after each turn.
        at_events : bool
            Call it after every event as well: it may have been woken, and knows when it is due.
        """
        if at_events:
            self._woken.append(len(self.sources))
        self.sources.append(source)
        self._due_ns.append(0)
        self._late_ns.append(late_ns if callable(late_ns) else lambda: late_ns)

    def all_due(self) -> None:
        self._due_ns = [0] * len(self.sources)

    def turn(self) -> None:
        """Call who is due, then wait until somebody is, or until something happens."""
        now_ns = time.monotonic_ns()
        for index, source in enumerate(self.sources):
            if self._due_ns[index] <= now_ns:
                self._due_ns[index] = source.tick(now_ns)
        self._before_waiting()
        next_ns = min(due_ns + late_ns() for due_ns, late_ns in zip(self._due_ns, self._late_ns, strict=True))
        timeout_s = max(0.0, (next_ns - time.monotonic_ns()) / 1e9)
        for key, mask in self._selector.select(timeout_s):
            key.data(mask)
            for index in self._woken:
                self._due_ns[index] = 0
