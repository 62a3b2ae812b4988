"""Take single acts back while no controller runs: as it would do it, journal first, only what is ours."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from pytools.errors import SwerveError
from pytools.signals import Act
from steering.acting import messages, taking_back
from steering.acting.journal import Entry, Journal, Kind, entry_now
from steering.acting.taking_back import TakenBack
from steering.actuators.weighted import Outcome, WeightActuator
from steering.plan import Change, Weights


def undo_last(
    log: Journal, actuators: WeightActuator, scope: str, count: int, send: Callable[[Act], None]
) -> list[TakenBack]:
    """Take the last acts in force back, the newest first, and send what was done. The instance's lock must be held.

    Raises
    ------
    OSError
        If the journal cannot be written; the act at hand was not taken back then.
    """
    acts = taking_back.last_acts(log.read().entries, scope)
    return taking_back.take_back(acts, count, lambda act: _take_back(act, log, actuators, scope, send))


def _take_back(
    act: Entry, log: Journal, actuators: WeightActuator, scope: str, send: Callable[[Act], None]
) -> TakenBack:
    group, began_ns = act.group, time.monotonic_ns()
    try:
        now = actuators.weights(group)
        if now is None:
            return TakenBack(act, "it is gone", tried=False)
        change = taking_back.change_back(act, replace(group, current=now), {})
        if isinstance(change, str):
            return TakenBack(act, change, tried=False)
        ours = log.outstanding(scope).get(act.target)
        if ours is None or now not in ours.ours:
            return TakenBack(act, "left alone: its weights are not ours", tried=False)
        _write(log, "intent", act, change, change.after, scope)
        outcome = actuators.apply(group, [now], change.after)
    except SwerveError as error:
        return TakenBack(act, str(error))
    applied = outcome.kind == "applied"
    if applied:
        name, acknowledged_ns = taking_back.undo_name(act.act_id), outcome.acknowledged_ns
        send(messages.act(act.host, group, change, "applied", began_ns, began_ns, acknowledged_ns, name))
    _write(log, "applied" if applied else "failed", act, change, _weights(outcome, change), scope)
    return TakenBack(act, "" if applied else outcome.why)


def _weights(outcome: Outcome, change: Change) -> Weights:
    return outcome.weights if outcome.kind == "applied" else change.before


def _write(log: Journal, kind: Kind, act: Entry, change: Change, after: Weights, scope: str) -> None:
    name = taking_back.undo_name(act.act_id)
    facts = (change.before, after, change.because, change.under, scope, "command", act.host)
    log.write(entry_now(kind, name, act.group, *facts))
