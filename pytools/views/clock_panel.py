"""Clocks in the live view: the state of ours, and one line for all.

Pure; times are CLOCK_MONOTONIC nanoseconds of the agent's host.
"""

from __future__ import annotations

from typing import Final, get_args

from rich.text import Text

from pytools.figures import supports_one_way
from pytools.signals import Clock, ClockState
from pytools.views import tables
from pytools.views.clock_tables import references
from pytools.views.model import Model, is_silent

_NAMED: Final = 3  # hosts called by name in one line
_STATES: Final = get_args(ClockState)  # the worst last


def own(model: Model, now_ns: int) -> Text:
    """How far this host's clock can be trusted, against which reference; empty when nothing is known."""
    clock = model.of(Clock).get(model.host)
    if clock is None:
        return Text("")
    state = tables.clock_state(clock.state, is_silent(clock, now_ns))
    line = Text("clock ").append_text(state)
    if clock.of == clock.reference:
        return line.append(", the reference")
    if clock.reference and supports_one_way(clock.state):
        line.append(f" {tables.bound(clock.bound_ns)} to {clock.reference}")
    return line


def summary(model: Model, now_ns: int) -> Text | None:
    """All clocks in one line; None when none is known."""
    worst = worst_first(model, now_ns)
    if not worst:
        return None
    common = references(model)
    line = Text(f"clocks against {' and '.join(common)}: " if common else "clocks: ", style="bold")
    silent = [clock for clock in worst if is_silent(clock, now_ns)]
    others = [clock for clock in worst if clock not in silent and clock.of != clock.reference]
    said: list[Text] = []
    for state in _STATES:
        of_state = [clock for clock in others if clock.state == state]
        if of_state:
            said.append(Text(f"{len(of_state)} ", style="not bold").append_text(tables.clock_state(of_state[0].state)))
            said[-1].append(f" ({_named(of_state)})")
    if silent:
        said.append(Text(f"{len(silent)} without signals ({_named(silent)})", style="not bold dim"))
    if not said:
        said.append(Text("nobody to compare with", style="not bold dim"))
    return line.append_text(Text(", ").join(said))


def _named(clocks: list[Clock]) -> str:
    """The worst of these by name, with their bounds."""
    names = [clock.of + ("" if clock.bound_ns is None else f" {tables.bound(clock.bound_ns)}") for clock in clocks]
    return ", ".join(names[:_NAMED]) + (", …" if len(names) > _NAMED else "")


def worst_first(model: Model, now_ns: int) -> list[Clock]:
    """The clocks of all hosts, those that can be trusted least first, the reference last."""

    def rank(clock: Clock) -> tuple[bool, int, int, str]:
        silent = is_silent(clock, now_ns)
        return (not silent, -_STATES.index(clock.state), -(clock.bound_ns or 0), clock.of)

    return sorted(model.of(Clock).values(), key=rank)
