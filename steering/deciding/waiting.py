"""Why a path is in its state, and what one that was left waits for. Pure; CLOCK_MONOTONIC nanoseconds."""

from __future__ import annotations

from steering.deciding import health
from steering.deciding.health import PathHealth
from steering.policy import Policy, duration_text


def reason(policy: Policy, path: PathHealth, now: int) -> str:
    """Why a path is in its state; of a drained one also how far it is, like `good for 12 s of 30 s; before: ...`.

    Parameters
    ----------
    policy : Policy
        The policy that judges it.
    path : PathHealth
        The path.
    now : int
        CLOCK_MONOTONIC nanoseconds.
    """
    if path.state != "drained" or path.seen_ns <= path.since_ns:  # nothing was measured since it was left
        return path.because
    if path.clear_since is None:
        return f"{path.because}; not good yet"
    return f"{_progress(policy, path, path.clear_since, now)}; before: {path.because}"


def _progress(policy: Policy, path: PathHealth, clear_since: int, now: int) -> str:
    """For how long it has looked good, of how long it must, and what else keeps it from returning then."""
    good_ns, dwell_ns = path.seen_ns - clear_since, health.dwell_of(policy, path)
    said = f"good for {duration_text(good_ns)} of {duration_text(dwell_ns)}"
    if good_ns < dwell_ns:
        return said
    if lacking := health.lacks(policy, path):
        return f"{said}, {lacking}"
    left_ns = 0 if path.tried_ns is None else path.tried_ns + health.retry_after(policy, path) - now
    return f"{said}, not tried again for {duration_text(left_ns)}" if left_ns > 0 else said
