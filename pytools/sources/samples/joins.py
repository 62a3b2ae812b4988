"""The samples of both ends of what this host sends, remembered for as long as a partner may come, and joined.

`near` samples were taken here at egress, `far` ones at the peers' ingress. `seen_ns` is CLOCK_MONOTONIC of this host
(for far samples: when they came in), `at_ns` the stamping clock of the host that took the sample. One thread.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pytools.estimators.matching import FRESH, SPOILED, STALE, Side, join, on_grid
from pytools.sources.samples.batches import TCP

PATIENCE_NS: Final = 2_000_000_000  # how long a sample waits for its partner, and its repetitions are noticed
GUARD_NS: Final = 1_000_000_000  # a retransmission is expected to follow within that
_REMEMBERED_NS: Final = 2 * (PATIENCE_NS + GUARD_NS)
_DOUBTFUL: Final = 99  # a fate like SPOILED, but not told: it would be nobody's fault but ours
OFF: Final = 63  # the rate at which nothing is sampled
_MOST_FAR: Final = 1 << 16

SAMPLE: Final = np.dtype(
    [
        ("flow", "i8"),
        ("key", "u8"),
        ("at_ns", "i8"),
        ("seen_ns", "i8"),
        ("pair", "i8"),
        ("ifindex", "u4"),
        ("peer", "u2"),
        ("protocol", "u1"),
        ("fate", "u1"),
    ]
)
SETTLED: Final = np.dtype(
    [
        ("flow", "i8"),
        ("key", "u8"),
        ("at_ns", "i8"),
        ("far_at_ns", "i8"),  # 0 unless joined
        ("seen_ns", "i8"),
        ("ifindex", "u4"),
        ("peer", "u2"),
        ("fate", "u1"),  # JOINED, SPOILED for ambiguous, FRESH for unmatched
    ]
)


def concatenated(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Records of one type, one array or more; numpy copies field by field, ten times as slowly."""
    kind = parts[0].dtype
    whole: NDArray[Any] = np.concatenate([part.view(f"V{kind.itemsize}") for part in parts]).view(kind)
    return whole


class Rates:
    """Which rates were in force lately."""

    def __init__(self) -> None:
        self._past: deque[tuple[int, int, int]] = deque([(0, OFF, OFF)])

    def note(self, now_ns: int, tcp: int, udp: int) -> None:
        if self._past[-1][1:] != (tcp, udp):
            self._past.append((now_ns, tcp, udp))
        while len(self._past) > 1 and self._past[1][0] <= now_ns - _REMEMBERED_NS:
            self._past.popleft()

    def coarsest(self, since_ns: int) -> tuple[int, int]:
        """The coarsest, of TCP and UDP, at any time since then."""
        tcp, udp = self._past[-1][1:]
        for (_, *rates), (end_ns, *_) in zip(self._past, itertools.islice(self._past, 1, None), strict=False):
            if end_ns > since_ns:
                tcp, udp = max(tcp, rates[0]), max(udp, rates[1])
        return tcp, udp


class Flows:
    """Numbers for flows, the same at both ends."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._rows: dict[int, np.void] = {}
        self._next = 0

    def number(self, flows: NDArray[Any]) -> NDArray[np.int64]:
        """The number of each of some flows, new ones for those that are new."""
        numbers = np.empty(len(flows), np.int64)
        for place, row in enumerate(flows):
            name = row.tobytes()
            number = self._numbers.get(name)
            if number is None:
                number = self._numbers[name] = self._next
                self._rows[number] = row
                self._next += 1
            numbers[place] = number
        return numbers

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, number: int) -> np.void:
        return self._rows[number]

    def keep(self, numbers: set[int]) -> None:
        self._rows = {number: row for number, row in self._rows.items() if number in numbers}
        self._numbers = {name: number for name, number in self._numbers.items() if number in numbers}


class Joins:
    """What is remembered of both ends.

    Parameters
    ----------
    peers : int
        How many; samples name them by number.
    """

    def __init__(self, peers: int) -> None:
        # samples that were left out, by cause
        self.drops = dict.fromkeys(("peer_silent", "peer_coarser", "rate_changed", "strays", "overflow"), 0)
        self.flows = Flows()  # the flows of the samples
        self._near = self._far = np.empty(0, SAMPLE)
        self._pairs = 0
        self._heard_ns = np.zeros(peers, np.int64)
        self._peer_rates = [Rates() for _ in range(peers)]

    @property
    def waiting(self) -> int:
        """How many samples of this end wait for the other end's, or for time to pass."""
        return len(self._near)

    def add_near(self, samples: NDArray[Any]) -> None:
        """Remember samples of SAMPLE, taken here, in their order."""
        self._near = concatenated([self._near, samples])

    def add_far(self, samples: NDArray[Any]) -> None:
        """Remember samples of SAMPLE, of a peer's batch, in their order."""
        room = max(_MOST_FAR - len(self._far), 0)
        self.drops["overflow"] += max(len(samples) - room, 0)
        self._far = concatenated([self._far, samples[:room]])

    def heard(self, peer: int, now_ns: int, tcp_rate: int, udp_rate: int) -> None:
        """A batch of the peer came in: it samples, at these rates."""
        self._heard_ns[peer] = now_ns
        self._peer_rates[peer].note(now_ns, tcp_rate, udp_rate)

    def doubt(self) -> None:
        """Samples were lost here: what waits may have been seen twice, for all we know."""
        self._near["fate"][self._near["fate"] == FRESH] = SPOILED

    def clear(self) -> None:
        self._near = self._far = np.empty(0, SAMPLE)
        self.flows.keep(set())

    def numbers(self) -> set[int]:
        """The flows of which samples are remembered."""
        return set(self._near["flow"].tolist()) | set(self._far["flow"].tolist())

    def settle(self, now_ns: int, own: Rates) -> NDArray[Any]:
        """Join what can be joined, and give up what has waited for too long.

        Parameters
        ----------
        own : Rates
            At which we sample. While a rate is new, only samples that both the old and the new one take are used:
            of the others a retransmission may have been missed.

        Returns
        -------
        ndarray of SETTLED
            Samples taken here whose fate is now known, each once.
        """
        near, far = self._near, self._far
        if not len(near) and not len(far):
            return np.empty(0, SETTLED)
        tcp_rate, udp_rate = own.coarsest(now_ns - GUARD_NS)
        fresh = np.flatnonzero(near["fate"] == FRESH)
        rate = np.where(near["protocol"][fresh] == TCP, tcp_rate, udp_rate)
        new = fresh[~on_grid(near["key"][fresh], rate)]
        self.drops["rate_changed"] += len(new)
        near["fate"][new] = _DOUBTFUL
        doubtful = near["fate"] == _DOUBTFUL
        near["fate"][doubtful] = SPOILED
        result = join(_side(near), _side(far))
        near["fate"], far["fate"] = np.where(doubtful, _DOUBTFUL, result.near_fate), result.far_fate
        pairs = self._pairs + 1 + np.arange(len(result.near))
        near["pair"][result.near] = far["pair"][result.far] = pairs
        self._pairs += len(pairs)
        joined = _settled(near[result.near], far["at_ns"][result.far])
        old_near, old_far = near["seen_ns"] < now_ns - PATIENCE_NS, far["seen_ns"] < now_ns - PATIENCE_NS
        alone = (far["fate"] == FRESH) | (far["fate"] == STALE)
        self.drops["strays"] += int(np.count_nonzero(old_far & alone))
        waited = (near["fate"] == FRESH) | (near["fate"] == SPOILED)
        given_up = self._comparable(near[old_near & waited], now_ns)
        self._near, self._far = near.take(np.flatnonzero(~old_near)), far.take(np.flatnonzero(~old_far))
        return concatenated([joined, _settled(given_up, 0)])

    def _comparable(self, samples: NDArray[Any], now_ns: int) -> NDArray[Any]:
        """Of samples that found no partner, those that their peer would have sent one for."""
        if not len(samples):
            return samples
        heard = self._heard_ns[samples["peer"]] > samples["seen_ns"]
        # Batches tell of the time before them, so look back a little further than the samples are old.
        since_ns = now_ns - PATIENCE_NS - GUARD_NS
        rates = np.array([each.coarsest(since_ns) for each in self._peer_rates])[samples["peer"]]
        shared = on_grid(samples["key"], np.where(samples["protocol"] == TCP, rates[:, 0], rates[:, 1]))
        self.drops["peer_silent"] += int(np.count_nonzero(~heard))
        self.drops["peer_coarser"] += int(np.count_nonzero(heard & ~shared))
        comparable: NDArray[Any] = samples[heard & shared]
        return comparable


def _side(samples: NDArray[Any]) -> Side:
    """The columns that joining looks at."""
    flow, key = np.ascontiguousarray(samples["flow"]), np.ascontiguousarray(samples["key"])
    return Side(
        flow, key, samples["protocol"] == TCP, samples["seen_ns"], samples["fate"].copy(), samples["pair"].copy()
    )


def _settled(near: NDArray[Any], far_at_ns: NDArray[Any] | int) -> NDArray[Any]:
    rows = np.empty(len(near), SETTLED)
    for name in ("flow", "key", "at_ns", "seen_ns", "ifindex", "peer", "fate"):
        rows[name] = near[name]
    rows["far_at_ns"] = far_at_ns
    return rows
