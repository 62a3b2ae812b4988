"""The public vocabulary: one typed, immutable record per kind of fact.

Units are suffixes of names (`_ns`, `_bytes`, `_segments`). `at_ns` is CLOCK_MONOTONIC of the publishing host, `unix_ns`
its CLOCK_REALTIME at the same instant, for people and logs only. Encoded, a signal is one JSON object with `type` and
`schema`. Records are safe to share between threads. Comments of fields become docs/signals.txt.
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

    source: str  # host that sends
    destination: str  # host that receives
    address: str  # the destination's address that is probed
    gateway: str  # of the nexthop; empty if on-link
    interface: str  # by which packets leave the source

    def __str__(self) -> str:
        return f"{self.source}>{self.destination} dev {self.interface}" + (
            f" via {self.gateway}" if self.gateway else ""
        )


def nexthop_name(gateway: str, interface: str) -> str:
    """What a person calls a nexthop; the gateway is empty when it is on-link."""
    return f"{gateway} dev {interface}" if gateway else f"dev {interface}"


class Histogram(msgspec.Struct, frozen=True):
    """Delays by size (`DELAY_BOUNDS_NS`). Each is counted once, so the counts of windows add up."""

    # by class: the i-th is up to the i-th of 1, 2, 5, 10 µs … 1 s, one more is above; trailing empty classes are
    # omitted
    counts: list[int]
    sum_ns: int  # of all that was counted

    def by_class(self) -> list[int]:
        """Counts of all classes; what a publisher has in more than these is in the last."""
        classes = len(DELAY_BOUNDS_NS) + 1
        counts = self.counts[:classes] + [0] * (classes - len(self.counts))
        counts[-1] += sum(self.counts[classes:])
        return counts


class Delay(msgspec.Struct, frozen=True, gc=False):
    """One direction of a path over one window. One-way delays are None while the clocks are free running."""

    samples: int  # probes that measured this direction; if 0, all figures are null
    owd_min_ns: int | None = None  # one-way delay, smallest; negative values within the bound are given as 0
    owd_p50_ns: int | None = None  # median
    owd_p99_ns: int | None = None  # 99th percentile
    bound_ns: int | None = None  # of the one-way delays: the bound of the clock offset, and 100 ns per stamp
    # the same without assuming symmetry: the hard bound of the offset, or half the smallest round trip with one
    # clock
    hard_bound_ns: int | None = None
    # queueing delay: one-way delay minus the base delay, at least 0; needs no common clock
    queueing_p50_ns: int | None = None
    queueing_p99_ns: int | None = None  # 99th percentile
    queueing_last_ns: int | None = None  # of the newest probe
    # of these: stamps, the uncertainty of the base delay, and the drift of the clocks since the minimum (100 ppm
    # while free running)
    queueing_bound_ns: int | None = None
    # long windows only: queueing delays of single probes, each in one window
    queueing_histogram: Histogram | None = None
    # J of RFC 3550, 6.4.1, over the window's answered probes, started at 0 and divided by 1 - (15/16)^n after n
    # differences; null with fewer than two probes; needs no common clock
    jitter_ns: int | None = None
    jitter_bound_ns: int | None = None  # its bound


class Signal(msgspec.Struct, frozen=True, kw_only=True, gc=False):  # refers to nothing that refers to it
    """What every fact carries."""

    host: str
    at_ns: int
    unix_ns: int
    schema: Annotated[int, msgspec.Meta(le=SCHEMA_VERSION)] = SCHEMA_VERSION  # a later one may mean something else


class PathDelay(Signal, frozen=True, kw_only=True, tag="path_delay"):
    """Delays and loss of one path over the window that ends at `at_ns`.

    Over `windows.short` every 200 ms, and once a probe interval while the path is slow or has just fallen silent;
    over `windows.long` once in that time.
    """

    path: Path
    window_ns: int
    # how far back the base delay behind `queueing_*` reaches: to the last route change, at least `windows.base`
    base_window_ns: int
    forward: Delay  # the direction to the peer
    reverse: Delay  # the direction back
    # smallest forward + reverse delay of one probe, without the time in the reflector; needs no common clock
    round_trip_min_ns: int | None
    clock: ClockState
    sent: int  # probes handed to the kernel in the window
    received: int  # probes answered in the window
    lost: int  # probes that timed out in the window; loss is lost / (received + lost)
    duplicates: int  # further answers to an answered probe, not in `received`
    reordered: int  # probes answered after a later one
    # unanswered probes that later probes to the same peer over other paths have passed: this path queues or loses
    overtaken: int = 0
    # half of the window's probes have waited at least this long, both directions together; null if fewer than
    # half were overtaken, or if they may be lost
    overtaken_p50_ns: int | None = None
    # the same towards the peer alone; null also if the directions are indistinguishable
    overtaken_forward_p50_ns: int | None = None
    asymmetry_ns: int | None = None  # smallest forward minus smallest reverse delay; null while free running
    asymmetry_bound_ns: int | None = None  # its bound, twice that of a one-way delay

    @property
    def loss(self) -> float:
        """Share of the probes whose fate was settled in this window that were lost."""
        settled = self.received + self.lost
        return self.lost / settled if settled else 0.0


class PathLiveness(Signal, frozen=True, kw_only=True, tag="path_liveness"):
    """Whether a path answers. Times are CLOCK_MONOTONIC of this host; None: never, or not known.

    Once a second per path; at once when two or more probes in a row are missed, with each further one (from the
    33rd ten times a second), and when an answer ends that.
    """

    path: Path
    missed: int  # missed probes in a row, each sent after the last answer arrived and at least a grace ago
    answered_run: int  # probes, one per interval, answered in time in a row, at most 1,000,000; 0 while any is missed
    silent_ns: int  # since the first of the missed probes was sent, ± 1 ms; 0 if none is missed
    last_answer_ns: int | None  # when the last answer arrived
    # when the last probe of the peer arrived by this interface: the direction from the peer works
    last_request_ns: int | None
    interval_ns: int  # between the probes of a path
    answered_sent_ns: int | None = None  # when the latest answered probe was sent (up to 1 ms too early)
    limit: int | None = None  # missed + missed_extra at which the path counts as dead, from its recent loss
    recent_loss: float | None = None  # share of recent probes that are unanswered
    longest_rtt_ns: int | None = None  # longest recent round trip
    # how long before its latest answer the peer's agent last ran; null: not swerve
    peer_agent_age_ns: int | None = None
    # what missed extra probes add: half their number, at most 5/4 of `missed`, 0 while that is below 3
    missed_extra: int = 0


class ProbeSamples(Signal, frozen=True, kw_only=True, tag="probe_samples"):
    """Raw results of one path, one entry per probe. A lost probe has None for both delays.

    For subscribers only.
    """

    path: Path
    clock: ClockState
    seq: list[int]  # sequence numbers, in the order in which results became known
    sent_ns: list[int]  # egress stamps, this host's clock
    # differences of the stamps of this direction, null if lost; unless `clock` is shared it is delay + offset of
    # the peer, and may be negative
    forward_ns: list[int | None]
    reverse_ns: list[int | None]  # the same back: delay - offset; the sum of both is the round trip
    extra: list[int] = []  # sequence numbers of extra probes; leave them out of percentiles over time


class ClockEdge(Signal, frozen=True, kw_only=True, tag="clock_edge"):
    """A peer's clock against ours, from the coded probes of one path over the last window.

    Per path and `clocks.interval`.
    """

    path: Path
    epoch_ns: int  # the time of our clock for which the offset is given
    window_ns: int
    offset_ns: int  # peer's clock minus ours
    drift_ppb: float  # growth: at t the offset is offset_ns + drift_ppb * (t - epoch_ns) / 1e9
    sigma_ns: float  # standard deviation of the offset by statistics alone
    drift_sigma_ppb: float  # standard deviation of the drift
    bound_ns: int  # of the offset: statistics and the allowance for asymmetry
    hard_low_ns: int  # the offset is between this and hard_high_ns, because no delay is negative
    hard_high_ns: int  # upper end
    round_trip_min_ns: int  # smallest round trip in the window
    pairs_kept: int  # pairs of both directions that were used
    pairs_rejected: int  # the spacing changed by more than `clocks.tolerance`, or a probe was lost
    stepped: bool  # a clock was stepped; the line is of the samples after it


class Clock(Signal, frozen=True, kw_only=True, tag="clock"):
    """A host's clock against the reference's, from all hosts together. Figures are None while it is free running.

    Per host and `clocks.interval`.
    """

    of: str  # the host whose clock it is
    reference: str  # the host whose clock is the common one; empty: none
    epoch_ns: int  # the time of that host's clock for which the offset is given
    state: ClockState  # of that host's clock
    offset_ns: int | None  # that host's clock minus the reference's
    drift_ppb: float | None  # growth of the offset, from any cause
    bound_ns: int | None  # statistics, the allowance for asymmetry, and in holdover the drift since
    hard_bound_ns: int | None  # from the smallest round trips; assumes only that clocks keep within DRIFT_PPM
    slew_ppb: float | None  # of drift_ppb, the present slew by that host's time service; null if unreadable
    neighbours: int  # hosts with an edge to it that was used
    pairs_kept: int  # of all its edges
    pairs_rejected: int  # of all its edges
    outlier_edges: int  # edges that contradict the others (an asymmetric path) and have little weight


class Collocated(msgspec.Struct, frozen=True):
    """Hosts that share one oscillator."""

    hosts: list[str]  # with one oscillator
    confidence: float  # probability that all of them share it


class Collocation(Signal, frozen=True, kw_only=True, tag="collocation"):
    """Which hosts share an oscillator, from the history of their drifts.

    Every five seconds with a subscriber.
    """

    span_ns: int  # length of the history
    groups: list[Collocated]  # hosts that share an oscillator
    alone: list[str]  # hosts that share with no other
    unknown: list[str]  # too little history, or drifts too alike


class Quantiles(msgspec.Struct, frozen=True):
    """A distribution of delays."""

    samples: int  # in the distribution
    p50_ns: int | None  # nearest rank, as all here
    p90_ns: int | None  # 90th percentile
    p99_ns: int | None  # 99th percentile
    max_ns: int | None  # largest


class AppDelay(Signal, frozen=True, kw_only=True, tag="app_delay"):
    """One-way delays of application packets over one window, of one flow, or of all flows of a path.

    Once per long window: per sampled flow, and of all flows of a path together.
    """

    path: Path | None  # None when the packets left by no measured path
    protocol: Literal["tcp", "udp"]  # of the sampled packets
    local: str  # address of this host; addresses are empty and ports 0 for all flows of the path
    local_port: int  # of this host
    remote: str  # address of the peer
    remote_port: int  # of the peer
    window_ns: int
    clock: ClockState
    owd: Quantiles  # one-way delays; null figures unless `synchronised`
    queueing: Quantiles  # excess over the smallest recent delay of the path; null figures if the drift is unknown
    bound_ns: int | None  # of the one-way delays
    hard_bound_ns: int | None  # of the one-way delays
    sampled: int  # samples settled in this window
    joined: int  # of these, found at the other end too
    ambiguous: int  # of these, retransmitted or indistinguishable, and left out
    unmatched: int  # of these, not seen at the other end


class Owner(msgspec.Struct, frozen=True):
    """Who holds a socket or a queue pair. Unknown parts are 0 or empty."""

    pid: int = 0  # process; 0 if unknown
    command: str = ""  # its name
    cgroup: str = ""  # path below the root of the hierarchy
    container: str = ""  # identifier in the group's name


class Retransmissions(msgspec.Struct, frozen=True):
    """Segments retransmitted, by cause."""

    fast: int = 0  # in recovery: acknowledgements showed the loss
    timeout: int = 0  # after a retransmission timeout, until what was outstanding then is acknowledged
    tail_probe: int = 0  # a loss probe (TLP) that repeats a segment
    syn: int = 0  # of the handshake, either side
    unknown: int = 0  # the congestion state was not seen

    @property
    def segments(self) -> int:
        """All of them."""
        return self.fast + self.timeout + self.tail_probe + self.syn + self.unknown


class CongestionTimes(msgspec.Struct, frozen=True):
    """Time in each congestion state of the kernel."""

    open_ns: int = 0  # in state open
    disorder_ns: int = 0  # acknowledgements out of order
    cwr_ns: int = 0  # slowing down after a mark
    recovery_ns: int = 0  # repairing a loss
    loss_ns: int = 0  # after a timeout


class TcpFlow(Signal, frozen=True, kw_only=True, tag="tcp_flow"):
    """One TCP connection. Counts are of the whole connection, unless it is older than the agent.

    For subscribers only: first every open connection, then per long window those updated since, every fourth window
    all, and at the end of the connection once more. The `tcp.busiest` ones also every `tcp.busiest_interval`. Of a
    connection older than the agent, retransmissions, timeouts and congestion times count from the agent's start. A
    connection that changed its interface has one row for each.
    """

    local: str  # address of this host
    local_port: int  # of this host
    remote: str  # address of the peer
    remote_port: int  # of the peer
    interface: str  # by which its packets leave
    path: Path | None  # None when the remote address is on no measured path
    owner: Owner
    state: str  # the kernel's name in lower case; `close` if ended; many `close_wait`: the application does not close
    first_ns: int  # when first seen
    last_ns: int  # when last read
    sent_bytes: int  # without retransmissions
    acknowledged_bytes: int  # of these acknowledged
    received_bytes: int  # in order
    segments_out: int  # sent, with retransmissions
    segments_in: int  # received
    retransmitted: Retransmissions  # segments by cause
    retransmitted_segments: int  # of all causes (`ss -ti`: retrans)
    retransmitted_bytes: int  # of these segments
    spurious_segments: int  # retransmitted needlessly, by the peer's DSACKs
    timeouts: int  # retransmission timeouts; each costs at least 200 ms
    srtt_ns: int | None  # smoothed round trip, with queues and delayed acknowledgements
    # smallest that the kernel remembers (five minutes by default); far below srtt_ns: a queue on the path
    min_rtt_ns: int | None
    cwnd_segments: int | None  # congestion window
    ssthresh_segments: int | None  # slow start threshold; null before any congestion
    delivery_rate_bps: int | None  # the kernel's last measurement; of an application-limited sender what it sent
    zero_windows: int  # segments received that closed the window: the peer does not read
    ecn: Literal["off", "negotiated"]  # whether it was negotiated
    delivered_segments: int  # acknowledged by the peer
    delivered_ce_segments: int  # of these, acknowledged as marked (CE)
    congestion: Literal["open", "disorder", "cwr", "recovery", "loss", "unknown"]  # state of the congestion control
    congestion_times: CongestionTimes  # time in each state
    resets_sent: int  # segments with RST
    resets_received: int  # segments with RST
    drops: dict[str, int] = {}  # packets of it dropped in this kernel, by reason (from Linux 6.11)


class TcpPath(Signal, frozen=True, kw_only=True, tag="tcp_path"):
    """All TCP connections on one path (or one interface, when `path` is None) in the last window.

    Once per long window.
    """

    interface: str  # `others` for interfaces beyond the table
    path: Path | None
    window_ns: int
    retransmitted: Retransmissions  # within the window, as all here
    retransmitted_segments: int  # of segments_out
    retransmitted_bytes: int  # of these segments
    timeouts: int  # retransmission timeouts
    spurious_segments: int  # retransmitted needlessly
    sent_bytes: int  # without retransmissions
    segments_out: int  # with retransmissions
    delivered_segments: int  # acknowledged
    delivered_ce_segments: int  # of these, acknowledged as marked (CE)
    zero_windows: int  # segments received that closed the window
    resets_sent: int  # segments with RST
    resets_received: int  # segments with RST
    total_segments: int  # retransmitted since the agent started

    @property
    def retransmitted_share(self) -> float:
        """Segments retransmitted, of all sent."""
        return self.retransmitted_segments / self.segments_out if self.segments_out else 0.0


class TcpHost(Signal, frozen=True, kw_only=True, tag="tcp_host"):
    """All TCP connections of the host, with the kernel's own counters.

    Those of this network namespace, once per long window with a subscriber.
    """

    window_ns: int
    flows: int  # connections in the table now
    capacity: int  # size of the table (`tcp.flows`)
    created: int  # connections seen since the agent started
    evicted: int  # removed for others while least recently used; their counts stay in all sums
    retransmitted: Retransmissions  # since the agent started, as all below
    retransmitted_segments: int  # of all causes
    retransmitted_bytes: int  # of these segments
    timeouts: int  # retransmission timeouts
    spurious_segments: int  # retransmitted needlessly
    sent_bytes: int  # without retransmissions
    resets_sent: int  # by a connection of this host
    resets_refused: int  # for packets without a connection
    resets_received: int  # for a connection of this host
    zero_windows: int  # segments received that closed the window
    # the kernel's counters that have grown since the agent started, by the names of `nstat`, for comparison
    kernel: dict[str, int]


class DropReason(msgspec.Struct, frozen=True):
    """Packets dropped for one reason."""

    reason: str  # the running kernel's name; `other` for numbers beyond the table
    window_packets: int  # within the window
    total_packets: int  # since the agent started


class PacketDrops(Signal, frozen=True, kw_only=True, tag="packet_drops"):
    """Packets that this machine's kernel dropped, in all network namespaces, by reason.

    Once per long window. `NO_SOCKET` and `NOT_SPECIFIED` are normal. `QDISC_DROP` is a full queue of this host,
    `SOCKET_RCVBUFF` an application that does not read, `NETFILTER_DROP` a firewall. Drops in switches are not among
    them.
    """

    window_ns: int
    reasons: list[DropReason]  # those that have occurred


class Qdisc(msgspec.Struct, frozen=True):
    """One queue discipline of an interface."""

    kind: str  # as tbf or fq
    handle: str  # as in `tc qdisc`
    parent: str  # as in `tc qdisc`
    backlog_bytes: int  # queued now
    backlog_packets: int  # queued now
    drops: int  # since its creation, as the next two (`tc -s qdisc`)
    overlimits: int  # held back because of the rate
    requeues: int  # returned by the driver


class Pause(msgspec.Struct, frozen=True):
    """Pause frames of one priority (None: of the whole link) since the driver was loaded."""

    priority: int | None  # 0 to 7; null: the whole link
    received: int | None = None  # frames
    sent: int | None = None  # frames
    received_duration_us: int | None = None  # how long the peer paused us
    sent_duration_us: int | None = None  # how long we paused the peer


class LinkCounters(msgspec.Struct, frozen=True):
    """The kernel's counters of an interface."""

    received_bytes: int  # as in `ip -s link`
    received_packets: int  # as in `ip -s link`
    received_errors: int  # as in `ip -s link`
    received_drops: int  # as in `ip -s link`
    sent_bytes: int  # as in `ip -s link`
    sent_packets: int  # as in `ip -s link`
    sent_errors: int  # as in `ip -s link`
    sent_drops: int  # without drops of its queue


class Link(Signal, frozen=True, kw_only=True, tag="link"):
    """One interface that carries paths.

    Once per long window with a subscriber, and at once after an event.
    """

    interface: str  # name
    paths: list[Path]  # that it carries
    window_ns: int
    up: bool  # administratively up
    carrier: bool  # has a carrier
    carrier_changes: int  # since the interface was created; if it grows, a cable, an optic or a port is failing
    mtu_bytes: int  # largest IP packet
    speed_mbps: int | None  # by the driver; null if it reports none
    counters: LinkCounters  # since the interface was created
    window: LinkCounters  # within the window
    qdiscs: list[Qdisc]  # its queue disciplines
    pauses: list[Pause]  # pause frames
    failed_neighbours: list[str]  # gateways and on-link peers that do not answer ARP or neighbour discovery
    driver: dict[str, int]  # `ethtool` statistics of errors that are not zero, by the driver's names


class LinkEvent(Signal, frozen=True, kw_only=True, tag="link_event"):
    """An event of an interface, or of a path over it.

    Once.
    """

    interface: str  # affected
    paths: list[Path]  # affected
    # the event
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
    happened_ns: int  # CLOCK_MONOTONIC
    detail: str  # a sentence for people
    values: dict[str, int]  # its numbers by name


class PathMtu(Signal, frozen=True, kw_only=True, tag="path_mtu"):
    """The largest packet that passes a path, there and back.

    Once per long window and path.
    """

    path: Path
    interface_mtu_bytes: int  # of its interface
    works_bytes: int | None  # largest IP packet that came back; null before one has
    fails_bytes: int | None  # smallest that did not, while smaller ones did; null if none failed
    told_bytes: int | None  # path MTU reported by a router or this kernel
    told_by: str  # its address
    state: Literal["agrees", "mismatch", "unknown"]  # whether full-size packets pass


class PathEcn(Signal, frozen=True, kw_only=True, tag="path_ecn"):
    """Marks on packets from the peer of `path`, as they arrived by one interface.

    Once per long window and path.
    """

    path: Path
    window_ns: int
    packets: int  # ECN-capable (ECT or CE) within the window
    ce_packets: int  # of these, marked: the share that met a queue above its threshold
    total_packets: int  # since the agent started
    total_ce_packets: int  # since the agent started


class RdmaPort(Signal, frozen=True, kw_only=True, tag="rdma_port"):
    """One port of an RDMA device: hardware counters and addresses.

    Once per long window with a subscriber.
    """

    device: str  # as in `rdma link`
    port: int  # as in `rdma link`
    interface: str  # network interface; empty for none
    state: str  # the kernel's word in lower case
    rate: str  # the kernel's words
    gids: dict[str, str]  # index to address and type
    window_ns: int
    counters: dict[str, int]  # everything in counters/ and hw_counters/ by the kernel's names
    window: dict[str, int]  # changes within the window
    # RoCE congestion notifications: our senders slow down; null here and below: not counted by the device
    cnp_received: int | None
    cnp_sent: int | None  # marked packets arrived
    ecn_marked: int | None  # marked packets received
    out_of_sequence: int | None  # packets out of sequence: loss or reordering
    timeouts: int | None  # acknowledgement timeouts
    receiver_not_ready: int | None  # RNR NAKs received or sent


RdmaVerdict = Literal["ok", "congested", "no_demand", "slow_receiver", "dead", "unknown"]


class Bandwidth(msgspec.Struct, frozen=True):
    """Bandwidth over sliding windows of so many messages: bytes from the first post to the last completion."""

    # length of the sliding window: 1, 8 or 32; 0: completed bytes by the time in which something was outstanding
    messages: int
    windows: int  # number of windows
    last_bps: int | None  # of the last one
    mean_bps: int | None  # of all of them
    min_bps: int | None  # smallest
    max_bps: int | None  # largest
    last_us: int | None  # CLOCK_MONOTONIC of the end of the last one


class RdmaQueuePair(Signal, frozen=True, kw_only=True, tag="rdma_qp"):
    """One RDMA queue pair. Counts are since it was first seen, figures of the last window.

    With a subscriber once per long window, and at once when its verdict changes.
    """

    seen_by: Literal["uprobe", "tap"]  # how it is counted
    owner: Owner
    device: str  # as in `rdma link`
    qp_number: int  # of this host
    qp_type: str  # rc, uc, ud, …
    remote: str  # address of the peer; empty if unknown (datagrams, or connected before the agent started)
    remote_qp_number: int | None  # of the peer; null if unknown
    path: Path | None
    window_ns: int
    posted: int  # work requests on the send queue
    completed: int  # unsignalled ones complete with the next signalled one
    outstanding: int  # posted and not completed
    posted_bytes: int  # of the posted requests
    completed_bytes: int  # of the completed ones
    outstanding_bytes: int  # of the outstanding ones
    receives_posted: int  # of a shared receive queue not this pair's alone
    receives_completed: int  # receives of this pair
    received_bytes: int  # of these
    shared_receive_queue: bool  # whether it has one
    opcodes: dict[str, int]  # requests posted, by verb in lower case
    errors: dict[str, int]  # failed completions by status, as retry_exc_err
    refused_posts: int  # calls refused by the provider: the queue was full
    bandwidths: list[Bandwidth]  # per length of the sliding window
    latency: Quantiles  # from post to completion, of timed requests
    sampled_share: float  # share of this window's requests that were timed
    verdict: RdmaVerdict  # what is wrong with it
    reason: str  # the measurement behind the verdict
    since_ns: int  # when the verdict began
    untracked: int  # posted, but neither timed nor in `outstanding`, because too many were outstanding
    closed: bool  # destroyed, or its process has ended: the last record
    uid: int | None = None  # user of the process; null if unknown


class Suspect(msgspec.Struct, frozen=True):
    """A host or link that several queue pairs show to be slow."""

    kind: Literal["host", "link"]  # host or link
    name: str  # of the host or link
    slowness: float  # missing share of its queue pairs' usual bandwidth
    agreeing: int  # queue pairs with a verdict against it
    queue_pairs: int  # all that use it
    reason: str  # the measurements behind it


class RdmaSuspects(Signal, frozen=True, kw_only=True, tag="rdma_suspects"):
    """Hosts and links that several queue pairs show to be slow, worst first.

    With a subscriber once per long window, and after changes of verdicts, at most ten times a second.
    """

    suspects: list[Suspect]  # worst first


class RdmaSight(Signal, frozen=True, kw_only=True, tag="rdma_sight"):
    """How RDMA is seen on this host.

    With a subscriber when it changes, and every five seconds.
    """

    available: bool  # there is RDMA to see
    reason: str  # if not, why
    providers: list[str]  # libraries with breakpoints
    seen: dict[str, str]  # process to tap, uprobe, or why it is not seen
    hits_per_s: float  # of the breakpoints; each costs the process time
    tap_processes: int  # processes with the tap


class GroupMember(msgspec.Struct, frozen=True):
    """One nexthop of a group as the kernel has it."""

    nexthop_id: int  # of the kernel
    gateway: str  # empty if on-link
    interface: str  # by which packets leave
    weight: int  # 1 to 256
    # times the kernel selected it since the group was last replaced, once per forwarded packet, seldom per
    # connected socket; null before Linux 6.9
    packets: int | None


class NexthopGroup(Signal, frozen=True, kw_only=True, tag="nexthop_group"):
    """A nexthop group that carries routes to peers.

    Once a second with a subscriber.
    """

    group_id: int  # of the kernel
    destinations: list[str]  # prefixes that use it
    members: list[GroupMember]  # its nexthops


class ProgramCost(msgspec.Struct, frozen=True):
    """Run-time statistics of one BPF program."""

    name: str  # of the BPF program
    runs: int  # while statistics were on
    run_time_ns: int | None  # of these runs; null if the kernel refuses statistics


class Self(Signal, frozen=True, kw_only=True, tag="self"):
    """Cost and losses of the agent.

    Once a second with a subscriber.
    """

    cpu_share: float  # CPU time of the agent and its pacer, of one core
    window_ns: int
    resident_bytes: int  # memory of both
    probe_bytes_per_s: float  # probes and answers on the wire, both directions, with headers
    programs: list[ProgramCost]  # run times of the BPF programs
    drops: dict[str, int]  # every counter of something lost, refused or not understood, zero or not
    failed: dict[str, str]  # kernel hooks that are not attached, each with the reason


class PathState(Signal, frozen=True, kw_only=True, tag="path_state"):
    """The controller's state of a path.

    At each change, and once a second.
    """

    path: Path
    state: str  # healthy, suspect, drained, returning or unmeasured
    since_ns: int  # when it began
    weight_wanted: int | None  # the engine's target; null if no group carries the path
    weight_actual: int | None  # in the kernel
    reason: str  # the measurement, and the progress of a return or of learning
    under: str  # the rule; empty if none applies


class Act(Signal, frozen=True, kw_only=True, tag="act"):
    """One change made, wanted (dry run) or undone, or an alert.

    At once. A guardian and `swerve steer off` publish their rollbacks too, at their end, and wait at most a second
    for an agent.
    """

    act_id: str  # the same in the journal
    what: str  # as "routes to 10.9.0.2/32"
    before: dict[str, int]  # weight by nexthop
    after: dict[str, int]  # weight by nexthop
    because: str  # the measurement with its numbers
    under: str  # the rule
    # alert and alert_over are of alerts, the others of changes
    outcome: Literal["dry_run", "applied", "failed", "undone", "alert", "alert_over"]
    seen_ns: int  # at_ns of the signal that led to it
    decided_ns: int  # the decision
    acknowledged_ns: int | None  # the kernel's acknowledgement, null if not made; minus seen_ns it is the time to act
    target: str = ""  # as "overlay:main:10.9.0.2/32": the table of the original routes and their first prefix
    actuator: str = ""  # overlay (weights), pin, label, reroute (by the kernel itself), alert or operator
    moves: str = ""  # what such a change moves, in words


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
