"""The public vocabulary: one typed, immutable record per kind of fact.

Units are suffixes of names (`_ns`, `_bytes`, `_segments`). `at_ns` is CLOCK_MONOTONIC of the publishing host, `unix_ns`
its CLOCK_REALTIME at the same instant, for people and logs only. Encoded, a signal is one JSON object with `type` and
`schema`. Records are safe to share between threads. Comments of fields become docs/signals.txt.

One module a concern; import the names from here.
"""

from __future__ import annotations

from pytools.signals.base import SCHEMA_VERSION, ClockState, Owner, Path, Quantiles, Signal, header, nexthop_name
from pytools.signals.clocks import Clock, ClockEdge, Collocated, Collocation
from pytools.signals.codec import UNREADABLE, AnySignal, decode, encode
from pytools.signals.delays import (
    DELAY_BOUNDS_NS,
    WAY_LASTS_NS,
    AppDelay,
    Delay,
    Histogram,
    PathDelay,
    PathLiveness,
    PathWay,
    ProbeSamples,
    Underlay,
)
from pytools.signals.gpu import GPU_REASONS, Gpu, GpuClock, GpuLink, GpuReason, GpuState
from pytools.signals.host import DropReason, PacketDrops, ProgramCost, Self
from pytools.signals.jobs import (
    Job,
    JobCause,
    JobCauseKind,
    JobLag,
    JobPath,
    JobRank,
    JobSensor,
    JobStep,
    JobVerdict,
    JobVerdictWord,
    RasState,
)
from pytools.signals.links import BondPort, Link, LinkCounters, LinkEvent, LinkEventKind, PathEcn, PathMtu, Pause, Qdisc
from pytools.signals.rdma import (
    Bandwidth,
    RdmaBackup,
    RdmaPort,
    RdmaQueuePair,
    RdmaSight,
    RdmaSuspects,
    RdmaVerdict,
    Suspect,
)
from pytools.signals.steering import Act, GroupMember, HoldState, NexthopGroup, PathState, SteeringState
from pytools.signals.tcp import CongestionTimes, Retransmissions, Stall, TcpFlow, TcpHost, TcpNamespace, TcpPath
