"""Every metric there is: its name, type, labels and meaning. In base units; docs/metrics.txt is made of it."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from pytools.figures import MEASURES

Kind = Literal["gauge", "counter", "histogram", "info"]


class Family(NamedTuple):
    """One metric; its labels in the order in which values are given."""

    kind: Kind
    labels: tuple[str, ...]
    help: str


PATH: Final = ("source", "destination", "address", "gateway", "interface")
_WAY: Final = (*PATH, "direction")
APP: Final = (*PATH, "protocol")
LINK: Final = ("interface",)
_PAUSE: Final = ("interface", "priority", "direction")
MEMBER: Final = ("group", "interface", "gateway")
PORT: Final = ("device", "port")
JOB: Final = ("job_name", "user")  # `job` is the scrape's own
NAMESPACE: Final = ("namespace",)
GPU: Final = ("gpu", "uuid")


def _measured() -> dict[str, Family]:
    """The gauges of the catalogue, each measure's errors behind it."""
    found = {}
    for each in MEASURES:
        labels = _WAY if each.of_direction else PATH
        found[each.family] = Family("gauge", (*labels, "figure") if len(each.exported) > 1 else labels, each.help)
        found |= {name: Family("gauge", labels, text) for name, (_, text) in each.errors.items()}
    return found


# What a person finds first in a list, they find first here: is it there, what does it cost, then paths, hosts, links.
FAMILIES: Final[dict[str, Family]] = {
    "swerve_up": Family("gauge", (), "1 while an agent is connected and speaks, else 0."),
    "swerve_agent_info": Family("info", ("host", "instance_name"), "The agent's host name and its instance."),
    "swerve_agent_connects_total": Family("counter", (), "Connections made to an agent."),
    "swerve_last_signal_timestamp_seconds": Family("gauge", (), "Unix time of the last message from the agent."),
    "swerve_metrics_signals_total": Family("counter", (), "Signals received by this process."),
    "swerve_metrics_signals_dropped_total": Family(
        "counter", (), "Signals that the agent dropped because this process was too slow."
    ),
    "swerve_metrics_malformed_total": Family(
        "counter", (), "Lines of the agent that are not signals, as of another version of swerve."
    ),
    "swerve_metrics_left_out_total": Family(
        "counter", ("kind",), "Signals about paths, interfaces and so on for which there was no room."
    ),
    "swerve_metrics_refused_total": Family("counter", (), "Scrapes refused because too many were under way."),
    "swerve_metrics_accept_paused_total": Family("counter", (), "Times that scrapes waited for a free descriptor."),
    "swerve_metrics_series_limit": Family("gauge", (), "Largest possible number of series of this process."),
    # ---- the agent ----
    "swerve_agent_cpu_ratio": Family("gauge", (), "CPU time of the agent, of one core."),
    "swerve_agent_resident_memory_bytes": Family("gauge", (), "Memory of the agent in RAM."),
    "swerve_agent_probe_bytes_per_second": Family("gauge", (), "Probes and answers on the wire, both directions."),
    "swerve_drops_total": Family("counter", ("counter",), "Losses while measuring, by the counters of `swerve self`."),
    "swerve_hooks_failed": Family("gauge", (), "Kernel hooks that are not attached."),
    "swerve_hook_failed": Family("gauge", ("hook",), "1: this kernel hook is not attached; `swerve self` says why."),
    "swerve_program_runs_total": Family("counter", ("program",), "Runs of a BPF program while run times were counted."),
    "swerve_program_run_time_seconds_total": Family("counter", ("program",), "Run time of these runs."),
    # ---- delays of paths ----
    "swerve_path_round_trip_seconds": Family(
        "histogram", PATH, "Forward plus reverse delay of each answered probe; needs no common clock."
    ),
    "swerve_path_queueing_delay_seconds": Family(
        "histogram", _WAY, "One-way delay above its recent minimum, of each answered probe."
    ),
    **_measured(),
    "swerve_path_clock_state": Family("gauge", (*PATH, "state"), "1 for the state of the clocks of the two ends."),
    "swerve_path_ways": Family(
        "gauge", (*PATH, "state"), "Ways behind the first hop, by state; the only way is unmeasured."
    ),
    "swerve_path_ways_confidence_ratio": Family("gauge", PATH, "How sure it is that these are all, of 1."),
    "swerve_app_delay_seconds": Family(
        "gauge", (*APP, "figure"), "One-way delay of application packets over the last window."
    ),
    "swerve_app_queueing_delay_seconds": Family(
        "gauge", (*APP, "figure"), "The same above the recent minimum of the path."
    ),
    "swerve_app_delay_bound_seconds": Family("gauge", APP, "The error of one-way delays of application packets."),
    "swerve_app_samples_total": Family(
        "counter", (*APP, "fate"), "Sampled application packets by what became of the sample."
    ),
    # ---- what becomes of packets on paths ----
    "swerve_path_probes_total": Family(
        "counter", (*PATH, "outcome"), "Probes answered or lost; those without a timestamp count as lost."
    ),
    "swerve_path_missed_probes": Family("gauge", PATH, "Probes in a row that were not answered in time."),
    "swerve_path_silent_seconds": Family("gauge", PATH, "Since the first of these was sent; 0 while the path answers."),
    "swerve_path_markable_packets_total": Family("counter", PATH, "Packets of the peer that arrived ECN-capable."),
    "swerve_path_marked_packets_total": Family("counter", PATH, "Of these, marked by a queue on the way back (CE)."),
    "swerve_path_mtu_bytes": Family("gauge", (*PATH, "figure"), "Packet sizes: of the interface, and what works."),
    "swerve_path_mtu_state": Family("gauge", (*PATH, "state"), "1 for whether packets of full size pass."),
    # ---- TCP ----
    "swerve_path_tcp_retransmitted_segments_total": Family("counter", (*PATH, "cause"), "Segments retransmitted."),
    "swerve_path_tcp_retransmitted_bytes_total": Family("counter", PATH, "Bytes retransmitted."),
    "swerve_path_tcp_spurious_segments_total": Family("counter", PATH, "Segments retransmitted needlessly."),
    "swerve_path_tcp_timeouts_total": Family("counter", PATH, "Retransmission timeouts that fired."),
    "swerve_path_tcp_segments_total": Family("counter", PATH, "Segments sent, retransmissions included."),
    "swerve_path_tcp_sent_bytes_total": Family("counter", PATH, "Bytes sent, retransmissions not included."),
    "swerve_path_tcp_delivered_segments_total": Family("counter", PATH, "Segments acknowledged."),
    "swerve_path_tcp_delivered_ce_segments_total": Family("counter", PATH, "Of these, acknowledged as marked (CE)."),
    "swerve_path_tcp_zero_windows_total": Family("counter", PATH, "Times that a receiver closed its window."),
    "swerve_path_tcp_resets_total": Family("counter", _WAY, "Resets, sent and received."),
    "swerve_tcp_retransmitted_segments_total": Family("counter", ("cause",), "Segments that the host retransmitted."),
    "swerve_tcp_retransmitted_bytes_total": Family("counter", (), "Bytes that the host retransmitted."),
    "swerve_tcp_spurious_segments_total": Family("counter", (), "Segments that the host retransmitted needlessly."),
    "swerve_tcp_timeouts_total": Family("counter", (), "Retransmission timeouts of the host."),
    "swerve_tcp_sent_bytes_total": Family("counter", (), "Bytes that the host sent."),
    "swerve_tcp_zero_windows_total": Family("counter", (), "Times that a receiver closed its window."),
    "swerve_tcp_resets_total": Family("counter", ("direction",), "Resets: sent, refused (nobody listens), received."),
    "swerve_tcp_connections": Family("gauge", (), "TCP connections in the table of the agent."),
    "swerve_tcp_connections_limit": Family("gauge", (), "Size of this table."),
    "swerve_tcp_connections_seen_total": Family("counter", (), "TCP connections seen."),
    "swerve_tcp_connections_evicted_total": Family("counter", (), "Of these, removed from the table for others."),
    "swerve_namespace_tcp_retransmitted_segments_total": Family(
        "counter", (*NAMESPACE, "cause"), "Segments that a pod or another network namespace retransmitted."
    ),
    "swerve_namespace_tcp_timeouts_total": Family("counter", NAMESPACE, "Its retransmission timeouts."),
    "swerve_namespace_tcp_segments_total": Family("counter", NAMESPACE, "Segments it sent, with retransmissions."),
    "swerve_namespace_tcp_sent_bytes_total": Family("counter", NAMESPACE, "Bytes it sent, without retransmissions."),
    "swerve_kernel_dropped_packets_total": Family(
        "counter", ("reason",), "Packets that this machine's kernel dropped, all network namespaces."
    ),
    # ---- links ----
    "swerve_link_up": Family("gauge", LINK, "1: the interface is administratively up."),
    "swerve_link_carrier": Family("gauge", LINK, "1: the interface has a carrier."),
    "swerve_link_carrier_changes_total": Family("counter", LINK, "Changes of the carrier."),
    "swerve_link_mtu_bytes": Family("gauge", LINK, "The largest IP packet of the interface."),
    "swerve_link_speed_bytes_per_second": Family("gauge", LINK, "Its speed, if the driver reports one."),
    "swerve_link_bytes_total": Family("counter", (*LINK, "direction"), "Bytes of the interface."),
    "swerve_link_packets_total": Family("counter", (*LINK, "direction"), "Packets of the interface."),
    "swerve_link_errors_total": Family("counter", (*LINK, "direction"), "Errors of the interface."),
    "swerve_link_drops_total": Family("counter", (*LINK, "direction"), "Drops of the interface, its queue excluded."),
    "swerve_link_queue_bytes": Family("gauge", LINK, "Waiting in the interface's root queue discipline."),
    "swerve_link_queue_packets": Family("gauge", LINK, "The same in packets."),
    "swerve_link_queue_drops_total": Family("counter", LINK, "Packets that this queue dropped."),
    "swerve_link_queue_overlimits_total": Family("counter", LINK, "Packets held back because of the rate."),
    "swerve_link_queue_requeues_total": Family("counter", LINK, "Packets that the driver returned to the queue."),
    "swerve_link_pause_frames_total": Family("counter", _PAUSE, "Pause frames of a priority, or of the whole link."),
    "swerve_link_paused_seconds_total": Family(
        "counter", _PAUSE, "How long pause frames stopped this host, or its peer."
    ),
    "swerve_link_failed_neighbours": Family("gauge", LINK, "Gateways and on-link peers that do not answer."),
    "swerve_link_events_total": Family("counter", (*LINK, "what"), "Events of the interface."),
    # ---- clocks ----
    "swerve_clock_state": Family("gauge", ("state",), "1 for the state of this host's clock."),
    "swerve_clock_offset_seconds": Family("gauge", (), "This host's clock minus the reference's."),
    "swerve_clock_bound_seconds": Family("gauge", (), "The error of the offset, either way."),
    "swerve_clock_hard_bound_seconds": Family("gauge", (), "The same with no assumption about symmetric paths."),
    "swerve_clock_drift_ratio": Family("gauge", (), "Seconds that this host's clock gains in a second."),
    "swerve_clock_slew_ratio": Family("gauge", (), "Of these, by its own time service."),
    "swerve_clocks": Family("gauge", ("state",), "Hosts by the state of their clocks, as this host sees them."),
    "swerve_clocks_bound_max_seconds": Family("gauge", (), "The largest error of the offset of any host."),
    # ---- steering ----
    "swerve_steering_up": Family("gauge", (), "1 while a controller speaks; absent where none ever has."),
    "swerve_path_steering_state": Family("gauge", (*PATH, "state"), "1 for the controller's state of the path."),
    "swerve_path_steering_weight": Family("gauge", (*PATH, "figure"), "Weights: wanted, and in the kernel."),
    "swerve_path_hold_armed": Family("gauge", PATH, "1: packets may be held here for this path; 0: not now."),
    "swerve_path_hold_queueing_seconds": Family("gauge", PATH, "Its newest queueing, by which packets are held."),
    "swerve_path_hold_threshold_seconds": Family("gauge", PATH, "The queueing above which they are."),
    "swerve_path_hold_rate_bytes_per_second": Family("gauge", PATH, "What leaves at most; absent if all does."),
    "swerve_path_held_packets_total": Family("counter", PATH, "Packets that were held."),
    "swerve_path_held_bytes_total": Family("counter", PATH, "Their bytes, with headers."),
    "swerve_path_held_seconds_total": Family("counter", PATH, "The sum of the times that their buffers were held for."),
    "swerve_path_hold_samples_total": Family("counter", PATH, "Samples of the queueing that were looked at."),
    "swerve_path_hold_samples_above_total": Family("counter", PATH, "Of these, above the threshold."),
    "swerve_acts_total": Family(
        "counter", ("actuator", "outcome"), "Acts and alerts; without --apply, acts that would have been made."
    ),
    "swerve_time_to_act_seconds": Family(
        "histogram", (), "From the measurement to the kernel's acknowledgement, of applied changes."
    ),
    "swerve_nexthop_weight": Family("gauge", MEMBER, "Weight of a member of a nexthop group in the kernel."),
    "swerve_nexthop_packets_total": Family("counter", MEMBER, "Packets that the kernel sent through it."),
    # ---- RDMA ----
    "swerve_rdma_available": Family("gauge", (), "1: this host has RDMA."),
    "swerve_rdma_queue_pairs": Family("gauge", ("verdict",), "Queue pairs by verdict."),
    "swerve_rdma_outstanding_requests": Family("gauge", (), "Work requests posted and not completed."),
    "swerve_rdma_outstanding_bytes": Family("gauge", (), "Bytes of these requests."),
    "swerve_rdma_requests_total": Family("counter", ("stage",), "Work requests posted and completed."),
    "swerve_rdma_bytes_total": Family("counter", ("stage",), "Bytes posted and completed."),
    "swerve_rdma_errors_total": Family("counter", ("status",), "Failed completions."),
    "swerve_rdma_refused_posts_total": Family("counter", (), "Posts that the provider refused."),
    "swerve_rdma_untracked_requests_total": Family("counter", (), "Requests neither timed nor counted as outstanding."),
    "swerve_rdma_suspects": Family("gauge", ("kind",), "Hosts and links that several queue pairs agree to be slow."),
    "swerve_rdma_tap_processes": Family("gauge", (), "Processes that run with the tap."),
    "swerve_rdma_port_active": Family("gauge", PORT, "1: the port's state is active."),
    "swerve_rdma_port_events_total": Family(
        "counter", (*PORT, "event"), "Congestion notifications, marks, losses and timeouts of the port."
    ),
    # ---- jobs ----
    "swerve_job_verdict": Family("gauge", (*JOB, "verdict"), "1 for why the job's steps take as long as they do."),
    "swerve_job_cause_ratio": Family(
        "gauge", (*JOB, "reason", "figure"), "Share of a step that a cause explains: estimate, low and high."
    ),
    "swerve_job_step_seconds": Family("gauge", JOB, "Median step, of jobs with NCCL's profiler plugin."),
    "swerve_job_step_slowdown_ratio": Family("gauge", JOB, "Time of a step divided by the usual."),
    # ---- GPUs ----
    "swerve_gpu_up": Family("gauge", GPU, "1: the GPU answers, else 0."),
    "swerve_gpu_sm_clock_hertz": Family("gauge", GPU, "SM clock, mean over the window."),
    "swerve_gpu_sm_clock_max_hertz": Family("gauge", GPU, "Highest SM clock of the GPU."),
    "swerve_gpu_clock_reason_ratio": Family(
        "gauge", (*GPU, "clock_reason"), "Share of the readings with this reason for the SM clock."
    ),
    "swerve_gpu_busy_ratio": Family("gauge", GPU, "Share of the time during which a kernel ran."),
    "swerve_gpu_power_watts": Family("gauge", GPU, "Power."),
    "swerve_gpu_temperature_celsius": Family("gauge", GPU, "Temperature."),
    "swerve_gpu_pcie_lanes": Family("gauge", GPU, "PCIe lanes in use."),
    "swerve_gpu_nvlinks_active": Family("gauge", GPU, "NVLinks that are up."),
    "swerve_gpu_ecc_errors_total": Family("counter", (*GPU, "kind"), "ECC errors, corrected and uncorrected."),
    "swerve_gpu_pcie_replays_total": Family("counter", GPU, "PCIe packets that were sent again."),
    "swerve_gpu_nvlink_errors_total": Family("counter", GPU, "NVLink replays, recoveries and CRC errors."),
    "swerve_gpu_xid_errors_total": Family("counter", GPU, "XID errors."),
}
