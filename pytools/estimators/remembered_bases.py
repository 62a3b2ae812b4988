"""What is known of the base delays of a path, in the form that outlives an agent.

Nanoseconds; times are CLOCK_MONOTONIC. Bounds keep whatever a file says within what arrays of 64 bits hold and add up.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

_MOST_HOPS = 16  # pairs of hop counts that were seen beside the usual one

Span: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]  # 13 days
Difference: TypeAlias = Annotated[int, msgspec.Meta(ge=-(1 << 62), le=1 << 62)]  # of stamps of two clocks
Time: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
_Ttl: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=255)]
Pair: TypeAlias = tuple[_Ttl, _Ttl]  # TTL of requests and of replies, on arrival


class RouteChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Evidence of another route whose base delays are not settled."""

    floor_ns: Span  # before
    base_ns: tuple[Difference, Difference] | None  # None: before the clocks were compared anew
    directions: tuple[bool, bool]  # which have another hop count
    queued: bool  # whether something waited on the path when the route changed


class RememberedBase(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The base delays of a path: of the round trip, and of each direction where its clocks still compare."""

    floor_ns: Span  # of the round trip
    since_ns: Time
    support: Annotated[int, msgspec.Meta(ge=0, le=1 << 30)]
    reached_ns: Time
    calm_ns: Span | None
    drifted_ns: Span
    standing_ns: tuple[Span, Span]
    slack_ns: tuple[Span, Span]
    base_ns: tuple[Difference, Difference] | None
    hops: Pair | None
    beside: Annotated[tuple[Pair, ...], msgspec.Meta(max_length=_MOST_HOPS)]
    change: RouteChange | None

    def without_clocks(self) -> RememberedBase:
        """What of it holds whatever the clocks have done meanwhile: round trips, and what stood in each direction."""
        change = self.change and msgspec.structs.replace(self.change, base_ns=None)
        return msgspec.structs.replace(self, base_ns=None, change=change)


def few(hops: list[Pair]) -> tuple[Pair, ...]:
    return tuple(hops[:_MOST_HOPS])
