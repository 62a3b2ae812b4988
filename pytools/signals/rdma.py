"""RDMA: ports, queue pairs with verdicts, suspects, and how RDMA is seen on a host."""

from __future__ import annotations

from typing import Literal

import msgspec

from pytools.signals.base import Owner, Path, Quantiles, Signal


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
    """Bandwidth over sliding windows of this many messages: bytes from the first post to the last completion."""

    # length of the sliding window: 1, 8 or 32; 0: completed bytes by the time in which something was outstanding
    messages: int
    windows: int  # number of windows
    last_bps: int | None  # of the last one
    mean_bps: int | None  # of all of them
    min_bps: int | None  # smallest
    max_bps: int | None  # largest
    last_us: int | None  # CLOCK_MONOTONIC of the end of the last one


class RdmaBackup(msgspec.Struct, frozen=True):
    """A GID of this host that reaches the peer of a dead queue pair over a path that answers probes."""

    device: str  # as in `rdma link`
    port: int  # as in `rdma link`
    gid_index: int  # in the port's table
    gid: str  # address and type
    remote: str  # the peer's address there
    path: Path  # that answers


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
    # of a dead one: whether its path answers probes; null if it has none that is measured, and for all others
    path_answers: bool | None = None
    backups: list[RdmaBackup] = msgspec.field(default_factory=list)  # of a dead one: what reaches the peer otherwise
    no_backup: str = ""  # of a dead one without: why

    @property
    def key(self) -> tuple[str, int, int]:
        """What tells the queue pairs of a host apart: another process may get the number of one that is gone."""
        return self.device, self.qp_number, self.owner.pid


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
