"""The minimum RTO of managed routes: put in force once, told, and told again when it is over.

One thread, in the namespace that is steered. Times are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from pytools.errors import SwerveError
from steering.acting import messages
from steering.actuators.overlay import Overlay
from steering.deciding.engine import Engine

RETRY_NS: Final = 1_000_000_000  # each attempt that fails has the whole overlay compared again


class RtoMinActing:
    """Puts our routes in force for their minimum RTO, or says that it would."""

    def __init__(self, apply: bool, engine: Engine, overlay: Overlay, output: messages.Output) -> None:
        self._apply, self._engine, self._overlay, self._output = apply, engine, overlay, output
        self._told: messages.Outcome | None = "applied" if overlay.held else None  # by a controller before us
        self._due_ns = 0
        if why := overlay.rto_min.why_not:
            output.say(f"no minimum RTO is set: {why}")

    def turn(self, now: int, refusal: Callable[[], str]) -> None:
        """Put it in force once there are routes, unless there is a reason to change nothing."""
        due = self._told is None or (self._apply and not self._overlay.held)
        if not due or now < self._due_ns or not self._overlay.rto_min.milliseconds or not self._engine.groups:
            return
        why = "the policy asks for it"
        if not self._apply:
            self._tell("dry_run", why, now)
        elif not refusal():
            try:
                self._overlay.hold()
                self._tell("applied", why, now)
            except SwerveError as error:
                self._due_ns = now + RETRY_NS
                self._tell("failed", why, now, str(error))

    def over(self, why: str) -> None:
        """Our rules are deleted."""
        if self._told == "applied":
            self._tell("undone", f"{why}; open connections keep the RTO that they have", time.monotonic_ns())

    def _tell(self, outcome: messages.Outcome, because: str, decided: int, failure: str = "") -> None:
        if outcome != self._told:
            self._told = outcome
            chosen, host = self._overlay.rto_min, self._output.host
            self._output.send(messages.rto_min_act(host, chosen, because, outcome, decided, failure))

    def facts(self) -> dict[str, object]:
        chosen = self._overlay.rto_min
        return {"rto_min_wanted_ms": chosen.milliseconds or None, "rto_min_missing": chosen.why_not}
