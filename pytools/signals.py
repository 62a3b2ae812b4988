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
    bound_ns: int | None = None  # of the one-way delays: stated allowances
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


AnySignal = PathDelay | ProbeSamples | TcpFlow | TcpPath | NexthopGroup | Self | PathState | Act

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
