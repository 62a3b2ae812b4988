"""Another IPv6 flow label for a connection that its present way through the fabric does not serve. Pure.

Switches that hash the label put the connection on another way behind the same nexthop; nobody knows which, so it is a
draw. It is made by the connection's own trouble while others over the nexthop get through, waits until the last one
shows, and ends after a few: a fabric that is bad everywhere, or a full rail, is not helped by shuffling. As Protective
ReRoute does it for outages (Wetherall et al., SIGCOMM 2023) and Protective Load Balancing for congestion (Qureshi et
al., SIGCOMM 2022). Times are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pytools.units import MS
from steering.flows.rates import FlowRate
from steering.plan import FlowKey, LabelChange

TRIES: Final = 4
_THROUGH: Final = 1 / 4  # so many connections of a path get through unless they all suffer from the same
_ROUND_TRIPS: Final = 8
_ANEW_NS: Final = 20_000 * MS  # it did well for so long, or the fabric has had time to heal: as if for the first time
_WAIT_NS: Final = 1_500 * MS  # what was lost before is repaired, and a window of the path's own has passed


@dataclass(frozen=True, slots=True)
class Relabelled:
    """A connection that was given another label."""

    change: LabelChange
    tries: int
    since_ns: int

    def waits(self, flow: FlowRate, now: int) -> bool:
        """Whether it is too early to say what the last label did."""
        return now - self.since_ns < max(_WAIT_NS, _ROUND_TRIPS * flow.srtt_ns)


def suffer_alike(flows: Sequence[FlowRate]) -> bool:
    """Whether connections over one path are in trouble together: then it is not one way behind the nexthop."""
    through = sum(not flow.troubled for flow in flows)
    return len(flows) > 1 and through < _THROUGH * len(flows)


def next_label(flow: FlowKey, last: int, seed: str) -> int:
    """A label that is the same for the same connection, last label (0 for none) and seed; never 0, which means none."""
    digest = hashlib.blake2b(f"{seed}/{flow}/{last}".encode(), digest_size=4).digest()
    return int.from_bytes(digest) % ((1 << 20) - 1) + 1


def relabelled(flow: FlowRate, known: Relabelled | None, seed: str, lease_ns: int, now: int) -> Relabelled | None:
    """The connection with its next label; None while it does well, must wait, or has had its tries."""
    tries = 0 if known is None or now - known.since_ns > _ANEW_NS else known.tries
    if not flow.troubled or tries >= TRIES or (known is not None and known.waits(flow, now)):
        return None
    label = next_label(flow.key, 0 if known is None else known.change.label, seed)
    change = LabelChange(flow.key, label, now + lease_ns)
    return Relabelled(change, tries + 1, now)
