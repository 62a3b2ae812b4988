"""Which rank the others wait for, from the durations of their kernels alone. Pure; no clock is compared.

In a collective in which all ranks meet, all kernels end together, and a rank that comes late has the shortest one: the
others wait in theirs. So a rank was late, against the typical other one, by the median duration of the others minus its
own. It is called a straggler where this holds beyond doubt, and matters.

The doubt: collectives in their order are cut into batches, and the median of their means has an interval that holds for
any distribution (order statistics). A step of several collectives, of which one waits, lies within a batch.

What this does not tell: one late rank in a few steps only, half of the ranks late together, and a slow network, which
makes all kernels long.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

BATCHES: Final = 32
DOUBT: Final = 0.01  # that any rank is named by chance
LEAST_NS: Final = 50_000.0
LEAST_SHARE: Final = 0.02  # of the median duration

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Straggler:
    """The rank that is waited for most."""

    rank: int  # which
    late_ns: float  # how late it comes to a collective: median of the batches' means
    low_ns: float  # bounds of that
    high_ns: float
    share: float  # of the collectives: in how many it is late by as much as matters
    collectives: int  # from how many this is
    also: tuple[int, ...] = ()  # other ranks that are late beyond doubt


def straggler(ranks: NDArray[np.int32], durations_ns: Floats) -> Straggler | None:
    """Name the rank that the others wait for.

    Parameters
    ----------
    ranks : ndarray, shape (r,)
        Their numbers.
    durations_ns : ndarray, shape (n, r)
        Of the kernels of each collective, in order; `collectives.by_rank` makes it.

    Returns
    -------
    Straggler or None
        None: nobody, or too few collectives to say.
    """
    many, width = durations_ns.shape
    batches = min(many, BATCHES)
    out = left_out(batches, DOUBT / max(width, 1))
    if width < 2 or out is None:
        return None
    late = lateness(durations_ns)
    parts = np.array_split(np.arange(many), batches)
    means = np.sort([late[part].mean(axis=0) for part in parts], axis=0)
    least = max(LEAST_NS, LEAST_SHARE * float(np.median(durations_ns)))
    low, high, middle = means[out], means[batches - 1 - out], np.median(means, axis=0)
    sure = np.flatnonzero(low > least)
    if not len(sure):
        return None
    worst = sure[np.argmax(middle[sure])]
    return Straggler(
        rank=int(ranks[worst]),
        late_ns=float(middle[worst]),
        low_ns=float(low[worst]),
        high_ns=float(high[worst]),
        share=float((late[:, worst] > least).mean()),
        collectives=many,
        also=tuple(int(ranks[each]) for each in sure if each != worst),
    )


def lateness(durations_ns: Floats) -> Floats:
    """How late each rank came to each collective against the typical other one; negative: early."""
    width = durations_ns.shape[1]
    order = np.argsort(durations_ns, axis=1, kind="stable")
    position = np.empty_like(order)
    np.put_along_axis(position, order, np.arange(width)[None, :].repeat(len(order), axis=0), axis=1)
    ordered = np.take_along_axis(durations_ns, order, axis=1)
    low, high = (width - 2) // 2, (width - 1) // 2  # the middle of the others
    others = [np.take_along_axis(ordered, at + (position <= at), axis=1) for at in (low, high)]
    return np.asarray((others[0] + others[1]) / 2 - durations_ns)


def left_out(many: int, doubt: float) -> int | None:
    """How many of so many ordered values lie outside the median's interval, on each side; None: they are too few."""
    below, out = 0.0, None
    for at in range(many // 2):
        below += math.comb(many, at) / 2**many
        if 2 * below > doubt:
            break
        out = at
    return out
