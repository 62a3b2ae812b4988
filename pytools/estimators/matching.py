"""Which sample taken at one host is of the same bytes as which sample taken at the other. Pure.

A sample is named by its flow and its key: a sequence number, or a hash of a datagram. A key that one host has seen
twice says nothing about which of the two the other has seen: such samples are spoiled, and stay so, and with them
everything of the same name that arrives as long as they are remembered. Sequence numbers wrap: the same number a turn
later is another byte. Which turn of one host is which of the other is known once anything of the flow is joined. Near
is the host that sent the packets, and that joins; far the one that received them.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

FRESH, JOINED, SPOILED, STALE = range(4)  # what has become of a sample so far
_LATEST: Final = np.iinfo(np.int64).max
_TURN: Final = 1 << 32


class Side(NamedTuple):
    """The samples that one host remembers, in the order in which they were taken."""

    flow: NDArray[np.int64]  # the same number for the same flow at both hosts
    key: NDArray[np.uint64]
    stream: NDArray[np.bool_]  # the key is a 32-bit sequence number
    known_ns: NDArray[np.int64]  # when the host that joins had it: the near ones when taken, the far ones when told
    fate: NDArray[np.uint8]
    pair: NDArray[np.int64]  # the same number at both hosts for two samples that are joined, later ones higher; else 0


class Join(NamedTuple):
    """What two sides come to."""

    near_fate: NDArray[np.uint8]
    far_fate: NDArray[np.uint8]
    near: NDArray[np.intp]  # rows joined now
    far: NDArray[np.intp]  # and their partners


def join(near: Side, far: Side) -> Join:
    """Join the fresh samples that are named alike, once at each host; spoil those that cannot be told apart.

    What was known of its arrival before it left was another turn's: stale.
    """
    places = positions(near), positions(far)
    near_fate, far_fate = (_repeated_spoiled(side, place) for side, place in zip((near, far), places, strict=True))
    names = _alike(np.concatenate([near.flow, far.flow]), np.concatenate(_aligned(near, far, *places)))
    near_name, far_name = names[: len(near.flow)], names[len(near.flow) :]
    count = int(names.max()) + 1 if len(names) else 0

    fresh = near_fate == FRESH
    left_ns = np.full(count, _LATEST)
    np.minimum.at(left_ns, near_name[fresh], near.known_ns[fresh])
    met = np.bincount(near_name[fresh], minlength=count) > 0
    far_fate[(far_fate == FRESH) & met[far_name] & (far.known_ns < left_ns[far_name])] = STALE

    def how_often(fate: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        return (
            np.bincount(near_name[near_fate == fate], minlength=count),
            np.bincount(far_name[far_fate == fate], minlength=count),
        )

    (near_fresh, far_fresh), (near_spoiled, far_spoiled) = how_often(FRESH), how_often(SPOILED)
    spoiled = (near_spoiled > 0) | (far_spoiled > 0)
    met = (near_fresh > 0) & (far_fresh > 0)
    sure = (near_fresh == 1) & (far_fresh == 1) & ~spoiled
    unsure = spoiled | (met & ~sure)
    rows = []
    for fate, name in ((near_fate, near_name), (far_fate, far_name)):
        fresh = fate == FRESH
        fate[fresh & unsure[name]] = SPOILED
        joined = np.flatnonzero(fresh & sure[name])
        fate[joined] = JOINED
        rows.append(joined[np.argsort(name[joined])])
    return Join(near_fate, far_fate, rows[0], rows[1])


def positions(side: Side) -> NDArray[np.int64]:
    """Where in its flow each sample lies: equal ones of one flow are of the same bytes.

    Sequence numbers are continued over their wraps, which takes less than half a turn from each sample of a flow to
    the next; hashes stay what they are.
    """
    result = side.key.view(np.int64).copy()
    rows = np.flatnonzero(side.stream)
    if not len(rows):
        return result
    rows = rows[np.argsort(side.flow[rows], kind="stable")]
    flow, key = side.flow[rows], side.key[rows].astype(np.uint32)
    first = np.concatenate([[True], flow[1:] != flow[:-1]])
    step = np.concatenate([[0], np.diff(key).view(np.int32).astype(np.int64)])
    start = np.flatnonzero(first)[np.cumsum(first) - 1]  # of each sample's flow
    travelled = np.cumsum(step)
    result[rows] = key[start].astype(np.int64) + travelled - travelled[start]
    return result


def _aligned(
    near: Side, far: Side, near_place: NDArray[np.int64], far_place: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Positions that are the same at both hosts; of streams of which nothing is joined, sequence numbers."""
    near_joined, far_joined = (np.flatnonzero(side.stream & (side.pair > 0)) for side in (near, far))
    _, here, there = np.intersect1d(near.pair[near_joined], far.pair[far_joined], True, return_indices=True)
    here, there = near_joined[here[::-1]], far_joined[there[::-1]]  # the latest first
    flows, latest = np.unique(near.flow[here], return_index=True)
    apart = (far_place[there] - near_place[here])[latest]
    names = []
    for side, place, sign in ((near, near_place, 0), (far, far_place, -1)):
        index = np.searchsorted(flows, side.flow)
        known = np.isin(side.flow, flows) & side.stream
        name = side.key.view(np.int64).copy()
        name[known] = place[known] + sign * apart[index[known]]
        names.append(name)
    return names[0], names[1]


def on_grid(key: NDArray[np.uint64], rate: NDArray[Any] | int) -> NDArray[np.bool_]:
    """Whether a key is one of those that are sampled at a rate: it ends in that many zero bits."""
    low = (np.uint64(1) << np.asarray(rate, np.uint64)) - np.uint64(1)
    zero: NDArray[np.bool_] = (key & low) == 0
    return zero


def _repeated_spoiled(side: Side, place: NDArray[np.int64]) -> NDArray[np.uint8]:
    """The fates, those fresh ones spoiled that this host has seen before or since."""
    name = _alike(side.flow, place)
    repeated = np.bincount(name)[name] > 1 if len(name) else np.zeros(0, np.bool_)
    return np.where(repeated & (side.fate == FRESH), SPOILED, side.fate).astype(np.uint8)


def _alike(flow: NDArray[np.int64], key: NDArray[np.int64]) -> NDArray[np.intp]:
    """The same small number for the same pair."""
    names = np.empty(len(flow), np.intp)
    if len(flow):
        order = np.lexsort((key, flow))
        flow, key = flow[order], key[order]
        names[order] = np.concatenate([[0], np.cumsum((flow[1:] != flow[:-1]) | (key[1:] != key[:-1]))])
    return names
