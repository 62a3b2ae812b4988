"""Signals of every type, to feed views and buses with; imported as `samples`."""

from __future__ import annotations

from typing import Any

from pytools.signals import (
    Act,
    AnySignal,
    AppDelay,
    Clock,
    ClockEdge,
    Collocated,
    Collocation,
    Delay,
    GroupMember,
    NexthopGroup,
    Path,
    PathDelay,
    PathState,
    ProbeSamples,
    ProgramCost,
    Quantiles,
    Self,
    TcpFlow,
    TcpPath,
)

SECOND_NS = 1_000_000_000
AT_NS = 1_000 * SECOND_NS


def path(rail: int = 1, destination: str = "h2") -> Path:
    return Path(
        source="h1",
        destination=destination,
        address=f"10.9.0.{destination[1:]}",
        gateway=f"10.{rail}.1.1",
        interface=f"rail{rail}",
    )


def _common(at_ns: int) -> dict[str, Any]:
    return {"host": "h1", "at_ns": at_ns, "unix_ns": 1_700_000_000 * SECOND_NS + at_ns}


def path_delay(rail: int = 1, at_ns: int = AT_NS, **changes: Any) -> PathDelay:
    direction = Delay(
        samples=50,
        owd_min_ns=1_700,
        owd_p50_ns=2_100,
        owd_p99_ns=8_400,
        bound_ns=450,
        hard_bound_ns=1_900,
        queueing_p50_ns=400,
        queueing_p99_ns=6_700,
        queueing_last_ns=300,
        queueing_bound_ns=200,
    )
    fields: dict[str, Any] = {
        "path": path(rail),
        "window_ns": SECOND_NS,
        "base_window_ns": 30 * SECOND_NS,
        "forward": direction,
        "reverse": direction,
        "round_trip_min_ns": 3_800,
        "clock": "synchronised",
        "sent": 50,
        "received": 50,
        "lost": 0,
        "duplicates": 0,
        "reordered": 0,
    }
    return PathDelay(**_common(at_ns), **(fields | changes))


def probe_samples(rail: int = 1, at_ns: int = AT_NS) -> ProbeSamples:
    return ProbeSamples(
        **_common(at_ns),
        path=path(rail),
        clock="free_running",
        seq=[7, 8],
        sent_ns=[at_ns - 10_000, at_ns - 5_000],
        forward_ns=[2_000, None],
        reverse_ns=[2_100, None],
    )


def clock_edge(rail: int = 1, at_ns: int = AT_NS, destination: str = "h2", **changes: Any) -> ClockEdge:
    fields: dict[str, Any] = {
        "path": path(rail, destination),
        "epoch_ns": at_ns,
        "window_ns": 2 * SECOND_NS,
        "offset_ns": -312_456_789,
        "drift_ppb": 12_345.6,
        "sigma_ns": 6.2,
        "drift_sigma_ppb": 4.1,
        "bound_ns": 410,
        "hard_low_ns": -312_458_589,
        "hard_high_ns": -312_454_989,
        "round_trip_min_ns": 3_600,
        "pairs_kept": 190,
        "pairs_rejected": 10,
        "stepped": False,
    }
    return ClockEdge(**_common(at_ns), **(fields | changes))


def clock(of: str = "h1", at_ns: int = AT_NS, reference: str = "h2", **changes: Any) -> Clock:
    fields: dict[str, Any] = {
        "of": of,
        "reference": reference,
        "epoch_ns": at_ns,
        "state": "synchronised",
        "offset_ns": 0 if of == reference else 312_456_789,
        "drift_ppb": 0.0 if of == reference else -12_345.6,
        "bound_ns": 0 if of == reference else 430,
        "hard_bound_ns": 0 if of == reference else 1_900,
        "slew_ppb": None,
        "neighbours": 3,
        "pairs_kept": 570,
        "pairs_rejected": 30,
        "outlier_edges": 0,
    }
    return Clock(**_common(at_ns), **(fields | changes))


def free_clock(of: str = "h1", at_ns: int = AT_NS, reference: str = "h2", **changes: Any) -> Clock:
    nothing: dict[str, Any] = dict.fromkeys(("offset_ns", "drift_ppb", "bound_ns", "hard_bound_ns"))
    return clock(of, at_ns, reference, state="free_running", **(nothing | {"neighbours": 0} | changes))


def collocation(at_ns: int = AT_NS, **changes: Any) -> Collocation:
    fields: dict[str, Any] = {
        "span_ns": 120 * SECOND_NS,
        "groups": [Collocated(hosts=["h1", "h4"], confidence=0.9987)],
        "alone": ["h2"],
        "unknown": ["h3"],
    }
    return Collocation(**_common(at_ns), **(fields | changes))


def app_delay(rail: int = 1, at_ns: int = AT_NS, local_port: int = 0, sampled: int = 200, **changes: Any) -> AppDelay:
    """Of one flow; of all flows of the path when there is no port."""
    fields: dict[str, Any] = {
        "path": path(rail),
        "protocol": "tcp",
        "local": "10.9.0.1" if local_port else "",
        "local_port": local_port,
        "remote": "10.9.0.2" if local_port else "",
        "remote_port": 5201 if local_port else 0,
        "window_ns": SECOND_NS,
        "clock": "synchronised",
        "owd": Quantiles(samples=196, p50_ns=14_200, p90_ns=31_000, p99_ns=88_400, max_ns=120_300),
        "queueing": Quantiles(samples=196, p50_ns=12_500, p90_ns=29_300, p99_ns=86_700, max_ns=118_600),
        "bound_ns": 460,
        "hard_bound_ns": 1_900,
        "sampled": sampled,
        "joined": sampled - 4,
        "ambiguous": 3,
        "unmatched": 1,
    }
    return AppDelay(**_common(at_ns), **(fields | changes))


def tcp_path(rail: int = 1, at_ns: int = AT_NS, in_window: int = 3, total: int = 30) -> TcpPath:
    return TcpPath(
        **_common(at_ns),
        interface=f"rail{rail}",
        path=path(rail),
        window_ns=SECOND_NS,
        retransmitted_segments=in_window,
        total_segments=total,
    )


def tcp_flow(rail: int = 1, at_ns: int = AT_NS, local_port: int = 40_000, segments: int = 12) -> TcpFlow:
    return TcpFlow(
        **_common(at_ns),
        local="10.9.0.1",
        local_port=local_port,
        remote="10.9.0.2",
        remote_port=5201,
        interface=f"rail{rail}",
        path=path(rail),
        retransmitted_segments=segments,
        last_ns=at_ns - SECOND_NS,
    )


def nexthop_group(at_ns: int = AT_NS, packets: tuple[int | None, int | None] = (100, 900)) -> NexthopGroup:
    return NexthopGroup(
        **_common(at_ns),
        group_id=102,
        destinations=["10.9.0.2/32"],
        members=[
            GroupMember(nexthop_id=11, gateway="10.1.1.1", interface="rail1", weight=1, packets=packets[0]),
            GroupMember(nexthop_id=12, gateway="10.2.1.1", interface="rail2", weight=9, packets=packets[1]),
        ],
    )


def self_cost(at_ns: int = AT_NS, **changes: Any) -> Self:
    fields: dict[str, Any] = {
        "cpu_share": 0.031,
        "window_ns": SECOND_NS,
        "resident_bytes": 41 << 20,
        "probe_bytes_per_s": 8_600.0,
        "programs": [ProgramCost(name="stamp_egress", runs=1000, run_time_ns=52_000)],
        "drops": {"ring_full": 0, "bus_slow": 0},
        "failed": {},
    }
    return Self(**_common(at_ns), **(fields | changes))


def path_state(rail: int = 1, at_ns: int = AT_NS, state: str = "drained", wanted: int | None = 1) -> PathState:
    return PathState(
        **_common(at_ns),
        path=path(rail),
        state=state,
        since_ns=at_ns - 4 * SECOND_NS,
        weight_wanted=wanted,
        weight_actual=wanted,
        reason="queueing 41 ms > 5 ms for 60 ms",
        under="drain-congested",
    )


def act(at_ns: int = AT_NS, number: int = 1, **changes: Any) -> Act:
    fields: dict[str, Any] = {
        "act_id": f"a{number}",
        "what": "nexthop group 102",
        "before": {"11": 5, "12": 5},
        "after": {"11": 1, "12": 9},
        "because": "queueing 41 ms > 5 ms for 60 ms on rail1",
        "under": "drain-congested",
        "outcome": "applied",
        "seen_ns": at_ns - 3_000_000,
        "decided_ns": at_ns - 2_000_000,
        "acknowledged_ns": at_ns - 1_000_000,
    }
    return Act(**_common(at_ns), **(fields | changes))


def one_of_each(at_ns: int = AT_NS) -> list[AnySignal]:
    """One signal of every type there is."""
    return [
        path_delay(at_ns=at_ns),
        probe_samples(at_ns=at_ns),
        clock_edge(at_ns=at_ns),
        clock(at_ns=at_ns),
        collocation(at_ns=at_ns),
        app_delay(at_ns=at_ns),
        tcp_flow(at_ns=at_ns),
        tcp_path(at_ns=at_ns),
        nexthop_group(at_ns=at_ns),
        self_cost(at_ns=at_ns),
        path_state(at_ns=at_ns),
        act(at_ns=at_ns),
    ]
