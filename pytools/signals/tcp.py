"""TCP connections, and their sums by path and by host."""

from __future__ import annotations

from typing import Literal

import msgspec

from pytools.signals.base import Owner, Path, Signal


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


class Stall(msgspec.Struct, frozen=True):
    """A wait for the retransmission timer (RTO), after at least one timeout that nothing has answered."""

    timeouts: int  # unanswered, in a row
    rto_ns: int  # the present timer; each timeout doubles it
    lasted_ns: int  # since the last acknowledgement


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
    interface: str  # by which its packets leave; empty if that is not known, as for most of other namespaces
    path: Path | None  # None when the remote address is on no measured path
    owner: Owner
    namespace: str = ""  # network namespace, as in `tcp_namespace`; empty: the agent's own
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
    retransmitted_bytes: int  # of these segments; not known (0) in other namespaces, as zero_windows and resets
    spurious_segments: int  # retransmitted needlessly, by the peer's DSACKs
    timeouts: int  # retransmission timeouts; each costs at least the minimum RTO, by default 200 ms
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
    # packets of it dropped in this kernel, by reason (from Linux 6.11)
    drops: dict[str, int] = msgspec.field(default_factory=dict)
    stall: Stall | None = None  # when published; null: no stall by a timeout, or of another namespace


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


class TcpNamespace(Signal, frozen=True, kw_only=True, tag="tcp_namespace"):
    """All TCP connections of another network namespace of this machine in the last window.

    Once per long window, or with more than 200 namespaces per several, if anything was counted; every fifteenth time
    of all.
    """

    netns: int  # its cookie in the kernel (SO_NETNS_COOKIE), never used twice
    # `NAMESPACE/NAME` of the pod, the container's name, `pod:UID`, `container:ID`, a service, or `netns:COOKIE`
    namespace: str
    window_ns: int
    connections: int  # seen since the agent started
    retransmitted: Retransmissions  # within the window, as all below
    retransmitted_segments: int  # of segments_out; equals the growth of its TcpRetransSegs
    spurious_segments: int  # retransmitted needlessly
    timeouts: int  # retransmission timeouts
    sent_bytes: int  # without retransmissions
    received_bytes: int  # in order
    segments_out: int  # with retransmissions
    delivered_segments: int  # acknowledged
    delivered_ce_segments: int  # of these, acknowledged as marked (CE)
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
