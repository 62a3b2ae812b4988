"""Signals to JSON and back. Encoded, a signal is one JSON object with `type` and `schema`.

Records and codec are safe to share between threads.
"""

from __future__ import annotations

from typing import Final

import msgspec

from pytools.signals.clocks import Clock, ClockEdge, Collocation
from pytools.signals.delays import AppDelay, PathDelay, PathLiveness, PathWay, ProbeSamples
from pytools.signals.gpu import Gpu, GpuClock
from pytools.signals.host import PacketDrops, Self
from pytools.signals.jobs import Job
from pytools.signals.links import Link, LinkEvent, PathEcn, PathMtu
from pytools.signals.rdma import RdmaPort, RdmaQueuePair, RdmaSight, RdmaSuspects
from pytools.signals.steering import Act, HoldState, NexthopGroup, PathState
from pytools.signals.tcp import TcpFlow, TcpHost, TcpNamespace, TcpPath

AnySignal = (
    PathDelay
    | PathLiveness
    | PathWay
    | ProbeSamples
    | ClockEdge
    | Clock
    | Collocation
    | AppDelay
    | TcpFlow
    | TcpPath
    | TcpHost
    | TcpNamespace
    | PacketDrops
    | Link
    | LinkEvent
    | PathMtu
    | PathEcn
    | RdmaPort
    | RdmaQueuePair
    | RdmaSuspects
    | RdmaSight
    | Job
    | Gpu
    | GpuClock
    | NexthopGroup
    | Self
    | PathState
    | HoldState
    | Act
)

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(AnySignal)

# What a decoder raises for bytes that are no message. Of half a megabyte of brackets it says so with the last one.
UNREADABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def encode(signal: AnySignal) -> bytes:
    """One signal as one JSON object, without a newline."""
    return _encoder.encode(signal)


def decode(line: bytes | str) -> AnySignal:
    """The signal in one JSON object.

    Raises
    ------
    msgspec.MsgspecError, UnicodeDecodeError, RecursionError
        `UNREADABLE`: if the line is not JSON, or not one of the signals of this schema.
    """
    signal: AnySignal = _decoder.decode(line)
    return signal
