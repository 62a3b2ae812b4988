"""Undo what the journal says is outstanding: for a controller that starts, a guardian, and `steer undo`.

Safe to repeat and to interrupt: undoing twice gives the original weights, and an entry is written only after the fact.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from pytools.errors import SwerveError
from steering.acting.journal import Entry, Journal, Outstanding, entry_now
from steering.actuators.registry import Actuators
from steering.actuators.weighted import Outcome, WeightActuator
from steering.plan import Group, Target, title


@dataclass(frozen=True, slots=True)
class Regained:
    """A target that went with its last link, and is there again."""

    group: Group  # with the weights that were read back
    last: Entry  # what the journal had of it before
    acknowledged_ns: int

    @property
    def why(self) -> str:
        """The reason in words."""
        return "made again over the nexthops that are left: without our acts it would not have gone with its links"


@dataclass(frozen=True, slots=True)
class Settled:
    """What became of one target."""

    target: Target
    outstanding: Outstanding
    outcome: Outcome

    @property
    def text(self) -> str:
        """It in one line."""
        what = {
            "applied": "original weights are back",
            "manual": "left alone",
            "gone": "nothing to undo",
            "failed": "could not be undone",
            "uncertain": "could not be read back",
        }[self.outcome.kind]
        why = f" ({self.outcome.why})" if self.outcome.why else ""
        return f"{title(self.target)}: {what}{why}"


def settle(
    journal: Journal,
    actuators: WeightActuator,
    scope: str,
    by: str,
    only: Callable[[Outstanding], bool] = lambda _: True,
    alive: Callable[[], object] = lambda: None,
) -> list[Settled]:
    """Put the original weights back wherever ours may be in force, and journal each.

    What the kernel refuses stays outstanding, for the next attempt. `alive` is called before each target: many of them
    take longer than a lease.

    Raises
    ------
    OSError
        If an entry could not be written; every target was still undone.
    """
    done = []
    unwritten: OSError | None = None
    for outstanding in list(journal.outstanding(scope).values()):
        if not only(outstanding):
            continue
        alive()
        try:
            outcome = actuators.undo(outstanding.group, outstanding.ours)
        except SwerveError as error:
            outcome = Outcome("failed", (), None, str(error))
        done.append(Settled(outstanding.target, outstanding, outcome))
        if outcome.kind in ("failed", "uncertain"):
            continue
        try:
            journal.write(_entry(done[-1], scope, by))
        except OSError as error:
            unwritten = error
    if unwritten is not None:
        raise unwritten
    return done


def regain(journal: Journal, actuators: Actuators, scope: str, by: str) -> tuple[list[Regained], list[str]]:
    """Make again what is gone only because of our acts, and journal each; what was done and could not be, in words too.

    To be called once everything is settled, by whoever leaves nobody behind who steers, before the backup routes go.

    Raises
    ------
    SwerveError, OSError
        If the kernel or the journal could not be read, or the journal not be written.
    """
    contents = journal.read()
    groups, told = actuators.regain(journal.path.parent, scope, contents.last_in_force(scope))
    now = time.monotonic_ns()
    last = {entry.target: entry for entry in contents.entries if entry.scope == scope}
    done = [Regained(group, last[group.target], now) for group in groups]
    for each in done:
        entry = each.last
        journal.write(
            entry_now(
                *("undone", entry.act_id, each.group, (), each.group.current, each.why, entry.under, scope, by),
                host=entry.host,
            )
        )
    return done, told


def _entry(settled: Settled, scope: str, by: str) -> Entry:
    last, outcome = settled.outstanding.last, settled.outcome
    return entry_now(
        "undone" if outcome.kind == "applied" else "released",
        last.act_id,
        settled.outstanding.group,
        last.after,
        outcome.weights,
        settled.text,
        last.under,
        scope,
        by,
        last.host,
    )
