"""What metrics are made of: known signals in, exact series out; bounded; totals that never go back."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
import reference
import samples
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from prometheus_client.utils import floatToGoString
from support import ROOT

from pytools.signals import (
    DELAY_BOUNDS_NS,
    AnySignal,
    Delay,
    DropReason,
    GroupMember,
    Histogram,
    Owner,
    Pause,
    ProbeSamples,
    ProgramCost,
    Retransmissions,
)
from pytools.signals import Path as NetworkPath
from pytools.views.metrics.counting import ROWS, WAYS
from pytools.views.metrics.families import FAMILIES
from pytools.views.metrics.model import FORGOTTEN_NS, Model
from pytools.views.metrics.parts import Histogram as Buckets
from pytools.views.metrics.parts import Total
from pytools.views.metrics.series import SERIES_LIMIT, expose, most
from pytools.views.model import SCRAPED_SILENT_NS

AT_NS, SECOND_NS, MS = samples.AT_NS, samples.SECOND_NS, 1_000_000
JOB = {"job_name": "slurm:4711.0/torchrun:n1:29500", "user": "1000"}
PATH = {"source": "h1", "destination": "h2", "address": "10.9.0.2", "gateway": "10.1.1.1", "interface": "rail1"}

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Fixed:
    """A collector of what was exposed once."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self.metrics = list(metrics)

    def collect(self) -> Iterable[Metric]:
        return self.metrics


def texts(model: Model, now_ns: int = AT_NS) -> tuple[str, str]:
    """The exposition as OpenMetrics and as Prometheus text."""
    registry = CollectorRegistry()
    registry.register(Fixed(expose(model, now_ns, "swerve-t-h1")))  # type: ignore[arg-type]
    return generate_openmetrics(registry).decode(), generate_latest(registry).decode()


def series(model: Model, now_ns: int = AT_NS) -> Series:
    """Every series of the exposition, as a parser of OpenMetrics reads it."""
    found: Series = {}
    for family in parse_openmetrics(texts(model, now_ns)[0]):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found
            found[key] = sample.value
    return found


def unwritten(model: Model, now_ns: int = AT_NS) -> Series:
    """Every series, without writing and reading the exposition: there are many."""
    samples_of = (sample for metric in expose(model, now_ns, "") for sample in metric.samples)
    return {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples_of}


def value(found: Series, name: str, labels: Mapping[str, str] | None = None, **more: str) -> float | None:
    return found.get((name, frozenset({**(labels or {}), **more}.items())))


def known(*signals: AnySignal) -> Model:
    model = Model()
    model.connect(AT_NS, same_agent=False)
    model.take(signals)
    return model


# ---- totals and histograms ----


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1000))))
def test_a_total_is_what_was_counted_by_all_agents_and_never_goes_back(growth: list[tuple[int, int]]) -> None:
    total, counted, reading, epoch = Total(), 0, 0, 1
    for restart, more in growth:
        if restart == 0:  # another agent: it counts from zero, and may soon be beyond where the last one was
            epoch, reading = epoch + 1, 0
        reading += more
        counted += more
        before = total.value
        total.take(reading, epoch)
        assert total.value == counted >= before


def test_a_reading_that_is_smaller_began_anew() -> None:
    total = Total()
    for reading, expected in ((10, 10), (10, 10), (4, 14), (5, 15)):
        total.take(reading)
        assert total.value == expected


@given(st.lists(st.integers(0, 3 * DELAY_BOUNDS_NS[-1])))
def test_buckets_hold_what_is_no_larger_than_their_bound(delays: list[int]) -> None:
    histogram = Buckets()
    for each in delays:
        histogram.observe(each)
    rows = histogram.cumulative()
    assert [count for _, count in rows[:-1]] == [sum(each <= bound for each in delays) for bound in DELAY_BOUNDS_NS]
    assert rows[-1] == ("+Inf", len(delays))
    assert [le for le, _ in rows[:-1]] == [floatToGoString(bound / 1e9) for bound in DELAY_BOUNDS_NS]
    assert histogram.sum_ns == sum(delays)


# ---- one signal of every type ----


def test_one_of_each_gives_the_values_it_has() -> None:
    found = series(known(*samples.one_of_each()))
    for name, labels, expected in (
        ("swerve_up", {}, 1),
        ("swerve_agent_info", {"host": "h1", "instance_name": "swerve-t-h1"}, 1),
        ("swerve_agent_cpu_ratio", {}, 0.031),
        ("swerve_agent_resident_memory_bytes", {}, 41 << 20),
        ("swerve_program_runs_total", {"program": "probe_egress"}, 1000),
        ("swerve_program_run_time_seconds_total", {"program": "probe_egress"}, 52e-6),
        ("swerve_drops_total", {"counter": "ring_full"}, 0),
        ("swerve_path_one_way_delay_seconds", {**PATH, "direction": "forward", "figure": "p99"}, 8.4e-6),
        ("swerve_path_one_way_delay_bound_seconds", {**PATH, "direction": "reverse"}, 450e-9),
        ("swerve_path_one_way_delay_hard_bound_seconds", {**PATH, "direction": "reverse"}, 1.9e-6),
        ("swerve_path_queueing_delay_window_seconds", {**PATH, "direction": "forward", "figure": "p50"}, 400e-9),
        ("swerve_path_queueing_delay_bound_seconds", {**PATH, "direction": "forward"}, 200e-9),
        ("swerve_path_round_trip_min_seconds", PATH, 3.8e-6),
        ("swerve_path_loss_ratio", PATH, 0),
        ("swerve_path_clock_state", {**PATH, "state": "synchronised"}, 1),
        ("swerve_path_clock_state", {**PATH, "state": "free_running"}, 0),
        ("swerve_path_missed_probes", PATH, 0),
        ("swerve_path_probes_total", {**PATH, "outcome": "answered"}, 1),
        ("swerve_path_probes_total", {**PATH, "outcome": "lost"}, 1),
        ("swerve_path_markable_packets_total", PATH, 100_000),
        ("swerve_path_marked_packets_total", PATH, 400),
        ("swerve_path_mtu_bytes", {**PATH, "figure": "works"}, 1500),
        ("swerve_path_mtu_state", {**PATH, "state": "mismatch"}, 1),
        ("swerve_path_ways", {**PATH, "state": "slow"}, 1),
        ("swerve_path_ways", {**PATH, "state": "dead"}, 0),
        ("swerve_path_ways_confidence_ratio", PATH, 0.992),
        ("swerve_path_tcp_retransmitted_segments_total", {**PATH, "cause": "fast"}, 2),
        ("swerve_path_tcp_retransmitted_segments_total", {**PATH, "cause": "timeout"}, 1),
        ("swerve_path_tcp_segments_total", PATH, 10_000),
        ("swerve_path_tcp_delivered_ce_segments_total", PATH, 99),
        ("swerve_path_tcp_resets_total", {**PATH, "direction": "sent"}, 0),
        ("swerve_tcp_retransmitted_segments_total", {"cause": "fast"}, 29),
        ("swerve_tcp_retransmitted_bytes_total", {}, 43_440),
        ("swerve_tcp_timeouts_total", {}, 1),
        ("swerve_tcp_resets_total", {"direction": "refused"}, 1),
        ("swerve_tcp_connections", {}, 40),
        ("swerve_tcp_connections_seen_total", {}, 60),
        ("swerve_kernel_dropped_packets_total", {"reason": "QDISC_DROP"}, 120),
        ("swerve_link_carrier", {"interface": "rail1"}, 1),
        ("swerve_link_speed_bytes_per_second", {"interface": "rail1"}, 12.5e9),
        ("swerve_link_bytes_total", {"interface": "rail1", "direction": "sent"}, 12_500_000),
        ("swerve_link_carrier_changes_total", {"interface": "rail1"}, 1),
        ("swerve_link_queue_bytes", {"interface": "rail1"}, 60_000),
        ("swerve_link_queue_drops_total", {"interface": "rail1"}, 120),
        (
            "swerve_link_pause_frames_total",
            {"interface": "rail1", "priority": "3", "direction": "received"},
            17,
        ),
        (
            "swerve_link_paused_seconds_total",
            {"interface": "rail1", "priority": "3", "direction": "received"},
            250e-6,
        ),
        ("swerve_link_events_total", {"interface": "rail1", "what": "carrier_lost"}, 1),
        ("swerve_link_events_total", {"interface": "rail1", "what": "flap"}, 0),
        ("swerve_clock_state", {"state": "synchronised"}, 1),
        ("swerve_clock_offset_seconds", {}, 0.312456789),
        ("swerve_clock_bound_seconds", {}, 430e-9),
        ("swerve_clock_drift_ratio", {}, -12_345.6e-9),
        ("swerve_clocks", {"state": "synchronised"}, 1),
        ("swerve_steering_up", {}, 1),
        ("swerve_path_steering_state", {**PATH, "state": "drained"}, 1),
        ("swerve_path_steering_state", {**PATH, "state": "healthy"}, 0),
        ("swerve_path_steering_weight", {**PATH, "figure": "wanted"}, 1),
        ("swerve_acts_total", {"actuator": "overlay", "outcome": "applied"}, 1),
        ("swerve_acts_total", {"actuator": "overlay", "outcome": "failed"}, 0),
        ("swerve_time_to_act_seconds_bucket", {"le": "0.001"}, 0),
        ("swerve_time_to_act_seconds_bucket", {"le": "0.002"}, 1),
        ("swerve_nexthop_weight", {"group": "102", "interface": "rail2", "gateway": "10.2.1.1"}, 9),
        ("swerve_nexthop_packets_total", {"group": "102", "interface": "rail2", "gateway": "10.2.1.1"}, 900),
        ("swerve_rdma_available", {}, 1),
        ("swerve_rdma_queue_pairs", {"verdict": "ok"}, 1),
        ("swerve_rdma_queue_pairs", {"verdict": "dead"}, 0),
        ("swerve_rdma_requests_total", {"stage": "completed"}, 4_900),
        ("swerve_rdma_outstanding_bytes", {}, 100 << 16),
        ("swerve_rdma_suspects", {"kind": "host"}, 1),
        ("swerve_job_verdict", {**JOB, "verdict": "network"}, 1),
        ("swerve_job_verdict", {**JOB, "verdict": "healthy"}, 0),
        ("swerve_job_cause_ratio", {**JOB, "reason": "network", "figure": "low"}, 0.5),
        ("swerve_job_cause_ratio", {**JOB, "reason": "gpu", "figure": "share"}, 0),
        ("swerve_job_step_seconds", JOB, 0.031),
        ("swerve_job_step_slowdown_ratio", JOB, 1.4),
        ("swerve_rdma_port_active", {"device": "rxe0", "port": "1"}, 1),
        ("swerve_rdma_port_events_total", {"device": "rxe0", "port": "1", "event": "out_of_sequence"}, 4),
        ("swerve_app_delay_seconds", {**PATH, "protocol": "tcp", "figure": "p90"}, 31e-6),
        ("swerve_app_samples_total", {**PATH, "protocol": "tcp", "fate": "joined"}, 196),
    ):
        assert value(found, name, labels) == pytest.approx(expected), (name, labels)
    assert value(found, "swerve_rdma_port_events_total", device="rxe0", port="1", event="cnp_sent") is None
    assert value(found, "swerve_clock_slew_ratio") is None


def test_every_family_is_used_and_no_series_is_of_another() -> None:
    cost = samples.self_cost(failed={"probe_egress on rail1": "no"})
    pair = samples.rdma_qp(errors={"retry_exc_err": 2}, number=19)
    delay = samples.path_delay(asymmetry_ns=-5, asymmetry_bound_ns=7)
    slewed = samples.clock(slew_ppb=3.0)
    model = known(*samples.one_of_each(), cost, pair, delay, slewed)
    openmetrics, text = texts(model)
    exposed = set(re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE))
    assert exposed == set(FAMILIES)
    assert {family.name for family in parse_openmetrics(openmetrics)} == {
        name.removesuffix("_info").removesuffix("_total") for name in FAMILIES
    }


def test_both_formats_say_the_same() -> None:
    openmetrics, text = texts(known(*samples.one_of_each()))
    assert openmetrics.endswith("# EOF\n")

    def read(families: Iterable[Any]) -> set[tuple[str, frozenset[tuple[str, str]], float]]:
        return {(s.name, frozenset(s.labels.items()), s.value) for family in families for s in family.samples}

    assert read(parse_openmetrics(openmetrics)) == read(parse_text(text))


def test_names_labels_and_units_are_as_prometheus_wants_them() -> None:
    for name, family in FAMILIES.items():
        assert re.fullmatch(r"swerve(_[a-z]+)+", name), name
        assert name.endswith("_total") == (family.kind == "counter"), name
        assert not re.search(r"_(ns|us|ms|ppb|mbps|bits|percent|count|sum|bucket|created)(_|$)", name), name
        assert family.kind != "histogram" or name.endswith("_seconds"), name
        assert family.help.endswith(".") and "\n" not in family.help, name
        assert not {"le", "quantile", "instance", "job", "port_number"} & set(family.labels), name


@given(st.text(min_size=1), st.text())
@settings(max_examples=50)
def test_any_name_survives(host: str, gateway: str) -> None:
    path = NetworkPath(host, host, "::1", gateway, "rail1")
    model = known(samples.path_delay(path=path))
    openmetrics, text = texts(model)
    for parse, exposition in ((parse_openmetrics, openmetrics), (parse_text, text)):
        found = [s for family in parse(exposition) for s in family.samples if s.name == "swerve_path_loss_ratio"]
        assert [(s.labels["source"], s.labels["gateway"]) for s in found] == [(host, gateway)]


def test_the_published_list_is_that_of_the_exporter() -> None:
    made = reference.metrics()
    assert (ROOT / "docs" / "metrics.txt").read_text() == made, "python scripts/reference.py"
    listed = {
        name: (kind, labels) for name, kind, labels in re.findall(r"^(swerve_\w+) (\w+)(?: {(.*)})?$", made, re.M)
    }
    assert listed.keys() == FAMILIES.keys()
    for name, family in FAMILIES.items():
        assert listed[name] == (family.kind, ", ".join(family.labels).replace(", ".join(PATH), "PATH")), name
        by_name = {"total": "counter", "info": "info"}.get(name.rpartition("_")[2], "gauge")
        assert family.kind == ("histogram" if (family.kind, by_name) == ("histogram", "gauge") else by_name), name
        assert family.help.endswith("."), name


def test_every_metric_that_a_page_names_is_there() -> None:
    for page in (ROOT / "docs").glob("*.md"):
        named = set(re.findall(r"`(swerve_[a-z_]*[a-z])`", page.read_text()))
        assert named <= FAMILIES.keys(), page.name


# ---- delays ----


def probes(forward: list[int | None], reverse: list[int | None]) -> ProbeSamples:
    times = {"seq": list(range(len(forward))), "sent_ns": [AT_NS] * len(forward)}
    return samples.probe_samples(forward_ns=forward, reverse_ns=reverse, **times)


def test_each_answered_probe_is_in_the_histogram_of_round_trips_once() -> None:
    # The peer's clock is a second ahead: one way is long, the other negative, their sum is the round trip.
    ahead = 1_000 * MS
    forward = [ahead + 2_000, ahead + 30_000, None, ahead + 5_000, ahead, None]
    reverse = [3_000 - ahead, 20_000 - ahead, None, None, -ahead - 1, 7_000]
    found = series(known(probes(forward, reverse)))
    assert value(found, "swerve_path_probes_total", PATH, outcome="answered") == 5
    assert value(found, "swerve_path_probes_total", PATH, outcome="lost") == 1
    assert value(found, "swerve_path_round_trip_seconds_count", PATH) == 2
    assert value(found, "swerve_path_round_trip_seconds_sum", PATH) == pytest.approx(55e-6)
    by_bound = {le: value(found, "swerve_path_round_trip_seconds_bucket", PATH, le=le) for le in ("2e-06", "5e-06")}
    assert by_bound == {"2e-06": 0, "5e-06": 1}
    assert value(found, "swerve_path_round_trip_seconds_bucket", PATH, le="5e-05") == 2
    assert value(found, "swerve_metrics_left_out_total", kind="round_trip") == 1


def window(length_ms: int, at_ms: int, queueing_us: int, counts: Sequence[int] = ()) -> AnySignal:
    counted = Histogram([*counts], sum(counts) * queueing_us * 1000) if counts else None
    delay = Delay(samples=1, queueing_p50_ns=queueing_us * 1000, queueing_histogram=counted)
    return samples.path_delay(
        at_ns=AT_NS + at_ms * MS, window_ns=length_ms * MS, forward=delay, reverse=Delay(samples=0)
    )


def test_histograms_of_windows_add_up() -> None:
    many = [0] * len(DELAY_BOUNDS_NS)
    long = [window(1000, 1000 * n, 70_000, counts) for n, counts in enumerate(([1, 2], [0, 3, 0, 4], [*many, 5, 6]))]
    model = known(*long, window(80, 2080, 90_000))
    found = series(model, AT_NS + 2100 * MS)
    assert value(found, "swerve_path_queueing_delay_seconds_count", PATH, direction="forward") == 21
    assert value(found, "swerve_path_queueing_delay_seconds_count", PATH, direction="reverse") == 0
    assert value(found, "swerve_path_queueing_delay_seconds_sum", PATH, direction="forward") == pytest.approx(21 * 0.07)
    below = {
        le: value(found, "swerve_path_queueing_delay_seconds_bucket", PATH, direction="forward", le=le)
        for le in ("1e-06", "2e-06", "5e-06", "1e-05", "1.0", "+Inf")
    }
    assert below == {"1e-06": 1, "2e-06": 6, "5e-06": 6, "1e-05": 10, "1.0": 10, "+Inf": 21}
    # What is shown is of the long window, also after short ones that are newer.
    labels = {**PATH, "direction": "forward", "figure": "p50"}
    assert value(found, "swerve_path_queueing_delay_window_seconds", labels) == 0.07


def test_what_is_not_known_has_no_series() -> None:
    nothing = Delay(samples=0)
    found = series(known(samples.path_delay(forward=nothing, reverse=nothing, clock="free_running", received=0)))
    assert not [name for name, _ in found if name.startswith(("swerve_path_one_way", "swerve_path_queueing_delay_w"))]
    assert value(found, "swerve_path_loss_ratio", PATH) is None
    assert value(found, "swerve_path_clock_state", PATH, state="free_running") == 1


# ---- bounded ----


def test_ten_thousand_flows_make_no_series() -> None:
    few = known(samples.tcp_flow(), samples.app_delay(local_port=1), samples.app_delay(), samples.rdma_qp())
    many = known(
        *(samples.tcp_flow(local_port=port, segments=port) for port in range(10_000)),
        *(samples.app_delay(local_port=port) for port in range(1, 10_001)),
        samples.app_delay(),
        *(samples.rdma_qp(number=number, owner=Owner(pid=number)) for number in range(10_000)),
    )
    assert set(series(few)) == set(series(many))
    sampled = {**PATH, "protocol": "tcp", "fate": "joined"}
    assert value(series(many), "swerve_app_samples_total", sampled) == 196  # of the path, not of each flow again
    assert value(series(many), "swerve_rdma_queue_pairs", verdict="ok") == 10_000
    assert value(series(many), "swerve_rdma_requests_total", stage="posted") == 10_000 * 5_000


MANY = 1_500


def flood() -> Iterable[AnySignal]:
    """More of everything that has a row than there is room for."""
    for number in range(MANY):
        path = NetworkPath("h1", f"h{number}", f"10.0.{number // 256}.{number % 256}", "10.1.1.1", "rail1")
        yield samples.path_delay(path=path, asymmetry_ns=1, asymmetry_bound_ns=1)
        yield samples.path_liveness(path=path)
        yield samples.path_mtu(path=path)
        yield samples.path_way(path=path)
        yield samples.path_ecn(path=path)
        yield samples.tcp_path(path=path)
        yield replace(samples.path_state(), path=path)
        yield samples.hold_state(path=path)
        for protocol in ("tcp", "udp"):
            yield samples.app_delay(path=path, protocol=protocol)
        yield samples.link(interface=f"if{number}", pauses=[Pause(each, 1, 1, 1, 1) for each in (None, *range(8))])
        members = [GroupMember(nexthop_id=n, gateway=f"g{n}", interface="x", weight=1, packets=1) for n in range(40)]
        yield replace(samples.nexthop_group(), group_id=number, members=members)
        yield samples.rdma_port(device=f"mlx5_{number}", cnp_received=1, cnp_sent=1, ecn_marked=1)
        yield samples.rdma_qp(number=number, errors={f"status{number}": 1})
        yield samples.act(actuator=f"a{number}")
        yield samples.job(job=f"job{number}")
        yield samples.clock(of=f"h{number}")
    names = [f"n{number}" for number in range(MANY)]
    yield samples.packet_drops(reasons=[DropReason(reason=name, window_packets=1, total_packets=1) for name in names])
    yield samples.self_cost(
        drops=dict.fromkeys(names, 1),
        failed=dict.fromkeys(names, "no"),
        programs=[ProgramCost(name=name, runs=1, run_time_ns=1) for name in names],
    )
    yield from samples.one_of_each()


def test_the_number_of_series_has_a_limit_and_what_is_left_out_is_counted() -> None:
    model = known(*flood())
    found = unwritten(model)
    of_name = Counter(name for name, _ in found)
    assert value(found, "swerve_metrics_series_limit") == SERIES_LIMIT
    assert 0.85 * SERIES_LIMIT < len(found) <= SERIES_LIMIT
    for name, family in FAMILIES.items():
        ends = {f"{name}{end}" for end in (("_bucket", "_count", "_sum") if family.kind == "histogram" else ("",))}
        assert sum(of_name[each] for each in ends) <= most(family), name
    left = {kind: value(found, "swerve_metrics_left_out_total", kind=kind) for kind in ("path", "interface", "port")}
    # Of each path come eight signals, of each interface and port one. Of one_of_each: nine of a path, its probes too,
    # rail1 and its event, and a port, for which there is no room either.
    assert left == {
        "path": 8 * (MANY - ROWS["path"]) + 9,
        "interface": MANY - ROWS["interface"] + 2,
        "port": MANY - ROWS["port"] + 1,
    }
    assert len({labels for name, labels in found if name == "swerve_path_loss_ratio"}) == ROWS["path"]


def test_ways_are_counted_by_what_was_last_told_of_each_up_to_a_limit() -> None:
    def told(number: int, state: str, at_s: int = 0) -> AnySignal:
        return samples.path_way(way=number, state=state, at_ns=AT_NS + at_s * SECOND_NS, confidence=1 - number / 1000)

    def counted(model: Model, at_s: int = 0) -> list[float | None]:
        found = series(model, AT_NS + at_s * SECOND_NS)
        names = ("healthy", "slow", "lossy", "dead", "unmeasured")
        return [value(found, "swerve_path_ways", PATH, state=state) for state in names]

    model = known(told(1, "healthy"), told(2, "healthy"), told(3, "dead"), told(2, "slow"))
    assert counted(model) == [1, 1, 0, 1, 0]
    assert value(series(model), "swerve_path_ways_confidence_ratio", PATH) == 0.997
    model.take([told(1, "healthy", 16)])
    assert counted(model, 16) == [1, 0, 0, 0, 0], "the others are no ways any more"
    assert counted(model, 32) == [None] * 5
    model.take([told(2, "slow", 16), samples.path_way(way=1, ways=1, at_ns=AT_NS + 16 * SECOND_NS, state="unmeasured")])
    assert counted(model, 16) == [0, 0, 0, 0, 1], "after another search"
    many = known(*(told(number, "lossy") for number in range(100)))
    assert counted(many) == [0, 0, WAYS, 0, 0]
    assert value(series(many), "swerve_metrics_left_out_total", kind="way") == 100 - WAYS


def test_there_is_room_again_after_an_hour() -> None:
    model = known(*flood())
    later = AT_NS + FORGOTTEN_NS + SECOND_NS
    model.take([samples.path_delay(at_ns=later)])
    assert value(unwritten(model, later), "swerve_path_loss_ratio", PATH) is None
    model.forget(later)
    model.take([samples.path_delay(at_ns=later)])
    assert value(unwritten(model, later), "swerve_path_loss_ratio", PATH) == 0


# ---- the agent comes and goes ----


def test_without_an_agent_there_are_totals_and_no_facts() -> None:
    model = known(*samples.one_of_each())
    gauges = {name for name, family in FAMILIES.items() if family.kind == "gauge"}
    model.disconnect()
    found = series(model)
    assert value(found, "swerve_up") == 0
    left = {name for name, _ in found} & gauges
    assert left == {
        "swerve_up", "swerve_last_signal_timestamp_seconds", "swerve_metrics_series_limit", "swerve_steering_up"
    }  # fmt: skip
    assert value(found, "swerve_steering_up") == 0
    assert value(found, "swerve_tcp_timeouts_total") == 1
    assert value(found, "swerve_path_round_trip_seconds_count", PATH) == 1


def test_before_any_agent_there_is_nothing_but_ourselves() -> None:
    found = series(Model())
    assert value(found, "swerve_up") == 0
    assert not [name for name, _ in found if name.startswith(("swerve_path", "swerve_link", "swerve_tcp"))]


def test_an_agent_that_hangs_is_not_up_and_what_it_said_does_not_stand() -> None:
    model = known(*samples.one_of_each())
    assert value(series(model, AT_NS + SCRAPED_SILENT_NS), "swerve_path_loss_ratio", PATH) == 0
    late = series(model, AT_NS + SCRAPED_SILENT_NS + 1)
    assert value(late, "swerve_up") == 0
    assert value(late, "swerve_path_loss_ratio", PATH) is None


def test_one_path_that_is_not_told_of_any_more_goes_by_itself() -> None:
    later = AT_NS + SCRAPED_SILENT_NS + 1
    model = known(samples.path_delay(rail=1), samples.path_delay(rail=2, at_ns=later))
    paths = {dict(labels)["interface"] for name, labels in series(model, later) if name == "swerve_path_loss_ratio"}
    assert paths == {"rail2"}


def test_totals_go_on_when_another_agent_begins_anew() -> None:
    def told(total: int, sent_bytes: int) -> list[AnySignal]:
        link = samples.link(counters=samples.counters(sent_bytes=sent_bytes))
        causes = Retransmissions(fast=total)
        return [
            samples.self_cost(drops={"ring_full": total}),
            samples.tcp_host(retransmitted=causes),
            samples.path_ecn(total_ce_packets=total),
            link,
        ]

    def totals(model: Model) -> list[float | None]:
        found = series(model)
        return [
            value(found, "swerve_drops_total", counter="ring_full"),
            value(found, "swerve_tcp_retransmitted_segments_total", cause="fast"),
            value(found, "swerve_path_marked_packets_total", PATH),
            value(found, "swerve_link_bytes_total", interface="rail1", direction="sent"),
        ]

    model = known(*told(100, 1_000))
    assert totals(model) == [100, 100, 100, 1_000]
    model.disconnect()
    model.connect(AT_NS, same_agent=True)
    model.take(told(103, 1_100))
    assert totals(model) == [103, 103, 103, 1_100]
    model.disconnect()
    model.connect(AT_NS, same_agent=False)  # it has counted more already than the other one had; the link goes on
    model.take(told(150, 1_200))
    assert totals(model) == [253, 253, 253, 1_200]
    assert value(series(model), "swerve_agent_connects_total") == 3


def test_windows_of_tcp_are_summed() -> None:
    model = known(*(samples.tcp_path(at_ns=AT_NS + n, in_window=3) for n in range(4)))
    found = series(model)
    assert value(found, "swerve_path_tcp_retransmitted_segments_total", PATH, cause="fast") == 8
    assert value(found, "swerve_path_tcp_segments_total", PATH) == 40_000


def test_tcp_on_no_measured_path_is_by_interface() -> None:
    found = series(known(samples.tcp_path(path=None)))
    labels = {"source": "h1", "destination": "", "address": "", "gateway": "", "interface": "rail1"}
    assert value(found, "swerve_path_tcp_segments_total", labels) == 10_000
    assert not [name for name, _ in found if name.startswith(("swerve_path_round", "swerve_path_probes"))]


def test_of_the_queues_of_an_interface_the_root_counts() -> None:
    (root,) = samples.link().qdiscs
    below = replace(root, handle="0:", parent="8001:1", drops=7, backlog_bytes=1)
    found = series(known(samples.link(qdiscs=[below, root])))
    assert value(found, "swerve_link_queue_drops_total", interface="rail1") == 120
    assert value(found, "swerve_link_queue_bytes", interface="rail1") == 60_000
    assert not [name for name, _ in series(known(samples.link(qdiscs=[below]))) if "_link_queue_" in name]


def test_an_event_told_twice_happened_once() -> None:
    first, second = samples.link_event(what="flap"), samples.link_event(what="flap", at_ns=AT_NS + 5)
    found = series(known(first, first, second))
    assert value(found, "swerve_link_events_total", interface="rail1", what="flap") == 2


def test_queue_pairs_are_sums_also_after_they_are_gone() -> None:
    model = known(samples.rdma_qp(18), samples.rdma_qp(19, verdict="dead"))
    model.take([samples.rdma_qp(18, posted=6_000, errors={"retry_exc_err": 1}, closed=True)])
    found = series(model)
    verdicts = {verdict: value(found, "swerve_rdma_queue_pairs", verdict=verdict) for verdict in ("ok", "dead")}
    assert verdicts == {"ok": 0, "dead": 1}
    assert value(found, "swerve_rdma_requests_total", stage="posted") == 11_000
    assert value(found, "swerve_rdma_errors_total", status="retry_exc_err") == 1


def test_what_the_agent_costs_is_of_the_longest_window_of_a_look() -> None:
    long = samples.self_cost(cpu_share=0.05, window_ns=14 * SECOND_NS, resident_bytes=1)
    short = samples.self_cost(at_ns=AT_NS + SECOND_NS, cpu_share=0.9, resident_bytes=2)
    found = series(known(long, short), AT_NS + SECOND_NS)
    assert value(found, "swerve_agent_cpu_ratio") == 0.05
    assert value(found, "swerve_agent_resident_memory_bytes") == 2
    next_look = samples.self_cost(at_ns=AT_NS + 15 * SECOND_NS, cpu_share=0.07, window_ns=13 * SECOND_NS)
    assert value(series(known(long, short, next_look), AT_NS + 15 * SECOND_NS), "swerve_agent_cpu_ratio") == 0.07


def test_nexthops_that_come_and_go_are_remembered_up_to_a_limit() -> None:
    def group(first: int) -> AnySignal:
        members = [
            GroupMember(nexthop_id=n, gateway=f"g{n}", interface="x", weight=1, packets=9) for n in range(first, 20)
        ]
        return replace(samples.nexthop_group(), members=members)

    found = series(known(group(10), group(0), group(10)))
    packets = {dict(labels)["gateway"]: count for (name, labels), count in found.items() if "nexthop_packets" in name}
    assert packets == {f"g{n}": 9 for n in (*range(10, 20), *range(6))}
    assert value(found, "swerve_metrics_left_out_total", kind="name") == 4
    weights = {dict(labels)["gateway"] for name, labels in found if name == "swerve_nexthop_weight"}
    assert weights == {f"g{n}" for n in range(10, 20)}


def test_counters_of_the_kernel_that_begin_anew_go_on() -> None:
    groups = [samples.nexthop_group(at_ns=AT_NS + n, packets=(packets, 0)) for n, packets in enumerate((100, 150, 20))]
    found = series(known(*groups))
    assert value(found, "swerve_nexthop_packets_total", group="102", interface="rail1", gateway="10.1.1.1") == 170
    uncounted = series(known(samples.nexthop_group(packets=(None, None))))
    assert not [name for name, _ in uncounted if name == "swerve_nexthop_packets_total"]


SIGNALS = st.sampled_from(samples.one_of_each())


@pytest.mark.slow
@given(st.lists(st.one_of(SIGNALS, st.sampled_from(["connect", "reconnect", "disconnect", "forget"])), max_size=60))
@settings(max_examples=60)
def test_no_total_ever_goes_back(script: list[AnySignal | str]) -> None:
    model, before = Model(), Series()
    for step in itertools.chain(script, ["disconnect"]):
        match step:
            case "connect" | "reconnect":
                model.connect(AT_NS, same_agent=step == "reconnect")
            case "disconnect":
                model.disconnect()
            case "forget":
                model.forget(AT_NS)
            case _:
                model.take([step])  # type: ignore[list-item]
        now = unwritten(model)
        for (name, labels), old in before.items():
            if name.endswith(("_total", "_bucket", "_count", "_sum")):
                assert now[name, labels] >= old, name
        before = now


def test_holds_count_on_when_they_begin_anew_and_their_gauges_end_with_the_controller() -> None:
    model = known(samples.hold_state(), samples.hold_state(at_ns=AT_NS + MS, held_packets=10, samples=3))
    found = series(model, AT_NS + MS)
    own = frozenset(PATH.items())
    assert found["swerve_path_held_packets_total", own] == 900 + 10
    assert found["swerve_path_held_bytes_total", own] == 1_300_000
    assert found["swerve_path_held_seconds_total", own] == 0.24
    assert found["swerve_path_hold_samples_total", own] == 410 + 3
    assert found["swerve_path_hold_samples_above_total", own] == 60
    assert found["swerve_path_hold_armed", own] == 1
    assert found["swerve_path_hold_queueing_seconds", own] == 0.0014
    assert found["swerve_path_hold_threshold_seconds", own] == 0.001
    assert found["swerve_path_hold_rate_bytes_per_second", own] == 40_000_000
    model.take([samples.hold_state(at_ns=AT_NS + 2 * MS, why_not="no fq", queueing_ns=None, rate_bytes_per_s=None)])
    later = series(model, AT_NS + 2 * MS)
    assert later["swerve_path_hold_armed", own] == 0
    assert {name for name, labels in later if labels == own and name.startswith("swerve_path_hold_")} == {
        *("swerve_path_hold_armed", "swerve_path_hold_threshold_seconds"),
        *("swerve_path_hold_samples_total", "swerve_path_hold_samples_above_total"),
    }
    gone = series(model, AT_NS + 2 * MS + SCRAPED_SILENT_NS + 1)
    assert ("swerve_path_hold_armed", own) not in gone and ("swerve_path_held_packets_total", own) in gone
