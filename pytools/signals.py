"""The public vocabulary: one typed, immutable record per kind of fact.

Units are suffixes of names (`_ns`, `_bytes`, `_segments`). `at_ns` is CLOCK_MONOTONIC of the publishing host, `unix_ns`
its CLOCK_REALTIME at the same instant, for people and logs only. Encoded, a signal is one JSON object with `type` and
`schema`. Records are safe to share between threads.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

SCHEMA_VERSION = 3

ClockState = Literal["synchronised", "holdover", "free_running"]

# Upper ends of the classes of a histogram of delays: 1, 2, 5 … from 1 µs to 1 s; one more class above.
DELAY_BOUNDS_NS: Final = (*(step * 10**power for power in range(3, 9) for step in (1, 2, 5)), 10**9)


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


def nexthop_name(gateway: str, interface: str) -> str:
    """What a person calls a nexthop; the gateway is empty when it is on-link."""
    return f"{gateway} dev {interface}" if gateway else f"dev {interface}"


class Histogram(msgspec.Struct, frozen=True):
    """Delays by size. Each was counted once, so what windows counted adds up.

    Class i has what is no larger than `DELAY_BOUNDS_NS[i]` and larger than the bound before it.
    """

    counts: list[int]  # by class; those behind the last one that has any are left out
    sum_ns: int

    def by_class(self) -> list[int]:
        """Counts of all classes; what a publisher has in more than these is in the last."""
        classes = len(DELAY_BOUNDS_NS) + 1
        counts = self.counts[:classes] + [0] * (classes - len(self.counts))
        counts[-1] += sum(self.counts[classes:])
        return counts


class Delay(msgspec.Struct, frozen=True, gc=False):
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
    # Of long windows: queueing of each probe that was settled since the last one, below zero as zero.
    queueing_histogram: Histogram | None = None
    jitter_ns: int | None = None  # RFC 3550, 6.4.1, of one-way delays; needs no common clock
    jitter_bound_ns: int | None = None


class Signal(msgspec.Struct, frozen=True, kw_only=True, gc=False):  # refers to nothing that refers to it
    """What every fact carries."""

    host: str
    at_ns: int
    unix_ns: int
    schema: Annotated[int, msgspec.Meta(le=SCHEMA_VERSION)] = SCHEMA_VERSION  # a later one may mean something else


class PathDelay(Signal, frozen=True, kw_only=True, tag="path_delay"):
    """Delays and loss of one path over the window that ends at `at_ns`."""

    path: Path
    window_ns: int
    base_window_ns: int  # how far back the base delay behind `queueing_*` reaches
    forward: Delay
    reverse: Delay
    round_trip_min_ns: int | None
    clock: ClockState
    sent: int
    received: int
    lost: int  # timed out in this window
    duplicates: int
    reordered: int
    # Unanswered although a later probe to the same peer over another path is answered, and no later one of its own:
    # the peer lives, this path waits or loses. Half of the probes of this window have waited at least overtaken_p50_ns,
    # there and back together; None when fewer than half were overtaken, or they may be lost. And at least
    # overtaken_forward_p50_ns on the way there; None when the directions cannot be told apart.
    overtaken: int = 0
    overtaken_p50_ns: int | None = None
    overtaken_forward_p50_ns: int | None = None
    # Smallest forward minus smallest reverse delay: what the two directions differ by when nothing waits.
    asymmetry_ns: int | None = None
    asymmetry_bound_ns: int | None = None

    @property
    def loss(self) -> float:
        """Share of the probes whose fate was settled in this window that were lost."""
        settled = self.received + self.lost
        return self.lost / settled if settled else 0.0


class PathLiveness(Signal, frozen=True, kw_only=True, tag="path_liveness"):
    """Whether a path answers, probe by probe: known long before a probe counts as lost."""

    path: Path
    missed: int  # probes in a row sent since the last answer arrived, each at least a grace ago
    answered_run: int  # probes in a row answered, at most 1,000,000; 0 while any is missed
    silent_ns: int  # since the first of the missed probes left; 0 when none is
    last_answer_ns: int | None  # when the last answer arrived, CLOCK_MONOTONIC of this host
    last_request_ns: int | None  # when the last probe of the peer's came in by the same interface: the way back works
    interval_ns: int  # between the probes of a path
    answered_sent_ns: int | None = None  # when the latest probe that was answered had left
    limit: int | None = None  # probes in a row that must be unanswered before the path counts as dead
    recent_loss: float | None = None  # share of the recent probes that are unanswered, 0 to 1
    longest_rtt_ns: int | None = None  # the longest recent round trip
    peer_agent_age_ns: int | None = None  # how long the peer's agent had not shown that it works, by the latest answer
    missed_extra: int = 0  # what extra probes that were missed add to `missed`


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
    extra: list[int] = []  # sequence numbers of those that left between two intervals


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


class Owner(msgspec.Struct, frozen=True):
    """Who holds a socket or a queue pair; what is not known is empty."""

    pid: int = 0
    command: str = ""
    cgroup: str = ""  # path below the root of the hierarchy
    container: str = ""  # the identifier that the cgroup's name holds


class Retransmissions(msgspec.Struct, frozen=True):
    """Segments sent again, by what made the kernel send them."""

    fast: int = 0  # in recovery: acknowledgements showed the loss
    timeout: int = 0  # after a retransmission timeout, until what was outstanding then is acknowledged
    tail_probe: int = 0  # TLP that repeats a segment
    syn: int = 0  # of the handshake, either side
    unknown: int = 0  # the state of the connection was not seen

    @property
    def segments(self) -> int:
        """All of them."""
        return self.fast + self.timeout + self.tail_probe + self.syn + self.unknown


class CongestionTimes(msgspec.Struct, frozen=True):
    """How long a connection was in each congestion state of the kernel."""

    open_ns: int = 0
    disorder_ns: int = 0
    cwr_ns: int = 0
    recovery_ns: int = 0
    loss_ns: int = 0


class TcpFlow(Signal, frozen=True, kw_only=True, tag="tcp_flow"):
    """One TCP connection as this host has it. Counts are of the whole connection, unless it is older than the agent."""

    local: str
    local_port: int
    remote: str
    remote_port: int
    interface: str  # by which its packets leave
    path: Path | None  # None when the remote address is on no measured path
    owner: Owner
    state: str  # of the connection, the kernel's word in lower case
    first_ns: int
    last_ns: int  # last look at it
    sent_bytes: int  # handed to the network, retransmissions not included
    acknowledged_bytes: int
    received_bytes: int
    segments_out: int
    segments_in: int
    retransmitted: Retransmissions
    retransmitted_segments: int
    retransmitted_bytes: int
    spurious_segments: int  # repeated needlessly, as the peer's DSACKs say
    timeouts: int
    srtt_ns: int | None
    min_rtt_ns: int | None
    cwnd_segments: int | None
    ssthresh_segments: int | None  # None while the connection has not met congestion
    delivery_rate_bps: int | None  # bits per second
    zero_windows: int  # acknowledgements that closed the window: the peer does not read
    ecn: Literal["off", "negotiated"]
    delivered_segments: int
    delivered_ce_segments: int  # of these, acknowledged as marked by a queue on the way
    congestion: Literal["open", "disorder", "cwr", "recovery", "loss", "unknown"]
    congestion_times: CongestionTimes
    resets_sent: int
    resets_received: int
    drops: dict[str, int] = {}  # packets of it dropped in this kernel, by reason


class TcpPath(Signal, frozen=True, kw_only=True, tag="tcp_path"):
    """All TCP connections on one path (or one interface, when `path` is None) in the last window."""

    interface: str
    path: Path | None
    window_ns: int
    retransmitted: Retransmissions  # within the window
    retransmitted_segments: int
    retransmitted_bytes: int
    timeouts: int
    spurious_segments: int
    sent_bytes: int
    segments_out: int
    delivered_segments: int
    delivered_ce_segments: int
    zero_windows: int
    resets_sent: int
    resets_received: int
    total_segments: int  # retransmitted since the agent started

    @property
    def retransmitted_share(self) -> float:
        """Segments sent again, of all sent."""
        return self.retransmitted_segments / self.segments_out if self.segments_out else 0.0


class TcpHost(Signal, frozen=True, kw_only=True, tag="tcp_host"):
    """All TCP connections of the host: what was counted here, and the kernel's own counters beside it."""

    window_ns: int
    flows: int  # remembered now
    capacity: int  # how many can be
    created: int  # connections seen since the agent started
    evicted: int  # of these, the least recently used that made room; their counts stay in all totals
    retransmitted: Retransmissions  # since the agent started
    retransmitted_segments: int
    retransmitted_bytes: int
    timeouts: int
    spurious_segments: int
    sent_bytes: int
    resets_sent: int  # by a connection of this host
    resets_refused: int  # sent for packets that no connection expected
    resets_received: int
    zero_windows: int
    kernel: dict[str, int]  # the kernel's counters of this network namespace since the agent started, by its names


class DropReason(msgspec.Struct, frozen=True):
    """Packets dropped for one reason."""

    reason: str  # the running kernel's name for it
    window_packets: int
    total_packets: int  # since the agent started


class PacketDrops(Signal, frozen=True, kw_only=True, tag="packet_drops"):
    """Packets that this machine's kernel dropped, in all network namespaces, by reason."""

    window_ns: int
    reasons: list[DropReason]


class Qdisc(msgspec.Struct, frozen=True):
    """One queue discipline of an interface."""

    kind: str
    handle: str
    parent: str
    backlog_bytes: int
    backlog_packets: int
    drops: int
    overlimits: int
    requeues: int


class Pause(msgspec.Struct, frozen=True):
    """Pause frames of one priority (None: of the whole link) since the driver was loaded."""

    priority: int | None
    received: int | None = None
    sent: int | None = None
    received_duration_us: int | None = None  # how long the peer kept us from sending
    sent_duration_us: int | None = None


class LinkCounters(msgspec.Struct, frozen=True):
    """The kernel's counters of an interface."""

    received_bytes: int
    received_packets: int
    received_errors: int
    received_drops: int
    sent_bytes: int
    sent_packets: int
    sent_errors: int
    sent_drops: int


class Link(Signal, frozen=True, kw_only=True, tag="link"):
    """One interface that carries paths."""

    interface: str
    paths: list[Path]
    window_ns: int
    up: bool
    carrier: bool
    carrier_changes: int  # since the interface was made, as the kernel counts them
    mtu_bytes: int
    speed_mbps: int | None
    counters: LinkCounters  # since the interface was made
    window: LinkCounters  # within the window
    qdiscs: list[Qdisc]
    pauses: list[Pause]
    failed_neighbours: list[str]
    driver: dict[str, int]  # ethtool statistics that tell of trouble, by the driver's names


class LinkEvent(Signal, frozen=True, kw_only=True, tag="link_event"):
    """Something happened to an interface."""

    interface: str
    paths: list[Path]  # those it concerns
    what: Literal[
        "carrier_lost",
        "carrier_found",
        "flap",
        "queue_full",
        "neighbour_failed",
        "neighbour_reachable",
        "mtu_changed",
        "mtu_mismatch",
        "mtu_agrees",
        "ce_marked",
        "pause_storm",
        "gid_changed",
        "port_down",
        "port_up",
        "removed",
    ]
    happened_ns: int
    detail: str  # a sentence for people
    values: dict[str, int]


class PathMtu(Signal, frozen=True, kw_only=True, tag="path_mtu"):
    """How large a packet a path carries, there and back."""

    path: Path
    interface_mtu_bytes: int
    works_bytes: int | None  # the largest IP packet that came back
    fails_bytes: int | None  # the smallest that did not while smaller ones did
    told_bytes: int | None  # what a router or this kernel says the path takes
    told_by: str  # its address
    state: Literal["agrees", "mismatch", "unknown"]


class PathEcn(Signal, frozen=True, kw_only=True, tag="path_ecn"):
    """Marks on the packets that a peer sent us, as they arrived by one interface: the way back of `path`."""

    path: Path
    window_ns: int
    packets: int  # able to be marked (ECT or CE), within the window
    ce_packets: int
    total_packets: int  # since the agent started
    total_ce_packets: int


class RdmaPort(Signal, frozen=True, kw_only=True, tag="rdma_port"):
    """One port of an RDMA device: hardware counters and addresses."""

    device: str
    port: int
    interface: str  # the network interface beneath, empty for none
    state: str  # the kernel's word in lower case
    rate: str  # the kernel's words
    gids: dict[str, str]  # index -> address and type
    window_ns: int
    counters: dict[str, int]  # all of counters/ and hw_counters/, by the kernel's names
    window: dict[str, int]  # those that changed within the window
    cnp_received: int | None  # congestion notifications; None: the device does not count them
    cnp_sent: int | None
    ecn_marked: int | None
    out_of_sequence: int | None
    timeouts: int | None
    receiver_not_ready: int | None


RdmaVerdict = Literal["ok", "congested", "no_demand", "slow_receiver", "dead", "unknown"]


class Bandwidth(msgspec.Struct, frozen=True):
    """Bandwidth over sliding windows of so many messages: bytes from the first post to the last completion."""

    messages: int
    windows: int
    last_bps: int | None  # bits per second
    mean_bps: int | None
    min_bps: int | None
    max_bps: int | None
    last_us: int | None  # CLOCK_MONOTONIC microseconds of the end of the last window


class RdmaQueuePair(Signal, frozen=True, kw_only=True, tag="rdma_qp"):
    """One queue pair. Counts are since it was first seen, figures of the last window."""

    seen_by: Literal["uprobe", "tap"]
    owner: Owner
    device: str
    qp_number: int
    qp_type: str
    remote: str  # address of the peer, empty when not known
    remote_qp_number: int | None
    path: Path | None
    window_ns: int
    posted: int  # work requests on the send queue
    completed: int
    outstanding: int
    posted_bytes: int
    completed_bytes: int
    outstanding_bytes: int
    receives_posted: int
    receives_completed: int
    received_bytes: int
    shared_receive_queue: bool
    opcodes: dict[str, int]  # posted, by the verbs' names in lower case
    errors: dict[str, int]  # completions that failed, by status
    refused_posts: int
    bandwidths: list[Bandwidth]
    latency: Quantiles  # post to completion of the sampled requests
    sampled_share: float  # of the requests of this window
    verdict: RdmaVerdict
    reason: str
    since_ns: int  # since when the verdict stands
    untracked: int  # requests that could not be followed: counted, but neither timed nor in outstanding
    closed: bool
    uid: int | None = None  # user of the process; None: not known


class Suspect(msgspec.Struct, frozen=True):
    """A host or a link that several queue pairs agree to be slow."""

    kind: Literal["host", "link"]
    name: str
    slowness: float  # share of its queue pairs' usual bandwidth that is missing, 0 to 1
    agreeing: int  # queue pairs with a verdict against it
    queue_pairs: int
    reason: str


class RdmaSuspects(Signal, frozen=True, kw_only=True, tag="rdma_suspects"):
    """Hosts and links by slowness, worst first."""

    suspects: list[Suspect]


class RdmaSight(Signal, frozen=True, kw_only=True, tag="rdma_sight"):
    """How RDMA is seen on this host, and why where it is not."""

    available: bool
    reason: str  # when not
    providers: list[str]  # libraries with probes attached
    seen: dict[str, str]  # process (pid command) -> tap, uprobe or why not
    hits_per_s: float  # of the probes
    tap_processes: int


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
    state: str  # healthy, suspect, drained, returning, unmeasured
    since_ns: int
    weight_wanted: int | None
    weight_actual: int | None
    reason: str
    under: str  # the policy rule, empty when none applies


class Act(Signal, frozen=True, kw_only=True, tag="act"):
    """One change made, wanted (dry run), or undone: what, from, to, because, under."""

    act_id: str
    what: str  # e.g. "routes to 10.9.0.2/32"
    before: dict[str, int]  # nexthop -> weight
    after: dict[str, int]
    because: str
    under: str
    outcome: Literal["dry_run", "applied", "failed", "undone", "alert", "alert_over"]
    seen_ns: int  # at_ns of the signal that led to it
    decided_ns: int
    acknowledged_ns: int | None  # when the kernel had acknowledged it
    target: str = ""  # e.g. "overlay:main:10.9.0.2/32"
    actuator: str = ""  # overlay, pin, label, reroute, alert, operator
    moves: str = ""  # what it moves, in words


AnySignal = (
    PathDelay
    | PathLiveness
    | ProbeSamples
    | ClockEdge
    | Clock
    | Collocation
    | AppDelay
    | TcpFlow
    | TcpPath
    | TcpHost
    | PacketDrops
    | Link
    | LinkEvent
    | PathMtu
    | PathEcn
    | RdmaPort
    | RdmaQueuePair
    | RdmaSuspects
    | RdmaSight
    | NexthopGroup
    | Self
    | PathState
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
