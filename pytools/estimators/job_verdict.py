"""Why the steps of a job take as long as they do: one verdict of a window. Pure.

Of several causes the one that explains most counts, and all are listed in that order, with one exception: a rank that
is late because its host or its GPU is slow follows that. "healthy" takes that everything was measured; what was not is
listed, and the verdict is "unknown" then, unless a cause was found.
"""

from __future__ import annotations

from typing import Final

from pytools import units
from pytools.estimators.job_causes import LEAST, causes
from pytools.estimators.job_evidence import Evidence
from pytools.signals import JobCause, JobVerdict

SLOW: Final = 1.25  # times the usual: nothing that explains it is no health
_ENOUGH: Final = 0.5  # of a rank's lateness: what explains so much of it is what makes it late


def verdict(evidence: Evidence) -> JobVerdict:
    found = _ordered(causes(evidence))
    missing = dict(evidence.missing)
    if found:
        return JobVerdict(found[0].kind, found[0].reason, found, evidence.step, missing)
    step = evidence.step
    if step is not None and step.slowdown is not None and step.slowdown >= SLOW:
        reason = f"steps take {step.slowdown:.2f} times as long as usual, and nothing that was measured explains it"
        return JobVerdict("unknown", reason, [], step, missing)
    if step is None and "rhythm" not in missing:
        missing["rhythm"] = "nothing shows the steps"
    if missing:
        reason = "; ".join(f"{sensor} not measured: {why}" for sensor, why in missing.items())
        return JobVerdict("unknown", f"no cause found, but {reason}", [], step, missing)
    return JobVerdict("healthy", f"all was measured, and nothing explains {units.share(LEAST)}", [], step, missing)


def _ordered(found: list[JobCause]) -> list[JobCause]:
    """With a late rank behind what makes it late."""
    late = next((each for each in found if each.kind == "straggler"), None)
    if late is None:
        return found
    roots = [
        each
        for each in found
        if each.kind in ("host", "gpu") and each.rank == late.rank and each.high >= _ENOUGH * late.low
    ]
    if not roots:
        return found
    first = min(found.index(roots[0]), found.index(late))
    rest = [each for each in found if each is not late and each is not roots[0]]
    return [*rest[:first], roots[0], late, *rest[first:]]
