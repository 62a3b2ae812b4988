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
_HASH_BITS: Final = 16
_MIXER: Final = np.uint64(0x9E3779B97F4A7C15)
_Rows = NDArray[np.intp]


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
    fates = near.fate.copy(), far.fate.copy()
    if not any((fate == FRESH).any() for fate in fates):
        return Join(*fates, np.empty(0, np.intp), np.empty(0, np.intp))
    places = positions(near), positions(far)
    all_names = _aligned(near, far, *places)
    rows = _like_fresh((near, far), all_names)
    near_fate, far_fate = (_repeated_spoiled(*each) for each in zip((near, far), places, rows, strict=True))
    flows = np.concatenate([side.flow[chosen] for side, chosen in zip((near, far), rows, strict=True)])
    names = alike(flows, np.concatenate([name[chosen] for name, chosen in zip(all_names, rows, strict=True)]))
    near_name, far_name = names[: len(near_fate)], names[len(near_fate) :]
    count = int(names.max()) + 1

    fresh = near_fate == FRESH
    left_ns = np.full(count, _LATEST)
    np.minimum.at(left_ns, near_name[fresh], near.known_ns[rows[0][fresh]])
    far_fate[(far_fate == FRESH) & (left_ns != _LATEST)[far_name] & (far.known_ns[rows[1]] < left_ns[far_name])] = STALE

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
    pairs = []
    for all_fates, chosen, fate, name in zip(fates, rows, (near_fate, far_fate), (near_name, far_name), strict=True):
        fresh = fate == FRESH
        fate[fresh & unsure[name]] = SPOILED
        joined = np.flatnonzero(fresh & sure[name])
        fate[joined] = JOINED
        all_fates[chosen] = fate
        pairs.append(chosen[joined[np.argsort(name[joined])]])
    return Join(*fates, *pairs)


def _like_fresh(sides: tuple[Side, Side], names: tuple[NDArray[np.int64], NDArray[np.int64]]) -> tuple[_Rows, _Rows]:
    """The rows of each side that are named like a fresh one of either: what is left to judge.

    And a few more, whose names only have the same hash: that costs far less than to sort all that is remembered.
    """
    hashes = [
        (name.view(np.uint64) + (side.flow.view(np.uint64) << np.uint64(32))) * _MIXER >> np.uint64(64 - _HASH_BITS)
        for side, name in zip(sides, names, strict=True)
    ]
    wanted = np.zeros(1 << _HASH_BITS, np.bool_)
    for side, hashed in zip(sides, hashes, strict=True):
        wanted[hashed[side.fate == FRESH]] = True
    near, far = (np.flatnonzero(wanted[hashed]) for hashed in hashes)
    return near, far


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
    start = np.concatenate([[0], 1 + np.flatnonzero(flow[1:] != flow[:-1])])  # of each flow
    place = np.zeros(len(rows), np.int64)
    np.cumsum((key[1:] - key[:-1]).view(np.int32), out=place[1:])
    result[rows] = place + np.repeat(key[start] - place[start], np.diff(start, append=len(rows)))
    return result


def _aligned(
    near: Side, far: Side, near_place: NDArray[np.int64], far_place: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Positions that are the same at both hosts; of streams of which nothing is joined, sequence numbers."""
    near_joined, far_joined = (np.flatnonzero(side.stream & (side.pair > 0)) for side in (near, far))
    _, here, there = np.intersect1d(near.pair[near_joined], far.pair[far_joined], True, return_indices=True)
    here, there = near_joined[here[::-1]], far_joined[there[::-1]]  # the latest first
    flows, latest = np.unique(near.flow[here], return_index=True)
    apart = np.append((far_place[there] - near_place[here])[latest], 0)
    names = []
    for side, place, sign in ((near, near_place, 0), (far, far_place, -1)):
        index = np.searchsorted(flows, side.flow)
        known = side.stream & (np.append(flows, -1)[index] == side.flow)
        names.append(np.where(known, place + sign * apart[index], side.key.view(np.int64)))
    return names[0], names[1]


def on_grid(key: NDArray[np.uint64], rate: NDArray[Any] | int) -> NDArray[np.bool_]:
    """Whether a key is one of those that are sampled at a rate: it ends in that many zero bits."""
    low = (np.uint64(1) << np.asarray(rate, np.uint64)) - np.uint64(1)
    zero: NDArray[np.bool_] = (key & low) == 0
    return zero


def _repeated_spoiled(side: Side, place: NDArray[np.int64], rows: _Rows) -> NDArray[np.uint8]:
    """The fates of some rows, those fresh ones spoiled that this host has seen before or since."""
    fate = side.fate[rows]
    name = alike(side.flow[rows], place[rows])
    fate[(np.bincount(name) > 1)[name] & (fate == FRESH)] = SPOILED
    return fate


def alike(flow: NDArray[np.int64], key: NDArray[np.int64]) -> NDArray[np.intp]:
    """The same small number for the same pair, in the order of the pairs."""
    names = np.empty(len(flow), np.intp)
    if len(flow):
        order = np.lexsort((key, flow))
        flow, key = flow[order], key[order]
        names[order] = np.concatenate([[0], np.cumsum((flow[1:] != flow[:-1]) | (key[1:] != key[:-1]))])
    return names
