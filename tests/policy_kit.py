"""Signals made up for tests of conditions, one builder per kind, all of host h1. Times are CLOCK_MONOTONIC in ns."""

from __future__ import annotations

from typing import Any

from pytools.signals import (
    Link,
    LinkCounters,
    LinkEvent,
    Owner,
    Path,
    PathEcn,
    PathLiveness,
    PathMtu,
    Quantiles,
    RdmaPort,
    RdmaQueuePair,
    Retransmissions,
    TcpPath,
)
from steering.policy.conditions import Condition
from steering.policy.file import parse

MS = 1_000_000
SECOND = 1_000 * MS
T0 = 1_000 * SECOND
_COUNTERS = LinkCounters(0, 0, 0, 0, 0, 0, 0, 0)

HEAD = "version: 1\nmanage: {destinations: [10.9.0.0/16]}\nrules:\n"


def rule(when: str, then: str = "{drain: {}}", more: str = "") -> str:
    """A whole policy with one rule."""
    head = HEAD.replace("10.9.0.0/16", '10.9.0.0/16, "fd00:9::/64"') if "relabel" in then else HEAD
    return f"{head}  - name: r\n    when: {when}\n    then: {then}\n{more}"


def condition(when: str) -> Condition:
    """The condition in a text of YAML's flow style."""
    return parse(rule(when)).rules[0].when


def _common(path: Path, at_ns: int) -> dict[str, Any]:
    return {"host": path.source, "at_ns": at_ns, "unix_ns": at_ns}


def liveness(path: Path, at_ns: int, missed: int = 0, **fields: Any) -> PathLiveness:
    """How a path's probes are answered; silent since as many intervals as are missed."""
    interval_ns = fields.pop("interval_ns", 10 * MS)
    silent_ns = fields.pop("silent_ns", missed * interval_ns)
    last = at_ns - silent_ns if missed else at_ns
    return PathLiveness(
        **_common(path, at_ns),
        path=path,
        missed=missed,
        answered_run=fields.pop("answered_run", 0 if missed else 100),
        silent_ns=silent_ns,
        last_answer_ns=fields.pop("last_answer_ns", last),
        last_request_ns=fields.pop("last_request_ns", None),
        interval_ns=interval_ns,
        **fields,
    )


def tcp(
    path: Path, at_ns: int, segments: int, again: int = 0, delivered: int = 0, marked: int = 0, **causes: int
) -> TcpPath:
    """What TCP went through on a path in the last second."""
    return TcpPath(
        **_common(path, at_ns),
        interface=path.interface,
        path=path,
        window_ns=SECOND,
        retransmitted=Retransmissions(**causes),
        retransmitted_segments=again,
        retransmitted_bytes=0,
        timeouts=0,
        spurious_segments=0,
        sent_bytes=0,
        segments_out=segments,
        delivered_segments=delivered,
        delivered_ce_segments=marked,
        zero_windows=0,
        resets_sent=0,
        resets_received=0,
        total_segments=0,
    )


def ecn(path: Path, at_ns: int, packets: int, marked: int) -> PathEcn:
    """What came back marked in the last second."""
    return PathEcn(
        **_common(path, at_ns),
        path=path,
        window_ns=SECOND,
        packets=packets,
        ce_packets=marked,
        total_packets=packets,
        total_ce_packets=marked,
    )


def link(path: Path, at_ns: int, carrier: bool = True, failed: tuple[str, ...] = ()) -> Link:
    """A report of a path's interface."""
    return Link(
        **_common(path, at_ns),
        interface=path.interface,
        paths=[path],
        window_ns=SECOND,
        up=True,
        carrier=carrier,
        carrier_changes=0,
        mtu_bytes=1500,
        speed_mbps=None,
        counters=_COUNTERS,
        window=_COUNTERS,
        qdiscs=[],
        pauses=[],
        failed_neighbours=list(failed),
        driver={},
    )


def event(path: Path, at_ns: int, what: Any, paths: list[Path] | None = None) -> LinkEvent:
    """Something happened to a path's interface."""
    return LinkEvent(
        **_common(path, at_ns),
        interface=path.interface,
        paths=[path] if paths is None else paths,
        what=what,
        happened_ns=at_ns,
        detail=f"{path.interface}: {what}",
        values={},
    )


def mtu(path: Path, at_ns: int, state: Any) -> PathMtu:
    """Whether packets of full size pass."""
    return PathMtu(
        **_common(path, at_ns),
        path=path,
        interface_mtu_bytes=9000,
        works_bytes=1500,
        fails_bytes=None,
        told_bytes=None,
        told_by="",
        state=state,
    )


def port(path: Path, at_ns: int, state: str) -> RdmaPort:
    """A report of the RDMA port over a path's interface."""
    return RdmaPort(
        **_common(path, at_ns),
        device="mlx5_0",
        port=1,
        interface=path.interface,
        state=state,
        rate="",
        gids={},
        window_ns=SECOND,
        counters={},
        window={},
        cnp_received=None,
        cnp_sent=None,
        ecn_marked=None,
        out_of_sequence=None,
        timeouts=None,
        receiver_not_ready=None,
    )


def queue_pair(
    path: Path | None, at_ns: int, number: int, verdict: Any, closed: bool = False, uid: int | None = 0
) -> RdmaQueuePair:
    """A queue pair over a path."""
    return RdmaQueuePair(
        host="h1",
        at_ns=at_ns,
        unix_ns=at_ns,
        seen_by="uprobe",
        owner=Owner(pid=7),
        device="mlx5_0",
        qp_number=number,
        qp_type="rc",
        remote="",
        remote_qp_number=None,
        path=path,
        window_ns=SECOND,
        posted=0,
        completed=0,
        outstanding=0,
        posted_bytes=0,
        completed_bytes=0,
        outstanding_bytes=0,
        receives_posted=0,
        receives_completed=0,
        received_bytes=0,
        shared_receive_queue=False,
        opcodes={},
        errors={},
        refused_posts=0,
        bandwidths=[],
        latency=Quantiles(0, None, None, None, None),
        sampled_share=0.0,
        verdict=verdict,
        reason="as made up",
        since_ns=at_ns,
        untracked=0,
        closed=closed,
        uid=uid,
    )
