"""Changes, one after the other: what is measured, ordered or lost meanwhile is looked at before each.

CLOCK_MONOTONIC nanoseconds; one thread, in the namespace that is steered.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from steering.acting.weights import Acting
from steering.deciding.engine import Engine
from steering.plan import Change, Target, same


class ChangeLoop:
    """Carries out what the engine wants, until it wants nothing more.

    Parameters
    ----------
    engine : Engine
        Says what is wanted of a target, and learns what was refused.
    acting : Acting
        Makes a change, or says what would be done.
    poll : callable
        Receives the signals that wait; they arrive at `heard`.
    refusal : callable
        Why nothing may be changed now; empty when it may.
    done : callable
        Called after each round with whether the kernel is as it was thought to be.
    """

    def __init__(
        self,
        engine: Engine,
        acting: Acting,
        apply: bool,
        poll: Callable[[], object],
        refusal: Callable[[], str],
        done: Callable[[bool], None],
    ) -> None:
        self._engine, self._acting, self._apply = engine, acting, apply
        self._poll, self._refusal, self._done = poll, refusal, done
        self._runs = False  # what is heard meanwhile waits
        self._touched: set[Target] = set()  # targets of which something was heard, not decided yet

    def heard(self, targets: Iterable[Target]) -> None:
        """Act on what was heard of these targets, at once or after the change that is under way."""
        self._touched |= set(targets)
        if not self._runs:
            self.act(self._changes_of_touched())

    def act(self, changes: list[Change]) -> None:
        """Carry out changes, and what is wanted of their targets by then."""
        self._runs = True
        try:
            while changes := [change for change in changes if self._stands(change)]:
                if not self._apply:
                    self._pretend(changes)
                    return
                carried = self._acting.carry_out_all(changes, self._look_again)
                self._done(carried.as_thought)
                changes = list(carried.left) or self._changes_of_touched()
        finally:
            self._runs = False

    def _changes_of_touched(self) -> list[Change]:
        touched, self._touched = self._touched, set()
        return self._engine.changes(time.monotonic_ns(), touched) if touched else []

    def _pretend(self, changes: list[Change]) -> None:
        why = self._refusal()
        for change in changes:
            self._engine.rejected(change, why) if why else self._acting.pretend(change)

    def _look_again(self, change: Change) -> Change | None:
        """What a change is now, immediately before the kernel is asked; None for none.

        Others may have been carried out since it was decided.
        """
        self._poll()
        if why := self._refusal():
            self._engine.rejected(change, why)
            return None
        for now in self._engine.changes(time.monotonic_ns(), [change.target]):
            same_weights = (now.before, now.after) == (change.before, change.after)
            return replace(now, because=change.because, under=change.under) if same_weights else now
        return None

    def _stands(self, change: Change) -> bool:
        """Whether a target is still as it was when its change was decided: another one's may have shown otherwise."""
        group = self._engine.groups.get(change.target)
        return group is not None and same(group.current, change.before)
