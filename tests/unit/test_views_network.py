"""TCP, links and RDMA as a person meets them: figures by cause, what is not known, and a model that stays small."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import msgspec
import pytest
import samples
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from support import mentions

from pytools import units
from pytools.signals import (
    AnySignal,
    BondPort,
    Link,
    LinkEvent,
    Owner,
    Path,
    PathEcn,
    PathMtu,
    Pause,
    RdmaBackup,
    RdmaPort,
    RdmaQueuePair,
    Retransmissions,
    Stall,
    Suspect,
    TcpFlow,
    TcpHost,
    TcpPath,
)
from pytools.units import UNKNOWN
from pytools.views import follow, table_registry, tcp_tables
from pytools.views.filters import Filters, Query, parse
from pytools.views.model import FORGOTTEN_NS, KEPT, SILENT_NS, Model, fold, is_silent
from pytools.views.query import asked_for
from pytools.views.registry import VIEWS

SECOND_NS = samples.SECOND_NS
NEW = ("tcp", "flows", "drops", "links", "events", "rdma", "ports", "suspects")


def known(*signals: AnySignal) -> Model:
    return fold(Model(), signals)


def shown(kind: str, model: Model, width: int = 300, asked: Query | None = None) -> str:
    out = io.StringIO()
    asked = asked or Query()
    drawn = table_registry.TABLES[kind](model, follow.rows_of(kind, model, asked), asked)
    Console(file=out, width=width, no_color=True, highlight=False).print(drawn)
    return out.getvalue()


def row(table: str, start: str) -> list[str]:
    line = next(line.strip() for line in table.splitlines() if line.strip().startswith(start))
    return re.split(r"\s{3,}", line)


def column(table: str, start: str, heading: str) -> str:
    """The cell under a heading of one line, in the row that starts so; both end at the same place."""
    lines = table.splitlines()
    at = next(index for index, line in enumerate(lines) if line.strip().startswith(start))
    head = max(index for index in range(at) if re.search(rf"(^|\s{{2}}){re.escape(heading)}(\s{{2}}|$)", lines[index]))
    end = re.search(rf"(^|\s{{2}}){re.escape(heading)}(\s{{2}}|$)", lines[head])
    assert end is not None
    stop = lines[head].index(heading, end.start()) + len(heading)
    return re.split(r"\s{2,}", lines[at][:stop].strip())[-1]


def test_retransmissions_stand_under_their_causes() -> None:
    causes = Retransmissions(fast=7, timeout=3, tail_probe=2, syn=1, unknown=4)
    model = known(samples.tcp_path(in_window=17, total=90, retransmitted=causes, spurious_segments=5, timeouts=2))
    table = shown("tcp", model)
    expected = {"retx": "17", "share": "0.17 %", "fast": "7", "RTO": "3", "TLP": "2", "SYN": "1", "other": "4"}
    expected |= {"spurious": "5", "outs": "2", "CE": "1.0 %", "sent": "115.8 Mbit/s", "total": "90"}
    for heading, cell in expected.items():
        assert column(table, "h2 rail1", heading) == cell, heading


def test_a_connection_has_its_figures_and_its_owner() -> None:
    owner = Owner(pid=77, command="trainer", cgroup="kubepods/pod1/x", container="0123456789abcdef0123")
    flow = samples.tcp_flow(owner=owner, drops={"SOCKET_RCVBUFF": 3}, congestion="recovery", resets_received=1)
    table = shown("flows", known(flow))
    assert row(table, "10.9.0.1:40000")[:4] == ["10.9.0.1:40000", "trainer (77)", "12", "11"]
    assert row(table, "→ 10.9.0.2:5201")[:3] == ["→ 10.9.0.2:5201", "0123456789ab", "180 µs"]
    for said in ("2.40 ms", "94.5 Mbit/s", "0 out, 1 in", "SOCKET_RCVBUFF 3", "established, recovery", "via 10.1.1.1"):
        assert said in table, said


def test_a_connection_that_waits_for_its_retransmission_timer_is_flagged_and_sorted() -> None:
    stall = Stall(timeouts=3, rto_ns=1_632_000_000, lasted_ns=1_400_000_000)
    model = known(samples.tcp_flow(local_port=1, congestion="loss"), samples.tcp_flow(local_port=2, stall=stall))
    table = shown("flows", model, asked=Query(sort="stall"))
    assert "stalled 1.40 s, RTO ×3" in row(table, "10.9.0.1:2")
    assert "established, loss" in row(table, "10.9.0.1:1")
    assert table.index("10.9.0.1:2") < table.index("10.9.0.1:1")


def test_what_is_not_known_of_a_connection_is_a_dash() -> None:
    names = ("srtt_ns", "min_rtt_ns", "cwnd_segments", "ssthresh_segments", "delivery_rate_bps", "path")
    flow = samples.tcp_flow(owner=Owner(), delivered_segments=0, delivered_ce_segments=0, **dict.fromkeys(names))
    table = shown("flows", known(flow))
    assert row(table, "10.9.0.1:40000")[1] == UNKNOWN
    assert table.count(UNKNOWN) == 7  # owner, two round trips, two windows, rate, share of CE
    assert "no measured path" in table and "None" not in table
    assert "off" in shown("flows", known(samples.tcp_flow(ecn="off")))


def test_what_is_on_no_measured_path_is_explained_where_it_is_shown() -> None:
    elsewhere = {"path": None, "interface": "rail1"}
    path, flow = samples.tcp_path(**elsewhere), samples.tcp_flow(**elsewhere)
    for kind, signals in (("tcp", [path]), ("tcp", [flow]), ("flows", [flow])):
        table = shown(kind, known(*signals))
        assert "\nno measured path" in table, (kind, signals)
    assert "no measured path" not in shown("tcp", known(samples.tcp_path(), samples.tcp_flow()))


def test_the_host_says_what_was_counted_here_and_by_the_kernel() -> None:
    host = samples.tcp_host(evicted=20, kernel={"TcpRetransSegs": 31, "TcpInSegs": 999_999})
    table = shown("tcp", known(host))
    assert mentions(table, "40", "at most 131,072", "60 seen", "20 evicted")
    assert mentions(table, "30 segments", "fast 29", "RTO 1", "42.4 KiB", "10 of them needlessly")
    assert mentions(table, "kernel", "TcpRetransSegs 31")


def test_without_a_filter_the_worst_connections_are_shown_and_the_others_counted() -> None:
    flows = [samples.tcp_flow(local_port=each, segments=each) for each in range(1, 31)]
    table = shown("tcp", known(*flows))
    assert re.findall(r"^10\.9\.0\.1:(\d+)", table, re.M) == [str(each) for each in range(30, 10, -1)]
    assert "and 10 more connections: swerve tcp --flows" in table
    assert len(re.findall(r"^10\.9\.0\.1:(\d+)", shown("flows", known(*flows)), re.M)) == 30


def test_filters_and_order_are_those_of_the_json() -> None:
    model = known(
        samples.tcp_host(),
        samples.tcp_path(),
        samples.tcp_flow(local_port=1, srtt_ns=5),
        samples.tcp_flow(local_port=2, srtt_ns=None),
        samples.tcp_flow(local_port=3, srtt_ns=9),
        samples.tcp_flow(local_port=4, owner=Owner(pid=1)),
    )
    asked = asked_for("tcp", "srtt", {"pid": (4711,)})
    rows = follow.rows_of("tcp", model, asked)
    assert [getattr(each, "local_port", None) for each in rows] == [3, 1, 2]
    table = shown("tcp", model, asked=asked)
    assert re.findall(r"^10\.9\.0\.1:(\d+)", table, re.M) == ["3", "1", "2"]
    assert "(--pid 4711)" in table and "by path" not in table
    assert "h1: nothing passes --pid 5\n" in shown("tcp", model, asked=asked_for("tcp", None, {"pid": (5,)}))


def test_hooks_that_are_missing_are_said_beside_an_empty_table() -> None:
    alive = known(samples.self_cost())
    assert "no TCP connection has been reported" in shown("tcp", alive) and "not attached" not in shown("tcp", alive)
    deaf = known(samples.self_cost(failed={"tcp_egress on rail1": "no TCX", "probe_egress on rail1": "x"}))
    assert mentions(
        shown("tcp", deaf), "not attached", "tcp_egress", "rail1", "no TCX"
    ) and "probe_egress" not in shown("tcp", deaf)


def test_addresses_in_brackets_stay_whole() -> None:
    assert "[fd00:9::1]:40000" in shown("flows", known(samples.tcp_flow(local="fd00:9::1", remote="fd00:9::2")))


def test_drops_by_reason_the_worst_now_first() -> None:
    table = shown("drops", known(samples.packet_drops()))
    assert table.index("QDISC_DROP") < table.index("NO_SOCKET")
    assert row(table, "QDISC_DROP") == ["QDISC_DROP", "7", "120"]
    sorted_ = shown("drops", known(samples.packet_drops()), asked=Query(sort="reason"))
    assert sorted_.index("NO_SOCKET") < sorted_.index("QDISC_DROP")
    some = shown("drops", known(samples.packet_drops()), asked=Query(parse(reason=["qdisc"])))
    assert "QDISC_DROP" in some and "NO_SOCKET" not in some and "(--reason qdisc)" in some
    none = shown("drops", known(samples.packet_drops()), asked=Query(parse(reason=["netfilter"])))
    assert mentions(none, "h1", "nothing", "--reason netfilter") and len(none.split("\n")) <= 2
    assert "has dropped no packet" in shown("drops", known(samples.packet_drops(reasons=[])))
    assert "swerve doctor" in shown("drops", known(samples.path_delay()))


def test_an_interface_has_its_state_its_queue_and_what_the_kernel_lost() -> None:
    window = samples.counters(received_drops=2, sent_drops=3, sent_errors=1)
    link = samples.link(window=window, driver={"rx_discards_phy": 8}, failed_neighbours=["10.1.1.1"], carrier_changes=5)
    cells = row(shown("links", known(link)), "rail1")
    assert cells == [
        *("rail1", "up", "5", "100.0 Gbit/s", "9,000", "8.00 Mbit/s", "100.0 Mbit/s", "58.6 KiB", "120", "3,000"),
        *("2 / 3", "1", "prio 3: 17 / 0, kept for 250 µs", "10.1.1.1", "rx_discards_phy 8"),
    ]


def test_links_that_are_not_well_come_first() -> None:
    model = known(samples.link(1), samples.link(2, carrier=False), samples.link(3, up=False, carrier=False))
    table = shown("links", model)
    assert re.findall(r"^(rail\d)", table, re.M) == ["rail2", "rail3", "rail1"]
    port = samples.link(1, interface="eth0", upper="bond0", paths=[])
    assert "eth0 (of bond0) " in shown("links", known(samples.link(), port))
    assert row(table, "rail2")[1] == "no carrier" and row(table, "rail3")[1] == "down"
    bare = samples.link(qdiscs=[], pauses=[], speed_mbps=None)
    assert shown("links", known(bare)).count(UNKNOWN) == 4  # speed, queue, pauses, driver
    quiet = samples.link(pauses=[Pause(priority=None, received=0, sent=0)])
    assert row(shown("links", known(quiet)), "rail1")[-3] == "0"


@pytest.mark.parametrize(
    ("active", "trouble", "words"),
    [(True, "", "up, 802.3ad  "), (False, "", "up, 802.3ad: backup  "), (True, "LACP: late", "up, LACP: late")],
)
def test_a_port_of_a_bond_says_what_the_bond_makes_of_it(active: bool, trouble: str, words: str) -> None:
    port = BondPort("802.3ad", "layer3+4", active, "up", trouble, 0, 0)
    assert words in shown("links", known(samples.link(1, interface="eth0", upper="bond0", paths=[], port=port)))


def test_a_way_is_named_by_the_port_of_a_bond_and_the_router() -> None:
    ways = (("eth0", "r1"), ("eth1", "r1"), ("eth1", ""), ("", "r1"), ("", ""))
    told = [samples.path_way(way=n, lower=lower, router=router) for n, (lower, router) in enumerate(ways, 1)]
    text = shown("ways", known(*told))
    for name in ("1 of 4: by eth0, r1, hop 2", "2 of 4: by eth1, r1, hop 2", "3 of 4: by eth1  ", "4 of 4: r1, hop 2"):
        assert name in text
    assert "5 of 4: port 40003, no router answers" in text
    only = samples.path_way(way=1, ways=1, router="", differs_at=None, state="unmeasured", confidence=0.9922)
    assert mentions(shown("ways", known(only)), "1 of 1", "only one", "no other")
    assert "99.2 %" in shown("ways", known(only))


def test_sizes_and_marks_stand_below_their_interfaces() -> None:
    model = known(samples.link(), samples.path_mtu(told_bytes=1400, told_by="10.1.1.1"), samples.path_ecn())
    table = shown("links", model)
    assert re.search(r"h2 rail1 via 10\.1\.1\.1 +do not pass +9,000 +1,500 +9,000 +1,400 by 10\.1\.1\.1", table)
    assert re.search(r"h2 rail1 via 10\.1\.1\.1 +3\.1 % +31 +1,000 +400 +100,000", table)


def test_events_are_told_the_newest_first_and_once() -> None:
    events = [samples.link_event(1, samples.AT_NS + each * SECOND_NS, detail=f"no {each}") for each in range(8)]
    model = known(samples.link(), *events, msgspec.structs.replace(events[3], at_ns=events[-1].at_ns))
    assert re.findall(r"no (\d)", shown("events", model)) == list("76543210")
    assert re.findall(r"no (\d)", shown("links", model)) == list("76543")
    assert "and 3 more: swerve links --events" in shown("links", model)
    assert "let it go on with -i 1" in shown("events", known(samples.link()))


def test_queue_pairs_the_worst_first_with_the_reason() -> None:
    model = known(
        samples.rdma_qp(1, verdict="ok"),
        samples.rdma_qp(2, verdict="no_demand", reason="nothing posted for 3 s"),
        samples.rdma_qp(3, verdict="dead", reason="6 MiB outstanding, nothing completed for 210 ms"),
        samples.rdma_qp(4, verdict="congested", reason="29 of 92 Gbit/s"),
        samples.rdma_qp(5, verdict="dead", closed=True),
    )
    table = shown("rdma", model)
    assert re.findall(r"^rxe0 qp (\d) {2,}", table, re.M) == list("34215")
    assert re.search(r"rxe0 qp 3 dead: .*\b6 MiB .*\b210 ms", table)
    assert "rxe0 qp 4 congested: 29 of 92 Gbit/s" in table and "qp 5 dead" not in table and "qp 1 ok" not in table
    assert row(table, "rxe0 qp 4") == [
        *("rxe0 qp 4", "ib_write_bw (815)", "rc", "5,000", "100", "91.0 Gbit/s", "5.20 µs", "0", "congested")
    ]
    assert row(table, "→ 10.9.0.2 qp 19")[1:] == ["tap", "4,900", "6.2 MiB", "92.0 Gbit/s", "21.00 µs", "for 4.00 s"]


def test_dead_queue_pairs_are_shown_with_what_could_be_used_instead() -> None:
    other = Path("h1", "h2", "10.9.1.2", "", "rail2")
    backup = RdmaBackup("rxe1", 1, 3, "10.9.1.1 RoCE v2", "10.9.1.2", other)
    dead = samples.rdma_qp(1, verdict="dead", path_answers=False, backups=[backup])
    alone = samples.rdma_qp(2, verdict="dead", path_answers=True, no_backup="no other path to h2 answers probes")
    lines = shown("rdma", known(dead, alone), width=200).splitlines()
    assert any(line.endswith(f"; its path {dead.path} does not answer probes") for line in lines)
    assert any(line.endswith(f"; its path {alone.path} answers probes") for line in lines)
    assert any(
        mentions(line, "backup", "rxe1/1 GID 3", "10.9.1.1", "10.9.1.2", "h1>h2 dev rail2", "answers") for line in lines
    )
    assert any(mentions(line, "no backup", "h2", "answers") for line in lines)


def test_bytes_and_rates_beyond_32_bits_are_whole() -> None:
    fast = samples.rdma_qp(outstanding_bytes=3 << 30, posted=5_000_000_000)
    wide = [msgspec.structs.replace(each, last_bps=800_000_000_000) for each in fast.bandwidths]
    table = shown("rdma", known(msgspec.structs.replace(fast, bandwidths=wide)))
    assert "3.0 GiB" in table and "800.0 Gbit/s" in table and "5,000,000,000" in table


def test_a_pair_of_which_little_is_known_has_dashes() -> None:
    shy = samples.rdma_qp(remote="", remote_qp_number=None, bandwidths=[], path=None, verdict="unknown", reason="young")
    table = shown("rdma", known(shy))
    assert "→ no address known" in table and row(table, "rxe0 qp 18")[5] == UNKNOWN
    failed = samples.rdma_qp(errors={"retry_exc_err": 3}, refused_posts=2)
    assert "retry_exc_err 3" in shown("rdma", known(failed)) and "refused 2" in shown("rdma", known(failed))


def test_suspects_and_how_rdma_is_seen_stand_below() -> None:
    sight = samples.rdma_sight(seen={"815 ib_write_bw": "tap", "9 nccl": "its libibverbs is static"})
    table = shown("rdma", known(samples.rdma_qp(), samples.rdma_suspects(), sight))
    assert re.search(r"host h2 +62\.0 % +3 of 4 +3 of 4 queue pairs", table)
    assert mentions(table, "not seen", "9 nccl", "libibverbs", "static") and "815" not in table.partition("not seen")[2]
    narrowed = shown("rdma", known(samples.rdma_qp(), sight), asked=asked_for("rdma", None, {"verdict": ("ok",)}))
    assert "seen through" not in narrowed


NO_RDMA = samples.rdma_sight(available=False, reason="the kernel has no RDMA", providers=[], seen={}, tap_processes=0)


@pytest.mark.parametrize("kind", ["rdma", "ports", "suspects"])
def test_where_there_is_no_rdma_it_is_said_why(kind: str) -> None:
    model = known(NO_RDMA)
    assert VIEWS[kind].heard(model)
    assert mentions(shown(kind, model), "no RDMA", "kernel has no RDMA", "`swerve doctor`")
    view = VIEWS[kind]
    assert view.silence is not None and "no RDMA is seen here" in view.silence(model)
    assert "has not said what it sees of RDMA" in shown(kind, known(samples.path_delay()))


def test_rdma_that_is_idle_is_not_no_rdma() -> None:
    idle = known(samples.rdma_sight(seen={}))
    assert "no queue pair has posted anything" in shown("rdma", idle)
    assert "no host and no link is suspected" in shown("suspects", idle)
    several = samples.rdma_suspects(
        suspects=[
            Suspect(kind="link", name="rail2", slowness=0.2, agreeing=2, queue_pairs=9, reason="x"),
            Suspect(kind="host", name="h3", slowness=0.7, agreeing=3, queue_pairs=4, reason="y"),
        ]
    )
    table = shown("suspects", known(several))
    assert table.index("host h3") < table.index("link rail2")


def test_ports_say_what_the_device_does_not_count() -> None:
    table = shown("ports", known(samples.rdma_port()))
    assert row(table, "rxe0/1")[4:10] == [UNKNOWN, UNKNOWN, UNKNOWN, "4", "0", "2"]
    assert "rcvd_pkts +1,000" in table


def test_the_connections_that_are_remembered_are_bounded_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 400  # a table of 4,096 rows takes seconds to draw
    monkeypatch.setitem(KEPT, TcpFlow, replace(KEPT[TcpFlow], most=most))
    flows = [
        samples.tcp_flow(local_port=each % 65536, segments=each, local=f"fd00::{each}") for each in range(most + 9)
    ]
    model = known(*flows)
    assert len(model.of(TcpFlow)) == most and TcpFlow in model.crowded
    assert min(flow.retransmitted_segments for flow in model.of(TcpFlow).values()) == 9  # of one second: the least go
    later = fold(model, [samples.tcp_flow(at_ns=samples.AT_NS + 2 * SECOND_NS, segments=0)])
    assert len(later.of(TcpFlow)) == most and samples.tcp_flow().local in {key[0] for key in later.of(TcpFlow)}
    assert mentions(shown("flows", later, width=120), "retransmitted least", "missing")
    assert TcpFlow not in known(samples.tcp_flow()).crowded


def test_queue_pairs_and_events_are_bounded_too() -> None:
    pairs = [samples.rdma_qp(each, closed=each < 5) for each in range(KEPT[RdmaQueuePair].most + 5)]
    model = known(*pairs)
    assert len(model.of(RdmaQueuePair)) == KEPT[RdmaQueuePair].most and RdmaQueuePair in model.crowded
    assert not any(pair.closed for pair in model.of(RdmaQueuePair).values())  # the ended ones went first
    events = [samples.link_event(at_ns=samples.AT_NS + each) for each in range(KEPT[LinkEvent].most + 50)]
    assert [each.at_ns for each in known(*events).of(LinkEvent).values()] == [
        samples.AT_NS + each for each in range(50, KEPT[LinkEvent].most + 50)
    ]


def test_what_is_not_heard_of_goes_dim_and_is_then_forgotten() -> None:
    signals = [samples.tcp_flow(), samples.tcp_path(), samples.link(), samples.path_mtu(), samples.path_ecn()]
    signals += [samples.rdma_qp(), samples.rdma_port()]
    later = samples.AT_NS + SILENT_NS + SECOND_NS
    silent = known(*signals, samples.self_cost(later))
    assert "ok?" in shown("rdma", silent)
    for each in (silent.of(TcpPath), silent.of(Link), silent.of(RdmaQueuePair)):
        assert is_silent(next(iter(each.values())), later)
    gone = fold(silent, [samples.self_cost(samples.AT_NS + FORGOTTEN_NS + 1)])
    for rest in (gone.of(TcpFlow), gone.of(TcpPath), gone.of(Link), gone.of(PathMtu), gone.of(PathEcn)):
        assert not rest
    assert not gone.of(RdmaQueuePair) and not gone.of(RdmaPort)


@given(st.lists(st.sampled_from(samples.one_of_each(5) + samples.one_of_each(9)), max_size=20), st.integers(0, 20))
def test_folding_in_two_steps_is_folding_in_one(signals: list[AnySignal], cut: int) -> None:
    assert fold(fold(Model(), signals[:cut]), signals[cut:]) == fold(Model(), signals)


@pytest.mark.parametrize("width", [70, 80, 100, 120, 200, 300])
@pytest.mark.parametrize("kind", NEW)
def test_no_table_is_cut_or_wider_than_the_terminal(kind: str, width: int) -> None:
    model = fold(known(*samples.one_of_each()), [samples.tcp_flow(2, local="fd00:9::1", remote="fd00:9::2")])
    lines = shown(kind, model, width).splitlines()
    assert max(map(len, lines)) <= width
    assert not any("…" in line for line in lines)
    if width == 300:
        assert not any(line.startswith("left out") for line in lines)


def test_causes_stay_in_a_terminal_of_80_columns() -> None:
    table = shown("tcp", known(*samples.one_of_each()), 80)
    heads = [line for line in table.splitlines() if line.startswith(("path ", "connection "))]
    assert len(heads) == 2 and all({"retx", "fast", "RTO", "TLP"} <= set(line.split()) for line in heads)


def test_every_view_is_heard_once_its_signals_are_there_and_asks_for_all_it_shows() -> None:
    model = known(*samples.one_of_each())
    for kind in NEW:
        assert VIEWS[kind].heard(model), kind
        tags = {str(each.__struct_config__.tag) for each in VIEWS[kind].rows(model)}
        assert tags and tags <= VIEWS[kind].types, kind


@pytest.mark.parametrize(
    ("bps", "text"), [(None, UNKNOWN), (0, "0 bit/s"), (1_500, "1.50 kbit/s"), (8e11, "800.0 Gbit/s")]
)
def test_rates_have_a_unit(bps: float | None, text: str) -> None:
    assert units.bit_rate(bps) == text


def test_causes_in_words_leave_out_what_was_none() -> None:
    assert tcp_tables.causes(Retransmissions()) == "none"
    assert tcp_tables.causes(Retransmissions(fast=1_200, syn=2)) == "fast 1,200, SYN 2"


def test_filters_that_ask_for_nothing_say_nothing() -> None:
    assert str(Filters()) == "" and Query().said() == ""


class Agent:
    """A client whose clock stands in for the time, and that has its signals ready at the first reading."""

    def __init__(self, signals: list[AnySignal]) -> None:
        self.signals, self.now_s = signals, 100.0

    def read(self) -> list[AnySignal]:
        signals, self.signals = self.signals, []
        return signals

    def wait(self, seconds: float) -> None:
        self.now_s += seconds


def collected(signals: list[AnySignal], filters: Filters | None) -> Model:
    agent = Agent(signals)
    return follow.collect(
        agent,  # type: ignore[arg-type]
        Model(),
        agent.now_s + 1.0,
        lambda: agent.now_s,
        agent.wait,
        filters,
    )


def test_connections_that_cannot_pass_take_no_room() -> None:
    crowd = [samples.tcp_flow(local_port=each % 65536, local=f"fd00::{each}") for each in range(KEPT[TcpFlow].most)]
    mine = [samples.tcp_flow(local_port=each, segments=0, owner=Owner(pid=9)) for each in range(1, 21)]
    asked = asked_for("flows", None, {"pid": (9,)})
    model = collected([*mine, *crowd, samples.tcp_host()], asked.filters)
    assert len(follow.rows_of("flows", model, asked)) == 20 and TcpFlow not in model.crowded
    assert model.one(TcpHost) is not None
    assert TcpFlow in collected([*mine, *crowd], None).crowded


def test_a_queue_pair_whose_verdict_changed_is_not_shown_with_its_old_one() -> None:
    asked = asked_for("rdma", None, {"verdict": ("congested",)})
    model = collected([samples.rdma_qp(verdict="congested"), samples.rdma_qp(verdict="ok")], asked.filters)
    assert follow.rows_of("rdma", model, asked) == []


def test_processes_are_waited_for_where_they_are_asked_for() -> None:
    tcp, rdma = VIEWS["tcp"], VIEWS["rdma"]
    by_process, by_address = asked_for("tcp", None, {"pid": (9,)}), asked_for("tcp", None, {"dst": ("::/0",)})
    assert tcp.wait_s(by_process.filters) > tcp.wait_s(by_address.filters) == tcp.wait_s(None) == tcp.first_s
    assert rdma.wait_s(by_process.filters) == rdma.first_s  # these come with their process


def test_the_first_frame_waits_until_enough_is_known() -> None:
    takes: list[float] = []
    shown = [len(takes) for _ in follow.paced(takes.append, lambda: len(takes) >= 3, 0.0, 0.0, 2)]
    assert shown == [3, 4]
