"""Delays, loss and liveness of paths: of probes, and of the packets of applications."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from pytools.signals.base import ClockState, Path, Quantiles, Signal

# Upper ends of the classes of a histogram of delays: 1, 2, 5 … from 1 µs to 1 s; one more class above.
DELAY_BOUNDS_NS: Final = (*(step * 10**power for power in range(3, 9) for step in (1, 2, 5)), 10**9)


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


class Underlay(msgspec.Struct, frozen=True):
    """A way by which the outer packets of a tunnel leave this host: a hop of the route to the peer's outer address."""

    address: str  # of the peer, outside the tunnel
    gateway: str  # empty: the address is on the link
    interface: str
    # packets that left this way since the record before, of probes and of applications; null: not counted, as of a
    # way that is the only one
    packets: int | None = None


class PathDelay(Signal, frozen=True, kw_only=True, tag="path_delay"):
    """Delays and loss of one path over the window that ends at `at_ns`.

    Over `windows.short` every 200 ms; once a probe interval for 2 s after the path became slow, then every 100 ms
    until it is not; once a probe interval after it has fallen silent. Over `windows.long` once in that time.
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
    # long windows only: ways below a path by a tunnel; null: its interface is not a tunnel, empty: they are not known
    underlay: list[Underlay] | None = None

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
    # sequence numbers of extra probes; leave them out of percentiles over time
    extra: list[int] = msgspec.field(default_factory=list)


WAY_LASTS_NS: Final = 15_000_000_000  # what was not told of a way for so long, three times in a row, holds no longer


class PathWay(Signal, frozen=True, kw_only=True, tag="path_way"):
    """One of the ways of a path: a bond or team of this host, or routers behind the first hop, hash flows over them.

    Of each path whose ways are known, one record per way: every 5 s, and at once when a state changes. Where routers
    do not answer, each port is a way of its own, with `router` empty.
    """

    path: Path
    way: int  # its number from 1, in the order in which they were met; stays while the ways are known
    ways: int  # number found; `confidence` says whether these are all
    # that there is no further way, if one were as likely as each of the others; 0 if routers do not answer
    confidence: float
    ports: list[int]  # UDP source ports of probes that take it
    ports_in_all: int  # source ports whose way is known, over all ways
    # address of the router at each hop from 1; null: it does not answer, or was not asked; behind the last hop at
    # which ways differ they are those of all ways
    hops: list[str | None]
    # the first hop at which ways differ, so that the router there names the way; null: there is one way, or routers
    # do not answer
    differs_at: int | None
    router: str  # address of the router at that hop; empty: not known
    # the port of a bond or team by which probes from these ports leave, as was seen there; empty: the path's interface
    # is above no such device that hashes flows
    lower: str = ""
    # against the best way of this path; the only way stays unmeasured: `path_delay` reports on it
    state: Literal["healthy", "slow", "lossy", "dead", "unmeasured"]
    window_ns: int  # how far back the probes go that the following is of
    sent: int  # probes along it whose fate is known
    lost: int  # of these, unanswered
    loss_bound: float | None  # either way, of lost / sent (95 %); null without probes
    # median of forward delays over the smallest of all ways of this path; needs no common clock
    queueing_p50_ns: int | None
    queueing_bound_ns: int | None  # its error: stamps, the drift of the clocks, and how much the delays vary
    # the queue or the loss is behind the router at this hop, and before the next; 0: before the first router; null:
    # not known, or the way is not bad
    sick_hop: int | None


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
