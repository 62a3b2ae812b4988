"""The overlay on every kind of route: where packets go, what follows, and that nothing of others changes."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from dataclasses import dataclass

import pytest
from overlay_kit import MANAGED, PEER, PREFIX, SERVICE, Host, gateway

from pytools.errors import RefusedError, SwerveError
from pytools.kernel.leftovers import sweep
from pytools.kernel.netlink.monitor import NetlinkWatch
from pytools.kernel.netlink.routing import Netlink
from pytools.kernel.netns import inside
from steering.actuators.overlay import Overlay


@pytest.fixture(params=[4, 6], ids=["IPv4", "IPv6"])
def host(request, namespace):
    found = Host(namespace, request.param)
    yield found
    if found.overlay is not None:
        found.overlay.close()
        found.netlink.close()


def plain(host):
    host.route("add", PREFIX[host.family], *host.hop(1))
    return {"alternatives": [{"via": gateway(host.family, 2), "dev": "rail2"}]}


def multipath(host):
    host.route("add", PREFIX[host.family], *host.nexthops(1, 2))
    return {}


def nexthop_group(host):
    for rail in (1, 2):
        host.ip("nexthop", "add", "id", str(10 + rail), *host.hop(rail))
    host.ip("nexthop", "add", "id", "102", "group", "11/12")
    host.route("add", PREFIX[host.family], "nhid", "102", "src", SERVICE[host.family])
    return {}


def metric(host):
    host.route("add", PREFIX[host.family], *host.hop(1), "metric", "50")
    host.route("add", PREFIX[host.family], *host.hop(2), "metric", "60")
    return {}


def source_table(host):
    host.route("add", "default", "table", "100", *host.nexthops(1, 2))
    host.rule("add", "from", SERVICE[host.family], "lookup", "100")
    return {}


KINDS = [plain, multipath, nexthop_group, metric, source_table]


@dataclass
class Kind:
    """How a kind of route is looked up, and where it leads at first."""

    words: tuple[str, ...]
    first: set[str]


def kind_of(host, make):
    words = ("from", SERVICE[host.family]) if make is source_table else ()
    return Kind(words, {"rail1"} if make in (plain, metric) else {"rail1", "rail2"})


@pytest.mark.parametrize("make", KINDS)
def test_an_act_moves_packets_and_undoing_it_leaves_nothing_of_others_changed(host, make):
    more, kind = make(host), kind_of(host, make)
    before = host.others()
    found = host.start(**more)
    assert host.ways(*kind.words) == kind.first, "a mirror decides nothing"
    assert host.rules() == []
    group = host.leave(1, found)
    assert host.ways(*kind.words) == {"rail2"}
    assert host.others() == before
    host.put_back(group)
    assert host.ways(*kind.words) == kind.first
    assert host.rules() == []
    host.overlay.close()
    assert host.ours() == 0 and host.others() == before


@pytest.mark.parametrize("make", KINDS)
def test_whoever_deletes_the_rules_has_undone_everything(host, make):
    more, kind = make(host), kind_of(host, make)
    before = host.others()
    host.leave(1, host.start(**more))
    with Netlink(host.netns) as netlink:
        assert any("rule" in line for line in sweep(netlink))
    assert host.ways(*kind.words) == kind.first
    assert host.ours() == 0 and host.others() == before


@pytest.mark.parametrize("make", [multipath, nexthop_group])
def test_a_minimum_rto_is_in_force_without_an_act(host, make):
    """From the first look on; after an act and its undoing; for a successor, until our rules are deleted."""
    more, kind = make(host), kind_of(host, make)
    before = host.others()
    found = host.start(rto_min="20ms", **more)
    assert host.rules() == [] and host.rto_min() == []
    host.overlay.hold()
    assert host.ways(*kind.words) == kind.first and host.rto_min() == ["lock", 20]
    host.put_back(host.leave(1, found))
    assert host.ways(*kind.words) == kind.first and host.rto_min() == ["lock", 20]
    with inside(host.netns):
        successor = Overlay(host.netlink, host.manage(rto_min="12ms"), True, host.overlay.memory)
    assert successor.held and successor.in_force
    successor.refresh()
    assert host.rto_min() == ["lock", 12] and host.others() == before
    successor.off()
    successor.refresh()
    assert host.rules() == [] and host.rto_min() == []
    successor.close()
    assert host.ours() == 0 and host.others() == before


def test_a_route_keeps_the_minimum_rto_that_it_has(host):
    host.route("add", PREFIX[host.family], "mtu", "1400", "rto_min", "50ms", *host.nexthops(1, 2))
    host.start(rto_min="20ms")
    host.overlay.hold()
    assert host.rto_min() == ["lock", 50]


@pytest.mark.parametrize("make", [multipath, nexthop_group, source_table])
def test_the_last_carrier_that_is_lost_leaves_their_route(host, make):
    """Rail 1 was left; without rail 2 our table is empty, and theirs decides, which hashes over what has a carrier."""
    host.write(f"net/ipv{host.family}/conf/all/ignore_routes_with_linkdown", 1)
    more, kind = make(host), kind_of(host, make)
    host.leave(1, host.start(**more))
    host.ip("link", "set", "dev", "far2", "down")
    host.hear(lambda: host.way(*kind.words) == "rail1")


@pytest.mark.parametrize("make", [multipath, nexthop_group, source_table])
def test_a_lost_carrier_is_out_of_our_group(host, make):
    more, kind = make(host), kind_of(host, make)
    [group] = host.start(**more).groups.values()
    first, second = (member.nexthop_id for member in group.members)
    host.overlay.apply(group.target, ((first, 1), (second, 9)))
    assert host.ways(*kind.words) == {"rail1", "rail2"}
    host.ip("link", "set", "dev", "far2", "down")
    host.hear(lambda: host.ways(*kind.words) == {"rail1"})


def test_a_hop_that_they_withdraw_leaves_and_a_new_one_joins(host):
    host.route("add", PREFIX[host.family], *host.nexthops(1, 2))
    found = host.start()
    [group] = found.groups.values()
    first, second = (member.nexthop_id for member in group.members)
    host.overlay.apply(group.target, ((first, 1), (second, 9)))
    host.add_rail(3)
    host.route("replace", PREFIX[host.family], *host.nexthops(1, 2, 3))
    host.hear(lambda: host.ways() == {"rail1", "rail2", "rail3"})
    assert {group.target} == set(host.look().groups), "it is the same target"
    host.route("replace", PREFIX[host.family], *host.nexthops(1, 3))
    host.hear(lambda: host.ways() == {"rail1", "rail3"})


def test_a_look_that_had_to_wait_delays_the_next_by_no_more_than_it_worked(host, monkeypatch):
    """For a processor, or for the lock that every change of routes takes."""
    host.route("add", PREFIX[host.family], *host.nexthops(1, 2))
    host.start()
    read = NetlinkWatch.read
    with monkeypatch.context() as patched:
        patched.setattr(NetlinkWatch, "read", lambda watch: (time.sleep(0.5), read(watch))[1])
        host.look()
    ended_ns = time.monotonic_ns()
    host.route("replace", PREFIX[host.family], *host.nexthops(1))
    host.overlay.receive()
    assert host.overlay.due_ns < max(ended_ns + 1_000_000_000, time.monotonic_ns() + 100_000_000)


def test_what_they_have_no_route_for_we_have_none_for(host):
    host.route("add", PREFIX[host.family], *host.nexthops(1, 2))
    host.leave(1, host.start())
    host.route("del", PREFIX[host.family])
    host.hear(lambda: not host.ours("route"))
    assert host.rules() == []


def test_a_route_inside_a_steered_prefix_that_cannot_be_steered_keeps_deciding(host):
    """A hole in what our table covers: a blackhole, and a route to one other rail."""
    inner, hole = ("10.9.7.0/24", "10.9.8.0/24") if host.family == 4 else ("fd00:9::7:0/112", "fd00:9::8:0/112")
    host.route("add", MANAGED[host.family], *host.nexthops(1, 2))
    host.route("add", inner, *host.hop(1))
    host.route("add", "blackhole", hole)
    found = host.start()
    assert set(found.groups) == {f"overlay:main:{MANAGED[host.family]}"} and inner in found.refused
    host.leave(1, found)
    assert host.ways() == {"rail2"}
    address = inner.partition("/")[0].replace("7:0", "7:1") if host.family == 6 else "10.9.7.1"
    assert json.loads(host.ip(f"-{host.family}", "-j", "route", "get", address))[0]["dev"] == "rail1"
    address = "10.9.8.1" if host.family == 4 else "fd00:9::8:1"
    done = subprocess.run(["ip", "-n", host.netns, "route", "get", address], capture_output=True, check=False)
    assert done.returncode != 0, "it is still a blackhole"


def test_source_tables_and_the_main_table_are_steered_apart(host):
    source_table(host)
    host.route("add", PREFIX[host.family], *host.nexthops(1, 2))
    found = host.start()
    assert len(found.groups) == 2
    [of_source] = [group for name, group in found.groups.items() if ":100:" in name]
    host.overlay.apply(of_source.target, of_source.original[1:])
    assert host.ways("from", SERVICE[host.family]) == {"rail2"}
    assert host.ways() == {"rail1", "rail2"}


def test_a_table_that_is_looked_up_twice_is_two_views(host):
    """As with wg-quick: first without its default route, then, behind a tunnel's table, as a whole."""
    host.route("add", PREFIX[host.family], *host.nexthops(1, 2))
    host.rule("add", "pref", "32764", "table", "main", "suppress_prefixlength", "0")
    found = host.start()
    for group in found.groups.values():
        assert host.overlay.apply(group.target, group.original[1:])
        assert host.ways() == {"rail2"}
    assert len(found.groups) == 2


def test_a_live_flow_goes_where_the_rule_sends_it_and_back(host):
    """Its cached route is looked up again when the rule comes or goes, and when our route is made again."""
    host.route("add", PREFIX[host.family], *host.hop(1), "metric", "50")
    host.route("add", PREFIX[host.family], *host.hop(2), "metric", "60")
    for rail in (1, 2):
        host.ip("neigh", "add", gateway(host.family, rail), "lladdr", "02:00:00:00:00:01", "dev", f"rail{rail}")
    with inside(host.netns), socket.socket(socket.AF_INET if host.family == 4 else socket.AF_INET6, 2) as flow:
        flow.connect((PEER[host.family], 9))

        def rails():
            before = sent(host)
            for _ in range(20):
                flow.send(b"x")
            after = sent(host)
            return {rail for rail in (1, 2) if after[rail] - before[rail] >= 20}

        found = host.start()
        assert rails() == {1}
        group = host.leave(1, found)
        assert rails() == {2}
        host.route("del", PREFIX[host.family], "table", "20000")
        rails()  # by theirs, or (IPv6) by what is cached
        host.hear(lambda: rails() == {2})
        host.put_back(group)
        assert rails() == {1}


def sent(host):
    """Packets that left by each rail."""
    shown = json.loads(host.ip("-j", "-s", "link"))
    return {rail: row["stats64"]["tx"]["packets"] for rail in (1, 2) for row in shown if row["ifname"] == f"rail{rail}"}


@pytest.mark.guest(only=True)  # the machine's own kernel has no VRF
def test_routes_of_a_vrf_are_steered_apart_from_those_of_the_main_table(host):
    host.ip("link", "add", "blue", "type", "vrf", "table", "77")
    host.ip("link", "set", "dev", "blue", "up")
    for rail in (1, 2):
        host.ip("link", "set", "dev", f"rail{rail}", "master", "blue")
        host.ip("address", "replace", f"fd00:{rail}::2/64", "dev", f"rail{rail}", "nodad")
    host.route("add", PREFIX[host.family], "vrf", "blue", *host.nexthops(1, 2))
    host.route("add", PREFIX[host.family], "table", "98", *host.hop(2))
    host.rule("add", "pref", "500", "oif", "blue", "lookup", "98")
    matches = host.ways("vrf", "blue") == {"rail2"}  # not from 5.18 to 6.14
    host.rule("del", "pref", "500")
    assert host.start(vrfs=["blue"]).groups.keys() == {f"overlay:blue:{PREFIX[host.family]}"}
    before = host.others()
    [group] = host.look().groups.values()
    if not matches:
        with pytest.raises(SwerveError, match="this kernel matches no rule with packets of VRF blue"):
            host.overlay.apply(group.target, group.original[1:])  # what moves nothing must not pass for an act
        assert host.rules() == []
    else:
        assert host.overlay.apply(group.target, group.original[1:])
        assert host.ways("vrf", "blue") == {"rail2"}
        host.put_back(group)
    assert host.ways("vrf", "blue") == {"rail1", "rail2"} and host.others() == before


def test_a_table_that_somebody_flushes_and_a_rule_that_he_deletes_come_back(host):
    host.route("add", PREFIX[host.family], *host.nexthops(1, 2))
    host.leave(1, host.start())
    [rule] = host.rules()
    host.route("del", PREFIX[host.family], "table", str(rule["table"]))
    assert host.ways() == {"rail1", "rail2"}, "their route answers meanwhile"
    host.hear(lambda: host.ways() == {"rail2"})
    host.rule("del", "pref", str(rule["priority"]))
    assert host.ways() == {"rail1", "rail2"}
    host.hear(lambda: host.ways() == {"rail2"})


@pytest.mark.parametrize("steered", [False, True])
def test_an_act_makes_again_what_somebody_has_just_deleted_of_ours(host, steered):
    host.route("add", PREFIX[host.family], *host.nexthops(1, 2))
    found = host.start()
    if steered:
        host.leave(1, found)
    host.ip("nexthop", "flush", "proto", "201")
    host.leave(2, found)
    assert host.ways() == {"rail1"}


def test_a_table_or_a_priority_of_somebody_elses_is_refused_by_his_name(host):
    host.route("add", PREFIX[host.family], *host.nexthops(1, 2))
    host.route("add", MANAGED[host.family], *host.hop(1), "table", "20000", "proto", "bird")
    with pytest.raises(RefusedError, match="routing table 20000 is used by protocol bird"):
        host.start()
    host.rule("add", "pref", "4900", "lookup", "100", "proto", "static")
    with pytest.raises(RefusedError, match="rule priority 4900 is used by protocol static"):
        host.start(table=21000, priority=4900)
    host.start(table=21000, priority=4901)
    host.leave(1)
    [rule] = host.rules()
    assert (rule["priority"], rule["table"]) == (4901, "21000")


def test_a_table_that_somebody_uses_when_it_is_needed_later_is_left_to_him(host):
    host.route("add", PREFIX[host.family], *host.nexthops(1, 2))
    host.start()
    host.route("add", MANAGED[host.family], *host.hop(1), "table", "20001", "proto", "bird")
    source_table(host)
    found = host.look()
    assert found.groups.keys() == {f"overlay:main:{PREFIX[host.family]}"}
    assert any("routing table 20001 is used by protocol bird" in event for event in found.events)
    assert [why for name, why in found.refused.items() if name.endswith(" in table 100")], "it is named as not managed"
    assert host.look().events == (), "it is said once"


def test_weights_that_are_not_in_force_are_theirs(host):
    """One prefix is steered, the other one comes into force with it: as it was."""
    other = "10.9.0.3/32" if host.family == 4 else "fd00:9::3/128"
    host.route("add", PREFIX[host.family], *host.nexthops(1, 2))
    host.route("add", other, "nexthop", *host.hop(2), "weight", "5", "nexthop", *host.hop(1), "weight", "3")
    found = host.start()
    group = found.groups[f"overlay:main:{PREFIX[host.family]}"]
    assert host.overlay.apply(group.target, group.original[1:])
    address = other.partition("/")[0]
    [route] = json.loads(host.ip(f"-{host.family}", "-j", "-d", "route", "get", "fibmatch", address))
    assert route["table"] == "20000"
    assert [(hop["dev"], hop["weight"]) for hop in route["nexthops"]] == [("rail2", 5), ("rail1", 3)], "in their order"


def test_without_nexthop_objects_the_same_holds(host, monkeypatch):
    """As beside zebra, which writes into the nexthop groups of others."""
    monkeypatch.setattr("steering.actuators.objects.Objects.zebra_runs", True)
    host.route("add", PREFIX[host.family], *host.nexthops(1, 2))
    before = host.others()
    found = host.start()
    assert host.rows("nexthop") == []
    group = host.leave(1, found)
    assert host.ways() == {"rail2"}
    first, second = (member.nexthop_id for member in group.members)
    assert host.overlay.apply(group.target, ((first, 1), (second, 9)))
    assert host.ways() == {"rail1", "rail2"}
    host.ip("link", "set", "dev", "far1", "down")
    host.hear(lambda: host.ways() == {"rail2"})
    host.ip("link", "set", "dev", "far1", "up")
    host.hear(lambda: "rail1" in {member.interface for g in host.look().groups.values() for member in g.members})
    host.put_back(group)
    host.overlay.close()
    assert host.ours() == 0 and sorted(host.others()) == sorted(before)


OTHER = {4: "10.9.0.3/32", 6: "fd00:9::3/128"}


@pytest.mark.parametrize("covering", [False, True], ids=["own route", "covering route"])
def test_an_address_that_is_steered_apart_leaves_the_others_where_they_are(host, covering):
    for prefix in [MANAGED[host.family]] if covering else [PREFIX[host.family], OTHER[host.family]]:
        host.route("add", prefix, *host.nexthops(1, 2))
    before = host.others()
    found = host.start()
    [shared] = found.groups
    host.overlay.set_apart(frozenset({PEER[host.family]}))
    found = host.look()
    [own] = found.targets_of(PEER[host.family])
    other = OTHER[host.family].partition("/")[0]
    assert found.targets_of(other) == (shared,) and found.groups[own].beside == shared
    assert {m.nexthop_id for m in found.groups[own].members} == {m.nexthop_id for m in found.groups[shared].members}

    rest = tuple((m.nexthop_id, m.weight) for m in found.groups[own].members if m.interface == "rail2")
    assert host.overlay.apply(own, rest)
    assert host.ways() == {"rail2"} and host.held(MANAGED[host.family] if covering else other) == {"rail1", "rail2"}
    found = host.look()
    assert (found.groups[own].current, found.groups[shared].current) == (rest, found.groups[shared].original)
    assert host.overlay.apply(own, found.groups[own].original)
    assert host.ways() == {"rail1", "rail2"} == host.ways_to(other)

    host.overlay.set_apart(frozenset())
    found = host.look()
    assert list(found.groups) == [shared] and found.targets_of(PEER[host.family]) == (shared,)
    assert host.others() == before


def test_an_address_taken_out_of_a_steered_target_stays_where_that_has_it(host):
    host.route("add", MANAGED[host.family], *host.nexthops(1, 2))
    host.leave(1, host.start())
    host.overlay.set_apart(frozenset({PEER[host.family]}))
    found = host.look()
    [own] = found.targets_of(PEER[host.family])
    assert {m.interface for m in found.groups[own].members if m.nexthop_id in dict(found.groups[own].current)} == {
        "rail2"
    }
    assert host.ways() == {"rail2"}


def test_a_successor_keeps_apart_what_its_predecessor_had_apart(host):
    host.route("add", MANAGED[host.family], *host.nexthops(1, 2))
    host.start()
    host.overlay.set_apart(frozenset({PEER[host.family]}))
    found = host.look()
    [own] = found.targets_of(PEER[host.family])
    rest = tuple((m.nexthop_id, m.weight) for m in found.groups[own].members if m.interface == "rail2")
    assert host.overlay.apply(own, rest)
    memory = host.overlay.memory
    host.overlay.close(remove=False)
    with inside(host.netns):
        host.overlay = Overlay(host.netlink, host.manage(), apply=True, memory=memory)
    found = host.look()
    assert found.groups[own].current == rest and found.groups[own].beside in found.groups
    assert host.ways() == {"rail2"} and host.held(MANAGED[host.family]) == {"rail1", "rail2"}
