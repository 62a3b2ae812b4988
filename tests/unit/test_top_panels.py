"""What the live view says in a line each about clocks, TCP, links and RDMA; nothing where all is well."""

from __future__ import annotations

import samples
from rich.text import Text
from samples import AT_NS, SECOND_NS
from support import mentions
from top_kit import NOW_NS

from pytools.views import clock_tables, network_panel
from pytools.views.model import Model, fold

PANELS = (network_panel.tcp, network_panel.links, network_panel.rdma)


def plain(text: Text | None) -> str:
    return "" if text is None else text.plain


def troubled() -> Model:
    return fold(
        Model(),
        [
            samples.tcp_path(1, in_window=3),
            samples.tcp_path(2, in_window=9),
            samples.link_event(1, what="carrier_lost"),
            samples.rdma_qp(18),
            samples.rdma_qp(20, verdict="congested"),
            samples.rdma_suspects(),
        ],
    )


def test_tcp_links_and_rdma_have_a_line_each() -> None:
    tcp, links, rdma = (plain(panel(troubled(), NOW_NS)) for panel in PANELS)
    worst, other = tcp.split("; ")
    assert mentions(worst, "TCP", "h2 rail2", "9 retransmitted", "fast 8", "RTO 1", "3 needlessly")
    assert mentions(other, "h2 rail1", "3 retransmitted", "fast 2", "RTO 1", "1 needlessly")
    assert mentions(links, "links", "rail1", "carrier lost", "502 ms ago")
    assert mentions(rdma, "RDMA", "1 congested", "rxe0 qp 20 ib_write_bw", "slow host h2", "62.0 %", "1 well")


def test_there_is_no_line_when_all_is_well() -> None:
    well = fold(
        Model(),
        [samples.path_delay(), samples.tcp_path(in_window=0), samples.rdma_qp(), samples.rdma_suspects(suspects=[])],
    )
    old = fold(well, [samples.link_event(at_ns=AT_NS - 61 * SECOND_NS)])
    assert [panel(each, NOW_NS) for each in (well, old) for panel in PANELS] == [None] * 6


def test_what_nobody_stands_for_any_more_is_not_said() -> None:
    later = NOW_NS + 20 * SECOND_NS
    tcp, links, rdma = (plain(panel(troubled(), later)) for panel in PANELS)
    assert tcp == rdma == "" and mentions(links, "links", "rail1", "carrier lost", "20.50 s ago")
    closed = fold(Model(), [samples.rdma_qp(verdict="dead", closed=True)])
    assert network_panel.rdma(closed, NOW_NS) is None


def test_of_events_that_follow_upon_one_another_the_last_is_told() -> None:
    events = [
        samples.link_event(1, AT_NS, "carrier_lost"),
        samples.link_event(1, AT_NS + 1, "carrier_found"),
        samples.link_event(1, AT_NS + 2, "neighbour_failed"),
        samples.link_event(2, AT_NS + 3, "queue_full"),
        samples.link_event(3, AT_NS + 4, "flap"),
    ]
    shown = plain(network_panel.links(fold(Model(), events), NOW_NS))
    last = ("rail3 flap", "502 ms", "rail2 queue full", "502 ms", "rail1 neighbour failed", "502 ms")
    assert mentions(shown, "links", *last, "1 more") and "carrier" not in shown


def test_a_receiver_that_does_not_read_is_said_without_any_loss() -> None:
    full = fold(Model(), [samples.tcp_path(in_window=0, zero_windows=4)])
    shown = plain(network_panel.tcp(full, NOW_NS))
    assert mentions(shown, "TCP", "h2 rail1", "4 zero windows") and "retransmitted" not in shown


def test_many_queue_pairs_are_a_line_by_verdict() -> None:
    verdicts = ["congested"] * 40 + ["dead"] * 3 + ["slow_receiver", "no_demand", "unknown", "ok"]
    pairs = [samples.rdma_qp(number, verdict=verdict) for number, verdict in enumerate(verdicts)]
    shown = plain(network_panel.rdma(fold(Model(), pairs), NOW_NS)).split("; ")
    facts = [
        ("RDMA", "3 dead", "rxe0 qp 40 ib_write_bw", "rxe0 qp 41 ib_write_bw", "…"),
        ("40 congested", "rxe0 qp 0 ib_write_bw", "rxe0 qp 1 ib_write_bw", "…"),
        ("1 slow receiver", "rxe0 qp 43 ib_write_bw"),
        ("2 well",),
    ]
    assert [part for part, each in zip(shown, facts, strict=True) if not mentions(part, *each)] == []
    assert all("qp 42" not in part and "qp 2 " not in part for part in shown)


def test_clocks_are_one_line_the_worst_of_each_state_by_name() -> None:
    clocks = [
        samples.clock("h1"),
        samples.clock("h2"),
        samples.clock("h3", state="holdover", bound_ns=14_300),
        samples.free_clock("h4"),
    ]
    groups = ("1 synchronised", "h1 ±430 ns", "1 holdover", "h3 ±14.30 µs", "1 free_running", "h4")
    assert mentions(plain(clock_tables.summary(fold(Model(), clocks), NOW_NS)), "clocks", "h2", *groups)
    fleet = fold(Model(), [samples.clock(f"n{each}", reference="n0", bound_ns=each) for each in range(50)])
    shown = plain(clock_tables.summary(fleet, NOW_NS))
    assert mentions(shown, "clocks", "n0", "49 synchronised", "n49 ±49 ns", "n48 ±48 ns", "n47 ±47 ns", "…")
    assert "n46" not in shown
    assert clock_tables.summary(Model(), NOW_NS) is None


def test_our_own_clock_is_said_with_its_reference() -> None:
    def own(*clocks: object, later_s: int = 0) -> str:
        model = fold(Model(), [samples.path_delay(), *clocks])  # type: ignore[list-item]
        return clock_tables.own(model, NOW_NS + later_s * SECOND_NS).plain

    assert own() == ""
    assert mentions(own(samples.clock("h1")), "clock", "synchronised", "±430 ns", "h2")
    assert mentions(own(samples.clock("h1", state="holdover", bound_ns=21_000)), "clock", "holdover", "±21.00 µs", "h2")
    assert own(samples.free_clock("h1")) == "clock free_running"
    assert own(samples.clock("h1", reference="h1")) == "clock synchronised, the reference"
    assert own(samples.clock("h1"), later_s=20).startswith("clock synchronised?")
