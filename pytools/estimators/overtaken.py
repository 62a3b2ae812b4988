"""What unanswered probes tell before they are answered: whether they wait, for how long, and on which way. Pure.

Packets of one session keep their order. So a probe waits only if no later one of its session is answered; one that was
passed is lost. Whether the last ones wait or are lost too is told by what else is lost, and by answers that came late.

A probe is overtaken where a later one to the same peer by another path is answered: it has waited for that much
longer, there and back together. It waits on the way there if the later one has come to the peer before it: the answer
says which probe was the newest that had come in by another interface. Nanoseconds of CLOCK_MONOTONIC.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pytools.estimators.windows import MISSING, Rows, Times

LATE_NS: Final = 1_000_000  # an answer that waited for so long shows a queue
_BY_CHANCE: Final = 1e-5
_SUDDEN: Final = 0.5  # share that may be lost from one moment to the next, where no answer was late
_MOST: Final = 0.9
_SIGMAS: Final = 1.5


class Overtaken(NamedTuple):
    """Probes that a later one by another path has overtaken and no later one of their own session has passed."""

    paths: Rows  # of each probe: its path, when it was sent, and how much later one was that is answered
    sent_ns: Times
    leads_ns: Times
    there_ns: Times  # how much later one was that came to the peer first; MISSING where the peer does not say
    # by path: whether one has come to the peer `LATE_NS` after a later one by another path: it was not lost
    late: NDArray[np.bool_]
    runs: NDArray[np.int64]  # by path: how many probes are unanswered since the latest answer
    # by path: how large the share of lost probes may be, by those that were passed, of this path lately, and of the
    # other paths to the same peer since this one has not answered
    losses: NDArray[np.float64]


_NO_TIMES: Final = np.zeros(0, np.int64)
NONE: Final = Overtaken(
    _NO_TIMES, _NO_TIMES, _NO_TIMES, _NO_TIMES, late=np.zeros(0, np.bool_), runs=_NO_TIMES, losses=np.zeros(0)
)


def may_be_lost(lost: int, answered: int) -> float:
    """How large the share of lost probes may be, where so many are known to be lost."""
    sent = lost + answered
    if not lost:
        return 0.0
    share = lost / sent
    return min(share + _SIGMAS * math.sqrt(share * (1.0 - share) / sent), _MOST)


def waiting(runs: NDArray[np.int64], loss: NDArray[np.float64], late: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """On which paths so many probes in a row are not lost by chance, but once in 10^5 times.

    Parameters
    ----------
    loss : ndarray of float
        How large the share of lost probes may be by what is known, above 0.
    late : ndarray of bool
        Whether an answer has lately come late. Where none has, it is likelier that loss has just begun.
    """
    share = np.where(late, loss, np.maximum(loss, _SUDDEN))
    found: NDArray[np.bool_] = runs * np.log(share) <= math.log(_BY_CHANCE)
    return found


def half_waited(paths: Rows, leads_ns: Times, answered: NDArray[np.int64], rows: Rows) -> tuple[Times, Times]:
    """How many probes of each path were overtaken, and what at least half of its probes have waited.

    The answered ones are all taken to have waited less, so the figure errs on the low side.

    Parameters
    ----------
    paths : ndarray of int, shape (n,)
        Path of each overtaken probe.
    leads_ns : ndarray of int64, shape (n,)
        It has waited at least so long.
    answered : ndarray of int64, shape (rows,)
        How many probes of each row were answered in the window.
    rows : ndarray of int, shape (rows,)
        The paths asked for.

    Returns
    -------
    overtaken, waited_ns : ndarray of int64, shape (rows,)
        `waited_ns` is MISSING where fewer than half were overtaken.
    """
    counts, waited = np.zeros(len(rows), np.int64), np.full(len(rows), MISSING)
    behind = set(paths.tolist())
    for place, path in enumerate(rows.tolist() if behind else ()):
        if path not in behind:
            continue
        leads = np.sort(leads_ns[paths == path])
        counts[place] = len(leads)
        rank = (len(leads) + answered[place] + 1) // 2 - answered[place]
        if rank > 0:
            waited[place] = leads[rank - 1]
    return counts, waited
