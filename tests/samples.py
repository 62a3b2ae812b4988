"""Signals of every type, to feed views and buses with; imported as `samples`."""

from __future__ import annotations

from typing import Any

from pytools.signals import (
    Act,
    AnySignal,
    AppDelay,
    Bandwidth,
    Clock,
    ClockEdge,
    Collocated,
    Collocation,
    CongestionTimes,
    Delay,
    DropReason,
    Gpu,
    GpuClock,
    GpuLink,
    GpuReason,
    GroupMember,
    Histogram,
    HoldState,
    Job,
    JobCause,
    JobLag,
    JobPath,
    JobRank,
    JobStep,
    JobVerdict,
    Link,
    LinkCounters,
    LinkEvent,
    NexthopGroup,
    Owner,
    PacketDrops,
    Path,
    PathDelay,
    PathEcn,
    PathLiveness,
    PathMtu,
    PathState,
    PathWay,
    Pause,
    ProbeSamples,
    ProgramCost,
    Qdisc,
    Quantiles,
    RdmaPort,
    RdmaQueuePair,
    RdmaSight,
    RdmaSuspects,
    Retransmissions,
    Self,
    Suspect,
    TcpFlow,
    TcpHost,
    TcpNamespace,
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
        queueing_histogram=Histogram([44, 0, 4, 2], 50_000),
        jitter_ns=350,
        jitter_bound_ns=210,
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
    return PathDelay(**(_common(at_ns) | fields | changes))


def path_liveness(rail: int = 1, at_ns: int = AT_NS, **changes: Any) -> PathLiveness:
    fields: dict[str, Any] = {
        "path": path(rail),
        "missed": 0,
        "answered_run": 4_711,
        "silent_ns": 0,
        "last_answer_ns": at_ns - 9_000_000,
        "last_request_ns": at_ns - 12_000_000,
        "interval_ns": 20_000_000,
    }
    return PathLiveness(**(_common(at_ns) | fields | changes))


def path_way(rail: int = 1, at_ns: int = AT_NS, **changes: Any) -> PathWay:
    fields: dict[str, Any] = {
        "path": path(rail),
        "way": 2,
        "ways": 4,
        "confidence": 0.992,
        "ports": [40_003, 40_010],
        "ports_in_all": 30,
        "hops": [f"10.{rail}.1.1", f"10.{100 + rail}.2.1", f"10.{rail}.1.1"],
        "differs_at": 2,
        "router": f"10.{100 + rail}.2.1",
        "lower": "",
        "state": "slow",
        "window_ns": 20 * SECOND_NS,
        "sent": 20,
        "lost": 0,
        "loss_bound": 0.16,
        "queueing_p50_ns": 12_000_000,
        "queueing_bound_ns": 1_500_000,
        "sick_hop": 2,
    }
    return PathWay(**(_common(at_ns) | fields | changes))


def probe_samples(rail: int = 1, at_ns: int = AT_NS, **changes: Any) -> ProbeSamples:
    fields: dict[str, Any] = {
        "path": path(rail),
        "clock": "free_running",
        "seq": [7, 8],
        "sent_ns": [at_ns - 10_000, at_ns - 5_000],
        "forward_ns": [2_000, None],
        "reverse_ns": [2_100, None],
    }
    return ProbeSamples(**(_common(at_ns) | fields | changes))


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
    return ClockEdge(**(_common(at_ns) | fields | changes))


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
    return Clock(**(_common(at_ns) | fields | changes))


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
    return Collocation(**(_common(at_ns) | fields | changes))


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
    return AppDelay(**(_common(at_ns) | fields | changes))


def tcp_path(
    rail: int = 1, at_ns: int = AT_NS, in_window: int = 3, total: int = 30, destination: str = "h2", **changes: Any
) -> TcpPath:
    fields: dict[str, Any] = {
        "interface": f"rail{rail}",
        "path": path(rail, destination),
        "window_ns": SECOND_NS,
        "retransmitted": causes(in_window),
        "retransmitted_segments": in_window,
        "retransmitted_bytes": 1448 * in_window,
        "timeouts": 1 if in_window else 0,
        "spurious_segments": in_window // 3,
        "sent_bytes": 14_480_000,
        "segments_out": 10_000,
        "delivered_segments": 9_900,
        "delivered_ce_segments": 99,
        "zero_windows": 0,
        "resets_sent": 0,
        "resets_received": 0,
        "total_segments": total,
    }
    return TcpPath(**(_common(at_ns) | fields | changes))


def causes(segments: int) -> Retransmissions:
    """Mostly by fast retransmission, the last one after a timeout."""
    return Retransmissions(fast=max(0, segments - 1), timeout=min(1, segments))


def tcp_flow(
    rail: int = 1,
    at_ns: int = AT_NS,
    local_port: int = 40_000,
    segments: int = 12,
    destination: str = "h2",
    **changes: Any,
) -> TcpFlow:
    fields: dict[str, Any] = {
        "local": "10.9.0.1",
        "local_port": local_port,
        "remote": path(rail, destination).address,
        "remote_port": 5201,
        "interface": f"rail{rail}",
        "path": path(rail, destination),
        "owner": Owner(pid=4711, command="iperf3", cgroup="system.slice/load.service"),
        "state": "established",
        "first_ns": at_ns - 60 * SECOND_NS,
        "last_ns": at_ns - SECOND_NS,
        "sent_bytes": 144_800_000,
        "acknowledged_bytes": 144_000_000,
        "received_bytes": 37,
        "segments_out": 100_000,
        "segments_in": 50_000,
        "retransmitted": causes(segments),
        "retransmitted_segments": segments,
        "retransmitted_bytes": 1448 * segments,
        "spurious_segments": segments // 3,
        "timeouts": 1 if segments else 0,
        "srtt_ns": 2_400_000,
        "min_rtt_ns": 180_000,
        "cwnd_segments": 84,
        "ssthresh_segments": 60,
        "delivery_rate_bps": 94_500_000,
        "zero_windows": 0,
        "ecn": "negotiated",
        "delivered_segments": 99_900,
        "delivered_ce_segments": 999,
        "congestion": "open",
        "congestion_times": CongestionTimes(open_ns=58 * SECOND_NS, recovery_ns=2 * SECOND_NS),
        "resets_sent": 0,
        "resets_received": 0,
    }
    return TcpFlow(**(_common(at_ns) | fields | changes))


def tcp_host(at_ns: int = AT_NS, **changes: Any) -> TcpHost:
    fields: dict[str, Any] = {
        "window_ns": SECOND_NS,
        "flows": 40,
        "capacity": 131_072,
        "created": 60,
        "evicted": 0,
        "retransmitted": causes(30),
        "retransmitted_segments": 30,
        "retransmitted_bytes": 43_440,
        "timeouts": 1,
        "spurious_segments": 10,
        "sent_bytes": 144_800_000,
        "resets_sent": 2,
        "resets_refused": 1,
        "resets_received": 0,
        "zero_windows": 0,
        "kernel": {"TcpRetransSegs": 30, "TcpExtTCPTimeouts": 1, "TcpExtTCPDSACKRecv": 0},
    }
    return TcpHost(**(_common(at_ns) | fields | changes))


def tcp_namespace(at_ns: int = AT_NS, segments: int = 7, **changes: Any) -> TcpNamespace:
    fields: dict[str, Any] = {
        "netns": 4242,
        "namespace": "shop/cart-5f7c",
        "window_ns": SECOND_NS,
        "connections": 25,
        "retransmitted": causes(segments),
        "retransmitted_segments": segments,
        "spurious_segments": 1,
        "timeouts": 1,
        "sent_bytes": 1_448_000,
        "received_bytes": 20_000,
        "segments_out": 1_007,
        "delivered_segments": 1_000,
        "delivered_ce_segments": 10,
        "total_segments": segments + 20,
    }
    return TcpNamespace(**(_common(at_ns) | fields | changes))


def packet_drops(at_ns: int = AT_NS, **changes: Any) -> PacketDrops:
    reasons = [
        DropReason(reason="NO_SOCKET", window_packets=0, total_packets=9),
        DropReason(reason="QDISC_DROP", window_packets=7, total_packets=120),
    ]
    fields: dict[str, Any] = {"window_ns": SECOND_NS, "reasons": reasons}
    return PacketDrops(**(_common(at_ns) | fields | changes))


def counters(**changes: int) -> LinkCounters:
    fields: dict[str, int] = {
        "received_bytes": 1_000_000,
        "received_packets": 1_000,
        "received_errors": 0,
        "received_drops": 0,
        "sent_bytes": 12_500_000,
        "sent_packets": 9_000,
        "sent_errors": 0,
        "sent_drops": 0,
    }
    return LinkCounters(**(fields | changes))


def link(rail: int = 1, at_ns: int = AT_NS, **changes: Any) -> Link:
    fields: dict[str, Any] = {
        "interface": f"rail{rail}",
        "paths": [path(rail)],
        "window_ns": SECOND_NS,
        "up": True,
        "carrier": True,
        "carrier_changes": 1,
        "mtu_bytes": 9000,
        "speed_mbps": 100_000,
        "counters": counters(),
        "window": counters(),
        "qdiscs": [
            Qdisc(
                kind="tbf",
                handle="8001:",
                parent="root",
                backlog_bytes=60_000,
                backlog_packets=40,
                drops=120,
                overlimits=3_000,
                requeues=0,
            )
        ],
        "pauses": [Pause(priority=3, received=17, sent=0, received_duration_us=250)],
        "failed_neighbours": [],
        "driver": {},
    }
    return Link(**(_common(at_ns) | fields | changes))


def link_event(rail: int = 1, at_ns: int = AT_NS, what: str = "carrier_lost", **changes: Any) -> LinkEvent:
    fields: dict[str, Any] = {
        "interface": f"rail{rail}",
        "paths": [path(rail)],
        "what": what,
        "happened_ns": at_ns - 2_000_000,
        "detail": f"rail{rail} lost its carrier",
        "values": {"carrier_changes": 2},
    }
    return LinkEvent(**(_common(at_ns) | fields | changes))


def path_mtu(rail: int = 1, at_ns: int = AT_NS, **changes: Any) -> PathMtu:
    fields: dict[str, Any] = {
        "path": path(rail),
        "interface_mtu_bytes": 9000,
        "works_bytes": 1500,
        "fails_bytes": 9000,
        "told_bytes": None,
        "told_by": "",
        "state": "mismatch",
    }
    return PathMtu(**(_common(at_ns) | fields | changes))


def path_ecn(rail: int = 1, at_ns: int = AT_NS, **changes: Any) -> PathEcn:
    fields: dict[str, Any] = {
        "path": path(rail),
        "window_ns": SECOND_NS,
        "packets": 1_000,
        "ce_packets": 31,
        "total_packets": 100_000,
        "total_ce_packets": 400,
    }
    return PathEcn(**(_common(at_ns) | fields | changes))


def rdma_port(at_ns: int = AT_NS, **changes: Any) -> RdmaPort:
    fields: dict[str, Any] = {
        "device": "rxe0",
        "port": 1,
        "interface": "rail1",
        "state": "active",
        "rate": "100 Gb/sec (4X EDR)",
        "gids": {"0": "fe80::1 RoCE v2", "1": "::ffff:10.1.0.1 RoCE v2"},
        "window_ns": SECOND_NS,
        "counters": {"out_of_sequence": 4, "rcvd_pkts": 100_000},
        "window": {"rcvd_pkts": 1_000},
        "cnp_received": None,
        "cnp_sent": None,
        "ecn_marked": None,
        "out_of_sequence": 4,
        "timeouts": 0,
        "receiver_not_ready": 2,
    }
    return RdmaPort(**(_common(at_ns) | fields | changes))


def rdma_qp(number: int = 18, at_ns: int = AT_NS, verdict: str = "ok", **changes: Any) -> RdmaQueuePair:
    bandwidths = [
        Bandwidth(
            messages=each,
            windows=90,
            last_bps=91_000_000_000,
            mean_bps=92_000_000_000,
            min_bps=80_000_000_000,
            max_bps=97_000_000_000,
            last_us=at_ns // 1000,
        )
        for each in (1, 8, 32)
    ]
    fields: dict[str, Any] = {
        "seen_by": "tap",
        "owner": Owner(pid=815, command="ib_write_bw"),
        "device": "rxe0",
        "qp_number": number,
        "qp_type": "rc",
        "remote": "10.9.0.2",
        "remote_qp_number": 19,
        "path": path(1),
        "window_ns": SECOND_NS,
        "posted": 5_000,
        "completed": 4_900,
        "outstanding": 100,
        "posted_bytes": 5_000 << 16,
        "completed_bytes": 4_900 << 16,
        "outstanding_bytes": 100 << 16,
        "receives_posted": 0,
        "receives_completed": 0,
        "received_bytes": 0,
        "shared_receive_queue": False,
        "opcodes": {"rdma_write": 5_000},
        "errors": {},
        "refused_posts": 0,
        "bandwidths": bandwidths,
        "latency": Quantiles(samples=300, p50_ns=5_200, p90_ns=9_000, p99_ns=21_000, max_ns=40_000),
        "sampled_share": 0.06,
        "verdict": verdict,
        "reason": "at its usual bandwidth",
        "since_ns": at_ns - 4 * SECOND_NS,
        "untracked": 0,
        "closed": False,
    }
    return RdmaQueuePair(**(_common(at_ns) | fields | changes))


def rdma_suspects(at_ns: int = AT_NS, **changes: Any) -> RdmaSuspects:
    slow = Suspect(
        kind="host", name="h2", slowness=0.62, agreeing=3, queue_pairs=4, reason="3 of 4 queue pairs to it are slow"
    )
    fields: dict[str, Any] = {"suspects": [slow]}
    return RdmaSuspects(**(_common(at_ns) | fields | changes))


def rdma_sight(at_ns: int = AT_NS, **changes: Any) -> RdmaSight:
    fields: dict[str, Any] = {
        "available": True,
        "reason": "",
        "providers": ["librxe-rdmav34.so"],
        "seen": {"815 ib_write_bw": "tap"},
        "hits_per_s": 0.0,
        "tap_processes": 1,
    }
    return RdmaSight(**(_common(at_ns) | fields | changes))


def job_verdict(**changes: Any) -> JobVerdict:
    cause = JobCause("network", 0.62, 0.5, 0.7, None, path(), "rail1", "h2 by rail1: queueing delay 9.1 ms ± 1 µs")
    fields: dict[str, Any] = {
        "verdict": "network",
        "reason": cause.reason,
        "causes": [cause, JobCause("straggler", 0.1, 0.08, 0.12, 8, None, "", "rank 8 comes 2.1 ms late")],
        "step": JobStep("nccl", 40, 3, 31_000_000, 400_000, None, 1.4),
        "missing": {"gpu": "NVML is not there"},
    }
    return JobVerdict(**fields | changes)


def job(at_ns: int = AT_NS, **changes: Any) -> Job:
    owner = Owner(pid=815, command="python3", cgroup="/system.slice/slurmstepd.scope/job_4711/step_0/user/task_0")
    fields: dict[str, Any] = {
        "job": "slurm:4711.0/torchrun:n1:29500",
        "source": "torchrun",
        "uid": 1000,
        "size": 16,
        "ranks": [JobRank(8, owner, 3, 0, "0,1", 0, "ml/train-0", 32, 0)],
        "window_ns": SECOND_NS,
        "paths": [JobPath(path(), "rail1", 20, 0, 250_000_000, 1_000), JobPath(None, "lo", 12, 0, 0, 0)],
        "ras": "ok",
        "ras_reason": "",
        "ras_ranks": 16,
        "lagging": [JobLag(3, "0xfeed", 3, "10.1.1.2", 77, 12)],
        "why": job_verdict(),
    }
    return Job(**(_common(at_ns) | fields | changes))


def gpu(at_ns: int = AT_NS, **changes: Any) -> Gpu:
    fields: dict[str, Any] = {
        "gpu": 0,
        "uuid": "GPU-5b523540-75bc-7a9e-b860-fd04351f8eae",
        "name": "NVIDIA H200",
        "pci": "00000000:00:06.0",
        "window_ns": SECOND_NS,
        "state": "ok",
        "reason": "",
        "processes": [4711],
        "readings": 5,
        "sm_mhz": 1755.0,
        "sm_low_mhz": 1740,
        "sm_max_mhz": 1980,
        "memory_mhz": 3201,
        "memory_max_mhz": 3201,
        "clock_reasons": [GpuReason(reason="sw_power_cap", share=0.8)],
        "busy": 0.97,
        "memory_busy": 0.41,
        "power_w": 698.5,
        "power_limit_w": 700.0,
        "temperature_c": 71,
        "ecc_corrected": 2,
        "ecc_uncorrected": 1,
        "ecc_corrected_total": 12,
        "ecc_uncorrected_total": 1,
        "xids": [48],
        "pcie_generation": 5,
        "pcie_generation_max": 5,
        "pcie_width": 8,
        "pcie_width_max": 16,
        "pcie_replays": 3,
        "pcie_sent_bytes_per_s": 1_664_000,
        "pcie_received_bytes_per_s": 573_000,
        "links": [
            GpuLink(link=0, active=True, sent_bytes_per_s=10**9, received_bytes_per_s=2 * 10**9, errors=4),
            GpuLink(link=1, active=False, sent_bytes_per_s=None, received_bytes_per_s=None, errors=None),
        ],
        "failed": {"nvmlDeviceGetPcieReplayCounter": "Not Supported"},
    }
    return Gpu(**(_common(at_ns) | fields | changes))


def gpu_clock(at_ns: int = AT_NS, **changes: Any) -> GpuClock:
    fields: dict[str, Any] = {
        "uuid": "GPU-5b523540-75bc-7a9e-b860-fd04351f8eae",
        "epoch_ns": at_ns - 2 * SECOND_NS,
        "window_ns": 4 * SECOND_NS,
        "offset_ns": 1_795_728_870_893_896_165,
        "drift_ppb": 4641.8,
        "sigma_ns": 6.7,
        "drift_sigma_ppb": 0.7,
        "bound_ns": 129,
        "hard_bound_ns": 761,
        "wander_ppb_per_s": 20.0,
        "state": "synchronised",
        "round_trip_min_ns": 1548,
        "pings": 312,
        "stepped": False,
    }
    return GpuClock(**(_common(at_ns) | fields | changes))


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
        "programs": [ProgramCost(name="probe_egress", runs=1000, run_time_ns=52_000)],
        "drops": {"ring_full": 0, "bus_slow": 0},
        "failed": {},
    }
    return Self(**(_common(at_ns) | fields | changes))


def path_state(
    rail: int = 1, at_ns: int = AT_NS, state: str = "drained", wanted: int | None = 1, **changes: Any
) -> PathState:
    fields: dict[str, Any] = {
        "path": path(rail),
        "state": state,
        "since_ns": at_ns - 4 * SECOND_NS,
        "weight_wanted": wanted,
        "weight_actual": wanted,
        "reason": "queueing 41 ms > 5 ms for 60 ms",
        "under": "drain-congested",
    }
    return PathState(**(_common(at_ns) | fields | changes))


def hold_state(rail: int = 1, at_ns: int = AT_NS, **changes: Any) -> HoldState:
    fields: dict[str, Any] = {
        "path": path(rail),
        "threshold_ns": 1_000_000,
        "longest_ns": 20_000_000,
        "armed": True,
        "why_not": "",
        "queueing_ns": 1_400_000,
        "rate_bytes_per_s": 40_000_000,
        "held_packets": 900,
        "held_bytes": 1_300_000,
        "waited_ns": 240_000_000,
        "samples": 410,
        "samples_above": 60,
        "under": "short-queues",
    }
    return HoldState(**(_common(at_ns) | fields | changes))


def act(at_ns: int = AT_NS, number: int = 1, **changes: Any) -> Act:
    fields: dict[str, Any] = {
        "act_id": f"a{number}",
        "what": "nexthop group 102",
        "target": "overlay:main:10.9.0.2/32",
        "actuator": "overlay",
        "moves": "new flows",
        "before": {"11": 5, "12": 5},
        "after": {"11": 1, "12": 9},
        "because": "queueing 41 ms > 5 ms for 60 ms on rail1",
        "paths": [path(1)],
        "under": "drain-congested",
        "outcome": "applied",
        "seen_ns": at_ns - 3_000_000,
        "decided_ns": at_ns - 2_000_000,
        "acknowledged_ns": at_ns - 1_000_000,
    }
    return Act(**(_common(at_ns) | fields | changes))


def one_of_each(at_ns: int = AT_NS) -> list[AnySignal]:
    """One signal of every type there is."""
    return [
        path_delay(at_ns=at_ns),
        path_liveness(at_ns=at_ns),
        path_way(at_ns=at_ns),
        probe_samples(at_ns=at_ns),
        clock_edge(at_ns=at_ns),
        clock(at_ns=at_ns),
        collocation(at_ns=at_ns),
        app_delay(at_ns=at_ns),
        tcp_flow(at_ns=at_ns),
        tcp_path(at_ns=at_ns),
        tcp_host(at_ns=at_ns),
        tcp_namespace(at_ns=at_ns),
        packet_drops(at_ns=at_ns),
        link(at_ns=at_ns),
        link_event(at_ns=at_ns),
        path_mtu(at_ns=at_ns),
        path_ecn(at_ns=at_ns),
        rdma_port(at_ns=at_ns),
        rdma_qp(at_ns=at_ns),
        rdma_suspects(at_ns=at_ns),
        rdma_sight(at_ns=at_ns),
        job(at_ns=at_ns),
        gpu(at_ns=at_ns),
        gpu_clock(at_ns=at_ns),
        nexthop_group(at_ns=at_ns),
        self_cost(at_ns=at_ns),
        path_state(at_ns=at_ns),
        hold_state(at_ns=at_ns),
        act(at_ns=at_ns),
    ]
