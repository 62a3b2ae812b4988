"""Clocks that keep their rate, and what hosts with such clocks tell each other: for the tests of the timescale.

True time and readings are integer nanoseconds; readings are exact, so that an error of one nanosecond shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from msgspec.structs import replace

from pytools.sources.clocks.messages import VERSION, Edge, Edges

SECOND_NS = 10**9
NOISE_NS = 10.0


@dataclass(frozen=True)
class Crystal:
    """A clock that is ahead by `offset_ns` at true time 0 and runs fast by `drift_ppb`."""

    offset_ns: int = 0
    drift_ppb: int = 0

    @property
    def rate(self) -> Fraction:
        return 1 + Fraction(self.drift_ppb, SECOND_NS)

    def at(self, true_ns: int) -> int:
        return round(true_ns * self.rate) + self.offset_ns

    def against(self, other: Crystal) -> float:
        """By how much it runs faster, in ppb of the other's seconds."""
        return float((self.rate / other.rate - 1) * SECOND_NS)

    def moved(self, by_ns: int) -> Crystal:
        return Crystal(self.offset_ns + by_ns, self.drift_ppb)


def edge(ours: Crystal, peer: str, theirs: Crystal, true_ns: int, **changes: Any) -> Edge:
    """What a faultless measurement between two hosts says at a moment."""
    offset = theirs.at(true_ns) - ours.at(true_ns)
    told = Edge(
        peer=peer,
        epoch_ns=ours.at(true_ns),
        offset_ns=offset,
        drift_ppb=theirs.against(ours),
        sigma_ns=NOISE_NS,
        drift_sigma_ppb=10.0,
        bound_ns=245,
        hard_low_ns=offset - 2_000,
        hard_high_ns=offset + 2_000,
        pairs_kept=80,
        pairs_rejected=20,
        stepped=False,
    )
    return replace(told, **changes)


def edges_of(
    host: str, crystals: Mapping[str, Crystal], true_ns: int, but: Iterable[str] = (), **changes: Any
) -> Edges:
    """What a host with an edge to each of the others tells."""
    others = [name for name in crystals if name != host and name not in set(but)]
    return Edges(VERSION, 0.0, [edge(crystals[host], name, crystals[name], true_ns, **changes) for name in others])
