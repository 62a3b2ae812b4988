"""Several routes to one prefix on the kernel; `ip -j route` and the kernel's own look-up are the judges."""

from __future__ import annotations

import json

import pytest
import steering_kit as kit
import support

from pytools.kernel import leftovers
from pytools.kernel.netlink import Netlink
from steering.acting import journal, settle
from steering.actuators.registry import Actuators
from steering.actuators.route_names import hop_id

MANAGED = ("10.9.0.0/16", "fd00:9::/32")
PREFIX = {4: "10.9.2.0/24", 6: "fd00:9:2::/64"}
INSIDE = {4: "10.9.2.7", 6: "fd00:9:2::7"}


class Host(kit.Host):
    """A host that reaches a prefix over each of three rails, at metrics of 100, 200 and 300."""

    def __init__(self, first, second, family):
        super().__init__(first)
        self.family = family
        for rail in (1, 2, 3):
            support.join(first, second, f"rail{rail}")
            self.ip("address", "add", f"10.{rail}.1.2/24", "dev", f"rail{rail}")
            self.ip("address", "add", f"fd00:{rail}:1::2/64", "dev", f"rail{rail}", "nodad")
            support.run(["ip", "-n", second, "link", "set", f"rail{rail}", "up"])
            self.ip("link", "set", f"rail{rail}", "up")
        support.wait_until(lambda: "tentative" not in self.ip("-6", "address"), 10, "the addresses are settled")
        for rail in (1, 2, 3):
            self.route("add", rail, 100 * rail)

    def gateway(self, rail):
        return f"10.{rail}.1.1" if self.family == 4 else f"fd00:{rail}:1::1"

    def route(self, verb, rail, metric, *extra):
        way = ["via", self.gateway(rail), "dev", f"rail{rail}"]
        place = [PREFIX[self.family], *way, "metric", str(metric)]
        self.ip(f"-{self.family}", "route", verb, *place, *(extra or ("proto", "static", "mtu", "1400")))

    def described(self):
        return json.loads(self.ip("-j", "-d", f"-{self.family}", "route", "show", PREFIX[self.family]))

    def taken(self):
        """The rail that the kernel chooses."""
        (found,) = json.loads(self.ip("-j", "route", "get", INSIDE[self.family]))
        return int(found["dev"][-1])

    def weights(self, rail):
        return ((hop_id(self.gateway(rail), f"rail{rail}"), 1),)


@pytest.fixture(params=[4, 6])
def host(request, make_namespace):
    return Host(make_namespace(), make_namespace(), request.param)


@pytest.fixture
def netlink(host):
    with Netlink(host.netns) as opened:
        yield opened


@pytest.fixture
def actuators(netlink):
    return Actuators(netlink)


@pytest.fixture
def routes(host, actuators):
    return actuators.find(MANAGED).groups[f"metric:main:{PREFIX[host.family]}"]


def test_the_one_in_force_is_found_and_the_others_with_it(host, actuators, routes):
    assert [(m.interface, m.weight) for m in routes.members] == [("rail1", 1), ("rail2", 0), ("rail3", 0)]
    assert routes.original == routes.current == host.weights(1) == actuators.weights(routes)
    assert actuators.find(MANAGED).target_of(INSIDE[host.family]) == routes.target
    assert "live" in routes.moves


@pytest.mark.guest
def test_another_one_is_preferred_and_nobody_elses_route_is_touched(host, actuators, routes):
    before = host.described()
    for rail in (2, 3, 2):
        now = actuators.weights(routes)
        outcome = actuators.apply(routes, [now], host.weights(rail))
        assert (outcome.kind, outcome.weights) == ("applied", host.weights(rail))
        assert host.taken() == rail
        ours = [route for route in host.described() if route not in before]
        assert [(route["protocol"], route["metric"], route["metrics"]) for route in ours] == [
            ("201", 99, [{"mtu": 1400}])
        ]
        assert [route for route in host.described() if route in before] == before
        known = actuators.find(MANAGED).groups[routes.target]
        assert (known.current, known.members) == (host.weights(rail), routes.members)
    assert actuators.apply(routes, [host.weights(2)], host.weights(1)).kind == "applied"
    assert host.described() == before


def test_undo_removes_ours(host, actuators, routes):
    before = host.described()
    actuators.apply(routes, [routes.original], host.weights(3))
    assert host.described() != before
    assert actuators.undo(routes, [host.weights(3)]).kind == "applied"
    assert host.described() == before
    assert actuators.undo(routes, [host.weights(3)]).kind == "applied", "and again, to no effect"


def test_a_journal_alone_is_enough(host, actuators, routes, tmp_path):
    before = host.described()
    with journal.Journal(tmp_path / "journal.jsonl") as log:
        log.write(journal.entry_now("intent", "a", routes, routes.original, host.weights(2), "", "", "here"))
        actuators.apply(routes, [routes.original], host.weights(2))
        (settled,) = settle.settle(log, actuators, "here", "guardian")
    assert (settled.outcome.kind, settled.outcome.why) == ("applied", "")
    assert host.described() == before


def test_somebody_elses_better_route_stays_and_is_told(host, actuators, routes):
    actuators.apply(routes, [routes.original], host.weights(2))
    host.route("add", 3, 5, "proto", "static")
    assert actuators.apply(routes, [host.weights(2)], host.weights(1)).kind == "manual"
    assert host.taken() == 3
    outcome = actuators.undo(routes, [host.weights(2)])
    assert outcome.kind == "applied" and "somebody" in outcome.why
    assert [route["metric"] for route in host.described()] == [5, 100, 200, 300]


def test_a_copy_whose_route_was_withdrawn_is_no_target_any_more(host, actuators, routes):
    """So the controller takes it back: traffic must not follow a route that its maker has withdrawn."""
    actuators.apply(routes, [routes.original], host.weights(2))
    host.route("delete", 2, 200)
    found = actuators.find(MANAGED, [routes])
    assert found.groups == {} and "is gone" in found.refused[routes.target]
    assert actuators.undo(routes, [host.weights(2)]).kind == "applied"
    assert host.taken() == 1


def test_a_route_that_is_gone_cannot_be_preferred(host, actuators, routes):
    host.route("delete", 3, 300)
    outcome = actuators.apply(routes, [routes.original], host.weights(3))
    assert outcome.kind == "failed" and "no such route" in outcome.why
    for rail in (1, 2):
        host.route("delete", rail, 100 * rail)
    assert actuators.apply(routes, [routes.original], host.weights(2)).kind == "gone"
    assert actuators.undo(routes, [host.weights(2)]).kind == "gone"
    assert actuators.weights(routes) is None


def test_it_is_one_route_or_nothing(host, actuators, routes):
    for wanted in ((), (*host.weights(1), *host.weights(2))):
        with pytest.raises(ValueError, match="exactly one"):
            actuators.apply(routes, [routes.original], wanted)


@pytest.mark.parametrize(
    ("metric", "protocol", "words"), [(1, "static", "metric 1"), (50, "zebra", "routing daemon"), (50, "bgp", "daemon")]
)
def test_where_it_would_not_do_it_is_left_alone(host, actuators, metric, protocol, words):
    host.route("add", 2, metric, "proto", protocol)
    found = actuators.find(MANAGED)
    assert found.groups == {} and words in found.refused[f"metric:main:{PREFIX[host.family]}"]


def test_a_route_without_a_gateway_is_left_alone(host, actuators):
    host.ip(f"-{host.family}", "route", "add", PREFIX[host.family], "dev", "rail3", "metric", "400", "proto", "static")
    found = actuators.find(MANAGED)
    assert found.groups == {} and "no gateway" in found.refused[f"metric:main:{PREFIX[host.family]}"]


def test_copies_are_swept(host, netlink, actuators, routes):
    before = host.described()
    actuators.apply(routes, [routes.original], host.weights(2))
    assert leftovers.sweep(netlink) == [f"route {PREFIX[host.family]} metric 99"]
    assert host.described() == before
    assert leftovers.sweep(netlink) == []
