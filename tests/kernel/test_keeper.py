"""What the kernel takes away with a link comes back, and a packet always has a route; `ip -j` is the judge."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import replace

import pytest
import steering_kit as kit
import support
from steering_kit import FIRST, GROUP, ORIGINAL, SECOND_HOP, TARGET

from pytools.kernel import leftovers, netns
from pytools.kernel.netlink import Netlink
from steering.actuators import remaking
from steering.actuators.keeper import Keeper
from steering.actuators.memory_file import MemoryFile
from steering.actuators.registry import Actuators
from steering.actuators.route_names import hop_id
from steering.plan import nexthop_group

MANAGED = ("10.9.0.0/16", "fd00:9::/32")
SIX = 202
_numbers = itertools.count()


class Host(kit.Host):
    """A host with two rails to another and a steered group."""

    def __init__(self, host, peer):
        super().__init__(host.netns)
        self.peer = peer

    def cable(self, rail, state):
        """Take a rail's carrier away at the other end, or give it back; until the kernel has taken notice."""
        support.run(["ip", "-n", self.peer, "link", "set", f"rail{rail}", state])
        flags = ("LOWER_UP",) if state == "up" else ("NO-CARRIER",)
        support.wait_until(lambda: set(flags) <= set(self.link(rail)["flags"]), 10, f"rail {rail} is {state}")

    def link(self, rail):
        return json.loads(self.ip("-j", "link", "show", f"rail{rail}"))[0]

    def nexthop(self, number):
        """A nexthop according to iproute2; None when there is none."""
        found = [each for each in self.nexthops() if each["id"] == number]
        return found[0] if found else None

    def nexthops(self):
        return json.loads(self.ip("-j", "-d", "nexthop", "list") or "[]")

    def theirs(self):
        """Everything that is not ours, for comparison."""
        routes = json.loads(self.ip("-j", "-d", "route")) + json.loads(self.ip("-j", "-d", "-6", "route"))
        return (
            [each for each in self.nexthops() if each["id"] < leftovers.FIRST_ID],
            [each for each in routes if each.get("metric") != leftovers.BACKUP_METRIC],
        )

    def ours(self):
        return [each for each in self.nexthops() if each["id"] >= leftovers.FIRST_ID]

    def taken(self, address="10.9.0.2"):
        """The interface by which a packet would leave; None when there is no route."""
        done = support.run(["ip", "-n", self.netns, "-j", "route", "get", address], check=False)
        return json.loads(done.stdout)[0]["dev"] if done.returncode == 0 else None


class Watched:
    """A keeper, and what a controller would know."""

    def __init__(self, host, netlink, file=None, keep=True):
        with netns.inside(host.netns):
            self.keeper = Keeper(netlink, MANAGED, keep, file)
        self.known, self.manual, self.view, self.told = {}, {}, None, []
        self.refresh()
        self.refresh()  # and once more, as the first makes the backups

    def refresh(self, frozen=False):
        self.view = self.keeper.refresh(self.known, self.manual.keys(), frozen)
        self.known = dict(self.view.groups)
        self.manual |= self.view.manual
        self.told += self.view.told
        return self.view

    def until(self, condition, what, frozen=False):
        def asked():
            self.keeper.heard()
            self.refresh(frozen)
            return condition()

        return support.wait_until(asked, 15, what, every_s=0.05)

    def apply(self, netlink, weights, target=TARGET):
        outcome = Actuators(netlink).apply(self.view.first[target], [self.known[target].current], weights)
        assert outcome.kind == "applied", outcome
        self.known[target] = replace(self.known[target], current=outcome.weights)


@pytest.fixture(params=["mpath"])
def host(request, make_namespace):
    first, second = make_namespace(), make_namespace()
    built = Host(kit.two_rails(first, second, request.param), second)
    for rail in (1, 2):
        for netns_, end in ((first, 2), (second, 1)):
            address = [f"fd00:{rail}:1::{end}/64", "dev", f"rail{rail}", "nodad"]
            support.run(["ip", "-n", netns_, "address", "add", *address])
        built.ip(
            "nexthop", "add", "id", str(20 + rail), "via", f"fd00:{rail}:1::1", "dev", f"rail{rail}", "proto", "44"
        )
    support.wait_until(lambda: "tentative" not in built.ip("-6", "address"), 10, "the addresses are settled")
    built.ip("nexthop", "add", "id", str(SIX), "group", "21,3/22,2", "proto", "44")
    built.ip("-6", "route", "add", "fd00:9::2/128", "nhid", str(SIX), "proto", "44", "metric", "77", "mtu", "1400")
    built.ip("route", "add", "10.9.5.0/24", "nhid", str(GROUP), "metric", "9", "proto", "static", "src", "10.1.1.2")
    return built


@pytest.fixture
def netlink(host):
    with Netlink(host.netns) as opened:
        yield opened


@pytest.fixture
def watched(host, netlink):
    kept = Watched(host, netlink)
    yield kept
    kept.keeper.close()


# ---- back with the link ----


@pytest.mark.guest(every=2)
@pytest.mark.parametrize("host", ["mpath", "resilient"], indirect=True)
def test_a_nexthop_comes_back_with_its_link_as_it_was(host, watched):
    before = [host.nexthop(number) for number in (FIRST, 21)]
    host.cable(1, "down")
    watched.until(lambda: watched.known[TARGET].current == ((SECOND_HOP, 1),), "the loss is noticed")
    assert host.nexthop(FIRST) is None and host.nexthop(21) is None
    assert [member.nexthop_id for member in watched.known[TARGET].members] == [SECOND_HOP]
    assert watched.manual == {}, "it is nobody's act"
    host.cable(1, "up")
    watched.until(lambda: host.nexthop(21), "the nexthop of IPv6 is back")
    assert [host.nexthop(number) for number in (FIRST, 21)] == before
    assert watched.manual == {}
    assert watched.known[TARGET].original == ORIGINAL, "it is a member again"
    assert watched.known[TARGET].current == ((SECOND_HOP, 1),), "whose weight is for the policy to give"
    assert any("nexthop 11 (10.1.1.1 dev rail1) is made again" in line for line in watched.told)


def test_its_weight_can_be_given_back(host, netlink, watched):
    before = host.theirs()
    host.cable(1, "down")
    watched.until(lambda: watched.known[TARGET].current == ((SECOND_HOP, 1),), "the loss is noticed")
    host.cable(1, "up")
    watched.until(lambda: host.nexthop(21), "the nexthops are back")
    watched.apply(netlink, ORIGINAL)
    watched.apply(netlink, watched.view.first[nexthop_group(SIX)].original, nexthop_group(SIX))
    watched.refresh()
    assert watched.manual == {} and host.theirs() == before


@pytest.mark.guest(every=2)
@pytest.mark.parametrize("host", ["mpath", "resilient"], indirect=True)
def test_a_group_comes_back_with_its_routes(host, watched):
    before = host.theirs()
    for rail in (1, 2):
        host.cable(rail, "down")
    watched.until(lambda: watched.view.lost == {TARGET, nexthop_group(SIX)}, "the groups are gone")
    assert host.taken() is None
    assert watched.view.target_of("10.9.0.2") == TARGET, "it is still known which target it was"
    for rail in (1, 2):
        host.cable(rail, "up")
    watched.until(lambda: host.theirs() == before, "all is back as it was")
    assert watched.view.lost == frozenset() and watched.manual == {}


def test_a_group_comes_back_over_the_first_link_that_does(host, watched):
    for rail in (1, 2):
        host.cable(rail, "down")
    watched.until(lambda: watched.view.lost, "the groups are gone")
    host.cable(2, "up")
    watched.until(lambda: host.taken() == "rail2", "there is a route again")
    assert host.weights() == {SECOND_HOP: 1}
    assert watched.view.first[TARGET].original == ORIGINAL
    host.cable(1, "up")
    watched.until(lambda: len(watched.known[TARGET].members) == 2, "the other is a member again")


def test_a_flap_that_nobody_saw_is_made_good(host, watched):
    """Down and up between two readings: gone without a word is the kernel's doing."""
    host.cable(1, "down")
    support.wait_until(lambda: host.nexthop(FIRST) is None, 10, "the kernel deletes the nexthop")
    host.cable(1, "up")
    watched.refresh()
    watched.until(lambda: host.nexthop(FIRST), "the nexthop is back")


def test_an_interface_that_is_made_anew_is_as_good(host, watched):
    before = host.nexthop(FIRST)
    host.ip("link", "delete", "rail1")
    watched.until(lambda: len(watched.known[TARGET].members) == 1, "the loss is noticed")
    support.join(host.netns, host.peer, "rail1")
    support.run(["ip", "-n", host.peer, "link", "set", "rail1", "up"])
    host.ip("address", "add", "10.1.1.2/24", "dev", "rail1")
    host.ip("link", "set", "rail1", "up")
    watched.until(lambda: host.nexthop(FIRST), "the nexthop is back")
    assert host.nexthop(FIRST) == before


@pytest.mark.parametrize("encap", [["ip", "id", "7", "dst", "1.2.3.4"], ["seg6", "mode", "encap", "segs", "fc00::1"]])
def test_a_nexthop_that_encapsulates_comes_back_as_it_was(host, netlink, encap):
    host.ip("nexthop", "replace", "id", str(FIRST), "encap", *encap, "via", "10.1.1.1", "dev", "rail1")

    def lines():  # in JSON the id of the tunnel hides that of the nexthop
        return [line for line in host.ip("nexthop").splitlines() if line.startswith(f"id {FIRST} ")]

    before = lines()
    assert f"encap {encap[0]}" in before[0]
    watched = Watched(host, netlink)
    host.cable(1, "down")
    watched.until(lambda: watched.known[TARGET].current == ((SECOND_HOP, 1),), "the loss is noticed")
    host.cable(1, "up")
    watched.until(lambda: lines() == before, "the nexthop is back as it was")
    watched.keeper.close()


def test_what_went_while_frozen_comes_back_afterwards(host, watched):
    before = host.theirs()
    for rail in (1, 2):
        host.cable(rail, "down")
    watched.until(lambda: watched.view.lost == {TARGET, nexthop_group(SIX)}, "the groups are gone", frozen=True)
    for rail in (1, 2):
        host.cable(rail, "up")
    watched.refresh(frozen=True)
    assert host.nexthop(FIRST) is None, "nothing is made while frozen"
    watched.until(lambda: host.theirs() == before, "all is back as it was")


def test_what_somebody_deleted_while_frozen_stays_deleted(host, netlink, watched):
    watched.apply(netlink, ((SECOND_HOP, 1),))
    host.ip("nexthop", "delete", "id", str(FIRST))
    watched.until(lambda: len(watched.known[TARGET].members) == 1, "it is noticed", frozen=True)
    for _ in range(3):
        watched.refresh()
    assert host.nexthop(FIRST) is None and watched.manual == {}


def test_a_flap_while_nobody_ran_is_no_deletion(host, netlink, tmp_path):
    before = host.theirs()
    Watched(host, netlink, MemoryFile(tmp_path, "here")).keeper.close()
    for rail in (1, 2):
        host.cable(rail, "down")
    support.wait_until(lambda: host.nexthop(GROUP) is None, 10, "the kernel deletes the group")
    for rail in (1, 2):
        host.cable(rail, "up")
    watched = Watched(host, netlink, MemoryFile(tmp_path, "here"))
    watched.until(lambda: host.theirs() == before, "all is back as it was")
    watched.keeper.close()


# ---- what a person did stays done ----


def test_what_somebody_deleted_stays_deleted(host, watched):
    host.ip("nexthop", "delete", "id", str(FIRST))
    watched.until(lambda: TARGET in watched.manual, "it is called somebody's act")
    for _ in range(3):
        watched.refresh()
    assert host.nexthop(FIRST) is None


def test_what_somebody_deleted_just_before_the_link_went_stays_deleted(host, watched):
    host.ip("nexthop", "delete", "id", str(FIRST))
    host.cable(1, "down")
    host.cable(1, "up")
    watched.refresh()
    watched.until(lambda: TARGET in watched.manual, "it is called somebody's act")
    assert host.nexthop(FIRST) is None


def test_what_somebody_made_in_its_place_stays(host, watched):
    host.cable(1, "down")
    watched.until(lambda: len(watched.known[TARGET].members) == 1, "the loss is noticed")
    host.ip("nexthop", "add", "id", str(FIRST), "via", "10.2.1.77", "dev", "rail2")
    theirs = host.nexthop(FIRST)
    host.cable(1, "up")
    for _ in range(3):
        watched.refresh()
    assert host.nexthop(FIRST) == theirs
    assert [member.nexthop_id for member in watched.known[TARGET].members] == [SECOND_HOP]


def test_somebody_elses_restoration_is_as_good(host, watched):
    host.cable(1, "down")
    watched.until(lambda: len(watched.known[TARGET].members) == 1, "the loss is noticed")
    watched.keeper._restore = lambda objects, without: ([], [])  # they are quicker
    host.cable(1, "up")
    host.ip("nexthop", "add", "id", str(FIRST), "via", "10.1.1.1", "dev", "rail1", "proto", "201")
    host.ip("nexthop", "replace", "id", str(GROUP), "group", f"{FIRST}/{SECOND_HOP}", "proto", "201")
    watched.until(lambda: watched.known[TARGET].current == ORIGINAL, "it is in the group again")
    assert watched.manual == {}


def test_a_routing_daemons_objects_are_left_to_it(host, netlink, make_namespace):
    for number in (FIRST, SECOND_HOP):
        rail = number - 10
        way = ["via", f"10.{rail}.1.1", "dev", f"rail{rail}", "proto", "zebra"]
        host.ip("nexthop", "replace", "id", str(number), *way)
    watched = Watched(host, netlink)
    host.cable(1, "down")
    watched.until(lambda: len(watched.known[TARGET].members) == 1, "the loss is noticed")
    host.cable(1, "up")
    watched.until(lambda: host.nexthop(21), "the others are back")
    assert host.nexthop(FIRST) is None
    watched.keeper.close()


@pytest.mark.parametrize("members", [{SECOND_HOP: 3, 31: 2}, {31: 1, 32: 1}])
def test_a_lost_group_that_somebody_makes_otherwise_is_theirs(host, watched, members):
    for rail in (1, 2):
        host.cable(rail, "down")
    watched.until(lambda: TARGET in watched.view.lost, "the group is gone")
    host.cable(2, "up")
    ways = {SECOND_HOP: "10.2.1.1", 31: "10.2.1.77", 32: "10.2.1.78"}
    for number in members:
        host.ip("nexthop", "add", "id", str(number), "via", ways[number], "dev", "rail2")
    group = "/".join(f"{number},{weight}" for number, weight in members.items())
    host.ip("nexthop", "add", "id", str(GROUP), "group", group)
    host.ip("route", "add", "10.9.0.2/32", "nhid", str(GROUP))
    watched.until(lambda: TARGET in watched.known, "it is there again")
    assert watched.known[TARGET].original == tuple(members.items()) == watched.known[TARGET].current
    assert {member.nexthop_id for member in watched.known[TARGET].members} == members.keys()


def test_a_predecessors_targets_that_are_not_managed_any_more_are_left_alone(host, netlink, tmp_path):
    watched = Watched(host, netlink, MemoryFile(tmp_path, "here"))
    for rail in (1, 2):
        host.cable(rail, "down")
    watched.until(lambda: TARGET in watched.view.lost, "the group is gone")
    watched.keeper.close()
    with netns.inside(host.netns):
        keeper = Keeper(netlink, ["10.8.0.0/16"], True, MemoryFile(tmp_path, "here"))
    for rail in (1, 2):
        host.cable(rail, "up")
    for _ in range(3):
        view = keeper.refresh({})
    assert view.lost == frozenset() and host.theirs()[0] == []
    keeper.close()


def test_a_group_that_somebody_deleted_is_not_made_again(host, watched):
    host.ip("nexthop", "delete", "id", str(GROUP))
    watched.until(lambda: TARGET not in watched.known, "it is gone")
    assert watched.view.lost == frozenset()
    assert host.taken() is None, "and its backup routes with it"


def test_a_dry_run_makes_nothing(host, netlink):
    before = host.nexthops()
    watched = Watched(host, netlink, keep=False)
    assert host.nexthops() == before
    host.cable(1, "down")
    watched.until(lambda: len(watched.known[TARGET].members) == 1, "the loss is noticed")
    host.cable(1, "up")
    watched.refresh()
    assert host.nexthop(FIRST) is None
    watched.keeper.close()


def test_a_successor_knows_what_went_with_a_link(host, netlink, tmp_path):
    before = host.nexthop(FIRST)
    watched = Watched(host, netlink, MemoryFile(tmp_path, "here"))
    watched.keeper.close(remove=False)  # as if killed
    host.cable(1, "down")
    watched = Watched(host, netlink, MemoryFile(tmp_path, "here"))
    assert watched.view.first[TARGET].original == ORIGINAL
    host.cable(1, "up")
    watched.until(lambda: host.nexthop(FIRST), "the nexthop is back")
    assert host.nexthop(FIRST) == before
    watched.keeper.close()


def test_a_successor_believes_the_kernel_where_it_was_changed_meanwhile(host, netlink, tmp_path):
    Watched(host, netlink, MemoryFile(tmp_path, "here")).keeper.close()
    host.ip("nexthop", "replace", "id", str(GROUP), "group", f"{FIRST},7/{SECOND_HOP},3")
    watched = Watched(host, netlink, MemoryFile(tmp_path, "here"))
    assert watched.view.first[TARGET].original == ((FIRST, 7), (SECOND_HOP, 3))
    watched.keeper.close()
    watched = Watched(host, netlink, MemoryFile(tmp_path, "elsewhere"))
    assert watched.view.first[TARGET].original == ((FIRST, 7), (SECOND_HOP, 3))
    watched.keeper.close()


# ---- backup routes ----


def test_every_managed_prefix_has_a_backup_of_its_own(host, watched):
    members = [each for each in host.ours() if "group" not in each]
    assert sorted((each["gateway"], each["dev"]) for each in members) == [
        ("10.1.1.1", "rail1"),
        ("10.2.1.1", "rail2"),
        ("fd00:1:1::1", "rail1"),
        ("fd00:2:1::1", "rail2"),
    ]
    routes = [
        route
        for words in (["route"], ["-6", "route"])
        for route in json.loads(host.ip("-j", "-d", *words))
        if route.get("metric") == leftovers.BACKUP_METRIC
    ]
    assert sorted(route["dst"] for route in routes) == ["10.9.0.2", "10.9.5.0/24", "fd00:9::2"]
    assert {route["protocol"] for route in routes} == {"201"}
    assert next(r for r in routes if r["dst"] == "10.9.5.0/24")["prefsrc"] == "10.1.1.2"
    assert next(r for r in routes if r["dst"] == "fd00:9::2")["metrics"] == [{"mtu": 1400}]


@pytest.mark.guest
def test_a_packet_has_a_route_when_the_last_hop_that_was_left_loses_its_link(host, netlink, watched):
    watched.apply(netlink, ((SECOND_HOP, 1),))  # rail 1 is drained
    watched.apply(netlink, ((22, 2),), nexthop_group(SIX))
    host.cable(2, "down")
    assert host.nexthop(GROUP) is None, "the kernel has deleted the group"
    assert host.taken() == "rail1" and host.taken("fd00:9::2") == "rail1", "before anybody did anything"
    watched.until(lambda: host.nexthop(GROUP), "the group is made again over what there is")
    assert host.weights() == {FIRST: 1}
    assert watched.manual == {}


def test_backups_go_with_the_route_they_stand_in_for(host, watched):
    host.ip("route", "delete", "10.9.5.0/24")
    watched.until(lambda: host.taken("10.9.5.1") is None, "nothing leads there any more")
    host.ip("route", "add", "10.9.7.0/24", "nhid", str(GROUP))
    watched.until(lambda: "10.9.7.0/24" in host.ip("route", "show", "proto", "201"), "the new one has one")


def test_a_prefix_of_two_targets_has_one_backup_which_follows_the_better_route(host, netlink):
    host.ip("nexthop", "add", "id", "103", "group", str(SECOND_HOP))
    for group, metric in ((103, 50), (GROUP, 60)):
        host.ip("route", "add", "10.9.6.0/24", "nhid", str(group), "metric", str(metric))
    watched = Watched(host, netlink)

    def hops():
        shown = host.ip("route", "show", "10.9.6.0/24", "proto", "201", "metric", str(leftovers.BACKUP_METRIC))
        return shown.count("nexthop via") or shown.count("via")

    assert hops() == 1
    host.ip("route", "delete", "10.9.6.0/24", "nhid", "103", "metric", "50")
    watched.until(lambda: hops() == 2, "the other's takes its place")
    assert not [line for line in watched.told if "cannot" in line]
    watched.keeper.close()


def test_backups_leave_what_is_somebody_elses(host, watched):
    host.ip("nexthop", "replace", "id", str(GROUP), "group", f"{FIRST},9/{SECOND_HOP}", "proto", "201")
    watched.until(lambda: TARGET in watched.manual, "it is somebody else's")
    watched.refresh()
    shown = host.ip("route", "show", "proto", "201", "metric", str(leftovers.BACKUP_METRIC))
    assert shown == ""


def test_at_the_end_nothing_of_ours_is_left(host, netlink):
    before = host.theirs(), host.ours()
    watched = Watched(host, netlink)
    assert host.ours()
    watched.keeper.close()
    assert (host.theirs(), host.ours()) == before == (host.theirs(), [])


def test_after_a_crash_all_of_ours_is_swept_and_nothing_else(host, netlink):
    before = host.theirs()
    Watched(host, netlink)  # and never closed
    assert len(leftovers.sweep(netlink)) == 1 + 4 + 2, "the routes together, the nexthops and the groups one by one"
    assert (host.theirs(), host.ours()) == (before, [])
    assert leftovers.sweep(netlink) == []


def test_a_backup_has_the_links_that_are_there(host, watched):
    host.cable(1, "down")
    watched.until(lambda: len(watched.known[TARGET].members) == 1, "the loss is noticed")
    assert {each["dev"] for each in host.ours() if "dev" in each} == {"rail2"}
    host.cable(1, "up")
    watched.until(lambda: len(host.ours()) == 4 + 2, "and again those that are back")


# ---- our own acts ----


def several_routes(host):
    """A route with two hops, and two routes with one each; by target, what to have them led by."""
    hops = [word for rail in (1, 2) for word in ("nexthop", "via", f"10.{rail}.1.1", "dev", f"rail{rail}")]
    host.ip("route", "add", "10.9.7.0/24", "proto", "static", *hops)
    for rail in (1, 2):
        way = ["via", f"10.{rail}.1.1", "dev", f"rail{rail}", "metric", str(100 * rail)]
        host.ip("route", "add", "10.9.8.0/24", "proto", "static", *way)
    second = hop_id("10.2.1.1", "rail2")
    return {kind: ((second, 1),) for kind in ("multipath:main:10.9.7.0/24", "metric:main:10.9.8.0/24")}


def test_what_we_changed_of_routes_is_no_other_persons_act(host, netlink):
    wanted = several_routes(host)
    watched = Watched(host, netlink)
    for target, weights in wanted.items():
        watched.apply(netlink, weights, target)
    watched.refresh()
    assert watched.manual == {}
    assert {target: watched.known[target].current for target in wanted} == wanted
    assert {host.taken(address) for address in ("10.9.7.1", "10.9.8.1")} == {"rail2"}
    for target in wanted:
        watched.apply(netlink, watched.known[target].original, target)
    watched.refresh()
    assert watched.manual == {}
    watched.keeper.close()


def test_what_somebody_changes_while_we_make_something_again_is_his_act(host, netlink, monkeypatch):
    for number in (31, 32):
        host.ip("nexthop", "add", "id", str(number), "via", f"10.2.1.{number}", "dev", "rail2")
    host.ip("nexthop", "add", "id", "103", "group", "31/32")
    host.ip("route", "add", "10.9.3.0/24", "nhid", "103")
    watched = Watched(host, netlink)
    host.cable(1, "down")
    watched.until(lambda: watched.known[TARGET].current == ((SECOND_HOP, 1),), "the loss is noticed")
    make_again = remaking.make_again

    def meanwhile(*given):
        done = make_again(*given)
        if done[0]:
            host.ip("nexthop", "replace", "id", "103", "group", "31,77/32,5")
        return done

    monkeypatch.setattr(remaking, "make_again", meanwhile)
    host.cable(1, "up")
    watched.until(lambda: host.nexthop(FIRST), "the nexthop is back")
    assert "weight 77" in watched.manual[nexthop_group(103)]
    watched.keeper.close()


# ---- when to look ----


@pytest.mark.parametrize("before", [True, False])
def test_what_is_deleted_while_it_looks_is_somebodys_act(host, watched, monkeypatch, before):
    """Just before the tables are read, so that it is missing there; or just after, so that it is seen the next time."""
    from steering.actuators import keeper

    def meanwhile(netlink, known):
        monkeypatch.setattr(keeper, "read", read)
        if before:
            host.ip("nexthop", "delete", "id", str(FIRST))
        found = read(netlink, known)
        if not before:
            host.ip("nexthop", "delete", "id", str(FIRST))
        return found

    read = keeper.read
    monkeypatch.setattr(keeper, "read", meanwhile)
    watched.refresh()
    assert watched.keeper.due_ns < time.monotonic_ns() + kit.SECOND, "there was news while it looked"
    watched.refresh()
    assert TARGET in watched.manual and host.nexthop(FIRST) is None


def test_it_looks_when_there_is_news_and_not_at_its_own(host, netlink, watched):
    import select

    def readable():
        return bool(select.select([watched.keeper], [], [], 0)[0])

    watched.keeper.heard()
    far = watched.keeper.due_ns
    watched.apply(netlink, ((SECOND_HOP, 1),))
    assert not readable(), "our own act is no news"
    host.ip("route", "add", "10.77.0.0/16", "via", "10.1.1.1")
    assert readable()
    watched.keeper.heard()
    assert watched.keeper.due_ns < far - 20 * kit.SECOND
