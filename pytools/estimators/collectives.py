"""NCCL operations and their kernels: joined, summed up for each communicator, and set beside each other by rank. Pure.

Records are those of `sources/jobs/nccl/ring.py`. Host times are CLOCK_MONOTONIC nanoseconds, those of a GPU its
globaltimer's, which is related to the host's here only as far as cause and effect allow: a kernel begins after the
call that enqueued it, and is seen to have ended after it has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

OPERATION: Final = np.dtype(
    [
        *(
            ("user", "u4"),
            ("process", "u4"),  # the caller's name for it, as the user
            ("hash", "u8"),
            ("rank", "i4"),
            ("ranks", "i4"),
            ("function", "S16"),
            ("number", "u8"),
            ("bytes", "u8"),
        ),
        # nothing is missing between the operations of a sample; whether something may be before or after them
        *(("sample", "u1"), ("sampled", "?")),
        *(("start_ns", "u8"), ("called_ns", "u8")),  # enqueued; the application's call, 0: not known
        *(("gpu_start_ns", "u8"), ("gpu_stop_ns", "u8")),  # first and last channel; 0: not known
        *(("seen_ns", "u8"), ("duration_ns", "f8"), ("kernels", "i4")),
    ]
)
NOTHING: Final = np.empty(0, OPERATION)
MEETING: Final = (b"AllReduce", b"AllGather", b"ReduceScatter", b"AlltoAll")  # nobody ends before all have begun
SETTLED_NS: Final = 1_000_000_000  # so long after a kernel no other of its operation is expected
FORGOTTEN_NS: Final = 60_000_000_000  # an operation without kernels: they were not recorded
_COLLECTIVE, _P2P, _KERNEL = 1, 2, 3


def join(records: NDArray[Any], communicators: NDArray[Any], now_ns: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Give operations their kernels.

    Parameters
    ----------
    records : ndarray
        Of one process, in the order of the ring.
    communicators : ndarray
        Those of the process.
    now_ns : int
        By it an operation is taken for whole that has fewer kernels than channels.

    Returns
    -------
    operations : ndarray of OPERATION
        Those that are whole; user and process are the caller's to fill in.
    rest : ndarray
        Records to be joined with later ones.
    """
    operation = np.isin(records["kind"], (_COLLECTIVE, _P2P))
    order = np.flatnonzero(operation)[np.argsort(records["id"][operation], kind="stable")]
    ids = records["id"][order]
    kernel = np.flatnonzero(records["kind"] == _KERNEL)
    place = np.searchsorted(ids, records["parent"][kernel])
    known = place < len(ids)
    known[known] = ids[place[known]] == records["parent"][kernel[known]]
    kernel, orphan, place = kernel[known], kernel[~known], place[known]

    many = np.bincount(place, minlength=len(ids))
    seen = np.zeros(len(ids), np.uint64)
    np.maximum.at(seen, place, records["stop_ns"][kernel])
    last = np.where(many > 0, seen, records["stop_ns"][order])
    age = np.int64(now_ns) - last.astype(np.int64)
    channels = records["channel"][order]  # 0: NCCL does not say
    whole = (many > 0) & (((channels > 0) & (many >= channels)) | (age > SETTLED_NS))
    gone = (many == 0) & (age > FORGOTTEN_NS)

    made = np.zeros(len(ids), OPERATION)
    for name in ("function", "number", "bytes", "start_ns", "called_ns"):
        made[name] = records[name][order]
    made["sample"], made["sampled"] = records["sample"][order] >> 1, records["sample"][order] & 1
    made["kernels"], made["seen_ns"] = many, seen
    _durations(made, records[kernel], place)
    _place(made, records["communicator"][order], communicators)

    lasting = np.zeros(len(records), bool)
    lasting[order] = ~whole & ~gone
    lasting[kernel] = ~whole[place]
    young = np.int64(now_ns) - records["stop_ns"][orphan].astype(np.int64) < SETTLED_NS
    lasting[orphan[young]] = True  # its operation may be read later: other threads write it
    return made[whole & (made["rank"] >= 0)], records[lasting]


def _durations(made: NDArray[Any], kernels: NDArray[Any], place: NDArray[np.intp]) -> None:
    """From the first channel's start to the last one's end: the GPU's own times, or, without them, the host's."""
    first = np.full(len(made), np.iinfo(np.uint64).max, np.uint64)
    host = first.copy()
    np.minimum.at(first, place, kernels["gpu_start_ns"])
    np.minimum.at(host, place, kernels["start_ns"])
    np.maximum.at(made["gpu_stop_ns"], place, kernels["gpu_stop_ns"])
    timed = np.ones(len(made), bool)  # on every channel
    timed[place[(kernels["gpu_start_ns"] == 0) | (kernels["gpu_stop_ns"] == 0)]] = False
    timed &= made["kernels"] > 0
    made["gpu_start_ns"] = np.where(timed, first, 0)
    made["gpu_stop_ns"][~timed] = 0
    start, stop = np.where(timed, first, host), np.where(timed, made["gpu_stop_ns"], made["seen_ns"])
    made["duration_ns"] = np.where(made["kernels"] > 0, (stop - start).astype(np.int64), np.nan)


def _place(made: NDArray[Any], serials: NDArray[np.uint64], communicators: NDArray[Any]) -> None:
    """Whose an operation is; rank -1 where its communicator has given its row to another."""
    rows = communicators[np.argsort(communicators["serial"])]
    at = np.searchsorted(rows["serial"], serials)
    known = at < len(rows)
    known[known] = rows["serial"][at[known]] == serials[known]
    made["rank"] = -1
    for name in ("hash", "rank", "ranks"):
        made[name][known] = rows[name][at[known]]


@dataclass(frozen=True)
class Summary:
    """One rank of one communicator in a window."""

    user: int  # whose communicator, which, and which rank of how many (-1: NCCL does not say)
    hash: int
    rank: int
    ranks: int
    operations: int  # how many were recorded, and count times size of all
    bytes: int
    sampled: bool  # more may not have been recorded: the plugin's limit (nccl/limit.h)
    duration_p50_ns: float  # of their kernels
    duration_p99_ns: float
    # from the application's call to the kernel's start, median; NaN where NCCL does not report calls
    enqueue_to_start_ns: float
    bound_ns: float  # how far that may be off: what is not known of the GPU's clock


def summarise(operations: NDArray[Any]) -> list[Summary]:
    """Sum a window up, one entry for each rank of each communicator."""
    keys, index = np.unique(operations[["user", "hash", "rank"]], return_inverse=True)
    found = []
    for at, key in enumerate(keys):
        own = operations[index == at]
        p50, p99 = np.quantile(own["duration_ns"], (0.5, 0.99))
        wait, bound = _enqueue_to_start(own)
        found.append(
            Summary(
                user=int(key["user"]),
                hash=int(key["hash"]),
                rank=int(key["rank"]),
                ranks=int(own["ranks"][0]),
                operations=len(own),
                bytes=int(own["bytes"].sum()),
                sampled=bool(own["sampled"].any()),
                duration_p50_ns=float(p50),
                duration_p99_ns=float(p99),
                enqueue_to_start_ns=wait,
                bound_ns=bound,
            )
        )
    return found


def _enqueue_to_start(own: NDArray[Any]) -> tuple[float, float]:
    """Median and bound. The host's clock minus the GPU's lies between what calls and what ends allow."""
    timed = own[(own["called_ns"] > 0) & (own["gpu_start_ns"] > 0)]
    if not len(timed):
        return float("nan"), float("nan")
    called, begun, ended, seen = (
        timed[name].astype(np.int64) for name in ("called_ns", "gpu_start_ns", "gpu_stop_ns", "seen_ns")
    )
    low, high = int((called - begun).max()), int((seen - ended).min())
    offset = (low + high) // 2
    return float(np.median(begun + offset - called)), abs(high - low) / 2


def interval_ns(collectives: NDArray[Any]) -> float:
    """The mean time from one collective to the next, also where only a sample was recorded: by their numbers.

    Parameters
    ----------
    collectives : ndarray of OPERATION
        Of one rank of one communicator.
    """
    per_ns = 0.0
    for function in np.unique(collectives["function"]):
        own = collectives[collectives["function"] == function]
        span_ns = int(own["start_ns"].max()) - int(own["start_ns"].min())
        passed = max(int(own["number"].max()) - int(own["number"].min()), len(own) - 1)
        per_ns += passed / max(span_ns, 1)
    return 1 / per_ns if per_ns else 0.0


def by_rank(operations: NDArray[Any]) -> dict[tuple[int, int], tuple[NDArray[np.int32], NDArray[np.float64]]]:
    """Durations of the collectives in which all ranks meet, beside each other.

    Returns
    -------
    dict
        By user and communicator, so that no user's records count for another's job: its ranks that are known here, and
        an array of nanoseconds with a row for each collective that all of these have recorded, in their order, and a
        column for each rank.
    """
    meeting = operations[np.isin(operations["function"], MEETING)]
    found = {}
    for key in np.unique(meeting[["user", "hash"]]):
        own = meeting[meeting[["user", "hash"]] == key]
        own = own[np.argsort(own["start_ns"], kind="stable")]
        ranks, column = np.unique(own["rank"], return_inverse=True)
        _, first, row = np.unique(own[["function", "number"]], return_index=True, return_inverse=True)
        table = np.full((len(first), len(ranks)), np.nan)
        table[row, column] = own["duration_ns"]
        twice = np.bincount(row * len(ranks) + column, minlength=table.size).reshape(table.shape) > 1
        table[twice] = np.nan  # numbers that NCCL gives more than once cannot be told apart
        table = table[np.argsort(first)]
        found[int(key["user"]), int(key["hash"])] = (ranks, table[~np.isnan(table).any(axis=1)])
    return found
