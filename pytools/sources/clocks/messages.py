"""The messages about clocks between agents: their edges, and the reference's result for every host's clock.

Version 1. Offsets and epochs are int64 nanoseconds of stamping clocks. Everything that arrives is checked here: names,
ranges, finite numbers. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta

from pytools.estimators.offsets import UNBOUNDED_NS
from pytools.signals import UNREADABLE, ClockState

VERSION: Final = 1
EDGES, CLOCKS = "edges", "clocks"  # topics
MOST_NS: Final = 2**60  # of epochs and offsets: so that sums of some fit
MOST_PAIRS: Final = 2**40

_Name = Annotated[str, Meta(min_length=1, max_length=255)]
_Time = Annotated[int, Meta(ge=-MOST_NS, le=MOST_NS)]
_Unix = Annotated[int, Meta(ge=-(2**62), le=2**62)]
_Error = Annotated[int, Meta(ge=0, le=UNBOUNDED_NS)]
_Count = Annotated[int, Meta(ge=0, le=MOST_PAIRS)]
_Rate = Annotated[float, Meta(ge=-1e9, le=1e9)]
_Drift = Annotated[float, Meta(ge=-1e7, le=1e7)]
_Sigma = Annotated[float, Meta(ge=0, le=1e12)]
_Measured = Annotated[float, Meta(ge=1e-4, le=1e9)]  # nothing measured is without error: 0 would outweigh the rest


class Edge(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A peer's clock against the sender's, see the signal ClockEdge."""

    peer: _Name
    epoch_ns: _Time
    offset_ns: _Time
    drift_ppb: _Drift
    sigma_ns: _Measured
    drift_sigma_ppb: _Measured
    bound_ns: _Error
    hard_low_ns: _Time
    hard_high_ns: _Time
    pairs_kept: _Count
    pairs_rejected: _Count
    stepped: bool


class Edges(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """All edges that a host owns, as of its last window."""

    version: int
    slew_ppb: _Rate | None
    edges: Annotated[list[Edge], Meta(max_length=4096)]


class HostClock(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One host's clock against the reference's, see the signal Clock."""

    host: _Name
    epoch_ns: _Time
    offset_ns: _Time
    drift_ppb: _Drift
    sigma_ns: _Sigma
    drift_sigma_ppb: _Sigma
    bound_ns: _Error
    hard_bound_ns: _Error
    state: ClockState
    slew_ppb: _Rate | None
    neighbours: _Count
    pairs_kept: _Count
    pairs_rejected: _Count
    outlier_edges: _Count


class Clocks(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The reference's word on every host's clock at one moment."""

    version: int
    unix_ahead_ns: _Unix  # the reference's CLOCK_REALTIME minus its stamping clock
    hosts: Annotated[list[HostClock], Meta(max_length=100_000)]


_Message = TypeVar("_Message", Edges, Clocks)
_encoder = msgspec.msgpack.Encoder()
_edges = msgspec.msgpack.Decoder(Edges)
_clocks = msgspec.msgpack.Decoder(Clocks)


def encode(message: Edges | Clocks) -> bytes:
    return _encoder.encode(message)


def decode_edges(payload: bytes) -> Edges | None:
    """The edges of a host; None for anything that is not a whole message of this version."""
    message = _decoded(_edges, payload)
    return message if message is not None and _sound(message.version, message.edges) else None


def decode_clocks(payload: bytes) -> Clocks | None:
    """The reference's word; None for anything that is not a whole message of this version."""
    message = _decoded(_clocks, payload)
    return message if message is not None and _sound(message.version, message.hosts) else None


def _decoded(decoder: msgspec.msgpack.Decoder[_Message], payload: bytes) -> _Message | None:
    try:
        return decoder.decode(payload)
    except UNREADABLE:
        return None


def _sound(version: int, rows: Sequence[Edge | HostClock]) -> bool:
    """Whether this is our version and every figure a number: the ranges above let one pass that is none."""
    figures = (figure for row in rows for figure in (row.drift_ppb, row.sigma_ns, row.drift_sigma_ppb))
    return version == VERSION and all(map(math.isfinite, figures))
