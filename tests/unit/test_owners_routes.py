"""What others route the managed prefixes over: views, hops, stand-bys, and what is passed on. Without a kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytools.kernel.netlink.routes import route_message, route_of
from pytools.kernel.netlink.routing import Hop, Link, Member, Nexthop, NexthopGroup, Route, Rule
from pytools.kernel.netlink.tables import rule_message, rule_of
from steering.actuators.objects import Objects, tables_of
from steering.actuators.owners_routes import Way, views
from steering.actuators.steered import Steered

MANAGED = ("10.9.0.0/16",)
LINKS = [Link(100 + rail, f"rail{rail}", True, True, True, 1, "veth", 1500, "") for rail in (1, 2, 3)]
BLUE = Link(9, "blue", True, True, True, 1, "vrf", 1500, "", vrf_table=77)


def body(message):
    message.encode()
    return bytes(message.data)[16:]


def rule(priority=32766, table=254, **fields):
    return rule_of(body(rule_message(Rule(priority, 4, table=table, **fields))))


def route(prefix, *rails, table=254, weights=None, **fields):
    hops = tuple(Hop(f"10.{r}.1.1", 100 + r, (weights or {}).get(r, 1)) for r in rails)
    one = {"gateway": hops[0].gateway, "ifindex": hops[0].ifindex} if len(hops) == 1 else {"hops": hops}
    return route_of(body(route_message(Route(prefix, 4, table, protocol=4, **one, **fields))))


def kernel(*routes, rules=(), links=(), nexthops=(), groups=()):
    every = [*LINKS, *links]
    tables = {}
    for each in routes:
        tables.setdefault((4, each.table), []).append(each)
    return Objects(
        {link.index: link for link in every},
        {each.id: each for each in nexthops},
        {each.id: each for each in groups},
        (rule(0, 255), *rules, rule()),
        {name: tuple(several) for name, several in tables.items()},
        {link.name: link for link in every},
    )


def seen(objects, managed=MANAGED, **more):
    return {
        view.name: {each.destination: {way.interface: weight for way, weight in each.ways} for each in view.prefixes}
        for view in views(objects, managed, **more)
    }


def test_only_what_is_managed_and_has_a_choice_is_steerable():
    objects = kernel(route("10.9.1.0/24", 1, 2, weights={2: 5}), route("10.9.2.0/24", 1), route("10.8.0.0/16", 1, 2))
    assert seen(objects) == {"main": {"10.9.1.0/24": {"rail1": 1, "rail2": 5}}}
    [view] = views(objects, MANAGED)
    assert set(view.refused) == {"10.9.2.0/24"} and "one hop" in view.refused["10.9.2.0/24"]


def test_worse_routes_and_alternatives_stand_by():
    objects = kernel(route("10.9.1.0/24", 2, metric=70), route("10.9.1.0/24", 1, metric=50))
    assert seen(objects) == {"main": {"10.9.1.0/24": {"rail1": 1, "rail2": 0}}}
    alternatives = [("10.3.1.1", "rail3"), ("fd00:3::1", "rail3"), ("10.4.1.1", "rail4")]
    found = seen(kernel(route("10.9.1.0/24", 1)), alternatives=alternatives)
    assert found == {"main": {"10.9.1.0/24": {"rail1": 1, "rail3": 0}}}


def test_what_covers_a_managed_prefix_carries_the_rest_of_it():
    objects = kernel(route("0.0.0.0/0", 1, 2), route("10.9.1.0/24", 3), route("10.9.2.0/24", 2, 3))
    [view] = views(objects, MANAGED)
    assert {each.destination for each in view.prefixes} == {"10.9.0.0/16", "10.9.2.0/24"}
    assert view.passed_on == ("10.9.1.0/24",)
    assert seen(kernel(route("0.0.0.0/0", 1))) == {"main": {}}


TO_A_LINK = {"protocol": 2, "hops": (), "ifindex": 101}


@pytest.mark.parametrize("fields", [{"kind": 6}, {"protocol": 1}, TO_A_LINK], ids=["blackhole", "redirect", "link"])
def test_what_cannot_be_steered_is_passed_on(fields):
    hole = replace(route("10.9.1.0/24", 1, 2), **fields)
    [view] = views(kernel(route("10.9.0.0/16", 1, 2), hole), MANAGED)
    assert [each.destination for each in view.prefixes] == ["10.9.0.0/16"] and view.passed_on == ("10.9.1.0/24",)


def test_routes_over_gateways_that_say_they_are_the_kernels_are_steered():
    cilium = replace(route("10.9.1.0/24", 1, 2), protocol=2)
    assert seen(kernel(cilium)) == {"main": {"10.9.1.0/24": {"rail1": 1, "rail2": 1}}}


def test_routes_for_some_packets_only_are_left_alone():
    special = replace(route("10.9.1.0/24", 1, 2), special=True)
    [view] = views(kernel(special), MANAGED)
    assert view.prefixes == () and "one source" in view.refused["10.9.1.0/24"]


def test_every_table_that_a_rule_leads_to_is_a_view_of_its_own():
    by_source = rule(1000, 100, source="10.9.0.1/32"), rule(1001, 100, source="10.9.0.5/32")
    ours = rule(32765, 20_000, protocol=201)
    objects = kernel(route("10.9.1.0/24", 1, 2), route("0.0.0.0/0", 2, 3, table=100), rules=(*by_source, ours))
    assert tables_of(objects.rules, LINKS, ()) == {(4, 254), (4, 100)}
    found = {view.name: view for view in views(objects, MANAGED)}
    assert found.keys() == {"main", "100"}
    assert [selector.priority for selector in found["100"].selectors] == [1000, 1001]


def test_what_a_rule_suppresses_does_not_count():
    wireguard = replace(rule(100, 254), suppress=0)
    objects = kernel(route("0.0.0.0/0", 1, 2), route("10.9.1.0/24", 1, 2), rules=(wireguard,))
    found = {view.suppress: {each.destination for each in view.prefixes} for view in views(objects, MANAGED)}
    assert found == {0: {"10.9.1.0/24"}, None: {"10.9.0.0/16", "10.9.1.0/24"}}


def test_a_vrf_counts_when_it_is_named():
    of_devices = replace(rule(1000, 0), l3mdev=True)
    objects = kernel(route("10.9.1.0/24", 1, 2, table=77), rules=(of_devices,), links=[BLUE])
    assert views(objects, MANAGED) == []
    assert tables_of(objects.rules, [BLUE], ["blue"]) == {(4, 254), (4, 77)}
    [view] = views(objects, MANAGED, vrfs=["blue"])
    assert (view.name, view.table) == ("blue", 77)
    assert [(each.iif, each.oif) for each in view.selectors] == [("blue", ""), ("", "blue")]


def test_a_group_counts_by_where_its_nexthops_lead():
    nexthops = [Nexthop(10 + rail, 4, f"10.{rail}.1.1", 100 + rail, 4) for rail in (1, 2)]
    group = NexthopGroup(102, (Member(11, 1), Member(12, 3)), "mpath", 4)
    by_group = route_of(body(route_message(Route("10.9.1.0/24", 4, 254, nexthop_id=102, protocol=4))))
    assert seen(kernel(by_group, nexthops=nexthops, groups=[group])) == {
        "main": {"10.9.1.0/24": {"rail1": 1, "rail2": 3}}
    }
    assert seen(kernel(by_group, nexthops=nexthops[:1], groups=[group])) == {"main": {}}, "a member is gone"


# ---- a target follows ----


def way(rail):
    return Way(4, f"10.{rail}.1.1", f"rail{rail}", 100 + rail)


def steered(ways, weights):
    target = Steered("t", (4, 254, None), tuple((way(rail), weight) for rail, weight in ways.items()), ("prefix",))
    target.follow(kernel())
    target.weights = {way(rail): weight for rail, weight in weights.items()}
    return target


def shares(target):
    return {int(each.interface[-1]): weight for each, weight in target.shares.items()}


def follow(target, ways, down=()):
    target.ways = tuple((way(rail), weight) for rail, weight in ways.items())
    objects = kernel()
    links = {index: replace(link, carrier=link.name not in down) for index, link in objects.links.items()}
    target.follow(replace(objects, links=links))
    return shares(target)


def test_a_hop_that_is_withdrawn_leaves_and_comes_back_with_nothing():
    target = steered({1: 1, 2: 1, 3: 1}, {1: 1, 2: 10, 3: 10})
    assert follow(target, {1: 1, 2: 1}) == {1: 1, 2: 10}
    assert follow(target, {1: 1, 2: 1, 3: 1}) == {1: 1, 2: 10}


def test_a_new_hop_joins_in_proportion():
    assert follow(steered({1: 1, 2: 1}, {1: 1, 2: 10}), {1: 1, 2: 1, 3: 2}) == {1: 1, 2: 10, 3: 20}


def test_a_hop_that_was_left_stays_left_whatever_comes_and_goes():
    target = steered({1: 1, 2: 1}, {2: 1})
    assert follow(target, {1: 1, 2: 1, 3: 1}) == {2: 1, 3: 1}
    assert follow(target, {1: 5, 2: 1, 3: 1}, down=("rail3",)) == {2: 1}


def test_with_the_last_hop_of_ours_gone_theirs_decide():
    target = steered({1: 1, 2: 1}, {2: 1})
    assert follow(target, {1: 1, 2: 1}, down=("rail2",)) == {1: 1}
    assert target.weights is None


def test_what_is_not_in_force_has_their_weights():
    target = steered({1: 1, 2: 1}, {2: 1})
    target.weights = None
    assert follow(target, {1: 3, 2: 4, 3: 0}) == {1: 3, 2: 4}


def taken_out(objects, apart, managed=MANAGED):
    """Destination, interfaces and origin of what is steered apart, and what is passed on."""
    [view] = views(objects, managed, apart=apart)
    own = {each.destination: each for each in view.prefixes if each.within}
    ways = {name: {way.interface for way, _ in each.ways} for name, each in own.items()}
    return ways, {name: each.within for name, each in own.items()}, view.passed_on


def test_an_address_is_taken_out_of_the_prefix_that_carries_it():
    objects = kernel(route("10.9.0.0/16", 1, 2), route("10.9.7.0/24", 2, 3), route("10.9.8.8/32", 1, 3))
    apart = ("10.9.1.1", "10.9.7.1", "10.9.8.8")
    assert taken_out(objects, apart) == (
        {"10.9.1.1/32": {"rail1", "rail2"}, "10.9.7.1/32": {"rail2", "rail3"}, "10.9.8.8/32": {"rail1", "rail3"}},
        {"10.9.1.1/32": "10.9.0.0/16", "10.9.7.1/32": "10.9.7.0/24", "10.9.8.8/32": "10.9.8.8/32"},
        (),
    )


def test_an_address_whose_route_cannot_be_steered_or_is_not_managed_is_not_taken_out():
    objects = kernel(route("10.9.0.0/16", 1, 2), route("10.9.7.0/24", 1), route("10.8.0.0/16", 1, 2))
    ways, _, passed_on = taken_out(objects, ("10.9.7.1", "10.8.0.1", "fd00::1", "no address"))
    assert ways == {} and passed_on == ("10.9.7.0/24",)


def test_an_address_is_taken_out_where_a_wider_route_covers_what_is_managed():
    ways, within, _ = taken_out(kernel(route("0.0.0.0/0", 1, 2)), ("10.9.1.1", "10.10.0.1"))
    assert ways == {"10.9.1.1/32": {"rail1", "rail2"}} and within == {"10.9.1.1/32": "10.9.0.0/16"}
