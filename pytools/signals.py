"""The public vocabulary: one typed, immutable record per kind of fact.

Units are suffixes of names (`_ns`, `_bytes`, `_segments`). `at_ns` is CLOCK_MONOTONIC of the publishing host, `unix_ns`
its CLOCK_REALTIME at the same instant, for people and logs only. Encoded, a signal is one JSON object with `type` and
`schema`. Records are safe to share between threads.
"""

from __future__ import annotations

from typing import Literal

import msgspec

SCHEMA_VERSION = 1

ClockState = Literal["synchronised", "holdover", "free_running"]


class Path(msgspec.Struct, frozen=True, order=True):
    """Source host to destination host through one nexthop: what is measured, and what is steered."""

    source: str
    destination: str
    address: str  # the destination's address that is probed
    gateway: str  # the nexthop's address; empty when on-link
    interface: str

    def __str__(self) -> str:
        return f"{self.source}>{self.destination} dev {self.interface}" + (
            f" via {self.gateway}" if self.gateway else ""
        )


class Delay(msgspec.Struct, frozen=True):
    """One direction of a path over one window.

    One-way delays are None unless the two clocks are synchronised; queueing delay (the excess over the recent
    minimum) needs no common origin and is given with its own bound, which covers the drift of a free clock.
    """

    samples: int
    owd_min_ns: int | None = None
    owd_p50_ns: int | None = None
    owd_p99_ns: int | None = None
    bound_ns: int | None = None  # of the one-way delays: statistics and stated allowances
    hard_bound_ns: int | None = None  # of the one-way delays: half the smallest round trip, no assumption
    queueing_p50_ns: int | None = None
    queueing_p99_ns: int | None = None
    queueing_last_ns: int | None = None
    queueing_bound_ns: int | None = None


class Signal(msgspec.Struct, frozen=True, kw_only=True):
    """What every fact carries."""

    host: str
    at_ns: int
    unix_ns: int
    schema: int = SCHEMA_VERSION


class PathDelay(Signal, frozen=True, kw_only=True, tag="path_delay"):
    """Delays and loss of one path over the window that ends at `at_ns`."""

    path: Path
    window_ns: int
    base_window_ns: int  # how far back the minimum behind `queueing_*` reaches
    forward: Delay
    reverse: Delay
    round_trip_min_ns: int | None
    clock: ClockState
    sent: int
    received: int
    lost: int  # timed out in this window
    duplicates: int
    reordered: int
    # Unanswered although a later probe to the same peer over another path is answered: the peer lives, this path waits
    # or loses. Half of the probes of this window have waited at least overtaken_p50_ns, there and back together; None
    # when fewer than half were overtaken.
    overtaken: int = 0
    overtaken_p50_ns: int | None = None
    # Smallest forward minus smallest reverse delay: what the two directions differ by when nothing waits.
    asymmetry_ns: int | None = None
    asymmetry_bound_ns: int | None = None

    @property
    def loss(self) -> float:
        """Share of the probes whose fate was settled in this window that were lost."""
        settled = self.received + self.lost
        return self.lost / settled if settled else 0.0


class ProbeSamples(Signal, frozen=True, kw_only=True, tag="probe_samples"):
    """Raw results of one path, one entry per probe, for those who want to do their own statistics.

    A lost probe has None for both delays. Published only while somebody subscribes to it.
    """

    path: Path
    clock: ClockState
    seq: list[int]
    sent_ns: list[int]  # the exact egress stamp
    forward_ns: list[int | None]
    reverse_ns: list[int | None]


class ClockEdge(Signal, frozen=True, kw_only=True, tag="clock_edge"):
    """How a peer's clock runs against ours, as the coded probes of one path show it over the last window.

    The peer's clock minus ours was `offset_ns` when ours read `epoch_ns`, and grew by `drift_ppb` nanoseconds per
    second of ours.
    """

    path: Path
    epoch_ns: int  # of this host's stamping clock
    window_ns: int
    offset_ns: int
    drift_ppb: float
    sigma_ns: float  # standard deviation of the offset by statistics alone
    drift_sigma_ppb: float
    bound_ns: int  # of the offset: statistics and the stated allowance for asymmetry
    hard_low_ns: int  # the offset lies between these two as long as no delay is negative: no assumption
    hard_high_ns: int
    round_trip_min_ns: int
    pairs_kept: int  # of both directions, in this window
    pairs_rejected: int
    stepped: bool  # the newest samples contradict the older ones: one of the two clocks was stepped


class Clock(Signal, frozen=True, kw_only=True, tag="clock"):
    """How a host's clock runs against the reference's: the result for all hosts together.

    The host's clock minus the reference's was `offset_ns` when the host's read `epoch_ns`; the figures are None while
    the clock is free running.
    """

    of: str  # whose clock
    reference: str  # the host whose clock is the common one; empty when there is none
    epoch_ns: int  # of that host's stamping clock
    state: ClockState
    offset_ns: int | None
    drift_ppb: float | None
    bound_ns: int | None  # statistics, the stated allowance for asymmetry, and in holdover the drift since
    hard_bound_ns: int | None  # from the smallest round trips, no assumption but that clocks keep within DRIFT_PPM
    slew_ppb: float | None  # by how much that host's own time service speeds its clock up, of which drift_ppb is net
    neighbours: int  # hosts with an edge to it that was used
    pairs_kept: int
    pairs_rejected: int
    outlier_edges: int  # edges of it that contradict the others and were given little weight


class Collocated(msgspec.Struct, frozen=True):
    """Hosts whose clocks are one oscillator."""

    hosts: list[str]
    confidence: float  # that all of them share it


class Collocation(Signal, frozen=True, kw_only=True, tag="collocation"):
    """Which hosts share an oscillator, from the history of their drifts."""

    span_ns: int  # how much history stands behind it
    groups: list[Collocated]
    alone: list[str]  # share with nobody here
    unknown: list[str]  # the data does not say


class Quantiles(msgspec.Struct, frozen=True):
    """A distribution of delays."""

    samples: int
    p50_ns: int | None
    p90_ns: int | None
    p99_ns: int | None
    max_ns: int | None


class AppDelay(Signal, frozen=True, kw_only=True, tag="app_delay"):
    """One-way delays of application packets over one window, of one flow, or of all flows of a path.

    From the egress hook of this host to the ingress hook of the destination, of the very same bytes at both ends.
    """

    path: Path | None  # None when the packets left by no measured path
    protocol: Literal["tcp", "udp"]
    local: str  # addresses are empty and ports zero when all flows of the path are meant
    local_port: int
    remote: str
    remote_port: int
    window_ns: int
    clock: ClockState
    owd: Quantiles  # figures are None unless the clocks are synchronised
    queueing: Quantiles  # excess over the smallest delay of the path's recent application packets
    bound_ns: int | None
    hard_bound_ns: int | None
    sampled: int  # samples taken here in this window whose fate is settled
    joined: int  # found at the other end as well
    ambiguous: int  # retransmitted, or not told apart: left out
    unmatched: int  # never seen at the other end


class TcpFlow(Signal, frozen=True, kw_only=True, tag="tcp_flow"):
    """Retransmissions of one flow over one path, since the flow was first seen retransmitting."""

    local: str
    local_port: int
    remote: str
    remote_port: int
    interface: str
    path: Path | None  # None when the remote address is on no measured path
    retransmitted_segments: int
    last_ns: int


class TcpPath(Signal, frozen=True, kw_only=True, tag="tcp_path"):
    """Retransmissions of all flows on one path (or one interface, when `path` is None) in the last window."""

    interface: str
    path: Path | None
    window_ns: int
    retransmitted_segments: int  # within the window
    total_segments: int  # since the agent started


class GroupMember(msgspec.Struct, frozen=True):
    """One nexthop of a group as the kernel has it."""

    nexthop_id: int
    gateway: str
    interface: str
    weight: int
    packets: int | None  # counted by the kernel for this member; None where the kernel does not count


class NexthopGroup(Signal, frozen=True, kw_only=True, tag="nexthop_group"):
    """A nexthop group that carries routes to peers."""

    group_id: int
    destinations: list[str]  # prefixes that use it
    members: list[GroupMember]


class ProgramCost(msgspec.Struct, frozen=True):
    """Run-time statistics of one BPF program; run_time is None unless somebody switched the statistics on."""

    name: str
    runs: int
    run_time_ns: int | None


class Self(Signal, frozen=True, kw_only=True, tag="self"):
    """What watching costs, and what was lost while watching."""

    cpu_share: float  # of one core, over window_ns
    window_ns: int
    resident_bytes: int
    probe_bytes_per_s: float  # on the wire, both directions, headers included
    programs: list[ProgramCost]
    drops: dict[str, int]  # every drop counter by name, zero or not
    failed: dict[str, str]  # kernel hook -> why it is not attached


class PathState(Signal, frozen=True, kw_only=True, tag="path_state"):
    """What the steering engine thinks of a path, and why."""

    path: Path
    state: str  # healthy, suspect, drained, returning, unmeasured, manual
    since_ns: int
    weight_wanted: int | None
    weight_actual: int | None
    reason: str
    under: str  # the policy rule, empty when none applies


class Act(Signal, frozen=True, kw_only=True, tag="act"):
    """One change made, wanted (dry run), or undone: what, from, to, because, under."""

    act_id: str
    what: str  # e.g. "nexthop group 110"
    before: dict[str, int]  # nexthop -> weight
    after: dict[str, int]
    because: str
    under: str
    outcome: Literal["dry_run", "applied", "failed", "undone"]
    seen_ns: int  # at_ns of the signal that led to it
    decided_ns: int
    acknowledged_ns: int | None  # when the kernel had acknowledged and the read-back agreed


AnySignal = (
    PathDelay
    | ProbeSamples
    | ClockEdge
    | Clock
    | Collocation
    | AppDelay
    | TcpFlow
    | TcpPath
    | NexthopGroup
    | Self
    | PathState
    | Act
)

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(AnySignal)


def encode(signal: AnySignal) -> bytes:
    """One signal as one JSON object, without a newline."""
    return _encoder.encode(signal)


def decode(line: bytes | str) -> AnySignal:
    """The signal in one JSON object.

    Raises
    ------
    msgspec.MsgspecError
        If the line is not JSON, or not one of the signals of this schema.
    """
    signal: AnySignal = _decoder.decode(line)
    return signal
