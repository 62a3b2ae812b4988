"""Rules about flows on a model of a host: when flows are moved, how often, where to, and how they come back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from flow_world import MBIT, MS, POLICY, SECOND, World, tcp_flow
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import mentions

from pytools.signals import Stall
from steering.flows.engine import SETTLE_NS
from steering.flows.leases import Holdings
from steering.flows.maxmin import INFINITE
from steering.flows.placing import Case, label_act, ways_of
from steering.flows.plan import FlowAct
from steering.flows.rail_rates import RailRates
from steering.flows.rates import FORGOTTEN_NS, FlowRates, key_of
from steering.flows.relabel import TRIES, next_label, relabelled
from steering.plan import LabelChange, Pin
from steering.policy.file import parse

import steering_kit as kit  # isort: skip

RELABEL = """\
version: 1
manage: {destinations: ["fd00:9::/64"]}
rules:
  - name: repath
    when: {signal: retransmits, above: 0.01, clear_below: 0.001}
    then: {relabel: {flows: {min_rate: 1mbit, at_most: 16}}}
"""

# ---- rates ----


def rates_after(*deliveries: tuple[int, int], **others: object) -> FlowRates:
    """A connection of which so many segments were delivered at these milliseconds."""
    rates = FlowRates()
    for at_ms, segments in deliveries:
        sent = {"segments_out": segments, "sent_bytes": 1000 * segments, "delivered_segments": segments}
        rates.take(tcp_flow(40_000, at_ms * MS, kit.path(), **(sent | others)))
    return rates


def test_a_rate_is_what_was_delivered_lately() -> None:
    rates = rates_after((1000, 0), (1100, 1000), (1200, 2000), (1300, 2100), (1400, 2200), (1500, 2300))
    (flow,) = rates.rates(1500 * MS)
    assert flow.rate_bps == 8 * MBIT  # 100 segments of 1000 bytes in 100 ms; the fast time before is over
    assert (flow.recent_bps, flow.before_bps) == (8 * MBIT, 8 * MBIT)
    assert flow.peak_bps == 80 * MBIT


def test_one_look_is_no_rate() -> None:
    assert list(rates_after((1000, 10)).rates(1000 * MS)) == []
    assert list(rates_after((1000, 10), (1010, 20)).rates(1010 * MS)) == []  # too close to tell


def test_a_connection_that_is_not_heard_of_slows_down_and_is_forgotten() -> None:
    rates = rates_after((1000, 0), (1100, 1000))
    (flow,) = rates.rates(1200 * MS)
    assert flow.rate_bps == 80 * MBIT
    (flow,) = rates.rates(2000 * MS)
    assert flow.rate_bps == pytest.approx(8 * MBIT)
    assert list(rates.rates(1100 * MS + FORGOTTEN_NS + 1)) == []
    assert len(rates) == 0


@pytest.mark.parametrize(
    "others",
    [{"first_ns": 2}, {"delivered_segments": 5, "segments_out": 5}, {"last_ns": 1050 * MS}],
    ids=["began later", "counts went back", "looked at before"],
)
def test_another_connection_with_the_same_ports_starts_anew(others: dict[str, object]) -> None:
    rates = rates_after((1000, 0), (1100, 1000))
    rates.take(tcp_flow(40_000, 1200 * MS, kit.path(), **({"delivered_segments": 2000, "sent_bytes": 10**6} | others)))
    assert list(rates.rates(1200 * MS)) == []


def test_a_closed_connection_is_gone_at_once() -> None:
    rates = rates_after((1000, 0), (1100, 1000))
    closed = tcp_flow(40_000, 1200 * MS, kit.path(), state="close")
    assert rates.lives(key_of(closed), 1200 * MS)
    rates.take(closed)
    assert not rates.lives(key_of(closed), 1200 * MS)


def test_the_least_recently_heard_of_makes_room() -> None:
    rates = FlowRates(capacity=3)
    for port in (1, 2, 3, 1, 4):
        rates.take(tcp_flow(port, port * MS))
    assert [rates.lives(key_of(tcp_flow(port, 0)), 9 * MS) for port in (1, 2, 3, 4)] == [True, False, True, True]
    assert rates.forgotten == 1


@pytest.mark.parametrize(
    ("others", "bound"),
    [
        ({}, False),
        ({"cwnd_segments": 1200}, True),  # 10 Mbyte/s times 100 ms are 1000 segments
        ({"cwnd_segments": 2000}, False),
        ({"congestion": "recovery"}, True),
        ({"congestion": "disorder"}, False),
    ],
    ids=["limited by its application", "window full", "window half full", "recovers", "reordered"],
)
def test_what_a_connection_asks_for(others: dict[str, object], bound: bool) -> None:
    rates = rates_after((1000, 0), (1100, 1000), **({"srtt_ns": 100 * MS, "cwnd_segments": 100_000} | others))
    (flow,) = rates.rates(1100 * MS)
    assert flow.demand_bps == (INFINITE if bound else flow.rate_bps == flow.demand_bps and flow.demand_bps)


def test_what_was_lost_or_marked_counts_for_a_second() -> None:
    rates = rates_after((1000, 0), (1100, 1000))
    rates.take(tcp_flow(40_000, 1200 * MS, kit.path(), delivered_segments=2000, sent_bytes=2 * 10**6, segments_out=2001,
                        retransmitted_segments=1))  # fmt: skip
    (flow,) = rates.rates(1200 * MS)
    assert (flow.demand_bps, flow.troubled) == (INFINITE, True)
    for at_ms in range(1300, 2200, 100):
        rates.take(tcp_flow(40_000, at_ms * MS, kit.path(), delivered_segments=20 * at_ms, sent_bytes=20_000 * at_ms,
                            segments_out=20 * at_ms + 1, retransmitted_segments=1))  # fmt: skip
    (flow,) = rates.rates(2100 * MS)
    assert (flow.demand_bps, flow.troubled) == (INFINITE, False)
    rates.take(tcp_flow(40_000, 2300 * MS, kit.path(), delivered_segments=50_000, sent_bytes=50 * 10**6,
                        segments_out=50_001, retransmitted_segments=1))  # fmt: skip
    (flow,) = rates.rates(2300 * MS)
    assert flow.demand_bps == flow.rate_bps


# ---- rails ----


def rail_at(now_ms: int, rails: RailRates, rates: FlowRates, queue_ms: float, rail: int = 1) -> object:
    """The estimate of a rail that shows this queue now."""
    rails.take(kit.measured(kit.path(rail), now_ms * MS, int(queue_ms * MS)))
    places = [("h2", "rail1"), ("h2", "rail2")]
    return rails.estimate(rates.rates(now_ms * MS), places, now_ms * MS)["h2", f"rail{rail}"]


def test_a_full_rail_carries_what_is_delivered() -> None:
    rates = rates_after((1000, 0), (1100, 1000), congestion="recovery")
    found = rail_at(1100, RailRates(), rates, 5)
    assert (found.capacity_bps, found.how, found.error_bps) == (80 * MBIT, "measured", 4 * MBIT)  # type: ignore[attr-defined]


def test_a_rail_that_was_never_full_is_like_its_siblings() -> None:
    rails, rates = RailRates(), rates_after((1000, 0), (1100, 1000), congestion="recovery")
    rail_at(1100, rails, rates, 5)
    idle = rail_at(1100, rails, rates, 0, rail=2)
    assert (idle.capacity_bps, idle.how) == (80 * MBIT, "assumed")  # type: ignore[attr-defined]
    assert idle.delivered_bps == 0  # type: ignore[attr-defined]


def test_what_a_full_rail_carried_is_remembered_until_it_is_forgotten() -> None:
    rails, rates = RailRates(), rates_after((1000, 0), (1100, 1000), congestion="recovery")
    rail_at(1100, rails, rates, 5)
    empty = FlowRates()
    then = rail_at(2000, rails, empty, 0)
    assert (then.capacity_bps, then.how) == (80 * MBIT, "remembered")  # type: ignore[attr-defined]
    assert rail_at(70_000, rails, empty, 0).how == "assumed"  # type: ignore[attr-defined]
    rail_at(1100, rails, rates, 5)
    rails.forget(("h2", "rail1"))
    assert rail_at(2000, rails, empty, 0).how == "assumed"  # type: ignore[attr-defined]


def test_a_cut_rail_is_known_within_300_ms() -> None:
    steps = [(1000 + 100 * n, 1000 * n) for n in range(6)] + [(1600 + 100 * n, 5100 + 100 * n) for n in range(6)]
    rails, rates = RailRates(), FlowRates()
    found = {}
    for at_ms, segments in steps:
        rates.take(tcp_flow(40_000, at_ms * MS, kit.path(), delivered_segments=segments, segments_out=segments,
                            sent_bytes=1000 * segments, congestion="recovery"))  # fmt: skip
        found[at_ms] = rail_at(at_ms, rails, rates, 5)
    assert found[1500].capacity_bps == 80 * MBIT  # type: ignore[attr-defined]
    assert not found[1600].steady  # type: ignore[attr-defined]
    assert (found[1800].capacity_bps, found[1800].steady) == (8 * MBIT, True)  # type: ignore[attr-defined]


# ---- moves ----


def test_all_is_left_alone_while_nothing_is_wrong() -> None:
    world = World([1, 1, 1, 1, 1, 2])
    assert world.run(5) == []  # unfair, but no rule says that it matters


def test_flows_leave_a_rail_that_is_cut_within_a_second_by_the_fewest_moves() -> None:
    world = World([1, 1, 1, 1, 2, 2, 2, 2])
    world.run(3)
    world.cut()
    (act,) = world.run(1)
    assert world.counts() == [0, 8]
    assert (act.kind, act.under, len(act.flows)) == ("pin", "move-elephants", 4)
    assert dict(act.before) == {"10.1.1.1 dev rail1": 4, "10.2.1.1 dev rail2": 4}
    assert dict(act.after) == {"10.1.1.1 dev rail1": 0, "10.2.1.1 dev rail2": 8}
    assert "queueing delay" in act.because
    assert mentions(act.because, "slowest flow", "2.49 Mbit/s", "12.5 Mbit/s")
    assert act.seen_ns > 0
    assert world.run(15) == []
    assert world.renewed > 0


def test_the_other_rails_are_shared_fairly() -> None:
    world = World([1, 1, 1, 1, 1, 2, 2, 4], rails=4)
    world.run(3)
    world.cut()
    world.run(1)
    assert sorted(world.counts()) == [0, 2, 3, 3]
    assert world.counts()[0] == 0
    assert world.moves() == 5


def test_a_limited_flow_counts_for_what_it_asks() -> None:
    world = World([1, 2, 2, 3], rails=3, demands={1: 8 * MBIT, 2: 8 * MBIT})
    world.run(3)
    world.cut()
    world.run(2)
    assert world.counts() == [0, 3, 1], "two that ask for 8 leave more than one that takes all"


def test_slow_flows_and_others_out_of_scope_stay() -> None:
    world = World([1, 1, 2], demands={0: 1 * MBIT})
    world.run(3)
    world.cut()
    world.run(2)
    assert world.connections[0].pinned is None, "below min_rate"
    scoped = World([1, 1, 2], text=POLICY.replace("    when:", "    scope: {flows: {local_port: 40001}}\n    when:"))
    scoped.run(3)
    scoped.cut()
    scoped.run(2)
    assert [connection.pinned for connection in scoped.connections] == [None, 2, None]


def test_flows_of_other_namespaces_stay() -> None:
    world = World([1, 1, 1, 2])
    for connection in world.connections[:2]:
        connection.namespace = "shop/cart"
    world.run(3)
    world.cut()
    world.run(2)
    (act,) = (act for _, act in world.acts)
    assert list(act.flows) == [world.connections[2].key]


def test_no_more_pins_than_allowed() -> None:
    world = World([1] * 6 + [2] * 2, text=POLICY.replace("at_most: 64", "at_most: 3"))
    world.run(3)
    world.cut()
    world.run(30)
    assert world.on(1) == 3


def test_nothing_is_moved_when_every_rail_is_bad() -> None:
    world = World([1, 1, 2, 2])
    world.run(3)
    world.cut(1)
    world.cut(2)
    assert world.run(20) == []


def test_nothing_is_moved_to_a_rail_that_is_not_measured() -> None:
    world = World([1, 1, 1, 2], rails=2)
    world.unheard = {2}
    world.run(3)
    world.cut()
    assert world.run(10) == []


def test_a_flow_is_moved_once_per_period() -> None:
    world = World([1, 1, 1, 1, 2, 2, 2, 2], rails=3)
    world.run(3)
    world.cut(1)
    world.run(2)
    first = world.moves()
    world.cut(2)
    world.cut(3, 50 * MBIT)
    world.run(6)
    moved = [pin.flow for _, act in world.acts for pin in act.pins]
    assert len(moved) == len(set(moved)), "within ten seconds"
    world.run(10)
    assert world.moves() > first


def test_a_herd_moves_a_fraction_at_a_time() -> None:
    herd = POLICY.replace("safety: {", "safety: {herd: {fraction: 0.5}, ")
    world = World([1, 1, 1, 1, 2, 2, 2, 2], text=herd)
    world.run(3)
    world.cut()
    first, *_ = world.run(1)
    assert len(first.flows) == 2
    world.run(4)
    assert world.counts() == [0, 8]


def test_both_families_of_a_peer_are_planned_one_after_the_other() -> None:
    world = World([1, 2, 3], rails=3, routed6=[1, 2, 3], text=POLICY.replace("gain: 0.1", "gain: 0.01"))
    world.run(3)
    world.cut()
    world.run(1.5)
    (first, one), (second, other) = world.acts
    assert {one.target, other.target} == {"nexthop_group:102", "nexthop_group:202"}
    assert second - first >= SETTLE_NS, "the second sees what the first did"
    assert world.counts() == [0, 3, 3]


def test_a_family_whose_pins_are_refused_does_not_keep_the_other_from_its_turn() -> None:
    world = World([1, 2, 3], rails=3, routed6=[1, 2, 3])
    world.run(3)
    world.cut()
    world.refuses = True
    world.run(3)
    asked = [act.target for act in world.refused]
    assert asked[:4] in (["nexthop_group:102", "nexthop_group:202"] * 2, ["nexthop_group:202", "nexthop_group:102"] * 2)


# ---- leases ----


def test_pins_of_connections_that_are_over_are_taken_away() -> None:
    world = World([1, 1, 2, 2])
    world.run(3)
    world.cut()
    world.run(1)
    gone = world.connections.pop(0)
    (act,) = world.run(11)
    assert (act.kind, act.flows, act.because) == ("unpin", (gone.key,), "the connection is over")


def test_a_rail_that_nobody_measures_any_more_is_let_go() -> None:
    world = World([1, 1, 2, 2])
    world.run(3)
    world.cut()
    world.run(1)
    world.unheard = {1, 2}
    world.run(4)
    assert world.counts() == [0, 4], "hold"
    (act,) = world.run(3)
    assert (act.kind, len(act.flows)) == ("unpin", 2)


def test_a_refused_pin_is_tried_again() -> None:
    world = World([1, 1, 2, 2])
    world.run(3)
    world.cut()
    act = next(act for _ in range(100) for act in _decide_only(world))
    world.flows.carried_out(act, world.now, dict.fromkeys(act.flows, "its gateway is not alive"))
    assert len(world.flows.held) == 0
    again = world.run(2)
    assert again
    assert set(again[0].flows) == set(act.flows)


def _decide_only(world: World) -> tuple[FlowAct, ...]:
    """Run until something is wanted, and do not do it."""
    from steering.flows.plan import FlowPlan

    steer, wanted = world.steer, FlowPlan()

    def look() -> None:
        nonlocal wanted
        if not wanted.acts:
            wanted = world.flows.decide(world.engine.paths, world.engine.groups.values(), world.now)

    world.steer = look  # type: ignore[method-assign]
    world.run(0.02)
    world.steer = steer  # type: ignore[method-assign]
    return wanted.acts


def test_a_dry_run_says_it_once_per_lease() -> None:
    world = World([1, 1, 2, 2], dry=True)
    world.run(3)
    world.cut()
    assert len(world.run(4)) == 1
    assert len(world.run(4)) == 1
    assert len(world.flows.held) == 0


def test_two_members_on_one_interface_cannot_be_told_apart() -> None:
    world = World([1, 1, 2, 2])
    twice = replace(world.group.members[1], interface="rail1")
    world.group = replace(world.group, members=(world.group.members[0], twice))
    world.engine.arrange([world.group], lambda address: (world.group.target,), world.now)
    world.cut()
    world.run(3)
    why = "two members leave by rail1: which one a flow takes cannot be told"
    assert world.flows.skipped == {world.group.target: why}
    assert world.flows.facts()["flows_skipped"] == world.flows.skipped
    assert world.acts == []


@settings(max_examples=15)
@given(st.lists(st.integers(1, 3), min_size=3, max_size=10), st.sampled_from([5, 10, 30]), st.integers(1, 3))
@example([1] * 6, 30, 1)  # the last one moves after 3.4 s
def test_whatever_is_cut_moves_are_few_and_settle(routed: list[int], to: int, rail: int) -> None:
    """Never a move to a bad rail, none after it has settled, and each flow once."""
    world = World(routed, rails=3)
    world.run(2)
    world.cut(rail, to * MBIT)
    for act in world.run(5):
        assert all(pin.nexthop_id != 10 + rail for pin in act.pins)
    assert world.run(5) == []
    moved = [pin.flow for _, act in world.acts for pin in act.pins]
    assert len(moved) == len(set(moved))
    lowest = min(connection.rate for connection in world.connections)
    assert lowest >= 0.85 * 100 * MBIT / -(-len(routed) // 2) or not moved


# ---- labels ----


def test_labels_differ_by_connection_and_try_and_are_the_same_again() -> None:
    keys = [key_of(tcp_flow(port, 0)) for port in range(40_000, 40_050)]
    drawn = {next_label(key, tries, "h1") for key in keys for tries in range(TRIES)}
    assert len(drawn) > 195
    assert all(0 < label < 1 << 20 for label in drawn)
    assert next_label(keys[0], 1, "h1") != next_label(keys[0], 1, "h2")


def test_the_same_try_of_a_connection_draws_the_same_label_whenever_it_is_made() -> None:
    (fine,) = rates_after((1000, 0), (1100, 1000)).rates(1100 * MS)
    bad, drawn = replace(fine, troubled=True), []
    for began in (2 * SECOND, 7 * SECOND):
        first = relabelled(bad, None, "h1", SECOND, began)
        second = relabelled(bad, first, "h1", SECOND, began + 3 * SECOND)
        assert first is not None
        assert second is not None
        drawn.append((first.change.label, second.change.label))
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 2


def test_a_connection_is_relabelled_while_it_is_in_trouble_a_few_times() -> None:
    rates = rates_after((1000, 0), (1100, 1000))
    (fine,) = rates.rates(1100 * MS)
    assert relabelled(fine, None, "h1", SECOND, 1100 * MS) is None
    bad, known, now, tries = replace(fine, troubled=True, srtt_ns=100 * MS), None, 1100 * MS, 0
    while now < 20 * SECOND:
        new = relabelled(bad, known, "h1", SECOND, now)
        if new is not None:
            assert known is None or (new.change.label != known.change.label and now - known.since_ns >= 1500 * MS)
            known, tries = new, tries + 1
        now += 50 * MS
    assert tries == TRIES
    assert known is not None
    again = relabelled(bad, known, "h1", SECOND, known.since_ns + 21 * SECOND)
    assert again is not None, "the fabric has had time to heal"
    assert again.tries == 1


@pytest.mark.parametrize(
    ("stuck", "through", "drawn"),
    [(2, 14, 2), (12, 4, 12), (13, 3, 0), (15, 1, 0), (16, 0, 0), (1, 0, 1), (2, 0, 0), (0, 16, 0)],
)
def test_only_connections_that_do_not_get_through_while_others_do_get_another_label(
    stuck: int, through: int, drawn: int
) -> None:
    world = World([], routed6=[1] * (stuck + through + 3), text=RELABEL)
    ((number, _),) = enumerate(world.flows.policy.rules)
    group = replace(world.group, paths=tuple((20 + rail, path) for rail, path in world.paths6.items()))
    group = replace(group, members=tuple(replace(m, nexthop_id=m.nexthop_id + 10) for m in group.members))
    ways = ways_of(group, "fd00:9::2", lambda _: True, lambda _: False)
    (fine,) = rates_after((1000, 0), (1100, 1000)).rates(1100 * MS)
    flows = tuple(
        replace(fine, key=each.key, path=world.paths6[1], troubled=place < stuck)
        for place, each in enumerate(world.connections)
    )
    slow = tuple(replace(flow, troubled=False, peak_bps=0.0) for flow in flows[stuck + through :])  # nothing to say
    case = Case(world.flows.policy, number, group, ways, ((world.paths6[1], number),), "", 0, flows[:-3] + slow, SECOND)
    act = label_act(case, Holdings(world.flows.policy), "h1")
    assert (0 if act is None else len(act.labels)) == drawn


def test_who_waits_for_others_of_its_job_is_in_no_trouble_and_who_waits_for_its_timer_is() -> None:
    rates = rates_after((1000, 0), (1100, 1000), cwnd_segments=1, srtt_ns=100 * MS)
    (flow,) = rates.rates(1900 * MS)
    assert (flow.demand_bps, flow.troubled) == (INFINITE, False)
    timer = Stall(timeouts=1, rto_ns=200 * MS, lasted_ns=300 * MS)
    rates = rates_after((1000, 0), (1100, 1000), stall=timer)
    (flow,) = rates.rates(1900 * MS)
    assert flow.troubled


# ---- what is held ----


def test_a_flow_may_be_moved_as_often_as_the_policy_says_however_often_that_is() -> None:
    held, world = Holdings(parse(POLICY.replace("count: 1", "count: 100"), "p")), World([1])
    key = world.connections[0].key
    for move in range(100):
        assert held.may_move(key, SECOND)
        pin = Pin(key, kit.TARGET, 11 + move % 2, 9 * SECOND)
        held.note(FlowAct("pin", kit.TARGET, (key,), "", "", 0, (pin,), troubles=((kit.path(), 0),)), (), SECOND)
    assert not held.may_move(key, SECOND)


def test_the_tries_of_a_label_begin_anew_where_the_act_says_so() -> None:
    held, key = Holdings(parse(POLICY, "p")), World([1]).connections[0].key
    for tries in (*range(1, TRIES + 1), 1):
        change = LabelChange(key, 100 + tries, 9 * SECOND)
        act = FlowAct("relabel", kit.TARGET, (key,), "", "", 0, labels=(change,), tries=(tries,))
        held.note(replace(act, troubles=((kit.path(), 0),)), (), SECOND)
        known = held.get("relabel", key)
        assert known is not None
        assert known.label is not None
        assert known.label.tries == tries
