"""What the controller says of itself, as signals. Pure but for the clocks (CLOCK_REALTIME for people only)."""

from __future__ import annotations

import time
from typing import Literal

from pytools.signals import Act, PathState
from steering.engine import Standing
from steering.plan import Change, Group, Weights
from steering.settle import Settled

Outcome = Literal["dry_run", "applied", "failed", "undone"]


def act_id(group_id: int) -> str:
    """A new name for an act: unique on this host, and in the order of time."""
    return f"{time.time_ns():x}-{group_id}"


def act(
    host: str,
    group: Group,
    change: Change,
    outcome: Outcome,
    seen_ns: int,
    decided_ns: int,
    acknowledged_ns: int | None = None,
    name: str = "",
    failure: str = "",
) -> Act:
    """An act that was made, would have been, or failed."""
    return Act(
        host=host,
        at_ns=time.monotonic_ns(),
        unix_ns=time.time_ns(),
        act_id=name or act_id(change.group_id),
        what=f"nexthop group {change.group_id}",
        before=group.named(change.before),
        after=group.named(change.after),
        because=f"{change.because}; failed: {failure}" if failure else change.because,
        under=change.under,
        outcome=outcome,
        seen_ns=seen_ns,
        decided_ns=decided_ns,
        acknowledged_ns=acknowledged_ns,
    )


def undone(host: str, settled: Settled, why: str, decided_ns: int) -> Act:
    """An act that was taken back."""
    last = settled.outstanding.last

    def named(weights: Weights) -> dict[str, int]:
        found = dict(weights)
        original = [nexthop for nexthop, _ in last.original]
        return {last.names.get(str(n), str(n)): found.get(n, 0) for n in original}

    return Act(
        host=host,
        at_ns=time.monotonic_ns(),
        unix_ns=time.time_ns(),
        act_id=last.act_id,
        what=f"nexthop group {settled.group_id}",
        before=named(last.after),
        after=named(settled.outcome.weights),
        because=why,
        under=last.under,
        outcome="undone",
        seen_ns=decided_ns,
        decided_ns=decided_ns,
        acknowledged_ns=settled.outcome.acknowledged_ns,
    )


def path_state(host: str, standing: Standing) -> PathState:
    """What is thought of a path now."""
    return PathState(
        host=host,
        at_ns=time.monotonic_ns(),
        unix_ns=time.time_ns(),
        path=standing.path,
        state=standing.state,
        since_ns=standing.since_ns,
        weight_wanted=standing.weight_wanted,
        weight_actual=standing.weight_actual,
        reason=standing.reason,
        under=standing.under,
    )
