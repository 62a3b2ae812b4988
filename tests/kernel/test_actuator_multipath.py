"""Routes with several hops on the kernel, both families; `ip -j -d route` is the judge."""

from __future__ import annotations

import errno
import json
import threading

import pytest
import steering_kit as kit
import support

from pytools.kernel.netlink import Netlink, NetlinkError
from pytools.kernel.netlink_routes import route_of, with_hops
from steering.acting import journal, settle
from steering.actuators import topology
from steering.actuators.registry import Actuators
from steering.actuators.route_names import hop_id
from steering.plan import title

MANAGED = ("10.9.0.0/16", "fd00:9::/32")
PREFIX = {4: "10.9.2.0/24", 6: "fd00:9:2::/64"}
ATTRIBUTES = {
    4: ["src", "10.8.0.1", "metric", "50", "mtu", "1400", "advmss", "1300", "quickack", "1"],
    6: ["src", "fd00:8::1", "metric", "50", "mtu", "1400", "pref", "high"],
}
TARGET = {family: f"multipath:main:{prefix}@50" for family, prefix in PREFIX.items()}


class Host(kit.Host):
    """A host with three rails and a route over all of them."""

    def __init__(self, first, second, family):
        super().__init__(first)
        self.family, self.peer = family, second
        for rail in (1, 2, 3):
            support.join(first, second, f"rail{rail}")
            for netns, end in ((first, 2), (second, 1)):
                dev = ["dev", f"rail{rail}"]
                support.run(["ip", "-n", netns, "address", "add", f"10.{rail}.1.{end}/24", *dev])
                support.run(["ip", "-n", netns, "address", "add", f"fd00:{rail}:1::{end}/64", *dev, "nodad"])
                support.run(["ip", "-n", netns, "link", "set", f"rail{rail}", "up"])
        self.ip("link", "set", "lo", "up")
        self.ip("address", "add", "10.8.0.1/32", "dev", "lo")
        self.ip("address", "add", "fd00:8::1/128", "dev", "lo")
        support.wait_until(lambda: "tentative" not in self.ip("-6", "address"), 10, "the addresses are settled")

    def gateway(self, rail):
        return f"10.{rail}.1.1" if self.family == 4 else f"fd00:{rail}:1::1"

    def hop(self, rail, weight=1):
        return ["nexthop", "via", self.gateway(rail), "dev", f"rail{rail}", "weight", str(weight)]

    def add(self, weights, *attributes, prefix=None, verb="add"):
        hops = [word for rail, weight in weights.items() for word in self.hop(rail, weight)]
        place = ["route", verb, prefix or PREFIX[self.family], "proto", "static"]
        self.ip(f"-{self.family}", *place, *(attributes or ATTRIBUTES[self.family]), *hops)

    def described(self, prefix=None):
        """The route according to iproute2."""
        found = json.loads(self.ip("-j", "-d", f"-{self.family}", "route", "show", prefix or PREFIX[self.family]))
        assert len(found) == 1, found
        return found[0]

    def by_rail(self):
        """Weight by rail, according to iproute2."""
        route = self.described()
        if "nexthops" not in route:
            return {int(route["dev"][-1]): None}
        return {int(hop["dev"][-1]): hop["weight"] for hop in route["nexthops"]}

    def weights(self, by_rail):
        """What we call these."""
        return tuple(sorted((hop_id(self.gateway(rail), f"rail{rail}"), w) for rail, w in by_rail.items()))


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
def route(host, actuators):
    host.add({1: 3, 2: 5, 3: 2})
    return actuators.find(MANAGED).groups[TARGET[host.family]]


ALL = {1: 3, 2: 5, 3: 2}


@pytest.mark.guest
def test_weights_are_changed_and_everything_else_is_kept(host, actuators, route):
    before = host.described()
    wanted = host.weights({1: 1, 2: 50, 3: 20})
    outcome = actuators.apply(route, [route.original], wanted)
    assert (outcome.kind, outcome.weights) == ("applied", wanted), outcome
    assert host.by_rail() == {1: 1, 2: 50, 3: 20}
    after = host.described()
    for name in before.keys() | after.keys():
        if name != "nexthops":
            assert after.get(name) == before.get(name), name
    assert actuators.undo(route, [wanted]).kind == "applied"
    assert host.described() == before


@pytest.mark.parametrize("left", [{2: 5, 3: 2}, {3: 2}, {1: 3}])
def test_a_hop_that_is_left_out_comes_back_as_it_was(host, actuators, route, left):
    before = host.described()
    wanted = host.weights(left)
    assert actuators.apply(route, [route.original], wanted).kind == "applied"
    assert list(host.by_rail()) == list(left)
    assert actuators.weights(route) == (wanted if len(left) > 1 else ((wanted[0][0], 1),))
    assert host.described()["metrics"] == before["metrics"]
    assert actuators.undo(route, [wanted]).kind == "applied"
    assert host.described() == before
    assert actuators.undo(route, [wanted]).kind == "applied", "and again, to no effect"
    assert host.described() == before


def test_what_only_one_hop_has_is_kept_too(host, actuators):
    if host.family == 6:
        host.add(ALL, "metric", "50", "mtu", "lock", "1300")
    else:
        hops = ["nexthop", "via", "10.77.0.1", "dev", "rail1", "onlink", "nexthop", "via", "inet6", "fd00:2:1::1"]
        rest = ["dev", "rail2", "weight", "4", "nexthop", "via", "10.3.1.1", "realm", "7", "dev", "rail3"]
        host.ip("route", "add", PREFIX[4], "proto", "77", "metric", "50", *hops, *rest)
    before = host.described()
    route = actuators.find(MANAGED).groups[TARGET[host.family]]
    last = route.original[-1:]
    for step in [last, route.original[:2]] if host.family == 4 else [last]:
        now = actuators.weights(route)
        assert actuators.apply(route, [now], step).kind == "applied"
        assert host.described() != before
    assert actuators.undo(route, [step]).kind == "applied"
    assert host.described() == before


def test_a_route_is_never_left_without_a_hop(host, actuators, route):
    with pytest.raises(ValueError, match="without a hop"):
        actuators.apply(route, [route.original], ())
    assert host.by_rail() == ALL


def test_what_somebody_else_changed_stays(host, actuators, route):
    drained = host.weights({2: 5, 3: 2})
    assert actuators.apply(route, [route.original], drained).kind == "applied"
    host.add({1: 7, 2: 9}, verb="replace")
    theirs = host.described()
    outcome = actuators.apply(route, [drained], route.original)
    assert outcome.kind == "manual" and "weight 9" in outcome.why
    assert actuators.undo(route, [drained]).kind == "manual"
    assert host.described() == theirs


def test_a_route_that_is_gone(host, actuators, route):
    host.ip(f"-{host.family}", "route", "delete", PREFIX[host.family])
    assert actuators.weights(route) is None
    assert actuators.apply(route, [route.original], host.weights({2: 1})).kind == "gone"
    assert actuators.undo(route, [host.weights({2: 1})]).kind == "gone"
    for rail in (1, 2, 3):
        host.ip("link", "set", f"rail{rail}", "down")
    assert actuators.undo(route, [host.weights({2: 1})]).kind == "gone", "that no interface is up is of no account"


def test_a_more_specific_route_to_the_same_address_does_not_mislead(host, actuators, route):
    address = PREFIX[host.family].partition("/")[0]
    host.ip(f"-{host.family}", "route", "add", address, "via", host.gateway(3), "dev", "rail3")
    wanted = host.weights({1: 3, 3: 2})
    assert actuators.apply(route, [route.original], wanted).kind == "applied"
    assert host.by_rail() == {1: 3, 3: 2}


def test_a_refusal_leaves_the_route_as_it_was(host, actuators, route, monkeypatch):
    before = host.described()
    from steering.actuators import multipath

    def nonsense(body, hops):
        return with_hops(body, [hops[0], hops[0]] if host.family == 6 else [])

    monkeypatch.setattr(multipath, "with_hops", nonsense)
    outcome = actuators.apply(route, [route.original], host.weights({1: 1, 2: 1}))
    assert outcome.kind == "failed" and outcome.why
    assert outcome.weights == route.original
    assert host.described() == before


def test_what_the_kernel_did_by_half_is_taken_back(host, netlink, actuators, route, monkeypatch):
    """IPv6 adds one hop after the other, and may refuse a later one."""
    before, make = host.described(), netlink.make_routes

    def by_half(bodies, replace):
        monkeypatch.setattr(netlink, "make_routes", make)
        first = with_hops(bodies[0], [route_of(bodies[0]).hops[0]])
        assert make([first], replace=replace) == [None]
        return [NetlinkError("making a route", 12, "")]

    monkeypatch.setattr(netlink, "make_routes", by_half)
    outcome = actuators.apply(route, [route.original], host.weights({1: 1, 2: 1, 3: 9}))
    assert (outcome.kind, outcome.weights) == ("failed", route.original)
    assert host.described() == before


@pytest.mark.parametrize(("code", "kind"), [(errno.ENOMEM, "failed"), (errno.ENOENT, "gone")])
def test_a_route_that_the_kernel_deleted_with_its_refusal_is_made_again(
    host, netlink, actuators, route, monkeypatch, code, kind
):
    """IPv6 deletes what it had added when it refuses a later hop; where there was nothing, somebody deleted it."""
    before, make = host.described(), netlink.make_routes

    def deleted(bodies, replace):
        monkeypatch.setattr(netlink, "make_routes", make)
        host.ip(f"-{host.family}", "route", "delete", PREFIX[host.family])
        return [NetlinkError("making a route", code, "")]

    monkeypatch.setattr(netlink, "make_routes", deleted)
    outcome = actuators.apply(route, [route.original], host.weights({1: 1, 2: 1, 3: 9}))
    assert outcome.kind == kind
    assert kind == "gone" or host.described() == before
    assert (actuators.weights(route) is None) == (kind == "gone")


def test_undo_without_the_record_of_the_route_gives_the_weights_back(host, actuators, route):
    """What a journal of another version may lack."""
    from dataclasses import replace

    drained = host.weights({2: 5})
    actuators.apply(route, [route.original], drained)
    assert actuators.undo(replace(route, origin=""), [drained]).kind == "applied"
    assert host.by_rail() == ALL


@pytest.mark.guest(every=2)
def test_a_hop_whose_interface_is_down_is_left_out_of_undo(host, actuators, route):
    drained = host.weights({2: 5, 3: 2})
    actuators.apply(route, [route.original], drained)
    host.ip("link", "set", "rail1", "down")
    outcome = actuators.undo(route, [drained])
    assert outcome.kind == "applied" and "rail1" in outcome.why
    assert host.by_rail() == {2: 5, 3: 2}


def test_an_interface_that_was_made_anew_is_found_by_its_name(host, actuators, route):
    drained = host.weights({2: 5, 3: 2})
    actuators.apply(route, [route.original], drained)
    host.ip("link", "delete", "rail1")
    support.join(host.netns, host.peer, "rail1")
    support.run(["ip", "-n", host.peer, "link", "set", "rail1", "up"])
    host.ip("address", "add", "10.1.1.2/24", "dev", "rail1")
    host.ip("address", "add", "fd00:1:1::2/64", "dev", "rail1", "nodad")
    host.ip("link", "set", "rail1", "up")
    assert actuators.undo(route, [drained]).kind == "applied"
    assert host.by_rail() == ALL


def test_a_journal_alone_is_enough_to_put_a_route_back(host, netlink, actuators, tmp_path):
    last = ["onlink", "nexthop", "via", host.gateway(2), "dev", "rail2", "weight", "5"]
    place = [f"-{host.family}", "route", "add", PREFIX[host.family], "metric", "50"]
    host.ip(*place, "nexthop", "via", "10.77.0.1" if host.family == 4 else "fd77::1", "dev", "rail1", *last)
    route = actuators.find(MANAGED).groups[TARGET[host.family]]
    before = host.described()
    assert "onlink" in before["nexthops"][0]["flags"]
    drained = host.weights({2: 5})
    with journal.Journal(tmp_path / "journal.jsonl") as log:
        log.write(journal.entry_now("intent", "a", route, route.original, drained, "why", "rule", "here"))
        Actuators(netlink).apply(route, [route.original], drained)
        (settled,) = settle.settle(log, Actuators(netlink), "here", "command")
        assert settled.outcome.kind == "applied"
        assert title(settled.target) in settled.text
    assert host.described() == before


def test_there_is_a_route_at_every_instant(host, actuators, route):
    """Looked up without a pause while the hops are left out and put back.

    IPv6 refuses whoever reads the very route that is being replaced, so there the next look counts (docs/actuators.md).
    """
    address = PREFIX[host.family].partition("/")[0]
    ends, missing, asked = threading.Event(), [], 0

    def ask():
        nonlocal asked
        with Netlink(host.netns) as other:
            while not ends.is_set():
                asked += 1
                refusals = []
                while len(refusals) < (1 if host.family == 4 else 2):
                    try:
                        other.route_get(address)
                        break
                    except NetlinkError as refusal:
                        refusals.append(str(refusal))
                else:
                    missing.append(refusals)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        steps = [host.weights(step) for step in ({2: 5}, {1: 1, 2: 10, 3: 10}, {1: 3, 3: 2}, ALL)]
        now = route.original
        for step in steps * 25:
            assert actuators.apply(route, [now], step).kind == "applied"
            now = step
    finally:
        ends.set()
        asking.join(10)
    assert missing == [] and asked > 0


# ---- which routes may be steered ----


def found(netlink, steered=()):
    return topology.find(netlink, MANAGED, steered)


def test_a_route_is_found_with_its_hops(host, netlink, route):
    assert route.destinations == (PREFIX[host.family],)
    assert [(m.gateway, m.interface, m.weight) for m in route.members] == [
        (host.gateway(rail), f"rail{rail}", weight) for rail, weight in ALL.items()
    ]
    assert "new flows" in route.moves
    known = found(netlink)
    inside = PREFIX[host.family].replace("0/24", "77").replace("::/64", "::77")
    assert known.target_of(inside) == TARGET[host.family]
    assert known.usable(route) == {m.nexthop_id for m in route.members}
    host.ip("link", "set", "rail2", "down")
    assert found(netlink).usable(route) == {m.nexthop_id for m in route.members if m.interface != "rail2"}


def test_a_route_with_the_usual_metric_is_called_by_its_prefix_alone(host, netlink):
    host.add(ALL, "mtu", "1400")
    assert list(found(netlink).groups) == [f"multipath:main:{PREFIX[host.family]}"]


def test_a_route_that_was_left_with_one_hop_is_known_as_long_as_it_is_steered(host, netlink, actuators, route):
    actuators.apply(route, [route.original], host.weights({2: 5}))
    assert found(netlink).groups == {}
    assert found(netlink, [route]).groups[route.target].current == host.weights({2: 1})


def test_other_routes_are_none_of_ours(host, netlink):
    host.ip(f"-{host.family}", "route", "add", PREFIX[host.family], "via", host.gateway(1))
    host.add(ALL, "metric", "7", prefix="10.7.0.0/16" if host.family == 4 else "fd00:7::/48")
    assert found(netlink).groups == {}


@pytest.mark.parametrize("host", [4], indirect=True)  # IPv6 joins them into one
def test_two_routes_that_would_be_mixed_up_are_left_alone(host, netlink, route):
    host.add({1: 1, 2: 1}, verb="append")
    known = found(netlink)
    assert known.groups == {} and "another route" in known.refused[route.target]
