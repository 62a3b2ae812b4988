"""The model as metrics: labels and values, made when somebody asks. Pure.

A gauge is given only while what it says was heard of lately; totals and histograms stay. Words of which there are few
(causes, states, verdicts) are all given, zero or not, so that a query always finds them.
"""

from __future__ import annotations

import math
import typing
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from prometheus_client import Metric

from pytools.figures import DIRECTIONS, MEASURES, Measure
from pytools.signals import ClockState, Delay, LinkEvent, PathDelay, RdmaVerdict
from pytools.views.metrics.exposition import Exposition
from pytools.views.metrics.families import APP, FAMILIES, LINK, MEMBER, PATH, PORT, Family
from pytools.views.metrics.model import COST_FRESH_NS, GROUPS, INTERFACES, MEMBERS, NAMES, PATHS, PORTS, Model
from pytools.views.metrics.parts import BUCKETS
from pytools.views.metrics.rows import CAUSES, PORT_EVENTS, AppRow, LinkRow, PathRow, PortRow

_CLOCK_STATES: Final = typing.get_args(ClockState)
_MTU_STATES: Final = ("agrees", "mismatch", "unknown")
_STEERING_STATES: Final = ("healthy", "suspect", "drained", "returning", "unmeasured")
_VERDICTS: Final = typing.get_args(RdmaVerdict)
_EVENTS: Final = typing.get_args(typing.get_type_hints(LinkEvent)["what"])
_ACTS: Final = (
    *((each, how) for each in ("overlay", "pin", "label")
      for how in ("dry_run", "applied", "failed", "undone")),
    *((each, how) for each in ("alert", "operator") for how in ("alert", "alert_over")),
)  # fmt: skip
_APP_FIGURES: Final = ("p50", "p90", "p99", "max")
# What has a row in the model, by its labels, the longest first; and how many values each other label can have there.
_ROWS: Final = {APP: 2 * PATHS, PATH: PATHS, MEMBER: GROUPS * MEMBERS, PORT: PORTS, LINK: INTERFACES}
_VALUES: Final = {
    **{"direction": 2, "outcome": 2, "fate": 3, "priority": 1 + 8, "cause": len(CAUSES), "what": len(_EVENTS)},
    "event": len(PORT_EVENTS),
    "state": 1 + len(_STEERING_STATES),  # a word that is not known comes besides
    "figure": max(len(_APP_FIGURES), *(len(each.exported) for each in MEASURES)),
}


def most(family: Family) -> int:
    """Series that a metric can have; of what has no row, as many as names are remembered besides the usual ones."""
    row = next((labels for labels in _ROWS if family.labels[: len(labels)] == labels), None)
    if row is not None:
        count = _ROWS[row] * math.prod(_VALUES[each] for each in family.labels[len(row) :])
    else:
        count = NAMES + len(_ACTS) if family.labels and family.kind != "info" else 1
    return count * (BUCKETS + 2 if family.kind == "histogram" else 1)


SERIES_LIMIT: Final = sum(map(most, FAMILIES.values()))


def expose(model: Model, now_ns: int, instance: str) -> Iterator[Metric]:
    """Everything that the model knows now.

    Parameters
    ----------
    now_ns : int
        CLOCK_MONOTONIC.
    instance : str
        The name of the agent's instance (`pytools.directories`).
    """
    out = Exposition()
    _ourselves(out, model, now_ns, instance)
    _cost(out, model, now_ns)
    for path in model.paths:
        _path(out, model, path, now_ns)
    for app in model.apps:
        _app(out, model, app, now_ns)
    _tcp(out, model, now_ns)
    for link in model.links:
        _link(out, model, link, now_ns)
    _clocks(out, model, now_ns)
    _steering(out, model, now_ns)
    _rdma(out, model, now_ns)
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
    for kind, count in model.left_out().items():
        out.add("swerve_metrics_left_out_total", (kind,), count)
    out.add("swerve_metrics_refused_total", (), model.refused)
    out.add("swerve_metrics_accept_paused_total", (), model.paused)
    out.add("swerve_metrics_series_limit", (), SERIES_LIMIT)


def _cost(out: Exposition, model: Model, now_ns: int) -> None:
    cost, newest = model.cost, model.newest_cost
    if cost is not None and newest is not None and model.connected and now_ns - newest.at_ns <= COST_FRESH_NS:
        out.add("swerve_agent_cpu_ratio", (), cost.cpu_share)
        out.add("swerve_agent_resident_memory_bytes", (), newest.resident_bytes)
        out.add("swerve_agent_probe_bytes_per_second", (), cost.probe_bytes_per_s)
        out.add("swerve_hooks_failed", (), len(newest.failed))
        for hook in sorted(newest.failed)[:NAMES]:
            out.add("swerve_hook_failed", (hook,), 1)
    out.totals("swerve_drops_total", (), model.drops)
    out.totals("swerve_program_runs_total", (), model.program_runs)
    out.totals("swerve_program_run_time_seconds_total", (), model.program_times, 1e-9)


def _path(out: Exposition, model: Model, row: PathRow, now_ns: int) -> None:
    path = row.path
    labels = (path.source, path.destination, path.address, path.gateway, path.interface)
    if path.destination:  # else: what TCP does on an interface besides the paths
        _path_delay(out, model, row, labels, now_ns)
        _path_fate(out, model, row, labels, now_ns)
        _path_steering(out, model, row, labels, now_ns)
    if row.retransmitted is None:
        return
    for cause, segments in row.retransmitted.items():
        out.add("swerve_path_tcp_retransmitted_segments_total", (*labels, cause), segments)
    for name, counted in (
        ("retransmitted_bytes", "retransmitted_bytes"),
        ("spurious_segments", "spurious_segments"),
        ("timeouts", "timeouts"),
        ("segments", "segments_out"),
        ("sent_bytes", "sent_bytes"),
        ("delivered_segments", "delivered_segments"),
        ("delivered_ce_segments", "delivered_ce_segments"),
        ("zero_windows", "zero_windows"),
    ):
        out.add(f"swerve_path_tcp_{name}_total", labels, row.tcp[counted])
    for direction in ("sent", "received"):
        out.add("swerve_path_tcp_resets_total", (*labels, direction), row.tcp[f"resets_{direction}"])


def _path_delay(out: Exposition, model: Model, row: PathRow, labels: Sequence[str], now_ns: int) -> None:
    out.histogram("swerve_path_round_trip_seconds", labels, row.round_trips)
    for direction in DIRECTIONS:
        out.histogram("swerve_path_queueing_delay_seconds", (*labels, direction), row.queueing[direction])
    delay = row.delay
    if delay is None or not model.is_fresh(delay.at_ns, now_ns, delay.window_ns):
        return
    for measure in MEASURES:
        if measure.of_direction:
            _measure(out, measure, delay, delay.forward, (*labels, DIRECTIONS[0]))
            _measure(out, measure, delay, delay.reverse, (*labels, DIRECTIONS[1]))
        else:
            _measure(out, measure, delay, None, labels)
    out.one_of("swerve_path_clock_state", labels, _CLOCK_STATES, delay.clock)


def _measure(out: Exposition, measure: Measure, delay: PathDelay, way: Delay | None, labels: Sequence[str]) -> None:
    scale = 1 if measure.unit == "share" else 1e9
    for part in measure.exported:
        value = measure.value(delay, way, part)
        own = (*labels, part) if len(measure.exported) > 1 else labels
        out.add(measure.family, own, None if value is None else value / scale)
    for name, (field, _) in measure.errors.items():
        out.ns(name, labels, getattr(way if measure.of_direction else delay, field))


def _path_fate(out: Exposition, model: Model, row: PathRow, labels: Sequence[str], now_ns: int) -> None:
    out.add("swerve_path_probes_total", (*labels, "answered"), row.answered)
    out.add("swerve_path_probes_total", (*labels, "lost"), row.lost)
    for (kind,), total in row.marks.items():
        out.add(f"swerve_path_{kind}_packets_total", labels, total.value)
    alive = row.liveness
    if alive is not None and model.is_fresh(alive.at_ns, now_ns):
        out.add("swerve_path_missed_probes", labels, alive.missed)
        out.ns("swerve_path_silent_seconds", labels, alive.silent_ns)
    mtu = row.mtu
    if mtu is not None and model.is_fresh(mtu.at_ns, now_ns):
        out.add("swerve_path_mtu_bytes", (*labels, "interface"), mtu.interface_mtu_bytes)
        out.add("swerve_path_mtu_bytes", (*labels, "works"), mtu.works_bytes)
        out.one_of("swerve_path_mtu_state", labels, _MTU_STATES, mtu.state)


def _path_steering(out: Exposition, model: Model, row: PathRow, labels: Sequence[str], now_ns: int) -> None:
    state = row.state
    if state is None or not model.is_fresh(state.at_ns, now_ns):
        return
    out.one_of("swerve_path_steering_state", labels, _STEERING_STATES, state.state)
    out.add("swerve_path_steering_weight", (*labels, "wanted"), state.weight_wanted)
    out.add("swerve_path_steering_weight", (*labels, "actual"), state.weight_actual)


def _app(out: Exposition, model: Model, row: AppRow, now_ns: int) -> None:
    path, delay = row.path, row.delay
    labels = (path.source, path.destination, path.address, path.gateway, path.interface, row.protocol)
    for fate, count in row.samples.items():
        out.add("swerve_app_samples_total", (*labels, fate), count)
    if delay is None or not model.is_fresh(delay.at_ns, now_ns, delay.window_ns):
        return
    for name, some in (("swerve_app_delay_seconds", delay.owd), ("swerve_app_queueing_delay_seconds", delay.queueing)):
        for figure in _APP_FIGURES:
            out.ns(name, (*labels, figure), getattr(some, f"{figure}_ns"))
    out.ns("swerve_app_delay_bound_seconds", labels, delay.bound_ns)


def _tcp(out: Exposition, model: Model, now_ns: int) -> None:
    out.totals("swerve_kernel_dropped_packets_total", (), model.packet_drops)
    host = model.tcp
    if host is None:
        return
    for (what, *cause), total in model.tcp_totals.items():
        match what:
            case "retransmitted":
                out.add("swerve_tcp_retransmitted_segments_total", cause, total.value)
            case "resets_sent" | "resets_refused" | "resets_received":
                out.add("swerve_tcp_resets_total", (what.removeprefix("resets_"),), total.value)
            case "created":
                out.add("swerve_tcp_connections_seen_total", (), total.value)
            case "evicted":
                out.add("swerve_tcp_connections_evicted_total", (), total.value)
            case _:
                out.add(f"swerve_tcp_{what}_total", (), total.value)
    if model.is_fresh(host.at_ns, now_ns, host.window_ns):
        out.add("swerve_tcp_connections", (), host.flows)
        out.add("swerve_tcp_connections_limit", (), host.capacity)


def _link(out: Exposition, model: Model, row: LinkRow, now_ns: int) -> None:
    labels = (row.interface,)
    for (what, *direction), total in row.counters.items():
        out.add(f"swerve_link_{what}_total", (*labels, *direction), total.value)
    for (what,), total in row.queue.items():
        out.add(f"swerve_link_queue_{what}_total", labels, total.value)
    out.totals("swerve_link_pause_frames_total", labels, row.pause_frames)
    out.totals("swerve_link_paused_seconds_total", labels, row.paused_us, 1e-6)
    for what in _EVENTS:
        out.add("swerve_link_events_total", (*labels, what), row.events.get(what, (0, 0))[0])
    link = row.link
    if link is None or not model.is_fresh(link.at_ns, now_ns, link.window_ns):
        return
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


def _steering(out: Exposition, model: Model, now_ns: int) -> None:
    if model.steering_heard_ns is not None:
        out.add("swerve_steering_up", (), float(model.is_fresh(model.steering_heard_ns, now_ns)))
    for act in dict.fromkeys((*_ACTS, *model.acts)):
        out.add("swerve_acts_total", act, model.acts[act])
    out.histogram("swerve_time_to_act_seconds", (), model.time_to_act)
    for row in model.groups:
        out.totals("swerve_nexthop_packets_total", (str(row.group_id),), row.packets)
        if row.group is not None and model.is_fresh(row.group.at_ns, now_ns):
            for member in row.group.members[:MEMBERS]:
                labels = (str(row.group_id), member.interface, member.gateway)
                out.add("swerve_nexthop_weight", labels, member.weight)


def _rdma(out: Exposition, model: Model, now_ns: int) -> None:
    if model.is_up(now_ns):
        pairs = [row.pair for row in model.pairs if row.pair is not None]
        fresh = [pair for pair in pairs if model.is_fresh(pair.at_ns, now_ns, pair.window_ns)]
        verdicts = Counter(pair.verdict for pair in fresh)
        for verdict in _VERDICTS:
            out.add("swerve_rdma_queue_pairs", (verdict,), verdicts[verdict])
        out.add("swerve_rdma_outstanding_requests", (), sum(pair.outstanding for pair in fresh))
        out.add("swerve_rdma_outstanding_bytes", (), sum(pair.outstanding_bytes for pair in fresh))
    sums = model.pair_sums
    for stage in ("posted", "completed"):
        out.add("swerve_rdma_requests_total", (stage,), sums[stage])
        out.add("swerve_rdma_bytes_total", (stage,), sums[f"{stage}_bytes"])
    for status, count in model.pair_errors.items():
        out.add("swerve_rdma_errors_total", (status,), count)
    out.add("swerve_rdma_refused_posts_total", (), sums["refused_posts"])
    out.add("swerve_rdma_untracked_requests_total", (), sums["untracked"])
    if model.sight is not None and model.is_fresh(model.sight.at_ns, now_ns):
        out.add("swerve_rdma_available", (), float(model.sight.available))
        out.add("swerve_rdma_tap_processes", (), model.sight.tap_processes)
    suspects = model.suspects
    if suspects is not None and model.is_fresh(suspects.at_ns, now_ns):
        kinds = Counter(suspect.kind for suspect in suspects.suspects)
        for kind in ("host", "link"):
            out.add("swerve_rdma_suspects", (kind,), kinds[kind])
    for row in model.ports:
        _port(out, model, row, now_ns)


def _port(out: Exposition, model: Model, row: PortRow, now_ns: int) -> None:
    device, number = row.key
    labels = (device, str(number))
    out.totals("swerve_rdma_port_events_total", labels, row.events)
    if row.port is not None and model.is_fresh(row.port.at_ns, now_ns, row.port.window_ns):
        out.add("swerve_rdma_port_active", labels, float(row.port.state == "active"))
