"""How long a path that was left stays so, what it waits for, and the jitter that keeps a herd apart.

Pure; CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

import hashlib

from pytools.signals import Path
from pytools.units import duration_text
from steering.deciding.health import PathHealth
from steering.policy.actions import WEIGHT_KINDS
from steering.policy.model import Policy, Rule


def dwell(rule: Rule, strikes: int) -> int:
    """How long a path must look good before it returns: doubled by each strike after the first."""
    doublings = min(max(0, strikes - 1), 32)
    return min(rule.return_.dwell << doublings, rule.return_.max_dwell)


def dwell_of(policy: Policy, path: PathHealth) -> int:
    """How long a drained path must look good before it returns: the longest dwell, and its own part of a herd's."""
    longest = max(dwell(policy.rules[number], path.strikes) for number in _held_by(path))
    return int(longest * (1 + path.lag))


def retry_after(policy: Policy, path: PathHealth) -> int:
    """How long after the last try the next one may begin."""
    return max(policy.rules[number].return_.retry_after for number in _held_by(path))


def _held_by(path: PathHealth) -> frozenset[int]:
    """The rules by which a drained path must be good: the one that took it down, and those it was bad under since."""
    assert path.rule is not None
    return path.also | {path.rule}


def lacks(policy: Policy, path: PathHealth) -> str:
    """What evidence a drained path lacks for its return, in words; empty when it has enough.

    It needs as much as it takes to leave, by every rule that moves weight.
    """
    for number, (rule, reading) in enumerate(zip(policy.rules, path.readings, strict=True)):
        name = "" if number == path.rule else f" by {rule.name}"
        if number in _held_by(path):
            if not reading.over:
                return f"not clear now{name}"
            if reading.run < rule.return_.rise and not reading.idle:
                return f"{reading.run} of {rule.return_.rise} measurements in a row{name}"
        if rule.then.kind in WEIGHT_KINDS and reading.over and not reading.proven:
            return f"fewer good measurements than bad ones take{name}"
    return ""


def drawn(policy: Policy, path: Path, seed: int) -> int:
    """A time within `safety.herd.jitter`, drawn by host and path, and anew for each occasion."""
    return int(policy.safety.herd.jitter * fraction(path, seed))


def fraction(path: Path, seed: int) -> float:
    """A number from 0 to 1, drawn by host and path, and anew for each occasion."""
    digest = hashlib.blake2b(f"{path}/{seed}".encode(), digest_size=4).digest()
    return int.from_bytes(digest) / 2**32


def reason(policy: Policy, path: PathHealth, now: int) -> str:
    """Why a path is in its state; of a drained one also how far it is, like `good for 12 s of 30 s; before: ...`."""
    if path.state != "drained" or path.seen_ns <= path.since_ns:  # nothing was measured since it was left
        return path.because
    if path.clear_since is None:
        return f"{path.because}; not good yet"
    return f"{_progress(policy, path, path.clear_since, now)}; before: {path.because}"


def _progress(policy: Policy, path: PathHealth, clear_since: int, now: int) -> str:
    """For how long it has looked good, of how long it must, and what else keeps it from returning then."""
    good_ns, dwell_ns = path.seen_ns - clear_since, dwell_of(policy, path)
    said = f"good for {duration_text(good_ns)} of {duration_text(dwell_ns)}"
    if good_ns < dwell_ns:
        return said
    if lacking := lacks(policy, path):
        return f"{said}, {lacking}"
    left_ns = 0 if path.tried_ns is None else path.tried_ns + retry_after(policy, path) - now
    return f"{said}, not tried again for {duration_text(left_ns)}" if left_ns > 0 else said
