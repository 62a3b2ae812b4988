"""The model as metrics: labels and values, made when somebody asks. Pure.

A gauge is given only while what it says was heard of lately; totals and histograms stay. Words of which there are few
(causes, states, verdicts) are all given, zero or not, so that a query always finds them.
"""

from __future__ import annotations

import itertools
import math
import typing
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from prometheus_client import Metric

from pytools import signals as sig
from pytools.figures import DIRECTIONS, MEASURES, Measure
from pytools.views.metrics.counting import CAUSES, EVENTS, MEMBERS, PORT_EVENTS, ROWS, Ways
from pytools.views.metrics.exposition import Exposition
from pytools.views.metrics.families import APP, FAMILIES, GPU, JOB, LINK, MEMBER, PATH, PORT, Family
from pytools.views.metrics.model import Model
from pytools.views.metrics.parts import BUCKETS, NAMES

Labels = Sequence[str]
_CLOCK_STATES: Final = typing.get_args(sig.ClockState)
_MTU_STATES: Final = ("agrees", "mismatch", "unknown")
_STEERING_STATES: Final = typing.get_args(sig.SteeringState)
_WAY_STATES: Final = typing.get_args(typing.get_type_hints(sig.PathWay)["state"])
_VERDICTS: Final = typing.get_args(sig.RdmaVerdict)
_JOB_VERDICTS: Final = typing.get_args(sig.JobVerdictWord)
_JOB_CAUSES: Final = typing.get_args(sig.JobCauseKind)
_COST_FRESH_NS: Final = 60_000_000_000  # of what the agent costs, which is looked at now and then
_APP_FIGURES: Final = ("p50", "p90", "p99", "max")
# What has a row in the model, by its labels, the longest first; and how many values each other label can have there.
_ROWS: Final = {
    APP: ROWS["app"],
    PATH: ROWS["path"],
    MEMBER: ROWS["group"] * MEMBERS,
    PORT: ROWS["port"],
    GPU: ROWS["gpu"],
    LINK: ROWS["interface"],
    JOB: ROWS["job"],
}
_VALUES: Final = {
    **{"direction": 2, "outcome": 2, "fate": 3, "priority": 1 + 8, "cause": len(CAUSES), "what": len(EVENTS)},
    "event": len(PORT_EVENTS),
    "verdict": len(_JOB_VERDICTS),
    "reason": len(_JOB_CAUSES),
    "clock_reason": len(sig.GPU_REASONS),
    "kind": 2,
    "state": 1 + len(_STEERING_STATES),  # a word that is not known comes besides
    "figure": max(len(_APP_FIGURES), *(len(each.exported) for each in MEASURES)),
}


def most(family: Family) -> int:
    """Series that a metric can have; of what has no row, as many as names are remembered."""
    row = next((labels for labels in _ROWS if family.labels[: len(labels)] == labels), None)
    if row is not None:
        count = _ROWS[row] * math.prod(_VALUES[each] for each in family.labels[len(row) :])
    else:
        count = NAMES if family.labels and family.kind != "info" else 1
    return count * (BUCKETS + 2 if family.kind == "histogram" else 1)


SERIES_LIMIT: Final = sum(map(most, FAMILIES.values()))


def expose(model: Model, now_ns: int, instance: str) -> Iterator[Metric]:
    """Everything that the model knows now.

    Parameters
    ----------
    instance : str
        The name of the agent's instance (`pytools.directories`).
    """
    out = Exposition()
    _ourselves(out, model, now_ns, instance)
    _cost(out, model, now_ns)
    for row in itertools.chain([model.of_host], *model.tables.values()):
        out.counted(row)
        for kind, signal in row.newest.items():
            gauges = _GAUGES.get(kind)
            if gauges is not None and model.is_fresh(signal.at_ns, now_ns, getattr(signal, "window_ns", 0)):
                gauges(out, row.labels, signal)
    _clocks(out, model, now_ns)
    if model.steering_heard_ns is not None:
        out.add("swerve_steering_up", (), float(model.is_fresh(model.steering_heard_ns, now_ns)))
    if model.is_up(now_ns):
        _queue_pairs(out, model, now_ns)
    return out.metrics()


def _ourselves(out: Exposition, model: Model, now_ns: int, instance: str) -> None:
    out.add("swerve_up", (), float(model.is_up(now_ns)))
    if model.host:
        out.info("swerve_agent_info", (model.host, instance))
        out.ns("swerve_last_signal_timestamp_seconds", (), model.heard_unix_ns)
    out.add("swerve_agent_connects_total", (), model.connects)
    out.add("swerve_metrics_signals_total", (), model.signals)
    out.add("swerve_metrics_signals_dropped_total", (), model.dropped)
    out.add("swerve_metrics_malformed_total", (), model.malformed)
    for kind, count in model.left_out.items():
        out.add("swerve_metrics_left_out_total", (kind,), count)
    out.add("swerve_metrics_refused_total", (), model.refused)
    out.add("swerve_metrics_accept_paused_total", (), model.paused)
    out.add("swerve_metrics_series_limit", (), SERIES_LIMIT)


def _cost(out: Exposition, model: Model, now_ns: int) -> None:
    cost, newest = model.cost, model.of_host.newest.get(sig.Self)
    if cost is not None and newest is not None and model.connected and now_ns - newest.at_ns <= _COST_FRESH_NS:
        out.add("swerve_agent_cpu_ratio", (), cost.cpu_share)
        out.add("swerve_agent_resident_memory_bytes", (), newest.resident_bytes)
        out.add("swerve_agent_probe_bytes_per_second", (), cost.probe_bytes_per_s)
        out.add("swerve_hooks_failed", (), len(newest.failed))
        for hook in sorted(newest.failed)[:NAMES]:
            out.add("swerve_hook_failed", (hook,), 1)


def _delay(out: Exposition, labels: Labels, delay: sig.PathDelay) -> None:
    for measure in MEASURES:
        if measure.of_direction:
            _measure(out, measure, delay, delay.forward, (*labels, DIRECTIONS[0]))
            _measure(out, measure, delay, delay.reverse, (*labels, DIRECTIONS[1]))
        else:
            _measure(out, measure, delay, None, labels)
    out.one_of("swerve_path_clock_state", labels, _CLOCK_STATES, delay.clock)


def _measure(out: Exposition, measure: Measure, delay: sig.PathDelay, way: sig.Delay | None, labels: Labels) -> None:
    scale = 1 if measure.unit == "share" else 1e9
    for part in measure.exported:
        value = measure.value(delay, way, part)
        own = (*labels, part) if len(measure.exported) > 1 else labels
        out.add(measure.family, own, None if value is None else value / scale)
    for name, (field, _) in measure.errors.items():
        out.ns(name, labels, getattr(way if measure.of_direction else delay, field))


def _liveness(out: Exposition, labels: Labels, alive: sig.PathLiveness) -> None:
    out.add("swerve_path_missed_probes", labels, alive.missed)
    out.ns("swerve_path_silent_seconds", labels, alive.silent_ns)


def _mtu(out: Exposition, labels: Labels, mtu: sig.PathMtu) -> None:
    out.add("swerve_path_mtu_bytes", (*labels, "interface"), mtu.interface_mtu_bytes)
    out.add("swerve_path_mtu_bytes", (*labels, "works"), mtu.works_bytes)
    out.one_of("swerve_path_mtu_state", labels, _MTU_STATES, mtu.state)


def _state(out: Exposition, labels: Labels, state: sig.PathState) -> None:
    out.one_of("swerve_path_steering_state", labels, _STEERING_STATES, state.state)
    out.add("swerve_path_steering_weight", (*labels, "wanted"), state.weight_wanted)
    out.add("swerve_path_steering_weight", (*labels, "actual"), state.weight_actual)


def _hold(out: Exposition, labels: Labels, hold: sig.HoldState) -> None:
    out.add("swerve_path_hold_armed", labels, float(hold.armed and not hold.why_not))
    out.ns("swerve_path_hold_queueing_seconds", labels, hold.queueing_ns)
    out.ns("swerve_path_hold_threshold_seconds", labels, hold.threshold_ns)
    out.add("swerve_path_hold_rate_bytes_per_second", labels, hold.rate_bytes_per_s)


def _ways(out: Exposition, labels: Labels, ways: Ways) -> None:
    states = Counter(way.state for way in ways.by_number.values())
    for state in _WAY_STATES:
        out.add("swerve_path_ways", (*labels, state), states[state])
    out.add("swerve_path_ways_confidence_ratio", labels, min(way.confidence for way in ways.by_number.values()))


def _app(out: Exposition, labels: Labels, delay: sig.AppDelay) -> None:
    for name, some in (("swerve_app_delay_seconds", delay.owd), ("swerve_app_queueing_delay_seconds", delay.queueing)):
        for figure in _APP_FIGURES:
            out.ns(name, (*labels, figure), getattr(some, f"{figure}_ns"))
    out.ns("swerve_app_delay_bound_seconds", labels, delay.bound_ns)


def _tcp(out: Exposition, labels: Labels, host: sig.TcpHost) -> None:
    out.add("swerve_tcp_connections", labels, host.flows)
    out.add("swerve_tcp_connections_limit", labels, host.capacity)


def _link(out: Exposition, labels: Labels, link: sig.Link) -> None:
    out.add("swerve_link_up", labels, float(link.up))
    out.add("swerve_link_carrier", labels, float(link.carrier))
    out.add("swerve_link_mtu_bytes", labels, link.mtu_bytes)
    if link.speed_mbps is not None:
        out.add("swerve_link_speed_bytes_per_second", labels, link.speed_mbps * 125_000)
    out.add("swerve_link_failed_neighbours", labels, len(link.failed_neighbours))
    root = next((queue for queue in link.qdiscs if queue.parent == "root"), None)
    if root is not None:
        out.add("swerve_link_queue_bytes", labels, root.backlog_bytes)
        out.add("swerve_link_queue_packets", labels, root.backlog_packets)


def _clocks(out: Exposition, model: Model, now_ns: int) -> None:
    known = [clock for clock in model.clocks.values() if model.is_fresh(clock.at_ns, now_ns)]
    if not known:
        return
    states = Counter(clock.state for clock in known)
    for state in _CLOCK_STATES:
        out.add("swerve_clocks", (state,), states[state])
    out.ns("swerve_clocks_bound_max_seconds", (), max((each.bound_ns for each in known if each.bound_ns is not None),
                                                      default=None))  # fmt: skip
    own = next((clock for clock in known if clock.of == model.host), None)
    if own is None:
        return
    out.one_of("swerve_clock_state", (), _CLOCK_STATES, own.state)
    out.ns("swerve_clock_offset_seconds", (), own.offset_ns)
    out.ns("swerve_clock_bound_seconds", (), own.bound_ns)
    out.ns("swerve_clock_hard_bound_seconds", (), own.hard_bound_ns)
    out.ns("swerve_clock_drift_ratio", (), own.drift_ppb)
    out.ns("swerve_clock_slew_ratio", (), own.slew_ppb)


def _group(out: Exposition, labels: Labels, group: sig.NexthopGroup) -> None:
    for member in group.members[:MEMBERS]:
        out.add("swerve_nexthop_weight", (*labels, member.interface, member.gateway), member.weight)


def _queue_pairs(out: Exposition, model: Model, now_ns: int) -> None:
    pairs = [row.newest[sig.RdmaQueuePair] for row in model.pairs]
    fresh = [pair for pair in pairs if model.is_fresh(pair.at_ns, now_ns, pair.window_ns)]
    verdicts = Counter(pair.verdict for pair in fresh)
    for verdict in _VERDICTS:
        out.add("swerve_rdma_queue_pairs", (verdict,), verdicts[verdict])
    out.add("swerve_rdma_outstanding_requests", (), sum(pair.outstanding for pair in fresh))
    out.add("swerve_rdma_outstanding_bytes", (), sum(pair.outstanding_bytes for pair in fresh))


def _sight(out: Exposition, labels: Labels, sight: sig.RdmaSight) -> None:
    out.add("swerve_rdma_available", labels, float(sight.available))
    out.add("swerve_rdma_tap_processes", labels, sight.tap_processes)


def _suspects(out: Exposition, labels: Labels, suspects: sig.RdmaSuspects) -> None:
    kinds = Counter(suspect.kind for suspect in suspects.suspects)
    for kind in ("host", "link"):
        out.add("swerve_rdma_suspects", (*labels, kind), kinds[kind])


def _port(out: Exposition, labels: Labels, port: sig.RdmaPort) -> None:
    out.add("swerve_rdma_port_active", labels, float(port.state == "active"))


def _job(out: Exposition, labels: Labels, job: sig.Job) -> None:
    if job.why is None:
        return
    out.one_of("swerve_job_verdict", labels, _JOB_VERDICTS, job.why.verdict)
    for kind in _JOB_CAUSES:
        first = next((each for each in job.why.causes if each.kind == kind), None)
        for name in ("share", "low", "high"):
            out.add("swerve_job_cause_ratio", (*labels, kind, name), 0.0 if first is None else getattr(first, name))
    if job.why.step is not None:
        out.ns("swerve_job_step_seconds", labels, job.why.step.duration_ns)
        out.add("swerve_job_step_slowdown_ratio", labels, job.why.step.slowdown)


def _gpu(out: Exposition, labels: Labels, gpu: sig.Gpu) -> None:
    out.add("swerve_gpu_up", labels, float(gpu.state == "ok"))
    shares = {each.reason: each.share for each in gpu.clock_reasons}
    if gpu.readings:
        for reason in sig.GPU_REASONS:
            out.add("swerve_gpu_clock_reason_ratio", (*labels, reason), shares.get(reason, 0.0))
    for name, value, unit in (
        ("sm_clock_hertz", gpu.sm_mhz, 1e6),
        ("sm_clock_max_hertz", gpu.sm_max_mhz, 1e6),
        ("busy_ratio", gpu.busy, 1),
        ("power_watts", gpu.power_w, 1),
        ("temperature_celsius", gpu.temperature_c, 1),
        ("pcie_lanes", gpu.pcie_width, 1),
        ("nvlinks_active", sum(each.active for each in gpu.links) if gpu.links else None, 1),
    ):
        if value is not None:
            out.add(f"swerve_gpu_{name}", labels, value * unit)


# What is given of the newest signal of a kind while it stands.
_GAUGES: Final[dict[Any, Callable[[Exposition, Labels, Any], None]]] = {
    sig.PathDelay: _delay,
    sig.PathLiveness: _liveness,
    sig.PathMtu: _mtu,
    sig.PathState: _state,
    sig.HoldState: _hold,
    sig.PathWay: _ways,
    sig.AppDelay: _app,
    sig.TcpHost: _tcp,
    sig.Link: _link,
    sig.NexthopGroup: _group,
    sig.RdmaSight: _sight,
    sig.RdmaSuspects: _suspects,
    sig.RdmaPort: _port,
    sig.Job: _job,
    sig.Gpu: _gpu,
}
